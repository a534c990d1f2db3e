"""Functions that only the forward calls: a rerun takes their results over, in order."""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools

import pytest
import torch
from oracle import DOORS, EACH_DOOR, WAYS, WORDS, Programs, apply, bits, integers as leaf
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import checkpointing
from checkpointing import ChangedError, checkpointed, forward_only, is_recomputing, keep

program = Programs()


@program(*WAYS)
def a_forward_only_function_runs_once_and_its_results_come_back_in_order(door):
    """Also where the results decide; with `keep`, which has an order of its own."""
    numbers, x = iter([2.0, 3.0, 5.0]), leaf()
    number = forward_only(lambda: next(numbers))
    y = door(lambda x: keep((x * number()).square()).square() * keep(x * number()))(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad, next(numbers)


@program(*WAYS)
def a_recompute_may_call_one_that_the_forward_has_not_called(door):
    """Behind a cache that has been cleared since."""
    build, cache, x = forward_only(lambda: 2.0), [2.0], leaf()
    y = door(lambda x: (x * (cache or [build()])[0]).square().square())(x)
    cache.clear()
    return y, *torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("early_stop", [True, False])
def test_it_is_not_called_by_the_recompute_for_a_backward_before_it(early_stop):
    calls, x = [], leaf()

    def fn(x):
        y = x.sin() * x
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        forward_only(calls.append)(1)
        return (y * g).exp()

    checkpointed(fn, early_stop=early_stop)(x).sum().backward()
    assert calls == [1]


@pytest.mark.parametrize("inner", ["rerun", "replay"])
def test_what_a_region_in_it_reads_is_guarded(inner):
    x = leaf()

    def fn(x):
        h = x * 1
        y = forward_only(WAYS[inner](lambda h: (h * 3).sin()))(h)
        with torch.no_grad():
            h += 1
        return y * 1

    y = checkpointed(fn)(x)
    with pytest.raises(ChangedError):
        y.sum().backward()


@dataclasses.dataclass(eq=False)
class Config:
    """Without tensors, and told apart by identity."""

    width: int


class HandedOver:
    @program(*WAYS)
    def objects_with_fields_that_are_keys_of_a_dict(door):
        """As arguments, and among the results of `forward_only`."""
        configs = [Config(2), Config(3)]
        table = dict(zip(configs, (2.0, 3.0), strict=True))
        pick = forward_only(lambda: configs[1])
        x = leaf()
        y = door(lambda x, given: (x * table[given[0]]).sin().exp() * table[pick()])(x, configs)
        return torch.autograd.grad(y.sum(), x)

    @program(*DOORS)
    def arguments_passed_through_a_forward_only_function_are_the_recomputes_own(door):
        """A probe in the middle of an expression; a list that the function goes on writing."""
        norms, hand_on = [], forward_only(lambda values: values)

        @forward_only
        def probe(x):
            norms.append(x.sum().item())
            return x

        def fn(x):
            y = probe(x.square()).square()
            (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return probe(x=inner * y).square()

        def writes(x):
            values = [x.sin()]
            hand_on(values).append(values[0] * 2)
            return (values[-1] * values[0]).exp()

        x = leaf().detach().clone().requires_grad_()  # no view
        (door(fn)(x).sum() + door(writes)(x).sum()).backward()
        return x.grad, len(norms)

    @program(*WAYS)
    def forward_only_functions_that_return_parts_of_views(door):
        """An offset counts from that of the argument."""
        part, detached = forward_only(lambda t: t[1:3]), forward_only(lambda t: t.detach()[1:3])
        x, inside = leaf(), lambda y: (part(y[1:]) * part(y) * detached(y[1:])).sin().exp()
        return torch.autograd.grad(door(lambda x: inside(x.exp()))(x).sum(), x)

    @program(*WAYS)
    def tensors_that_a_forward_only_function_makes_are_held(door):
        """With and without a gradient of their own, in containers, beside arguments, written."""
        weight = nn.Parameter(torch.full((4,), 2.0))

        @forward_only
        def statistics(x):
            parts = [x.detach().clone().mul_(2), torch.randint(5, (4,))]
            return {"sum": x.sum(), "parts": parts, "count": len(x), "it": x, "leaf": weight}

        def fn(x):
            s = statistics(x.square())
            noise = s["parts"][1] + 1
            y = (s["it"] * s["sum"].detach() + s["parts"][0] * noise * s["count"]).square()
            return (y * s["leaf"] * s["parts"][0]).square()

        x = leaf()
        return torch.autograd.grad(door(fn)(x).sum(), [x, weight])


class Normaliser(nn.Module):
    """Updates buffers, and writes tensors that it is given, where only the forward does. What it
    keeps, and other such functions that it calls, are its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("scale", None)
        self.calls, self.notes = 0, torch.zeros(2, 4)

    @forward_only
    def number(self):
        self.calls += 1
        self.count.data.add_(self.calls)
        return keep(torch.rand(4)) + self.calls

    @forward_only
    def update(self, x, total, parts):
        self.mean += x.detach().sum(0)
        self.scale = self.number() if self.scale is None else self.scale * 0.5
        total += self.mean
        self.norm(x)
        parts["a"].mul_(2)
        return parts["b"][0].add_(self.calls)

    def forward(self, x):
        parts = {"a": x.detach() * 3, "b": [torch.rand(2, 4)]}
        before = x - self.mean
        b = self.update(before, self.notes[0], parts)
        after = keep((before - self.mean).square()) * self.scale + parts["a"] + b
        self.update(after, self.notes[1], parts)
        noise = self.number() * parts["a"] * parts["b"][0] * self.count
        return self.norm(before) * (after - self.mean) * noise, self.mean.exp()


@program(*WAYS)
def it_may_take_a_sparse_tensor(door):
    """It has no strides that would tell whether a result is a part of it."""
    rows, x = torch.eye(4).to_sparse(), leaf()
    degrees = forward_only(lambda rows: torch.sparse.sum(rows, 0).to_dense())
    y = door(lambda x: (x * degrees(rows)).exp())(x)
    return torch.autograd.grad(y.sum(), x)


class Noted(nn.Module):
    """Its buffers are set, registered and forgotten by a function that only the forward calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.ones(4))

    @forward_only
    def note(self, x):
        self.last = x.detach() * 2 if self.last is None else None
        self.register_buffer("newest", x.detach() * 3)
        return [x.detach().square(), Config(3), None]

    def forward(self, x):
        square, config, _ = self.note(x)
        return (x * square * config.width + self.newest).exp()


@program(*WAYS)
def buffers_that_it_sets_registers_and_forgets(door):
    module, x = Noted(), leaf()
    for _ in range(3):
        y = door(module)(x)
        yield torch.autograd.grad(y.sum(), x)
        yield [*module.named_buffers()]


def test_a_changed_result_is_an_error():
    kept = []
    scale = forward_only(lambda: kept.append(torch.full((4,), 2.0)) or kept[0])
    y = checkpointed(lambda x: (x * scale()).sin().exp())(leaf())
    kept[0].add_(1)
    with pytest.raises(checkpointing.CheckpointError, match="forward_only"):
        y.sum().backward()


@pytest.mark.parametrize("why", ["not made", "raised"])
def test_a_call_of_which_the_forward_has_no_result_is_an_error(why):
    runs = []

    @forward_only
    def note():
        if why == "raised":
            raise KeyError

    def fn(x):
        runs.append(1)
        for _ in runs:
            with contextlib.suppress(KeyError):
                note()
            x = x * 2
        return x.sin().exp()

    with pytest.raises(checkpointing.MismatchError, match=r"calls .*note, which is forward_only"):
        checkpointed(fn)(leaf()).sum().backward()


def test_a_result_of_one_function_is_not_that_of_another():
    """Where the recompute skips a call, which `is_recomputing()` makes easy."""
    scale = forward_only(lambda x: x.amax())

    class Scale:
        def __call__(self, x):
            return x.amax()

    for other in (forward_only(torch.sum), forward_only(Scale())):

        @checkpointed
        def fn(x):
            if not is_recomputing():
                other(x)  # noqa: B023
            return (x * scale(x)).exp()

        y = fn(torch.ones(3, requires_grad=True))
        with pytest.raises(checkpointing.MismatchError, match="at this place"):
            y.sum().backward()


@pytest.mark.parametrize("around", [torch.no_grad, checkpointing.disabled])
def test_outside_of_a_region_it_is_the_function(around):
    seen = []
    note = forward_only(seen.append)
    note(1)
    with around():
        checkpointed(lambda x: note(2) or x.sin())(leaf())
    assert seen == [1, 2]


class Model:
    def __init__(self):
        self.seen = []

    @forward_only
    def method(self, x, /, *, times: int = 1) -> str:
        """Notes."""
        self.seen.append(times)
        return "method"

    static = staticmethod(forward_only(lambda x: "static"))
    static_inside = forward_only(staticmethod(lambda x: "static inside"))
    of_class = classmethod(forward_only(lambda cls, x: cls.__name__))
    of_class_inside = forward_only(classmethod(lambda cls, x: cls.__name__))


def test_methods_and_signatures():
    """It looks and binds like what it wraps; what can't be wrapped is refused."""
    model, results = Model(), []
    assert (Model.method.__doc__, Model.method.__name__) == ("Notes.", "method")
    assert list(inspect.signature(Model.method).parameters) == ["self", "x", "times"]

    def fn(x):
        names = ("method", "static", "static_inside", "of_class", "of_class_inside")
        results.extend(getattr(model, name)(x) for name in names)
        return x.sin().exp()

    checkpointed(fn)(leaf()).sum().backward()
    assert results == ["method", "static", "static inside", "Model", "Model"] * 2
    assert model.seen == [1]
    assert copy.deepcopy(model).method(None, times=3) == "method"

    for wrong in (lambda: (yield), asyncio.sleep, Model, 3):
        with pytest.raises(TypeError, match="forward_only"):
            forward_only(wrong)


class Statistics(nn.Module):
    """Notes what it sees, in a buffer, in a list, and in what it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("sum", torch.zeros(2, 4))
        self.weight, self.notes = nn.Parameter(torch.arange(4.0)), []

    @forward_only
    def note(self, history, x, into):
        self.count.add_(1)
        self.sum = self.sum * 0.5 + x
        history.append(x.detach() + self.count)
        into[0].add_(x[1])
        into[1].mul_(self.count)
        return x

    def forward(self, x):
        y = x * self.weight * self.count.clone()
        first = torch.zeros(4)
        parts = torch.empty(2, 4)
        parts[0], parts[1] = y.detach()[0], 2
        noted = self.note(self.notes, y, [first, parts])
        return (noted.sin() + self.sum) * (parts * 1), self.sum.exp() * self.count.clone()


KINDS = [Normaliser, Statistics]
NESTS = [*itertools.product(WORDS, KINDS)]
NESTS += zip(["css", "ccs", "scs", "sscs", "acs", "rc", "csc"], itertools.cycle(KINDS))


@functools.cache
def in_a_nest(word, kind):
    """What three steps leave behind: of the last two the operators are the same."""
    m, x = kind(), torch.arange(8.0).view(2, 4).requires_grad_()

    def fn(x):
        m.sum = torch.zeros(2, 4)
        for _ in range(2):
            x, _unused = apply(word[1:], m)(x)
        return x * m.count.clone()

    seen = []
    for n in range(3):
        torch.manual_seed(n)
        y = apply(word[:1], fn)(x)
        grads = torch.autograd.grad(y.sin().sum(), [x, *m.parameters()])
        seen += bits([y, *grads, *m.buffers(), *m.notes, torch.rand(2)])
    return seen


@pytest.mark.parametrize(("word", "kind"), NESTS)
def test_a_forward_only_function_in_any_nest(word, kind):
    """Which writes, with a graph, too, what the blocks in and around the rerun have made; its
    buffers are as it has left them."""
    assert in_a_nest(word, kind) == in_a_nest("", kind)


NOTED = {  # what is noted in a square
    "first to read": lambda a, b, note: (note(b), a.square() * b)[1],
    "result": lambda a, b, note: a.square() * note(b) * b,
    "result of a view": lambda a, b, note: a.square() * note(b[1:]) * b,
    "kept": lambda a, b, note: (y := keep(a.square() * note(b)), note(y), y * b * a)[2],
}


@pytest.mark.parametrize("word", ["cs", "ccs", "scs", "cr", "csc"])
@pytest.mark.parametrize("way", NOTED)
def test_a_forward_only_function_in_a_scope_in_a_rerun_leaves_no_trace_there(word, way):
    """The rerun records the scope anew, without the operators of the function."""
    seen = []

    @forward_only
    def note(x):
        seen.append(x.detach().sum().item())
        return x.detach().sum()

    def gradients(word):
        a, b = leaf(), leaf()
        y = apply(word, lambda a, b: NOTED[way](a, b, note).square())(a * 1, b * 2)
        return torch.autograd.grad(y.sum(), (a, b))

    want = gradients("")
    runs = len(seen)
    assert all(map(torch.equal, gradients(word), want))
    assert len(seen) == 2 * runs


@EACH_DOOR
@pytest.mark.parametrize("where", ["check", "snapshot", "hook"])
def test_is_recomputing_is_false_in_what_the_forward_calls(door, where):
    seen = []

    def note(value=None):
        seen.append(checkpointing.is_recomputing())
        return value

    options = {"determinism_check": lambda t: note() or t.shape} if where == "check" else {}
    around = {
        "check": contextlib.nullcontext,
        "snapshot": lambda: checkpointing.register_state(note, note),
        "hook": lambda: saved_tensors_hooks(note, note),
    }[where]
    with around():
        y = door(lambda x: x.sin().exp().sin(), **options)(leaf() * 2)
        assert not any(seen)
        seen.clear()
    y.sum().backward()
    assert where != "check" or all(seen)


@program("rerun", "rerun to the end")
def a_backward_inside_reruns_ahead_of_the_forward(door):
    """What has not been kept or called yet is made anew."""
    twice = forward_only(lambda y: y * 2)

    def fn(x):
        y = keep(x * 1.5).exp().sin()
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return (keep((g * twice(y)).exp()) * y).sin()

    x = leaf()
    return torch.autograd.grad(door(fn)(x).sum(), x)


test_programs_are_plains = program.test()
