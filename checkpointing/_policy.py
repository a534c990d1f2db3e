"""What a region keeps.

Keeping a value *is* a checkpoint: recompute starts from it. In a scope (or a replay function) the tape holds the value
and cuts what made it; under rerun the value is pinned, so that a decision taken in the forward stands in the rerun.
"""

from __future__ import annotations

from typing import TypeVar, cast

from ._engine import thread
from ._tree import map_tensors

T = TypeVar("T")


def keep(x: T) -> T:
    """Keep `x` in the innermost region: its recompute starts from `x` and never computes it again.

    Args:
        x: a tensor (any shape, dtype and device) or any nesting of containers and dataclasses with tensors in it.

    Returns:
        `x` itself in the forward. In a rerun, which calls the function again, an equal structure with the kept
        values in place of the recomputed ones. Outside of a region, `x`.

    What is kept are the storages that the tensors lie on. They are saved by whatever encloses the region, so under
    `torch.autograd.graph.save_on_cpu` they are offloaded. Tensors from outside of the region are held anyway.

    >>> import torch
    >>> from checkpointing import checkpoint_scope, keep
    >>> layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    >>> x = torch.randn(2, 8, requires_grad=True)
    >>> with checkpoint_scope() as scope:
    ...     y = x
    ...     for layer in layers:
    ...         y = keep(layer(y).relu())  # backward recomputes one layer at a time
    >>> y.sum().backward()
    >>> scope.stats.bytes_kept
    0

    Source of the method: `jax.ad_checkpoint.checkpoint_name` with the policy `save_only_these_names`.
    """
    region = thread.region
    if region is None:
        return x
    return cast(T, map_tensors(region.keep, x))
