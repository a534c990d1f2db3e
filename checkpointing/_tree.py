"""Tensors inside structures: how arguments, results and kept values are taken apart and put together again.

Containers are lists, tuples, dicts, named tuples, dataclasses and whatever is registered with torch's pytree. Other
objects stay whole.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES

# Types without tensors inside, for a quick way past them.
ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type, range, slice, torch.dtype, torch.device, torch.Size}
)


Build = Callable[[dict[Any, Any]], Any]


def open_container(value: Any) -> tuple[dict[Any, Any], Build] | None:
    """A container's parts by key, and how to build one of its kind from other parts; None for other objects.

    What builds it does not hold `value`, whose tensors may go.
    """
    kind: Any = type(value)
    if kind is list:
        return dict(enumerate(value)), lambda parts: list(parts.values())
    if kind is tuple:
        return dict(enumerate(value)), lambda parts: tuple(parts.values())
    if kind is dict:
        return value, lambda parts: parts
    node = SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        keys = value if isinstance(value, dict) and len(value) == len(children) else range(len(children))
        return dict(zip(keys, children, strict=True)), lambda parts: node.unflatten_fn(list(parts.values()), context)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True)), lambda parts: kind(*parts.values())
    if isinstance(value, dict):
        attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}

        def build_dict(parts: dict[Any, Any]) -> Any:
            # Past the constructors of subclasses, which may take anything.
            new = kind.__new__(kind)
            (OrderedDict if isinstance(new, OrderedDict) else dict).update(new, parts)
            if attributes:
                new.__dict__.update(attributes)
            return new

        return dict(value), build_dict
    if dataclasses.is_dataclass(value) and not isinstance(value, dict | list | tuple):
        names = {f.name for f in dataclasses.fields(value)}
        rest = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in names}

        def build(parts: dict[str, Any]) -> Any:
            new = object.__new__(kind)
            for name, part in {**rest, **parts}.items():
                object.__setattr__(new, name, part)
            return new

        return {name: getattr(value, name) for name in names if hasattr(value, name)}, build
    return None


# Not to be looked into.
NO_OBJECTS = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object holds in its `__dict__` and its slots."""
    attributes = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                attributes[name] = getattr(value, name)
    return attributes


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with `function` of its tensors in their places; `value` itself where nothing has changed."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in ATOMS:
        return value
    opened = open_container(value)
    if opened is None:
        return value
    parts, build = opened
    new = {key: map_tensors(function, part) for key, part in parts.items()}
    return value if all(new[key] is part for key, part in parts.items()) else build(new)
