"""Arguments and results of any structure, saved as an operator saves its inputs: through the hooks around, parameters
by reference, each guarded by its version."""

import collections
import copy
import dataclasses
import functools
import types
from typing import Any, NamedTuple

import pytest
import torch
from oracle import bits
from oracle import s as scope
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import register_pytree_node

from checkpointing import ChangedError, CheckpointError, checkpointed


def leaf(*shape):
    """Small integers that want a gradient."""
    n = torch.Size(shape or (3,)).numel()
    return (torch.arange(1.0, n + 1) % 5 - 2).view(shape or (3,)).requires_grad_()


def data(*shape):
    """The same, without."""
    return leaf(*shape).detach() + 3


def rerun(fn):
    return checkpointed(fn)


def replay(fn):
    return checkpointed(fn, backend="replay")


DOORS = pytest.mark.parametrize("door", [rerun, replay, scope])


def same(have, want):
    """Two lists of tensors, bit for bit."""
    assert [bits(t) for t in have] == [bits(t) for t in want]


# ---- structures


@dataclasses.dataclass
class Plain:
    x: Any
    rest: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any
    rest: Any = None


@dataclasses.dataclass
class PostInit:
    x: Any
    rest: dataclasses.InitVar[Any] = None
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self, rest):
        self.rest = rest
        self.twice = "set once"


class Named(NamedTuple):
    x: Any
    rest: Any = None


class Output(collections.OrderedDict):
    """A dict whose values are attributes, too, and that torch's pytree does not know: handed over as it is."""

    def __init__(self, x, rest=None):
        super().__init__(x=x, rest=rest)

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Registered:
    """Known to torch's pytree."""

    def __init__(self, x, rest=None):
        self.x = x
        self.rest = rest


register_pytree_node(Registered, lambda r: ([r.x, r.rest], None), lambda parts, _: Registered(*parts))


class PlainObject:
    """No container: handed over as it is."""

    def __init__(self, x, rest=None):
        self.x = x
        self.rest = rest


STRUCTURES = {
    "list": (lambda x, r=None: [x, r], lambda s: s[0]),
    "tuple": (lambda x, r=None: (r, x), lambda s: s[1]),
    "dict": (lambda x, r=None: {"a": x, "r": r}, lambda s: s["a"]),
    "dict with odd keys": (lambda x, r=None: {(1, 2): r, None: x}, lambda s: s[None]),
    "nested": (lambda x, r=None: {"a": [(r, [x])], "b": {}}, lambda s: s["a"][0][1][0]),
    "OrderedDict": (lambda x, r=None: collections.OrderedDict(r=r, a=x), lambda s: s["a"]),
    "defaultdict": (lambda x, r=None: collections.defaultdict(list, a=x, r=r), lambda s: s["a"]),
    "deque": (lambda x, r=None: collections.deque([r, x], maxlen=2), lambda s: s[1]),
    "dataclass in a dict": (lambda x, r=None: {"p": Plain([x], r)}, lambda s: s["p"].x[0]),
    **{kind.__name__: (kind, lambda s: s.x) for kind in (Plain, Slotted, PostInit, Named, Output, Registered)},
    "object": (PlainObject, lambda s: s.x),
    "SimpleNamespace": (lambda x, r=None: types.SimpleNamespace(x=x, r=r), lambda s: s.x),
    "objects in a list": (lambda x, r=None: [PlainObject(r), PlainObject(x)], lambda s: s[1].x),
    "mapping proxy": (lambda x, r=None: types.MappingProxyType({"a": x, "r": r}), lambda s: s["a"]),
}


@DOORS
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", ["leaf", "computed"])
def test_arguments_of_any_structure(door, structure, kind):
    """The function sees the structure that it was given, in both runs; gradients are plain's."""
    build, find = STRUCTURES[structure]
    w, base, seen = leaf(), leaf(), set()

    def fn(s, *, w):
        seen.add(type(s))
        return (find(s) * w).square()

    def step(fn):
        return torch.autograd.grad(fn(build(base if kind == "leaf" else base * 2, {"o": 1}), w=w).sum(), [base, w])

    same(step(door(fn)), step(fn))
    assert len(seen) == 1


@DOORS
@pytest.mark.parametrize("structure", STRUCTURES)
def test_results_of_any_structure(door, structure):
    """The caller gets the object that the function made, with the gradients of plain."""
    build, find = STRUCTURES[structure]
    x, made = leaf(), []

    def fn(x):
        made.append(build(x.square().square(), x.square()))
        return made[-1]

    def step(fn):
        result = fn(x)
        assert result is made[-1]
        return torch.autograd.grad(find(result).sum(), x)

    same(step(door(fn)), step(fn))


