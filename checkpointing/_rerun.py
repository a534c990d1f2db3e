"""Source 1: call the function again.

The inputs are saved as an operator would save them: through the enclosing hooks, so that they may be offloaded or
recomputed themselves; parameters and other leaves are referenced (rule 2). Every tensor in the arguments, at any
depth, is guarded by its version (rule 8). Containers are copied, so that what the caller does to a list or a dict
afterwards does not reach the rerun; other objects are handed to the rerun as they are.

Rejected: `functools.partial` of the live arguments (torch, for everything but positional tensors): a keyword or
nested tensor that is changed before backward then gives wrong gradients without a word.
"""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import _torch, errors
from ._ambient import Ambient, Generators, has_rng
from ._engine import (
    Frame,
    Held,
    Name,
    Recompute,
    identity,
    is_parameter,
    named,
    root_of,
    thread,
    unpack,
    without_recording,
)
from ._tree import ATOMS, NO_OBJECTS, Build, attributes_of, open_container

# Bound once: these run for every call.
_enclosing_hooks = _torch.enclosing_hooks
_save_input = _torch.save_input
_push_hooks, _pop_hooks = _torch.push_hooks, _torch.pop_hooks
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, _torch.set_grad_enabled
_get_state, _set_state = torch.default_generator.get_state, torch.default_generator.set_state
_SavedTensor = _torch.SavedTensor

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
PreserveRngState = bool | Literal["all"]


class Rerun:
    """The function, its saved inputs and the state it ran in."""

    __slots__ = (
        "_ambient",
        "_cpu_state",
        "_function",
        "_hooks",
        "_inputs",
        "_outer",
        "_pins",
        "_results",
        "_rng",
        "_surroundings",
        "buffers",
        "context",
        "guards_leaves",
        "policy",
    )

    save = None
    at_hand = None

    def __init__(
        self,
        function: Callable[..., Any],
        alone: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: PreserveRngState,
        outer: Any,
    ) -> None:
        """`alone`: the function `stands_alone`. `outer`: the region that this one is in."""
        self._function = function
        self._hooks = hooks = _enclosing_hooks()
        self._inputs = inputs = Inputs(args, kwargs, hooks)
        self._surroundings: Surroundings | None = None
        if not alone or inputs.functions:
            self._surroundings = around = Surroundings(function, *inputs.functions)
            inputs.modules += around.modules
            inputs.generators += around.generators
        self.context: AbstractContextManager[Any] | None = None  # entered around the rerun
        self._ambient = ambient = Ambient()
        self.buffers: Buffers | None = None
        if inputs.modules:
            self.buffers = Buffers(inputs.modules)
            inputs.see(self.buffers.devices)
        # Leaves that the function finds by itself are no arguments. Those that come from elsewhere in the rerun than in
        # the forward (hooks, copies of buffers) have other version counters.
        finds_leaves = self._surroundings is not None or self.buffers is not None
        self.guards_leaves = hooks is None and self.buffers is None if finds_leaves else None
        if ambient.states is not None:  # restoring them may write tensors that the function finds by itself
            self.guards_leaves = False
            if self._surroundings is not None:
                self._surroundings.guard_only_leaves()
        self._cpu_state: Tensor | None = None  # of the default random generator
        self._rng: Generators | None = None  # the others
        if preserve_rng_state:
            self._cpu_state = _get_state()
            if inputs.devices or inputs.generators or preserve_rng_state == "all":
                self._rng = Generators(False, inputs.devices, inputs.generators, preserve_rng_state == "all")
        self._pins: list[tuple[Held, int]] = []
        self._results: list[Any] = []
        self._outer = outer
        self.policy = None if outer is None else outer.policy

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(root_of(tensor)):  # not computed
            return tensor
        if isinstance(self._outer, Rerun | Pinned):
            # Its own rerun runs this region anew, which must not decide anew.
            tensor = self._outer.keep(tensor)
        self._pins.append((Held(tensor, self._hooks, "a value given to keep()"), _torch.version(tensor)))
        return tensor

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        return tensor if self._outer is None else self._outer.tag(tensor, name)

    def keep_for_inner(self, tensor: Tensor) -> None:
        """The region inside runs anew in a rerun, and what it keeps is made there."""

    def yield_to_inner(self, change: int) -> None:
        if self._outer is not None:
            self._outer.yield_to_inner(change)

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._results.append(_FAILED)
        place = len(self._results) - 1  # it may call others
        # What it saves is no slot of the region, since the recompute won't save it.
        _torch.push_hooks(detached, identity)
        try:
            result = function(*args, **kwargs) if self._outer is None else self._outer.once(function, args, kwargs)
        finally:
            _torch.pop_hooks()
        self._results[place] = _Result(result, args, kwargs, self._hooks)
        return result

    def recompute(self, request: Recompute) -> None:
        if self._surroundings is not None:
            self._surroundings.check(request.frame)
        args, kwargs = self._inputs.restore(request.frame)
        present = None if self.buffers is None else self.buffers.enter(request.frame)
        others = None if self._rng is None else self._rng.enter()
        now = None
        if self._cpu_state is not None:
            now = _get_state()
            _set_state(self._cpu_state)
        grad_mode = _is_grad_enabled()
        _set_grad_enabled(True)
        if self._pins or self._results or self.policy is not None:
            thread.region = Pinned(self._pins, self._results, self.policy, request.frame)
        _push_hooks(request.packer(), identity)
        try:
            self._ambient.run(self._function if self.context is None else self._with_context, *args, **kwargs)
            request.ran_to_its_end = True
        finally:
            _pop_hooks()
            _set_grad_enabled(grad_mode)
            if now is not None:
                _set_state(now)
            if others is not None:
                Generators.leave(others)
            if present is not None:
                Buffers.leave(present)

    def _with_context(self, *args: Any, **kwargs: Any) -> None:
        assert self.context is not None
        with self.context:
            self._function(*args, **kwargs)


