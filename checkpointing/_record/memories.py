"""Memories: what a recorder knows at one place of a path.

Invariant: it follows from the path alone, so it is found again when a run leaves its program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import _torch
from .decisions import Decisions
from .origins import Cells
from .program import NOT_WRITTEN, ON_MADE, UNSEEN, First, Hold, Slot, Step, Value

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
    # On memory from outside: what is held now, by the cells with it, and with views of it.
    there: dict[int, Hold] = field(default_factory=dict)
    is_parameter: bool = False
    is_lent: bool = False
    is_state: bool = False  # from outside, and written by the block: as by the next run, perhaps
    is_saved: bool = False  # autograd has saved something of it; or it is a parameter

    def has(self, cell: int) -> bool:
        """Whether a replay can come by what is in a cell now."""
        return cell in self.there if self.state is OUTSIDE else self.state is MADE

    def write(self, index: int) -> None:
        self.version = index
        self.there.clear()


class Memories:
    """The memories at one place of a path, and the tensors in its cells."""

    def __init__(self, cells: Cells, steps: Iterable[tuple[Step, Sequence[Slot]]]) -> None:
        """`steps` are those of the path, each with what autograd has saved after it."""
        self._cells = cells
        self.met: list[Tensor] = []  # tensors that take the next cells
        self.held: set[Value] = set()
        self.decisions = Decisions()
        self.memory_of: list[Memory] = []  # by cell
        self._memories: dict[int, Memory] = {}
        self._names: dict[int, int] = {}  # by id of a tensor: its cell
        self._places: dict[int | None, Memory] = {}  # by storage
        self._alive: list[Memory] = []  # of those that steps have made
        for step, saves in steps:
            for first in step.firsts:
                self.add_first(first)
            for asked in step.holds:
                self.add_hold(asked)
            self.add(step)
            for slot in saves:
                self._add_slot(slot)

    def add_first(self, first: First) -> None:
        memory = self._memory(first.memory, OUTSIDE)
        if first.origin is ON_MADE:
            memory.state = OUTSIDE
        memory.is_parameter |= first.is_parameter
        memory.is_saved |= first.is_parameter
        memory.is_lent |= first.is_lent
        self._add_cell(first.cell, memory)
        if first.refers is not None:
            self.add_hold(first.refers)

    def add_hold(self, asked: Hold) -> None:
        self.held.add(asked.value)
        if not asked.is_hidden:
            self._memories[asked.memory].there[asked.value[0]] = asked

    def add(self, step: Step) -> None:
        """Learn what a step has changed."""
        for number, state in step.states:
            self._memory(number, state).state = state
        self._alive += [self._memories[number] for number, _ in step.sizes]
        if step.gone:
            self._alive = [memory for memory in self._alive if memory.number not in step.gone]
        written = [self._memories[number] for number in step.writes]
        self.decisions.add(step, [cell for memory in written for cell in memory.cells])
        for memory in written:
            memory.write(step.index)
            memory.is_state |= memory.state is OUTSIDE
        for cell, number in step.memories:
            memory = self._memories[number]
            if cell == number or not memory.whole.isdisjoint(step.targets):
                memory.whole.add(cell)
            self._add_cell(cell, memory)
            if step.is_view and not step.effect and memory.state is OUTSIDE:
                base = step.reads[0][0]  # on the same memory, unless that is sparse
                memory.there[cell] = self.memory_of[base].there[base]
        for number, _ in step.states if step.info.gathers else ():
            self._memories[number].is_lent = True
        if step.event is UNSEEN:
            self._write_unseen(step.index)

    def _write_unseen(self, index: int) -> None:
        """Anything but parameters may have been written."""
        for memory in self._memories.values():
            if not memory.is_parameter:
                memory.state = OUTSIDE
                memory.write(index)

    def _add_slot(self, slot: Slot) -> None:
        if slot.first is not None:
            self.add_first(slot.first)
        memory = self.memory_of[slot.value[0]]
        if slot.hold is not None:
            self.add_hold(slot.hold)
            if slot.is_read:  # if it was allocated here, something unseen has filled it
                memory.state = OUTSIDE
        memory.is_saved = True

    def _memory(self, number: int, state: str) -> Memory:
        if number not in self._memories:
            self._memories[number] = Memory(number, state)
        return self._memories[number]

    def _add_cell(self, cell: int, memory: Memory) -> None:
        assert cell == len(self.memory_of), "cells are filled in order"
        self.memory_of.append(memory)
        memory.cells.append(cell)
        tensor = self.tensor_in(cell)
        if tensor is not None:
            self._names[id(tensor)] = cell
            self._places[_storage_of(tensor)] = memory

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

    def memory_at(self, tensor: Tensor) -> Memory | None:
        """The known memory that a tensor uses, as far as something there is alive."""
        place = _storage_of(tensor)
        memory = None if place is None else self._places.get(place)
        if memory is None or place not in map(_storage_of, self._tensors_of(memory)):
            return None
        return memory

    def _tensors_of(self, memory: Memory) -> Iterator[Tensor]:
        """The tensors that are alive of those that have been there."""
        tensors = map(self.tensor_in, memory.cells)
        return (tensor for tensor in tensors if tensor is not None)

    def gone(self) -> tuple[int, ...]:
        """Memories of recorded operators that nobody holds any more."""
        gone = [memory for memory in self._alive if next(self._tensors_of(memory), None) is None]
        self._alive = [memory for memory in self._alive if memory not in gone]
        return tuple([memory.number for memory in gone])

    def value(self, cell: int) -> Value:
        """What is in a cell: as the last step left it that wrote to any part of its memory."""
        return cell, self.memory_of[cell].version
