"""Memories: what a recorder knows at one place of a path.

Invariant: it follows from the path alone, so it is found again when a run leaves its program.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor

from .. import _torch
from .program import BROUGHT_BACK, NOT_WRITTEN, UNSEEN, Cells, First, Hold, Slot, Step, Value

# What is known of a memory; recorder.py says what follows from it.
MADE, UNFILLED, OUTSIDE = "made", "unfilled", "outside"

_storage_of, _has_storage = _torch.storage_of, _torch.has_storage


@dataclass(slots=True, eq=False)
class Memory:
    """What is known of one memory."""

    number: int  # the first cell on it
    state: str
    version: int = NOT_WRITTEN  # the last step that wrote to it
    cells: list[int] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)  # the cells that cover it, if it is made here
    sure: set[int] = field(default_factory=set)  # as decisions.py says
    # On memory from outside: what is held now, by the cells with it, and with views of it.
    there: dict[int, Hold] = field(default_factory=dict)
    is_parameter: bool = False
    is_lent: bool = False
    is_met: bool = False  # it was there before, or nobody saw who made it
    is_state: bool = False  # so it was, and the block writes it, as the next run may
    is_saved: bool = False  # autograd has saved something of it; or it is a parameter

    def write(self, index: int) -> None:
        self.version = index
        self.there.clear()


class Memories:
    """The memories at one place of a path, and the tensors in its cells."""

    # The last step, and how many tensors autograd has saved after it.
    at: tuple[Step, int]

    def __init__(self, cells: Cells, steps: Iterable[tuple[Step, Sequence[Slot]]]) -> None:
        """`steps` are those of the path, each with what autograd has saved after it."""
        self._cells = cells
        self.met: list[Tensor] = []  # tensors that take the next cells
        self.memory_of: list[Memory] = []  # by cell
        self._memories: dict[int, Memory] = {}
        self.brought_back: set[Memory | None] = set()  # that a backward inside has made again
        self._names: dict[int, int] = {}  # by id of a tensor: its cell
        self._places: dict[int | None, Memory] = {}  # by storage
        self._alive: set[int] = set()  # memories that steps have made
        self._left: set[int] = set()  # memories on which a tensor has died since the last step
        self._watches: list[ref[Tensor]] = []  # whose callbacks say so
        for step, saves in steps:
            self._add_met(step)
            self.add(step)
            self.add_decisions(step)
            for slot in saves:
                self._add_met(slot)
                memory = self.memory_of[slot.cell]
                # If it was allocated here, something unseen has filled it.
                if slot.is_read and slot.holds:
                    memory.state = OUTSIDE
                self.has_saved(memory)

    def _add_met(self, here: Step | Slot) -> None:
        for first in here.firsts:
            self.add_first(first)
        for asked in here.holds:
            self.add_hold(asked)

    def add_first(self, first: First) -> None:
        memory = self._set_state(first.memory, OUTSIDE)
        memory.is_met = True
        memory.is_parameter |= first.is_parameter
        memory.is_saved |= first.is_parameter
        memory.is_lent |= first.is_lent
        self._add_cell(first.cell, memory)
        if first.refers is not None:
            self.add_hold(first.refers)

    def _set_state(self, number: int, state: str) -> Memory:
        """Note the state of a memory, which may be new."""
        memory = self._memories.get(number)
        if memory is None:
            memory = self._memories[number] = Memory(number, state)
        memory.state = state
        return memory

    def add_hold(self, asked: Hold) -> None:
        if not asked.is_hidden:
            self._memories[asked.memory].there[asked.value[0]] = asked

    def add(self, step: Step) -> None:
        """Learn what a step has changed."""
        self.at = step, 0
        for number, state in step.states:
            self._set_state(number, state)
        if step.event is BROUGHT_BACK:
            self.brought_back.update([self._memories[number] for number, _ in step.states])
        self._alive.update(dict(step.sizes))
        self._alive.difference_update(step.gone)
        for number in step.writes:
            memory = self._memories[number]
            memory.write(step.index)
            memory.is_state |= memory.is_met
        for cell, number in step.memories:
            memory = self._memories[number]
            if cell == number or not memory.whole.isdisjoint(step.targets):
                memory.whole.add(cell)
            self._add_cell(cell, memory)
            if step.is_view and not step.effect and memory.state is OUTSIDE:
                base = step.reads[0][0]  # on the same memory, unless that is sparse
                memory.there[cell] = self.memory_of[base].there[base]
        if step.info.gathers:
            for number, _ in step.states:
                gathered = self._memories[number]
                gathered.is_lent = gathered.is_parameter = True
        if step.event is UNSEEN:
            self._write_unseen(step.index)

    def _write_unseen(self, index: int) -> None:
        """Anything but parameters may have been written."""
        for memory in self._memories.values():
            if not memory.is_parameter:
                memory.state = OUTSIDE
                memory.write(index)

    def is_sure(self, cell: int) -> bool:
        """Whether a replay gives the same again in a cell."""
        memory = self.memory_of[cell]
        return memory.state is OUTSIDE or cell in memory.sure

    def add_decisions(self, step: Step) -> None:
        """Learn which values are sure after a step."""
        for number in () if step.sure else step.writes:
            self._memories[number].sure.clear()
        for cell in [*step.sure, *[asked.value[0] for asked in step.decides]]:
            self.memory_of[cell].sure.add(cell)

    def has_saved(self, memory: Memory) -> None:
        """Autograd has saved something of it."""
        step, count = self.at
        self.at = step, count + 1
        memory.is_saved = True

    def _add_cell(self, cell: int, memory: Memory) -> None:
        assert cell == len(self.memory_of), "cells are filled in order"
        self.memory_of.append(memory)
        memory.cells.append(cell)
        tensor, left, number = self.tensor_in(cell), self._left, memory.number
        if tensor is None:
            left.add(number)
            return
        self._names[id(tensor)] = cell
        self._places[_storage_of(tensor)] = memory
        self._watches.append(ref(tensor, lambda _: left.add(number)))

    def tensor_in(self, cell: int) -> Any:
        cells = self._cells
        return cells[cell]() if cell < len(cells) else self.met[cell - len(cells)]

    # ---- names

    def find(self, tensor: Tensor) -> int | None:
        """The cell of a tensor; None if it is not known."""
        cell = self._names.get(id(tensor))
        if cell is None or self.tensor_in(cell) is not tensor:
            return None
        if not _has_storage(tensor):
            return cell
        # Unless `tensor.data = ...` has given it other memory.
        return cell if self._places.get(_storage_of(tensor)) is self.memory_of[cell] else None

    def known_memory(self, tensor: Tensor) -> Memory | None:
        """The memory of a tensor; None if the tensor is not known."""
        cell = self.find(tensor)
        return None if cell is None else self.memory_of[cell]

    def memory_at(self, tensor: Tensor) -> Memory | None:
        """The known memory that a tensor uses, as far as something there is alive."""
        if not _has_storage(tensor):
            return self.known_memory(tensor)
        place = _storage_of(tensor)
        memory = self._places.get(place)
        if memory is None or place not in map(_storage_of, self._tensors_of(memory)):
            return None
        return memory

    def _tensors_of(self, memory: Memory) -> Iterator[Tensor]:
        """The tensors that are alive of those that have been there. Mostly the first one is, so
        that nobody looks further; those before it are forgotten."""
        cells = memory.cells
        while cells and self.tensor_in(cells[0]) is None:
            del cells[0]
        return (tensor for tensor in map(self.tensor_in, cells) if tensor is not None)

    def find_gone(self, step: Step) -> None:
        """Note the memories of recorded operators that nobody holds any more after a step."""
        left = self._left & self._alive
        self._left.difference_update(left)  # nothing that another thread adds meanwhile
        memories = [self._memories[number] for number in sorted(left)]
        step.gone = tuple(m.number for m in memories if next(self._tensors_of(m), None) is None)
        self._alive.difference_update(step.gone)

    def value(self, cell: int) -> Value:
        """What is in a cell: as the last step left it that wrote to any part of its memory."""
        return cell, self.memory_of[cell].version
