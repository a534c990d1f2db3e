"""Groups: the slots of a path that one replay brings back.

Opening a holder replays its *window*: the steps that its value depends on, back to inputs and kept
values, together with those of the other live holders of the same segment (the stretch between two
cuts) that share operators with it. So within a graph task an operator of a segment runs at most
once, a dropout mask does not drag in the matrix product beside it, and one block around a whole
model with kept values between the layers needs the memory of one layer at a time.

Rejected: replaying whole blocks (memory of plain), whole segments (they hold what all of their
slots start from until the last of them is gone), and widening a window by whatever it touches (a
mask or a rotary table that all layers share would make one window of the whole model).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any, TypeVar

from .._record import Path, Slice, Slot, Value
from .windows import Window

T = TypeVar("T")
Needs = tuple[Set[Value], Set[int]]  # values to start from, and steps that draw random numbers


class Group:
    """Slots of one path that a window brings back together; or, with `parts`, in pieces: a replay
    from what the group starts from makes what the parts start from."""

    def __init__(self, path: Path, slots: list[int], parts: Sequence[Group] = ()) -> None:
        self.path, self.slots, self.parts = path, slots, parts
        self._windows: dict[Any, Window] = {}
        self._needs: dict[Any, Needs] = {}
        self._started: dict[Any, Group] = {}

    def window(self, slots: Iterable[int]) -> Window:
        """The window for some of its slots, found when it is opened for the first time."""
        slots = tuple(slots)
        return _found(
            self._windows,
            slots,
            lambda: Window(self.path, self._targets(slots), self._slice_of(slots)),
        )

    def split(self, values: Iterable[Value], cuts: Iterable[int]) -> Path:
        """Bring back what it has in pieces. Returns the path of these."""
        path = self.path.placed(values, cuts)
        self.parts = [Group(path, slots) for slots in _grouped(path, self.slots)]
        return path

    def started_from(self, values: Set[Value]) -> Group:
        """These slots, where a run holds some of the values that the parts start from."""
        return _found(
            self._started,
            frozenset(values),
            lambda: Group(self.path.placed(values, ()), self.slots, self.parts),
        )

    def needs(self, slots: Iterable[int]) -> Needs:
        """What a run has to hold for some of its slots."""
        slots = tuple(slots)
        return _found(self._needs, slots, lambda: self._find_needs(slots))

    def _find_needs(self, slots: tuple[int, ...]) -> Needs:
        order, starts, _ = self._slice_of(slots)
        values = {slot.value for slot in self._targets(slots).values()}
        randoms: Set[int] = {index for index in order if self.path.steps[index].draws}
        for part, mine in self.parts_of(slots):
            sources, drawn = part.needs(mine)
            starts, randoms = starts | (sources - values), randoms | drawn
        return starts, randoms

    def _slice_of(self, slots: tuple[int, ...]) -> Slice:
        """What the window of some of its slots runs. It starts from no kept value from which that
        of all slots can't start, so what a run has to hold does not depend on which slots are
        opened together."""
        if len(slots) == len(self.slots):
            return self._slice_of_all
        values = [slot.value for slot in self._targets(slots).values()]
        return self.path.slice_of(values, self._slice_of_all.without)

    @cached_property
    def _slice_of_all(self) -> Slice:
        return self.path.slice_of([slot.value for slot in self._targets(self.slots).values()])

    def _targets(self, slots: Iterable[int]) -> Mapping[int, Slot]:
        """What the window of some of its slots makes: these, or what the parts start from and no
        run holds."""
        if not self.parts:
            return {slot: self.path.slots[slot] for slot in slots}
        sources = set().union(*[part.needs(mine)[0] for part, mine in self.parts_of(slots)])
        missing = [source for source in sources if not self.path.is_held(source)]
        return {number: Slot(value) for number, value in enumerate(sorted(missing))}

    def parts_of(self, slots: Iterable[int]) -> list[tuple[Group, list[int]]]:
        """The parts that have some of these slots, and which."""
        wanted = {*slots}
        found = [(part, [slot for slot in part.slots if slot in wanted]) for part in self.parts]
        return [(part, mine) for part, mine in found if mine]


_MOST_WINDOWS = 4
# As many bytes are written at most, for each byte of a value that is made again in each window.
MOST_WRITTEN = 4


def _found(known: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_WINDOWS:
            known.clear()
        found = known[key] = make()
    return found


def _grouped(path: Path, slots: Iterable[int]) -> list[list[int]]:
    """These slots by window: those of a segment that share operators have one."""
    segments: dict[int, list[int]] = defaultdict(list)
    at_hand: dict[Value, list[int]] = defaultdict(list)  # by what is kept
    for slot in slots:
        value = path.slots[slot].value
        if value in path.kept:
            at_hand[value].append(slot)
            continue
        newest, reader = path.newest(value), path.saved_for[slot]
        # Views of what is held go with what was saved beside them, and so does what is made again
        # in each window that needs it: a mask that all layers share.
        is_far = bisect_right(path.cuts, newest) < bisect_right(path.cuts, reader)
        is_light = newest < 0 or (is_far and _is_light(path, value))
        segments[bisect_right(path.cuts, reader if is_light else newest)].append(slot)
    found = [*at_hand.values()]
    for segment in segments.values():
        found += _joined(path, _connected(path, segment))
    return found


def _is_light(path: Path, value: Value) -> bool:
    """Whether a value is quickly made from inputs."""
    order, starts, _ = path.slice_of([value])
    steps = [path.steps[index] for index in order]
    written = {number: nbytes for step in steps for number, nbytes in step.sizes}
    own = written.get(path.memory_of[value[0]], 0)
    is_quick = not any(step.flops or step.draws for step in steps)
    return is_quick and starts <= path.given and sum(written.values()) <= MOST_WRITTEN * own


def _connected(path: Path, slots: Sequence[int]) -> list[list[int]]:
    """These slots, in groups whose slices share operators; that two share a view is no reason."""
    leader = {slot: slot for slot in slots}  # another one of its group, or itself
    first: dict[int, int] = {}  # by operator: the slot that was seen to run it first

    def find(slot: int) -> int:
        while leader[slot] != slot:
            leader[slot] = slot = leader[leader[slot]]
        return slot

    # Mostly, the last one needs whatever the others need.
    for slot in reversed(slots):
        stack = [path.slots[slot].value]
        seen: set[Value] = set()
        while stack:
            value = stack.pop()
            if value in seen or path.is_held(value):
                continue
            seen.add(value)
            index, reads = path.made_by(value)
            if not path.steps[index].is_alias:
                if index in first:
                    leader[find(slot)] = find(first[index])
                    continue
                first[index] = slot
            stack += reads
    groups: dict[int, list[int]] = defaultdict(list)
    for slot in slots:
        groups[find(slot)].append(slot)
    return [*groups.values()]


def _joined(path: Path, groups: Sequence[list[int]]) -> list[list[int]]:
    """Groups, where what would cost a window of its own has joined the group saved just before:
    parameters and their views, what is drawn from nothing (the masks of dropout), and views of what
    that group starts from, too. Backward needs that group for longer, so no input is held for
    longer than before. What was saved before all else joins the first group only if all that this
    starts from is an input of it. Of what remains, the views of a base are one group, since it is
    held for all of them anyway, and so are parameters."""
    found: list[list[int]] = []
    small: list[tuple[list[int], Set[Value], bool]] = []  # ..., and whether it is drawn
    # By slot: its group, and the inputs and kept values that this starts from.
    hosts: dict[int, tuple[list[int], Set[Value]]] = {}
    for slots in groups:
        steps, starts, _ = path.slice_of([path.slots[slot].value for slot in slots])
        inputs = starts - path.parameters
        computes = starts and not all(path.steps[index].is_alias for index in steps)
        if computes:
            hosts.update(dict.fromkeys(slots, (slots, inputs)))
        if computes or (inputs and not steps):  # that is held, and handed out as it is
            found.append(slots)
        else:
            small.append((slots, inputs, not starts))
    views: dict[frozenset[Value], list[int]] = defaultdict(list)
    order = sorted(hosts)
    for slots, inputs, is_drawn in small:
        before = bisect_right(order, min(slots)) - 1
        host, held = hosts[order[max(0, before)]] if order else ([], frozenset())
        needed = held if before < 0 else frozenset()
        if order and needed <= inputs <= held:
            host += slots
        elif is_drawn:
            found.append(slots)
        else:
            views[frozenset(inputs)] += slots
    return [sorted(slots) for slots in [*found, *views.values()]]
