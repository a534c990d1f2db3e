"""A drop-in replacement for `torch.utils.checkpoint`, over this library's engine.

Change `from torch.utils.checkpoint import checkpoint` to `from checkpointing.torch_compat import
checkpoint`. Signatures and semantics are those of torch 2.15 on every torch from 2.13 on, with its
warnings and those sentences of its errors that other code matches. Data, enums and the contexts of
selective checkpointing are torch's own.

Improvements: tensors in keyword arguments and containers are guarded, the random state of every
device type among the arguments is forked, `ctx.saved_tensors` may be read twice, and switches are
per thread and context.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any, TypeVar, overload

import torch
import torch.utils.checkpoint as _theirs
from torch import nn
from torch.utils.checkpoint import noop_context_fn as noop_context_fn

from . import _torch
from ._engine import name_of, warn
from ._entry import (
    CheckpointedObject,
    CheckpointFunction as CheckpointFunction,
    Options,
    check_backward_validity as check_backward_validity,
    is_disabled,
    is_plain,
    run_rerun,
    switched,
    wrap,
)
from .errors import CheckpointError as CheckpointError

# Bound here, since users replace torch's names by ours (`torch.utils.checkpoint.checkpoint = ...`).
_their_checkpoint = _theirs.checkpoint

ContextFn = Callable[[], Any]  # returns the contexts of the forward and of the recompute
F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

__all__ = _theirs.__all__


def __getattr__(name: str) -> Any:
    """Names that are not defined here are torch's: other code imports private ones, too."""
    return getattr(_theirs, name)


_early_stop = ContextVar("checkpointing.early_stop", default=None)
_debug = ContextVar("checkpointing.debug", default=None)


def set_checkpoint_early_stop(enable: bool) -> AbstractContextManager[None]:
    """Override `early_stop` of every `checkpoint` that is called inside, in this thread and
    context.

    Example:
        >>> import torch
        >>> from checkpointing.torch_compat import checkpoint, set_checkpoint_early_stop
        >>> x = torch.randn(3, requires_grad=True)
        >>> with set_checkpoint_early_stop(False):  # backward runs all of the function again
        ...     y = checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False)
    """
    return switched(_early_stop, enable)


def set_checkpoint_debug_enabled(enabled: bool | None) -> AbstractContextManager[None]:
    """Override `debug` of every `checkpoint` that is called inside, in this thread and context.
    None overrides nothing.

    Example:
        >>> import torch
        >>> from checkpointing.torch_compat import checkpoint, set_checkpoint_debug_enabled
        >>> x = torch.randn(3, requires_grad=True)
        >>> with set_checkpoint_debug_enabled(True):  # errors list the operators of both runs
        ...     y = checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False)
    """
    return switched(_debug, enabled)


def _switch(ours: ContextVar[Any], theirs: str, argument: Any) -> Any:
    """An argument, unless our context manager or torch's overrides it."""
    for override in (ours.get(), getattr(_theirs, theirs)):
        if override is not None:
            return override
    return argument


