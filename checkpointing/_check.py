"""What must be equal in forward and recompute: metadata, values, or what a function of the user's finds."""

from __future__ import annotations

import operator
import sys
import zlib
from collections.abc import Callable
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from . import _torch, errors
from ._region import without_recording
from ._where import entered_from

DeterminismCheck = Literal["metadata", "values", "none"] | Callable[[Tensor], Any]
Check = Callable[[Tensor], Any] | None


# What `determinism_check="metadata"` compares.
metadata_of: Callable[[Tensor], Any] = operator.attrgetter("shape", "dtype", "device")


def values_of(tensor: Tensor) -> Any:
    """What `determinism_check="values"` compares. Of the memory that kernels of recurrent nets reserve for their own
    backward not all is ever written: there are no values in it to compare."""
    if tensor.dtype is torch.uint8 and tensor.dim() == 1 and not tensor.requires_grad:
        return metadata_of(tensor)
    return Evidence(tensor, f"checksum {without_recording(checksum, tensor.detach()):016x}")


def check_of(option: DeterminismCheck) -> Check:
    """The function that an option means; None compares nothing."""
    return _by_function(option) if callable(option) else CHECKS[option]


CHECKS: dict[str, Check] = {"metadata": metadata_of, "values": values_of, "none": None}


def _by_function(function: Callable[[Tensor], Any]) -> Check:
    def check(tensor: Tensor) -> Evidence:
        try:
            found = without_recording(function, tensor.detach())
        except TypeError as error:
            raise errors.hidden(f"determinism_check={function!r}", error) from error
        return Evidence(tensor, found.tolist() if isinstance(found, Tensor) else found)

    return check


class Evidence:
    """What a costly check has found in a tensor, and where that was saved; equal if the finding is."""

    __slots__ = ("finding", "line")

    def __init__(self, tensor: Tensor, finding: object) -> None:
        self.finding = (metadata_of(tensor), finding)
        self.line = entered_from(sys._getframe(1))

    def __eq__(self, other: object) -> bool:
        return type(other) is Evidence and bool(self.finding == other.finding)

    def __str__(self) -> str:
        return str(self.finding)


def maker_of(tensor: Tensor) -> str | None:
    """The operator that made it, where autograd knows."""
    return None if tensor.grad_fn is None else str(tensor.grad_fn.name())


def checksum(tensor: Tensor) -> int:
    """64 bits that depend on every bit of the tensor and on its place."""
    parts = _torch.parts_of(tensor)
    if parts is not None:
        numbers = [checksum(p) if isinstance(p, Tensor) else zlib.crc32(repr(p).encode()) for p in parts]
        return reduce(lambda total, number: (total * 0x100000001B3 + number) & _MASK, numbers, len(numbers))
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    flat = flat.view(_INTEGERS[flat.element_size()])
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        # Each element with its position through the finaliser of SplitMix64, so that no two changes cancel out.
        mixed = flat[start : start + _CHUNK].to(torch.int64)
        mixed = mixed + torch.arange(start + 1, start + 1 + mixed.numel(), device=flat.device) * -0x61C8864680B583EB
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += int(mixed.sum())
    return total & _MASK


_MASK = 0xFFFFFFFFFFFFFFFF
_CHUNK = 1 << 22  # elements: the integers in between take eight bytes each
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
