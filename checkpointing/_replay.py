"""Source 2: run recorded operators again, just those that are needed.

Opening a holder replays its *window*: the steps that its value depends on, back to inputs and kept values, together
with those of the other live holders of the same segment (the stretch between two kept values) that share operators
with it. So within a graph task an operator of a segment runs at most once, a dropout mask does not drag in the matrix
product beside it, and one block around a whole model with kept values between the layers needs the memory of one
layer at a time.

Which holders share a window, and the list of instructions that runs it, follow from the path of the run alone. They
are found once, in a `Plan` at the end of the path. A run gives each group of holders its `Stock`: what its window
starts from. Stocks belong to holders, so that whatever no live holder needs is freed when the block ends, and the
rest goes as backward passes by (rule 9).

Invariant: a window writes to no memory that it has been given or has given away. Tensors on memory that it writes are
copied when they are fetched, and delivered as copies if a later step of it writes there.

Rejected: replaying whole blocks (memory of plain), and widening a window by whatever it touches (a mask or a rotary
table that all layers share would make one window of the whole model).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from . import _torch, errors
from ._ambient import Undo, enter_switches, undo_all
from ._engine import Frame, Holder, Holding, Recompute, Source
from ._gathered import check_there
from ._held import Held, check_version
from ._offload import Moved, prefetch
from ._ops import tensors_of
from ._plan import Choice, Model, Stretch, choose
from ._program import NOT_WRITTEN, First, Known, Like, Parts, Slot, Step, Value
from ._record import BROUGHT_BACK, KEEP, Run, Wrapped, sizes_of, slots_of, with_saves


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
        for step, saves in with_saves(run):
            for first in step.firsts:
                self._add_first(first)
            for cell, memory in step.memories:
                self.memory_of[cell] = memory
                self._maker[cell] = step.index
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
        if first.holds:
            self.given.add(first.cell)
            if first.is_parameter:
                self.parameters.add(first.cell)

    def placed(self, values: Iterable[Value], cuts: Iterable[int]) -> Path:
        """The same, of a run that keeps these values, too, and has segments that begin at these steps."""
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
        """The steps after which a value is there: the one that made the tensor, and the last one that wrote to it."""
        cell, version = value
        maker = self._maker[cell]
        return (maker,) if version <= maker else (maker, version)

    def there_after(self, source: Any) -> int:
        """The step after which a run holds what it keeps."""
        return self._maker[source] if type(source) is int else max(self.makers(source))

    def slice_of(
        self, values: Iterable[Value], without: frozenset[Any] = frozenset()
    ) -> tuple[list[int], dict[int, Any]]:
        """The steps that make these values, in order, and what they start from: by cell, the cell that is held. Kept
        cells in `without` are not used."""
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
            if kept != cell and made_at.get(self.memory_of[cell], self.there_after(kept)) < self.there_after(kept)
        }
        if banned:
            return self.slice_of(values, without | banned)
        return sorted(found), starts

    def newest(self, value: Value) -> int:
        """The last operator that made something of a value; -1 if it is held."""
        return self._origin(value)[0]

    def _origin(self, value: Value) -> tuple[int, Any]:
        """The same, and in which case what is held there, of which the value may be a view."""
        newest = -1
        while (source := self.source_of(value)) is None:
            maker, *writer = self.makers(value)
            newest = max(newest, *writer) if writer else newest
            step = self.steps[maker]
            if not step.is_view or not step.reads:
                return max(newest, maker), None
            value = step.reads[0]
        return newest, source

    def groups(self, slots: Iterable[int] | None = None) -> list[list[int]]:
        """Slots whose windows are one: those of a segment that share operators. Of all or of these."""
        bundles: list[list[int]] = []  # the slots of one holder
        for number in range(len(self.slots)) if slots is None else slots:
            if self.slots[number].joins:
                bundles[-1].append(number)
            else:
                bundles.append([number])
        segments: dict[int, list[list[int]]] = defaultdict(list)
        at_hand: dict[Any, list[int]] = defaultdict(list)  # by what is kept: it, and views of it
        for bundle in bundles:
            newest, source = max([self._origin(self.slots[slot].value) for slot in bundle], key=itemgetter(0))
            if newest < 0 and type(source) is tuple and len(bundle) == 1:
                at_hand[source] += bundle
                continue
            # Views of what is held go with what was saved beside them.
            position = newest if newest >= 0 else self.saved_after[bundle[0]]
            segments[bisect_right(self.cuts, position)].append(bundle)
        return [*at_hand.values(), *(group for segment in segments.values() for group in self._connected(segment))]

    def _connected(self, bundles: list[list[int]]) -> list[list[int]]:
        """The slots of these bundles, in groups whose slices share operators; that two share a view is no reason."""
        group_of: dict[int, tuple[list[int], list[int]]] = {}  # by step: slots and steps
        for bundle in reversed(bundles):  # mostly, the last one needs whatever the others need
            mine: tuple[list[int], list[int]] = (list(bundle), [])
            stack = [self.slots[slot].value for slot in bundle]
            views: set[int] = set()
            while stack:
                value = stack.pop()
                if self.source_of(value) is not None:
                    continue
                for index in self.makers(value):
                    step = self.steps[index]
                    if step.is_view:
                        if index not in views:
                            views.add(index)
                            stack += step.reads
                        continue
                    theirs = group_of.get(index)
                    if theirs is None:
                        group_of[index] = mine
                        mine[1].append(index)
                        stack += step.reads
                    elif theirs is not mine:
                        small, mine = (mine, theirs) if len(mine[1]) < len(theirs[1]) else (theirs, mine)
                        mine[0].extend(small[0])
                        mine[1].extend(small[1])
                        group_of.update(dict.fromkeys(small[1], mine))
            if not mine[1]:
                group_of[-1 - bundle[0]] = mine
        return self._merged([slots for slots, _ in {id(group): group for group in group_of.values()}.values()])

    def _merged(self, groups: list[list[int]]) -> list[list[int]]:
        """The same with one group of what is drawn from nothing (the masks of dropout), and views of parameters beside
        the rest: each of them alone would cost a window."""
        drawn: list[int] = []
        views: list[int] = []
        others: list[list[int]] = []
        for slots in groups:
            steps, starts = self.slice_of([self.slots[slot].value for slot in slots])
            if steps and not starts:
                drawn += slots
            elif all(self.steps[index].is_view for index in steps) and self.parameters.issuperset(starts):
                views += slots
            else:
                others.append(slots)
        if drawn:
            others.append(drawn)
        if views:
            others = others or [[]]
            others[0] = others[0] + views
        return [sorted(slots) for slots in others]


class Origins:
    """Where the values of a block come from, for reports."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps  # it may grow
        self._seen = 0
        self._maker: dict[int, Step] = {}
        self._reader: dict[int, Step] = {}

    def _learn(self) -> None:
        for step in self._steps[self._seen :]:
            self._maker.update((cell, step) for cell, _ in step.memories)
            for cell, _ in step.reads:
                self._reader.setdefault(cell, step)
        self._seen = len(self._steps)

    def maker(self, value: Value) -> Step | None:
        """The operator that made a value; None if it is from outside."""
        self._learn()
        while True:
            cell, version = value
            step = self._maker.get(cell) if version == NOT_WRITTEN else self._steps[version]
            if step is None or not step.reads or not (step.is_view or step.event):
                return step
            value = step.reads[0]

    def reader(self, cell: int) -> Step | None:
        """The operator that read it first."""
        self._learn()
        return self._reader.get(cell)


