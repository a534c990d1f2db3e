"""Arguments and results of any shape; an argument that is changed later is an error that names it."""

import collections
import copy
import dataclasses
import functools
import operator
import re
import types
from typing import Any, NamedTuple

import pytest
import torch
from oracle import bits, count
from oracle import s as scope
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import register_pytree_node

from checkpointing import ChangedError, CheckpointError, checkpoint_scope, checkpointed, keep


def leaf(*shape):
    """A tensor that wants a gradient."""
    return torch.rand(*shape or (3,)).requires_grad_()


def rerun(fn):
    """`fn` as a region that is called again."""
    return checkpointed(fn)


def replay(fn):
    """`fn` as a region that is replayed."""
    return checkpointed(fn, backend="replay")


DOORS = pytest.mark.parametrize("door", [rerun, replay, scope])


# ---- structures


@dataclasses.dataclass
class Plain:
    x: Any
    rest: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
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
    """A dict whose values are attributes, too, as transformers' outputs are."""

    def __init__(self, x, rest=None):
        super().__init__(x=x, rest=rest)

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class PlainObject:
    def __init__(self, x, rest=None):
        self.x = x
        self.rest = rest


class SlotsObject:
    __slots__ = ("rest", "x")

    def __init__(self, x, rest=None):
        self.x = x
        self.rest = rest


class CallableObject(PlainObject):
    def __call__(self):
        return self.x


class ListObject(list):
    """A list with attributes."""

    def __init__(self, x, rest=None):
        super().__init__([x, rest])

    @property
    def x(self):
        return self[0]


class Registered:
    """Known to torch's pytree."""

    def __init__(self, x, rest=None):
        self.x = x
        self.rest = rest


register_pytree_node(Registered, lambda r: ([r.x, r.rest], None), lambda parts, _: Registered(*parts))


STRUCTURES = {
    "list": (lambda x, r=None: [x, r], lambda s: s[0]),
    "tuple": (lambda x, r=None: (r, x), lambda s: s[1]),
    "dict": (lambda x, r=None: {"a": x, "r": r}, lambda s: s["a"]),
    "dict with odd keys": (lambda x, r=None: {(1, 2): r, None: x}, lambda s: s[None]),
    "nested": (lambda x, r=None: {"a": [(r, [x])], "b": {}}, lambda s: s["a"][0][1][0]),
    "OrderedDict": (lambda x, r=None: collections.OrderedDict(r=r, a=x), lambda s: s["a"]),
    "defaultdict": (lambda x, r=None: collections.defaultdict(list, a=x, r=r), lambda s: s["a"]),
    "deque": (lambda x, r=None: collections.deque([r, x], maxlen=2), lambda s: s[1]),
    "SimpleNamespace": (lambda x, r=None: types.SimpleNamespace(x=x, r=r), lambda s: s.x),
    "mapping proxy": (lambda x, r=None: types.MappingProxyType({"a": x, "r": r}), lambda s: s["a"]),
    "objects in a list": (lambda x, r=None: [PlainObject(r), PlainObject(x)], lambda s: s[1].x),
    "object in an object": (lambda x, r=None: PlainObject(PlainObject(x), r), lambda s: s.x.x),
    "dataclass in a dict": (lambda x, r=None: {"p": Plain([x], r)}, lambda s: s["p"].x[0]),
    "list in an object": (lambda x, r=None: PlainObject([r, {"a": x}]), lambda s: s.x[1]["a"]),
    "registered": (Registered, lambda s: s.x),
    **{
        kind.__name__: (kind, lambda s: s.x)
        for kind in (
            Plain,
            Frozen,
            Slotted,
            PostInit,
            Named,
            Output,
            PlainObject,
            SlotsObject,
            CallableObject,
            ListObject,
        )
    },
}
STRUCTURE = pytest.mark.parametrize("structure", STRUCTURES)


def same(have, want):
    """Two lists of tensors, bit for bit."""
    assert [bits(t) for t in have] == [bits(t) for t in want]


