"""Compiled code in a recorded block.

Inductor's code allocates and writes memory past the dispatcher, and calls some operators in
between. The run lets these pass: their results go to kernels that it does not see. Results of
compiled code are tensors from outside. Its writes show in version counters alone, so the run
compares the version of a tensor that it has made with the version after the last recorded operator,
at every read and save.

Invariant: a run pays nothing while inductor is not loaded. It changes its class when it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._engine import put_before
from .ops import tensors_of
from .program import WRITTEN_UNSEEN

_Run: Any = object  # `Run`, once an instance is made

INDUCTOR = "torch._inductor.output_code"  # loaded before compiled code runs


class BesideCompiledCode(_Run):  # type: ignore[misc]
    """A run in a process that may run compiled code: a class put before that of the run."""

    sees_compiled_code = True
    _versions: dict[int, int]  # by storage: the highest version that recorded operators have left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._here["depth"] != self._depth and not self._wakes_up(func, args):
            return func(*args, **kwargs)
        if not torch.is_grad_enabled() and _torch.inductor_runs():
            return func(*args, **kwargs)
        self._look_for_writes((*args, *kwargs.values()))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._note_versions(args, kwargs, result)
        return result

    def save(self, tensor: Tensor) -> Any:
        self._look_for_writes((tensor if self._announced is None else self._announced,))
        return super().save(tensor)

    def _look_for_writes(self, values: Iterable[Any]) -> None:
        """Note the writes of compiled code to these tensors."""
        plain = [tensor for tensor in tensors_of(tuple(values)) if type(tensor) is Tensor]
        for tensor in filter(_torch.has_storage, plain):
            storage, version = _torch.storage_id(tensor), _torch.version(tensor)
            if version > self._versions.get(storage, 0):
                self._versions[storage] = version
                if self.has_made(tensor):
                    self._event(WRITTEN_UNSEEN, (tensor,))

    def _note_versions(self, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note the versions that the last step has left."""
        if not self.step.is_view:  # below autograd, the version of a view counts from 0
            self._note(result, 0)
        info = self.step.info
        for place in () if info is None else info.targets:
            target = kwargs.get(place) if type(place) is str else args[place]
            self._note(target, 1)  # which is counted up when the operator has returned

    def _note(self, values: Any, change: int) -> None:
        for tensor in filter(_torch.has_storage, tensors_of(values)):
            self._versions[_torch.storage_id(tensor)] = _torch.version(tensor) + change


def see_compiled_code(run: Any) -> None:
    """From here on the run looks for writes of compiled code."""
    put_before(run, BesideCompiledCode)
    run._versions = {}