def callables(module, act, norm, x):
    return norm(act(module(x))).square()


def every_kind(a, /, b, *rest, c, d=2.0, **others):
    return (a * b + sum(rest) * c + d * others["e"]).square()


def twice_and_a_view(a, b, view):
    return (a * b)[:2] * view


def one_list_twice(a, b):
    b.append(a[0] * 2)
    return (a[-1] * a[0]).square()


LINEAR = nn.Linear(3, 3)
CALLS = {
    "modules and functions": (callables, lambda x: ((LINEAR, torch.relu, LINEAR.forward, x), {})),
    "every kind of parameter": (every_kind, lambda x: ((x, x + 1, x + 2, x + 3), {"c": x, "e": x + 4})),
    "one tensor twice, and a view": (twice_and_a_view, lambda x: (lambda y: ((y, y, y[2:]), {}))(x * 2)),
    "one list twice": (one_list_twice, lambda x: (lambda items: ((items, items), {}))([x * 2])),
    "a function with arguments": (lambda x, f: f(x).square(), lambda x: ((x, functools.partial(torch.mul, x)), {})),
}


@DOORS
@pytest.mark.parametrize("call", CALLS)
def test_calls_of_any_kind(door, call):
    """What is one object in the forward is one in the rerun."""
    fn, build = CALLS[call]

    def step(door):
        x = leaf(3, 3)
        args, kwargs = build(x)
        return torch.autograd.grad(door(fn)(*args, **kwargs).sum(), x)

    same(step(door), step(lambda fn: fn))


@DOORS
def test_a_chain_of_5000_objects(door):
    """It is not walked; lists are, and may be deep."""
    chain: Any = None
    for _ in range(5000):
        chain = PlainObject(chain)
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    x = leaf()
    door(lambda x, chain, deep: x.square() * (chain.x is not None) * len(deep))(x, chain, deep).sum().backward()
    same([x.grad], [2 * x.detach()])


@DOORS
def test_other_objects_are_handed_over_as_they_are(door):
    """The very object, with what it holds when backward runs; what nobody saved may change."""
    seen, given = [], PlainObject(data(), {"n": 1})

    def fn(x, given):
        seen.append((id(given), id(given.rest), given.rest["n"]))
        return (x * 2).square()

    y = door(fn)(leaf(), given)
    given.rest["n"] = 2
    given.x.add_(1)
    y.sum().backward()
    assert seen[0] == (id(given), id(given.rest), 1)
    assert seen[1:] == ([(id(given), id(given.rest), 2)] if door is rerun else [])


# ---- the guard

PLACES = {
    "args[0]": (lambda t: ((t,), {}), lambda a, k: a[0]),
    "args[1]": (lambda t: ((1, t), {}), lambda a, k: a[1]),
    "args[0]['a'][0][1]": (lambda t: (({"a": [(0, t)]},), {}), lambda a, k: a[0]["a"][0][1]),
    "kwargs['z']": (lambda t: ((), {"z": t}), lambda a, k: k["z"]),
    "kwargs['z']['a'][2]": (lambda t: ((), {"z": {"a": (0, 0, t)}}), lambda a, k: k["z"]["a"][2]),
    "args[0].x": (lambda t: ((Plain(t),), {}), lambda a, k: a[0].x),
    "args[0].x[1]['a']": (lambda t: ((Named([0, {"a": t}]),), {}), lambda a, k: a[0].x[1]["a"]),
    "args[0][0].rest": (lambda t: (([Slotted(0, t)],), {}), lambda a, k: a[0][0].rest),
    "args[0]['x']": (lambda t: ((collections.OrderedDict(x=t),), {}), lambda a, k: a[0]["x"]),
    "args[0][0]": (lambda t: ((Registered(t),), {}), lambda a, k: a[0].x),
    "kwargs['z']['b']": (lambda t: ((), {"z": collections.defaultdict(list, b=t)}), lambda a, k: k["z"]["b"]),
}
PLACE = pytest.mark.parametrize("place", PLACES)
MAKE = {"data": data, "computed": lambda: leaf() * 2, "leaf": leaf}