@DOORS
@STRUCTURE
@pytest.mark.parametrize("how", ["positional", "keyword"])
@pytest.mark.parametrize("kind", ["leaf", "computed"])
def test_arguments_of_any_structure(door, structure, how, kind):
    """The function sees the structure that it was given, in both runs; gradients are plain's."""
    build, find = STRUCTURES[structure]
    w, base = leaf(), leaf()
    types_seen = set()

    def fn(s, w):
        types_seen.add(type(s))
        return (find(s) * w).sin().exp()

    def step(fn):
        s = build(base if kind == "leaf" else base * 1.5, {"other": 1})
        y = fn(s, w) if how == "positional" else fn(w=w, s=s)
        return torch.autograd.grad(y.sum(), [base, w])

    same(step(door(fn)), step(fn))
    assert len(types_seen) == 1


@DOORS
@STRUCTURE
def test_results_of_any_structure(door, structure):
    """The caller gets the object that the function made, with the gradients of plain."""
    build, find = STRUCTURES[structure]
    x, made = leaf(), []

    def fn(x):
        result = build(x.sin().exp(), x.cos().exp())
        made.append(result)
        return result

    def step(fn):
        made.clear()
        result = fn(x)
        assert result is made[0]
        return torch.autograd.grad(find(result).sum(), x)

    same(step(door(fn)), step(fn))


@DOORS
def test_modules_and_callables_are_arguments_too(door):
    """A module, a bound method or a function among the arguments runs in the region."""
    linear, x = nn.Linear(3, 3), leaf(2, 3)

    def fn(module, act, norm, x):
        return norm(act(module(x))).sin()

    arguments = (linear, torch.exp, linear.forward, x)
    wanted = [x, *linear.parameters()]
    have = torch.autograd.grad(door(fn)(*arguments).sum(), wanted)
    same(have, torch.autograd.grad(fn(*arguments).sum(), wanted))


@DOORS
def test_star_args_defaults_and_positional_only(door):
    """Every kind of parameter."""

    def fn(a, /, b, *rest, c, d=2.0, **others):
        return (a * b + sum(rest) * c + d * others["e"]).sin().exp()

    leaves = [leaf() for _ in range(6)]
    a, b, r1, r2, c, e = leaves

    def step(fn):
        return torch.autograd.grad(fn(a, b, r1, r2, c=c, e=e).sum(), leaves)

    same(step(door(fn)), step(fn))


@DOORS
def test_one_tensor_in_two_places(door):
    """A tensor passed twice, and a view beside its base, get their gradients together."""
    x = leaf(4)

    def fn(a, b, view):
        return (a.sin() * b.exp())[:2] * view

    def step(fn):
        y = x * 1.5
        return torch.autograd.grad(fn(y, [y][0], y[2:]).sum(), x)

    same(step(door(fn)), step(fn))


# ---- the guard

# Where a tensor is, how to put it there, and how the message names the place.
PLACES = {
    "args[0]": (lambda t: ((t,), {}), lambda a, k: a[0]),
    "args[1]": (lambda t: ((1, t), {}), lambda a, k: a[1]),
    "args[0][1]": (lambda t: (([0, t],), {}), lambda a, k: a[0][1]),
    "args[0]['a']": (lambda t: (({"a": t},), {}), lambda a, k: a[0]["a"]),
    "args[0]['a'][0][1]": (lambda t: (({"a": [(0, t)]},), {}), lambda a, k: a[0]["a"][0][1]),
    "kwargs['z']": (lambda t: ((), {"z": t}), lambda a, k: k["z"]),
    "kwargs['z']['a']": (lambda t: ((), {"z": {"a": t}}), lambda a, k: k["z"]["a"]),
    "kwargs['z'][2]": (lambda t: ((), {"z": (0, 0, t)}), lambda a, k: k["z"][2]),
    "args[0].x": (lambda t: ((PlainObject(t),), {}), lambda a, k: a[0].x),
    "args[0].x[1]['a']": (lambda t: ((PlainObject([0, {"a": t}]),), {}), lambda a, k: a[0].x[1]["a"]),
    "args[0][0].x": (lambda t: (([PlainObject(t)],), {}), lambda a, k: a[0][0].x),
    "args[0].x.x": (lambda t: ((PlainObject(PlainObject(t)),), {}), lambda a, k: a[0].x.x),
    "kwargs['z'].x": (lambda t: ((), {"z": types.SimpleNamespace(x=t)}), lambda a, k: k["z"].x),
}
# These may be named as a container's part or as an attribute.
ATTRIBUTES = {
    f"args[0] {kind.__name__}": (lambda t, kind=kind: ((kind(t),), {}), lambda a, k: a[0].x)
    for kind in (Plain, Frozen, Slotted, PostInit, Named, Output, SlotsObject, CallableObject, Registered)
}
PLACE = pytest.mark.parametrize("place", [*PLACES, *ATTRIBUTES])
KINDS = pytest.mark.parametrize("kind", ["data", "computed", "leaf"])


