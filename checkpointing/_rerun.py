"""Source 1: call the function again.

The rerun gets back what the contract lists, and nothing else: its arguments and the variables that it closes over, as
an operator would save them (through the enclosing hooks; parameters by reference) and guarded by their versions;
random and ambient state; the buffers of modules in training mode, rewound in place for the time of the rerun; and what
was given to `keep` or came from `forward_only` functions. Whatever else the function reads (globals, attributes,
the inside of the user's own objects) is what it is when backward runs.

Invariant: a recompute changes nothing of the user's but buffers, variables that the function closes over, and random
and ambient state, in place, and puts them back. What it does not own it may refuse, at the slot that needs it, but
never replace.

Rejected: looking for everything that a function might read or write. That search has no end in Python, costs more than
the region, and what it then exchanges belongs to others (FSDP's shards, ranks that are threads, caches).
"""

from __future__ import annotations

import contextvars
import functools
import math
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import _torch, errors
from ._ambient import Ambient, Generators, Undo, has_rng, undo_all
from ._engine import Frame, Held, Holder, Holding, Name, Recompute, Source, copy_of, identity, is_parameter, named, root_of
from ._region import Region, thread, without_recording
from ._tree import ATOMS, Field, leaves_of, put_together, take_apart

# Bound once: these run for every call.
_enclosing_hooks = _torch.enclosing_hooks
_push_hooks, _pop_hooks = _torch.push_hooks, _torch.pop_hooks
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, _torch.set_grad_enabled
_parts_of, _has_storage = _torch.parts_of_module, _torch.has_storage
_Module, _partial, _Norm = nn.Module, functools.partial, _torch.Normalisation

PreserveRngState = bool | Literal["all"]


