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
from .choose import choose
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
        self._model = Model(path, run, still_waiting(run, path.trained), 1.0)
        self._stretch = Stretch(self._model)
        work = [step.flops for step in path.steps]
        self._work = work if any(work) else self._model.work

    def planned(self, peak: int | None) -> Cost:
        """With `auto()`, or with `auto(peak=...)`."""
        choice = choose(self._stretch, peak)
        return Cost(choice.peak, choice.nbytes, self._part(choice.again))

    def plain(self) -> Cost:
        """Without checkpoints."""
        return self.by_hand([])

    def repeats(self) -> list[Block]:
        """The blocks that the program repeats."""
        return [block for run in self._stretch.blocks for block in pairwise(run)]

    def by_hand(self, blocks: list[Block]) -> Cost:
        """With a checkpoint around each of these blocks."""
        model = self._model
        needed: dict[int, int] = {}  # by memory: the step down to which it is held
        last: dict[Block, int] = {}  # by block: the last step that runs again
        for slot, (at, number) in model.saves.items():
            block = next((pair for pair in blocks if pair[0] <= at < pair[1]), None)
            if block is None:
                needed[number] = min(at, needed.get(number, at))
            else:
                last[block] = max(last.get(block, 0), model.path.saved_after[slot])
        for begin, end in blocks:
            for number in chain.from_iterable(self._stretch.reads[begin:end]):
                if model.memories[number].maker < begin:
                    needed[number] = min(begin, needed.get(number, begin))
        again = [index for (begin, _), end in last.items() for index in range(begin, end + 1)]
        return Cost(*self._held(needed, blocks), self._part(again))

    def _part(self, steps: Iterable[int]) -> float:
        """Which part of the forward these steps are."""
        return sum([self._work[index] for index in steps]) / max(1.0, sum(self._work))

    def _held(self, needed: dict[int, int], blocks: list[Block]) -> tuple[int, int]:
        """The peak, and the bytes that are held when backward begins: `needed` says down to which
        step what is held, and what is saved in these blocks is there while their backward runs."""
        model, count = self._model, self._model.count
        memories = model.memories
        held = [(memories[number], at) for number, at in needed.items()]
        dead = model.sums((memory.dies, count, memory.cost) for memory, _ in held)
        spans = [(at, count, memory.cost) for memory, at in held]
        for begin, end in blocks:
            for number, at in self._stretch.saved.items():
                if begin <= at < end and number not in needed:
                    spans.append((at, end - 1, memories[number].cost))
        there = model.sums(spans)
        forward = [model.live[at] + dead[at] for at in range(count)]
        backward = [model.backward[at] + there[at] for at in range(count)]
        return max(forward + backward), sum([memory.cost for memory, _ in held])
