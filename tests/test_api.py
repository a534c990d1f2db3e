"""The two doors: what can be decorated and what stays as it was, what a scope object is, what each option changes."""

import copy
import dataclasses
import functools
import gc
import inspect
import operator
import pickle
import threading
import types
import weakref

import pytest
import torch
from oracle import bits, count
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from checkpointing import CheckpointError, Stats, checkpoint_scope, checkpointed, disabled, is_recomputing, keep

BACKENDS = pytest.mark.parametrize("backend", ["rerun", "replay"])


def leaf(*shape):
    """A tensor that wants a gradient."""
    return torch.rand(*shape or (3, 3)).requires_grad_()


def body(x):
    """Plain autograd would hold the sine for backward, and computes it once."""
    return x.sin().exp()


def is_region(fn, *args, **kwargs):
    """Whether backward of the call recomputes; the gradient, too, must be plain's."""
    x = leaf()
    y = fn(x, *args, **kwargs)
    ran = count(y.sum().backward)
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    assert bits(x.grad) == bits(expected)
    return ran.get("sin", 0) == 1


# ---- what can be decorated


def bare(decorate):
    """A plain function."""
    return decorate(body)


def other_lambda(decorate):
    """A lambda."""
    return decorate(lambda x: x.sin().exp())


def decorated_again(decorate):
    """A function that is a region already."""
    return decorate(decorate(body))


def bound_method(decorate):
    """A method that has its object."""
    return decorate(Methods(decorate).undecorated)


def method(decorate):
    """A method decorated in its class."""
    return Methods(decorate).make().method


def static_inside(decorate):
    """`@staticmethod` above the decorator, called on an object."""
    return Methods(decorate).make().static_inside


def static_outside(decorate):
    """`@staticmethod` below the decorator, called on the class."""
    return type(Methods(decorate).make()).static_outside


def class_inside(decorate):
    """`@classmethod` above the decorator, called on the class."""
    return type(Methods(decorate).make()).class_inside


def class_outside(decorate):
    """`@classmethod` below the decorator, called on an object."""
    return Methods(decorate).make().class_outside


def callable_object(decorate):
    """An object with `__call__`."""
    return decorate(Callable())


def partial(decorate):
    """A `functools.partial` with a positional and a keyword argument bound."""
    return decorate(functools.partial(lambda f, x, *, g: g(f(x)), torch.sin, g=torch.exp))


def composed_builtins(decorate):
    """A built-in function; it has no signature of Python's."""
    sin, exp = decorate(torch.sin), decorate(torch.exp)
    return decorate(lambda x: exp(sin(x)))


def module_instance(decorate):
    """A module."""
    return decorate(Body())


def sequential_instance(decorate):
    """A module of torch's own."""
    return decorate(nn.Sequential(Body(), nn.Identity()))


def module_class(decorate):
    """An `nn.Module` subclass."""
    return decorate(type("Fresh", (Body,), {}))()


def module_forward(decorate):
    """`forward` decorated in its class."""

    class Inside(nn.Module):
        @decorate
        def forward(self, x):
            return body(x)

    return Inside()


class Callable:
    def __call__(self, x):
        return body(x)


class Body(nn.Module):
    """A module without parameters."""

    def forward(self, x):
        return body(x)


class Methods:
    """A class with every kind of method, each decorated both ways round."""

    def __init__(self, decorate):
        self.decorate = decorate

    def undecorated(self, x):
        """A method; what it uses of `self` is there."""
        assert self.decorate is not None
        return body(x)

    def make(self):
        """An object of that class."""
        decorate = self.decorate

        class Decorated:
            scale = 1.0

            @decorate
            def method(self, x):
                return body(x) * self.scale

            @staticmethod
            @decorate
            def static_inside(x):
                return body(x)

            @decorate
            @staticmethod
            def static_outside(x):
                return body(x)

            @classmethod
            @decorate
            def class_inside(cls, x):
                return body(x) * cls.scale

            @decorate
            @classmethod
            def class_outside(cls, x):
                return body(x) * cls.scale

        return Decorated()


