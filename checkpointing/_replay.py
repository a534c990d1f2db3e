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
import weakref
from bisect import bisect_right, insort
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from . import _torch, errors
from ._ambient import read_switches, write_switches
from ._engine import Frame, Held, Holder, Recompute
from ._offload import Moved, prefetch
from ._tape import (
    Geometry,
    Limits,
    Op,
    Ref,
    Scratch,
    Shape,
    Tape,
    Value,
    Wrapped,
    bytes_of,
    geometry_of,
    name_of,
    tensors_of,
)

Cuts = list[tuple[int, list[Value]]]  # positions on the tape, each with what was made before and is read after it
# How a stored value lies on its storage: nothing of it may be overwritten.
_EVERYTHING: Any = ((), (), 0, None, 0)


class Replay:
    """The tape of one region as a source. The operators themselves belong to the holders."""

    def __init__(self, tape: Tape, log: list[tuple[str, str]] | None = None) -> None:
        self.tape = tape
        self.save = tape.saver
        self.log = log
        self.replays = 0
        self.replayed = 0
        self._by_segment: dict[int, list[weakref.ref[Holder]]] | None = None
        self._order: list[weakref.ref[Moved]] | None = None

    def maker(self, holder: Holder) -> str | None:
        """The operator that made what the holder saved."""
        return next((name_of(value.op) for value in values_of(holder.saved) if value.op is not None), None)

    def knows(self, parameters: tuple[Tensor, ...]) -> bool:
        """Not asked: parameters are inputs."""
        return True

    def hint(self, saved: Any, recomputed: Any) -> str:
        """Nothing."""
        return ""

    def segment_of(self, holder: Holder) -> int:
        """The segment in which the newest of what a holder saved was made; -1 if nothing has to be made."""
        index = newest(holder)
        return index if index < 0 else bisect_right(self.tape.cuts, index)

    def by_segment(self, frame: Frame) -> dict[int, list[weakref.ref[Holder]]]:
        """The holders of what was made in each segment. There may be thousands of both, so they are sorted once."""
        if self._by_segment is not None:
            return self._by_segment
        found: dict[int, list[weakref.ref[Holder]]] = {}
        for ref in frame.holders:
            holder = ref()
            if holder is not None and (segment := self.segment_of(holder)) >= 0:
                found.setdefault(segment, []).append(ref)
        if frame.complete:
            self._by_segment = found
        return found

    def order(self, frame: Frame) -> list[weakref.ref[Moved]]:
        """What waits elsewhere, as backward will probably want it: it opens first what was saved last."""
        if self._order is None:
            self._order = []
            live = [holder for ref in frame.holders if (holder := ref()) is not None]
            for _, moved in first_needs(reversed(live)):
                moved.rank = len(self._order)
                self._order.append(weakref.ref(moved))
            for holder, moved in first_needs(live):
                moved.last_reader = weakref.ref(holder)
        return self._order

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A value from outside that hooks have not taken: nothing to compute, nothing to share."""
        saved = holder.saved
        if type(saved) is not Ref or not saved[0].held or where.check is not None or not where.early_stop:
            return None
        value, geometry, kind = saved
        held = value.held.get(geometry)
        if held is None and value.op is None:
            held = next(iter(value.held.values()))
        if held is None or held.is_packed:
            return None
        try:
            tensor = held.fetch(where)
        except errors.CheckpointError:
            return None  # it will be raised again, from a recompute
        if geometry_of(tensor) != geometry:
            with _torch.below_autograd():
                tensor = _torch.lay(tensor, *geometry)
        return tensor if kind is None else tensor.as_subclass(kind)

    def recompute(self, request: Recompute) -> None:
        self.tape.settle()
        if read_switches() == self.tape.switches:
            _Window(self, request).run()
            return
        undo = write_switches(self.tape.switches)  # of the block's beginning: kernels look at them
        try:
            _Window(self, request).run()
        finally:
            undo()


class Stage:
    """What replays of one segment hold on to in one graph task: cuts inside of it, from which later ones start."""

    __slots__ = ("positions", "stored")

    def __init__(self) -> None:
        self.positions: list[int] = []  # of the cuts, in order
        self.stored: dict[int, tuple[Tensor, int]] = {}  # by value: a tensor on it, and the position of what made it

    def forget(self, last: int) -> None:
        """Nothing that was made after this position will be asked for."""
        for id in [id for id, (_, made_at) in self.stored.items() if made_at > last]:
            del self.stored[id]

    def piece_of(self, opened: Holder, holders: list[Holder]) -> list[Holder]:
        """Those which are between the same cuts as `opened`."""
        i = bisect_right(self.positions, newest(opened))
        return [holder for holder in holders if bisect_right(self.positions, newest(holder)) == i]

    def cut(self, cuts: Cuts, opened: Holder) -> dict[int, Value]:
        """Make these cuts. Returns, by id, the values to store when `opened` is asked for."""
        for position, _ in cuts:
            insort(self.positions, position)
        return {v.id: v for position, values in cuts if position <= newest(opened) for v in values}


class _Window:
    """One replay: what is wanted, the operators that make it, and the tensors made so far."""

    def __init__(self, source: Replay, request: Recompute) -> None:
        self._source = source
        self._request = request
        self._deliver = request.deliver
        self._ready = request.task.ready
        self._is_quick = request.frame.check is None
        if request.task.inputs is None:
            request.task.inputs = {}
        self._inputs = request.task.inputs
        self._made: dict[int, Tensor] = {}  # by value: a tensor on its storage
        self._geometry: dict[int, Geometry] = {}  # by value: how that tensor lies there
        self._frame = request.frame
        self._grad_mode = False  # what `below_autograd` sets
        self._writes = False  # whether the window has operators that write in place
        self._given: dict[int, list[Geometry]] = {}  # by storage: what has been delivered is no longer ours to write
        self._parts: dict[int, Tensor] = {}  # by value: parts of wrappers whose other parts are still to come
        self._segment: tuple[int, list[Holder]] = (-1, [])  # of the holder that is opened, and who else is in it
        self._stage: Stage | None = None
        self._storing: dict[int, Value] = {}  # what the stage wants

    def run(self) -> None:
        request = self._request
        wanted, ops = self._choose()
        # Before autograd is switched off: an enclosing region may have to rerun for them.
        self._fetch_inputs(ops, wanted)
        with _torch.below_autograd():
            if not ops or request.whole_region:
                for holder in wanted:
                    if newest(holder) < 0:
                        self._deliver(holder, self._build(holder.saved))
            if self._stage is not None:
                self._unstore(wanted, ops)
            if ops:
                self._source.replays += 1
                self._source.replayed += len(ops)
                self._replay(ops, wanted)
        if self._inputs:
            if request.is_last:
                self._inputs.clear()
            elif self._source.tape.movers:
                self._drop_moved()

    def _choose(self) -> tuple[list[Holder], list[Op]]:
        """What is delivered, and the operators that run for it."""
        limits = self._source.tape.limits
        if limits is None or not self._frame.complete or self._request.whole_region:
            return self._widen()
        request, source = self._request, self._source
        segment = source.segment_of(request.holder)
        stages = request.task.stages
        if segment < 0 or (segment not in stages and 2 * self._size_of(segment) <= 3 * limits.piece):
            return self._widen()
        stage = self._stage = stages.get(segment)
        if stage is None:
            for other in list(stages):
                if not request.wanted(source.by_segment(self._frame).get(other, ())):
                    del stages[other]
            stage = self._stage = stages[segment] = Stage()
        candidates = request.wanted(source.by_segment(self._frame).get(segment, ()))
        stage.forget(max(map(newest, candidates)))
        wanted = stage.piece_of(request.holder, candidates)
        storing = self._storing
        while True:
            there = stage.stored.keys() | storing.keys()
            cuts = place_cuts(slice_of(wanted, there), wanted, there, limits)
            if not cuts:
                return wanted, slice_of(wanted, stage.stored, storing.values())
            storing.update(stage.cut(cuts, request.holder))
            wanted = stage.piece_of(request.holder, wanted)

    def _size_of(self, segment: int) -> int:
        """Bytes that would be delivered at once."""
        holders = self._request.wanted(self._source.by_segment(self._frame).get(segment, ()))
        return sum({v.id: v.nbytes for holder in holders for v in values_of(holder.saved) if v.op is not None}.values())

    def _unstore(self, wanted: list[Holder], ops: list[Op]) -> None:
        """Start from what an earlier replay has stored."""
        stage = self._stage
        assert stage is not None
        stored = stage.stored
        needed = {v.id for op in ops for v in op.reads} | {v.id for h in wanted for v in values_of(h.saved)}
        for id in needed & stored.keys():
            tensor, _ = stored[id]
            self._made[id], self._geometry[id] = tensor, geometry_of(tensor)
            self._given.setdefault(_torch.storage_id(tensor), []).append(_EVERYTHING)
        for holder in wanted:
            for value in values_of(holder.saved):
                if value.id in stored:
                    self._give(holder, value.id)

    def _store(self, id: int) -> None:
        """A value has been made from which later replays will start."""
        assert self._stage is not None
        tensor = self._made[id]
        self._stage.stored[id] = tensor, cast(Op, self._storing[id].op).index
        self._given.setdefault(_torch.storage_id(tensor), []).append(_EVERYTHING)

    def _widen(self) -> tuple[list[Holder], list[Op]]:
        """The holder that is being opened and those that share its window, and the operators of the window."""
        request = self._request
        opened = request.holder
        if request.whole_region:
            candidates = request.wanted()
            return candidates, slice_of(candidates)
        segment = self._source.segment_of(opened)
        if segment < 0:
            return [opened], []
        plan: dict[int, set[int]] = request.task.plan
        if plan is None:
            plan = request.task.plan = {}
        slots = plan.get(opened.slot)
        if self._source.tape.cuts:
            candidates = request.wanted(self._source.by_segment(self._frame).get(segment, ()))
        else:
            candidates = [holder for holder in request.wanted() if newest(holder) >= 0]
        self._segment = segment, candidates
        if slots is None:
            ops = slice_of([opened])
            inside = {None, *ops}
            if all(
                h.saved[0].op in inside if type(h.saved) is Ref else all(v.op in inside for v in values_of(h.saved))
                for h in candidates
            ):
                slots = {h.slot for h in candidates}
                plan.update(dict.fromkeys(slots, slots))
                return candidates, ops  # nearly always: the last one needs whatever the others need
            groups, ops = connected(candidates, opened)
            plan.update(groups)
            slots = groups[opened.slot]
            return [holder for holder in candidates if holder.slot in slots], ops
        wanted = [holder for holder in candidates if holder.slot in slots]
        return wanted, slice_of(wanted)

    def _passed_by(self, ops: list[Op]) -> Iterable[Holder]:
        """The holders that may want something that these operators make: of their segments, and of no others."""
        request, source = self._request, self._source
        if request.whole_region:
            return request.wanted()
        first, last = bisect_right(source.tape.cuts, ops[0].index), bisect_right(source.tape.cuts, ops[-1].index)
        if first == last == self._segment[0]:
            return self._segment[1]
        by_segment = source.by_segment(self._frame)
        return request.wanted(ref for segment in range(first, last + 1) for ref in by_segment.get(segment, ()))

    def _fetch_inputs(self, ops: list[Op], wanted: list[Holder]) -> None:
        """What comes through hooks, once per graph task; the rest is at hand."""
        inputs = self._inputs
        values = {value for op in ops for value in op.reads if value.op is None}
        others = [holder for holder in wanted if type(holder.saved) is not Ref or holder.saved[0].op is None]
        values.update(v for holder in others for v in values_of(holder.saved) if v.op is None)
        for value in values:
            for geometry, held in value.held.items():
                if held.is_packed and held not in inputs:
                    inputs[held] = tensor = held.fetch(self._frame)
                    if geometry is not None and geometry_of(tensor) == geometry:
                        self._source.tape.adopt(tensor, value)
        for holder in others:
            if type(holder.saved) is Held and holder.saved.is_packed and holder.saved not in inputs:
                inputs[holder.saved] = holder.saved.fetch(self._frame)

        if self._source.tape.movers and self._frame.complete:
            order = self._source.order(self._frame)
            fetched = [moved.rank for held in inputs if (moved := held.moved) is not None]
            prefetch(order, max(fetched, default=len(order)))

    def _drop_moved(self) -> None:
        """What is probably wanted no more; it can be fetched again."""
        ready = self._request.task.ready
        for held in list(self._inputs):
            moved = held.moved
            if moved is not None and moved.last_reader is not None:
                reader = moved.last_reader()
                if reader is None or reader.slot in ready:
                    del self._inputs[held]

    def _replay(self, ops: list[Op], wanted: list[Holder]) -> None:
        made = self._made
        # What passes by in this window and is wanted by a holder of another one comes for free.
        savers: dict[int, list[Holder]] = {}
        for holder in self._passed_by(ops) if self._stage is None else wanted:
            saved = holder.saved
            if type(saved) is Ref:
                savers.setdefault(saved[0].id, []).append(holder)
                continue
            for value in values_of(saved):
                if value.op is not None:
                    savers.setdefault(value.id, []).append(holder)
        last = {}
        for op in ops:
            self._writes = self._writes or bool(op.writes)
            for value in op.reads:
                last[value.id] = op
        log = self._source.log
        storing = self._storing
        for op in ops:
            if log is not None:
                log.append((str(op.func), ""))
            if op.writes:
                still_read = {}
                for old, _ in op.writes:
                    # Read later under its old value: only through a storage that the tape has adopted.
                    before = self._make_writable(old, op, last[old] is not op)
                    if before is not None:
                        still_read[old] = before
                new = self._run(op)
                made.update(still_read)
            else:
                new = self._run(op)
            for id in new:
                if storing and id in storing:
                    self._store(id)
                if id in savers:
                    for holder in savers[id]:
                        self._give(holder, id)
                if id not in last:
                    del made[id]
            for value in op.reads:
                if last[value.id] is op:
                    made.pop(value.id, None)

    def _run(self, op: Op) -> Sequence[int]:
        """Run one operator; returns the ids of the values that it made. Nothing else of it stays alive."""
        made = self._made
        args = self._arguments(op.args)
        kwargs = op.kwargs
        if kwargs:
            kwargs = dict(zip(kwargs, self._arguments(kwargs.values()), strict=True))
        if op.grad_mode is not self._grad_mode:
            self._grad_mode = op.grad_mode
            _torch.set_grad_enabled(op.grad_mode)
        if op.rng is None:
            result = op.func(*args, **kwargs)
        else:
            now = op.rng.enter()
            try:
                result = op.func(*args, **kwargs)
            finally:
                op.rng.leave(now)
        if not op.writes and type(result) is Tensor:  # nearly always
            outputs = op.outputs
            self._take(result, outputs[0])
            return outputs
        for tensor, id in zip(tensors_of(result), op.outputs, strict=False):
            if id:
                self._take(tensor, id)
        new = [id for id in op.outputs if id]
        for old, id in op.writes:
            made[id] = made.pop(old)
            self._geometry[id] = geometry_of(made[id])  # anew: `resize_` changes it
            new.append(id)
        return new

    def _take(self, tensor: Tensor, id: int) -> None:
        """This is the value, made anew."""
        try:
            self._geometry[id] = geometry_of(tensor)
        except RuntimeError:  # a strided nested tensor: what is wanted lies on its storage
            tensor = bytes_of(tensor)
            self._geometry[id] = geometry_of(tensor)
        self._made[id] = tensor

    def _give(self, holder: Holder, id: int) -> None:
        """A value that `holder` saved has been made."""
        tensor = self._made[id]
        saved = holder.saved
        if self._writes:
            given = self._given.setdefault(_torch.storage_id(tensor), [])
            given.append(saved[1] if type(saved) is Ref else geometry_of(tensor))
        if type(saved) is Ref:
            value, geometry, kind = saved
            if self._geometry[id] != geometry:
                tensor = self._lay(tensor, value, geometry)
            if kind is not None:
                tensor = tensor.as_subclass(kind)
            if not self._frame.complete:
                self._source.tape.adopt(tensor, value)
            if self._is_quick:
                self._ready[holder.slot] = tensor
            else:
                self._deliver(holder, tensor)
            return
        self._parts[id] = tensor
        if all(v.op is None or v.id in self._parts for v in values_of(saved)):
            self._deliver(holder, self._build(saved))

    def _make_writable(self, id: int, op: Op, is_read_later: bool) -> Tensor | None:
        """Let `op` write the value: on a copy, unless it is ours alone. Returns what later readers need, if any."""
        tensor = self._made.get(id)
        if tensor is None:  # a kept value
            value = next(value for value in op.reads if value.id == id)
            tensor = self._fetch(next(iter(value.held.values())))
        elif not is_read_later and not self._would_overwrite(id, op, self._given.get(_torch.storage_id(tensor))):
            return None
        copy = self._made[id] = _torch.clone_storage(tensor)
        self._geometry[id] = geometry_of(copy)
        return tensor if is_read_later else None

    @staticmethod
    def _would_overwrite(id: int, op: Op, given: list[Geometry] | None) -> bool:
        """Whether `op` may write elements of the value that have been delivered."""
        if not given:
            return False
        written = [ref.geometry for ref in (*op.args, *op.kwargs.values()) if type(ref) is Ref and ref.value.id == id]
        return not written or not all(are_disjoint(ours, theirs) for ours in written for theirs in given)

    def _arguments(self, saved: Iterable[Any]) -> list[Any]:
        args = []
        for arg in saved:
            kind = type(arg)
            if kind is Ref:
                value, geometry, _ = arg
                id = value.id
                tensor = self._made.get(id)
                if tensor is None:
                    tensor = self._from_held(value, geometry)
                elif self._geometry[id] != geometry:
                    tensor = self._lay(tensor, value, geometry)
                args.append(tensor)
            else:
                args.append(self._build(arg) if kind in _STANDS_FOR_TENSOR else arg)
        return args

    def _lay(self, made: Tensor, value: Value, geometry: Geometry) -> Tensor:
        """What lies like this on the storage of what an operator has made anew."""
        nbytes = made.untyped_storage().nbytes()
        if nbytes != value.nbytes:
            raise errors.another_size(
                self._frame, "an operator" if value.op is None else name_of(value.op), value.nbytes, nbytes
            )
        return _torch.lay(made, *geometry)

    def _build(self, saved: Any) -> Any:
        """The tensor (or list of tensors) that `saved` stands for."""
        kind = type(saved)
        if kind is Ref:
            value = saved.value
            tensor = self._parts.get(value.id)
            if tensor is None:
                tensor = self._from_held(value, saved.geometry)
            elif geometry_of(tensor) != saved.geometry:
                tensor = _torch.lay(tensor, *saved.geometry)
            return tensor if saved.kind is None else tensor.as_subclass(saved.kind)
        if kind is Shape:
            return torch.empty_strided(saved.size, saved.stride, dtype=saved.dtype, device=saved.device)
        if kind is list or kind is tuple:
            return kind(self._arguments(saved))
        if kind is Scratch:
            return _torch.clone_storage(self._arguments((saved.ref,))[0])
        if kind is Held:
            return self._fetch(saved)
        if kind is not Wrapped:  # no tensor
            return saved
        parts = {name: self._build(part) for name, part in saved.parts.items()}
        return _torch.unflatten(saved.kind, parts, saved.context, saved.size, saved.stride)

    def _from_held(self, value: Value, geometry: Geometry) -> Tensor:
        held = value.held.get(geometry)
        if held is not None and held.is_packed:
            tensor = self._fetch(held)
            size, stride, _, dtype, _ = geometry
            return tensor if tensor.stride() == stride else _laid_out(tensor, size, stride, dtype)
        if held is None:  # one that covers the storage
            held = next(iter(value.held.values()))
        tensor = self._fetch(held)
        return tensor if geometry_of(tensor) == geometry else _torch.lay(tensor, *geometry)

    def _fetch(self, held: Held) -> Tensor:
        return self._inputs[held] if held.is_packed else held.fetch(self._frame)


_STANDS_FOR_TENSOR = frozenset({Shape, Scratch, Held, list, tuple})


def _laid_out(tensor: Tensor, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """A copy with these strides: hooks may give back another layout."""
    copy = torch.empty_strided(size, stride, dtype=dtype, device=tensor.device)
    try:
        return copy.copy_(tensor)
    except RuntimeError:  # some elements share their memory, as in an expanded tensor
        flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.element_size(),), (1,))
        places = torch.arange(flat.numel(), device=flat.device).as_strided(size, stride)
        flat[places.reshape(-1)] = tensor.reshape(-1)
        return copy


def values_of(saved: Any) -> Iterable[Value]:
    """The values behind what a holder saved: one for a plain tensor."""
    if type(saved) is Ref:
        return (saved.value,)
    if type(saved) is Wrapped:
        return [value for part in saved.parts.values() for value in values_of(part)]
    return ()


@functools.lru_cache(maxsize=4096)  # the same few are asked for again and again: gates that lie side by side
def are_disjoint(a: Geometry, b: Geometry) -> bool:
    """Whether two tensors that lie like this on one storage share no element; False where that is not plain to see."""
    (sizes, strides, start, dtype, _), (others, other_strides, other_start, other_dtype, _) = a, b
    if dtype != other_dtype or len(sizes) != len(others):
        return False
    dims = []
    for size, stride, other, other_stride in zip(sizes, strides, others, other_strides, strict=True):
        if size != 1 or other != 1:
            if stride != other_stride or stride <= 0:
                return False
            dims.append((stride, size, other))
    # Boxes of one grid, whose steps are the strides: apart if they are so in one direction.
    apart = False
    whole = 0
    for stride, size, other in sorted(dims, reverse=True):
        i, start = divmod(start, stride)
        j, other_start = divmod(other_start, stride)
        if whole and (whole % stride or max(i + size, j + other) * stride > whole):
            return False
        apart = apart or i + size <= j or j + other <= i
        whole = stride
    return apart or start != other_start


def first_needs(holders: Iterable[Holder]) -> Iterator[tuple[Holder, Moved]]:
    """What waits elsewhere and is needed for these, each with the first holder that needs it."""
    seen: set[Any] = set()
    for holder in holders:
        saved = holder.saved
        stack: list[Any] = [saved] if type(saved) is Held else list(values_of(saved))
        while stack:
            found = stack.pop()
            if type(found) is Held:
                moved = found.moved
                if moved is not None and moved not in seen:
                    seen.add(moved)
                    yield holder, moved
            elif found.op is None:
                stack.extend(found.held.values())
            elif found.op not in seen:
                seen.add(found.op)
                stack.extend(found.op.reads)


def slice_of(holders: Iterable[Holder], stored: Container[int] = (), values: Iterable[Value] = ()) -> list[Op]:
    """The operators that make what these holders saved, and these values, from what is held or stored; in the order in
    which they ran."""
    found: set[Op] = set()
    stack = [*values]
    for holder in holders:
        saved = holder.saved
        if type(saved) is Ref:
            stack.append(saved[0])
        else:
            stack.extend(values_of(saved))
    while stack:
        value = stack.pop()
        op = value.op
        if op is not None and op not in found and value.id not in stored:
            found.add(op)
            stack += op.reads
    return sorted(found, key=_index)


def newest(holder: Holder) -> int:
    """The position of the last operator that made something of what a holder saved."""
    saved = holder.saved
    if type(saved) is Ref:
        op = saved[0].op
        return -1 if op is None else op.index
    return max((value.op.index for value in values_of(saved) if value.op is not None), default=-1)


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
    last = {v: k for k, op in enumerate(ops) for v in op.reads if v.op in at and v.id not in stored}
    change = [0] * (len(ops) + 1)
    for value, k in last.items():
        change[at[cast(Op, value.op)] + 1] += value.nbytes
        change[k + 1] -= value.nbytes
    alive = list(accumulate(change))  # before each operator
    pieces = min(-(-total // limits.piece), len(ops))
    while pieces > 1:
        places = set()
        k = 1
        for i in range(1, pieces):
            best: tuple[int, float, int] | None = None
            while k < len(ops) and 2 * pieces * delivered[k] < (2 * i + 1) * total:
                if 2 * pieces * delivered[k] >= (2 * i - 1) * total and alive[k] * pieces < total:
                    found = alive[k], abs(pieces * delivered[k] - i * total), k
                    best = found if best is None else min(best, found)
                k += 1
            if best is not None:
                places.add(best[2])
        needed = sum(alive[k] for k in places)
        if places and (needed <= limits.stored or pieces == 2):
            return [
                (ops[k].index, [v for v, end in last.items() if at[cast(Op, v.op)] < k <= end]) for k in sorted(places)
            ]
        fitting = 1 + (pieces - 1) * limits.stored // max(needed, 1)
        pieces = 1 if pieces == 2 else max(2, min(fitting, pieces - 1 - pieces // 8))
    return []


def connected(holders: list[Holder], opened: Holder) -> tuple[dict[int, set[int]], list[Op]]:
    """Groups of holders whose slices share operators: for each slot the slots of its group, and the operators that
    the group of `opened` needs."""
    groups: list[set[int]] = [{holder.slot} for holder in holders]  # members of one group share one set
    position = {holder.slot: i for i, holder in enumerate(holders)}
    owner: dict[Op, int] = {}
    for i, holder in enumerate(holders):
        stack = [value.op for value in values_of(holder.saved) if value.op is not None]
        while stack:
            op = stack.pop()
            j = owner.get(op)
            if j is None:
                owner[op] = i
                stack.extend([value.op for value in op.reads if value.op is not None])
            elif groups[i] is not groups[j]:
                small, large = sorted((groups[i], groups[j]), key=len)
                large |= small
                for slot in small:
                    groups[position[slot]] = large
    mine = groups[position[opened.slot]]
    ops = [op for op, i in owner.items() if groups[i] is mine]
    return {holder.slot: group for holder, group in zip(holders, groups, strict=True)}, sorted(ops, key=_index)


def _index(op: Op) -> int:
    return op.index
