"""Pieces: a block whose paths never come again is run as several blocks, one after the other.

Where experts are chosen in each step, layers are dropped, or a loop takes another number of turns,
every step would be recorded and planned anew, and its forward would hold nothing. Such a block
is cut while it runs, where it has saved much since the last cut, and little is alive of what it has
made: mostly between two layers. How much follows from the last path that was run as a whole. Its
pieces share one program, so a layer is known whatever comes before and after it, and each has a
window of its own, as in a scope around it.

Invariant: what a piece holds stays as it was, whatever later pieces write.

Rejected: a plan in one pass for each new path. A step took 2 to 4 times as long as with torch's
checkpoint around each layer; it is 1.0 to 1.3 times now.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from .. import _torch
from .._engine import Aliased, Held
from .history import History
from .ops import Info
from .path import Path
from .program import MOST_GROWTH, Cells, First, Hold, Step


class Ends:
    """Where the pieces of a run end."""

    def __init__(self, end: Callable[[], int], history: History) -> None:
        """`end` gives a piece's holders what they need, and returns how many there are so far."""
        self.end, self._history = end, history
        self._sizes = Sizes(history.nbytes, history.times)
        self.begin()

    def begin(self) -> None:
        """The next piece begins."""
        self._sizes.saved = 0
        self._count = 0  # of its steps that have been looked at
        self._made: dict[Any, int] = {}  # by memory that it has made: the bytes
        self._results: list[tuple[int, int]] = []  # that may be alive: cells and memories
        self._written: set[int] = set()  # memories that it has written
        self._met: list[First] = []

    def may_be_here(self, path: Sequence[Step], cells: Cells) -> bool:
        """Whether little is alive of what the piece has made, or has written though an earlier one
        has made it."""
        self._look_at(path)
        self._results = [each for each in self._results if cells[each[0]]() is not None]
        alive = sum([self._made.get(memory, 0) for memory in {m for _, m in self._results}])
        met = [cells[first.cell]() for first in self._met if first.memory in self._written]
        alive += sum([_torch.memory_size(tensor) for tensor in met if tensor is not None])
        if not self._sizes.suffice(alive):
            return False
        if self._sizes.ends + alive > self._history.room:
            self._history.stays_whole = True  # from the next run on
            return False
        self._sizes.end(alive)
        return True

    def _look_at(self, path: Sequence[Step]) -> None:
        made = self._made
        for step in path[self._count :]:
            made.update(step.sizes)
            self._results += step.memories
            self._written.update(step.writes)
            self._met += [first for first in step.firsts if first.requires_grad]
            self._sizes.saved += sum([made.get(slot.memory, 0) for slot in step.saves])
        self._count = len(path)

    def saved(self, path: Sequence[Step]) -> int:
        """Bytes that the block has made, and autograd saved; `path` is that of the last piece."""
        self._look_at(path)
        return self._sizes.all_saved + self._sizes.saved


class Pieces(defaultdict[int | None, WeakKeyDictionary[Held, Hold]]):
    """What the pieces of a run hold that have ended: by storage, what is held, and how that was
    asked for."""

    def __init__(self) -> None:
        super().__init__(WeakKeyDictionary)

    def leave(self, holds: Iterable[tuple[Hold, Held]]) -> None:
        """What a piece holds belongs to holders now, and may be written later. What FSDP2 has lent,
        it writes when it gathers that again."""
        for asked, held in holds:
            if type(held) is Aliased and not asked.is_lent:
                self[_torch.storage_of(held.packed)][held] = asked

    def hear_of(self, info: Info, targets: Sequence[Tensor]) -> bool:
        """Whether an operator that nobody records writes where something is held. What is held of
        parameters is copied, and that is all: optimizers write them, also from hooks. (FSDP2, which
        gathers them, writes to other tensors.)"""
        storages = {*map(_torch.storage_of, targets)}
        if not all(map(_torch.is_whole_parameter, targets)):
            return any(self[storage] for storage in self.keys() & storages)
        self._copy(storages, lambda held, _: would_change(info, held))
        return False

    def before_write(self, step: Step, targets: Iterable[Tensor]) -> None:
        """Copy what is held where a step writes."""
        self._copy({*map(_torch.storage_of, targets)}, partial(must_copy, step))

    def before_unseen_write(self, step: Step) -> None:
        """Anything may be written."""
        self._copy({*self}, partial(must_copy, step))

    def _copy(self, storages: Set[int | None], is_changed: Callable[[Held, Hold], bool]) -> None:
        """Copy what is about to be changed there. It is in memory of its own then."""
        for storage in self.keys() & storages:
            there = self[storage]
            for held, asked in [*there.items()]:
                if is_changed(held, asked):
                    held.freeze()
                    del there[held]


