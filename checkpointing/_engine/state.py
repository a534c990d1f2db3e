"""State that operators depend on besides their arguments: random generators, and switches that
select kernels.

Invariant: whatever enters an older state leaves it again, in the reverse order, also after an
error. A list named `undo` collects the functions that do so.
"""

import importlib
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import _torch

Undo = list[tuple[Callable[[Any], object], Any]]  # functions that put a state back, with the state
Rng = tuple[Callable[[Any], Any], Callable[[], Any]]  # a generator's setter and getter


def undo_all(undo: Undo) -> None:
    """Call these functions with their states, the last first, even if one fails."""
    try:
        while undo:
            function, argument = undo.pop()
            function(argument)
    except BaseException:
        undo_all(undo)
        raise


def enter_context(context: AbstractContextManager[Any], undo: Undo) -> None:
    """Enter a context; `undo` gets the function that leaves it."""
    context.__enter__()
    undo.append((lambda context: context.__exit__(None, None, None), context))


class Generators:
    """States of random generators at one moment."""

    def __init__(self, rngs: list[Rng], python: bool = False) -> None:
        """With `python`, also those of the `random` module and, where it is installed, of
        NumPy."""
        if python:
            rngs = [*rngs, (random.setstate, random.getstate)]
            with suppress(ImportError):
                numpy = importlib.import_module("numpy.random")
                rngs.append((numpy.set_state, lambda: numpy.get_state(legacy=False)))
        self._python = python
        self._rngs = [(setter, getter, getter()) for setter, getter in rngs]

    @property
    def states(self) -> list[Tensor]:
        return [state for _, _, state in self._rngs if isinstance(state, Tensor)]

    def have_moved(self) -> bool:
        """Whether one of them has been used since; always True with those of Python and NumPy."""
        with _torch.unseen_by_modes():  # states are real tensors, also beside fake ones
            return self._python or any(
                not torch.equal(state, getter()) for _, getter, state in self._rngs
            )

    def enter(self, undo: Undo) -> None:
        """Go back to this moment. `undo` gets the functions that return, unless it has an older
        state of a generator."""
        known = [setter for setter, _ in undo]
        for setter, getter, state in self._rngs:
            if setter not in known:
                undo.append((setter, getter()))
            setter(state)


CPU_RNG = _torch.set_cpu_state, _torch.get_cpu_state


def rngs_of(devices: Iterable[torch.device], generators: Iterable[torch.Generator]) -> list[Rng]:
    """The default generators of those devices that are accelerators, and `generators`."""
    rngs = [
        _rng_of(device)
        for device in devices
        if hasattr(getattr(torch, device.type, None), "set_rng_state")
    ]
    return rngs + [(each.set_state, each.get_state) for each in generators]


@cache  # one setter for each device, by which `Generators.enter` knows its state
def _rng_of(device: torch.device) -> Rng:
    """An accelerator's default generator (`torch.<type>.get_rng_state`, one uint8 tensor)."""
    module = torch.get_device_module(device)
    return lambda state: module.set_rng_state(state, device), lambda: module.get_rng_state(device)


# ---- switches


_getters = [getter for getter, _ in _torch.SWITCHES]


def read_switches() -> list[Any]:
    return [getter() for getter in _getters]


def enter_switches(values: list[Any], undo: Undo) -> None:
    """Write the switches that differ; `undo` gets the functions that reset them."""
    if read_switches() == values:
        return
    for (getter, setter), value in zip(_torch.SWITCHES, values, strict=True):
        present = getter()
        if present != value:
            undo.append((setter, present))
            setter(value)
