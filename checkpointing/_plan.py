"""What a block keeps for backward, computed from what it did last time.

Backward opens the segments of a block from the last one to the first. When it opens one, everything kept for that
segment and for those before it is held, the window of the segment delivers what autograd saved there, and gradients
need room to work; what was kept for later segments is gone, and the gradients of parameters used there exist. A plan
chooses cuts such that the largest of these sums, the simulated peak, is least. Then it keeps what saves most
recompute per byte, as far as a peak allows that is a little larger (`_SLACK`). So the last segment, where backward
begins, is kept as it is, and gradients that do not exist yet are room.

The model looks at memories, not at tensors: views cost nothing, and a segment that reads a value from before its
beginning keeps the memory of that value. Values that are cheap to make from inputs, such as casts of weights and
masks, cross a cut for free, since each window makes them again. What somebody else holds anyway costs nothing.

Invariant: a plan depends on byte counts and positions alone, so it is the same on every rank.

Rejected: placing cuts while the block runs, by what is alive at that moment. What is alive is not what will be read.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ._program import KEEP, NOT_WRITTEN, UNSEEN, Step, Value
from ._run import Run
from ._windows import Group, Path


class Memory:
    """What a plan knows of a memory that the block has made."""

    def __init__(self, number: int, maker: int, nbytes: int, never: int) -> None:
        self.number = number  # also the first cell on it
        self.maker = maker
        self.nbytes = nbytes
        self.writers = [maker]  # steps
        self.final = maker + 1  # the first position at which it is what it will be
        self.never = never  # a position after all others
        self.last_read = maker  # by a step
        self.last_use = maker  # by a step or a slot
        self.dies = never  # the step after which nobody outside holds it
        self.values: set[Value] = set()  # that others read than those who write to it
        self.saved: dict[Value, int] = {}  # that autograd has saved: bytes
        self.has_gradient = False
        self.effort: int | None = None  # bytes written to make it from inputs, if that is cheap
        self.cost = self.delivered = nbytes  # to hold it, and what a window makes of it
        self.copies = False  # whether to hold copies of what autograd has saved, since it is written again
        self.stands_for: list[Value] = []  # what to hold

    def settle(self, steps: list[Step], is_elsewhere: bool) -> None:
        """All that happens to it is known."""

        def is_final(value: Value) -> bool:
            return all(value[0] in steps[index].spares for index in self.writers[1:] if index > value[1])

        early = {value: nbytes for value, nbytes in self.saved.items() if not is_final(value)}
        self.copies = bool(early)
        self.delivered += sum(early.values())  # a window copies what it will write again
        self.stands_for = [(self.number, NOT_WRITTEN)]
        if early:
            self.stands_for, self.cost = sorted(self.saved), sum(self.saved.values())
        elif self.final > self.maker + 1:
            self.stands_for = sorted(filter(is_final, self.values))
        if not self.nbytes or (early and not self.values <= self.saved.keys()):
            self.final = self.never
        if is_elsewhere:
            self.cost = self.delivered = 0


class Facts(NamedTuple):
    """What a plan goes by, beside the path."""

    alive: frozenset[int] = frozenset()  # memories that somebody else holds anyway
    parameters: Mapping[int, int] = {}  # bytes of those that get gradients, by memory
    missing: Mapping[int, int] = {}  # the same, of those whose gradients do not exist yet
    scale: float = 1.0  # how much larger the run is than the one that was recorded


class Model:
    """The memories of a path: who makes, reads and writes them, and what they cost."""

    def __init__(self, path: Path, facts: Facts) -> None:
        self.path, self.facts = path, facts
        self.count = len(path.steps)
        self.memories: dict[int, Memory] = {}
        self.made: list[list[int]] = [[] for _ in path.steps]  # memories, by step; those that it writes, too
        self.reads: list[list[int]] = [[] for _ in path.steps]
        self.work = [0.0] * self.count  # of each step, in floating-point operations
        self._weights: list[list[int]] = [[] for _ in path.steps]  # parameters that a step reads
        for step in path.steps:
            self._add(step)
        self.saves = [self._place_of(number) for number in range(len(path.slots))]
        for slot, (position, number) in zip(path.slots, self.saves, strict=True):
            if slot.cell not in path.given and number in self.memories:
                memory = self.memories[number]
                memory.values.add(slot.value)
                memory.saved[slot.value] = int(slot.nbytes * facts.scale)
                memory.last_use = max(memory.last_use, position)
        for memory in self.memories.values():
            memory.settle(path.steps, memory.number in facts.alive and memory.effort is None)
        self.live = self.sums((m.maker, m.dies - 1, m.nbytes) for m in self.memories.values())
        self.besides, gradients = self._gradients()
        self.backward = [self._needed_by(index, gradients) for index in range(self.count)]

    def _add(self, step: Step) -> None:
        """Learn what a step does to memory."""
        index, memory_of, memories = step.index, self.path.memory_of, self.memories
        for number in memories.keys() & step.gone:
            memories[number].dies = index
        if step.event is UNSEEN:
            for memory in memories.values():
                memory.final = memory.never
        if step.effect or step.is_view or step.event is KEEP:
            for number in memories.keys() & step.writes:
                memories[number].final = self.count + 1
            return
        read = {memory_of[cell] for cell, _ in step.reads}
        made = {memory_of[cell] for cell, _ in step.reads if cell not in self.path.given} & memories.keys()
        self.reads[index] = reads = sorted(made)
        self._weights[index] = sorted(read & self.facts.parameters.keys())
        own = {*step.writes, *(number for _, number in step.memories)}  # it writes there, or splits it
        for value in step.reads:
            number = memory_of[value[0]]
            if number in made - own:
                memories[number].values.add(value)
        for number in reads:
            memories[number].last_read = memories[number].last_use = index
        for number, nbytes in step.sizes:
            memories[number] = memory = Memory(number, index, int(nbytes * self.facts.scale), self.count + 1)
            if step.event is not None or not (step.reads or step.reads_metadata):
                memory.final = memory.never  # torch makes something else of `zeros()` if somebody holds the result
            self.made[index].append(number)
        for number in memories.keys() & step.writes:
            memory = memories[number]
            memory.final = max(memory.final, index + 1)
            memory.writers += [index] * (memory.maker != index)
            self.made[index] += [number] * (memory.maker != index)
        self._note_worth(step, read)

    def _note_worth(self, step: Step, read: set[int]) -> None:
        """What a step costs, whether what it makes is quickly made from inputs, and whether it has a gradient."""
        reads = [self.memories[number] for number in self.reads[step.index]]
        made = [self.memories[number] for number in self.made[step.index]]
        written = sum(memory.nbytes for memory in made)
        flops = step.flops * self.facts.scale
        self.work[step.index] = flops + _PER_BYTE * written
        efforts = [memory.effort for memory in reads]
        effort = None if None in efforts or step.draws else written + sum(filter(None, efforts))
        if effort is not None and (effort > _CHEAP * written or flops > _PER_BYTE * written):
            effort = None
        has_gradient = step.grad_mode and any(memory.has_gradient for memory in reads)
        has_gradient |= step.grad_mode and not read.isdisjoint(self.path.differentiable)
        for memory in made:
            memory.effort = effort
            memory.has_gradient = has_gradient

    def _place_of(self, number: int) -> tuple[int, int]:
        """Where backward wants a slot: the position of the step that saves it, and the memory."""
        slot, after = self.path.slots[number], self.path.saved_after[number]
        memory = self.path.memory_of[slot.cell]
        is_made = memory in self.memories and slot.cell not in self.path.given
        is_input = is_made and max(self.path.makers(slot.value)) < after
        return min(max(after, 0) + is_input, self.count - 1), memory

    def sums(self, spans: Iterable[tuple[int, int, int]]) -> list[int]:
        """By position: the bytes that are there. Each is there from one position to another."""
        change = [0] * (self.count + 3)
        for first, last, nbytes in spans:
            change[first] += nbytes
            change[max(first, min(last, self.count)) + 1] -= nbytes
        return [*accumulate(change)]

    def values(self, kept: Iterable[int]) -> list[Value]:
        """What to hold of these memories."""
        return [value for number in kept for value in self.memories[number].stands_for]

    def crossing(self, held: frozenset[int]) -> list[int]:
        """By position: bytes made before it and used from there on."""
        memories = [m for m in self.memories.values() if m.effort is None and m.number not in held]
        return self.sums((m.maker + 1, m.last_use, m.cost) for m in memories)

    def _gradients(self) -> tuple[list[int], list[int]]:
        """By position to which backward has come: bytes that are there besides what the block keeps (gradients that
        did not exist before, what somebody else holds), and bytes of gradients on their way."""
        uses: dict[int, list[int]] = defaultdict(list)
        for index, parameters in enumerate(self._weights):
            for number in parameters:
                uses[number].append(index)
        there = [(0, uses[number][-1], nbytes) for number, nbytes in self.facts.missing.items() if number in uses]
        elsewhere = [m for m in self.memories.values() if not m.cost]
        there += [(0, self.count, memory.nbytes) for memory in elsewhere]
        pending = [(m.maker + 1, m.last_read, m.nbytes) for m in self.memories.values() if m.has_gradient]
        # The sum over all uses of a parameter waits for the first one.
        pending += [
            (at[0] + 1, at[-1], self.facts.parameters[number])
            for number, at in uses.items()
            if len(at) > 1 and number not in self.facts.missing
        ]
        return self.sums(there), self.sums(pending)

    def _needed_by(self, index: int, gradients: list[int]) -> int:
        """Bytes that the backward of a step works with, beside what is kept or was saved."""
        made, need = self.made[index], gradients[index + 1]
        if any(self.memories[number].has_gradient for number in made):
            arguments = [self.memories[number] for number in self.reads[index] if number not in made]
            new = sum(m.nbytes for m in arguments if m.has_gradient and m.last_read <= index)
            need += new * (3 if self.path.steps[index].func in _IN_OTHER_LAYOUTS else 1)
            need += sum(self.facts.parameters[number] for number in self._weights[index])
        return need


class Segment(NamedTuple):
    """What lies between two cuts."""

    across: frozenset[int]  # memories that its window reads from before
    need: int  # bytes that its backward needs at once, beside what is kept
    forward: int  # bytes that are alive at the worst moment of its forward
    at: int  # the step of that moment


class _Walk:
    """Goes down through a segment: what its window runs, and what it needs."""

    def __init__(self, stretch: Stretch, kept: set[int]) -> None:
        self._stretch, self._kept = stretch, kept
        self.again: list[int] = []  # steps that run again
        self.reading: set[int] = set()  # memories that they read, whose makers are still to come
        self.need = 0
        self._delivered: set[int] = set()
        self._forward = self._at = 0

    def down(self, index: int) -> None:
        stretch, model, memories = self._stretch, self._stretch.model, self._stretch.model.memories
        there = 0  # bytes that are there from here on upwards
        for number in stretch.wanted.get(index, ()):
            if number not in self._kept and number not in self._delivered:
                self._delivered.add(number)
                self.reading.add(number)
                if memories[number].effort is not None:
                    there += memories[number].delivered
        made = [number for number in model.made[index] if memories[number].maker == index]
        for number in made:
            if number in self._kept:
                nbytes = memories[number].cost
            elif number in self._delivered and memories[number].effort is None:
                nbytes = memories[number].delivered
            else:
                continue
            if stretch.lasts.get(number, index) > index:  # it has gone when backward comes to its maker
                self.need += nbytes
            else:
                there += nbytes
        self.need = max(self.need, model.backward[index]) + there
        if stretch.live[index] > self._forward:
            self._forward, self._at = stretch.live[index], index
        if not self.reading.isdisjoint(model.made[index]):
            self.again.append(index)
            self.reading.difference_update(made)
            new = [number for number in model.reads[index] if memories[number].maker < index]
            self.reading.update([n for n in new if n not in self._kept and stretch.must_make(n)])

    @property
    def across(self) -> frozenset[int]:
        """What crosses a cut here."""
        memories = self._stretch.model.memories
        return frozenset([number for number in self.reading if memories[number].effort is None])

    def segment(self) -> Segment:
        """What it has come by until here."""
        return Segment(self.across, self.need, self._forward, self._at)


class Stretch:
    """A part of a path whose slots one window would bring back, and that is to be cut."""

    def __init__(
        self,
        model: Model,
        slots: Iterable[int],
        held: frozenset[int] = frozenset(),
        ends: tuple[int, int] | None = None,
    ) -> None:
        self.model = model
        self.held = held  # memories
        self.is_all = ends is None
        self.first, self.last = ends or (0, model.count)
        self.live = model.live if self.is_all else [0] * model.count  # a replay is no forward
        self.wanted: dict[int, list[int]] = defaultdict(list)  # by position: memories that autograd has saved
        for number in slots:
            position, memory = model.saves[number]
            is_made = memory in model.memories and model.path.slots[number].cell not in model.path.given
            if is_made and memory not in held:
                self.wanted[min(max(position, self.first), self.last - 1)].append(memory)
        # The position down to which backward needs them; a kept one may be needed by the window of its maker.
        self.lasts: dict[int, int] = {}
        for position in sorted(self.wanted, reverse=True):
            self.lasts.update(dict.fromkeys(self.wanted[position], position))
        self.saved = {memory for memories in self.wanted.values() for memory in memories}
        self.positions = self._candidates()

    @property
    def delivered(self) -> int:
        """Bytes that a window for all slots delivers."""
        memories = [self.model.memories[number] for number in self.saved]
        return sum(memory.delivered for memory in memories if memory.effort is None)

    def must_make(self, number: int) -> bool:
        """Whether a window that reads this memory must have made it."""
        memory = self.model.memories[number]
        return memory.effort is None and memory.maker >= self.first and number not in self.held

    def _candidates(self) -> list[int]:
        """Positions that little crosses, and the ends."""
        crossing, first, last = self.model.crossing(self.held), self.first, self.last
        best: dict[int, int] = {}
        minima = [
            p
            for p in range(first + 1, last)
            if crossing[p] <= min(crossing[p - 1], crossing[p + 1]) and self.model.made[p - 1]
        ]
        size = 1.0 if len(minima) <= _MOST_CANDIDATES else (last - first) / _MOST_CANDIDATES
        for p in minima:
            part = int((p - first) / size)
            if part not in best or crossing[p] < crossing[best[part]]:
                best[part] = p
        return [first, *best.values(), last]

    def segments(self, end: int, most: float) -> Iterable[tuple[int, Segment]]:
        """Segments that end here and need no more than this, by where they start; the last stretch in any case."""
        starts, walk = {*self.positions}, _Walk(self, set())
        for index in range(end - 1, self.first - 1, -1):
            walk.down(index)
            if walk.need > most:
                return
            if index in starts:
                yield index, walk.segment()

    def price(self, number: int, position: int) -> int:
        """What it costs that a memory crosses a cut; one that autograd saves anyway comes first."""
        memory = self.model.memories[number]
        price = memory.cost + (number not in self.saved)
        return price if memory.final <= position else 2 * price


class _Cuts:
    """Where a stretch may be cut."""

    def __init__(self, stretch: Stretch, budget: int | None) -> None:
        self.stretch, self.budget = stretch, budget
        self.segments: dict[tuple[int, int], Segment] = {}

    def least_peak(self) -> tuple[int, list[int]]:
        """The least peak that cuts can have, and those cuts."""
        model, low = self.stretch.model, 0
        high = max(1024, max(model.backward) + max(model.besides), max(self.stretch.live))
        while (best := self._widened(high)) is None:
            low, high = high, 2 * high
        while high - low > max(64, high // 256):
            middle = (low + high) // 2
            cuts = self.under(middle)
            if cuts is None:
                low = middle
            else:
                high, best = middle, cuts
        return high, best

    def _widened(self, peak: int) -> list[int] | None:
        for end in self.stretch.positions[1:]:
            for start, segment in self.stretch.segments(end, peak):
                self.segments[start, end] = segment
        return self.under(peak)

    def under(self, peak: int) -> list[int] | None:
        """The cuts under which no segment needs more than `peak`, and the least is held; None, if there are none."""
        positions = self.stretch.positions
        held: dict[int, tuple[frozenset[int], int]] = {positions[0]: (frozenset(), 0)}  # up to a position
        before: dict[int, int] = {}
        for at, end in enumerate(positions[1:], 1):
            room = peak - self.stretch.model.besides[end]
            for start in positions[:at]:
                segment = self.segments.get((start, end))
                if segment is None or start not in held:
                    continue
                kept, total = held[start]
                total += sum([self.stretch.price(number, start) for number in segment.across - kept])
                if total + segment.need > room or (end in held and total >= held[end][1]):
                    continue
                kept |= segment.across
                fits = total + segment.forward <= peak or self._forward(kept, segment) <= peak
                if fits and (self.budget is None or total <= self.budget):
                    held[end] = kept, total
                    before[end] = start
        end = positions[-1]
        if end not in held:
            return None
        cuts = [end]
        while cuts[-1] != positions[0]:
            cuts.append(before[cuts[-1]])
        return cuts[-2:0:-1]

    def _forward(self, kept: frozenset[int], segment: Segment) -> int:
        """The peak of its forward, with what is kept that nobody else holds by then."""
        memories = [self.stretch.model.memories[number] for number in kept]
        return segment.forward + sum(memory.cost for memory in memories if memory.dies <= segment.at)

    def room(self, least: int, cuts: list[int]) -> int:
        """What these cuts add to the peak that no plan can avoid, that of the worst stretch between two places where
        it may cut; and no more than they keep."""
        alone = [self.segments[pair].need for pair in pairwise(self.stretch.positions)]
        across: set[int] = set()
        for pair in pairwise([self.stretch.first, *cuts, self.stretch.last]):
            across |= self.segments[pair].across
        kept = sum(self.stretch.model.memories[number].cost for number in across)
        return max(0, min(kept, least - max(*alone, *self.stretch.live)))

    def least_budget(self) -> int | None:
        """The smallest one with room for a cut."""
        stretch = self.stretch
        last = [s for start, s in stretch.segments(stretch.last, float("inf")) if start > stretch.first]
        costs = [sum(stretch.model.memories[number].cost for number in segment.across) for segment in last]
        return min(filter(None, costs), default=None)


class Choice(NamedTuple):
    """What a plan keeps."""

    kept: tuple[int, ...] = ()  # memories
    cuts: tuple[int, ...] = ()  # the first step of each segment but the first
    peak: int = 0
    least: int | None = None  # the smallest budget with room for a cut, if anything is computed again


def choose(stretch: Stretch, budget: int | None = None) -> Choice:
    """What to keep of a stretch."""
    if not stretch.saved:
        return Choice(peak=max(stretch.live, default=0))
    table = _Cuts(stretch, budget)
    least, cuts = table.least_peak()
    if budget is None:
        room = table.room(least, cuts)
        fillings = [(part * room / least, _filled(table, least + int(part * room), cuts)) for part in _SLACKS]
    else:
        more = 0.0 if stretch.is_all else _SLACK_OF_PARTS
        fillings = [(0.0, _filled(table, int(least * (1 + more)), cuts))]
    forward = max(1.0, sum(stretch.model.work))
    _, best = min(fillings, key=lambda each: _RATE * each[0] + each[1].left / forward)
    recomputes = any(stretch.model.memories[n].effort is None for n in stretch.saved - best.kept)
    smallest = table.least_budget() if recomputes and budget is not None else None
    return Choice(tuple(sorted(best.kept)), tuple(best.ends[1:-1]), max(best.peaks + best.forward), smallest)


def _filled(table: _Cuts, peak: int, least: list[int]) -> _Fill:
    """The least recompute under a peak; `least` are the cuts with the least one."""
    stretch = table.stretch
    new = stretch.model.besides[stretch.first] - stretch.model.besides[stretch.last]
    tries = [table.under(peak - new * part // 4) for part in range(5)]
    tries.insert(0 if stretch.is_all else len(tries), least)
    fillings = [_Fill(table, cuts, peak) for cuts in dict.fromkeys(tuple(t) for t in tries if t is not None)]
    return min(fillings, key=lambda filling: filling.left)


class _Fill:
    """Keeps what saves most recompute per byte, as long as there is room."""

    def __init__(self, table: _Cuts, cuts: tuple[int, ...], peak: int) -> None:
        self.stretch, self.budget, self.peak = table.stretch, table.budget, peak
        self.memories = self.stretch.model.memories
        self.positions = {*self.stretch.positions}
        self.ends = [self.stretch.first, *cuts, self.stretch.last]
        self.kept: set[int] = set()
        for start, end in pairwise(self.ends):
            across = table.segments[start, end].across
            self.kept |= {number for number in across if self.memories[number].final <= start}
        self.again: set[int] = set()  # steps that run again
        self.readers: dict[int, set[int]] = {}  # by memory: of those steps
        self.peaks: list[int] = []  # of backward, by segment
        self.forward: list[int] = []
        for _ in range(_MOST_ROUNDS):
            before, ends = {*self.kept}, self.ends
            self.ends = sorted({*ends, *self._look()})
            self.kept -= {number for number in self.kept - self.stretch.saved if number not in self.readers}
            self._look()
            self._fill()
            if (before, ends) == (self.kept, self.ends):
                break
        self._look()
        self.left = sum(self.stretch.model.work[index] for index in self.again)

    def _look(self) -> set[int]:
        """Find what runs again and the peaks. Returns where cuts are free, since all that crosses there is kept."""
        model, free = self.stretch.model, set()
        self.again, self.readers, self.peaks, self.forward = set(), defaultdict(set), [], []
        kept = [self.memories[number] for number in self.kept]
        held = model.sums((memory.maker + 1, model.count, memory.cost) for memory in kept)
        dead = model.sums((memory.dies, model.count, memory.cost) for memory in kept)
        for start, end in pairwise(self.ends):
            walk = _Walk(self.stretch, self.kept)
            for index in range(end - 1, start - 1, -1):
                walk.down(index)
                if index in self.positions and start < index < end - 1 and not walk.across:
                    free.add(index)
            self.again.update(walk.again)
            self.peaks.append(held[start] + walk.need + model.besides[end])
            self.forward.append(max(self.stretch.live[i] + dead[i] for i in range(start, end)))
        for index in self.again:
            for number in model.reads[index]:
                self.readers[number].add(index)
        return free

    def _fill(self) -> None:
        """Take the steps whose results save most. Of equal ones the last is held for the shortest time; within a
        window it is the first, so that what remains is at the end, where no replay has to come by it again."""
        order = -1 if self.stretch.is_all else 1
        queue = [(-self._worth(index), order * index) for index in sorted(self.again)]
        heapq.heapify(queue)
        while queue:
            before, place = heapq.heappop(queue)
            index = order * place
            worth = self._worth(index)
            if queue and -worth > max(before, queue[0][0]):
                heapq.heappush(queue, (-worth, place))
            elif worth > 0:
                self._take(self._results(index), index)

    def _results(self, index: int) -> list[int]:
        """What to keep in order not to run a step again; nothing, if that is not possible."""
        made = []
        for number in self.stretch.model.made[index]:
            memory = self.memories[number]
            is_read = number in self.readers and memory.effort is None  # cheap ones only if autograd has saved them
            is_wanted = is_read or number in self.stretch.saved
            if is_wanted and number not in self.kept and number not in self.stretch.held:
                made.append(number)
        return made if all(self.memories[number].final == index + 1 for number in made) else []

    def _worth(self, index: int) -> float:
        """Operations saved per byte."""
        made, model = self._results(index), self.stretch.model
        if not made:
            return 0.0
        gone, stack = {index}, [index]
        while stack and len(gone) < _FAR:
            for number in model.reads[stack.pop()]:
                is_unread = number not in self.stretch.saved and self.readers[number] <= gone
                if number not in self.kept and (is_unread or number in made):
                    new = self.again.intersection(self.memories[number].writers) - gone
                    gone |= new
                    stack += sorted(new)
        work = sum(model.work[step] for step in sorted(gone))
        return work / max(1, sum(self.memories[number].cost for number in made))

    def _take(self, made: list[int], index: int) -> None:
        """Keep these, if there is room."""
        memories = [self.memories[number] for number in made]
        nbytes = sum(memory.cost for memory in memories)
        more = sum(memory.cost - memory.delivered * (memory.number in self.stretch.saved) for memory in memories)
        here = bisect_right(self.ends, index) - 1
        after = bisect_right(self.ends, min(memory.dies for memory in memories)) - 1
        later = [peak + nbytes for peak in self.forward[after:] + self.peaks[here + 1 :]]
        if self.budget is not None:
            if sum(self.memories[number].cost for number in self.kept) + nbytes > self.budget:
                return
        elif max([self.peaks[here] + more, *later]) > self.peak:
            return
        self.kept.update(made)
        self.peaks[here] += more
        self.peaks[here + 1 :] = [peak + nbytes for peak in self.peaks[here + 1 :]]
        self.forward[after:] = [peak + nbytes for peak in self.forward[after:]]


_IN_OTHER_LAYOUTS = {torch.ops.aten.convolution.default}  # whose backward copies what it reads and makes
_PER_BYTE = 10  # floating-point operations in the time in which a byte is written
_CHEAP = 4  # as many bytes are written at most, for each byte of a value that is made again in each window
_MOST_CANDIDATES = 64
_MOST_ROUNDS = 4
_SLACKS = (0, 1 / 8, 3 / 8)  # what may be spent on less recompute: parts of what a plan adds to the peak at least
_RATE = 0.9  # which part of a forward it must save for each part of the peak
_SLACK_OF_PARTS = 1 / 8  # the same, within a window: what it keeps first is made by a replay, which should be short
_FAR = 64  # steps, when the worth of one is found


class Plan:
    """How to bring back what was saved on one path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = [Group(path, slots) for slots in path.groups()]
        self.whole: Group | None = None  # all slots, where nothing that `auto()` chose has been held
        self.peak = 0  # simulated
        self.missing = 0  # bytes of gradients that did not exist yet, when the plan was made
        self.size = 0  # bytes that autograd saved then
        self.saved_bytes = 0  # of the run whose bytes the steps have
        self.kept: frozenset[Value] = frozenset()  # what a run should hold
        self.copied: frozenset[Value] = frozenset()  # of that: as copies, because something writes there again
        self.complaint = ""

    def suits(self, run: Run) -> bool:
        """Whether a run has no less room than the plan assumes. A plan for more room is never exchanged for another:
        runs of several sizes, and runs that accumulate gradients, would plan anew at every change."""
        if run.placement is None:
            return True
        return run.saved_bytes <= _MOST_GROWTH * self.size and self.missing <= _missing_gradients(self.path, run)

    def passes(self, step: Step) -> bool:
        """Whether the step is on its path."""
        return self.path.steps[step.index : step.index + 1] == [step]

    def groups_for(self, run: Run) -> list[Group]:
        """What to give a run's holders: by what it holds."""
        if self.whole is None or run.held.keys() >= self.kept:
            return self.groups
        if run.is_checked:  # whatever is computed is to be compared
            return Plan(self.whole.path).groups
        return [self.whole]


