"""Where the tensors come from that a run has not met.

A run knows tensors by their objects. Of others it has to know whether they share memory with what
it has met, since a write to one changes all of them. Storages tell, as long as something there is
alive.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import Tensor, nn

from .. import _torch
from .program import NOT_WRITTEN, ON_MADE, OWN, ZEROS, Origin

_storage_of, _has_storage, _storage_id = _torch.storage_of, _torch.has_storage, _torch.storage_id
_Parameter = nn.Parameter
Cells = list[Callable[[], Any]]


class Origins:
    """The memories that one run has met, by storage."""

    def __init__(self, cells: Cells, held: Container[Any]) -> None:
        self._cells, self._held = cells, held
        self._outside: dict[int | None, int] = {}  # the first cell from outside there
        self._made: dict[int | None, int] = {}  # a cell there; of so many cells:
        self._looked_at = 0

    def of(self, tensor: Tensor, met: Sequence[Tensor] = ()) -> Origin:
        """The origin of a tensor that no cell has. `met` are those that take the next cells."""
        if not _has_storage(tensor):
            return OWN
        place = _storage_id(tensor)
        cells, known = self._cells, self._outside.get(place)
        if known is not None and ((known, NOT_WRITTEN) in self._held or self._is_at(known, place)):
            return known
        for number, other in enumerate(met) if met else ():
            if _storage_of(other) == place:
                return len(cells) + number
        if type(tensor) is not _Parameter and not _torch.is_whole_parameter(tensor):
            if self._is_made(place):
                return ON_MADE
            if _torch.is_zeros(tensor):
                return ZEROS
        return OWN

    def _is_at(self, cell: int, place: int | None) -> bool:
        """Whether the tensor in a cell is alive, and `set_` has given it no other memory."""
        tensor = self._cells[cell]()
        return tensor is not None and _storage_of(tensor) == place

    def forget(self, mark: int) -> None:
        """The cells from here on are empty again."""
        self._looked_at = min(self._looked_at, mark)
        for known in (self._outside, self._made):
            for place in [place for place, cell in known.items() if cell >= mark]:
                del known[place]

    def has_met(self, tensor: Tensor) -> bool:
        """Whether a tensor uses memory from outside that the run has met."""
        place = _storage_of(tensor)
        cell = self._outside.get(place)
        return cell is not None and self._is_at(cell, place)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor uses memory that recorded operators have made."""
        return not self.has_met(tensor) and self._is_made(_storage_of(tensor))

    def _is_made(self, place: int | None) -> bool:
        cells, made = self._cells, self._made
        for cell in range(self._looked_at, len(cells)):
            tensor = cells[cell]()
            if tensor is not None:
                made.setdefault(_storage_of(tensor), cell)
        self._looked_at = len(cells)
        there = made.get(place)
        if there is None:
            return False
        return any(self._is_at(cell, place) for cell in range(there, len(cells)))
