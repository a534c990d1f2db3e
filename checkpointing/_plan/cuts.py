"""Where to cut a stretch, so that no segment needs more than a peak.

A dynamic program goes over the positions at which a cut may be. At each it has a few *labels*: ways
to cut what lies before, by the bytes that they hold and the work that they repeat, none of them
worse in both. Bisection over the peak finds the least one.

Invariant: `need` of a segment is what its backward needs at once if its window delivers all that
was saved in it and made in it, beside what is kept before it.

Rejected: placing cuts while the block runs, by what is alive at that moment: what is alive is not
what will be read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from .stretch import Stretch

PRECISION = 256  # a least peak is found to one part in so many
Cuts = Sequence[int]  # the first step of each segment but the first


class Segment(NamedTuple):
    """What lies between two cuts."""

    end: int
    reads: int  # how many of the memories that were made before its window reads
    need: int
    work: float  # that its window does again
    worst: int  # the step of its forward at which most bytes are alive


class Label(NamedTuple):
    """One way to cut what lies before a position."""

    held: int
    work: float  # that is repeated
    cuts: tuple[int, ...]  # the starts of its segments
    before: frozenset[int]  # what is kept for those before the last one,
    reads: Sequence[int]  # and what the window of that reads


class Cutting:
    """The segments of a stretch."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch
        # By position: steps that windows run if they go up to here.
        self.done: dict[int, list[int]] = defaultdict(list)
        self.ends = {*stretch.positions}
        self._openings: dict[int, Opening] = {}
        self._find_reads()

    def _find_reads(self) -> None:
        """Go down once, with the end of the shortest window that reads each memory from here on."""
        stretch, model = self.stretch, self.stretch.model
        soonest: dict[int, int] = {}
        for index in range(model.count - 1, -1, -1):
            soonest.update(dict.fromkeys(stretch.wanted.get(index, ()), index + 1))
            ends = [soonest[number] for number in model.made[index] if number in soonest]
            if ends:
                end = min(ends)
                self.done[end].append(index)
                for number in stretch.reads[index]:
                    soonest[number] = min(end, soonest.get(number, end))
            for number in model.made[index]:
                if stretch.memories[number].maker == index:
                    soonest.pop(number, None)
            if index in self.ends:
                across = [(end, n) for n, end in soonest.items() if n in stretch.dear]
                self._openings[index] = Opening(self, index, sorted(across))

    def least_peak(self, budget: int | None = None) -> tuple[int, Cuts]:
        """The least peak that cuts can have, and those cuts. The search goes up from below: under a
        much larger peak, segments as long as the program would have to be looked at."""
        model = self.stretch.model
        high = max(*model.backward, *model.live, 1)  # no cut lowers these
        low, more = high - 1, high // PRECISION + 1
        while not (best := self.cuts(high, budget, 1)):
            low, high, more = high, high + more, 2 * more
        while high - low > max(64, high // PRECISION):
            middle = (low + high) // 2
            found = self.cuts(middle, budget, 1)
            if found:
                high, best = middle, found
            else:
                low = middle
        return high, best[0]

    def cuts(self, peak: int, budget: int | None, most: int = 5) -> list[Cuts]:
        """Cuts under which no segment needs more than `peak`: those that hold the least and, if
        there may be several labels at a position, others that repeat less."""
        stretch, memories = self.stretch, self.stretch.memories
        best: dict[int, list[Label]] = defaultdict(list)
        best[0] = [Label(0, 0.0, (), frozenset(), ())]
        limit = peak if budget is None else min(peak, budget)
        for start in stretch.positions[:-1]:
            opening = self._openings[start]
            for label in best[start]:
                cuts, before = (*label.cuts, start), label.before.union(label.reads)
                costs = [0 if n in before else memories[n].cost for n in opening.across]
                # By how many of these are held: bytes.
                held_by = [*accumulate(costs, initial=label.held)]
                for segment in opening.segments(peak):
                    there = best[segment.end]
                    held = held_by[segment.reads]
                    if held > limit or held + segment.need > peak:
                        break  # longer ones read and need as much, or more
                    work = label.work + segment.work if most > 1 else 0.0
                    if _has_better(there, held, work):
                        continue
                    new = Label(held, work, cuts, before, opening.across[: segment.reads])
                    if self._fits(new, segment.worst, peak):
                        _add(there, new, most)
        return [label.cuts[1:] for label in best[stretch.model.count]]

    def _fits(self, label: Label, worst: int, peak: int) -> bool:
        """Whether the forward has room at this step for what is kept, and has died by then."""
        room = peak - self.stretch.model.live[worst]
        if label.held <= room:
            return True
        kept, memories = label.before.union(label.reads), self.stretch.memories
        return self.stretch.cost([n for n in kept if memories[n].dies <= worst]) <= room


def _has_better(labels: list[Label], held: int, work: float) -> bool:
    """Whether one holds no more, and repeats no more. They hold more, one after the other."""
    for label in labels:
        if label.held > held:
            return False
        if label.work <= work:
            return True
    return False


def _add(labels: list[Label], new: Label, most: int) -> None:
    """Add a label in place of those that hold as much, and repeat as much."""
    better = [each for each in labels if each.held < new.held or each.work < new.work]
    labels[:] = sorted([*better, new])
    if len(labels) > most:  # leave out the one that is most like its neighbours
        gaps = [after.held - before.held for before, after in zip(labels, labels[2:], strict=False)]
        del labels[1 + gaps.index(min(gaps))]


class Opening:
    """The segments that begin at a position, found as far as they are asked for."""

    def __init__(self, cutting: Cutting, start: int, across: list[tuple[int, int]]) -> None:
        # Memories by the least end of a window that reads them.
        self._ends, self.across = [end for end, _ in across], [number for _, number in across]
        self._found: list[Segment] = []
        self._others = self._find(cutting, start)

    def segments(self, most: int) -> list[Segment]:
        """All that need no more than this, and perhaps others."""
        while not self._found or self._found[-1].need <= most:
            segment = next(self._others, None)
            if segment is None:
                break
            self._found.append(segment)
        return self._found

    def _find(self, cutting: Cutting, start: int) -> Iterator[Segment]:
        """Take one step after the other into a segment."""
        stretch, done, ends = cutting.stretch, cutting.done, cutting.ends
        live, backward, works = stretch.model.live, stretch.model.backward, stretch.model.work
        wanted = stretch.wanted
        held = need = 0
        work, worst = 0.0, start
        seen: set[int] = set()
        for at in range(start, stretch.model.count):
            for number in wanted.get(at, ()):
                if number not in seen:
                    seen.add(number)
                    memory = stretch.memories[number]
                    if memory.maker >= start or number not in stretch.dear:
                        held += memory.cost
            need = max(need, backward[at] + held)
            if live[at] > live[worst]:
                worst = at
            end = at + 1
            for index in done.get(end, ()):
                if index >= start:
                    work += works[index]
            if end in ends:
                yield Segment(end, bisect_right(self._ends, end), need, work, worst)