class Inputs:
    """What goes into one call: how to hold it, and what is found on the way."""

    devices: frozenset[torch.device] = frozenset()
    generators: tuple[torch.Generator, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    objects: tuple[tuple[Name, object], ...] = ()  # handed over as they are
    _hooks: _torch.Hooks | None = None

    def hold(self, value: Any, name: Name) -> Any:
        """What stands for an argument, or a part of one, until the rerun."""
        if isinstance(value, Tensor):
            if not value.is_cpu:
                self.devices |= {value.device}
            return Held(value, self._hooks, name, True)
        if isinstance(value, torch.Generator):
            self.generators += (value,)
        else:
            self.look_at(value)
            self.objects += ((name, value),)
        return value

    def capture(self, function: Any) -> list[tuple[CellType, Any]] | None:
        """The cells of the variables that the function closes over, each with what stands for its contents."""
        if type(function) is MethodType:
            self.look_at(function.__self__)
            function = function.__func__
        if type(function) is not FunctionType:  # a module, or another object that can be called
            self.look_at(function)
            return None
        code, scope = function.__code__, function.__globals__
        names = code.co_names
        if CodeType in map(type, code.co_consts):  # comprehensions, lambdas
            names = (*names, *[name for const in code.co_consts if type(const) is CodeType for name in const.co_names])
        for name in names:
            if isinstance(scope.get(name), _Module):
                self.modules += (scope[name],)
        if function.__defaults__ or function.__kwdefaults__:
            for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self.look_at(default)
        if function.__closure__ is None:
            return None
        return [
            (cell, self._save_variable(contents_of(cell), name))
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
        ]

    def _save_variable(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor | torch.Generator):
            return self.hold(value, f"the variable '{name}'")
        self.look_at(value)
        return value

    def look_at(self, value: Any, depth: int = 2) -> None:
        """Find the modules of what a function is bound to or closes over: the object itself, those among its own
        attributes or in a small list or dict, and those of a function that it wraps."""
        kind = type(value)
        if kind in ATOMS or isinstance(value, Tensor):
            return
        if isinstance(value, _Module):
            self.modules += (value,)
        elif kind is list or kind is tuple or kind is dict:
            if len(value) <= 100:  # larger ones are not searched
                self._take(value.values() if kind is dict else value)
        elif kind is FunctionType or kind is MethodType:
            if kind is MethodType:
                self.look_at(value.__self__, depth - 1)
            for cell in (value.__closure__ or ()) if depth else ():
                self.look_at(contents_of(cell), depth - 1)
        elif kind is _partial:
            for part in (value.func, *value.args, *value.keywords.values()):
                self.look_at(part, depth - 1)
        elif not isinstance(value, type):
            self._take(getattr(value, "__dict__", {}).values())

    def _take(self, parts: Iterable[Any]) -> None:
        self.modules += tuple([part for part in parts if isinstance(part, _Module)])


class Rerun(Region, Source, Inputs):
    """The function, its saved inputs and the state it ran in."""

    context: AbstractContextManager[Any] | None = None  # entered around the rerun
    _buffers: Buffers | None = None
    _cpu_state: Tensor | None = None
    _rng: Generators | None = None
    _pins: tuple[Pin, ...] = ()
    _results: tuple[Any, ...] = ()

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: PreserveRngState,
    ) -> None:
        outer = thread.region
        if outer is not None:
            self.policy = outer.policy
        self._hooks = hooks = _enclosing_hooks()
        while type(function) is _partial:
            args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
        self._function = function
        met: dict[int, Any] = {}  # a container that is two arguments stays one
        self._args: list[Any] = []
        for i, value in enumerate(args):
            name = ("args", i)
            plain = type(value) is Tensor and value.is_cpu
            self._args.append(Held(value, hooks, name, True) if plain else take_apart(value, self.hold, name, met))
        self._kwargs = kwargs
        if kwargs:
            self._kwargs = {k: take_apart(v, self.hold, ("kwargs", k), met) for k, v in kwargs.items()}
        self._has_containers = bool(met)
        self._variables = self.capture(function)
        if self.modules:
            self._buffers = Buffers(self) or None
        self.ambient = Ambient()
        if preserve_rng_state:
            self._cpu_state = _torch.get_cpu_state()
            if self.devices or self.generators or preserve_rng_state == "all":
                devices = filter(has_rng, self.devices)
                self._rng = Generators(False, devices, self.generators, preserve_rng_state == "all")

    # ---- as a region

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(root_of(tensor)):  # not computed
            return tensor
        if isinstance(self.outer, Rerun | Repeated):
            tensor = self.outer.keep(tensor)  # its own rerun runs this region anew, which must not decide anew
        self._pins += (Pin.of(tensor, self._hooks, "a value given to keep()"),)
        return tensor

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = len(self._results)  # it may call others
        self._results += (_FAILED,)
        # What it saves is no slot of the region, since the recompute won't save it.
        _push_hooks(detached, identity)
        try:
            result = function(*args, **kwargs) if self.outer is None else self.outer.once(function, args, kwargs)
        finally:
            _pop_hooks()
        places: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        passed = {id(value): Passed(key) for key, value in places.items() if type(value) not in ATOMS}

        def save(part: Any, _: Name) -> Any:
            if id(part) in passed:  # it is the recompute's own
                return passed[id(part)]
            return (
                Pin.of(part, self._hooks, "what a forward_only function returned") if isinstance(part, Tensor) else part
            )

        kept = passed.get(id(result)) or take_apart(result, save)
        self._results = (*self._results[:place], kept, *self._results[place + 1 :])
        return result

    def keep_for_inner(self, tensor: Tensor) -> None:
        """The region inside runs anew in a rerun, and what it keeps is made there."""

    # ---- as a source

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A parameter, which is referenced (rule 2)."""
        _, version, is_all, parameter = holder.saved
        if not is_all:
            return None
        if parameter._version != version:
            raise errors.changed(where, named("a parameter", parameter), version, parameter._version)
        return parameter  # type: ignore[no-any-return]

    def holdings(self, frame: Frame) -> Iterable[Holding]:
        variables = [saved for _, saved in self._variables or ()]
        for held in [leaf for saved in (*self._args, *self._kwargs.values(), *variables) for leaf in leaves_of(saved)]:
            if type(held) is Held and not held.is_parameter:
                yield Holding("input", held, named(held.name))
        for pin in [*self._pins, *[leaf for result in self._results for leaf in leaves_of(result)]]:
            if type(pin) is Pin and not pin.held.is_parameter:
                yield Holding("kept", pin.held, named(pin.held.name))
        for state in () if self._rng is None else self._rng.states:
            yield Holding("random state", state, None)
        for copy in () if self._buffers is None else self._buffers.copies():
            yield Holding("buffers", copy, None)

    def knows(self, parameters: tuple[Tensor, ...]) -> bool:
        return any(known is parameter for m in self.modules for known in m.parameters() for parameter in parameters)

    def hint(self, saved: Any, recomputed: Any) -> str:
        """Which arguments the region may have changed itself: objects that are handed over as they are, and hold a
        tensor of the size that the recompute has met."""
        grown = [named(name) for name, value in self.objects if _holds(value, recomputed)]
        return errors.grown(grown, recomputed is not None) if grown else ""

    def recompute(self, request: Recompute) -> None:
        where = request.frame
        function, args, kwargs = self.restored(where)
        undo: Undo = []
        try:
            context = self.go_back(where, undo)
            if self._buffers is not None:
                request.rewound = self._buffers.storages()
            if self._pins or self._results or self.policy is not None:
                thread.region = Repeated(self._pins, self._results, self.policy, where)
            request.begin_in_order()
            _push_hooks(request.pack, identity)
            try:
                context.run(function, *args, **kwargs)
                request.ran_to_its_end = True
            finally:
                _pop_hooks()
        finally:
            undo_all(undo)

    def restored(self, where: object) -> tuple[Any, list[Any], dict[str, Any]]:
        """The function and its arguments."""

        function, kwargs = self._function, self._kwargs
        if self._has_containers:
            met: dict[int, Any] = {}

            def build(saved: Any) -> Any:
                return put_together(saved, lambda part: part.fetch(where) if type(part) is Held else part, met)

            args = [build(saved) for saved in self._args]
            kwargs = {k: build(saved) for k, saved in kwargs.items()}
        else:
            args = [saved.fetch(where) if type(saved) is Held else saved for saved in self._args]
            if kwargs:
                kwargs = {k: saved.fetch(where) if type(saved) is Held else saved for k, saved in kwargs.items()}
        if self.context is not None:
            function = functools.partial(_call_within, self.context, function)
        return function, args, kwargs

    def go_back(self, where: object, undo: Undo) -> contextvars.Context:
        """Enter the state that the forward was called in; `undo` is given the way out, the last first. Returns the
        context to run in."""
        if self._variables:
            then = [(cell, saved.fetch(where) if type(saved) is Held else saved) for cell, saved in self._variables]
            undo.append((_fill, [(cell, contents_of(cell)) for cell, _ in then]))
            _fill(then)  # in place: what the function calls may share them
        undo.append((_set_grad_enabled, _is_grad_enabled()))
        _set_grad_enabled(True)
        if self._buffers is not None:
            self._buffers.enter(where, undo)
        context = self.ambient.enter(undo)
        if self._cpu_state is not None:
            undo.append((_torch.set_cpu_state, _torch.get_cpu_state()))
            _torch.set_cpu_state(self._cpu_state)
        if self._rng is not None:
            undo.append((Generators.leave, self._rng.enter([])))
        return context


def _call_within(context: AbstractContextManager[Any], function: Any, *args: Any, **kwargs: Any) -> None:
    with context:
        function(*args, **kwargs)


class Repeated(Region):
    """The region of a rerun: hands back what the forward kept or recorded, in order."""

    def __init__(self, pins: Iterable[Pin], results: Iterable[Any], policy: Any, where: Frame) -> None:
        self._pins, self._results = iter(pins), iter(results)
        self.policy = policy  # regions inside must keep what they kept in the forward
        self._where = where

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(root_of(tensor)):
            return tensor
        pin = next(self._pins, None)
        if pin is None:  # backward inside the region, met again by the rerun, may run ahead of the forward
            return tensor
        region, thread.region = thread.region, None  # hooks of others may call functions again (rule 3)
        try:
            value = pin.held.fetch(self._where)
        finally:
            thread.region = region
        if tensor.requires_grad:
            return _InPlaceOf.apply(tensor, value)  # type: ignore[no-untyped-call, no-any-return]
        return copy_of(value, pin.version)

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = next(self._results, _FAILED)
        if result is _FAILED:
            if not self._where.complete:  # a rerun that a backward inside the region asked for, ahead of the forward
                return None
            raise errors.not_recorded(self._where, getattr(function, "__qualname__", repr(function)))
        places: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}

        def restore(saved: Any) -> Any:
            if type(saved) is Passed:
                return places[saved.key]
            return saved.restore(self._where) if type(saved) is Pin else saved

        return put_together(result, restore)


_FAILED = object()  # a call that raised


class Pin(NamedTuple):
    """A value of the forward that the rerun must not compute anew."""

    held: Held
    in_graph: bool
    version: int

    @classmethod
    def of(cls, tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> Pin:
        return cls(Held(tensor, hooks, name), tensor.requires_grad and not tensor.is_leaf, _torch.version(tensor))

    def restore(self, where: Frame) -> Tensor:
        tensor = self.held.fetch(where)
        if tensor.requires_grad:  # a leaf
            return tensor
        return copy_of(tensor.requires_grad_() if self.in_graph else tensor, self.version)


class Passed(NamedTuple):
    """Stands for an argument of a `forward_only` function that it has returned."""

    key: int | str


class _InPlaceOf(torch.autograd.Function):
    # The kept value with the recomputed tensor's place in the graph.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()  # the function may write it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def detached(tensor: Tensor) -> Tensor:
    """The pack hook for a graph that holds its tensors itself: a live one would be a cycle, if it is the output."""
    return tensor.detach() if tensor.requires_grad else tensor


# ---- variables


def contents_of(cell: CellType) -> Any:
    """What is in a cell; the cell itself while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _fill(cells: list[tuple[CellType, Any]]) -> None:
    """Give cells these contents, where they have others."""
    for cell, value in cells:
        if value is cell:
            del cell.cell_contents
        elif contents_of(cell) is not value:
            cell.cell_contents = value