class Instruction:
    """One step of a window: where on the table its arguments are, and where its results go."""

    step: Step
    index: int
    run: Callable[..., Any]
    grad_mode: bool
    is_random: bool
    args: list[Any]
    kwargs: dict[str, Any]
    is_flat: bool  # whether `args` are places, and that is all
    results: list[int]
    wanted: list[tuple[int, int, bool]]
    dead: list[int]  # places that nothing reads any more


class Window:
    """The instructions that make some slots, over a table of tensors and constants."""

    def __init__(self, path: Path, slots: Iterable[int], targets: Sequence[Slot] | None = None) -> None:
        self.path = path
        self.slots = [*slots]
        self._targets = path.slots if targets is None else targets  # what the slots are numbers in
        values = [self._targets[slot].value for slot in self.slots]
        self.order, starts = path.slice_of(values)
        steps = [path.steps[index] for index in self.order]
        self.counted = sum(not step.is_view and step.event is None for step in steps)
        self.written = {memory: step.index for step in steps for memory in step.writes}  # by memory: the last write
        self.table: list[Any] = []
        self.place_of: dict[int, int] = {}  # by cell
        self.starts = [(self._place(cell), source, path.memory_of[cell]) for cell, source in starts.items()]
        self.sources = {source for _, source, _ in self.starts}
        self.randoms = [step.index for step in steps if step.draws]
        for step in steps:
            for cell, _ in step.memories:
                self._place(cell)
        self.instructions = [self._instruction(step) for step in steps]
        self.at_once = [self._wanted(n) for n in self.slots if self._ready_after(self._targets[n], starts) < 0]
        self._find_wanted(starts)
        self._find_last_uses()

    def _place(self, cell: int) -> int:
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
        made.grad_mode = step.grad_mode
        made.args = [self._argument(template) for template in step.inputs]
        made.kwargs = {name: self._argument(template) for name, template in (step.named or {}).items()}
        if step.event is BROUGHT_BACK:
            made.run = self._brought_back(step)
            made.args = [self._place(step.reads[0][0])]
        made.is_flat = all(type(place) is int for place in made.args) and not made.kwargs and not step.likes
        made.is_random = step.draws
        made.results = [self.place_of[cell] for cell, _ in step.memories]
        made.wanted = []
        made.dead = []
        return made

    def _brought_back(self, step: Step) -> Any:
        memories = {self.path.memory_of[step.reads[0][0]], self.path.memory_of[step.first_cell]}
        return torch.clone if memories & self.written.keys() else _same

    def _ready_after(self, slot: Slot, starts: dict[int, Any]) -> int:
        """The step after which a slot can be delivered; -1 if it is held."""
        if slot.cell in starts and self.path.source_of(slot.value) == starts[slot.cell]:
            return -1
        return max(self.path.makers(slot.value))

    def _wanted(self, number: int) -> tuple[int, int, bool]:
        """A slot, its place, and whether it must be copied because a later step writes to its memory."""
        slot = self._targets[number]
        is_written = self.written.get(self.path.memory_of[slot.cell], NOT_WRITTEN) > slot.version
        return number, self.place_of[slot.cell], is_written

    def _find_wanted(self, starts: dict[int, int]) -> None:
        at = {instruction.index: instruction for instruction in self.instructions}
        for number in self.slots:
            index = self._ready_after(self._targets[number], starts)
            if index >= 0:
                at[index].wanted.append(self._wanted(number))

    def _find_last_uses(self) -> None:
        last: dict[int, Instruction] = {}
        tensors = set(self.place_of.values())
        for instruction in self.instructions:
            places = [*_flatten(instruction.args), *_flatten(instruction.kwargs.values()), *instruction.results]
            places += [place for _, place, _ in instruction.wanted]
            last.update((place, instruction) for place in places if place in tensors)
        for place, instruction in last.items():
            instruction.dead.append(place)