FORMS = [
    *(bare, other_lambda, decorated_again, bound_method, method, static_inside, static_outside, class_inside),
    *(class_outside, callable_object, partial, composed_builtins, module_instance, sequential_instance),
    *(module_class, module_forward),
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize(
    "decorate",
    [
        checkpointed,
        checkpointed(),
        lambda fn: checkpointed(fn, name="direct"),
        checkpointed(backend="replay"),
        lambda fn: checkpointed(fn, backend="replay"),
        lambda fn: checkpointed(checkpointed(fn), backend="replay"),
    ],
    ids=["bare", "called", "with options", "replay, called", "replay with options", "both"],
)
def test_every_form_is_a_region(form, decorate):
    """Whatever is decorated, backward recomputes once and gives plain's gradients."""
    fn = form(decorate)
    assert is_region(fn)
    assert is_region(fn)  # it may be called any number of times


@BACKENDS
def test_options_reach_static_and_class_methods(backend):
    """Decorating the descriptor object is decorating the function in it."""
    assert not is_region(static_outside(checkpointed(backend=backend, enabled=False)))
    assert not is_region(class_outside(checkpointed(backend=backend, enabled=False)))


def test_the_decorator_is_reusable():
    """One `checkpointed(...)` decorates any number of functions."""
    decorate = checkpointed(name="shared")
    assert is_region(decorate(body))
    assert is_region(decorate(lambda x: x.sin().exp()))


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_descriptors_stay_what_they_are(kind):
    """A decorated static or class method object is one again."""
    assert type(checkpointed(kind(body))) is kind


def generator(x):
    yield x.sin()


async def coroutine(x):
    return x.sin()


async def async_generator(x):
    yield x.sin()


class GeneratorObject:
    def __call__(self, x):
        yield x


class GeneratorModule(nn.Module):
    def forward(self, x):
        yield x


class AsyncModule(nn.Module):
    async def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (generator, "generator function generator"),
        (coroutine, "async function coroutine"),
        (async_generator, "async generator function async_generator"),
        (functools.partial(functools.partial(generator), 1), "generator function"),
        (staticmethod(generator), "generator function"),
        (classmethod(coroutine), "async function"),
        (GeneratorObject(), "generator function"),
        (GeneratorObject().__call__, "generator function"),
        (GeneratorModule(), "generator function"),
        (AsyncModule(), "async function"),
        (type("Generators", (GeneratorModule,), {}), "generator function"),
        (Callable, "class Callable"),
        (int, "class int"),
        (torch.autograd.Function, "class Function"),
        (property(body), "property"),
        (3, "3"),
        ("body", "'body'"),
        (torch.ones(1), "tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@BACKENDS
def test_what_cannot_be_a_region_is_refused_at_once(fn, word, backend):
    """Generator and async functions, plain classes and what can't be called: `TypeError` that says which."""
    with pytest.raises(TypeError, match=f"checkpointed .*{word}"):
        checkpointed(fn, backend=backend)
    with pytest.raises(TypeError, match=f"checkpointed .*{word}"):
        checkpointed(backend=backend)(fn)


def test_fn_is_positional_only_and_options_are_keyword_only():
    """The signature says so, for both doors."""
    fn, *options = inspect.signature(checkpointed).parameters.values()
    assert (fn.kind, fn.default) == (inspect.Parameter.POSITIONAL_ONLY, None)
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options)
    assert [(option.name, option.default) for option in options] == [
        ("backend", None),
        ("enabled", True),
        ("preserve_rng_state", True),
        ("early_stop", True),
        ("determinism_check", "metadata"),
        ("policy", None),
        ("debug", False),
        ("name", None),
    ]
    scope = inspect.signature(checkpoint_scope).parameters.values()
    assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in scope)
    assert [(option.name, option.default) for option in scope] == [
        (option.name, option.default) for option in options if option.name != "backend"
    ]


# ---- what stays as it was


def documented(x, /, y: int = 1, *rest, flag: bool = False, **others) -> "torch.Tensor":
    """What it does."""
    return x.sin().exp()


documented.attribute = "kept"


