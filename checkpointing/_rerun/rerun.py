"""Source 1: call the function again.

The rerun gets back its arguments and the variables that it closes over, held as an operator would
save them (through the enclosing hooks; parameters by reference) and guarded by version; random and
ambient state; the buffers of modules in training mode, rewound in place while it runs; values given
to `keep`, and results of `forward_only` functions. Everything else that the function reads
(globals, attributes, the inside of your own objects) is as backward finds it.

Invariant: of the user's objects, a recompute changes only buffers, variables that the function
closes over, and random and ambient state, all in place, and puts them back. It may refuse other
changes, at the slot that needs them, but it never makes any.

Rejected: a search for everything that a function may read or write. It has no end in Python, costs
more than the region, and exchanges objects that belong to others (FSDP's shards, caches).
"""

from __future__ import annotations

import contextvars
import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .. import _torch, errors
from .._engine import (
    Ambient,
    Frame,
    Generators,
    Held,
    Holder,
    Holding,
    Name,
    Recompute,
    Referenced,
    Region,
    Source,
    Undo,
    check_version,
    has_rng,
    hold,
    hold_argument,
    identity,
    is_parameter,
    named,
    note_written,
    root_of,
    thread,
    undo_all,
    without_recording,
)
from .._torch import ATOMS, leaves_of, put_together, take_apart, tensors_in
from .buffers import Buffers

# Bound once: these run for every call.
_enclosing_hooks = _torch.enclosing_hooks
_push_hooks, _pop_hooks = _torch.push_hooks, _torch.pop_hooks
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, _torch.set_grad_enabled
_Module, _partial = nn.Module, functools.partial

PreserveRngState = bool | Literal["all"]
Given = tuple[Tensor, int, Held]  # a tensor, its version, and the `Held` of it
Cells = list[tuple[CellType, Any]]  # variables that a function closes over, with their contents


