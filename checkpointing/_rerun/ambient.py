"""State outside the arguments, except random generators: captured in the forward, entered in the
recompute.

Every region pays for the capture, so it is a handful of getters. The recompute enters only the
state that differs from the present one, and puts that back at its end (rule 7).

The owner of other state (a tracker of random states, the scales of FP8 casts) registers it with
`register_state`.

Rejected: entering `autocast` and other context managers in every recompute, as torch does. They
would be most of a region's overhead.
"""

import contextvars
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .. import _torch
from .._engine import Undo, enter_context, enter_switches, put_together, read_switches, take_apart

S = TypeVar("S")


# In order; each access is atomic.
_registered: OrderedDict[int, tuple[Callable[[], Any], Callable[[Any], object]]] = OrderedDict()


def register_state(snapshot: Callable[[], S], restore: Callable[[S], object]) -> RemovableHandle:
    """Restore a state that is not an argument in recomputes, such as the scales of FP8 casts.

    From now on, in every thread, a region that calls its function again (rerun, reentrant) calls
    `snapshot()` when it is entered, and `restore(state)` with the result before each recompute.
    After the recompute, even a failed one, the present state is restored in the same way. A replay
    runs no Python again and needs no such state.

    Args:
        snapshot: returns a copy of the present state. Called with grad mode off.
        restore: puts a state from `snapshot` back, possibly several times, and must not change it.
            Called with grad mode off, in the thread in which backward runs.

    Returns:
        A handle whose `remove()` ends the registration, also usable as a context manager. Regions
        that were entered before keep their snapshot and still restore it.

    Raises:
        TypeError: if one of the two is not callable.

    Example:
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
    handle = RemovableHandle(_registered)
    _registered[handle.id] = torch.no_grad()(snapshot), torch.no_grad()(restore)
    return handle


class Ambient:
    """Autocast, function modes, switches, context variables, and registered states."""

    def __init__(self) -> None:
        self._context = context = contextvars.copy_context()
        # A recompute may collect values in them: it gets copies. Their tensors are not kept alive.
        # Torch's own are settings: inductor keeps about a thousand, and more with each compilation.
        self._collections = [
            (variable, take_apart(value, _saved))
            for variable, value in context.items()
            if isinstance(value, _COLLECTIONS) and not variable.name.startswith("torch.")
        ]
        for variable, _ in self._collections:
            context.run(variable.set, None)
        self._switches = read_switches()
        self._modes = _torch.function_modes() if _torch.function_mode_count() else []
        self._autocast = _autocast_state() if _torch.autocast_is_on_somewhere() else []
        self._states = [(*pair, pair[0]()) for pair in [*_registered.values()]]

    def enter(self, undo: Undo) -> contextvars.Context:
        """Enter the states that differ; `undo` gets the functions that leave them. Returns the
        context to run in: a copy, since recomputes nest and a context can't be entered twice."""
        context = self._context.copy()
        for variable, saved in self._collections:
            context.run(variable.set, put_together(saved, _restored))
        enter_switches(self._switches, undo)
        if self._modes or _torch.function_mode_count():
            modes = _torch.function_modes()
            undo.append((_torch.set_function_modes, modes))
            _torch.set_function_modes(self._modes)
        if torch.is_inference_mode_enabled():  # as may backward, but no forward of a region
            enter_context(torch.inference_mode(False), undo)
        if self._autocast or _torch.autocast_is_on_somewhere():
            self._enter_autocast(undo)
        for snapshot, restore, state in self._states:
            undo.append((restore, snapshot()))
            context.run(restore, state)
        return context

    def _enter_autocast(self, undo: Undo) -> None:
        """Enter autocast. If it is on around backward as in the forward, its cached casts of
        weights are those of the forward, as a rule, and are used. Else no casts stay behind."""
        around = _autocast_state()
        undo += around
        for kind in _torch.autocast_device_types():
            torch.set_autocast_enabled(kind, False)
        for setter, value in self._autocast:
            setter(value)
        if self._autocast and [v for _, v in self._autocast] != [v for _, v in around]:
            torch.clear_autocast_cache()
            undo.append((lambda _: torch.clear_autocast_cache(), None))


def _autocast_state() -> Undo:
    """The state of autocast, as functions that restore it."""
    state: Undo = [(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())]
    for kind in _torch.autocast_device_types():
        state += [
            (partial(torch.set_autocast_enabled, kind), torch.is_autocast_enabled(kind)),
            (partial(torch.set_autocast_dtype, kind), torch.get_autocast_dtype(kind)),
        ]
    return state


_COLLECTIONS = (list, dict, set, tuple)


class _Weak(weakref.ref[Tensor]):
    """A tensor that earlier layers have collected; a recompute finds it, or None."""


def _saved(part: Any, _: object) -> Any:
    if isinstance(part, Tensor) and part.grad_fn is not None:
        return _Weak(part)
    return {*part} if type(part) is set else part


def _restored(part: Any) -> Any:
    if type(part) is _Weak:
        return part()
    return {*part} if type(part) is set else part
