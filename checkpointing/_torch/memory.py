"""The memory of tensors: storages, layouts and copies.

Invariant: a copy has the strides, gaps, shared elements and alignment of the original, since
kernels look at them and may add in another order otherwise.
"""

import functools
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from .names import (
    FakeTensor,
    below_versions,
    counting_versions,
    has_storage,
    is_zeros,
    mode_count,
    plain_parts,
    storage_id,
    storage_uses,
    unseen_by_modes,
    version,
)

_PLAIN = (Tensor, nn.Parameter)
_WITH_LAYOUT = (*_PLAIN, FakeTensor)
_ALIGNMENT = 64  # bytes

# ---- storages


def storage_of(tensor: Tensor) -> int | None:
    """The storage of a tensor, by which memory is known; None where it has none of its own."""
    return storage_id(tensor) if has_storage(tensor) else None


def memory_of(tensor: Tensor) -> Any:
    """An object that lives as long as the memory of a tensor: its storage, or itself without."""
    return tensor.untyped_storage() if has_storage(tensor) else tensor


def memory_size(tensor: Tensor) -> int:
    """The bytes of the memory that a tensor uses, as far as it has some of its own."""
    return tensor.untyped_storage().nbytes() if has_storage(tensor) else 0


def was_given_back(tensor: Tensor) -> bool:
    """Whether part of the memory of a tensor has been freed. FSDP2 and others that stream weights
    free it for a while; kernels would crash on it."""
    if not has_storage(tensor):
        return False
    there = tensor.untyped_storage().nbytes()
    if there >= tensor.nbytes:
        return False
    length = tensor.storage_offset() + _length(tensor.shape, tensor.stride())  # if expanded
    return there < length * tensor.itemsize


def is_on(tensor: Tensor, storages: Set[int | None]) -> bool:
    """Whether a tensor, or one of its parts, uses one of these storages."""
    return not storages.isdisjoint(map(storage_of, plain_parts(tensor)))


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor has the memory of this one, or a part of it."""
    parts = plain_parts(tensor)
    # Two are this one's: the tensor, and the object for its storage.
    return not all(has_storage(p) and storage_uses(p.untyped_storage()._cdata) == 2 for p in parts)


def alias(tensor: Tensor) -> Tensor:
    """A detached alias that shares the version counter, also when called below autograd. An
    inference tensor has no counter, so that nobody sees when it is written: it is copied."""
    if tensor.is_inference() and has_storage(tensor):
        with torch.inference_mode(False), unseen_by_modes():
            return copy(tensor)
    with counting_versions():
        return unseen(Tensor.detach, tensor)


def unseen(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Call a function of a tensor. No mode sees it, not even one of the user, if that is plain."""
    if type(tensor) in _PLAIN and mode_count():
        with unseen_by_modes():
            return function(tensor)
    return function(tensor)


# ---- layouts

# Size, stride, whether it is seen conjugated, or negated, and offset.
Layout = tuple[torch.Size, tuple[int, ...], bool, bool, int]


def layout_of(tensor: Tensor) -> Layout | None:
    """The geometry of a plain tensor; None for others."""
    return _layout(tensor) if type(tensor) in _WITH_LAYOUT and is_strided(tensor) else None


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is one range of a storage, seen through sizes and strides."""
    return not (tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized)


def _layout(tensor: Tensor) -> Layout:
    offset = int(tensor.storage_offset())
    return tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), offset


def lay_as(base: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """A tensor of this type on the storage of `base`, detached, with this geometry."""
    size, stride, is_conj, is_neg, offset = layout
    new = base.new_empty(0, dtype=dtype).set_(base.untyped_storage(), offset, size, stride)
    if is_conj:
        new = torch._conj(new)
    return torch._neg_view(new) if is_neg else new


def _length(size: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from the first in memory to the last."""
    return 0 if 0 in size else 1 + sum(step * (n - 1) for n, step in zip(size, stride, strict=True))


