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
import dis
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import _torch, errors
from ._ambient import Ambient, Generators, Undo, has_rng, undo_all
from ._buffers import Buffers
from ._engine import Frame, Holder, Holding, Name, Recompute, Source, identity, is_parameter, named, root_of
from ._held import Held, check_version, hold, hold_argument, note_written
from ._region import Region, thread, without_recording
from ._tree import ATOMS, leaves_of, map_tensors, put_together, take_apart

# Bound once: these run for every call.
_enclosing_hooks = _torch.enclosing_hooks
_push_hooks, _pop_hooks = _torch.push_hooks, _torch.pop_hooks
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, _torch.set_grad_enabled
_Module, _partial = nn.Module, functools.partial

PreserveRngState = bool | Literal["all"]
Given = tuple[Tensor, int, Held]  # a tensor, its version, and what stands for it


class Inputs:
    """What goes into one call: how to hold it, and what is found on the way."""

    devices: frozenset[torch.device] = frozenset()
    generators: tuple[torch.Generator, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    objects: tuple[tuple[Name, object], ...] = ()  # handed over as they are
    _hooks: _torch.Hooks | None = None
    # Where hooks are around, and while the function runs: what it was given, by the id of the tensor.
    _given: dict[int, Given] | None = None
    _is_shared = False  # whether one of them was given twice

    def hold(self, value: Any, name: Name) -> Any:
        """What stands for an argument, a part of one, or a variable until the rerun: the same for one tensor, whatever
        hooks make of it the second time."""
        if isinstance(value, Tensor):
            if not value.is_cpu:
                self.devices |= {value.device}
            held = hold_argument(value, self._hooks, name)
            if self._given is None:
                return held
            first = self._given.setdefault(id(value), (value, _torch.version(value), held))[2]
            self._is_shared |= first is not held
            return first
        if isinstance(value, torch.Generator):
            self.generators += (value,)
        elif type(value) not in ATOMS:
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
        own = _assigned_by(code)
        return [
            (cell, self.hold(contents_of(cell), f"the variable '{name}'"))
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
            if name not in own
        ]

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
    _written: Mapping[Held, int] = {}  # what lies on memory that the function has written: on which

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
        if hooks is not None:
            self._given = {}
        met: dict[int, Any] = {}  # a container that is two arguments stays one
        self._args: list[Any] = []
        for i, value in enumerate(args):
            name = ("args", i)
            if type(value) is not Tensor:
                held = take_apart(value, self.hold, name, met)
            elif hooks is None and value.is_cpu:
                held = hold_argument(value, None, name)  # past one call
            else:
                held = self.hold(value, name)
            self._args.append(held)
        self._kwargs = kwargs
        if kwargs:
            self._kwargs = {k: take_apart(v, self.hold, ("kwargs", k), met) for k, v in kwargs.items()}
        self._has_containers = bool(met)
        self._variables = self.capture(function)
        if self.modules:
            self._buffers = Buffers(self)
        self.ambient = Ambient()
        if preserve_rng_state:
            self._cpu_state = _torch.get_cpu_state()
            if self.devices or self.generators or preserve_rng_state == "all":
                devices = filter(has_rng, self.devices)
                self._rng = Generators(False, devices, self.generators, preserve_rng_state == "all")

    def end(self) -> None:
        """The function has run."""
        self.outer = None
        if self._given is not None:
            self._note_writes([*self._given.values()])
            self._given = None

    def _note_writes(self, given: list[Given]) -> None:
        """Who may write gets his own: what lies on memory that the function has written."""
        changed = [held for tensor, version, held in given if _torch.version(tensor) != version]
        if not changed:
            return
        storages = {held: _torch.storage_id(tensor) for tensor, _, held in given if _torch.has_storage(tensor)}
        written = {storages[held] for held in changed if held in storages}
        self._written = {held: storage for held, storage in storages.items() if storage in written}
        note_written(self._hooks, written)

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
        outer = self.outer
        run = function if outer is None else lambda *args, **kwargs: outer.once(function, args, kwargs)
        result = _without_slots(run, args, kwargs)
        given = _given_to(args, kwargs)
        passed = {id(value): Passed(i) for i, value in enumerate(given) if type(value) not in ATOMS}

        def save(part: Any, _: Name) -> Any:
            if id(part) in passed:  # it is the recompute's own
                return passed[id(part)]
            if not isinstance(part, Tensor):
                return part
            return View.among(given, part) or Pin.of(part, self._hooks, "what a forward_only function returned")

        kept = passed.get(id(result)) or take_apart(result, save)
        self._results = (*self._results[:place], kept, *self._results[place + 1 :])
        return result

    def keep_for_inner(self, tensor: Tensor) -> None:
        """The region inside runs anew in a rerun, and what it keeps is made there."""

    # ---- as a source

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A parameter, which is referenced (rule 2)."""
        _, version, is_all, ref = holder.saved
        parameter: Tensor | None = ref()
        if not is_all or parameter is None:
            return None
        check_version(where, "a parameter", parameter, version)
        return parameter

    def holdings(self, frame: Frame) -> Iterable[Holding]:
        variables = [saved for _, saved in self._variables or ()]
        for held in [leaf for saved in (*self._args, *self._kwargs.values(), *variables) for leaf in leaves_of(saved)]:
            if isinstance(held, Held) and not held.is_parameter:
                yield Holding("input", held, named(held.name))
        for pin in [*self._pins, *[leaf for result in self._results for leaf in leaves_of(result)]]:
            if type(pin) is Pin and not pin.held.is_parameter:
                yield Holding("kept", pin.held, named(pin.held.name))
        for state in () if self._rng is None else self._rng.states:
            yield Holding("random state", state, None)
        for copy in () if self._buffers is None else self._buffers.copies():
            yield Holding("buffers", copy, None)

    def name_of(self, parameter: Tensor) -> str | None:
        known = [(type(module).__name__, module.named_parameters()) for module in self.modules]
        return next((f"{kind}.{name}" for kind, named in known for name, p in named if p is parameter), None)

    def hint(self) -> str:
        live = [named(name) for name, value in self.objects if _holds_tensors(value)]
        return errors.live(live) if live else errors.CALLED_AGAIN

    def recompute(self, request: Recompute) -> None:
        where = request.frame
        function, args, kwargs, cells = self.restored(where)
        undo: Undo = []
        try:
            context = self.go_back(where, cells, undo)
            if self._buffers:
                request.rewound = self._buffers.storages()
            if self._pins or self._results or self.policy is not None or not where.complete:
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

    def restored(self, where: object) -> tuple[Any, list[Any], dict[str, Any], Cells]:
        """The function, its arguments, and the variables that it closes over."""
        function, kwargs = self._function, self._kwargs
        if not (self._has_containers or self._is_shared or self._written):  # mostly
            args = [saved.fetch(where) if isinstance(saved, Held) else saved for saved in self._args]
            if kwargs:
                kwargs = {key: _fetch(saved, where) for key, saved in kwargs.items()}
            cells = [(cell, _fetch(saved, where)) for cell, saved in self._variables or ()]
        else:
            fetch = _Fetched(where, self._written)
            met: dict[int, Any] = {}
            args = [put_together(saved, fetch, met) for saved in self._args]
            kwargs = {key: put_together(saved, fetch, met) for key, saved in kwargs.items()}
            cells = [(cell, fetch(saved)) for cell, saved in self._variables or ()]
        if self.context is not None:
            function = functools.partial(call_within, self.context, function)
        return function, args, kwargs, cells

    def go_back(self, where: object, cells: Cells, undo: Undo) -> contextvars.Context:
        """Enter the state that the forward was called in; `undo` is given the way out, the last first. Returns the
        context to run in."""
        if cells:
            undo.append((_fill, [(cell, contents_of(cell)) for cell, _ in cells]))
            _fill(cells)  # in place: what the function calls may share them
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


Cells = list[tuple[CellType, Any]]  # variables that a function closes over, with their contents


def _fetch(saved: Any, where: object) -> Any:
    return saved.fetch(where) if isinstance(saved, Held) else saved


class _Fetched:
    """The same, but one tensor that is two arguments comes back as one, and what the function writes is a copy of its
    own, since others may read what was fetched."""

    def __init__(self, where: object, written: Mapping[Held, int]) -> None:
        self._where, self._written = where, written
        self._met: dict[Held, Tensor] = {}
        self._copies = _torch.Copies()
        self._storages: dict[int, int] = {}  # by that of the forward

    def __call__(self, saved: Any) -> Any:
        if isinstance(saved, Held) and saved not in self._met:
            tensor = saved.fetch(self._where)
            if saved in self._written:
                storage = _torch.storage_id(tensor)
                if self._storages.setdefault(self._written[saved], storage) != storage:  # hooks tear memory apart
                    raise errors.changed(self._where, named(saved.name, tensor))
                tensor = _torch.in_place_of(tensor, without_recording(self._copies.copy, tensor))
            self._met[saved] = tensor
        return self._met[saved] if isinstance(saved, Held) else saved


def call_within(context: AbstractContextManager[Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    with context:
        return function(*args, **kwargs)
    raise errors.suppressed()


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
        value = self._outside(pin.held.fetch)
        ours, theirs = _torch.plain_parts(tensor), _torch.plain_parts(value)
        if not all(map(_torch.are_alike, ours, theirs)):
            return pin.restore(value)
        for pair in zip(ours, theirs, strict=True):
            if not without_recording(_torch.same_bits, pair):
                pin.refuse_if_it_is(tensor, self._where)
                without_recording(_torch.write, pair)
        return tensor

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = next(self._results, _FAILED)
        if result is _FAILED:
            if not self._where.complete:  # a rerun that a backward inside the region asked for, ahead of the forward
                return _without_slots(function, args, kwargs)
            raise errors.not_recorded(self._where, getattr(function, "__qualname__", repr(function)))
        given = _given_to(args, kwargs)

        def restore(saved: Any) -> Any:
            if type(saved) is Passed:
                return given[saved.place]
            if type(saved) is View:
                return saved.of(given[saved.place])
            return saved.restore(self._outside(saved.held.fetch)) if type(saved) is Pin else saved

        return put_together(result, restore)

    def _outside(self, fetch: Callable[[object], Tensor]) -> Tensor:
        """Hooks of others may call functions again (rule 3)."""
        region, thread.region = thread.region, None
        try:
            return fetch(self._where)
        finally:
            thread.region = region


_FAILED = object()  # a call that raised


class Pin(NamedTuple):
    """A value of the forward that the rerun must not compute anew."""

    held: Held
    in_graph: bool
    live: weakref.ref[Tensor]

    @classmethod
    def of(cls, tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> Pin:
        return cls(hold(tensor, hooks, name), tensor.requires_grad and not tensor.is_leaf, weakref.ref(tensor))

    def refuse_if_it_is(self, tensor: Tensor, where: Frame) -> None:
        """What was there before the recompute is the user's, who has changed it since."""
        if self.live() is tensor:
            raise errors.changed(where, named(self.held.name, tensor))

    def restore(self, tensor: Tensor) -> Tensor:
        """What was fetched, for the recompute to write. (Where it is no copy, the forward has not written it.)"""
        if tensor.requires_grad:  # a leaf
            return tensor
        data = without_recording(_torch.copy, tensor) if self.held.is_packed else _torch.alias(tensor)
        if not self.in_graph:
            return data
        with torch.enable_grad():
            place = torch.zeros((), dtype=data.dtype, device=data.device, requires_grad=True).clone()
        return _torch.in_place_of(place, data)


class Passed(NamedTuple):
    """Stands for what a `forward_only` function was given, and has returned."""

    place: int


class View(NamedTuple):
    """Stands for a tensor that lies on the memory of one that it was given."""

    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from that one's
    in_graph: bool

    @classmethod
    def among(cls, given: list[Any], part: Tensor) -> View | None:
        in_graph = part.requires_grad
        for place, value in enumerate(given):
            if isinstance(value, Tensor) and _torch.lies_in(part, value) and (value.requires_grad or not in_graph):
                offset = int(part.storage_offset() - value.storage_offset())
                return cls(place, part.shape, part.stride(), offset, in_graph)
        return None

    def of(self, tensor: Tensor) -> Tensor:
        with torch.enable_grad():
            base = tensor if self.in_graph else tensor.detach()
            return base.as_strided(self.size, self.stride, self.offset + int(tensor.storage_offset()))


def _given_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments, and the tensors in them, in order."""
    given = [*args, *kwargs.values()]
    map_tensors(lambda tensor: given.append(tensor) or tensor, given[:])  # type: ignore[func-returns-value]
    return given


def _without_slots(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what a recompute does not call: what it saves is no slot of the region."""
    _push_hooks(detached, identity)
    try:
        return function(*args, **kwargs)
    finally:
        _pop_hooks()


def detached(tensor: Tensor) -> Tensor:
    """The pack hook for a graph that holds its tensors itself: a live one would be a cycle, if it is the output."""
    return tensor.detach() if tensor.requires_grad else tensor


# ---- variables


@functools.cache
def _assigned_by(code: CodeType) -> frozenset[str]:
    """The variables of enclosing functions that a function, or one defined in it, assigns itself: its own business.
    (Only its code tells: what has changed when it returns, something that it calls may have set.)"""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")}
    names = names.union(*(_assigned_by(const) for const in code.co_consts if type(const) is CodeType))
    return frozenset(code.co_freevars) & names


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


def _holds_tensors(value: object, depth: int = 5) -> bool:
    """Whether an object has a tensor in its attributes, items, or theirs; asked for messages."""
    if depth == 0 or isinstance(value, Tensor | type | _Module | FunctionType):
        return isinstance(value, Tensor)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    parts = [*parts, *getattr(value, "__dict__", {}).values()]
    return len(parts) < 1000 and any(_holds_tensors(part, depth - 1) for part in parts)