@BACKENDS
def test_functions_keep_their_face(backend):
    """Name, module, docstring, signature, annotations and attributes are those of the function."""
    fn = checkpointed(documented, backend=backend)
    assert type(fn) is types.FunctionType
    assert (fn.__name__, fn.__qualname__, fn.__module__) == ("documented", "documented", __name__)
    assert fn.__doc__ == "What it does."
    assert inspect.signature(fn) == inspect.signature(documented)
    assert fn.__annotations__ == documented.__annotations__
    assert fn.attribute == "kept"
    assert fn.__wrapped__ is documented


@checkpointed
def picklable(x):
    """Found by its name."""
    return body(x)


@checkpointed(backend="replay")
def picklable_replay(x):
    """Found by its name."""
    return body(x)


class Owner:
    """An object whose method is a region."""

    @checkpointed
    def method(self, x):
        return body(x)

    @checkpointed
    @staticmethod
    def static(x):
        return body(x)

    @classmethod
    @checkpointed
    def make(cls, x):
        return body(x)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_functions_are_pickled_by_name(protocol):
    """A decorated function at module level comes back as itself, methods with their object; copies as well."""
    for fn in (picklable, picklable_replay, Owner.static):
        assert pickle.loads(pickle.dumps(fn, protocol)) is fn
        assert copy.deepcopy(fn) is fn
    assert is_region(pickle.loads(pickle.dumps(Owner().method, protocol)))
    assert is_region(pickle.loads(pickle.dumps(Owner.make, protocol)))


@checkpointed
class Block(nn.Module):
    """A module class that is a region."""

    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, x, *, flip: bool = False):
        """What the block does."""
        return (self.linear(-x if flip else x) * self.scale).sin().exp()


class PlainBlock(nn.Module):
    """The same, without a region."""

    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 1.5))

    def forward(self, x, *, flip: bool = False):
        """What the block does."""
        return (self.linear(-x if flip else x) * self.scale).sin().exp()


@checkpointed(backend="replay")
class ReplayBlock(PlainBlock):
    """Inherits everything, its `forward` as well."""


class Wider(Block):
    """A subclass that calls the region of its parent."""

    def forward(self, x, *, flip: bool = False):
        return super().forward(x, flip=flip).cos()


@checkpointed
class WiderRegion(Block):
    """A subclass that is a region around the region of its parent."""

    def forward(self, x, *, flip: bool = False):
        return super().forward(x, flip=flip).cos()


def gradients(module, x, **kwargs):
    """The bits of a step."""
    module.zero_grad()
    y = module(x, **kwargs)
    grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    return [bits(t) for t in (y, *grads)]


def recomputes(module, x):
    """How often backward computes the exponential, which no derivative does."""
    return count(module(x).sum().backward).get("exp", 0)


@pytest.mark.parametrize("cls", [Block, ReplayBlock])
@pytest.mark.parametrize("flip", [False, True])
def test_module_classes_compute_what_they_did(cls, flip):
    """Same outputs and gradients, bit for bit; backward recomputes."""
    plain, module, x = PlainBlock(), cls(), leaf(2, 3)
    module.load_state_dict(plain.state_dict())
    assert gradients(module, x, flip=flip) == gradients(plain, x, flip=flip)
    assert (recomputes(plain, x), recomputes(module, x)) == (0, 1)


@pytest.mark.parametrize("cls", [Block, ReplayBlock])
def test_module_classes_stay_classes(cls):
    """`isinstance`, name, signature and docstring of `forward`, and `state_dict` keys are unchanged."""
    module = cls()
    assert isinstance(cls, type)
    assert isinstance(module, cls)
    assert isinstance(module, nn.Module)
    assert type(module) is cls
    assert cls.__module__ == __name__
    assert cls.forward.__name__ == "forward"
    assert cls.forward.__doc__ == "What the block does."
    assert inspect.signature(cls.forward) == inspect.signature(PlainBlock.forward)
    assert list(module.state_dict()) == list(PlainBlock().state_dict()) == ["scale", "linear.weight", "linear.bias"]
    assert repr(module) == repr(PlainBlock()).replace("PlainBlock", cls.__name__)
    assert module.forward.__self__ is module


