"""What a recompute is given back: arguments of any structure, saved as an operator saves its
inputs; variables that the function closes over; state that no argument shows; results of calls
that must not be repeated."""

import asyncio
import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import random
import types
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from oracle import (
    DOORS,
    EACH_DOOR,
    Hooks,
    Programs,
    apply,
    at_once,
    bits,
    integers as leaf,
    plain,
    python_calls,
    replay,
    rerun,
    same_bits,
    scope,
    tensors,
)
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import register_pytree_node

from checkpointing import (
    ChangedError,
    CheckpointError,
    MismatchError,
    checkpointed,
    disabled,
    forward_only,
    is_recomputing,
    keep,
    register_state,
)

EACH = pytest.mark.parametrize("door", [rerun, replay, scope])
WAYS = {**DOORS, "rerun to the end": functools.partial(rerun, early_stop=False)}
RERUNS = ("rerun", "rerun to the end", "rerun in rerun")
ONE_LEVEL = ("rerun", "rerun to the end", "replay", "scope")
program = Programs(WAYS, default=[*RERUNS, "replay", "scope"])


def data(*shape):
    return leaf(*shape or (3,)).detach() + 3


def same(have, want):
    assert [bits(t) for t in have] == [bits(t) for t in want]


@dataclasses.dataclass
class Plain:
    x: Any
    rest: Any = None


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


class Named(NamedTuple):
    x: Any
    rest: Any = None


class Output(collections.OrderedDict):
    """A dict that torch's pytree does not know: handed over as it is."""


class Registered:
    def __init__(self, x, rest=None):
        self.x = x
        self.rest = rest


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


@EACH
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

    def one_list_twice(a, b):
        b.append(a[0] * 2)
        return (a[-1] * a[0]).square()

    linear, x = nn.Linear(3, 3), leaf(3, 3)
    y, items = x * 2, [x * 2]
    results = (
        door(lambda module, act, norm, x: norm(act(module(x))))(
            linear, torch.relu, linear.forward, x
        ),
        door(every_kind)(x, x + 1, x + 2, x + 3, c=x, e=x + 4),
        door(lambda a, b, view: (a * b)[:2] * view)(y, y, y[2:]),
        door(one_list_twice)(items, items),
        door(lambda x, f: f(x).square())(x, functools.partial(torch.mul, x)),
    )
    return torch.autograd.grad(sum(result.square().sum() for result in results), x)


@EACH
def test_chains_of_5000_objects_and_lists(door):
    """Objects are not walked; lists are, as deep as anybody writes them."""
    chain, deep = None, []
    for _ in range(5000):
        chain, deep = SimpleNamespace(next=chain), [deep]
    x = leaf(3)
    door(lambda x, chain, deep: x.square() * len(deep))(x, chain, deep).sum().backward()
    same([x.grad], [2 * x.detach()])


@EACH
def test_other_objects_are_handed_over_as_they_are(door):
    """The very object, with what it holds when backward runs; what nobody saved may change."""
    seen, given = [], SimpleNamespace(x=data(), rest={"n": 1})

    def fn(x, given):
        seen.append((id(given), id(given.rest), given.rest["n"]))
        return (x * 2).square()

    y = door(fn)(leaf(3), given)
    given.rest["n"] = 2
    given.x.add_(1)
    y.sum().backward()
    assert seen[0] == (id(given), id(given.rest), 1)
    assert seen[1:] == ([(id(given), id(given.rest), 2)] if door is rerun else [])


PLACES = {
    "args[0]": (lambda t: ((t,), {}), lambda a, k: a[0]),
    "args[1]": (lambda t: ((1, t), {}), lambda a, k: a[1]),
    "args[0]['a'][0][1]": (lambda t: (({"a": [(0, t)]},), {}), lambda a, k: a[0]["a"][0][1]),
    "kwargs['z']": (lambda t: ((), {"z": t}), lambda a, k: k["z"]),
    "args[0].x": (lambda t: ((Plain(t),), {}), lambda a, k: a[0].x),
    "args[0].x[1]['a']": (lambda t: ((Named([0, {"a": t}]),), {}), lambda a, k: a[0].x[1]["a"]),
    "args[0][0].x": (lambda t: (([Slotted(t)],), {}), lambda a, k: a[0][0].x),
    "args[0][0]": (lambda t: ((Registered(t),), {}), lambda a, k: a[0].x),
}
MAKE = {
    "data": data,
    "computed": lambda: leaf(3) * 2,
    "leaf": lambda: leaf(3),
    "parameter": lambda: nn.Parameter(data()),
}


