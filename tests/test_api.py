"""The two doors: what can be decorated, what stays as it was, and what options change."""

import copy
import functools
import inspect
import pickle
import re
import types
import weakref

import pytest
import torch
from beside import Code
from oracle import EACH_WAY, at_once, bits, count, leaf, python_calls, scope
from torch import nn

import checkpointing
from checkpointing import CheckpointError, checkpoint_scope, checkpointed, disabled

BACKENDS = pytest.mark.parametrize("backend", ["rerun", "replay"])


def body(x):
    """Plain autograd would hold the sine for backward, and computes it once."""
    return x.sin().exp()


def is_region(fn, *args, **kwargs):
    """Whether backward of the call recomputes; the gradient, too, must be plain's."""
    x = leaf(3, 3)
    y = fn(x, *args, **kwargs)
    ran = count(y.sum().backward)
    assert bits(x.grad) == bits(torch.autograd.grad(body(x).sum(), x)[0])
    return ran.get("sin", 0) == 1


Body = type("Body", (nn.Module,), {"forward": lambda self, x: body(x)})


class Object:
    scale = 1.0

    def method(self, x):
        return body(x) * self.scale

    __call__ = method


class Bindable(Object):
    """As a decorator that is a class makes of a method: it has no name."""

    __get__ = types.MethodType


def methods(decorate):
    """An object with every kind of method, each decorated both ways round."""

    class Decorated(Object):
        decorated = decorate(lambda self, x: body(x) * self.scale)
        static_inside = staticmethod(decorate(body))
        static_outside = decorate(staticmethod(body))
        class_inside = classmethod(decorate(lambda cls, x: body(x) * cls.scale))
        class_outside = decorate(classmethod(lambda cls, x: body(x) * cls.scale))

    return Decorated()


