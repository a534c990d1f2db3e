"""Source 2: run recorded operators again, just those that are needed.

When a block ends, its plan says which holders share a window, and each group of holders gets a
`Stock`: what its window starts from. Stocks belong to holders, so that whatever no live holder
needs is freed when the block ends, and the rest goes as backward passes by (rule 9). Opening a
holder runs the window of its group.

Invariant: a window writes to no memory that it has been given or gives away. Tensors on memory that
it writes are copied when they are fetched. Before it writes, the slots that it has found and that
overlap with the target are copied, by the geometry that both have in this very run.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from itertools import accumulate
from typing import Any

from torch import Tensor

from .. import _torch, errors
from .._engine import (
    Aliased,
    Frame,
    Held,
    Holder,
    Holding,
    Moved,
    Request,
    TaskTensors,
    Undo,
    check_version,
    described,
    enter_context,
    enter_switches,
    maker_of as maker_of_tensor,
    prefetch,
    undo_all,
)
from .._plan import Found, Group, Instruction, Path, Plan, Window, attach, maker_of, plan_of
from .._record import (
    NOT_WRITTEN,
    Like,
    Run,
    Slot,
    Wrapped,
    check_there,
    shapes_of,
    slots_of,
    tensors_of,
)


class Stock:
    """What the window of a group starts from in one run."""

    __slots__ = ("first_holder", "group", "held", "numbers", "random", "shapes")

    def __init__(
        self, group: Group, held: dict[Any, Any], run: Run | Stock, slots: Sequence[int]
    ) -> None:
        self.group = group
        self.random: dict[int, Any] = {}
        if group.only is not None:
            self.held = {group.only: held[group.only]}
        else:
            sources, randoms = group.needs(slots)
            self.held = {source: held[source] for source in sources}
            if run.random:
                self.random = {index: run.random[index] for index in randoms if index in run.random}
        self.first_holder: int = run.first_holder
        self.numbers: dict[int, Any] = run.numbers
        self.shapes: dict[int, Any] = run.shapes

    def owner(self, slot: int) -> int:
        """Which holder of the frame has a slot."""
        return self.first_holder + self.group.path.owners[slot]

    def wanted(self, request: Request) -> dict[int, Holder]:
        """By slot: the live holders that the graph task may still open."""
        ready, refs = request.ready, request.frame.holders
        owners, first = self.group.path.owners, self.first_holder
        found: dict[int, Holder] = {}
        for slot in self.group.slots:
            holder = refs[first + owners[slot]]()
            if holder is not None and holder.slot not in ready:
                found[slot] = holder
        return found


class _Holder(Holder):
    __slots__ = ("stock",)

    stock: Stock  # once the block has ended


class _Task(TaskTensors):
    holds_more = True

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[Any, Any] = {}  # tensors that have been fetched, and parts of stocks


class Replay(Frame):
    """A block whose operators run again."""

    hint = errors.UNSEEN
    kind_of_task = _Task

    def __init__(self, run: Run, *about: Any) -> None:
        super().__init__(*about)
        self.tape = run
        self.save = run.save
        self.replays: int = 0
        self.replayed = 0
        self._counted = 0  # operators, before the block began anew
        self.plan: Plan | None = None  # when the block has ended
        self.complaint = ""
        self._order: list[weakref.ref[Moved]] | None = None

    # ---- what the holders get

    def pack(self, tensor: Tensor) -> Holder:
        holder = _Holder()
        holder.frame = self
        holder.slot = len(self.holders)
        self.holders.append(weakref.ref(holder))
        holder.saved = self.save(tensor)
        if self.check is not None:
            holder.metadata = self.check(tensor)
        if self.notes is not None:
            self.notes.add(holder, tensor)
        return holder

    _torch.mark_as_torchs_own(pack)

    def close(self) -> None:
        """The block has ended: what its windows need goes to the holders."""
        run = self.tape
        plan = self._hand_over()
        self.plan, self.complaint = plan, plan.complaint
        run.held, run.random, run.path, run.stocks, run.cells = {}, {}, [], {}, []
        run.is_over = True

    def _hand_over(self) -> Plan:
        """What windows need goes to the holders, which own it from here on."""
        run = self.tape
        plan = self._find_plan()
        holders: Any = [ref() for ref in self.holders[run.first_holder :]]
        owners = plan.path.owners
        for group in plan.groups_for(run):
            alive = [slot for slot in group.slots if holders[owners[slot]] is not None]
            stock = Stock(group, run.held, run, alive) if alive else None
            for slot in alive:
                holders[owners[slot]].stock = stock
        return plan

    def _find_plan(self) -> Plan:
        """The plan for what the run has done so far."""
        run = self.tape
        run.finish_step()
        old = run.step.plan
        if old is not None and old.suits(run):
            plan, run.program.new_paths = old, 0
        else:
            run.own_program()
            plan = run.step.plan = plan_of(run, old)
            if not run.is_alone:
                attach(plan, old)
        run.program.expected = plan
        if old is not None and plan.size > old.size:
            run.program.grow(plan.size)
        return plan  # type: ignore[no-any-return]

    def _stock_of(self, holder: Any) -> Stock:
        try:
            return holder.stock  # type: ignore[no-any-return]
        except AttributeError:
            pass
        slot, run = holder.slot, self.tape
        if run.may_begin_anew:
            self._counted += sum(step.is_counted for step in self._hand_over().path.steps)
            run.begin_anew(self.holders)
            return holder.stock  # type: ignore[no-any-return]
        if slot not in run.stocks:  # a backward inside the block
            plan = self._find_plan()
            for group in plan.groups_for(run):
                stock = Stock(group, run.held, run, group.slots)
                run.stocks.update((stock.owner(slot), stock) for slot in group.slots)
        return run.stocks[slot]  # type: ignore[no-any-return]

    # ---- as a frame

    def announce(self, role: object, tensor: Tensor) -> None:
        self.tape.announce(tensor)

    def note_written(self, storages: Set[int]) -> None:
        """The run has seen the operators that wrote."""

    def maker(self, holder: Any, tensor: Tensor) -> str | None:
        if not hasattr(holder, "stock"):
            return self._operator_of(holder) or maker_of_tensor(tensor)
        path = holder.stock.group.path
        made = max([path.newest(slot.value) for slot in slots_of(holder.saved)], default=-1)
        return None if made < 0 else str(path.steps[made].func)

    def holdings(self) -> Iterable[Holding]:
        run = self.tape
        held, random = run.held, run.random  # while the block runs
        if self.plan is not None:
            holders: Any = [holder for ref in self.holders if (holder := ref()) is not None]
            stocks = {
                id(holder.stock): holder.stock for holder in holders if hasattr(holder, "stock")
            }.values()
            held = {cell: entry for stock in stocks for cell, entry in stock.held.items()}
            random = {index: state for stock in stocks for index, state in stock.random.items()}
        path = self.path()
        for key, entry in held.items():
            if type(entry) is tuple or entry.is_parameter:
                continue
            if key in path.given:
                readers = (step for step in path.steps if key in dict(step.reads))
                kind, step = "input", next(readers, None)
            else:
                value = key if type(key) is tuple else (key, NOT_WRITTEN)
                kind, step = "kept", maker_of(value, path.steps)
            operator, note = (None, None) if step is None else (str(step.func), step.note)
            yield Holding(kind, entry, operator, note)
        for index, state in random.items():
            step = path.steps[index]
            for tensor in state.states:
                yield Holding("random state", tensor, str(step.func), step.note)

    def _operator_of(self, holder: Holder) -> str | None:
        steps = [maker_of(slot.value, self.tape.path) for slot in slots_of(holder.saved)]
        return next((str(step.func) for step in steps if step is not None), None)

    @property
    def saved_bytes(self) -> int:  # type: ignore[override]
        return self.tape.saved_bytes

    def counts(self) -> tuple[int, tuple[int, ...]]:
        """How many operators were recorded, and where among them the cuts are."""
        path = self.path()
        before = [*accumulate([step.is_counted for step in path.steps], initial=0)]
        return self._counted + before[-1], tuple([before[cut] for cut in path.cuts])

    def path(self) -> Path:
        return Path(self.tape) if self.plan is None else self.plan.path

    def at_hand(self, holder: Holder) -> Tensor | None:
        """A value that is held, or a view of one, that hooks have not taken: nothing to compute,
        nothing to share."""
        slot = holder.saved
        is_replayed = self.check is not None or not self.early_stop
        if is_replayed or type(slot) is not Slot:
            return None
        stock = self._stock_of(holder)
        held = stock.held.get(slot.cell if slot.is_held else stock.group.only)
        if type(held) is Aliased and not (held.is_stale or held.is_parameter):
            return held.packed  # type: ignore[no-any-return]
        window = None if held is not None else stock.group.shown()
        if any(isinstance(each, Held) and each.is_packed for each in stock.held.values()):
            return None
        try:
            if held is not None:
                return self.fetch(held, {})
            if window is not None and not _torch.mode_count():  # which would see it being made
                return _Execution(self, stock, window, {}, []).run().popitem()[1]
        except errors.CheckpointError:
            pass  # it will be raised again, from a recompute
        return None

    def fetch(self, held: Any, inputs: dict[Any, Tensor]) -> Tensor:
        """What a run holds in a cell."""
        if type(held) in _torch.UNWRAPPED:  # an earlier replay has made it
            return held  # type: ignore[no-any-return]
        if type(held) is tuple:
            parameter, version = held
            check_version(self, "a parameter", parameter, version)
            if type(parameter) is not _torch.FakeTensor and not parameter.data_ptr():
                check_there(self, parameter)
            return parameter  # type: ignore[no-any-return]
        tensor = inputs.get(held)
        if tensor is None:
            tensor = held.fetch(self)
            if held.is_parameter:
                check_there(self, tensor)
            # Else it can be fetched again.
            if held.is_packed and held.moved is None:
                inputs[held] = tensor
        return tensor

    def _prefetch(self, stock: Stock) -> None:
        """Start to bring back the next tensors: backward opens first the one saved last."""
        if self._order is None:
            self._order = []
            holders = [holder for ref in reversed(self.holders) if (holder := ref()) is not None]
            for held in {id(s): s for holder in holders for s in [self._stock_of(holder)]}.values():
                for moved in _moved_in(held):
                    if moved.rank < 0:
                        moved.rank = len(self._order)
                        self._order.append(weakref.ref(moved))
        prefetch(
            self._order, max([moved.rank for moved in _moved_in(stock)], default=len(self._order))
        )

    def recompute(self, request: Request) -> None:
        run, task = self.tape, request.task
        assert isinstance(task, _Task)
        run.settle()
        # Those of the block's beginning: kernels look at them.
        undo: Undo = []
        if run.fake_mode is not None and _torch.fake_mode() is None:  # backward runs outside of it
            enter_context(run.fake_mode, undo)
        before = self.replayed
        try:
            enter_switches(run.switches, undo)
            if self.context is not None:
                enter_context(self.context, undo)
            self._replay(request.holder, request, task.memory, undo)
            for holder in () if self.early_stop else request.wanted():
                if holder.slot not in request.ready:
                    self._replay(holder, request, task.memory, undo)
        finally:
            undo_all(undo)
        self.replays += self.replayed > before
        if task.memory and request.is_last:
            task.memory.clear()

    def _replay(self, holder: Holder, request: Request, inputs: dict[Any, Any], undo: Undo) -> None:
        """Run the window of a holder, and hand out what it makes."""
        stock = self._part_of(holder, request, inputs, undo)
        holders = stock.wanted(request)
        window = stock.group.window(tuple(holders))
        execution = _Execution(self, stock, window, inputs, undo)
        if self.tape.movers and self.complete:
            self._prefetch(stock)
        parts: dict[int, list[Tensor]] = defaultdict(list)  # by holder
        for number, tensor in sorted(execution.run().items()):
            holder = holders[number]
            saved = holder.saved
            if type(saved) is Wrapped:
                mine = parts[holder.slot]
                mine.append(tensor)
                if len(mine) == len([*slots_of(saved)]):
                    request.deliver(holder, _wrap(saved, iter(mine)))
                continue
            if not hasattr(holder, "stock"):
                self.tape.adopt(tensor, saved)
            request.deliver(holder, tensor)

    def _part_of(
        self, holder: Holder, request: Request, inputs: dict[Any, Any], undo: Undo
    ) -> Stock:
        """What the window of a holder starts from. Where the run has not held it, it is made now,
        for all parts at once, and stays until the windows of the parts have run, or the graph task
        ends."""
        stock = self._stock_of(holder)
        passed = []
        while stock.group.parts:
            parts = inputs.get(stock, {})
            if holder.slot not in parts:
                parts = inputs[stock] = self._fill(stock, request, inputs, undo)
            passed.append(stock)
            stock = parts[holder.slot]
        for outer in passed:
            for slot in stock.group.slots:
                inputs[outer].pop(stock.owner(slot), None)
            if not inputs[outer]:
                del inputs[outer]
        return stock

    def _fill(
        self, stock: Stock, request: Request, inputs: dict[Any, Any], undo: Undo
    ) -> dict[int, Stock]:
        """What the parts of a group start from, by holder."""
        parts = stock.group.parts_of(stock.wanted(request))
        values, window = stock.group.filling(
            {source for part, mine in parts for source in part.needs(mine)[0]}
        )
        made = _Execution(self, stock, window, inputs, undo).run()
        held = {**stock.held, **{value: made[number] for number, value in enumerate(values)}}
        found: dict[int, Stock] = {}
        for part, mine in parts:
            part_stock = Stock(part, held, stock, mine)
            found.update((stock.owner(slot), part_stock) for slot in mine)
        return found


def _moved_in(stock: Stock) -> list[Moved]:
    """What of a stock waits elsewhere."""
    packed = [held.moved for held in stock.held.values() if isinstance(held, Held)]
    return [moved for moved in packed if moved is not None]


class _Execution:
    """One replay of a window."""

    def __init__(
        self,
        source: Replay,
        stock: Stock,
        window: Window,
        inputs: dict[Any, Tensor],
        undo: Undo,
    ) -> None:
        self.source, self.stock, self.window = source, stock, window
        self.undo = undo
        self.found: dict[int, Tensor] = {}  # by slot
        self.exposed: dict[int, list[int]] = defaultdict(list)  # by memory: found, and not copied
        self.table = window.table.copy()
        # Before autograd is switched off: an enclosing region may have to rerun for them.
        for place, key, _ in window.starts:
            self.table[place] = source.fetch(stock.held[key], inputs)

    def run(self) -> dict[int, Tensor]:
        """What the window makes, by slot."""
        with _torch.below_autograd():
            self._run()
        self.source.replayed += self.window.counted
        return self.found

    def _run(self) -> None:
        table, numbers = self.table, self.stock.numbers
        self._begin()
        for instruction in self.window.instructions:
            is_quick = instruction.is_quick
            if instruction.index in numbers:
                instruction.take(numbers[instruction.index], table)
                is_quick = is_quick and not instruction.kwargs
            if is_quick:
                result = instruction.call(*[table[place] for place in instruction.args])
            else:
                result = self._call(instruction)
            if type(result) is Tensor:
                table[instruction.results[0]] = result
            else:
                self._take(instruction, result)
            result = None
            for found in instruction.wanted:
                self._note(found)
            for place in instruction.dead:
                table[place] = None

    def _begin(self) -> None:
        window = self.window
        if window.written:
            self._copy_what_is_written()
        for found in window.at_once:
            self._note(found)

    def _note(self, found: Found) -> None:
        """A slot has been made."""
        self.found[found.slot] = self.table[found.place]
        if found.memory is not None:
            self.exposed[found.memory].append(found.slot)

    def _call(self, instruction: Instruction) -> Any:
        """Run a step with all that may belong to it."""
        _torch.set_grad_enabled(instruction.step.grad_mode)
        for memory in instruction.writes:
            self._save_from(instruction, memory)
        draws = instruction.step.draws
        state = self.stock.random.get(instruction.index) if draws else None
        if state is not None:
            state.enter(self.undo)
        args = [self._look(place) for place in instruction.args]
        kwargs = {name: self._look(place) for name, place in instruction.kwargs.items()}
        result = instruction.run(*args, **kwargs)
        if self.stock.shapes:
            self._check_shapes(instruction, result)
        return result

    def _take(self, instruction: Instruction, result: Any) -> None:
        for place, tensor in zip(instruction.results, tensors_of(result), strict=True):
            self.table[place] = tensor

    def _copy_what_is_written(self) -> None:
        for place, _, memory in self.window.starts:
            if memory in self.window.written:
                self.table[place] = _torch.clone_storage(self.table[place])

    def _check_shapes(self, instruction: Instruction, result: Any) -> None:
        """An operator may depend on more than the shapes of its arguments."""
        was, step = self.stock.shapes.get(instruction.index), instruction.step
        if was is not None and was != (now := shapes_of(result)):
            line = None if step.line is None else described(step.line)
            raise errors.other_shapes(self.source, str(step.func), line, was, now)

    def _look(self, place: Any) -> Any:
        if type(place) is int:
            found = self.table[place]
            return found.make() if type(found) is Like else found
        kind, places = place
        return kind([self._look(part) for part in places])

    def _save_from(self, instruction: Instruction, memory: int) -> None:
        """Copy the slots that an instruction is about to write to. A region inside may take several
        tensors that share memory."""
        targets = tensors_of([self._look(place) for place in instruction.targets])
        slots, exposed = self.window.targets, self.exposed[memory]
        hit = {n for n in exposed if any(_torch.overlap(self.found[n], t) for t in targets)}
        if any(slots[number].is_read for number in hit):
            hit.update([number for number in exposed if slots[number].is_read])
        copies = _torch.Copies()
        for number in hit:
            copy = copies.copy if slots[number].is_read else _torch.copy
            self.found[number] = copy(self.found[number])
        self.exposed[memory] = [number for number in exposed if number not in hit]


def _wrap(saved: Wrapped, parts: Any) -> Tensor:
    """The other way of `Wrapped`."""
    tensors = {}
    for name, part in saved.parts.items():
        tensors[name] = (
            _wrap(part, parts)
            if type(part) is Wrapped
            else next(parts)
            if type(part) is Slot
            else part
        )
    return _torch.unflatten(saved.kind, tensors, saved.context, saved.size, saved.stride)
