"""What a block keeps for backward, computed from what it did last time.

The memory model. Backward opens the segments of a block from the last one to the first. While it
works on one, three things are there: what is kept for that segment and for those before it; what
the window of the segment delivers; and gradients. What was kept for later segments is gone, and the
gradients of parameters used there exist. The largest of these sums, or the worst moment of the
forward, is the simulated peak.

The plan. For one peak, a dynamic program (`Stretch.cuts`) finds the cuts under which the least is
held, among positions that little crosses; bisection finds the least peak. Then `Filling` keeps what
saves most recompute per byte, as long as there is room under a peak. `choose` compares a few peaks:
from the least one up to that of a checkpoint around each block that the program repeats, which is
what users place by hand. It takes the least recompute until no more is computed than with those,
and beyond that as much memory as saves the same part of a forward. Finally, cuts that make no
difference to the peak are dropped, because each window takes time.

The model looks at memories, not at tensors: views cost nothing, and a segment that reads a value
from before its beginning keeps the memory of that value. Values that are cheap to make from inputs,
such as casts of weights and masks, cross a cut for free, since each window makes them again. What
somebody else holds anyway costs nothing.

Invariant: a plan depends on byte counts and positions alone, so it is the same on every rank.

Rejected: placing cuts while the block runs, by what is alive at that moment: what is alive is not
what will be read. Spending a fixed part of the least peak on less recompute: where logits are most
of the peak, a few percent of it are all the checkpoints of the model; where attention is, they are
one of them.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from itertools import accumulate, pairwise
from operator import add, is_
from typing import Any, NamedTuple

from .. import _torch
from .._record import KEEP, MOST_GROWTH, NOT_WRITTEN, UNSEEN, Run, Step, Value
from .windows import Group, Path


class Memory:
    """What a plan knows of a memory that the block has made."""

    has_gradient = False
    is_cheap = False
    effort = 0.0  # bytes written to make it from inputs, if that is cheap

    def __init__(self, number: int, maker: int, nbytes: int, never: int) -> None:
        self.number = number  # also the first cell on it
        self.maker = maker
        self.nbytes = nbytes
        self.cost = nbytes  # to hold it
        self.writers: list[int] = []  # steps, after the maker
        self.final = maker + 1  # the first position at which it is what it will be
        self.last_read = maker  # by a step
        self.last_use = maker  # by a step or a slot
        self.dies = never  # the step after which nobody outside holds it
        # That are saved, or read by others than those who write to it.
        self.values: set[Value] = set()

    def drop_unfinished(self, path: Path) -> None:
        """Leave out the values that a later step writes to. What reads them comes before that
        step, and their backward runs after it, so no window needs one of them from a cut."""
        for value in [*self.values] if self.writers else ():
            later = [index for index in self.writers if index > value[1]]
            if any(path.writes_to(path.steps[index], value[0]) for index in later):
                self.values.remove(value)


class Model:
    """The memories of a path: who makes, reads and writes them, and what they cost."""

    def __init__(self, path: Path, run: Run, waiting: Iterable[int], scale: float) -> None:
        """`waiting` are cells of parameters that have no gradient yet."""
        self.path, self.scale = path, scale
        self.count = len(path.steps)
        self.never = self.count + 1  # a position after all others
        self.memories: dict[int, Memory] = {}
        # Memories by step, also those that it writes.
        self.made: list[list[int]] = [[] for _ in path.steps]
        self.reads: list[list[int]] = [[] for _ in path.steps]
        self.work = [0.0] * self.count  # of each step, in floating-point operations
        # By memory of a parameter that trains: its bytes, and the steps that read it.
        held = {path.memory_of[cell]: run.held.get(cell) for cell in path.trained}
        self._gradients = {number: h[0].nbytes for number, h in held.items() if type(h) is tuple}
        self._uses: dict[int, list[int]] = defaultdict(list)
        # By slot that the block has made: the position at which backward wants it, and the memory.
        self.saves: dict[int, tuple[int, int]] = {}
        for step in path.steps:
            self._add(step)
        for number in range(len(path.slots)):
            self._add_slot(number)
        elsewhere = {path.memory_of[cell] for cell in run.alive()} - {
            path.memory_of[cell] for cell in path.given
        }
        for memory in self.memories.values():
            memory.drop_unfinished(path)
            if not (memory.nbytes and memory.values):
                memory.final = self.never
            if memory.number in elsewhere and not memory.is_cheap:
                memory.cost = 0
        self.live = self.sums((m.maker, m.dies - 1, m.nbytes) for m in self.memories.values())
        missing = {path.memory_of[cell] for cell in waiting}
        self.besides = self._besides(missing)
        self.backward = self._needed_by_backward(missing)

    def _add(self, step: Step) -> None:
        """Learn what a step does to memory."""
        index, memories = step.index, self.memories
        for number in memories.keys() & step.gone:
            memories[number].dies = index
        written = memories.keys() & step.writes
        if step.effect or step.is_view or step.event is KEEP:
            for number in memories if step.event is UNSEEN else written:
                memories[number].final = self.never
            return
        read = {self.path.memory_of[cell] for cell, _ in step.reads}
        if step.grad_mode:
            for number in read & self._gradients.keys():
                self._uses[number].append(index)
        self._add_reads(step)
        for number, nbytes in step.sizes:
            memories[number] = memory = Memory(number, index, int(nbytes * self.scale), self.never)
            if step.event is not None or not (step.reads or step.reads_metadata):
                # Torch makes something else of `zeros()` if somebody holds it.
                memory.final = self.never
            self.made[index].append(number)
        for number in written:
            memory = memories[number]
            memory.writers.append(index)
            memory.final = max(memory.final, index + 1)
            self.made[index].append(number)
        self._weigh(step, not read.isdisjoint(self.path.differentiable))

    def _add_reads(self, step: Step) -> None:
        # It writes there, or splits it.
        own = {*step.writes, *(number for _, number in step.memories)}
        read: set[int] = set()
        for value in step.reads:
            number = self.path.memory_of[value[0]]
            if value[0] in self.path.given or number not in self.memories:
                continue
            memory = self.memories[number]
            memory.last_read = memory.last_use = step.index
            read.add(number)
            if number not in own:
                memory.values.add(value)
        self.reads[step.index] = sorted(read)

    def _weigh(self, step: Step, reads_leaf: bool) -> None:
        """What a step costs, and whether what it makes is cheap and has a gradient."""
        reads = [self.memories[number] for number in self.reads[step.index]]
        made = [self.memories[number] for number in self.made[step.index]]
        written = sum(memory.nbytes for memory in made)
        flops = step.flops * self.scale
        self.work[step.index] = flops + _PER_BYTE * written
        effort = written + sum(memory.effort for memory in reads)
        if step.draws:  # the random numbers would have to be drawn in each window
            effort = math.inf
        is_quick = max(flops / _PER_BYTE, effort / _CHEAP) <= written
        is_cheap = is_quick and all(memory.is_cheap for memory in reads)
        depends = any([reads_leaf, *[memory.has_gradient for memory in reads]])
        for memory in made:
            memory.is_cheap, memory.effort = is_cheap, effort
            memory.has_gradient = step.grad_mode and depends

    def values(self, kept: Iterable[int]) -> list[Value]:
        """What to hold of these memories."""
        found: list[Value] = []
        for number in kept:
            memory = self.memories[number]
            found += sorted(memory.values) if memory.writers else [(number, NOT_WRITTEN)]
        return found

    def _add_slot(self, number: int) -> None:
        """Find where backward wants a slot."""
        slot, after = self.path.slots[number], self.path.saved_after[number]
        memory = self.memories.get(self.path.memory_of[slot.cell])
        if memory is None or slot.cell in self.path.given:
            return
        is_input = self.path.there_after(slot.value) < after
        position = min(max(after, 0) + is_input, self.count - 1)
        memory.values.add(slot.value)
        memory.last_use = max(memory.last_use, position)
        self.saves[number] = position, memory.number

    def sums(self, spans: Iterable[tuple[int, int, int]]) -> list[int]:
        """By position: the bytes that are there. Each is there from one position to another."""
        change = [0] * (self.count + 3)
        for first, last, nbytes in spans:
            change[first] += nbytes
            change[max(first, min(last, self.count)) + 1] -= nbytes
        return [*accumulate(change)]

    def _besides(self, missing: set[int]) -> list[int]:
        """By position to which backward has come: bytes that are there whatever the block keeps:
        gradients that did not exist before, and what somebody else holds."""
        there = [(0, self.count, m.nbytes) for m in self.memories.values() if not m.cost]
        there += [(0, self._uses[n][-1], self._gradients[n]) for n in missing & self._uses.keys()]
        return self.sums(there)

    def _needed_by_backward(self, missing: set[int]) -> list[int]:
        """By step: bytes that its backward works with, beside what is kept or was saved."""
        # A gradient is there from the backward of the last reader to that of the maker.
        pending = [
            (m.maker + 1, m.last_read + 1, m.nbytes)
            for m in self.memories.values()
            if m.has_gradient
        ]
        for number, uses in self._uses.items():
            nbytes = self._gradients[number]
            pending += [(index + 1, index + 1, nbytes) for index in uses]
            if len(uses) > 1:  # the sum over all uses waits for the first one
                if number not in missing:
                    pending.append((uses[0] + 1, uses[-1], nbytes))
                # The first sum is a third one, beside both parts. Others are added to it in place.
                if self.path.steps[uses[-1]].func is not _torch.CAST:
                    pending.append((uses[-2] + 1, uses[-2] + 1, nbytes))
        return self.sums(pending)[1:]


class Segment(NamedTuple):
    """What lies between two cuts."""

    start: int
    across: frozenset[int]  # memories that its window reads from before
    need: int  # bytes that its backward needs at once, beside what is kept before it
    worst: int  # the step of its forward at which most bytes are alive


class Stretch:
    """A part of a path whose slots one window would bring back: where it may be cut."""

    def __init__(
        self, model: Model, slots: Iterable[int], held: frozenset[int], window: Sequence[int] = ()
    ) -> None:
        self.model, self.memories = model, model.memories
        self.is_all = not window
        self.first, self.last = (window[0], window[-1] + 1) if window else (0, model.count)
        self.live = model.live if self.is_all else [0] * model.count  # a replay is no forward
        # By position: memories that autograd has saved.
        self.wanted: dict[int, set[int]] = defaultdict(set)
        for slot in model.saves.keys() & slots:
            position, memory = model.saves[slot]
            if memory not in held:
                self.wanted[min(max(position, self.first), self.last - 1)].add(memory)
        # The position down to which backward needs them.
        self.saved = {
            number: at for at in sorted(self.wanted, reverse=True) for number in self.wanted[at]
        }
        dear = [m for m in self.memories.values() if not m.is_cheap and m.number not in held]
        # A window that reads it must have made it.
        self.dear = {m.number for m in dear if m.maker >= self.first}
        self.crossing = model.sums((m.maker + 1, m.last_use, m.cost) for m in dear)
        self.positions = self._candidates()
        self._walks = {end: Walk(self, end) for end in self.positions}

    def cost(self, kept: Iterable[int]) -> int:
        """Bytes, to hold these memories."""
        return sum([self.memories[number].cost for number in kept])

    def _candidates(self) -> list[int]:
        """Positions that little crosses, and the ends."""
        crossing, first, last = self.crossing, self.first, self.last
        minima = [
            p
            for p in range(first + 1, last)
            if crossing[p] <= min(crossing[p - 1], crossing[p + 1]) and self.model.made[p - 1]
        ]
        size = 1.0 if len(minima) <= _MOST_CANDIDATES else (last - first) / _MOST_CANDIDATES
        best: dict[int, int] = {}  # by part
        for p in sorted(minima, key=crossing.__getitem__):
            best.setdefault(int((p - first) / size), p)
        return [first, *sorted(best.values()), last]

    def segments(self, end: int, most: float) -> list[Segment]:
        """Segments that end here: all that need no more than this, and perhaps others."""
        walk = self._walks[end]
        while walk.need <= most and walk.index > self.first:
            walk.down()
            if walk.index in self._walks:
                worst = max(range(walk.index, end), key=self.live.__getitem__)
                walk.found.append(Segment(walk.index, walk.across, walk.need, worst))
        return walk.found

    def least_peak(self, budget: int | None) -> tuple[int, tuple[int, ...]]:
        """The least peak that cuts can have, and those cuts."""
        low, high = 0, max(1024, *self.model.backward, *self.model.besides, *self.live)
        while (best := self.cuts(high, budget)) is None:
            low, high = high, 2 * high
        while high - low > max(64, high // 1024):
            middle = (low + high) // 2
            cuts = self.cuts(middle, budget)
            if cuts is None:
                low = middle
            else:
                high, best = middle, cuts
        return high, best

    def cuts(self, peak: int, budget: int | None = None) -> tuple[int, ...] | None:
        """The cuts under which no segment needs more than `peak`, and the least is held; None, if
        there are none."""
        # By position: the bytes held up to there, of which memories, and the starts of the
        # segments.
        best: dict[int, tuple[int, frozenset[int], tuple[int, ...]]] = {
            self.first: (0, frozenset(), ())
        }
        for end in self.positions[1:]:
            room = peak - self.model.besides[end]
            least = peak if budget is None else min(peak, budget)
            for segment in self.segments(end, peak):
                if segment.start not in best:
                    continue
                held, kept, starts = best[segment.start]
                new = segment.across - kept
                # One that autograd saves anyway comes first.
                held += self.cost(new) + len(new - self.saved.keys())
                if held > min(least, room - segment.need):
                    continue
                kept |= new
                dead = self.cost([n for n in kept if self.memories[n].dies <= segment.worst])
                if self.live[segment.worst] + dead <= peak:
                    best[end] = held, kept, (*starts, segment.start)
                    least = held
        return best[self.last][2][1:] if self.last in best else None

    def least_budget(self) -> int:
        """The smallest one with room for a cut."""
        costs = [self.cost(segment.across) for segment in self.segments(self.last, math.inf)]
        return min(filter(None, costs), default=0)

    def blocks(self) -> list[int]:
        """Where the blocks begin that the program repeats, and where the last one ends; nothing, if
        there are none."""
        funcs = [step.func for step in self.model.path.steps]

        def repeats(period: int) -> tuple[int, int]:
            """The most steps in a row that come again a period later, and the first of them."""
            same = bytes(map(is_, funcs[period:], funcs))
            run = max(same.split(b"\0"))
            return len(run), same.find(run)

        periods = range(1, min(len(funcs) // 2, _LONGEST_BLOCK))
        period = max(periods, key=lambda p: repeats(p)[0], default=1)
        length, begin = repeats(period)
        # What comes before the first block may look like the end of one.
        starts = range(begin, min(begin + period, len(self.crossing) - period))
        first = min(starts, key=lambda at: self.crossing[at + period], default=self.last)
        return [
            at for at in range(first, begin + length + period + 1, period) if 0 < at < self.last
        ]


class Walk:
    """Goes down through a segment: what its window runs, and what its backward needs."""

    def __init__(self, stretch: Stretch, end: int, kept: Set[int] = frozenset()) -> None:
        self.stretch, self.kept = stretch, kept
        self.index = self.end = end
        self.found: list[Segment] = []
        self.again: list[int] = []  # steps that run again
        self.need = 0
        self._reading: set[int] = set()  # memories that they read, whose makers are still to come
        self._held = {*kept}  # memories that are kept, or delivered

    def down(self) -> None:
        self.index -= 1
        index, stretch, model = self.index, self.stretch, self.stretch.model
        wanted = stretch.wanted.get(index, _NONE) - self.kept
        there = stretch.cost(wanted - stretch.dear - self._reading)  # each window makes it
        self._held |= wanted & stretch.dear
        self._reading |= wanted
        made = [number for number in model.made[index] if stretch.memories[number].maker == index]
        for number in self._held.intersection(made):
            if stretch.saved.get(number, index) > index:
                # It has gone when backward comes to its maker.
                self.need += stretch.memories[number].cost
            else:
                there += stretch.memories[number].cost
        self.need = max(self.need, model.backward[index]) + there
        if not self._reading.isdisjoint(model.made[index]):
            self.again.append(index)
            self._reading.difference_update(made)
            self._reading |= stretch.dear.intersection(model.reads[index]) - self.kept

    def down_to(self, position: int) -> None:
        while self.index > position:
            self.down()

    @property
    def across(self) -> frozenset[int]:
        """What crosses a cut here."""
        return frozenset(self._reading & self.stretch.dear)


class Choice(NamedTuple):
    """What a plan keeps."""

    kept: tuple[int, ...] = ()  # memories
    cuts: tuple[int, ...] = ()  # the first step of each segment but the first
    peak: int = 0
    least: int = 0  # the smallest budget with room for a cut, if anything is computed again


def choose(stretch: Stretch, budget: int | None = None) -> Choice:
    """What to keep of a stretch."""
    if not stretch.saved:
        return Choice(peak=max(stretch.live, default=0))
    if budget is None and stretch.cost(stretch.saved) < _LITTLE:
        return Filling(stretch, ()).choice()
    least, cuts = stretch.least_peak(budget)

    def filled(peak: int) -> Filling:
        found = stretch.cuts(peak, budget)
        return Filling(stretch, cuts if found is None else found, peak, budget)

    if budget is not None:
        choice = filled(least if stretch.is_all else least + int(least * _SLACK_OF_PARTS)).choice()
        if stretch.dear & stretch.saved.keys() - choice.kept:
            choice = choice._replace(least=stretch.least_budget())
        return choice
    blocks = Filling(stretch, stretch.blocks())
    enough = blocks.flops(blocks.ends[-2])  # what follows the last block is in no checkpoint
    room, most = max(0, blocks.choice().peak - least), int(least * _MOST_SLACK)
    worth = 2  # how many forwards of recompute all of the peak is worth
    if room > most:  # blocks so small that nobody would checkpoint each of them
        room, enough, worth = most, math.inf, 1
    forward = max(1.0, sum(stretch.model.work))

    def price(filling: Filling) -> tuple[float, float]:
        """Once no more is computed than by the blocks, a part of the peak is worth some of a
        forward."""
        work = sum(stretch.model.work[index] for index in filling.again)
        memory = worth * filling.choice().peak / least
        return max(filling.flops(stretch.last), enough), memory + work / forward

    peaks = {least + room * n // _TRIES for n in range(_TRIES + 1)}
    best = min(map(filled, sorted(peaks)), key=price)
    best.join()
    return best.choice()


class Filling:
    """Keeps what saves most recompute per byte, as long as there is room: under a peak, or in a
    budget."""

    def __init__(
        self, stretch: Stretch, cuts: Iterable[int], peak: int = 0, budget: int | None = None
    ) -> None:
        self.stretch, self.peak, self.budget = stretch, peak, budget
        self.model, self.memories = stretch.model, stretch.memories
        self.ends = [stretch.first, *cuts, stretch.last]
        self.kept: set[int] = set()
        for start, across in self._look():
            if start in self.ends:
                self.kept |= {number for number in across if self.memories[number].final <= start}
        for _ in range(_MOST_ROUNDS if peak else 0):
            before = {*self.kept}, self.ends
            # Where all that crosses is kept, a cut is free.
            self.ends = sorted({*self.ends, *[at for at, across in self._look() if not across]})
            self.kept &= self.readers.keys()
            self._look()
            self._fill()
            if before == (self.kept, self.ends):
                break
        self._look()

    def choice(self) -> Choice:
        return Choice(
            tuple(sorted(self.kept)), tuple(self.ends[1:-1]), max(self.peaks + self.forward)
        )

    def flops(self, end: int) -> float:
        """Floating-point operations that are done again up to here."""
        return sum(self.model.path.steps[index].flops for index in self.again if index < end)

    def _look(self) -> list[tuple[int, frozenset[int]]]:
        """Find what runs again and the peaks. Returns what crosses where a cut is possible, and is
        not kept."""
        model, positions = self.model, {*self.stretch.positions, *self.ends}
        crosses = []
        self.again: set[int] = set()  # steps that run again
        self.peaks: list[int] = []  # of backward, by segment
        self.forward: list[int] = []
        # By memory: those of the steps that read it. Autograd reads what it has saved.
        self.readers = {number: {_AUTOGRAD} for number in self.stretch.saved}
        kept = [self.memories[number] for number in self.kept]
        self.held = model.sums((memory.maker + 1, model.count, memory.cost) for memory in kept)
        dead = model.sums((memory.dies, model.count, memory.cost) for memory in kept)
        for start, end in pairwise(self.ends):
            walk = Walk(self.stretch, end, self.kept)
            while walk.index > start:
                walk.down()
                if walk.index in positions and walk.index < end - 1:
                    crosses.append((walk.index, walk.across))
            self.again.update(walk.again)
            self.peaks.append(self._peak(walk))
            self.forward.append(max(map(add, self.stretch.live[start:end], dead[start:end])))
        for index in self.again:
            for number in model.reads[index]:
                self.readers.setdefault(number, set()).add(index)
        self.wanted = self.stretch.dear & self.readers.keys() | self.stretch.saved.keys()
        return crosses

    def _peak(self, walk: Walk) -> int:
        """That of backward, while it works on the segment that a walk has come through."""
        return self.held[walk.index] + walk.need + self.model.besides[walk.end]

    def join(self) -> None:
        """Drop cuts that make no difference to the peak, because each window takes time."""
        most, ends = max(self.peaks) * _SURE, [self.ends[-1]]
        walk = Walk(self.stretch, ends[0], self.kept)
        for start, end in reversed([*pairwise(self.ends)]):
            walk.down_to(start)
            if end < walk.end and self._peak(walk) > most:
                ends.append(end)
                walk = Walk(self.stretch, end, self.kept)
                walk.down_to(start)
        self.ends = [self.ends[0], *reversed(ends)]
        self._look()

    def _fill(self) -> None:
        """Take the steps whose results save most. Of equal ones the last is held for the shortest
        time; within a window it is the first, so that what remains is at the end, where no replay
        has to come by it again."""
        order = -1 if self.stretch.is_all else 1
        queue = [(-self._worth(index), order * index) for index in self.again]
        heapq.heapify(queue)
        while queue:
            _, place = heapq.heappop(queue)
            worth = self._worth(order * place)
            if queue and -worth > queue[0][0]:  # it was worth more before others were kept
                heapq.heappush(queue, (-worth, place))
            elif worth > 0:
                self._take(order * place)

    def _results(self, index: int) -> set[int]:
        """What to keep in order not to run a step again; nothing, if that is not possible."""
        made = self.wanted.intersection(self.model.made[index]) - self.kept
        is_possible = all(self.memories[number].final == index + 1 for number in made)
        return made if is_possible else set()

    def _worth(self, index: int) -> float:
        """Operations saved per byte."""
        made = self._results(index)
        if not made:
            return 0.0
        gone, stack = {index}, [index]
        while stack and len(gone) < _FAR:
            for number in self.model.reads[stack.pop()]:
                is_needless = number in made or self.readers[number] <= gone
                if is_needless and number not in self.kept:
                    memory = self.memories[number]
                    new = self.again.intersection([memory.maker, *memory.writers]) - gone
                    gone |= new
                    stack += sorted(new)
        return sum(self.model.work[step] for step in gone) / max(1, self.stretch.cost(made))

    def _take(self, index: int) -> None:
        """Keep the results of a step, if there is room."""
        made, stretch = self._results(index), self.stretch
        nbytes, new = stretch.cost(made), stretch.cost(made - stretch.saved.keys())
        here = bisect_right(self.ends, index) - 1
        after = bisect_right(self.ends, min(self.memories[number].dies for number in made)) - 1
        peaks = [self.peaks[here] + new, *[peak + nbytes for peak in self.peaks[here + 1 :]]]
        forward = [peak + nbytes for peak in self.forward[after:]]
        if self.budget is None:
            fits = max(peaks + forward) <= self.peak
        else:
            fits = stretch.cost(self.kept) + nbytes <= self.budget
        if fits:
            self.kept.update(made)
            self.peaks[here:], self.forward[after:] = peaks, forward


_NONE: frozenset[int] = frozenset()
_AUTOGRAD = -1  # no step, but a reader
_PER_BYTE = 10  # floating-point operations in the time in which a byte is written
# As many bytes are written at most, for each byte of a value that is made again in each window.
_CHEAP = 4
_LITTLE = 8 * 1024  # bytes that autograd saves: too few to be worth the time of a second window
_MOST_CANDIDATES = 64
_LONGEST_BLOCK = 2000  # steps
_MOST_ROUNDS = 4
_SURE = 0.9  # of the peak: segments that need less may be joined, though the model is not exact
_MOST_SLACK = 1 / 3  # what may be spent on less recompute: a part of the least peak
_TRIES = 3
# The same, within a window: what it keeps first is made by a replay, which should be short.
_SLACK_OF_PARTS = 1 / 8
_FAR = 64  # steps, when the worth of one is found


class Plan:
    """How to bring back what was saved on one path."""

    whole: Group | None = None  # all slots, where nothing that `auto()` chose has been held
    peak = 0  # simulated
    size = 0  # bytes that autograd saves, as the plan assumes
    first_size = 0  # those of the run whose bytes the steps have
    waiting: Sequence[int] = ()  # cells of parameters that it assumes to have no gradient
    kept: frozenset[Value] = frozenset()  # what a run should hold
    complaint = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = [Group(path, slots) for slots in path.groups()]

    def suits(self, run: Run) -> bool:
        """Whether a run has the room that the plan assumes. A plan is not exchanged for one with
        more room: runs of several sizes, and runs that accumulate gradients, would plan anew at
        every change."""
        if run.placement is None:
            return True
        has_gradient = any(map(_has_gradient, map(run.held.get, self.waiting)))
        return run.saved_bytes <= MOST_GROWTH * self.size and not has_gradient

    def drops(self, value: Value, step: Step) -> bool:
        """Whether the plan passes this step, and does not keep this value there."""
        if value in self.kept:
            return False
        steps = self.path.steps
        return step.index < len(steps) and steps[step.index] is step

    def groups_for(self, run: Run) -> list[Group]:
        """What to give a run's holders: by what it holds."""
        if self.whole is None or run.held.keys() >= self.kept:
            return self.groups
        if run.is_checked:  # whatever is computed is to be compared
            return Plan(self.whole.path).groups
        return [self.whole]