@EACH
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["data", "computed", "leaf"])
def test_a_tensor_changed_in_place_is_named(place, kind, door):
    """Rerun says which argument, replay which operator read it."""
    build, find = PLACES[place]
    tensor, w = MAKE[kind](), leaf(3)
    args, kwargs = build(tensor)
    y = door(lambda *args, **kwargs: ((find(args, kwargs) + 1) * w).square())(*args, **kwargs)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(ChangedError, match=r"changed in place[\s\S]*clone") as caught:
        y.sum().backward()
    text = str(caught.value)
    name = "test_a_tensor_changed_in_place_is_named.<locals>.<lambda>"
    assert text.startswith(f"region '{name}' (entered at ") or door is not rerun
    assert f"{__file__}:" in text or door is scope
    read = "an input of aten.add.Tensor (float32 tensor of shape (3,))"
    assert (f": {place} " if door is rerun else read) in text


WRITES = {
    "argument": lambda x, d: (d.mul_(2), (x * d).square())[1],
    "a view of it": lambda x, d: (d[:1].mul_(2), (x * d).square())[1],
    "read, then written": lambda x, d: ((x * d.clone()).square(), d.mul_(2))[0],
    "with a gradient": lambda x, d: (d.copy_(x * 2) * x).square(),
}


@EACH
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("how", ["arguments", "containers", "closure"])
def test_what_the_function_writes_itself_is_refused_by_rerun(door, write, how):
    """With the remedy in the message; the remedy is right."""
    fn = WRITES[write]

    def step(door):
        x, d = leaf(4, 3), data(4, 3)
        calls = {
            "arguments": lambda: door(fn)(x, d=d),
            "containers": lambda: door(lambda x, s: fn(x, s[0]["d"]))(x, [{"d": d}]),
            "closure": lambda: door(lambda x: fn(x, d))(x),
        }
        calls[how]().sum().backward()
        return x.grad, d.detach()

    if door is rerun:
        name = "variable 'd'" if how == "closure" else ""
        with pytest.raises(CheckpointError, match=rf"{name}.*changed in place .*backend='replay'"):
            step(door)
    else:
        same(step(door), step(plain))


@pytest.mark.parametrize("door", [*RERUNS, "rerun in scope", "rerun in replay"])
@pytest.mark.parametrize("kind", ["data", "leaf", "parameter"])
@pytest.mark.parametrize("how", ["positional", "keyword", "in a list", "wrapped"])
def test_default_arguments_are_guarded_like_arguments(door, kind, how):
    """Under their names."""
    tensor, x = MAKE[kind](), leaf(3)

    def positional(x, other=None, t=tensor):
        return ((t * 2) * x).square()

    def keyword(x, *, other=None, t=tensor):
        return ((t * 2) * x).square()

    def contained(x, t=[{"a": tensor}]):  # noqa: B006
        return ((t[0]["a"] * 2) * x).square()

    def wrapped(*args):
        return positional(*args)

    fn = {"keyword": keyword, "in a list": contained}.get(how, positional)
    if how == "wrapped":
        fn = functools.wraps(positional)(wrapped)
    ways = WAYS | {"rerun in replay": lambda fn: replay(rerun(fn))}
    y = ways[door](fn)(x)
    with torch.no_grad():
        tensor.add_(1)
    if door not in RERUNS:  # replays of the whole name what read it
        with pytest.raises(ChangedError):
            y.sum().backward()
        return
    path = r"\['t'\]\[0\]\['a'\]" if how == "in a list" else r"\['t'\]"
    with pytest.raises(ChangedError, match=rf"defaults{path} \(float32 .* was changed in place"):
        y.sum().backward()


@program(*RERUNS, "replay", "scope", "rerun in scope")
def generators_and_modules_that_are_default_arguments(door):
    """They draw the numbers of the forward, and go on from where they were."""
    one, two = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    norm, x = nn.BatchNorm1d(4), leaf(4, 4)

    def fn(x, one=one, *, two=two, norm=norm):
        noise = torch.rand(4, generator=one) + torch.rand(4, generator=two)
        return norm(x * noise).square()

    y = door(fn)(x)
    return *torch.autograd.grad(y.sum(), x), norm.running_mean, one.get_state(), two.get_state()


@pytest.mark.parametrize("door", [*RERUNS, "rerun in scope", "scope in rerun"])
@pytest.mark.parametrize("kind", ["data", "leaf", "parameter", "frozen"])
@pytest.mark.parametrize("how", ["argument", "closure", "default"])
def test_requires_grad_of_an_argument_is_that_of_the_forward(door, kind, how):
    """Or it is refused: the recompute would save other tensors."""
    tensor = nn.Parameter(data(), requires_grad=False) if kind == "frozen" else MAKE[kind]()

    def step(door, changes):
        w = leaf(3)
        calls = {
            "argument": lambda: door(lambda t, w: (t * w).exp() * w)(tensor, w),
            "closure": lambda: door(lambda w: (tensor * w).exp() * w)(w),
            "default": lambda: door(lambda w, t=tensor: (t * w).exp() * w)(w),
        }
        y = calls[how]()
        if changes:
            tensor.requires_grad_(not tensor.requires_grad)
        return torch.autograd.grad(y.sum(), w)

    want = step(plain, False)
    outcome = contextlib.suppress(CheckpointError)
    if door in ("rerun", "rerun to the end"):
        outcome = pytest.raises(ChangedError, match=r"`requires_grad` of .*was changed in place")
    with outcome:
        same(step(WAYS[door], True), want)


