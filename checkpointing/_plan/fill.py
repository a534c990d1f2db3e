"""Filling: from given cuts on, keep what saves most recompute per byte, as long as there is room.

Invariant: the simulated peak is at least what the block needs, kernels aside, at every step of
forward and backward. In the forward, that is what lives there, and what is kept and would have died
before. In backward, beside what it works with, each of these is there:

- what is kept, from the end on down to the first segment whose windows need it;
- what the window of a segment delivers, from the end of the segment down to where it was saved.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from itertools import accumulate, pairwise
from operator import add, neg

from .stretch import Stretch

Crosses = list[tuple[int, Set[int]]]
# What is added to which peaks, from where on; and how much that is in all.
Change = tuple["Peaks", int, int, int]


class Filling:
    """A way to cut a stretch, and what is kept of it: under a peak, or in a budget."""

    _has_news = False  # whether cuts or room have been found since it was filled

    def __init__(
        self, stretch: Stretch, cuts: Iterable[int], most: int = 0, budget: int | None = None
    ) -> None:
        self.stretch, self.most, self.budget = stretch, most, budget
        self.model, self.memories = stretch.model, stretch.memories
        self.ends = [stretch.first, *cuts, stretch.last]
        self.kept: set[int] = set()
        for start, across in self._find_windows():
            if start in self.ends:
                self.kept |= {number for number in across if self.memories[number].final <= start}
        self._simulate()
        if most:
            self._cut_and_drop()
            self._fill_on()

    def refine(self) -> Filling:
        """Fill again, where the last time has made room, or cuts free."""
        for _ in range(_MOST_ROUNDS):
            if not self._has_news:
                break
            ends, kept, most = self.ends, {*self.kept}, max(self.most, *self.peaks)
            self._fill_on()
            if max(self.peaks) > most:
                self.ends, self.kept = ends, kept
                self._simulate()
                break
        return self

    def key(self) -> tuple[float, ...]:
        """Better if less: the peak above what is allowed, then what is done again: floating-point
        operations of products, and of all."""
        flops = sum([self.model.path.steps[index].flops for index in self.again])
        return max(self.most, *self.peaks), flops, self._work

    def _fill_on(self) -> None:
        self._fill()
        self._simulate()
        self._has_news = self._cut_and_drop()

    def _cut_and_drop(self) -> bool:
        """Where all that crosses is kept, a cut is free; what is not needed any more is not kept.
        Returns whether there is such a thing."""
        before = self.ends, self.kept
        self.ends = sorted({*self.ends, *[at for at, across in self._crosses if not across]})
        self.kept = {*filter(self._is_wanted, self.kept)}
        if (self.ends, self.kept) == before:
            return False
        self._simulate()
        return True

    @property
    def cuts(self) -> list[int]:
        return self.ends[1:-1]

    @property
    def peak(self) -> int:
        return max(*self.peaks, *self.forward)

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        return self.stretch.cost(self.kept)

    def time(self) -> float:
        """What running again and keeping take, in floating-point operations."""
        return self._work + _PER_STEP * len(self.again) + _PER_KEPT * len(self.kept)

    @property
    def _work(self) -> float:
        return sum([self.model.work[index] for index in self.again])

    def join(self, peak: int = 0) -> None:
        """Drop cuts that make no difference to the peak, because each window takes time."""
        most, ends = max(peak, *self.peaks) * _SURE, [self.ends[-1]]
        for start, end in reversed([*pairwise(self.ends[:-1])]):
            if self._peak_of(start, ends[-1]) > most:
                ends.append(end)
        self.ends = [self.ends[0], *reversed(ends)]
        self._simulate()

    # ---- the simulation

    def _simulate(self) -> None:
        """Find what runs again, the peaks, and what crosses where a cut is possible, and is not
        kept."""
        model, memories, stretch = self.model, self.memories, self.stretch
        self._crosses = self._find_windows()
        kept = [memories[number] for number in self.kept]
        dead = model.sums((memory.dies, model.count, memory.cost) for memory in kept)
        self.forward: list[int] = [*map(add, stretch.live, dead)][: stretch.last]
        spans = []
        for memory in kept:
            needed = self._first.get(memory.number, model.count)
            there_from = min(memory.maker + 1, stretch.saved.get(memory.number, model.count))
            spans.append((max(needed, there_from), model.count, memory.cost))
        self.held = model.sums(spans)
        there = [*map(add, model.backward, self.held)]
        made = [0] * (model.count + 1)  # by windows, and saved here
        for number, at in stretch.saved.items():
            cost = 0 if number in self.kept else memories[number].cost
            if number in stretch.dear or at in self.again:
                made[at + 1] += cost
            else:
                there[at] += cost  # it has a window of its own
        self._made = [*accumulate(made)]
        self._there: list[int] = [*map(add, there, self._made[1:])]
        self.peaks = [self._peak_of(start, end) for start, end in pairwise(self.ends)]

    def _peak_of(self, start: int, end: int) -> int:
        """That of backward, while it works on a segment."""
        return max(self._there[start:end]) - self._made[start]

    def _find_windows(self) -> Crosses:
        """Go through the segments: what their windows run, read, and start from."""
        model, stretch, memories = self.model, self.stretch, self.memories
        positions = {*stretch.positions}
        crosses: Crosses = []
        self.again: set[int] = set()
        self._first: dict[int, int] = {}  # by memory: the first segment whose windows need it
        for start, end in pairwise(self.ends):
            reading: set[int] = set()  # memories that are not kept, whose makers are still to come
            needed: set[int] = set()  # what is kept
            for index in range(end - 1, start - 1, -1):
                if index in stretch.wanted:
                    needed |= stretch.wanted[index] & self.kept
                    reading |= stretch.wanted[index] - self.kept
                made = model.made[index]
                if not reading.isdisjoint(made):
                    self.again.add(index)
                    for number in made:
                        if memories[number].maker == index:
                            reading.discard(number)
                    early = model.early.get(index, ())
                    for number in stretch.reads[index]:
                        is_there = number in self.kept and number not in early
                        (needed if is_there else reading).add(number)
                if index == start or (index in positions and index < end - 1):
                    crosses.append((index, reading & stretch.dear))
            for number in needed:
                self._first.setdefault(number, start)
        return crosses

    def _is_wanted(self, number: int) -> bool:
        """Whether autograd has saved a memory, or a step that runs again reads it."""
        if number in self.stretch.saved:
            return True
        readers = self.memories[number].readers
        return number in self.stretch.dear and not self.again.isdisjoint(readers)

    # ---- filling

    def _fill(self) -> None:
        """Take the steps whose results save most. Of equal ones the last is held for the shortest
        time; within a window it is the first, so that what remains is at the end, where no replay
        has to come by it again."""
        self._forward_peaks = Peaks(self.forward, self.most)
        self._backward_peaks = Peaks(self.peaks, self.most)
        order = -1 if self.stretch.is_all else 1
        # By what a step saves, negative; not known yet.
        queue = sorted([(-math.inf, order * index) for index in self.again])
        while queue:
            known, place = heapq.heappop(queue)
            made = self._results(order * place)
            changes = self._room_for(order * place, made) if made else None
            if changes is None:
                continue  # there will not be more room
            worth = self._worth(order * place, made)
            # It may have been worth more before others were kept.
            if known == -math.inf or (queue and -worth > queue[0][0]):
                heapq.heappush(queue, (-worth, place))
            elif worth > 0:
                self.kept |= made
                for peaks, at, nbytes, _ in changes:
                    peaks.add(at, nbytes)

    def _results(self, index: int) -> set[int]:
        """What to keep in order not to run a step again; nothing, if that is not possible."""
        made = {*filter(self._is_wanted, self.model.made[index])} - self.kept
        is_possible = all(self.memories[number].final == index + 1 for number in made)
        return made if is_possible else set()

    def _worth(self, index: int, made: Set[int]) -> float:
        """Operations saved per byte."""
        memories, again, saved = self.memories, self.again, self.stretch.saved
        gone, stack = {index}, [index]
        while stack and len(gone) < _FAR:
            for number in self.model.reads[stack.pop()]:
                memory = memories[number]
                if number in self.kept or (number in saved and number not in made):
                    continue
                if not (number in made or gone.issuperset(again.intersection(memory.readers))):
                    continue
                new = again.intersection([memory.maker, *memory.writers]) - gone
                gone |= new
                stack += sorted(new)
        return sum([self.model.work[step] for step in gone]) / max(1, self.stretch.cost(made))

    def _room_for(self, index: int, made: set[int]) -> list[Change] | None:
        """What changes if the results of a step are kept; None if there is no room for them."""
        stretch, saved, memories = self.stretch, self.stretch.saved, self.memories
        nbytes, new = stretch.cost(made), stretch.cost(made.difference(saved))
        if self.budget is not None:
            return [] if self.nbytes + nbytes <= self.budget else None
        dies = min([memories[number].dies for number in made])
        readers = [reader for number in made for reader in memories[number].readers]
        users = [*self.again.intersection(readers), *[saved[n] for n in made if n in saved]]
        lowest = min(users, default=self.model.count)
        here, first = (bisect_right(self.ends, at) - 1 for at in (index, lowest))
        backward = self._backward_peaks
        changes = [(self._forward_peaks, dies, nbytes, nbytes)]
        if first > here:
            changes.append((backward, first, nbytes, nbytes))
        else:  # its window delivers what is saved there, kept or not
            changes += [(backward, here, new, new), (backward, here + 1, nbytes - new, nbytes)]
        return changes if all(peaks.allow(at, n) for peaks, at, _, n in changes) else None


class Peaks:
    """Numbers up to `most`, to the last of which something is added now and then."""

    def __init__(self, numbers: Sequence[int], most: int) -> None:
        self._most = most
        # By place: the largest number from there on; behind the last place, what has been added.
        self._largest = [*accumulate([0, *reversed(numbers)], max)][::-1]

    def allow(self, first: int, number: int) -> bool:
        """Whether all from there on stay within `most` if this is added to them."""
        return self._largest[min(first, len(self._largest) - 1)] + number <= self._most

    def add(self, first: int, number: int) -> None:
        """To all from there on."""
        largest = self._largest
        first = min(first, len(largest) - 1)
        largest[first:] = [each + number for each in largest[first:]]
        less = bisect_right(largest, -largest[first], 0, first, key=neg)
        largest[less:first] = [largest[first]] * (first - less)


_MOST_ROUNDS = 3
_SURE = 0.9  # of the peak: segments that need less may be joined, though the model is not exact
_FAR = 64  # steps, when the worth of one is found
# What Python takes to run a step again, and to keep a memory, in the floating-point operations of
# that time. Measured on one CPU with nn.GRU, 64 wide: about 3 and 18 microseconds.
_PER_STEP, _PER_KEPT = 3e5, 18e5