def make(kind):
    """A tensor to be passed: plain data, a result of an operator, or a leaf that wants a gradient."""
    return {"data": lambda: torch.rand(3), "computed": lambda: leaf() * 1.5, "leaf": leaf}[kind]()


def names(place):
    """A pattern of the ways to name a place."""
    if place in PLACES:
        return re.escape(place)
    return r"args\[0\](\.x|\['x'\]|\[0\])"


def region_over(find, w):
    """A function of which plain autograd would keep something that depends on the tensor found, not that itself."""

    def fn(*args, **kwargs):
        return ((find(args, kwargs) + 1.0) * w).sin().exp()

    return fn


@PLACE
@KINDS
def test_a_tensor_changed_in_place_is_named(place, kind):
    """Under rerun, wherever it is in the arguments: the error says which one, where the region is, and what to do."""
    build, find = {**PLACES, **ATTRIBUTES}[place]
    tensor, w = make(kind), leaf()
    args, kwargs = build(tensor)
    y = checkpointed(region_over(find, w), name="mine")(*args, **kwargs)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(ChangedError) as caught:
        y.sum().backward()
    text = str(caught.value)
    assert text.startswith(f"region 'mine' (entered at {__file__}:")
    assert re.search(names(place), text), text
    assert "changed in place" in text
    assert "clone" in text


@PLACE
@KINDS
@pytest.mark.parametrize("door", [replay, scope])
def test_a_tensor_changed_in_place_is_found_by_replay(place, kind, door):
    """A tape knows operators, not arguments: the error says which operator read the tensor, and its shape."""
    build, find = {**PLACES, **ATTRIBUTES}[place]
    tensor, w = make(kind), leaf()
    args, kwargs = build(tensor)
    y = door(region_over(find, w))(*args, **kwargs)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(ChangedError, match=r"what aten\.add\.Tensor read \(float32 tensor of shape \(3,\)\).*version"):
        y.sum().backward()


@PLACE
@DOORS
def test_an_unchanged_tensor_passes(place, door):
    """Reading an argument after the region, or changing a copy of it, is no change."""
    build, find = {**PLACES, **ATTRIBUTES}[place]
    tensor, w = make("computed").detach(), leaf()
    args, kwargs = build(tensor)
    fn = region_over(find, w)
    y = door(fn)(*args, **kwargs)
    tensor.clone().add_(1)
    copy.deepcopy(tensor).zero_()
    tensor.sum()
    have = torch.autograd.grad(y.sum(), w)
    same(have, torch.autograd.grad(fn(*args, **kwargs).sum(), w))


@DOORS
@pytest.mark.parametrize("part", ["view", "base", "alias"])
def test_changing_what_shares_the_memory_is_a_change(door, part):
    """A view of the argument, what it is a view of, its `detach()`: all share a version."""
    base, w = torch.rand(6), leaf()
    argument = base[:3]
    y = door(lambda x: ((x + 1) * w).sin().exp())(argument)
    {"view": lambda: argument[0], "base": lambda: base, "alias": argument.detach}[part]().add_(1)
    with pytest.raises(ChangedError):
        y.sum().backward()


@DOORS
def test_a_closed_over_parameter_changed_is_an_error(door):
    """An optimiser step between forward and backward: as autograd says for plain code, with the region's name."""
    w, x = leaf(), leaf()
    y = door(lambda x: (x.exp() * w).sin())(x)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(CheckpointError, match=r"region '.*' \(entered at .*changed in place"):
        y.sum().backward()


