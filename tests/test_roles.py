"""Regions in regions beside `keep`, `forward_only`, hooks that copy, and writes: slots come back as
what they were."""

import contextlib
import functools
import itertools

import pytest
import torch
from oracle import bits, leaf
from oracle import s as scope
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from checkpointing import (
    CheckpointError,
    MismatchError,
    auto,
    checkpointed,
    forward_only,
    keep,
    offload,
)
from checkpointing.torch_compat import checkpoint


def in_torch_compat(function):
    return lambda *args: checkpoint(function, *args, use_reentrant=False)


RERUNS = {
    "rerun": checkpointed,
    "all of it": checkpointed(early_stop=False),
    "compat": in_torch_compat,
}
REGIONS = {
    **RERUNS,
    "replay": checkpointed(backend="replay"),
    "scope": scope,
    "auto": functools.partial(scope, policy=auto()),
    "offload": functools.partial(scope, policy=offload(inputs=True, min_bytes=0)),
    "offload auto": functools.partial(scope, policy=offload(auto(), inputs=True, min_bytes=0)),
}
HOOKS = {
    "no hooks": contextlib.nullcontext,
    "save_on_cpu": save_on_cpu,
    "stored copies": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    "new copies": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()),
}


def gradients(function, make, hooks=contextlib.nullcontext):
    """Two backwards through one graph, and a second derivative."""
    torch.manual_seed(1)
    leaves = make()
    with hooks():
        loss = function(*leaves).sin().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    weighed = sum(
        (g.square().sum() for g in second if g is not None and g.requires_grad), start=loss * 0
    )
    third = torch.autograd.grad(weighed, leaves, allow_unused=True)
    return [bits(t) for t in (loss, *first, *second, *third) if t is not None]


def assert_as_plain(plain, function, make, hooks=contextlib.nullcontext):
    assert gradients(function, make, hooks) == gradients(plain, make)


def assert_right_or_refused(plain, function, make, hooks=contextlib.nullcontext):
    want = gradients(plain, make)
    try:
        have = gradients(function, make, hooks)
    except CheckpointError:
        return False
    assert have == want
    return True


OUTER = ["rerun", "compat", "replay", "offload auto"]
INNER = ["rerun", "all of it", "scope", "offload"]
AROUND = pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)


def nested_in_hooks(inner):
    """Each outer region with each of these inside: without hooks around, and in one kind of them
    by turns."""
    pairs = enumerate(itertools.product(OUTER, inner))
    some = [(*pair, hooks) for i, pair in pairs for hooks in ("no hooks", [*HOOKS][1 + i % 3])]
    cases = [(REGIONS[outer], REGIONS[inner], HOOKS[hooks]) for outer, inner, hooks in some]
    return pytest.mark.parametrize(("outer", "inner", "hooks"), cases, ids=map("-".join, some))


# ---- keep and forward_only beside inner regions


@forward_only
def transposed(t):
    return t.t()


@forward_only
def in_pieces(pair):
    return [pair["a"][1:3].t(), pair["a"], {"b": pair["a"][:, ::2]}]


def kept_leaf(region):
    def function(x, w):
        k = keep(x)
        return region(lambda a, b, c: (a * b).exp() * (c.sin() * b))(x, w * 1.5, k) * k

    return function


def kept_and_read_again(region):
    def function(x, w):
        h = x * w
        k = keep(h)
        m = h.sin()
        return region(lambda a: (a * h).cos() * k.exp() + (a * m).tanh())(k) + h

    return function


def kept_view(region):
    def function(x, w):
        h = (x @ w).tanh()
        k = keep(h.t())
        return region(lambda a, b: (a * b).exp() + (a @ b).sin())(h, k)

    return function


def kept_without_grad(region):
    def function(x, w):
        h = x * w
        with torch.no_grad():
            k = keep(h)
        return region(lambda a: (a * k).exp() * h.cos())(h)

    return function


