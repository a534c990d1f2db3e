"""`torch.utils.checkpoint`, argument for argument, over this library's engine.

Change `from torch.utils.checkpoint import checkpoint` to `from checkpointing.torch_compat import checkpoint`: torch
2.15's signatures and semantics on every torch from 2.11 on, its warnings, and the sentences in its errors that code
matches on. Data and enums that other code compares by identity are torch's own objects.

What is better here: tensors in keyword arguments and containers are guarded, every device type among the arguments
has its random state forked, `ctx.saved_tensors` may be read twice, and switches are per thread and context.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast, overload

import torch
import torch.utils.checkpoint as _theirs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy as CheckpointPolicy
from torch.utils.checkpoint import DefaultDeviceType as DefaultDeviceType
from torch.utils.checkpoint import GraphExecGroup as GraphExecGroup
from torch.utils.checkpoint import SelectiveCheckpointContext as SelectiveCheckpointContext
from torch.utils.checkpoint import get_device_states as get_device_states
from torch.utils.checkpoint import noop_context_fn as noop_context_fn
from torch.utils.checkpoint import set_device_states as set_device_states

from . import _torch
from . import _rerun
from ._api import is_plain
from ._report import logged
from ._engine import is_internal
from ._check import metadata_of
from ._where import entered_from, warn
from ._policy import selective_context
from ._reentrant import CheckpointFunction as CheckpointFunction
from ._reentrant import check_backward_validity as check_backward_validity
from ._reentrant import detach_variable as detach_variable
from .errors import CheckpointError as CheckpointError

SAC_IGNORED_OPS = _theirs.SAC_IGNORED_OPS
# Bound here, so that this module can itself be put in the place of torch's (`torch.utils.checkpoint.checkpoint = ...`).
_their_names = vars(_theirs)
_their_checkpoint = _theirs.checkpoint
_their_selective_contexts = _theirs.create_selective_checkpoint_contexts

ContextFn = Any
P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]


def __getattr__(name: str) -> Any:
    """Other people's code imports private names of torch's module, too."""
    if name.startswith("_") and not name.startswith("__"):
        return getattr(_theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_early_stop: contextvars.ContextVar[bool | None] = contextvars.ContextVar("checkpointing.early_stop", default=None)
_debug: contextvars.ContextVar[bool | None] = contextvars.ContextVar("checkpointing.debug", default=None)


@contextlib.contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Override `early_stop` of every `checkpoint` called inside, in this thread and context."""
    token = _early_stop.set(enable)
    try:
        yield
    finally:
        _early_stop.reset(token)


@contextlib.contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Override `debug` of every `checkpoint` called inside, in this thread and context; None overrides nothing."""
    token = _debug.set(enabled)
    try:
        yield
    finally:
        _debug.reset(token)


def _switch(ours: contextvars.ContextVar[bool | None], theirs: str, argument: bool) -> bool:
    """An argument, unless one of the context managers overrides it: ours, or torch's of the same name."""
    override = ours.get()
    if override is None:
        override = _their_names.get(theirs)
    return argument if override is None else override


_MISSING: Any = object()
_CHECKS: dict[str, Callable[[Tensor], Any] | None] = {"default": metadata_of, "none": None}


