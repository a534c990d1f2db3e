"""The determinism check: compares metadata, values, or the result of a function of the user's."""

import hashlib
import io
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _torch
from .threads import without_recording
from .where import entered_from

DeterminismCheck = Literal["metadata", "values", "none"] | Callable[[Tensor], Any]
Check = Callable[[Tensor], Any] | None


def metadata_of(tensor: Tensor) -> Any:
    """The comparison of `determinism_check="metadata"`."""
    try:
        return tensor.shape, tensor.dtype, tensor.device
    except RuntimeError:  # a nested tensor
        return _torch.shape_of(tensor), tensor.dtype, tensor.device


def check_of(option: DeterminismCheck) -> Check:
    """The function for an option; None compares nothing."""
    if not callable(option):
        return CHECKS[option]

    def check(tensor: Tensor) -> Evidence:
        found = without_recording(lambda: option(tensor.detach()))
        return Evidence(tensor, found.tolist() if isinstance(found, Tensor) else found)

    return check


class Evidence:
    """The finding of a costly check in a tensor, and where that was saved; compares the finding."""

    def __init__(self, tensor: Tensor, finding: object) -> None:
        self.finding = metadata_of(tensor), finding
        self.line = entered_from(sys._getframe(1))

    def __eq__(self, other: Any) -> bool:
        return bool(self.finding == other.finding)

    def __str__(self) -> str:
        return str(self.finding)


def checksum(tensor: Tensor) -> str:
    """64 bits that depend on every bit of the tensor and its position."""
    # Kernels of recurrent nets reserve such memory for their backward, and do not write all of it.
    may_be_unwritten = (tensor.dtype, tensor.dim()) == (torch.uint8, 1)
    if may_be_unwritten or tensor.is_meta or isinstance(tensor, _torch.FakeTensor):
        return "unknown"
    file = io.BytesIO()
    torch.save([*map(_compact, _torch.plain_parts(tensor))], file)  # knows tensors of all kinds
    return f"checksum {hashlib.blake2b(file.getbuffer(), digest_size=8).hexdigest()}"


def _compact(tensor: Tensor) -> Tensor:
    """A tensor alone on its memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.layout is torch.strided:
        plain = plain.contiguous()
    return plain.clone()


CHECKS = {"metadata": metadata_of, "values": check_of(checksum), "none": None}
