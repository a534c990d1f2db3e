"""FSDP2 in a recorded block: parameters gathered into memory that is given back after each module.

A recompute refers to gathered parameters as to all others, and runs when FSDP2 has gathered them
again. Backward gathers them module by module. So the block is cut where memory has been given back:
values alive at a cut are kept, and no window crosses it.

Invariant: a run pays nothing until it meets an operator of FSDP2.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch
from .position import Position


class Gathering:
    """Watches for memory that has been given back."""

    def __init__(self, run: Position) -> None:
        self._run = run
        self._lent: list[torch.UntypedStorage] = []  # of gathered parameters, until given back
        self.begin()

    def begin(self) -> None:
        """The run is at the root of a program: its cells are empty."""
        self._cut_at = 0  # the number of cells at the last cut
        self._alive: list[int] = []  # cells from before it
        self._kept = WeakIdKeyDictionary()  # by tensor: the version

    def lend(self, tensors: Iterable[Tensor]) -> None:
        """FSDP2 has gathered parameters into the memory of these tensors."""
        self._lent += [tensor.untyped_storage() for tensor in tensors]

    def before(self, values: Any) -> bool:
        there = [storage for storage in self._lent if storage.nbytes()]
        if len(there) < len(self._lent):
            self._lent = there
            self._cut()
        return True

    def _cut(self) -> None:
        """Keep the values that are alive."""
        cells = self._run.cells
        numbers = [*self._alive, *range(self._cut_at, len(cells))]
        self._alive = [cell for cell in numbers if cells[cell]() is not None]
        for tensor in [cells[cell]() for cell in self._alive]:
            if _torch.has_storage(tensor) and not self._run.known.has_met(tensor):
                version = _torch.version(tensor)
                if self._kept.get(tensor) != version:
                    self._run.keep_at(tensor)
                    self._kept[tensor] = version
        self._cut_at = len(cells)