def detached(tensor: Tensor) -> Tensor:
    """The pack hook for a graph that holds its tensors itself: a live one would be a cycle, if it is the output."""
    return tensor.detach() if tensor.requires_grad else tensor


def is_internal(hooks: _torch.Hooks) -> bool:
    """Whether these hooks are those of a region or of a rerun, rather than the user's."""
    return hooks[1] is unpack or hooks[1] is identity


class Pinned:
    """Where `keep` and functions that run once go while the function is called again: it hands back what the forward
    pinned or recorded, in order."""

    def __init__(self, pins: list[tuple[Held, int]], results: list[Any], policy: Any, where: Frame) -> None:
        self._pins = iter(pins)
        self._results = iter(results)
        self.policy = policy  # regions inside must keep what they kept in the forward
        self._where = where

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(root_of(tensor)):
            return tensor
        pin, version = next(self._pins, (None, 0))
        if pin is None:  # backward inside the region, met again by the rerun, may run ahead of the forward
            return tensor
        region, thread.region = thread.region, None  # hooks of others may call functions again (rule 3)
        try:
            value = pin.fetch(self._where)
        finally:
            thread.region = region
        if tensor.requires_grad:
            return _Pin.apply(tensor, value)  # type: ignore[no-untyped-call, no-any-return]
        return copy_of(value, version)

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = next(self._results, _FAILED)
        if type(result) is _Result:
            return result.restore(args, kwargs, self._where)
        if not self._where.complete:  # a rerun that a backward inside the region asked for, ahead of the forward
            return None
        raise errors.not_recorded(self._where, getattr(function, "__qualname__", repr(function)))

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        return tensor

    def keep_for_inner(self, tensor: Tensor) -> None:
        pass

    def yield_to_inner(self, change: int) -> None:
        pass


_FAILED = object()  # a call that raised