@EACH_DOOR
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
    "OrderedDict": (lambda t: collections.OrderedDict(a=t), lambda s, t: s.clear()),
}


@EACH
@pytest.mark.parametrize("change", CHANGES)
def test_containers_may_be_changed_afterwards(door, change):
    """What the caller does to them after the call does not reach the recompute."""
    build, mutate = CHANGES[change]
    w, x = leaf(3), data()
    s = build(x)
    y = door(lambda *, s: (tensors(s)[0] * w).square())(s=s)
    mutate(s, torch.zeros(3))
    same(torch.autograd.grad(y.sum(), w), torch.autograd.grad((x * w).square().sum(), w))


@program("rerun", "replay", "scope")
def a_function_that_changes_its_containers(door):
    """A list that the function empties is empty for the caller, once."""
    w, xs, into = leaf(3), [data(), data() * 2], {}

    def fn(xs, into):
        into["seen"] = into.get("seen", 0) + 1
        return (xs.pop() * w).square()

    y = door(fn)(xs, into)
    return *torch.autograd.grad(y.sum(), w), len(xs), into["seen"]


def set_data(p, away):
    """Other memory, and a copy of the old one."""
    if away:
        p.stash, p.data = p.data.clone(), torch.empty(0)
    else:
        p.data = p.stash.clone()


def resize_storage(p, away):
    """The same storage, without bytes and with bytes again."""
    if away:
        p.stash = p.data.clone()
        p.untyped_storage().resize_(0)
    else:
        p.untyped_storage().resize_(p.stash.untyped_storage().nbytes())
        p.data.copy_(p.stash)


@EACH
@pytest.mark.parametrize("trick", [set_data, resize_storage])
@pytest.mark.parametrize("how", ["closure", "argument", "module", "data"])
def test_memory_may_be_away_between_forward_and_backward(door, trick, how):
    """As plain: no error, the same gradients."""
    if how == "data" and trick is not resize_storage:
        return  # autograd itself saves its memory
    module, x = nn.Linear(3, 3, bias=False), leaf(2, 3)
    p = module.weight = nn.Parameter(data(3, 3))
    d, w = data(3), leaf(3)
    gone, wanted = (d, [w]) if how == "data" else (p, [x, p])
    calls = {
        "data": lambda door: door(lambda d: (d * w).square())(d),
        "argument": lambda door: door(lambda x, p: (x @ p.t()).square())(x, p),
        "closure": lambda door: door(lambda x: (x @ p.t()).square())(x),
        "module": lambda door: door(lambda x: module(x).square())(x),
    }

    def step(door, away=True):
        y = calls[how](door)
        if away:
            trick(gone, True)
            trick(gone, False)
        return torch.autograd.grad(y.sum(), wanted)

    same(step(door), step(plain, away=False))


@pytest.mark.parametrize("left_there", [False, True])
@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_may_be_gathered_inside_the_region(left_there, frozen):
    """ZeRO-3 as its hooks do it: the full parameter is there only while its module runs."""
    shard, module, x = data(9), nn.Linear(3, 3, bias=False), leaf(2, 3)

    def gather(*_):
        module.weight.data = shard.clone().view(3, 3)

    def release(*_):
        if not left_there:
            module.weight.data = torch.empty(0)

    gather()
    module.weight.requires_grad_(not frozen)
    want = torch.autograd.grad(module(x).square().sum(), x)
    module.weight.data = torch.empty(0)
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(release)
    y = rerun(lambda x: module(x).square())(x)
    assert module.weight.numel() == (9 if left_there else 0)
    same(torch.autograd.grad(y.sum(), x), want)


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

    hooks = Hooks()
    x, have = step(WAYS[door](fn), hooks)
    same(have, step(fn, Hooks())[1])
    assert sorted(hooks.places) == sorted(t.data_ptr() for t in (x, d, nested, hidden))
    assert hooks.unpacked == 4


# ---- the function's own variables


