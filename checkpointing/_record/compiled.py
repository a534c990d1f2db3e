"""Compiled code in a recorded block.

Inductor's code allocates and writes memory past the dispatcher, and calls some operators in
between. A run lets these pass: their results go to kernels that it does not see. Results of
compiled code are tensors from outside. Its writes show in version counters alone, so the version of
a tensor that the run has made is compared with that after the last recorded operator, at every read
and save.

Invariant: a run pays nothing while inductor is not loaded.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .ops import tensors_of
from .position import Position
from .program import Step

INDUCTOR = "torch._inductor.output_code"  # loaded before compiled code runs


class CompiledCode:
    """Watches for the writes of compiled code."""

    def __init__(self, run: Position) -> None:
        self._run = run
        # By storage: the highest version that recorded operators have left.
        self._versions: dict[int, int] = {}

    def before(self, values: Any) -> bool:
        # What inductor has compiled always runs without grad mode.
        if not torch.is_grad_enabled() and _torch.is_called_from("torch._inductor"):
            return False
        self.look_at(values)
        return True

    def look_at(self, values: Any) -> None:
        """Find the tensors, among those about to be read or saved, that were written unseen.
        Compiled code itself saves nothing: autograd saves its results after it has returned."""
        plain = [tensor for tensor in tensors_of(values) if type(tensor) is Tensor]
        for tensor in filter(_torch.has_storage, plain):
            storage, version = _torch.storage_id(tensor), _torch.version(tensor)
            if version > self._versions.get(storage, 0):
                self._versions[storage] = version
                known = self._run.known
                if known.made_at(storage) is not None and not known.has_met(tensor):
                    self._run.written_unseen(tensor)

    def after(self, step: Step, args: Any, kwargs: Any, result: Any) -> None:
        """Note the versions that the step has left."""
        if not (step.is_view or step.writes):  # below autograd, the version of a view counts from 0
            for tensor in filter(_torch.has_storage, tensors_of(result)):
                self._versions[_torch.storage_id(tensor)] = _torch.version(tensor)
        targets = step.info.targets_of(args, kwargs)
        for tensor in filter(_torch.has_storage, targets):
            storage = _torch.storage_id(tensor)
            version = _torch.version(tensor) + 1  # counted up when the operator has returned
            # What `unsafe_split` returns shares memory, and counts apart.
            self._versions[storage] = max(version, self._versions.get(storage, 0))