def one_each(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor`, with the dimensions that are expanded (stride 0) in `like` narrowed to one
    element."""
    for dim, step in enumerate(like.stride()):
        if step == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


# ---- copies


def copy(tensor: Tensor, layout: Layout | None = None) -> Tensor:
    """A copy on memory of its own, with the layout of `tensor`, or with `layout`."""
    layout = layout or layout_of(tensor)
    if layout is None:
        return tensor.clone()
    size, stride, *_, offset = layout
    with below_versions():  # which leaves the version at 0
        if (tensor.shape, tensor.stride(), False, False, 0) == layout and tensor.is_contiguous():
            return tensor.clone()
        shift = offset % (_ALIGNMENT // tensor.itemsize)
        length = shift + _length(size, stride)
        new = lay_as(tensor.new_empty(length), tensor.dtype, (*layout[:-1], shift))
        write(new, tensor)
        return new


def laid_out(tensor: Tensor, layout: Layout | None) -> Tensor:
    """The tensor itself if it has this layout, at any offset, else a copy."""
    if layout is None or _layout(tensor)[:-1] == layout[:-1]:
        return tensor
    return copy(tensor, layout)


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of `tensor`, as bytes."""
    return tensor.new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def whole(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor on all of a storage, of the type of `like`."""
    with unseen_by_modes():
        return torch.empty(0, dtype=like.dtype, device=storage.device).set_(storage)


class Copies(dict[tuple[int, int], tuple[Tensor, Tensor]]):
    """Copies of tensors with their whole storages, by storage and version: those that share memory
    do so as copies, too. A storage lives as long, since the tensor is held, too."""

    def forget(self, storages: Set[int | None]) -> None:
        """Those on these storages have been made of what is not there any more."""
        for key in [key for key in self if key[0] in storages]:
            del self[key]

    def of(self, tensor: Tensor) -> Tensor:
        if not is_strided(tensor) or is_zeros(tensor):
            return copy(tensor)
        key = storage_id(tensor), version(tensor)
        if key not in self:
            self[key] = tensor, copy(bytes_of(tensor))
        new = lay_as(self[key][1], tensor.dtype, _layout(tensor))
        return new.detach()  # a view can't be written with a graph


def write(tensor: Tensor, values: Tensor) -> None:
    """Write values, once for elements that share their memory, without counting up the version."""
    with below_versions():
        one_each(tensor, tensor).copy_(one_each(values, tensor))


def overwrite(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Give tensors these values, and their sizes, without counting up versions."""
    with below_versions():
        for tensor, value in zip(tensors, values, strict=True):
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
        try:
            torch._foreach_copy_(tensors, values)
        except NotImplementedError:  # not all subclasses have these
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)


# ---- comparisons


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share an element. They do not if they are two ranges of a storage, or
    columns of one matrix."""
    if one is other:
        return True
    if storage_of(one) != storage_of(other):
        return False
    layouts = layout_of(one), layout_of(other)
    if None in layouts or one.dtype is not other.dtype:
        return True
    return layouts_overlap(*layouts)


@functools.lru_cache(1024)  # a window asks for the same layouts in each run
def layouts_overlap(one: Layout, other: Layout) -> bool:
    """Whether tensors of one type may share an element, with these layouts on one storage."""
    strides = {*one[1], *other[1]} - {0}
    rows = [row for row in strides if not any(step % row for step in strides if step > row)]
    for row in [*rows, sys.maxsize]:  # all memory is one row, too
        (_, end), (start, last) = sorted([_columns(one, row), _columns(other, row)])
        if end <= start <= last <= row:
            return False
    return True


def shared_part(one: Layout, other: Layout) -> Layout | None:
    """The elements that two slices of one tensor share, as a layout; None if there are none, or the
    two are not such slices."""
    (size, stride, _, _, rest), (their_size, their_stride, _, _, their_rest) = one, other
    if stride != their_stride or 0 in stride:
        return None
    shared, offset, row = [*size], 0, sys.maxsize
    for place in sorted(range(len(stride)), key=stride.__getitem__, reverse=True):
        step = stride[place]
        (first, rest), (their_first, their_rest) = divmod(rest, step), divmod(their_rest, step)
        last, their_last = first + size[place], their_first + their_size[place]
        begin, end = max(first, their_first), min(last, their_last)
        # In slices, no row runs on into the next one.
        if begin >= end or max(last, their_last) * step > row:
            return None
        shared[place], row = end - begin, step
        offset += begin * step
    return (torch.Size(shared), stride, False, False, offset + rest) if rest == their_rest else None


def _columns(layout: Layout, row: int) -> tuple[int, int]:
    """The first of the columns that a tensor uses of a matrix, and the one after the last."""
    size, stride, *_, offset = layout
    columns = [n if step < row else 1 for n, step in zip(size, stride, strict=True)]
    start = offset % row
    return start, start + _length(columns, stride)


def lies_in(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor uses only memory of another one of its type."""
    layouts: Any = layout_of(tensor), layout_of(other)
    if None in layouts:
        return False
    mine, others = layouts
    kind = storage_id(other), other.dtype, others[2:4]
    if (storage_id(tensor), tensor.dtype, mine[2:4]) != kind:
        return False
    start = mine[-1] - others[-1]
    return 0 <= start <= _length(*others[:2]) - _length(*mine[:2])  # type: ignore[no-any-return]


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are plain, and of one size, type and device."""
    if layout_of(one) is None or layout_of(other) is None:
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two such tensors are equal, bit for bit."""
    return one.is_meta or torch.equal(_as_bytes(one), _as_bytes(other))


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.unsqueeze(-1).flatten().view(torch.uint8)  # one element may have any stride