@program()
def a_lambda_in_a_loop(door):
    """Closures see variables, not values; recompute sees the values of its own forward."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    x = y = leaf(2, 4)
    for i, layer in enumerate(layers):
        y = door(lambda y: layer(y).square() * (i + 1))(y)  # noqa: B023
    return torch.autograd.grad(y.sum(), [x, *(layer.weight for layer in layers)])


@program(*ONE_LEVEL)
def variables_set_anew_afterwards(door):
    """Numbers, functions, tensors with and without a gradient, modules."""
    factor, act, t, module = 2.0, torch.relu, torch.full((4,), 3.0), nn.Linear(4, 4)
    p = then = leaf() * 2

    def fn(x, a=3.0, *, b=5.0):
        return act(module(x * factor * a * b * t * p))

    x = leaf()
    y = door(fn)(x)
    factor, act, t, p, module = 7.0, torch.sin, torch.zeros(4), torch.zeros(4), None
    gradients = torch.autograd.grad(y.square().sum(), [x, then])
    assert (factor, act, module) == (7.0, torch.sin, None)
    return gradients


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_function_assigns_itself_is_its_own_business(times):
    """It, or one that it defines: left as it is, as with torch's checkpoint."""

    def run(region):
        n, total, x = 0, torch.zeros(4), leaf()

        def fn(x):
            nonlocal n

            def add():
                nonlocal total
                total = total + x.detach()

            add()
            m = n
            del n
            y = x.sin()
            n = m + 1  # noqa: F841
            return y

        for _ in range(times):
            fn = region(fn)
        y = fn(x) + fn(x) * 2
        found = [n, bits(total)]
        y.sum().backward()
        return *found, n, bits(total), bits(x.grad)

    theirs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    assert run(WAYS["rerun to the end"]) == run(
        lambda fn: functools.partial(theirs, fn, early_stop=False)
    )


def test_what_it_only_reads_keeps_the_value_of_the_forward_beside_it():
    """A variable that it assigns beside one that it reads."""
    n, factor = 0, 2.0

    def fn(x):
        nonlocal n
        n += 1

        def inside():
            factor = 3.0
            return [factor for _ in range(2)]

        inside()
        return (x * factor).square()

    x = leaf()
    y = checkpointed(fn)(x)
    factor = 5.0
    y.sum().backward()
    assert (n, factor) == (2, 5.0)
    assert torch.equal(x.grad, 8 * x.detach())


@pytest.mark.parametrize("door", ONE_LEVEL)
@pytest.mark.parametrize("kind", MAKE)
def test_tensors_among_them_are_guarded_like_arguments(door, kind):
    """The message of a rerun has the variable's name."""
    weight, x = MAKE[kind](), leaf(3)
    y = WAYS[door](lambda x: ((weight * 2) * x).square())(x)
    with torch.no_grad():
        weight.add_(1)
    name = r"the variable 'weight' .*" if door in RERUNS else ""
    with pytest.raises(ChangedError, match=f"{name}was changed in place"):
        y.sum().backward()


def test_containers_among_them_are_the_live_ones():
    """Side effects on them happen again, and what they hold is what it is when backward runs."""
    noted, table = [], {"n": 2.0}

    def fn(x):
        noted.append(table["n"])
        return (x * table["n"]).square()

    x = leaf()
    y = checkpointed(fn)(x)
    table["n"] = 3.0
    y.sum().backward()
    assert noted == [2.0, 3.0]
    assert torch.equal(x.grad, 2 * (x.detach() * 3) * 2)  # autograd holds the 2 itself


@program()
def methods_and_functions_that_are_defined_later_keep_their_variables(door):
    """Methods with `super()` and variables, also in a partial; recursion."""
    factor = 2.0

    class Base:
        def run(self, x):
            return x.square()

    class Derived(Base):
        weight = 3.0

        def run(self, n, x):
            return super().run(x * factor * n) * later(x, 2) * self.weight

    def call(x):
        return door(Derived().run)(5.0, x) + door(functools.partial(Derived().run, 5.0))(x)

    def later(x, n):
        return x if n == 0 else later(x * 2, n - 1)

    x = leaf()
    y = call(x)
    factor = 3.0
    return torch.autograd.grad(y.sum(), x)


# ---- parameters are known by their identity


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.two(self.one(x).relu()).square()


def around(door):
    net, x = Net(), leaf(2, 4)
    for part in (net.one, net.two):
        part.forward = door(part.forward)
    new = {name: (p.detach() * 2).requires_grad_() for name, p in net.named_parameters()}
    torch.func.functional_call(net, new, (x,)).sum().backward()
    return x.grad, *(p.grad for p in new.values()), *(p.grad for p in net.parameters())


def give(module, weight):
    del module.weight
    module.weight = weight


def swapped(net):
    net.one.weight, net.two.weight = net.two.weight, net.one.weight


EXCHANGES = {
    "assigned": lambda net: give(net.one, nn.Parameter(torch.zeros(4, 4))),
    "a tensor that is no parameter": lambda net: give(net.one, torch.zeros(4, 4)),
    "a child": lambda net: setattr(net, "two", nn.Linear(4, 4, bias=False)),
    "swapped": swapped,
}