FORMS = {
    "function": lambda d: d(body),
    "region": lambda d: d(d(body)),
    "bound method": lambda d: d(Object().method),
    "method": lambda d: methods(d).decorated,
    "static inside": lambda d: methods(d).static_inside,
    "static outside": lambda d: type(methods(d)).static_outside,
    "class inside": lambda d: type(methods(d)).class_inside,
    "class outside": lambda d: methods(d).class_outside,
    "callable object": lambda d: d(Object()),
    "decorated by a class": lambda d: d(Bindable()),
    "partial": lambda d: d(functools.partial(lambda f, x, *, g: g(f(x)), torch.sin, g=torch.exp)),
    "builtins": lambda d: d(lambda x: d(functools.partial(torch.exp, out=None))(d(torch.sin)(x))),
    "module": lambda d: d(Body()),
    "module of torch's": lambda d: d(nn.Sequential(Body(), nn.Identity())),
    "module class": lambda d: d(type("Fresh", (Body,), {}))(),
    "forward in a class": lambda d: type("Inside", (Body,), {"forward": d(Body.forward)})(),
}
DECORATORS = {
    "bare": checkpointed,
    "with options": lambda fn: checkpointed(fn, name="direct"),
    "replay, called": checkpointed(backend="replay"),
    "both": lambda fn: checkpointed(checkpointed(fn), backend="replay"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decorate", DECORATORS)
def test_every_form_is_a_region(form, decorate):
    fn = FORMS[form](DECORATORS[decorate])
    assert is_region(fn)
    assert is_region(fn)
    assert not is_region(FORMS[form](checkpointed(enabled=False)))


def generator(x):
    yield x.sin()


async def coroutine(x):
    return x.sin()


async def async_generator(x):
    yield x.sin()


GeneratorObject = type("GeneratorObject", (), {"__call__": generator})
GeneratorModule = type("GeneratorModule", (nn.Module,), {"forward": generator})
REFUSED = [
    (generator, "generator function generator"),
    (coroutine, "async function coroutine"),
    (async_generator, "async function async_generator"),
    (functools.partial(functools.partial(generator), 1), "generator function"),
    (staticmethod(generator), "generator function"),
    (classmethod(coroutine), "async function"),
    (GeneratorObject(), "generator function"),
    (GeneratorObject().__call__, "generator function"),
    (GeneratorModule(), "generator function"),
    (type("Generators", (GeneratorModule,), {}), "generator function"),
    (Object, "class Object"),
    (nn.Linear, "class Linear: it is torch's own"),
    (torch.autograd.Function, "class Function"),
    (property(body), "property"),
    (3, "3"),
    (torch.ones(1), "tensor"),
]


@pytest.mark.parametrize(("fn", "word"), REFUSED)
def test_what_cannot_be_a_region_is_refused_at_once(fn, word):
    for door in (checkpointed, checkpointed(backend="replay")):
        with pytest.raises(TypeError, match=f"checkpointed .*{word}"):
            door(fn)


def test_fn_is_positional_only_and_options_are_keyword_only():
    """At both doors; an option that there is none is a `TypeError` that names it."""
    fn, *options = inspect.signature(checkpointed).parameters.values()
    assert (fn.kind, fn.default) == (inspect.Parameter.POSITIONAL_ONLY, None)
    defaults = {"enabled": True, "preserve_rng_state": True, "early_stop": True}
    defaults |= {"determinism_check": "metadata", "policy": None, "debug": False, "report": False}
    defaults["name"] = None
    assert {option.name: option.default for option in options} == {"backend": None, **defaults}
    policy, *scope = inspect.signature(checkpoint_scope).parameters.values()
    assert policy.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {option.name: option.default for option in [policy, *scope]} == defaults
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in [*options, *scope])
    wrong = {
        "fn": lambda: checkpointed(fn=torch.sin),
        "positional": lambda: checkpointed(torch.sin, True),
        "a policy is one of": lambda: checkpoint_scope(True),
        "multiple values": lambda: checkpoint_scope([], policy=[]),
        "checkpointed has no option 'polcy', only .*enabled": lambda: checkpointed(polcy=None),
        "checkpoint_scope has no option 'polcy', only .*": lambda: checkpoint_scope(polcy=None),
        "no option 'backend', only enabled": lambda: checkpoint_scope(backend="rerun"),
    }
    for message, call in wrong.items():
        with pytest.raises(TypeError, match=message):
            call()


def documented(x, /, y: int = 1, *rest, flag: bool = False, **others) -> "torch.Tensor":
    """What it does."""
    return x.sin().exp()


documented.attribute = "kept"


@BACKENDS
def test_functions_keep_their_face(backend):
    fn = checkpointed(documented, backend=backend)
    assert type(fn) is types.FunctionType
    assert (fn.__name__, fn.__qualname__, fn.__module__) == ("documented", "documented", __name__)
    assert fn.__doc__ == "What it does."
    assert inspect.signature(fn) == inspect.signature(documented)
    assert fn.__annotations__ == documented.__annotations__
    assert (fn.attribute, fn.__wrapped__) == ("kept", documented)
    for kind in (staticmethod, classmethod):
        assert type(checkpointed(kind(body), backend=backend)) is kind
    assert checkpointed((it := Object()).method, backend=backend).__self__ is it


picklable = checkpointed(documented)
picklable.__qualname__ = picklable.__name__ = "picklable"


class Owner:
    @checkpointed
    def method(self, x):
        return body(x)

    @checkpointed(backend="replay")
    @staticmethod
    def static(x):
        return body(x)

    @classmethod
    @checkpointed
    def make(cls, x):
        return body(x)


def test_functions_are_pickled_by_name():
    for fn in (picklable, Owner.static):
        assert pickle.loads(pickle.dumps(fn)) is fn
        assert copy.deepcopy(fn) is fn
    for method in (Owner().method, Owner.make):
        assert is_region(pickle.loads(pickle.dumps(method)))


class PlainBlock(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, x, *, flip: bool = False):
        """What the block does."""
        return (self.linear(-x if flip else x) * self.scale).sin().exp()


# A module class that is a region, and inherits its `forward`.
Block = checkpointed(type("Block", (PlainBlock,), {}))


def test_module_classes_stay_classes():
    """`isinstance`, name, signature and docstring of `forward`. (Bits: test_modules.py.)"""
    module = Block()
    assert (type(Block), type(module)) == (type, Block)
    assert (Block.forward.__name__, Block.forward.__doc__) == ("forward", "What the block does.")
    assert inspect.signature(Block.forward) == inspect.signature(PlainBlock.forward)
    assert list(module.state_dict()) == ["scale", "linear.weight", "linear.bias"]
    assert repr(module) == repr(PlainBlock()).replace("PlainBlock", "Block")
    fresh = type("Fresh", (PlainBlock,), {})
    assert checkpointed(fresh) is fresh


@BACKENDS
def test_a_module_instance_is_not_changed(backend):
    module, x, calls = PlainBlock(), leaf(2, 3), []
    before, forward = dict(vars(module)), module.forward
    run = checkpointed(module, backend=backend)
    assert run.__wrapped__ is module
    assert (vars(module), module.forward, type(module)) == (before, forward, PlainBlock)
    assert [count(fn(x).sum().backward).get("exp", 0) for fn in (run, module)] == [1, 0]
    module.register_forward_pre_hook(lambda *_: calls.append(checkpointing.is_recomputing()))
    run(x).sum().backward()
    assert calls == ([False, True] if backend == "rerun" else [False])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "eager"}, ["backend", "'eager'", "'rerun', 'replay' or 'reentrant'"]),
        ({"policy": [], "backend": "rerun"}, ["policy", "recorded", "'rerun'", "backend='replay'"]),
        ({"policy": [], "backend": "reentrant"}, ["policy", "recorded", "'reentrant'"]),
        ({"debug": True, "backend": "reentrant"}, ["backend='reentrant'", "debug"]),
        ({"determinism_check": len, "backend": "reentrant"}, ["'reentrant'", "determinism_check"]),
        ({"determinism_check": "value"}, ["determinism_check", "'value'", "'metadata', 'values'"]),
        ({"determinism_check": ["metadata"]}, ["determinism_check", "metadata"]),
        ({"preserve_rng_state": "python"}, ["preserve_rng_state is True, False or 'all'"]),
        ({"preserve_rng_state": None}, ["preserve_rng_state is True, False or 'all'"]),
        ({"enabled": "0"}, ["enabled is True or False, not '0'"]),
        ({"early_stop": "no"}, ["early_stop is True or False"]),
    ],
    ids=str,
)
def test_bad_options_are_refused_at_once(options, words):
    doors = [checkpointed, functools.partial(checkpointed, body)]
    for door in doors if "backend" in options else [*doors, checkpoint_scope]:
        with pytest.raises(ValueError) as caught:
            door(**options)
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("options", [{}, {"enabled": False}, {"name": "mine"}], ids=str)
def test_a_scope_is_entered_once(options):
    scope, x = checkpoint_scope(**options), leaf(3, 3)
    said = f"scope '{scope.name}' has been entered before.* Make a new one with checkpoint_scope"
    with scope as entered:
        assert entered is scope
        with pytest.raises(CheckpointError, match=said):
            scope.__enter__()
        y = body(x)
    with pytest.raises(CheckpointError, match=said):
        scope.__enter__()
    assert count(y.sum().backward).get("sin", 0) == (0 if options.get("enabled") is False else 1)
    assert bits(x.grad) == bits(torch.autograd.grad(body(x).sum(), x)[0])


