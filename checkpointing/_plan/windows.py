"""Windows: the steps that one replay runs, as instructions over a table of tensors.

Invariant: a window follows from the path of a run alone, and holds no tensor. It is found once for
all runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._record import BROUGHT_BACK, First, Known, Like, Parts, Path, Slice, Slot, Step, Value

# A target that a window has made: its number, its place, and the part of a memory, or the whole,
# that a write may change with it. (The garbage collector does not track plain tuples of integers.)
Found = tuple[int, int, int]


class Instruction:
    """One step of a window: where on the table its arguments are, and where its results go."""

    def __init__(self, step: Step, given: dict[Any, Any]) -> None:
        """`given` are places on the table, by place or name of the argument."""
        self.step, self.index, self.places = step, step.index, (*given.values(),)
        named = {name: arg for name, arg in step.inputs.items() if type(name) is str}
        self.args = self.places[: len(given) - len(named)]
        self.kwargs = {name: given[name] for name in named}
        self.run: Callable[..., Any] = step.run
        if step.offset is not None:
            self.run = partial(_call_with_offset, step.run, step.offset)
        if step.reads_metadata:
            self.run = partial(_call_like, self.run)
        if step.info.base == "set_":
            self.run = partial(_call_with_alias, self.run)
        # With the keywords that are constants.
        self.call = partial(self.run, **named) if named else self.run
        holds_tensors = any(isinstance(arg, Known | First | Parts) for arg in named.values())
        is_flat = all(type(place) is int for place in self.args) and not holds_tensors
        # Whether there is nothing to do but to call `call` with the tensors in `args`.
        self.is_quick = is_flat and not (step.draws or step.info.sizes_depend_on_data)
        self.results: tuple[int, ...] = ()
        self.wanted: tuple[Found, ...] = ()  # after it
        self.dead: tuple[int, ...] = ()  # places that nothing reads any more
        self.writes: tuple[int, ...] = ()  # parts that it writes, with targets found before
        self.targets = tuple([given[place] for place in step.info.targets if place in given])

    def take(self, own: dict[int, Any], table: list[Any]) -> None:
        """Put arguments that the run has of its own in their places."""
        for number, value in own.items():
            table[self.places[number]] = value


class Window:
    """The instructions that make some values, over a table of tensors and constants."""

    def __init__(self, path: Path, targets: Mapping[int, Slot], slice_: Slice) -> None:
        """`slice_` is what makes the targets."""
        self.path, self.targets = path, targets
        order, starts, _ = slice_
        steps = [path.steps[index] for index in order]
        self.counted = sum(step.is_counted for step in steps)
        # Statistics are not updated again.
        self.written = {m for step in steps if not step.updates for m in step.writes}
        self.table: list[Any] = []
        # By start, and by cell of what is computed. A start on memory that steps write is computed.
        # What is from outside never is: the steps of a window write that memory as it was before.
        self._places: dict[Any, int] = {}
        self.starts = []
        for value in starts:
            is_written = value not in path.given and path.memory_of[value[0]] in self.written
            place = self._place(value[0] if is_written else value)
            self.starts.append((place, value, is_written))
        for step in steps:
            for cell, _ in step.memories:
                self._place(cell)
        self._tensors = len(self.table)  # constants lie behind them
        self.instructions = [self._instruction(step) for step in steps]
        grad_mode = None
        for instruction in self.instructions:  # those that are not quick set the grad mode
            instruction.is_quick &= instruction.step.grad_mode is grad_mode
            grad_mode = instruction.step.grad_mode
        self._find_wanted(starts)
        self._find_last_uses()

    def _place(self, key: Any) -> int:
        if key not in self._places:
            self._places[key] = len(self.table)
            self.table.append(None)
        return self._places[key]

    def _place_of(self, value: Value) -> int:
        """Where a value is: a start, or what steps have made in its cell."""
        return self._places[value if value in self._places else value[0]]

    def _argument(self, template: Any, versions: Mapping[int, int]) -> Any:
        """The place of an argument on the table, or a list of places."""
        if isinstance(template, Known | First):
            return self._place_of((template.cell, versions[template.cell]))
        if type(template) is Parts:
            return template.kind, [self._argument(item, versions) for item in template.items]
        self.table.append(template)
        return len(self.table) - 1

    def _instruction(self, step: Step) -> Instruction:
        versions = dict(step.reads)
        if step.event is BROUGHT_BACK:
            made = Instruction(step, {0: self._place_of(step.reads[0])})
            memories = {self.path.memory_of[step.reads[0][0]], *dict(step.memories).values()}
            made.run = made.call = torch.clone if memories & self.written else _same
        else:
            inputs = step.inputs.items()
            made = Instruction(step, {key: self._argument(arg, versions) for key, arg in inputs})
        made.results = tuple([self._places[cell] for cell, _ in step.memories])
        return made

    def _find_wanted(self, starts: Set[Value]) -> None:
        """Find when each target is there, and which writes come after that."""
        part_of = self._parts()
        wanted: dict[int, list[Found]] = defaultdict(list)  # by step
        for number, slot in self.targets.items():
            index = -1 if slot.value in starts else self.path.there_after(slot.value)
            wanted[index].append((number, self._place_of(slot.value), part_of[slot.cell]))
        self.at_once = wanted[-1]
        exposed = {part for *_, part in self.at_once}
        for instruction in self.instructions:
            written = {part_of[cell] for cell in instruction.step.targets}
            instruction.writes = tuple(written & exposed)
            instruction.is_quick &= not instruction.writes
            instruction.wanted = tuple(wanted[instruction.index])
            exposed.update([part for *_, part in instruction.wanted])

    def _parts(self) -> dict[int, int]:
        """By cell that is written or wanted: its memory. Where an operator has split that, and
        nothing else of it is written or wanted, the part that the cell lies in. (What a region
        inside takes is copied with all of its memory.)"""
        memory_of, parts, slots = self.path.memory_of, self.path.parts, self.targets.values()
        cells = {slot.cell for slot in slots}
        cells.update(cell for each in self.instructions for cell in each.step.targets)
        whole = {memory_of[cell] for cell in cells if cell not in parts}
        whole.update(memory_of[slot.cell] for slot in slots if slot.is_read)
        return {
            cell: memory_of[cell] if memory_of[cell] in whole else parts[cell] for cell in cells
        }

    def _find_last_uses(self) -> None:
        later = {*range(self._tensors, len(self.table))}  # constants are never dropped
        for instruction in reversed(self.instructions):
            places = {*_flatten(instruction.places), *instruction.results}
            places.update([place for _, place, _ in instruction.wanted])
            instruction.dead = tuple(places - later)
            later |= places


def _flatten(places: Iterable[Any]) -> Iterable[int]:
    for place in places:
        if type(place) is int:
            yield place
        else:
            yield from _flatten(place[1])


def _call_like(function: Callable[..., Any], like: Like, *args: Any, **named: Any) -> Any:
    """Call a function that reads only the metadata of its first argument."""
    return function(like.make(), *args, **named)


def _call_with_offset(function: Callable[..., Any], place: int, *args: Any, **named: Any) -> Any:
    """Call a function whose offset counts from that of its first argument."""
    offset = args[place] + args[0].storage_offset()
    return function(*args[:place], offset, *args[place + 1 :], **named)


def _call_with_alias(function: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
    """Call a function that gives its first argument other memory: it may be a target."""
    return function(_torch.alias(tensor), *args)


def _same(tensor: Tensor) -> Tensor:
    return tensor
