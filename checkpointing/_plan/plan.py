"""What a block keeps for backward, computed from what it did last time.

The memory model. Backward opens the segments of a block from the last one to the first. While it
works on one, three things are there: what is kept for that segment and for those before it; what
the window of the segment delivers; and gradients, those of parameters from the step that makes them
on. What was kept for later segments is gone. The largest of these sums, or the worst moment of the
forward, is the simulated peak.

The plan. For one peak, a dynamic program (`Stretch.cuts`) finds cuts among positions that little
crosses: those under which the least is held, and a few under which less runs again. Bisection finds
the least peak. The plan is made for a larger one: that of a checkpoint around each block that the
program repeats, which is what users place by hand (`Stretch.by_hand`), or the one that the user
asks for. Under it, `Filling` keeps what saves most recompute per byte, from each of these cuts, and
the least recompute is taken. Finally, cuts that make no difference to the peak are dropped, because
each window takes time.

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
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from itertools import accumulate, pairwise
from operator import add
from typing import Any, NamedTuple

from .. import _torch
from .._record import (
    KEEP,
    MOST_GROWTH,
    NOT_WRITTEN,
    UNSEEN,
    First,
    Hold,
    Known,
    Path,
    Run,
    Step,
    Value,
)
from .groups import MOST_WRITTEN, Group, grouped


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

    def drop_unfinished(self, path: Path) -> set[Value]:
        """Leave out the values that a later step writes to: to hold the memory is not to hold them.
        What reads them comes before that step."""
        dropped: set[Value] = set()
        for value in self.values if self.writers else ():
            later = [index for index in self.writers if index > value[1]]
            if any(path.writes_to(path.steps[index], value[0]) for index in later):
                dropped.add(value)
        self.values -= dropped
        return dropped


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
        # Threads of the backend hold what they send for a time that differs from rank to rank.
        self._sent: dict[int, int] = {}  # by memory: the last step that does
        # By memory of a parameter that trains: its bytes, and the steps that read it.
        held = {path.memory_of[cell]: run.store.parameter(cell) for cell in path.trained}
        self._gradients = {number: p.nbytes for number, p in held.items() if p is not None}
        self._uses: dict[int, list[int]] = defaultdict(list)
        # By slot that the block has made: the position at which backward wants it, and the memory.
        self.saves: dict[int, tuple[int, int]] = {}
        for step in path.steps:
            self._add(step)
        for number in range(len(path.slots)):
            self._add_slot(number)
        for number in self._sent.keys() & self.memories.keys():
            memory = self.memories[number]
            memory.dies = max(memory.last_use, self._sent[number])
        elsewhere = {path.memory_of[cell] for cell in run.alive()} - {
            path.memory_of[cell] for cell, _ in path.given
        }
        unfinished: set[Value] = set()
        for memory in self.memories.values():
            unfinished |= memory.drop_unfinished(path)
            if not (memory.nbytes and memory.values):
                memory.final = self.never
            if memory.number in elsewhere and not memory.is_cheap:
                memory.cost = 0
        # By step: memories of which it reads what a later step writes over.
        self.early = {
            step.index: {path.memory_of[cell] for cell, _ in unfinished.intersection(step.reads)}
            for step in path.steps
            if not unfinished.isdisjoint(step.reads)
        }
        # When small ones die may depend on the garbage collector, which differs from rank to rank.
        large = [m for m in self.memories.values() if m.nbytes >= _SMALL]
        spans = [(m.maker, m.dies - 1, m.nbytes) for m in large]
        self.live = self.sums([*spans, *self._copies(0)])
        missing = {path.memory_of[cell] for cell in waiting}
        self.besides = self._besides(missing)
        # What the steps after it have made is there, too.
        self.backward = [*map(add, self._needed_by_backward(missing), self.besides[1:])]

    def _add(self, step: Step) -> None:
        """Learn what a step does to memory."""
        index, memories = step.index, self.memories
        for number in memories.keys() & {*step.gone}:
            memories[number].dies = index
        if step.info.communicates:
            cells = [arg.cell for arg in step.args if isinstance(arg, Known | First)]
            self._sent.update([(self.path.memory_of[cell], index) for cell in cells])
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
            if value in self.path.given or number not in self.memories:
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
        is_quick = max(flops / _PER_BYTE, effort / MOST_WRITTEN) <= written
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
        if memory is None or slot.value in self.path.given:
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

    def _copies(self, shift: int) -> list[tuple[int, int, int]]:
        """What convolutions work with on their own: copies in another layout, about as large as
        what they read and make. (Measured with oneDNN on a CPU, and with nothing else.)"""
        steps = [step.index for step in self.path.steps if step.func is _torch.CONVOLUTION]
        found = []
        for index in steps:
            numbers = [*self.reads[index], *self.made[index]]
            nbytes = sum([self.memories[number].nbytes for number in numbers])
            found.append((index + shift, index + shift, nbytes))
        return found

    def _needed_by_backward(self, missing: set[int]) -> list[int]:
        """By step: bytes that its backward works with, beside what is kept or was saved."""
        # A gradient is there from the backward of the last reader to that of the maker.
        pending = [
            (m.maker + 1, m.last_read + 1, m.nbytes)
            for m in self.memories.values()
            if m.has_gradient
        ]
        pending += self._copies(1)
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

    end: int
    across: tuple[int, ...]  # memories that its window reads from before
    need: int  # bytes that its backward needs at once, beside what is kept before it
    work: float  # that its window does again
    worst: int  # the step of its forward at which most bytes are alive


class Label(NamedTuple):
    """One way to cut what lies before a position."""

    held: int
    work: float
    kept: frozenset[int]
    before: Any  # the label at the start of the last segment
    start: int


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
        self.ends_of = {*self.positions}
        self.found = self._openings()

    def _openings(self) -> dict[int, Opening]:
        """What is known of the segments that begin at a position."""
        self.lows: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, at in self.saved.items():
            if number in self.dear:
                memory = self.memories[number]
                self.lows[at].append((memory.maker, memory.cost))
        found = {start: Opening(self, start) for start in self.positions[:-1]}
        for number, uses in self._uses().items():
            memory, end, above = self.memories[number], self.last + 1, self.last
            for at, until in uses:  # from the last one
                if until < end:
                    self._cross(found, number, at + 1, above, end)
                    end, above = until, at
            self._cross(found, number, memory.maker + 1, above, end)
        for opening in found.values():
            opening.across.sort()
        return found

    def _uses(self) -> dict[int, list[tuple[int, int]]]:
        """Find which windows run which steps. Returns, by memory, where it is read, the last first,
        and up to where a window has to go to read it there."""
        model, dear, never = self.model, self.dear, self.last + 1
        self.done: dict[int, list[int]] = defaultdict(list)  # steps that windows up to here run
        uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
        soonest: dict[int, int] = {}
        for index in range(self.last - 1, self.first - 1, -1):
            for number in self.wanted.get(index, _NONE):
                soonest[number] = index + 1
                uses[number].append((index, index + 1))
            end = min([soonest.get(number, never) for number in model.made[index]], default=never)
            if end == never:
                continue
            self.done[end].append(index)
            for number in dear.intersection(model.reads[index]):
                uses[number].append((index, end))
                soonest[number] = min(end, soonest.get(number, never))
        return {number: uses[number] for number in sorted(dear & uses.keys())}

    def _cross(
        self, found: dict[int, Opening], number: int, first: int, last: int, end: int
    ) -> None:
        """From the positions between these on, windows that go to `end` read a memory."""
        if end <= self.last:
            begin, behind = bisect_left(self.positions, first), bisect_right(self.positions, last)
            for at in self.positions[begin:behind]:
                if at in found:
                    found[at].across.append((end, number))

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

    def least_peak(self, budget: int | None) -> tuple[int, tuple[int, ...]]:
        """The least peak that cuts can have, and those cuts."""
        low, high = 0, max(1024, *self.model.backward, *self.live)
        while not (best := self.cuts(high, budget, 1)):
            low, high = high, 2 * high
        while high - low > max(64, high // 256):
            middle = (low + high) // 2
            cuts = self.cuts(middle, budget, 1)
            if cuts:
                high, best = middle, cuts
            else:
                low = middle
        return high, best[0]

    def cuts(self, peak: int, budget: int | None = None, most: int = 8) -> list[tuple[int, ...]]:
        """Cuts under which no segment needs more than `peak`: those under which the least is held,
        and others, under which less runs again."""
        best: dict[int, list[Label]] = defaultdict(list)
        best[self.first] = [Label(0, 0.0, frozenset(), None, 0)]
        limit = peak if budget is None else min(peak, budget)
        for start in self.positions[:-1]:
            labels = best[start]
            if not labels:
                continue
            for segment in self.found[start].segments(peak):
                there, room = best[segment.end], min(limit, peak - segment.need)
                for label in labels:
                    new = [n for n in segment.across if n not in label.kept]
                    held, work = label.held + self.cost(new), label.work + segment.work
                    # One that autograd saves anyway comes first.
                    held += len([n for n in new if n not in self.saved])
                    if held > room or any(
                        other.held <= held and (most == 1 or other.work <= work) for other in there
                    ):
                        continue
                    kept = label.kept.union(new) if new else label.kept
                    dead = self.cost([n for n in kept if self.memories[n].dies <= segment.worst])
                    if self.live[segment.worst] + dead > peak:
                        continue
                    there = [
                        other
                        for other in there
                        if other.held < held or (most > 1 and other.work < work)
                    ]
                    there.append(Label(held, work, kept, label, start))
                    there.sort()
                    if len(there) > most:  # leave out the one that is most like its neighbours
                        near = min(
                            range(1, most), key=lambda n: there[n + 1].held - there[n - 1].held
                        )
                        del there[near]
                    best[segment.end] = there
        found = []
        for label in best[self.last]:
            cuts = []
            while label.before is not None:
                cuts.append(label.start)
                label = label.before
            found.append(tuple(reversed(cuts))[1:])
        return found

    def by_hand(self, least: int, cuts: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """What users place by hand, and its peak: a checkpoint around each block that repeats,
        unless the blocks are so small that nobody would do that; elsewhere, the cuts of the least
        peak."""
        peak, most = least, least + int(least * _MOST_SLACK)
        runs: list[range] = []
        for blocks in self.blocks():
            new = [*runs, blocks]
            others = [at for at in cuts if not any(run[0] <= at <= run[-1] for run in new)]
            placed = {*others, *[at for run in new for at in run if self.first < at < self.last]}
            found = Filling(self, sorted(placed)).choice().peak
            if found <= most:
                margin = min(int(found * _MARGIN), 2 * max(self.crossing[at] for at in blocks))
                peak, runs, cuts = max(least, found - margin), new, tuple(sorted(placed))
        return peak, cuts

    def blocks(self) -> list[range]:
        """The steps at which the blocks begin that the program repeats, and at which the last one
        ends, by run of repeats."""
        # By step: a number for the operators from it on, of which there are `length`.
        ranks = [id(step.func) for step in self.model.path.steps]
        length, runs = 1, []
        while length < len(ranks):
            numbers: dict[tuple[int, int], int] = {}
            pairs = zip(ranks, ranks[length:], strict=False)
            ranks = [numbers.setdefault(pair, len(numbers)) for pair in pairs]
            length *= 2
            runs += self._runs(ranks, length)
            if len(numbers) == len(ranks):
                break
        found: list[range] = []
        taken: list[tuple[int, int, int]] = []
        for begin, end, period in sorted(runs, key=lambda run: run[0] - run[1] + 2 * run[2]):
            for first, last, _ in taken:
                if begin < first:
                    end = min(end, first + period - 1)
                elif end > last:
                    begin = max(begin, last - period + 1)
                else:
                    end = begin
            least = max([p for *_, p in taken], default=0)  # shorter ones are parts of a block
            if end - begin >= max(3 * period, least):
                taken.append((begin, end, period))
                # What comes before the first block may look like the end of one.
                starts = range(begin, min(begin + period, end - period))
                first = min(starts, key=lambda at: self.crossing[at + period])
                found.append(range(first, end + 1, period))
        return found

    def _runs(self, ranks: Sequence[int], length: int) -> list[tuple[int, int, int]]:
        """Where operators repeat: begin, end, period."""
        last: dict[int, int] = {}
        far = [0] * len(ranks)  # how far the same operators come again
        for at in range(len(ranks) - 1, -1, -1):
            far[at] = last.get(ranks[at], at) - at
            last[ranks[at]] = at
        begin, runs = 0, []
        for at in range(1, len(far) + 1):
            if at == len(far) or far[at] != far[begin]:
                period = far[begin]
                if period and at - begin + length - 1 >= period and period >= length // 2:
                    runs.append((begin, at + length - 1 + period, period))
                begin = at
        return runs


class Opening:
    """The segments that begin at a position."""

    def __init__(self, stretch: Stretch, start: int) -> None:
        self.stretch, self.start = stretch, start
        self.across: list[tuple[int, int]] = []  # from which end on what crosses it is read
        self._found: list[Segment] = []
        self._at = self._worst = start
        self._held = self._need = 0
        self._work = 0.0
        self._seen: set[int] = set()

    def segments(self, most: int) -> list[Segment]:
        """All that need no more than this, and perhaps others."""
        stretch = self.stretch
        while self._need <= most and self._at < stretch.last:
            self._go_on()
            if self._at in stretch.ends_of:
                last = bisect_left(self.across, (self._at + 1, -1))
                numbers = tuple([number for _, number in self.across[:last]])
                self._found.append(Segment(self._at, numbers, self._need, self._work, self._worst))
        return self._found

    def _go_on(self) -> None:
        """Take one step more into the segment."""
        stretch, start, at = self.stretch, self.start, self._at
        for maker, cost in stretch.lows.get(at, ()):
            if maker >= start:
                self._held += cost
        if at in stretch.wanted:  # what each window makes
            for number in stretch.wanted[at] - stretch.dear - self._seen:
                self._seen.add(number)
                self._held += stretch.memories[number].cost
        self._need = max(self._need, stretch.model.backward[at] + self._held)
        if stretch.live[at] > stretch.live[self._worst]:
            self._worst = at
        self._at = at = at + 1
        for index in stretch.done.get(at, ()):
            if index >= start:
                self._work += stretch.model.work[index]


class Walk:
    """Goes down through a segment: what its window runs, and what its backward needs.

    Invariant: after `down_to(position)`, `need` is what the backward of the steps from `position`
    to `end` needs at once, beside what is kept before them, and `again` are those that run again.
    """

    def __init__(self, stretch: Stretch, end: int, kept: Set[int] = frozenset()) -> None:
        self.stretch, self.kept = stretch, kept
        self.index = self.end = end
        self.again: list[int] = []  # steps that run again
        self.need = 0
        self._reading: set[int] = set()  # memories that they read, whose makers are still to come
        self.held: set[int] = set()  # memories that are delivered, or kept for its windows

    def down_to(self, position: int) -> None:
        model, need = self.stretch.model, self.need
        for index in range(self.index - 1, position - 1, -1):
            there = spike = self._deliver(index) if index in self.stretch.wanted else 0
            made = model.made[index]
            gone = more = 0
            if made:
                gone, more = self._unmake(index, made)
            if self._reading.isdisjoint(made):  # they have a window of their own
                there = 0
            else:
                self._run_again(index, made)
            need = max(need + gone + there, model.backward[index] + spike) + more
        self.index, self.need = position, need

    def _deliver(self, index: int) -> int:
        """Backward wants what was saved here. Returns the bytes that each window makes anew."""
        stretch, there = self.stretch, 0
        for number in stretch.wanted[index]:
            if number in self.kept or number in stretch.dear:
                self.held.add(number)
            if number in self.kept:
                continue
            if not (number in stretch.dear or number in self._reading):
                there += stretch.memories[number].cost
            self._reading.add(number)
        return there

    def _unmake(self, index: int, made: Iterable[int]) -> tuple[int, int]:
        """The bytes that are there from here on, and those that have gone when backward comes to
        this step."""
        gone = there = 0
        for number in self.held.intersection(made):
            memory = self.stretch.memories[number]
            if memory.maker != index:
                continue
            if self.stretch.saved.get(number, index) > index:
                gone += memory.cost
            else:
                there += memory.cost
        return gone, there

    def _run_again(self, index: int, made: Iterable[int]) -> None:
        stretch = self.stretch
        self.again.append(index)
        for number in made:
            if stretch.memories[number].maker == index:
                self._reading.discard(number)
        kept = self.kept - stretch.model.early.get(index, _NONE)
        reads = stretch.dear.intersection(stretch.model.reads[index])
        self._reading |= reads - kept
        self.held |= reads & kept

    @property
    def across(self) -> frozenset[int]:
        """What crosses a cut here."""
        return frozenset(self._reading & self.stretch.dear)


class Choice(NamedTuple):
    """What a plan keeps."""

    kept: tuple[int, ...] = ()  # memories
    cuts: tuple[int, ...] = ()  # the first step of each segment but the first
    peak: int = 0
    parts: Sequence[tuple[int, int]] = ()  # by segment: what is held before it, and its peak
    forward: int = 0  # the peak of the forward
    target: int = 0  # the peak that it was made for
    nbytes: int = 0  # of what is kept
    exceeds: bool = False  # whether that is more than the budget
    again: Set[int] = frozenset()  # the steps that run again


def choose(stretch: Stretch, target: int = 0, peak: int | None = None) -> Choice:
    """What to keep of a stretch, under a peak. `target` is the peak of a plan for a path much like
    it, which may not come again."""
    if peak is None and stretch.cost(stretch.saved) < _LITTLE:
        return Filling(stretch, ()).choice()
    if target:
        return _rough(stretch, target)
    least, cuts = stretch.least_peak(None)
    if peak is None:
        target, cuts = stretch.by_hand(least, cuts)
    else:
        target = max(least, peak)
    best = _filled(stretch, cuts, target)
    best.join(target if peak is None else 0)
    return best.choice()._replace(target=target)


def choose_within(stretch: Stretch, budget: int) -> Choice:
    """What to keep of a stretch, in a budget: under the largest of a few peaks for which it is
    enough, so that a smaller budget never means a larger peak."""
    least, cuts = stretch.least_peak(None)
    best = _filled(stretch, cuts, least)
    low, high = 0, _MOST_PEAKS
    most = Filling(stretch, ()).choice().peak
    while stretch.cost(best.kept) <= budget and high - low > 0:
        middle = (low + high + 1) // 2
        peak = int(least * max(1, most / least) ** (middle / _MOST_PEAKS))
        tried = _filled(stretch, cuts, peak)
        if stretch.cost(tried.kept) <= budget:
            low, best = middle, tried
        else:
            high = middle - 1
    best.join()
    choice = best.choice()
    return choice._replace(exceeds=choice.nbytes > budget)


def choose_first(stretch: Stretch, budget: int) -> Choice:
    """What to keep in a budget that is too small for the least peak: windows of what lies between
    make that in pieces."""
    least, cuts = stretch.least_peak(budget)
    most = least if stretch.is_all else least + int(least * _SLACK_OF_PARTS)
    return _filled(stretch, cuts, most, budget).choice()


def _rough(stretch: Stretch, target: int) -> Choice:
    """Few windows, and nothing kept beside the cuts."""
    while not (found := stretch.cuts(target, None, 1)):
        target += target // 4
    rough = Filling(stretch, found[0])
    rough.join(target)
    return rough.choice()._replace(target=target)


def _filled(
    stretch: Stretch, cuts: tuple[int, ...], peak: int, budget: int | None = None
) -> Filling:
    """The least recompute under a peak, of a few ways to cut."""
    ways = stretch.cuts(peak, budget)
    few = {0, len(ways) // 2, len(ways) - 1} if ways else ()
    starts = [ways[n] for n in sorted(few)]
    if budget is None or not starts:
        starts.append(cuts)
    found = [Filling(stretch, each, peak, budget) for each in starts]

    def cost(filling: Filling) -> tuple[float, float, float, int]:
        work = sum([stretch.model.work[index] for index in filling.again])
        most = max(filling.peaks)
        return max(peak, most), filling.flops(stretch.last), work, most

    return min(found, key=cost)


class Room(NamedTuple):
    """How the peaks change with the results of one more step kept."""

    here: int  # the segment of the step
    peaks: list[int]  # of backward, from there on
    after: int  # the segment in which they would have died; past the last one if in none
    split: int  # the step in it
    nbytes: int  # by which the forward needs more from there on


class Filling:
    """Keeps what saves most recompute per byte, as long as there is room: under a peak, or in a
    budget."""

    def __init__(
        self,
        stretch: Stretch,
        cuts: Iterable[int],
        peak: int = 0,
        budget: int | None = None,
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
        held = [self.held[at] for at in self.ends[:-1]]
        return Choice(
            tuple(sorted(self.kept)),
            tuple(self.ends[1:-1]),
            max(self.peaks + self.forward),
            parts=[*zip(held, self.peaks, strict=True)],
            forward=max(self.forward),
            nbytes=self.stretch.cost(self.kept),
            again=self.again,
        )

    def flops(self, end: int) -> float:
        """Floating-point operations that are done again up to here."""
        return sum(self.model.path.steps[index].flops for index in self.again if index < end)

    def _look(self) -> list[tuple[int, frozenset[int]]]:
        """Find what runs again and the peaks. Returns what crosses where a cut is possible, and is
        not kept."""
        model, positions = self.model, sorted({*self.stretch.positions, *self.ends})
        crosses = []
        self.again: set[int] = set()  # steps that run again
        self.peaks: list[int] = []  # of backward, by segment
        self.forward: list[int] = []
        # By memory: those of the steps that read it. Autograd reads what it has saved.
        self.readers = {number: {_AUTOGRAD} for number in self.stretch.saved}
        kept = [self.memories[number] for number in self.kept]
        self.first: dict[int, int] = {}  # by memory: the first segment whose windows need it
        dead = model.sums((memory.dies, model.count, memory.cost) for memory in kept)
        forward = [*map(add, self.stretch.live, dead)]
        self._extra = [0] * len(self.ends)  # by segment: to add to these
        self._suffix: list[list[int]] = []  # by segment and step: most of the forward from there on
        for start, end in pairwise(self.ends):
            walk = Walk(self.stretch, end, self.kept)
            for at in positions[bisect_right(positions, end - 2) - 1 :: -1] if end > 1 else ():
                if at <= start:
                    break
                walk.down_to(at)
                crosses.append((at, walk.across))
            walk.down_to(start)
            crosses.append((start, walk.across))
            self.again.update(walk.again)
            self.first.update(dict.fromkeys(walk.held & self.kept - self.first.keys(), start))
            self.peaks.append(walk.need)
            here = forward[start:end]
            self.forward.append(max(here))
            self._suffix.append([*accumulate(reversed(here), max)][::-1])
        # Backward holds what is kept down to the first segment that needs it.
        spans = [(max(m.maker + 1, self.first.get(m.number, model.count)), m.cost) for m in kept]
        self.held = model.sums((first, model.count, cost) for first, cost in spans)
        self.peaks = [
            self.held[start] + need for start, need in zip(self.ends, self.peaks, strict=False)
        ]
        for index in self.again:
            for number in model.reads[index]:
                self.readers.setdefault(number, set()).add(index)
        self.wanted = self.stretch.dear & self.readers.keys() | self.stretch.saved.keys()
        return crosses

    def _peak(self, walk: Walk) -> int:
        """That of backward, while it works on the segment that a walk has come through."""
        there = [number for number, first in self.first.items() if first < walk.end]
        before = [number for number in there if self.memories[number].maker < walk.index]
        return self.stretch.cost(before) + walk.need

    def join(self, peak: int = 0) -> None:
        """Drop cuts that make no difference to the peak, because each window takes time."""
        most, ends = max(peak, *self.peaks) * _SURE, [self.ends[-1]]
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
            made = self._results(order * place)
            room = self._room_for(order * place, made) if made else None
            if room is None:
                continue
            worth = self._worth(order * place)
            if queue and -worth > queue[0][0]:  # it was worth more before others were kept
                heapq.heappush(queue, (-worth, place))
            elif worth > 0:
                self._take(made, room)

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

    def _room_for(self, index: int, made: set[int]) -> Room | None:
        """The peaks with the results of a step kept, if there is room."""
        stretch = self.stretch
        nbytes, new = stretch.cost(made), stretch.cost(made - stretch.saved.keys())
        if self.budget is not None and stretch.cost(self.kept) + nbytes > self.budget:
            return None
        here = bisect_right(self.ends, index) - 1
        reads = set().union(*[self.readers[number] for number in made]) - {_AUTOGRAD}
        reads.update([stretch.saved[number] for number in made & stretch.saved.keys()])
        first = bisect_right(self.ends, min(reads)) - 1
        peaks = self.peaks[here:first] + [peak + nbytes for peak in self.peaks[max(here, first) :]]
        if first <= here:
            peaks[0] = self.peaks[here] + new
        if self.budget is None and max(peaks) > self.peak:
            return None
        dies = min(self.memories[number].dies for number in made)
        if dies >= stretch.last:
            return Room(here, peaks, len(self.ends), 0, 0)
        after = bisect_right(self.ends, dies) - 1
        split = dies - self.ends[after]
        old, extra = self._suffix[after], self._extra[after]
        most = max(old[split] + extra, *self.forward[after + 1 :], 0) + nbytes
        if self.budget is None and most > self.peak:
            return None
        return Room(here, peaks, after, split, nbytes)

    def _take(self, made: set[int], room: Room) -> None:
        here, peaks, after, split, nbytes = room
        self.kept.update(made)
        self.peaks[here:] = peaks
        if after < len(self.forward):
            suffix = self._suffix[after]
            suffix[split:] = [peak + nbytes for peak in suffix[split:]]
            for at in range(split - 1, -1, -1):
                if suffix[at] >= suffix[split]:
                    break
                suffix[at] = suffix[split]
            self.forward[after] = suffix[0] + self._extra[after]
            for later in range(after + 1, len(self.forward)):
                self.forward[later] += nbytes
                self._extra[later] += nbytes


_NONE: frozenset[int] = frozenset()
_AUTOGRAD = -1  # no step, but a reader
_PER_BYTE = 10  # floating-point operations in the time in which a byte is written
_SMALL = 512  # bytes: a block of CUDA's allocator
_LITTLE = 8 * 1024  # bytes that autograd saves: too few to be worth the time of a second window
_MOST_CANDIDATES = 64
_MOST_ROUNDS = 4
_MOST_PEAKS = 16  # that are tried for a budget
_MOST_HALVES = 6  # of what the least peak needs: smaller budgets have no room for a checkpoint
_MARGIN = 1 / 48  # of the peak of cuts by hand: the model is not exact
_SURE = 0.9  # of the peak: segments that need less may be joined, though the model is not exact
_MOST_SLACK = 1 / 3  # what may be spent on less recompute: a part of the least peak
# The same, within a window: what it keeps first is made by a replay, which should be short.
_SLACK_OF_PARTS = 1 / 8
_MOST_NEW_PATHS = 3  # in a row; those that come after them may not come again
_FAR = 64  # steps, when the worth of one is found


class Plan:
    """How to bring back what was saved on one path."""

    whole: Group | None = None  # all slots, where nothing that `auto()` chose has been held
    peak = 0  # simulated
    target = 0  # the peak that it was made for
    exceeds = False  # whether it keeps more than its budget, which has no room for a checkpoint
    size = 0  # bytes that autograd saves, as the plan assumes
    first_size = 0  # those of the run whose bytes the steps have
    waiting: Sequence[int] = ()  # cells of parameters that it assumes to have no gradient
    kept: frozenset[Value] = frozenset()  # what a run should hold
    complaint = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = [Group(path, slots) for slots in grouped(path)]

    def suits(self, run: Run) -> bool:
        """Whether a run has the room that the plan assumes. A plan is not exchanged for one with
        more room: runs of several sizes, and runs that accumulate gradients, would plan anew at
        every change."""
        if run.store.placement is None:
            return True
        has_gradient = any(map(_has_gradient, map(run.store.parameter, self.waiting)))
        return run.store.saved_bytes <= MOST_GROWTH * self.size and not has_gradient

    def drops(self, value: Value, step: Step) -> bool:
        """Whether the plan passes this step, and does not keep this value there."""
        if value in self.kept:
            return False
        steps = self.path.steps
        return step.index < len(steps) and steps[step.index] is step

    def groups_for(self, run: Run) -> list[Group]:
        """What to give a run's holders: by what it holds."""
        if self.whole is None or run.store.held.keys() >= self.kept:
            return self.groups
        if run.store.is_checked:  # whatever is computed is to be compared
            return Plan(self.whole.path).groups
        return [self.whole]


