"""Regions and torch.func: a transform over a region runs it plain and says so once; inside a region
they work."""

import pytest
import torch
import torch.autograd.forward_ad as fwd
from beside import Program
from oracle import DOOR, DOORS, apply, bits
from torch import nn

from checkpointing import checkpointed

# What torch's forward mode imports when it is first used.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.torch.jit.script:{kind}")
    for kind in ("DeprecationWarning", "FutureWarning")
] + [pytest.mark.filterwarnings("ignore:.*torch.func")]  # given once a process


def function(x):
    return (x.sin() * x.exp()).cumsum(0).tanh()


def loss(x):
    return function(x).square().sum()


def x0():
    return torch.linspace(0.1, 1.0, 5)


OVER = {
    "grad": lambda door: torch.func.grad(door(loss))(x0()),
    "grad and value": lambda door: torch.func.grad_and_value(door(loss))(x0()),
    "jacrev": lambda door: torch.func.jacrev(door(function))(x0()),
    "vmap": lambda door: torch.func.vmap(door(function))(torch.stack([x0(), x0() * 2])),
    "jvp": lambda door: torch.func.jvp(door(function), (x0(),), (torch.ones(5),)),
    "jacfwd": lambda door: torch.func.jacfwd(door(function))(x0()),
    "vmap of grad": lambda door: torch.func.vmap(torch.func.grad(door(loss)))(
        torch.stack([x0(), x0() * 2])
    ),
    "region in the function": lambda door: torch.func.grad(lambda x: door(function)(x * 2).sum())(
        x0()
    ),
}


def flat(value):
    return [flat(v) for v in value] if isinstance(value, tuple | list) else bits(value)


@pytest.mark.parametrize("over", OVER)
@DOOR
def test_a_transform_over_a_region_is_plains(over, door):
    """It runs, without a region."""
    assert flat(OVER[over](door)) == flat(OVER[over](lambda fn: fn))


@DOOR
def test_vmap_over_a_region_that_wants_gradients_afterwards(door):
    """What it would have saved are batches, which end with the transform; backward comes later."""

    def step(door):
        x = torch.stack([x0(), x0() * 2]).requires_grad_()
        w = x0().requires_grad_()
        y = torch.func.vmap(lambda x: door(lambda x, w: function(x * w))(x, w))(x)
        y.square().sum().backward()
        return bits(x.grad), bits(w.grad)

    assert step(door) == step(lambda fn: fn)


PROGRAM = """
import os, sys
import torch
from checkpointing import checkpoint_scope, checkpointed

@checkpointed
def rerun(x):
    return x.sin()

def scope(x):
    with checkpoint_scope():  # scope
        return x.sin()

def run(x):
    return rerun(x) if door == "rerun" else scope(x)  # rerun

for door in ("rerun", "scope"):
    print(f"{door}:", file=sys.stderr, flush=True)
    if os.fork() == 0:
        for _ in range(3):
            torch.func.vmap(run)(torch.ones(2, 5))
            torch.func.grad(lambda x: run(x).sum())(torch.ones(5))
        sys.stderr.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""
warned = Program("-c", PROGRAM)


@pytest.mark.parametrize("door", ["rerun", "scope"])
def test_the_warning_is_given_once_and_points_at_user_code(door):
    """One per process, whatever transforms follow; at the line that enters the region."""
    assert warned.output == ""
    said = warned.outcome.stderr.partition(f"{door}:\n")[2].partition("scope:\n")[0]
    line = 1 + next(n for n, text in enumerate(PROGRAM.splitlines()) if text.endswith(f"# {door}"))
    assert said.count("UserWarning") == 1
    assert f"<string>:{line}: UserWarning" in said
    for words in ("torch.func", "plain", "inside a region vmap, jvp and jacfwd work"):
        assert words in said


# ---- inside a region

REFUSED = {
    "grad": lambda x: torch.func.grad(lambda x: x.sin().sum())(x),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "jacrev": lambda x: torch.func.jacrev(torch.sin)(x),
    "hessian": lambda x: torch.func.hessian(lambda x: x.sin().sum())(x),
}


@pytest.mark.parametrize("backend", ["rerun", "replay"])
@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_torch_refuses_inside_a_region(name, backend):
    """Both ways to recompute; README says so, and the warning does not advise it."""
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        checkpointed(REFUSED[name], backend=backend)(torch.ones(3, requires_grad=True))


INSIDE = {
    "vmap": lambda x, w: torch.func.vmap(lambda row: (row * w).sin().exp())(x),
    "vmap with randomness": lambda x, w: torch.func.vmap(
        lambda row: nn.functional.dropout(row * w, 0.5).exp(), randomness="different"
    )(x.sin()),
    "jvp": lambda x, w: torch.func.jvp(lambda x: (x * w).sin().exp(), (x,), (torch.ones_like(x),))[
        1
    ].tanh(),
    "vmap of jvp": lambda x, w: torch.func.vmap(
        lambda row: torch.func.jvp(lambda row: (row * w).sin().exp(), (row,), (w,))[1]
    )(x).tanh(),
    "dual numbers": lambda x, w: dual(x, w),
    "region in vmap": lambda x, w: torch.func.vmap(checkpointed(lambda row: (row * w).sin().exp()))(
        x
    ).cos(),
}


def dual(x, w):
    with fwd.dual_level():
        y = (fwd.make_dual(x, x.sin()) * w).sin().exp()
        primal, tangent = fwd.unpack_dual(y)
        return (primal * tangent).tanh()


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize(
    ("word", "early_stop"), [("c", True), ("c", False), ("r", False), ("s", True), ("cc", True)]
)
def test_transforms_inside_a_region(inside, word, early_stop):
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
    """Dual numbers pass through; gradients of the primal and of the tangent, inside the level, are
    plain's."""

    def step(make):
        x = x0().requires_grad_()
        with fwd.dual_level():
            y = make(function)(fwd.make_dual(x, torch.ones(5)))
            primal, tangent = fwd.unpack_dual(y)
            grads = torch.autograd.grad(primal.sum() + tangent.square().sum(), x)
        return [bits(t) for t in (primal, tangent, *grads)]

    assert step(DOORS[door]) == step(lambda fn: fn)
