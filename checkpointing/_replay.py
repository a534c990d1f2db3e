"""Source 2: run recorded operators again, just those that are needed.

Opening a holder replays its *window*: the operators that its value depends on, back to what is held, together with
those of the other live holders of the same segment (the stretch between two kept values) that share operators with
it. So within a graph task an operator of a segment runs at most once, a dropout mask does not drag in the matrix
product beside it, and one block around a whole model with kept values between the layers needs the memory of one
layer at a time.

Rejected: replaying whole tapes (memory of plain), and widening a window by whatever it touches (a mask or a rotary
table that all layers share would make one window of the whole model).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import _torch
from ._engine import Deliver, Held, Holder, Recompute
from ._tape import Op, Ref, Scratch, Shape, Tape, Value, Wrapped, geometry_of, tensors_of


class Replay:
    """The tape of one region as a source. The operators themselves belong to the holders."""

    in_order = False

    def __init__(self, tape: Tape, log: list[tuple[str, str]] | None = None) -> None:
        self._tape = tape
        self.save = tape.save
        self.keep = tape.keep
        self.log = log
        self.replays = 0
        self.replayed = 0

    def recompute(self, request: Recompute, deliver: Deliver) -> None:
        _Window(self, request, deliver).run()


class _Window:
    """One replay: what is wanted, the operators that make it, and the tensors made so far."""

    def __init__(self, source: Replay, request: Recompute, deliver: Deliver) -> None:
        self._source = source
        self._request = request
        self._deliver = deliver
        self._inputs = request.task.inputs
        self._made: dict[int, Tensor] = {}  # by value: a tensor on its storage
        self._given: set[int] = set()  # storages that have been delivered: no longer ours to write
        self._parts: dict[int, Tensor] = {}  # by value: parts of wrappers whose other parts are still to come

    def run(self) -> None:
        request = self._request
        wanted = list(request.wanted()) if request.whole_region else self._widen()
        ops = slice_of(value for holder in wanted for value in values_of(holder.saved))
        # Before autograd is switched off: an enclosing region may have to rerun for them.
        self._fetch_inputs(ops, wanted)
        with _torch.below_autograd():
            for holder in wanted:
                if all(value.op is None for value in values_of(holder.saved)):
                    self._deliver(holder.slot, self._build(holder.saved))
            if ops:
                self._source.replays += 1
                self._source.replayed += len(ops)
                self._replay(ops)
        if all(holder.slot in request.task.ready for holder in request.wanted()):
            self._inputs.clear()

    def _widen(self) -> list[Holder]:
        """The holder that is being opened and those that share its window."""
        request = self._request
        opened = request.holder
        segment = _segment(opened)
        if segment < 0:
            return [opened]
        plan: dict[int, list[int]] = request.task.plan
        if plan is None:
            plan = request.task.plan = {}
        slots = plan.get(opened.slot)
        if slots is None:
            group = connected([holder for holder in request.wanted() if _segment(holder) == segment])
            plan.update(group)
            slots = group[opened.slot]
        return [holder for holder in request.wanted() if holder.slot in set(slots)]

    def _fetch_inputs(self, ops: list[Op], wanted: list[Holder]) -> None:
        """What comes through hooks, once per graph task; the rest is at hand."""
        inputs = self._inputs
        values = [value for op in ops for value in op.reads] + [v for h in wanted for v in values_of(h.saved)]
        helds = [held for value in values if value.op is None for held in value.held.values()]
        for held in helds + [h.saved for h in wanted if type(h.saved) is Held]:
            if held.is_packed and held not in inputs:
                inputs[held] = held.fetch(self._request.frame)

    def _replay(self, ops: list[Op]) -> None:
        made = self._made
        # What passes by in this window and is wanted by a holder of another one comes for free.
        savers: dict[int, list[Holder]] = {}
        for holder in self._request.wanted():
            for value in values_of(holder.saved):
                if value.op is not None:
                    savers.setdefault(value.id, []).append(holder)
        last = {value.id: i for i, op in enumerate(ops) for value in op.reads}
        log = self._source.log
        for i, op in enumerate(ops):
            if log is not None:
                log.append((str(op.func), ""))
            for old, _ in op.writes:
                self._make_writable(old, op)
            args = self._arguments(op.args)
            kwargs = dict(zip(op.kwargs, self._arguments(op.kwargs.values()), strict=True)) if op.kwargs else op.kwargs
            if op.rng is None:
                result = op.func(*args, **kwargs)
            else:
                now = op.rng.enter()
                try:
                    result = op.func(*args, **kwargs)
                finally:
                    op.rng.leave(now)
            new = []
            if op.outputs:
                flat = (result,) if isinstance(result, Tensor) else tuple(tensors_of(result))
                for number, id in op.outputs:
                    made[id] = flat[number]
                    new.append(id)
                del flat
            for old, id in op.writes:
                made[id] = made.pop(old)
                new.append(id)
            del args, kwargs, result  # the next operator must not find them alive
            for id in new:
                for holder in savers.get(id, ()):
                    self._give(holder, id)
                if last.get(id, -1) <= i:
                    made.pop(id, None)
            for value in op.reads:
                if last[value.id] == i:
                    made.pop(value.id, None)

    def _give(self, holder: Holder, id: int) -> None:
        """A value that `holder` saved has been made."""
        tensor = self._made[id]
        self._given.add(_torch.storage_id(tensor))
        saved = holder.saved
        if type(saved) is not Ref:
            self._parts[id] = tensor
            if any(v.op is not None and v.id not in self._parts for v in values_of(saved)):
                return
        self._deliver(holder.slot, self._build(saved))

    def _make_writable(self, id: int, op: Op) -> None:
        tensor = self._made.get(id)
        if tensor is None:  # a kept value
            value = next(value for value in op.reads if value.id == id)
            tensor = self._fetch(next(iter(value.held.values())))
        elif _torch.storage_id(tensor) not in self._given:
            return
        self._made[id] = _torch.clone_storage(tensor)

    def _arguments(self, saved: Iterable[Any]) -> list[Any]:
        return [
            arg if type(arg) not in _STANDS_FOR_TENSOR else self._build(arg, arg_only=True) for arg in saved
        ]

    def _build(self, saved: Any, arg_only: bool = False) -> Any:
        """The tensor (or list of tensors) that `saved` stands for."""
        kind = type(saved)
        if kind is Ref:
            tensor = self._made.get(saved.value.id)
            if tensor is None and not arg_only:
                tensor = self._parts.get(saved.value.id)
            if tensor is None:
                tensor = self._from_held(saved)
            elif not lies_like(tensor, saved):
                tensor = lay(tensor, saved)
            return tensor if arg_only or saved.kind is None else tensor.as_subclass(saved.kind)
        if kind is Shape:
            return torch.empty_strided(saved.size, saved.stride, dtype=saved.dtype, device=saved.device)
        if kind is list or kind is tuple:
            return kind(self._arguments(saved))
        if kind is Scratch:
            return _torch.clone_storage(self._build(saved.ref))
        if kind is Held:
            return self._fetch(saved)
        parts = {name: self._build(part) for name, part in saved.parts.items()}
        return saved.kind.__tensor_unflatten__(parts, saved.context, saved.size, saved.stride)

    def _from_held(self, ref: Ref) -> Tensor:
        held = ref.value.held.get(geometry_of(ref))
        if held is not None and held.is_packed:
            tensor = self._fetch(held)
            if tensor.stride() != ref.stride:  # hooks may give back another layout
                tensor = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device=tensor.device).copy_(tensor)
            return tensor
        if held is None:  # one that covers the storage
            held = next(iter(ref.value.held.values()))
        tensor = self._fetch(held)
        return tensor if lies_like(tensor, ref) else lay(tensor, ref)

    def _fetch(self, held: Held) -> Tensor:
        if not held.is_packed:
            return held.fetch(self._request.frame)
        return self._inputs[held]


_STANDS_FOR_TENSOR = frozenset({Ref, Shape, Scratch, Held, list, tuple})


def lies_like(tensor: Tensor, ref: Ref) -> bool:
    return (
        tensor.shape == ref.size
        and tensor.stride() == ref.stride
        and tensor.dtype == ref.dtype
        and tensor.storage_offset() == ref.offset
        and tensor.is_neg() == ref.neg
        and (not ref.dtype.is_complex or tensor.is_conj() == ref.conj)
    )


def lay(base: Tensor, ref: Ref) -> Tensor:
    return _torch.lay(base, ref.size, ref.stride, ref.offset, ref.dtype, ref.conj, ref.neg)


def values_of(saved: Any) -> Iterable[Value]:
    """The values behind what a holder saved: one for a plain tensor."""
    if type(saved) is Ref:
        return (saved.value,)
    if type(saved) is Wrapped:
        return [value for part in saved.parts.values() for value in values_of(part)]
    return ()


def slice_of(values: Iterable[Value]) -> list[Op]:
    """The operators that make these values from what is held, in the order in which they ran."""
    found: set[Op] = set()
    stack = [value.op for value in values if value.op is not None]
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack.extend(value.op for value in op.reads if value.op is not None)
    return sorted(found, key=_index)


def connected(holders: list[Holder]) -> dict[int, list[int]]:
    """Groups of holders whose slices share operators: for each slot the slots of its group."""
    groups: list[list[int]] = [[holder.slot] for holder in holders]  # members of one group share one list
    position = {holder.slot: i for i, holder in enumerate(holders)}
    owner: dict[Op, int] = {}
    for i, holder in enumerate(holders):
        stack = [value.op for value in values_of(holder.saved) if value.op is not None]
        while stack:
            op = stack.pop()
            j = owner.get(op)
            if j is None:
                owner[op] = i
                stack.extend(value.op for value in op.reads if value.op is not None)
            elif groups[i] is not groups[j]:
                small, large = sorted((groups[i], groups[j]), key=len)
                large.extend(small)
                for slot in small:
                    groups[position[slot]] = large
    return {holder.slot: group for holder, group in zip(holders, groups, strict=True)}


def _segment(holder: Holder) -> int:
    return max((value.op.segment for value in values_of(holder.saved) if value.op is not None), default=-1)


def _index(op: Op) -> int:
    return op.index