def _has_gradient(parameter: Any) -> bool:
    return parameter is not None and parameter.grad is not None


def plan_of(run: Run, old: Plan | None = None) -> Plan:
    """The plan for what the run has done, or for `old` where that had less room."""
    path, store = run.so_far(), run.store
    if store.placement is None or not path.slots:
        return Plan(path)
    size = first_size = store.saved_bytes
    waiting: Sequence[int] = path.trained
    if old is not None:
        size, first_size, waiting = max(size, old.size), old.first_size, old.waiting
    waiting = [cell for cell in waiting if not _has_gradient(store.parameter(cell))]
    if run.sees_gathering and path.cuts:  # no window may cross where FSDP2 gives parameters back
        plan, choice = Plan(path), Choice()
    else:
        target = _target(run, size) if old is None else 0
        plan, choice = _planned(Model(path, run, waiting, size / max(1, first_size)), run, target)
    plan.size, plan.first_size, plan.waiting = size, first_size, waiting
    plan.peak, plan.target = choice.peak + store.kept_bytes, choice.target
    plan.complaint = _complaint(run, choice)
    return plan


def _target(run: Run, size: int) -> int:
    """For a path that may not come again, the peak of the last plan; else 0."""
    program, placement = run.program, run.store.placement
    program.new_paths += 1
    last = program.expected
    asks = placement is not None and (placement.budget, placement.peak) != (None, None)
    if asks or last is None or program.new_paths <= _MOST_NEW_PATHS:
        return 0
    return int(last.target * max(1, size / max(1, last.size)))


