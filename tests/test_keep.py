"""A kept value is where recompute starts from: held in a scope, pinned under rerun."""

import collections
import dataclasses
import types

import pytest
import torch
from oracle import Hooks, bits, leaf
from oracle import s as scope
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from checkpointing import ChangedError, checkpoint_scope, checkpointed, disabled, keep

TAPES = pytest.mark.parametrize(
    "door", [checkpointed(backend="replay"), scope], ids=["replay", "scope"]
)
RERUN = checkpointed()
DOORS = pytest.mark.parametrize(
    "door", [RERUN, checkpointed(backend="replay"), scope], ids=["rerun", "replay", "scope"]
)


@dataclasses.dataclass
class Pair:
    a: object
    b: object


Named = collections.namedtuple("Named", "a b")


# ---- what it returns


BUILDS = {
    "list": lambda x: [x, 3],
    "nested": lambda x: {"a": [x, {"b": (x, None)}]},
    "named tuple": lambda x: Named(x, "text"),
    "dataclass": lambda x: Pair(x, [x]),
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "text": lambda x: "text",
}


@pytest.mark.parametrize("build", [lambda x: x, *BUILDS.values()], ids=["tensor", *BUILDS])
def test_keep_returns_its_argument(build):
    """The very same object, in the forward of every door and outside of all."""
    x = leaf(3)
    value = build(h := x.sin())
    for door in (
        lambda fn: fn,
        scope,
        checkpointed,
        checkpointed(backend="replay"),
        lambda fn: torch.no_grad()(checkpointed(fn)),
        lambda fn: disabled()(scope(fn)),
    ):
        assert door(lambda: keep(value))() is value
    h.exp().sum().backward()
    assert h._version == 0


# ---- on a tape


def test_bytes_kept_are_those_of_storages_counted_once():
    """Two views of one storage, kept twice, count once; what came from outside counts nothing."""
    x = leaf(10)
    with checkpoint_scope() as entered:
        y = x.sin()
        keep([y, y[:5], y.view(2, 5)])
        keep(y)
        keep(x)
        z = y.exp().sin()
    assert entered.stats.bytes_kept == 40
    z.sum().backward()
    assert entered.stats.bytes_kept == 0


@DOORS
@pytest.mark.parametrize(
    "modify", [lambda y: y.mul_(2).add_(1), lambda y: y[0].zero_()], ids=["whole", "part"]
)
def test_keep_then_in_place(door, modify):
    """Who read it before gets the old value, the others the new one; a rerun may refuse."""
    x = leaf(3, 3)

    def fn(x):
        y = keep(x.sin())
        before = y.clone().exp().sin()
        modify(y)
        return before * y.clone().exp().sin()

    want = torch.autograd.grad(fn(x).sum(), x)[0]
    y = door(fn)(x)
    for retain in (True, False):
        try:
            have = torch.autograd.grad(y.sum(), x, retain_graph=retain)[0]
        except ChangedError as error:
            assert door is RERUN
            assert "a value given to keep() (float32 tensor of shape (3, 3)) was ch" in str(error)
        else:
            assert bits(have) == bits(want)


@TAPES
def test_a_kept_value_changed_after_the_block(door):
    """Changed in place outside, before backward: an error, as autograd says for plain code."""
    x = leaf(3)
    y, kept = door(lambda x: ((kept := keep(x.sin().cos())).exp().sin(), kept))(x)
    with torch.no_grad():
        kept.add_(1)
    with pytest.raises(RuntimeError, match=r"a kept tensor .*changed in place"):
        y.sum().backward()


# ---- under rerun


