"""A kept value is where recompute starts from: held in a scope, pinned under rerun."""

import collections
import dataclasses
import types

import pytest
import torch
from oracle import bits, leaf, replay, rerun, scope

from checkpointing import auto, checkpoint_scope, checkpointed, disabled, keep, save_tagged, tag


@dataclasses.dataclass
class Pair:
    a: object
    b: object


Named = collections.namedtuple("Named", "a b")


STRUCTURES = {  # of a tensor, and where it is in there
    "list": (lambda t: [t, 3], lambda s: s[0]),
    "nested": (lambda t: {"a": [None, {"b": (t, "text")}]}, lambda s: s["a"][1]["b"][0]),
    "named tuple": (lambda t: Named(t, 1), lambda s: s.a),
    "dataclass": (lambda t: Pair(None, [t]), lambda s: s.b[0]),
}
STRUCTURE = pytest.mark.parametrize(("wrap", "unwrap"), STRUCTURES.values(), ids=STRUCTURES)
OTHERS = [lambda t: t, lambda t: types.SimpleNamespace(t=t), lambda t: "text"]


@pytest.mark.parametrize("build", [*OTHERS, *(wrap for wrap, _ in STRUCTURES.values())])
def test_keep_returns_its_argument(build):
    """The very same object, in the forward of every door and outside of all."""
    h = leaf(3).sin()
    value = build(h)
    for door in (
        lambda fn: fn,
        scope,
        rerun,
        replay,
        lambda fn: torch.no_grad()(checkpointed(fn)),
        lambda fn: disabled()(scope(fn)),
    ):
        assert door(lambda: keep(value))() is value
    h.exp().sum().backward()
    assert h._version == 0


@pytest.mark.parametrize("mark", [keep, lambda value: tag(value, "both")], ids=["keep", "tag"])
@STRUCTURE
def test_every_tensor_in_a_structure_is_kept(mark, wrap, unwrap):
    """By hand, and by a policy that names its tag."""
    x = leaf(10)
    with checkpoint_scope(policy=save_tagged("both")) as entered:
        a, b = x.sin(), x.cos()
        value = wrap(a), wrap(b)
        assert mark(value) is value
        y = a.exp().sin() * b.exp().sin()
    assert entered.stats.bytes_kept == 80
    y.sum().backward()
    assert entered.stats.ops_replayed == 4  # the exponentials and their sines
    want = (x.sin().exp().sin() * x.cos().exp().sin()).sum()
    assert bits(x.grad) == bits(torch.autograd.grad(want, x)[0])


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


def test_kept_values_take_from_the_budget_of_a_plan_that_was_made_for_smaller_ones():
    for size in (100, 100, 120):
        with checkpoint_scope(policy=auto(budget=1600)) as entered:
            y = keep(leaf(size).sin())
            for _ in range(12):
                y = y.sin()
    assert entered.stats.bytes_kept <= 1600
    del y


@pytest.mark.parametrize("door", [replay, scope])
def test_a_kept_value_changed_after_the_block(door):
    """Changed in place outside, before backward: an error, as autograd says for plain code."""
    x = leaf(3)
    y, kept = door(lambda x: ((kept := keep(x.sin().cos())).exp().sin(), kept))(x)
    with torch.no_grad():
        kept.add_(1)
    with pytest.raises(RuntimeError, match=r"a kept tensor .*changed in place"):
        y.sum().backward()


@STRUCTURE
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


def test_a_parameter_needs_no_pin():
    """It is handed back as it is, whatever else is kept."""
    x, w = leaf(3), torch.nn.Parameter(torch.full((), 3.0))

    def fn(x, keep=keep):
        v = keep(w)
        y = keep((x * v).square())
        return (y * v).square()

    want = torch.autograd.grad(fn(x, lambda t: t).sum(), (x, w))
    assert bits(torch.autograd.grad(checkpointed(fn)(x).sum(), (x, w))) == bits(want)