def _planned(model: Model, run: Run, target: int) -> tuple[Plan, Choice]:
    """The plan for a run, and what it keeps."""
    store = run.store
    assert store.placement is not None
    path, (budget, _, peak) = model.path, store.placement
    by_user = frozenset([path.memory_of[cell] for cell, _ in path.kept])
    stretch = Stretch(model, range(len(path.slots)), by_user)
    if not stretch.saved:
        return Plan(path), Choice(peak=max(stretch.live, default=0))
    if budget is None:
        rest = None if peak is None else max(0, peak - store.kept_bytes)
        choice = choose(stretch, target, rest)
        return _laid_over(model, choice), choice
    rest = max(0, budget - store.kept_bytes)
    choice = choose_within(stretch, rest)
    for tried in _budgets(rest, choice.nbytes):
        first = choose_first(stretch, tried)
        plan = _laid_over(model, first)
        held = by_user.union(first.kept)
        backward = _split_all(plan.groups, model, held, max(tried, 1), first, first.forward)
        peak = max(first.forward, backward)
        if peak <= choice.peak * (1 if tried <= rest else _SURE):
            plan.exceeds = tried > rest
            return plan, first._replace(peak=peak, nbytes=tried, exceeds=plan.exceeds)
    return _laid_over(model, choice), choice


