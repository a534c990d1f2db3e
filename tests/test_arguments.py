"""Arguments, defaults and closed-over tensors: saved as by an operator, guarded, given again."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import re
import types
import weakref
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from oracle import EACH_WAY, RERUNS, WAYS, bits, data, integers as leaf, plain, rerun, same
from torch import nn
from torch.utils._pytree import register_pytree_node

from checkpointing import ChangedError, CheckpointError, MismatchError

program = oracle.Programs()


Plain = dataclasses.make_dataclass("Plain", [("x", Any), ("rest", Any, None)])
Named = collections.namedtuple("Named", "x rest", defaults=[None])
# A dict that torch's pytree does not know: handed over as it is.
Output = type("Output", (collections.OrderedDict,), {})


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    rest: dataclasses.InitVar[Any] = None
    set_once: Any = dataclasses.field(init=False)

    def __post_init__(self, rest):
        self.set_once = rest


def more(x, rest=None):
    """A dataclass with an attribute beside its fields."""
    value = Plain(x, rest)
    value.factor = 2.0
    return value


class Registered:
    def __init__(self, x, rest=None):
        self.x, self.rest = x, rest


register_pytree_node(
    Registered, lambda r: ([r.x, r.rest], None), lambda parts, _: Registered(*parts)
)

STRUCTURES = {
    "dict with odd keys": (lambda x, r=None: {(1, 2): r, None: x}, lambda s: s[None]),
    "nested": (lambda x, r=None: {"a": [(r, [x])], "b": {}}, lambda s: s["a"][0][1][0]),
    "OrderedDict": (lambda x, r=None: collections.OrderedDict(r=r, a=x), lambda s: s["a"]),
    "defaultdict": (lambda x, r=None: collections.defaultdict(list, a=x, r=r), lambda s: s["a"]),
    "deque": (lambda x, r=None: collections.deque([r, x], maxlen=2), lambda s: s[1]),
    "attribute beside fields": (more, lambda s: s.x * s.factor),
    **{kind.__name__: (kind, lambda s: s.x) for kind in (Plain, Slotted, Named, Registered)},
    "unknown dict": (lambda x, r=None: Output(x=x, r=r), lambda s: s["x"]),
    "object": (lambda x, r=None: SimpleNamespace(x=x, r=r), lambda s: s.x),
    "mapping proxy": (lambda x, r=None: types.MappingProxyType({"a": x, "r": r}), lambda s: s["a"]),
}


@oracle.EACH_DOOR
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["leaf", "computed"])
def test_arguments_and_results_of_any_structure(door, structure, kind):
    """As given in both runs, and as made in the forward; gradients are plain's."""
    build, find = STRUCTURES[structure]
    w, base, seen, made = leaf(3), leaf(3), set(), []

    def fn(s, *, w):
        seen.add(type(s))
        made.append(build((find(s) * w).square(), w.square()))
        return made[-1]

    def step(fn):
        result = fn(build(base if kind == "leaf" else base * 2, {"o": 1}), w=w)
        assert result is made[-1]
        return torch.autograd.grad(find(result).sum(), [base, w])

    same(step(door(fn)), step(fn))
    assert len(seen) == 1


@program("rerun", "replay", "scope")
def calls_of_any_kind(door):
    """What is one object in the forward is one in the rerun."""

    def every_kind(a, /, b, *rest, c, d=2.0, **others):
        return (a * b + sum(rest) * c + d * others["e"]).square()

    linear, x = nn.Linear(3, 3), leaf(3, 3)
    y, items, act = x * 2, [x * 2], torch.relu
    results = (
        door(lambda module, act, norm, x: norm(act(module(x))))(linear, act, linear.forward, x),
        door(every_kind)(x, x + 1, x + 2, x + 3, c=x, e=x + 4),
        door(lambda a, b, view: (a * b)[:2] * view)(y, y, y[2:]),
        door(lambda a, b: (b.append(a[0] * 2), (a[-1] * a[0]).square())[1])(items, items),
        door(lambda x, f: f(x).square())(x, functools.partial(torch.mul, x)),
    )
    return torch.autograd.grad(sum(result.square().sum() for result in results), x)


@EACH_WAY
def test_objects_are_handed_over_as_they_are(door):
    """The very object, with what it holds when backward runs; lists are copied at any depth."""
    seen, given, deep = [], SimpleNamespace(x=data(), rest={"n": 1}), []
    for _ in range(5000):
        deep = [deep]

    def fn(x, given, deep):
        seen.append((id(given), id(given.rest), given.rest["n"]))
        return (x * 2).square() * len(deep)

    y = door(fn)(leaf(3), given, deep)
    given.rest["n"] = 2
    given.x.add_(1)
    y.sum().backward()
    assert seen[0] == (id(given), id(given.rest), 1)
    assert seen[1:] == ([(id(given), id(given.rest), 2)] if door is rerun else [])