def view_from_forward_only(region):
    def function(x, w):
        k = transposed(x)
        return region(lambda a, b: (a * x).exp() * (a @ b).sin())(k, w * 2)

    return function


def views_from_forward_only(region):
    def function(x, w):
        h = (x * w).tanh()
        piece, same, rest = in_pieces({"a": h})
        return region(
            lambda a, b: (a * b).exp() @ (piece.t() * 2)[:, :1].repeat(2, 1) + rest["b"].sum()
        )(h, same)

    return function


PROGRAMS = [
    kept_leaf,
    kept_and_read_again,
    kept_view,
    kept_without_grad,
    view_from_forward_only,
    views_from_forward_only,
]


def two_leaves():
    return leaf(4, 4), leaf(4, 4)


@nested_in_hooks(INNER)
@pytest.mark.parametrize("program", PROGRAMS)
def test_kept_values_and_inner_regions(program, outer, inner, hooks):
    """The inner region of the recompute meets the tensors that it met in the forward."""
    views_apart = hooks is not contextlib.nullcontext and program is kept_view
    check = assert_right_or_refused if views_apart else assert_as_plain
    check(program(lambda f: f), outer(program(inner)), two_leaves, hooks)


# ---- one tensor held twice


@nested_in_hooks(INNER)
def test_one_tensor_that_is_two_arguments(outer, inner, hooks):
    """It comes back as one: also in containers and closed over."""

    def program(door, region):
        def function(x, w):
            h = x * 1.25

            def block(a, pair, w):
                last = h

                def part(w):
                    return (a * w).exp() * pair[0] + (last * w).sin() * (a + pair[1])

                return region(part)(w)

            return door(block)(h, [h, h], w)

        return function

    plain, function = program(lambda f: f, lambda f: f), program(outer, inner)
    assert_as_plain(plain, function, two_leaves, hooks)
    sent = scope(function, policy=offload(inputs=True, min_bytes=0))
    assert_as_plain(plain, sent, two_leaves, hooks)


# ---- who writes


def reads_and_writes(region, write, reader=None):
    """Two regions read `a`; the later one writes it at its start."""
    reader = reader or region

    def function(x, w):
        a = x * 1.5
        y = reader(lambda a, w: (a + 1).exp() * w)(a, w)
        return y + write(region, a, w).cos()

    return function


def as_argument(region, a, w):
    def block(a, w):
        a.mul_(2).relu_()
        return (a + 1).sin() * w

    return region(block)(a, w)


def by_closure(region, a, w):
    def block(w):
        a.mul_(0.5)
        return (a + 1).sin() * w

    return region(block)(w)


def through_a_view(region, a, w):
    def block(a, row, w):
        row.mul_(3)
        return (a + 1).sin() * w

    return region(block)(a, a[1], w)


def without_grad(region, a, w):
    def block(a, w):
        with torch.no_grad():
            a.mul_(3)
        return (a + 1).sin() * w

    return region(block)(a, w)


def further_inside(region, a, w):
    def block(a, w):
        return region(lambda w: as_argument(region, a, w) * 2)(w)

    return region(block)(a, w)


WRITES = [as_argument, by_closure, through_a_view, without_grad, further_inside]


@nested_in_hooks(RERUNS)
@pytest.mark.parametrize("write", WRITES)
def test_a_region_that_writes_what_another_one_reads(write, outer, inner, hooks):
    """In the forward and in each recompute, which writes what is its own."""
    plain, function = reads_and_writes(lambda f: f, write), outer(reads_and_writes(inner, write))
    works = assert_right_or_refused(plain, function, two_leaves, hooks)
    assert works or (write is through_a_view and hooks is not contextlib.nullcontext)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("write", WRITES)
def test_regions_of_two_kinds(write, outer, inner):
    """One reads, another one writes."""
    for reader in (checkpointed, scope):
        function = REGIONS[outer](reads_and_writes(REGIONS[inner], write, reader))
        assert_as_plain(reads_and_writes(lambda f: f, write), function, two_leaves)


