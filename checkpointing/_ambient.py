"""State outside the arguments that a rerun needs: captured at forward, entered at recompute where it differs.

Capture is a handful of getters, because every region pays for it; restoring may take longer, because it happens only
where something has changed in between (rule 7). Random number generators are forked: the rerun draws the numbers
that the forward drew, and the stream goes on afterwards where it was.

Rejected: entering `autocast`, `fork_rng`, ... context managers unconditionally (torch): most of a region's overhead.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import _torch


class Generators:
    """States of random generators at one moment."""

    __slots__ = ("_cpu", "_others")

    def __init__(
        self, cpu: bool, devices: Iterable[torch.device] = (), generators: Iterable[torch.Generator] = ()
    ) -> None:
        """The CPU's default generator if `cpu`, those of `devices`, and `generators` themselves."""
        self._cpu = _CPU.get_state() if cpu else None
        self._others: tuple[tuple[Callable[[Tensor], Any], Callable[[], Tensor], Tensor], ...] = ()
        for device in devices:
            getter, setter = device_rng(device)
            self._others += ((setter, getter, getter()),)
        for generator in generators:
            self._others += ((generator.set_state, generator.get_state, generator.get_state()),)

    @property
    def nbytes(self) -> int:
        return (0 if self._cpu is None else self._cpu.nbytes) + sum(state.nbytes for _, _, state in self._others)

    def have_moved(self) -> bool:
        """Whether somebody has drawn from one of them since."""
        return any(
            not torch.equal(state, getter())
            for getter, state in [(g, s) for _, g, s in self._others]
            + ([] if self._cpu is None else [(_CPU.get_state, self._cpu)])
        )

    def enter(self) -> list[tuple[Callable[[Tensor], Any], Tensor]]:
        """Go back to this moment; returns what `leave` needs to put the present states back."""
        now = [(setter, getter()) for setter, getter, _ in self._others]
        if self._cpu is not None:
            now.append((_CPU.set_state, _CPU.get_state()))
            _CPU.set_state(self._cpu)
        for setter, _, state in self._others:
            setter(state)
        return now

    @staticmethod
    def leave(now: list[tuple[Callable[[Tensor], Any], Tensor]]) -> None:
        for setter, state in now:
            setter(state)


_CPU = torch.default_generator


def device_rng(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """Getter and setter of an accelerator's default generator (`torch.<type>.get_rng_state`, one uint8 tensor)."""
    module = torch.get_device_module(device)
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


def has_rng(device: torch.device) -> bool:
    """Whether the device is an accelerator with a generator of its own."""
    if device.type in ("cpu", "meta"):
        return False
    module = getattr(torch, device.type, None)
    return hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")


_function_mode_count = _torch.function_mode_count
_autocast_is_on = _torch.autocast_is_on_somewhere


class Ambient:
    """Everything but random state: autocast, function modes, switches, context variables."""

    __slots__ = ("_autocast", "_context", "_modes", "_switches")

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._switches = [getter() for getter in _GETTERS]
        self._modes = _torch.function_modes() if _function_mode_count() else None
        self._autocast = _read_autocast() if _autocast_is_on() else None

    def run(self, call: Callable[[], Any]) -> None:
        """Call with the captured state; whatever had to change is put back, also after an exception."""
        # A copy: one context can't be entered twice, and recomputes nest.
        self._context.copy().run(self._run, call)

    def _run(self, call: Callable[[], Any]) -> None:
        if self._is_here():
            call()
            return
        undo: list[Callable[[], None]] = []
        try:
            self._enter(undo)
            call()
        finally:
            for restore in reversed(undo):
                restore()

    def _is_here(self) -> bool:
        """Whether there is nothing to enter, as nearly always."""
        return (
            self._autocast is None
            and self._modes is None
            and not _autocast_is_on()
            and not _function_mode_count()
            and [getter() for getter in _GETTERS] == self._switches
        )

    def _enter(self, undo: list[Callable[[], None]]) -> None:
        switches = read_switches()
        if switches != self._switches:
            undo.append(lambda: write_switches(switches))
            write_switches(self._switches)
        modes = _torch.function_modes()
        if modes != (self._modes or []):
            undo.append(lambda: _torch.set_function_modes(modes))
            _torch.set_function_modes(self._modes or [])
        if self._autocast is not None or _autocast_is_on():
            autocast = _read_autocast()
            undo.append(lambda: _write_autocast(autocast))
            _write_autocast(self._autocast)
        if self._autocast is not None:
            # Casts of weights are cached. The rerun neither sees casts made elsewhere nor leaves its own behind.
            torch.clear_autocast_cache()
            undo.append(torch.clear_autocast_cache)


_GETTERS = tuple(getter for getter, _ in _torch.SWITCHES)
_Autocast = list[tuple[str, bool, torch.dtype]]


def read_switches() -> list[Any]:
    return [getter() for getter in _GETTERS]


def write_switches(values: list[Any]) -> None:
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