class _Checkpointed:
    """What `checkpoint(**options)(function)` returns; as a method it binds."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.function = function
        self.checkpoint_kwargs = options
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _checkpoint(self.function, args, kwargs, **self.checkpoint_kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        bind = getattr(self.function, "__get__", None)
        if instance is None or bind is None:
            return self
        if torch.compiler.is_dynamo_compiling() and isinstance(self.function, FunctionType):
            return functools.partial(self, instance)  # Dynamo in torch 2.11 can't trace `bind`
        return type(self)(bind(instance, owner), self.checkpoint_kwargs)


@overload
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> R: ...
@overload
def checkpoint(
    function: None = None,
    *,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
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
    """Call a function so that autograd does not hold what it saves, as `torch.utils.checkpoint.checkpoint` does.

    Args:
        function: what to call, now and in backward; left out, a decorator is returned.
        args, kwargs: its arguments, any nesting of containers with tensors of any shape, dtype and device in it.
        use_reentrant: False recomputes through autograd's saved-tensors hooks. True is the legacy way: no keywords, no
            `torch.autograd.grad`, no `backward(inputs=...)`, and an argument that requires grad. None means True, with
            torch's warning.
        preserve_rng_state: whether the recompute draws the random numbers of the forward.
        context_fn: returns two context managers, for the forward and for the recompute.
        determinism_check: `"default"` compares shape, dtype and device of what forward and recompute save; `"none"`
            compares nothing.
        debug: log the operators of both runs, and show them when an error is found.
        early_stop: stop the recompute at the last tensor that is needed.
        respect_saved_tensors_hooks: whether what a selective policy keeps goes through the saved-tensors hooks around
            the region. None means False, with torch's warning where there are such hooks.

    Returns:
        What `function(*args, **kwargs)` returns, or a decorator for functions and methods.

    Raises:
        ValueError: for arguments that contradict each other.
        CheckpointError: from backward, when the tensors can't be recomputed exactly.

    Under `torch.compile` the call is torch's own.

    >>> import torch
    >>> from checkpointing import checkpoint
    >>> x = torch.randn(3, requires_grad=True)
    >>> checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False).sum().backward()
    """
    if function is None and not args:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        options = {
            "use_reentrant": use_reentrant,
            "preserve_rng_state": preserve_rng_state,
            "context_fn": context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
            "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
        }
        return functools.partial(_Checkpointed, options=options)
    return _checkpoint(
        function,  # type: ignore[arg-type]
        args,
        kwargs,
        use_reentrant,
        preserve_rng_state,
        context_fn,
        determinism_check,
        debug,
        early_stop,
        respect_saved_tensors_hooks,
    )


def _checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_reentrant: bool | None,
    preserve_rng_state: bool,
    context_fn: ContextFn,
    determinism_check: str,
    debug: bool,
    early_stop: bool,
    respect_saved_tensors_hooks: bool | None,
) -> Any:
    if torch.compiler.is_dynamo_compiling() or _torch.is_tracing():
        # Only what differs from the defaults: what the compiler does with a call depends on which arguments it names.
        options: dict[str, Any] = {}
        if use_reentrant is not None:
            options["use_reentrant"] = use_reentrant
        if not preserve_rng_state:
            options["preserve_rng_state"] = preserve_rng_state
        if context_fn is not noop_context_fn:
            options["context_fn"] = context_fn
        if determinism_check != "default":
            options["determinism_check"] = determinism_check
        if debug:
            options["debug"] = debug
        if not early_stop:
            options["early_stop"] = early_stop
        return _their_checkpoint(function, *args, **options, **kwargs)
    if use_reentrant is None:
        _warn_about_use_reentrant("checkpoint", "calling checkpoint without use_reentrant will raise an exception.")
        use_reentrant = True
    if use_reentrant:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        if context_fn is not noop_context_fn or debug is not False or respect_saved_tensors_hooks is not None:
            raise ValueError(
                "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported when "
                "use_reentrant=False."
            )
        return CheckpointFunction.apply(function, bool(preserve_rng_state), *args)  # type: ignore[no-untyped-call]

    if _switch(_debug, "_checkpoint_debug_enabled", debug):
        if context_fn is not noop_context_fn:
            raise ValueError("debug=True is incompatible with non-default context_fn")
        debug = True
    else:
        debug = False
    if determinism_check not in _CHECKS:
        raise ValueError(f"determinism_check should be one of {list(_CHECKS)}, but got {determinism_check}")
    if is_plain():
        return function(*args, **kwargs)
    was_up = not preserve_rng_state or _torch.accelerator_is_up()

    def contexts(frame):
        if debug:
            return logged(frame)
        forward, recompute = context_fn()
        if isinstance(forward, _torch.SelectiveForward):
            forward.respect_saved_tensors_hooks = respect_saved_tensors_hooks
        return forward, recompute

    result = _rerun.call(function, args, kwargs, getattr(function, "__qualname__", type(function).__qualname__),
        entered_from(sys._getframe(1)), bool(preserve_rng_state), _switch(_early_stop, "_enable_checkpoint_early_stop", early_stop),
        _CHECKS[determinism_check], contexts if debug or context_fn is not noop_context_fn else None, "torch.utils.checkpoint")
    if not was_up and _torch.accelerator_is_up():
        raise RuntimeError(
            "PyTorch's device state was initialized in the forward pass of a Checkpoint, which is not allowed: what "
            "its random generator was before is unknown. Use the device once before the first checkpoint, or pass "
            "preserve_rng_state=False."
        )
    return result


def _warn_about_use_reentrant(name: str, threat: str) -> None:
    warn(
        f"torch.utils.checkpoint{'' if name == 'checkpoint' else '.' + name}: the use_reentrant parameter should be "
        f"passed explicitly. In a future release, {threat} use_reentrant=False is recommended, but if you need to "
        "preserve the current default behavior, you can pass use_reentrant=True. Refer to docs for more details on the "
        "differences between the two variants."
    )


def checkpoint_sequential(
    functions: nn.Sequential | nn.ModuleList | Iterable[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run functions one after the other, all segments but the last under `checkpoint`.

    Args:
        functions: an `nn.Sequential`, `nn.ModuleList` or list of callables of one argument.
        segments: how many pieces of `len(functions) // segments` functions; the last one takes the rest.
        input: the argument of the first function.
        use_reentrant, preserve_rng_state: as for `checkpoint`.

    Raises:
        ValueError: for fewer than one segment or more segments than functions, and unknown keywords.

    >>> import torch
    >>> from checkpointing import checkpoint_sequential
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    >>> y = checkpoint_sequential(layers, 3, torch.randn(2, 4, requires_grad=True), use_reentrant=False)
    """
    if use_reentrant is None:
        _warn_about_use_reentrant("checkpoint_sequential", "we will raise an exception if use_reentrant is not passed.")
        use_reentrant = True
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    steps: list[Any] = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(steps):
        raise ValueError(f"segments must be between 1 and the number of functions ({len(steps)}), not {segments}")
    size = len(steps) // segments
    last = size * (segments - 1)
    for start in range(0, last, size):
        input = checkpoint(
            functools.partial(_run_in_turn, steps[start : start + size]),
            input,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
        )
    return _run_in_turn(steps[last:], input)