@EACH_WAY
def test_disabled_makes_regions_plain_calls(door):
    """Those entered inside, in this thread only; an exception in the block puts it back."""
    fn = door(body)
    before = fn(leaf(3, 3)).sum()
    with disabled():
        assert count(before.backward)["sin"] == 1
        with disabled():
            assert not is_region(fn)
        assert not is_region(fn)
        assert at_once(lambda: is_region(fn)) == [True]
    with pytest.raises(KeyError), disabled():
        raise KeyError
    assert is_region(fn)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@EACH_WAY
def test_grad_mode_off_is_a_plain_call(mode, door):
    """No hook, mode or operator, few function calls; arguments and values die at once."""
    seen, refs, x = [], [], leaf(3, 3)

    def fn(x):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        seen.append((hooks, torch._C._len_torch_dispatch_stack()))
        middle = x.sin()
        refs.append(weakref.ref(middle))
        return middle.exp()

    region = door(fn)
    with mode():
        y = region(x)
        refs.append(weakref.ref(x))
        del x
        assert seen == [(None, 0)]
        assert [ref() for ref in refs] == [None, None]
        assert not y.requires_grad
        assert count(lambda: region(y)) == {"sin": 1, "exp": 1}
        assert python_calls(lambda: region(y)) < python_calls(lambda: fn(y)) + 30
        with checkpoint_scope() as entered:
            fn(y)
        assert entered.stats == checkpointing.Stats()


