"""One site, one memory, one set of hooks, nests of them: small programs that each found a hole."""

import contextlib
import itertools
import math

import pytest
import torch
from oracle import EACH_WAY, NO_ROOM, PLANNED, bits, rerun, scope
from torch.autograd.graph import saved_tensors_hooks

import checkpointing
from checkpointing import auto, checkpoint_scope, checkpointed, disabled, keep, offload

pytestmark = NO_ROOM
_library = torch.library.Library("checkpointing_sites", "FRAGMENT")
_library.define("by_grad_mode(Tensor x) -> Tensor")
_kernel = lambda x: x * (2 + torch.is_grad_enabled())
_library.impl("by_grad_mode", _kernel, "CompositeExplicitAutograd")


def kept_with_another_offset(_, w, x):
    """What is kept is a copy."""
    h = keep(torch.cat([w, w])[2:8]).as_strided((2,), (1,), 3)
    return (h * h).sin() * h


def a_foreach_operator_that_fails(_, w, x):
    """The first tensor is written before the second one fails."""
    a = (w * 1.0).detach()
    with contextlib.suppress(RuntimeError), torch.no_grad():
        torch._foreach_mul_([a, torch.zeros(3).expand(2, 3)], 3.0)
    return (w * a).sin() * a


def one_tensor_twice_or_two(kind, w, x):
    """None of them needs a gradient."""
    a, b = torch.rand(4), torch.rand(4)
    y = {"one": a * a, "two": a * b, "one that is known": (x * 2) * a}[kind]
    return (w * y).sin() * y


def views_that_a_region_inside_takes(_, w, x):
    """Of three, the first write meets two; the region itself writes the third."""

    def inner(first, whole, last, w):
        last.add_(1)
        first.mul_(2)
        return ((whole + 1) * w).sin()

    m = w.detach() * 1.5
    return rerun(inner)(m[:2], m, m[3:], w * 1) * m


def numbers_by_their_bits(number, w, x):
    return w * torch.ones(4).copysign(torch.full((4,), number)).sin()


def memory_that_two_tensors_share_or_not(how, w, x):
    """Then a write to one is none to the other."""
    a, b = (x[:3], x[1:]) if how == "shared" else (x[:3], x[1:].clone())
    y = w[1:] * (a * b)
    a.mul_(3)
    return y * (b * 1)


def kernels_that_look_at_the_grad_mode(is_on, w, x):
    """As attention does."""
    with torch.set_grad_enabled(is_on):
        h = torch.ops.checkpointing_sites.by_grad_mode(x * 2)
    return w * h


def an_operator_that_fails(_, w, x):
    """What it was given second is met first; a view of the first is written."""
    a, other = x.view(2, 2), torch.ones(3, 3)
    with contextlib.suppress(RuntimeError):
        torch.mm(a, other)
    y = other.sum() + w.view(2, 2) * (a * 1)
    x.mul_(3)
    return (y * (a * 1)).sin()


KINDS = [
    (one_tensor_twice_or_two, ("one", "two", "one that is known")),
    (views_that_a_region_inside_takes, (None,)),
    (numbers_by_their_bits, (0.0, -0.0)),
    (numbers_by_their_bits, (math.nan, -math.nan)),
    (numbers_by_their_bits, (1, 1.0, -1.0)),
    (memory_that_two_tensors_share_or_not, ("apart", "shared")),
    (kernels_that_look_at_the_grad_mode, (True, False)),
    (an_operator_that_fails, (None,)),
    (a_foreach_operator_that_fails, (None,)),
    (kept_with_another_offset, (None,)),
]

POLICIES = [None, auto(), PLANNED, offload(PLANNED, min_bytes=0, inputs=True)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(("program", "kinds"), KINDS)
def test_each_run_through_one_site_is_plains(program, kinds, policy):
    """Recorded or followed, whatever has gone through it before."""

    def step(kind, seed, enabled):
        torch.manual_seed(seed)
        w, x = torch.rand(4, requires_grad=True), torch.rand(4)
        with contextlib.nullcontext() if enabled else disabled(), checkpoint_scope(policy=policy):
            y = program(kind, w, x)
        return bits(torch.autograd.grad(y.sum(), w))

    for order in itertools.permutations(kinds):
        checkpointing.clear_programs()
        for seed, kind in enumerate(order * 2):
            assert step(kind, seed, True) == step(kind, seed, False), order


PACKS = {"detach": torch.Tensor.detach, "view": lambda t: t.view(-1), "clone": torch.clone}

HANDED_ON = [*itertools.product(PACKS, ["nothing", "given"]), ("clone", "made")]


@EACH_WAY
@pytest.mark.parametrize(("pack", "written"), HANDED_ON)
def test_what_hooks_hand_on_is_guarded(pack, written, door):
    """An alias is what it was made of; of a copy, the copy is. Else plain's bits."""
    w, x, made = torch.rand(4, 4).requires_grad_(), torch.rand(4, 4), []
    want = ((x + 1) * w.detach()).cos() * (x + 1)
    hooks = lambda t: made.append(PACKS[pack](t)) or made[-1], lambda t: t.view(4, 4)
    with saved_tensors_hooks(*hooks):
        y = door(lambda x, w: ((x + 1) * w).sin())(x, w)
    for tensor in {"nothing": [], "given": [x], "made": made}[written]:
        tensor.mul_(2)
    if written == ("made" if pack == "clone" else "given"):
        with pytest.raises(checkpointing.ChangedError):
            y.sum().backward()
    else:
        assert torch.equal(torch.autograd.grad(y.sum(), w)[0], want)


def test_a_foreach_write_in_a_scope_counts_for_the_rerun_around_it():
    """In a dispatch mode, torch itself does not count these up."""
    halve, x, c = scope(torch._foreach_mul_), torch.ones(3, requires_grad=True), torch.ones(3)
    y = checkpointed(lambda x, c: (halve([c], 0.5), x.logsumexp(0))[1])(x, c)
    with pytest.raises(checkpointing.ChangedError):
        y.backward()
    assert c.tolist() == [0.5] * 3
