"""State outside the arguments that a rerun needs: captured at forward, entered at recompute where it differs.

Capture is a handful of getters, because every region pays for it; restoring may take longer, because it happens only
where something has changed in between (rule 7). Random number generators are forked: the rerun draws the numbers
that the forward drew, and the stream goes on afterwards where it was.

What no one can see from here (a tracker of random states, scales of FP8 casts) its owner registers: `register_state`.

Rejected: entering `autocast`, `fork_rng`, ... context managers unconditionally (torch): most of a region's overhead.
"""

from __future__ import annotations

import contextvars
import importlib
import operator
import random
import weakref
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import _torch

S = TypeVar("S")


Undo = list[tuple[Callable[[Any], object], Any]]  # functions that put something back, with what they put back


class Generators:
    """States of random generators at one moment."""

    __slots__ = ("_python", "_streams")

    def __init__(
        self,
        cpu: bool,
        devices: Iterable[torch.device] = (),
        generators: Iterable[torch.Generator] = (),
        python: bool = False,
    ) -> None:
        """The CPU's default generator if `cpu`, those of `devices`, and `generators` themselves; with `python` those
        that are no torch's: of the `random` module and of NumPy."""
        streams: list[_Stream] = [(_torch.set_cpu_state, _torch.get_cpu_state)] if cpu else []
        for device in devices:
            streams.append(_device_stream(device))
        for generator in generators:
            streams.append((generator.set_state, generator.get_state))
        self._python = python
        if python:
            streams += _python_streams()
        self._streams = [(setter, getter, getter()) for setter, getter in streams]

    @property
    def states(self) -> list[Tensor]:
        return [state for _, _, state in self._streams if isinstance(state, Tensor)]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states)

    def have_moved(self) -> bool:
        """Whether somebody has drawn from one of them since; of those that are no torch's nobody asks."""
        return self._python or any(not torch.equal(state, getter()) for _, getter, state in self._streams)

    def enter(self, now: Undo) -> Undo:
        """Go back to this moment. What `leave` needs to put the present states back is added to `now`, unless it is
        there from before."""
        known = [setter for setter, _ in now]
        now += [(setter, getter()) for setter, getter, _ in self._streams if setter not in known]
        for setter, _, state in self._streams:
            setter(state)
        return now

    @staticmethod
    def leave(now: Undo) -> None:
        for setter, state in reversed(now):
            setter(state)


_Stream = tuple[Callable[[Any], Any], Callable[[], Any]]  # setter and getter


def _python_streams() -> list[_Stream]:
    """The global generators of Python and, where it is installed, NumPy."""
    streams: list[_Stream] = [(random.setstate, random.getstate)]
    try:
        numpy = importlib.import_module("numpy.random")
    except ImportError:
        return streams
    return [*streams, (numpy.set_state, lambda: numpy.get_state(legacy=False))]


def _device_stream(device: torch.device) -> _Stream:
    """An accelerator's default generator (`torch.<type>.get_rng_state`, one uint8 tensor)."""
    module = torch.get_device_module(device)
    return lambda state: module.set_rng_state(state, device), lambda: module.get_rng_state(device)


def has_rng(device: torch.device) -> bool:
    """Whether the device is an accelerator with a generator of its own."""
    if device.type in ("cpu", "meta"):
        return False
    module = getattr(torch, device.type, None)
    return hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")


# ---- state of the user's


class StateHandle:
    """What `register_state` returns: `remove()` ends the registration, and so does leaving it as a context manager."""

    __slots__ = ("_restore", "_snapshot")

    def __init__(self, snapshot: Callable[[], Any], restore: Callable[[Any], object]) -> None:
        self._snapshot = snapshot
        self._restore = restore

    def remove(self) -> None:
        """Take no more snapshots. Regions that have one still restore it. Removing twice does nothing."""
        _registered.pop(self, None)

    def __enter__(self) -> StateHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def capture(self) -> tuple[StateHandle, Any]:
        with torch.no_grad():
            return self, self._snapshot()

    def restore(self, state: Any) -> None:
        with torch.no_grad():
            self._restore(state)


_registered: dict[StateHandle, None] = {}  # in their order; what is done with it takes one step, and no lock


def register_state(snapshot: Callable[[], S], restore: Callable[[S], object]) -> StateHandle:
    """Let recompute see state of yours that no argument shows: a tracker of random states, scales of FP8 casts, ...

    From now on, in every thread: when a region that recomputes by calling its function again (rerun, reentrant) is
    entered, `snapshot()` is called, and before each of its recomputes `restore(state)` with what it returned. After the
    recompute the state of now, of which `snapshot()` is asked just before, is restored in the same way, also when the
    recompute fails. Replay runs no Python again: it needs none of this.

    Args:
        snapshot: returns the present state; a copy, not something that changes later. Called with grad mode off.
        restore: puts a state back that `snapshot` has returned. It may be called with one state several times, and
            must not change it. Called with grad mode off, in the thread in which backward runs.

    Returns:
        A handle whose `remove()` ends it, like those of torch's hooks; also a context manager that removes it at its
        end. Regions that were entered before keep their snapshot and still restore it.

    Raises:
        TypeError: if one of the two can't be called.

    >>> import torch
    >>> from checkpointing import checkpointed, register_state
    >>> scale = {"value": 2.0}
    >>> handle = register_state(scale.copy, scale.update)
    >>> x = torch.ones(3, requires_grad=True)
    >>> y = checkpointed(lambda x: (x * scale["value"]).exp().sin())(x)
    >>> scale["value"] = 3.0
    >>> y.sum().backward()  # the recompute scales by 2
    >>> scale["value"]
    3.0
    >>> handle.remove()
    """
    for function in (snapshot, restore):
        if not callable(function):
            raise TypeError(f"register_state takes two functions, not {function!r}")
    handle = StateHandle(snapshot, restore)
    _registered[handle] = None
    return handle


