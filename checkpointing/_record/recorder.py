"""Recording: what a new step of a program does to memory.

A run that meets an operator call which its program does not know asks a `Recorder` for a new step.
The recorder looks at storages and at the operator's schema to find who wrote to the memory that
each argument uses, and what the run must hold. It may take its time, since it runs once for each
new step, in all runs together.

A value is replayable, or it is held. Replayable is what recorded operators make from what is held:

- Of memory that recorded operators have made, and nobody else has written (`MADE`), all is
  replayable.
- Memory that is allocated, and not yet filled by recorded operators (`UNFILLED`), has no value. Who
  reads it reads what something unseen has filled: it is from outside. Whether parts fill it follows
  from their geometry, so each run finds that out, as an event (`FILLED`).
- Of all other memory (`OUTSIDE`) a value is held as it is when it is read. Views of what is held
  are replayable.

An operator that writes to memory from outside is an *effect*: it runs once, and what it writes and
returns is from outside.

Invariant: replaying a step on its inputs gives the bits that it gave the first time.

Rejected: keeping a recorder while a run follows its program. What a recorder knows follows from the
path, so it is found again when the run leaves the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._engine import entered_from, is_parameter, root_of
from .memories import MADE, OUTSIDE, UNFILLED, Memories, Memory
from .ops import Info, by_place, tensors_of
from .origins import Cells, Origins
from .program import (
    BROUGHT_BACK,
    FILLED,
    KEEP,
    ON_MADE,
    OWN,
    PLAIN,
    WRITTEN_UNSEEN,
    First,
    Hold,
    Known,
    Like,
    Met,
    Parts,
    Slot,
    Step,
    Thing,
    Value,
)

# Types of arguments that are compared with `==`, by whether all lists are sizes, and all floats
# usual.
_COMPARED = {
    (False, False): PLAIN,
    (False, True): PLAIN | {float},
    (True, False): PLAIN | {list},
    (True, True): PLAIN | {list, float},
}
_INSIDE = "an input of a region inside"
_is_grad_enabled = torch.is_grad_enabled
_storage_of, _has_storage = _torch.storage_of, _torch.has_storage


class Recorder(Memories):
    """What comes next at one place of a path."""

    def __init__(
        self,
        cells: Cells,
        origins: Origins,
        steps: Iterable[tuple[Step, Sequence[Slot]]],
        saves_freely: bool,
    ) -> None:
        """`saves_freely`: no hooks are around the block."""
        super().__init__(cells, steps)
        self._origins, self._saves_freely = origins, saves_freely

    def _start(self) -> None:
        self.met = []
        self._reads: list[Value] = []
        self._firsts: list[First] = []
        self._holds: list[Hold] = []

    def _name(self, tensor: Tensor) -> Known | First:
        """The template of a tensor whose contents do not matter."""
        cell = self.find(tensor)
        if cell is None:
            return self._meet(tensor)
        return Known(cell) if cell < len(self._cells) else Met(cell)

    def _meet(self, tensor: Tensor) -> First:
        """A tensor that is not known takes the next cell."""
        cell, origin = len(self.memory_of), self._origins.of(tensor, self.met)
        there = self.memory_at(tensor)
        memory = there if origin is ON_MADE else None
        if type(origin) is int:
            memory = self.memory_of[origin]
        number = cell if memory is None else memory.number
        first = First(
            cell, origin, number, is_parameter(root_of(tensor)), requires_grad=tensor.requires_grad
        )
        if memory is not None and memory.is_lent:
            first.is_lent = first.is_parameter = True
        elif first.is_parameter and origin is OWN and there is not None:
            first.is_lent = True  # on memory that the block has made: gathered from one process
        self.met.append(tensor)
        self.add_first(first)
        self._firsts.append(first)
        return first

    def _hold(self, template: Known | First, reader: Any, **how: bool) -> None:
        """The run is to hold what is in a cell."""
        cell = template.cell
        memory = self.memory_of[cell]
        asked = Hold(self.value(cell), memory.number, reader, memory.is_parameter, **how)
        asked.is_lent, asked.is_read = memory.is_lent, reader is not None
        self.add_hold(asked)
        is_whole = _torch.is_whole_parameter(self.tensor_in(cell))
        if isinstance(template, First) and is_whole and not (how or asked.is_lent):
            template.refers = asked
        else:
            self._holds.append(asked)

    def _read(self, tensor: Tensor, reader: Any, is_copied: bool = False) -> Known | First:
        """The template of a tensor whose contents an operator reads."""
        template = self._name(tensor)
        memory = self.memory_of[template.cell]
        there = memory.there.get(template.cell)
        if memory.state is OUTSIDE and (is_copied or memory.is_state):
            if there is None or not there.is_copied:
                if is_copied and template.cell in memory.there:  # autograd has saved the tensor
                    template = self._meet(tensor)
                self._hold(template, reader, is_copied=True)
        elif there is not None:
            there.is_read = True
        elif not memory.has(template.cell):
            self._hold(template, reader)
        self._reads.append(self.value(template.cell))
        return template

    def _map(self, function: Callable[[Tensor], Any], arg: Any) -> Any:
        """A template of an argument, with `function` of the tensors in it."""
        if isinstance(arg, Tensor):
            return function(arg)
        if tensors_of(arg):
            return Parts(type(arg), [self._map(function, part) for part in arg])
        return arg

    # ---- steps

    def step(self, parent: Step, info: Info, func: Any, args: Any, kwargs: Any) -> Step:
        """What an operator is about to do."""
        self._start()
        step = Step(parent, func, info=info, grad_mode=_is_grad_enabled())
        step.call = func, step.grad_mode, len(args), (*kwargs,)
        given = by_place(args, kwargs)
        step.plain = _COMPARED[info.has_sizes, _has_usual_floats(given.values())]
        step.run = info.run
        if any(map(_torch.is_zeros, tensors_of(args))):
            step.run = _torch.with_zeros(info.run)
        if info.ignored:
            self._view(step, given)
        else:
            self._operate(step, args, kwargs, given)
        step.inputs = step.args[: len(args)]
        if kwargs:
            step.named = dict(zip(kwargs, step.args[len(args) :], strict=True))
        if step.reads_metadata:
            step.inputs = (Like(args[0]), *step.inputs[1:])
        if step.updates:
            step.inputs = tuple(
                None if place in info.statistics else arg for place, arg in enumerate(step.inputs)
            )
        if info.offset in given and given[info.offset] is not None:
            step.offset = info.offset
        return self._end(step)

    def _end(self, step: Step) -> Step:
        step.reads, step.firsts = tuple(self._reads), tuple(self._firsts)
        step.holds = tuple(self._holds)
        step.is_prepared = any((step.holds, step.reads_metadata, step.offset is not None))
        is_other = step.run is not step.info.run
        is_noted = step.updates or step.draws or step.fills_part
        step.is_special = any((step.is_prepared, is_noted, step.effect, is_other))
        return step

    def _view(self, step: Step, given: dict[int | str, Any]) -> None:
        step.is_view = True
        is_view = step.info.base != "set_"
        are_there = [is_view]

        def base(tensor: Tensor) -> Known | First:
            template = self._name(tensor)
            memory = self.memory_of[template.cell]
            if (
                is_view
                and type(template) is First
                and (self._saves_freely or template.is_parameter)
            ):
                self._hold(template, step.func)
            is_there = memory.state is UNFILLED or memory.has(template.cell)
            if is_there:
                self._reads.append(self.value(template.cell))
            are_there.append(is_there)
            return template

        step.args = tuple([self._map(base, arg) for arg in given.values()])
        step.effect = not all(are_there)

    def _operate(self, step: Step, args: Any, kwargs: Any, given: dict[int | str, Any]) -> None:
        info = step.info
        lent = (0,) if info.metadata_only else ()
        places = given.keys() - {*info.targets, *lent}
        for tensor in tensors_of([given[place] for place in given if place in places]):
            cell = self.find(tensor)
            # Something unseen has filled what is read: a raw kernel, `ctypes`, NumPy.
            if cell is not None and (memory := self.memory_of[cell]).state is UNFILLED:
                memory.state = OUTSIDE
                step.states += ((memory.number, OUTSIDE),)
        written = info.targets_of(args, kwargs)
        step.updates = info.updates_statistics(args)
        step.effect = info.communicates or any(self._is_outside(each, info) for each in written)
        step.draws = info.may_draw and not step.effect
        has_generator = torch.Generator in map(type, given.values())
        step.is_quick_draw = not (info.custom or has_generator)
        step.args = tuple([self._template(step, place, arg) for place, arg in given.items()])

    def _is_outside(self, tensor: Tensor, info: Info) -> bool:
        """Whether what is written cannot be made again: it was there before, or something unseen
        has filled it."""
        cell = self.find(tensor)
        if cell is None:
            return True
        state = self.memory_of[cell].state
        return state is OUTSIDE or (state is UNFILLED and not info.fills)

    def _template(self, step: Step, place: int | str, arg: Any) -> Any:
        """The template of an operator's argument."""
        info = step.info
        if place in info.targets:
            return self._map(lambda tensor: self._target(step, tensor), arg)
        if step.effect:
            is_object = isinstance(arg, torch.ScriptObject)
            return Thing(type(arg)) if is_object else self._map(self._name, arg)
        if isinstance(arg, Tensor):
            if place == 0 and info.metadata_only and _has_storage(arg):
                step.reads_metadata = True
                return self._name(arg)
            if place in info.statistics:
                return self._statistics(step, arg)
        return self._map(lambda tensor: self._read(tensor, step.func), arg)

    def _target(self, step: Step, tensor: Tensor) -> Known | First:
        """The template of a tensor that the operator writes."""
        info, template = step.info, self._name(tensor)
        memory = self.memory_of[template.cell]
        state = memory.state
        if step.effect:
            state = OUTSIDE
        else:  # after whoever wrote to its memory before
            self._reads.append(self.value(template.cell))
            if info.allocates:  # `resize_`, or with `out=`
                state = UNFILLED
            elif template.cell in memory.whole or not info.overwrites:
                state = MADE
            elif state is UNFILLED:
                step.fills_part = True
        step.states += ((memory.number, state),)
        step.targets += (template.cell,)
        # FSDP2 gathers parameters: they are as they were before their memory had been given back.
        if memory.number not in step.writes and not info.gathers:
            step.writes += (memory.number,)
        return template

    def _statistics(self, step: Step, tensor: Tensor) -> Known | First:
        """The template of statistics that a normalisation reads, or updates without saying so."""
        if not step.updates:
            return self._read(tensor, step.func, is_copied=True)
        template = self._name(tensor)
        memory = self.memory_of[template.cell]
        step.writes += (memory.number,)
        step.states += ((memory.number, OUTSIDE),)
        return template

    def has_run(self, step: Step, results: list[Tensor], limit: int) -> None:
        """Record the results of an operator, which are in their cells. `limit`: bytes of decisions
        that may be held."""
        info = step.info
        self.met = []
        step.count, step.first_cell = len(results), len(self.memory_of)
        made: dict[Value, Tensor] = {}
        for cell, tensor in enumerate(results, step.first_cell):
            known = None if info.base == "set_" else self.find(tensor)
            memory = self.memory_at(tensor) if known is None else self.memory_of[known]
            if step.event is BROUGHT_BACK or memory is None:
                state = UNFILLED if info.allocates else MADE
                if step.effect or not _has_storage(tensor):
                    state = OUTSIDE
                memory = Memory(cell, state)
                step.states += ((cell, state),)
                step.sizes += ((cell, _torch.memory_size(tensor)),)
            step.memories += ((cell, memory.number),)
            version = step.index if memory.number in step.writes else memory.version
            made[cell, version] = tensor
        if step.event is None and not step.effect:
            computed = [each for each in step.reads if self.memory_of[each[0]].state is not OUTSIDE]
            decided = self.decisions.find(step, computed, made, self.tensor_in, limit)
            numbers = {cell: self.memory_of[cell].number for cell, _ in computed}
            numbers.update(step.memories)
            step.decides = tuple([Hold(value, numbers[value[0]], None) for value in decided])
        if info.sizes_depend_on_data:
            step.line = entered_from(sys._getframe(1))
        step.is_special |= bool(step.decides) or info.sizes_depend_on_data
        self.add(step)

    def event(self, parent: Step, event: str, args: tuple[Any, ...]) -> Step:
        """What has happened that is no operator: `keep`, `opaque`, a write that nobody saw."""
        self._start()
        step = Step(parent, None, (event,), event=event, args=args)
        step.effect = True
        if event is KEEP:
            step.args = (self._name(*args),)
            cell = step.args[0].cell
            memory = self.memory_of[cell]
            if memory.state is MADE:
                step.effect = False
                self._reads.append(self.value(cell))
                step.decides = (Hold(self.value(cell), memory.number, None),)
        elif event is BROUGHT_BACK:
            (slot,) = args
            self._reads.append(slot.value)
            step.effect = self.value(slot.value[0]) != slot.value
        elif event in (FILLED, WRITTEN_UNSEEN):
            step.args = (self._name(*args),)
            number = self.memory_of[step.args[0].cell].number
            if event is FILLED:
                step.states = ((number, MADE),)
            else:
                step.writes, step.states = (number,), ((number, OUTSIDE),)
        step.inputs = step.args
        return self._end(step)

    def slot(self, tensor: Tensor, is_read: bool, joins: bool) -> Slot:
        """What autograd saves now; `is_read`: for a region inside, `joins`: as another part of the
        tensor before."""
        self._start()
        template = self._name(tensor)
        cell = template.cell
        memory = self.memory_of[cell]
        if memory.state is UNFILLED and is_read:  # then something unseen has filled it
            memory.state = OUTSIDE
        if not memory.has(cell):
            # Autograd saves it before the operator runs that fills it: nothing is in it yet.
            how = {"is_hidden": True} if memory.state is UNFILLED else {}
            self._hold(template, _INSIDE if is_read else None, **how)
        slot = Slot(self.value(cell), is_read=is_read, joins=joins)
        slot.first = template if type(template) is First else None
        slot.hold = self._holds[0] if self._holds else None
        slot.is_held = slot.value in self.held
        slot.is_usual = not any((slot.first, slot.hold, joins, is_read))
        slot.nbytes = tensor.nbytes if _has_storage(tensor) else 0
        slot.counts = not memory.is_saved
        memory.is_saved = True
        return slot


def _has_usual_floats(args: Any) -> bool:
    """Whether all floats are the same as any that is equal: neither nan, nor a zero with its
    sign."""
    return all(abs(arg) > 0 for arg in args if type(arg) is float)