def test_decorating_a_class_returns_that_class_and_leaves_its_parent_alone():
    """The class is changed in place; a parent that only lent its `forward` is not."""

    class Child(PlainBlock):
        pass

    assert checkpointed(Child) is Child
    assert "forward" in vars(Child)
    x = leaf(2, 3)
    assert recomputes(Child(), x) == 1
    assert recomputes(PlainBlock(), x) == 0


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: type(module)().train(module.training),
    ],
    ids=["deepcopy", "pickle", "state_dict"],
)
@pytest.mark.parametrize("cls", [Block, ReplayBlock, Wider, WiderRegion])
def test_modules_are_copied_and_pickled_like_any(cls, copied):
    """A copy is a module of its own, of the same class, that computes the same and recomputes, too."""
    module, x = cls(), leaf(2, 3)
    twin = copied(module)
    twin.load_state_dict(module.state_dict())
    assert type(twin) is cls
    assert gradients(twin, x) == gradients(module, x)
    assert recomputes(twin, x) == recomputes(module, x)
    with torch.no_grad():
        twin.linear.weight.zero_()
    assert module.linear.weight.abs().sum() > 0


def test_a_subclass_calls_super_forward():
    """The parent's `forward` is a region when a subclass calls it, also from within a region of its own."""
    plain, x = PlainBlock(), leaf(2, 3)

    class WiderPlain(PlainBlock):
        def forward(self, x, *, flip=False):
            return super().forward(x, flip=flip).cos()

    plain = WiderPlain()
    for cls in (Wider, WiderRegion):
        module = cls()
        module.load_state_dict(plain.state_dict())
        assert gradients(module, x) == gradients(plain, x)
    assert recomputes(Wider(), x) == 1
    # Once for what the outer region saves, which needs the inner one's result, and once for the inner one.
    assert recomputes(WiderRegion(), x) in (1, 2)


@BACKENDS
def test_a_module_instance_is_not_changed(backend):
    """What comes back is another object; the module has the attributes that it had, and its hooks run."""
    module, x = PlainBlock(), leaf(2, 3)
    before, forward, klass = dict(vars(module)), module.forward, type(module)
    calls = []
    run = checkpointed(module, backend=backend)
    assert run.__wrapped__ is module
    assert vars(module) == before
    assert (module.forward, type(module)) == (forward, klass)
    assert recomputes(run, x) == 1
    assert recomputes(module, x) == 0
    module.register_forward_pre_hook(lambda *_: calls.append(is_recomputing()))
    run(x).sum().backward()
    assert calls == ([False, True] if backend == "rerun" else [False])


@BACKENDS
def test_results_of_any_kind_come_back_as_they_are(backend):
    """The object that the function returned is the object that the caller gets."""
    for result in (None, 3, "text", object(), [leaf()], (leaf(), None), {"a": leaf()}, leaf()):
        assert checkpointed(lambda result=result: result, backend=backend)() is result


# ---- options that contradict each other or do not exist


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "eager"}, ["backend", "'eager'", "'rerun', 'replay' or 'reentrant'"]),
        ({"backend": "Rerun"}, ["'Rerun'"]),
        ({"policy": [], "backend": "rerun"}, ["policy", "tape", "'rerun'", "backend='replay'"]),
        ({"policy": [], "backend": "reentrant"}, ["policy", "tape", "'reentrant'"]),
        ({"determinism_check": "value"}, ["determinism_check", "'value'", "'metadata', 'values', 'none'"]),
        ({"determinism_check": None}, ["determinism_check", "None"]),
        ({"determinism_check": True}, ["determinism_check", "True"]),
        ({"determinism_check": ["metadata"]}, ["determinism_check", "metadata"]),
    ],
    ids=str,
)
def test_bad_options_are_refused_at_decoration(options, words):
    """`ValueError` that names the option, what it got and what it takes."""
    for decorate in (lambda: checkpointed(**options), lambda: checkpointed(body, **options)):
        with pytest.raises(ValueError) as caught:
            decorate()
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("check", ["value", None, True, ["metadata"]], ids=str)
def test_bad_options_are_refused_by_the_scope(check):
    """At the call, before anything is entered."""
    with pytest.raises(ValueError, match="determinism_check"):
        checkpoint_scope(determinism_check=check)


