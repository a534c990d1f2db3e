"""Regions and torch.func: a transform over a region runs it plain and says so once; inside a region they work."""

import sys
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwd
from oracle import apply, bits, r, s
from torch import nn

from checkpointing import _api, checkpointed

# What torch's forward mode imports when it is first used.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.torch.jit.script:{kind}") for kind in ("DeprecationWarning", "FutureWarning")
]

DOORS = {
    "rerun": checkpointed,
    "replay": r,
    "scope": s,
    "rerun in rerun": lambda fn: checkpointed(checkpointed(fn)),
}
DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))


@pytest.fixture
def said(monkeypatch):
    """As if the warning had been given already."""
    monkeypatch.setattr(_api, "_warned", [True])


def function(x):
    """Of vectors."""
    return (x.sin() * x.exp()).cumsum(0).tanh()


def loss(x):
    """A number."""
    return function(x).square().sum()


def x0():
    """The same each time."""
    return torch.linspace(0.1, 1.0, 5)


OVER = {
    "grad": lambda door: torch.func.grad(door(loss))(x0()),
    "grad and value": lambda door: torch.func.grad_and_value(door(loss))(x0()),
    "jacrev": lambda door: torch.func.jacrev(door(function))(x0()),
    "vmap": lambda door: torch.func.vmap(door(function))(torch.stack([x0(), x0() * 2])),
    "jvp": lambda door: torch.func.jvp(door(function), (x0(),), (torch.ones(5),)),
    "jacfwd": lambda door: torch.func.jacfwd(door(function))(x0()),
    "vmap of grad": lambda door: torch.func.vmap(torch.func.grad(door(loss)))(torch.stack([x0(), x0() * 2])),
    "region in the function": lambda door: torch.func.grad(lambda x: door(function)(x * 2).sum())(x0()),
}


def flat(value):
    """Bits of tensors in nested tuples."""
    return [flat(v) for v in value] if isinstance(value, tuple | list) else bits(value)


@pytest.mark.parametrize("over", OVER)
@DOOR
def test_a_transform_over_a_region_is_plains(over, door, said):
    """It runs, without a region."""
    assert flat(OVER[over](door)) == flat(OVER[over](lambda fn: fn))


@DOOR
def test_vmap_over_a_region_that_wants_gradients_afterwards(door, said):
    """What it would have saved are batches, which end with the transform; backward comes later."""

    def step(door):
        x = torch.stack([x0(), x0() * 2]).requires_grad_()
        w = x0().requires_grad_()
        y = torch.func.vmap(lambda x: door(lambda x, w: function(x * w))(x, w))(x)
        y.square().sum().backward()
        return bits(x.grad), bits(w.grad)

    assert step(door) == step(lambda fn: fn)


def test_the_warning_is_given_once(monkeypatch):
    """One per process, whatever transforms follow."""
    monkeypatch.setattr(_api, "_warned", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for over in OVER.values():
            for door in DOORS.values():
                over(door)
    messages = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(messages) == 1
    assert "torch.func" in messages[0]
    assert "plain" in messages[0]


@pytest.mark.parametrize("door", ["rerun", "replay", "scope", "module"])
def test_the_warning_points_at_user_code(monkeypatch, door):
    """At the line that enters the region, not into torch or this library."""
    monkeypatch.setattr(_api, "_warned", [])
    module = nn.Sequential(nn.Tanh())
    region = checkpointed(module) if door == "module" else DOORS[door](function)
    with pytest.warns(UserWarning, match=r"torch\.func") as caught:
        torch.func.vmap(lambda x: region(x))(torch.rand(2, 5))
    assert len(caught) == 1
    assert caught[0].filename == (__file__ if door != "scope" else sys.modules["oracle"].__file__)


# ---- inside a region

INSIDE = {
    "vmap": lambda x, w: torch.func.vmap(lambda row: (row * w).sin().exp())(x),
    "vmap with randomness": lambda x, w: torch.func.vmap(
        lambda row: nn.functional.dropout(row * w, 0.5).exp(), randomness="different"
    )(x.sin()),
    "jvp": lambda x, w: torch.func.jvp(lambda x: (x * w).sin().exp(), (x,), (torch.ones_like(x),))[1].tanh(),
    "vmap of jvp": lambda x, w: torch.func.vmap(
        lambda row: torch.func.jvp(lambda row: (row * w).sin().exp(), (row,), (w,))[1]
    )(x).tanh(),
    "dual numbers": lambda x, w: dual(x, w),
    "region in vmap": lambda x, w: torch.func.vmap(checkpointed(lambda row: (row * w).sin().exp()))(x).cos(),
}


def dual(x, w):
    """Forward-mode by hand."""
    with fwd.dual_level():
        y = (fwd.make_dual(x, x.sin()) * w).sin().exp()
        primal, tangent = fwd.unpack_dual(y)
        return (primal * tangent).tanh()


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize(("word", "early_stop"), [("c", True), ("c", False), ("r", False), ("s", True), ("cc", True)])
def test_transforms_inside_a_region(inside, word, early_stop, said):
    """Gradients of first and second order, and the random stream, as plain."""

    def make(fn):
        return apply(word, fn, early_stop)

    def step(make):
        torch.manual_seed(0)
        x = torch.linspace(0.1, 1, 15).view(3, 5).clone().requires_grad_()
        w = x0().requires_grad_()
        y = make(lambda x, w: INSIDE[inside](x.cos(), w).sin())(x, w)
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])
        return [bits(t) for t in (y, *first, *second)], bits(torch.get_rng_state())

    assert step(make) == step(lambda fn: fn)


# ---- forward mode over a region


@pytest.mark.parametrize("door", ["rerun", "replay", "scope", "rerun in rerun"])
def test_forward_mode_over_a_region(door):
    """Dual numbers pass through; gradients of the primal and of the tangent, inside the level, are plain's."""

    def step(make):
        x = x0().requires_grad_()
        with fwd.dual_level():
            y = make(function)(fwd.make_dual(x, torch.ones(5)))
            primal, tangent = fwd.unpack_dual(y)
            grads = torch.autograd.grad(primal.sum() + tangent.square().sum(), x)
        return [bits(t) for t in (primal, tangent, *grads)]

    assert step(DOORS[door]) == step(lambda fn: fn)