def test_keep_pins_a_routing_decision():
    """The rerun gets the indices that the forward chose, though it would choose others now (pain
    5)."""
    x, scores = leaf(4, 3), [torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([0.0, 1.0, 2.0, 3.0])]
    seen = []

    @checkpointed
    def route(x):
        indices = keep(scores[len(seen)].topk(2).indices)
        seen.append(indices)
        return x[indices].sin().exp()

    y = route(x)
    y.sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    want = torch.autograd.grad(x[[0, 2]].sin().exp().sum(), x)[0]
    assert bits(x.grad) == bits(want)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda t: [t], lambda s: s[0]),
        (lambda t: {"a": (t,)}, lambda s: s["a"][0]),
        (lambda t: Pair(t, None), lambda s: s.a),
        (lambda t: Named(t, 1), lambda s: s.a),
    ],
)
def test_pinned_structures_are_like_the_ones_given(wrap, unwrap):
    """The rerun gets an equal structure, with the kept tensors."""
    runs = []

    @checkpointed
    def fn(x):
        runs.append(keep(wrap(torch.full((3,), float(len(runs))))))
        return (x * (unwrap(runs[-1]) + 1)).sin().exp()

    x = leaf(3)
    fn(x).sum().backward()
    assert type(runs[0]) is type(runs[1])
    assert bits(x.grad) == bits(torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize("nested", [(), (3,), (0, 2)])
def test_pins_are_in_order(nested):
    """Several in a loop find their own, also in inner regions."""
    counter = iter(range(1, 100))

    def stage(x):
        return (x * keep(torch.tensor(float(next(counter))))).sin()

    def fn(x):
        for i in range(5):
            x = checkpointed(stage)(x) if i in nested else stage(x)
        return x

    x = leaf(3)
    checkpointed(fn)(x).sum().backward()
    want = x
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
        want = (want * scale).sin()
    assert bits(x.grad) == bits(torch.autograd.grad(want.sum(), x)[0])


# ---- beside other hooks


@DOORS
def test_kept_values_go_through_enclosing_hooks(door):
    """Each once, as an operator's saved tensor would."""
    base, hooks = leaf(3), Hooks()
    with hooks:
        x = base * 1.5
        y = door(lambda x: keep(x.exp().sin()).exp().sin())(x)
    want = torch.autograd.grad((base * 1.5).exp().sin().exp().sin().sum(), base)[0]
    kept = (base.detach() * 1.5).exp().sin()
    assert sum(torch.equal(t, kept) for t in hooks.packed) == 1
    assert bits(torch.autograd.grad(y.sum(), base)[0]) == bits(want)
    assert hooks.unpacked >= 1


@DOORS
@pytest.mark.parametrize("write", [False, True])
def test_keep_under_save_on_cpu(door, write):
    """Offloaded and back, also where the kept tensor is a view."""

    def fn(x):
        y = keep(x.relu().t())
        z = keep((y * 3)[1:])
        before = z.clone().square()
        if write:
            z.mul_(2)
        return before.sum() + (keep(z.clone()) * z.clone()).square().sum()

    if write and door is RERUN:
        return  # which may refuse it
    base = torch.arange(-8.0, 8.0).view(4, 4).requires_grad_()
    want = torch.autograd.grad(fn(base * 2), base)
    with save_on_cpu():
        y = door(fn)(base * 2)
    have = [torch.autograd.grad(y, base, retain_graph=retain)[0] for retain in (True, False)]
    assert [*map(bits, have)] == [*map(bits, want * 2)]


def transposed(x, keep):
    h = keep((x * 2).t())
    a = x.t() * 3
    b = keep(a * h)
    return (b * a) * b


def in_part(x, keep):
    h = x.square() * 2
    keep(h[1:3])
    return (h * x) * h


@pytest.mark.parametrize("program", [transposed, in_part])
def test_keep_under_hooks_that_change_the_layout(program):
    """NumPy arrays in C order, say."""
    x = torch.arange(24.0).view(4, 6).requires_grad_()
    (want,) = torch.autograd.grad(program(x, lambda t: t).sum(), x)
    with saved_tensors_hooks(
        lambda t: t.detach().numpy().copy(order="C"), lambda a: torch.from_numpy(a.copy())
    ):
        y = scope(program)(x, keep)
    assert bits(torch.autograd.grad(y.sum(), x)[0]) == bits(want)


def test_a_parameter_needs_no_pin():
    """It is handed back as it is, whatever else is kept."""
    x, w = leaf(3), torch.nn.Parameter(torch.full((), 3.0))

    def fn(x, keep=keep):
        v = keep(w)
        y = keep((x * v).square())
        return (y * v).square()

    want = torch.autograd.grad(fn(x, lambda t: t).sum(), (x, w))
    assert [*map(bits, torch.autograd.grad(checkpointed(fn)(x).sum(), (x, w)))] == [
        *map(bits, want)
    ]
