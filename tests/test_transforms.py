"""torch.func: a transform over a region runs it plain and says so once; inside, they work."""

import pytest
import torch
import torch.autograd.forward_ad as fwd
from oracle import DOORS, EACH_DOOR, Programs, apply, bits, plain
from torch import func, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from checkpointing import checkpointed, opaque

# What torch's forward mode imports when it is first used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
    pytest.mark.filterwarnings("ignore:.*torch.func"),  # given once a process
]

program = Programs()


def function(x):
    return (x.sin() * x.exp()).cumsum(0).tanh()


def loss(x):
    return function(x).square().sum()


def x0():
    return torch.linspace(0.1, 1.0, 5)


OVER = {
    "grad": lambda door: func.grad(door(loss))(x0()),
    "jacrev": lambda door: func.jacrev(door(function))(x0()),
    "vmap": lambda door: func.vmap(door(function))(torch.stack([x0(), x0() * 2])),
    "jvp": lambda door: func.jvp(door(function), (x0(),), (torch.ones(5),)),
    "jacfwd": lambda door: func.jacfwd(door(function))(x0()),
    "vmap of grad": lambda door: func.vmap(func.grad(door(loss)))(torch.stack([x0(), x0() * 2])),
    "region in the function": lambda door: func.grad(lambda x: door(function)(x * 2).sum())(x0()),
}


@pytest.mark.parametrize("over", OVER)
@EACH_DOOR
def test_a_transform_over_a_region_is_plains(over, door):
    assert bits(OVER[over](door)) == bits(OVER[over](plain))


@program(*DOORS)
def vmap_over_a_region_that_wants_gradients_afterwards(door):
    """What it would have saved are batches, which end with the transform; backward comes later."""
    x, w = torch.stack([x0(), x0() * 2]).requires_grad_(), x0().requires_grad_()
    y = func.vmap(lambda x: door(lambda x, w: function(x * w))(x, w))(x)
    y.square().sum().backward()
    return x.grad, w.grad


@program()
def forward_mode_over_a_region(door):
    """Dual numbers pass through, and have gradients of both parts inside the level."""
    x = x0().requires_grad_()
    with fwd.dual_level():
        y = door(function)(fwd.make_dual(x, torch.ones(5)))
        primal, tangent = fwd.unpack_dual(y)
        return primal, tangent, *torch.autograd.grad(primal.sum() + tangent.square().sum(), x)


test_programs_are_plains = program.test()


REFUSED = {
    "grad": func.grad(lambda x: x.sin().sum()),
    "vjp": lambda x: func.vjp(torch.sin, x)[1](x)[0],
    "jacrev": func.jacrev(torch.sin),
    "hessian": func.hessian(lambda x: x.sin().sum()),
}


@pytest.mark.parametrize("backend", ["rerun", "replay"])
@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_torch_refuses_inside_a_region(name, backend):
    """Both ways to recompute; LIMITS.md says so, and the warning does not advise it."""
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        checkpointed(REFUSED[name], backend=backend)(torch.ones(3, requires_grad=True))


def dual(x, w):
    with fwd.dual_level():
        y = (fwd.make_dual(x, x.sin()) * w).sin().exp()
        primal, tangent = fwd.unpack_dual(y)
        return (primal * tangent).tanh()


def tangent(function, x, w):
    return func.jvp(function, (x,), (w,))[1].tanh()


def tangent_before_opaque(x, w):
    """The tangents of weights are efficient zeros, which have no memory."""
    value, tangent = func.jvp(lambda x: nn.functional.linear(x, w.outer(w), w), (x,), (x,))
    with opaque():
        pass
    return value * tangent


def attention_of_zeros(x, w):
    """An efficient zero has no memory that a kernel could read."""
    q, k, v = x[None], torch._efficientzerotensor((1, 3, 5)), (x * w)[None]
    with sdpa_kernel(SDPBackend.MATH):  # the one with a second derivative
        return nn.functional.scaled_dot_product_attention(q, k, v)[0]


INSIDE = {
    "vmap": lambda x, w: func.vmap(lambda row: (row * w).sin().exp())(x),
    "vmap with randomness": lambda x, w: func.vmap(
        lambda x: nn.functional.dropout(x, 0.5).exp(), randomness="different"
    )(x.sin() * w),
    "jvp": lambda x, w: tangent(lambda x: (x * w).sin().exp(), x, torch.ones_like(x)),
    "vmap of jvp": lambda x, w: func.vmap(lambda row: tangent(function, row * w, w))(x),
    "dual numbers": dual,
    "jvp before opaque": tangent_before_opaque,
    "attention of efficient zeros": lambda x, w: attention_of_zeros(x.sin(), w.expand(3, 5)),
    "region in vmap": lambda x, w: func.vmap(checkpointed(lambda row: function(row * w)))(x).cos(),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize(
    ("word", "early_stop"), [("c", True), ("c", False), ("r", False), ("s", True), ("cc", True)]
)
def test_transforms_inside_a_region(inside, word, early_stop):
    def step(word):
        torch.manual_seed(0)
        x = torch.linspace(0.1, 1, 15).view(3, 5).clone().requires_grad_()
        w = x0().requires_grad_()
        y = apply(word, lambda x, w: INSIDE[inside](x.cos(), w).sin(), early_stop)(x, w)
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), [x, w])
        return [bits(t) for t in (y, *first, *second)], bits(torch.get_rng_state())

    assert step(word) == step("")
