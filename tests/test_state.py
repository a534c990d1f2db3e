"""State that recompute must see though no argument shows it, and calls that it must not repeat: random numbers of
Python and NumPy, `register_state`, `forward_only`."""

import copy
import inspect
import random
import threading
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
    checkpoint_scope,
    checkpointed,
    forward_only,
    is_recomputing,
    keep,
    register_state,
)


def leaf():
    """The same leaf each time."""
    return torch.linspace(0.1, 1, 4).requires_grad_()


def plain(fn):
    """No region."""
    return fn


DOORS = {
    "rerun": rerun,
    "replay": replay,
    "scope": scope,
    "rerun in rerun": lambda fn, **options: rerun(rerun(fn, **options), **options),
    "scope in rerun": lambda fn, **options: rerun(scope(fn, **options), **options),
    "rerun in scope": lambda fn, **options: scope(rerun(fn, **options), **options),
    "scope in scope in rerun": lambda fn, **options: rerun(scope(scope(fn, **options), **options), **options),
}
DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))
RERUNS = pytest.mark.parametrize("door", [rerun, DOORS["rerun in rerun"]], ids=["rerun", "rerun in rerun"])


# ---- preserve_rng_state="all"


def draws(x):
    """Numbers from three streams, after which two of them have moved."""
    scale = random.random() + float(np.random.rand()) + torch.rand(())
    return (x * scale).sin().exp() * random.gauss(0, 1)


def streams():
    """Where the global streams are."""
    return random.getstate(), repr(np.random.get_state()), bits(torch.get_rng_state())


def seed():
    """All of them."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


@DOOR
def test_all_preserves_the_random_numbers_of_python_and_numpy(door):
    """Gradients as plain, and so are the three streams afterwards."""

    def step(door, **options):
        seed()
        x = leaf()
        y = door(draws, **options)(x)
        random.random(), np.random.rand()
        y.sum().backward()
        return bits(x.grad), streams()

    assert step(door, preserve_rng_state="all") == step(plain)


@RERUNS
def test_true_preserves_those_of_torch_only(door):
    """Which is what the documentation says; it is cheaper."""

    def step(door):
        seed()
        x = leaf()
        y = door(draws)(x)
        y.sum().backward()
        return bits(x.grad)

    assert step(door) != step(plain)


def test_all_restores_the_streams_after_an_error():
    """The recompute fails after it has drawn."""
    runs = []

    def fn(x):
        y = draws(x)
        runs.append(1)
        if len(runs) > 1:
            raise ValueError("the second time")
        return y.sin()

    y = checkpointed(fn, preserve_rng_state="all")(leaf())
    before = streams()
    with pytest.raises(ValueError, match="the second time"):
        y.sum().backward()
    assert streams() == before


def test_all_with_another_bit_generator_of_numpy():
    """NumPy lets its global generator be replaced."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:

        def step(door):
            np.random.get_bit_generator().state = np.random.PCG64(5).state
            x = leaf()
            y = door(lambda x: (x * np.random.rand()).sin().exp())(x)
            y.sum().backward()
            return bits(x.grad), np.random.rand()

        assert step(lambda fn: checkpointed(fn, preserve_rng_state="all")) == step(plain)
    finally:
        np.random.set_bit_generator(before)


def test_all_in_the_reentrant_backend():
    """Accepted by every backend."""
    with pytest.warns(FutureWarning) if not _reentrant_has_warned() else _nothing():
        region = checkpointed(draws, backend="reentrant", preserve_rng_state="all")

    def step(fn):
        seed()
        x = leaf()
        fn(x).sum().backward()
        return bits(x.grad), streams()

    assert step(region) == step(draws)


def _reentrant_has_warned():
    from checkpointing import _reentrant

    return bool(_reentrant._warned)


def _nothing():
    import contextlib

    return contextlib.nullcontext()


@pytest.mark.parametrize("door", [checkpointed, checkpoint_scope])
@pytest.mark.parametrize("value", ["python", "", None, 2])
def test_other_values_are_refused(door, value):
    """At decoration."""
    with pytest.raises(ValueError, match="preserve_rng_state is True, False or 'all'"):
        door(preserve_rng_state=value)(lambda x: x) if door is checkpointed else door(preserve_rng_state=value)


# ---- register_state


class Tracker:
    """A named generator, known to nobody, as model-parallel libraries have one."""

    def __init__(self):
        self.generators = {"model-parallel": torch.Generator().manual_seed(7)}

    def snapshot(self):
        return {name: g.get_state() for name, g in self.generators.items()}

    def restore(self, states):
        for name, state in states.items():
            self.generators[name].set_state(state)

    def draw(self):
        return torch.rand(4, generator=self.generators["model-parallel"])