@PLACE
@DOORS
@pytest.mark.parametrize("kind", MAKE)
def test_a_tensor_changed_in_place_is_named(place, kind, door):
    """Rerun says which argument, replay which operator read it; both where the region is, and what to do."""
    build, find = PLACES[place]
    tensor, w = MAKE[kind](), leaf()
    args, kwargs = build(tensor)
    y = door(lambda *args, **kwargs: ((find(args, kwargs) + 1) * w).square())(*args, **kwargs)
    copy.deepcopy(tensor.detach()).add_(1)  # changes nothing
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(ChangedError) as caught:
        y.sum().backward()
    text = str(caught.value)
    if door is rerun:
        assert text.startswith("region 'test_a_tensor_changed_in_place_is_named.<locals>.<lambda>' (entered at ")
    assert f"{__file__}:" in text or door is scope
    assert (f": {place} " if door is rerun else "what aten.add.Tensor read (float32 tensor of shape (3,))") in text
    assert "changed in place" in text
    assert "clone" in text


@DOORS
@pytest.mark.parametrize("part", ["view", "base", "alias"])
def test_changing_what_shares_the_memory_is_a_change(door, part):
    """A view of the argument, what it is a view of, its `detach()`: all share a version."""
    base, w = data(6), leaf()
    argument = base[:3]
    y = door(lambda x: ((x + 1) * w).square())(argument)
    {"view": lambda: argument[0], "base": lambda: base, "alias": argument.detach}[part]().add_(1)
    with pytest.raises(ChangedError):
        y.sum().backward()


WRITES = {
    "argument": lambda x, d, c: (d.mul_(2), (x * d).square())[1],
    "a view of it": lambda x, d, c: (d[:1].mul_(2), (x * d).square())[1],
    "read, then written": lambda x, d, c: ((x * d.clone()).square(), d.mul_(2))[0],
    "statistics": lambda x, d, c: nn.functional.batch_norm(x, d, c, training=True).square(),
    "with a gradient": lambda x, d, c: (d.copy_(x * 2) * x).square(),
}


@DOORS
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("how", ["arguments", "containers", "closure"])
def test_what_the_function_writes_itself_is_refused_by_rerun(door, write, how):
    """With the remedy in the message; the remedy is right."""
    if write == "statistics" and door is rerun:
        pytest.skip("batch_norm's kernels write running statistics without a trace: a limit, in LIMITS.md")

    def step(door):
        x, d, c = leaf(4, 3), data(3), torch.ones(3)
        fn = WRITES[write]
        if write == "with a gradient":
            d = data(4, 3)
        calls = {
            "arguments": lambda: door(fn)(x, d, c=c),
            "containers": lambda: door(lambda x, s: fn(x, s[0]["d"], s[1]))(x, [{"d": d}, c]),
            "closure": lambda: door(lambda x: fn(x, d, c))(x),
        }
        calls[how]().sum().backward()
        return x.grad, d.detach(), c

    if door is rerun:
        name = "variable '[dc]'" if how == "closure" else ""
        with pytest.raises(CheckpointError, match=rf"{name}.*changed in place .*backend='replay'"):
            step(door)
    else:
        same(step(door), step(lambda fn: fn))


# ---- containers are the caller's own

CHANGES = {
    "append": (lambda t: [t], lambda s, t: s.insert(0, t)),
    "clear": (lambda t: [t], lambda s, t: s.clear()),
    "nested": (lambda t: [[t]], lambda s, t: s[0].clear()),
    "dict replace": (lambda t: {"a": t}, lambda s, t: s.update(a=t)),
    "dict in a list": (lambda t: [{"a": t}], lambda s, t: s[0].clear()),
    "attribute of a dataclass": (Plain, lambda s, t: setattr(s, "x", t)),
    "list in a dataclass": (lambda t: Plain([t]), lambda s, t: s.x.clear()),
    "deque": (lambda t: collections.deque([t]), lambda s, t: s.appendleft(t)),
    "OrderedDict": (lambda t: collections.OrderedDict(a=t), lambda s, t: s.clear()),
}


def first_tensor(value):
    if isinstance(value, torch.Tensor):
        return value
    parts = value.values() if isinstance(value, dict) else (value.x,) if isinstance(value, Plain) else value
    return next(found for part in parts if (found := first_tensor(part)) is not None)