def afterwards(door, change):
    net, x = Net(), leaf(2, 4)
    y, then = door(net)(x), [*net.parameters()]
    EXCHANGES[change](net)
    y.sum().backward()
    return x.grad, *(p.grad for p in (*then, *net.parameters()))


@pytest.mark.parametrize("values", ["other", "the same"])
@pytest.mark.parametrize("door", RERUNS)
def test_frozen_parameters_that_are_exchanged(door, values):
    """Another adapter, another teacher. (Hooks may bring the same values in for each call.)"""

    def step(door):
        net, x = Net().requires_grad_(False), leaf(2, 4)
        y = door(net)(x)
        factor = 2 if values == "other" and door is not plain else 1
        net.two.weight = nn.Parameter(net.two.weight * factor, requires_grad=False)
        y.sum().backward()
        return x.grad

    if values == "the same":
        torch.manual_seed(0)
        want = step(plain)
        torch.manual_seed(0)
        assert bits(step(WAYS[door])) == bits(want)
        return
    with pytest.raises(MismatchError, match=r"in the place of a parameter"):
        step(WAYS[door])


@pytest.mark.parametrize("door", [*RERUNS, "replay", "scope"])
@pytest.mark.parametrize("change", [None, *EXCHANGES])
def test_parameters_that_are_exchanged_around_a_region(door, change):
    """Refused by a rerun, by the names that they have now, with the remedy; right under replay."""
    exchange = functools.partial(afterwards, change=change) if change else around
    if door not in RERUNS:
        same_bits(WAYS[door], exchange)
        return
    one, two = r"saves the parameter Net\.one\.weight ", r".*saved the parameter Net\.two\.weight "
    match = one + two if change == "swapped" else r"parameter .*float32 tensor of shape"
    with pytest.raises(MismatchError, match=match) as caught:
        exchange(WAYS[door])
    assert "region '" in str(caught.value) and "backend='replay'" in str(caught.value)


def offloaded(goes, seen=None):
    """A model whose frozen weights hooks bring in anew, and take away again if it `goes`."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.PReLU(4)
    model = nn.Sequential(*layers).requires_grad_(False)

    def give(module):
        store = {name: p.detach().clone() for name, p in module.named_parameters()}

        def bring(device="cpu"):
            for name, value in store.items():
                parameter = nn.Parameter(value.to(device, copy=True), requires_grad=False)
                setattr(module, name, parameter)
                if seen is not None and device == "cpu":
                    seen.append(weakref.ref(parameter))

        module.register_forward_pre_hook(lambda *_: bring())
        if goes:
            module.register_forward_hook(lambda *_: bring("meta"))

    for module in model:
        give(module)
    return model


@program()
def frozen_weights_that_hooks_bring_in_anew(door):
    """Their identity is another at every call, their values are the same."""
    x = leaf(3, 4)
    for goes in (False, True):
        region = door(offloaded(goes))
        (region(x).square().sum() + region(region(x)).sum()).backward()
    return (x.grad,)


@pytest.mark.parametrize("door", RERUNS)
def test_frozen_weights_that_hooks_take_away_are_not_held(door, no_gc):
    """The memory that offloading saves is not lost to a region."""
    seen = []
    model, x = offloaded(True, seen), leaf(3, 4)
    y = WAYS[door](model)(x)
    assert len(seen) == 6 and all(ref() is None for ref in seen)
    y.sum().backward()
    assert len(seen) > 6 and all(ref() is None for ref in seen)


@pytest.mark.parametrize("door", RERUNS)
@pytest.mark.parametrize("change", ["shape", "dtype", "trains", "no parameter"])
def test_weights_that_come_back_as_others_are_refused(door, change):
    """Another shape, another dtype; one that trains; a tensor in its place."""
    module, x = nn.Module(), leaf(2, 1, 4)
    module.weight = nn.Parameter(torch.ones(4), requires_grad=False)
    module.forward = lambda x: (x * module.weight).square()
    y = WAYS[door](module)(x)
    others = {
        "shape": nn.Parameter(torch.ones(3, 4), requires_grad=False),
        "dtype": nn.Parameter(torch.ones(4).double(), requires_grad=False),
        "trains": nn.Parameter(torch.ones(4)),
        "no parameter": torch.ones(4),
    }
    give(module, others[change])
    with pytest.raises(MismatchError):
        y.sum().backward()


@pytest.mark.parametrize("door", RERUNS)
@pytest.mark.parametrize("trains", [False, True])
def test_weights_that_are_written_are_still_guarded(door, trains):
    """By an optimizer's step, say; as long as they are the same ones."""
    net, x = Net().requires_grad_(trains), leaf(2, 4)
    y = WAYS[door](net)(x)
    with torch.no_grad():
        net.two.weight.mul_(2)
    with pytest.raises(ChangedError, match=r"Net\.two\.weight|Linear\.weight"):
        y.sum().backward()


