"""Tensors inside structures: takes arguments, results and kept values apart and together again.

Containers are lists, tuples, dicts, named tuples, dataclasses and the types that are registered
with torch's pytree. Other objects stay whole.
"""

import dataclasses
from collections.abc import Callable
from enum import Enum
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _torch

# Types without tensors inside, which need no look.
ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type, range, slice}
    | {torch.dtype, torch.device, torch.Size}
)


class Field(str):
    """The key of a part that is a field or attribute, for messages."""

    __slots__ = ()


class Container(NamedTuple):
    """A container taken apart: its parts by key, and a function that builds one from other
    parts."""

    parts: dict[Any, Any]
    build: Callable[[dict[Any, Any]], Any]


def open_container(value: Any) -> Container | None:
    """The parts of a container, or None for other objects. The result does not refer to `value`."""
    kind = type(value)
    node = _torch.PYTREE_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        has_keys = isinstance(value, dict) and len(value) == len(children)
        parts = dict(zip(value if has_keys else range(len(children)), children, strict=True))
        return Container(parts, lambda parts: node.unflatten_fn(list(parts.values()), context))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = dict(zip(map(Field, value._fields), value, strict=True))
        return Container(parts, lambda parts: tuple.__new__(kind, parts.values()))
    if not dataclasses.is_dataclass(value) or isinstance(value, dict | list | Enum | nn.Module):
        return None
    attributes = dict(getattr(value, "__dict__", {}))
    fields = {
        Field(field.name): getattr(value, field.name)
        for field in dataclasses.fields(value)
        if hasattr(value, field.name)
    }

    def build(parts: dict[Any, Any]) -> Any:
        new = object.__new__(kind)  # past the constructor, which may take anything
        for name, part in (attributes | parts).items():
            object.__setattr__(new, name, part)
        return new

    return Container(fields, build)


def take_apart(
    value: Any, leaf: Callable[[Any, Any], Any], name: Any = None, met: Any = None, depth: int = 0
) -> Any:
    """Replace each container in `value` by a `Container`, and each other part by `leaf(part,
    name)`. `put_together` is the inverse.

    A container that occurs twice becomes one. A container inside itself, or more than 100 levels
    down (a linked list), stays as it is.
    """
    if type(value) in ATOMS:
        return value
    opened = None if isinstance(value, Tensor) or depth > 100 else open_container(value)
    if opened is None:
        return leaf(value, name)
    met = {} if met is None else met
    if id(value) in met:
        return met[id(value)][0]
    met[id(value)] = value, value
    parts = {
        k: take_apart(part, leaf, (name, k), met, depth + 1) for k, part in opened.parts.items()
    }
    taken = Container(parts, opened.build)
    # An object with fields may be the key of a dict: it stays itself.
    if set(map(type, parts)) == {Field} and all(map(is_, parts.values(), opened.parts.values())):
        taken = value
    met[id(value)] = taken, value  # which lives as long as its id is used
    return taken


def put_together(saved: Any, leaf: Callable[[Any], Any], met: Any = None) -> Any:
    """Undo `take_apart`, with `leaf(part)` for each part that is no `Container`."""
    if type(saved) is not Container:
        return leaf(saved)
    met = {} if met is None else met
    if id(saved) not in met:
        met[id(saved)] = saved.build(
            {k: put_together(part, leaf, met) for k, part in saved.parts.items()}
        )
    return met[id(saved)]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a structure, in order."""
    leaves: list[Any] = []
    take_apart(value, lambda part, _: leaves.append(part))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply `function` to the tensors in a structure; `value` itself if that changes nothing."""
    taken = take_apart(value, lambda part, _: function(part) if isinstance(part, Tensor) else part)
    new = put_together(taken, lambda part: part)
    return value if all(map(is_, tensors_in(value), tensors_in(new))) else new
