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

With a budget, whatever autograd saves is kept while there is room. When there is none left, the values go first whose
recompute is cheap per byte, then cuts: that one whose segments together raise the level least.

Only byte counts, positions and reference counts are looked at, so that the same program makes the same cuts.

Rejected: cutting when a segment has dropped as much as is kept (twice the memory: the last segment is the largest when
most is kept), and keeping all that is alive at a cut (variables of calling functions, which nothing reads again).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from typing import Any, NamedTuple

from torch import Tensor

from . import _torch
from ._engine import is_internal, thread
from ._tape import Info, Op, Policy, Ref, Tape, Value, info_of, whole

_users = _torch.storage_users_by_id
_storage_id = _torch.storage_id


class Placement(NamedTuple):
    """What the user asks of the schedule, in bytes."""

    budget: int | None
    segment: int | None


class Kept:
    """What the tape knows of a value that it keeps of its own accord, and may give up again."""

    __slots__ = ("cut", "density", "op", "refs", "sid", "value", "was_read")

    value: Value
    op: Op  # that made it
    sid: int  # its storage
    refs: int  # how many references of the storage it is
    was_read: int  # position of the operator that has read it last
    cut: Cut | None  # the first one after it was made
    density: float | None  # cost of its recompute per byte, if it may stay without a cut


class Cut:
    """A position on the tape, and the segment that ends there."""

    __slots__ = ("alive", "dropped", "kept", "nbytes", "position", "waiting", "waits")

    def __init__(self, position: int, dropped: int) -> None:
        self.position = position
        self.dropped = dropped  # bytes that autograd has saved of the segment and that are not kept
        self.kept: dict[Value, Kept] = {}  # made in the segment and read after it
        self.waiting: list[tuple[int, Value]] = []  # alive when it was settled, and not read until then
        self.alive = 0  # bytes that were alive when it was made
        self.waits = 0  # bytes of those
        self.nbytes = 0  # bytes of both