@pytest.mark.parametrize("door", RERUNS)
def test_weights_cached_around_a_region(door):
    """`parametrize.cached()`: the recompute makes the weight that the forward found."""
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), leaf(2, 4)
    with nn.utils.parametrize.cached():
        layer(x)
        y = WAYS[door](layer)(x)
    with pytest.raises(MismatchError, match=r"parametrizations\.weight\.original"):
        y.sum().backward()


class Reads(nn.Module):
    """Reads parameters in ways in which no operator saves them; `later` not at all."""

    def __init__(self):
        super().__init__()
        self.embedding, self.bias = nn.Embedding(3, 4), nn.Parameter(torch.ones(4))
        self.last, self.later = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x):
        y = self.embedding(torch.tensor([0, 1, 0, 2])) * x
        return y.sin() + self.last, (x + self.bias).cos()


@pytest.mark.parametrize("door", [*RERUNS, "replay", "scope", "rerun in scope"])
@pytest.mark.parametrize("name", ["embedding.weight", "bias"])
@pytest.mark.parametrize("how", ["module", "method", "lambda"])
def test_parameters_that_are_read_but_not_saved_are_guarded(door, name, how):
    """By an update between forward and backward."""
    net, x = Reads(), leaf(4, 4)
    region = {"module": net, "method": net.forward, "lambda": lambda x: net(x)}[how]
    one, two = WAYS[door](region)(x)
    with torch.no_grad():
        net.get_parameter(name).mul_(2)
    match = rf"parameter .*{name.split('.')[-1]}" if door in RERUNS else None
    with pytest.raises(ChangedError, match=match):
        (one.sum() + two.sum()).backward()


@program(*RERUNS, "replay")
def parameters_whose_update_does_not_matter(door):
    """Read after all that is recomputed, or not read."""
    net, x = Reads(), leaf(4, 4)
    one, two = door(net)(x)
    with torch.no_grad():
        net.last.mul_(2)
        net.later.weight.mul_(2)
    (one.sum() + two.sum()).backward()
    return x.grad, *(p.grad for p in net.parameters())


@program()
def an_optimizer_that_steps_in_backward(door):
    """Each parameter as soon as its gradient is there; every region could reach all of them."""
    torch.manual_seed(1)
    net, x = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))), leaf(4)

    def step(p):
        with torch.no_grad():
            p.sub_(p.grad)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        y = x
        for i in range(3):
            y = door(lambda y, i=i: net[i](y) * 2)(y)
        y.sum().backward()
    return x.grad, *net.parameters()


@pytest.mark.parametrize("door", [*RERUNS, "replay", "scope", "rerun in scope"])
def test_tensors_in_the_place_of_parameters_are_those_of_the_forward(door):
    """As inner loops of `higher` exchange them, step by step. Refused by a rerun."""

    def step(door):
        net, x, total = Net(), leaf(2, 4), 0
        base = [leaf(4, 4), leaf(4, 4) * 2]
        weights = base
        for _ in range(2):
            net.one._parameters["weight"], net.two._parameters["weight"] = weights
            total = total + door(net)(x).sum()
            weights = [w * 2 for w in weights]
        return torch.autograd.grad(total, [x, *base])

    if door in (*RERUNS, "rerun in scope"):
        with pytest.raises(
            MismatchError, match=r"another tensor in the place of a parameter.*replay"
        ):
            step(WAYS[door])
    else:
        same(step(WAYS[door]), step(plain))


@program()
def parameters_that_are_exchanged_inside_a_region(door):
    """By a functional call, with parameters from around it, of which one comes of another."""
    net, x, base = Net(), leaf(2, 4), leaf(4, 4)
    new = {"one.weight": base * 2, "two.weight": base}
    door(lambda x: torch.func.functional_call(net, new, (x,)))(x).sum().backward()
    return x.grad, base.grad, *(p.grad for p in net.parameters())


@program()
def leaves_that_the_function_makes(door):
    """They are new each time, and fine."""

    def fn(x):
        torch.manual_seed(1)
        w, p = torch.ones(4, requires_grad=True), nn.Parameter(torch.full((4,), 2.0))
        (g,) = torch.autograd.grad((x * w).square().sum(), w, create_graph=True)
        return nn.Linear(4, 4)(x * (w - g * 0.5) * p * p).square()

    x = leaf(4)
    door(fn)(x).sum().backward()
    return (x.grad,)


