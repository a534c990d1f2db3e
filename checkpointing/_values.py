"""Values and operators, as a tape refers to them: one graph that points only backwards.

A *value* is one storage at one moment: an operator that writes in place makes a new value of the same storage. How a
tensor lies on its storage is part of the reference to the value, so views are free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import _torch
from ._ambient import Generators
from ._engine import Name
from ._held import Held, Saver, hold
from ._ops import Info
from ._region import without_recording

# Size, stride, offset and dtype of a tensor on its storage, and whether its conj (1) and neg (2) bits are set.
Geometry = tuple[torch.Size, tuple[int, ...], Any, torch.dtype, int]

# What else may be said of a value:
UNFILLED = "allocated, and not yet filled by a recorded operator"
KEPT = "held, all of the storage, although an operator made it"
LENT = "the memory of gathered parameters, which are referenced as all are"
CHEAP = "one cheap operator makes it from something held anyway: as good as held"
VOLATILE = "from outside and written by the region: others will write it again, so copies are read"


class Value:
    """One storage between two writes: `op` made it, or it is `held`."""

    __slots__ = ("geometry", "held", "id", "nbytes", "op", "parts", "saved", "state")

    def __init__(self, id: int, op: Op | None, nbytes: int, geometry: Geometry | None) -> None:
        self.id = id
        self.op = op
        self.nbytes = nbytes
        self.geometry = geometry  # of the tensor that `op` makes (None: not known), or of what is held from outside
        self.held: Held | None = None
        self.parts: dict[Geometry, Held] | None = None  # what enclosing hooks have packed besides
        self.saved = 0  # how many bytes of it autograd has saved
        self.state: str | None = None

    def hold(self, tensor: Tensor, geometry: Geometry | None, hooks: Saver, reader: Name, place: object = None) -> None:
        """Hold the value, which is from outside, as it is now. `tensor` lies on it like that; None as `reader`: no
        operator reads it, autograd saves it. `place`: as which of its arguments."""
        self.op, self.state = None, None if self.state is UNFILLED else self.state
        held = self.holding(geometry)
        if held is None:
            held = hold(tensor, None if self.state is LENT else hooks, None, (reader, place))
            held.is_parameter |= self.state is LENT
            if self.held is None:
                self.held, self.geometry = held, geometry
            else:
                self.parts = {**(self.parts or {}), cast(Geometry, geometry): held}
        if held.name is None and reader is not None:
            held.name = reader
            if self.state is VOLATILE:
                held.freeze(functools.partial(copied, tensor, geometry))

    def holding(self, geometry: Geometry | None) -> Held | None:
        """What is held of which a tensor that lies like this can be made. An alias of the storage will do for all."""
        held, parts = self.held, self.parts or {}
        if held is not None and (not held.is_packed or geometry == self.geometry or self.state is KEPT):
            return held
        part = parts.get(cast(Geometry, geometry))
        return part if part or held is None else next((h for h in parts.values() if not h.is_packed), None)

    def keep(self, tensor: Tensor, hooks: Saver) -> None:
        """Hold the value, although an operator makes it. What is packed covers the storage, so that nothing is lost."""
        covers = type(hooks) is tuple and tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        if hooks is not None and not covers:
            tensor = without_recording(_torch.bytes_of, tensor)
        self.op, self.parts, self.state = None, None, KEPT
        self.held = hold(tensor, hooks, "a kept tensor")

    @property
    def is_outside(self) -> bool:
        return self.op is None and self.state is not KEPT

    @property
    def position(self) -> int:
        """Of the operator that must run in order to make it; -1 for what is there, or as good as there."""
        return -1 if self.op is None or self.state is CHEAP else self.op.index

    @property
    def all_held(self) -> list[Held]:
        return [*(() if self.held is None else (self.held,)), *(self.parts or {}).values()]

    @property
    def is_parameter(self) -> bool:
        return any(held.is_parameter for held in self.all_held)

    @property
    def is_stale(self) -> bool:
        return any(held.is_stale for held in self.all_held)

    def freeze(self, live: Tensor | None = None) -> None:
        """It is about to be written: what is held of it must not change. `live` lies on it."""
        held = [] if self.held is None else [(None if self.state is KEPT else self.geometry, self.held)]
        for geometry, each in (*held, *(self.parts or {}).items()):
            each.freeze(None if live is None else functools.partial(copied, live, geometry))


def geometry_of(tensor: Tensor) -> Geometry:
    """How a tensor lies on its storage."""
    dtype = tensor.dtype
    bits = 2 * tensor.is_neg() + (dtype.is_complex and tensor.is_conj())
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), dtype, bits)


@functools.lru_cache(maxsize=4096)  # the same few are asked for again and again: gates that lie side by side
def are_disjoint(a: Geometry, b: Geometry) -> bool:
    """Whether two tensors that lie like this on one storage share no element; False where that is not plain to see."""
    (sizes, strides, start, dtype, _), (others, other_strides, other_start, other_dtype, _) = a, b
    if (dtype, len(sizes)) != (other_dtype, len(others)):
        return False
    dims = [dim for dim in zip(strides, other_strides, sizes, others, strict=True) if dim[2:] != (1, 1)]
    if any(stride != other_stride or stride <= 0 for stride, other_stride, _, _ in dims):
        return False
    # Boxes of one grid, whose steps are the strides: apart if they are so in one direction.
    apart = False
    whole = 0
    for stride, _, size, other in sorted(dims, reverse=True):
        i, start = divmod(start, stride)
        j, other_start = divmod(other_start, stride)
        if whole and max(i + size, j + other) * stride > whole:
            return False
        apart = apart or i + size <= j or j + other <= i
        whole = stride
    return apart or start != other_start


def copied(live: Tensor, geometry: Geometry | None) -> Tensor:
    """A copy of what lies like this on the storage of a tensor; None: of all of it."""
    return _torch.copy(_torch.bytes_of(live) if geometry is None else _torch.lay(live, *geometry))


class Ref(NamedTuple):
    """A tensor that lies on a value in another way than the value itself says."""

    value: Value
    geometry: Geometry
    kind: type[Tensor] | None  # a subclass that only decorates a plain tensor


class Scratch(NamedTuple):
    """Stands for an argument from outside that an operator writes: replay lets it write a copy."""

    ref: Any


class Wrapped:
    """A wrapper subclass, taken apart into references."""

    def __init__(self, tensor: Any, reference: Callable[[Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size, self.stride = tensor.size(), tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}  # a `DeviceMesh` may be one of them
        self.parts = {name: reference(part) if isinstance(part, Tensor) else part for name, part in parts.items()}


def values_of(saved: Any) -> Iterable[Value]:
    """The values behind what a holder saved: one for a plain tensor."""
    if type(saved) is Value:
        return (saved,)
    if type(saved) is Ref:
        return (saved.value,)
    if type(saved) is Wrapped:
        return [value for part in saved.parts.values() for value in values_of(part)]
    return ()


class Op:
    """One recorded operator call. It names the values it makes by id: a strong reference would be a cycle."""

    __slots__ = ("args", "index", "info", "reads")

    args: tuple[Any, ...]  # with a Value, Ref or Scratch in place of each tensor, or what makes one with its metadata
    index: int  # position on the tape; the id of the first value that it makes
    info: Info
    reads: tuple[Value, ...]

    # Nearly all operators take no keywords, draw no random numbers, write nothing and make one new tensor. Others are:
    kwargs: Any = {}  # noqa: RUF012
    grad_mode = True  # kernels may look at it
    rng: Generators | None = None  # where the generators stood, for a random operator
    outputs: Sequence[int] | None = None  # for each tensor of the result the id of the value that it is; 0: no new one
    writes: Sequence[tuple[int, int]] = ()  # (id of the value that is overwritten, id of the value that it becomes)


class SpecialOp(Op):
    __slots__ = ("grad_mode", "kwargs", "outputs", "rng", "writes")