@AROUND
@pytest.mark.parametrize("door", RERUNS.values(), ids=RERUNS)
@pytest.mark.parametrize("write", [as_argument, by_closure, without_grad])
def test_a_region_that_writes_what_is_from_outside_of_all(write, door, hooks):
    """Refused, or right where hooks have made copies; the second time, too."""

    def function(x, w, door=door):
        return write(door, x * 1.5, w)

    plain = functools.partial(function, door=lambda f: f)
    works = assert_right_or_refused(plain, function, two_leaves, hooks)
    assert not (works and hooks in (contextlib.nullcontext, save_on_cpu))
    with pytest.raises(CheckpointError, match="backend='replay'"):
        gradients(function, two_leaves)


# ---- layouts

LAYOUTS = {
    "gaps": lambda t: t[:, :97],
    "steps": lambda t: t[:, ::2],
    "transposed gaps": lambda t: t[:, 1:98].t(),
    "windows": lambda t: t.unfold(1, 5, 3),
    "expanded": lambda t: t[:, None, :50].expand(-1, 3, -1),
    "expanded gaps": lambda t: t[:, None, 3:99:3].expand(2, -1, 4, -1),
    "odd offset": lambda t: t.view(-1)[1:-6],
    "one row": lambda t: t[1],
}


@AROUND
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_stay(layout, hooks):
    """Strides decide in which order kernels add."""
    seen = []

    def reduce(t):
        seen.append(t.stride())
        return t.sum(-1).exp().mean() * t.mean()

    def make():
        return (leaf(20, 100),)

    def inside(x, kept, door):
        return door(lambda: reduce(kept(layout((x * 2).exp()))))()

    def given(x, kept, door):
        return door(lambda t: reduce(kept(t)))(layout((x * 2).exp()))

    for kept in (keep, lambda t: t, forward_only(lambda t: t), forward_only(lambda t: t + 0)):
        seen.clear()
        want = gradients(lambda x, kept=kept: inside(x, kept, lambda f: f), make)
        strides = {*seen}
        for program, door in itertools.product((inside, given), REGIONS.values()):
            seen.clear()
            assert gradients(lambda x, p=program, k=kept, d=door: p(x, k, d), make, hooks) == want
            assert {*seen} == strides


def test_kept_values_are_written_where_they_are_read():
    """Where the recompute computes something else, it gets what was kept."""
    counter, same = itertools.count(1), []

    @checkpointed
    def function(x):
        scale = torch.tensor([float(next(counter))])
        wide = scale.expand(4)
        kept = keep(wide)
        same.append(kept is wide)
        return (x * kept).exp() * scale

    x = leaf(4)
    function(x).sum().backward()
    assert same == [True, True]
    assert bits(x.grad) == bits(torch.autograd.grad((x * 1.0).exp().sum(), x)[0])


def test_what_is_the_users_is_put_back():
    """A kept tensor that is from outside, and has changed since, is only lent to the recompute."""
    state = torch.ones(4)

    @checkpointed
    def function(x):
        return (x * keep(state)).exp() * state

    x = leaf(4)
    y = function(x)
    state.copy_(torch.full((4,), 5.0))
    with contextlib.suppress(CheckpointError):
        y.sum().backward()
        assert bits(x.grad) == bits(torch.autograd.grad(x.exp().sum(), x)[0])
    assert state.tolist() == [5.0] * 4


# ---- shifts


def test_slots_that_have_shifted_are_a_mismatch():
    """Also if their number and metadata agree."""
    flip = iter([True, False, False])

    @checkpointed
    def function(x, w):
        first = next(flip)
        inner = checkpointed(lambda t: (t * 2).exp() * 3)
        if first:
            return inner(x * 2) + w.sin()
        a = (w * 1.0).sin()
        return a + inner(x * 2)

    y = function(leaf(4), leaf(4))
    with pytest.raises(MismatchError, match="region inside"):
        y.sum().backward()
