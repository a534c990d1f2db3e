"""Checkpoints that place themselves: a tape that decides while it records what to keep.

A *cut* is a position on the tape. What is made before it and read after it is kept, as soon as it is read; so replay
never crosses a cut, whatever the code around it looks like, and a tensor that is alive but never read again costs
nothing. Good moments for a cut are those at which little is alive: the tape knows by the reference counts of the
storages, just before an operator runs.

Between cuts lie segments. When backward recomputes a segment it needs room for what the segment dropped, beside what
the cuts before it keep; what the later cuts kept is gone by then. The schedule holds the largest of these sums, the
*level*, as low as it can without knowing what is still to come: it makes a cut when a segment would exceed the level,
at the best moment that the segment has had (it is held provisionally), which may raise the level; and whenever the
level has risen, it gives up the cuts, oldest first, whose two segments now fit into one. Over n equal steps that is
sqrt(2 n) cuts or less, in segments that become shorter towards the end.

What autograd has saved last is spared while the level allows it, since backward begins there. With a budget, whatever
it saves is spared while there is room. When there is none left, the values go first whose recompute is cheap per byte,
then cuts: that one whose segments together raise the level least.

Only byte counts, positions and reference counts are looked at, so that the same program makes the same cuts.

Rejected: cutting when a segment has dropped as much as is kept (twice the memory: the last segment is the largest when
most is kept), and keeping all that is alive at a cut (variables of calling functions, which nothing reads again).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from itertools import accumulate
from typing import Any, NamedTuple, cast

from torch import Tensor

from . import _torch
from ._engine import is_internal
from ._held import hold
from ._offload import Destination, Mover
from ._ops import Info, tensors_of
from ._replay import Limits
from ._tape import Tape, by_storage
from ._values import CHEAP, Op, Value, are_disjoint, geometry_of

_users = _torch.storage_users_by_id
_storage_id, _has_storage, _STORAGE_OBJECT = _torch.storage_id, _torch.has_storage, _torch.STORAGE_OBJECT


class Placement(NamedTuple):
    """What the user asks of the schedule, in bytes."""

    budget: int | None
    segment: int | None
    place: Destination | None = None  # where cuts keep things


class Kept:
    """What the tape knows of a value that a cut keeps."""

    __slots__ = ("cut", "op", "refs", "sid", "value", "was_read")

    value: Value
    cut: Cut  # the first one after the value was made
    op: Op  # that made it
    sid: int  # its storage
    refs: int  # how many references of the storage it is
    was_read: int  # position of the operator that has read it last


class Cut:
    """A position on the tape, and the segment that ends there."""

    def __init__(self, position: int, dropped: int) -> None:
        self.position = position
        self.dropped = dropped  # bytes of the segment that autograd has saved and the cut does not keep
        self.kept: dict[Value, Kept] = {}  # made in the segment and read after it
        self.waiting: list[tuple[int, Value]] = []  # alive when it was settled, and not read until then
        self.alive = 0  # bytes that were alive when it was made
        self.waits = 0  # bytes that are waiting
        self.nbytes = 0  # bytes that it keeps or that are waiting
        self.stays = False  # whatever it costs


class AutoTape(Tape):
    """A tape that makes cuts."""

    def __init__(self, hooks: Any, preserve_rng_state: Any, log: Any, policy: Any, placement: Placement) -> None:
        super().__init__(hooks, preserve_rng_state, log, policy)
        self._budget, self._size, place = placement
        self._segment = placement.segment
        self._cut_mover = None if place is None else self._mover(place)
        # To save something in a region of ours makes a slot there, so that is done at the end, once for each value.
        self._packs_late = hooks is not None and is_internal(hooks)
        self._saves = 0  # how many values autograd has saved
        self._fresh: list[tuple[int, Value]] = []  # made since the last settled cut, as far as they live
        self._cheap: list[tuple[int, Value]] = []  # as good as held, as far as they live: casts that autocast caches
        self._cheap_bytes = 0

        self._cuts: list[Cut] = []  # the last one provisionally, if `_trial` is not None
        self._trial: tuple[int, int] | None = None  # of the provisional cut: bytes dropped before it, bytes alive
        self._last_cut = 0  # its position
        self._dropped = 0  # bytes saved since
        self._cut_bytes = 0  # that all cuts keep, or will if it is read
        self._level = 0
        self._lasting = 0.0  # the part of what was alive at a cut that lived on until the next one
        self._pause = 0  # operators until the next look
        self._is_free = self._budget is None and self._size is None  # nobody says how many bytes are too many

        self._sent: set[Value] = set()  # to other processes: how long threads refer to it differs from run to run
        self._kept: dict[Value, Kept] = {}
        self._spare: dict[Value, Tensor] = {}  # saved, and still there: kept in the end, if it may stay until then
        self._spare_on: dict[int, set[Value]] = {}  # by storage: which of them lie on it
        self._spare_bytes = 0
        self._held_bytes = 0  # of what cuts keep
        self._cheapest: list[tuple[float, int, Value]] = []  # heap: cost per byte of what is spared under a budget
        self._flops = None if self._budget is None else {}
        self._least: int | None = None  # the smallest budget for which there would have been a cut
        self._had_cut = False

    # ---- what the recording tells

    def _read_across(self, value: Value, tensor: Tensor) -> None:
        op = value.op
        if op is None:
            kept = self._kept.get(value)
            if kept is not None:
                kept.was_read = self.clock + 1
        elif op.index < self._last_cut and value.nbytes and value.state is not CHEAP:
            if self._budget is not None:
                self._give_up(value)
                self._clear_room(value.nbytes)
            if op.index < self._last_cut:
                self._hold(value, tensor)

    def _has_saved(self, value: Value, tensor: Tensor, nbytes: int) -> None:
        is_new = value.saved == 0
        super()._has_saved(value, tensor, nbytes)
        op = value.op
        self._saves += is_new and (op is not None or value in self._kept)
        if op is not None:
            if value.state is not CHEAP:
                self._drop(op.index, nbytes)
            if is_new:
                self._spare_it(value, op, tensor)

    def _run_outside(self, info: Info, targets: dict[int, Tensor], args: Any, kwargs: Any) -> Any:
        result = super()._run_outside(info, targets, args, kwargs)
        values = map(self._values.get, by_storage((*args, *kwargs.values())))
        self._sent.update(value for value in values if value is not None and value.op is not None)
        return result

    def keep_at(self, tensor: Tensor, mover: Mover | None) -> None:
        value = self._values.get(_storage_id(tensor)) if _has_storage(tensor) else None
        if value is not None:
            kept = self._kept.get(value)
            if kept is not None:
                self._release(kept)
            self._give_up(value)
            if value.op is not None and self._budget is not None:
                self._clear_room(value.nbytes)
        super().keep_at(tensor, mover)

    def look_away(self) -> None:
        for value in list(self._spare):  # it can be made again
            self._give_up(value)
        super().look_away()

    def close(self) -> str:
        why, least = "", self.kept_bytes + self._held_bytes
        if self._budget is not None and least > self._budget:
            why = "what `keep` and other policies keep in this block, or FSDP2 between modules, takes more than that"
        elif not self._had_cut and self._least is not None and len(self._spare) != self._saves:
            why, least = "no room for a single checkpoint, so backward recomputes all of the block at once", self._least
        if self._budget and self._had_cut:
            # A window may be larger than what the budget lets the forward keep: then its replay makes cuts of its own.
            self.limits = Limits(min(self._budget, self._segment or self._budget), self._budget)
        try:
            for value in sorted(self._kept, key=lambda value: value.id) if self._packs_late else ():
                held = value.held
                if held is not None and not held.is_packed:
                    value.keep(held.packed, self.hooks)
            self._hand_over()
        finally:  # hooks of what encloses the region may raise
            super().close()
            self._flops = None
        return why and f"auto(budget={self._budget}): {why}. The smallest budget possible is {least} bytes."

    def _hand_over(self) -> None:
        for value, tensor in self._spare.items():
            if self._values.get(_storage_id(tensor)) is value:
                value.keep(tensor, self.hooks)
                del self._values[_storage_id(tensor)]
            elif self.hooks is None:  # the rest of its storage has been overwritten
                value.parts = {geometry_of(tensor): hold(tensor, None, "a kept tensor")}
        for value, kept in self._kept.items():
            if self._values.get(kept.sid) is value and not self._is_alive(kept.sid, value):
                del self._values[kept.sid]
        super()._hand_over()
        for cut in self._cuts:  # to which its values refer
            cut.kept.clear()
        self._fresh, self._cuts, self._cheapest, self._trial = [], [], [], None
        for mine in (self._kept, self._spare, self._spare_on, self._sent):
            mine.clear()
        self._last_cut = self._dropped = self._since = self._cut_bytes = self._cheap_bytes = 0
        self._held_bytes = self._spare_bytes = self._level = self._pause = 0
        self._lasting, self._watch = 0.0, 1

    def _forget(self) -> None:
        super()._forget()
        self._fresh, self._cheap = [], []

    def keeps_now(self) -> int:
        return self._held_bytes + self._spare_bytes + self.kept_bytes

    def _on_storages(self, tensors: Any) -> dict[int, Tensor]:
        """They are about to be written: what was saved of their storages is spared only if it stays what it is."""
        targets = super()._on_storages(tensors)
        for tensor in tensors_of(tensors) if self._spare else ():
            sid = _storage_id(tensor) if _has_storage(tensor) else 0
            for value in list(self._spare_on.get(sid, ())):
                if not are_disjoint(geometry_of(self._spare[value]), geometry_of(tensor)):
                    self._give_up(value)
        return targets

    # ---- bytes

    def _drop(self, index: int, nbytes: int) -> None:
        """Of a value made at `index`, that many bytes (more) have been saved and are not kept by a cut."""
        if index >= self._last_cut:
            self._dropped += nbytes
            self._since += nbytes
        else:
            self._cut_after(index).dropped += nbytes
            self._count()

    def _count(self) -> None:
        self._since = self._dropped if self._trial is None else self._dropped + self._cuts[-1].dropped

    def _cut_after(self, index: int) -> Cut:
        return self._cuts[bisect_right(self._cuts, index, key=lambda cut: cut.position)]

    def _hold(self, value: Value, tensor: Tensor) -> None:
        """Keep a value that was made before a cut and is read after it."""
        self._give_up(value)
        op = value.op
        assert op is not None  # the callers looked
        kept = Kept()
        kept.value, kept.op, kept.was_read = value, op, self.clock + 1
        kept.sid = sid = _storage_id(tensor)
        before = _users(sid)
        mover = self._cut_mover
        is_moved = mover is not None and mover.takes(tensor)
        value.keep(tensor, mover if is_moved else None if self._packs_late else self.hooks)
        kept.refs = 0 if is_moved else _users(sid) - before
        self._kept[value] = kept
        self._held_bytes += value.nbytes
        self._assign(kept, self._cut_after(op.index))
        self._drop(op.index, -value.saved)

    def _assign(self, kept: Kept, cut: Cut) -> None:
        kept.cut = cut
        cut.kept[kept.value] = kept
        cut.nbytes += kept.value.nbytes
        self._cut_bytes += kept.value.nbytes

    def _release(self, kept: Kept) -> None:
        """Keep it no longer; it can be recomputed."""
        value, op, cut = kept.value, kept.op, kept.cut
        held = value.held
        tensor = None if held is None or held.is_packed else held.packed
        del cut.kept[value], self._kept[value]
        cut.nbytes -= value.nbytes
        self._cut_bytes -= value.nbytes
        self._held_bytes -= value.nbytes
        value.op, value.held, value.state = op, None, None
        if value.saved:
            self._drop(op.index, value.saved)
            if self._budget is not None and tensor is not None and self._values.get(kept.sid) is value:
                self._spare_it(value, op, tensor)

    def _is_alive(self, sid: int, value: Value) -> bool:
        """Whether code outside of the tape can still read it: not overwritten, and somebody refers to it."""
        if self._values.get(sid) is not value or value in self._sent:
            return False
        ours = _STORAGE_OBJECT + (len(self._spare_on[sid]) if sid in self._spare_on else 0)
        if value.op is None:
            kept = self._kept.get(value)
            if kept is None:
                return False  # kept for good: no concern of cuts
            ours += kept.refs
            if self._cut_mover is not None:
                ours += self._cut_mover.holds(sid)
        return _users(sid) > ours

    # ---- cuts

    def _look(self, info: Info) -> None:
        if self._pause > 0:
            self._pause -= 1
            return
        is_small = self._is_free and self._since < _WORTH_CUTTING * (self.clock - self._last_cut)
        if is_small or info.ignored or info.writes:  # the latter may write what the cut would keep
            return
        if self._consider() and self._since >= self._watch:
            self._consider()  # the older cut has been settled: this may be the first moment of the next one

    def _consider(self) -> bool:
        """Cut here, perhaps. Returns whether a cut has been settled."""
        alive, closed = 0, self._since  # the latter would be dropped before it
        is_alive, values, fresh = self._is_alive, self._values, []
        is_simple = not self._spare_on and not self._sent
        for entry in self._fresh:
            sid, value = entry
            quick = is_simple and value.op is not None  # past one call, mostly
            if (values.get(sid) is value and _users(sid) > _STORAGE_OBJECT) if quick else is_alive(sid, value):
                fresh.append(entry)
                alive += value.nbytes
                closed -= value.saved
        self._fresh = fresh
        self._pause = self._pause or len(fresh) >> 5
        trial = self._trial
        settled = self._cut_bytes - (0 if trial is None else self._cuts[-1].nbytes)
        room = self._level - settled if self._size is None else self._size
        # As many cuts as there are, all as dear as this one, should not keep much more than a segment drops.
        count = len(self._cuts) + (trial is None)
        is_late = count > 1 and self._since > 2 * (room + self._level)
        enough = 1 if self._size is not None or is_late else max(4, count / 2)
        is_good = closed >= enough * (alive * (1 - self._lasting))
        if trial is not None:  # later is better, unless more is alive
            is_good &= closed * trial[1] >= trial[0] * alive and (10 * closed >= 11 * trial[0] or alive < trial[1])
        if is_good and closed > 0 and self._has_room(alive, settled, self._since > room):
            self._make(closed, alive)
        if self._trial is None or self._since <= room:
            return False
        self._settle()
        return True

    def _make(self, closed: int, alive: int) -> None:
        """Here, until there is a better place in this segment."""
        if self._trial is not None:
            self._remove(len(self._cuts) - 1)
        position = self._position()
        self._had_cut = True
        self._cuts.append(Cut(position, self._dropped))
        insort(self.cuts, position)
        self._last_cut, self._dropped, self._trial = position, 0, (closed, alive)
        self._whole.clear()  # whoever reads it crosses the cut
        self._count()

    def _cut_for_good(self) -> None:
        self._fresh = [entry for entry in self._fresh if self._is_alive(*entry)]
        self._make(0, sum(value.nbytes for _, value in self._fresh))
        self._cuts[-1].stays = True
        self._settle()

    def _settle(self) -> None:
        """The provisional cut stays; older ones may go."""
        cuts = self._cuts
        last = cuts[-1]
        assert self._trial is not None
        last.alive = self._trial[1]
        self._trial = None
        self._count()
        position = last.position
        last.waiting = [(sid, v) for sid, v in self._fresh if v.op is not None and v.op.index < position]
        makers = [self._kept.get(value, value).op for _, value in self._fresh]  # but of what is kept for good
        self._fresh = [entry for entry, op in zip(self._fresh, makers, strict=True) if op and op.index >= position]
        self._cheap = [entry for entry in self._cheap if self._is_alive(*entry)]
        self._cheap_bytes = sum(value.nbytes for _, value in self._cheap)
        for cut in cuts:
            if cut.waiting:
                cut.waiting = [(sid, v) for sid, v in cut.waiting if v.op is not None and self._is_alive(sid, v)]
                waits = sum(value.nbytes for _, value in cut.waiting)
                cut.nbytes += waits - cut.waits
                self._cut_bytes += waits - cut.waits
                cut.waits = waits
        if len(cuts) > 2:
            # What still lives of the cut before would have been kept by any cut (the long connections of a net, outputs
            # that are collected in a list): that part says nothing about whether a cut is dear.
            cut = cuts[-3]
            living = cut.waits + sum(v.nbytes for v, kept in cut.kept.items() if self._is_alive(kept.sid, v))
            self._lasting = min(1.0, living / cut.alive) if cut.alive else 0.0
        if self._size is None:
            self._level = max(self._level, self._cut_bytes - last.nbytes + last.dropped)
            self._merge()
            self._watch = max(1, (self._level - self._cut_bytes) // 2)
        else:
            self._watch = max(1, self._size // 2)

    def _merge(self) -> None:
        """Give up the cuts, oldest first, without which no segment exceeds the level."""
        i = before = 0
        while i < len(self._cuts) - 1:
            if not self._cuts[i].stays and before + self._merged(i) <= self._level:
                self._remove(i)
            else:
                before += self._cuts[i].nbytes
                i += 1

    def _merged(self, i: int) -> int:
        """What the segments around a cut would drop without it."""
        cuts = self._cuts
        after = cuts[i + 1].dropped if i + 1 < len(cuts) else self._dropped
        return cuts[i].dropped + after + sum(value.saved for value in cuts[i].kept)

    def _remove(self, i: int) -> None:
        cuts = self._cuts
        cut = cuts.pop(i)
        self.cuts.remove(cut.position)
        after = cuts[i] if i < len(cuts) else None
        if after is not None:
            after.dropped += cut.dropped
            after.waiting += cut.waiting
            after.waits += cut.waits
            after.nbytes += cut.waits
        else:
            self._last_cut = cuts[-1].position if cuts else 0
            self._dropped += cut.dropped
            self._fresh += cut.waiting
            self._cut_bytes -= cut.waits
            self._trial = None
        self._count()
        for kept in list(cut.kept.values()):
            if after is not None and kept.was_read >= after.position:
                self._cut_bytes -= kept.value.nbytes
                self._assign(kept, after)
            else:
                self._release(kept)

    # ---- what is spared

    def _spare_it(self, value: Value, op: Op, tensor: Tensor) -> None:
        """Autograd has saved it: hold on to it while there is room.

        With a budget, until something that is dearer needs the room. Else the last ones, as far as the level allows:
        backward is through with them before it needs the room for anything else.
        """
        budget = self._budget
        if self._cut_mover is not None or (budget is None and self.saved_bytes < _WORTH_SPARING * self._saves):
            return
        sid = _storage_id(tensor)
        nbytes = 0 if sid in self._spare_on else value.nbytes
        if budget is None:
            if self.hooks is not None or value.state is CHEAP:
                return
            room = self._held_bytes
            if self._size is None:
                room = min(room, self._level - self._cut_bytes - self._cheap_bytes)
            if self._trial is not None or (self._cuts and self._dropped > self._level):
                room = max(room, self._dropped)  # perhaps the end, which backward would make again at once
            while self._spare_bytes + nbytes > room and self._spare:
                self._give_up(next(iter(self._spare)))
            if nbytes > room:
                return
        else:
            if nbytes > budget - self.kept_bytes:
                return
            entry = (self._cost(value, op) / value.nbytes, value.id, value)
            cheapest = self._cheapest
            while self.keeps_now() + nbytes > budget:
                if not cheapest or cheapest[0] >= entry:
                    return
                self._give_up(heapq.heappop(cheapest)[2])
            heapq.heappush(cheapest, entry)
        self._spare[value] = _torch.alias(tensor)
        self._spare_on.setdefault(sid, set()).add(value)
        self._spare_bytes += nbytes

    def _give_up(self, value: Value) -> None:
        tensor = self._spare.pop(value, None)
        if tensor is not None:
            sid = _storage_id(tensor)
            self._spare_on[sid].remove(value)
            if not self._spare_on[sid]:
                del self._spare_on[sid]
                self._spare_bytes -= value.nbytes

    def _cost(self, value: Value, op: Op) -> float:
        """What it costs to make the value again, in floating-point operations, if all is there that autograd saves."""
        cost, flops = 0.0, self._flops or {}
        seen = {op}
        stack = [(value, op)]
        while stack:
            value, op = stack.pop()
            cost += flops.get(op.index, 0) + _PER_BYTE * value.nbytes
            for read in op.reads:
                there = read.op is None or read.saved == read.nbytes
                if not there and read.op not in seen and len(seen) < 32:
                    assert read.op is not None
                    seen.add(read.op)
                    stack.append((read, read.op))
        return cost

    # ---- the budget

    def _has_room(self, alive: int, settled: int, is_full: bool) -> bool:
        """Whether there can be a cut here, where so much is alive that was made since the last settled one."""
        budget = self._budget
        if budget is None or settled + alive + self.kept_bytes <= budget:
            return True
        if not is_full:
            return False  # a provisional cut must not cost an older one
        # If it were the only one:
        cuts = self._cuts if self._trial is None else self._cuts[:-1]
        last = cuts[-1].position if cuts else 0
        alive += sum(value.nbytes for cut in self._cuts for _, value in cut.waiting if value.op is not None)
        older = [(kept.sid, value) for value, kept in self._kept.items() if kept.op.index < last]
        alive += sum(value.nbytes for sid, value in older if self._is_alive(sid, value))
        if not self._had_cut:
            self._least = min(alive, self._least or alive)
        if alive + self.kept_bytes > budget:
            return False
        level = self._cheapest_removal(len(cuts))[0]
        return level <= self._level or level <= 2 * self._since

    def _cheapest_removal(self, count: int) -> tuple[int, int]:
        """The one of the first `count` cuts whose segments together raise the level least: the new level, and which."""
        before = [0, *accumulate(cut.nbytes for cut in self._cuts)]
        possible = [i for i in range(count) if not self._cuts[i].stays]
        return min(((before[i] + self._merged(i), i) for i in possible), default=(0, -1))

    def _clear_room(self, nbytes: int) -> None:
        """Give up what is worth least, until that many bytes fit in. What users keep may need more than the budget."""
        budget = cast(int, self._budget)
        while self.keeps_now() + nbytes > budget and (self._spare or self._cuts):
            if self._spare:
                self._give_up(heapq.heappop(self._cheapest)[2])
            elif len(self._cuts) == 1 and not self._cuts[0].stays:
                self._remove(0)
            else:
                level, i = self._cheapest_removal(len(self._cuts) - 1)  # but for the last one
                if i < 0:
                    return
                if self._size is None:
                    self._level = max(self._level, level)
                else:
                    self._size = max(self._size, self._merged(i))
                self._remove(i)


_WORTH_CUTTING = 1 << 8  # bytes that an operator drops, on average: what the tape itself needs for it
_WORTH_SPARING = 1 << 18  # bytes, on average: to spare smaller values takes longer than to make some of them again
_PER_BYTE = 10  # floating-point operations in the time in which a byte is written