def _run_in_turn(steps: list[Callable[..., Any]], value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value


# ---- selective checkpointing


class _Saved:
    """A cached output, with the version that it had."""

    __slots__ = ("unpack_hook", "val", "version")

    def __init__(self, value: Any, hooks: _torch.Hooks | None, in_place: bool) -> None:
        if isinstance(value, Tensor):
            value = _torch.alias(value)
            if hooks is not None:
                value = hooks[0](value)
        else:
            hooks = None
        self.val = value
        self.unpack_hook = None if hooks is None else hooks[1]
        self.version: int | None = None
        if isinstance(value, Tensor):  # autograd counts the write when the operator has returned
            self.version = _torch.version(value) + (in_place and hooks is None)

    def get(self, may_have_changed: bool) -> Any:
        if self.version is not None and not may_have_changed and self.version != _torch.version(self.val):
            raise RuntimeError("Tensor cached during selective activation checkpoint has been mutated")
        return self.val if self.unpack_hook is None else self.unpack_hook(self.val)


_RECOMPUTE: Any = object()
_CONSUMED: Any = object()
_Storage = defaultdict[Any, dict[int, Any]]

# Forward and recompute find each other by operator and number: the calls of each are counted. The modes derive from
# torch's, because other code asks for these classes.


class _Caching(_torch.SelectiveForward):  # type: ignore[misc]
    """Around the forward: caches what the policy says."""

    supports_higher_order_operators = True
    respect_saved_tensors_hooks: bool | None = None
    ac_graph_id: Any = None

    def __init__(self, policy_fn: Callable[..., Any], storage: _Storage) -> None:
        TorchDispatchMode.__init__(self)
        self.policy_fn = policy_fn
        self.storage = storage
        self.func_counter: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return result
        key = _torch.identity_of_call(func, args)
        number = self.func_counter[key]
        self.func_counter[key] += 1
        answer = self.policy_fn(selective_context(result), func, *args, **kwargs)
        if isinstance(answer, bool):
            answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        wanted = answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
        if (wanted and (not _torch.is_mutable(func) or _torch.writes_in_place(func))) or (
            # What has an ordered effect must not happen twice, unless the policy insists.
            answer is not CheckpointPolicy.MUST_RECOMPUTE and _torch.has_ordered_effect(func)
        ):
            hooks, in_place = self._hooks(), _torch.writes_in_place(func)
            self.storage[key][number] = _torch.tree_map(lambda value: _Saved(value, hooks, in_place), result)
        else:
            self.storage[key][number] = _RECOMPUTE
        return result

    def _hooks(self) -> _torch.Hooks | None:
        hooks = _user_hooks()
        if hooks is not None and self.respect_saved_tensors_hooks is None:
            warnings.warn(
                "A saved_tensors_hooks context (e.g. save_on_cpu) is active around a selective activation checkpoint "
                "region. Tensors that SAC saves currently bypass these hooks, but a future release will route them "
                "through the hooks like any other saved tensor. Silence this warning and choose the behavior "
                "explicitly by passing respect_saved_tensors_hooks=True|False to torch.utils.checkpoint.checkpoint.",
                FutureWarning,
                stacklevel=3,
            )
        return hooks if self.respect_saved_tensors_hooks else None


class _Cached(_torch.SelectiveRecompute):  # type: ignore[misc]
    """Around the recompute: answers from the cache."""

    supports_higher_order_operators = True

    def __init__(self, storage: _Storage, allow_cache_entry_mutation: bool) -> None:
        TorchDispatchMode.__init__(self)
        self.storage = storage
        self.allow_cache_entry_mutation = allow_cache_entry_mutation
        self.func_counter: dict[Any, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self.func_counter.clear()
        return TorchDispatchMode.__enter__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        key = _torch.identity_of_call(func, args)
        number = self.func_counter[key]
        self.func_counter[key] += 1
        reason = (
            "This can happen if the operations in the checkpointed region are nondeterministic or depend on global "
            "state that changed between forward and backward."
        )
        if key not in self.storage:
            raise RuntimeError(f"{func} encountered during backward but not found in storage. {reason}")
        entries = self.storage[key]
        if number not in entries:
            raise RuntimeError(
                f"{func} invocation index {number} encountered during backward but not found in storage. {reason}"
            )
        entry = entries[number]
        if entry is _RECOMPUTE:
            return func(*args, **kwargs)
        if entry is _CONSUMED:
            raise RuntimeError(
                "Trying to backward an extra time. You are only allowed to backward once on any region computed under "
                "selective activation checkpoint."
            )
        entries[number] = _CONSUMED
        result = _torch.tree_map(lambda saved: saved.get(self.allow_cache_entry_mutation), entry)
        # The caller goes on with its own tensor, into which an operator in place would have written that.
        return args[0].copy_(result) if _torch.writes_in_place(func) else result


def _user_hooks() -> _torch.Hooks | None:
    """The innermost hooks that the user has set; those of regions, ours and torch's, don't count."""
    passed: list[_torch.Hooks] = []
    hooks = _torch.enclosing_hooks()
    while hooks is not None and (is_internal(hooks) or _torch.are_torchs_own(hooks)):
        passed.append(hooks)
        _torch.pop_hooks()
        hooks = _torch.enclosing_hooks()
    for pair in reversed(passed):
        _torch.push_hooks(*pair)
    return hooks


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable[..., Any] | list[Any], allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for `context_fn`: which operators' outputs are cached in the forward instead of recomputed.

    Args:
        policy_fn_or_list: a list of `OpOverload`s to cache, or a function `(ctx, op, *args, **kwargs)` that returns a
            `CheckpointPolicy` or a bool (True: cache).
        allow_cache_entry_mutation: don't check that cached tensors have not been changed in place.

    Raises:
        ValueError: for a list with something else in it. TypeError: for something that is neither.
    """
    if _torch.is_tracing():  # torch's own tag the nodes of the graph
        theirs = _their_selective_contexts(policy_fn_or_list, allow_cache_entry_mutation)  # type: ignore[no-untyped-call]
        return cast("tuple[AbstractContextManager[Any], AbstractContextManager[Any]]", theirs)
    policy: Callable[..., Any]
    if isinstance(policy_fn_or_list, list):
        ops = policy_fn_or_list
        for op in ops:
            if not isinstance(op, _torch.OpOverload | _torch.HigherOrderOperator):
                hint = (
                    "Please update the OpOverloadPacket to a specific OpOverload."
                    "For example, if you have `torch.ops.aten.mm`, change it to `torch.ops.aten.mm.default`."
                    if isinstance(op, _torch.OpOverloadPacket)
                    else ""
                )
                raise ValueError(
                    f"Expected op in `op_list` to be an OpOverload but got: {op} of type {type(op)}. {hint}"
                )

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    elif callable(policy_fn_or_list):
        policy = policy_fn_or_list
    else:
        raise TypeError("policy_fn_or_list must be either a function or a list of ops.")
    storage: _Storage = defaultdict(dict)
    return _Caching(policy, storage), _Cached(storage, allow_cache_entry_mutation)
