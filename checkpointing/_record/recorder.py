"""Recording: what a new step of a program does to memory.

A run that meets an operator call which its program does not know asks a `Recorder` for a new step.
The recorder looks at storages and at the operator's schema to find who wrote to the memory that
each argument uses, and what the run must hold. It may take its time, since it runs once for each
new step, in all runs together.

Invariant: replaying a step on its inputs gives the bits that it gave the first time. Where that
cannot be promised, the run holds the tensor: memory that existed before the block, memory that is
read before a step wrote to it, and memory that somebody else writes.

Rejected: keeping a recorder while a run follows its program. What a recorder knows follows from the
path, so it is found again when the run leaves the program.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .. import _torch
from .._engine import entered_from, is_parameter, root_of
from .decisions import Decisions, most_bytes
from .ops import Info, tensors_of
from .program import (
    BROUGHT_BACK,
    KEEP,
    NOT_WRITTEN,
    PLAIN,
    UNSEEN,
    WRITTEN_UNSEEN,
    Filling,
    First,
    Known,
    Like,
    Parts,
    Slot,
    Step,
    Thing,
    Value,
    to_hold,
    with_saves,
)

# What is known of a memory:
MADE = "made by recorded operators"
UNFILLED = "allocated, and not yet filled by a recorded operator"
OUTSIDE = "from outside, or written from there"

# In place of the cell that an unknown tensor shares its memory with:
ON_MADE_MEMORY = -2
NO_MEMORY = -3  # efficient zeros, for which operators run in another way

# Types of arguments that are compared with `==`, by whether all lists are sizes, and all floats
# usual.
_COMPARED = {
    (False, False): PLAIN,
    (False, True): PLAIN | {float},
    (True, False): PLAIN | {list},
    (True, True): PLAIN | {list, float},
}
_is_grad_enabled = torch.is_grad_enabled
_storage_of, _has_storage = _torch.storage_of, _torch.has_storage


class Recorder:
    """What recording knows: which memory each cell uses, and what has become of it. It follows from
    the path."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._start()
        self.memory_of: list[int] = []  # by cell
        # By cell: after which step; the halves are what was saved after a step.
        self._born: list[float] = []
        self._state: dict[int, str] = {}  # by memory
        self._written: dict[int, int] = {}  # by memory: the last step that wrote to it
        self._again: set[int] = set()  # memory from outside that the block writes
        self._lost: set[int] = set()  # cells that steps have filled which are not replayed
        self._held: set[int] = set()  # cells that are held, and views of them
        self._starts: set[int] = set()  # cells that are held
        self._copied: set[int] = set()  # cells that hold a copy
        self._read: set[int] = set()  # held cells that an operator reads
        # By memory: what to copy before it is written.
        self._held_on: dict[int, list[Any]] = defaultdict(list)
        self._cells_on: dict[int, list[int]] = defaultdict(list)  # by memory
        self._parameters: set[int] = set()  # memories
        self._lent: set[int] = set()  # memories of gathered parameters
        self._saved: set[int] = set()  # memories that autograd has saved, and parameters
        self._names: dict[int, int] = {}  # by id of a tensor: its cell
        self._places: dict[int | None, int] = {}  # by storage: its memory
        self._decisions = Decisions()
        self._sizes: dict[int, int] = {}  # by memory that may still live: bytes
        for step, saves in with_saves(run):
            for first in step.firsts:
                self._add_first(first, step.index)
            self._add_results(step)
            for slot in saves:
                self._add_slot(slot, step.index)

    def _add_first(self, first: First, born: float) -> None:
        memory, cell = first.memory, first.cell
        self._state.setdefault(memory, OUTSIDE)
        if first.shares == ON_MADE_MEMORY:
            self._state[memory] = OUTSIDE
        self._add_cell(cell, memory, born)
        if first.is_parameter:
            self._parameters.add(memory)
            self._saved.add(memory)
        if not first.holds:
            return
        self._held.add(cell)
        self._starts.add(cell)
        if first.copies:
            self._copied.add(cell)
        elif not first.hides:
            self._held_on[memory].append(cell)
        if first.name is not None:
            self._read.add(cell)

    def _add_results(self, step: Step) -> None:
        """Learn what a step has changed."""
        self._state.update(step.states)
        if step.info.gathers:
            self._lent.update([memory for memory, _ in step.states])
        self._sizes.update(step.sizes)
        for memory in step.gone:
            self._sizes.pop(memory, None)
        self._decisions.add(step, self._cells_on)
        for memory in step.writes:
            self._add_write(memory, step)
        self._read.update([cell for cell, _ in step.reads if cell in self._held])
        for cell, memory in step.memories:
            self._add_cell(cell, memory, step.index, is_name=step.event is not KEEP)
            if step.effect:
                self._lost.add(cell)
            elif step.is_view and self._state[memory] is OUTSIDE:
                self._held.add(cell)
        if step.event is KEEP and not step.effect:
            self._held_on[step.memories[0][1]].append(step.first_cell)
        self._add_decisions(step)
        if step.event is UNSEEN:
            for memory in self._state.keys() - self._parameters:
                self._state[memory] = OUTSIDE
                self._add_write(memory, step)

    def _add_decisions(self, step: Step) -> None:
        for value in step.decides:
            self._held_on[self.memory_of[value[0]]].append(value)

    def _add_write(self, memory: int, step: Step) -> None:
        self._written[memory] = step.index
        self._held_on.pop(memory, None)
        if self._state[memory] is OUTSIDE and step.event is not UNSEEN:
            self._again.add(memory)

    def _add_slot(self, slot: Slot, index: int) -> None:
        if slot.first is not None:
            self._add_first(slot.first, index + 0.5)
            if slot.is_read:  # if it was allocated here, something unseen has filled it
                self._state[slot.first.memory] = OUTSIDE
        self._saved.add(self.memory_of[slot.cell])

    def _add_cell(self, cell: int, memory: int, born: float, is_name: bool = True) -> None:
        assert cell == len(self.memory_of), "cells are filled in order"
        self.memory_of.append(memory)
        self._born.append(born)
        self._cells_on[memory].append(cell)
        tensor = self._tensor_in(cell)
        if tensor is not None and is_name:
            self._names[id(tensor)] = cell
            self._places[_storage_of(tensor)] = memory

    def _tensor_in(self, cell: int) -> Any:
        cells = self._run.cells
        return cells[cell]() if cell < len(cells) else self.met[cell - len(cells)]

    # ---- names

    def _find(self, tensor: Tensor) -> int | None:
        """The cell of a tensor; None if it is not known."""
        cell = self._names.get(id(tensor))
        if cell is None or self._tensor_in(cell) is not tensor:
            return None
        if not _has_storage(tensor):
            return cell
        # Unless `tensor.data = ...` has given it other memory.
        return cell if self._places.get(_storage_of(tensor)) == self.memory_of[cell] else None

    def _memory_at(self, tensor: Tensor) -> int | None:
        """The known memory that a tensor uses, as far as something there is alive."""
        memory = self._places.get(_storage_of(tensor)) if _has_storage(tensor) else None
        return None if memory is None or self._is_gone(memory) else memory

    def _is_gone(self, memory: int) -> bool:
        """Whether nobody holds a tensor there any more."""
        return all(self._tensor_in(cell) is None for cell in self._cells_on[memory])

    def _value(self, cell: int) -> Value:
        """What is in a cell: as the last step left it that wrote to any part of its memory."""
        return cell, self._written.get(self.memory_of[cell], NOT_WRITTEN)

    def _state_at(self, cell: int | None) -> str | None:
        """What is known of the memory that a cell uses."""
        return None if cell is None else self._state[self.memory_of[cell]]

    def _is_there(self, cell: int | None) -> TypeGuard[int]:
        """Whether a replay can come by what is in a cell now."""
        if cell is None or cell in self._lost:
            return False
        memory = self.memory_of[cell]
        if self._state[memory] is OUTSIDE:
            return cell in self._held and self._born[cell] > self._written.get(memory, NOT_WRITTEN)
        return self._state[memory] is MADE

    def _first(self, tensor: Tensor, was: int | None, **more: Any) -> First:
        """A new cell for a tensor."""
        cell = len(self._run.cells) + len(self.met)
        self.met.append(tensor)
        shares = cell
        memory = cell if was is None else self.memory_of[was]
        if was is None:
            shares = self._run.shares(tensor, cell)
            if shares == ON_MADE_MEMORY:
                there = self._memory_at(tensor)
                memory = cell if there is None else there
            elif shares not in (cell, NO_MEMORY):
                memory = self.memory_of[shares]
        first = First(cell, was, shares, memory)
        first.is_parameter = is_parameter(root_of(tensor))
        first.requires_grad = tensor.requires_grad
        if memory in self._lent:
            first.is_lent = first.is_parameter = True
        elif first.is_parameter and shares == cell and self._memory_at(tensor) is not None:
            first.is_lent = True  # on memory that the block has made: gathered from one process
        for name, value in more.items():
            setattr(first, name, value)
        self._add_first(first, len(self._run.path) + (0.5 if more.get("name", 0) is None else 0))
        if was is None:
            is_as_it_is = not any((first.copies, first.is_lent))
            first.is_referenced = first.holds and is_as_it_is and _torch.is_whole_parameter(tensor)
            self._run.take_first(first, tensor)
        self._firsts.append(first)
        return first

    def _name(self, tensor: Tensor) -> Known | First:
        """The template of a tensor whose contents do not matter."""
        cell = self._find(tensor)
        return Known(cell) if cell is not None else self._first(tensor, None)

    def _read_tensor(self, tensor: Tensor, reader: Any, copies: bool = False) -> Known | First:
        """The template of a tensor whose contents an operator reads."""
        cell = self._find(tensor)
        if cell is not None:
            copies = copies or self.memory_of[cell] in self._again
        if self._is_there(cell):
            needs_copy = copies and self._state_at(cell) is OUTSIDE
            if not needs_copy or cell in self._copied:
                self._reads.append(self._value(cell))
                return Known(cell)
        first = self._first(tensor, cell, holds=True, copies=copies, name=reader)
        self._reads.append((first.cell, NOT_WRITTEN))
        return first

    def _base(self, tensor: Tensor, reader: Any) -> tuple[Known | First, bool]:
        """The template of a tensor that a view is made of, and whether a replay can come by its
        memory."""
        cell = self._find(tensor)
        if cell is None:
            holds = self._run.hooks is None or is_parameter(root_of(tensor))
            first = self._first(tensor, None, holds=holds, name=reader)
            if holds:
                self._reads.append((first.cell, NOT_WRITTEN))
            return first, holds
        is_there = self._is_there(cell)
        if self._state_at(cell) is UNFILLED:
            is_there = cell not in self._lost
        if is_there:
            self._reads.append(self._value(cell))
        return Known(cell), is_there

    def _map(self, function: Callable[[Tensor], Any], arg: Any) -> Any:
        """A template of an argument, with `function` of the tensors in it."""
        if isinstance(arg, Tensor):
            return function(arg)
        if tensors_of(arg):
            return Parts(type(arg), [self._map(function, part) for part in arg])
        return arg

    # ---- steps

    def _start(self) -> None:
        self.met: list[Tensor] = []
        self._reads: list[Value] = []
        self._firsts: list[First] = []

    def _begin(self, func: Any) -> Step:
        self._start()
        return Step(self._run.step, func)

    def _end(self, step: Step) -> Step:
        step.reads, step.firsts = tuple(self._reads), tuple(self._firsts)
        step.holds = to_hold(self._firsts)
        return step

    def step(self, info: Info, func: Any, args: Any, kwargs: dict[str, Any]) -> Step:
        """What an operator is about to do."""
        step = self._begin(func)
        step.info, step.grad_mode = info, _is_grad_enabled()
        step.call = func, step.grad_mode, len(args), (*kwargs,)
        step.plain = _COMPARED[info.has_sizes, _has_usual_floats((*args, *kwargs.values()))]
        step.run = info.run
        if any(map(_torch.is_zeros, tensors_of(args))):
            step.run = _torch.with_zeros(info.run)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        updates = info.updates_statistics(args)
        if info.ignored:
            self._step_of_view(step, given)
        else:
            self._step_of_operator(step, args, given, updates)
        step.inputs = step.args[: len(args)]
        if kwargs:
            step.named = dict(zip(kwargs, step.args[len(args) :], strict=True))
        if step.reads_metadata:
            step.inputs[0] = Like(args[0])
        for place in info.statistics if updates else ():
            step.inputs[place] = None
        if info.offset in given and given[info.offset] is not None:
            step.offset = info.offset
        self._end(step)
        is_noted = step.reads_metadata or step.offset is not None
        step.needs_preparation = any((step.holds, step.freezes, step.targets, is_noted))
        step.is_special = any(
            (step.needs_preparation, step.draws, step.effect, step.run is not info.run)
        )
        return step

    def _step_of_view(self, step: Step, given: dict[int | str, Any]) -> None:
        step.is_view = True
        bases = []

        def base(tensor: Tensor) -> Known | First:
            template, is_there = self._base(tensor, step.func)
            bases.append(is_there)
            return template

        step.args = [self._map(base, arg) for arg in given.values()]
        step.effect = not all((*bases, step.info.base != "set_"))

    def _step_of_operator(
        self, step: Step, args: Any, given: dict[int | str, Any], updates: bool
    ) -> None:
        info = step.info
        places = info.targets
        written = [tensor for place in places for tensor in tensors_of(given.get(place))]
        if any(self._is_unfilled(tensor) for tensor in written):
            # The operator may read one part of this memory and write to another: then it has been
            # filled unseen.
            read = [arg for place, arg in enumerate(args) if place not in places]
            self._fill(step, [tensor for tensor in tensors_of(read) if self._is_unfilled(tensor)])
        outside = [self._is_outside(tensor, info.fills) for tensor in written]
        step.effect = info.communicates or (info.inplace and all(outside))
        step.draws = info.may_draw and not step.effect
        has_generator = torch.Generator in map(type, given.values())
        step.is_quick_draw = not (info.custom or has_generator)
        step.args = [self._template(step, place, arg, updates) for place, arg in given.items()]

    def _template(self, step: Step, place: int | str, arg: Any, updates: bool) -> Any:
        """The template of an operator's argument; `updates`: of the statistics that it takes."""
        info = step.info
        if place in info.targets:
            return self._map(lambda tensor: self._target(step, tensor), arg)
        if step.effect:
            return Thing(type(arg)) if _is_script_object(arg) else self._map(self._name, arg)
        if isinstance(arg, Tensor):
            if place == 0 and info.metadata_only and _has_storage(arg):
                step.reads_metadata = True
                return self._name(arg)
            if place in info.statistics:
                return self._statistics(step, arg, updates)
        return self._map(lambda tensor: self._read_filled(step, tensor), arg)

    def _read_filled(self, step: Step, tensor: Tensor) -> Known | First:
        if self._is_unfilled(tensor):
            self._fill(step, [tensor])
        return self._read_tensor(tensor, step.func)

    def _is_unfilled(self, tensor: Tensor) -> bool:
        return self._state_at(self._find(tensor)) is UNFILLED

    def _is_outside(self, tensor: Tensor, fills: bool) -> bool:
        """Whether what is written cannot be made again: it was there before, or something unseen
        has filled it."""
        cell = self._find(tensor)
        if cell is None or cell in self._lost:
            return True
        state = self._state_at(cell)
        return not fills if state is UNFILLED else state is OUTSIDE

    def _fill(self, step: Step, tensors: list[Tensor]) -> None:
        """Something unseen has filled these: a raw kernel, `ctypes`, NumPy."""
        for tensor in tensors:
            cell = self._find(tensor)
            assert cell is not None
            self._state[self.memory_of[cell]] = OUTSIDE
            step.states += ((self.memory_of[cell], OUTSIDE),)

    def _target(self, step: Step, tensor: Tensor) -> Any:
        """The template of a tensor that the operator writes."""
        info = step.info
        is_outside = self._is_outside(tensor, info.fills)
        if is_outside and not step.effect:  # a replay lets it write to a copy
            template = self._read_tensor(tensor, step.func, copies=True)
        else:
            template = self._name(tensor)
        cell = template.cell
        memory = self.memory_of[cell]
        if is_outside:
            step.targets += (cell,)
        elif not info.gathers:  # after whoever wrote to its memory before
            self._reads.append(self._value(cell))
        if info.gathers:
            # As it was before it had been given back, if it was there before.
            step.states += ((memory, OUTSIDE),)
            return template
        if not is_outside:
            template = self._fill_target(step, template, tensor)
        elif step.effect:
            step.states += ((memory, OUTSIDE),)
        if memory not in step.writes:
            step.writes += (memory,)
            step.freezes += tuple(self._held_on[memory])
        return template

    def _fill_target(self, step: Step, template: Known | First, tensor: Tensor) -> Known | First:
        """An operator writes to memory that recorded operators have made: is it filled then?"""
        info, cell = step.info, template.cell
        memory = self.memory_of[cell]
        if step.effect:
            step.states += ((memory, OUTSIDE),)
            return template
        if info.allocates:  # `resize_`, or with `out=`
            step.states += ((memory, UNFILLED),)
        if self._state[memory] is not UNFILLED:
            return template
        covers = tensor.nbytes >= tensor.untyped_storage().nbytes()
        if not info.allocates and (covers or not info.overwrites):
            step.states += ((memory, MADE),)
        is_all = tensor._base is None and covers
        return template if is_all else Filling(cell, covers)

    def _statistics(self, step: Step, tensor: Tensor, updates: bool) -> Any:
        """The template of statistics that a normalisation reads, or updates without saying so."""
        if not updates:
            return self._read_tensor(tensor, step.func, copies=True)
        template = self._name(tensor)
        memory = self.memory_of[template.cell]
        step.writes += (memory,)
        step.states += ((memory, OUTSIDE),)
        # Something else than the node that saves it has read it.
        read = [
            cell for cell in self._held_on[memory] if cell in self._read or self._run.is_checked
        ]
        step.freezes += tuple(read)
        return template

    def has_run(self, step: Step, results: Iterable[Tensor]) -> None:
        """What has become of it."""
        info = step.info
        results = [*results]
        step.count = len(results)
        step.first_cell = cell = len(self.memory_of)
        self.met = results
        for tensor in results:
            known = None if info.base == "set_" else self._find(tensor)
            memory = self.memory_of[known] if known is not None else self._memory_at(tensor)
            if step.event is BROUGHT_BACK or memory is None:
                memory = cell
                state = UNFILLED if info.allocates else MADE
                if step.effect or not _has_storage(tensor):
                    state = OUTSIDE
                step.states += ((memory, state),)
                step.sizes += ((memory, _torch.memory_size(tensor)),)
            step.memories += ((cell, memory),)
            cell += 1
        if step.event is None and not step.effect:
            made = [(cell, self._version_after(step, memory)) for cell, memory in step.memories]
            limit = most_bytes(self._run.saved_bytes, self._run.decided_bytes)
            tensors = dict(zip(made, results, strict=True))
            self._decisions.find(step, tensors, self._held, self._tensor_in, limit)
        if info.sizes_depend_on_data:
            step.line = entered_from(sys._getframe(1))
            step.is_special = True
        step.is_special |= bool(step.decides)
        self._add_results(step)
        self.met = []

    def _version_after(self, step: Step, memory: int) -> int:
        return step.index if memory in step.writes else self._written.get(memory, NOT_WRITTEN)

    def gone(self) -> tuple[int, ...]:
        """Memories of recorded operators that nobody holds any more."""
        gone = [memory for memory in self._sizes if self._is_gone(memory)]
        for memory in gone:
            del self._sizes[memory]
        return tuple(gone)

    def event(self, event: str, args: tuple[Any, ...]) -> Step:
        """What else has happened."""
        step = self._begin(None)
        step.event, step.args = event, [*args]
        if event is KEEP:
            (tensor,) = args
            cell = self._find(tensor)
            if self._is_there(cell) and self._state_at(cell) is MADE:
                self._reads.append(self._value(cell))
            else:
                step.effect = True
            step.args[0] = self._name(tensor)
        elif event is BROUGHT_BACK:
            (slot,) = args
            self._reads.append(slot.value)
            step.effect = self._value(slot.cell) != slot.value
        elif event is WRITTEN_UNSEEN:
            step.args[0] = self._name(*args)
            memory = self.memory_of[step.args[0].cell]
            step.effect, step.writes, step.states = True, (memory,), ((memory, OUTSIDE),)
        else:
            step.effect = True
            if event is UNSEEN:
                alive = [m for m in self._held_on if m not in self._parameters]
                step.freezes = tuple([cell for memory in alive for cell in self._held_on[memory]])
        step.inputs = step.args
        return self._end(step)

    def slot(self, tensor: Tensor) -> Slot:
        """What autograd saves now."""
        self._start()
        cell = self._find(tensor)
        if self._is_there(cell):
            slot = Slot(*self._value(cell), None)
        else:
            # Autograd saves it before the operator runs that fills it: there is nothing in it yet.
            hides = self._state_at(cell) is UNFILLED
            if self._run.is_read:  # then something unseen has filled it
                hides = False
                if cell is not None:
                    self._state[self.memory_of[cell]] = OUTSIDE
            first = self._first(tensor, cell, holds=True, hides=hides, name=None)
            slot = Slot(first.cell, NOT_WRITTEN, first)
        memory = self.memory_of[slot.cell]
        slot.is_held = slot.cell in self._starts
        slot.nbytes = tensor.nbytes if _has_storage(tensor) else 0
        slot.counts = memory not in self._saved
        self._saved.add(memory)
        return slot


def _is_script_object(arg: Any) -> bool:
    return isinstance(arg, torch.ScriptObject)


def _has_usual_floats(args: Any) -> bool:
    """Whether all floats are the same as any that is equal: neither nan, nor a zero with its
    sign."""
    return all(abs(arg) > 0 for arg in args if type(arg) is float)
