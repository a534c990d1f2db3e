"""Comparing: which known step an operator call is.

A run knows tensors by their objects. Of others it has to know whether they share memory with what
it has met, since a write to one changes all of them. Storages tell, as long as something there is
alive.

A call is compared without any effect. When a step has been found, the tensors that the call meets
take their cells.
"""

import struct
from collections.abc import Sequence
from itertools import repeat
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .. import _torch
from .._engine import is_parameter
from .program import (
    NO_STRIDES,
    ON_MADE,
    OWN,
    ZEROS,
    First,
    Known,
    Met,
    Origin,
    Parts,
    Step,
)
from .store import Store

_storage_of, _has_storage, _storage_id = _torch.storage_of, _torch.has_storage, _torch.storage_id
_is_whole_parameter = _torch.is_whole_parameter


class Matcher:
    """The tensors that a run has met, and their comparison with those that a step expects."""

    _looked_at = 0  # so many cells, for what has been made

    def __init__(self, store: Store) -> None:
        self._store, self._cells = store, store.cells
        self._outside: dict[int | None, int] = {}  # by storage: the first cell from outside there
        # Of those, so that no other storage gets the address of one. Without hooks, the run holds
        # the tensors themselves.
        self._storages: list[Any] = []
        self._made: dict[int | None, int] = {}  # by storage: a cell there
        # By storage: the place among those that are met now. An old one is told by its storage.
        self._meeting: dict[int, int] = {}

    def find(self, following: tuple[Step, ...], call: Any, given: Any) -> Step | None:
        """Which of these steps a call is, if any. Then tensors that it meets take their cells."""
        cells = self._cells
        for step in following:
            if step.call != call:
                continue
            met: list[Tensor] = []
            # The usual cases, past one call.
            for known, arg in zip(step.args, given):  # noqa: B905
                kind = type(known)
                if kind is Known:
                    if cells[known.cell]() is not arg or arg is None:
                        break
                elif known is not arg:
                    is_plain = type(arg) is kind and kind in step.info.plain
                    # Zeros that are equal may differ in sign.
                    is_same = is_plain and known and known == arg
                    if not (is_same or self.matches(known, arg, met)):
                        break
            else:
                if met:
                    self.meet(step.firsts, met)
                return step
        return None

    def meet(self, firsts: tuple[First, ...], met: list[Tensor]) -> None:
        """These tensors take the next cells."""
        for first, tensor in zip(firsts, met, strict=True):
            self._cells.append(ref(tensor))
            if type(first.origin) is str and _has_storage(tensor):  # it is the first one there
                self._outside[_storage_id(tensor)] = first.cell
                if self._store.hooks is not None:
                    self._storages.append(_torch.StorageWeakRef(tensor.untyped_storage()))
            if first.refers is not None:
                self._store.refer(first.refers, tensor)

    def matches(self, known: Any, arg: Any, met: list[Tensor]) -> bool:
        """Whether `arg` is what the program has recorded here. `met` gets the tensors that are met
        for the first time."""
        kind = type(known)
        if kind is First:
            return self.comes_from_there(known, arg, met)
        if kind is Known:
            return arg is not None and self._cells[known.cell]() is arg
        if kind is Met:
            return met[known.cell - len(self._cells)] is arg
        if kind is Parts:
            is_alike = type(arg) is known.kind and len(arg) == len(known.items)
            return is_alike and all(map(self.matches, known.items, arg, repeat(met)))
        return known is arg or _are_same(known, arg)

    def comes_from_there(self, first: First, arg: Any, met: list[Tensor]) -> bool:
        """Whether this is a tensor, and comes from where it came from then."""
        if not isinstance(arg, Tensor):
            return False
        is_whole = _is_whole_parameter(arg)
        if self.of(arg, is_whole, met) != first.origin:
            return False
        other = None if first.beside is None else self._cells[first.beside]()
        if other is not None and _storage_of(other) != _storage_of(arg):
            return False
        is_one = first.is_parameter
        if not is_whole:
            is_one = first.is_lent or is_parameter(arg) is first.is_parameter
            is_one = is_one and first.refers is None
        if is_one:
            met.append(arg)
        return is_one

    def find_with_other_numbers(
        self, following: tuple[Step, ...], call: Any, given: Any
    ) -> Step | None:
        """A known next step that differs in numbers, sizes or generators alone. It will not compare
        them any more."""
        for step in following:
            if step.call != call:
                continue
            met: list[Tensor] = []
            others = []
            for place, (known, arg) in enumerate(zip(step.args, given, strict=True)):
                if self.matches(known, arg, met):
                    continue
                if not (type(known) is type(arg) and _may_vary(known) and _may_vary(arg)):
                    break  # what follows may name a cell that this argument has not taken
                others.append(place)
            else:
                step.vary(others)
                self.meet(step.firsts, met)
                return step
        return None

    # ---- memory

    def of(self, tensor: Tensor, is_whole: bool, met: Sequence[Tensor]) -> Origin:
        """The origin of a tensor that no cell has; `is_whole`: it is a parameter itself. `met` are
        those that take the next cells."""
        if not _has_storage(tensor):
            return str(tensor.layout)
        place = _storage_id(tensor)
        cells, known = self._cells, self._outside.get(place)
        if known is not None and (self._store.keeps(known) or self._is_at(known, place)):
            return known
        number = self._meeting.get(place, len(met))
        if number < len(met) and _storage_of(met[number]) == place:
            return len(cells) + number
        self._meeting[place] = len(met)
        # Mostly, a parameter is the only tensor on its memory.
        if (not is_whole or _torch.is_shared(tensor)) and self.made_at(place) is not None:
            return ON_MADE
        if not is_whole and _torch.is_zeros(tensor):
            return ZEROS
        return OWN if is_whole or _torch.is_strided(tensor) else NO_STRIDES

    def _is_at(self, cell: int, place: int | None) -> bool:
        """Whether the tensor in a cell is alive, and `set_` has given it no other memory."""
        tensor = self._cells[cell]()
        return tensor is not None and _storage_of(tensor) == place

    def forget(self, mark: int) -> None:
        """The cells from here on are empty again."""
        self._looked_at = min(self._looked_at, mark)
        for known in (self._outside, self._made):
            for place in [place for place, cell in known.items() if cell >= mark]:
                del known[place]

    def has_met(self, tensor: Tensor) -> bool:
        """Whether a tensor uses memory from outside that the run has met."""
        place = _storage_of(tensor)
        cell = self._outside.get(place)
        return cell is not None and self._is_at(cell, place)

    def made_at(self, place: int | None, but: Tensor | None = None) -> int | None:
        """The first cell with a tensor, other than `but`, that is alive and uses this storage."""
        cells, made = self._cells, self._made
        for cell in range(self._looked_at, len(cells)):
            tensor = cells[cell]()
            if tensor is not None:
                made.setdefault(_storage_of(tensor), cell)
        self._looked_at = len(cells)
        for cell in range(made.get(place, len(cells)), len(cells)):
            if self._is_at(cell, place) and cells[cell]() is not but:
                return cell
        return None


def _are_same(known: Any, arg: Any) -> bool:
    """Whether two arguments that hold no tensor are the same."""
    kind = type(known)
    if isinstance(known, type):  # of an object, or of what varies
        return type(arg) is known
    if type(arg) is not kind or kind is torch.ScriptObject:
        return False
    if kind in (float, complex, list, tuple):  # 0.0 is not -0.0, nor 0
        return bool(_bits(known) == _bits(arg))
    return bool(known == arg)


def _bits(number: Any) -> Any:
    """What tells numbers apart that are equal, and nan from nan."""
    if type(number) is float:
        return struct.pack("d", number)
    if type(number) is complex:
        return _bits(number.real), _bits(number.imag)
    return [*map(_bits, number)] if type(number) in (list, tuple) else repr(number)


def _may_vary(number: Any) -> bool:
    """Whether each run may have its own argument of this kind."""
    if type(number) in (list, tuple):
        return {*map(type, number)} <= {int, float}
    return type(number) in (int, float, complex, torch.Generator)
