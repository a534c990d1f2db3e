"""Tensors as regions see them: their names in messages, which are referenced, not saved, and what
a recompute knows of those that it needs."""

from typing import Any

from torch import Tensor, nn

from .. import _torch
from .threads import without_recording
from .tree import Field

# Formatted only when it is needed: (parent, key) stands for `parent[key]`, an operator for its
# input.
Name = str | tuple[object, object] | object


def named(name: Name, tensor: Tensor | None = None) -> str:
    """A tensor as messages name it."""
    if isinstance(name, tuple):
        parent, key = name
        name = f"{named(parent)}.{key}" if isinstance(key, Field) else f"{named(parent)}[{key!r}]"
    text = name if isinstance(name, str) else f"an input of {name}"
    if tensor is None:
        return text
    shape = tuple(_torch.shape_of(tensor))
    return f"{text} ({tensor.dtype} tensor of shape {shape})".replace("torch.", "")


def root_of(tensor: Tensor) -> Tensor:
    """The base of a view; the tensor itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def is_parameter(tensor: Tensor) -> bool:
    """Whether this is a parameter, or a view of one: a region references it, rather than saving it
    (rule 2)."""
    root = root_of(tensor)
    return type(root) is not Tensor and isinstance(root, nn.Parameter)


def is_another(parameter: Any, other: Any) -> bool:
    """Whether another tensor is in the place of a parameter, and they differ. Nobody knows where
    one has no memory now."""
    if type(parameter) is not nn.Parameter or type(other) not in (Tensor, nn.Parameter):
        return False
    if _torch.was_given_back(parameter) or _torch.was_given_back(other):
        return False
    if not _torch.are_alike(parameter, other):
        return True
    return not without_recording(_torch.same_bits, parameter, other)


def carries_nothing(tensor: Tensor) -> bool:
    """Whether a view shows the `requires_grad` of its base, and was made under `no_grad`. (A view
    whose base was written with a gradient counts as a leaf until its `grad_fn` is read.)"""
    base = tensor._base
    if base is None or not base.requires_grad:
        return False
    try:
        return tensor.grad_fn is None
    except RuntimeError:  # of torch: it was made under `no_grad`, and has been written since
        return True


def is_referenced(tensor: Tensor) -> bool:
    """Whether a region references this tensor: a parameter, a view of one, or a leaf that requires
    grad, which the graph keeps alive anyway."""
    if tensor.requires_grad and not carries_nothing(tensor) and tensor.is_leaf:
        return True
    return is_parameter(tensor)


class Held:
    """A tensor that a recompute will need."""

    is_parameter = False  # whether it is referenced rather than saved
    is_stale = False  # whether it is referenced rather than saved, and has been written since
    is_shared = True  # whether somebody else may have its memory

    def __init__(self, packed: Any, name: Name) -> None:
        self.packed = packed
        self.name = name

    def fetch(self, frame: object) -> Tensor:
        """The tensor as it was. Others may read it, too: it must not be written."""
        raise NotImplementedError

    def renew(self) -> None:
        """The region has written to other parts of its memory."""

    def freeze(self, live: Tensor | None = None) -> None:
        """The region is about to write the tensor: hold a copy from here on. `live` is the tensor,
        if it is at hand, which is quicker than fetching it."""
