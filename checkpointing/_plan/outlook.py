"""What a step of a block would cost, in each of several ways, by simulation.

All ways share one memory model (`model.py`). Plain code holds what autograd saves, each memory from
its maker to the last backward that reads it. A checkpoint around each block that the program
repeats holds what a block reads from outside, and what is saved outside of the blocks; in backward
a block is called again, up to the last tensor that it saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise
from typing import NamedTuple

from .._record import Run
from .choose import choose, choose_under
from .fill import Filling
from .model import Model, still_waiting
from .stretch import Stretch

Block = tuple[int, int]  # its first step, and the first one after it


class Cost(NamedTuple):
    """Of one step: bytes at its peak, bytes kept for backward, and the part of the forward that is
    computed again."""

    peak: int
    kept: int
    recomputed: float


class Outlook:
    """The costs of a block that has just run."""

    def __init__(self, run: Run) -> None:
        path = run.so_far()
        waiting = still_waiting(run, path.trained)
        self._model = Model(path, run, waiting, 1.0, retained=len(path.slots))
        self._stretch = Stretch(self._model, self._model.held)
        self._plain = Stretch(self._model, frozenset())  # without `keep`
        work = [step.flops for step in path.steps]
        self._work = work if any(work) else self._model.work

    def planned(self, peak: int | None) -> Cost:
        """With `auto()`, or with `auto(peak=...)`."""
        choice = choose(self._stretch) if peak is None else choose_under(self._stretch, peak)
        return Cost(choice.peak, choice.nbytes, self._part(choice.again))

    def plain(self) -> Cost:
        """Without checkpoints."""
        return self.by_hand([])

    def repeats(self) -> list[Block]:
        """The blocks that the program repeats."""
        return [block for run in self._stretch.blocks for block in pairwise(run)]

    def by_hand(self, blocks: list[Block]) -> Cost:
        """With a checkpoint around each of these blocks."""
        model, memories = self._model, self._model.memories
        held: set[int] = set()
        last: dict[Block, int] = {}  # by block: the last step that runs again
        for slot, (at, number) in model.saves.items():
            block = next((pair for pair in blocks if pair[0] <= at < pair[1]), None)
            if block is None:
                held.add(number)
            else:
                last[block] = max(last.get(block, 0), model.path.saved_after[slot])
        for begin, end in blocks:
            read = chain.from_iterable(self._plain.reads[begin:end])
            held.update([number for number in read if memories[number].maker < begin])
        again = [index for (begin, _), end in last.items() for index in range(begin, end + 1)]
        inside = {at for begin, end in blocks for at in range(begin + 1, end)}
        filling = Filling(self._plain, sorted({*range(1, model.count)} - inside))
        filling.keep(held)
        return Cost(filling.peak, filling.nbytes, self._part(again))

    def _part(self, steps: Iterable[int]) -> float:
        """Which part of the forward these steps are."""
        return sum([self._work[index] for index in steps]) / max(1.0, sum(self._work))