@DOORS
def test_a_module_parameter_changed_is_an_error(door):
    """Also where it is found through `self`, and saved as a transposed view."""
    linear, x = nn.Linear(3, 3), leaf(2, 3)
    y = door(linear)(x).sin()
    z = door(lambda x: linear(linear(x)).sin())(x)
    with torch.no_grad():
        linear.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace"):
        y.sum().backward()
    with pytest.raises(CheckpointError, match="changed in place"):
        z.sum().backward()


@DOORS
def test_a_closed_over_tensor_changed_is_never_silently_wrong(door):
    """Data from around the function, saved by an operator: plain code raises, and so does a region."""
    data, x = torch.rand(3), leaf()
    y = door(lambda x: (x.exp() * data).sin())(x)
    data.add_(1)
    with pytest.raises(CheckpointError, match="changed in place"):
        y.sum().backward()


# Functions without a closure, of which a first look at the names finds nothing but torch.
HIDDEN = """
def in_a_lambda(x, k):
    return (lambda t: t * w)(x.exp()).sin()

def in_a_comprehension(x, k):
    return [(x.exp() * w).sin() for _ in range(1)][0]

def in_a_class_body(x, k):
    class A:
        v = w
    return (x.exp() * A.v).sin()

def an_attribute_of_an_argument(x, k):
    return (x.exp() * x.scale).sin()

def an_attribute_of_a_class(x, k):
    return (x.exp() * k.w).sin()

def from_a_call(x, k):
    return k(x.exp()).sin()
"""


@pytest.mark.parametrize("wants_grad", [True, False])
@pytest.mark.parametrize(
    "name",
    [*re.findall(r"def (\w+)\(", HIDDEN), "from_a_partial", "from_a_bound_method", "a_default", "a_keyword_default"],
)
def test_a_tensor_that_a_function_finds_in_an_odd_place_is_guarded(name, wants_grad):
    """Plain code raises, since an operator has saved the tensor; a rerun does, too."""
    w, x = torch.rand(3).requires_grad_(wants_grad), leaf()
    x.scale = w
    names = {"w": w}
    exec(HIDDEN, names)
    fn: Any = names.get(name, names["from_a_call"])
    k: Any = type("K", (), {"w": w})
    if name == "from_a_call":
        k = operator.methodcaller("mul", w)
    elif name == "from_a_partial":
        k = functools.partial(torch.mul, w)
    elif name == "from_a_bound_method":
        k = w.mul
    elif name == "a_default":

        def fn(x, k, w=w):
            return (x.exp() * w).sin()

    elif name == "a_keyword_default":

        def fn(x, k, *, w=w):
            return (x.exp() * w).sin()

    y = checkpointed(fn)(x, k)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(ChangedError, match="changed in place"):
        y.sum().backward()


def test_a_global_that_is_not_there_in_the_first_call_is_guarded():
    """What is known about a function's names is found in its first call."""
    names = {}
    exec("def fn(x, late):\n    return ((x + w) if late else x).sin().exp()", names)
    fn, x = checkpointed(names["fn"]), leaf()
    fn(x, False).sum().backward()
    names["w"] = torch.rand(3)
    y = fn(x, True)
    names["w"].mul_(2)
    with pytest.raises(ChangedError, match="'w'"):
        y.sum().backward()


def test_a_default_that_is_written_is_written_once():
    """A counter as a default argument."""

    start = torch.zeros(())

    def fn(x, count=start):
        count.add_(1)
        return (x * count).sin().exp()

    x = leaf()
    expected = torch.autograd.grad((x * 1.0).sin().exp().sum(), x)[0]
    out = checkpointed(fn)(x)
    assert bits(torch.autograd.grad(out.sum(), x)[0]) == bits(expected)
    assert start.item() == 1


@DOORS
def test_values_finds_what_no_guard_sees(door):
    """Data from around the function that no operator saves is found by comparing values."""
    data, x = torch.rand(3), leaf()

    def fn(x):
        return (x.exp() + data).sin()

    check = {rerun: {}, replay: {"backend": "replay"}}.get(door)
    if check is None:
        with checkpoint_scope(determinism_check="values"):
            y = fn(x)
    else:
        y = checkpointed(fn, determinism_check="values", **check)(x)
    data.add_(1)
    with pytest.raises(CheckpointError):
        y.sum().backward()