def _holds(value: object, metadata: Any, depth: int = 5) -> bool:
    """Whether an object holds a tensor (of that size) in its attributes, items, or theirs; asked for messages."""
    if isinstance(value, Tensor):
        return metadata is None or (isinstance(metadata, tuple) and value.numel() == math.prod(metadata[0]))
    if depth == 0 or isinstance(value, type | _Module | FunctionType):
        return False
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    parts = [*parts, *getattr(value, "__dict__", {}).values()]
    return len(parts) < 1000 and any(_holds(part, metadata, depth - 1) for part in parts)


# ---- buffers

_SMALL = 1 << 16  # bytes: up to that a copy before every forward costs little


class Buffers:
    """The buffers of the modules that a region runs, as they were before it.

    Those of modules in training mode are copied, and rewound in place while the function is called
    again: so they are written once (rule 7), and aliases, views and what is keyed by the tensor stay what they are.
    Larger ones and those of modules in evaluation mode are guarded by version.
    """

    __slots__ = ("_entries", "_guarded", "_then")

    def __init__(self, inputs: Inputs) -> None:
        self._entries: Entries = []
        self._guarded: list[tuple[nn.Module, str, Tensor, int]] = []
        small: list[Tensor] = []  # what shares memory is rewound twice, to the same
        stack: list[Any] = [*inputs.modules]
        seen = set()
        while stack:
            module = stack.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            children, parameters, buffers = _parts_of(module)
            if children:
                stack += children.values()
            for parameter in parameters.values():
                if parameter is not None and not parameter.is_cpu:
                    inputs.devices |= {parameter.device}
            if not buffers:
                continue
            self._entries.append((module, dict(buffers)))
            # The kernels of normalisation leave no trace that could be guarded.
            most = 0 if not module.training else math.inf if isinstance(module, _Norm) else _SMALL
            for name, tensor in buffers.items():
                is_plain = type(tensor) is Tensor and _has_storage(tensor) and not tensor.is_inference()
                if is_plain and most and tensor.nbytes <= most:
                    small.append(tensor)
                elif tensor is not None:
                    self._guarded.append((module, name, tensor, _torch.version(tensor)))
        self._then = _Moment(small)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def storages(self) -> set[int]:
        """Those that are rewound."""
        return set(map(_torch.storage_id, self._then.tensors))

    def copies(self) -> list[Tensor]:
        return self._then.values

    def enter(self, where: object, undo: Undo) -> None:
        """Go back; `undo` is given the way out."""
        for module, name, tensor, version in self._guarded:
            if _torch.version(tensor) != version:
                what = named((type(module).__name__, Field(name)), tensor)
                raise errors.changed(where, what, version, _torch.version(tensor))
        undo.append((_set, [(module, dict(_torch.buffers_of_module(module)[0])) for module, _ in self._entries]))
        undo.append((_Moment.go_back, self._then.again()))
        _set(self._entries)
        self._then.go_back()