class Scale:
    """FP8-like: each forward looks at the largest value so far, and then at its input."""

    def __init__(self):
        self.amax = torch.ones(())

    def snapshot(self):
        return self.amax.clone()

    def restore(self, amax):
        self.amax.copy_(amax)

    def __call__(self, x):
        y = x / self.amax.clone()
        self.amax.copy_(torch.maximum(self.amax, x.detach().abs().max()) * 1.5)
        return y


STATES = {
    "tracker": (Tracker, lambda tracker: lambda x: (x * tracker["it"].draw()).sin().exp() * tracker["it"].draw()),
    "scale": (Scale, lambda scale: lambda x: scale["it"](scale["it"](x).sin().exp()).exp()),
}


@pytest.mark.parametrize("state", STATES)
@DOOR
def test_registered_state_is_the_forwards_in_recompute_and_the_present_one_afterwards(state, door):
    """Gradients and the state afterwards are plain's, with other forwards in between and two backwards."""
    kind, build = STATES[state]

    def step(door):
        it = kind()
        # Two dicts deep, so that nothing finds the state by itself.
        fn = build(types.MappingProxyType({"it": it}))
        handle = register_state(it.snapshot, it.restore)
        try:
            x = leaf()
            first = door(fn)(x)
            second = door(fn)(x * 2)
            gradients = [
                *torch.autograd.grad(second.sum(), x, retain_graph=True),
                *torch.autograd.grad(first.sum(), x, retain_graph=True),
                *torch.autograd.grad(first.sum() + second.sum(), x),
            ]
        finally:
            handle.remove()
        return [bits(t) for t in gradients], repr(it.snapshot())

    if state == "scale" and door in (DOORS["scope in rerun"], DOORS["scope in scope in rerun"]):
        # A tape in a rerun refuses a tensor from outside that the block reads and then writes.
        with pytest.raises(CheckpointError):
            step(door)
    else:
        assert step(door) == step(plain)


def counters():
    """A state that counts how often it is asked for and put back."""
    calls = []

    def snapshot():
        calls.append(("snapshot", is_recomputing()))
        return len(calls)

    def restore(state):
        calls.append(("restore", state))

    return calls, snapshot, restore


def test_the_present_state_is_put_back_after_the_recompute():
    """One snapshot at forward; one at recompute, then the old is restored, and at the end the new."""
    calls, snapshot, restore = counters()
    with register_state(snapshot, restore):
        y = checkpointed(lambda x: x.sin().exp())(leaf())
        assert calls == [("snapshot", False)]
        y.sum().backward()
    assert calls == [("snapshot", False), ("snapshot", True), ("restore", 1), ("restore", 2)]


def test_after_remove_no_snapshots_are_taken():
    """Regions that have one restore it still, else their recompute would be wrong; removing twice is no error."""
    calls, snapshot, restore = counters()
    handle = register_state(snapshot, restore)
    before = checkpointed(lambda x: x.sin().exp())(leaf())
    handle.remove()
    handle.remove()
    after = checkpointed(lambda x: x.sin().exp())(leaf())
    assert len(calls) == 1
    after.sum().backward()
    assert len(calls) == 1
    before.sum().backward()
    assert [what for what, _ in calls] == ["snapshot", "snapshot", "restore", "restore"]


def test_two_states_are_restored_last_first():
    """As contexts are left."""
    order = []

    def register(name):
        return register_state(lambda: name, lambda state: order.append(state))

    with register("a"), register("b"):
        checkpointed(lambda x: x.sin().exp())(leaf()).sum().backward()
    assert order == ["a", "b", "b", "a"]


@pytest.mark.parametrize("who", ["function", "restore of one", "snapshot of one"])
def test_states_are_put_back_after_an_error(who):
    """Wherever in the recompute it is."""
    value = {"good": 0}
    fail = []

    def fail_if(name):
        if fail and who == name:
            fail.clear()
            raise ValueError(who)

    def snapshot():
        fail_if("snapshot of one")
        return 0

    def fn(x):
        y = x.sin().exp()
        fail_if("function")
        return y.cos()

    with register_state(value.copy, value.update), register_state(snapshot, lambda _: fail_if("restore of one")):
        y = checkpointed(fn)(leaf())
        value["good"] = 1
        fail.append(1)
        with pytest.raises(ValueError, match=who):
            y.sum().backward()
        assert value["good"] == 1
        y.sum().backward()
        assert value["good"] == 1