@program("rerun", "replay")
def parameters_that_the_region_did_not_use_may_change(door):
    """The rest of the module is stepped meanwhile."""
    torch._dynamo.reset()
    net, x = Net(), leaf(2, 4)
    blocks = [net.one, torch.compile(net.one, backend="eager") if door is not plain else net.one]
    for block in blocks:
        y = door(lambda x, block=block: block(x).square())(x)
        with torch.no_grad():
            net.two.weight.mul_(2)
        y.sum().backward()
    return x.grad, net.one.weight.grad


def test_a_rerun_finds_and_leaves_everything_as_the_user_has_it():
    """The very parameters with their flags, memory and versions."""
    net, seen = Net(), []
    net.tables = {"a": [1, 2]}

    def state():
        return (
            [(id(m), id(m._parameters), id(m._modules), m.training) for m in net.modules()],
            [(id(p), p.requires_grad, p.data_ptr(), p._version) for p in net.parameters()],
            (id(net.tables), copy.deepcopy(net.tables)),
            list(net.state_dict()),
        )

    def fn(x):
        seen.append((is_recomputing(), state()))
        return net(x)

    y = checkpointed(fn)(leaf(2, 4))
    net.eval()
    before = state()
    y.sum().backward()
    assert [recomputing for recomputing, _ in seen] == [False, True]
    assert seen[1] == (True, seen[0][1])
    assert seen[0][1] != before == state()


@program("rerun", "replay")
def a_variable_that_something_else_in_the_region_sets(door):
    """A helper or a hook that shares it by `nonlocal` finds what the forward found."""
    scale, x = torch.tensor(2.0), leaf(4, 4)

    def note(*given):
        nonlocal scale
        scale = scale + given[-1].detach().sum()

    def fn(x):
        note(x)
        return (x * scale).square()

    fn = door(fn)
    (fn(x).sum() + fn(x).sum()).backward()
    return scale, x.grad


def draws(x):
    """Numbers from three streams, after which two of them have moved."""
    scale = random.random() + float(np.random.rand()) + torch.rand(())
    return (x * scale).square().square() * random.gauss(0, 1)


def streams():
    return random.getstate(), repr(np.random.get_state(legacy=False)), bits(torch.get_rng_state())


@EACH_DOOR
def test_all_preserves_the_random_numbers_of_python_and_numpy(door):
    """Gradients as plain, and so are the three streams afterwards; True preserves torch's only."""

    def step(door, **options):
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
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


@program(*DOORS)
def registered_state_is_the_forwards_in_recompute_and_the_present_one_afterwards(door):
    """With other forwards in between, and two backwards."""
    state, generator = {"amax": 1.0}, torch.Generator().manual_seed(7)
    hidden = register_state(generator.get_state, generator.set_state)

    def scaled(x):
        y = x * state["amax"] * torch.randint(1, 5, (4,), generator=generator)
        state["amax"] += 1
        return y

    with hidden, register_state(state.copy, state.update):
        fn, x = (lambda x: scaled(scaled(x).square()).square()), leaf()
        first, second = door(fn)(x), door(fn)(x * 2)
        return [
            *torch.autograd.grad(second.sum(), x, retain_graph=True),
            *torch.autograd.grad(first.sum(), x, retain_graph=True),
            *torch.autograd.grad(first.sum() + second.sum(), x),
            state["amax"],
        ]


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
    """At forward; at recompute, after which the state of now is put back. When it has been removed,
    regions that have one restore it still, else their recompute would be wrong."""
    calls, snapshot, restore = counters()
    order = []
    with register_state(lambda: "a", order.append), register_state(lambda: "b", order.append):
        handle = register_state(snapshot, restore)
        y = checkpointed(lambda x: x.sin().exp())(leaf())
        handle.remove()
        handle.remove()
        assert calls == [("snapshot", False)]
        y.sum().backward()
    checkpointed(lambda x: x.sin().exp())(leaf()).sum().backward()
    assert calls == [("snapshot", False), ("snapshot", True), ("restore", 1), ("restore", 2)]
    assert order == ["a", "b", "b", "a"]


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


def test_who_asks_for_states():
    """Reruns of all threads; a tape has what Python read, and grad mode off is a plain call."""
    calls, snapshot, restore = counters()
    with register_state(snapshot, restore):
        replay(lambda x: x.sin().exp())(leaf()).sum().backward()
        scope(lambda x: x.sin().exp())(leaf()).sum().backward()
        with torch.no_grad():
            checkpointed(lambda x: x.sin().exp())(leaf())
        assert calls == []
        at_once(lambda: checkpointed(lambda x: x.sin())(leaf()))
    at_once(lambda: checkpointed(lambda x: x.sin())(leaf()))
    assert calls == [("snapshot", False)]


