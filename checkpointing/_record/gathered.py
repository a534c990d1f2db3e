"""FSDP2 in a recorded block: parameters gathered into memory that is given back after each module.

A recompute refers to gathered parameters as to all others, and runs when FSDP2 has gathered them
again. Backward gathers them module by module. So the block is cut where memory has been given back:
values alive at a cut are kept, and no window crosses it.

Invariant: a run pays nothing until it meets an operator of FSDP2. Then it changes its class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .. import _torch, errors
from .._engine import put_before

_Run: Any = object  # `Run`, once an instance is made


class BesideGathering(_Run):  # type: ignore[misc]
    """A run that has met FSDP2: a class put before that of the run."""

    sees_gathering = True
    _lent: list[torch.UntypedStorage]  # memory of gathered parameters, until it is given back
    _alive: list[int]  # cells from before the last cut
    _cut_at: int  # the number of cells then
    _kept: dict[Any, ref[Tensor]]  # by id and version

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._here["depth"] == self._depth:
            self._look_for_memory_given_back()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def close(self) -> None:
        self._lent = []
        super().close()

    def _look_for_memory_given_back(self) -> None:
        there = [storage for storage in self._lent if storage.nbytes()]
        if len(there) < len(self._lent):
            self._lent = there
            self._cut()

    def _cut(self) -> None:
        """Keep the values that are alive."""
        cells = [*self._alive, *range(self._cut_at, len(self.cells))]
        self._alive = [cell for cell in cells if self.cells[cell]() is not None]
        for tensor in [self.cells[cell]() for cell in self._alive]:
            if _torch.has_storage(tensor) and not self.is_from_outside(tensor):
                self._keep_once(tensor)
        self._cut_at = len(self.cells)

    def _keep_once(self, tensor: Tensor) -> None:
        key = id(tensor), _torch.version(tensor)
        kept = self._kept.get(key)
        if kept is None or kept() is not tensor:
            self.keep_at(tensor, None)
            self._kept[key] = ref(tensor)


def lend(run: Any, tensors: Iterable[Tensor]) -> None:
    """FSDP2 has gathered parameters into the memory of these tensors."""
    if not run.sees_gathering:
        put_before(run, BesideGathering)
        run._lent, run._alive, run._cut_at, run._kept = [], [], 0, {}
    run._lent += [tensor.untyped_storage() for tensor in tensors]


def check_there(where: object, parameter: Tensor) -> None:
    """Refuse a parameter whose memory has been given back, on which kernels would crash."""
    if not _torch.has_storage(parameter):
        return
    if parameter.numel() and not parameter.untyped_storage().nbytes():
        raise errors.given_back(where, parameter.shape)