def _has_gradient(held: Any) -> bool:
    return type(held) is tuple and held[0].grad is not None


def plan_of(run: Run, old: Plan | None = None) -> Plan:
    """The plan for what the run has done, or for `old` where that had less room."""
    path = Path(run)
    plan, choice = Plan(path), Choice()
    if run.placement is None or not path.slots:
        return plan
    size = first_size = run.saved_bytes
    waiting: Sequence[int] = path.trained
    if old is not None:
        size, first_size, waiting = max(size, old.size), old.first_size, old.waiting
    waiting = [cell for cell in waiting if not _has_gradient(run.held.get(cell))]
    # Where FSDP2 gives parameters back, no window may cross that.
    if not (run.sees_gathering and path.cuts):
        plan, choice = _planned(Model(path, run, waiting, size / max(1, first_size)), run)
    plan.size, plan.first_size, plan.waiting = size, first_size, waiting
    plan.peak = choice.peak + run.kept_bytes
    plan.complaint = _complaint(run, choice)
    return plan


def _planned(model: Model, run: Run) -> tuple[Plan, Choice]:
    """The plan for a run, and what it keeps."""
    assert run.placement is not None
    path, budget = model.path, run.placement.budget
    by_user = frozenset([path.memory_of[cell] for cell, _ in path.kept])
    rest = None if budget is None else max(0, budget - run.kept_bytes)
    choice = choose(Stretch(model, range(len(path.slots)), by_user), rest)
    if not choice.kept and not choice.cuts:
        return Plan(path), choice
    values = model.values(choice.kept)
    plan = Plan(path.placed(values, choice.cuts))
    plan.kept = frozenset(values)
    plan.whole = Group(path, [*range(len(path.slots))])
    plan.whole.parts = plan.groups
    if budget is not None:
        for group in plan.groups:
            _split(group, model, by_user.union(choice.kept), max(budget, 1))
    return plan, choice