def _budgets(budget: int, enough: int) -> list[int]:
    """What to try for a budget that is too small for the least peak: it, smaller ones, under which
    the peak may be less, and at last larger ones, which may have room for the first checkpoint."""
    if budget >= enough:
        return []
    sizes = [enough >> n for n in range(_MOST_HALVES, 0, -1)]
    smaller = [size for size in reversed(sizes) if size < budget]
    return [budget, *smaller, *[size for size in sizes if size > budget]]


def _laid_over(model: Model, choice: Choice) -> Plan:
    """The plan that keeps this."""
    if not choice.kept and not choice.cuts:
        return Plan(model.path)
    values = model.values(choice.kept)
    plan = Plan(model.path.placed(values, choice.cuts))
    plan.kept, plan.exceeds = frozenset(values), choice.exceeds
    if values:
        plan.whole = Group(model.path, [*range(len(model.path.slots))])
        plan.whole.parts = plan.groups
    return plan


def _split_all(
    groups: Sequence[Group],
    model: Model,
    held: frozenset[int],
    budget: int,
    choice: Choice,
    peak: int,
) -> int:
    """Split what needs more than `peak`. Returns the peak of backward."""
    ends = [0, *choice.cuts, model.count]
    found = [max(model.backward[start:end], default=0) for start, end in pairwise(ends)]
    for group in groups:
        at = [model.saves[slot][0] for slot in group.slots if slot in model.saves]
        part = bisect_right(choice.cuts, max(at, default=0))
        before, most = choice.parts[part]
        need = most - before
        if most > peak:
            need = min(need, _split(group, model, held, budget, peak - before))
        found[part] = max(found[part], need)
    return max([before + need for (before, _), need in zip(choice.parts, found, strict=True)])


