"""Source 1: call the function again.

The inputs are saved as an operator would save them: through the enclosing hooks, so that they may be offloaded or
recomputed themselves; parameters and other leaves are referenced (rule 2). Every tensor in the arguments, at any
depth, is guarded by its version (rule 8). Containers are copied, so that what the caller does to a list or a dict
afterwards does not reach the rerun; other objects are handed to the rerun as they are.

Rejected: `functools.partial` of the live arguments (torch, for everything but positional tensors): a keyword or
nested tensor that is changed before backward then gives wrong gradients without a word.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import itertools
import operator
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import _torch, errors
from ._ambient import Ambient, Generators, has_rng, undo_all
from ._engine import (
    Frame,
    Held,
    Name,
    Recompute,
    copy_of,
    identity,
    is_parameter,
    named,
    remember,
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
_get_state, _set_state = _torch.get_cpu_state, _torch.set_cpu_state
_SavedTensor = _torch.SavedTensor

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
PreserveRngState = bool | Literal["all"]


class Rerun:
    """The function, its saved inputs and the state it ran in."""

    save = None
    at_hand = None

    # What a function that is given tensors that require grad, and finds nothing by itself, does without.
    buffers: Buffers | None = None
    context: AbstractContextManager[Any] | None = None  # entered around the rerun
    guards_leaves: bool | None = None
    policy: Any = None
    _cpu_state: Tensor | None = None  # of the default random generator
    _rng: Generators | None = None  # the others
    _surroundings: Surroundings | None = None
    _writes: Writes | None = None
    _pins: tuple[tuple[Held, int], ...] = ()
    _results: list[Any] | None = None
    _last_statistics = -1  # the node that has saved some
    _looked_away = False  # something has happened that no operator shows

    def __init__(
        self,
        function: Callable[..., Any],
        alone: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        preserve_rng_state: PreserveRngState,
        outer: Any,
        strict: bool = False,
    ) -> None:
        """`alone`: the function `stands_alone`. `outer`: the region that this one is in. `strict`: what the function
        finds in closures and globals is compared, but not repaired."""
        self._function = function
        self._hooks = hooks = _enclosing_hooks()
        self._inputs = inputs = Inputs(args, kwargs, hooks)
        self._outer = outer
        if outer is not None:
            self.policy = outer.policy
        if not alone or inputs.has_opaque or inputs.modules or inputs.plain:
            self._look_around(function, alone, inputs, strict)
        self._ambient = Ambient()
        if self._ambient.states is not None:  # restoring them may write tensors that the function finds by itself
            self.guards_leaves = False
            if self._surroundings is not None:
                self._surroundings.guard_only_leaves()
        if preserve_rng_state:
            self._cpu_state = _get_state()
            if inputs.devices or inputs.generators or preserve_rng_state == "all":
                self._rng = Generators(False, inputs.devices, inputs.generators, preserve_rng_state == "all")

    def _look_around(self, function: Callable[..., Any], alone: bool, inputs: Inputs, strict: bool) -> None:
        """For what the function may read and write besides its arguments."""
        functions = inputs.functions
        if isinstance(function, nn.Module):
            inputs.modules += (function,)
        elif not alone:
            functions = (function, *functions)
        if functions:
            self._surroundings = around = Surroundings(*functions, strict=strict)
            inputs.modules += around.modules
            inputs.generators += around.generators
            inputs.plain += around.plain
            inputs.attributes += around.attributes
        if inputs.modules:
            self.buffers = found = Buffers(inputs.modules)
            inputs.see(found.devices)
            inputs.generators += found.generators
            inputs.plain += found.plain
            inputs.attributes += found.attributes
        if inputs.plain or inputs.attributes:
            self._writes = Writes(_code_of(function), inputs.plain, inputs.attributes)
        # Leaves that the function finds by itself are no arguments. Those that come from elsewhere in the rerun than in
        # the forward (hooks, copies of buffers) have other version counters.
        if self._surroundings is not None or self.buffers is not None or inputs.has_opaque:
            self.guards_leaves = self._hooks is None and self.buffers is None

    @property
    def writes_something(self) -> bool:
        """Whether there is something to `settle`."""
        return self.buffers is not None or self._writes is not None

    def settle(self) -> None:
        """The forward has ended."""
        if self.buffers is not None:
            self.buffers.settle()
        if self._writes is not None:
            self._writes.settle()
            self._inputs.forgive(self._writes)
            if self._surroundings is not None:
                self._surroundings.forgive(self._writes)

    @property
    def see_statistics(self) -> Callable[[Tensor, FrameType], None] | None:
        is_alone = self._surroundings is None and self.buffers is None and self._writes is None
        return None if is_alone and self._outer is None else self._see_statistics

    def _see_statistics(self, tensor: Tensor, frame: FrameType) -> None:
        """Batch normalisation saves its running statistics before it writes them, which leaves no other trace."""
        if frame.f_code is not _BATCH_NORM or self._last_statistics == _node_count():
            return
        names = frame.f_locals  # slow
        if tensor is names.get("running_var"):  # the mean came before, and what the operator saves after is its own
            self._last_statistics = _node_count()
        elif tensor is not names.get("running_mean"):
            return
        if self._outer is not None and self._outer.see_statistics is not None:
            self._outer.see_statistics(tensor, frame)
        if self.buffers is not None and self.buffers.knows(tensor):
            return
        if self._writes is None:
            self._writes = Writes(_BATCH_NORM, [], [])
        self._writes.see_statistics(tensor, names, frame)

    def keep(self, tensor: Tensor) -> Tensor:
        if is_parameter(root_of(tensor)):  # not computed
            return tensor
        if isinstance(self._outer, Rerun | Pinned):
            # Its own rerun runs this region anew, which must not decide anew.
            tensor = self._outer.keep(tensor)
        self._pins += ((Held(tensor, self._hooks, "a value given to keep()"), _torch.version(tensor)),)
        return tensor

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        return tensor if self._outer is None else self._outer.tag(tensor, name)

    def keep_for_inner(self, tensor: Tensor) -> None:
        """The region inside runs anew in a rerun, and what it keeps is made there."""

    def look_away(self) -> None:
        self._looked_away = True
        if self._outer is not None:
            self._outer.look_away()

    def yield_to_inner(self, change: int) -> None:
        if self._outer is not None:
            self._outer.yield_to_inner(change)

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._results is None:
            self._results = []
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

    def maker(self, holder: object) -> None:
        """Not known."""

    def recompute(self, request: Recompute) -> None:
        where, inputs, function = request.frame, self._inputs, self._function
        # Whether there is more than a function of tensors, which finds nothing by itself.
        is_plain = (
            not inputs.has_opaque and self._surroundings is None and not self.writes_something and self.context is None
        )
        if not is_plain:
            function = self._checked(where)
        args, kwargs = inputs.restore(where)
        undo: list[Callable[[], object]] = []
        now: Tensor | None = None
        grad_mode = _is_grad_enabled()
        try:
            if not is_plain:
                function = self._go_back(request, function, undo)
            if self._rng is not None:
                undo.append(functools.partial(Generators.leave, self._rng.enter()))
            pack = request.packer()
            if self._cpu_state is not None:
                now = _get_state()
                _set_state(self._cpu_state)
            _set_grad_enabled(True)
            if self._pins or self._results or self.policy is not None:
                thread.region = Pinned(self._pins, self._results, self.policy, where)
            _push_hooks(pack, identity)
            try:
                if self._ambient.is_present():
                    self._ambient.context.copy().run(function, *args, **kwargs)
                else:
                    self._ambient.run(function, *args, **kwargs)
                request.ran_to_its_end = True
            finally:
                _pop_hooks()
        finally:
            try:
                _set_grad_enabled(grad_mode)
                if now is not None:
                    _set_state(now)
            finally:  # whatever interrupts that: others wait for the locks
                undo_all(undo)

    def _checked(self, where: Frame) -> Any:
        """The function, with its variables as they were, if what it finds by itself still is what it was."""
        if self._writes is not None:
            self._writes.check(where)
        if self._surroundings is not None:
            self._surroundings.check(where)
            if self.context is None:
                return self._surroundings.rebound(self._function)
        return self._function if self.context is None else self._with_context

    def _go_back(self, request: Recompute, function: Any, undo: list[Callable[[], object]]) -> Any:
        """Put back what modules and other tensors held before the forward; `undo` is given the ways out, last first.

        They belong to the process: while one rerun has put back what they held, another of the same must wait."""
        altered = self._altered()
        if altered:
            function = functools.partial(_call_altered, altered, function)
        writes, buffers = self._writes, self.buffers
        if writes is not None:
            request.written = writes.written_arguments()
        if writes is None and buffers is None:
            return function
        has_others = writes is not None and writes.has_others
        for lock in (*(() if buffers is None else buffers.locks), *((_others_lock,) if has_others else ())):
            lock.acquire()
            undo.append(lock.release)
        if buffers is not None:
            present = Buffers.exchange(buffers.then(request.frame, self._looked_away))
            undo.append(lambda: Buffers.exchange(present))
        if writes is not None and request.written is not None:
            swapped = writes.enter(request.written)
            undo.append(lambda: Writes.leave(swapped))
        changed = self._changed(request.frame)
        return functools.partial(_call_unread, _Unread(changed), function) if changed else function

    def _changed(self, where: Frame) -> list[Changed]:
        """What the function may find besides its arguments and must not read: it has been changed since."""
        changed = [] if self.buffers is None else self.buffers.changed(where)
        if self._writes is not None:
            changed += self._writes.changed(where, self._ambient.states is not None)
        return changed

    def _altered(self) -> list[Tensor]:
        """The leaves that the function finds by itself and that have been frozen or thawed since."""
        found = self._inputs.required()
        if self._surroundings is not None and self._surroundings.tensors:
            found += [(tensor, required_grad) for _, tensor, _, required_grad in self._surroundings.tensors]
        if self._writes is not None:
            found += self._writes.required()
        if not found:  # as often
            return []
        altered = {id(t): t for t, required_grad in found if t.requires_grad is not required_grad and _torch.is_leaf(t)}
        return [*altered.values()]

    def _with_context(self, *args: Any, **kwargs: Any) -> None:
        assert self.context is not None
        with self.context:
            function = self._function if self._surroundings is None else self._surroundings.rebound(self._function)
            function(*args, **kwargs)


# And what makes the error to raise if somebody reads it: one that is held already would hold itself, by its traceback.
Changed = tuple[Tensor, Callable[[], errors.CheckpointError]]


class _Unread(TorchDispatchMode):
    """Runs a function that may be able to reach what has been changed since its forward: all is well if it reads
    something else (another optimizer's parameters, say). Entered only then, since every operator pays for it."""

    def __init__(self, changed: list[Changed]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changed = changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.refuse((args, kwargs))
        return func(*args, **(kwargs or {}))

    def refuse(self, read: Any) -> None:
        for value in torch.utils._pytree.tree_leaves(read):
            if isinstance(value, Tensor):
                for tensor, error in self._changed:
                    if tensor is value or _share_memory(tensor, value):
                        raise error()


class _UnreadList(TorchFunctionMode):
    """For the one method that reads memory without an operator."""

    def __init__(self, unread: _Unread) -> None:
        super().__init__()
        self._unread = unread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            self._unread.refuse(args)
        return func(*args, **(kwargs or {}))


def _call_unread(mode: _Unread, function: Any, *args: Any, **kwargs: Any) -> None:
    with mode, _UnreadList(mode):
        function(*args, **kwargs)


def _call_altered(altered: list[Tensor], function: Any, *args: Any, **kwargs: Any) -> None:
    """Without this a rerun saves more or fewer tensors than the forward did, in slots meant for others."""
    try:
        for tensor in altered:
            tensor.requires_grad_(not tensor.requires_grad)
        function(*args, **kwargs)
    finally:
        for tensor in altered:
            tensor.requires_grad_(not tensor.requires_grad)


# One per module, not one for all: in a process whose threads are ranks, each has modules of its own, and its rerun
# waits for the others in a collective.
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_others_lock = threading.RLock()


def detached(tensor: Tensor) -> Tensor:
    """The pack hook for a graph that holds its tensors itself: a live one would be a cycle, if it is the output."""
    return tensor.detach() if tensor.requires_grad else tensor


class Pinned:
    """Where `keep` and functions that run once go while the function is called again: it hands back what the forward
    pinned or recorded, in order."""

    def __init__(
        self, pins: Sequence[tuple[Held, int]], results: Sequence[Any] | None, policy: Any, where: Frame
    ) -> None:
        self._pins = iter(pins)
        self._results = iter(results or ())
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

    def see_statistics(self, tensor: Tensor, frame: FrameType) -> None:
        """The forward has seen them."""

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

    def look_away(self) -> None:
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


# ---- what a region writes

_SMALL = 1 << 16  # bytes: a copy of that costs less than to find out whether it is needed
_MEDIUM = 1 << 20  # bytes: a copy of that is worth while to find out
# What calls so far have written: by module and name of the buffer, by code and path of other tensors.
_wrote_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()
_wrote_tensors: dict[object, dict[Name, bool]] = {}


def _clones(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() if tensor.is_contiguous() else _torch.copy(tensor) for tensor in tensors]


def _uncount(number: Tensor) -> Tensor:
    return number.sub_(1)


def _differ(pair: tuple[Tensor, Tensor]) -> bool:
    return not torch.equal(*pair)


class _Buffer:
    """A buffer of a module, or a parameter that is trained by other means than gradients, before the forward."""

    __slots__ = ("before", "module", "name", "required_grad", "store", "tensor", "version")

    def __init__(self, module: nn.Module, store: dict[str, Any], name: str, tensor: Tensor) -> None:
        self.module = module
        self.store = store
        self.name = name
        self.tensor = tensor
        self.version = _torch.version(tensor)
        self.before: Tensor | None = None
        self.required_grad = tensor.requires_grad
        if not self.required_grad and _wrote_buffers.get(module, {}).get(name) is not False:
            self.before = without_recording(_torch.copy, tensor)

    def __str__(self) -> str:
        return f"{type(self.module).__name__}.{self.name}"


class Buffers:
    """The buffers of the modules that a region runs, as they were before it: the rerun starts from these, and what it
    writes is dropped (rule 7). And what else modules have that no argument shows: their parameters and children (which
    `torch.func.functional_call`, for one, exchanges), whether they are in training mode, generators and tensors among
    their attributes.

    Small buffers of modules in training mode are always copied, because some kernels write running statistics without
    a trace. Any other is copied until a forward has left it alone, and guarded from then on; if a later one writes it,
    that rerun is refused, and the next forward copies it again.
    """

    __slots__ = (
        "_buffers",
        "_lazy",
        "_leaves",
        "_lost",
        "_modes",
        "_parts",
        "_versions",
        "_volatile",
        "attributes",
        "devices",
        "generators",
        "locks",
        "plain",
    )

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        ordered = sorted(modules, key=id) if len(modules) > 1 else modules
        self.locks = [_locks.get(module) or _locks.setdefault(module, threading.RLock()) for module in ordered]
        self._buffers: list[_Buffer] = []
        self._lost: list[_Buffer] = []
        self._lazy: list[tuple[dict[str, Any], str]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._parts: list[tuple[dict[str, Any], str, Any]] = []
        self._leaves: list[tuple[nn.Module, str, Tensor]] = []  # the parameters, and what they were after the forward
        self._versions: list[int] = []
        self.attributes: list[Attribute] = []
        # Where, what it was, a copy of that, and the version that the copies in a rerun must have.
        self._volatile: list[tuple[dict[str, Any], str, Tensor, Tensor, int]] = []
        self.devices: set[torch.device] = set()
        self.generators: tuple[torch.Generator, ...] = ()
        self.plain: list[Plain] = []
        volatile: list[tuple[dict[str, Any], str, Tensor]] = []
        stack: list[nn.Module | None] = list(modules)
        seen: set[nn.Module] = set()
        while stack:
            module = stack.pop()
            if module is None or module in seen:
                continue
            seen.add(module)
            training = module.training
            self._modes.append((module, training))
            children, parameters, buffers = _parts_of(module)
            for name, child in children.items():
                self._parts.append((children, name, child))
                stack.append(child)
            for name, parameter in parameters.items():
                self._parts.append((parameters, name, parameter))
                if parameter is not None:
                    if not parameter.is_cpu:
                        self.devices.add(parameter.device)
                    if parameter.requires_grad:
                        self._leaves.append((module, name, parameter))
                    elif not nn.parameter.is_lazy(parameter):
                        self._buffers.append(_Buffer(module, parameters, name, parameter))
            for name, tensor in buffers.items():
                if training and type(tensor) is Tensor and tensor.nbytes <= _SMALL and not tensor.requires_grad:
                    volatile.append((buffers, name, tensor))
                elif tensor is None:
                    self._parts.append((buffers, name, None))
                elif nn.parameter.is_lazy(tensor):
                    self._lazy.append((buffers, name))
                else:
                    self._buffers.append(_Buffer(module, buffers, name, tensor))
            # Torch's own modules have no others with state.
            if not type(module).__module__.startswith("torch.nn.") and vars(module).keys() != _OWN_ATTRIBUTES:
                self._look_at_attributes(module, stack)
        if volatile:
            copies = without_recording(_clones, [tensor for _, _, tensor in volatile])
            self._volatile = [
                (*entry, copy, _torch.version(entry[2])) for entry, copy in zip(volatile, copies, strict=True)
            ]

    def _look_at_attributes(self, module: nn.Module, modules: list[nn.Module | None]) -> None:
        attributes = vars(module)
        for name, value in attributes.items():
            if name in _OWN_ATTRIBUTES:
                continue
            if value is None or type(value) in _WITH_STATE:
                if type(value) is torch.Generator:
                    self.generators += (value,)
                elif not name.startswith("_"):
                    _note_attribute(self, f"{type(module).__name__}.{name}", value, attributes, name)
            elif type(value) in (list, dict) and 0 < len(value) < 100 and not name.startswith("_"):
                for path, part, store, key in _near(value, f"{type(module).__name__}.{name}"):
                    if part is None or isinstance(part, Tensor):
                        _note_attribute(self, path, part, store, key)
                    elif isinstance(part, nn.Module):
                        modules.append(part)

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is a buffer, or lies where one does."""
        for _, _, buffer, *_ in self._volatile:
            if buffer is tensor:
                return True
        storage = _torch.storage_id(tensor)
        known = [*(buffer.tensor for buffer in self._buffers), *(entry[2] for entry in self._volatile)]
        return any(_torch.storage_id(buffer) == storage for buffer in known if _torch.has_storage(buffer))

    def settle(self) -> None:
        """After the forward: which buffers has it written?"""
        for buffer in self._buffers:
            is_same = buffer.store.get(buffer.name) is buffer.tensor
            wrote = not is_same or _torch.version(buffer.tensor) != buffer.version
            if not wrote and buffer.before is not None:
                wrote = without_recording(_differ, (buffer.before, buffer.tensor))
            if wrote and buffer.before is None:
                self._lost.append(buffer)
            elif not wrote:
                buffer.before = None
            _wrote_buffers.setdefault(buffer.module, {})[buffer.name] = wrote
        self._versions = self._versions_now()
        for store, name in self._lazy:  # made by this forward: its first value is gone, but it is not written twice
            new = store[name]
            if new is not None:
                self._volatile.append((store, name, new, without_recording(_torch.copy, new), _torch.version(new)))

    def then(self, where: object, with_versions: bool = True) -> list[tuple[dict[str, Any], str, Any]]:
        """What the modules had before the forward and don't have now. Who looks at versions: `opaque` in a scope."""
        for buffer in self._lost:
            raise errors.written(where, str(buffer))
        then: list[tuple[dict[str, Any], str, Any]]
        then = [entry for entry in self._parts if entry[0].get(entry[1]) is not entry[2]]
        for module, name, leaf in self._leaves:
            if not leaf.requires_grad:  # frozen since
                then.append((_parts_of(module)[1], name, nn.Parameter(leaf.detach())))
        copies = _clones([before for _, _, _, before, _ in self._volatile])
        if with_versions:
            _torch.set_versions(copies, [version for *_, version in self._volatile])
        then += [(store, name, copy) for (store, name, *_), copy in zip(self._volatile, copies, strict=True)]
        for buffer in self._buffers:
            if buffer.before is not None:
                copy = copy_of(buffer.before, buffer.version)
                if isinstance(buffer.tensor, nn.Parameter):
                    copy = nn.Parameter(copy, requires_grad=False)
                then.append((buffer.store, buffer.name, copy))
            elif _torch.version(buffer.tensor) != buffer.version:
                later = _torch.version(buffer.tensor)
                raise errors.changed(where, named(str(buffer), buffer.tensor), buffer.version, later)
            elif buffer.tensor.requires_grad and not buffer.required_grad:
                then.append((buffer.store, buffer.name, nn.Parameter(buffer.tensor.detach(), requires_grad=False)))
            elif buffer.store.get(buffer.name) is not buffer.tensor:
                then.append((buffer.store, buffer.name, buffer.tensor))
        then += [(vars(m), "training", training) for m, training in self._modes if m.training is not training]
        return then

    def changed(self, where: Frame) -> list[Changed]:
        """The parameters that have been changed since, but for those that an embedding has only made shorter again."""
        if not self._versions or self._versions_now() == self._versions:
            return []
        changed = functools.partial(errors.changed, where)
        return [
            (p, functools.partial(changed, named(f"{type(m).__name__}.{name}", p), version, _torch.version(p)))
            for (m, name, p), version in zip(self._leaves, self._versions, strict=False)
            if _torch.version(p) != version and vars(m).get("max_norm") is None
        ]

    def _versions_now(self) -> list[int]:
        try:
            return [parameter._version for _, _, parameter in self._leaves]
        except RuntimeError:
            return [_torch.version(parameter) for _, _, parameter in self._leaves]

    @staticmethod
    def exchange(values: Iterable[tuple[dict[str, Any], str, Any]]) -> list[tuple[dict[str, Any], str, Any]]:
        """Give the modules these; returns what they had."""
        present = []
        for store, name, value in values:
            present.append((store, name, store.get(name)))
            store[name] = value
        return present


_parts_of = _torch.parts_of_module
_WITH_STATE = frozenset({Tensor, nn.Parameter, torch.Generator})
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # that every module has


class Plain:
    """A tensor that belongs to no module and needs no gradient, before the forward."""

    __slots__ = ("argument", "before", "is_guarded", "is_seen", "path", "tensor", "version")

    def __init__(self, path: Name, tensor: Tensor, argument: _Given | None = None) -> None:
        self.path = path
        self.tensor = tensor
        self.argument = argument  # what gives it to the rerun; None if the function finds it by itself
        self.version = tensor._version
        self.before: Tensor | None = None
        self.is_seen = False  # by batch normalisation
        self.is_guarded = True  # against later changes, which are an error

    @staticmethod
    def is_one(tensor: Tensor) -> bool:
        """Whether a region might write it in place (rather than, say, an expanded tensor)."""
        return (
            (type(tensor) is Tensor or type(tensor) is nn.Parameter)
            and not tensor.requires_grad
            and tensor.layout is torch.strided
            and _torch.version(tensor) >= 0
            and tensor.device.type != "meta"
            and 0 not in tensor.stride()
            and (tensor.is_contiguous() or _extent(tensor) <= max(2 * tensor.nbytes, _MEDIUM))
        )


class Attribute:
    """A variable, attribute or item that holds a tensor or None before the forward, and the dict or list that it is in;
    None if nothing can be set there.

    A tensor that belongs to a graph is not held with it: that may lead to an earlier region, and so on to them all.
    """

    __slots__ = ("_given", "_required_grad", "_value", "_version", "is_set", "key", "path", "store")

    def __init__(self, path: str, value: Tensor | None, store: Any, key: Any) -> None:
        self.path = path
        self.store = store
        self.key = key
        self._value = value
        self._version = 0 if value is None else _torch.version(value)
        self._required_grad = value is not None and value.requires_grad
        self._given: Callable[[], Tensor | None] | None = None
        self.is_set = False  # by the function, so that the rerun will do it, too

    def settle(self) -> None:
        """The forward has ended."""
        value = self._value
        self.is_set = self.store is not None and self.now() is not value
        if value is None:
            return
        if value.requires_grad and _torch.is_leaf(value):
            self._version = _torch.version(value)
        elif self.store is None or value.requires_grad:
            self._given = weakref.ref(value)
            self._value = None if self.store is None else value.detach()

    def now(self) -> Any:
        try:
            return self.store[self.key]
        except (KeyError, IndexError):
            return _UNSET

    def is_there(self, now: Any) -> bool:
        return now is self._value if self._given is None else now is not None and now is self._given()

    def then(self) -> Tensor | None:
        """What the rerun finds there."""
        given = self._value if self._given is None else self._given()
        if given is not None or self._value is None:
            return given
        with torch.enable_grad():  # it has gone, and with it its graph
            return copy_of(self._value.requires_grad_(), self._version)

    @property
    def required(self) -> tuple[Tensor, bool] | None:
        """The tensor, and whether it required grad."""
        tensor = self._value if self._given is None else self._given()
        return None if tensor is None else (tensor, self._required_grad)

    def changed(self, where: Frame, only_leaves: bool) -> Changed | None:
        """The tensor, if it has been changed in place."""
        tensor = self._value if self._given is None or self._value is not None else self._given()
        if tensor is None or _torch.version(tensor) == self._version:
            return None
        if only_leaves and not (self._given is None and tensor.requires_grad):
            return None
        name = named(f"'{self.path}'", tensor)
        return tensor, functools.partial(errors.changed, where, name, self._version, _torch.version(tensor))


def _note_attribute(found: Buffers | Surroundings, path: str, value: Tensor | None, store: Any, key: Any) -> None:
    """Among what these have found is an attribute, which the region may set, or write if it holds a tensor."""
    found.attributes.append(Attribute(path, value, store, key))
    if value is not None and Plain.is_one(value):
        found.plain.append(Plain(path, value))


def required_of(attributes: Iterable[Attribute]) -> list[tuple[Tensor, bool]]:
    """The tensors that they hold, each with whether it required grad."""
    found = [attribute.required for attribute in attributes]
    return [required for required in found if required is not None]


class Writes:
    """Tensors outside of modules that a region has written: running statistics, counters, code books. The rerun gets
    copies of what they held before the forward; what it writes is dropped (rule 7). Attributes that a region sets to
    other tensors have those of before the forward in the rerun, too.

    Numbers and vectors of up to 64 KiB are copied before each forward; larger tensors until a forward has left them
    alone, if they aren't too large for a try. If a tensor is written that has not been copied, that rerun is refused,
    and the next forward copies it.
    """

    __slots__ = ("_arguments", "_attributes", "_known", "_lost", "_noted", "_overlapping", "_swaps")

    def __init__(self, code: object, noted: list[Plain], attributes: list[Attribute]) -> None:
        self._known = known = _wrote_tensors.setdefault(code, {})
        if len(known) > 1000:  # paths that never come again, such as numbers of steps in a dict
            known.clear()
        self._noted = noted
        self._attributes = attributes
        self._lost: list[Plain] = []
        self._swaps: list[Plain] = []
        self._arguments: list[_Given] = []
        self._overlapping: tuple[Plain, Plain] | None = None
        copied = []
        for plain in noted:
            wrote = known.get(plain.path)
            limit = _MEDIUM if wrote is None else sys.maxsize if wrote else _SMALL if plain.tensor.dim() <= 1 else -1
            if plain.tensor.nbytes <= limit:
                copied.append(plain)
        if copied:
            for plain, copy in zip(copied, without_recording(_clones, [p.tensor for p in copied]), strict=True):
                plain.before = copy

    def see_statistics(self, tensor: Tensor, names: dict[str, Any], frame: FrameType) -> None:
        """Batch normalisation is about to write these running statistics; `names` are its variables."""
        plain = self._find(tensor)
        if plain is not None:
            plain.is_seen = True
            return
        self._add(tensor, "running statistics")
        module = None if frame.f_back is None else frame.f_back.f_locals.get("self")
        count = getattr(module, "num_batches_tracked", None)
        if isinstance(count, Tensor) and names.get("training") and self._find(count) is None:
            without_recording(_uncount, self._add(count, "num_batches_tracked"))  # it has been counted just before

    def _find(self, tensor: Tensor) -> Plain | None:
        storage = _torch.storage_id(tensor)
        return next((plain for plain in self._noted if _torch.storage_id(plain.tensor) == storage), None)

    def _add(self, tensor: Tensor, name: str) -> Tensor:
        plain = Plain(name, tensor)
        plain.is_seen = True
        (plain.before,) = without_recording(_clones, [tensor])
        self._noted.append(plain)
        return plain.before

    def settle(self) -> None:
        """After the forward: what has it written?"""
        written: list[Plain] = []
        for plain in self._noted:
            known = self._known.get(plain.path)
            is_same = _torch.version(plain.tensor) == plain.version
            wrote = known or plain.is_seen or not is_same
            if plain.before is None:
                if wrote:
                    self._lost.append(plain)
            elif not wrote and known is None:
                wrote = without_recording(_differ, (plain.before, plain.tensor))
            if known is None or wrote:
                self._known[plain.path] = bool(wrote)
            if wrote and plain.before is not None:
                plain.is_guarded = is_same
                written.append(plain)
        self._noted = []  # an argument may belong to the region's graph by now
        for attribute in self._attributes:
            attribute.settle()
        if written:
            self._share_out(written)

    def _share_out(self, written: list[Plain]) -> None:
        """Who is given which copy: one tensor stays one, wherever the function has it from."""
        first: dict[int, Plain] = {}
        for plain in sorted(written, key=lambda plain: plain.argument is not None):
            leader = first.setdefault(id(plain.tensor), plain)
            if plain.argument is None:
                if leader is plain:
                    self._swaps.append(plain)
            else:
                plain.argument.start_from(plain, leader)
                self._arguments.append(plain.argument)
        for one, other in itertools.combinations(first.values(), 2):
            if _torch.storage_id(one.tensor) == _torch.storage_id(other.tensor) and _overlap(one.tensor, other.tensor):
                self._overlapping = one, other

    def has_written(self, tensor: Tensor | None) -> bool:
        return any(plain.tensor is tensor and not plain.is_guarded for plain in self._swaps)

    def check(self, where: Frame) -> None:
        """Whether the values of before the forward are at hand."""
        for plain in self._lost:
            raise errors.written(where, named(plain.path, plain.tensor))
        if self._overlapping is not None:
            raise errors.sharing_memory(where, *(named(plain.path, plain.tensor) for plain in self._overlapping))

    def written_arguments(self) -> set[int]:
        """The storages of the copies that the rerun has been given."""
        return {argument.copied for argument in self._arguments}

    @property
    def has_others(self) -> bool:
        """Whether there is something to exchange that belongs to the process."""
        return bool(self._swaps) or any(True for _ in self._replaced())

    def _replaced(self) -> Iterator[tuple[Attribute, Any]]:
        """The attributes that hold something else now, or will in the rerun."""
        for attribute in self._attributes:
            if attribute.store is not None:
                now = attribute.now()
                if attribute.is_set or not attribute.is_there(now):
                    yield attribute, now

    def changed(self, where: Frame, only_leaves: bool) -> list[Changed]:
        """The tensors that somebody has written since the forward, while the rerun is entered."""
        found = [attribute.changed(where, only_leaves) for attribute in self._attributes]
        return [changed for changed in found if changed is not None]

    def required(self) -> list[tuple[Tensor, bool]]:
        """The tensors, each with whether it required grad."""
        return required_of(self._attributes)

    def enter(self, written: set[int]) -> tuple[list[tuple[Tensor, Tensor, int]], list[tuple[Any, Any, Any]]]:
        """Give the tensors that are no arguments their values of before the forward; returns what `leave` needs."""
        attributes = []
        for attribute, now in [*self._replaced()]:
            attributes.append((attribute.store, attribute.key, now))
            attribute.store[attribute.key] = attribute.then()
        present = []
        for plain, copy in zip(
            self._swaps, _clones([p.before for p in self._swaps if p.before is not None]), strict=True
        ):
            tensor = plain.tensor
            present.append((tensor, tensor.data, tensor._version))
            written.add(_torch.storage_id(copy))
            tensor.data = copy
            _torch.set_version(tensor, plain.version)
        return present, attributes

    @staticmethod
    def leave(present: tuple[list[tuple[Tensor, Tensor, int]], list[tuple[Any, Any, Any]]]) -> None:
        for tensor, data, version in present[0]:
            tensor.data = data
            _torch.set_version(tensor, version)
        for store, key, value in present[1]:
            if value is not _UNSET:
                store[key] = value
            elif isinstance(store, dict):
                store.pop(key, None)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    if not (_torch.has_storage(a) and _torch.has_storage(b)) or _torch.storage_id(a) != _torch.storage_id(b):
        return False
    return _overlap(a, b)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors on one storage have an element in common (or might, if they are large)."""
    (start, end), (other_start, other_end) = _span(a), _span(b)
    if start >= other_end or other_start >= end:
        return False
    if max(a.numel(), b.numel()) > _SMALL:
        return True
    return not _bytes_of(a).isdisjoint(_bytes_of(b))


def _bytes_of(tensor: Tensor) -> set[int]:
    """Where on its storage its elements begin, in bytes."""
    places = {int(tensor.storage_offset())}
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = {place + i * stride for place in places for i in range(size)}
    return {place * tensor.itemsize for place in places}


def _extent(tensor: Tensor) -> int:
    """Bytes from its first element to its last, with the gaps in between."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where on its storage it begins and ends, in bytes."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + _extent(tensor)


_BATCH_NORM = nn.functional.batch_norm.__code__
_node_count = _torch.node_count


def _code_of(function: Any) -> object:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", type(function))


class _Cell:
    """A closure variable, as if it were in a dict."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        return _contents(self._cell)

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value


class Surroundings:
    """The modules and tensors that functions can be seen to use besides their arguments: themselves, what they are
    bound to, and what they and the functions around them name in closures and globals. What only a method or an
    imported function knows is not found.

    The variables that these functions find in closures and among globals, and do not set, have the values of the
    forward in the rerun, whatever the code around has set them to: `for layer in layers: x = checkpointed(lambda x:
    layer(x))(x)` is right.
    """

    __slots__ = ("_in_object", "_strict", "_variables", "attributes", "generators", "modules", "plain", "tensors")

    def __init__(self, *functions: Any, strict: bool = False) -> None:
        self._strict = strict
        self._in_object = False
        self.modules: tuple[nn.Module, ...] = ()
        self.generators: tuple[torch.Generator, ...] = ()
        self.tensors: tuple[tuple[str, Tensor, int, bool], ...] = ()  # with version, and whether they required grad
        self.plain: list[Plain] = []
        self.attributes: list[Attribute] = []
        self._variables: dict[FunctionType, list[Any]] = {}
        for function in functions:
            self._look_at(function)

    def _look_at(self, function: Any) -> None:
        while isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                self._note("an argument of a partial", value)
            function = function.func
        if type(function) is MethodType:
            self._note("self", function.__self__)
            function = function.__func__
        if type(function) is not FunctionType:
            self._note("self", getattr(function, "__self__", function))
        elif function not in self._variables:
            self._variables[function] = values = _values_of_variables(function)
            for name, value in _defaults_of(function):
                if isinstance(value, Tensor) and not self._strict:  # a call may bring another one in its place
                    _note_attribute(self, name, value, None, None)
                else:
                    self._note(name, value)
            _, names, sets = _variables_of(function)
            for i, (name, value) in enumerate(zip(names, values, strict=True)):
                self._note(name, value)
                if name in sets and (value is None or isinstance(value, Tensor)) and not self._strict:
                    cells = function.__closure__ or ()
                    store = _Cell(cells[i]) if i < len(cells) else function.__globals__
                    self.attributes.append(Attribute(name, value, store, name))

    def _note(self, name: str, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS:
            return
        if isinstance(value, nn.Module):
            self.modules += (value,)
        elif isinstance(value, Tensor):
            self.tensors += ((name, value, _torch.version(value), value.requires_grad),)
            if not self._strict and Plain.is_one(value):
                self.plain.append(Plain(name, value))
        elif isinstance(value, torch.Generator):
            self.generators += (value,)
        elif kind is FunctionType:
            if _home(value) != "torch":
                self._look_at(value)
        elif kind is MethodType or isinstance(value, functools.partial):
            self._look_at(value)
        elif not isinstance(value, NO_OBJECTS):
            near = set()
            for path, part, store, key in _near(value, name):
                if part is None or isinstance(part, Tensor):
                    near.add(id(part))
                    if not self._strict:
                        _note_attribute(self, path, part, store, key)
                elif isinstance(part, FunctionType | MethodType | functools.partial) and not self._in_object:
                    # Not those that these lead to in turn: an object may lead to the whole program.
                    self._in_object = True
                    self._note(path, part)
                    self._in_object = False
            for path, part in _parts_in(value, name, set()):
                if not isinstance(part, Tensor):
                    self._note(path, part)
                elif id(part) not in near and not self._strict:
                    self.attributes.append(Attribute(path, part, None, None))

    def forgive(self, writes: Writes) -> None:
        """What the region itself has written is no change."""
        self.tensors = tuple(entry for entry in self.tensors if not writes.has_written(entry[1]))

    def guard_only_leaves(self) -> None:
        self.tensors = tuple(entry for entry in self.tensors if entry[3])

    def check(self, where: Frame) -> None:
        for name, tensor, version, _ in self.tensors:
            if _torch.version(tensor) != version:
                raise errors.changed(where, named(f"'{name}'", tensor), version, _torch.version(tensor))

    def rebound(self, function: Any) -> Any:
        """The function with its variables as they were in the forward: itself, if they still are."""
        return function if self._strict else self._rebound(function, {})

    def _rebound(self, function: Any, done: dict[Any, Any]) -> Any:
        if type(function) is not FunctionType or function not in self._variables:
            return function
        if function in done:
            return done[function]
        done[function] = function  # those that reach themselves stay as they are
        now = _values_of_variables(function)
        then = [self._rebound(value, done) for value in self._variables[function]]
        if all(map(operator.is_, now, then)):
            return function
        code, names, sets = _variables_of(function)
        closure = function.__closure__
        changed = {
            name: old
            for name, new, old in zip(names, now, then, strict=True)
            if new is not old and old is not _UNSET and name not in sets
        }
        if closure is not None:
            pairs = zip(code.co_freevars, closure, strict=True)
            closure = tuple(CellType(changed.pop(name)) if name in changed else cell for name, cell in pairs)
        scope = function.__globals__ | changed if changed else function.__globals__
        new = done[function] = FunctionType(code, scope, function.__name__, function.__defaults__, closure)
        new.__kwdefaults__ = function.__kwdefaults__
        return new


_UNSET = object()


class _Variables(NamedTuple):
    """What a function's code says of its variables."""

    code: CodeType
    names: tuple[str, ...]  # that it has from its closure, and those of its globals that may hold objects
    sets: frozenset[str]  # which of them it, or one inside it, sets itself


def _variables_of(function: FunctionType) -> _Variables:
    code = function.__code__
    known = _variables.get(id(code))
    if known is None:
        scope = function.__globals__
        names = code.co_freevars + tuple(
            name
            for name in _globals_read_by(code)
            if not (isinstance(scope.get(name), type | ModuleType) or _is_import(name, scope.get(name), scope))
            and (name in scope or not hasattr(builtins, name))  # it may be set later
        )
        known = _Variables(code, names, frozenset(_set_by(code)))
        remember(_variables, code, known)
    return known


# Looked for once, at the function's first call. By id, because the hash of a code object is that of all its constants.
_variables: dict[int, _Variables] = {}


def _is_import(name: str, value: Any, scope: dict[str, Any]) -> bool:
    """Whether a global is a function from elsewhere under its own name, rather than a variable that holds one."""
    is_function = isinstance(value, FunctionType | BuiltinFunctionType)
    return is_function and getattr(value, "__globals__", None) is not scope and value.__name__ == name


def _globals_read_by(code: CodeType) -> tuple[str, ...]:
    """The globals that a function, or one inside it, reads."""
    found = [str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _globals_read_by(const)]
    return tuple(dict.fromkeys(found + inner))


def _names_in(code: CodeType) -> Iterator[str]:
    """Globals and attributes, also of functions inside."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)


def _defaults_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _values_of_variables(function: FunctionType) -> list[Any]:
    cells = function.__closure__ or ()
    values = [_contents(cell) for cell in cells]
    scope = function.__globals__
    return values + [scope.get(name, _UNSET) for name in _variables_of(function).names[len(cells) :]]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNSET


def _set_by(code: CodeType) -> Iterator[str]:
    """The closure variables and globals that a function, or one inside it, sets itself."""
    stores = ("STORE_DEREF", "DELETE_DEREF", "STORE_GLOBAL", "DELETE_GLOBAL")
    yield from (str(i.argval) for i in dis.get_instructions(code) if i.opname in stores)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _set_by(const)


def _near(value: Any, name: str, depth: int = 2) -> Iterator[tuple[str, Any, Any, Any]]:
    """What is in a container, or in an object's attributes and in the containers there: the path to it, what it is,
    where it can be set, and the key there."""
    parts = value if isinstance(value, dict) else dict(enumerate(value)) if type(value) in (list, tuple) else None
    store = getattr(value, "__dict__", None) if parts is None else None if type(value) is tuple else value
    for key, part in (attributes_of(value) if parts is None else parts).items():
        path = f"{name}.{key}" if parts is None else f"{name}[{key!r}]"
        if type(part) in (list, tuple, dict) and depth:
            yield from _near(part, path, depth - 1)
        else:
            yield path, part, store if type(store) is not dict or key in store else None, key


def stands_alone(function: Any) -> bool:
    """Whether a function has nothing around it but torch: no closure, and no global that could lead to a tensor."""
    if type(function) is not FunctionType or function.__closure__ is not None:
        return False
    if any(type(value) not in ATOMS for _, value in _defaults_of(function)):
        return False
    code = function.__code__
    known = _alone.get(id(code))
    if known is None:
        scope = function.__globals__
        alone = all(
            (isinstance(scope[name], type | ModuleType) or _is_import(name, scope[name], scope))
            and _home(scope[name]) in ("torch", "math")
            if name in scope
            else any(hasattr(known, name) for known in _KNOWN)  # else set later, or somebody's attribute of an argument
            for name in _names_in(code)
        )
        known = code, alone
        remember(_alone, code, known)
    return known[1]


def _home(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


_KNOWN = (builtins, Tensor, torch, nn, nn.functional, torch.linalg, torch.fft, torch.special, dict, list, str)
_alone: dict[int, tuple[CodeType, bool]] = {}


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


# ---- arguments


class _NotSaved:
    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def unpack(self) -> Tensor:
        return self._tensor


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether `a` is still what it was when the alias `b` was made of it: the same storage in the same way."""
    if a is b:
        return True
    if a.requires_grad != b.requires_grad or _torch.version(a) != _torch.version(b):
        return False
    if type(a) is not Tensor:  # a subclass, of which detached ones share the insides
        return type(a) is type(b)
    if a.is_nested or not _torch.has_storage(a) or not _torch.has_storage(b):
        return False
    if _torch.storage_id(a) != _torch.storage_id(b):
        return False
    return (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)


class _Argument:
    """A tensor argument that belongs to a graph: it comes back with its place in that graph."""

    __slots__ = ("_live", "_name", "_saved", "_version")

    def __init__(self, tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> None:
        self._name = name
        if is_parameter(root_of(tensor)):  # a view of a leaf
            self._saved: Any = _NotSaved(tensor)
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
            tensor: Tensor = self._saved.unpack()
            return tensor
        except RuntimeError as error:
            raise _as_changed(error, self._name, where) from error


def _as_changed(error: RuntimeError, name: Name, where: Frame) -> RuntimeError:
    """What autograd says about a saved tensor that has been written, in our words."""
    if isinstance(error, errors.CheckpointError) or "modified by an inplace" not in str(error):
        return error
    now, was = [*re.findall(r"version (\d+)", str(error)), None, None][:2]
    text = named(name)
    found = re.search(r"\[torch\.(?:\w+\.)*(\w+) \[([\d, ]*)\]\]", str(error))
    dtype = None if found is None else getattr(getattr(torch, found[1], None), "dtype", None)
    if found is not None and dtype is not None:
        size = tuple(int(n) for n in found[2].split(",") if n)
        text += f" ({dtype} tensor of shape {size})".replace("torch.", "")
    return errors.changed(where, text, was, now)


class _Given(Held):
    """A tensor argument that needs no gradient. The very object comes back if it still is what it was: functions ask
    for identity, and for attributes that somebody has set."""

    __slots__ = ("_before", "_given", "_leader", "copied", "copy")

    def __init__(self, tensor: Tensor, hooks: _torch.Hooks | None, name: Name) -> None:
        super().__init__(tensor, hooks, name)
        self._before: Any = None  # what a rerun starts from, and its version
        self._leader: Plain | None = None
        self.copied = 0  # the storage that a rerun writes
        self.copy: Callable[[], Tensor | None] = lambda: None  # until the rerun has it
        # Weakly: it may be written in place later by what this region computes, and would own itself.
        self._given: Callable[[], Tensor | None] = weakref.ref(tensor) if type(tensor) is Tensor else lambda: tensor

    def start_from(self, plain: Plain, leader: Plain) -> None:
        """The region has written it: hand out copies of what it held before, or what `leader` hands out."""
        if not plain.is_guarded:
            self.stop_guarding()
        self._before = plain.before, plain.version
        if leader is not plain:
            self._leader = leader

    def fetch(self, where: Frame) -> Tensor:
        if self._before is not None:
            if self.is_guarded:
                super().fetch(where)
            return self._fetch_copy()
        tensor, given = super().fetch(where), self._given()
        if tensor.requires_grad:  # a parameter that has been thawed since
            return tensor.detach()
        return given if given is not None and _is_same(given, tensor) else tensor

    def _fetch_copy(self) -> Tensor:
        if self._leader is not None:
            other = self._leader.argument
            shared = self._leader.tensor if other is None else other.copy()
            if shared is not None:
                return shared
        copy = copy_of(*self._before)
        self.copied = _torch.storage_id(copy)
        self.copy = weakref.ref(copy)
        return copy


Seen = tuple[str, weakref.ref[Tensor], int, bool]  # the path to it, the tensor, its version, whether it required grad


class Inputs:
    """The arguments of one call: tensors saved, containers copied, everything guarded."""

    # What there may be besides tensors that require grad.
    has_opaque = False  # something that may lead to tensors that nobody sees here
    devices: tuple[torch.device, ...] = ()
    generators: tuple[torch.Generator, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    functions: tuple[Any, ...] = ()
    _iterators: tuple[str, ...] = ()
    _objects: tuple[tuple[object, str, list[Seen]], ...] = ()

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: _torch.Hooks | None) -> None:
        self._hooks = hooks
        self._args: list[Any] = [*args]
        self._kwargs = kwargs
        self.plain: list[Plain] = []
        self.attributes: list[Attribute] = []
        is_quick = hooks is None and _SavedTensor is not None
        for i, value in enumerate(args):
            kind = type(value)
            if is_quick and (kind is Tensor or kind is nn.Parameter) and value.requires_grad and value.is_cpu:
                self._args[i] = _save_input(value, False)  # autograd guards the version
            elif kind not in ATOMS or kind is type:
                self._args[i] = self._save(value, ("args", i))
        if kwargs:
            self._kwargs = {k: self._save(v, ("kwargs", k)) for k, v in kwargs.items()}

    def restore(self, where: Frame) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as they were; `ChangedError` names the first that has changed."""
        for path in self._iterators:
            raise errors.used_up(where, path)
        for value, path, seen in self._objects:
            self._check_object(value, path, seen, where)
        args = self._args.copy()
        for i, saved in enumerate(args):
            if type(saved) is _SavedTensor:
                try:
                    tensor = saved.unpack()  # type: ignore[attr-defined]
                    args[i] = tensor if tensor.requires_grad else _as_leaf(tensor)
                except RuntimeError as error:
                    raise _as_changed(error, ("args", i), where) from error
            else:
                args[i] = _rebuild(saved, where)
        return args, {k: _rebuild(v, where) for k, v in self._kwargs.items()} if self._kwargs else self._kwargs

    def _save(self, value: Any, name: str | tuple[str, Any], around: tuple[Any, ...] = ()) -> Any:
        """What stands for `value`, which is in the containers `around`, until the rerun."""
        kind = type(value)
        if kind in ATOMS:
            self.has_opaque = self.has_opaque or kind is type
            return value
        if isinstance(value, Tensor):
            if not value.is_cpu:
                self.see((value.device,))
            if value.requires_grad:
                return (Held if value.is_leaf else _Argument)(value, self._hooks, name)
            given = _Given(value, self._hooks, name)
            if Plain.is_one(value):
                self.plain.append(Plain(name, value, given))
            return given
        if isinstance(value, torch.Generator):
            self.generators += (value,)
            return value
        if isinstance(value, nn.Module):
            self.modules += (value,)
            return value
        if isinstance(value, NO_OBJECTS) or kind is functools.partial:
            self.has_opaque = True
            if kind is FunctionType or kind is MethodType or kind is functools.partial:
                self.functions += (value,)
            return value
        path = name if isinstance(name, str) else f"{name[0]}[{name[1]!r}]"
        opened = open_container(value)
        if opened is not None:
            if any(value is container for container in around):
                return value  # a container in itself
            parts, build = opened
            around = (*around, value)
            has_fields = dataclasses.is_dataclass(value) or hasattr(kind, "_fields")
            names = ((k, f"{path}.{k}" if has_fields and type(k) is str else (path, k)) for k in parts)
            return _Container(build, {k: self._save(parts[k], name, around) for k, name in names})
        self.has_opaque = True
        if _is_iterator(value):
            self._iterators += (path,)
        seen: list[Seen] = []
        for name, part in _parts_in(value, path, set()):
            if isinstance(part, nn.Module):
                self.modules += (part,)
            elif isinstance(part, torch.Generator):
                self.generators += (part,)
            else:
                self.see((part.device,))
                seen.append((name, weakref.ref(part), _torch.version(part), part.requires_grad))
                if Plain.is_one(part):
                    self.plain.append(Plain(name, part))
        if seen:
            self._objects += ((value, path, seen),)
        return value

    def required(self) -> list[tuple[Tensor, bool]]:
        """The tensors in objects, each with whether it required grad."""
        found = [(ref(), required_grad) for _, _, seen in self._objects for _, ref, _, required_grad in seen]
        return [(tensor, required_grad) for tensor, required_grad in found if tensor is not None]

    def forgive(self, writes: Writes) -> None:
        """What the region itself has written is no change."""
        self._objects = tuple(
            (value, path, [entry for entry in seen if not writes.has_written(entry[1]())])
            for value, path, seen in self._objects
        )

    def see(self, devices: Iterable[torch.device]) -> None:
        """Fork the random generators of these, too."""
        for device in devices:
            if device not in self.devices and has_rng(device):
                self.devices += (device,)

    @staticmethod
    def _check_object(value: object, path: str, seen: list[Seen], where: Frame) -> None:
        now = dict(_parts_in(value, path, set()))
        for name, ref, version, _ in seen:
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


def _as_leaf(tensor: Tensor) -> Tensor:
    """What required grad, also if it has been frozen since."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _rebuild(saved: Any, where: Frame) -> Any:
    kind = type(saved)
    if kind is _Argument or kind is _Given:
        return saved.fetch(where)
    if kind is Held:
        return _as_leaf(saved.fetch(where))
    if kind is _Container:
        return saved.build({k: _rebuild(v, where) for k, v in saved.parts.items()})
    return saved


def _is_iterator(value: Any) -> bool:
    """Whether this is what a loop has used up. Not endless ones, which give numbers to names and logs."""
    kind = type(value)
    is_one = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
    return is_one and kind is not itertools.count and kind is not itertools.repeat


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