def must_copy(step: Step, held: Held, asked: Hold) -> bool:
    """Whether something held is to be copied before a step writes there."""
    if not asked.is_used:
        return False
    if step.updates:  # statistics, without counting a version up: a replay would notice
        return asked.is_read
    return would_change(step.info, held)


def would_change(info: Info, held: Held) -> bool:
    """Whether an operator that writes there would be the first to change something held."""
    # A custom operator, or a block inside, may have counted versions up already.
    return info.custom or info.is_uncounted or not held.is_stale


class Sizes:
    """How large the pieces of one run are."""

    saved = 0  # bytes, in the present piece
    all_saved = ends = 0  # bytes saved in the pieces before, and alive at their ends

    def __init__(self, nbytes: int, times: float) -> None:
        """A block saves `nbytes`. Its pieces are `times` as large as would be best if they could
        end anywhere, since a layer may be larger than that."""
        self._nbytes, self._times = nbytes, times

    def suffice(self, alive: int) -> bool:
        """Whether the present piece may end, where so many bytes are alive. At the best size, one
        piece and what is alive at all ends need the least memory together."""
        best = min(math.sqrt(self._nbytes * alive), _MOST_ALIVE * alive)
        enough = max(2 * alive, self._times * best, self._nbytes * _LEAST)
        return alive > 0 and self.saved >= enough

    def end(self, alive: int) -> None:
        """The present piece has ended."""
        self.ends += alive
        self.all_saved += self.saved
        self.saved = 0


def size_pieces(path: Path, history: History, room: float) -> bool:
    """Choose how large pieces are: so that this path, which was run as a whole, needs the least.
    Returns whether there is room for what is alive at all ends together; else blocks stay whole."""
    sizes: dict[Any, int] = dict([size for step in path.steps for size in step.sizes])
    saved = [0] * (len(path.steps) + 1)
    for slot, index in zip(path.slots, path.saved_after, strict=True):
        saved[index] += sizes.get(slot.memory, 0)
    history.nbytes, history.room = sum(saved), room

    def need(times: float) -> tuple[int, int]:
        """The most that a piece needs together with what is alive at the ends before it, and what
        is alive at all ends."""
        found = Sizes(history.nbytes, times)
        there: dict[int, int] = {}  # bytes by memory that the present piece has made
        most = 0
        for step in path.steps:
            for number in step.gone:
                there.pop(number, None)
            alive = sum(there.values())
            if found.suffice(alive):
                found.end(alive)
                there.clear()
            there.update([(number, sizes.get(number, 0)) for number in step.writes])
            there.update(step.sizes)
            found.saved += saved[step.index]
            most = max(most, found.ends + found.saved)
        return most, found.ends

    needs = {times: need(times) for times in _TIMES}
    _, ends = least = min(needs.values())
    # Layers of other runs may be larger or smaller. With the middle one of those that are equally
    # good, pieces are most likely to end between these, too.
    equal = [times for times, found in needs.items() if found == least]
    history.times = equal[(len(equal) - 1) // 2]
    history.in_pieces = MOST_GROWTH * ends <= room  # also of runs that are as much larger
    history.stays_whole = not history.in_pieces
    return history.in_pieces


_MOST_ALIVE = 17  # times what is alive at its end: the best size is no larger
_TIMES = [2 ** (n / 8) for n in range(-8, 9)]  # the factors that are tried
_LEAST = 1 / 128  # of what the block saves: no piece is smaller