Entries = list[tuple[nn.Module, dict[str, Any]]]  # with the buffers that it had


def _set(entries: Entries) -> None:
    """Buffers may have been set to other tensors. What is not persistent is a cache, with something beside it that says
    what is in it (the length that rotary embeddings have grown to): it stays as it is."""
    for module, then in entries:
        store, caches = _torch.buffers_of_module(module)
        if store.keys() != then.keys() or not all(map(operator.is_, store.values(), then.values())):
            kept = {name: store[name] for name in caches if name in store}
            store.clear()
            store.update({**then, **kept})


class _Moment:
    """What tensors hold at one moment, and their versions."""

    __slots__ = ("_versions", "memory", "tensors", "values")

    def __init__(self, tensors: list[Tensor], memory: list[Tensor] | None = None) -> None:
        self.tensors = tensors
        # Where elements have gaps between them, share their memory or stand for others: all of the storage.
        self.memory = memory or [t if t.is_contiguous() and not t.is_complex() else _torch.bytes_of(t) for t in tensors]
        self.values: list[Tensor] = without_recording(_torch.clones, self.memory) if tensors else []
        self._versions = [tensor._version for tensor in tensors]

    def again(self) -> _Moment:
        """What they hold now."""
        return _Moment(self.tensors, self.memory)

    def go_back(self) -> None:
        if self.tensors:
            without_recording(_torch.overwrite, (self.memory, self.values))
            _torch.set_versions(self.tensors, self._versions)
