"""The legacy backend: a custom `autograd.Function` that runs the function again inside its backward.

Kept for programs that rely on it; self-contained, deletable in one commit. It can't do what the engine does, and says
so: only `backward()` without `inputs=`, only positional tensors differentiate, gradients of first order, at least one
input must require grad. Random state, ambient state and module buffers are captured as in the rest of the library.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from . import _torch, errors
from ._ambient import Ambient, Generators, has_rng
from ._engine import thread, warn
from ._rerun import Buffers, PreserveRngState, Surroundings, required_of
from ._tree import map_tensors


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn if no tensor in `inputs` requires grad: the gradients will then be None."""
    if not any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        warn("None of the inputs have requires_grad=True. Gradients will be None")


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same tuple with its tensors cut off from their graph; whether they require grad stays."""
    if not isinstance(inputs, tuple):
        raise RuntimeError(f"Only tuple of tensors is supported. Got Unsupported input type: {type(inputs).__name__}")
    return tuple(
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in inputs
    )


class CheckpointFunction(torch.autograd.Function):
    """`CheckpointFunction.apply(function, preserve_rng_state, *args)` is `function(*args)`, differentiable once."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], preserve_rng_state: PreserveRngState, *args: Any) -> Any:
        check_backward_validity(args)
        ctx.function = function
        ctx.ambient = Ambient()
        around = Surroundings(function, *(value for value in args if isinstance(value, FunctionType | MethodType)))
        ctx.buffers = Buffers(around.modules + tuple(value for value in args if isinstance(value, nn.Module)))
        ctx.rng = None
        if preserve_rng_state:
            generators = [
                *around.generators,
                *ctx.buffers.generators,
                *(value for value in args if isinstance(value, torch.Generator)),
            ]
            devices = {device for device in ctx.buffers.devices | _devices(args) if has_rng(device)}
            ctx.rng = Generators(True, devices, generators, preserve_rng_state == "all")
        ctx.is_tensor = [isinstance(value, Tensor) for value in args]
        ctx.others = [value for value in args if not isinstance(value, Tensor)]
        ctx.save_for_backward(*(value for value in args if isinstance(value, Tensor)))
        try:
            with torch.no_grad():
                return function(*args)
        finally:
            ctx.buffers.settle()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not _torch.is_checkpoint_valid():
            raise errors.CheckpointError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` "
                "parameter to .backward(). To resolve this error, you can either set use_reentrant=False "
                "(backend='rerun'), or call .backward() without passing the `inputs` argument."
            )
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        inputs = detach_variable(tuple(next(tensors if is_tensor else others) for is_tensor in ctx.is_tensor))
        outputs = _rerun(ctx, inputs)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        if not pairs:
            raise errors.CheckpointError("none of output has requires_grad=True, this checkpoint() is not necessary")
        try:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        except RuntimeError as error:
            if "mark a variable ready only once" not in str(error):
                raise
            raise errors.CheckpointError(
                "DistributedDataParallel met a parameter twice, because the reentrant backend runs a backward inside "
                "the backward. Use backend='rerun' (use_reentrant=False), which does not. What it said: "
                + str(error).split(". ")[0]
                + "."
            ) from error
        return (None, None, *(value.grad if isinstance(value, Tensor) else None for value in inputs))


def _devices(args: tuple[Any, ...]) -> set[torch.device]:
    devices: set[torch.device] = set()

    def see(tensor: Tensor) -> Tensor:
        devices.add(tensor.device)
        return tensor

    map_tensors(see, args)
    return devices


def _rerun(ctx: Any, inputs: tuple[Any, ...]) -> Any:
    result: Any = None

    def call() -> None:
        nonlocal result
        present = Buffers.exchange(ctx.buffers.then("the reentrant backend"))
        try:
            with torch.enable_grad():
                result = ctx.function(*inputs)
        finally:
            Buffers.exchange(present)

    region, thread.region = thread.region, None
    thread.depth += 1
    now = None if ctx.rng is None else ctx.rng.enter()
    try:
        ctx.ambient.run(call)
    finally:
        if now is not None:
            ctx.rng.leave(now)
        thread.depth -= 1
        thread.region = region
    return result


def run(function: Callable[..., Any], name: str, preserve_rng_state: PreserveRngState, args: Any, kwargs: Any) -> Any:
    """One region of our own doors: what the backend can't do is an error before anything is lost."""
    if kwargs:
        raise ValueError(
            f"region '{name}': Unexpected keyword arguments: {','.join(kwargs)}. The reentrant backend takes "
            "positional arguments only; use backend='rerun'."
        )
    if not any(isinstance(value, Tensor) and value.requires_grad for value in args):
        around = Surroundings(function)
        modules = around.modules + tuple(value for value in args if isinstance(value, nn.Module))
        found = [tensor for _, tensor, *_ in around.tensors]
        found += [tensor for tensor, _ in required_of(around.attributes)]
        if any(t.requires_grad for t in found) or any(p.requires_grad for m in modules for p in m.parameters()):
            raise errors.UnsupportedError(
                f"region '{name}': none of the inputs requires grad, so the reentrant backend would give the "
                "parameters that the function uses no gradients. Use backend='rerun', or call requires_grad_() on an "
                "input."
            )
    return CheckpointFunction.apply(function, preserve_rng_state, *args)  # type: ignore[no-untyped-call]


_warned: list[bool] = []


def warn_once(stacklevel: int) -> None:
    """The backend is deprecated: said once per process, when it is chosen through our own doors."""
    if not _warned:
        _warned.append(True)
        warnings.warn(
            "backend='reentrant' is deprecated: backend='rerun', the default, supports more and is faster. "
            "Leave backend out.",
            FutureWarning,
            stacklevel=stacklevel + 1,
        )
