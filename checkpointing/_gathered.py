"""FSDP2 in a recorded block: parameters that are gathered into memory which is given back after each module.

A recompute refers to gathered parameters as to all others: whoever replays does so while FSDP2 has gathered them again.
In backward those of one module at a time are there, so the block is cut where memory has been given back: what is
alive then is kept, and no window crosses the cut.

Invariant: a run costs nothing more until it meets an operator of FSDP2. It becomes another kind of run when it does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from . import _torch, errors

_Run: Any = object  # a run, by the time that an instance is made


class BesideGathering(_Run):  # type: ignore[misc]
    """A run that has met FSDP2: a class that is put before that of the run."""

    sees_gathering = True
    _lent: list[torch.UntypedStorage]  # memory of gathered parameters, while they are there
    _alive: list[int]  # cells from before the last cut
    _cut_at: int  # so many cells were there
    _kept: dict[
        int, tuple[ref[Tensor], int]
    ]  # by id: tensors that are kept, and the version at which they are

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._here["depth"] == self._depth:
            self._look_for_memory_given_back()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def close(self) -> str:
        self._lent = []
        return super().close()  # type: ignore[no-any-return]

    def _look_for_memory_given_back(self) -> None:
        there = [storage for storage in self._lent if storage.nbytes()]
        if len(there) < len(self._lent):
            self._lent = there
            self._cut()

    def _cut(self) -> None:
        cells = [*self._alive, *range(self._cut_at, len(self.cells))]
        self._alive = [cell for cell in cells if self.cells[cell]() is not None]
        for tensor in [self.cells[cell]() for cell in self._alive]:
            if _torch.has_storage(tensor) and not self.is_from_outside(tensor):
                self._keep_once(tensor)
        self._cut_at = len(self.cells)

    def _keep_once(self, tensor: Tensor) -> None:
        kept, version = self._kept.get(id(tensor), (None, -1))
        if kept is None or kept() is not tensor or version != _torch.version(tensor):
            self.keep_at(tensor, None)
            self._kept[id(tensor)] = ref(tensor), _torch.version(tensor)


@functools.cache
def _beside_gathering(kind: Any) -> Any:
    return type(kind.__name__, (BesideGathering, kind), {})


def lend(run: Any, tensors: Iterable[Tensor]) -> None:
    """FSDP2 has put parameters into the memory of these tensors, until it gives that back."""
    if not run.sees_gathering:
        run.__class__ = _beside_gathering(run.__class__)
        run._lent, run._alive, run._cut_at, run._kept = [], [], 0, {}
    run._lent += [tensor.untyped_storage() for tensor in tensors]


def check_there(where: object, parameter: Tensor) -> None:
    """Kernels would crash on a parameter whose memory has been given back."""
    is_computable = _torch.has_storage(parameter) and parameter.numel() and not parameter.is_meta
    if is_computable and not parameter.untyped_storage().nbytes():
        raise errors.given_back(where, parameter.shape)