class _Result:
    """What a function that runs once has returned: tensors held, containers copied. What it passes through from its
    arguments is the recompute's own."""

    __slots__ = ("_saved",)

    def __init__(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: _torch.Hooks | None) -> None:
        passed = {id(value): key for key, value in _by_place(args, kwargs).items() if type(value) not in ATOMS}
        self._saved = self._save(result, passed, hooks)

    def _save(self, value: Any, passed: dict[int, Any], hooks: _torch.Hooks | None) -> Any:
        if id(value) in passed:
            return _Passed(passed[id(value)])
        if isinstance(value, Tensor):
            in_graph = value.requires_grad and not value.is_leaf  # of the region, which would be a cycle
            held = Held(value.detach() if in_graph else value, hooks, "what a forward_only function returned")
            return _Returned(held, in_graph, _torch.version(value))
        opened = None if type(value) in ATOMS else open_container(value)
        if opened is None:
            return value
        parts, build = opened
        return _Container(build, {key: self._save(part, passed, hooks) for key, part in parts.items()})

    def restore(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: Frame) -> Any:
        return self._build(self._saved, _by_place(args, kwargs), where)

    def _build(self, saved: Any, places: dict[int | str, Any], where: Frame) -> Any:
        kind = type(saved)
        if kind is _Passed:
            return places[saved.key]
        if kind is _Returned:
            tensor = saved.held.fetch(where)
            if tensor.requires_grad:  # a leaf
                return tensor
            return copy_of(tensor.requires_grad_() if saved.in_graph else tensor, saved.version)
        if kind is _Container:
            return saved.build({key: self._build(part, places, where) for key, part in saved.parts.items()})
        return saved


class _Passed(NamedTuple):
    key: int | str


class _Returned(NamedTuple):
    held: Held
    in_graph: bool
    version: int


def copy_of(tensor: Tensor, version: int) -> Tensor:
    """A copy for the function to write to, at the version that the original had: saved versions are compared."""
    copy = tensor.clone()
    if version > 0:
        _torch.set_version(copy, version)
    return copy


def _by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    places: dict[int | str, Any] = dict(enumerate(args))
    return places | kwargs


class _Pin(torch.autograd.Function):
    # The pinned value with the recomputed tensor's place in the graph.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()  # the function may write it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# ---- modules

_SMALL = 1 << 16  # bytes: a copy of that costs less than to find out whether it is needed
# Larger buffers that a forward in training mode has left alone: no longer copied, but watched.
_quiet: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class Buffers:
    """The buffers of the modules that a region runs, as they were before it: the rerun starts from these, and what it
    writes is dropped (rule 7).

    Small buffers of modules in training mode are always copied, because some kernels write running statistics without
    a trace. A large one is copied until a forward has left it alone; if a later one writes it, that rerun is refused.
    """

    __slots__ = ("_copies", "_lazy", "_lost", "_watched", "devices")

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self._copies: list[tuple[nn.Module, str, Tensor]] = []
        self._watched: list[tuple[nn.Module, str, Tensor, int]] = []
        self._lost: list[tuple[nn.Module, str]] = []
        self.devices: set[torch.device] = set()
        self._lazy: list[tuple[nn.Module, str]] = []
        stack: list[nn.Module | None] = list(modules)
        seen: set[nn.Module] = set()
        while stack:
            module = stack.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            stack.extend(_torch.children(module))
            for parameter in _torch.own_parameters(module):
                if parameter is not None and not parameter.is_cpu:
                    self.devices.add(parameter.device)
            for name, buffer in _torch.own_buffers(module).items():
                if buffer is not None and not nn.parameter.is_lazy(buffer):
                    self._note(module, name, buffer)
                elif buffer is not None:
                    self._lazy.append((module, name))

    def _note(self, module: nn.Module, name: str, buffer: Tensor) -> None:
        is_small = buffer.nbytes <= _SMALL
        if module.training and not buffer.requires_grad and (is_small or name not in _quiet.get(module, ())):
            # Below the tape: an enclosing scope has no use for the copies.
            self._copies.append((module, name, without_recording(torch.clone, buffer)))
        if not is_small or not module.training or buffer.requires_grad:
            self._watched.append((module, name, buffer, _torch.version(buffer)))

    def settle(self) -> None:
        """After the forward: which buffers has it written?"""
        copied = {(module, name) for module, name, _ in self._copies}
        for module, name, buffer, version in self._watched:
            if _torch.own_buffers(module).get(name) is buffer and _torch.version(buffer) == version:
                _quiet.setdefault(module, set()).add(name)
                copied.discard((module, name))
            elif (module, name) not in copied:
                self._lost.append((module, name))
                _quiet.get(module, set()).discard(name)
        self._copies = [copy for copy in self._copies if copy[:2] in copied]
        for module, name in self._lazy:  # made by this forward: its first value is gone, but it is not written twice
            new = _torch.own_buffers(module)[name]
            if new is not None:
                self._copies.append((module, name, without_recording(torch.clone, new)))
        self._watched.clear()

    def enter(self, where: object) -> list[tuple[nn.Module, str, Tensor | None]]:
        """Give the modules their buffers of before the forward; returns what `leave` needs."""
        for module, name in self._lost:
            raise errors.written(where, f"{type(module).__name__}.{name}")
        present = [(module, name, _torch.own_buffers(module)[name]) for module, name, _ in self._copies]
        copies = [before.clone() for _, _, before in self._copies]
        for (module, name, _), copy in zip(present, copies, strict=True):
            _torch.own_buffers(module)[name] = copy
        return present

    @staticmethod
    def leave(present: list[tuple[nn.Module, str, Tensor | None]]) -> None:
        for module, name, buffer in present:
            _torch.own_buffers(module)[name] = buffer