def _flatten(places: Iterable[Any]) -> Iterable[int]:
    for place in places:
        if type(place) is int:
            yield place
        else:
            yield from _flatten(place[1])


def _same(tensor: Tensor) -> Tensor:
    return tensor


class Group:
    """Slots of one path that a window brings back together; or, with `parts`, in pieces: a replay from what the group
    starts from makes what the parts start from."""

    def __init__(self, path: Path, slots: list[int]) -> None:
        self.path = path
        self.slots = slots
        self.parts: list[Group] = []
        self.at_hand: Any = None  # under which key what the only slot shows is held
        self._windows: dict[Any, Window] = {}
        if len(slots) == 1:
            source = path.source_of(path.slots[slots[0]].value)
            self.at_hand = source if type(source) is tuple and source == path.slots[slots[0]].value else None

    def window(self, slots: Sequence[int]) -> Window:
        return self._found(tuple(slots), lambda: Window(self.path, slots))

    def _found(self, key: Any, make: Callable[[], Window]) -> Window:
        found = self._windows.get(key)
        if found is None:
            if len(self._windows) >= _MOST_WINDOWS:
                self._windows.clear()
            found = self._windows[key] = make()
        return found

    def split(self, choice: Choice) -> None:
        """Bring back what it has in pieces."""
        path = self.path.placed(choice.values, choice.cuts)
        self.parts = [Group(path, slots) for slots in path.groups(self.slots)]

    def needs(self, slots: Iterable[int]) -> tuple[set[Any], set[int]]:
        """Under which keys what it needs for these slots is held, and the steps that draw random numbers."""
        slots = [*slots]
        if not self.parts:
            window = self.window(slots)
            return window.sources, {*window.randoms}
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
        """Which of the things that its parts start from are not held, and the window that makes them."""
        values = [source for source in sources if type(source) is tuple and source not in self.path.kept]
        values.sort(key=lambda value: (self.path.there_after(value), value))
        targets = [Slot(*value, None) for value in values]
        return values, self._found(("fills", *values), lambda: Window(self.path, range(len(targets)), targets))