def test_state_is_not_part_of_an_enclosing_tape_nor_of_a_graph():
    """Snapshots are taken with grad mode off; a state that requires grad is no saved tensor."""
    weight = torch.ones(3, requires_grad=True)
    seen = []

    def snapshot():
        seen.append(torch.is_grad_enabled())
        return (weight * 2).sin()

    with register_state(snapshot, lambda _: seen.append(torch.is_grad_enabled())):
        x = leaf()
        y = checkpointed(checkpointed(lambda x: x.sin().exp()))(x)
        y.sum().backward()
    assert not any(seen)
    assert bits(x.grad) == bits(torch.autograd.grad(x.sin().exp().sum(), x)[0])


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
    """Registered here, used there, removed elsewhere."""
    value = {"scale": 2.0}
    grads = []

    def run():
        x = leaf()
        y = checkpointed(lambda x: (x * vars(holder)["value"]["scale"]).sin().exp())(x)
        value["scale"] = 5.0
        y.sum().backward()
        grads.append(bits(x.grad))

    holder = types.SimpleNamespace(value=value)
    handle = register_state(value.copy, value.update)
    in_thread(run)
    in_thread(handle.remove)
    x = leaf()
    (x * 2.0).sin().exp().sum().backward()
    assert grads == [bits(x.grad)]
    assert value["scale"] == 5.0


