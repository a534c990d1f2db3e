"""Tensors as regions see them: their names in messages, and which are referenced, not saved."""

from __future__ import annotations

from torch import Tensor, nn

from .. import _torch
from .tree import Field

_Parameter = nn.Parameter

# Formatted only when it is needed: (parent, key) stands for `parent[key]`, an operator for its
# input.
Name = str | tuple[object, object] | object


def named(name: Name, tensor: Tensor | None = None) -> str:
    """A tensor as messages name it."""
    if isinstance(name, tuple):
        parent, key = name
        name = f"{named(parent)}.{key}" if isinstance(key, Field) else f"{named(parent)}[{key!r}]"
    if isinstance(name, str):
        text = name
    elif name is None:
        text = "a tensor that it saved"
    else:
        text = f"an input of {name}"
    if tensor is None:
        return text
    shape = tuple(_torch.shape_of(tensor))
    return f"{text} ({tensor.dtype} tensor of shape {shape})".replace("torch.", "")


def root_of(tensor: Tensor) -> Tensor:
    """The base of a view; the tensor itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def is_parameter(root: Tensor) -> bool:
    """Whether a region references this tensor and its views, rather than saving them (rule 2)."""
    kind = type(root)
    if kind is Tensor:
        return False
    return kind is _Parameter or isinstance(root, _Parameter)


def is_referenced(root: Tensor) -> bool:
    """Like `is_parameter`, but also true for leaves that require grad, which the graph keeps alive
    anyway."""
    if root.is_leaf and root.requires_grad:
        return True
    return is_parameter(root)