class Inputs:
    """The inputs of one call: holds them, and collects their devices, generators and modules."""

    devices: frozenset[torch.device] = frozenset()
    generators: tuple[torch.Generator, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    defaults: tuple[Held, ...] = ()  # tensors that a call need not name
    _hooks: _torch.Hooks | None = None
    # With hooks around, while the function runs: the tensors that it was given, by id.
    _given: dict[int, Given] | None = None
    _is_shared = False  # whether one of them was given twice

    def hold(self, value: Any, name: Name) -> Any:
        """Hold an argument, a part of one, or a variable until the rerun. A tensor that comes twice
        is held once, even if hooks make something else of it the second time."""
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
        return value

    def capture(self, function: Any) -> Cells:
        """Look for modules in a function, and hold the variables that it closes over."""
        if type(function) is MethodType:
            self.look_at(function.__self__)
            function = function.__func__
        if type(function) is not FunctionType:  # a module, or another object that can be called
            self.look_at(function)
            return []
        self._look_into(function)
        if hasattr(function, "__wrapped__"):  # as `checkpointed` leaves it
            wrapped = inspect.unwrap(function)
            if type(wrapped) is FunctionType:
                self._look_into(wrapped)
        if function.__closure__ is None:
            return []
        code = function.__code__
        own = _assigned_by(code)
        return [
            (cell, self.hold(contents_of(cell), f"the variable '{name}'"))
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
            if name not in own
        ]

    def _look_into(self, function: FunctionType) -> None:
        """Find modules among the globals that a function names, and its defaults."""
        code, scope = function.__code__, function.__globals__
        names = code.co_names
        if CodeType in map(type, code.co_consts):  # comprehensions, lambdas
            inner = [const for const in code.co_consts if type(const) is CodeType]
            names = (*names, *[name for const in inner for name in const.co_names])
        for name in names:
            if isinstance(scope.get(name), _Module):
                self.modules += (scope[name],)
        if function.__defaults__ or function.__kwdefaults__:
            self._hold_defaults(function)

    def _hold_defaults(self, function: FunctionType) -> None:
        """Guard the tensors among a function's default arguments, which live as long as it does.
        Look for generators and modules there."""
        defaults = dict(function.__kwdefaults__ or {})
        if positional := function.__defaults__:
            code = function.__code__
            names = code.co_varnames[: code.co_argcount]
            defaults |= zip(names[-len(positional) :], positional, strict=True)
        if ATOMS.issuperset(map(type, defaults.values())):
            return

        def guard(value: Any, name: Name) -> None:
            if isinstance(value, Tensor):
                self.defaults += (Referenced(value, name),)
            else:
                self.hold(value, name)

        take_apart(defaults, guard, "defaults")

    def look_at(self, value: Any, depth: int = 2) -> None:
        """Find modules: the object itself, its attributes, the items of a small container, and the
        same for the functions and variables that it wraps."""
        kind = type(value)
        if kind in ATOMS or isinstance(value, Tensor | type):
            return
        if isinstance(value, _Module):
            self.modules += (value,)
        elif kind in _WRAPPERS and depth:
            for part in _wrapped_by(value):
                self.look_at(part, depth - 1)
        else:
            self.modules += tuple([part for part in _parts_of(value) if isinstance(part, _Module)])


_WRAPPERS = (FunctionType, MethodType, _partial)
_MOST_ITEMS = 100  # larger containers are not searched for modules


def _wrapped_by(value: Any) -> list[Any]:
    if type(value) is _partial:
        return [value.func, *value.args, *value.keywords.values()]
    parts = [contents_of(cell) for cell in value.__closure__ or ()]
    if type(value) is MethodType:
        parts.append(value.__self__)
    return parts


def _parts_of(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        value = value.values()
    elif type(value) not in (list, tuple):
        return getattr(value, "__dict__", {}).values()
    return value if len(value) <= _MOST_ITEMS else ()


class Rerun(Region, Source, Inputs):
    """The function, its inputs, and the state in which it ran."""

    hint = errors.CALLED_AGAIN
    context: AbstractContextManager[Any] | None = None  # entered around the rerun
    _buffers: Buffers | None = None
    _cpu_state: Tensor | None = None
    _rng: Generators | None = None
    _draws_python = False  # whether the generators of Python and NumPy are put back, too
    _pins: tuple[Pin, ...] = ()
    _results: tuple[Any, ...] = ()
    _written: Mapping[Held, int] = {}  # inputs that the function has written, with their storages

    def __init__(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        preserve_rng_state: PreserveRngState,
    ) -> None:
        outer = thread.region
        self.policy = None if outer is None else outer.policy
        self._hooks = hooks = _enclosing_hooks()
        while type(function) is _partial:
            args = (*function.args, *args)
            kwargs, function = {**function.keywords, **kwargs}, function.func
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
                held = hold_argument(value, None, name)  # saves one call
            else:
                held = self.hold(value, name)
            self._args.append(held)
        self._kwargs = kwargs
        if kwargs:
            self._kwargs = {
                key: take_apart(value, self.hold, ("kwargs", key), met)
                for key, value in kwargs.items()
            }
        self._variables = self.capture(function)
        if self.modules:
            self._buffers = Buffers(self)
        self.ambient = Ambient()
        if preserve_rng_state:
            self._cpu_state = _torch.get_cpu_state()
            self._draws_python = preserve_rng_state == "all"
            if any([self.devices, self.generators, self._draws_python]):
                self._rng = self._generators(cpu=False)

    def end(self) -> None:
        """The function has run."""
        self.outer = None
        if self._buffers is not None:
            self._buffers.end()
        if self._given is not None:
            self._note_writes([*self._given.values()])
            self._given = None

    def _note_writes(self, given: list[Given]) -> None:
        """Note the inputs in storages that the function has written: its recompute gets copies."""
        changed = [held for tensor, version, held in given if _torch.version(tensor) != version]
        if not changed:
            return
        storages = {
            held: _torch.storage_id(tensor)
            for tensor, _, held in given
            if _torch.has_storage(tensor)
        }
        written = {storages[held] for held in changed if held in storages}
        self._written = {held: storage for held, storage in storages.items() if storage in written}
        note_written(self._hooks, written)

    # ---- as a region

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(root_of(tensor)):
            return tensor
        if isinstance(self.outer, Rerun | Repeated):
            # Its rerun enters this region again, which must then meet the same value.
            tensor = self.outer.keep(tensor)
        self._pins += (Pin.of(tensor, self._hooks, "a value given to keep()"),)
        return tensor

    def once(self, function: Any, args: Any, kwargs: Any) -> Any:
        place = len(self._results)  # it may call others
        self._results += ((_FAILED, None),)
        before = None if self._cpu_state is None else self._generators(cpu=True)
        result = _without_slots(function, args, kwargs, self.outer)
        has_drawn = before is not None and before.have_moved()
        after = self._generators(cpu=True) if has_drawn else None
        given = _given_to(args, kwargs)
        passed = {id(v): Passed(i) for i, v in enumerate(given) if type(v) not in ATOMS}

        def save(part: Any, _: Name) -> Any:
            if id(part) in passed:  # the recompute has its own
                return passed[id(part)]
            if not isinstance(part, Tensor):
                return part
            name = "the result of a forward_only function"
            return View.among(given, part) or Pin.of(part, self._hooks, name)

        kept = passed.get(id(result)) or take_apart(result, save)
        self._results = (*self._results[:place], (kept, after), *self._results[place + 1 :])
        return result

    def _generators(self, cpu: bool) -> Generators:
        """The present states of the generators that a recompute puts back."""
        devices = filter(has_rng, self.devices)
        return Generators(cpu, devices, self.generators, self._draws_python)

    def keep_for_inner(self, tensor: Tensor) -> None:
        """Do nothing: a rerun enters the inner region again, which keeps the value again."""

    # ---- as a source

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A parameter: it is referenced (rule 2)."""
        _, version, is_all, ref = holder.saved
        parameter: Tensor | None = ref()
        if not is_all or parameter is None:
            return None
        check_version(where, "a parameter", parameter, version)
        return parameter

    def holdings(self, frame: Frame) -> Iterable[Holding]:
        variables = [saved for _, saved in self._variables]
        inputs = leaves_of(*self._args, *self._kwargs.values(), *variables)
        pins = leaves_of(*self._pins, *[result for result, _ in self._results])
        held = [("input", leaf) for leaf in inputs if isinstance(leaf, Held)]
        held += [("kept", pin.held) for pin in pins if type(pin) is Pin]
        for kind, one in held:
            if not one.is_parameter:
                yield Holding(kind, one, named(one.name))
        states = [] if self._cpu_state is None else [self._cpu_state]
        if self._rng is not None:
            states += self._rng.states
        yield from [Holding("random state", state, None) for state in states]
        if self._buffers is not None:
            yield from [Holding("buffers", copy, None) for copy in self._buffers.copies()]

    def name_of(self, parameter: Tensor) -> str | None:
        for module in self.modules:
            for name, other in module.named_parameters():
                if other is parameter:
                    return f"{type(module).__name__}.{name}"
        return None

    def recompute(self, request: Recompute) -> None:
        where = request.frame
        function, args, kwargs, cells = self.restored(where)
        undo: Undo = []
        try:
            if self._buffers is not None and (written := self._buffers.written(where)):
                request.guard(written, tensors_in([args, kwargs, [value for _, value in cells]]))
            context = self.go_back(where, cells, undo)
            if self._buffers:
                request.rewound = self._buffers.storages()
            if any([self._pins, self._results, self.policy, not where.complete]):
                thread.region = Repeated(self, where)
            request.run_in_order(_partial(context.run, function, *args, **kwargs))
        finally:
            undo_all(undo)

    def restored(self, where: object) -> tuple[Any, list[Any], dict[str, Any], Cells]:
        """The function, its arguments, and the variables that it closes over."""
        fetch: Any = _partial(_fetch, where)
        if self._is_shared or self._written:
            fetch = _Fetched(where, self._written)
        for default in self.defaults:
            default.fetch(where)
        met: dict[int, Any] = {}
        args = [put_together(saved, fetch, met) for saved in self._args]
        kwargs = {key: put_together(saved, fetch, met) for key, saved in self._kwargs.items()}
        cells = [(cell, fetch(saved)) for cell, saved in self._variables]
        function = self._function
        if self.context is not None:
            function = functools.partial(call_within, self.context, function)
        return function, args, kwargs, cells

    def go_back(self, where: object, cells: Cells, undo: Undo) -> contextvars.Context:
        """Enter the state of the forward; `undo` gets the functions that leave it. Returns the
        context to run in."""
        if cells:
            undo.append((_fill, [(cell, contents_of(cell)) for cell, _ in cells]))
            _fill(cells)  # in place: other functions may share them
        undo.append((_set_grad_enabled, _is_grad_enabled()))
        _set_grad_enabled(True)
        if self._buffers is not None:
            self._buffers.enter(where, undo)
        context = self.ambient.enter(undo)
        if self._cpu_state is not None:
            undo.append((_torch.set_cpu_state, _torch.get_cpu_state()))
            _torch.set_cpu_state(self._cpu_state)
        if self._rng is not None:
            self._rng.enter(undo)
        return context


def _fetch(where: object, saved: Any) -> Any:
    return saved.fetch(where) if isinstance(saved, Held) else saved


class _Fetched:
    """Fetches inputs: a tensor that is two arguments once, and one that the function writes as a
    copy, since others may read the fetched one."""

    def __init__(self, where: object, written: Mapping[Held, int]) -> None:
        self._where, self._written = where, written
        self._met: dict[Any, Any] = {}
        self._copies = _torch.Copies()
        self._storages: dict[int, int] = {}  # by the storage in the forward

    def __call__(self, saved: Any) -> Any:
        if not isinstance(saved, Held):
            return saved
        if saved not in self._met:
            tensor = saved.fetch(self._where)
            if saved in self._written:
                tensor = self._copied(saved, tensor)
            self._met[saved] = tensor
        return self._met[saved]

    def _copied(self, saved: Held, tensor: Tensor) -> Tensor:
        storage = _torch.storage_id(tensor)
        if self._storages.setdefault(self._written[saved], storage) != storage:
            # Hooks have made two storages of one.
            raise errors.changed(self._where, named(saved.name, tensor))
        return _torch.in_place_of(tensor, without_recording(self._copies.copy, tensor))


def call_within(
    context: AbstractContextManager[Any], function: Any, *args: Any, **kwargs: Any
) -> Any:
    with context:
        return function(*args, **kwargs)
    raise errors.suppressed()


class Repeated(Region):
    """The region of a rerun: returns the kept values of the forward, in order."""

    def __init__(self, source: Rerun, where: Frame) -> None:
        self._pins, self._results = iter(source._pins), iter(source._results)
        self.policy = source.policy  # regions inside must keep the same values as in the forward
        self._where = where

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(root_of(tensor)):
            return tensor
        pin = next(self._pins, None)
        if pin is None:  # the forward still runs, and has not come so far
            return tensor
        value = self._outside(pin.held.fetch)
        ours, theirs = _torch.plain_parts(tensor), _torch.plain_parts(value)
        if not all(map(_torch.are_alike, ours, theirs)):
            return pin.restore(value)
        for one, other in zip(ours, theirs, strict=True):
            if without_recording(_torch.same_bits, one, other):
                continue
            if pin.live() is tensor:  # it existed before the recompute, and has been changed
                raise errors.changed(self._where, named(pin.held.name, tensor))
            without_recording(_torch.write, one, other)
        return tensor

    def once(self, function: Any, args: Any, kwargs: Any) -> Any:
        kept, after = next(self._results, (_FAILED, None))
        if kept is _FAILED:
            if not self._where.complete:  # a rerun for a backward inside the region
                return _without_slots(function, args, kwargs)
            raise errors.not_recorded(
                self._where, getattr(function, "__qualname__", repr(function))
            )
        if after is not None:  # the function has drawn random numbers
            after.enter([])
        given = _given_to(args, kwargs)

        def restore(saved: Any) -> Any:
            if type(saved) is Passed:
                return given[saved.place]
            if type(saved) is View:
                return saved.of(given[saved.place])
            if type(saved) is Pin:
                return saved.restore(self._outside(saved.held.fetch))
            return saved

        return put_together(kept, restore)

    def _outside(self, fetch: Callable[[object], Tensor]) -> Tensor:
        """Fetch with no region active, since hooks may call functions again (rule 3)."""
        region, thread.region = thread.region, None
        try:
            return fetch(self._where)
        finally:
            thread.region = region


_FAILED = object()  # a call that raised


class Pin(NamedTuple):
    """A value of the forward that the rerun takes over."""

    held: Held
    in_graph: bool
    live: weakref.ref[Tensor]

    @classmethod
    def of(cls, tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> Pin:
        return cls(
            hold(tensor, hooks, name),
            tensor.requires_grad and not tensor.is_leaf,
            weakref.ref(tensor),
        )

    def restore(self, tensor: Tensor) -> Tensor:
        """A fetched tensor that the recompute may write. (The forward did not write one that is no
        copy.)"""
        if tensor.requires_grad:  # a leaf
            return tensor
        copy = _torch.copy if self.held.is_packed else _torch.alias
        data: Tensor = without_recording(copy, tensor)
        if not self.in_graph:
            return data
        with torch.enable_grad():
            place = data.new_zeros((), requires_grad=True).clone()
        return _torch.in_place_of(place, data)


class Passed(NamedTuple):
    """The place of an argument that a `forward_only` function returned."""

    place: int


class View(NamedTuple):
    """The geometry of a returned tensor that is a view of an argument."""

    place: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from that of the argument
    in_graph: bool

    @classmethod
    def among(cls, given: list[Any], part: Tensor) -> View | None:
        in_graph = part.requires_grad
        for place, value in enumerate(given):
            if not isinstance(value, Tensor):
                continue
            if in_graph and not value.requires_grad:
                continue
            if _torch.lies_in(part, value):
                offset = int(part.storage_offset() - value.storage_offset())
                return cls(place, part.shape, part.stride(), offset, in_graph)
        return None

    def of(self, tensor: Tensor) -> Tensor:
        with torch.enable_grad():
            base = tensor if self.in_graph else tensor.detach()
            return base.as_strided(
                self.size, self.stride, self.offset + int(tensor.storage_offset())
            )


def _given_to(args: Any, kwargs: Any) -> list[Any]:
    """The arguments, then the tensors in them, in order."""
    given = [*args, *kwargs.values()]
    return given + tensors_in(given)


def _without_slots(function: Any, args: Any, kwargs: Any, outer: Region | None = None) -> Any:
    """Call a function that recomputes skip: tensors saved in it are no slots."""
    _push_hooks(Tensor.detach, identity)  # a graph that owned a live output would be a cycle
    try:
        if outer is not None:
            return outer.once(function, args, kwargs)
        return function(*args, **kwargs)
    finally:
        _pop_hooks()


# ---- variables


@functools.lru_cache  # bounded, since it holds the code
def _assigned_by(code: CodeType) -> frozenset[str]:
    """The variables that a function, or one defined in it, assigns (`nonlocal`)."""
    names = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF")
    }
    names = names.union(
        *(_assigned_by(const) for const in code.co_consts if type(const) is CodeType)
    )
    return frozenset(code.co_freevars) & names


def contents_of(cell: CellType) -> Any:
    """The contents of a cell; the cell itself while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _fill(cells: Cells) -> None:
    """Give these contents to the cells that have others."""
    for cell, value in cells:
        if value is cell:
            del cell.cell_contents
        elif contents_of(cell) is not value:
            cell.cell_contents = value
