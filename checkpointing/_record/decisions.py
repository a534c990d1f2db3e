"""Decisions: what a replay must not compute again, since it might come out otherwise.

Kernels that add atomically round differently from call to call. Computed again, a near tie between
two experts flips, and the tensors behind it have other sizes. So the indices and masks that follow
from rounded numbers are held from the forward on.

Invariant: a value is *sure* if a replay gives the same again on any device. It is held, or made
from nothing, or by views, integral operators and pointwise operators from what is sure.

Where steps write to a memory of which two decisions are held, one window may need both as they
were. It then starts from the first, and the later one is made again.

Rejected: holding what is read, at the first reader. Readers read views, and autograd saves the
base.
"""

import torch
from torch import Tensor

from .. import _torch
from .memories import Memories
from .program import Hold, Step, Value
from .store import Store

_INDICES = (torch.int64, torch.int32)
_FEW = 1 << 16  # bytes of decisions that are always held; else an eighth of what autograd saves


def find_decisions(known: Memories, step: Step, store: Store) -> None:
    """Note which results of a new step are sure, and the decisions that it takes or reads. They are
    held, so the bytes of all decisions in a run are limited."""
    cells = [cell for cell, _ in step.memories]
    unsure = {
        value: known.tensor_in(value[0]) for value in step.reads if not known.is_sure(value[0])
    }
    if step.is_view:
        step.sure = () if unsure else tuple(cells)
        return
    made = {known.value(cell): known.tensor_in(cell) for cell in cells}
    decided: dict[Value, Tensor] = {}
    if step.info.sizes_depend_on_data:
        decided = {value: read for value, read in unsure.items() if not is_rounded(read)}
        # Of rounded numbers alone (`unique`), the results are all there is to hold.
        if not decided and unsure.keys() == {*step.reads}:
            decided = made
    is_exact = step.info.is_pointwise or not step.reads
    for value, tensor in made.items():
        if not unsure and (is_exact or not is_rounded(tensor)):
            step.sure += (value[0],)
        elif tensor.dtype in _INDICES and not step.info.pools:
            decided[value] = tensor
    limit = max(_FEW, store.saved_bytes // 8) - store.decided_bytes
    for value, tensor in decided.items():
        nbytes = _torch.memory_size(tensor)
        if nbytes <= limit:  # indices may fit where the mask that they were found in does not
            limit -= nbytes
            step.decides += (Hold(value, known.memory_of[value[0]].number),)


def is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