@EACH_WAY
def test_nothing_that_requires_grad_leaves_nothing(door):
    """With grad mode on, a region over plain data holds none of it when it is done."""
    x = torch.rand(3)
    y, ref = door(body)(x), weakref.ref(x)
    del x
    assert ref() is None
    assert y.grad_fn is None
    with checkpoint_scope() as scope:
        torch.nn.functional.dropout(torch.rand(3), 0.5).sin().exp()
    assert (scope.stats.bytes_saved, scope.stats.bytes_held, scope.stats.bytes_kept) == (0, 0, 0)


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("door", ["rerun", "replay", "scope", "module", "instance", "modules"])
def test_name_is_what_messages_say(door, name):
    """The name that was given; else the function's, the class's, the module's, or 'scope'."""
    x, source = leaf(3), torch.ones(3)

    def fn(x, source):
        return (x * source).sin()

    Twisted = type("Twisted", (nn.Module,), {"forward": lambda self, *args: fn(*args)})
    model = nn.ModuleDict({"a": Twisted()})
    checkpointing.checkpoint_modules(model, "a", name=name)
    run, own = {
        "rerun": lambda: (checkpointed(fn, name=name), fn.__qualname__),
        "replay": lambda: (checkpointed(fn, name=name, backend="replay"), fn.__qualname__),
        "scope": lambda: (scope(fn, name=name), "scope"),
        "instance": lambda: (checkpointed(Twisted(), name=name), Twisted.__qualname__),
        "module": lambda: (checkpointed(Twisted, name=name)(), Twisted.__qualname__),
        "modules": lambda: (model["a"], "a"),
    }[door]()
    assert checkpoint_scope(name=name).name == (name or "scope")
    y = run(x, source)
    source.add_(1)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    where = r"\S+oracle\.py" if door == "scope" else re.escape(__file__)
    assert re.match(rf"region '{re.escape(name or own)}' \(entered at {where}:", str(caught.value))


TRANSFORMED = "UserWarning", "torch.func", "inside a region vmap, jvp and jacfwd work"
DEPRECATED = "FutureWarning", "backend='rerun'"
PROGRAM = """
import os
import sys
import warnings
import torch
from checkpointing import checkpoint_scope, checkpointed
from checkpointing.torch_compat import checkpoint, checkpoint_sequential

warnings.simplefilter("always")
rerun = checkpointed(torch.sin)
x = torch.ones(5, requires_grad=True)

def scope(x):
    with checkpoint_scope():  # scope
        return x.sin()

def run(x):
    return scope(x) if child else rerun(x)  # rerun

torch.func.vmap(torch.sin)(torch.ones(2))  # imports much
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("and the other door:", file=sys.stderr, flush=True)

checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
checkpoint_sequential([torch.sin, torch.cos], 2, x, use_reentrant=True).sum().backward()
for _ in range(3):
    checkpointed(torch.sin, backend="reentrant")(x)  # legacy
    torch.func.vmap(run)(torch.ones(2, 5))
    torch.func.grad(lambda x: run(x).sum())(torch.ones(5))
"""


def test_a_warning_is_given_once_and_points_at_user_code():
    """One per process, whatever follows, at the line that enters the region; the drop-in gives none
    of a backend that is deprecated."""
    warned, lines = Code(PROGRAM), PROGRAM.splitlines()
    assert warned.output == ""
    halves = warned.outcome.stderr.split("and the other door:\n")
    for door, said in zip(["rerun", "scope"], halves, strict=True):
        for place, (kind, *words) in ((door, TRANSFORMED), ("legacy", DEPRECATED)):
            line = 1 + next(n for n, text in enumerate(lines) if text.endswith(f"# {place}"))
            assert said.count(kind) == 1
            assert f"<string>:{line}: {kind}" in said
            assert all(word in said for word in words)


