"""Regions and torch.func: a transform over a region runs it plain and says so once; inside a region they work."""

import subprocess
import sys
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwd
from oracle import apply, bits, r, s
from torch import nn

from checkpointing import _api, checkpoint_scope, checkpointed
from checkpointing.torch_compat import checkpoint

# What torch's forward mode imports when it is first used.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.torch.jit.script:{kind}") for kind in ("DeprecationWarning", "FutureWarning")
]

DOORS = {
    "rerun": checkpointed,
    "replay": r,
    "scope": s,
    "compat": lambda fn: lambda *args: checkpoint(fn, *args, use_reentrant=False),
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
    "vjp": lambda door: torch.func.vjp(door(function), x0())[1](torch.ones(5)),
    "jacrev": lambda door: torch.func.jacrev(door(function))(x0()),
    "vmap": lambda door: torch.func.vmap(door(function))(torch.stack([x0(), x0() * 2])),
    "hessian": lambda door: torch.func.hessian(door(loss))(x0()),
    "jvp": lambda door: torch.func.jvp(door(function), (x0(),), (torch.ones(5),)),
    "jacfwd": lambda door: torch.func.jacfwd(door(function))(x0()),
    "grad of grad": lambda door: torch.func.grad(lambda x: torch.func.grad(door(loss))(x).sum())(x0()),
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


def test_a_model_of_regions_under_functional_call(said):
    """Per-sample gradients of a module whose blocks are regions."""

    def step(decorate):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 1))
        if decorate:
            block.forward = checkpointed(block.forward)
        parameters = dict(model.named_parameters())

        def of_one(parameters, x):
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        grads = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0))(parameters, torch.rand(3, 4))
        return [bits(g) for g in grads.values()]

    assert step(True) == step(False)


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


def test_the_warning_is_one_per_process_from_many_threads():
    """In a process of its own."""
    program = """
import sys, threading, warnings
sys.setswitchinterval(1e-6)
import torch
from checkpointing import checkpointed
count = []
warnings.showwarning = lambda *a, **k: count.append(a)
warnings.simplefilter("always")
region = checkpointed(lambda x: x.sin().exp().sum())
barrier = threading.Barrier(8)
def run():
    barrier.wait()
    torch.func.grad(region)(torch.ones(3))
threads = [threading.Thread(target=run) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
torch.func.vmap(region)(torch.ones(2, 3))
print(len(count))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr


# ---- inside a region

INSIDE = {
    "vmap": lambda x, w: torch.func.vmap(lambda row: (row * w).sin().exp())(x),
    "vmap of matmul": lambda x, w: torch.func.vmap(torch.dot, in_dims=(0, None))(x.sin(), w).exp(),
    "vmap in vmap": lambda x, w: torch.func.vmap(torch.func.vmap(lambda a, b: (a * b).sin().exp()), (0, None))(x, w),
    "vmap with randomness": lambda x, w: torch.func.vmap(
        lambda row: nn.functional.dropout(row * w, 0.5).exp(), randomness="different"
    )(x.sin()),
    "jvp": lambda x, w: torch.func.jvp(lambda x: (x * w).sin().exp(), (x,), (torch.ones_like(x),))[1].tanh(),
    "jacfwd": lambda x, w: torch.func.jacfwd(lambda w: (x @ w).sin())(w).exp(),
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


@pytest.mark.parametrize("early_stop", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("door", ["rerun", "replay", "scope", "rerun in rerun"])
def test_transforms_inside_a_region(inside, door, early_stop, said):
    """Gradients of first and second order, and the random stream, as plain."""
    words = {"rerun": "c", "replay": "r", "scope": "s", "rerun in rerun": "cc"}

    def make(fn):
        return apply(words[door], fn, early_stop)

    def step(make):
        torch.manual_seed(0)
        x = torch.linspace(0.1, 1, 15).view(3, 5).clone().requires_grad_()
        w = x0().requires_grad_()
        y = make(lambda x, w: INSIDE[inside](x.cos(), w).sin())(x, w)
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])
        return [bits(t) for t in (y, *first, *second)], bits(torch.get_rng_state())

    assert step(make) == step(lambda fn: fn)


@pytest.mark.parametrize("door", ["rerun", "replay", "scope", "rerun in rerun"])
def test_gradients_by_torch_func_inside_a_region_are_refused_by_torch_or_right(door, said):
    """torch forbids hooks around its own gradients, and says so before anything is computed."""
    x = x0().requires_grad_()
    region = DOORS[door](lambda x: torch.func.grad(loss)(x).sin())
    try:
        y = region(x)
    except RuntimeError as error:
        assert "saved tensor hooks" in str(error)
    else:
        want = torch.autograd.grad(torch.func.grad(loss)(x).sin().sum(), x)
        assert flat(torch.autograd.grad(y.sum(), x)) == flat(want)
    assert torch.autograd.grad(checkpointed(loss)(x), x)[0] is not None  # nothing has been left behind


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


def test_legacy_vmap_over_backward_is_no_transform_over_a_region():
    """`is_grads_batched` and `vectorize=True` batch the backward only."""
    x = x0().requires_grad_()
    with checkpoint_scope():
        y = function(x)
    z = checkpointed(function)(x)
    want = torch.autograd.grad(function(x), x, torch.eye(5), is_grads_batched=True)
    for result in (y, z):
        assert flat(torch.autograd.grad(result, x, torch.eye(5), is_grads_batched=True)) == flat(want)
    have = torch.autograd.functional.jacobian(checkpointed(function), x0(), vectorize=True)
    assert flat(have) == flat(torch.autograd.functional.jacobian(function, x0(), vectorize=True))