@pytest.mark.parametrize("door", [checkpointed, checkpoint_scope])
def test_unknown_options_are_type_errors(door):
    """As for any Python function."""
    with pytest.raises(TypeError, match="use_reentrant"):
        door(use_reentrant=False)


@pytest.mark.parametrize("door", [checkpoint_scope])
def test_the_scope_takes_no_backend_and_no_contexts(door):
    """A block can't be called again."""
    for option in ("backend", "context_fn"):
        with pytest.raises(TypeError, match=option):
            door(**{option: None})


# ---- the scope object


def test_a_scope_is_a_region():
    """Backward of a block recomputes, and gives plain's gradients."""

    def scoped(x):
        with checkpoint_scope():
            return body(x)

    assert is_region(scoped)


@pytest.mark.parametrize("options", [{}, {"enabled": False}, {"name": "mine"}], ids=str)
def test_a_scope_is_entered_once(options):
    """A second enter raises, inside the block and after it, and says what to do; the first block is not disturbed."""
    scope, x = checkpoint_scope(**options), leaf()
    with scope as entered:
        assert entered is scope
        with pytest.raises(CheckpointError, match=f"scope '{options.get('name', 'scope')}' has been entered before"):
            scope.__enter__()
        y = body(x)
    with pytest.raises(CheckpointError, match=r"Make a new one with checkpoint_scope\(\.\.\.\)"), scope:
        raise AssertionError("not reached")
    y.sum().backward()
    assert bits(x.grad) == bits(torch.autograd.grad(body(x).sum(), x)[0])


def test_a_scope_does_not_swallow_exceptions():
    """What the block raises leaves the block, and `stats` can be read all the same."""
    with pytest.raises(KeyError, match="mine"), checkpoint_scope() as scope:
        leaf().sin()
        raise KeyError("mine")
    assert isinstance(scope.stats, Stats)


def test_stats_are_numbers_of_the_moment():
    """Nothing before the block; what it holds after it; what backward ran after that."""
    x = leaf(10, 10)
    scope = checkpoint_scope()
    assert scope.stats == Stats()
    with scope:
        y = keep(x.sin()).exp().cos()
        inside = scope.stats
    after = scope.stats
    y.sum().backward()
    done = scope.stats
    assert (inside.ops_recorded, inside.replays, inside.ops_replayed) == (3, 0, 0)
    assert (after.ops_recorded, after.replays, after.ops_replayed) == (3, 0, 0)
    assert after.bytes_kept == 400
    assert done.ops_recorded == 3
    assert (done.replays, done.ops_replayed) == (1, 1)
    assert (done.bytes_held, done.bytes_kept) == (0, 0)


def test_stats_are_frozen():
    """Assigning to a number or to the property raises; two of the same numbers are equal."""
    with checkpoint_scope() as scope:
        leaf().sin()
    stats = scope.stats
    assert dataclasses.is_dataclass(stats)
    assert {f.name for f in dataclasses.fields(stats)} >= {
        *("ops_recorded", "ops_replayed", "replays", "bytes_saved", "bytes_held", "bytes_kept")
    }
    for field in dataclasses.fields(stats):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(stats, field.name, 1)
    with pytest.raises(AttributeError):
        scope.stats = stats
    assert (stats, hash(stats)) == (scope.stats, hash(scope.stats))


# ---- turning regions off


def scoped(x):
    """A block as a function."""
    with checkpoint_scope():
        return body(x)


REGIONS = pytest.mark.parametrize(
    "fn", [checkpointed(body), checkpointed(body, backend="replay"), scoped], ids=["rerun", "replay", "scope"]
)


@REGIONS
def test_disabled_makes_regions_plain_calls(fn):
    """Inside, nested any way; an exception in the block puts it back."""
    with disabled():
        assert not is_region(fn)
        with disabled():
            assert not is_region(fn)
        assert not is_region(fn)
    assert is_region(fn)
    with pytest.raises(KeyError), disabled():
        raise KeyError
    assert is_region(fn)


