"""State that recompute must see though no argument shows it, and calls that it must not repeat: random numbers of
Python and NumPy, `register_state`, `forward_only`, `is_recomputing`."""

import contextvars
import copy
import inspect
import random
import types

import numpy as np
import pytest
import torch
from oracle import apply, bits, in_thread
from oracle import c as rerun
from oracle import r as replay
from oracle import s as scope

from checkpointing import (
    CheckpointError,
    MismatchError,
    checkpointed,
    disabled,
    forward_only,
    is_recomputing,
    keep,
    register_state,
)


def leaf():
    """The same leaf each time."""
    return torch.tensor([0.5, -1.0, 1.5, 2.0], requires_grad=True)


def plain(fn, **options):
    """No region."""
    return fn


DOORS = {
    "rerun": rerun,
    "replay": replay,
    "scope": scope,
    "rerun in rerun": lambda fn, **options: rerun(rerun(fn, **options), **options),
    "scope in rerun": lambda fn, **options: rerun(scope(fn, **options), **options),
    "rerun in scope": lambda fn, **options: scope(rerun(fn, **options), **options),
}
DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))


# ---- preserve_rng_state="all"


def draws(x):
    """Numbers from three streams, after which two of them have moved."""
    scale = random.random() + float(np.random.rand()) + torch.rand(())
    return (x * scale).square().square() * random.gauss(0, 1)


def streams():
    """Where the global streams are."""
    return random.getstate(), repr(np.random.get_state(legacy=False)), bits(torch.get_rng_state())


def seed():
    """All of them."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


@DOOR
def test_all_preserves_the_random_numbers_of_python_and_numpy(door):
    """Gradients as plain, and so are the three streams afterwards; True preserves torch's only."""

    def step(door, **options):
        seed()
        x = leaf()
        y = door(draws, **options)(x)
        random.random(), np.random.rand()
        y.sum().backward()
        return bits(x.grad), streams()

    assert step(door, preserve_rng_state="all") == step(plain)
    if door in (rerun, DOORS["rerun in rerun"]):
        assert step(door) != step(plain)


def test_all_restores_the_streams_after_an_error():
    """The recompute fails after it has drawn; NumPy's global generator may be another one."""

    def fn(x):
        y = draws(x)
        if is_recomputing():
            raise ValueError("the second time")
        return y.square()

    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        y = checkpointed(fn, preserve_rng_state="all")(leaf())
        state = streams()
        with pytest.raises(ValueError, match="the second time"):
            y.sum().backward()
        assert streams() == state
    finally:
        np.random.set_bit_generator(before)


# ---- register_state


class Tracker:
    """A named generator, as model-parallel libraries have one."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(7)

    def snapshot(self):
        return self.generator.get_state()

    def restore(self, state):
        self.generator.set_state(state)

    def __call__(self, x):
        return x * torch.randint(1, 5, (4,), generator=self.generator)


class Scale:
    """FP8-like: each forward looks at the largest value so far, and then at its input."""

    def __init__(self):
        self.amax = 1.0

    def snapshot(self):
        return self.amax

    def restore(self, amax):
        self.amax = amax

    def __call__(self, x):
        y = x * self.amax
        self.amax += 1
        return y


@pytest.mark.parametrize("kind", [Tracker, Scale])
@DOOR
def test_registered_state_is_the_forwards_in_recompute_and_the_present_one_afterwards(kind, door):
    """Gradients and the state afterwards are plain's, with other forwards in between and two backwards."""

    def step(door):
        hidden = types.SimpleNamespace(it=kind())
        with register_state(hidden.it.snapshot, hidden.it.restore):
            fn, x = (lambda x: hidden.it(hidden.it(x).square()).square()), leaf()
            first, second = door(fn)(x), door(fn)(x * 2)
            gradients = [
                *torch.autograd.grad(second.sum(), x, retain_graph=True),
                *torch.autograd.grad(first.sum(), x, retain_graph=True),
                *torch.autograd.grad(first.sum() + second.sum(), x),
            ]
        return [bits(t) for t in gradients], repr(hidden.it.snapshot())

    assert step(door) == step(plain)