@overload
def checkpoint(function: Callable[..., R], *args: Any, **kwargs: Any) -> R: ...
@overload
def checkpoint(function: None = None, **options: Any) -> Callable[[F], F]: ...
def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function without saving its activations, as `torch.utils.checkpoint.checkpoint` does.

    Args:
        function: the function to call, now and in backward. Without it, returns a decorator.
        args, kwargs: its arguments: any nesting of containers and tensors of any shape, dtype and
            device.
        use_reentrant: False recomputes through autograd's saved-tensors hooks. True is the legacy
            way: no keywords, no `torch.autograd.grad`, no `backward(inputs=...)`, and an argument
            that requires grad. None means True, with torch's warning.
        preserve_rng_state: whether the recompute draws the random numbers of the forward.
        context_fn: returns two context managers, for the forward and for the recompute.
        determinism_check: `"default"` compares shape, dtype and device of the tensors that forward
            and recompute save; `"none"` compares nothing.
        debug: log the operators of both runs, and show them in errors.
        early_stop: stop the recompute at the last tensor that is needed.
        respect_saved_tensors_hooks: whether tensors that a selective policy keeps go through the
            saved-tensors hooks around the region. None means False, with torch's warning if there
            are such hooks. True needs torch 2.14.

    Returns:
        The result of `function(*args, **kwargs)`, or a decorator for functions and methods.

    Raises:
        ValueError: if arguments contradict each other.
        CheckpointError: from backward, if the tensors can't be recomputed exactly.

    Under `torch.compile` the call is torch's own.

    Example:
        >>> import torch
        >>> from checkpointing.torch_compat import checkpoint
        >>> x = torch.randn(3, requires_grad=True)
        >>> checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).sum().backward()
    """
    options = {
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
        "context_fn": context_fn,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
        "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
    }
    if function is None and not args:
        _refuse_keywords(kwargs)
        return partial(_decorated, partial(_checkpoint, options))
    return _checkpoint(options, function, args, kwargs)


def _refuse_keywords(given: dict[str, Any]) -> None:
    if given:
        raise ValueError("Unexpected keyword arguments: " + ",".join(given))


def _decorated(run: Any, function: Any) -> Any:
    if isinstance(function, MethodType):  # which would be pickled by its name
        return CheckpointedObject(function, run)
    return wrap("checkpoint", function, run)


_DEFAULTS: Any = checkpoint.__kwdefaults__
_CHECKS: Any = {"default": "metadata", "none": "none"}


def _checkpoint(options: Any, function: Any, args: Any, kwargs: Any, name: str = "") -> Any:
    # The compiler looks at the arguments that a call names: leave the defaults out.
    given = {key: value for key, value in options.items() if value is not _DEFAULTS[key]}
    if torch.compiler.is_dynamo_compiling() or _torch.is_tracing():
        # New in 2.14, and of no effect here: kept tensors are in the graph, where no hook sees
        # them.
        given.pop("respect_saved_tensors_hooks", None)
        return _their_checkpoint(function, *args, **given, **kwargs)
    if _chooses_reentrant(options["use_reentrant"], ""):
        _refuse_keywords(kwargs)
        if given.keys() & {"context_fn", "debug", "respect_saved_tensors_hooks"}:
            raise ValueError(
                "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported "
                "when use_reentrant=False."
            )
        if is_disabled():
            return function(*args)
        return CheckpointFunction.apply(  # type: ignore[no-untyped-call]
            function, options["preserve_rng_state"], *args
        )
    context_fn, check = options["context_fn"], options["determinism_check"]
    debug = _switch(_debug, "_checkpoint_debug_enabled", options["debug"])
    if debug and context_fn is not noop_context_fn:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    if check not in _CHECKS:
        raise ValueError(f"determinism_check should be one of {list(_CHECKS)}, but got {check}")
    if is_plain():
        return function(*args, **kwargs)
    contexts = _contexts(context_fn, options["respect_saved_tensors_hooks"])
    early_stop = _switch(_early_stop, "_enable_checkpoint_early_stop", options["early_stop"])
    rng = options["preserve_rng_state"]
    ours = Options("rerun", True, rng, early_stop, _CHECKS[check], debug=debug)
    name = name_of(function)
    was_up = _torch.accelerator_is_up()
    result = run_rerun(function, args, kwargs, name, ours, contexts, "torch.utils.checkpoint")
    if rng and was_up != _torch.accelerator_is_up():
        raise RuntimeError(
            "PyTorch's device state was initialized in the forward pass of a Checkpoint, which is "
            "not allowed: the earlier state of its random generator is unknown. Use the device "
            "once before the first checkpoint, or pass preserve_rng_state=False."
        )
    return result


def _contexts(context_fn: ContextFn, respect: bool | None) -> Any:
    """The contexts of forward and recompute, if there are any."""
    if context_fn is noop_context_fn:
        return None
    forward, recompute = context_fn()
    if isinstance(forward, _torch.SelectiveForward):
        if hasattr(forward, "respect_saved_tensors_hooks"):  # since 2.14
            forward.respect_saved_tensors_hooks = respect
            forward = _torch.shows_users_hooks(forward)
        elif respect:
            raise ValueError(
                "respect_saved_tensors_hooks=True needs torch 2.14: here, selective checkpointing "
                "ignores them"
            )
    return forward, recompute


def _chooses_reentrant(given: bool | None, name: str) -> bool:
    if given is None:
        warn(
            f"torch.utils.checkpoint{name}: the use_reentrant parameter should be passed "
            "explicitly. In a future release, leaving it out will raise an exception. "
            "use_reentrant=False is recommended, but if you need to preserve the current default "
            "behavior, you can pass use_reentrant=True. Refer to docs for more details on the "
            "differences between the two variants."
        )
        return True
    return given  # which torch converts as late as possible


def checkpoint_sequential(
    functions: nn.Sequential | nn.ModuleList | Iterable[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run functions one after the other, in segments, all but the last under `checkpoint`.

    Args:
        functions: an `nn.Sequential`, `nn.ModuleList` or list of callables of one argument.
        segments: the number of segments of `len(functions) // segments` functions; the last one
            takes the rest.
        input: the argument of the first function.
        use_reentrant, preserve_rng_state: as for `checkpoint`.

    Raises:
        ValueError: if there are no segments, more segments than functions, or unknown keywords.

    Returns:
        The result of the last function.

    Example:
        >>> import torch
        >>> from checkpointing.torch_compat import checkpoint_sequential
        >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        >>> x = torch.randn(2, 4, requires_grad=True)
        >>> y = checkpoint_sequential(layers, 3, x, use_reentrant=False)
    """
    use_reentrant = _chooses_reentrant(use_reentrant, ".checkpoint_sequential")
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    _refuse_keywords(kwargs)
    if isinstance(functions, nn.Sequential):
        functions = functions.children()  # a layer that comes twice runs once, as in torch
    steps = [*functions]
    if not 1 <= segments <= len(steps):
        raise ValueError(
            f"segments must be between 1 and the number of functions ({len(steps)}), not {segments}"
        )
    size = len(steps) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        input = checkpoint(
            partial(_run_in_turn, steps[start : start + size]),
            input,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
        )
    return _run_in_turn(steps[last:], input)


def _run_in_turn(steps: Any, value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value