# Ways to give a function `fn(t)` its tensor, by what a rerun calls the tensor.
GIVEN = {
    "args[0]": lambda door, fn, t: door(fn)(t),
    "args[1]": lambda door, fn, t: door(lambda n, t: fn(t))(1, t),
    "args[0]['a'][0][1]": lambda door, fn, t: door(lambda s: fn(s["a"][0][1]))({"a": [(0, t)]}),
    "kwargs['z']": lambda door, fn, t: door(lambda *, z: fn(z))(z=t),
    "args[0].x": lambda door, fn, t: door(lambda s: fn(s.x))(Plain(t)),
    "args[0].x[1]['a']": lambda door, fn, t: door(lambda s: fn(s.x[1]["a"]))(Named([0, {"a": t}])),
    "args[0][0].x": lambda door, fn, t: door(lambda s: fn(s[0].x))([Slotted(t)]),
    "args[0][0]": lambda door, fn, t: door(lambda s: fn(s.x))(Registered(t)),
    "defaults['t']": lambda door, fn, t: door(lambda n=0, t=t: fn(t))(),
    "defaults['k']": lambda door, fn, t: door(lambda *, n=0, k=t: fn(k))(),
    "defaults['s'][0]['a']": lambda door, fn, t: door(lambda s=[{"a": t}]: fn(s[0]["a"]))(),
    "defaults['w']": lambda door, fn, t: door(
        functools.wraps(wrapped := lambda w=t: fn(w))(lambda *args: wrapped(*args))
    )(),
    "the variable 't'": lambda door, fn, t: door(lambda: fn(t))(),
}
FORMS = ("args[0]", "args[0]['a'][0][1]", "kwargs['z']", "defaults['t']", "the variable 't'")
MAKE = {
    "data": data,
    "computed": lambda: leaf(3) * 2,
    "leaf": lambda: leaf(3),
    "parameter": lambda: nn.Parameter(data()),
}

NAMED = [*itertools.product(GIVEN, ("rerun", "replay", "scope"))]
# In a nest by whichever region finds it. (The outer one doesn't look for variables of the inner.)
NAMED += itertools.product(FORMS[:-1], ("rerun to the end", "rerun in rerun", "rerun in scope"))


@pytest.mark.parametrize(("given", "door"), NAMED)
@pytest.mark.parametrize("kind", MAKE)
def test_a_tensor_changed_in_place_is_named(given, kind, door):
    """A rerun says which argument or variable, a replay which operator read it."""
    tensor, w = MAKE[kind](), leaf(3)
    y = GIVEN[given](WAYS[door], lambda t: ((t + 1) * w).square(), tensor)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(ChangedError, match=r"changed in place[\s\S]*clone") as caught:
        y.sum().backward()
    text = str(caught.value)
    assert f"{__file__}:" in text or "scope" in door
    if door == "rerun":
        assert re.match(r"region '\S*<lambda>' \(entered at ", text)
        assert f": {given} " in text
    elif kind != "parameter" and door in ("replay", "scope"):
        assert "an input of aten.add.Tensor (float32 tensor of shape (3,))" in text


def test_a_weak_proxy_of_a_module_is_an_object():
    class Trainer:
        def __init__(self, model):
            self.model = weakref.proxy(model)

        def loss(self, x):
            return self.model(x).sum()

    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), leaf(3)
    rerun(Trainer(model).loss)(x).backward()
    assert torch.equal(x.grad, torch.autograd.grad(model(x).sum(), x)[0])


WRITES = {
    "argument": lambda x, d: (d.mul_(2), (x * d).square())[1],
    "a view of it": lambda x, d: (d[:1].mul_(2), (x * d).square())[1],
    "read, then written": lambda x, d: ((x * d.clone()).square(), d.mul_(2))[0],
    "with a gradient": lambda x, d: (d.copy_(x * 2) * x).square(),
}


@EACH_WAY
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("given", FORMS)
def test_what_the_function_writes_itself_is_refused_by_rerun(door, write, given):
    """With the remedy in the message; the remedy is right."""

    def step(door):
        x, d = leaf(4, 3), data(4, 3)
        GIVEN[given](door, lambda d: WRITES[write](x, d), d).sum().backward()
        return x.grad, d.detach()

    if door is rerun:
        name = "variable 't'" if "variable" in given else ""
        with pytest.raises(CheckpointError, match=rf"{name}.*changed in place .*backend='replay'"):
            step(door)
    else:
        same(step(door), step(plain))