@pytest.mark.parametrize("early_stop", [True, False])
def test_all_states_are_put_back_even_if_one_fails(early_stop):
    """The error is shown, and the module is as it was before the recompute."""
    norm, then = nn.BatchNorm1d(4), []

    def restore(_):
        then.append(1)
        if len(then) == 2:
            raise KeyError("restore")

    with register_state(lambda: None, restore):
        y = checkpointed(lambda x: norm(x.sin()).exp(), early_stop=early_stop)(leaf(4, 4))
    norm(leaf(4, 4))
    norm.eval()
    before = bits(dict(norm.named_buffers()))
    with pytest.raises(KeyError, match="restore"):
        y.sum().backward()
    assert len(then) == 2 and not norm.training
    assert bits(dict(norm.named_buffers())) == before


# ---- forward_only


@EACH_DOOR
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_forward_only_function_runs_once_and_its_results_come_back_in_order(door, early_stop):
    """Also where the results decide; with `keep`, which has an order of its own."""

    def step(door, **options):
        numbers = iter([2.0, 3.0, 5.0])
        number = forward_only(lambda: next(numbers))

        def fn(x):
            return keep((x * number()).square()).square() * keep(x * number())

        x = leaf()
        y = door(fn, **options)(x).sum()
        y.backward(retain_graph=True)
        y.backward()
        return bits(x.grad), next(numbers)

    assert step(door, early_stop=early_stop) == step(plain)


@dataclasses.dataclass(eq=False)
class Config:
    """Without tensors, and told apart by identity."""

    width: int


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

    def fn(x):
        y = x.exp()
        return (part(y[1:]) * part(y) * detached(y[1:])).sin().exp()

    x = leaf()
    return torch.autograd.grad(door(fn)(x).sum(), x)


@program(*WAYS)
def tensors_that_a_forward_only_function_makes_are_held(door):
    """With and without a gradient of their own, in containers, beside arguments, and written. A
    leaf gets its gradient."""
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

    with pytest.raises(MismatchError, match=r"calls .*note, which is forward_only"):
        checkpointed(fn)(leaf()).sum().backward()


@pytest.mark.parametrize("around", [torch.no_grad, disabled])
def test_outside_of_a_region_it_is_the_function(around):
    """Every call is a call."""
    seen = []
    note = forward_only(lambda x: seen.append(x))
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


@pytest.mark.parametrize("word", ["cs", "ccs", "scs", "cr", "csc"])
@pytest.mark.parametrize("way", ["first to read", "result", "result of a view", "kept"])
def test_a_forward_only_function_in_a_scope_in_a_rerun_leaves_no_trace_there(word, way):
    """The rerun records the scope anew, without the operators of the function."""
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


@EACH_DOOR
@pytest.mark.parametrize("where", ["check", "snapshot", "hook"])
def test_is_recomputing_is_false_in_what_the_forward_calls(door, where):
    """Checks, snapshots and saved-tensors hooks of the user run in the forward, too."""
    seen = []

    def note(value=None):
        seen.append(is_recomputing())
        return value

    options = {"determinism_check": lambda t: note() or t.shape} if where == "check" else {}
    around = {
        "check": contextlib.nullcontext,
        "snapshot": lambda: register_state(note, note),
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
        return python_calls(lambda: region().sum().backward())

    assert calls(50_000) == calls(0)


test_programs_are_plains = program.test()


class Cache:
    """As transformers' `DynamicCache`: an object with layers, which grow."""

    def __init__(self):
        self.layers = [SimpleNamespace(keys=torch.zeros(0, 4)) for _ in range(2)]

    def update(self, keys, i):
        self.layers[i].keys = torch.cat([self.layers[i].keys, keys])
        return self.layers[i].keys


@pytest.mark.parametrize("view", [False, True])
@EACH
def test_a_cache_is_grown_inside_a_region(door, view):
    """Rerun: an error of a few lines that says what helps; replay handles it."""

    def attend(x, past):
        keys = past.update(x * 2, 1)
        return (x @ keys.t()).square() if view else keys.square()

    def program(door):
        cache, x = Cache(), leaf(4, 4)
        y = door(attend)(x, past=cache)
        y.sum().backward()
        return x.grad, cache.layers[1].keys.detach()

    if door is not rerun:
        same_bits(door, program)
        return
    with pytest.raises(MismatchError) as caught:
        program(door)
    text = str(caught.value)
    assert all(words in text for words in ("as left by", "use_cache=False", "backend='replay'"))
    assert text.count("\n") < 16 and len(text) < 2000


def test_a_function_that_fails_on_its_grown_cache_says_so():
    """The remedy, with the function's own exception as the cause."""
    cache, x = Cache(), leaf(4, 4)
    y = rerun(lambda x, past: past.update(x * 2, 1) * torch.ones(x.shape))(x, past=cache)
    with pytest.raises(MismatchError, match=r"as left by the forward.*use_cache=False") as caught:
        y.square().sum().backward()
    assert "must match the size" in str(caught.value.__cause__)