def counters():
    """A state that notes how often it is asked for and put back, and in which grad mode."""
    calls = []

    def snapshot():
        assert not torch.is_grad_enabled()
        calls.append(("snapshot", is_recomputing()))
        return len(calls)

    def restore(state):
        assert not torch.is_grad_enabled()
        calls.append(("restore", state))

    return calls, snapshot, restore


def test_when_states_are_asked_for_and_put_back():
    """At forward; at recompute, after which the state of now is put back; the last first, if there are several."""
    calls, snapshot, restore = counters()
    order = []
    with register_state(lambda: "a", order.append), register_state(lambda: "b", order.append):
        with register_state(snapshot, restore):
            y = checkpointed(lambda x: x.sin().exp())(leaf())
            assert calls == [("snapshot", False)]
            y.sum().backward()
        assert calls == [("snapshot", False), ("snapshot", True), ("restore", 1), ("restore", 2)]
    assert order == ["a", "b", "b", "a"]


def test_after_remove_no_snapshots_are_taken():
    """Regions that have one restore it still, else their recompute would be wrong; removing twice is no error."""
    calls, snapshot, restore = counters()
    handle = register_state(snapshot, restore)
    before = checkpointed(lambda x: x.sin().exp())(leaf())
    handle.remove()
    handle.remove()
    checkpointed(lambda x: x.sin().exp())(leaf()).sum().backward()
    assert len(calls) == 1
    before.sum().backward()
    assert [what for what, _ in calls] == ["snapshot", "snapshot", "restore", "restore"]


@pytest.mark.parametrize("who", ["function", "restore of one", "snapshot of one"])
def test_states_are_put_back_after_an_error(who):
    """Wherever in the recompute it is."""
    value, fail = {"good": 0}, []

    def fail_if(name):
        if fail and who == name:
            fail.clear()
            raise ValueError(who)

    def fn(x):
        y = x.sin().exp()
        fail_if("function")
        return y.cos()

    one = register_state(lambda: fail_if("snapshot of one"), lambda _: fail_if("restore of one"))
    with register_state(value.copy, value.update), one:
        y = checkpointed(fn)(leaf())
        value["good"] = 1
        fail.append(1)
        with pytest.raises(ValueError, match=who):
            y.sum().backward()
        assert value["good"] == 1
        y.sum().backward()
        assert value["good"] == 1


def test_replay_and_plain_calls_ask_for_no_state():
    """A tape has what Python read; grad mode off is a plain call."""
    calls, snapshot, restore = counters()
    with register_state(snapshot, restore):
        replay(lambda x: x.sin().exp())(leaf()).sum().backward()
        scope(lambda x: x.sin().exp())(leaf()).sum().backward()
        with torch.no_grad():
            checkpointed(lambda x: x.sin().exp())(leaf())
    assert calls == []


def test_states_are_registered_for_all_threads():
    """Not for the one that registers them only."""
    calls, snapshot, restore = counters()
    with register_state(snapshot, restore):
        in_thread(lambda: checkpointed(lambda x: x.sin())(leaf()))
    in_thread(lambda: checkpointed(lambda x: x.sin())(leaf()))
    assert calls == [("snapshot", False)]


# ---- forward_only


