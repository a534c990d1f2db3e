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

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._engine import entered_from, is_parameter
from .decisions import find_decisions, is_rounded
from .match import Matcher
from .memories import MADE, OUTSIDE, UNFILLED, Memories, Memory
from .ops import GATHERING_COPY, info_of, tensors_of
from .program import (
    BROUGHT_BACK,
    FILLED,
    ON_MADE,
    WRITTEN_UNSEEN,
    First,
    Hold,
    Known,
    Like,
    Met,
    Parts,
    Slot,
    Step,
    event_after,
)
from .store import Store

_INSIDE = "an input of a region inside"
_has_storage = _torch.has_storage


class Recorder(Memories):
    """What comes next at one place of a path."""

    _step: Step  # that is recorded now; for a slot, what saving it meets and needs

    def __init__(
        self, store: Store, known: Matcher, steps: Iterable[tuple[Step, Sequence[Slot]]]
    ) -> None:
        super().__init__(store.cells, steps)
        self._known, self._store = known, store

    def _name(self, tensor: Tensor) -> Known | First:
        """The template of a tensor whose contents do not matter."""
        cell = self.find(tensor)
        if cell is None:
            return self._meet(tensor)
        return Known(cell) if cell < len(self._cells) else Met(cell)

    def _meet(self, tensor: Tensor) -> First:
        """A tensor that is not known takes the next cell."""
        cell, is_whole = len(self.memory_of), _torch.is_whole_parameter(tensor)
        origin = self._known.of(tensor, is_whole, self.met)
        memory, beside = Memory(cell, OUTSIDE), None
        if type(origin) is int:
            memory = self.memory_of[origin]
        elif origin is ON_MADE:
            memory = self.memory_at(tensor) or memory
            beside = self._known.made_at(_torch.storage_of(tensor), tensor)
        requires_grad = tensor.requires_grad
        first = First(cell, origin, memory.number, is_parameter(tensor), requires_grad, beside)
        if memory.is_lent:
            first.is_lent = first.is_parameter = True
        self.met.append(tensor)
        self.add_first(first)
        self._step.firsts += (first,)
        return first

    def _hold(
        self, template: Known | First, is_copied: bool = False, is_hidden: bool = False
    ) -> None:
        """The run is to hold what is in a cell."""
        cell, step = template.cell, self._step
        memory = self.memory_of[cell]
        asked = Hold(
            self.value(cell),
            memory.number,
            reader=step.func,
            is_read=step.func is not None or self._store.is_checked,
            is_used=not step.is_view,
            is_parameter=memory.is_parameter,
            is_lent=memory.is_lent,
            is_copied=is_copied,
            is_hidden=is_hidden,
        )
        self.add_hold(asked)
        is_whole = _torch.is_whole_parameter(self.tensor_in(cell))
        if isinstance(template, First) and is_whole and not (is_copied or asked.is_lent):
            template.refers = asked
        else:
            step.holds += (asked,)

    def _map(self, function: Callable[[Tensor], Any], arg: Any) -> Any:
        """A template of an argument, with `function` of the tensors in it."""
        if isinstance(arg, Tensor):
            return function(arg)
        if tensors_of(arg):
            return Parts(type(arg), [self._map(function, part) for part in arg])
        return arg

    # ---- steps

    def step(self, call: Any, given: dict[Any, Any]) -> Step:
        """What an operator is about to do with these arguments."""
        func, grad_mode, *_ = call
        is_gathering = func is _torch.COPY and _torch.is_called_from(_torch.FSDP_GATHERS)
        info = GATHERING_COPY if is_gathering else info_of(func)
        self._step = step = Step(self.at[0].index + 1, func, call, info, grad_mode=grad_mode)
        step.cells_before = len(self.memory_of)
        tensors = tensors_of([*given.values()])
        has_zeros = any(map(_torch.is_zeros, tensors))
        step.run = _torch.with_others_inside(info.run) if has_zeros else info.run
        if info.is_view:
            self._view(given)
        else:
            self._operate(given)
        step.inputs = dict(zip(given, step.args, strict=True))
        if grad_mode and not step.reads_metadata:
            followed = [tensor for tensor in tensors if tensor.requires_grad]
            step.differentiated = tuple([m.number for m in map(self.known_memory, followed) if m])
        if step.reads_metadata:
            step.inputs[0] = Like(given[0])
        if step.updates:
            step.inputs.update(dict.fromkeys(info.statistics))
        if given.get(info.offset) is not None:
            step.offset = info.offset
        step.is_prepared = any((step.holds, step.reads_metadata, step.offset is not None))
        return self._end(step)

    def _end(self, step: Step) -> Step:
        """The tensors that a step meets are in their cells from here on."""
        self._known.meet(step.firsts, self.met)
        self.met = []
        return step

    def _view(self, given: dict[Any, Any]) -> None:
        step = self._step
        step.is_view, step.effect = True, step.info.base == "set_"
        shows_more = step.info.offset is not None  # than what is held, perhaps: `as_strided`
        saves_freely = self._store.hooks is None  # no hooks are around the block

        def base(tensor: Tensor) -> Known | First:
            template = self._name(tensor)
            memory = self.memory_of[template.cell]
            if isinstance(template, First) and (saves_freely or template.is_parameter):
                self._hold(template)
            if memory.state is OUTSIDE and (shows_more or template.cell not in memory.there):
                step.effect = True
            else:
                step.reads += (self.value(template.cell),)
            return template

        step.args = tuple([self._map(base, arg) for arg in given.values()])

    def _operate(self, given: dict[Any, Any]) -> None:
        step, info = self._step, self._step.info
        step.reads_metadata = info.metadata_only and _torch.layout_of(given[0]) is not None
        others = {*info.targets, 0} if step.reads_metadata else {*info.targets}
        read = [arg for place, arg in given.items() if place not in others]
        written = tensors_of([given.get(place) for place in info.targets])
        # A copy within one memory, as in circular padding, is not yet a use of it.
        same = self.known_memory(written[0]) if step.func is _torch.COPY else None
        for memory in map(self.known_memory, tensors_of(read)):
            # Something unseen has filled what is read: a raw kernel, `ctypes`, NumPy.
            if memory is not None and memory is not same and memory.state is UNFILLED:
                memory.state = OUTSIDE
                step.states += ((memory.number, OUTSIDE),)
        step.updates = bool(given.get(info.switch, info.statistics))  # no switch: if it has any
        step.effect = (
            info.communicates
            or given.get(info.random_state) is not None
            or not all(map(self._can_be_made, written))
        )
        elsewhere = {torch.Generator, torch.device} & {*map(type, given.values())}
        step.is_quick_draw = not (info.custom or elsewhere)
        step.draws = info.may_draw and not step.effect
        step.args = tuple([self._template(place, arg) for place, arg in given.items()])

    def _can_be_made(self, target: Tensor) -> bool:
        """Whether what is written can be made again: nobody unseen has had a part in it. Numbers
        that are drawn without a random state are kept instead, so no other tensor may show that
        memory, and nobody may have read it."""
        info, cell = self._step.info, self.find(target)
        if cell is None:
            return False
        memory = self.memory_of[cell]
        is_fresh = memory.state is UNFILLED and memory.cells == [cell]
        if info.may_draw and not (self._store.preserve_rng_state or is_fresh):
            return False
        if memory.state is UNFILLED:
            return info.overwrites
        return memory.state is MADE

    def _template(self, place: int | str, arg: Any) -> Any:
        """The template of an operator's argument."""
        step, info = self._step, self._step.info
        if place in info.targets:
            return self._map(self._target, arg)
        if step.effect:
            # Any process group will do, since the operator is never replayed.
            is_object = isinstance(arg, torch.ScriptObject)
            return type(arg) if is_object else self._map(self._name, arg)
        if step.reads_metadata and place == 0:
            return self._name(arg)
        return self._map(self._statistics if place in info.statistics else self._read, arg)

    def _read(self, tensor: Tensor, is_copied: bool = False) -> Known | First:
        """The template of a tensor whose contents an operator reads."""
        template = self._name(tensor)
        memory = self.memory_of[template.cell]
        if memory.state is OUTSIDE:
            there = memory.there.get(template.cell)
            copies = is_copied or memory.is_state
            if there is None:
                self._hold(template, copies)
            elif there.is_copied or not copies:
                there.is_read = there.is_used = True
            else:
                there.is_used = True
                if is_copied:  # autograd has saved the tensor
                    template = self._meet(tensor)
                self._hold(template, copies)
        self._step.reads += (self.value(template.cell),)
        return template

    def _statistics(self, tensor: Tensor) -> Known | First:
        """The template of statistics that a normalisation reads, or updates without saying so."""
        step = self._step
        if not step.updates:
            return self._read(tensor, is_copied=True)
        template = self._name(tensor)
        number = self.memory_of[template.cell].number
        step.writes += (number,)
        step.states += ((number, OUTSIDE),)
        return template

    def _target(self, tensor: Tensor) -> Known | First:
        """The template of a tensor that the operator writes."""
        step, info = self._step, self._step.info
        template = self._name(tensor)
        memory = self.memory_of[template.cell]
        state = memory.state
        if step.effect:
            state = OUTSIDE
        else:  # after whoever wrote to its memory before
            step.reads += (self.value(template.cell),)
            if info.allocates:  # `resize_`, or with `out=`
                state = UNFILLED
            elif template.cell in memory.whole:
                state = MADE
            elif state is UNFILLED:
                step.fills_part = True
        step.states += ((memory.number, state),)
        step.targets += (template.cell,)
        # FSDP2 gathers parameters: they are as they were before their memory had been given back.
        if memory.number not in step.writes and not info.gathers:
            step.writes += (memory.number,)
        return template

    def has_run(self, step: Step) -> None:
        """Record the results of an operator, which are in their cells."""
        info = step.info
        for cell in range(len(self.memory_of), len(self._cells)):
            tensor = self.tensor_in(cell)
            memory = self.memory_at(tensor)
            if step.event is BROUGHT_BACK and (step.effect or memory not in self.brought_back):
                memory = None  # only parts of what has been made again share one
            if memory is None:
                state = UNFILLED if info.allocates else MADE
                if step.effect or not _has_storage(tensor):
                    state = OUTSIDE
                memory = Memory(cell, state)
                step.states += ((cell, state),)
                step.sizes += ((cell, _torch.memory_size(tensor)),)
                if not is_rounded(tensor):
                    step.integers += (cell,)
            step.memories += ((cell, memory.number),)
        step.count = len(step.memories)
        self.add(step)
        if step.event is None and not step.effect:
            find_decisions(self, step, self._store)
        self.add_decisions(step)
        if self._store.placement is not None:
            self.find_gone(step)
        if info.sizes_depend_on_data:
            step.line = entered_from(sys._getframe(1))
        does_more = step.updates, step.draws, step.fills_part, step.line, step.decides
        reasons = step.is_prepared, step.effect, info.is_uncounted, *does_more
        step.is_special = any(reasons)

    def event(self, event: str, args: tuple[Any, ...]) -> Step:
        """What has happened that is no operator: `keep`, `opaque`, a write that nobody saw."""
        self._step = step = event_after(self.at[0], event, args)
        if event is BROUGHT_BACK:
            (slot,) = args
            step.reads = (slot.value,)
            step.effect = self.value(slot.cell) != slot.value
        elif args:  # something has happened to a tensor
            step.args = (self._name(*args),)
            cell = step.args[0].cell
            memory = self.memory_of[cell]
            if event is FILLED:
                step.states = ((memory.number, MADE),)
            elif event is WRITTEN_UNSEEN:
                step.writes, step.states = (memory.number,), ((memory.number, OUTSIDE),)
            elif memory.state is MADE:
                value = self.value(cell)
                step.effect, step.reads = False, (value,)
                step.decides = (Hold(value, memory.number),)
        return self._end(step)

    def slot(self, tensor: Tensor, is_read: bool) -> Slot:
        """What autograd saves now; `is_read`: for a region inside."""
        self._step = step = Step(-1, _INSIDE if is_read else None)
        template = self._name(tensor)
        cell = template.cell
        memory = self.memory_of[cell]
        if memory.state is UNFILLED and is_read:  # then something unseen has filled it
            memory.state = OUTSIDE
        if memory.state is not MADE and cell not in memory.there:
            # Autograd saves it before the operator runs that fills it: nothing is in it yet.
            self._hold(template, is_hidden=memory.state is UNFILLED)
        slot = Slot(self.value(cell), step.firsts, step.holds, is_read)
        slot.is_usual = not any((step.firsts, step.holds, is_read))
        slot.memory = None if memory.is_saved else memory.number
        self.has_saved(memory)
        self._end(step)
        return slot
