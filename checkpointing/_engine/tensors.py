"""Tensors as regions see them: their names in messages, and which are referenced, not saved."""

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
    return is_parameter(root_of(tensor))
