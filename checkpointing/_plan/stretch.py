"""A stretch: the steps that are planned at once, and the positions at which they may be cut.

All steps of a path are one stretch. Where a window would deliver more than a budget allows, its
steps are another one: what lies before is held, or made by others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from functools import cached_property

from .model import Model
from .repeats import repeats


class Stretch:
    """Steps of a path whose slots one window would bring back."""

    def __init__(
        self,
        model: Model,
        held: Set[int],
        slots: Iterable[int] | None = None,
        window: Sequence[int] = (),
    ) -> None:
        """`held` are memories from which any window can start."""
        self.model, self.memories = model, model.memories
        self.is_all = not window
        self.held = held
        saves = model.saves if slots is None else model.saves.keys() & slots
        wanted = [model.saves[slot] for slot in saves]
        wanted = [(position, memory) for position, memory in wanted if memory not in self.held]
        self.first, self.last = 0, model.count
        if window:
            self.first = window[0]
            self.last = 1 + max([window[-1], *[position for position, _ in wanted]])
        self.live = model.live if self.is_all else self._live_in_replay(window)
        # By position: memories that autograd has saved.
        self.wanted: dict[int, set[int]] = defaultdict(set)
        for position, memory in wanted:
            self.wanted[max(position, self.first)].add(memory)
        # The position down to which backward needs them.
        self.saved = {
            number: at for at in sorted(self.wanted, reverse=True) for number in self.wanted[at]
        }
        dear = [m for m in self.memories.values() if not m.is_cheap and m.number not in self.held]
        # A window that reads it must have made it.
        self.dear = {m.number for m in dear if m.maker >= self.first}
        self.reads = [(*filter(self.dear.__contains__, read),) for read in model.reads]
        spans = [(m.maker + 1, m.last_use, m.cost) for m in dear]
        self.crossing = model.sums(spans)
        self.positions = self._candidates()

    def _live_in_replay(self, window: Sequence[int]) -> list[int]:
        """What is there while a replay runs these steps: what it has made and still reads, and
        gradients."""
        made = {number for index in window for number in self.model.made[index]}
        found = [self.memories[number] for number in sorted(made)]
        spans = [(m.maker, m.last_read, m.nbytes) for m in found if m.maker >= self.first]
        return self.model.sums([*spans, (0, self.model.count, self.model.backward[self.last - 1])])

    def _candidates(self) -> list[int]:
        """Positions that little crosses, or much less after the next step, and the ends."""
        crossing, first, last = self.crossing, self.first, self.last
        found = [
            p
            for p in range(first + 1, last)
            if self.model.made[p - 1] and _is_low(*crossing[p - 1 : p + 2])
        ]
        if len(found) > _MOST_CANDIDATES:
            found = self._lowest(found)
        return [first, *found, last]

    def _lowest(self, positions: Sequence[int]) -> list[int]:
        """The position that the fewest bytes cross, in each part. Parts are even in steps and in
        saved bytes together, since a stem may save most of the bytes in a few steps."""
        count, memories = self.model.count, self.memories
        there = self.model.sums((at, count, memories[n].cost) for n, at in self.saved.items())
        steps, nbytes = self.last - self.first, max(1, there[count])
        best: dict[int, int] = {}  # by part
        for p in sorted(positions, key=self.crossing.__getitem__):
            far = (p - self.first) / steps + there[p] / nbytes
            best.setdefault(int(far / 2 * _MOST_CANDIDATES), p)
        return sorted(best.values())

    @cached_property
    def blocks(self) -> list[range]:
        """The steps at which the blocks begin that the program repeats, by run of repeats. Who
        checkpoints by hand takes blocks that save more than they begin with: not the products
        beside each other that make queries, keys and values."""
        found = repeats([step.func for step in self.model.path.steps], self.crossing)
        return [run for run in found if self._are_worth_it(run)]

    def allow_cuts_at_blocks(self) -> None:
        """Blocks may begin where more crosses than at other positions."""
        begins = {at for run in self.blocks for at in run if self.first < at < self.last}
        self.positions = sorted(begins.union(self.positions))

    def _are_worth_it(self, run: range) -> bool:
        saved = [number for number, at in self.saved.items() if run[0] <= at < run[-1]]
        return 2 * sum([self.crossing[at] for at in run[:-1]]) <= self.cost(saved)

    def cost(self, kept: Iterable[int]) -> int:
        """Bytes, to hold these memories."""
        return sum([self.memories[number].cost for number in kept])


def _is_low(before: int, here: int, after: int) -> bool:
    """Whether this is no more than before, and no more than after it or much more than that."""
    return here <= before and (here <= after or here >= _MUCH * after)


_MUCH = 1.5  # times: a step that leaves so much less is worth a cut before it
_MOST_CANDIDATES = 96
