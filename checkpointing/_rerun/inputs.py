"""The inputs of a function that is called again: held when it is called, found by type.

Arguments, defaults and the variables that the function closes over are held as an operator would
save them: through the enclosing hooks, parameters by reference. Devices, generators and modules are
collected on the way.
"""

import dis
import inspect
from collections.abc import Iterable
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from .. import _torch
from .._engine import (
    ATOMS,
    Aliased,
    Held,
    Name,
    hold_argument,
    take_apart,
)

Cells = list[tuple[CellType, Any]]  # variables that a function closes over, with their contents


class Inputs:
    """The inputs of one call: holds them, and collects their devices, generators and modules."""

    devices: frozenset[torch.device] = frozenset()
    generators: tuple[torch.Generator, ...] = ()
    modules: tuple[Module, ...] = ()
    _hooks: _torch.Hooks | None = None

    def __init__(self) -> None:
        # By id, while the function runs: a tensor, its version, and the `Held` of it.
        self._given: dict[int, tuple[Tensor, int, Held]] = {}
        self.inputs: dict[Held, bool] = {}  # and whether they required grad

    def hold(self, value: Any, name: Name) -> Any:
        """Hold an argument, a part of one, or a variable until the rerun. A tensor that comes twice
        is held once, even if hooks make something else of it the second time."""
        if isinstance(value, Tensor):
            if not value.is_cpu:
                self.devices |= {value.device}
            held = hold_argument(value, self._hooks, name)
            given = value, _torch.version(value), held
            *_, held = self._given.setdefault(id(value), given)
            self.inputs[held] = value.requires_grad
            return held
        if isinstance(value, torch.Generator):
            self.generators += (value,)
        else:
            self.look_at(value)
        return value

    def capture(self, function: Any) -> Cells:
        """Look for modules in a function, and hold the variables that it closes over."""
        if type(function) not in (FunctionType, MethodType):
            self.look_at(function)
            function = function.forward if isinstance(function, Module) else type(function).__call__
        if type(function) is MethodType:
            self.look_at(function.__self__)
            function = function.__func__
        if type(function) is not FunctionType:  # it is not written in Python
            return []
        self._look_into(function)
        if hasattr(function, "__wrapped__"):  # as `checkpointed` leaves it
            wrapped = inspect.unwrap(function)
            if type(wrapped) is FunctionType:
                self._look_into(wrapped)
        if function.__closure__ is None:
            return []
        code = function.__code__
        return [
            (cell, self.hold(contents_of(cell), f"the variable '{name}'"))
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
            if name not in _assigned_by(code)
        ]

    def _look_into(self, function: FunctionType) -> None:
        """Find modules among the globals that a function names, and its defaults."""
        code, scope = function.__code__, function.__globals__
        for each in (code, *_codes_in(code)):
            for name in each.co_names:
                module = scope.get(name)
                if isinstance(module, Module):
                    self.modules += (module,)
        positional, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        if not (positional or keywords):
            return
        names = code.co_varnames[: code.co_argcount]
        defaults = dict(zip(names[::-1], positional[::-1], strict=False)) | keywords

        # Tensors among them live as long as the function, and are guarded.
        def guard(value: Any, name: Name) -> None:
            if isinstance(value, Tensor):
                self.inputs[Aliased(value, name, True)] = value.requires_grad
            else:
                self.hold(value, name)

        if not ATOMS.issuperset(map(type, defaults.values())):
            take_apart(defaults, guard, "defaults")

    def look_at(self, value: Any, depth: int = 2) -> None:
        """Find modules: the object itself, its attributes, the items of a small container, and the
        same in functions that it wraps and variables that these close over."""
        kind = type(value)
        if kind in ATOMS or isinstance(value, Tensor | type):
            return
        if issubclass(kind, Module):  # `isinstance` takes a weak proxy for one
            self.modules += (value,)
        elif kind in _WRAPPERS and depth:
            for part in _wrapped_by(value):
                self.look_at(part, depth - 1)
        else:
            parts = [*getattr(value, "__dict__", {}).values(), *items_of(value)]
            self.modules += tuple([part for part in parts if issubclass(type(part), Module)])


_WRAPPERS = (FunctionType, MethodType, partial)
_MOST_ITEMS = 100  # larger containers are not searched for modules and generators


def _wrapped_by(value: Any) -> list[Any]:
    if type(value) is partial:
        return [value.func, *value.args, *value.keywords.values()]
    cells = value.__closure__ or ()
    return [getattr(value, "__self__", None), *map(contents_of, cells)]


def items_of(value: Any) -> Iterable[Any]:
    """The items of a small container; nothing of other objects."""
    if type(value) is dict:
        value = value.values()
    elif type(value) not in (list, tuple):
        return ()
    return value if len(value) <= _MOST_ITEMS else ()


# ---- variables


def _codes_in(code: CodeType) -> list[CodeType]:
    """Comprehensions, lambdas and functions that are defined in a function."""
    return [const for const in code.co_consts if type(const) is CodeType]


@lru_cache  # bounded, since it holds the code
def _assigned_by(code: CodeType) -> frozenset[str]:
    """The variables that a function, or one defined in it, assigns (`nonlocal`)."""
    names = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF")
    }
    names = names.union(*map(_assigned_by, _codes_in(code)))
    return frozenset(code.co_freevars) & names


def contents_of(cell: CellType) -> Any:
    """The contents of a cell; the cell itself while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def fill(cells: Cells) -> None:
    """Give the cells these contents."""
    for cell, value in cells:
        if value is cell:
            del cell.cell_contents
        else:
            cell.cell_contents = value