@DOORS
@pytest.mark.parametrize("change", CHANGES)
def test_containers_may_be_changed_afterwards(door, change):
    """What the caller does to a list, dict or dataclass after the call does not reach the recompute."""
    build, mutate = CHANGES[change]
    w, x = leaf(), data()
    s = build(x)
    y = door(lambda *, s: (first_tensor(s) * w).square())(s=s)
    mutate(s, torch.zeros(3))
    same(torch.autograd.grad(y.sum(), w), torch.autograd.grad((x * w).square().sum(), w))


@DOORS
def test_the_function_may_change_its_containers(door):
    """A list that the function empties is empty for the caller, once, and full again for the rerun."""
    x, w, xs, into = data(), leaf(), [data(), data() * 2], {}

    def fn(xs, into):
        into["seen"] = into.get("seen", 0) + 1
        return (xs.pop() * w).square()

    y = door(fn)(xs, into)
    have = torch.autograd.grad(y.sum(), w)
    assert (len(xs), into) == (1, {"seen": 1})
    same(have, torch.autograd.grad((x * 2 * w).square().sum(), w))


# ---- parameters and data whose memory goes and comes back (ZeRO, FSDP)


def set_data(p, away):
    """Another tensor's memory, and the old one back."""
    if away:
        p.stash, p.data = p.data, torch.empty(0)
    else:
        p.data = p.stash


def set_data_fresh(p, away):
    """New memory with the old numbers."""
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


@DOORS
@pytest.mark.parametrize("trick", [set_data, set_data_fresh, resize_storage])
@pytest.mark.parametrize("how", ["closure", "argument", "module", "data"])
def test_memory_may_be_away_between_forward_and_backward(door, trick, how):
    """As plain: no error, the same gradients."""
    if how == "data" and trick is not resize_storage:
        return  # autograd itself saves its memory
    module, x = nn.Linear(3, 3, bias=False), leaf(2, 3)
    p = module.weight = nn.Parameter(data(3, 3))
    d, w = data(3), leaf()

    def step(door):
        if how == "data":
            y = door(lambda d: (d * w).square())(d)
        elif how == "argument":
            y = door(lambda x, p: (x @ p.t()).square())(x, p)
        else:
            y = door(lambda x: (module(x) if how == "module" else x @ p.t()).square())(x)
        gone = d if how == "data" else p
        trick(gone, True)
        trick(gone, False)
        return torch.autograd.grad(y.sum(), [w] if how == "data" else [x, p])

    same(step(door), step(lambda fn: fn) if how != "data" else torch.autograd.grad((d * w).square().sum(), [w]))


@pytest.mark.parametrize("left_there", [False, True])
@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_may_be_gathered_inside_the_region(left_there, frozen):
    """ZeRO-3 as its hooks do it: the full parameter is there only while its module runs, or is left there."""
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


# ---- hooks around


class Hooks(saved_tensors_hooks):
    """Hooks that copy what they are given, and know what it was."""

    def __init__(self):
        self.packed, self.unpacked = [], 0
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        self.packed.append(tensor.data_ptr())
        return tensor.detach().clone()

    def unpack(self, copied):
        self.unpacked += 1
        return copied.clone()


@DOORS
def test_inputs_go_through_enclosing_hooks_and_parameters_do_not(door):
    """Computed arguments, data and keyword arguments are saved by what encloses the region, once and fetched once."""
    base, p, d, nested = leaf(3, 3), nn.Parameter(data(3, 3)), data(3, 3), data(3, 3)

    def fn(x, p, *, d, nested):
        return ((x @ p).relu() * d + nested[0]["a"]).square() @ p

    def step(fn, hooks):
        x = base * 2
        with hooks:
            y = fn(x, p, d=d, nested=[{"a": nested}])
        return x, torch.autograd.grad(y.sum(), [base, p])

    hooks = Hooks()
    x, have = step(door(fn), hooks)
    same(have, step(fn, Hooks())[1])
    assert sorted(hooks.packed) == sorted(t.data_ptr() for t in (x, d, nested))
    assert hooks.unpacked == 3


@DOORS
def test_hooks_may_return_another_layout(door):
    """A hook that gives back a contiguous copy of a transposed tensor changes no gradient."""
    base, w = leaf(3, 4), data(4, 3)
    want = torch.autograd.grad(((base * 2).t() * w).square().sum(), base)
    with saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
        y = door(lambda x, w: (x.t() * w).square())(base * 2, w)
        z = door(lambda x, w: (x * w).square())((base * 2).t(), w)
    for out in (y, z):
        assert torch.equal(torch.autograd.grad(out.sum(), base)[0], want[0])