@DOORS
def test_what_the_region_changes_itself_is_no_change(door):
    """An argument that the function overwrites has its new value for whoever reads it later, as plain."""
    w = leaf()

    def fn(x, w):
        x.mul_(2)
        return (x * w).sin().exp()

    def step(fn):
        x = torch.arange(3.0)
        y = fn(x, w)
        return torch.autograd.grad(y.sum(), w), x

    (have,), x = step(door(fn))
    (want,), plain_x = step(fn)
    same([have, x], [want, plain_x])


# ---- containers are the caller's own

CHANGES = {
    "append": (lambda t: [t], lambda s, t: s.append(t)),
    "replace": (lambda t: [t], lambda s, t: s.__setitem__(0, t)),
    "clear": (lambda t: [t], lambda s, t: s.clear()),
    "nested": (lambda t: [[t]], lambda s, t: s[0].clear()),
    "dict replace": (lambda t: {"a": t}, lambda s, t: s.update(a=t)),
    "dict pop": (lambda t: {"a": t}, lambda s, t: s.pop("a")),
    "dict in a list": (lambda t: [{"a": t}], lambda s, t: s[0].clear()),
    "attribute of a dataclass": (lambda t: Plain(t), lambda s, t: setattr(s, "x", t)),
    "list in a dataclass": (lambda t: Plain([t]), lambda s, t: s.x.clear()),
    "deque": (lambda t: collections.deque([t]), lambda s, t: s.appendleft(t)),
    "OrderedDict": (lambda t: collections.OrderedDict(a=t), lambda s, t: s.clear()),
}


def find_tensor(value):
    """The first tensor in a structure."""
    if isinstance(value, torch.Tensor):
        return value
    parts = value.values() if isinstance(value, dict) else value
    if dataclasses.is_dataclass(value):
        parts = (value.x,)
    return next(found for part in parts if (found := find_tensor(part)) is not None)


@DOORS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_containers_may_be_changed_afterwards(door, change, how):
    """What the caller does to a list, dict or dataclass after the call does not reach the recompute."""
    build, mutate = CHANGES[change]
    w, x = leaf(), torch.rand(3)

    def fn(s):
        return (find_tensor(s) * w).sin().exp()

    s = build(x)
    want = torch.autograd.grad(fn(s).sum(), w)
    y = door(fn)(s) if how == "positional" else door(fn)(s=s)
    mutate(s, torch.zeros(3))
    same(torch.autograd.grad(y.sum(), w), want)


@DOORS
def test_the_function_may_change_its_containers(door):
    """A list that the function empties is empty for the caller, once, and full again for the rerun."""
    x, w = torch.rand(3), leaf()

    def fn(xs, into):
        into["seen"] = into.get("seen", 0) + 1
        return (xs.pop() * w).sin().exp()

    xs, into = [x, x.cos()], {}
    y = door(fn)(xs, into)
    assert (len(xs), into) == (1, {"seen": 1})
    have = torch.autograd.grad(y.sum(), w)
    assert (len(xs), into) == (1, {"seen": 1})
    same(have, torch.autograd.grad(fn([x, x.cos()], {}).sum(), w))


@pytest.mark.parametrize("kind", [PlainObject, types.SimpleNamespace, SlotsObject])
def test_an_attribute_set_anew_is_named(kind):
    """Objects are handed to the rerun as they are: another tensor in place of the one that was read is an error."""
    w, holder = leaf(), kind(x=torch.rand(3))
    y = checkpointed(lambda h: (h.x * w).sin().exp())(holder)
    holder.x = torch.rand(3)
    with pytest.raises(ChangedError, match=r"args\[0\]\.x is not the tensor"):
        y.sum().backward()


def test_containers_of_unknown_kind_are_guarded_as_objects():
    """They can't be copied, so what the caller changes in them afterwards is an error, not another gradient."""
    w, holder = leaf(), ListObject(x=torch.rand(3))
    y = checkpointed(lambda h: (find_tensor(h) * w).sin().exp())(holder)
    holder[0] = torch.rand(3)
    with pytest.raises(ChangedError, match=r"args\[0\]"):
        y.sum().backward()