class Surroundings:
    """The modules and tensors that functions can be seen to use besides their arguments: themselves, what they are
    bound to, and what they and the functions around them name in closures and globals. What only a method or an
    imported function knows is not found."""

    __slots__ = ("generators", "modules", "tensors")

    def __init__(self, *functions: Any) -> None:
        self.modules: tuple[nn.Module, ...] = ()
        self.generators: tuple[torch.Generator, ...] = ()
        self.tensors: tuple[tuple[str, Tensor, int], ...] = ()
        seen: set[CodeType] = set()
        for function in functions:
            if isinstance(function, nn.Module):
                self.modules += (function,)
            else:
                self._look_at(function, seen)

    def _look_at(self, function: Any, seen: set[CodeType]) -> None:
        while isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                self._note("an argument of a partial", value, seen)
            function = function.func
        code = getattr(function, "__code__", None)
        if code is None:
            self._note("self", getattr(function, "__self__", function), seen)
            return
        if code in seen:
            return
        seen.add(code)
        names = _names.get(code)
        if names is None:
            names = _names[code] = _names_of_objects(function)
        for name in names:
            self._note(name, function.__globals__.get(name), seen)
        if function.__closure__ is not None:
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True):
                with contextlib.suppress(ValueError):  # not yet set
                    self._note(name, cell.cell_contents, seen)
        if type(function) is MethodType:
            self._note("self", function.__self__, seen)

    def _note(self, name: str, value: Any, seen: set[CodeType]) -> None:
        if isinstance(value, nn.Module):
            self.modules += (value,)
        elif isinstance(value, Tensor):
            self.tensors += ((name, value, _torch.version(value)),)
        elif isinstance(value, torch.Generator):
            self.generators += (value,)
        elif type(value) is FunctionType and not value.__module__.startswith("torch."):
            self._look_at(value, seen)
        elif type(value) not in ATOMS and not isinstance(value, NO_OBJECTS):
            for path, part in _parts_in(value, name, set()):
                if not isinstance(part, Tensor):
                    self._note(path, part, seen)

    def guard_only_leaves(self) -> None:
        self.tensors = tuple(entry for entry in self.tensors if entry[1].requires_grad)

    def check(self, where: Frame) -> None:
        for name, tensor, version in self.tensors:
            if _torch.version(tensor) != version:
                raise errors.changed(where, named(f"'{name}'", tensor), version, _torch.version(tensor))


def stands_alone(function: Any) -> bool:
    """Whether a function has nothing around it but torch: no closure, and no global that could lead to a tensor."""
    if type(function) is not FunctionType or function.__closure__ is not None:
        return False
    code = function.__code__
    alone = _alone.get(code)
    if alone is None:
        values = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        alone = _alone[code] = all(isinstance(v, _NO_TENSORS) and _home(v) in ("torch", "math") for v in values)
    return alone


