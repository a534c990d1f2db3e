"""The legacy backend: a custom `autograd.Function` that runs the function again in its backward.

For programs that rely on it; self-contained, deletable in one commit. It supports only `backward()`
without `inputs=`, positional tensors, and gradients of first order; at least one input must require
grad. Everything else is an error. Random state, ambient state and module buffers are captured as in
the rest of the library.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import detach_variable

from .. import _torch, errors
from .._engine import Region, Undo, tensors_in, undo_all, warn, within
from .._rerun import Call, PreserveRngState


def _trains(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn if no tensor in `inputs` requires grad: the gradients will then be None."""
    if not any(map(_trains, inputs)):
        warn("None of the inputs have requires_grad=True. Gradients will be None")


class CheckpointFunction(torch.autograd.Function):
    """`CheckpointFunction.apply(function, preserve_rng_state, *args)` is `function(*args)`,
    differentiable once."""

    @staticmethod
    def forward(ctx: Any, function: Any, preserve_rng_state: PreserveRngState, *args: Any) -> Any:
        check_backward_validity(args)
        ctx.call = Call(function, args, {}, preserve_rng_state)
        try:
            return function(*args)  # without grad mode, as in all of these
        finally:
            ctx.call.end()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not _torch.is_checkpoint_valid():
            raise errors.CheckpointError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or "
                "passing an `inputs` parameter to .backward(). To resolve this error, you can "
                "either set use_reentrant=False (backend='rerun'), or call .backward() without "
                "passing the `inputs` argument."
            )
        _ = ctx.saved_tensors  # empty, but an error if the graph was not retained
        inputs, outputs = _rerun(ctx.call, len(ctx.needs_input_grad) - 2)
        if not _torch.keeps_graph():
            ctx.call = None
        pairs = [pair for pair in zip(outputs, grads, strict=True) if _trains(pair[0])]
        if not pairs:
            raise errors.CheckpointError(
                "none of output has requires_grad=True, this checkpoint() is not necessary"
            )
        trained, gradients = zip(*pairs, strict=True)
        try:
            torch.autograd.backward(trained, gradients)
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise errors.CheckpointError(
                "DistributedDataParallel met a parameter twice, because the reentrant backend runs "
                "a backward inside the backward. Use backend='rerun' (use_reentrant=False), which "
                f"does not. It said: {str(error).split('. ')[0]}."
            ) from error
        return None, None, *[v.grad if isinstance(v, Tensor) else None for v in inputs]


def _rerun(call: Call, count: int) -> tuple[Any, Any]:
    """The last `count` arguments (a partial adds others before), detached; and the outputs."""
    name = "the reentrant backend"
    undo: Undo = []
    with within(Region()):
        try:
            restored, cells = call.restored(name, undo)
            first, last = restored.args[:-count], restored.args[-count:]
            inputs = detach_variable(last)
            outputs = call.go_back(name, cells, undo).run(
                restored.func, *first, *inputs, **restored.keywords
            )
        finally:
            undo_all(undo)
    return inputs, (outputs,) if isinstance(outputs, Tensor) else outputs


def run(
    function: Any, name: str, preserve_rng_state: PreserveRngState, args: Any, kwargs: Any
) -> Any:
    """Enter a region of `checkpointed`. Unsupported inputs are an error in the forward."""
    if kwargs:
        raise ValueError(
            f"region '{name}': Unexpected keyword arguments: {','.join(kwargs)}. The reentrant "
            "backend takes positional arguments only; use backend='rerun'."
        )
    if not any(map(_trains, args)):
        result = function(*args)  # in grad mode, which shows whether it uses parameters that train
        if any(map(_trains, tensors_in(result))):
            raise errors.CheckpointError(
                f"region '{name}': none of the inputs requires grad, so the reentrant backend "
                "would give the parameters that the function uses no gradients. Use "
                "backend='rerun', or call requires_grad_() on an input."
            )
        check_backward_validity(args)
        return result
    return CheckpointFunction.apply(  # type: ignore[no-untyped-call]
        function, preserve_rng_state, *args
    )