@pytest.mark.parametrize("door", [*RERUNS, "rerun in scope", "scope in rerun"])
@pytest.mark.parametrize("kind", ["data", "leaf", "parameter", "frozen"])
@pytest.mark.parametrize("given", ["args[0]", "defaults['t']", "the variable 't'"])
def test_requires_grad_of_an_argument_is_that_of_the_forward(door, kind, given):
    """Or it is refused: the recompute would save other tensors."""
    tensor = nn.Parameter(data(), requires_grad=False) if kind == "frozen" else MAKE[kind]()

    def step(door, changes):
        w = leaf(3)
        y = GIVEN[given](door, lambda t: (t * w).exp() * w, tensor)
        if changes:
            tensor.requires_grad_(not tensor.requires_grad)
        return torch.autograd.grad(y.sum(), w)

    want = step(plain, False)
    outcome = contextlib.suppress(CheckpointError)
    if door in ("rerun", "rerun to the end"):
        outcome = pytest.raises(ChangedError, match=r"`requires_grad` of .*was changed in place")
    with outcome:
        same(step(WAYS[door], True), want)


@pytest.mark.parametrize("asks", ["first", "later", "for a while"])
@oracle.EACH_DOOR
def test_a_function_may_want_gradients_of_its_argument(door, asks):
    """As models of forces do, of the positions of atoms; also for a backward inside."""
    weight = leaf(3)

    def energy_and_forces(batch):
        positions = batch["positions"]
        before = (positions * weight).exp().sin() if asks == "later" else 1
        positions.requires_grad_()
        energy = (positions * weight * before).square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        if asks == "for a while":
            positions.requires_grad_(False)
        return (positions * energy).sum() + forces.square().sum()

    def step(door):
        positions = data(3)
        loss = door(energy_and_forces)({"positions": positions})
        leaves = [each for each in (weight, positions) if each.requires_grad]
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        # What was saved earlier is a constant, with hooks of any kind.
        leaves = [weight] if asks == "later" else leaves
        return [*first, *torch.autograd.grad(first[0].sum(), leaves), positions.requires_grad]

    assert bits(step(door)) == bits(step(plain))


@oracle.EACH_DOOR
@pytest.mark.parametrize("view", [False, True])
def test_inference_tensors_are_copied(door, view):
    """They have no version: nobody sees that they are written."""
    with torch.inference_mode():
        x = data(4)
        x = x[:2] if view else x
    w = leaf(*x.shape)
    y = door(lambda x, w: ((x + 0) * w).square())(x, w)
    want = 2 * w.detach() * (x + 0) ** 2
    with torch.inference_mode():
        x.add_(1)
    same(torch.autograd.grad(y.sum(), w), [want])


CHANGES = {
    "append": (lambda t: [t], lambda s, t: s.insert(0, t)),
    "dict replace": (lambda t: {"a": t}, lambda s, t: s.update(a=t)),
    "dict in a list": (lambda t: [{"a": t}], lambda s, t: s[0].clear()),
    "list in a dataclass": (lambda t: Plain([t]), lambda s, t: s.x.clear()),
    "attribute of a dataclass": (Plain, lambda s, t: setattr(s, "x", t)),
    "deque": (lambda t: collections.deque([t]), lambda s, t: s.appendleft(t)),
}


@program("rerun", "replay", "scope")
def containers_that_are_changed_afterwards(door):
    """What the caller does to them after the call does not reach the recompute."""
    for build, mutate in CHANGES.values():
        w, s = leaf(3), build(data())
        y = door(lambda *, s: (oracle.tensors(s)[0] * w).square())(s=s)  # noqa: B023
        mutate(s, torch.zeros(3))
        yield from torch.autograd.grad(y.sum(), w)


@program("rerun", "replay", "scope")
def a_function_that_changes_its_containers(door):
    w, xs, into = leaf(3), [data(), data() * 2], {}

    def fn(xs, into):
        into["seen"] = into.get("seen", 0) + 1
        return (xs.pop() * w).square()

    y = door(fn)(xs, into)
    return *torch.autograd.grad(y.sum(), w), len(xs), into["seen"]


def set_data(p):
    """Other memory, and a copy of the old one."""
    stash, p.data = p.data.clone(), torch.empty(0)
    p.data = stash.clone()


def resize_storage(p):
    """The same storage, without bytes and with bytes again."""
    stash, storage = p.data.clone(), p.untyped_storage()
    storage.resize_(0)
    storage.resize_(stash.untyped_storage().nbytes())
    p.data.copy_(stash)


@EACH_WAY
@pytest.mark.parametrize("trick", [set_data, resize_storage])
@pytest.mark.parametrize("given", ["args[0]", "the variable 't'", "module", "data"])
def test_memory_may_be_away_between_forward_and_backward(door, trick, given):
    if given == "data" and trick is not resize_storage:
        return  # autograd itself saves its memory
    x, module = leaf(3), nn.Linear(3, 3, bias=False)
    p = module.weight = nn.Parameter(data(3, 3))
    gone, wanted = (data(3), [x]) if given == "data" else (p, [x, p])

    def step(door, trick=trick):
        if given == "data":
            y = door(lambda d: (d * x).square())(gone)
        elif given == "module":
            y = door(lambda x: module(x).square())(x)
        else:
            y = GIVEN[given](door, lambda p: (x @ p.t()).square(), p)
        trick(gone)
        return torch.autograd.grad(y.sum(), wanted)

    same(step(door), step(plain, trick=id))