_MOST_WINDOWS = 4


class Plan:
    """How to bring back what was saved on one path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = [Group(path, slots) for slots in path.groups()]
        self.whole: Group | None = None  # all slots, where nothing that `auto()` chose has been held
        self.peak = 0  # simulated
        self.key: Any = None
        self.saved_bytes = 0  # of the run whose bytes the steps have
        self.kept: frozenset[Value] = frozenset()  # what a run should hold
        self.complaint = ""

    def suits(self, run: Run) -> bool:
        return run.placement is None or self.key == _key_of(run, _gradients_to_come(self.path, run)[0])

    def groups_for(self, run: Run) -> list[Group]:
        """What to give a run's holders: by what it holds."""
        if self.whole is None or run.held.keys() >= self.kept:
            return self.groups
        return [self.whole]


def _key_of(run: Run, missing: dict[int, int]) -> tuple[int, int]:
    """What a plan goes by, beside the path: bytes of gradients that do not exist yet, and how large the run is."""
    return sum(missing.values()), run.saved_bytes.bit_length()


def _gradients_to_come(path: Path, run: Run) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes of gradients that do not exist yet, by memory; and those of all parameters."""
    parameters: dict[int, int] = {}
    missing: dict[int, int] = {}
    for cell, held in run.held.items():
        if type(held) is tuple:
            memory, parameter = path.memory_of[cell], held[0]
            parameters[memory] = parameter.nbytes
            if parameter.requires_grad and parameter.grad is None:
                missing[memory] = parameter.nbytes
    return missing, parameters


def plan_of(run: Run, old: Plan | None = None) -> Plan:
    """The plan for what a run has done; `old` was for one of another size."""
    path = Path(run)
    if run.placement is None or not path.slots:
        return Plan(path)
    missing, parameters = _gradients_to_come(path, run)
    if run.sees_gathering and path.cuts:  # where parameters are given back; no window may cross that
        plan = Plan(path)
        plan.key = _key_of(run, missing)
        return plan
    saved_bytes = run.saved_bytes if old is None else old.saved_bytes
    alive = {path.memory_of[cell] for cell in run.alive} - {path.memory_of[cell] for cell in path.given}
    model = Model(path, alive, parameters, missing, run.saved_bytes / max(1, saved_bytes))
    budget = run.placement.budget
    by_user = frozenset([path.memory_of[cell] for cell, _ in path.kept])
    stretch = Stretch(model, range(len(path.slots)), by_user)
    kept_by_user = run.kept_bytes
    choice = choose(stretch, None if budget is None else max(0, budget - kept_by_user))
    if choice.values or choice.cuts:
        plan = Plan(path.placed(choice.values, choice.cuts))
        plan.kept = frozenset(choice.values)
        plan.whole = Group(path, [*range(len(path.slots))])
        plan.whole.parts = plan.groups
        if budget is not None:
            held = frozenset(path.memory_of[cell] for cell, _ in plan.path.kept)
            for group in plan.groups:
                _split(group, model, held, max(budget, 1))
    else:
        plan = Plan(path)
    plan.key, plan.saved_bytes = _key_of(run, missing), saved_bytes
    plan.peak = choice.peak + kept_by_user
    plan.complaint = _complaint(run, choice)
    return plan


def _split(group: Group, model: Model, held: frozenset[int], budget: int) -> None:
    """Where a window would deliver more than the budget, a first replay makes what smaller windows start from."""
    order = group.window(group.slots).order
    if not order:
        return
    stretch = Stretch(model, group.slots, held, (order[0], order[-1] + 1))
    if stretch.delivered <= budget:
        return
    choice = choose(stretch, budget)
    if choice.values:
        group.split(choice)
        if max(len(part.slots) for part in group.parts) == len(group.slots):
            group.parts = []
        for part in group.parts:
            _split(part, model, held | {model.path.memory_of[cell] for cell, _ in choice.values}, budget)


def _complaint(run: Run, choice: Choice) -> str:
    """What to say of a budget that is too small."""
    assert run.placement is not None
    budget, least, why = run.placement.budget, run.kept_bytes, ""
    if budget is None:
        return ""
    if least > budget:
        why = "what `keep` and other policies keep in this block, or FSDP2 between modules, takes more than that"
    elif choice.recomputes and choice.least is not None and budget < least + choice.least:
        why = "no room for a single checkpoint, so backward recomputes all of the block at once"
        least += choice.least
    return why and f"auto(budget={budget}): {why}. The smallest budget possible is {least} bytes."


def attach(plan: Plan, old: Plan | None) -> None:
    """From here on runs hold what the plan keeps, as soon as it is there."""
    path, before = plan.path, frozenset() if old is None else old.kept
    new: dict[int, list[tuple[Value, bool]]] = defaultdict(list)
    counted: set[int] = set()
    for value in sorted(plan.kept):
        memory = path.memory_of[value[0]]
        new[path.there_after(value)].append((value, memory not in counted))
        counted.add(memory)
    for step in path.steps:
        mine = new.get(step.index, [])
        if mine or (before and step.keeps):
            taken = {value for value, _ in mine}
            others = [each for each in step.keeps if each[0] not in taken and each[0] not in before]
            step.keeps = (*others, *mine)
            step.is_special = step.is_special or bool(step.keeps)


class Stock:
    """What the window of a group starts from in one run."""

    __slots__ = ("group", "held", "numbers", "random", "sizes")

    def __init__(self, group: Group, held: dict[Any, Any], run: Run | Stock, slots: Sequence[int]) -> None:
        sources, randoms = group.needs(slots)
        self.group = group
        self.held = {source: held[source] for source in sources}
        self.random = {index: run.random[index] for index in randoms if index in run.random}
        self.numbers = run.numbers
        self.sizes = run.sizes


class Replay(Source):
    """The run of one block as a source."""

    def __init__(self, run: Run, log: list[tuple[str, str]] | None = None) -> None:
        self.tape = run
        self.save = run.save
        self.log = log
        self.replays = 0
        self.replayed = 0
        self.plan: Plan | None = None  # when the block has ended
        self.complaint = ""
        self._stocks: dict[int, Stock] = {}  # while the block runs: by slot
        self._origins: Origins | None = None  # while it runs, for reports
        self._order: list[weakref.ref[Moved]] | None = None

    # ---- what the holders get

    def close(self, frame: Frame) -> None:
        """The block has ended: what its windows need goes to the holders."""
        run = self.tape
        plan = run.step.plan
        if plan is None or not plan.suits(run):
            plan, old = plan_of(run, plan), plan
            run.step.plan = plan
            attach(plan, old)
        run.program.expected = plan.kept
        holders, owners = [ref() for ref in frame.holders], plan.path.owners
        for group in plan.groups_for(run):
            alive = [slot for slot in group.slots if holders[owners[slot]] is not None]
            if alive:
                stock = Stock(group, run.held, run, alive)
                for slot in alive:
                    holders[owners[slot]].stock = stock  # type: ignore[union-attr]
        self.plan, self.complaint = plan, plan.complaint
        self._stocks = {}
        self._origins = None
        run.held, run.random, run.path = {}, {}, []

    def _stock_of(self, holder: Holder, frame: Frame) -> Stock:
        try:
            return holder.stock  # type: ignore[no-any-return]
        except AttributeError:
            pass
        slot = holder.slot
        if slot not in self._stocks:  # a backward inside the block
            run = self.tape
            plan = Plan(Path(run))
            for group in plan.groups:
                stock = Stock(group, run.held, run, group.slots)
                self._stocks.update((plan.path.owners[slot], stock) for slot in group.slots)
        return self._stocks[slot]

    # ---- as a source

    def announce(self, tensor: Tensor) -> None:
        self.tape.announce(tensor)

    def maker(self, holder: Holder) -> str | None:
        """The operator that made what the holder saved."""
        path = holder.stock.group.path
        made = max([path.newest(slot.value) for slot in slots_of(holder.saved)], default=-1)
        return None if made < 0 else str(path.steps[made].func)

    def holdings(self, frame: Frame) -> Iterable[Holding]:
        run = self.tape
        held, random = run.held, run.random  # while the block runs
        if self.plan is not None:
            holders = [holder for ref in frame.holders if (holder := ref()) is not None]
            stocks = {id(holder.stock): holder.stock for holder in holders if hasattr(holder, "stock")}.values()
            held = {cell: entry for stock in stocks for cell, entry in stock.held.items()}
            random = {index: state for stock in stocks for index, state in stock.random.items()}
        path = self.path()
        origins = Origins(path.steps)
        for cell, entry in held.items():
            if type(entry) is tuple or entry.is_parameter:
                continue
            kind, step = "kept", origins.maker((cell, NOT_WRITTEN))
            if cell in path.given:
                kind, step = "input", origins.reader(cell)
            yield Holding(kind, entry, None if step is None else str(step.func), step and step.note)
        for index, state in random.items():
            for tensor in state.states:
                yield Holding("random state", tensor, str(path.steps[index].func), path.steps[index].note)

    def operator_of(self, holder: Holder) -> str | None:
        if self._origins is None:
            self._origins = Origins(self.tape.path)
        steps = [self._origins.maker(slot.value) for slot in slots_of(holder.saved)]
        return next((str(step.func) for step in steps if step is not None), None)

    def counts(self) -> tuple[int, tuple[int, ...]]:
        """How many operators were recorded, and where among them the cuts are."""
        path = self.path()
        before = [*accumulate([is_counted(step) for step in path.steps], initial=0)]
        return before[-1], tuple([before[cut] for cut in path.cuts])

    def path(self) -> Path:
        return Path(self.tape) if self.plan is None else self.plan.path

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A value that is held, and that hooks have not taken: nothing to compute, nothing to share."""
        slot = holder.saved
        if type(slot) is not Slot or where.check is not None or not where.early_stop:
            return None
        if slot.is_held:
            held = self._stock_of(holder, where).held[slot.cell]
        elif where.complete and holder.stock.group.at_hand is not None:
            held = holder.stock.held[holder.stock.group.at_hand]
        else:
            return None
        if isinstance(held, Held) and held.is_packed:
            return None
        try:
            return self._fetch(held, where, None)
        except errors.CheckpointError:
            return None  # it will be raised again, from a recompute

    def _fetch(self, held: Any, where: Frame, inputs: dict[Any, Tensor] | None) -> Tensor:
        """What a run holds in a cell."""
        if type(held) is Tensor:  # an earlier replay has made it
            return held
        if type(held) is tuple:
            parameter, version = held
            check_version(where, "a parameter", parameter, version)
            if not parameter.data_ptr():
                check_there(where, parameter)
            return parameter  # type: ignore[no-any-return]
        tensor = None if inputs is None else inputs.get(held)
        if tensor is None:
            tensor = held.fetch(where)
            if held.is_parameter:
                check_there(where, tensor)
            if held.is_packed and held.moved is None and inputs is not None:  # else it can be fetched again
                inputs[held] = tensor
        return tensor

    def _prefetch(self, stock: Stock, frame: Frame) -> None:
        """Start to bring back what will be wanted next: backward opens first what was saved last."""
        if self._order is None:
            self._order = []
            holders = [holder for ref in reversed(frame.holders) if (holder := ref()) is not None]
            for held in {id(s): s for holder in holders for s in [self._stock_of(holder, frame)]}.values():
                for moved in _moved_in(held):
                    if moved.rank < 0:
                        moved.rank = len(self._order)
                        self._order.append(weakref.ref(moved))
        prefetch(self._order, max([moved.rank for moved in _moved_in(stock)], default=len(self._order)))

    def recompute(self, request: Recompute) -> None:
        run = self.tape
        run.settle()
        # Those of the block's beginning: kernels look at them.
        undo: Undo = []
        frame = request.frame
        memory: Any = request.task.memory
        inputs = request.task.memory = {} if memory is None else memory
        before = self.replayed
        try:
            enter_switches(run.switches, undo)
            for holder in [request.holder] if frame.early_stop else request.wanted():
                if holder is request.holder or holder.slot not in request.ready:
                    self._replay(self._part_of(holder, request, inputs, undo), request, inputs, undo)
        finally:
            undo_all(undo)
        self.replays += self.replayed > before
        if inputs and request.is_last:
            inputs.clear()

    def _part_of(self, holder: Holder, request: Recompute, inputs: dict[Any, Any], undo: Undo) -> Stock:
        """What the window of a holder starts from. Where the run has not held it, it is made now, for all parts at
        once, and stays until the windows of the parts have run, or the graph task ends."""
        stock = self._stock_of(holder, request.frame)
        passed = []
        while stock.group.parts:
            parts = inputs.get(stock)
            if parts is None or holder.slot not in parts:
                parts = inputs[stock] = self._fill(stock, request, inputs, undo)
            passed.append(stock)
            stock = parts[holder.slot]
        owners = stock.group.path.owners
        for outer in passed:
            for slot in stock.group.slots:
                inputs[outer].pop(owners[slot], None)
            if not inputs[outer]:
                del inputs[outer]
        return stock

    def _fill(self, stock: Stock, request: Recompute, inputs: dict[Any, Any], undo: Undo) -> dict[int, Stock]:
        """What the parts of a group start from, by holder."""
        frame, group = request.frame, stock.group
        owners = group.path.owners
        refs = [frame.holders[slot] for slot in dict.fromkeys([owners[slot] for slot in group.slots])]
        wanted = {holder.slot for holder in request.wanted(refs)}
        parts = group.parts_of([slot for slot in group.slots if owners[slot] in wanted])
        values, window = group.filling({source for part, mine in parts for source in part.needs(mine)[0]})
        table = window.table.copy()
        for place, source, _ in window.starts:
            table[place] = self._fetch(stock.held[source], frame, inputs)
        with _torch.below_autograd():
            execution = _Filling(self, request, stock, window, table, {}, undo)
            execution.run()
        self.replayed += window.counted
        held = {**stock.held, **{value: execution.found[number] for number, value in enumerate(values)}}
        found = {}
        for part, mine in parts:
            part_stock = Stock(part, held, stock, mine)
            found.update((owners[slot], part_stock) for slot in mine)
        return found

    def _replay(self, stock: Stock, request: Recompute, inputs: dict[Any, Tensor], undo: Undo) -> None:
        frame, group = request.frame, stock.group
        owners = group.path.owners
        refs = [frame.holders[slot] for slot in dict.fromkeys([owners[slot] for slot in group.slots])]
        holders = {holder.slot: holder for holder in request.wanted(refs)}
        window = group.window([slot for slot in group.slots if owners[slot] in holders])
        # Before autograd is switched off: an enclosing region may have to rerun for them.
        table = window.table.copy()
        for place, source, _ in window.starts:
            table[place] = self._fetch(stock.held[source], frame, inputs)
        if self.tape.movers and frame.complete:
            self._prefetch(stock, frame)
        with _torch.below_autograd():
            _Execution(self, request, stock, window, table, holders, undo).run()
        self.replayed += window.counted