@DOORS
def test_a_buffer_with_a_gradient_is_an_input_like_any_other(door):
    """A module among the arguments may have a buffer that was computed and wants a gradient."""
    base, w = leaf(), leaf()
    module = nn.Module()

    def fn(module, w):
        return (module.x * w).sin().exp()

    def step(fn):
        module.x = base * 1.5
        return torch.autograd.grad(fn(module, w).sum(), [base, w])

    module.register_buffer("x", None)
    same(step(door(fn)), step(fn))


# ---- parameters whose memory goes and comes back (ZeRO, FSDP)


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
@pytest.mark.parametrize("how", ["closure", "argument", "module"])
def test_parameters_may_be_away_between_forward_and_backward(door, trick, how):
    """As plain: no error, the same gradients."""
    p, x = nn.Parameter(torch.rand(3, 3)), leaf(2, 3)
    module = nn.Linear(3, 3, bias=False)
    module.weight = p

    def fn(x, p=p):
        return (x @ p.t()).sin().exp()

    def step(door):
        call = {"closure": fn, "argument": lambda x, p=p: door(fn)(x, p), "module": lambda x: module(x).sin().exp()}[
            how
        ]
        y = call(x) if how == "argument" else door(call)(x)
        trick(p, True)
        trick(p, False)
        return torch.autograd.grad(y.sum(), [x, p])

    with torch.no_grad():
        original = p.clone()
    have = step(door)
    assert bits(p.detach()) == bits(original)
    y = fn(x)
    same(have, torch.autograd.grad(y.sum(), [x, p]))


@DOORS
def test_parameters_may_be_gathered_inside_the_region(door):
    """ZeRO-3 as its hooks do it: the full parameter is there only while its module runs."""
    shard = torch.rand(9)
    module, x = nn.Linear(3, 3, bias=False), leaf(2, 3)

    def gather(*_):
        module.weight.data = shard.clone().view(3, 3)

    def release(*_):
        module.weight.data = torch.empty(0)

    gather()
    want = torch.autograd.grad(module(x).sin().exp().sum(), x)
    module.weight.requires_grad_(False)
    release()
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(release)
    y = door(lambda x: module(x).sin().exp())(x)
    assert module.weight.numel() == 0
    same(torch.autograd.grad(y.sum(), x), want)


@DOORS
def test_an_input_may_be_away_between_forward_and_backward(door):
    """The same for data: a batch that is moved out of memory and back."""
    x, w = torch.rand(3), leaf()
    want = torch.autograd.grad((x * w).sin().exp().sum(), w)
    y = door(lambda x: (x * w).sin().exp())(x)
    resize_storage(x, True)
    resize_storage(x, False)
    same(torch.autograd.grad(y.sum(), w), want)


# ---- enclosing hooks


class Hooks(saved_tensors_hooks):
    """Hooks that copy what they are given, and know what it was."""

    def __init__(self):
        self.packed, self.unpacked = [], 0
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor):
        self.packed.append(tensor.detach())
        return tensor.detach().clone()

    def unpack(self, copied):
        self.unpacked += 1
        return copied.clone()

    def has(self, tensor):
        """Whether the tensor's memory was given to `pack`."""
        return any(t.data_ptr() == tensor.data_ptr() for t in self.packed)


@DOORS
def test_inputs_go_through_enclosing_hooks_and_parameters_do_not(door):
    """Computed arguments, data and keyword arguments are saved by what encloses the region; leaves are referenced."""
    base, p, data, nested = leaf(3, 3), nn.Parameter(torch.rand(3, 3)), torch.rand(3, 3), torch.rand(3, 3)

    def fn(x, p, *, data, nested):
        return ((x @ p).sin() * data + nested[0]["a"]).exp() @ p

    def step(fn, hooks=None):
        x = base * 1.5
        if hooks is None:
            y = fn(x, p, data=data, nested=[{"a": nested}])
        else:
            with hooks:
                y = fn(x, p, data=data, nested=[{"a": nested}])
        return x, y, torch.autograd.grad(y.sum(), [base, p])

    hooks = Hooks()
    x, _, have = step(door(fn), hooks)
    same(have, step(fn)[-1])
    assert hooks.has(x)
    assert hooks.has(data)
    assert hooks.has(nested)
    assert not hooks.has(p)
    assert not hooks.has(base)
    assert len(hooks.packed) == 3
    assert hooks.unpacked >= 3