@pytest.mark.parametrize("door", [*RERUNS, "replay", "scope"])
def test_inputs_go_through_enclosing_hooks_and_parameters_do_not(door):
    """Computed arguments, data and leaves that are no parameters: saved once and fetched once."""
    base, p, d, nested = leaf(3, 3), nn.Parameter(data(3, 3)), data(3, 3), data(3, 3)
    frozen, hidden = nn.Linear(3, 3).requires_grad_(False), data(3, 3).requires_grad_()

    def fn(x, p, *, d, nested, hidden):
        return ((x @ p).relu() * d + nested[0]["a"] * (frozen(hidden) @ p)).square() @ p

    def step(fn, hooks):
        x = base * 2
        with hooks:
            y = fn(x, p, d=d, nested=[{"a": nested}], hidden=hidden)
        return x, torch.autograd.grad(y.sum(), [base, p, hidden])

    hooks = oracle.Hooks()
    x, have = step(WAYS[door](fn), hooks)
    same(have, step(fn, oracle.Hooks())[1])
    assert sorted(hooks.places) == sorted(t.data_ptr() for t in (x, d, nested, hidden))
    assert hooks.unpacked == 4


LOGGER = None


class Layer(nn.Linear):
    """Names a logger, as those of transformers."""

    def forward(self, x):
        assert LOGGER is not None
        return super().forward(x).relu()


@pytest.mark.parametrize("way", ["module", "method", "lambda", "argument"])
def test_what_a_region_could_reach_costs_nothing(way, monkeypatch):
    """As many calls of functions, forward and backward, however much there is around it."""

    def calls(n):
        many = {f"key {i}": [i] for i in range(n)}
        manager = logging.Manager(logging.RootLogger(logging.WARNING))
        manager.loggerDict |= dict.fromkeys(many, [logging.PlaceHolder(manager.root)] * 10)
        monkeypatch.setitem(globals(), "LOGGER", manager.getLogger("a.b"))
        layer, x = Layer(4, 4), leaf(4, 4)
        layer.config = many
        trainer = SimpleNamespace(words=[*many], batches=[*many.values()], block=layer)
        region = {
            "module": lambda: rerun(layer)(x),
            "method": lambda: rerun(layer.forward)(x),
            "lambda": lambda: rerun(lambda x: trainer.block(x))(x),
            "argument": lambda: rerun(lambda x, trainer: layer(x))(x, trainer),
        }[way]
        region().sum().backward()
        return oracle.python_calls(lambda: region().sum().backward())

    assert calls(50_000) == calls(0)


class Cache:
    """As transformers' `DynamicCache`: an object with layers, which grow."""

    def __init__(self):
        self.layers = [SimpleNamespace(keys=torch.zeros(0, 4)) for _ in range(2)]

    def update(self, keys, i):
        self.layers[i].keys = torch.cat([self.layers[i].keys, keys])
        return self.layers[i].keys


@program("replay", "scope")
def a_cache_that_grows_once(door):
    for attend in (lambda x, keys: (x @ keys.t()).square(), lambda x, keys: keys.square()):
        cache, x = Cache(), leaf(4, 4)
        region = door(lambda x, past: attend(x, past.update(x * 2, 1)))  # noqa: B023
        region(x, past=cache).sum().backward()
        yield x.grad
        yield cache.layers[1].keys.detach()


@program("rerun", "replay", "scope")
def a_variable_of_a_closure_that_gets_its_first_value_later(door):
    def fn(x):
        try:
            return x.exp().sin() * scale
        except NameError:
            return x.exp().sin()

    x = leaf(4)
    y = door(fn)(x)
    scale = 3.0
    return *torch.autograd.grad(y.sum(), x), torch.tensor(scale)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rerun_that_grows_a_cache_again_says_what_helps(fails):
    """In a few lines; with the function's own exception, if there is one, as the cause."""

    def attend(x, past):
        keys = past.update(x * 2, 1)
        return (keys * torch.ones(x.shape) if fails else keys).square()

    y = rerun(attend)(leaf(4, 4), past=Cache())
    with pytest.raises(MismatchError) as caught:
        y.sum().backward()
    text = str(caught.value)
    assert "as left by the forward" in text and "use_cache=False" in text
    assert text.count("\n") < 16 and len(text) < 2000
    assert fails == ("must match the size" in str(caught.value.__cause__))
    assert fails or "backend='replay'" in text


test_programs_are_plains = program.test()