def _moved_in(stock: Stock) -> list[Moved]:
    """What of a stock waits elsewhere."""
    packed = [held.moved for held in stock.held.values() if isinstance(held, Held)]
    return [moved for moved in packed if moved is not None]


class _Execution:
    """One replay of a window."""

    def __init__(
        self,
        source: Replay,
        request: Recompute,
        stock: Stock,
        window: Window,
        table: list[Any],
        holders: dict[int, Holder],
        undo: Undo,
    ) -> None:
        self.source, self.request, self.stock, self.window = source, request, stock, window
        self.table, self.holders, self.undo = table, holders, undo
        self.copies: dict[tuple[int, int], Tensor] = {}  # by storage and version
        self.parts: dict[int, dict[int, Tensor]] = defaultdict(dict)

    def run(self) -> None:
        window, table, random, numbers = self.window, self.table, self.stock.random, self.stock.numbers
        log, grad_mode = self.source.log, False
        if window.written:
            self._copy_what_is_written()
        for wanted in window.at_once:
            self._deliver(wanted)
        for instruction in window.instructions:
            if log is not None and not instruction.step.is_view:
                log.append((str(instruction.step.func), ""))
            if instruction.grad_mode is not grad_mode:
                grad_mode = instruction.grad_mode
                _torch.set_grad_enabled(grad_mode)
            if instruction.is_random and instruction.index in random:
                random[instruction.index].enter(self.undo)
            if instruction.index in numbers:
                result = self._call_with_own_numbers(instruction, numbers[instruction.index])
            elif instruction.is_flat:
                result = instruction.run(*[table[place] for place in instruction.args])
            else:
                args = [self._look(place) for place in instruction.args]
                kwargs = {name: self._look(place) for name, place in instruction.kwargs.items()}
                result = instruction.run(*args, **kwargs)
            if instruction.is_random:
                self._check_sizes(instruction, result)
            results = instruction.results
            if type(result) is Tensor:
                table[results[0]] = result
            elif results:
                for place, tensor in zip(results, tensors_of(result), strict=True):
                    table[place] = tensor
            result = None
            for wanted in instruction.wanted:
                self._deliver(wanted)
            for place in instruction.dead:
                table[place] = None

    def _copy_what_is_written(self) -> None:
        copies: dict[int, Tensor] = {}
        for place, _, memory in self.window.starts:
            if memory in self.window.written:
                tensor = self.table[place]
                storage = _torch.storage_id(tensor)
                if storage not in copies:
                    copies[storage] = _torch.clone_storage(tensor)
                    self.table[place] = copies[storage]
                else:
                    self.table[place] = _torch.lay_as(tensor, copies[storage])

    def _check_sizes(self, instruction: Instruction, result: Any) -> None:
        """A custom operator may depend on something besides its arguments."""
        was = self.stock.sizes.get(instruction.index)
        if was is not None and was != (now := sizes_of(result)):
            name = str(instruction.step.func)
            raise errors.another_size(self.request.frame, name, sum(was), sum(now))

    def _look(self, place: Any) -> Any:
        if type(place) is int:
            found = self.table[place]
            return found.make() if type(found) is Like else found
        kind, places = place
        return kind([self._look(part) for part in places])

    def _call_with_own_numbers(self, instruction: Instruction, own: list[Any]) -> Any:
        step = instruction.step
        args = [self._build(template) for template in own[: len(step.inputs)]]
        named = own[-1] if len(own) > len(step.inputs) else step.named or {}
        return instruction.run(*args, **{name: self._build(template) for name, template in named.items()})

    def _build(self, template: Any) -> Any:
        if isinstance(template, Known | First):
            return self.table[self.window.place_of[template.cell]]
        if type(template) is Parts:
            return template.kind([self._build(item) for item in template.items])
        return template.make() if type(template) is Like else template

    def _copy_of(self, tensor: Tensor, slot: Slot) -> Tensor:
        """A copy of what a later step will write to; a region inside may take several tensors that share memory."""
        if not slot.is_read:
            return _torch.copy(tensor)
        key = _torch.storage_id(tensor), slot.version
        if key not in self.copies:
            self.copies[key] = _torch.clone_storage(tensor)
        return _torch.lay_as(tensor, self.copies[key])

    def _deliver(self, wanted: tuple[int, int, bool]) -> None:
        number, place, is_written = wanted
        tensor = self.table[place]
        if is_written:
            tensor = self._copy_of(tensor, self.window.path.slots[number])
        holder = self.holders[self.window.path.owners[number]]
        saved = holder.saved
        if type(saved) is Wrapped:
            parts = self.parts[holder.slot]
            parts[number] = tensor
            if len(parts) < len([*slots_of(saved)]):
                return
            tensor = _wrap(saved, iter([parts[number] for number in sorted(parts)]))
        elif not self.request.frame.complete:
            self.source.tape.adopt(tensor, saved)
        self.request.deliver(holder, tensor)


