"""Pieces: a block whose paths never come again is run as several blocks, one after the other.

Where experts are chosen in each step, layers are dropped, or a loop takes another number of turns,
every step would be recorded and planned anew, and its forward would hold nothing. Such a block
is cut while it runs, where little is alive of what it has made since the last cut: mostly between
two layers. How little follows from the last path that was run as a whole. Its pieces share one
program, so a layer is known whatever comes before and after it, and each has a window of its own,
as in a scope around it.

Invariant: what a piece holds stays as it was, whatever later pieces write.

Rejected: a plan in one pass for each new path. A step took 2 to 4 times as long as with torch's
checkpoint around each layer; it is 1.0 to 1.2 times now.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any
from weakref import ref

from torch import Tensor

from .. import _torch
from .._engine import Aliased, Held, without_recording
from .history import History
from .origins import Cells
from .path import Path
from .program import Hold, Step


class Pieces:
    """Where the pieces of a run end, and what those before hold."""

    def __init__(self, end: Callable[[], int], history: History) -> None:
        """`end` gives a piece's holders what they need, and returns how many there are so far."""
        self.end, self._history = end, history
        self._written: set[int | None] = set()  # storages from outside
        self._copies = _torch.Copies()
        # By storage: a weak reference to what is held, and whether an operator has read it.
        self._held: dict[int | None, list[tuple[Any, bool]]] = defaultdict(list)

    def may_end(self, path: Sequence[Step], cells: Cells, saved_bytes: int) -> bool:
        """Whether little is alive of what the piece has made, or written."""
        if len(_alive(path[-_NEAR:], cells)) > _FEW:
            return False  # checked first
        sizes = dict([size for step in path for size in step.sizes])
        alive = sum([sizes.get(memory, 0) for memory in _alive(path, cells)])
        written = {memory for step in path for memory in step.writes if memory not in sizes}
        for first in [first for step in path for first in step.firsts] if written else ():
            if first.memory in written and (tensor := cells[first.cell]()) is not None:
                written.discard(first.memory)
                alive += _torch.memory_size(tensor)
        history = self._history
        return 0 < _enough(alive, history.nbytes, history.most_alive) <= saved_bytes

    def leave(self, holds: Iterable[tuple[Hold, Held]], is_checked: bool) -> None:
        """What a piece holds belongs to holders now, and may be written later. `is_checked`: values
        are compared when they come back."""
        for asked, held in holds:
            if type(held) is Aliased:
                entry = ref(held), asked.is_read or is_checked
                self._held[_torch.storage_of(held.packed)].append(entry)

    def may_write(self, asked: Hold, tensor: Tensor) -> bool:
        """Whether earlier pieces have written there, as the next block may before backward."""
        is_filled = not (asked.is_parameter or asked.is_hidden)
        return is_filled and _torch.storage_of(tensor) in self._written

    def copy(self, tensor: Tensor) -> Held:
        """A copy, the same for all pieces until the tensor is written again."""
        return Aliased(without_recording(self._copies.copy, tensor), "an input")

    def before_write(self, step: Step, targets: Iterable[Tensor]) -> None:
        """Copy what is held where a step writes."""
        storages = {*map(_torch.storage_of, targets)}
        self._written |= storages
        # Custom operators count versions up before; updates of statistics do not.
        self._copy(storages, step.info.custom or step.updates, step.updates)

    def before_unseen_write(self) -> None:
        """Anything may be written."""
        self._copy({*self._held}, False, False)

    def _copy(self, storages: Set[int | None], in_any_case: bool, only_read: bool) -> None:
        for storage in self._held.keys() & storages:
            for each, is_read in self._held[storage]:
                held = each()
                if held is None or (only_read and not is_read):
                    continue
                if in_any_case or not held.is_stale:
                    held.freeze()


def size_pieces(path: Path, nbytes: int, history: History) -> None:
    """Find what may be alive where a piece ends. In this path, which was run as a whole, pieces and
    what is alive at their ends need least together then."""
    sizes = dict([size for step in path.steps for size in step.sizes])
    saved = [0] * (len(path.steps) + 1)
    for slot, index in zip(path.slots, path.saved_after, strict=True):
        saved[index] += slot.counts * sizes.get(path.memory_of[slot.cell], 0)

    def need(most: float) -> float:
        ends = largest = piece = now = 0
        alive: dict[int, int] = {}
        for step in path.steps:
            now -= sum([alive.pop(number, 0) for number in step.gone])  # before it
            if 0 < _enough(now, nbytes, most) <= piece:
                ends, largest, piece, now, alive = ends + now, max(largest, piece), 0, 0, {}
            new = [*step.sizes, *[(number, sizes.get(number, 0)) for number in step.writes]]
            now += sum([size for number, size in new if number not in alive])
            alive.update(new)
            piece += saved[step.index]
        return ends + max(largest, piece)

    history.nbytes = nbytes
    history.most_alive = min([nbytes / 2**n for n in range(_FINEST, 1, -1)], key=need)


def _enough(alive: int, nbytes: int, most_alive: float) -> float:
    """The bytes that a piece saves at least, of so many in the block, for so many that are alive at
    its end. Where these are few, pieces of this size and all ends need least together."""
    enough = min(_ABOUT * math.sqrt(nbytes * alive), _MOST_ALIVE * alive)
    if alive > most_alive:
        enough = max(enough, nbytes * _LARGEST)
    return max(2 * alive, enough)


def _alive(steps: Iterable[Step], cells: Cells) -> set[int]:
    """The memories with results of these steps that somebody holds."""
    results = [each for step in steps for each in step.memories]
    return {memory for cell, memory in results if cells[cell]() is not None}


_NEAR, _FEW = 6, 2  # the last steps, and how many of their results may be alive at an end
_ABOUT = 0.7  # of the best size: one layer rather than two
_MOST_ALIVE = 12  # times what is alive at its end: no piece has to be larger
_LARGEST = 0.4  # of a block: a piece that saves as much may end where more is alive
_FINEST = 12  # the least that may be alive, as a power of 1/2 of what the block saves