def _split(group: Group, model: Model, held: frozenset[int], budget: int, peak: int) -> int:
    """Where a window would deliver more than the budget, a first replay makes what smaller windows
    start from. Returns what backward needs then."""
    order, _ = group.path.slice_of([group.path.slots[slot].value for slot in group.slots])
    if not order:
        return 0
    stretch = Stretch(model, group.slots, held, order)
    need = Filling(stretch, ()).choice().peak
    if stretch.cost(stretch.dear & stretch.saved.keys()) <= budget:
        return need
    choice = choose_first(stretch, budget)
    if not choice.kept:
        return need
    group.split(model.values(choice.kept), choice.cuts)
    if max(len(part.slots) for part in group.parts) == len(group.slots):
        group.parts = []
        return need
    return _split_all(group.parts, model, held.union(choice.kept), budget, choice, peak)


def _complaint(run: Run, choice: Choice) -> str:
    """What to say of a budget, or of a peak, that is too small."""
    assert run.store.placement is not None
    (budget, _, peak), least = run.store.placement, run.store.kept_bytes
    if peak is not None and choice.peak + least > peak:
        why = "this block needs more in any plan. The least peak possible"
        return f"auto(peak={peak}): {why} is {choice.peak + least} bytes."
    if budget is None:
        return ""
    if least > budget:
        why = "`keep`, other policies, or FSDP2 keep more than that in this block"
    elif choice.exceeds:
        why = "no room for checkpoints that lower the peak, so more is kept"
        least += choice.nbytes
    else:
        return ""
    return f"auto(budget={budget}): {why}. A budget of {least} bytes is enough."


def attach(plan: Plan, old: Plan | None) -> None:
    """From here on runs hold what the plan keeps, as soon as it is there."""
    path, gone = plan.path, plan.kept if old is None else plan.kept | old.kept
    for step in path.steps:
        if step.keeps:
            step.keeps = tuple([each for each in step.keeps if each[0].value not in gone])
    counted: set[int] = set()
    for value in sorted(plan.kept):
        memory = path.memory_of[value[0]]
        counts = memory not in counted and not plan.exceeds
        path.steps[path.there_after(value)].keeps += ((Hold(value, memory, None), counts),)
        counted.add(memory)