def _home(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


_NO_TENSORS = (type, ModuleType, FunctionType, BuiltinFunctionType)
_alone: dict[CodeType, bool] = {}


def nothing_requires_grad(args: tuple[Any, ...]) -> bool:
    """Whether arguments are plain values and tensors that need no gradient."""
    for value in args:
        kind = type(value)
        if kind is Tensor:
            if value.requires_grad:
                return False
        elif kind not in ATOMS:
            return False
    return True


# The globals of a function that may hold modules, tensors or more functions of the same file; looked for once, at its
# first call.
_names: dict[CodeType, tuple[str, ...]] = {}


def _names_of_objects(function: Any) -> tuple[str, ...]:
    names, no_objects = function.__globals__, (type, ModuleType, BuiltinFunctionType)
    return tuple(
        name
        for name in function.__code__.co_names
        if name in names
        and not isinstance(names[name], no_objects)
        and getattr(names[name], "__globals__", names) is names
    )


# ---- arguments


class _Argument:
    """A tensor argument that belongs to a graph: it comes back with its place in that graph."""

    __slots__ = ("_live", "_name", "_saved", "_version")

    def __init__(self, tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> None:
        self._name = name
        if is_parameter(root_of(tensor)):  # a view of a leaf
            self._saved: _torch.SavedInput = _torch.NotSaved(tensor)
            self._live: Callable[[], Tensor | None] | None = lambda: tensor
            self._version = tensor._version
            return
        self._saved = _torch.save_input(tensor, False)
        if hooks is None or hooks[1] is unpack:  # autograd, or a region of ours, guards the version
            self._live = None
        else:
            self._live = weakref.ref(tensor)
            self._version = tensor._version

    def fetch(self, where: Frame) -> Tensor:
        if self._live is not None:
            live = self._live()
            if live is not None and live._version != self._version:
                raise errors.changed(where, named(self._name, live), self._version, live._version)
        try:
            return self._saved.unpack()
        except RuntimeError as error:
            raise _as_changed(error, self._name, where) from error


def _as_changed(error: RuntimeError, name: Name, where: Frame) -> RuntimeError:
    """What autograd says about a saved tensor that has been written, in our words."""
    if isinstance(error, errors.CheckpointError) or "modified by an inplace" not in str(error):
        return error
    now, was = [*re.findall(r"version (\d+)", str(error)), None, None][:2]
    return errors.changed(where, named(name), was, now)


class _Given(Held):
    """A tensor argument that needs no gradient. The very object comes back if it still is what it was: functions ask
    for identity, and for attributes that somebody has set."""

    __slots__ = ("_given",)

    def __init__(self, tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> None:
        super().__init__(tensor, hooks, name)
        # Weakly: it may be written in place later by what this region computes, and would own itself.
        self._given: Callable[[], Tensor | None] = weakref.ref(tensor) if type(tensor) is Tensor else lambda: tensor

    def fetch(self, where: Frame) -> Tensor:
        tensor, given = super().fetch(where), self._given()
        return given if given is not None and _torch.is_same(given, tensor) else tensor


class Inputs:
    """The arguments of one call: tensors saved, containers copied, everything guarded."""

    __slots__ = ("_args", "_hooks", "_kwargs", "_objects", "devices", "functions", "generators", "modules")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: _torch.Hooks | None) -> None:
        self._hooks = hooks
        self._objects: tuple[tuple[object, str, list[tuple[str, weakref.ref[Tensor], int]]], ...] = ()
        self.devices: tuple[torch.device, ...] = ()
        self.generators: tuple[torch.Generator, ...] = ()
        self.modules: tuple[nn.Module, ...] = ()
        self.functions: tuple[Any, ...] = ()
        self._args: list[Any] = [*args]
        self._kwargs = kwargs
        is_quick = hooks is None and _SavedTensor is not None
        for i, value in enumerate(args):
            kind = type(value)
            if is_quick and (kind is Tensor or kind is nn.Parameter) and value.requires_grad and value.is_cpu:
                self._args[i] = _save_input(value, False)  # autograd guards the version
            elif kind not in ATOMS:
                self._args[i] = self._save(value, "args", i)
        if kwargs:
            self._kwargs = {k: self._save(v, "kwargs", k) for k, v in kwargs.items()}

    def restore(self, where: Frame) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as they were; `ChangedError` names the first that has changed."""
        for value, path, seen in self._objects:
            self._check_object(value, path, seen, where)
        args = self._args.copy()
        for i, saved in enumerate(args):
            if type(saved) is _SavedTensor:
                try:
                    args[i] = saved.unpack()  # type: ignore[attr-defined]
                except RuntimeError as error:
                    raise _as_changed(error, ("args", i), where) from error
            else:
                args[i] = _rebuild(saved, where)
        return args, {k: _rebuild(v, where) for k, v in self._kwargs.items()} if self._kwargs else self._kwargs

    def _save(self, value: Any, parent: str, key: Any) -> Any:
        """What stands for `value` until the rerun."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, Tensor):
            if not value.is_cpu:
                self.see((value.device,))
            if value.requires_grad:
                return (Held if value.is_leaf else _Argument)(value, self._hooks, (parent, key))
            return _Given(value, self._hooks, (parent, key))
        if isinstance(value, torch.Generator):
            self.generators += (value,)
            return value
        if isinstance(value, nn.Module):
            self.modules += (value,)
            return value
        if isinstance(value, NO_OBJECTS):
            if type(value) is FunctionType or type(value) is MethodType:
                self.functions += (value,)
            return value
        path = f"{parent}[{key!r}]"
        opened = open_container(value)
        if opened is not None:
            parts, build = opened
            return _Container(build, {k: self._save(v, path, k) for k, v in parts.items()})
        seen: list[tuple[str, weakref.ref[Tensor], int]] = []
        for name, part in _parts_in(value, path, set()):
            if isinstance(part, nn.Module):
                self.modules += (part,)
            elif isinstance(part, torch.Generator):
                self.generators += (part,)
            else:
                self.see((part.device,))
                seen.append((name, weakref.ref(part), _torch.version(part)))
        if seen:
            self._objects += ((value, path, seen),)
        return value

    def see(self, devices: Iterable[torch.device]) -> None:
        """Fork the random generators of these, too."""
        for device in devices:
            if device not in self.devices and has_rng(device):
                self.devices += (device,)

    @staticmethod
    def _check_object(value: object, path: str, seen: list[tuple[str, weakref.ref[Tensor], int]], where: Frame) -> None:
        now = dict(_parts_in(value, path, set()))
        for name, ref, version in seen:
            tensor: Any = now.get(name)
            if not isinstance(tensor, Tensor) or tensor is not ref():
                raise errors.replaced(where, name)
            if _torch.version(tensor) != version:
                raise errors.changed(where, named(name, tensor), version, _torch.version(tensor))


class _Container:
    """A saved container: how to build one of its kind, and what stands for its parts."""

    __slots__ = ("build", "parts")

    def __init__(self, build: Build, parts: dict[Any, Any]) -> None:
        self.build = build
        self.parts = parts


def _rebuild(saved: Any, where: Frame) -> Any:
    kind = type(saved)
    if kind is _Argument or kind is Held or kind is _Given:
        return saved.fetch(where)
    if kind is _Container:
        return saved.build({k: _rebuild(v, where) for k, v in saved.parts.items()})
    return saved


def _parts_in(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The tensors and modules that an object reaches through its attributes and the containers among them."""
    if isinstance(value, Tensor | nn.Module | torch.Generator):
        yield path, value
    elif type(value) not in ATOMS and not isinstance(value, NO_OBJECTS) and id(value) not in seen:
        seen.add(id(value))
        opened = open_container(value)
        if opened is not None:
            for key, part in opened[0].items():
                yield from _parts_in(part, f"{path}[{key!r}]", seen)
        else:
            if isinstance(value, list | tuple | set | frozenset):
                for i, part in enumerate(value):
                    yield from _parts_in(part, f"{path}[{i}]", seen)
            for name, part in attributes_of(value).items():
                yield from _parts_in(part, f"{path}.{name}", seen)