@DOOR
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_forward_only_function_runs_once_and_its_results_come_back_in_order(door, early_stop):
    """Also where the results decide; with `keep`, which has an order of its own; with two backwards."""

    def step(door, **options):
        numbers = iter([2.0, 3.0, 5.0])
        number = forward_only(lambda: next(numbers))
        x = leaf()
        y = door(lambda x: keep((x * number()).square()).square() * keep(x * number()), **options)(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        return bits(x.grad), next(numbers)

    assert step(door, early_stop=early_stop) == step(plain)


@DOOR
@pytest.mark.parametrize("pass_it", [lambda f, x: f(x), lambda f, x: f(x=x)], ids=["positional", "keyword"])
def test_an_argument_passed_through_is_the_recomputes_own(door, pass_it):
    """A probe in the middle of an expression; its gradients flow, in a backward inside the region, too."""
    norms = []

    @forward_only
    def probe(x):
        norms.append(x.sum().item())
        return x

    def fn(x):
        y = pass_it(probe, x.square()).square()
        (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return pass_it(probe, inner * y).square()

    def step(door):
        x = leaf()
        return bits(torch.autograd.grad(door(fn)(x).sum(), x)[0])

    assert step(door) == step(plain)
    assert len(norms) == 4


@DOOR
def test_tensors_that_a_forward_only_function_makes_are_held(door):
    """With and without a gradient of their own, in containers, and beside arguments."""

    @forward_only
    def statistics(x):
        return {"sum": x.sum(), "parts": [x.detach() * 2, torch.randint(5, (4,))], "count": len(x), "it": x}

    def fn(x):
        s = statistics(x.square())
        noise = s["parts"][1] + 1
        return (s["it"] * s["sum"].detach() + s["parts"][0] * noise * s["count"]).square()

    def step(door):
        torch.manual_seed(0)
        x = leaf()
        door(fn)(x).sum().backward()
        return bits(x.grad), bits(torch.get_rng_state())

    assert step(door) == step(plain)


def test_a_changed_result_is_an_error():
    """As for any tensor that a recompute starts from."""
    kept = []
    scale = forward_only(lambda: kept.append(torch.full((4,), 2.0)) or kept[0])
    y = checkpointed(lambda x: (x * scale()).sin().exp())(leaf())
    kept[0].add_(1)
    with pytest.raises(CheckpointError, match="forward_only"):
        y.sum().backward()


@pytest.mark.parametrize("why", ["not made", "raised"])
def test_a_call_of_which_the_forward_has_no_result_is_an_error(why):
    """It was not made, or raised what the region caught."""
    runs = []

    @forward_only
    def note(x):
        if why == "raised":
            raise KeyError("logger")
        return 1.0

    def fn(x):
        runs.append(1)
        for _ in range(len(runs)):
            try:
                x = x * note(x)
            except KeyError:
                x = x * 2
        return x.sin().exp()

    with pytest.raises(MismatchError, match=r"calls .*note, which is forward_only"):
        checkpointed(fn)(leaf()).sum().backward()


@pytest.mark.parametrize("where", ["outside", "grad off", "disabled"])
def test_outside_of_a_region_it_is_the_function(where):
    """Every call is a call."""
    seen = []
    note = forward_only(lambda x: seen.append(x))
    region = checkpointed(lambda x: note(1) or x.sin())
    if where == "outside":
        note(1)
    else:
        with disabled() if where == "disabled" else torch.no_grad():
            region(leaf())
    assert seen == [1]


class Model:
    """Every kind of method."""

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
        for method in (model.method, model.static, model.static_inside, model.of_class, model.of_class_inside):
            results.append(method(x))
        return x.sin().exp()

    checkpointed(fn)(leaf()).sum().backward()
    assert results == ["method", "static", "static inside", "Model", "Model"] * 2
    assert model.seen == [1]
    assert copy.deepcopy(model).method(None, times=3) == "method"

    def generator():
        yield

    async def coroutine():
        pass

    for wrong in (generator, coroutine, Model, 3):
        with pytest.raises(TypeError, match="forward_only"):
            forward_only(wrong)


@pytest.mark.parametrize("word", ["cs", "ccs", "scs", "cr", "csc"])
@pytest.mark.parametrize("way", ["first to read", "result", "result of a view", "kept"])
def test_a_forward_only_function_in_a_scope_in_a_rerun_leaves_no_trace_there(word, way):
    """The rerun records the scope anew, without the operators of the function: its slots are the same all the same."""
    seen = []

    @forward_only
    def note(x):
        seen.append(x.detach().sum().item())
        return x.detach().sum()

    def function(a, b):
        if way == "first to read":
            note(b)
            return (a.square() * b).square()
        if way == "kept":
            y = keep(a.square() * note(b))
            note(y)
            return (y * b).square() * a
        return (a.square() * note(b if way == "result" else b[1:]) * b).square()

    def gradients(function):
        a, b = leaf(), leaf()
        return torch.autograd.grad(function(a * 1, b * 2).sum(), (a, b))

    want = gradients(function)
    runs = len(seen)
    assert all(map(torch.equal, gradients(apply(word, function)), want))
    assert len(seen) == 2 * runs


# ---- is_recomputing


@DOOR
@pytest.mark.parametrize("where", ["check", "snapshot", "hook"])
def test_is_recomputing_is_false_in_what_the_forward_calls(door, where):
    """Checks, snapshots and saved-tensors hooks of the user run in the forward, too."""
    seen = []

    def note(value=None):
        seen.append(is_recomputing())
        return value

    options = {"determinism_check": lambda t: note() or t.shape} if where == "check" else {}
    state = register_state(note, note)
    if where != "snapshot":
        state.remove()
    hooks = (note, note) if where == "hook" else (lambda t: t, lambda t: t)
    with state, torch.autograd.graph.saved_tensors_hooks(*hooks):
        y = door(lambda x: x.sin().exp().sin(), **options)(leaf() * 2)
        assert not any(seen)
        seen.clear()
    y.sum().backward()
    assert where != "check" or all(seen)


def test_a_list_passed_through_a_forward_only_function_is_the_recomputes_own():
    """Not a copy: the function goes on writing it."""
    hand_on = forward_only(lambda values: values)

    def fn(x):
        values = [x.sin()]
        hand_on(values).append(values[0] * 2)
        return (values[-1] * values[0]).exp()

    x = leaf()
    want = bits(torch.autograd.grad(fn(x).sum(), x)[0])
    assert bits(torch.autograd.grad(checkpointed(fn)(x).sum(), x)[0]) == want


class Box:
    def __init__(self, value):
        self.value = value


def test_a_registered_state_may_be_kept_in_a_context_variable():
    """It is restored in the context that the function is called in."""
    variable = contextvars.ContextVar("scale")
    variable.set(Box(2.0))
    x = leaf()
    (want,) = torch.autograd.grad((x * 2).exp().sin().sum(), x)
    with register_state(lambda: variable.get().value, lambda value: variable.set(Box(value))):
        y = checkpointed(lambda x: (x * variable.get().value).exp().sin())(x)
        variable.get().value = 3.0
        assert bits(torch.autograd.grad(y.sum(), x)[0]) == bits(want)
        assert variable.get().value == 3.0


@pytest.mark.parametrize("early_stop", [True, False])
def test_leaves_and_written_tensors_that_a_forward_only_function_returns(early_stop):
    """A leaf gets its gradient."""
    weight = torch.nn.Parameter(torch.full((3,), 2.0))
    pick, make = forward_only(lambda: weight), forward_only(lambda: torch.ones(3).add_(1))

    def fn(x):
        return (x * pick()).square() * make()

    x = torch.ones(3, requires_grad=True)
    want = torch.autograd.grad(fn(x).sum(), (x, weight))
    have = torch.autograd.grad(checkpointed(fn, early_stop=early_stop)(x).sum(), (x, weight))
    assert [*map(bits, have)] == [*map(bits, want)]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("what", ["keep", "forward_only"])
def test_a_backward_inside_reruns_ahead_of_the_forward(what, early_stop):
    """What has not been kept or called yet is made anew."""
    count = forward_only(lambda: None)

    def fn(x, keep):
        y = (keep(x * 1.5) if what == "keep" else x * 1.5).exp().sin()
        (g,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        count()
        z = keep((g * y).exp()) if what == "keep" else (g * y).exp()
        return (z * y).sin()

    x = leaf()
    (want,) = torch.autograd.grad(fn(x, lambda t: t).sum(), x)
    (have,) = torch.autograd.grad(checkpointed(fn, early_stop=early_stop)(x, keep).sum(), x)
    assert bits(have) == bits(want)


def test_a_view_from_a_forward_only_function_in_a_scope_in_a_rerun():
    """The scope finds a tensor of its own, in the forward and in the rerun."""
    turned = forward_only(lambda t: t.detach().t())

    def fn(x):
        return (x * turned(x.detach().sin())).sin()

    x = leaf().detach().expand(3, -1)[:, :3].clone().requires_grad_()
    (want,) = torch.autograd.grad(fn(x).sum(), x)
    for door in (checkpointed, lambda fn: checkpointed(scope(fn))):
        assert bits(torch.autograd.grad(door(fn)(x).sum(), x)[0]) == bits(want)
