"""Recording: which operators a block ran, on which values.

The tape sits below autograd, autocast and function modes, where every tensor is plain data. A *value* is one storage
at one moment: an operator that writes in place makes a new value of the same storage. How a tensor lies on its
storage (size, stride, offset, dtype, conj and neg bits) is part of the reference to the value, so views are free and
pure view operators are not recorded at all. What lies as the value was made (or first met) is referred to by the
value itself, anything else by a `Ref`.

Values and operators form a graph that points only backwards (`Value.op` -> `Op.reads` -> older values), and only
holders own it. So whatever no live holder needs is freed when the block ends, and the rest goes as backward passes
by, without any bookkeeping (rule 9).

Invariant: replaying an operator on its recorded references gives the bits that it gave the first time. Where that
can't be promised, the value is held instead: storages that existed before, storages that are read before any
recorded operator wrote them, storages written from outside.

Rejected: a list of operators with use counts (needs a release pass after each backward), and identity of tensors
(autograd packs saved outputs as shallow copies).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import _torch
from ._ambient import read_switches
from ._held import note_written
from ._offload import Destination, Mover
from ._ops import INFOS, Info, generators_of, info_of_region, tensors_of
from ._region import Region, aside, thread, without_recording
from ._tree import ATOMS
from ._values import (
    CHEAP,
    KEPT,
    LENT,
    UNFILLED,
    VOLATILE,
    Geometry,
    Op,
    Ref,
    Scratch,
    SpecialOp,
    Value,
    Wrapped,
    geometry_of,
)
from ._where import stack_of_user

# What to do with a value: False to recompute it, True to keep it, or where it is kept.
Answer = bool | Destination


class Places(NamedTuple):
    """Where a policy puts things about which it is not asked; None: where they would be without it."""

    kept: Destination | None  # what `keep` is given
    saved: Destination | None  # all that autograd saves, which is then kept
    inputs: Destination | None


NOWHERE = Places(None, None, None)


_NOTHING: dict[Any, Any] = {}
_storage_id, _has_storage, _weak_storage = _torch.storage_id, _torch.has_storage, _torch.weak_storage
_users = _torch.storage_users_by_id
_modules, _INDUCTOR = sys.modules, "torch._inductor.output_code"  # loaded before anything runs that it has compiled
_Parameter, _plain_dispatch = nn.Parameter, Tensor.__torch_dispatch__
_is_grad_enabled, _graph_task_id = torch.is_grad_enabled, _torch.graph_task_id


class Tape(TorchDispatchMode, Region):
    """Records while it is entered: one per region. Afterwards what it recorded lives on in the holders alone."""

    supports_higher_order_operators = True
    is_checked = False  # whether values are compared when they come back
    _opened: Any = None  # by a backward in the block: all holders; () if it has freed them
    _adopts = True  # whether what it reads is recorded
    # For tapes that make cuts:
    _last_cut = 0  # a value from before this position must be kept when it is read
    _since = 0  # bytes saved since the last settled cut
    _watch = 1  # look for a cut when there are so many
    limits: Any = None  # for a replay, when the block has ended
    _flops: dict[int, float] | None = None  # by position, if anybody wants to know
    _fresh: list[tuple[int, Value]] | None = None  # what operators have made: storage and value
    _cheap: list[tuple[int, Value]] = []  # the same of what is as good as held  # noqa: RUF012

    def __init__(self, hooks: _torch.Hooks | None, preserve_rng_state: bool | str, log: Any, policy: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.clock = 0  # the last id of a value
        self.recorded = self.saved_bytes = self.kept_bytes = 0
        self.cuts: list[int] = []  # where segments begin: positions on the tape, in order
        self.counted: dict[int, int] = {}  # by position: how many operators came before
        self.switches = read_switches()
        self._here = here = thread.__dict__
        self._depth = here["depth"]
        self._graph_task = _graph_task_id()  # of the rerun that this is part of, if of one
        self._preserve_rng_state = preserve_rng_state
        self.outer = outer = here["region"]
        self.policy = outer.policy if policy is None and outer is not None else policy
        self._ask = None if self.policy is None else self.policy.on_op
        self.movers: dict[Destination, Mover] = {}
        kept, saved, inputs = NOWHERE if self.policy is None else self.policy.places
        self._keeper, self._save_at = self._mover(kept), self._mover(saved)
        self._around = hooks
        self.hooks: Any = hooks if inputs is None else self._mover(inputs)
        self._inner = 0  # how many tapes have been entered just inside this one: they ask for themselves
        self._running: Any = None  # the operator that reads now, for messages
        self._values: dict[int, Value] = {}  # by storage: its value now
        # Equal ones are one object: there are few, many refer to them, and garbage collection looks at each.
        self._geometries: dict[Any, Any] = {}
        self._weak: list[int] = []
        self._written: dict[int, int] = {}  # by storage: the version that recorded operators have left, at most
        # By storage: what operators have made, until one makes a view of it: nothing can lie there in another way.
        self._whole: dict[int, Value] = {}
        self._has_zeros = False  # has seen efficient zeros, which have no memory
        self._unsettled: list[tuple[Answer, Tensor]] = []  # written just now, and to be kept
        self._lent: list[torch.UntypedStorage] = []  # memory of gathered parameters, while there

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps `__torch_dispatch__` once more, and every operator pays for it.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else compiled code runs eagerly in the block, and in torch 2.13 also after it.
        return True

    def adopt(self, tensor: Tensor, value: Value) -> None:
        """While the block still runs, a backward inside it has brought `value` back on another storage. What reads
        that storage reads the value: holding it once more would be a waste, and a slot that no rerun would have."""
        fits = _has_storage(tensor) and tensor.untyped_storage().nbytes() == value.nbytes
        if fits and self._adopts and _storage_id(tensor) not in self._values:
            self._weak.append(_weak_storage(tensor.untyped_storage()))
            self._values[_storage_id(tensor)] = value

    def close(self) -> str:
        """Drop what is needed only while recording. Returns what to warn of."""
        try:
            self.settle()
            for mover in self.movers.values():
                mover.settle()
        finally:
            self.outer = None
            self._lent.clear()
            self._forget()
        return ""

    def _forget(self) -> None:
        """No holder needs what has been recorded; what others read of it from here on comes from outside."""
        for mine in (self._whole, self._values, self._written, self._geometries):
            mine.clear()
        while self._weak:
            _torch.free_weak_storage(self._weak.pop())

    def note_backward(self, holders: Any) -> None:
        """A backward in the block opens one of these. (In hooks each value that is met once more would be a slot, so
        there all that was recorded stays.)"""
        if self.hooks is None and _graph_task_id() != self._graph_task:
            if not self._opened:
                self._hand_over()
            self._opened, self._adopts = holders, _is_grad_enabled()  # as it is with `create_graph` alone

    def _hand_over(self) -> None:
        """Let the holders alone own what operators have made: who reads it once more reads it from outside."""
        self._values = {sid: value for sid, value in self._values.items() if value.op is None and _users(sid)}

    def _rests(self, info: Info) -> bool:
        """Whether an operator need not be recorded: in a backward in the block, which writes nothing that was there;
        and after one that has freed its graph, until gradients are wanted again (mostly, an optimizer's step)."""
        if _graph_task_id() != self._graph_task:
            self._whole.clear()  # its result may be a view
            return not (info.targets or _is_grad_enabled())
        if self._opened:
            is_freed = not self._lent and not any(ref() for ref in self._opened)
            self._opened = () if is_freed else None
            if is_freed:
                self._forget()
        if self._values or _is_grad_enabled():
            self._opened = None
        return self._opened is not None

    def settle(self) -> None:
        """Keep what the last write has made: it has the version now that it should have."""
        while self._unsettled:
            answer, tensor = self._unsettled.pop(0)
            self._obey(answer, (tensor,))

    # ---- what is saved and kept

    def save(self, tensor: Tensor) -> Any:
        """What a holder needs to bring `tensor` back."""
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            return Wrapped(tensor, self.save)
        if _INDUCTOR in _modules:
            self._whole.clear()  # compiled code makes views that nobody sees
            self._notice_writes(tensor)
        if self._here["depth"] != self._depth:  # in `opaque()`, where versions alone tell what is written
            for sid in by_storage(tensor):
                if sid in self._values and self._values[sid].is_stale:
                    del self._values[sid]
        saved = self.reference(tensor)
        value = saved if type(saved) is Value else cast(Ref, saved).value
        if type(value.op) is SpecialOp and value is saved and self.hooks is None and _is_cheap_to_hold(value):
            value.hold(tensor, value.geometry, None, "a random tensor")
        if value.saved < value.nbytes:
            self._has_saved(value, tensor, min(value.nbytes - value.saved, tensor.nbytes))
        if self._save_at is not None:
            self.keep_at(tensor, self._save_at)
        return saved

    def _has_saved(self, value: Value, tensor: Tensor, nbytes: int) -> None:
        """Autograd has saved so many bytes of the value that it had not before."""
        if not value.saved and (value.op is not None or not value.is_parameter):
            self.saved_bytes += value.nbytes
        value.saved += nbytes

    def _mover(self, destination: Destination | None) -> Mover | None:
        return None if destination is None else self.movers.setdefault(destination, Mover(destination))

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold a value: recompute starts from it, and never crosses it."""
        self.keep_at(tensor, self._keeper)
        return tensor

    def keep_at(self, tensor: Tensor, mover: Mover | None) -> None:
        """The same; `mover` says where, None: as an input."""
        if hasattr(tensor, "__tensor_flatten__"):
            Wrapped(tensor, partial(self.keep_at, mover=mover))
        elif _has_storage(tensor):
            value = self._values.get(_storage_id(tensor))
            # There is nothing yet in memory that has only been allocated.
            if value is not None and value.op is not None and not (value.state is UNFILLED and value.nbytes):
                hooks = self.hooks if mover is None or not mover.takes(tensor) else mover
                value.keep(tensor, hooks)
                self.kept_bytes += value.nbytes
                self.cuts.append(self._position())

    def keeps_now(self) -> int | None:
        """How many bytes are kept at this moment of the block, where that is known."""
        return None

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        """The value has a name, which the innermost policy may want to keep it by."""
        if self.policy is not None:
            self._obey(self.policy.on_tag(name), (tensor,))
        return tensor

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay repeats no Python, but a rerun around it does: then what the function does must leave no trace here,
        and what it returns comes from outside."""
        outer = self.outer
        while isinstance(outer, Tape):
            outer = outer.outer
        if outer is None:
            return function(*args, **kwargs)
        with aside():
            return outer.once(function, args, kwargs)

    def keep_for_inner(self, tensor: Tensor) -> None:
        self.keep(tensor)
        super().keep_for_inner(tensor)

    def look_away(self) -> None:
        """Whatever is alive may be written unseen: what has been read of it must not change, and whoever reads it from
        here on reads something from outside."""
        self.settle()
        self._whole.clear()
        for sid, value in list(self._values.items()):
            if value.is_stale or not value.is_parameter:
                value.freeze()
                del self._values[sid]
        super().look_away()

    def yield_to_inner(self, change: int) -> None:
        self._inner += change

    def _decide(self, info: Info, drew: bool, func: Any, args: Any, kwargs: Any, result: Any, made: Any) -> None:
        """Keep what the operator has made, if it must be or the policy says so."""
        answer: Answer = drew and not self._preserve_rng_state
        if not answer and self._ask is not None and not self._inner and _graph_task_id() == self._graph_task:
            # Not in a backward inside, which makes others' hooks call functions again at times that differ in a rerun.
            answer = self._ask(func, args, kwargs, result)
        if info.writes:  # when the operator has returned, which has still to count versions up
            self._unsettled += [(answer, tensor) for tensor in made]
        else:
            self._obey(answer, made)

    def _obey(self, answer: Answer, tensors: Iterable[Tensor]) -> None:
        """Do with these what the policy has answered."""
        if not answer:
            return
        mover = self._mover(answer) if isinstance(answer, Destination) else None
        for tensor in tensors:
            self.keep_at(tensor, mover)
            if mover is None and self.outer is not None:
                self.outer.keep_for_inner(tensor)

    # ---- references to values

    def reference(self, tensor: Tensor, reads: list[Value] | None = None) -> Value | Ref:
        """What stands for `tensor` as it is now: its value, or a `Ref` to it. Autograd saves it; or, if `reads` is
        given, to which its value is added, an operator reads it."""
        kind: Any = type(tensor)
        if kind is _Parameter:
            value = self._values.get(_storage_id(tensor)) if _has_storage(tensor) else None
            held = None if value is None else value.held
            if held is not None and held.packed is tensor and (reads is None or held.name is not None):
                if reads is not None:
                    reads.append(cast(Value, value))
                return cast(Value, value)
            kind = None
        elif kind is Tensor:
            kind = None
        elif _dispatches(kind):
            return self._opaque(tensor, reads)
        try:
            sid = _storage_id(tensor)
            value = self._whole.get(sid)
            if value is not None and value.state is None and kind is None:
                if reads is not None:
                    reads.append(value)
                return value
            geometry = geometry_of(tensor)
        except RuntimeError:  # sparse, MKLDNN, strided nested: no storage, or no geometry
            return self._opaque(tensor, reads)
        value = self._values.get(sid)
        if value is None:
            value = self._register(tensor, None, sid, None)
            self._has_zeros = self._has_zeros or _torch.is_zeros(tensor)
        op = value.op
        if op is not None:
            if value.state is UNFILLED and value.nbytes:  # filled by something unseen (a raw kernel, ctypes, NumPy)
                if reads is not None and isinstance(self.outer, Tape):
                    self.outer.reference(tensor, [])  # else it would take this for what autograd saves to be filled
                value = self._from_outside(value, tensor, geometry, reads)
            elif op.index < self._last_cut:
                self._read_across(value, tensor)
        elif value.state is KEPT:
            self._read_across(value, tensor)
        elif (held := value.holding(geometry)) is None or (held.name is None and reads is not None):
            value = self._from_outside(value, tensor, geometry, reads)
        if reads is not None:
            reads.append(value)
        if kind is None and geometry == value.geometry:
            return value
        return Ref(value, self._geometries.setdefault(geometry, geometry), kind)

    def _read_across(self, value: Value, tensor: Tensor) -> None:
        """A kept value is read, or one from before the last cut."""
        if value.op is not None and value.op.index < self._last_cut and value.nbytes:
            value.keep(tensor, self.hooks)
            self.kept_bytes += value.nbytes

    def _position(self) -> int:
        """Where a cut would be now."""
        self.counted[self.clock + 1] = self.recorded
        return self.clock + 1

    def _see_lent(self) -> None:
        """Where gathered parameters have been given back (FSDP2, after each module) is a cut: in backward those of one
        module at a time will be there."""
        lent = [storage for storage in self._lent if storage.nbytes()]
        if len(lent) < len(self._lent):
            self._lent = lent
            self._cut_for_good()

    def _cut_for_good(self) -> None:
        self._last_cut = self._position()
        self.cuts.append(self._last_cut)
        self._whole.clear()

    def _see_view(self, info: Info, args: Any) -> None:
        """What an operator is about to look at has views from here on."""
        viewed = None if info.viewed is None else args[info.viewed]
        if isinstance(viewed, Tensor) and _has_storage(viewed):
            self._whole.pop(_storage_id(viewed), None)
        else:
            self._whole.clear()

    def _look(self, info: Info) -> None:
        """An operator is about to run: is this a moment for a cut?"""

    def _from_outside(self, value: Value, tensor: Tensor, geometry: Geometry, reads: list[Value] | None) -> Value:
        """Hold a value that no recorded operator made. Returns what it is for this reader."""
        hooks = self.hooks
        is_apart = False
        if reads is None and value.op is not None:
            # Autograd saves it before the operator runs that fills it: there is nothing in it yet.
            hooks, is_apart = None, True
        elif self._here["depth"] != self._depth:  # in `opaque()`, where nobody sees whether that is so
            hooks = None
        elif hooks is not None and value.op is None and _graph_task_id() != self._graph_task:
            # A backward inside. In a rerun of the enclosing region it may see this tensor on another storage, which
            # is known already: so it must not be held there.
            hooks, is_apart = None, value.holding(geometry) is None
        if is_apart:
            value = Value(0, None, value.nbytes, None)
        reader, place = (None, None) if reads is None else (self._running, len(reads))
        value.hold(tensor, geometry, hooks, reader, place)
        return value

    def _opaque(self, tensor: Tensor, reads: list[Value] | None) -> Value:
        """What has no storage is held as it is."""
        value = Value(0, None, 0, None)
        value.hold(tensor, None, self.hooks, None if reads is None else self._running)
        if reads is not None:
            reads.append(value)
        return value

    def _register(self, tensor: Tensor, op: Op | None, sid: int, geometry: Geometry | None) -> Value:
        """The storage of the tensor, with this id, has a new value."""
        next_id = self.clock + 1
        self.clock = id = op.index if op is not None and op.index == next_id else next_id  # one int object, mostly
        values, storage = self._values, tensor.untyped_storage()
        if sid not in values:
            # While a weak reference lives, no other storage gets this address.
            self._weak.append(_weak_storage(storage))
        value = values[sid] = Value(id, op, storage.nbytes(), geometry)
        # There is nothing to keep in memory that has only been allocated (DDP's buckets, when it makes them anew).
        if self._fresh is not None and op is not None and value.nbytes and not op.info.only_allocates:
            if op.info.is_cheap and all(read.is_outside and read.state is None for read in op.reads):
                value.state = CHEAP
            (self._fresh if value.state is None else self._cheap).append((sid, value))
        return value

    def _now_outside(self, targets: dict[int, Tensor], gathered: bool = False) -> None:
        """These have been written from outside, or so that a replay can't do it again."""
        note_written(self._around, {*targets})
        for sid, target in targets.items():
            self._register(target, None, sid, None).state = LENT if gathered else VOLATILE
        self._lent += [target.untyped_storage() for target in targets.values() if gathered]
        self._whole.clear()

    # ---- the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        info = INFOS.get(id(func)) or Info(func)
        kwargs = kwargs or _NOTHING
        if info.ignored and not types:
            if info.relays:
                self._see_view(info, args)
            return info.run(*args, **kwargs)
        if self._here["depth"] != self._depth:  # an operator of a recompute (rule 3)
            self._whole.clear()  # whose result may be a view
            return func(*args, **kwargs)
        if self._opened is not None and self._rests(info):
            return func(*args, **kwargs)
        if self._lent:
            self._see_lent()
        if _INDUCTOR in _modules:
            self._whole.clear()  # compiled code makes views that nobody sees
            if not _is_grad_enabled() and _torch.inductor_runs():
                if info.name != "inductor_compiled_code":
                    return func(*args, **kwargs)  # its kernels, which nobody sees, write what this makes
                info, args = info_of_region(info, args[0]), (args[0], *args[1])
            self._notice_writes(args)
            self._notice_writes([*kwargs.values()])
        if self._since >= self._watch:
            self._look(info)
        if self._unsettled:
            self.settle()
        if types and any(_dispatches(t) for t in types):
            if any(issubclass(t, _torch.FakeTensor) for t in types):
                return func(*args, **kwargs)  # their own mode is at work, to find out shapes
            return NotImplemented  # the subclass takes itself apart, and plain tensors come by
        if info.ignored:
            self._see_view(info, args)
            return info.run(*args, **kwargs)
        self._running = func
        if self.log is not None:
            self.log.append((str(func), stack_of_user()))
        reads: list[Value] = []
        targets: dict[int, Tensor] = _NOTHING  # by storage: views of one are written together
        outside: dict[int, Tensor] = _NOTHING
        named, rng, drew = kwargs, None, False
        preserve = self._preserve_rng_state
        if info.is_plain and not kwargs:  # most are
            refs = self._refer(args, reads)
            result = (info.run if not self._has_zeros else _torch.with_zeros(info.run))(*args)
            if type(result) is Tensor and self._ask is None and self._flops is None and _is_grad_enabled():
                op: Any = Op()
                op.args, op.index, op.info = tuple(refs), self.clock + 1, info
                op.reads = op.args if reads == refs else tuple(reads)
                self.recorded += self._output(op, result) > 0
                return result
        else:
            given = args
            if info.targets:
                places = info.targets
                written = args[0] if places == (0,) else [kwargs.get(p) if type(p) is str else args[p] for p in places]
                targets = self._on_storages(written)
                if any((value := self._values.get(sid)) is not None and value.state is UNFILLED for sid in targets):
                    # What it reads may be another part of that: then it has been filled unseen, and is from outside.
                    self._refer([arg for i, arg in enumerate(args) if i not in places], [])
                outside = {sid: targets[sid] for sid in targets if _is_outside(self._values.get(sid), info)}
                if info.communicates or (info.inplace and len(outside) == len(targets)):
                    return self._run_outside(info, targets, args, kwargs)
                given, named = list(args), dict(kwargs)
                for place in places:
                    where: Any = named if type(place) is str else given
                    if type(place) is int or place in kwargs:
                        where[place] = self._refer_to_written(where[place], reads, info, outside)
            elif info.metadata_only and isinstance(args[0], Tensor) and _has_storage(args[0]):
                given = [_like(args[0]), *args[1:]]
            elif info.statistics is not None:
                outside = {}
                given = self._without_statistics(info.statistics, args, outside)
            refs = self._refer(given, reads)  # which lets references pass
            if kwargs:
                named = dict(zip(kwargs, self._refer(named.values(), reads), strict=True))
            for sid in targets:
                if (value := self._values.get(sid)) is not None and value.held is not None:
                    value.freeze(targets[sid])  # what is held of it must not change
            run = info.run if not self._has_zeros else _torch.with_zeros(info.run)
            drew = info.may_draw
            if drew and (preserve or info.custom):
                rng = generators_of(args, kwargs, info.custom and preserve == "all")
            result = run(*args, **kwargs) if kwargs else run(*args)
            drew = drew and (not info.custom or (rng is not None and rng.have_moved()))
        grad_mode = _is_grad_enabled()
        is_special = kwargs or targets or drew or not grad_mode or type(result) is not Tensor
        op = SpecialOp() if is_special else Op()
        op.args, op.index, op.info = tuple(refs), self.clock + 1, info
        op.reads = op.args if reads == refs else tuple(reads)
        if self._flops is not None and not drew and (formula := _torch.flop_formula(func)) is not None:
            self._flops[op.index] = formula(args, kwargs, result)
        if is_special:
            op.kwargs, op.grad_mode, op.rng = named, grad_mode, rng if drew and preserve else None
            op.writes = tuple([self._overwrite(op, sid, targets[sid]) for sid in targets if sid not in outside])
            ids = () if info.inplace else tuple([self._output(op, tensor) for tensor in tensors_of(result)])
            op.outputs = ids if any(ids) else ()
            self.recorded += bool(op.outputs or op.writes)
        elif self._output(op, result):
            self.recorded += 1
        if outside:
            self._now_outside(outside)
        if self._ask is not None or (drew and not preserve):
            made = (*targets.values(), *tensors_of(result))
            self._decide(info, drew, func, args, dict(kwargs), result, made)
        return result

    def _output(self, op: Op, tensor: Tensor) -> int:
        """The value that `op` has made there; 0 if the storage is none, or not new."""
        try:
            sid = _storage_id(tensor)
        except RuntimeError:
            return 0
        if sid in self._values:
            self._whole.pop(sid, None)  # the operator returns a view, or two results that share it
            return 0
        try:
            geometry = geometry_of(tensor)
        except RuntimeError:  # strided nested
            return self._register(tensor, op, sid, None).id
        value = self._whole[sid] = self._register(tensor, op, sid, self._geometries.setdefault(geometry, geometry))
        if op.info.allocates:
            value.state = UNFILLED
        return value.id

    def _without_statistics(self, where: Any, given: Any, updated: dict[int, Tensor]) -> list[Any]:
        """The arguments of a normalisation without the statistics that it updates, which are added to `updated`, and
        with copies of those that it reads: nobody would notice that they are written later."""
        places, training = where
        args = [*given]
        for i in places:
            if isinstance(args[i], Tensor):
                sid = _storage_id(args[i])
                value = self._values.get(sid)
                updates = training is None or given[training]
                for held in value.all_held if updates and value is not None else ():
                    if held.name is not None or self.is_checked:
                        held.freeze()  # something else has read it, besides the node that saves it
                    held.name = held.name or self._running
                if updates:
                    updated[sid], args[i] = args[i], None
                elif value is None or value.op is None:
                    args[i] = without_recording(_torch.clone_storage, args[i])
        return args

    def _refer(self, args: Iterable[Any], reads: list[Value]) -> list[Any]:
        """References in place of the tensors in `args`; notes in `reads` the values that they read."""
        refs: list[Any] = []
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is _Parameter or (kind not in ATOMS and isinstance(arg, Tensor)):
                arg = self.reference(arg, reads)
            elif kind is list or kind is tuple:
                arg = kind(self._refer(arg, reads))
            refs.append(arg)
        return refs

    def _run_outside(self, info: Info, targets: dict[int, Tensor], args: Any, kwargs: Any) -> Any:
        """Run what is never repeated: it only writes something from outside, or others would have to take part. These
        write mostly later, while other code runs; what comes in is held when it is first read: by then it has arrived.
        Whoever read the value before gets a copy."""
        for sid in () if info.gathers else targets:  # what was gathered is as it was before it had been given back
            if (value := self._values.get(sid)) is not None:
                value.freeze(targets[sid])
        result = (info.run if not self._has_zeros else _torch.with_zeros(info.run))(*args, **kwargs)
        self._now_outside(targets, info.gathers)
        for sid, tensor in by_storage(result).items():
            if sid not in self._values:
                self._register(tensor, None, sid, None)
        return result

    def _overwrite(self, op: Op, sid: int, target: Tensor) -> tuple[int, int]:
        """`op` has made a new value of this storage."""
        value, info = self._values[sid], op.info
        new = self._register(target, op, sid, None if info.moves else value.geometry)
        if self._whole.pop(sid, None) is not None and info.targets == (0,) and not info.moves:  # `out=` resizes
            self._whole[sid] = new
        if _INDUCTOR in _modules:
            self._written[sid] = _torch.version(target) + 1
        is_partly = target.nbytes < new.nbytes if info.overwrites else info.allocates and new.nbytes > value.nbytes
        if is_partly and (value.state is UNFILLED or info.allocates):  # the latter is `resize_`
            new.state = UNFILLED
        return value.id, new.id

    def _notice_writes(self, args: Any) -> None:
        """Compiled code that no operator shows leaves a trace of what it writes in version counters alone."""
        for sid, tensor in by_storage(args).items():
            value = self._values.get(sid)
            if value is not None and value.op is not None and _torch.version(tensor) > self._written.get(sid, 0):
                self._now_outside(self._on_storages(tensor))

    def _refer_to_written(self, arg: Any, reads: list[Value], info: Info, outside: dict[int, Tensor]) -> Any:
        if type(arg) is list or type(arg) is tuple:
            return [self._refer_to_written(a, reads, info, outside) for a in arg]
        if not isinstance(arg, Tensor) or not _has_storage(arg):
            return arg
        sid = _storage_id(arg)
        if sid in outside:
            return _like(arg) if info.overwrites else Scratch(self.reference(arg, reads))
        # Not `reference`: a buffer that is only being filled need not be held.
        value = self._values[sid]
        if not (info.overwrites and arg.nbytes == value.nbytes) and value.state is not UNFILLED:
            self._read_across(value, arg)
        reads.append(value)
        geometry = value.geometry if sid in self._whole else geometry_of(arg)
        return value if geometry == value.geometry else Ref(value, cast(Geometry, geometry), None)

    def _on_storages(self, tensors: Any) -> dict[int, Tensor]:
        """What is about to be written."""
        return by_storage(tensors)


def _is_outside(value: Value | None, info: Info) -> bool:
    """Whether what is written can't be made again: it was there before, or something unseen has filled it."""
    fills = info.overwrites or info.allocates
    return value is None or value.is_outside or (value.state is UNFILLED and not fills)


def _is_cheap_to_hold(value: Value) -> bool:
    """Whether it is smaller than the state of the generators from which it, and nothing else, would be drawn again."""
    op = value.op
    while op is not None and op.rng is None:
        op = op.reads[0].op if op.writes and op.reads else None
    return op is not None and op.rng is not None and value.nbytes <= op.rng.nbytes and len(op.outputs or ()) < 2


def by_storage(tensors: Any) -> dict[int, Tensor]:
    """One tensor on each storage that there is among these."""
    if type(tensors) is Tensor and _has_storage(tensors):
        return {_storage_id(tensors): tensors}
    return {_storage_id(tensor): tensor for tensor in tensors_of(tensors) if _has_storage(tensor)}


def _dispatches(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor has a `__torch_dispatch__` of its own. (A `DeviceMesh` comes by, too: no tensor.)"""
    return getattr(kind, "__torch_dispatch__", _plain_dispatch) is not _plain_dispatch


def _like(tensor: Tensor) -> Callable[[], Tensor]:
    """Makes what stands for an argument of which an operator reads only the metadata, or that it overwrites."""
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
