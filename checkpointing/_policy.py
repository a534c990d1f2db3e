"""What a region keeps.

Keeping a value *is* a checkpoint: recompute starts from it. In a scope (or a replay function) the tape holds the value
and cuts what made it; under rerun the value is pinned, so that a decision taken in the forward stands in the rerun.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from . import _torch
from ._engine import thread
from ._tape import Policy
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


def as_policy(policy: Any) -> Policy | None:
    """What the tape asks, made from what the user gave: a list of operators, or a function as torch's selective
    checkpointing takes it, `(ctx, op, *args, **kwargs) -> CheckpointPolicy | bool`.

    Raises:
        TypeError: for anything else. ValueError: for a list with something else than `OpOverload`s in it.
    """
    if policy is None:
        return None
    if isinstance(policy, list | tuple | set | frozenset):
        for op in policy:
            if not isinstance(op, _torch.OpOverload | _torch.HigherOrderOperator):
                raise ValueError(
                    f"a policy lists OpOverloads such as torch.ops.aten.mm.default, not {op!r}"
                    + (" (name one of its overloads)" if isinstance(op, _torch.OpOverloadPacket) else "")
                )
        ops = frozenset(policy)
        return lambda op, args, kwargs, result: op in ops
    if not callable(policy):
        raise TypeError(f"a policy is a list of operators or a function, not {policy!r}")

    def ask(op: Any, args: Any, kwargs: Any, result: Any) -> bool | _torch.Hooks:
        answer = policy(selective_context(result), op, *args, **kwargs)
        if isinstance(answer, bool):
            return answer
        if answer in (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD):
            return _to_host, _from_host
        return answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    return ask


def selective_context(result: Any) -> Any:
    context = object.__new__(SelectiveCheckpointContext)  # torch 2.11's takes no `op_output`
    context.is_recompute = False
    context.op_output = result
    return context


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    return tensor.device, tensor.to("cpu", copy=True)


def _from_host(packed: tuple[torch.device, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor.to(device)
