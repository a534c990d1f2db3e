"""What a block keeps for backward, computed from what it did last time.

Backward opens the segments of a block from the last one to the first. When it opens one, everything kept for that
segment and for those before it is held, the window of the segment delivers what autograd saved there, and gradients
need room to work; what was kept for later segments is gone, and the gradients of parameters used there exist. A plan
chooses cuts and values to keep such that the largest of these sums, the simulated peak, is least. Then it keeps what
saves most recompute per byte, as far as the peak allows. So the last segment, where backward begins, is kept as it is,
and gradients that do not exist yet are room.

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
from itertools import pairwise
from typing import Any, NamedTuple

from ._program import NOT_WRITTEN, Step, Value
from ._record import KEEP, UNSEEN, Run
from ._windows import Group, Path


class Choice(NamedTuple):
    """What a plan keeps."""

    values: tuple[Value, ...]
    cuts: tuple[int, ...]  # the first step of each segment but the first
    nbytes: int
    peak: int
    least: int | None  # the smallest budget with room for a cut
    recomputes: bool = False  # whether anything is computed again


class Model:
    """The memories of a path: who makes, reads and writes them, and what they cost."""

    def __init__(
        self,
        path: Path,
        alive: Iterable[int],
        parameters: Mapping[int, int],
        missing: Mapping[int, int],
        scale: float = 1.0,
    ) -> None:
        self.path = path
        self._scale = scale  # how much larger the run is than the one that was recorded
        self._parameters = parameters  # bytes, by memory
        self._missing = missing  # the same, of those whose gradients do not exist yet
        self.alive = frozenset(alive)
        steps = path.steps
        self.count = len(steps)
        self.made: list[list[int]] = [[] for _ in steps]  # memories, by step; those that it writes, too
        self.reads: list[list[int]] = [[] for _ in steps]
        self.work = [0.0] * len(steps)  # of each step, in floating-point operations
        self.weights = [0] * len(steps)  # bytes of the parameters that a step reads
        self.nbytes: dict[int, int] = {}
        self.maker: dict[int, int] = {}
        self.final: dict[int, int] = {}  # by memory: the first position at which it is what it will be
        self.last_read: dict[int, int] = {}
        self.values: dict[int, set[Value]] = defaultdict(set)  # by memory: what is read there
        self._cheap: dict[int, int] = {}  # by memory: bytes written to make it from inputs
        last_use: dict[int, int] = {}  # by parameter without a gradient
        for step in steps:
            self._add(step, last_use)
        self.new_gradients = [0] * (self.count + 1)  # bytes that exist when backward has come down to a position
        for memory, index in last_use.items():
            self.new_gradients[index] += self._missing[memory]
        for index in range(self.count - 1, -1, -1):
            self.new_gradients[index] += self.new_gradients[index + 1]
        self.saves = [self._place_of(number) for number in range(len(path.slots))]
        for slot, (position, memory) in zip(path.slots, self.saves, strict=True):
            if memory in self.maker:
                self.values[memory].add(slot.value)
                self.last_read[memory] = max(self.last_read[memory], position)
        self.crossing = self._crossing()
        self.held_elsewhere = {m for m in self.alive if m in self.maker and m not in self._cheap}
        self.forward, self.backward = self._needed()

    def _add(self, step: Step, last_use: dict[int, int]) -> None:
        """Learn what a step does to memory."""
        index, memory_of = step.index, self.path.memory_of
        if step.event is UNSEEN:
            self.final = dict.fromkeys(self.final, self.count + 1)
        for cell, version in step.reads:
            memory = memory_of[cell]
            if memory in self._missing:
                last_use[memory] = index
            if memory in self.maker and cell not in self.path.given:
                self.values[memory].add((cell, version))
        if step.effect or step.is_view or step.event is KEEP:
            self.final.update((memory, self.count + 1) for memory in step.writes if memory in self.maker)
            return
        cells = {cell for cell, _ in step.reads if cell not in self.path.given}
        self.reads[index] = reads = sorted({memory_of[cell] for cell in cells} & self.maker.keys())
        for memory in reads:
            self.last_read[memory] = index
        for memory, nbytes in step.sizes:
            self.maker[memory] = self.last_read[memory] = index
            self.nbytes[memory] = int(nbytes * self._scale)
            self.final[memory] = index + 1 if step.event is None else self.count + 1
            self.made[index].append(memory)
        for memory in step.writes:
            if memory in self.maker:
                self.final[memory] = max(self.final[memory], index + 1)
                self.made[index] += [memory] * (memory not in self.made[index])
        written = sum(self.nbytes[memory] for memory in self.made[index])
        self.work[index] = step.flops * self._scale + _PER_BYTE * written
        from_outside = {memory_of[cell] for cell in cells} - self.maker.keys()
        self.weights[index] = sum(self._parameters.get(memory, 0) for memory in from_outside)
        self._note_cheap(step, written)

    def _note_cheap(self, step: Step, written: int) -> None:
        """Whether what a step makes is quickly made from inputs."""
        reads, made = self.reads[step.index], self.made[step.index]
        is_cheap = not step.draws and all(memory in self._cheap for memory in reads)
        cost = written + sum(self._cheap.get(memory, 0) for memory in reads)
        is_cheap &= cost <= _CHEAP * written and step.flops <= _PER_BYTE * written
        for memory in made:
            if is_cheap:
                self._cheap[memory] = cost
            else:
                self._cheap.pop(memory, None)

    def _place_of(self, number: int) -> tuple[int, int]:
        """Where backward wants a slot: the position of the step that saves it, and the memory."""
        slot, after = self.path.slots[number], self.path.saved_after[number]
        memory = self.path.memory_of[slot.cell]
        is_made = memory in self.maker and slot.cell not in self.path.given
        is_input = is_made and max(self.path.makers(slot.value)) < after
        return min(max(after, 0) + is_input, self.count - 1), memory

    def _crossing(self) -> list[int]:
        """By position: bytes made before it and read from there on; about those of gradients at that time."""
        change = [0] * (self.count + 2)
        for memory, index in self.maker.items():
            if memory not in self._cheap:
                change[index + 1] += self.nbytes[memory]
                change[self.last_read[memory] + 1] -= self.nbytes[memory]
        found, total = [], 0
        for each in change[: self.count + 1]:
            total += each
            found.append(total)
        return found

    def is_cheap(self, memory: int) -> bool:
        return memory in self._cheap

    def cost(self, memory: int) -> int:
        """Bytes that it costs to hold a memory."""
        return 0 if memory in self.held_elsewhere else self.nbytes[memory]

    def _needed(self) -> tuple[list[int], list[int]]:
        """By step: bytes that its forward works with, and its backward, beside what is kept or was saved."""
        forward, backward, elsewhere = [], [], 0
        for index, memories in enumerate(self.made):
            made = set(memories)
            arguments = sum(self.nbytes[m] for m in self.reads[index] if self.last_read[m] <= index and m not in made)
            elsewhere += sum(self.nbytes[m] for m in made if m in self.held_elsewhere and self.maker[m] == index)
            forward.append(int(self.path.steps[index].live * self._scale) - elsewhere)
            backward.append(self.crossing[index + 1] + arguments + self.weights[index])
        return forward, backward


class Segment(NamedTuple):
    """What lies between two cuts."""

    across: frozenset[int]  # memories that its window reads from before
    backward: int  # bytes that it needs at once, beside what is kept
    forward: int


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
        self.first, self.last = ends or (0, model.count)
        self.forward = model.forward if ends is None else [0] * model.count  # a replay is no forward
        self.wanted: dict[int, list[int]] = defaultdict(list)  # by position: memories that autograd has saved
        for number in slots:
            position, memory = model.saves[number]
            if memory in model.maker and memory not in held:
                self.wanted[min(max(position, self.first), self.last - 1)].append(memory)

    def candidates(self) -> list[int]:
        """Positions that little crosses."""
        crossing, first, last = self.model.crossing, self.first, self.last
        if self.model.alive or self.held:
            crossing = self._crossing()
        minima = [
            p
            for p in range(first + 1, last)
            if crossing[p] <= crossing[p - 1] and crossing[p] <= crossing[p + 1] and self.model.made[p - 1]
        ]
        if len(minima) > _MOST_CANDIDATES:
            size = (last - first) / _MOST_CANDIDATES
            best: dict[int, int] = {}
            for p in minima:
                part = int((p - first) / size)
                if part not in best or crossing[p] < crossing[best[part]]:
                    best[part] = p
            minima = [*best.values()]
        return [first, *minima, last]

    def _crossing(self) -> list[int]:
        model = self.model
        change = [0] * (model.count + 2)
        for memory, index in model.maker.items():
            if not model.is_cheap(memory) and memory not in self.held:
                change[index + 1] += model.cost(memory)
                change[model.last_read[memory] + 1] -= model.cost(memory)
        found, total = [], 0
        for each in change[: model.count + 1]:
            total += each
            found.append(total)
        return found

    def walk(self, end: int, starts: set[int]) -> dict[int, Segment]:
        """Segments that end here, by where they start."""
        model = self.model
        reading: set[int] = set()  # memories whose makers are still to come
        saved: set[int] = set()
        found: dict[int, Segment] = {}
        need = forward = 0
        for index in range(end - 1, self.first - 1, -1):
            more = 0
            for memory in self.wanted.get(index, ()):
                if memory not in saved:
                    saved.add(memory)
                    if not model.is_cheap(memory):
                        reading.add(memory)
                    else:
                        more += model.nbytes[memory]
            made = model.made[index]
            if made:
                need = max(need, model.backward[index])
            forward = max(forward, self.forward[index])
            if not reading.isdisjoint(made):
                for memory in made:
                    if model.maker[memory] == index and memory in reading:
                        reading.discard(memory)
                        more += model.cost(memory) if memory in saved else 0
                for memory in model.reads[index]:
                    is_held = memory in self.held or model.maker[memory] < self.first
                    if not is_held and not model.is_cheap(memory) and model.maker[memory] < index:
                        reading.add(memory)
            need += more
            if index in starts:
                found[index] = Segment(frozenset(reading), need, forward)
        return found

    @property
    def delivered(self) -> int:
        """Bytes that a window for all slots delivers."""
        saved = {memory for memories in self.wanted.values() for memory in memories}
        return sum(self.model.cost(memory) for memory in saved if not self.model.is_cheap(memory))

    def keepable(self, memories: Iterable[int], position: int) -> set[int]:
        """Those that are what they will be at a position."""
        return {memory for memory in memories if self.model.final[memory] <= position}

    def price(self, memory: int, position: int) -> int:
        """What it costs that a memory crosses a cut."""
        cost = self.model.cost(memory)
        return cost if self.model.final[memory] <= position else 2 * cost


class _Table(NamedTuple):
    """All segments between candidates."""

    positions: list[int]
    pairs: dict[tuple[int, int], Segment]


def _table(stretch: Stretch) -> _Table:
    positions = stretch.candidates()
    starts = set(positions)
    pairs = {}
    for end in positions[1:]:
        for start, segment in stretch.walk(end, starts).items():
            if start < end:
                pairs[start, end] = segment
    return _Table(positions, pairs)


def _cut(stretch: Stretch, table: _Table, peak: int, budget: int | None) -> list[int] | None:
    """The cuts under which no segment needs more than `peak`, and the least is held; None, if there are none."""
    positions, pairs = table
    gradients = stretch.model.new_gradients
    held: dict[int, tuple[frozenset[int], int]] = {positions[0]: (frozenset(), 0)}  # up to a position
    before: dict[int, int] = {}
    for at, end in enumerate(positions[1:], 1):
        room = peak - gradients[end]
        for start in positions[:at]:
            if start not in held:
                continue
            kept, nbytes = held[start]
            across, need, forward = pairs[start, end]
            if nbytes + need > room or nbytes + forward > peak:
                continue
            total = nbytes + sum([stretch.price(memory, start) for memory in across - kept])
            is_better = end not in held or total < held[end][1]
            fits = total + need <= room and total + forward <= peak
            if is_better and fits and (budget is None or total <= budget):
                held[end] = kept | across, total
                before[end] = start
    end = positions[-1]
    if end not in held:
        return None
    cuts = []
    while before[end] != positions[0]:
        end = before[end]
        cuts.append(end)
    return cuts[::-1]


def _least_peak(stretch: Stretch, table: _Table, budget: int | None) -> tuple[int, list[int]]:
    """The least peak that cuts can have, and those cuts."""
    first, last = table.positions[0], table.positions[-1]
    low, high = 0, max(table.pairs[first, last][1:])
    high = max(high, stretch.model.new_gradients[first])
    best = _cut(stretch, table, high, budget)
    while best is None:  # the gradients of what comes later are the peak
        low, high = high, 2 * high + 1
        best = _cut(stretch, table, high, budget)
    while high - low > max(64, high // 256):
        middle = (low + high) // 2
        cuts = _cut(stretch, table, middle, budget)
        if cuts is None:
            low = middle
        else:
            high, best = middle, cuts
    return high, best


def choose(stretch: Stretch, budget: int | None = None) -> Choice:
    """What to keep of a stretch."""
    table = _table(stretch)
    if len(table.positions) < 2 or not table.pairs:
        return Choice((), (), 0, 0, None)
    peak, cuts = _least_peak(stretch, table, budget)
    peak += peak // _SLACK
    first, last = table.positions[0], table.positions[-1]
    gradients = stretch.model.new_gradients[first]
    tries = [cuts, *(_cut(stretch, table, peak - part, budget) for part in (0, gradients // 2, gradients))]
    fillings = [
        _Fill(stretch, [first, *cuts, last], table, peak, budget)
        for cuts in dict.fromkeys(tuple(cuts) for cuts in tries if cuts is not None)
    ]
    filling = min(fillings, key=lambda filling: filling.left)
    cuts = filling.starts[1:]
    costs = [
        sum(stretch.price(memory, start) for memory in across)
        for (start, end), (across, *_) in table.pairs.items()
        if end == last and start > first
    ]
    kept = sorted(filling.kept)
    model = stretch.model
    nbytes = sum(model.cost(memory) for memory in kept)
    simulated = max(filling.peaks + filling.forward) + sum(model.nbytes[memory] for memory in model.held_elsewhere)
    return Choice(
        _values(model, kept), tuple(cuts), nbytes, simulated, min(filter(None, costs), default=None), filling.recomputes
    )


def _values(model: Model, kept: Iterable[int]) -> tuple[Value, ...]:
    """The values that stand for these memories."""
    found: list[Value] = []
    for memory in kept:
        version = model.final[memory] - 1
        if version == model.maker[memory]:
            found.append((memory, NOT_WRITTEN))
        else:
            found += sorted(value for value in model.values[memory] if value[1] == version)
    return tuple(found)


class _Fill:
    """Keeps what saves most recompute per byte, as long as there is room."""

    def __init__(self, stretch: Stretch, ends: list[int], table: _Table, peak: int, budget: int | None) -> None:
        self.stretch, self.model, self.budget = stretch, stretch.model, budget
        self.starts, self.peak = ends[:-1], peak
        self.kept: set[int] = set()
        self.peaks: list[int] = []  # of backward, by segment
        self.forward: list[int] = []
        self.nbytes = 0
        for start, end in pairwise(ends):
            across, need, forward = table.pairs[start, end]
            new = stretch.keepable(across, start) - self.kept
            self.kept |= new
            self.nbytes += sum(self.model.cost(memory) for memory in new)
            self.peaks.append(self.nbytes + need + self.model.new_gradients[end])
            self.forward.append(self.nbytes + forward)
        self.saved = {memory for position in stretch.wanted.values() for memory in position}
        self.steps: set[int] = set()  # that are run again
        self.readers: dict[int, set[int]] = {}  # by memory: of those steps
        self._find_steps(ends)
        self.fill()
        self._find_steps(ends)
        self.left = sum(self.model.work[index] for index in self.steps)

    def _find_steps(self, ends: list[int]) -> None:
        self.steps, self.readers = set(), defaultdict(set)
        for start, end in pairwise(ends):
            self._find_steps_between(start, end)

    def _find_steps_between(self, start: int, end: int) -> None:
        model, stretch = self.model, self.stretch
        reading: set[int] = set()
        for index in range(end - 1, start - 1, -1):
            wanted = {memory for memory in stretch.wanted.get(index, ()) if memory not in self.kept}
            reading |= wanted
            if reading.isdisjoint(model.made[index]):
                continue
            self.steps.add(index)
            reading -= {memory for memory in model.made[index] if model.maker[memory] == index}
            for memory in model.reads[index]:
                self.readers[memory].add(index)
                if memory not in self.kept and memory not in stretch.held and model.maker[memory] >= stretch.first:
                    reading.add(memory)

    def fill(self) -> None:
        """Take the steps whose results save most."""
        queue = []
        for index in sorted(self.steps):
            if self._results(index):
                queue.append((-self._worth(index), index))
        heapq.heapify(queue)
        while queue:
            before, index = heapq.heappop(queue)
            worth = self._worth(index)
            if worth <= 0:
                continue
            if queue and -worth > queue[0][0] and -worth > before:
                heapq.heappush(queue, (-worth, index))
            else:
                self._take(index)

    @property
    def recomputes(self) -> bool:
        """Whether anything that autograd saved is not kept."""
        return any(memory not in self.kept and not self.model.is_cheap(memory) for memory in self.saved)

    def _results(self, index: int) -> list[int]:
        """What to keep in order not to run a step again; nothing, if that is not possible."""
        model = self.model
        cheap = {m for m in model.made[index] if model.is_cheap(m)}  # kept only if autograd has saved it
        made = [m for m in model.made[index] if m in self.saved or (m in self.readers and m not in cheap)]
        made = [m for m in made if m not in self.kept and m not in self.stretch.held]
        is_final = all(model.final[memory] == index + 1 for memory in made)
        return made if is_final else []

    def _worth(self, index: int) -> float:
        """Operations saved per byte."""
        made = self._results(index)
        if not made:
            return 0.0
        model, total, gone, stack = self.model, 0.0, {index}, [index]
        while stack:
            index = stack.pop()
            total += model.work[index]
            for memory in model.reads[index]:
                maker = model.maker[memory]
                is_free = memory not in self.kept and memory not in self.stretch.held and maker in self.steps
                is_unread = memory in made or (memory not in self.saved and self.readers[memory] <= gone)
                if is_free and is_unread and maker not in gone and len(gone) < _FAR:
                    gone.add(maker)
                    stack.append(maker)
        return total / max(1, sum(model.cost(memory) for memory in made))

    def _take(self, index: int) -> None:
        model, made = self.model, self._results(index)
        segment = bisect_right(self.starts, index) - 1
        nbytes = sum(model.cost(memory) for memory in made)
        unsaved = sum(model.cost(memory) for memory in made if memory not in self.saved)
        later = max(self.forward[segment:] + self.peaks[segment + 1 :])
        if self.budget is not None:
            if self.nbytes + nbytes > self.budget:
                return
        elif max(self.peaks[segment] + unsaved, later + nbytes) > self.peak:
            return
        self.nbytes += nbytes
        self.kept.update(made)
        self.peaks[segment] += unsaved
        self.peaks[segment + 1 :] = [each + nbytes for each in self.peaks[segment + 1 :]]
        self.forward[segment:] = [each + nbytes for each in self.forward[segment:]]


_PER_BYTE = 10  # floating-point operations in the time in which a byte is written
_CHEAP = 4  # as many bytes are written at most, for each byte of a value that is made again in each window
_MOST_CANDIDATES = 64
_SLACK = 32  # which part of the least peak may be given away for less recompute
_FAR = 64  # steps, when the worth of one is found


class Plan:
    """How to bring back what was saved on one path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = [Group(path, slots) for slots in path.groups()]
        self.whole: Group | None = None  # all slots, where nothing that `auto()` chose has been held
        self.peak = 0  # simulated
        self.key: Any = None
        self.saved_bytes = 0  # of the run whose bytes the steps have
        self.kept: frozenset[Value] = frozenset()  # what a run should hold
        self.complaint = ""

    def suits(self, run: Run) -> bool:
        return run.placement is None or self.key == _key_of(run, _gradients_to_come(self.path, run)[0])

    def groups_for(self, run: Run) -> list[Group]:
        """What to give a run's holders: by what it holds."""
        if self.whole is None or run.held.keys() >= self.kept:
            return self.groups
        return [self.whole]


