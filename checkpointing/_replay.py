"""Source 2: run recorded operators again, just those that are needed.

Opening a holder replays its *window*: the operators that its value depends on, back to what is held, together with
those of the other live holders of the same segment (the stretch between two kept values) that share operators with
it. So within a graph task an operator of a segment runs at most once, a dropout mask does not drag in the matrix
product beside it, and one block around a whole model with kept values between the layers needs the memory of one
layer at a time.

A window may deliver more than there is room for (`Limits`, from a budget). Then only its last piece is delivered, and
what is alive at the cuts before it is stored until the graph task is through with it: opening a holder of an earlier
piece replays from there, and cuts again where that is still too much. With room for c values on each level, a chain of
n steps is recomputed log n / log c times over at most, and needs c values as many times.

Rejected: replaying whole tapes (memory of plain), and widening a window by whatever it touches (a mask or a rotary
table that all layers share would make one window of the whole model).
"""

from __future__ import annotations

import functools
import operator
import weakref
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

from torch import Tensor

from . import _torch, errors
from ._ambient import Undo, enter_switches, undo_all
from ._engine import Frame, Holder, Holding, Recompute, Source, named
from ._offload import Moved, prefetch
from ._ops import tensors_of
from ._tape import Tape
from ._tree import ATOMS
from ._values import CHEAP, KEPT, Geometry, Op, Ref, Scratch, Value, Wrapped, are_disjoint, geometry_of, values_of

Cuts = list[tuple[int, list[Value]]]  # positions on the tape, each with what was made before and is read after it
# How a stored value lies on its storage: nothing of it may be overwritten.
_EVERYTHING: Any = ((), (), 0, None, 0)


class Limits(NamedTuple):
    """What a replay may hold, in bytes, of what autograd will ask for later."""

    piece: int  # delivered at once
    stored: int  # to start from once more


