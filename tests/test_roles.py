"""Slots come back as what they were: regions in regions beside hooks that copy, and writes."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from oracle import (
    EACH_WAY,
    NO_ROOM,
    PLANNED,
    bits,
    by_turns,
    leaf,
    plain,
    planned,
    scope,
    seed,
    weigh,
)
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import checkpointing
from checkpointing import CheckpointError, MismatchError, checkpointed, keep, offload
from checkpointing.torch_compat import checkpoint

pytestmark = NO_ROOM
RERUNS = {
    "rerun": checkpointed,
    "all of it": checkpointed(early_stop=False),
    "compat": lambda function: functools.partial(checkpoint, function, use_reentrant=False),
}
REGIONS = {
    **RERUNS,
    "replay": checkpointed(backend="replay"),
    "scope": scope,
    "planned": planned,
    "offload": functools.partial(scope, policy=offload(inputs=True, min_bytes=0)),
    "offload planned": functools.partial(scope, policy=offload(PLANNED, inputs=True, min_bytes=0)),
}
HOOKS = {
    "no hooks": contextlib.nullcontext,
    "save_on_cpu": save_on_cpu,
    "stored copies": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    "new copies": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()),
}


def gradients(function, hooks=contextlib.nullcontext, make=lambda: (leaf(4, 4), leaf(4, 4))):
    """Two backwards through one graph, and a second derivative."""
    seed(1)
    leaves = make()
    with hooks():
        loss = function(*leaves).sin().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    third = torch.autograd.grad(loss * 0 + weigh(second), leaves, allow_unused=True)
    return [bits(t) for t in (loss, *first, *second, *third) if t is not None]


of = functools.partial  # a program through these doors: a function of two tensors


wanted = functools.cache(lambda program, *more: gradients(of(program, *more, plain)))


def assert_right_or_refused(want, function, hooks=contextlib.nullcontext):
    try:
        have = gradients(function, hooks)
    except CheckpointError:
        return False
    assert have == want
    return True


TWO = REGIONS, REGIONS
OUTER = ["rerun", "compat", "replay", "offload planned"]
INNER = ["rerun", "all of it", "scope", "offload"]


def in_hooks_by_turns(names, *tables):
    """Each row of names, looked up in these tables, with one kind of hooks or none."""
    rows, tables = by_turns(names, HOOKS), (*tables, HOOKS)
    return [pytest.param(*map(dict.__getitem__, tables, row), id=str(row)) for row in rows]


def reads_and_writes(write, region, reader, x, w):
    """Two regions read `a`; the later one writes it at its start."""
    a = x * 1.5
    y = reader(lambda a, w: (a + 1).exp() * w)(a, w)
    return y + write(region, a, w).cos()


unseen = torch.no_grad()(torch.Tensor.mul_)

WRITES = {
    "argument": lambda region, a, w: region(lambda a, w: (a.mul_(2).relu_() + 1).sin() * w)(a, w),
    "closure": lambda region, a, w: region(lambda w: (a.mul_(0.5) + 1).sin() * w)(w),
    "view": lambda region, a, w: region(lambda a, row, w: (row.mul_(3), (a + 1).sin() * w)[1])(
        a, a[1], w
    ),
    "without grad": lambda region, a, w: region(lambda a, w: (unseen(a, 3) + 1).sin() * w)(a, w),
    # `.data` has a version of its own.
    "what shares its memory": lambda region, a, w: region(
        lambda a, other, w: (a.mul_(3) + other).sin() * w
    )(a, a.data, w),
    "further inside": lambda region, a, w: region(
        lambda a, w: region(lambda w: WRITES["argument"](region, a, w) * 2)(w)
    )(a, w),
}
WRITTEN = itertools.product(OUTER, [*INNER, "compat"], WRITES)
READ = in_hooks_by_turns(
    by_turns(WRITTEN, ["the same", "rerun", "scope"]), *TWO, WRITES, REGIONS | {"the same": None}
)


@pytest.mark.parametrize(("outer", "inner", "write", "reader", "hooks"), READ)
def test_a_region_that_writes_what_another_one_reads(outer, inner, write, reader, hooks):
    """In the forward and in each recompute, which writes what is its own; of one kind or two."""
    want = wanted(reads_and_writes, write, plain)
    nested = outer(of(reads_and_writes, write, inner, reader or inner))
    works = assert_right_or_refused(want, nested, hooks)
    shares = write in (WRITES["view"], WRITES["what shares its memory"])
    assert works or (shares and hooks is not contextlib.nullcontext)


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("door", RERUNS.values(), ids=RERUNS)
@pytest.mark.parametrize("write", ["argument", "closure", "without grad"])
def test_a_region_that_writes_what_is_from_outside_of_all(write, door, hooks):
    """Refused, or right where hooks have made copies; the second time, too."""
    program = lambda door, x, w: WRITES[write](door, x * 1.5, w)
    works = assert_right_or_refused(gradients(of(program, plain)), of(program, door), hooks)
    assert not (works and hooks in (contextlib.nullcontext, save_on_cpu))
    with pytest.raises(CheckpointError, match="backend='replay'"):
        gradients(of(program, door))


LAYOUTS = {
    "gaps": lambda t: t[:, :97],
    "steps": lambda t: t[:, ::2],
    "transposed gaps": lambda t: t[:, 1:98].t(),
    "windows": lambda t: t.unfold(1, 5, 3),
    "expanded gaps": lambda t: t[:, None, 3:99:3].expand(2, -1, 4, -1),
    "odd offset": lambda t: t.view(-1)[1:-6],
    "one row": lambda t: t[1],
    "a column of one row": lambda t: t[:1, 3],  # one element, and a stride that is not 1
}


KEPT = {"keep": keep, "nothing": lambda t: t}
KEPT["once"], KEPT["once, new"] = map(checkpointing.forward_only, (lambda t: t, lambda t: t + 0))
LAID = by_turns(by_turns(itertools.product(REGIONS, KEPT), ["given", "made inside"]), HOOKS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_stay(layout):
    """Strides decide in which order kernels add."""
    seen = []

    def reduce(t):
        seen.append(t.stride())
        return t.sum(-1).exp().mean() * t.mean()

    def found(place, kept, door, hooks=contextlib.nullcontext):
        seen.clear()
        inside = lambda x: door(lambda: reduce(kept(LAYOUTS[layout]((x * 2).exp()))))()
        given = lambda x: door(lambda t: reduce(kept(t)))(LAYOUTS[layout]((x * 2).exp()))
        function = given if place == "given" else inside
        return gradients(function, hooks, lambda: [leaf(20, 100)]), {*seen}

    want = {name: found("made inside", kept, plain) for name, kept in KEPT.items()}
    for region, kept, place, hooks in LAID:
        assert found(place, KEPT[kept], REGIONS[region], HOOKS[hooks]) == want[kept]


def test_kept_values_are_written_where_they_are_read():
    """Where the recompute computes something else, it gets what was kept."""
    counter, same, x = itertools.count(1.0), [], leaf(4)

    def function(x):
        scale = torch.tensor([next(counter)])
        wide = scale.expand(4)
        kept = keep(wide)
        same.append(kept is wide)
        return (x * kept).exp() * scale

    checkpointed(function)(x).sum().backward()
    assert same == [True, True]
    assert bits(x.grad) == bits(torch.autograd.grad((x * 1.0).exp().sum(), x)[0])


def test_what_is_the_users_is_put_back():
    """A kept tensor that is from outside, and has changed since, is only lent to the recompute."""
    state, x = torch.ones(4), leaf(4)
    y = checkpointed(lambda x: (x * keep(state)).exp() * state)(x)
    state.copy_(torch.full((4,), 5.0))
    with contextlib.suppress(CheckpointError):
        y.sum().backward()
        assert bits(x.grad) == bits(torch.autograd.grad(x.exp().sum(), x)[0])
    assert state.tolist() == [5.0] * 4


SEEN = {"conjugate": lambda z: z.conj().t(), "negated": lambda z: z.conj().imag}


KEEPERS = ["replay", "planned", "offload planned"]


@pytest.mark.parametrize(
    ("seen", "outer", "inner", "hooks"),
    in_hooks_by_turns(itertools.product(SEEN, REGIONS, KEEPERS), SEEN, *TWO),
)
def test_a_kept_tensor_is_the_conjugate_or_negated_view_that_it_was(seen, outer, inner, hooks):
    """Recorded operators read the bits in memory."""

    def function(outer, inner, kept):
        def body(x, w):
            v = kept(seen(torch.complex(x, w)))
            return (v.real if v.is_complex() else v).square().sin()

        return lambda x, w: outer(inner(body))(x, w)

    have = gradients(function(outer, inner, keep), hooks)
    assert have == gradients(function(plain, plain, lambda t: t))


VIEWS = {
    "leaf": lambda: torch.ones(4, 4)[:2].requires_grad_(),
    # It shows `requires_grad` of its base, and carries no gradient.
    "no_grad": lambda: torch.no_grad()(lambda base: base[:2])(leaf(4, 4)),
}


def of_a_view(view, outer, around, inner):
    product = inner(lambda x, v: (v + 1).cos() * x * v)
    body = around(lambda x, v: (product(x, v) + v.sin() * x).exp())

    def function(x, w):
        v = VIEWS[view]()
        y = outer(lambda x, v: body(x, v).sin())(x[:2], v)
        return y * w[:2] if view == "no_grad" else y * w[:2] + v

    return function


VIEWED = by_turns(itertools.product(VIEWS, OUTER, ["plain", *INNER]), HOOKS)


@pytest.mark.parametrize(("view", "outer", "inner", "hooks"), VIEWED, ids=str)
def test_a_view_that_no_operator_of_the_graph_made_is_what_it_was(view, outer, inner, hooks):
    """Hooks bring it back as a leaf of its own."""
    nested = of_a_view(view, REGIONS[outer], checkpointed, REGIONS.get(inner, plain))
    assert gradients(nested, HOOKS[hooks]) == gradients(of_a_view(view, plain, plain, plain))


def test_slots_that_have_shifted_are_a_mismatch():
    """Also if their number and metadata agree."""
    flip, inner = iter([True, False, False]), checkpointed(lambda t: (t * 2).exp() * 3)

    @checkpointed
    def function(x, w):
        if next(flip):
            return inner(x * 2) + w.sin()
        return (w * 1.0).sin() + inner(x * 2)

    y = function(leaf(4), leaf(4))
    with pytest.raises(checkpointing.MismatchError, match="region inside"):
        y.sum().backward()


@pytest.mark.parametrize("region", ["scope", "planned"])
def test_tensors_that_have_left_their_memory_are_not_found_there(region):
    """As `copy.deepcopy` of a tensor does. Memory of another one is soon in that place."""

    def function(x, w):
        for _ in range(4):
            x = (copy.deepcopy(x.detach()) * w).sin() + copy.deepcopy(w.detach()) * x
        return x

    want = gradients(function)
    for _ in range(6):
        checkpointing.clear_programs()
        assert gradients(checkpointed(REGIONS[region](function))) == want


@pytest.mark.parametrize("region", ["replay", "scope", "planned"])
def test_storages_are_known_by_the_tensors_on_them_and_not_held(region, no_gc):
    """Written through a tensor that `set_` has put there; no program keeps one alive."""
    storages = []

    def function(x, w):
        made = x.detach() * 2
        storages.append(StorageWeakRef(made.untyped_storage()))
        there = torch.empty(0).set_(made.untyped_storage(), 0, (4, 4), (4, 1))
        there.add_(1)
        return (w * there.sin()).exp() * made.cos() * x

    want = gradients(function)
    for _ in range(3):
        assert gradients(REGIONS[region](function)) == want
    assert all(storage.expired() for storage in storages)


@pytest.mark.parametrize("outer", RERUNS)
@pytest.mark.parametrize("inner", ["scope", "replay", "planned"])
def test_a_table_that_the_first_call_makes_is_not_taken_for_what_it_is_made_from(outer, inner):
    """In the forward an input of `cos`, in the rerun one of `mul`: as large, in the same slot."""
    table = []

    def program(x, w):
        if not table:
            table.append(w.detach().cos())
        return (x @ x).sin() * table[0]

    region = RERUNS[outer](REGIONS[inner](program))
    with pytest.raises(MismatchError, match="another input of a region inside"):
        gradients(region)
    assert gradients(region) == gradients(program)


class Named(torch.Tensor):
    """A tensor with an attribute, as masks and images have."""

    def __new__(cls, tensor, power):
        made = tensor.as_subclass(cls)
        made.power = power
        return made


@pytest.mark.parametrize("outer", REGIONS)
@pytest.mark.parametrize("inner", RERUNS)
def test_attributes_of_inputs_are_there_in_a_rerun(outer, inner):
    def with_input(through):
        def program(x, w):
            call = through(lambda named: (x @ w) * named.as_subclass(torch.Tensor) ** named.power)
            return call(Named(w.detach().exp(), 3))

        return program

    region = lambda call: REGIONS[outer](RERUNS[inner](call))
    assert gradients(with_input(region)) == gradients(with_input(plain))


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