_function_mode_count = _torch.function_mode_count
_is_inference = torch.is_inference_mode_enabled
_autocast_is_on = _torch.autocast_is_on_somewhere


class Ambient:
    """Everything but random state: autocast, function modes, switches, context variables, state of the user's."""

    __slots__ = ("_autocast", "_collections", "_context", "_modes", "_states", "_switches")

    def __init__(self) -> None:
        self._context = context = contextvars.copy_context()
        # What code collects in them is collected once: a recompute gets copies.
        self._collections = [v for v, value in context.items() if issubclass(type(value), _COLLECTIONS)]
        for variable in self._collections:
            context.run(variable.set, copied(context[variable]))
        self._switches = read_switches()
        self._modes = _torch.function_modes() if _function_mode_count() else None
        self._autocast = _read_autocast() if _autocast_is_on() else None
        self._states = [handle.capture() for handle in [*_registered]] if _registered else ()

    def enter(self, undo: Undo) -> contextvars.Context:
        """Put back what differs; `undo` is given the way out, the last first. Returns the context to run in: a copy,
        because one can't be entered twice, and recomputes nest."""
        context = self._context.copy()
        if self._collections:
            for variable in self._collections:
                context.run(variable.set, copied(context[variable]))
        if read_switches() != self._switches:
            enter_switches(self._switches, undo)
        if self._modes is not None or _function_mode_count():
            modes = _torch.function_modes()
            undo.append((_torch.set_function_modes, modes))
            _torch.set_function_modes(self._modes or [])
        if _is_inference():  # around the backward; a region is never entered in it
            mode = torch.inference_mode(False)
            mode.__enter__()
            undo.append((lambda mode: mode.__exit__(None, None, None), mode))
        is_on = _autocast_is_on()
        if is_on or self._autocast is not None:
            undo.append((_write_autocast, _read_autocast()))
            _write_autocast(self._autocast)
            # Casts of weights are cached. The rerun neither sees casts made elsewhere nor leaves its own behind, ...
            if is_on:  # ... nor drops those that the code around the backward will want again.
                torch.set_autocast_cache_enabled(False)
            else:
                torch.clear_autocast_cache()
                undo.append((lambda _: torch.clear_autocast_cache(), None))
        for handle, state in self._states:
            undo.append((handle.restore, handle.capture()[1]))
            context.run(handle.restore, state)
        return context


_COLLECTIONS = (list, dict, set, tuple)


class _Weak(weakref.ref[Tensor]):
    """Stands for a tensor in a copy."""


def copied(value: Any, met: dict[int, Any] | None = None) -> Any:
    """Lists, dicts and sets as copies, at any depth. Tensors of a graph in lists and dicts, such as those that earlier
    layers have left there, are not kept alive for a recompute: a copy holds them weakly, a copy of that has them or
    None."""
    met = {} if met is None else met
    if id(value) in met:
        return met[id(value)]
    if isinstance(value, tuple):
        parts = [copied(part, met) if isinstance(part, _COLLECTIONS) else part for part in value]
        same = all(map(operator.is_, parts, value))
        return value if same else tuple.__new__(type(value), parts)
    new = met[id(value)] = copy(value)
    if isinstance(new, list | dict):
        for key, part in new.items() if isinstance(new, dict) else enumerate(new):
            if isinstance(part, _COLLECTIONS):
                new[key] = copied(part, met)
            elif type(part) is _Weak:
                new[key] = part()
            elif isinstance(part, Tensor) and part.grad_fn is not None:
                new[key] = _Weak(part)
    return new


def undo_all(undo: Undo) -> None:
    """Call these functions with their arguments, the last first; one that fails does not keep the others from it."""
    try:
        while undo:
            function, argument = undo.pop()
            function(argument)
    except BaseException:
        undo_all(undo)
        raise


_QUICK_GETTERS = _torch.QUICK_GETTERS
_Autocast = list[tuple[str, bool, torch.dtype]]


def read_switches() -> list[Any]:
    try:
        return [getter() for getter in _QUICK_GETTERS]
    except RuntimeError:
        return [getter() for getter, _ in _torch.SWITCHES]


def enter_switches(values: list[Any], undo: Undo) -> None:
    """Write them where they differ; `undo` is given the way back."""
    present = read_switches()
    if present != values:
        undo += [(_torch.set_precisions, _torch.precisions()), (_write_switches, present)]
        _write_switches(values)


def _write_switches(values: list[Any]) -> None:
    for (getter, setter), value in zip(_torch.SWITCHES, values, strict=True):
        if getter() != value:
            setter(value)


def _read_autocast() -> tuple[bool, _Autocast]:
    return torch.is_autocast_cache_enabled(), [
        (t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in _torch.autocast_device_types()
    ]


def _write_autocast(state: tuple[bool, _Autocast] | None) -> None:
    if state is None:
        for t in _torch.autocast_device_types():
            torch.set_autocast_enabled(t, False)
        return
    cache, types = state
    torch.set_autocast_cache_enabled(cache)
    for t, enabled, dtype in types:
        torch.set_autocast_enabled(t, enabled)
        torch.set_autocast_dtype(t, dtype)
