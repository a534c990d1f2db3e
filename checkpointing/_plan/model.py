"""The memory of a step: what a path makes, reads and saves, and how large that is.

Positions are steps. The forward passes them upwards, backward downwards. Backward at a position
works with gradients, with what is kept, and with what the window of its segment delivers:
`backward` has the first of these by position, `live` what the forward has there. Both are sums of
spans: every memory is there from one position to another.

The model looks at memories, not at tensors: views cost nothing. Values that are cheap to make from
inputs, such as casts of weights and masks, cross a cut for free, since each window makes them
again. What somebody else holds anyway costs nothing.

Invariant: a model depends on byte counts and positions alone, so it is the same on every rank.
Memory that is handed to other processes counts as gone after its last use, since threads of the
backend hold it for a time that differs from rank to rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from copy import copy
from itertools import accumulate, chain

from .. import _torch
from .._record import KEEP, NOT_WRITTEN, UNSEEN, First, Known, Path, Run, Step, Value
from .gradients import Gradients, Span
from .groups import MOST_WRITTEN


class Memory:
    """What a plan knows of a memory that the block has made. After an operator has overwritten all
    of a memory that others have read, it counts as another one, since a run can hold either. In

        y = x.clone()
        x.add_(1)

    the memory of `x` is one before the last line, and another one after it."""

    is_overwritten = False
    overwrites: int | None = None  # what it was before
    is_cheap = False
    is_theirs = False  # whether somebody else holds it when the block has ended
    effort = math.inf  # bytes written to make it from inputs, if that is cheap

    def __init__(self, number: int, storage: int, maker: int, nbytes: int, never: int) -> None:
        self.number = number
        self.storage = storage  # the memory of the path; also the first cell on it
        # The value that is all of it, where one is known: views are made of that.
        self.whole: Value | None = (storage, NOT_WRITTEN)
        self.maker = maker
        self.nbytes = nbytes
        self.cost = nbytes  # to hold it
        self.writers: tuple[int, ...] = ()  # steps of the path, after the maker
        self.final = maker + 1  # the first position at which it is what it will be
        self.readers: tuple[int, ...] = ()  # steps
        self.last_read = maker  # by a step
        self.dies = never  # the step after which nobody outside holds it
        # That are saved, or read by others than those who write to it, and the last such step.
        self.values: dict[Value, int] = {}
        self.last_part = maker  # the last step that reads a part that a later one overwrites

    def between(self, first: int, count: int) -> Memory:
        """The same in a part of the model: positions count from its first one, and what happens
        after its last one never does."""
        moved = copy(self)
        moved.maker -= first
        moved.final -= first
        moved.last_read -= first
        moved.last_part -= first
        moved.dies = min(self.dies - first, count + 1)
        moved.readers = tuple([reader - first for reader in self.readers])
        return moved


class Model:
    """The memories of a path: who makes, reads and writes them, and what they cost."""

    first = 0  # the step of the path that is at position 0
    is_part = False

    def __init__(
        self, path: Path, run: Run, waiting: Iterable[int], scale: float, retained: int
    ) -> None:
        """`waiting` are cells of parameters that have no gradient yet. From the slot `retained` on,
        what backward needs stays for another one."""
        self.path, self.steps, self.scale = path, path.steps, scale
        self._last: dict[int, int] = {}  # by memory of the path that is overwritten: the last one
        self._number_at: dict[tuple[int, int], int] = {}  # by memory of the path, and step
        self.count = len(path.steps)
        self.never = self.count + 1  # a position after all others
        # The position down to which a backward retains the graph.
        self.retained = max(0, [*path.saved_after, self.count][retained])
        self.memories: dict[int, Memory] = {}
        # Memories by step, also those that it writes.
        self.made: list[tuple[int, ...]] = [()] * self.count
        self.reads: list[tuple[int, ...]] = [()] * self.count
        self.work = [0.0] * self.count  # of each step, in floating-point operations
        self._sent: dict[int, int] = {}  # by memory: the last step that hands it to others
        # By slot that the block has made: the position at which backward wants it, and the memory.
        self.saves: dict[int, tuple[int, int]] = {}
        for step in path.steps:
            self._add(step)
        self.held = {self.number_of(value) for value in path.kept}  # by the user
        alive = self._alive(run)
        gradients = self._find_gradients(run, alive)
        self.with_gradient = gradients.memories
        for number in range(len(path.slots)):
            self._add_slot(number)
        given = {self.number_of(value) for value in path.given}
        self._find_final(alive - given)
        # What the block has made and holds in any case; not parameters, which FSDP2 lends.
        own = {self.number_of(value) for value in path.given - path.parameters}
        fixed = [self.memories[number] for number in own & self.memories.keys()]
        for memory in fixed:
            memory.dies = self.never
        states = [
            (index, self.count, sum([state.nbytes for state in drawn.states]))
            for index, drawn in run.store.random.items()
        ]
        self.live = self.sums([*self._lives(), *states])
        # What backward needs, whatever the block keeps and saves: somebody else holds it, or it is
        # made there.
        spans = [(memory.maker + 1, self.count, memory.nbytes) for memory in fixed] + states
        spans += [(0, self.count, m.nbytes) for m in self.memories.values() if m.is_theirs]
        # From here on, gradients are made by another backward, before this one.
        another = 0 if run.program.history.parts > 1 else self.retained  # such as micro-batches
        missing = {path.memory_of[cell] for cell in waiting}
        spans += [*gradients.spans, *gradients.of_parameters(missing, another)]
        # What the steps after it have made is there, too.
        self.backward = self.sums(spans)[1:]
        # Of this, what is still there at the position before, to which backward comes next.
        self.passed_on = self.sums((low + 1, high, n) for low, high, n in spans if low < high)[1:]

    def _alive(self, run: Run) -> Set[int]:
        """The memories that are alive at the end. Those that were handed to other processes count
        as gone after their last use, even if a thread of the backend still holds them."""
        alive = {self.path.memory_of[cell] for cell in run.alive()} - self._sent.keys()
        for number in self._sent.keys() & self.memories.keys():
            memory = self.memories[self._now(number)]
            memory.dies = max(memory.last_read, self._sent[number])
            if memory.dies == self.count - 1:
                alive.add(number)
        return {*map(self._now, alive)}

    def _find_gradients(self, run: Run, alive: Set[int]) -> Gradients:
        """Backward gets gradients of what lives on, and of the last result."""
        integers = {number for step in self.steps for number in step.integers}
        followed = [self.made[step.index] for step in self.steps if step.differentiated]
        last = {*alive}.union(*self.made[-1:]).intersection(chain(*followed))
        ends = {self.memories[number].storage for number in last} - integers
        sizes = {n: memory.nbytes for n, memory in self.memories.items() if n not in integers}
        for step in self.steps:
            if step.info.base in _torch.LARGE_NUMBERS and step.inputs.get(2) != 0:  # a reduction
                sizes.update(dict.fromkeys(self.made[step.index], 0))
        held = {self.path.memory_of[cell]: run.store.parameter(cell) for cell in self.path.trained}
        parameters = {number: p.nbytes for number, p in held.items() if p is not None}
        return Gradients(self.path, sizes, parameters, ends, self.scale)

    def _lives(self) -> Iterator[Span]:
        """From when to when each memory is there in the forward, and what operators work with. When
        small ones die may depend on the garbage collector, which differs from rank to rank."""
        for memory in self.memories.values():
            if memory.nbytes >= _SMALL:
                yield memory.maker, memory.dies - 1, memory.nbytes
        for index in range(self.count):
            yield index, index, self.scratch(index)

    def scratch(self, index: int) -> int:
        """The bytes that an operator allocates, beside its results."""
        return int(self.steps[index].scratch_of_forward * self.scale)

    def _find_final(self, elsewhere: Set[int]) -> None:
        """Find which memories can be held, from when on, and what that costs. Somebody else holds
        those `elsewhere` when the block has ended."""
        saved = {number for _, number in self.saves.values()}
        for memory in self.memories.values():
            for value in [*filter(self._is_unfinished, memory.values)]:
                last = memory.values.pop(value)
                if value[0] in self.path.views:
                    memory.last_part = max(memory.last_part, last)
            if not (memory.nbytes and memory.values):
                memory.final = self.never
            memory.is_theirs = memory.number in elsewhere and not memory.is_cheap
            if memory.is_theirs and memory.number in saved:
                memory.cost = 0  # else it may be written after the block, so a copy is held

    def _is_unfinished(self, value: Value) -> bool:
        """Whether a later step writes to a value: to hold the memory is not to hold it. What reads
        it comes before that step."""
        cell, version = value
        writers = self.memories[self.number_of(value)].writers
        later = [self.path.steps[index] for index in writers if index > version]
        return any(self.path.writes_to(step, cell) for step in later)

    def _add(self, step: Step) -> None:
        """Learn what a step does to memory."""
        index, memories = step.index, self.memories
        for number in memories.keys() & {*step.gone}:
            memories[self._now(number)].dies = index
        if step.info.communicates:
            cells = [arg.cell for arg in step.args if isinstance(arg, Known | First)]
            self._sent.update([(self.path.memory_of[cell], index) for cell in cells])
        written = {*map(self._now, memories.keys() & step.writes)}
        self._number_at.update({(memories[number].storage, index): number for number in written})
        if step.effect or step.is_view or step.event is KEEP:
            for number in memories if step.event is UNSEEN else written:
                memories[number].final = self.never
        if step.is_view or step.event is KEEP:
            return
        for number, nbytes in step.sizes:
            memory = Memory(number, number, index, int(nbytes * self.scale), self.never)
            memories[number] = memory
            if step.event is not None or step.effect:
                memory.final = self.never
        self.made[index] = tuple([number for number, _ in step.sizes])
        if step.effect:  # it is never replayed
            return
        self._add_reads(step)
        for number in written:
            self._write(step, memories[number])
        self._weigh(step)

    def _write(self, step: Step, memory: Memory) -> None:
        """A step writes to a memory. If others have read it, and all of it is overwritten, it is
        another one from here on."""
        index, storage = step.index, memory.storage
        targets = [value for value in step.reads if value[0] in step.targets]
        whole = [value for value in targets if self.path.extent[value[0]] == storage]
        if whole and memory.values:
            memory.whole, memory.is_overwritten, memory.dies = whole[0], True, index
            number = self._last[storage] = self._number_at[storage, index] = ~len(self.memories)
            new = Memory(number, storage, index, memory.nbytes, self.never)
            new.overwrites, self.memories[number] = memory.number, new
            memory = new
        else:
            memory.writers += (index,)
            memory.final = max(memory.final, index + 1)
        memory.whole = None  # each view that is read is held by itself
        self.made[index] += (memory.number,)

    def _now(self, storage: int) -> int:
        """What a memory of the path is at present."""
        return self._last.get(storage, storage)

    def number_of(self, value: Value) -> int:
        """The memory of a value."""
        cell, version = value
        storage = self.path.memory_of[cell]
        return self._number_at.get((storage, version), storage)

    def _add_reads(self, step: Step) -> None:
        # It writes there, or splits it.
        own = {*step.writes, *(number for _, number in step.memories)}
        read: set[int] = set()
        for value in step.reads:
            number = self.number_of(value)
            if value in self.path.given or number not in self.memories:
                continue
            read.add(number)
            if self.memories[number].storage not in own:
                self.memories[number].values[value] = step.index
        for number in read:
            memory = self.memories[number]
            memory.last_read = step.index
            memory.readers += (step.index,)
        self.reads[step.index] = (*sorted(read),)

    def _weigh(self, step: Step) -> None:
        """What a step costs, and whether what it makes is cheap."""
        reads = [self.memories[number] for number in self.reads[step.index]]
        made = [self.memories[number] for number in self.made[step.index]]
        written = self.bytes_of(self.made[step.index])
        flops = step.flops * self.scale
        self.work[step.index] = flops + _PER_BYTE * written
        effort = written + sum([memory.effort for memory in reads])
        if step.draws:  # the random numbers would have to be drawn in each window
            effort = math.inf
        is_cheap = not flops and effort <= MOST_WRITTEN * written
        for memory in made:
            memory.is_cheap, memory.effort = is_cheap, effort if is_cheap else math.inf

    def part(self, steps: Sequence[int], slots: Iterable[int], held: Set[int]) -> Model:
        """The stretch from the first of these steps to where the last of these slots is wanted that
        is not held, as a model of its own."""
        first = steps[0] - self.first
        saves = [(slot, *self.saves[slot]) for slot in self.saves.keys() & slots]
        part = copy(self)
        part.saves = {slot: (max(0, at - first), n) for slot, at, n in saves if n not in held}
        part.is_part, part.first = True, steps[0]
        part.count = 1 + max([steps[-1] - steps[0], *[at for at, _ in part.saves.values()]])
        part.retained = part.count  # what it makes is gone when it has run
        span = slice(first, first + part.count)
        part.steps, part.work = self.steps[span], self.work[span]
        part.made, part.reads = self.made[span], self.reads[span]
        part.live, part.backward = self.live[span], self.backward[span]
        part.passed_on = self.passed_on[first : first + part.count + 1]
        numbers = {n for _, n in part.saves.values()}.union(*part.made, *part.reads)
        part.memories = {n: self.memories[n].between(first, part.count) for n in numbers}
        return part

    def values(self, kept: Iterable[int]) -> set[Value]:
        """What to hold of these memories."""
        found: set[Value] = set()
        for number in kept:
            memory = self.memories[number]
            whole = memory.whole
            if whole is None:
                found.update(memory.values)
            else:  # views made after the last write are made anew
                others = [v for v in memory.values if self.path.there_after(v) == whole[1]]
                found.update([whole, *others])
        return found

    def _add_slot(self, number: int) -> None:
        """Find where backward wants a slot."""
        slot = self.path.slots[number]
        memory = self.memories.get(self.number_of(slot.value))
        if memory is None or slot.value in self.path.given:
            return
        position = min(self.path.saved_for[number], self.count - 1)
        memory.values.setdefault(slot.value, position)
        self.saves[number] = position, memory.number

    def sums(self, spans: Iterable[Span]) -> list[int]:
        """By position: the bytes that are there. Each is there from one position to another."""
        change = [0] * (self.count + 3)
        for first, last, nbytes in spans:
            change[first] += nbytes
            change[max(first, min(last, self.count)) + 1] -= nbytes
        return [*accumulate(change)]

    def bytes_of(self, numbers: Iterable[int]) -> int:
        """The bytes of these memories."""
        return sum([self.memories[number].nbytes for number in numbers])


def still_waiting(run: Run, cells: Iterable[int]) -> list[int]:
    """Those of these cells whose tensors have no gradient yet."""
    found = [(cell, run.store.parameter(cell)) for cell in cells]
    return [cell for cell, parameter in found if parameter is None or parameter.grad is None]


_PER_BYTE = 10  # floating-point operations in the time in which a byte is written
_SMALL = 512  # bytes: a block of CUDA's allocator