@REGIONS
def test_disabled_counts_when_a_region_is_entered(fn):
    """A region from before is recomputed under `disabled()`, one from inside of it is not recomputed after it."""
    x = leaf()
    before = fn(x)
    with disabled():
        inside = fn(x)
        assert count(before.sum().backward)["sin"] == 1
    assert "sin" not in count(inside.sum().backward)


def test_disabled_is_for_this_thread():
    """Another thread's regions are regions."""
    found = []
    with disabled():
        thread = threading.Thread(target=lambda: found.append(is_region(checkpointed(body))))
        thread.start()
        thread.join()
    assert found == [True]


@pytest.mark.parametrize("enabled", [True, False])
def test_enabled(enabled):
    """`enabled=False` is a plain call and a plain block; nothing is recorded."""
    assert is_region(checkpointed(body, enabled=enabled)) is enabled
    assert is_region(checkpointed(body, backend="replay", enabled=enabled)) is enabled
    with checkpoint_scope(enabled=enabled) as scope:
        body(leaf())
    assert (scope.stats == Stats()) is not enabled


def test_is_recomputing_tells_forward_from_rerun():
    """False in forward, True in the rerun and in what it calls, False in another thread, False afterwards."""
    seen = []

    @checkpointed
    def inner(x):
        seen.append(("inner", is_recomputing()))
        return x.sin().exp()

    @checkpointed
    def outer(x):
        seen.append(("outer", is_recomputing()))
        thread = threading.Thread(target=lambda: seen.append(("thread", is_recomputing())))
        thread.start()
        thread.join()
        return inner(x).cos()

    y = outer(leaf()).sum()
    assert seen == [("outer", False), ("thread", False), ("inner", False)]
    seen.clear()
    y.backward()
    assert seen[:3] == [("outer", True), ("thread", False), ("inner", True)]
    assert all(recomputing for name, recomputing in seen if name != "thread")
    assert not is_recomputing()


def test_replay_does_not_run_python_again():
    """Side effects of a block, and of a function under replay, happen once."""
    calls = []

    def noisy(x):
        calls.append(is_recomputing())
        return body(x)

    for fn in (checkpointed(noisy, backend="replay"), lambda x: scoped_of(noisy, x)):
        calls.clear()
        assert is_region(fn)
        assert calls == [False]


def scoped_of(fn, x):
    """`fn` in a block."""
    with checkpoint_scope():
        return fn(x)


# ---- grad mode off