class Replay(Source):
    """The tape of one region as a source. The operators themselves belong to the holders."""

    def __init__(self, tape: Tape, log: list[tuple[str, str]] | None = None) -> None:
        self.tape = tape
        self.save = tape.save
        self.log = log
        self.replays = 0
        self.replayed = 0
        self._segments: dict[int, list[weakref.ref[Holder]]] | None = None
        self._order: list[weakref.ref[Moved]] | None = None

    def counts(self) -> tuple[int, tuple[int, ...]]:
        """How many operators were recorded, and where among them the cuts are."""
        return self.tape.recorded, tuple([self.tape.counted[cut] for cut in self.tape.cuts])

    def operator_of(self, holder: Holder) -> str | None:
        return self.maker(holder)

    def holdings(self, frame: Frame) -> Iterable[Holding]:
        holders = [holder for ref in frame.holders if (holder := ref()) is not None]
        stack = [*self.tape._values.values(), *(value for holder in holders for value in values_of(holder.saved))]
        spare: dict[Value, Tensor] = getattr(self.tape, "_spare", {})
        spared = {value.id for value in spare} | getattr(self.tape, "spared", set())
        yield from [Holding("spared", tensor, None, value.id) for value, tensor in spare.items()]
        seen: set[Value] = set()
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            kind = "spared" if value.id in spared else "kept" if value.state is KEPT else "input"
            for held in value.all_held:
                if not held.is_parameter:
                    shown = "random state" if held.name == "a random tensor" else kind
                    yield Holding(shown, held, named(held.name), value.id)
            if value.op is not None:
                stack += value.op.reads
                for state in () if value.op.rng is None else value.op.rng.states:
                    yield Holding("random state", state, str(value.op.info.func))

    def maker(self, holder: Holder) -> str | None:
        """The operator that made what the holder saved."""
        return next((str(value.op.info.func) for value in values_of(holder.saved) if value.op is not None), None)

    def segments(self, frame: Frame) -> dict[int, list[weakref.ref[Holder]]]:
        """The holders by the segment in which the newest of what they saved was made. There may be thousands of both,
        so they are sorted once."""
        found = self._segments
        if found is None:
            found, cuts = defaultdict(list), self.tape.cuts
            for ref in frame.holders:
                holder = ref()
                made = -1 if holder is None else newest(holder)
                if made >= 0:
                    found[bisect_right(cuts, made)].append(ref)
            if frame.complete:
                self._segments = found
        return found

    def order(self, frame: Frame) -> list[weakref.ref[Moved]]:
        """What waits elsewhere, as backward will probably want it: it opens first what was saved last."""
        if self._order is None:
            live = [holder for ref in frame.holders if (holder := ref()) is not None]
            for moved, holder in first_needs(live).items():
                moved.last_reader = weakref.ref(holder)
            self._order = []
            for moved in first_needs(reversed(live)):
                moved.rank = len(self._order)
                self._order.append(weakref.ref(moved))
        return self._order

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A value that is held, and that hooks have not taken: nothing to compute, nothing to share."""
        if not where.complete:
            self.tape.note_backward(where.holders)
        saved = holder.saved
        value = saved.value if type(saved) is Ref else saved
        if type(value) is Wrapped or (value.held is None and value.parts is None):
            return None
        geometry = saved.geometry
        held = value.holding(geometry)
        if held is None or held.is_packed or where.check is not None or not where.early_stop:
            return None
        try:
            tensor = held.fetch(where)
        except errors.CheckpointError:
            return None  # it will be raised again, from a recompute
        if (type(saved) is Ref or value.state is KEPT) and geometry_of(tensor) != geometry:
            with _torch.below_autograd():
                tensor = _torch.lay(tensor, *geometry)
        return _in_kind(tensor, saved)

    def recompute(self, request: Recompute) -> None:
        self.tape.settle()
        # Those of the block's beginning: kernels look at them.
        undo: Undo = []
        try:
            enter_switches(self.tape.switches, undo)
            _Window(self, request, undo).run()
        finally:
            undo_all(undo)


class Stage(NamedTuple):
    """What replays of one segment hold on to in one graph task: cuts inside of it, from which later ones start."""

    positions: list[int]  # of the cuts, in order
    stored: dict[int, tuple[Tensor, int]]  # by value: a tensor on it, and the position of what made it

    def piece_of(self, opened: Holder, holders: list[Holder]) -> list[Holder]:
        """Those which are between the same cuts as `opened`."""
        i = bisect_right(self.positions, newest(opened))
        return [holder for holder in holders if bisect_right(self.positions, newest(holder)) == i]


class _Window:
    """One replay: what is wanted, the operators that make it, and the tensors made so far."""

    def __init__(self, source: Replay, request: Recompute, undo: Undo) -> None:
        self._source = source
        self._request = request
        self._frame = request.frame
        # What was fetched, which slots come together, and what is held on to for what is opened later.
        memory: Any = request.task.memory or ({}, {}, {})
        self._inputs, self._plan, self._stages = request.task.memory = memory
        self._made: dict[int, Tensor] = {}  # by value: what its operator returned, or another tensor on its storage
        self._given: dict[int, list[Geometry]] = {}  # by storage: what has been delivered is no longer ours to write
        self._undo = undo
        self._grad_mode = False  # what `below_autograd` sets
        self._stage: Stage | None = None
        self._storing: dict[int, Value] = {}  # what the stage wants

    def run(self) -> None:
        request, source = self._request, self._source
        wanted, ops = self._choose()
        # Before autograd is switched off: an enclosing region may have to rerun for them.
        self._fetch_inputs(ops, wanted)
        with _torch.below_autograd():
            if self._stage is not None:  # start from what an earlier replay has stored
                stored = self._stage.stored
                for id in {value.id for value in needs(ops, wanted)} & stored.keys():
                    self._made[id] = stored[id][0]
                    self._give_away(self._made[id], _EVERYTHING)
            if not ops or not self._frame.early_stop or self._stage is not None:
                for holder in wanted:
                    if self._is_there(holder.saved):
                        request.deliver(holder, self._build(holder.saved))
            if ops:
                source.replays += 1
                source.replayed += len(ops)
                self._replay(ops, wanted)
        if self._inputs and request.is_last:
            self._inputs.clear()
        elif source.tape.movers:
            self._drop_moved()

    # ---- what is delivered, and the operators that run for it

    def _choose(self) -> tuple[list[Holder], list[Op]]:
        request, source = self._request, self._source
        opened = request.holder
        position = newest(opened)
        if not self._frame.early_stop or position < 0:
            wanted = request.wanted() if not self._frame.early_stop else [opened]
            return wanted, slice_of(wanted)
        segment = bisect_right(source.tape.cuts, position)
        limits: Limits | None = source.tape.limits
        if limits is not None and self._frame.complete:
            candidates, stages = self._candidates(segment), self._stages
            made = {value for holder in candidates for value in values_of(holder.saved) if value.op is not None}
            if segment in stages or 2 * sum(value.nbytes for value in made) > 3 * limits.piece:
                for other in [other for other in stages if not self._candidates(other)]:
                    del stages[other]
                return self._choose_piece(stages.setdefault(segment, Stage([], {})), candidates, limits)
        # The holders that share its window: operators that their slices have in common run once.
        plan = self._plan
        if opened.slot in plan:
            wanted = request.wanted([self._frame.holders[slot] for slot in sorted(plan[opened.slot])])
            return wanted, slice_of(wanted)
        groups = [
            ({holder.slot for holder in group}, group, ops) for group, ops in connected(self._candidates(segment))
        ]
        plan.update((slot, slots) for slots, _, _ in groups for slot in slots)
        wanted, ops = next((group, ops) for slots, group, ops in groups if opened.slot in slots)
        return wanted, sorted({*ops}, key=_position)

    def _candidates(self, segment: int) -> list[Holder]:
        """The holders of a segment that may still be opened."""
        return self._request.wanted(self._source.segments(self._frame).get(segment, ()))

    def _choose_piece(self, stage: Stage, candidates: list[Holder], limits: Limits) -> tuple[list[Holder], list[Op]]:
        """No more than there is room for, and what is stored for what will be opened later."""
        opened = self._request.holder
        self._stage = stage
        last = max(map(newest, candidates))  # nothing that was made after it will be asked for
        for id in [id for id, (_, made_at) in stage.stored.items() if made_at > last]:
            del stage.stored[id]
        wanted = stage.piece_of(opened, candidates)
        while True:
            there = stage.stored.keys() | self._storing.keys()
            cuts = place_cuts(slice_of(wanted, there), wanted, there, limits)
            if not cuts:
                return wanted, slice_of(wanted, stage.stored, self._storing.values())
            stage.positions[:] = sorted([*stage.positions, *(position for position, _ in cuts)])
            self._storing.update((v.id, v) for position, values in cuts if position <= newest(opened) for v in values)
            wanted = stage.piece_of(opened, wanted)

    def _is_there(self, saved: Any) -> bool:
        return all(value.op is None or value.id in self._made for value in values_of(saved))

    # ---- what it starts from

    def _fetch_inputs(self, ops: list[Op], wanted: list[Holder]) -> None:
        """What comes through hooks, once per graph task; the rest is at hand."""
        inputs, tape = self._inputs, self._source.tape
        if tape.hooks is None and not tape.movers:
            return
        for value in needs(ops, wanted):
            for held in value.all_held if value.op is None else ():
                if held.is_packed and held not in inputs:
                    inputs[held] = tensor = held.fetch(self._frame)
                    known = None if self._frame.complete else value.geometry
                    if known is not None and geometry_of(tensor) == known:
                        tape.adopt(tensor, value)
        if tape.movers and self._frame.complete:
            order = self._source.order(self._frame)
            fetched = [moved.rank for held in inputs if (moved := held.moved) is not None]
            prefetch(order, max(fetched, default=len(order)))

    def _drop_moved(self) -> None:
        """What is probably wanted no more; it can be fetched again."""
        for held in list(self._inputs):
            moved = held.moved
            if moved is not None and moved.last_reader is not None:
                reader = moved.last_reader()
                if reader is None or reader.slot in self._request.ready:
                    del self._inputs[held]

    def _start(self, value: Value, geometry: Geometry | None) -> Tensor:
        """The tensor that lies like this on a value that is held."""
        held = value.holding(geometry)
        assert held is not None  # whoever read it made sure of that
        tensor: Tensor = self._inputs[held] if held.is_packed else held.fetch(self._frame)
        if held.is_parameter and geometry is not None and value.nbytes and not tensor.untyped_storage().nbytes():
            raise errors.given_back(self._frame, tensor.shape)  # kernels would crash
        if geometry is None or (value.state is not KEPT and (held.is_packed or geometry is value.geometry)):
            return tensor
        return tensor if geometry_of(tensor) == geometry else _torch.lay(tensor, *geometry)

    # ---- running operators again

    def _replay(self, ops: list[Op], wanted: list[Holder]) -> None:
        made, storing, log = self._made, self._storing, self._source.log
        ready = self._request.ready
        savers: dict[int, list[Holder]] = defaultdict(list)
        for holder in wanted:
            for value in values_of(holder.saved):
                if value.op is not None:
                    savers[value.id].append(holder)
        last: dict[int, Op | None] = {value.id: op for op in ops for value in op.reads}
        wrappers = (saver.saved for saver in wanted if type(saver.saved) is Wrapped)  # whose parts wait for each other
        last.update((value.id, None) for saved in wrappers for value in values_of(saved))
        self._written = written = {old for op in ops for old, _ in op.writes}
        is_plain = self._frame.complete and self._frame.check is None
        for op in ops:
            if log is not None:
                log.append((str(op.info.func), ""))
            for id in self._run(op) if not op.writes else self._run_write(op, last):
                if self._stage is not None and id in storing:  # later replays will start from it
                    self._stage.stored[id] = made[id], op.index
                    self._give_away(made[id], _EVERYTHING)
                for holder in savers.get(id, ()):
                    saved, tensor = holder.saved, made[id]
                    if is_plain and type(saved) is Value and tensor.shape == saved.geometry[0]:  # type: ignore[index]
                        if id in written:
                            self._give_away(tensor, saved.geometry)
                        ready[holder.slot] = tensor  # past one call
                    else:
                        self._give(holder, id)
                if id not in last:
                    del made[id]
            for value in op.reads:
                if last[value.id] is op:
                    made.pop(value.id, None)

    def _run(self, op: Op) -> Sequence[int]:
        """Run one operator; returns the ids of the values that it made. Nothing else of it stays alive."""
        made, build = self._made, self._build
        args = [  # past one call, mostly
            made[arg.id] if type(arg) is Value and arg.id in made else arg if type(arg) in ATOMS else build(arg)
            for arg in op.args
        ]
        if op.grad_mode is not self._grad_mode:
            self._grad_mode = op.grad_mode
            _torch.set_grad_enabled(op.grad_mode)
        outputs = op.outputs
        if outputs is None:
            made[op.index] = op.info.run(*args)
            return (op.index,)
        if op.rng is not None:
            op.rng.enter(self._undo)
        kwargs = {name: build(arg) for name, arg in op.kwargs.items()} if op.kwargs else op.kwargs
        result = op.info.run(*args, **kwargs)
        if not outputs:
            return ()
        for tensor, id in zip(tensors_of(result), outputs, strict=False):
            if id:
                made[id] = tensor
        return [id for id in outputs if id]

    def _run_write(self, op: Op, last: dict[int, Op | None]) -> Sequence[int]:
        """The same for one that writes values, which are others then."""
        made = self._made
        still_read = {}
        for old, _ in op.writes:
            tensor = made.get(old)
            if tensor is not None and last[old] is op and not self._given:
                continue  # it is ours alone
            if tensor is None:  # a kept value
                value = next(value for value in op.reads if value.id == old)
                tensor = self._start(value, value.geometry)
            elif last[old] is not op:  # under its old value: through a storage that the tape has adopted, or a wrapper
                still_read[old] = tensor
            elif not ((given := self._given.get(_torch.storage_id(tensor))) and _would_overwrite(op, old, given)):
                continue
            made[old] = _torch.clone_storage(tensor)
        new = [*self._run(op)]
        for old, id in op.writes:
            made[id] = made.pop(old)
            new.append(id)
        made.update(still_read)
        return new

    def _build(self, saved: Any) -> Any:
        """The tensor (or list of tensors) that `saved` stands for; itself, if it stands for none."""
        kind = type(saved)
        if kind is Value:
            tensor = self._made.get(saved.id)
            if tensor is None:
                tensor = self._start(saved, saved.geometry)
                if saved.id and saved.is_outside:  # nothing writes it
                    self._made[saved.id] = tensor
            return tensor
        if kind is Ref:
            value = saved.value
            tensor = self._made.get(value.id)
            if tensor is None or value.is_outside:
                return _in_kind(self._start(value, saved.geometry), saved)
            return self._lay(tensor, value, saved)
        if kind is list or kind is tuple:
            return kind([self._build(part) for part in saved])
        if kind is functools.partial:
            return saved()
        if kind is Scratch:
            return _torch.clone_storage(self._build(saved.ref))
        if kind is Wrapped:
            parts = {name: self._build(part) for name, part in saved.parts.items()}
            return _torch.unflatten(saved.kind, parts, saved.context, saved.size, saved.stride)
        return saved

    def _lay(self, made: Tensor, value: Value, saved: Value | Ref) -> Tensor:
        """What lies as it was saved on the storage of what an operator has made anew."""
        nbytes = made.untyped_storage().nbytes()
        if nbytes != value.nbytes:
            maker = "an operator" if value.op is None else str(value.op.info.func)
            raise errors.another_size(self._frame, maker, value.nbytes, nbytes)
        base = _torch.bytes_of(made) if made.is_nested else made
        return _in_kind(_torch.lay(base, *cast(Geometry, saved.geometry)), saved)

    # ---- what comes of it

    def _give_away(self, tensor: Tensor, geometry: Any) -> None:
        """What lies like this on the storage must not be written any more."""
        self._given.setdefault(_torch.storage_id(tensor), []).append(geometry)

    def _give(self, holder: Holder, id: int) -> None:
        """A value that `holder` saved has been made."""
        tensor = self._made[id]
        saved = holder.saved
        kind = type(saved)
        if id in self._written:
            self._give_away(tensor, geometry_of(tensor) if kind is Wrapped else saved.geometry)
        if kind is Wrapped:
            if self._is_there(saved):
                self._request.deliver(holder, self._build(saved))
            return
        if kind is Ref or tensor.shape != saved.geometry[0]:
            (value,) = values_of(saved)
            tensor = self._lay(tensor, value, saved)
        if not self._frame.complete:
            self._source.tape.adopt(tensor, *values_of(saved))
        self._request.deliver(holder, tensor)


def _in_kind(tensor: Tensor, saved: Value | Ref) -> Tensor:
    return tensor.as_subclass(saved.kind) if type(saved) is Ref and saved.kind is not None else tensor


def _would_overwrite(op: Op, id: int, given: list[Geometry]) -> bool:
    """Whether `op` may write elements of the value that have been delivered."""
    args = (*op.args, *op.kwargs.values())
    written = [arg.geometry for arg in args if type(arg) is not Wrapped and any(v.id == id for v in values_of(arg))]
    return not written or not all(are_disjoint(ours, theirs) for ours in written for theirs in given)


def first_needs(holders: Iterable[Holder]) -> dict[Moved, Holder]:
    """What waits elsewhere and is needed for these, in order, each with the first holder that needs it."""
    found: dict[Moved, Holder] = {}
    seen: set[Op] = set()
    for holder in holders:
        stack = [*values_of(holder.saved)]
        while stack:
            value = stack.pop()
            if value.op is None:
                for moved in filter(None, [held.moved for held in value.all_held]):
                    found.setdefault(moved, holder)
            elif value.op not in seen:
                seen.add(value.op)
                stack += value.op.reads
    return found


def needs(ops: list[Op], holders: list[Holder]) -> Iterable[Value]:
    """What these operators read, and what these holders saved."""
    saved = [value for holder in holders for value in values_of(holder.saved)]
    return dict.fromkeys(saved + [value for op in ops for value in op.reads])


def slice_of(holders: Iterable[Holder], stored: Container[int] = (), values: Iterable[Value] = ()) -> list[Op]:
    """The operators that make what these holders saved, and these values, from what is held or stored; in the order in
    which they ran."""
    found: set[Op] = set()
    stack = [*values, *(value for holder in holders for value in values_of(holder.saved))]
    while stack:
        value = stack.pop()
        op = value.op
        if op is not None and op not in found and value.id not in stored:
            found.add(op)
            stack += op.reads
    return sorted(found, key=_position)


_position = operator.attrgetter("index")


def newest(holder: Holder) -> int:
    """The position of the last operator that made something of what a holder saved."""
    return max([value.position for value in values_of(holder.saved)], default=-1)


def place_cuts(ops: list[Op], holders: list[Holder], stored: Container[int], limits: Limits) -> Cuts:
    """Where a replay of these operators should cut, so that what lies between two cuts delivers no more to the holders
    than the limits say, and the cuts store no more; none if that is not worth it.

    Evenly over what is delivered; between half a piece before and half a piece after, where the fewest bytes are alive.
    """
    at = {op: k for k, op in enumerate(ops)}
    delivered = [0] * (len(ops) + 1)  # before each operator
    for value in {v.id: v for holder in holders for v in values_of(holder.saved) if v.op in at}.values():
        delivered[at[cast(Op, value.op)] + 1] += value.nbytes
    delivered = list(accumulate(delivered))
    total = delivered[-1]
    if 2 * total <= 3 * limits.piece:
        return []
    last = {v: k for k, op in enumerate(ops) for v in op.reads if v.position >= 0 and v.op in at and v.id not in stored}
    change = [0] * (len(ops) + 1)
    for value, k in last.items():
        change[at[cast(Op, value.op)] + 1] += value.nbytes
        change[k + 1] -= value.nbytes
    alive = list(accumulate(change))  # before each operator
    pieces = min(-(-total // limits.piece), len(ops))
    while pieces > 1:
        # Operators with so much delivered before them lie around the same even place.
        edges = [bisect_left(delivered, (2 * i + 1) * total, key=lambda n: 2 * pieces * n) for i in range(pieces)]
        places = []
        for i, (start, end) in enumerate(pairwise(edges), 1):
            near = [(alive[k], abs(pieces * delivered[k] - i * total), k) for k in range(start, end)]
            best = min(near, default=None)
            if best is not None and best[0] * pieces < total:
                places.append(best[2])
        needed = sum(alive[k] for k in places)
        if places and (needed <= limits.stored or pieces == 2):
            return [(ops[k].index, [v for v, end in last.items() if at[cast(Op, v.op)] < k <= end]) for k in places]
        fitting = 1 + (pieces - 1) * limits.stored // max(needed, 1)
        pieces = 1 if pieces == 2 else max(2, min(fitting, pieces - 1 - pieces // 8))
    return []


def connected(holders: list[Holder]) -> Iterable[tuple[list[Holder], list[Op]]]:
    """Groups of holders whose slices share operators, and these."""
    groups: dict[Op, tuple[list[Holder], list[Op]]] = {}
    for holder in reversed(holders):  # mostly, the last one needs whatever the others need
        stack = [*values_of(holder.saved)]
        mine = groups.get(cast(Op, stack[-1].op)) or ([], [])
        mine[0].append(holder)
        while stack:
            value = stack.pop()
            op = value.op
            if op is None:
                continue
            if value.state is CHEAP:  # whoever needs it makes it
                mine[1].append(op)
                continue
            theirs = groups.get(op)
            if theirs is None:
                groups[op] = mine
                mine[1].append(op)
                stack += op.reads
            elif theirs is not mine:
                small, mine = (mine, theirs) if len(mine[1]) < len(theirs[1]) else (theirs, mine)
                mine[0].extend(small[0])
                mine[1].extend(small[1])
                groups.update(dict.fromkeys(small[1], mine))
    return {id(group): group for group in groups.values()}.values()