@DOORS
def test_what_the_region_saves_does_not_reach_enclosing_hooks(door):
    """The innermost region owns what is saved inside it; what leaves it is saved outside (rule 1)."""
    base, hooks = leaf(), Hooks()
    with hooks:
        x = base * 1.5
        y = door(lambda x: x.sin().exp().cos())(x)
        z = y.exp()
    assert len(hooks.packed) == 2
    assert hooks.has(x)
    assert hooks.has(z)


@DOORS
def test_save_on_cpu_around_a_region(door):
    """Inputs and kept values are offloaded; gradients are plain's, also with `retain_graph`."""
    base, p = leaf(3, 3), nn.Parameter(torch.rand(3, 3))

    def fn(x):
        return keep((x @ p).sin()).exp() @ p

    want = torch.autograd.grad(fn(base * 1.5).sum(), [base, p])
    with save_on_cpu():
        y = door(fn)(base * 1.5)
    same(torch.autograd.grad(y.sum(), [base, p], retain_graph=True), want)
    same(torch.autograd.grad(y.sum(), [base, p]), want)


@DOORS
def test_save_on_cpu_inside_a_region(door):
    """Hooks entered inside a region own what is saved inside of them, in forward and in recompute."""
    base = leaf(3, 3)

    def fn(x):
        y = x.sin()
        with save_on_cpu():
            y = y.exp()
        return y.cos()

    want = torch.autograd.grad(fn(base * 1.5).sum(), base)
    y = door(fn)(base * 1.5)
    same(torch.autograd.grad(y.sum(), base), want)


@DOORS
def test_hooks_may_return_another_layout(door):
    """A hook that gives back a contiguous copy of a transposed tensor changes no bit."""
    base, w = leaf(3, 4), torch.rand(4, 3)

    def fn(x, w):
        return (x.t() * w).sin().exp()

    want = torch.autograd.grad(fn(base * 1.5, w).sum(), base)
    with saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
        y = door(fn)((base * 1.5), w)
        z = door(lambda x, w: (x * w.t()).sin().exp())((base * 1.5), w)
    same(torch.autograd.grad(y.sum(), base), want)
    assert torch.autograd.grad(z.sum(), base)[0].shape == base.shape


def test_inputs_are_fetched_once_per_backward():
    """An offloaded input comes back once, however many tensors are recomputed from it."""
    base, hooks = leaf(), Hooks()
    for door in (rerun, replay, scope):
        hooks = Hooks()
        with hooks:
            y = door(lambda x: (x.sin().exp() * x.cos().exp()).tanh())(base * 1.5)
        y.sum().backward()
        assert hooks.unpacked == 1, door.__name__


@DOORS
def test_a_region_in_a_region_hands_its_input_out(door):
    """The inner region's input is recomputed by the outer one: each operator once."""
    base = leaf()

    def fn(x):
        inner = checkpointed(lambda x: x.exp().sin().exp())
        return inner(x.tan()).cos()

    y = door(fn)(base * 1.5)
    ran = count(y.sum().backward)
    assert ran["tan"] == 1
    want = torch.autograd.grad((base * 1.5).tan().exp().sin().exp().cos().sum(), base)
    same([base.grad], want)


class Saves(torch.autograd.Function):
    """Saves what it does not need, after its work is done."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.clone()

    @staticmethod
    def backward(ctx, g):
        return g, None


@DOORS
@pytest.mark.parametrize("how", ["another", "transposed"])
def test_a_tensor_that_becomes_another_right_after_it_was_saved(door, how):
    """No operator runs between the two: what is recomputed reads the new one."""

    def fn(a, p):
        x, other = p * 2, p * 3
        view = x.detach().t()
        z = Saves.apply(a, x)
        x.data = view if how == "transposed" else other
        y = (a + x).exp()
        return z.sum() + (y * a).sum()

    a, p = leaf(3, 3), torch.rand(3, 3)
    expected = torch.autograd.grad(fn(a, p), a)[0]
    assert bits(torch.autograd.grad(door(fn)(a, p), a)[0]) == bits(expected)