class Modes(TorchDispatchMode):
    """Something to look for on the stack of modes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def around(what):
    """What a region sets while its code runs."""
    what.append((torch._C._autograd._top_saved_tensors_default_hooks(True), torch._C._len_torch_dispatch_stack()))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
@BACKENDS
def test_grad_mode_off_is_a_plain_call(mode, backend):
    """No hook and no mode; arguments and intermediates die at once."""
    seen = []

    @checkpointed(backend=backend)
    def fn(x):
        around(seen)
        middle = x.sin()
        refs.append(weakref.ref(middle))
        return middle.exp()

    refs, x = [], leaf()
    with mode():
        y = fn(x)
    refs.append(weakref.ref(x))
    del x
    assert seen == [(None, 0)]
    assert [ref() for ref in refs] == [None, None]
    assert not y.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference"])
def test_grad_mode_off_is_a_plain_block(mode):
    """Nothing is recorded, and the stats say so."""
    seen, x = [], leaf()
    with mode(), checkpoint_scope() as scope:
        around(seen)
        body(x)
    assert seen == [(None, 0)]
    assert scope.stats == Stats()


@REGIONS
def test_nothing_that_requires_grad_leaves_nothing(fn):
    """With grad mode on, a region over plain data holds none of it when it is done."""
    x = torch.rand(3)
    y, ref = fn(x), weakref.ref(x)
    del x
    assert ref() is None
    assert y.grad_fn is None


def test_nothing_that_requires_grad_is_not_stashed():
    """The scope held nothing and kept nothing, dropout or not."""
    with checkpoint_scope() as scope:
        torch.nn.functional.dropout(torch.rand(3), 0.5).sin().exp()
    assert (scope.stats.bytes_saved, scope.stats.bytes_held, scope.stats.bytes_kept) == (0, 0, 0)


def test_grad_mode_inside_a_region_is_its_own_affair():
    """`no_grad` in a region, `enable_grad` in a region under `no_grad`: as plain."""

    def fn(x):
        with torch.no_grad():
            scale = x.sin().exp()
        return (x * scale).sin().exp()

    x = leaf()
    expected = torch.autograd.grad(fn(x).sum(), x)
    for backend in ("rerun", "replay"):
        have = torch.autograd.grad(checkpointed(fn, backend=backend)(x).sum(), x)
        assert bits(have[0]) == bits(expected[0])


# ---- every option changes something


def test_backend_decides_whether_python_runs_again():
    """Rerun calls the function twice, replay once; None is rerun, and with a policy replay."""
    calls = []

    def fn(x):
        calls.append(1)
        return body(x)

    for options, expected in (
        ({}, 2),
        ({"backend": None}, 2),
        ({"backend": "rerun"}, 2),
        ({"backend": "replay"}, 1),
        ({"policy": [torch.ops.aten.mm.default]}, 1),
    ):
        calls.clear()
        assert is_region(checkpointed(fn, **options))
        assert len(calls) == expected, options


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop_decides_how_far_recompute_goes(early_stop):
    """With it, a rerun ends at the last tensor that is needed and a replay runs its window only."""
    reached = []

    @checkpointed(early_stop=early_stop)
    def fn(x):
        y = x.sin().exp()
        reached.append("end")
        return y * 2

    fn(leaf()).sum().backward()
    assert reached == (["end"] if early_stop else ["end", "end"])
    x = leaf()
    with checkpoint_scope(early_stop=early_stop) as scope:
        first = x.sin().exp()
        second = x.cos().exp()
    first.sum().backward()
    assert scope.stats.ops_replayed == (2 if early_stop else 4)
    del second


@pytest.mark.parametrize("preserve", [True, False])
def test_preserve_rng_state_decides_what_a_rerun_draws(preserve):
    """Without it, a rerun draws new numbers; a scope keeps the numbers instead of a state."""
    x = leaf(100)
    masks = []

    @checkpointed(preserve_rng_state=preserve)
    def fn(x):
        mask = torch.rand(100)
        masks.append(mask)
        return (x * mask).sin().exp()

    fn(x).sum().backward()
    assert (bits(masks[0]) == bits(masks[1])) is preserve
    with checkpoint_scope(preserve_rng_state=preserve) as scope:
        y = (x * torch.rand(100)).sin().exp()
    assert (scope.stats.bytes_kept == 0) is preserve
    del y


@pytest.mark.parametrize("check", ["metadata", "values", "none"])
def test_determinism_check_decides_what_is_compared(check):
    """Another number passes "metadata", another dtype passes "none" only."""
    switch = {"add": 0.0, "dtype": torch.float32}

    @checkpointed(determinism_check=check)
    def fn(x):
        return (x + switch["add"]).to(switch["dtype"]).sin().sum()

    def outcome(**later):
        switch.update(add=0.0, dtype=torch.float32)
        y = fn(leaf())
        switch.update(later)
        try:
            y.backward()
        except CheckpointError:
            return "refused"
        return "passed"

    assert outcome() == "passed"
    assert outcome(add=1.0) == ("refused" if check == "values" else "passed")
    assert outcome(dtype=torch.float64) == ("passed" if check == "none" else "refused")


def test_determinism_check_of_a_scope():
    """A value that was changed behind autograd's back is found by "values" only."""
    for check, refused in (("metadata", False), ("values", True), ("none", False)):
        source = torch.ones(3)
        x = leaf(3)
        with checkpoint_scope(determinism_check=check):
            y = (x * source).sin()
        source.data.numpy()[0] = 2.0  # no version counter sees that
        if refused:
            with pytest.raises(CheckpointError, match="different"):
                y.sum().backward()
        else:
            y.sum().backward()


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("door", ["rerun", "replay", "scope"])
def test_debug_adds_logs_to_errors(door, debug):
    """The operators of both runs, with the user's lines; nothing of the kind without it."""
    x, source = leaf(3), torch.ones(3)

    def fn(x, source):
        return (x * source).sin()

    if door == "scope":
        with checkpoint_scope(debug=debug):
            y = fn(x, source)
    else:
        y = checkpointed(fn, backend=door, debug=debug)(x, source)
    source.add_(1)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    text = str(caught.value)
    assert ("Operations executed during the original forward" in text) is debug
    assert ("Operations executed during recomputation" in text) is debug
    assert ("aten.sin.default" in text) is debug
    assert text.startswith("region '")
    if debug:
        assert f"{__file__}:{fn.__code__.co_firstlineno + 1}" in text