def _split(group: Group, model: Model, held: frozenset[int], budget: int) -> None:
    """Where a window would deliver more than the budget, a first replay makes what smaller windows
    start from."""
    order = group.window(tuple(group.slots)).order
    if not order:
        return
    stretch = Stretch(model, group.slots, held, order)
    if stretch.cost(stretch.dear & stretch.saved.keys()) <= budget:
        return
    choice = choose(stretch, budget)
    if choice.kept:
        group.split(model.values(choice.kept), choice.cuts)
        if max(len(part.slots) for part in group.parts) == len(group.slots):
            group.parts = []
        for part in group.parts:
            _split(part, model, held.union(choice.kept), budget)


def _complaint(run: Run, choice: Choice) -> str:
    """What to say of a budget that is too small."""
    assert run.placement is not None
    budget, least = run.placement.budget, run.kept_bytes
    if budget is None:
        return ""
    if least > budget:
        why = "`keep`, other policies, or FSDP2 keep more than that in this block"
    elif not least and budget < choice.least:
        why = "no room for a single checkpoint, so backward recomputes all of the block at once"
        least = choice.least
    else:
        return ""
    return f"auto(budget={budget}): {why}. The smallest budget possible is {least} bytes."


def attach(plan: Plan, old: Plan | None) -> None:
    """From here on runs hold what the plan keeps, as soon as it is there."""
    path, gone = plan.path, plan.kept if old is None else plan.kept | old.kept
    for step in path.steps:
        if step.keeps:
            step.keeps = tuple([each for each in step.keeps if each[0] not in gone])
    counted: set[int] = set()
    for value in sorted(plan.kept):
        memory = path.memory_of[value[0]]
        path.steps[path.there_after(value)].keeps += ((value, memory not in counted),)
        counted.add(memory)
        for step in path.writers.get(memory, ()):
            if step.index > path.there_after(value) and value not in step.passes:
                step.passes += (value,)
                step.is_special = step.needs_preparation = True
