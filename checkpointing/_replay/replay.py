"""Source 2: run recorded operators again, just those that are needed.

When a block ends, its plan says which holders share a window, and each group of holders gets a
`Stock`: what its window starts from. Stocks belong to holders, so that whatever no live holder
needs is freed when the block ends, and the rest goes as backward passes by (rule 9). Opening a
holder runs the window of its group.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, islice
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor

from .. import _torch, errors
from .._engine import (
    Aliased,
    Frame,
    Held,
    Holder,
    Holding,
    Moved,
    Task,
    Undo,
    enter_context,
    enter_switches,
    regions,
    thread,
    undo_all,
    unpack,
    warn,
)
from .._plan import Group, Plan, attach, plan_of
from .._record import Ends, Path, Run, Value, size_pieces
from .execution import Execution, Work

_MUCH, _NEARLY_ALL = 1 << 26, 0.9  # bytes that a block saves, and the part that backward needs
_OF_A_NODE = 16  # tensors: few nodes of the graph save more
_AHEAD = 2  # how many offloaded tensors are prefetched


class Stock:
    """What the window of a group starts from in one run."""

    def __init__(
        self, plan: Plan, group: Group, held: Mapping[Value, Any], source: Any, slots: Sequence[int]
    ) -> None:
        """`source` is a store, or the stock of which this is a part."""
        values, randoms = group.needs(slots)
        self.plan, self.group = plan, group
        self.held = {value: held[value] for value in values}
        known = source.random
        self.random = {index: known[index] for index in randoms if index in known}
        self.first_holder: int = source.first_holder
        self.numbers, self.shapes = source.numbers, source.shapes

    def wanted(self, holders: Sequence[ref[Holder]], task: Task) -> dict[int, Holder]:
        """By slot: the live holders that the graph task may still open."""
        found: dict[int, Holder] = {}
        for slot in self.group.slots:
            holder = holders[self.first_holder + slot]()
            if holder is not None and holder.slot not in task:
                found[slot] = holder
        return found

    def moved(self) -> list[Moved]:
        """What waits elsewhere."""
        return [held for held in self.held.values() if type(held) is Moved]


class _Holder(Holder):
    __slots__ = ("stock",)

    stock: Stock  # once the block has ended, or a backward inside it has begun


class Wrapped:
    """A wrapper subclass, taken apart: its parts have holders."""

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Holder]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size, self.stride = tensor.size(), tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}  # one may be a `DeviceMesh`
        self.parts = {k: pack(v) if isinstance(v, Tensor) else v for k, v in parts.items()}

    def unwrapped(self) -> Tensor:
        parts = {k: unpack(v) if type(v) is _Holder else v for k, v in self.parts.items()}
        return _torch.unflatten(self.kind, parts, self.context, self.size, self.stride)


class Replay(Frame):
    """A block whose operators run again."""

    hint = errors.UNSEEN
    kind_of_task = Work
    _room: float | None = None  # for what pieces keep; None: it is not taken in pieces
    _brings_back = False  # whether a backward inside has brought values back into the block
    is_new = False  # whether the block went a way that was not known
    replays: int = 0
    replayed = 0
    plan: Plan | None = None  # when the block has ended
    # Of what came before the block began anew: operators, bytes, the largest peak predicted, and
    # parameters that got a gradient.
    _counted = _saved = peak = 0
    _trained: Set[Tensor] = frozenset()
    _cuts: tuple[int, ...] = ()  # there, and where the pieces ended: operators before these
    _order: dict[ref[Moved], int] | None = None  # in which backward wants them

    def __init__(self, run: Run, *about: Any) -> None:
        super().__init__(*about)
        self.run = run
        self.save = run.save
        self._pieces: list[int] = []  # the steps at which they ended, by id

    # ---- what the holders get

    def pack(self, tensor: Tensor) -> Holder:
        holder, holders = _Holder(), self.holders
        holder.frame = self
        holder.slot = len(holders)
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            holder.slot = ~holder.slot  # which no part has
            holder.saved = self._wrapped(tensor)
            return holder
        holders.append(ref(holder))
        holder.saved = self.save(tensor)
        if self.check is not None:
            holder.metadata = self.check(tensor)
        if self.notes is not None:
            self.notes.add(holder, tensor)
        return holder

    _torch.mark_as_torchs_own(pack)

    def _wrapped(self, tensor: Tensor) -> Wrapped:
        """Take a wrapper subclass apart. Of an input of a region inside, all parts are inputs."""
        run = self.run
        announced, run.announced = run.announced, None

        def pack(part: Tensor) -> Holder:
            if announced is not None:
                run.announced = part
            return self.pack(part)

        return Wrapped(tensor if announced is None else announced, pack)

    def allow_pieces(self, budget: int | None) -> None:
        """Where the paths of a site do not come again, the block is several, one after the other,
        each with a window of its own. Together they keep no more than the budget."""
        run, history = self.run, self.run.program.history
        self._room = math.inf if budget is None else budget
        if history.in_pieces:
            run.ends = Ends(self._end_piece, history)
            run.store.placement = None
            run.holds_planned = False
            run.program.is_advised = True

    def _leave(self) -> Plan:
        """What comes next in the block is like another run."""
        plan = self._hand_over()
        self._counted, self._cuts = self._counts(plan.path)
        self._saved += self.run.store.saved_bytes
        return plan

    def _end_piece(self) -> int:
        self._leave()
        self._cuts += (self._counted,)
        self._pieces.append(id(self.run.step))
        return len(self.holders)

    def close(self) -> str:
        """The block has ended: what its windows need goes to the holders. Returns the complaint of
        its plan, if it has one."""
        self.plan = plan = self._hand_over()
        self._trained = frozenset()
        run, program = self.run, self.run.program
        program.history.brings_back = self._brings_back
        if run.store.placement is not None:
            self._wait()
        if self._goes_otherwise(plan.path):
            program.forget()
        run.end()
        return plan.complaint

    def _goes_otherwise(self, path: Path) -> bool:
        """Whether the next run of the site is whole and this one was not, or the other way round;
        `path` is that of the block, or of its last piece."""
        run, history = self.run, self.run.program.history
        if run.ends is not None:
            return history.came_in((*self._pieces, id(run.step)), run.ends.saved(run.path))
        if self._room is None or not history.went(self.is_new):
            return False
        return size_pieces(path, history, self._room - run.store.kept_bytes)

    def _wait(self) -> None:
        """From here on this block waits for backward. Those that did before have stayed behind."""
        for site, blocks in [*thread.blocks.items()]:
            if blocks:
                site.stay_behind(blocks)
            else:
                del thread.blocks[site]
        thread.blocks.setdefault(self.run.program.history, WeakSet()).add(self)

    def _hand_over(self) -> Plan:
        """What windows need goes to the holders. Returns the plan for what the run has done."""
        run, store = self.run, self.run.store
        run.finish_step()
        old: Plan | None = run.step.plan
        if old is not None and old.suits(run):
            plan = old
            if run.program.history.brings_back:
                run.keep_what_is_there(plan)
        else:
            run.own_program()
            plan = run.step.plan = plan_of(run, old)
            self.is_new = old is None
            if self.is_new:
                run.program.has_planned(len(run.path))
            if not run.is_alone:
                attach(plan, old)
                run.keep_what_is_there(plan)
        gradients = [each.nbytes for each in self._trained if each.grad is not None]
        self.peak = max(self.peak, int(plan.growth(run) * plan.peak) + sum(gradients))
        run.program.has_used(plan)
        if old is not None and plan.size > old.size:
            run.program.grow(plan)
        holders: Any = [weak() for weak in self.holders[store.first_holder :]]
        for group in plan.groups_for(run):
            alive = [slot for slot in group.slots if holders[slot] is not None]
            if alive:
                stock = Stock(plan, group, store.held, store, alive)
                store.copy_states(stock.held.keys())
                for slot in alive:
                    holders[slot].stock = stock
        return plan

    def _stock_of(self, holder: Any) -> Stock:
        run = self.run
        if hasattr(holder, "stock") and (self.plan is not None or not run.may_rest_again()):
            return holder.stock  # type: ignore[no-any-return]
        run.store.settle()  # a backward has begun
        run.program.history.stays_whole = True
        if run.may_begin_anew():
            self._trained |= self._leave().without_gradient(run)
            run.begin_anew(self.holders)
        else:
            self._brings_back = run.program.history.brings_back = True
            self._hand_over()
        return holder.stock  # type: ignore[no-any-return]

    # ---- as a frame

    def announce(self, role: object, tensor: Tensor) -> None:
        self.run.announced = tensor

    def at_hand(self, holder: Holder) -> Tensor | None:
        """What needs no window: a value that is held by itself, or a subclass put together from
        its parts, which have holders of their own."""
        slot = holder.saved
        if type(slot) is Wrapped:
            return slot.unwrapped()
        if self.check is not None or not self.early_stop:
            return None  # it is compared, too, or all windows run
        held = self._stock_of(holder).held.get(slot.value)
        if type(held) is not Aliased:
            return None
        if held.is_stale or _torch.was_given_back(held.packed):
            return None  # which a recompute says
        return held.packed  # type: ignore[no-any-return]

    def recompute(self, holder: Holder, task: Any) -> None:
        run = self.run
        run.store.settle()
        undo: Undo = []
        task.undo = undo
        if run.fake_mode is not None and _torch.fake_mode() is None:  # backward runs outside of it
            enter_context(run.fake_mode, undo)
        before = self.replayed
        try:
            # Those of the block's beginning: kernels look at them.
            enter_switches(run.switches, undo)
            if self.context is not None:
                enter_context(self.context, undo)
            self._replay(holder, task)
            for other in () if self.early_stop else self.wanted(task):
                self._replay(other, task)
        finally:
            undo_all(undo)
        self.replays += self.replayed > before
        if regions.entered:
            regions.is_alone, regions.entered = regions.entered == 1, 0
        if regions.is_alone and run.store.placement is None:
            self._advise(task)
        # Mostly the first look tells, since backward opens the last slots first.
        if task.memory and next(self.wanted(task), None) is None:
            task.memory.clear()

    def _advise(self, task: Task) -> None:
        """Warn if this block, the only one in the step, has brought back all at once."""
        program, saved = self.run.program, self.run.store.saved_bytes
        if program.is_advised or saved <= _MUCH:
            return
        tensors = [tensor for tensor in task.values() if tensor is not None]
        made = {_torch.storage_of(tensor): _torch.memory_size(tensor) for tensor in tensors}
        if sum(made.values()) > _NEARLY_ALL * saved:
            program.is_advised = True
            warn(
                f"{self.title}: backward brought back nearly all that was saved in it at once."
                " Around a whole model that saves next to nothing: checkpoint_scope(auto()) places"
                " checkpoints inside."
            )

    def _replay(self, holder: Holder, work: Work) -> None:
        """Run the window of a holder, and hand out what it makes."""
        stock = self._part_of(holder, work)
        holders = stock.wanted(self.holders, work)
        window = stock.group.window(holders)
        if _torch.keeps_graph():
            stock.plan.retains(holder.slot - stock.first_holder)
        elif not self.replayed:
            self._begins_with(stock)
        self.replayed += window.counted
        execution = Execution(window, stock, self, work)
        if self.run.store.movers and self.complete:
            self._prefetch(stock)
        check = self.check
        for number, tensor in sorted(execution.make().items()):
            holder = holders[number]
            if self.plan is None and holder.slot >= self.run.store.first_holder:
                self.run.adopt(tensor, holder.saved)
            if check is not None and (found := check(tensor)) != holder.metadata:
                self.note_mismatch(holder, found, tensor, work)
            work[holder.slot] = tensor

    def _begins_with(self, stock: Stock) -> None:
        """Backward begins with a window of this. What comes after it waits, such as a second loss
        that is differentiated later."""
        end = stock.first_holder + max(stock.group.slots) + 1
        later = sum([holder() is not None for holder in self.holders[end:]])
        if later > _OF_A_NODE:
            self.run.program.history.leaves(1)

    def _part_of(self, holder: Holder, work: Work) -> Stock:
        """What the window of a holder starts from. Where the run has not held it, it is made now,
        for all parts at once. It stays until the windows of the parts have run, or the graph task
        ends; what a part starts from, until that is in parts, too."""
        whole, memory = self._stock_of(holder), work.memory
        if not whole.group.parts:
            return whole
        parts: dict[int, Stock] = memory.setdefault(whole, {})  # by holder
        stock = parts.get(holder.slot, whole)
        while stock.group.parts:
            filled = self._fill(stock, work)
            _drop(stock, parts)
            parts.update(filled)
            stock = parts[holder.slot]
        _drop(stock, parts)
        if not parts:
            del memory[whole]
        return stock

    def _fill(self, stock: Stock, work: Work) -> dict[int, Stock]:
        """What the parts of a group start from, by holder."""
        wanted = stock.wanted(self.holders, work)
        window = stock.group.window(wanted)
        self.replayed += window.counted
        made = Execution(window, stock, self, work).make()
        held = dict(stock.held)
        held.update([(window.targets[number].value, tensor) for number, tensor in made.items()])
        found: dict[int, Stock] = {}
        for part, mine in stock.group.parts_of(wanted):
            if all(self.at_hand(wanted[slot]) is not None for slot in mine):
                continue  # they are handed out without it, and it would stay
            part_stock = Stock(stock.plan, part, held, stock, mine)
            found.update((stock.first_holder + slot, part_stock) for slot in mine)
        return found

    def _prefetch(self, stock: Stock) -> None:
        """Start to bring back the next tensors: backward opens first the one saved last."""
        if self._order is None:
            holders = [h for weak in reversed(self.holders) if (h := weak()) is not None]
            stocks = dict.fromkeys(map(self._stock_of, holders))
            found = dict.fromkeys([ref(moved) for one in stocks for moved in one.moved()])
            self._order = {weak: rank for rank, weak in enumerate(found)}
        ranks = [self._order.get(ref(moved), -1) for moved in stock.moved()]
        last = max(ranks, default=len(self._order))
        after = islice(self._order, last + 1, None)
        coming = (later for weak in after if (later := weak()) is not None)
        for later in islice(coming, _AHEAD):
            later.prefetch()

    # ---- for messages and reports

    @property
    def saved_bytes(self) -> int:  # type: ignore[override]
        return self._saved + self.run.store.saved_bytes

    def maker(self, holder: Any, tensor: Tensor) -> str | None:
        path = holder.stock.group.path if hasattr(holder, "stock") else self.run.so_far()
        step = path.maker_of(holder.saved.value)
        return super().maker(holder, tensor) if step is None else str(step.func)

    def counts(self) -> tuple[int, tuple[int, ...]]:
        """How many operators were recorded, and where among them the cuts are."""
        return self._counts(self.run.so_far() if self.plan is None else self.plan.path)

    def _counts(self, path: Path) -> tuple[int, tuple[int, ...]]:
        before = [*accumulate([step.is_counted for step in path.steps], initial=self._counted)]
        cuts = [*self._cuts, *[before[cut] for cut in path.cuts]]
        return before[-1], tuple(dict.fromkeys(cuts))  # several values may be kept at one place

    def holdings(self) -> Iterable[Holding]:
        holders: Any = [weak() for weak in self.holders]
        found = [holder.stock for holder in holders if hasattr(holder, "stock")]
        paths: dict[Any, Path] = {stock: stock.group.path for stock in found}
        if self.plan is None:  # the block still runs
            paths[self.run.store] = self.run.so_far()
        for stock, path in paths.items():
            for value, held in stock.held.items():
                if not held.is_parameter:
                    yield _holding(path, value, held)
            for index, state in stock.random.items():
                step = path.steps[index]
                for tensor in state.states:
                    yield Holding("random state", tensor, str(step.func), step.note)


def _drop(stock: Stock, parts: dict[int, Stock]) -> None:
    """Its window has run, or has been taken apart."""
    for slot in stock.group.slots:
        parts.pop(stock.first_holder + slot, None)


def _holding(path: Path, value: Value, held: Held) -> Holding:
    if value in path.given:
        readers = (step for step in path.steps if step.func and value in step.reads)
        kind, step = "input", next(readers, None)
    else:
        kind, step = "kept", path.maker_of(value)
    if step is None:
        return Holding(kind, held)
    return Holding(kind, held, str(step.func), step.note)