def test_registering_from_many_threads_at_once():
    """None is lost, and none stays."""
    calls, snapshot, restore = counters()
    handles = []

    def register():
        handles.extend(register_state(snapshot, restore) for _ in range(50))

    threads = [threading.Thread(target=register) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    checkpointed(lambda x: x.sin())(leaf())
    assert len(calls) == 400
    threads = [threading.Thread(target=handle.remove) for handle in handles]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    checkpointed(lambda x: x.sin())(leaf())
    assert len(calls) == 400


@pytest.mark.parametrize("pair", [(None, print), (print, None), (1, 2)])
def test_what_cannot_be_called_is_refused(pair):
    """At once."""
    with pytest.raises(TypeError, match="register_state takes two functions"):
        register_state(*pair)


# ---- forward_only


@DOOR
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_forward_only_function_runs_once(door, early_stop):
    """Counters, metrics, logs: once for each forward, whatever is recomputed how often."""
    seen = []

    @forward_only
    def note(x):
        seen.append(x.mean().item())

    def fn(x):
        x = x.sin()
        note(x)
        x = x.exp()
        note(x)
        return x.cos()

    x = leaf()
    y = door(fn, early_stop=early_stop)(x).sum()
    assert len(seen) == 2
    y.backward(retain_graph=True)
    y.backward()
    assert len(seen) == 2
    fn(x)
    assert seen[:2] == seen[2:]


@DOOR
def test_the_recompute_gets_the_results_of_the_forward_in_order(door):
    """So that a function whose result is used does no harm: here it decides."""
    numbers = iter([2.0, 3.0, 5.0, 7.0])

    @forward_only
    def next_number():
        return next(numbers)

    x = leaf()
    y = door(lambda x: ((x * next_number()).sin() * next_number()).exp())(x)
    y.sum().backward()
    want = leaf()
    ((want * 2.0).sin() * 3.0).exp().sum().backward()
    assert bits(x.grad) == bits(want.grad)
    assert next(numbers) == 5.0


@DOOR
@pytest.mark.parametrize("pass_it", [lambda f, x: f(x), lambda f, x: f(x=x), lambda f, x: f(x)], ids=str)
def test_an_argument_passed_through_is_the_recomputes_own(door, pass_it):
    """A probe in the middle of an expression; its gradients flow, in a backward inside the region, too."""
    norms = []

    @forward_only
    def probe(x):
        norms.append(x.norm().item())
        return x

    def fn(x):
        y = pass_it(probe, x.sin()).exp()
        (inner,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return pass_it(probe, inner * y).cos()

    def step(door):
        x = leaf()
        (gradient,) = torch.autograd.grad(door(fn)(x).sum(), x)
        return bits(gradient)

    assert step(door) == step(plain)
    assert len(norms) == 4


@DOOR
def test_tensors_that_a_forward_only_function_makes_are_held(door):
    """With and without a gradient of their own, in containers, written to afterwards in the region."""

    @forward_only
    def statistics(x):
        return {"mean": x.mean(), "parts": [x.detach() * 2, torch.rand(4)], "count": len(x), "it": x}

    def fn(x):
        s = statistics(x.sin())
        noise = s["parts"][1] + 1
        return (s["it"] * s["mean"].detach() + s["parts"][0] * noise * s["count"]).exp().sin()

    def step(door):
        torch.manual_seed(0)
        x = leaf()
        door(fn)(x).sum().backward()
        return bits(x.grad), bits(torch.get_rng_state())

    assert step(door) == step(plain)


def test_a_result_is_held_without_its_graph(no_gc):
    """A tensor that belongs to the region's graph would be a cycle."""
    import weakref

    @forward_only
    def double(x):
        return x * 2

    class Token:
        pass

    token = Token()
    y = checkpointed(lambda x, token: double(x.sin()).exp().sin())(leaf(), token)
    ref = weakref.ref(token)
    del token
    assert ref() is not None
    y.sum().backward()
    del y
    assert ref() is None


def test_a_changed_result_is_an_error():
    """As for any tensor that a recompute starts from."""
    kept = []

    @forward_only
    def scale(x):
        kept.append(torch.full((4,), 2.0))
        return kept[0]

    y = checkpointed(lambda x: (x * scale(x)).sin().exp())(leaf())
    kept[0].add_(1)
    with pytest.raises(CheckpointError, match="forward_only"):
        y.sum().backward()


def test_a_call_that_the_forward_did_not_make_is_an_error():
    """There is nothing to hand back."""
    runs = []

    @forward_only
    def note(x):
        return 1.0

    def fn(x):
        runs.append(1)
        for _ in range(len(runs)):
            x = x * note(x)
        return x.sin().exp()

    with pytest.raises(MismatchError, match=r"calls .*note, which is forward_only"):
        checkpointed(fn)(leaf()).sum().backward()


def test_a_call_that_raised_is_an_error_in_the_recompute():
    """The region caught what it raised; the recompute can't tell."""

    @forward_only
    def fails(x):
        raise KeyError("logger")

    def fn(x):
        try:
            fails(x)
        except KeyError:
            x = x * 2
        return x.sin().exp()

    with pytest.raises(MismatchError, match="fails, which is forward_only"):
        checkpointed(fn)(leaf()).sum().backward()


def test_forward_only_calls_nest():
    """One calls another: only the outer one's result counts in the recompute."""
    seen = []

    @forward_only
    def inner(x):
        seen.append("inner")
        return 2.0

    @forward_only
    def outer(x):
        seen.append("outer")
        return inner(x) + 1

    x = leaf()
    checkpointed(lambda x: (x * outer(x) * inner(x)).sin().exp())(x).sum().backward()
    assert seen == ["outer", "inner", "inner"]
    want = leaf()
    (want * 3.0 * 2.0).sin().exp().sum().backward()
    assert bits(x.grad) == bits(want.grad)


def test_with_keep():
    """Each has its own order."""
    seen = []

    @forward_only
    def note(x):
        seen.append(1)
        return 2.0

    def fn(x):
        y = keep(x.sin()) * note(x)
        return (keep(y.exp()) * note(x)).cos().exp()

    def step(door):
        x = leaf()
        door(fn)(x).sum().backward()
        return bits(x.grad)

    assert step(lambda fn: checkpointed(checkpointed(fn))) == step(plain)
    assert len(seen) == 4


@DOOR
def test_in_threads(door):
    """Regions of several threads at once, each with its own calls; backward in another thread than forward."""
    seen = []

    @forward_only
    def note(name):
        seen.append(name)
        return float(name)

    grads = {}

    def run(name):
        x = leaf()
        region = door(lambda x: (x * note(name)).sin() * note(name + 10))
        for _ in range(5):
            y = region(x)
            in_thread(y.sum().backward)
        grads[name] = bits(x.grad)

    threads = [threading.Thread(target=run, args=(name,)) for name in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for name in range(1, 5):
        x = leaf()
        for _ in range(5):
            ((x * float(name)).sin() * float(name + 10)).sum().backward()
        assert grads[name] == bits(x.grad)
    assert sorted(seen) == sorted([*range(1, 5), *range(11, 15)] * 5)


@pytest.mark.parametrize("where", ["outside", "grad off", "disabled"])
def test_outside_of_a_region_it_is_the_function(where):
    """Every call is a call."""
    from checkpointing import disabled

    seen = []
    note = forward_only(lambda x: seen.append(x))
    region = checkpointed(lambda x: note(1) or x.sin())
    if where == "outside":
        note(1)
    elif where == "disabled":
        with disabled():
            region(leaf()).sum().backward()
    else:
        with torch.no_grad():
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

    @staticmethod
    @forward_only
    def static(x):
        return "static"

    @forward_only
    @staticmethod
    def static_inside(x):
        return "static inside"

    @classmethod
    @forward_only
    def of_class(cls, x):
        return cls.__name__

    @forward_only
    @classmethod
    def of_class_inside(cls, x):
        return cls.__name__


def test_methods_and_signatures():
    """It looks and binds like what it wraps."""
    model = Model()
    assert Model.method.__doc__ == "Notes."
    assert Model.method.__name__ == "method"
    assert list(inspect.signature(Model.method).parameters) == ["self", "x", "times"]
    results = []

    def fn(x):
        for method in (model.method, model.static, model.static_inside, model.of_class, model.of_class_inside):
            results.append(method(x))
        return x.sin().exp()

    checkpointed(fn)(leaf()).sum().backward()
    assert results == ["method", "static", "static inside", "Model", "Model"] * 2
    assert model.seen == [1]
    assert copy.deepcopy(model).method(None, times=3) == "method"


def test_what_cannot_be_forward_only_is_refused():
    """As for regions."""

    def generator():
        yield

    async def coroutine():
        pass

    for wrong in (generator, coroutine, Model, 3):
        with pytest.raises(TypeError, match="forward_only"):
            forward_only(wrong)


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
    x = leaf()
    hooks = (note, note) if where == "hook" else (lambda t: t, lambda t: t)
    with state, torch.autograd.graph.saved_tensors_hooks(*hooks):
        y = door(lambda x: x.sin().exp().sin(), **options)(x * 2)
        assert not any(seen)
        seen.clear()
    y.sum().backward()
    if where == "check":
        assert all(seen)


@pytest.mark.parametrize("word", ["cs", "css", "ccs", "scs", "cr", "csc"])
@pytest.mark.parametrize("way", ["first to read", "result", "result of a view", "kept", "again and again"])
def test_a_forward_only_function_in_a_scope_in_a_rerun_leaves_no_trace_there(word, way):
    """The rerun records the scope anew, without the operators of the function: what the scope saves in the region
    around it must be the same all the same, in the same order."""
    seen = []

    @forward_only
    def note(x):
        seen.append(x.detach().sum().item())
        return x.detach().mean()

    def function(a, b):
        if way == "first to read":
            note(b)
            return (a.sin() * b).exp()
        if way == "result":
            return (a.sin() * note(b) * b).exp()
        if way == "result of a view":
            return (a.sin() * note(b[1:]) * b).exp()
        if way == "kept":
            y = keep(a.exp() * note(b))
            note(y)
            return (y * b).sin() * a
        for x in (b, a, b):
            a = (a * note(x)).sin() * b
        return a.exp()

    def gradients(function):
        a, b = leaf(), leaf()
        with torch.no_grad():
            b += 1
        return torch.autograd.grad(function(a * 1, b * 1).sum(), (a, b))

    want = gradients(function)
    runs = len(seen)
    assert all(map(torch.equal, gradients(apply(word, function)), want))
    assert len(seen) == 2 * runs


@pytest.mark.parametrize("word", ["cs", "css", "scs", "cr"])
def test_what_a_recompute_leaves_out_may_read_again_but_not_first(word):
    """In a scope in a rerun: else the scope would find one tensor where it saved another."""

    def gradients(function):
        a, b = leaf(), leaf()
        with torch.no_grad():
            b += 1
        return torch.autograd.grad(function(a * 1, b * 1).sum(), (a, b))

    def first(a, b):
        if not is_recomputing():
            b.detach().sum()
        return (a.sin() * b).exp()

    def again(a, b):
        y = a.sin() * b
        if not is_recomputing():
            (b.detach() + a.detach()).sum()
        return (y * a).exp() * b

    assert all(map(torch.equal, gradients(apply(word, again)), gradients(again)))
    with pytest.raises(MismatchError, match=r"another order.*test_state\.py.*@forward_only"):
        gradients(apply(word, first))


@pytest.mark.parametrize("way", ["kernel", "order"])
def test_other_bits_are_no_other_order(way):
    """Kernels may give other bits each time, which nobody promised to hide; a tensor that only the forward needed, and
    the recompute reads first, is another matter."""
    a, b, c = (leaf() * i for i in (1, 2, 3))
    runs = []

    def function(a, b, c):
        runs.append(1)
        with torch.no_grad():
            a = a + (way == "kernel") * len(runs)
        with checkpoint_scope():
            if not is_recomputing():
                (b if way == "order" else a).detach().sum()
            (c if way == "order" else a).detach().sum()
            return (a.sin() * b).exp()

    y = checkpointed(function)(a, b, c).sum()
    if way == "kernel":
        y.backward()
        assert len(runs) == 2
    else:
        with pytest.raises(MismatchError, match="another order"):
            y.backward()