def _key_of(run: Run, missing: dict[int, int]) -> tuple[int, int]:
    """What a plan goes by, beside the path: bytes of gradients that do not exist yet, and how large the run is."""
    return sum(missing.values()), run.saved_bytes.bit_length()


def _gradients_to_come(path: Path, run: Run) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes of gradients that do not exist yet, by memory; and those of all parameters."""
    parameters: dict[int, int] = {}
    missing: dict[int, int] = {}
    for cell, held in run.held.items():
        if type(held) is tuple:
            memory, parameter = path.memory_of[cell], held[0]
            parameters[memory] = parameter.nbytes
            if parameter.requires_grad and parameter.grad is None:
                missing[memory] = parameter.nbytes
    return missing, parameters


def plan_of(run: Run, old: Plan | None = None) -> Plan:
    """The plan for what a run has done; `old` was for one of another size."""
    path = Path(run)
    if run.placement is None or not path.slots:
        return Plan(path)
    missing, parameters = _gradients_to_come(path, run)
    if run.sees_gathering and path.cuts:  # where parameters are given back; no window may cross that
        plan = Plan(path)
        plan.key = _key_of(run, missing)
        return plan
    saved_bytes = run.saved_bytes if old is None else old.saved_bytes
    alive = {path.memory_of[cell] for cell in run.alive} - {path.memory_of[cell] for cell in path.given}
    model = Model(path, alive, parameters, missing, run.saved_bytes / max(1, saved_bytes))
    budget = run.placement.budget
    by_user = frozenset([path.memory_of[cell] for cell, _ in path.kept])
    stretch = Stretch(model, range(len(path.slots)), by_user)
    kept_by_user = run.kept_bytes
    choice = choose(stretch, None if budget is None else max(0, budget - kept_by_user))
    if choice.values or choice.cuts:
        plan = Plan(path.placed(choice.values, choice.cuts))
        plan.kept = frozenset(choice.values)
        plan.whole = Group(path, [*range(len(path.slots))])
        plan.whole.parts = plan.groups
        if budget is not None:
            held = frozenset(path.memory_of[cell] for cell, _ in plan.path.kept)
            for group in plan.groups:
                _split(group, model, held, max(budget, 1))
    else:
        plan = Plan(path)
    plan.key, plan.saved_bytes = _key_of(run, missing), saved_bytes
    plan.peak = choice.peak + kept_by_user
    plan.complaint = _complaint(run, choice)
    return plan


def _split(group: Group, model: Model, held: frozenset[int], budget: int) -> None:
    """Where a window would deliver more than the budget, a first replay makes what smaller windows start from."""
    order = group.window(group.slots).order
    if not order:
        return
    stretch = Stretch(model, group.slots, held, (order[0], order[-1] + 1))
    if stretch.delivered <= budget:
        return
    choice = choose(stretch, budget)
    if choice.values:
        group.split(choice.values, choice.cuts)
        if max(len(part.slots) for part in group.parts) == len(group.slots):
            group.parts = []
        for part in group.parts:
            _split(part, model, held | {model.path.memory_of[cell] for cell, _ in choice.values}, budget)


def _complaint(run: Run, choice: Choice) -> str:
    """What to say of a budget that is too small."""
    assert run.placement is not None
    budget, least, why = run.placement.budget, run.kept_bytes, ""
    if budget is None:
        return ""
    if least > budget:
        why = "what `keep` and other policies keep in this block, or FSDP2 between modules, takes more than that"
    elif choice.recomputes and choice.least is not None and budget < least + choice.least:
        why = "no room for a single checkpoint, so backward recomputes all of the block at once"
        least += choice.least
    return why and f"auto(budget={budget}): {why}. The smallest budget possible is {least} bytes."


def attach(plan: Plan, old: Plan | None) -> None:
    """From here on runs hold what the plan keeps, as soon as it is there."""
    path, before = plan.path, frozenset() if old is None else old.kept
    new: dict[int, list[tuple[Value, bool]]] = defaultdict(list)
    counted: set[int] = set()
    for value in sorted(plan.kept):
        memory = path.memory_of[value[0]]
        new[path.there_after(value)].append((value, memory not in counted))
        counted.add(memory)
    for step in path.steps:
        mine = new.get(step.index, [])
        if mine or (before and step.keeps):
            taken = {value for value, _ in mine}
            others = [each for each in step.keeps if each[0] not in taken and each[0] not in before]
            step.keeps = (*others, *mine)
            step.is_special = step.is_special or bool(step.keeps)
