"""Recording: which operators a block ran, on which values.

The tape sits below autograd, autocast and function modes, where every tensor is plain data. A *value* is one storage
at one moment: an operator that writes in place makes a new value of the same storage. How a tensor lies on its
storage (size, stride, offset, dtype, conj and neg bits) is part of the reference to the value, so views are free and
pure view operators are not recorded at all.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import _torch
from ._ambient import Generators, has_rng, read_switches
from ._engine import Held, Name
from ._offload import Destination, Mover
from ._region import Region, aside, thread, without_recording
from ._tree import ATOMS
from ._where import stack_of_user


class Value:
    """One storage between two writes: `op` made it, or it is `held` (by geometry; one alias serves all)."""

    __slots__ = ("held", "id", "kept", "nbytes", "op", "unwritten", "volatile")

    def __init__(self, id: int, op: Op | None, nbytes: int) -> None:
        self.id = id
        self.op = op
        self.nbytes = nbytes
        self.unwritten = False  # allocated, and not yet filled by a recorded operator
        self.kept = False  # held although an operator made it
        self.volatile = False  # from outside and written by the region: others will write it again, so hold copies
        self.held: dict[Any, Held] = _NOTHING if op is not None else {}

    def hold(self, tensor: Tensor, geometry: Geometry, hooks: Saver, name: Name) -> None:
        """Hold the value as it is now. `tensor` lies on it like that."""
        if self.op is not None:
            self.op, self.held, self.unwritten = None, {}, False
        held = self.held.get(geometry)
        if held is None and self.held:
            # An alias of the storage, from which any geometry can be made, will do.
            held = next((held for held in self.held.values() if not held.is_packed), None)
        if held is not None:
            if held.name is None:
                held.name = name
            return
        self.held[geometry] = held = Held(tensor, hooks, name)
        if self.volatile:
            held.freeze()

    def keep(self, tensor: Tensor, hooks: Saver) -> None:
        """Hold the value, although an operator makes it. `tensor` covers the storage."""
        self.hold(tensor, geometry_of(tensor), hooks, "a kept tensor")
        self.kept = True

    def pack(self, hooks: Saver) -> None:
        """Save what was kept in what encloses the region."""
        (held,) = self.held.values()
        if not held.is_packed:
            self.held = {}
            self.keep(whole(held.alias, hooks), hooks)

    def hold_part(self, tensor: Tensor) -> None:
        """Hold what lies on the value like `tensor`, of which alone it is known that nothing has overwritten it."""
        self.held = {geometry_of(tensor): Held(tensor, None, "a kept tensor")}

    def give_back(self, op: Op) -> None:
        """Keep it no longer: `op` makes it."""
        self.op, self.held, self.kept = op, _NOTHING, False

    @property
    def is_parameter(self) -> bool:
        return any(held.is_parameter for held in self.held.values())


_NOTHING: dict[Any, Held] = {}
_NOTHING_RECENT = (None, None)

# Size, stride, offset and dtype of a tensor on its storage, and whether its conj (1) and neg (2) bits are set.
Geometry = tuple[torch.Size, tuple[int, ...], Any, torch.dtype, int]


def geometry_of(tensor: Tensor) -> Geometry:
    """How a tensor lies on its storage."""
    dtype = tensor.dtype
    bits = 2 if tensor.is_neg() else 0
    if dtype.is_complex and tensor.is_conj():
        bits += 1
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), dtype, bits)


class Ref(NamedTuple):
    """A tensor on a value."""

    value: Value
    geometry: Geometry
    kind: type[Tensor] | None  # a subclass that only decorates a plain tensor


_new_ref: Callable[[tuple[Value, Geometry, type[Tensor] | None]], Ref] = partial(tuple.__new__, Ref)  # cheaper


class Shape:
    """Stands for an argument of which an operator reads only the metadata, or that it overwrites."""

    __slots__ = ("device", "dtype", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.device = tensor.device


class Scratch:
    """Stands for an argument from outside that an operator writes: replay lets it write a copy."""

    __slots__ = ("ref",)

    def __init__(self, ref: Ref) -> None:
        self.ref = ref


class Wrapped:
    """A wrapper subclass, taken apart into references."""

    __slots__ = ("context", "kind", "parts", "size", "stride")

    def __init__(self, tensor: Any, reference: Callable[[Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size, self.stride = tensor.size(), tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}  # a `DeviceMesh` may be one of them
        self.parts = {name: reference(part) if isinstance(part, Tensor) else part for name, part in parts.items()}


class Op:
    """One recorded operator call. It names the values it makes by id: a strong reference would be a cycle."""

    __slots__ = ("args", "func", "grad_mode", "index", "kwargs", "outputs", "reads", "rng", "writes")

    func: Any
    args: list[Any]  # with a Ref, Shape or Scratch in place of each tensor
    kwargs: dict[str, Any]
    reads: list[Value]
    grad_mode: bool  # kernels may look at it
    index: int  # position on the tape
    rng: Generators | None  # where the generators stood, for a random operator
    outputs: Sequence[int]  # for each tensor of the result the id of the value that it is; 0 if not a new one
    writes: list[tuple[int, int]]  # (id of the value that is overwritten, id of the value that it becomes)


class Info:
    """What the schema of an operator says that recording needs; found once per operator."""

    __slots__ = (
        "allocates",
        "communicates",
        "custom",
        "hidden",
        "ignored",
        "inplace",
        "may_draw",
        "metadata_only",
        "overwrites",
        "random",
        "run",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        # Past one Python call, where there is one to pass.
        self.run = _torch.quick_call(func)
        self.writes: tuple[Any, ...] = ()
        self.ignored = self.inplace = self.random = False
        name = func.name() if isinstance(func, _torch.OpOverload) else str(func)
        self.hidden = HIDDEN_WRITES.get(name.partition(".")[0])
        base = name.partition(".")[0].removeprefix("aten::")
        self.communicates = name.partition("::")[0] in COMMUNICATION
        if self.communicates:
            # Without a word in the schema; and most do it later, while other code runs.
            self.hidden = lambda args, kwargs: (0,)
        # Custom operators may draw random numbers without torch's tag: look whether the generators have moved.
        self.custom = name.partition("::")[0] not in ("aten", "prim", "prims")
        self.may_draw = self.custom
        self.allocates = base in ALLOCATES
        self.metadata_only = base in METADATA_ONLY or name == "aten::bernoulli.p"
        self.overwrites = base in OVERWRITES
        if schema is None:
            return
        arguments = schema.arguments
        self.writes = tuple(
            a.name if a.kwarg_only else i
            for i, a in enumerate(arguments)
            if a.alias_info is not None and a.alias_info.is_write
        )
        self.overwrites = self.overwrites or all(type(w) is str for w in self.writes)
        if self.hidden is not None and self.writes:  # with `out=`
            hidden, shown = self.hidden, self.writes
            self.hidden = lambda args, kwargs: (*hidden(args, kwargs), *shown)
            self.overwrites = False
        results = [r for r in schema.returns if "Tensor" in str(r.type)]
        aliases = [r.alias_info for r in results]
        views = all(a is not None and not a.is_write for a in aliases)
        # Views share their storage with an argument, which is how values are found; other results that are no
        # tensors were decided in the forward.
        self.ignored = base in IGNORED or (not self.writes and self.hidden is None and views)
        self.inplace = bool(self.writes) and all(a is not None and a.is_write for a in aliases)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.may_draw = self.random or self.custom


def info_of(func: Any) -> Info:
    info = _INFOS.get(func)
    if info is None:
        info = _INFOS[func] = Info(func)
    return info


# Operators that are not recorded: `set_` gives a tensor another storage and writes none; the sizes of a nested tensor
# are asked for where an exception would end the process; efficient zeros are noticed when they are read.
IGNORED = frozenset({"set_", "_nested_tensor_size", "_efficientzerotensor"})
# Operators that allocate without filling.
ALLOCATES = frozenset(
    {
        "empty",
        "empty_quantized",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
    }
)
# Operators whose first argument only lends its metadata. Without this a dropout mask would drag the matrix product
# before it into every replay.
METADATA_ONLY = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
    | {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}
)
# In-place operators that don't read what they overwrite.
OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_"}
    | {"cauchy_", "geometric_"}
)


def _batch_norm_statistics(training: int) -> Callable[[Any, Any], tuple[int, ...]]:
    return lambda args, kwargs: (3, 4) if len(args) <= training or args[training] else ()


# Operators that write arguments without saying so in their schema, and in no version counter: which ones, given a call.
HIDDEN_WRITES: dict[str, Callable[[Any, Any], tuple[int, ...]]] = {
    "aten::native_batch_norm": _batch_norm_statistics(5),
    "aten::cudnn_batch_norm": _batch_norm_statistics(5),
    "aten::miopen_batch_norm": _batch_norm_statistics(5),
    "aten::batch_norm_gather_stats": lambda args, kwargs: (3, 4),
    "aten::batch_norm_gather_stats_with_counts": lambda args, kwargs: (3, 4),
    "aten::batch_norm_update_stats": lambda args, kwargs: (1, 2),
}
# Operators that other processes take part in.
COMMUNICATION = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})
# Where these take the statistics that a later call may write.
STATISTICS = (3, 4)

_INFOS: dict[Any, Info] = {}
_NO_KWARGS: dict[str, Any] = {}
_NO_WRITES: list[tuple[int, int]] = []
_NO_STORAGES: frozenset[int] = frozenset()
_FIRST = (0,)
_getframe = sys._getframe
_storage_id, _id_of_storage = _torch.storage_id, _torch.id_of_storage
_weak_storage = _torch.weak_storage
_Parameter = nn.Parameter
_plain_dispatch = Tensor.__torch_dispatch__
_is_grad_enabled = torch.is_grad_enabled
_has_storage = _torch.has_storage
_graph_task_id = _torch.graph_task_id


# What to do with a value: False to recompute it, True to keep it, or where it is kept.
Answer = bool | Destination
# What saves a value from outside, or a kept one: hooks of what encloses the region, or the way to somewhere else.
Saver = _torch.Hooks | Mover | None


class Limits(NamedTuple):
    """What a replay may hold, in bytes, of what autograd will ask for later."""

    piece: int  # delivered at once
    stored: int  # to start from once more


class Places(NamedTuple):
    """Where a policy puts things about which it is not asked; None: where they would be without it."""

    kept: Destination | None  # what `keep` is given
    saved: Destination | None  # all that autograd saves, which is then kept
    inputs: Destination | None


NOWHERE = Places(None, None, None)


class Policy(Protocol):
    """What the tape asks."""

    @property
    def places(self) -> Places: ...

    @property
    def on_op(self) -> Callable[[Any, Any, Any, Any], Answer] | None:
        """Given (operator, args, kwargs, result)."""

    def on_tag(self, name: str) -> Answer: ...


class Tape(TorchDispatchMode, Region):
    """Records while it is entered: one per region. Afterwards what it recorded lives on in the holders alone."""

    supports_higher_order_operators = True
    _frames = 1  # from where an operator is recorded to the code that runs it

    def __init__(
        self,
        hooks: _torch.Hooks | None,
        preserve_rng_state: bool | str,
        log: list[tuple[str, str]] | None,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self.recorded = 0
        self.saved_bytes = 0
        self.kept_bytes = 0
        self._hooks: Saver = hooks
        self._preserve_rng_state = preserve_rng_state
        self._here = here = thread.__dict__
        self.outer = outer = here["region"]
        self.policy: Policy | None = outer.policy if policy is None and outer is not None else policy
        self._ask = None if self.policy is None else self.policy.on_op
        self.movers: dict[Destination, Mover] = {}
        self._keeper: Mover | None = None
        self._save_at: Mover | None = None
        if self.policy is not None and self.policy.places is not NOWHERE:
            kept, saved, inputs = self.policy.places
            self._keeper = None if kept is None else self._mover(kept)
            if inputs is not None:
                self._hooks = self._mover(inputs)
            self._save_at = None if saved is None else self._mover(saved)
        self._inner = 0  # how many tapes have been entered just inside this one: they ask for themselves
        self._recent: tuple[Any, Any] = _NOTHING_RECENT  # a tensor that has just been referred to, and how
        self._recent_at: Any = None  # where Python code was
        self._running: Any = None  # the operator that reads now, for messages
        self._depth = here["depth"]
        self._graph_task = _graph_task_id()  # of the rerun that this is part of, if of one
        self._is_open = True
        self.switches = read_switches()
        self._values: dict[int, Value] = {}  # by storage: its value now
        self._refs: dict[int, Ref] = {}  # by storage: the last reference
        self._geometries: dict[Geometry, Geometry] = {}  # equal ones are one object: there are few, and many references
        self._weak: list[int] = []
        self._saved: set[int] = set()
        self._pending: set[Value] = set()  # saved while still unwritten, and read by no operator yet
        self.cuts: list[int] = []  # where segments begin: positions on the tape, in order
        self._ids = 0
        self._has_zeros = False  # has seen efficient zeros, which have no memory
        self._unsettled: list[tuple[Answer, Tensor]] = []  # written just now, and to be kept

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps `__torch_dispatch__` once more, and every operator pays for it.
        return False

    def adopt(self, tensor: Tensor, value: Value) -> None:
        """While the block still runs, a backward inside it has brought `value` back on another storage. What reads
        that storage reads the value: holding it once more would be a waste, and a slot that no rerun would have."""
        if self._is_open and _has_storage(tensor) and tensor.untyped_storage().nbytes() == value.nbytes:
            sid = _storage_id(tensor)
            if sid not in self._values:
                self._weak.append(_weak_storage(tensor.untyped_storage()))
                self._values[sid] = value

    def close(self) -> None:
        """Drop what is needed only while recording."""
        try:
            self.settle()
            for mover in self.movers.values():
                mover.settle()
        finally:
            self._is_open = False
            self.outer = None
            self._recent = _NOTHING_RECENT
            self._values.clear()
            self._refs.clear()
            self._geometries.clear()
            self._saved.clear()
            self._pending.clear()
            for weak in self._weak:
                _torch.free_weak_storage(weak)
            self._weak.clear()

    def _forget_recent(self) -> None:
        self._recent = _NOTHING_RECENT

    def settle(self) -> None:
        """Keep what the last write has made: it has the version now that it should have."""
        while self._unsettled:
            answer, tensor = self._unsettled.pop(0)
            self._obey(answer, (tensor,))

    def save(self, tensor: Tensor) -> Any:
        """What a holder needs to bring `tensor` back."""
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            return Wrapped(tensor, self.save)
        ref = self.reference(tensor, is_read=False)
        if type(ref) is Ref:
            value = ref[0]
            if value.op is not None and not value.unwritten:
                # Most operators read next what they have saved. Those that don't: the tensor may be another by then.
                self._recent, self._recent_at = (tensor, ref), _position(self._frames + 1)
            if value.id not in self._saved:
                self._saved.add(value.id)
                if value.op is not None or not value.is_parameter:
                    self.saved_bytes += value.nbytes
        return ref

    def _mover(self, destination: Destination) -> Mover:
        mover = self.movers.get(destination)
        if mover is None:
            mover = self.movers[destination] = Mover(destination)
        return mover

    @property
    def saver(self) -> Callable[[Tensor], Any]:
        """How to save: what all holders of the region are made with."""
        return self.save if self._save_at is None else self._save_elsewhere

    def _save_elsewhere(self, tensor: Tensor) -> Any:
        """What a holder needs to bring `tensor` back, which is kept."""
        ref = self.save(tensor)
        self.keep_at(tensor, self._save_at)
        return ref

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold a value: recompute starts from it, and never crosses it."""
        self.keep_at(tensor, self._keeper)
        return tensor

    def keep_at(self, tensor: Tensor, mover: Mover | None) -> None:
        """The same; `mover` says where, None: as an input."""
        if hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                part = getattr(tensor, name)
                if isinstance(part, Tensor):
                    self.keep_at(part, mover)
        elif _torch.has_storage(tensor):
            value = self._values.get(_torch.storage_id(tensor))
            # There is nothing yet in memory that has only been allocated.
            if value is not None and value.op is not None and not (value.unwritten and value.nbytes):
                hooks = self._hooks if mover is None or not mover.takes(tensor) else mover
                value.keep(whole(tensor, hooks), hooks)
                self.kept_bytes += value.nbytes
                self.cuts.append(self.recorded)

    def keeps_now(self) -> int | None:
        """How many bytes are kept at this moment of the block, where that is known."""
        return None

    @property
    def limits(self) -> Limits | None:
        """Bounds for a replay, if it has any."""
        return None

    @property
    def complaint(self) -> str | None:
        """What to warn of when the block ends."""
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
        if self.outer is None or outer is None:
            return function(*args, **kwargs)
        with aside():
            return self.outer.once(function, args, kwargs)

    def keep_for_inner(self, tensor: Tensor) -> None:
        self.keep(tensor)
        if self.outer is not None:
            self.outer.keep_for_inner(tensor)

    def look_away(self) -> None:
        """Whatever is alive may be written unseen: what has been read of it must not change, and whoever reads it from
        here on reads something from outside."""
        self.settle()
        self._forget_recent()
        parameters = {sid: value for sid, value in self._values.items() if value.is_parameter}
        self._freeze(value for sid, value in self._values.items() if sid not in parameters)
        self._values = parameters
        self._refs.clear()
        self._pending.clear()
        if self.outer is not None:
            self.outer.look_away()

    def yield_to_inner(self, change: int) -> None:
        self._inner += change

    def _obey(self, answer: Answer, tensors: Iterable[Tensor]) -> None:
        """Do with these what the policy has answered."""
        if not answer:
            return
        mover = None if answer is True else self._mover(answer)
        for tensor in tensors:
            self.keep_at(tensor, mover)
            if mover is None and self.outer is not None:
                self.outer.keep_for_inner(tensor)

    def reference(self, tensor: Tensor, is_read: bool = True) -> Any:
        """A reference to what `tensor` reads now. Its value is held if no recorded operator made it."""
        kind: Any = type(tensor)
        if kind is Tensor or kind is _Parameter:
            kind = None
        elif _dispatches(kind):  # opaque
            return Held(tensor, self._hooks, self._running if is_read else None)
        try:
            sid = _storage_id(tensor)
            geometry = geometry_of(tensor)
        except RuntimeError:  # sparse, MKLDNN, strided nested: no storage, or no geometry
            return Held(tensor, self._hooks, self._running if is_read else None)
        value = self._values.get(sid)
        if value is None:
            value = self._register(tensor.untyped_storage(), None, sid)
            self._has_zeros = self._has_zeros or _torch.is_zeros(tensor)
        if (value.op is None and not value.kept) or (value.unwritten and value.nbytes):
            # From outside; or allocated here and filled by something unseen (a raw kernel, ctypes, NumPy).
            held = value.held.get(geometry)
            if is_read and held is not None and held.name is not None and not self._pending:
                return self._ref(sid, value, geometry, kind)  # known
            hooks = self._hooks
            if is_read:
                self._pending.discard(value)
            elif value.op is not None:
                self._pending.add(value)
                hooks = None  # there is nothing in it yet that could be saved elsewhere
            elif self._here["depth"] != self._depth and not tensor.requires_grad and tensor._version == 0:
                hooks = None  # nor here, perhaps: what fills it is not recorded (`opaque`)
            if hooks is not None and value.op is None and _graph_task_id() != self._graph_task:
                # A backward inside. In a rerun of the enclosing region it may see this tensor on another storage, which
                # is known already: so it must not be held there.
                if geometry not in value.held and all(held.is_packed for held in value.held.values()):
                    value = Value(0, None, value.nbytes)
                hooks = None
            # The operator for which autograd saves it has still to come.
            value.hold(tensor, geometry, hooks, self._running if is_read else None)
        return self._ref(sid, value, geometry, kind)

    def _ref(self, sid: int, value: Value, geometry: Geometry, kind: type[Tensor] | None) -> Ref:
        """A reference. Equal ones share what they can: each object is one more for the garbage collector."""
        refs = self._refs
        ref = refs.get(sid)
        if ref is None or ref[0] is not value or ref[1] != geometry or ref[2] is not kind:
            geometry = self._geometries.setdefault(geometry, geometry)
            ref = refs[sid] = _new_ref((value, geometry, kind))
        return ref

    def _opaque(self, held: Held) -> Value:
        value = Value(0, None, 0)
        value.held[None] = held
        return value

    def _register(self, storage: Any, op: Op | None, sid: int) -> Value:
        """The storage, with this id, has a new value."""
        self._ids = id = self._ids + 1
        value = Value(id, op, storage.nbytes())
        if sid not in self._values:
            # While a weak reference lives, no other storage gets this address.
            self._weak.append(_weak_storage(storage))
        else:
            self._refs.pop(sid, None)  # it would hold the value before
        self._values[sid] = value
        return value

    # ---- the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = _NO_KWARGS
        if self._here["depth"] != self._depth:  # an operator of a recompute (rule 3)
            return func(*args, **kwargs)
        if self._unsettled:
            self.settle()
        info = _INFOS.get(func) or info_of(func)
        if types and any(_dispatches(t) for t in types):
            if any(issubclass(t, _torch.FakeTensor) for t in types):
                return func(*args, **kwargs)  # their own mode is at work, to find out shapes
            return NotImplemented  # the subclass takes itself apart, and plain tensors come by
        if info.ignored:
            self._recent = _NOTHING_RECENT
            return info.run(*args, **kwargs)
        self._running = func
        if self.log is not None:
            self.log.append((str(func), stack_of_user()))
        written = info.writes if info.hidden is None else info.hidden(args, kwargs)
        if written:
            self._recent = _NOTHING_RECENT
            return self._record_write(func, info, written, args, kwargs)
        if self._recent is not _NOTHING_RECENT and self._recent_at != _position(self._frames):
            self._recent = _NOTHING_RECENT
        given = args
        if info.hidden is not None:
            args = self._with_copies(args)
        op = Op()
        op.func = info.run
        reads: list[Value] = []
        op.reads = reads
        if info.metadata_only and isinstance(args[0], Tensor) and _has_storage(args[0]):
            op.args = [Shape(args[0]), *self._refer(args[1:], reads)]
        else:
            op.args = self._refer(args, reads)
        op.kwargs = dict(zip(kwargs, self._refer(kwargs.values(), reads), strict=True)) if kwargs else kwargs
        op.rng = self._stash_generators(info, args, kwargs) if info.may_draw else None
        op.grad_mode = _is_grad_enabled()
        op.index = self.recorded
        self._recent = _NOTHING_RECENT
        run = info.run if not self._has_zeros else _torch.with_zeros(info.run)
        result = run(*given, **kwargs)
        drew = info.random if op.rng is None else self._drew(info, op)
        op.writes = _NO_WRITES
        self._add_outputs(op, result, info.allocates)
        if self._ask is not None or (drew and not self._preserve_rng_state):
            self._choose(info, drew, func, args, dict(kwargs), result, tensors_of(result))
        return result

    def _with_copies(self, given: Any) -> list[Any]:
        """The arguments, with copies of statistics from outside: nobody would notice that they are written later."""
        args = list[Any](given)
        for i in STATISTICS:
            if i < len(args) and isinstance(args[i], Tensor):
                value = self._values.get(_storage_id(args[i]))
                if value is None or value.op is None:
                    args[i] = without_recording(_torch.clone_storage, args[i])
                for held in () if value is None else value.held.values():
                    held.name = held.name or self._running
        return args

    def _stash_generators(self, info: Info, args: Any, kwargs: Any) -> Generators | None:
        """Where the generators stand that the operator draws from, or may draw from."""
        if info.custom or (info.random and self._preserve_rng_state):
            return stash_generators(args, kwargs, info.custom and self._preserve_rng_state == "all")
        return None

    def _drew(self, info: Info, op: Op) -> bool:
        """Whether an operator has drawn random numbers; forgets the state of the generators if replay needs it not."""
        drew = not info.custom or (op.rng is not None and op.rng.have_moved())
        if not drew or not self._preserve_rng_state:
            op.rng = None
        return drew

    def _choose(
        self, info: Info, drew: bool, func: Any, args: Any, kwargs: Any, result: Any, made: Iterable[Tensor]
    ) -> None:
        """Keep what the operator has made, if it must be or the policy says so."""
        if drew and not self._preserve_rng_state:
            answer: Answer = True
        elif self._ask is not None and not self._inner and _graph_task_id() == self._graph_task:
            # Not in a backward inside, which makes others' hooks call functions again at times that differ in a rerun.
            answer = self._ask(func, args, kwargs, result)
        else:
            return
        if info.writes:  # when the operator has returned, which has still to count versions up
            self._unsettled += [(answer, tensor) for tensor in made]
        else:
            self._obey(answer, made)

    def _refer(self, args: Iterable[Any], reads: list[Value]) -> list[Any]:
        """References in place of the tensors in `args`; notes in `reads` the values that they read."""
        saved = []
        recent, recent_ref = self._recent
        for arg in args:
            kind = type(arg)
            if arg is recent and arg is not None:
                reads.append(recent_ref[0])
                saved.append(recent_ref)
            elif kind is Tensor or kind is _Parameter or (kind not in ATOMS and isinstance(arg, Tensor)):
                ref = self.reference(arg)
                reads.append(ref[0] if type(ref) is Ref else self._opaque(ref))
                saved.append(ref)
            elif kind is list or kind is tuple:
                saved.append(kind(self._refer(arg, reads)))
            else:
                saved.append(arg)
        return saved

    def _add_outputs(self, op: Op, result: Any, unwritten: bool = False) -> None:
        """The storages in `result` that are new are values that `op` makes."""
        values = self._values
        if type(result) is Tensor and _has_storage(result):  # nearly always
            storage = result.untyped_storage()
            sid = _id_of_storage(storage)
            if sid not in values:
                value = self._register(storage, op, sid)
                value.unwritten = unwritten
                op.outputs = (value.id,)
                self.recorded += 1
                return
        outputs = []
        for tensor in tensors_of(result):
            id = 0
            if _has_storage(tensor):
                sid = _storage_id(tensor)
                if sid not in values:
                    value = self._register(tensor.untyped_storage(), op, sid)
                    value.unwritten = unwritten
                    id = value.id
            outputs.append(id)
        op.outputs = outputs if any(outputs) else ()
        if op.outputs or op.writes:
            self.recorded += 1

    def _record_communication(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Not repeated, since others would have to take part. What comes in is held when it is first read: by then it
        has arrived."""
        name = func.overloadpacket.__name__
        targets: dict[int, Tensor] = {}
        if args and name.endswith("_") and name != "monitored_barrier_":
            targets.update((_storage_id(t), t) for t in tensors_of(args[0]) if _has_storage(t))
        targets.update((_storage_id(t), t) for t in tensors_of(kwargs.get("out")) if _has_storage(t))
        self._freeze([self._values.get(sid) for sid in targets])
        result = func(*args, **kwargs)
        for sid, target in targets.items():
            self._register(target.untyped_storage(), None, sid).volatile = True
        for tensor in tensors_of(result):
            if _has_storage(tensor) and _storage_id(tensor) not in self._values:
                self._register(tensor.untyped_storage(), None, _storage_id(tensor))
        return result

    def _record_write(self, func: Any, info: Info, written: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        if info.communicates:
            return self._record_communication(func, args, kwargs)
        run = func if not self._has_zeros else _torch.with_zeros(func)
        is_simple = written == _FIRST and args and type(args[0]) is Tensor and _has_storage(args[0])  # nearly always
        targets: dict[int, Tensor] = {}  # by storage: views of one are written together
        if is_simple:
            targets[_storage_id(args[0])] = args[0]
        else:
            places = dict(enumerate(args)) | kwargs
            for place in written:
                targets.update((_storage_id(t), t) for t in tensors_of(places.get(place)) if _has_storage(t))
        old = {sid: self._values.get(sid) for sid in targets}
        # Filled by an operator whose node has saved them just before: what it saved is what the operator leaves there.
        pending = {sid for sid, value in old.items() if value in self._pending} if self._pending else _NO_STORAGES
        outside = {sid for sid, value in old.items() if self._is_outside(value, info)}
        if info.inplace and len(outside) == len(targets):
            # It only writes something from outside: never repeated. Whoever read the value before gets a copy.
            self._freeze(value for sid, value in old.items() if sid not in pending)
            result = run(*args, **kwargs)
            for sid, target in targets.items():
                if sid not in pending:
                    self._register(target.untyped_storage(), None, sid).volatile = True
            return result
        op = Op()
        op.func = info.run
        reads: list[Value] = []
        op.reads = reads
        if is_simple:
            op.args = [self._refer_to_written(args[0], reads, info, outside), *self._refer(args[1:], reads)]
            op.kwargs = dict(zip(kwargs, self._refer(kwargs.values(), reads), strict=True)) if kwargs else kwargs
        else:
            saved = {
                place: self._refer_to_written(arg, reads, info, outside)
                if place in written
                else self._refer((arg,), reads)[0]
                for place, arg in places.items()
            }
            op.args = [saved[i] for i in range(len(args))]
            op.kwargs = {name: saved[name] for name in kwargs}
        op.rng = self._stash_generators(info, args, kwargs) if info.may_draw else None
        op.grad_mode = _is_grad_enabled()
        op.index = self.recorded
        op.writes = []
        self._freeze([self._values.get(sid) for sid in targets if sid not in pending])
        result = run(*args, **kwargs)
        drew = info.random if op.rng is None else self._drew(info, op)
        for sid, target in targets.items():
            value = old[sid]
            if sid in outside or value is None:
                if sid not in pending:
                    self._register(target.untyped_storage(), None, sid).volatile = True
                continue
            new = self._register(target.untyped_storage(), op, sid)
            if info.overwrites:
                new.unwritten = value.unwritten and target.numel() * target.element_size() < new.nbytes
            elif info.allocates:  # resize_
                new.unwritten = new.nbytes > value.nbytes
            op.writes.append((value.id, new.id))
        self._add_outputs(op, result)
        if self._ask is not None or (drew and not self._preserve_rng_state):
            self._choose(info, drew, func, args, kwargs, result, (*targets.values(), *tensors_of(result)))
        return result

    @staticmethod
    def _is_outside(value: Value | None, info: Info) -> bool:
        """Whether what is written can't be made again: it was there before, or something unseen has filled it."""
        if value is None or (value.op is None and not value.kept):
            return True
        return value.unwritten and not (info.overwrites or info.allocates)

    def _refer_to_written(self, arg: Any, reads: list[Value], info: Info, outside: set[int]) -> Any:
        if not isinstance(arg, Tensor):
            if type(arg) is list or type(arg) is tuple:
                return [self._refer_to_written(a, reads, info, outside) for a in arg]
            return arg
        if not _torch.has_storage(arg):
            return self.reference(arg)
        sid = _torch.storage_id(arg)
        if sid not in outside:
            # Not `reference`: a buffer that is only being filled need not be held.
            ref = self._ref(sid, self._values[sid], geometry_of(arg), None)
            reads.append(ref.value)
            return ref
        if info.overwrites:
            return Shape(arg)
        ref = self.reference(arg)
        reads.append(ref.value)
        return Scratch(ref)

    @staticmethod
    def _freeze(values: Iterable[Value | None]) -> None:
        """Before a write: what is held of these values must not change with it."""
        for value in values:
            if value is not None and value.held:
                for held in value.held.values():
                    held.freeze()


def _position(depth: int) -> tuple[int, int] | None:
    """Which call of Python code is running, that many frames outwards, and where it is; None if there is none."""
    try:
        frame = _getframe(depth + 1)
    except ValueError:
        return None
    return id(frame), frame.f_lasti


def name_of(op: Op) -> str:
    """The operator as messages name it."""
    return next((str(func) for func, info in _INFOS.items() if info.run is op.func), str(op.func))


def _dispatches(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor has a `__torch_dispatch__` of its own. (A `DeviceMesh` comes by, too: no tensor.)"""
    return getattr(kind, "__torch_dispatch__", _plain_dispatch) is not _plain_dispatch


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in an operator's argument or result, in order."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) is tuple or type(value) is list:
        for part in value:
            yield from tensors_of(part)


def whole(tensor: Tensor, hooks: Saver) -> Tensor:
    """A tensor that covers the storage of `tensor`, so that packing it loses nothing."""
    if type(hooks) is Mover:
        return cast(Tensor, without_recording(bytes_of, tensor))
    if hooks is None or tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
        return tensor
    return cast(Tensor, without_recording(bytes_of, tensor))


def bytes_of(tensor: Tensor) -> Tensor:
    """All of the storage of `tensor`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def stash_generators(args: Any, kwargs: dict[str, Any], python: bool = False) -> Generators:
    """The state of the generator that a random operator is about to draw from; with `python` also those of Python and
    NumPy."""
    generators = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)]
    if generators:
        return Generators(False, (), generators, python)
    if kwargs.get("device") is not None:
        devices = {torch.device(kwargs["device"])}
    else:
        devices = {t.device for a in (*args, *kwargs.values()) for t in tensors_of(a)}
    others = [device for device in devices if has_rng(device)]
    return Generators(not others, others, (), python)
