"""Filling: from given cuts on, keep what saves most recompute per byte, as long as there is room.

Invariant: the simulated peak is at least what the block needs, kernels aside, at every step of
forward and backward. In the forward, that is what lives there, and what is kept and would have died
before. In backward, beside what it works with, each of these is there:

- what is kept, from the end down to where the last value is used that its windows make, or as far
  down as the graph is retained;
- what the window of a segment delivers, from the end of the segment down to where it was saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate, pairwise
from operator import add

from .gradients import Span
from .model import Memory
from .stretch import Stretch

Crosses = Iterator[tuple[int, Set[int]]]


class Filling:
    """A way to cut a stretch, and what is kept of it: under a peak, or in a budget."""

    def __init__(
        self, stretch: Stretch, cuts: Iterable[int], most: int = 0, budget: int | None = None
    ) -> None:
        self.stretch, self.most, self.budget = stretch, most, budget
        self.model, self.memories = stretch.model, stretch.memories
        self.ends = [0, *cuts, self.model.count]
        self._positions = {*stretch.positions}
        self.kept: set[int] = set()
        self._room = most  # for what is there at once, with what is kept beside the cuts
        # What is kept from one cut on, windows before it need not make.
        for start, across in self._find_windows():
            if start in self.ends:
                self.kept |= {number for number in across if self._stands_for(number, start)}
        if most:
            self._fill_in_rounds()
        else:
            self._simulate()

    def _stands_for(self, number: int, start: int) -> bool:
        """Whether a memory, as it will be in the end, is all that steps from here on need of it:
        until then, it is only written, as by an activation in place."""
        memory = self.memories[number]
        if memory.is_theirs and memory.cost:
            return False  # what others may write is kept as a copy, where there is room
        others = {*memory.readers}.difference(memory.writers)
        return memory.final <= self.model.count and not any(
            start <= reader < memory.final for reader in others
        )

    def keep(self, numbers: Iterable[int]) -> None:
        """Keep these memories, and no others."""
        self.kept = {*numbers}
        self._simulate()

    def key(self) -> tuple[float, ...]:
        """Better if less: the peak above what is allowed, then what is done again."""
        return max(self.most, self.peak), self.work

    def cut_and_drop(self) -> None:
        """Cut where all that crosses is kept anyway, and drop what is not needed any more. What
        windows run stays the same, but for what is cheap."""
        self.ends = sorted({*self.ends, *[at for at, across in self._find_windows() if not across]})
        self.kept &= self._needed_at.keys()
        self._find_peaks()

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

    @property
    def work(self) -> float:
        """What is done again, in floating-point operations."""
        return sum([self.model.work[index] for index in self.again])

    def join(self) -> None:
        """Drop cuts that make no difference to the peak, because each window takes time. Those stay
        at which a window starts from a memory that it overwrites: a window that begins earlier has
        to make that memory again."""
        most, ends = max(self.peaks) * _SURE, [self.ends[-1]]
        kept = [self.memories[number] for number in self.kept]
        needed = {memory.maker for memory in kept if memory.is_overwritten}
        for start, end in reversed([*pairwise(self.ends[:-1])]):
            if self._peak_of(start, ends[-1]) > most or needed.intersection(range(start, end)):
                ends.append(end)
        self.ends = [self.ends[0], *reversed(ends)]
        self._simulate()

    # ---- the simulation

    def _simulate(self) -> None:
        """Find what runs again, and the peaks."""
        for _ in self._find_windows():
            pass
        self._find_peaks()

    def _find_peaks(self) -> None:
        """Sum up what is there, by position of the forward, and by segment of backward."""
        model, memories, stretch = self.model, self.memories, self.stretch
        kept = [memories[number] for number in self.kept]
        dead = model.sums((memory.dies, model.count, memory.cost) for memory in kept)
        self.forward: list[int] = [*map(add, model.live, dead)][: model.count]
        spans = []
        for memory in kept:
            first = min(self._needed_at.get(memory.number, model.count), model.retained)
            spans.append((first, model.count, memory.cost))
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
        passing = model.sums(self._passing())
        self._running: list[int] = [*map(add, self._made[1:], passing)]
        self.peaks = [self._peak_of(start, end) for start, end in pairwise(self.ends)]

    def _passing(self) -> Iterator[Span]:
        """What windows make only to read it, what they deliver before it was saved, and what their
        operators work with."""
        for index in self.again:
            yield index, index, self.model.scratch(index)
        for number, maker, last in self._made_again:
            last = self.stretch.saved.get(number, last + 1) - 1
            if maker <= last:
                yield maker, last, self.memories[number].nbytes

    def _peak_of(self, start: int, end: int) -> int:
        """The larger of two: that of the window of a segment, with what it makes only to read it,
        and that of the backward that follows."""
        came_in = self.model.passed_on[end] + self.held[end - 1]
        running = came_in + max(self._running[start:end])
        return max(running, *self._there[start:end]) - self._made[start]

    def _find_windows(self) -> Crosses:
        """Go through the segments, the last one first: what their windows run, read, and start
        from. Yields what crosses where a cut is possible, and is not kept."""
        self.again: set[int] = set()
        # By memory that is kept: the first position at which a window, or backward, needs it.
        self._needed_at: dict[int, int] = {}
        # What windows make: a memory, the step that makes it, and the last one that needs it there.
        self._made_again: list[tuple[int, int, int]] = []
        # Memories that are not kept, whose makers are still to come, and where they are needed. For
        # what others may write, a window goes back beyond its cut; that is not there for long.
        reading: dict[int, int] = {}
        for start, end in reversed([*pairwise(self.ends)]):
            reading = dict.fromkeys(reading.keys() - self.kept, _BEYOND)
            yield from self._go_down(start, end, reading)

    def _go_down(self, start: int, end: int, reading: dict[int, int]) -> Crosses:
        """Go through a segment, last step first. Yields what crosses there."""
        stretch = self.stretch
        # Kept ones that a window starts from: it has them until all that it makes is used.
        starts: set[int] = set()
        used = end
        for index in range(end - 1, start - 1, -1):
            if index in stretch.wanted:
                at_hand = stretch.wanted[index] & self.kept
                self._needed_at.update(dict.fromkeys(at_hand, index))
                if to_make := stretch.wanted[index] - at_hand:
                    reading.update(dict.fromkeys(to_make, index))
                    used = index
            made = self.model.made[index]
            if not reading.keys().isdisjoint(made):
                starts |= self._run_again(index, reading, start)
            is_start = index == start
            if starts and (is_start or stretch.dear.isdisjoint(reading)):  # a window begins here
                self._needed_at.update(
                    {number: min(used, self._needed_at.get(number, used)) for number in starts}
                )
                starts = set()
            if is_start or (index in self._positions and index < end - 1):
                yield index, reading.keys() & stretch.dear

    def _run_again(self, index: int, reading: dict[int, int], start: int) -> set[int]:
        """A window of the segment that begins at `start` runs this step. Returns the kept memories
        that it reads."""
        self.again.add(index)
        read = self.stretch.reads[index]
        kept = {n for n in self.kept.intersection(read) if self._can_start(n, index, start)}
        for number in self.model.made[index]:
            memory = self.memories[number]
            if memory.maker == index:
                # What the window overwrites is a copy, from the beginning on.
                first = start if memory.overwrites in kept else index
                last = reading.pop(number, index)
                if last != _BEYOND:
                    self._made_again.append((number, first, last))
        for number in read:
            if number not in kept and reading.get(number, _BEYOND) == _BEYOND:
                reading[number] = index
        return kept

    def _can_start(self, number: int, index: int, start: int) -> bool:
        """Whether windows of a segment start from a kept memory that a step reads."""
        memory = self.memories[number]
        # Where a window writes, one value stands for all of a memory: the one that it begins with.
        return memory.last_part < index and (memory.maker < start or not memory.is_overwritten)

    def _is_wanted(self, number: int) -> bool:
        """Whether autograd has saved a memory, or a step that runs again reads it."""
        if number in self.stretch.saved:
            return True
        readers = self.memories[number].readers
        return number in self.stretch.dear and not self.again.isdisjoint(readers)

    # ---- filling

    def _fill_in_rounds(self) -> None:
        self.cut_and_drop()
        for _ in range(_ROUNDS):  # each may make room for the next, or cuts free
            before, ends, peak = {*self.kept}, self.ends, max(self.peaks)
            self._fill()
            if self.kept == before:
                return
            self.cut_and_drop()
            over = max(self.peaks) - max(self.most, peak)
            if over > 0:
                # What a window starts from stays until all that it makes is used: perhaps for
                # longer than if the window had made that, too. The next round keeps less.
                self.kept, self.ends = before, ends
                self._simulate()
                if self.budget is not None:  # the next round would be the same
                    return
                self._room -= over

    def _fill(self) -> None:
        """Take the steps whose results save most, as long as there is room for them. Of equal ones
        the last is held for the shortest time; within a window it is the first, so that what
        remains is at the end, where no replay has to come by it again."""
        # The largest peaks from each position, and from each segment, on; but for what is added.
        forward, backward = _largest_from(self.forward), _largest_from(self.peaks)
        before, added = self.nbytes, 0

        def first_beside(index: int) -> int:
            """The first segment that gets more to hold if the results of a step are kept: mostly,
            its own makes them anyway. A graph that is retained has them to the end."""
            return bisect_right(self.ends, min(index, self.model.retained - 1))

        def has_room(index: int) -> bool:
            nbytes = self.stretch.cost(results[index] - self.kept)
            if self.budget is not None:
                return before + added + nbytes <= self.budget
            dies = min([self.memories[number].dies for number in results[index]])
            peak = max(added + forward[min(dies, len(self.forward))], backward[first_beside(index)])
            return peak + nbytes <= self._room

        results = {index: self._results(index) for index in self.again}
        possible = [index for index, made in results.items() if made and has_room(index)]
        worths = {index: self._worth(results[index]) for index in possible}
        order = 1 if self.model.is_part else -1
        for index in sorted(worths, key=lambda index: (-worths[index], order * index)):
            if has_room(index):
                more, first = results[index] - self.kept, first_beside(index)
                nbytes = self.stretch.cost(more)
                self.kept |= more
                added += nbytes
                self.peaks[first:] = [peak + nbytes for peak in self.peaks[first:]]
                backward = _largest_from(self.peaks)

    def _results(self, index: int) -> set[int]:
        """What to keep in order not to run a step again; nothing, if that is not possible. Parts of
        what it has written may have been read before: what was made of them is kept, too."""
        made = self._wanted_of(index)
        for memory in [self.memories[number] for number in made]:
            made = made.union(*map(self._wanted_of, self._readers(memory, memory.last_part)))
        memories = [self.memories[number] for number in made]
        is_possible = all(m.final <= index + 1 and not m.is_overwritten for m in memories)
        return made if is_possible else set()

    def _wanted_of(self, index: int) -> set[int]:
        """What else is to be kept of a step's results if it should not run again."""
        return {*filter(self._is_wanted, self.model.made[index])} - self.kept

    def _readers(self, memory: Memory, last: int) -> set[int]:
        """The steps up to `last` that run again and read a memory; not those that write to it."""
        others = self.again.intersection(memory.readers).difference(memory.writers)
        return {step for step in others if step <= last}

    def _worth(self, made: Set[int]) -> float:
        """Operations saved per byte, if these results of steps that run again are kept: what only
        these steps need does not run again, either."""
        gone = {self.memories[number].final - 1 for number in made}
        stack = [*gone]
        while stack and len(gone) < _FAR:
            for number in self.model.reads[stack.pop()]:
                memory = self.memories[number]
                is_read_before = memory.last_part > memory.maker  # before its last write, in part
                if number in made or (number in self.kept and is_read_before):
                    last = memory.last_part
                elif number in self.kept or number in self.stretch.saved:
                    continue
                else:
                    last = self.model.count
                if self._readers(memory, last) <= gone:
                    makers = self.again.intersection((memory.maker, *memory.writers)) - gone
                    gone |= makers
                    stack += makers
        return sum([self.model.work[step] for step in gone]) / max(1, self.stretch.cost(made))


def _largest_from(values: Sequence[int]) -> list[int]:
    """By position: the largest value from there on."""
    return [*accumulate([0, *reversed(values)], max)][::-1]


_BEYOND = -1  # where a later segment needs a memory
_ROUNDS = 2
_SURE = 0.9  # of the peak: segments that need less may be joined, though the model is not exact
_FAR = 64  # steps, when the worth of one is found
