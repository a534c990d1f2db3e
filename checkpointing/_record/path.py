"""Paths: which steps of one way through a program make which values.

Invariant: a path follows from the steps alone, and holds no tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from copy import copy
from typing import Any, NamedTuple

from .. import _torch
from .program import KEEP, NOT_WRITTEN, First, Hold, Known, Parts, Slot, Step, Value, with_saves


class Slice(NamedTuple):
    """What makes some values."""

    steps: list[int]
    starts: Set[Value]
    without: Set[Value]  # kept values from which it can't start


class Path:
    """One way through a program, as far as it has been run."""

    def __init__(self, root: Step, steps: Sequence[Step], saved: int) -> None:
        """`saved` tensors have been saved after the last step."""
        self.steps = [*steps]
        self.slots: list[Slot] = []
        self.saved_after: list[int] = []  # by slot: a step
        self.saved_for: list[int] = []  # by slot: the step whose backward wants it
        self.given: set[Value] = set()  # held, since no step makes them
        self.parameters: set[Value] = set()  # those among them
        self.kept: set[Value] = set()  # held, though steps make them
        self.cuts: list[int] = []  # steps at which something was kept
        self.memory_of: dict[int, int] = {}
        # Steps, by memory; the first stands for whatever was there before.
        self._writers: dict[int, list[int]] = defaultdict(lambda: [NOT_WRITTEN])
        self.trained: list[int] = []  # cells of parameters, and of other tensors that require grad
        # By cell: the part that it shows of what an operator has made and another one has split.
        # (A third one may split that again otherwise: its parts would overlap with these.)
        self.parts: dict[int, int] = {}
        self._split_by: dict[int, int] = {}  # by memory that has parts: the step that made them
        # By cell: the first one that shows as much: that of its memory, or a view of a part.
        self.extent: dict[int, int] = {}
        # Cells of what steps have made, and of views of that without overlaps.
        self._plain: set[int] = set()
        self._maker: dict[int, int] = {}
        # By cell of what shares memory with an argument: that argument.
        self._bases: dict[int, int] = {}
        # By cell of a view: the first one that shows the same, made by the same operators.
        self.views: dict[int, int] = {}
        self._shown: dict[Any, int] = {}
        seen: set[Value] = set()
        for step, saves in with_saves(root, self.steps, saved):
            self._add_step(step)
            for slot in saves:
                self._add_met(slot)
                # A result of a step is saved just after it for its own backward, and only once.
                is_own = slot.value not in seen and self._saves(step, slot.cell)
                seen.add(slot.value)
                self.slots.append(slot)
                self.saved_after.append(step.index)
                self.saved_for.append(step.index if is_own else step.index + 1)
        del self._shown  # it is large, and only needed to build the path

    def _add_step(self, step: Step) -> None:
        self._add_met(step)
        splits = len(step.memories) > 1
        for cell, memory in step.memories:
            self.memory_of[cell] = memory
            self._maker[cell] = step.index
            base = self._base_of(step, memory)
            self.extent[cell] = memory if base is None else self.extent[base]
            if base is None:
                self._plain.add(cell)
                continue
            if step.takes_part or (splits and step.is_alias):
                self.extent[cell] = cell
            self._bases[cell] = base
            if step.is_alias and not step.varies:
                self._add_view(step, cell, base)
            if base in self._plain and step.info.base not in _OVERLAPPING:
                self._plain.add(cell)
                if base in self.parts:
                    self.parts[cell] = self.parts[base]
                elif (
                    splits
                    and self.extent[base] == memory
                    and self._split_by.setdefault(memory, step.index) == step.index
                ):
                    self.parts[cell] = cell
        for memory in step.writes:
            self._writers[memory].append(step.index)
        self.kept.update([asked.value for asked in step.decides])
        if step.event is KEEP and not step.effect:
            self.cuts.append(step.index)

    def _saves(self, step: Step, cell: int) -> bool:
        """Whether autograd saves a result of a step for the backward of that step itself."""
        results = [*dict(step.memories), *step.targets]
        if step.is_view or cell not in results:
            return False
        return cell != results[0] or _torch.saves_its_result(step.func)

    def _add_view(self, step: Step, cell: int, base: int) -> None:
        """Note what a view shows: the same as another one that was made by the same operator, with
        the same numbers, of what shows the same."""
        tensors = Known | First | Parts
        given = [arg for arg in step.inputs.values() if not isinstance(arg, tensors)]
        place = cell - step.memories[0][0]
        key = step.func, self.views.get(base, base), place, repr(given)
        self.views[cell] = self._shown.setdefault(key, cell)

    def _base_of(self, step: Step, memory: int) -> int | None:
        """The argument on the same memory as a result: what the step writes, or else its first
        argument. None if there is none, or more than one."""
        cells = step.targets or [cell for cell, _ in step.reads[:1]]
        there = [cell for cell in cells if self.memory_of[cell] == memory]
        return there[0] if len(there) == 1 else None

    def _add_met(self, here: Step | Slot) -> None:
        for asked in here.holds:
            self._add_given(asked)
        for first in here.firsts:
            self.memory_of[first.cell] = self.extent[first.cell] = first.memory
            if first.refers is not None:
                self._add_given(first.refers)
            if first.requires_grad and not first.is_lent:
                self.trained.append(first.cell)

    def _add_given(self, asked: Hold) -> None:
        self.given.add(asked.value)
        if asked.is_parameter:
            self.parameters.add(asked.value)

    def placed(self, values: Iterable[Value], cuts: Iterable[int]) -> Path:
        """The path of a run that keeps these values, too, and has segments that begin at these
        steps."""
        path = copy(self)
        path.kept = self.kept.union(values)
        path.cuts = sorted([*self.cuts, *cuts])
        return path

    def is_held(self, value: Value) -> bool:
        """Whether a run holds a value, so that nothing need compute it."""
        return value in self.given or value in self.kept

    def made_by(self, value: Value) -> tuple[int, list[Value]]:
        """The step after which a value is there, and the values that it takes: what the step reads,
        and, if it has written to a tensor that was there, that tensor as it was before."""
        cell, version = value
        index = self.there_after(value)
        reads = [*self.steps[index].reads]
        if index != self._maker[cell]:
            writers = self._writers[self.memory_of[cell]]
            reads.append((cell, writers[bisect_left(writers, version) - 1]))
        return index, reads

    def is_current(self, value: Value) -> bool:
        """Whether nothing has written to a value."""
        cell, version = value
        return version == self._writers[self.memory_of[cell]][-1]

    def there_after(self, value: Value) -> int:
        """The step after which a run can keep a value; -1 if it is there from the beginning."""
        cell, version = value
        return max(self._maker.get(cell, NOT_WRITTEN), version)

    def slice_of(self, values: Collection[Value], without: Set[Value] = frozenset()) -> Slice:
        """The steps that make these values, in order, and what they start from, but for kept values
        in `without`, and those that can't stand for their memory here."""
        found: set[int] = set()
        starts: set[Value] = set()
        seen: set[Value] = set()
        stack = [*values]
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if self.is_held(value) and value not in without:
                starts.add(value)
            else:
                index, reads = self.made_by(value)
                found.add(index)
                stack += reads
        if banned := self._not_for_all(found, starts - self.given):
            return self.slice_of(values, without | banned)
        return Slice(sorted(found), starts, without)

    def _not_for_all(self, found: Set[int], kept: Set[Value]) -> Set[Value]:
        """The kept values that can't stand for their memory, since these steps make it, too, as it
        was before. In

            y = x.exp()
            row = y[0]
            y.mul_(2)  # `y` is kept here
            y.add_(1)

        `row` needs `y` as it was when `row` was made. `add_` on a copy of the kept `y` would not
        show in it, nor in a copy of a kept `row`: where steps write, one value stands for all of
        the memory."""
        if not kept:
            return frozenset()
        made_at: dict[int, int] = {}
        written: set[int] = set()
        for step in [self.steps[index] for index in sorted(found, reverse=True)]:
            if not step.is_alias:
                made_at.update((memory, step.index) for _, memory in step.memories)
            if not step.updates:
                written.update(step.writes)
        after = {value: self.there_after(value) for value in kept}
        # The earliest first; of those that are there at once, the one that shows most.
        in_order = sorted(kept, key=lambda v: (after[v], len(self._line(v[0])), v))
        banned: set[Value] = set()
        taken: set[int] = set()  # memories that are written, and for which another value stands
        for value in in_order:
            memory = self.memory_of[value[0]]
            if made_at.get(memory, after[value]) < after[value] or memory in taken:
                banned.add(value)
            if memory in written:
                taken.add(memory)
        return banned

    def newest(self, value: Value) -> int:
        """The last operator that made something of a value; -1 if the value, or what it is a view
        of, is held."""
        while not self.is_held(value):
            index, reads = self.made_by(value)
            if not (self.steps[index].is_alias and reads):
                return index
            value = reads[0]
        return -1

    def maker_of(self, value: Value) -> Step | None:
        """The operator that made a value, for reports; None if it is from outside, or something
        unseen has written it."""
        while (index := self.there_after(value)) >= 0:
            step = self.steps[index]
            if not (step.is_alias or step.event) or not step.reads:
                return step if step.func else None
            value = step.reads[0]
        return None

    def writes_to(self, step: Step, cell: int) -> bool:
        """Whether a step writes to the tensor in this cell, to what that is a view of, or to a view
        of it. Two views of one tensor are parts of it: mostly, they lie apart."""
        line = self._line(cell)
        for target in step.targets:
            other = self._line(target)
            if line[0] in other or other[0] in line:
                return True
        return not step.targets

    def bases_of(self, cell: int) -> Iterator[int]:
        """A tensor, what it is a view of, and so on."""
        found: int | None = cell
        while found is not None:
            yield found
            found = self._bases.get(found)

    def _line(self, cell: int) -> list[int]:
        """A tensor and its bases; of views that show the same, always the first one."""
        return [self.views.get(each, each) for each in self.bases_of(cell)]


# Views that may show an element more than once, or what their base does not.
_OVERLAPPING = frozenset({"as_strided", "as_strided_", "expand", "unfold"})
