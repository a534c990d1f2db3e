"""One site, one memory, one set of hooks: small programs that each found a hole."""

import contextlib
import itertools
import math

import pytest
import torch
from oracle import EACH_WAY, NO_ROOM, PLANNED, bits, rerun
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from checkpointing import ChangedError, auto, checkpoint_scope, clear_programs, keep, offload

pytestmark = NO_ROOM
INPUTS = offload(min_bytes=0, inputs=True)
AROUND = {
    "scope": (contextlib.nullcontext, None),
    "auto": (contextlib.nullcontext, auto()),
    "planned": (contextlib.nullcontext, PLANNED),
    "offload": (contextlib.nullcontext, INPUTS),
    "offload planned": (contextlib.nullcontext, offload(PLANNED, min_bytes=0, inputs=True)),
    "hooks that clone": (lambda: saved_tensors_hooks(torch.clone, lambda t: t), None),
    "save_on_cpu": (save_on_cpu, None),
}


def strided(w, x):
    """The kept value is a copy, whose offset is another."""
    h = keep((w * 1.0).flatten()[2:8]).as_strided((2,), (1,), 3)
    return (h * h).sin() * h


def expanded(w, x):
    return (w * (x + 1)).sin()


def failing(w, x):
    """The first tensor is written before the second one fails."""
    a = (w * 1.0).detach()
    with contextlib.suppress(RuntimeError), torch.no_grad():
        torch._foreach_mul_([a, torch.zeros(3).expand(2, 3)], 3.0)
    return (w * a).sin() * a


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("program", [strided, expanded, failing])
def test_what_is_held_has_its_layout_and_its_values(program, around):
    context, policy = AROUND[around]

    def step(enabled):
        w = torch.arange(37 * 96.0).view(37, 96).remainder(7).requires_grad_()
        x = torch.arange(96.0).remainder(5).view(1, 96)
        x = x.expand(37, 96) if program is expanded else x
        hooks = context() if enabled else contextlib.nullcontext()
        with hooks, checkpoint_scope(policy=policy, enabled=enabled):
            y = program(w, x)
        y.sum().backward()
        return bits(w.grad)

    want = step(False)
    clear_programs()
    assert step(True) == want
    assert step(True) == want


PRODUCTS = {
    "of one": lambda x, a, b: a * a,
    "of two": lambda x, a, b: a * b,
    "of one that is known": lambda x, a, b: x * a,
}


@pytest.mark.parametrize("order", [*itertools.permutations(PRODUCTS)], ids=str)
def test_operators_that_take_one_tensor_twice_or_two(order):
    """Met at one site, none of them needing a gradient."""

    def product(kind, s, a, b, w):
        with checkpoint_scope():
            y = PRODUCTS[kind](s * 2, a, b)
            return (w * y).sin(), y

    clear_programs()
    for kind in (*order, *order):
        s, a, b = torch.rand(3), torch.rand(3), torch.rand(3)
        w = torch.rand(3, requires_grad=True)
        z, y = product(kind, s, a, b, w)
        assert torch.equal(torch.autograd.grad(z.sum(), w)[0], (w * y).cos() * y)


@pytest.mark.parametrize("policy", [None, PLANNED], ids=str)
def test_views_that_a_region_inside_takes_share_memory_in_the_recompute(policy):
    """Of three, the first write meets two; the region itself writes the third."""

    def step(enabled):
        w = torch.linspace(0.1, 1, 4).requires_grad_()

        def inner(first, whole, last, w):
            last.add_(1)
            first.mul_(2)
            return ((whole + 1) * w).sin()

        with checkpoint_scope(policy=policy, enabled=enabled):
            m = w.detach() * 1.5
            y = (rerun(inner) if enabled else inner)(m[:2], m, m[3:], w * 1)
            z = y * m
        return bits(torch.autograd.grad(z.sum(), w))

    clear_programs()
    assert step(True) == step(True) == step(False)


_library = torch.library.Library("checkpointing_sites", "FRAGMENT")
_library.define("by_grad_mode(Tensor x) -> Tensor")
_library.impl(
    "by_grad_mode", lambda x: x * (2 + torch.is_grad_enabled()), "CompositeExplicitAutograd"
)


@pytest.mark.parametrize("is_on", [True, False])
def test_kernels_run_in_the_grad_mode_of_the_forward(is_on):
    """Some look at it, as attention does."""
    w, x = torch.rand(3, requires_grad=True), torch.rand(3)
    with checkpoint_scope():
        with torch.set_grad_enabled(is_on):
            h = torch.ops.checkpointing_sites.by_grad_mode(x * 2)
        y = w * h
    (found,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(found, x * 2 * (2 + is_on))


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (math.nan, -math.nan), (1, 1.0, -1.0)], ids=str)
def test_numbers_are_compared_by_their_bits(numbers):
    """nan has a sign, too."""

    def slope(number, enabled):
        w = torch.ones(3, requires_grad=True)
        with checkpoint_scope(enabled=enabled):
            t = torch.full((3,), number)
            y = w * torch.ones(3).copysign(t).sin()
        return bits(torch.autograd.grad(y.sum(), w))

    clear_programs()
    for number in (*numbers, *reversed(numbers)):
        assert slope(number, True) == slope(number, False)