class _Filling(_Execution):
    """One replay that makes what other windows start from."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.found: dict[int, Tensor] = {}

    def _copy_of(self, tensor: Tensor, slot: Slot) -> Tensor:
        """A copy of what a later step will write to; a region inside may take several tensors that share memory."""
        if not slot.is_read:
            return _torch.copy(tensor)
        key = _torch.storage_id(tensor), slot.version
        if key not in self.copies:
            self.copies[key] = _torch.clone_storage(tensor)
        return _torch.lay_as(tensor, self.copies[key])

    def _deliver(self, wanted: tuple[int, int, bool]) -> None:
        number, place, is_written = wanted
        self.found[number] = _torch.copy(self.table[place]) if is_written else self.table[place]


def _wrap(saved: Wrapped, parts: Any) -> Tensor:
    """The other way of `Wrapped`."""
    tensors = {}
    for name, part in saved.parts.items():
        tensors[name] = _wrap(part, parts) if type(part) is Wrapped else next(parts) if type(part) is Slot else part
    return _torch.unflatten(saved.kind, tensors, saved.context, saved.size, saved.stride)


def is_counted(step: Step) -> bool:
    """Whether a step counts as a recorded operator: no view, and repeated by a replay."""
    return step.event is None and not step.is_view and not step.effect