@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("door", ["rerun", "replay", "scope", "module", "instance", "object"])
def test_name_is_what_messages_say(door, name):
    """The name that was given; else the function's, the class's, or 'scope'."""
    x, source = leaf(3), torch.ones(3)

    class Twisted(nn.Module):
        def forward(self, x, source):
            return (x * source).sin()

    class Doing:
        def __call__(self, x, source):
            return (x * source).sin()

    def fn(x, source):
        return (x * source).sin()

    run, own = {
        "rerun": lambda: (checkpointed(fn, name=name), fn.__qualname__),
        "replay": lambda: (checkpointed(fn, name=name, backend="replay"), fn.__qualname__),
        "scope": lambda: (named_scope(fn, name), "scope"),
        "module": lambda: (checkpointed(Twisted, name=name)(), Twisted.__qualname__),
        "instance": lambda: (checkpointed(Twisted(), name=name), Twisted.__qualname__),
        "object": lambda: (checkpointed(Doing(), name=name), Doing.__qualname__),
    }[door]()
    y = run(x, source)
    source.add_(1)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    assert str(caught.value).startswith(f"region '{name or own}' (entered at {__file__}:")


def named_scope(fn, name):
    """`fn` in a block with a name."""

    def run(*args):
        with checkpoint_scope(name=name) as scope:
            assert scope.name == (name or "scope")
            return fn(*args)

    return run


@pytest.mark.parametrize("door", ["rerun", "replay", "scope"])
def test_options_may_be_any_object_and_are_not_held(door):
    """A check or policy that can't be hashed works, and nothing refers to it when the region is gone."""

    @dataclasses.dataclass
    class Check:
        seen: int = 0

        def __call__(self, tensor):
            self.seen += 1
            return tensor.shape

    check = Check()
    if door == "scope":
        with checkpoint_scope(determinism_check=check):
            y = body(leaf())
    else:
        y = checkpointed(body, backend=door, determinism_check=check)(leaf())
    y.sum().backward()
    assert check.seen > 1
    ref = weakref.ref(check)
    del check, y
    gc.collect()
    assert ref() is None


# ---- odds and ends


@BACKENDS
def test_no_arguments_and_a_closure(backend):
    """A function may take nothing and read everything from around it."""
    x = leaf()
    y = checkpointed(lambda: body(x), backend=backend)()
    assert count(y.sum().backward)["sin"] == 1
    assert bits(x.grad) == bits(torch.autograd.grad(body(x).sum(), x)[0])


@BACKENDS
def test_recursion(backend):
    """A region that calls itself."""

    @checkpointed(backend=backend)
    def deep(x, n):
        return x if n == 0 else deep(x.sin(), n - 1).exp()

    def plain(x, n):
        return x if n == 0 else plain(x.sin(), n - 1).exp()

    x = leaf()
    assert bits(torch.autograd.grad(deep(x, 4).sum(), x)[0]) == bits(torch.autograd.grad(plain(x, 4).sum(), x)[0])


@BACKENDS
def test_partials_and_operators(backend):
    """`functools.partial` objects keep working when called with more arguments; so do C functions."""
    power = checkpointed(functools.partial(torch.pow, exponent=3), backend=backend)
    times = checkpointed(operator.mul, backend=backend)
    x, w = leaf(), leaf()
    have = torch.autograd.grad(times(power(x), w).sum(), (x, w))
    want = torch.autograd.grad((x.pow(3) * w).sum(), (x, w))
    assert [bits(t) for t in have] == [bits(t) for t in want]