_MOST_GROWTH = 1.5  # of the bytes that autograd saves, until a plan is made anew


def _missing_gradients(path: Path, run: Run) -> int:
    """Bytes of gradients that do not exist yet."""
    held = [run.held.get(cell) for cell in path.trained]  # of parameters that the block writes, a copy
    return sum([h[0].nbytes for h in held if type(h) is tuple and h[0].grad is None])


def _gradients(path: Path, run: Run) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes of gradients that do not exist yet, by memory; and those of all parameters that get some."""
    parameters: dict[int, int] = {}
    missing: dict[int, int] = {}
    for cell, held in run.held.items():
        if type(held) is tuple and held[0].requires_grad:
            parameter = held[0]
            parameters[path.memory_of[cell]] = parameter.nbytes
            if parameter.grad is None:
                missing[path.memory_of[cell]] = parameter.nbytes
    return parameters, missing


def plan_of(run: Run, old: Plan | None = None) -> Plan:
    """The plan for what a run has done; `old` was for one of another size."""
    path = Path(run)
    if run.placement is None or not path.slots:
        return Plan(path)
    parameters, missing = _gradients(path, run)
    saved_bytes = run.saved_bytes if old is None else old.saved_bytes
    plan, choice = Plan(path), Choice()
    if not (run.sees_gathering and path.cuts):  # where parameters are given back; no window may cross that
        alive = {path.memory_of[cell] for cell in run.alive()} - {path.memory_of[cell] for cell in path.given}
        facts = Facts(frozenset(alive), parameters, missing, run.saved_bytes / max(1, saved_bytes))
        plan, choice = _planned(path, Model(path, facts), run)
    plan.missing, plan.size, plan.saved_bytes = _missing_gradients(path, run), run.saved_bytes, saved_bytes
    plan.peak = choice.peak + run.kept_bytes
    plan.complaint = _complaint(run, choice)
    return plan


def _planned(path: Path, model: Model, run: Run) -> tuple[Plan, Choice]:
    """The plan with the least peak, and what it keeps."""
    assert run.placement is not None
    budget, slots = run.placement.budget, range(len(path.slots))
    by_user = frozenset([path.memory_of[cell] for cell, _ in path.kept])
    rest = None if budget is None else max(0, budget - run.kept_bytes)
    choice = choose(Stretch(model, slots, by_user), rest)
    if not choice.kept and not choice.cuts:
        return Plan(path), choice
    values = model.values(choice.kept)
    plan = Plan(path.placed(values, choice.cuts))
    plan.kept = frozenset(values)
    plan.copied = frozenset(model.values([n for n in choice.kept if model.memories[n].copies]))
    plan.whole = Group(path, [*slots])
    plan.whole.parts = plan.groups
    if budget is not None:
        for group in plan.groups:
            _split(group, model, by_user.union(choice.kept), max(budget, 1))
    return plan, choice


def _split(group: Group, model: Model, held: frozenset[int], budget: int) -> None:
    """Where a window would deliver more than the budget, a first replay makes what smaller windows start from."""
    order = group.window(tuple(group.slots)).order
    if not order:
        return
    stretch = Stretch(model, group.slots, held, (order[0], order[-1] + 1))
    if stretch.delivered <= budget:
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
        why = "what `keep` and other policies keep in this block, or FSDP2 between modules, takes more than that"
    elif not least and choice.least is not None and budget < choice.least:
        why = "no room for a single checkpoint, so backward recomputes all of the block at once"
        least = choice.least
    else:
        return ""
    return f"auto(budget={budget}): {why}. The smallest budget possible is {least} bytes."


def attach(plan: Plan, old: Plan | None) -> None:
    """From here on runs hold what the plan keeps, as soon as it is there."""
    path, before = plan.path, frozenset() if old is None else old.kept
    new: dict[int, list[tuple[Value, bool, bool]]] = defaultdict(list)
    counted: set[int] = set()
    for value in sorted(plan.kept):
        memory = path.memory_of[value[0]]
        new[path.there_after(value)].append((value, memory not in counted, value in plan.copied))
        counted.add(memory)
    for step in path.steps:
        mine = new.get(step.index, [])
        if mine or (before and step.keeps):
            taken = before.union([value for value, *_ in mine])
            step.keeps = (*(each for each in step.keeps if each[0] not in taken), *mine)