class AutoTape(Tape):
    """A tape that makes cuts."""

    def __init__(
        self,
        hooks: _torch.Hooks | None,
        preserve_rng_state: bool,
        log: list[tuple[str, str]] | None,
        policy: Policy | None,
        placement: Placement,
    ) -> None:
        super().__init__(hooks, preserve_rng_state, log, policy)
        self._placement = placement
        # To save something in a region of ours makes a slot there, so that is done at the end, once for each value.
        self._packs_late = hooks is not None and is_internal(hooks)
        self._made: list[Cut] = []  # the last one provisionally, if `_ratio` is not None
        self._cut_bytes = 0  # that they keep, or will if it is read
        self._ratio: tuple[int, int] | None = None  # of the provisional cut: bytes dropped before it, bytes alive
        self._last = 0  # position of the last cut
        self._dropped = 0  # bytes saved since, and not kept
        self._since = 0  # bytes saved since the last settled cut, and not kept
        self._watch = 1  # look for a cut when `_since` has reached this
        self._pause = 0  # operators until the next look
        self._level = 0
        self._lasting = 0.0  # the part of what was alive at a cut that lived on until the next one
        self._size = placement.segment
        self._fresh: list[tuple[int, Value]] = []  # made since the last settled cut, as far as they live
        self._saves: dict[Value, int] = {}  # bytes of it that autograd has saved
        self._kept: dict[Value, Kept] = {}
        self._bytes = 0  # of those
        self._budget = placement.budget
        self._least: int | None = None  # the smallest budget for which there would have been a cut
        self._spare: list[tuple[float, int, Value]] = []  # heap: what may stay while there is room, cheapest first
        self._has_tail = hooks is None and placement.budget is None
        self._tail: dict[Value, Tensor] = {}  # what was saved last
        self._tail_bytes = 0
        self._tail_users: dict[int, int] = {}  # by storage: how many of them are on it
        self._costs: dict[int, float] = {}  # by position: what the operator costs
        self._lacks = False  # something was given up or never kept, for want of room
        self._has_cut = False

    # ---- what the recording tells

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._since >= self._watch and thread.depth == self._depth:
            self._look(func)
        if self._budget is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        position = self.recorded
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.recorded > position:
            flops = _torch.flop_formula(func)
            if flops is not None:
                self._costs[position] = flops(args, kwargs or {}, result)
        return result

    def _register(self, tensor: Tensor, op: Op | None, sid: int) -> Value:
        value = super()._register(tensor, op, sid)
        if op is not None and value.nbytes:
            self._fresh.append((sid, value))
        return value

    def reference(self, tensor: Tensor, is_read: bool = True) -> Any:
        ref = super().reference(tensor, is_read)
        if is_read and type(ref) is Ref:
            self._read(ref.value, tensor)
        return ref

    def _refer_to_written(self, arg: Any, reads: list[Value], info: Info, outside: set[int]) -> Any:
        ref = super()._refer_to_written(arg, reads, info, outside)
        if type(ref) is Ref and not ref.value.unwritten and not (info.overwrites and arg.nbytes == ref.value.nbytes):
            self._read(ref.value, arg)
        return ref

    def _read(self, value: Value, tensor: Tensor) -> None:
        """An operator at the present position reads the value."""
        op = value.op
        if op is None:
            kept = self._kept.get(value)
            if kept is not None:
                kept.was_read = self.recorded
                if kept.cut is None and kept.op.index < self._last:
                    self._assign(kept)
        elif op.index < self._last and value.nbytes:
            self._keep_for_cut(value, tensor)

    def save(self, tensor: Tensor) -> Any:
        ref = super().save(tensor)
        if type(ref) is Ref:
            value = ref.value
            kept = None
            self._read(value, tensor)  # what an operator saves it also reads, without another `reference`
            op = value.op
            if op is None:
                kept = self._kept.get(value)
                if kept is None:
                    return ref
                op = kept.op
            before = self._saves.get(value, 0)
            now = min(value.nbytes, before + tensor.nbytes)
            if now != before:
                self._saves[value] = now
                if kept is None or kept.cut is None:
                    self._drop(op.index, now - before)
                if self._has_tail and before == 0:
                    self._extend_tail(value, tensor)
            if self._budget is not None and kept is None and value.nbytes:
                self._offer(value, op, tensor)
        return ref

    def keep(self, tensor: Tensor, hooks: _torch.Hooks | None = None) -> Tensor:
        if _torch.has_storage(tensor):
            value = self._values.get(_storage_id(tensor))
            kept = None if value is None else self._kept.get(value)
            if kept is not None:
                self._release(kept)
            if value is not None and value.op is not None and self._budget is not None:
                self._make_room(value.nbytes)
        return super().keep(tensor, hooks)

    def close(self) -> None:
        for value, tensor in self._tail.items():
            if value.op is not None and not value.unwritten and self._values.get(_storage_id(tensor)) is value:
                value.keep(tensor, None)
        self._tail.clear()
        self._tail_users.clear()
        if self._packs_late:
            for value in sorted(self._kept, key=lambda value: value.id):
                value.pack(self._hooks)
        super().close()
        for cut in self._made:  # which its values refer to
            cut.kept.clear()
        self._made.clear()
        self._fresh.clear()
        self._saves.clear()
        self._kept.clear()
        self._spare.clear()
        self._costs.clear()

    @property
    def complaint(self) -> str | None:
        """What to warn of when the block ends: there was no room for a single cut."""
        if self._has_cut or not self._lacks or self._least is None:
            return None
        return (
            f"auto(budget={self._placement.budget}) has no room for a single checkpoint of this block, so backward "
            f"recomputes all of it at once. The smallest budget possible is {self._least} bytes."
        )

    def _extend_tail(self, value: Value, tensor: Tensor) -> None:
        """Hold on to what was saved last, within what the cuts keep and below the level: backward begins there, and is
        through with it before it needs the room for something else."""
        tail, users = self._tail, self._tail_users
        tail[value] = _torch.alias(tensor)
        sid = _storage_id(tensor)
        users[sid] = users.get(sid, 0) + 1
        self._tail_bytes += value.nbytes
        room = self._cut_bytes if self._size is not None else min(self._cut_bytes, self._level - self._cut_bytes)
        while self._tail_bytes > room and tail:
            oldest = next(iter(tail))
            users[_storage_id(tail.pop(oldest))] -= 1
            self._tail_bytes -= oldest.nbytes

    # ---- bytes

    def _drop(self, index: int, nbytes: int) -> None:
        """Of a value made at `index`, that many bytes (more) have been saved and are not kept by a cut."""
        if index >= self._last:
            self._dropped += nbytes
        else:
            self._cut_after(index).dropped += nbytes
        self._count()

    def _count(self) -> None:
        self._since = self._dropped if self._ratio is None else self._dropped + self._made[-1].dropped

    def _cut_after(self, index: int) -> Cut:
        return self._made[bisect_right(self._made, index, key=_position)]

    def _hold(self, value: Value, tensor: Tensor) -> Kept:
        op = value.op
        assert op is not None  # the callers looked
        kept = Kept()
        kept.value, kept.op = value, op
        kept.sid = sid = _storage_id(tensor)
        before = _users(sid)
        hooks = None if self._packs_late else self._hooks
        tensor_on_it = whole(tensor, hooks)
        value.keep(tensor_on_it, hooks)
        del tensor_on_it
        kept.refs = _users(sid) - before
        kept.was_read = self.recorded
        kept.cut = kept.density = None
        self._kept[value] = kept
        self._bytes += value.nbytes
        return kept

    def _release(self, kept: Kept) -> None:
        """Keep it no longer; it can be recomputed."""
        value = kept.value
        if kept.cut is not None:
            del kept.cut.kept[value]
            kept.cut.nbytes -= value.nbytes
            self._cut_bytes -= value.nbytes
            self._drop(kept.op.index, self._saves.get(value, 0))
        value.give_back(kept.op)
        del self._kept[value]
        self._bytes -= value.nbytes

    def _is_alive(self, sid: int, value: Value) -> bool:
        """Whether code outside of the tape can still read it: not overwritten, and somebody refers to it."""
        if self._values.get(sid) is not value:
            return False
        ours = _torch.STORAGE_OBJECT + self._tail_users.get(sid, 0)
        if value.op is None:
            kept = self._kept.get(value)
            if kept is None:
                return False  # kept for good: no concern of cuts
            ours += kept.refs
        return _users(sid) > ours

    # ---- cuts

    def _keep_for_cut(self, value: Value, tensor: Tensor) -> None:
        if value.unwritten:
            return
        while self._budget is not None and not self._make_room(value.nbytes):
            if not self._made:
                return
            self._remove(len(self._made) - 1)  # not even the last cut fits
            if value.op is None or value.op.index >= self._last:
                return
        assert value.op is not None
        if value.op.index < self._last:
            self._assign(self._hold(value, tensor))

    def _assign(self, kept: Kept) -> None:
        kept.cut = cut = self._cut_after(kept.op.index)
        cut.kept[kept.value] = kept
        cut.nbytes += kept.value.nbytes
        self._cut_bytes += kept.value.nbytes
        self._drop(kept.op.index, -self._saves.get(kept.value, 0))

    def _look(self, func: Any) -> None:
        """An operator is about to run: is this a moment for a cut?"""
        if self._pause > 0:
            self._pause -= 1
            return
        info = info_of(func)
        if info.ignored or info.writes:
            return  # it may write what the cut would keep
        alive, saved = self._alive()
        self._pause = (len(self._fresh) if self._budget is None else len(self._fresh) + len(self._kept)) >> 5
        if self._consider(self._since - saved, alive) and self._since >= self._watch:
            # The older cut has been settled: this may be the first moment of the next one.
            alive, saved = self._alive()
            self._consider(self._since - saved, alive)

    def _alive(self) -> tuple[int, int]:
        """Bytes that are alive of what was made since the last settled cut, and how much of that autograd has saved."""
        saves = self._saves
        alive = saved = 0
        self._fresh = [entry for entry in self._fresh if self._is_alive(*entry)]
        for _, value in self._fresh:
            alive += value.nbytes
            saved += saves.get(value, 0)
        return alive, saved

    def _consider(self, closed: int, alive: int) -> bool:
        """Cut here, perhaps: `closed` bytes would be dropped before it. Returns whether a cut has been settled."""
        last = self._ratio
        settled = self._cut_bytes - (0 if last is None else self._made[-1].nbytes)
        room = self._level - settled if self._size is None else self._size
        # As many cuts as there are, all as dear as this one, should not keep much more than a segment drops.
        count = len(self._made) + (last is None)
        cost = alive * (1 - self._lasting)
        is_good = closed >= max(4, count / 2) * cost or (
            count > 1 and self._since > 2 * (room + self._level) and closed >= cost
        )
        if (
            is_good
            and closed > 0
            and (
                last is None
                or (closed * last[1] >= last[0] * alive and (10 * closed >= 11 * last[0] or alive < last[1]))
            )
            and self._has_room(alive)
        ):
            self._make(closed, alive)
        if self._ratio is None or self._since <= room:
            return False
        self._settle()
        return True

    def _make(self, closed: int, alive: int) -> None:
        """Here, until there is a better place in this segment."""
        if self._ratio is not None:
            self._remove(len(self._made) - 1)
        position = self.recorded
        self._has_cut = True
        self._forget_recent()  # what has just been saved is now read across the cut
        self._made.append(Cut(position, self._dropped))
        insort(self.cuts, position)
        self._last, self._dropped, self._ratio = position, 0, (closed, alive)
        self._count()

    def _settle(self) -> None:
        """The provisional cut stays; older ones may go."""
        made = self._made
        last = made[-1]
        assert self._ratio is not None
        last.alive = self._ratio[1]
        self._ratio = None
        self._count()
        position = last.position
        last.waiting = [(sid, v) for sid, v in self._fresh if v.op is not None and v.op.index < position]
        self._fresh = [(sid, v) for sid, v in self._fresh if _made_at(v, self._kept) >= position]
        for cut in made:
            if cut.waiting:
                cut.waiting = [(sid, v) for sid, v in cut.waiting if v.op is not None and self._is_alive(sid, v)]
                waits = sum(value.nbytes for _, value in cut.waiting)
                cut.nbytes += waits - cut.waits
                self._cut_bytes += waits - cut.waits
                cut.waits = waits
        if len(made) > 1:
            # What still lives of the cut before would have been kept by any cut (the long connections of a net, outputs
            # that are collected in a list): that part says nothing about whether a cut is dear.
            cut = made[-2]
            living = cut.waits + sum(
                kept.value.nbytes for kept in cut.kept.values() if self._is_alive(kept.sid, kept.value)
            )
            self._lasting = min(1.0, living / cut.alive) if cut.alive else 0.0
        if self._size is None:
            self._level = max(self._level, self._cut_bytes - last.nbytes + last.dropped)
            self._merge()
            self._watch = max(1, (self._level - self._cut_bytes) // 2)
        else:
            self._watch = max(1, self._size // 2)

    def _merge(self) -> None:
        """Give up the cuts, oldest first, without which no segment exceeds the level."""
        made = self._made
        i = before = 0
        while i < len(made) - 1:
            if before + self._merged(i) <= self._level:
                self._remove(i)
            else:
                before += made[i].nbytes
                i += 1

    def _merged(self, i: int) -> int:
        """What the segments around a cut would drop without it."""
        cut = self._made[i]
        after = self._made[i + 1].dropped if i + 1 < len(self._made) else self._dropped
        return cut.dropped + after + sum(self._saves.get(value, 0) for value in cut.kept)

    def _remove(self, i: int) -> None:
        made = self._made
        cut = made.pop(i)
        self.cuts.remove(cut.position)
        if i < len(made):
            after: Cut | None = made[i]
            assert after is not None
            after.dropped += cut.dropped
            after.waiting += cut.waiting
            after.waits += cut.waits
            after.nbytes += cut.waits
        else:
            after = None
            self._last = made[-1].position if made else 0
            self._dropped += cut.dropped
            self._fresh += cut.waiting
            self._cut_bytes -= cut.waits
            self._ratio = None
        for kept in cut.kept.values():
            kept.cut = None
            if after is not None and kept.was_read >= after.position:
                kept.cut = after
                after.kept[kept.value] = kept
                after.nbytes += kept.value.nbytes
                continue
            self._cut_bytes -= kept.value.nbytes
            self._drop(kept.op.index, self._saves.get(kept.value, 0))
            if kept.density is None:
                self._release(kept)
            else:
                heapq.heappush(self._spare, (kept.density, kept.value.id, kept.value))
        self._count()

    # ---- the budget

    def _has_room(self, alive: int) -> bool:
        """Whether a cut here would fit, if it were the only one."""
        if self._budget is None:
            return True
        alive += sum(value.nbytes for cut in self._made for _, value in cut.waiting if value.op is not None)
        alive += sum(
            kept.value.nbytes
            for kept in self._kept.values()
            if kept.op.index < self._last and self._is_alive(kept.sid, kept.value)
        )
        if not self._has_cut and (self._least is None or alive < self._least):
            self._least = alive
        return alive + self.kept_bytes <= self._budget

    def _make_room(self, nbytes: int) -> bool:
        """Give up what is worth least, until that many bytes fit in. The last cut stays."""
        budget = self._budget
        assert budget is not None
        while self._bytes + self.kept_bytes + nbytes > budget:
            self._lacks = True
            if self._spare:
                self._give_up(heapq.heappop(self._spare)[2])
            elif len(self._made) > 1:
                before, best = 0, (0, -1)
                for i, cut in enumerate(self._made[:-1]):
                    level = before + self._merged(i)
                    if best[1] < 0 or level < best[0]:
                        best = level, i
                    before += cut.nbytes
                if self._size is None:
                    self._level = max(self._level, best[0])
                else:
                    self._size = max(self._size, self._merged(best[1]))
                self._remove(best[1])
            else:
                return False
        return True

    def _give_up(self, value: Value) -> None:
        kept = self._kept.get(value)
        if kept is not None and kept.density is not None:
            kept.density = None
            if kept.cut is None:
                self._release(kept)

    def _offer(self, value: Value, op: Op, tensor: Tensor) -> None:
        """Autograd has saved it: keep it while nothing better needs the room."""
        budget = self._budget
        assert budget is not None
        if value.nbytes > budget:
            self._lacks = True
            return
        entry = (self._cost(value, op) / value.nbytes, value.id, value)
        while self._bytes + self.kept_bytes + value.nbytes > budget:
            self._lacks = True
            if not self._spare or self._spare[0] >= entry:
                return
            self._give_up(heapq.heappop(self._spare)[2])
        kept = self._hold(value, tensor)
        kept.density = entry[0]
        heapq.heappush(self._spare, entry)

    def _cost(self, value: Value, op: Op) -> float:
        """What it costs to make the value again, in floating-point operations, if all is there that autograd saves."""
        cost = 0.0
        seen = {op}
        stack = [(value, op)]
        while stack:
            value, op = stack.pop()
            cost += self._costs.get(op.index, 0) + _PER_BYTE * value.nbytes
            for read in op.reads:
                if read.op is not None and read.op not in seen and read not in self._saves and len(seen) < 32:
                    seen.add(read.op)
                    stack.append((read, read.op))
        return cost


_PER_BYTE = 10  # floating-point operations in the time in which a byte is written


def _position(cut: Cut) -> int:
    return cut.position


def _made_at(value: Value, kept: dict[Value, Kept]) -> int:
    op = value.op
    if op is None:
        known = kept.get(value)
        return -1 if known is None else known.op.index
    return op.index
