"""Tensors inside structures: how arguments, results and kept values are taken apart and put together again.

Containers are lists, tuples, dicts, named tuples, dataclasses and whatever is registered with torch's pytree. Other
objects stay whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

# Types without tensors inside, for a quick way past them.
ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type, range, slice, torch.dtype, torch.device, torch.Size}
)


class Field(str):
    """The key of a part that is a field or attribute, for messages."""

    __slots__ = ()


class Container(NamedTuple):
    """A container taken apart: its parts by key, and how to build one of its kind from other parts."""

    parts: dict[Any, Any]
    build: Callable[[dict[Any, Any]], Any]


def open_container(value: Any) -> Container | None:
    """A container's parts, or None for other objects. What is returned does not hold `value`, whose tensors may go."""
    kind: Any = type(value)
    if kind is list or kind is tuple:
        return Container(dict(enumerate(value)), lambda parts: kind(parts.values()))
    node = SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        keys = value if isinstance(value, dict) and len(value) == len(children) else range(len(children))
        parts = dict(zip(keys, children, strict=True))
        return Container(parts, lambda parts: node.unflatten_fn(list(parts.values()), context))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = dict(zip(map(Field, value._fields), value, strict=True))
        return Container(parts, lambda parts: tuple.__new__(kind, parts.values()))
    if not dataclasses.is_dataclass(value) or isinstance(value, dict | Enum | nn.Module):
        return None
    attributes = dict(getattr(value, "__dict__", {}))
    fields = {Field(f.name): getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}

    def build(parts: dict[Any, Any]) -> Any:
        new = object.__new__(kind)  # past the constructor, which may take anything
        for name, part in (attributes | parts).items():
            object.__setattr__(new, name, part)
        return new

    return Container(fields, build)


def take_apart(
    value: Any, leaf: Callable[[Any, Any], Any], name: Any = None, met: dict[int, Any] | None = None, depth: int = 0
) -> Any:
    """`value` with `leaf(part, name)` in place of whatever is no container, and `Container`s in place of those; `put_
    together` is the way back. A container that is met twice becomes one; one that is in itself, or further down than
    Python's stack is deep (a linked list), stays there."""
    if type(value) in ATOMS:
        return value
    opened = None if isinstance(value, Tensor) or depth > 100 else open_container(value)
    if opened is None:
        return leaf(value, name)
    met = {} if met is None else met
    if id(value) in met:
        return met[id(value)][0]
    met[id(value)] = value, value
    parts = {k: take_apart(part, leaf, (name, k), met, depth + 1) for k, part in opened.parts.items()}
    is_same = all(parts[k] is part and type(k) is Field for k, part in opened.parts.items())
    taken = value if is_same and parts else Container(parts, opened.build)  # objects with fields may be keys of dicts
    met[id(value)] = taken, value  # which lives as long as its id is used
    return taken


def put_together(saved: Any, leaf: Callable[[Any], Any], met: dict[int, Any] | None = None) -> Any:
    """What `take_apart` has taken apart, with `leaf(part)` for what it has put there."""
    if type(saved) is not Container:
        return leaf(saved)
    met = {} if met is None else met
    if id(saved) not in met:
        met[id(saved)] = saved.build({k: put_together(part, leaf, met) for k, part in saved.parts.items()})
    return met[id(saved)]


def leaves_of(saved: Any) -> list[Any]:
    """What `take_apart` has put in place of whatever is no container."""
    if type(saved) is not Container:
        return [saved]
    return [leaf for part in saved.parts.values() for leaf in leaves_of(part)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `function` of its tensors in their places; `value` itself where nothing has changed."""
    is_tensor = isinstance(value, Tensor)
    opened = None if is_tensor or type(value) in ATOMS else open_container(value)
    if opened is None:
        return function(value) if is_tensor else value
    new = {key: map_tensors(function, part) for key, part in opened.parts.items()}
    return value if all(new[key] is part for key, part in opened.parts.items()) else opened.build(new)