def test_slips_of_the_first_minute_are_refused_with_the_fix():
    """The result of a module in the place of the module, an option by position, a scope as a
    decorator, a module as a policy: each message is one line, of bounded length."""
    x, model = torch.ones(64, 64), PlainBlock()
    slips = {
        "not tensor.*Call what it returns": lambda: checkpointed(x),
        r"one positional argument.*checkpointed\(fn\)\(x\)": lambda: checkpointed(torch.sin, x),
        r"not auto\(\). .*Options are keywords": lambda: checkpointed(checkpointing.auto()),
        "no decorator: write `with .*`@checkpointed": lambda: checkpoint_scope()(body),
        "no decorator": lambda: checkpoint_scope(body)(x),
        "a policy is one of .*not PlainBlock": lambda: checkpoint_scope(model),
        r"a tag is a string, not tensor.*tag\(x, name\)": lambda: checkpointing.tag("name", x),
        "peak is an int, in bytes": lambda: checkpointing.auto(peak=2e9),
        "report takes tensors, such as a loss, not list": lambda: checkpointing.report([x]),
    }
    for message, call in slips.items():
        with pytest.raises(TypeError, match=message) as caught:
            call()
        assert len(str(caught.value)) < 250
        assert "\n" not in str(caught.value)


def test_what_is_assigned_to_a_module_instance_is_what_its_forward_uses():
    dropout, norm = checkpointed(nn.Dropout(0.9)), checkpointed(nn.BatchNorm1d(4))
    linear, x = checkpointed(nn.Linear(4, 4)), torch.randn(8, 4)
    dropout.p, norm.momentum = 0.0, 1.0
    linear.weight, linear.bias = nn.Parameter(torch.eye(4)), None
    assert torch.equal(dropout(x), x) and torch.equal(linear(x), x)
    norm(x)
    assert torch.allclose(norm.running_mean, x.mean(0))
    assert [name for name, _ in linear.named_parameters()] == ["weight"]
    linear.register_parameter("scale", nn.Parameter(torch.ones(4)))
    linear.register_buffer("mean", torch.ones(4))
    linear.add_module("inner", nn.Linear(4, 4, bias=False))
    assert [*linear.state_dict()] == ["weight", "scale", "mean", "inner.weight"]
    for module in (linear, nn.Sequential(linear)):  # by itself, and as a part
        assert module.load_state_dict({}, strict=False).missing_keys == [*module.state_dict()]
    assert [name for name, _ in linear.named_parameters()] == ["weight", "scale", "inner.weight"]


def test_a_module_instance_stays_a_module_of_its_model():
    """Its parameters are trained, and have the names, states and copies of plain ones."""
    x, models = leaf(4, 3), []
    for around in (lambda module: module, checkpointed):
        torch.manual_seed(0)
        inner = nn.Sequential(PlainBlock(), nn.BatchNorm1d(3), nn.Dropout())
        models.append(nn.Sequential(nn.Linear(3, 3), around(inner), around(PlainBlock())))
    plain, model = models

    def step(model):
        torch.manual_seed(1)
        return torch.autograd.grad(model(x).sum(), [*model.parameters()])

    for names in (nn.Module.named_modules, nn.Module.named_parameters, nn.Module.named_buffers):
        assert dict(names(model)).keys() == dict(names(plain)).keys()
    assert "1" not in dict(nn.Sequential(model[2], model[2]).named_modules())  # it is the first
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    model.load_state_dict(plain.state_dict())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = step(plain)
    assert checkpointed(nn.Linear(1, 1).eval()).training is False
    for each in (model, *copies):
        assert all(map(torch.equal, step(each), expected))
        assert count(each(x).sum().backward)["exp"] == 2
        assert not any(module.training for module in each.eval().modules())
    assert model[2].scale is model[2].__wrapped__.scale
    assert [*model[1]] == [model[1][0], *model[1][1:]] == [*model[1].__wrapped__]
    with pytest.raises(AttributeError, match="'PlainBlock' object has no attribute 'weight'"):
        _ = model[2].weight