def test_zeros_that_have_no_memory():
    """As autograd makes them for gradients that are zero; others come by at other times."""

    def slope(is_zero, enabled):
        w, u = torch.ones(3, requires_grad=True), torch.rand(3)
        z = torch._efficientzerotensor(3) if is_zero else torch.arange(3.0)
        with checkpoint_scope(enabled=enabled):
            y = (w + z * 2).sin() * (w * (z + u)).exp()
        return bits(torch.autograd.grad(y.sum(), w))

    for order in ((True, False), (False, True)):
        clear_programs()
        for is_zero in order * 2:
            found = []
            for enabled in (True, False):
                torch.manual_seed(1)
                found.append(slope(is_zero, enabled))
            assert found[0] == found[1]


@pytest.mark.parametrize("order", ["apart shared", "shared apart"])
def test_two_tensors_that_an_operator_meets_may_share_memory(order):
    """Or not: then a write to one is none to the other."""

    def slope(how, enabled):
        w, base = torch.ones(3, requires_grad=True), torch.arange(1.0, 5.0)
        a, b = (base[:3], base[1:]) if how == "shared" else (base[:3], base[1:].clone())
        with checkpoint_scope(enabled=enabled):
            y = w * (a * b)
            a.mul_(3)
            y = y * (b * 1)
        return bits(torch.autograd.grad(y.sum(), w))

    clear_programs()
    for how in order.split() * 2:
        assert slope(how, True) == slope(how, False)


def test_checks_that_change_at_one_site():
    """What one run compares another may not have noted."""
    norm = nn.BatchNorm1d(4)
    clear_programs()
    for check in ("metadata", "values", "none", "metadata", "values"):
        x = torch.rand(5, 4, requires_grad=True)
        with checkpoint_scope(determinism_check=check):
            y = norm(x.sin()).exp()
        y.sum().backward()
    assert norm.num_batches_tracked == 5


@EACH_WAY
def test_kernels_are_chosen_as_in_the_forward(door):
    """`mkldnn` is on again in backward."""
    x = torch.rand(4, 4, requires_grad=True)
    seen = []

    def fn(x):
        seen.append(torch.backends.mkldnn.enabled)
        return (x @ x).sin().exp()

    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        y = door(fn)(x)
        want = torch.autograd.grad(fn(x).sum(), x)
    assert bits(torch.autograd.grad(y.sum(), x)) == bits(want)
    assert not any(seen)


@EACH_WAY
@pytest.mark.parametrize("alias", [torch.Tensor.detach, lambda t: t.view(-1)])
def test_hooks_that_hand_on_an_alias(alias, door):
    """Whose memory is written before backward: an error. Without the write, plain's bits."""
    for is_written in (False, True):
        w = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        x = torch.arange(16.0).view(4, 4)
        with saved_tensors_hooks(alias, lambda t: t.view(4, 4)):
            y = door(lambda x, w: ((x + 1) * w).sin())(x, w)
        if not is_written:
            want = ((x + 1) * w.detach()).cos() * (x + 1)
            assert torch.equal(torch.autograd.grad(y.sum(), w)[0], want)
            continue
        x.mul_(2)
        with pytest.raises(ChangedError):
            y.sum().backward()


@EACH_WAY
@pytest.mark.parametrize("written", ["what was given", "what they made"])
def test_hooks_that_copy(written, door):
    """Their copy is guarded, not what it was made of."""
    w, x, made = torch.rand(4, 4).requires_grad_(), torch.rand(4, 4), []
    want = ((x + 1) * w.detach()).cos() * (x + 1)
    with saved_tensors_hooks(lambda t: made.append(t.clone()) or made[-1], lambda t: t):
        y = door(lambda x, w: ((x + 1) * w).sin())(x, w)
    if written == "what was given":
        x.mul_(2)
        assert torch.equal(torch.autograd.grad(y.sum(), w)[0], want)
        return
    for copied in made:
        copied.mul_(2)
    with pytest.raises(ChangedError):
        y.sum().backward()


@pytest.mark.parametrize("policy", [None, PLANNED], ids=str)
def test_an_operator_that_fails_leaves_no_trace_of_what_it_was_given(policy):
    """What it was given second is met first; a view of the first is written."""

    def step(enabled):
        w, a = torch.ones(4, 4, requires_grad=True), torch.arange(16.0).view(4, 4)
        other, alias = torch.ones(3, 3), a.view(-1)
        with checkpoint_scope(policy=policy, enabled=enabled):
            with contextlib.suppress(RuntimeError):
                torch.mm(a, other)
            y = other.sum() + w * (a * 1)
            alias.mul_(3)
            y = (y * (a * 1)).sin()
        return bits(torch.autograd.grad(y.sum(), w))

    want = step(False)
    clear_programs()
    assert step(True) == want
    assert step(True) == want
