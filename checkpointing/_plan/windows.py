"""Windows: which steps one replay runs.

Opening a holder replays its *window*: the steps that its value depends on, back to inputs and kept
values, together with those of the other live holders of the same segment (the stretch between two
kept values) that share operators with it. So within a graph task an operator of a segment runs at
most once, a dropout mask does not drag in the matrix product beside it, and one block around a
whole model with kept values between the layers needs the memory of one layer at a time.

Invariant: windows follow from the path of a run alone, and hold no tensor. They are found once for
all runs.

Rejected: replaying whole blocks (memory of plain), and widening a window by whatever it touches (a
mask or a rotary table that all layers share would make one window of the whole model).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._record import (
    BROUGHT_BACK,
    KEEP,
    Filling,
    First,
    Known,
    Like,
    Parts,
    Run,
    Slot,
    Step,
    Value,
    with_saves,
)


class Path:
    """One way through a program, as far as it has been run: which steps make which values."""

    def __init__(self, run: Run) -> None:
        self.steps = [*run.path]
        self.slots: list[Slot] = []
        self.saved_after: list[int] = []  # by slot: a step
        self.kept: dict[Value, Any] = {}  # under which key a run holds it
        self.cuts: list[int] = []  # steps at which something was kept
        self.memory_of: dict[int, int] = {}
        self._maker: dict[int, int] = {}
        self.given: set[int] = set()
        self.parameters: set[int] = set()
        self.writers: dict[int, list[Step]] = defaultdict(list)  # by memory
        self._bases: dict[int, int] = {}  # by cell of a view, or of a tensor that has been written
        self.trained: list[int] = []  # cells of parameters
        self.differentiable: set[int] = set()  # memories from outside
        for step, saves in with_saves(run):
            for first in step.firsts:
                self._add_first(first)
            for cell, memory in step.memories:
                self.memory_of[cell] = memory
                self._maker[cell] = step.index
                if step.reads and (step.is_view or memory in step.writes):
                    self._bases[cell] = step.reads[0][0]
            for memory in step.writes:
                self.writers[memory].append(step)
            self.kept.update(zip(step.decides, step.decides, strict=True))
            if step.event is KEEP and not step.effect:
                self.kept[step.reads[0]] = step.first_cell
                self.cuts.append(step.index)
            for slot in saves:
                if slot.first is not None:
                    self._add_first(slot.first)
            self.slots += saves
            self.saved_after += [step.index] * len(saves)
        self.owners: list[int] = []  # by slot: which of the frame's holders has it
        for slot in self.slots:
            last = self.owners[-1] if self.owners else -1
            self.owners.append(last if slot.joins else last + 1)

    def _add_first(self, first: First) -> None:
        self.memory_of[first.cell] = first.memory
        if first.requires_grad:
            self.differentiable.add(first.memory)
        if first.holds:
            self.given.add(first.cell)
            if first.is_parameter:
                self.parameters.add(first.cell)
        if first.is_referenced and first.requires_grad:
            self.trained.append(first.cell)

    def placed(self, values: Iterable[Value], cuts: Iterable[int]) -> Path:
        """The same, of a run that keeps these values, too, and has segments that begin at these
        steps."""
        path = copy(self)
        path.kept = {**dict.fromkeys(values), **self.kept}
        path.kept.update((value, value) for value, source in path.kept.items() if source is None)
        path.cuts = sorted([*self.cuts, *cuts])
        return path

    def source_of(self, value: Value) -> Any:
        """Under which key a run holds a value; None if it has to be computed."""
        if value[0] in self.given:
            return value[0]
        return self.kept.get(value)

    def makers(self, value: Value) -> tuple[int, ...]:
        """The steps after which a value is there: the one that made the tensor, and the last one
        that wrote to it."""
        cell, version = value
        maker = self._maker[cell]
        return (maker,) if version <= maker else (maker, version)

    def writes_to(self, step: Step, cell: int) -> bool:
        """Whether a step writes to the tensor in this cell, to what that is a view of, or to a view
        of it. Two views of one tensor are parts of it: mostly, they lie apart."""
        for place in step.info.targets:
            target = step.named[place] if isinstance(place, str) else step.args[place]
            if type(target) not in _TENSORS:
                return True
            line, other = self._line(cell), self._line(target.cell)
            if line[0] in other or other[0] in line:
                return True
        return not step.info.targets

    def _line(self, cell: int) -> list[int]:
        """A tensor, and what it is a view of."""
        line = [cell]
        while line[-1] in self._bases:
            line.append(self._bases[line[-1]])
        return line

    def there_after(self, source: Any) -> int:
        """The step after which a run holds what it keeps."""
        return self._maker[source] if type(source) is int else max(self.makers(source))

    def slice_of(self, values: Iterable[Value], without: frozenset[Any] = frozenset()) -> Slice:
        """The steps that make these values, in order, and what they start from: by cell, the cell
        that is held. Kept cells in `without` are not used."""
        found: set[int] = set()
        starts: dict[int, Any] = {}
        stack = [*values]
        while stack:
            value = stack.pop()
            source = self.source_of(value)
            if source is not None and source not in without:
                starts[value[0]] = source
                continue
            for index in self.makers(value):
                if index not in found:
                    found.add(index)
                    stack += self.steps[index].reads
        # A kept value cannot stand for its memory where the memory as it was before is needed, too.
        made_at: dict[int, int] = {}
        for index in sorted(found, reverse=True):
            if not self.steps[index].is_view:
                made_at.update((memory, index) for _, memory in self.steps[index].memories)
        banned = {
            kept
            for cell, kept in starts.items()
            if kept != cell
            and made_at.get(self.memory_of[cell], self.there_after(kept)) < self.there_after(kept)
        }
        if banned:
            return self.slice_of(values, without | banned)
        return sorted(found), starts

    def newest(self, value: Value) -> int:
        """The last operator that made something of a value; -1 if the value, or what it is a view
        of, is held."""
        newest = -1
        while self.source_of(value) is None:
            maker, *writer = self.makers(value)
            newest = max(newest, *writer) if writer else newest
            step = self.steps[maker]
            if not step.is_view or not step.reads:
                return max(newest, maker)
            value = step.reads[0]
        return newest

    def groups(self, slots: Iterable[int] | None = None) -> list[list[int]]:
        """All slots, or these, by window: those of a segment that share operators have one."""
        bundles: list[list[int]] = []  # the slots of one holder
        for number in range(len(self.slots)) if slots is None else slots:
            if self.slots[number].joins:
                bundles[-1].append(number)
            else:
                bundles.append([number])
        segments: dict[int, list[list[int]]] = defaultdict(list)
        at_hand: dict[Value, list[int]] = defaultdict(list)  # by what is kept
        for bundle in bundles:
            values = [self.slots[slot].value for slot in bundle]
            if len(values) == 1 and values[0] in self.kept:
                at_hand[values[0]] += bundle
                continue
            newest = max(map(self.newest, values))
            # Views of what is held go with what was saved beside them.
            position = newest if newest >= 0 else self.saved_after[bundle[0]]
            segments[bisect_right(self.cuts, position)].append(bundle)
        return [
            *at_hand.values(),
            *(group for segment in segments.values() for group in self._connected(segment)),
        ]

    def _connected(self, bundles: list[list[int]]) -> list[list[int]]:
        """The slots of these bundles, in groups whose slices share operators; that two share a view
        is no reason."""
        leader = [*range(len(bundles))]  # by bundle: another one of its group, or itself
        first: dict[int, int] = {}  # by operator: the bundle that was seen to run it first

        def find(bundle: int) -> int:
            while leader[bundle] != bundle:
                leader[bundle] = bundle = leader[leader[bundle]]
            return bundle

        # Mostly, the last one needs whatever the others need.
        for number in reversed(range(len(bundles))):
            stack = [self.slots[slot].value for slot in bundles[number]]
            views: set[int] = set()
            while stack:
                value = stack.pop()
                if self.source_of(value) is not None:
                    continue
                for index in self.makers(value):
                    step = self.steps[index]
                    if step.is_view:
                        is_known = index in views
                        views.add(index)
                    else:
                        is_known = index in first
                        leader[find(number)] = find(first.setdefault(index, number))
                    if not is_known:
                        stack += step.reads
        groups: dict[int, list[int]] = defaultdict(list)
        for number, bundle in enumerate(bundles):
            groups[find(number)] += bundle
        return self._joined([*groups.values()])

    def _joined(self, groups: list[list[int]]) -> list[list[int]]:
        """Groups, where what would cost a window of its own has joined the group saved just
        before, mostly by the same operator: parameters and their views, what is drawn from nothing
        (the masks of dropout), and views of what that group starts from, too. Backward needs that
        group for longer, so no input is held for longer than before."""
        found: list[list[int]] = []
        small: list[tuple[list[int], set[Any]]] = []
        # By slot: its group, and the inputs and kept values that this starts from.
        hosts: dict[int, tuple[list[int], set[Any]]] = {}
        for slots in groups:
            steps, starts = self.slice_of([self.slots[slot].value for slot in slots])
            inputs = {start for start in starts.items() if start[0] not in self.parameters}
            computes = starts and not all(self.steps[index].is_view for index in steps)
            if computes:
                hosts.update(dict.fromkeys(slots, (slots, inputs)))
            if computes or (inputs and not steps):  # that is held, and handed out as it is
                found.append(slots)
            else:
                small.append((slots, inputs))
        rest: list[int] = []
        order = sorted(hosts)
        for slots, inputs in small:
            before = bisect_right(order, min(slots)) - 1
            host, held = hosts[order[max(0, before)]] if order else (rest, set())
            if not inputs or (before >= 0 and inputs <= held):
                host += slots
            else:
                found.append(slots)
        return [sorted(slots) for slots in [*found, rest] if slots]


def maker_of(value: Value, steps: Sequence[Step]) -> Step | None:
    """The operator that made a value, for reports; None if it is from outside."""
    cell, version = value
    for step in reversed(steps):
        if step.index != version and cell not in dict(step.memories):
            continue
        if not step.reads or not (step.is_view or step.event):
            return step
        cell, version = step.reads[0]
    return None


Slice = tuple[list[int], dict[int, Any]]  # of a path: steps, and what they start from


class Found(NamedTuple):
    """A slot that a window has made."""

    slot: int
    place: int
    memory: int | None  # if the window writes there later


class Instruction:
    """One step of a window: where on the table its arguments are, and where its results go."""

    step: Step
    index: int
    run: Callable[..., Any]
    call: Callable[..., Any]  # the same, with the keywords that are constants
    args: list[Any]
    kwargs: dict[str, Any]
    is_quick: bool  # whether there is nothing to do but to call `call` with the tensors in `args`
    results: list[int]
    wanted: list[Found]  # after it
    dead: list[int]  # places that nothing reads any more
    writes: list[int]  # memories of slots that were found before it
    targets: list[Any]  # the places where it writes

    def take(self, own: dict[int, Any], table: list[Any]) -> None:
        """Put arguments that the run has of its own in their places. (`call` has bound the
        keywords, and does not look there for them.)"""
        places = [*self.args, *self.kwargs.values()] if self.kwargs else self.args
        for number, value in own.items():
            table[places[number]] = value


class Window:
    """The instructions that make some slots, over a table of tensors and constants."""

    def __init__(
        self,
        path: Path,
        slots: Iterable[int],
        targets: Sequence[Slot] | None = None,
        found: Slice | None = None,
    ) -> None:
        self.path = path
        self.slots = [*slots]
        self.targets = path.slots if targets is None else targets  # what the slots are numbers in
        values = [self.targets[slot].value for slot in self.slots]
        self.order, starts = found or path.slice_of(values)
        steps = [path.steps[index] for index in self.order]
        self.counted = sum(step.is_counted for step in steps)
        self.written = {memory for step in steps for memory in step.writes}
        self.table: list[Any] = []
        self.place_of: dict[Any, int] = {}  # by cell
        self.given = starts.keys()
        self.starts = [
            (self._place(cell), source, path.memory_of[cell]) for cell, source in starts.items()
        ]
        self.sources = {source for _, source, _ in self.starts}
        self.randoms = [step.index for step in steps if step.draws]
        for step in steps:
            for cell, _ in step.memories:
                self._place(cell)
        self.instructions = [self._instruction(step) for step in steps]
        self.is_view = all(step.is_view for step in steps)
        grad_mode = None
        for instruction in self.instructions:  # those that are not quick set the grad mode
            instruction.is_quick &= instruction.step.grad_mode is grad_mode
            grad_mode = instruction.step.grad_mode
        self.at_once: list[Found] = []
        self._find_wanted(starts)
        self._find_last_uses()

    def _place(self, cell: Any) -> int:
        place = self.place_of.get(cell)
        if place is None:
            place = self.place_of[cell] = len(self.table)
            self.table.append(None)
        return place

    def _argument(self, template: Any) -> Any:
        """The place of an argument on the table, or a list of places."""
        if isinstance(template, Known | First):
            return self._place(template.cell)
        if type(template) is Parts:
            return template.kind, [self._argument(item) for item in template.items]
        self.table.append(template)
        return len(self.table) - 1

    def _instruction(self, step: Step) -> Instruction:
        made = Instruction()
        made.step = step
        made.index = step.index
        made.run = step.run
        made.args = [self._argument(template) for template in step.inputs]
        made.kwargs = {name: self._argument(template) for name, template in step.named.items()}
        if step.offset is not None:
            made.run = partial(_call_with_offset, step.run, step.offset)
        if step.event is BROUGHT_BACK:
            made.run = self._brought_back(step)
            made.args = [self._place(step.reads[0][0])]
        constants = step.named
        made.call = partial(made.run, **constants) if constants else made.run
        if step.reads_metadata:
            made.call = partial(_call_like, made.call)
        holds_tensors = any(isinstance(arg, Known | First | Parts) for arg in constants.values())
        is_flat = all(type(place) is int for place in made.args) and not holds_tensors
        made.is_quick = not any((not is_flat, step.draws, step.info.sizes_depend_on_data))
        # A decision that is held is not replaced by what is computed beside it.
        made.results = [
            self._place(("again", cell) if cell in self.given else cell)
            for cell, _ in step.memories
        ]
        made.wanted = []
        made.dead = []
        made.writes = []
        arguments: dict[Any, Any] = {**dict(enumerate(made.args)), **made.kwargs}
        made.targets = [arguments[place] for place in step.info.targets if place in arguments]
        return made

    def _brought_back(self, step: Step) -> Any:
        memories = {self.path.memory_of[step.reads[0][0]], self.path.memory_of[step.first_cell]}
        return torch.clone if memories & self.written else _same

    def _ready_after(self, slot: Slot, starts: dict[int, Any]) -> int:
        """The step after which a slot can be delivered; -1 if it is held."""
        if slot.cell in starts and self.path.source_of(slot.value) == starts[slot.cell]:
            return -1
        return max(self.path.makers(slot.value))

    def _find_wanted(self, starts: dict[int, Any]) -> None:
        """Find when each slot is there, and which writes come after that."""
        at = {instruction.index: instruction for instruction in self.instructions}
        writers: dict[int, list[Instruction]] = defaultdict(list)  # by memory
        for instruction in self.instructions:
            for memory in instruction.step.writes:
                writers[memory].append(instruction)
        first: dict[int, int] = {}  # by memory: the step after which its first slot is there
        for number in self.slots:
            slot = self.targets[number]
            index = self._ready_after(slot, starts)
            memory = self.path.memory_of[slot.cell]
            is_written = memory in writers and writers[memory][-1].index > index
            wanted = self.at_once if index < 0 else at[index].wanted
            wanted.append(Found(number, self.place_of[slot.cell], memory if is_written else None))
            first[memory] = min(index, first.get(memory, index))
        for memory in writers.keys() & first.keys():
            for instruction in writers[memory]:
                if instruction.index > first[memory]:
                    instruction.writes.append(memory)
                    instruction.is_quick = False

    def _find_last_uses(self) -> None:
        last: dict[int, Instruction] = {}
        tensors = set(self.place_of.values())
        for instruction in self.instructions:
            places = [
                *_flatten(instruction.args),
                *_flatten(instruction.kwargs.values()),
                *instruction.results,
            ]
            places += [found.place for found in instruction.wanted]
            last.update((place, instruction) for place in places if place in tensors)
        for place, instruction in last.items():
            instruction.dead.append(place)


def _flatten(places: Iterable[Any]) -> Iterable[int]:
    for place in places:
        if type(place) is int:
            yield place
        else:
            yield from _flatten(place[1])


def _call_like(function: Callable[..., Any], like: Like, *args: Any) -> Any:
    """Call a function that reads only the metadata of its first argument."""
    return function(like.make(), *args)


def _call_with_offset(function: Callable[..., Any], place: int, *args: Any, **named: Any) -> Any:
    """Call a function whose offset counts from that of its first argument."""
    offset = args[place] + args[0].storage_offset()
    return function(*args[:place], offset, *args[place + 1 :], **named)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Group:
    """Slots of one path that a window brings back together; or, with `parts`, in pieces: a replay
    from what the group starts from makes what the parts start from."""

    def __init__(self, path: Path, slots: list[int]) -> None:
        self.path = path
        self.slots = slots
        self.parts: list[Group] = []
        self._windows: dict[Any, Window] = {}
        self._slice: tuple[Any, Slice | None] = None, None  # of some slots, found just now
        keys = {path.source_of(path.slots[slot].value) for slot in slots}
        # Under which key the value of all its slots is held, if there is just one.
        self.only: Any = keys.pop() if len(keys) == 1 else None

    def shown(self) -> Window | None:
        """The window of the only slot, if that is a view of what is held."""
        if len(self.slots) > 1 or self.parts:
            return None
        window = self.window((self.slots[0],))
        return window if window.is_view else None

    def window(self, slots: tuple[int, ...]) -> Window:
        found = self._windows.get(slots)
        if found is None:
            known = self._slice[1] if self._slice[0] == slots else None
            found = self._found(slots, lambda: Window(self.path, slots, None, known))
            self._slice = None, None
        return found

    def _found(self, key: Any, make: Callable[[], Window]) -> Window:
        found = self._windows.get(key)
        if found is None:
            if len(self._windows) >= _MOST_WINDOWS:
                self._windows.clear()
            found = self._windows[key] = make()
        return found

    def split(self, values: Iterable[Value], cuts: Iterable[int]) -> None:
        """Bring back what it has in pieces."""
        path = self.path.placed(values, cuts)
        self.parts = [Group(path, slots) for slots in path.groups(self.slots)]

    def needs(self, slots: Iterable[int]) -> tuple[set[Any], set[int]]:
        """Under which keys what it needs for these slots is held, and the steps that draw random
        numbers."""
        slots = tuple(slots)
        if not self.parts:
            window = self._windows.get(slots)
            if window is not None:
                return window.sources, {*window.randoms}
            # A window is made when it is opened for the first time.
            path = self.path
            order, starts = path.slice_of([path.slots[slot].value for slot in slots])
            self._slice = slots, (order, starts)
            return {*starts.values()}, {index for index in order if path.steps[index].draws}
        sources: set[Any] = set()
        randoms: set[int] = set()
        for more, drawn in [part.needs(mine) for part, mine in self.parts_of(slots)]:
            sources |= more
            randoms |= drawn
        values, window = self.filling(sources)
        return sources.difference(values) | window.sources, randoms.union(window.randoms)

    def parts_of(self, slots: Iterable[int]) -> list[tuple[Group, list[int]]]:
        """The parts that have some of these slots, and which."""
        wanted = {*slots}
        found = [(part, [slot for slot in part.slots if slot in wanted]) for part in self.parts]
        return [(part, mine) for part, mine in found if mine]

    def filling(self, sources: Iterable[Any]) -> tuple[list[Value], Window]:
        """Which of the things that its parts start from are not held, and the window that makes
        them."""
        values = [
            source for source in sources if type(source) is tuple and source not in self.path.kept
        ]
        values.sort(key=lambda value: (self.path.there_after(value), value))
        targets = [Slot(cell, version, None) for cell, version in values]
        return values, self._found(
            ("fills", *values), lambda: Window(self.path, range(len(targets)), targets)
        )


_MOST_WINDOWS = 4
_TENSORS = (Known, First, Filling)
