"""The doors `checkpointed` and `checkpoint_scope`, side by side, and the one `Options` behind them.

A door decides whether there is a region at all (grad mode, `enabled`, `disabled()`), builds frame and source, and
enters and leaves them so that nothing stays behind after an exception. Everything else is the engine's.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, cast, overload

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from typing_extensions import Unpack

from . import _reentrant, _torch, errors
from ._check import CHECKS, DeterminismCheck, check_of
from ._debug import explain, logged
from ._engine import Frame, is_internal, unpack
from ._policy import as_policy
from ._program import program_of
from ._record import Run
from ._region import thread
from ._replay import Replay as Follow
from ._report import Report, Reported, Stats, measure, note, report_of
from ._rerun import PreserveRngState, Rerun, call_within
from ._where import Line, entered_from, stack_of_user, warn

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)

Backend = Literal["rerun", "replay", "reentrant"]


class Options(NamedTuple):
    """What a region can be told, spelled once. `checkpointed` and `checkpoint_scope` say what each means."""

    backend: Backend | None = None
    enabled: bool = True
    preserve_rng_state: PreserveRngState = True
    early_stop: bool = True
    determinism_check: DeterminismCheck = "metadata"
    policy: Any = None
    debug: bool = False
    report: bool = False
    name: str | None = None

    def checked(self) -> Options:
        """The same with the backend and the policy that are meant.

        Raises:
            ValueError: for options that contradict each other.
        """
        if self.backend is None:
            return self._replace(backend="rerun" if self.policy is None else "replay").checked()
        check = self.determinism_check
        if self.backend not in ("rerun", "replay", "reentrant"):
            raise ValueError(f"backend is 'rerun', 'replay' or 'reentrant', not {self.backend!r}")
        if self.policy is not None and self.backend != "replay":
            raise ValueError(
                f"a policy needs the tape, which backend={self.backend!r} doesn't have: leave backend out, or say "
                "backend='replay'"
            )
        if self.backend == "reentrant" and (
            self.debug or self.report or check not in ("metadata", "none")
        ):
            raise ValueError(
                "backend='reentrant' has no tensors to check or to log: leave determinism_check, debug and report out"
            )
        if self.preserve_rng_state not in (True, False, "all"):
            raise ValueError(
                f"preserve_rng_state is True, False or 'all', not {self.preserve_rng_state!r}"
            )
        if not callable(check) and not (isinstance(check, str) and check in CHECKS):
            raise ValueError(
                f"determinism_check is one of {', '.join(map(repr, CHECKS))} or a function of a tensor, not {check!r}"
            )
        return Options(*self[:5], as_policy(self.policy), *self[6:])


class GivenToScope(TypedDict, total=False):
    # The same for type checkers.
    enabled: bool
    preserve_rng_state: PreserveRngState
    early_stop: bool
    determinism_check: DeterminismCheck
    policy: Any
    debug: bool
    report: bool
    name: str | None


class Given(GivenToScope, total=False):
    backend: Backend | None


_SCOPE_DEFAULTS = Options("replay")

# Bound once: these run for every call.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled, _hooks_are_enabled = torch.is_grad_enabled, _torch.hooks_are_enabled
_innermost_transform, _mode_count, _is_tracing = (
    _torch.innermost_transform,
    _torch.mode_count,
    _torch.is_tracing,
)

_run_by_hooks = "_ambient _buffers _check _compiled _debug _engine _gathered _held _record _region _replay _report"
_run_by_hooks += " _rerun _torch _where _windows"
_torch.keep_dynamo_out(*(sys.modules[f"{__package__}.{name}"] for name in _run_by_hooks.split(" ")))

_disabled: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "checkpointing.disabled", default=False
)


@contextmanager
def disabled() -> Iterator[None]:
    """Turn every region that is entered inside, in this thread and context, into a plain call.

    >>> import torch
    >>> from checkpointing import checkpointed, disabled
    >>> @checkpointed
    ... def f(x):
    ...     return x.sin().cos()
    >>> with disabled():
    ...     y = f(torch.ones(3, requires_grad=True))  # saves its activations, recomputes nothing
    """
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def is_recomputing() -> bool:
    """Whether this thread is running a region again, for code whose side effects must happen once.

    Replay does not run Python code again, so there only custom operators ever see `True`.

    >>> from checkpointing import is_recomputing
    >>> is_recomputing()
    False
    """
    return thread.depth > thread.aside


def forward_only(fn: Callable[P, R], /) -> Callable[P, R]:
    """Don't run a function again in recompute: for metrics, counters and logging in a region.

    In recompute a call returns what the call of the forward returned, in the order of calls: arguments that it passed
    through, and views of them, are the recompute's own, other tensors are held from the forward on, without their graph
    (gradients of a backward *inside* the region do not flow through them), containers are copied, anything else is the
    same object.
    Outside of a region, and in replay, which runs no Python code again, `fn` is just called.

    Args:
        fn: a function or method (any decorator order with `staticmethod` and `classmethod`) or callable object.

    Returns:
        What behaves like `fn`, with its signature.

    Raises:
        TypeError: for generator functions, async functions and classes.
        MismatchError: from backward, when the recompute calls it where the forward did not, or where it raised.

    Where no region of this library recomputes, there are no results of the forward: the legacy reentrant backend gives
    None, and torch's own checkpoint and a custom operator that replay runs again call the function again.

    >>> import torch
    >>> from checkpointing import checkpointed, forward_only
    >>> means = []
    >>> @forward_only
    ... def note(x):
    ...     means.append(x.mean().item())
    >>> @checkpointed
    ... def block(x):
    ...     note(x)
    ...     return x.sin().exp()
    >>> block(torch.ones(3, requires_grad=True)).sum().backward()
    >>> means
    [1.0]
    """
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(forward_only(fn.__func__))
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(f"forward_only wraps functions, methods and callable objects, not {fn!r}")
    refuse_generators("forward_only", fn)

    # A callable object has attributes of its own that must not be copied onto the wrapper.
    @functools.wraps(fn, updated=("__dict__",) if inspect.isroutine(fn) else ())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return fn(*args, **kwargs)
        region = thread.region
        return fn(*args, **kwargs) if region is None else region.once(fn, args, kwargs)

    return cast("Callable[P, R]", wrapper)


def is_plain(enabled: bool = True) -> bool:
    """Whether to run without a region (rule 10). What is traced is a graph, with the backward in it or not at all: a
    recompute would put the activations of this run into it, and other random numbers."""
    if (
        not enabled
        or not _is_grad_enabled()
        or _disabled.get()
        or (_mode_count() and _is_tracing())
    ):
        return True
    # A transform taken over a region: `grad` and its kin disable hooks; under `vmap` what a region would save or read
    # are batches, which end with it.
    if _hooks_are_enabled() and _innermost_transform() is None:
        return False
    _warn_about_transforms()
    return True


@functools.cache
def _warn_about_transforms() -> None:
    warn(
        "checkpointing: a torch.func transform (grad, vjp, jacrev, vmap, ...) is being taken over a region, or "
        "saved-tensors hooks are disabled for another reason, so regions run as plain code and save no memory. "
        "Take gradients with torch.autograd.grad; inside a region vmap, jvp and jacfwd work, too. This is said once."
    )


# ---- the function door


class _Decorator(Protocol):
    @overload
    def __call__(self, fn: type[M], /) -> type[M]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def checkpointed(fn: type[M], /, **options: Unpack[Given]) -> type[M]: ...
@overload
def checkpointed(fn: Callable[P, R], /, **options: Unpack[Given]) -> Callable[P, R]: ...
@overload
def checkpointed(fn: None = None, /, **options: Unpack[Given]) -> _Decorator: ...
def checkpointed(fn: Any = None, /, **options: Unpack[Given]) -> Any:
    """Run a function so that autograd does not hold what it saves: backward computes it again.

    Args:
        fn: a function, method, static or class method, lambda or callable object; arguments and results may be any
            nesting of containers, dataclasses and objects. An `nn.Module` subclass gets its `forward` wrapped, in
            place, and stays what it was for `isinstance`, pickling and `state_dict`. For a module *instance* (or
            another callable object) an object is returned that runs it; the instance is not changed.
        backend: how activations come back. `"rerun"` (what None means) calls the function again, `"replay"` runs the
            recorded operators again, just those that are needed, `"reentrant"` is torch's legacy way.
        enabled: False makes every call a plain one.
        preserve_rng_state: whether a rerun draws the random numbers of the forward: of the CPU, of every device and
            type of device found in the arguments, and of `torch.Generator`s among them; with `"all"` (about 0.1 ms a
            region) those of Python's `random` and NumPy's global generator, too. Replay always does.
        early_stop: stop recomputing at the last tensor that is still needed. With False, a recompute always covers
            the whole region.
        determinism_check: what must be equal in forward and recompute: `"metadata"` (shape, dtype, device),
            `"values"` (bit for bit, by a checksum: slow; but not of 1-D uint8 tensors, which kernels save as scratch
            memory with arbitrary bytes), a function of a tensor whose results are compared with `==`, or `"none"`.
        policy: what to keep, and not recompute (implies replay): `save_ops(...)`, `save_tagged(...)`, combinations of
            them by `|`, a list of `OpOverload`s, or a function `(ctx, op, *args, **kwargs)` that returns a
            `torch.utils.checkpoint.CheckpointPolicy` or a bool. It holds in regions inside that bring none.
        debug: log the operators of forward and recompute and show both when an error is found. Slow.
        report: note, for `report(loss)`, what is saved and where, also in regions inside (as with `debug`). Slow.
        name: the region's name in messages; the function's, if None.

    Options are keywords. Without them: backend=None, enabled=True, preserve_rng_state=True, early_stop=True,
    determinism_check="metadata", policy=None, debug=False, report=False, name=None.

    Returns:
        What behaves like `fn` (same signature), or a decorator if `fn` is left out. For a bound method it is a bound
        method, for a callable object an object that holds it: `copy.deepcopy` and `pickle` take them with their
        owner, and a copy runs its own parameters. (A bound method is pickled by its name, as always in Python: where it
        had replaced the method of its object, what is loaded has the method of the class again.)

    Raises:
        TypeError: for generator functions, async functions, classes that are no modules, and classes of torch's own.
        ValueError: for options that contradict each other.
        CheckpointError: from backward, when the tensors can't be recomputed exactly: an argument has been changed
            in place, or the function does something else the second time.

    >>> import torch
    >>> from checkpointing import checkpointed
    >>> @checkpointed
    ... def block(x, w):
    ...     return torch.relu(x @ w).sin()
    >>> x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    >>> block(x, w).sum().backward()

    Source of the method: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; saved-tensors hooks as in
    `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.
    """
    chosen = options_of("checkpointed", options)
    return functools.partial(_wrap, options=chosen) if fn is None else _wrap(fn, chosen)


def options_of(door: str, given: Any, *backend: Any) -> Options:
    """What a door was given, checked; some have a backend of their own."""
    known = Options._fields[len(backend) :]
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"{door} has no option {unknown[0]!r}, only {', '.join(known)}")
    options = Options(*backend, **given).checked()
    if options.backend == "reentrant":
        _reentrant.warn_once()
    return options


def _wrap(fn: Any, options: Options) -> Any:
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(_wrap(fn.__func__, options))
    if isinstance(fn, type):
        if not issubclass(fn, nn.Module) or fn.__module__.partition(".")[0] == "torch":
            reason = (
                "is torch's own: derive from it" if issubclass(fn, nn.Module) else "is no nn.Module"
            )
            raise TypeError(
                f"checkpointed can't wrap the class {fn.__name__}: it {reason}, or decorate a method."
            )
        fn.forward = _wrap(fn.forward, Options(*options[:8], options.name or fn.__qualname__))
        return fn
    if not callable(fn):
        raise TypeError(
            f"checkpointed wraps functions, methods, modules and callable objects, not {fn!r}"
        )
    refuse_generators("checkpointed", fn)
    if isinstance(fn, MethodType):
        return MethodType(_wrap(fn.__func__, options), fn.__self__)
    if not inspect.isroutine(fn):
        return _CheckpointedObject(fn, options)
    run, name = runner_of(options), options.name or fn.__qualname__

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(fn, args, kwargs, name, options)

    return wrapper


def is_in_region(fn: Any) -> bool:
    """Whether calling a function enters a region, as far as `functools.wraps` tells."""
    codes = (
        _wrap.__code__.co_consts
    )  # that of `wrapper` is among them: Dynamo can set no attribute of a function

    def enters(fn: Any) -> bool:
        return getattr(fn, "__code__", fn) in codes or isinstance(
            getattr(fn, "options", None), Options
        )

    return enters(inspect.unwrap(fn, stop=enters))


def runner_of(options: Options) -> Callable[..., Any]:
    """What runs a function in a region: called with function, args, kwargs, name and options."""
    return _run_replay if options.backend == "replay" else _run


class _CheckpointedObject:
    """A callable object, run in regions. Copies and pickles as what it holds."""

    def __init__(self, fn: Any, options: Options) -> None:
        self.__wrapped__, self.options = fn, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn, options = self.__wrapped__, self.options
        return runner_of(options)(fn, args, kwargs, options.name or type(fn).__qualname__, options)


def refuse_generators(door: str, fn: Any) -> None:
    code = fn.func if isinstance(fn, functools.partial) else fn
    if not inspect.isroutine(code):
        code = code.forward if isinstance(code, nn.Module) else type(code).__call__
    is_async = inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)
    if is_async or inspect.isgeneratorfunction(code):
        raise TypeError(
            f"{door} can't wrap the {'async' if is_async else 'generator'} function "
            f"{getattr(fn, '__qualname__', fn)}: calling it computes nothing. Decorate a plain function that it calls."
        )


def _run(fn: Any, args: Any, kwargs: Any, name: str, options: Options) -> Any:
    if _is_compiling() and options.enabled:
        is_reentrant, keeps_rng = options.backend == "reentrant", bool(options.preserve_rng_state)
        return torch.utils.checkpoint.checkpoint(
            fn, *args, use_reentrant=is_reentrant, preserve_rng_state=keeps_rng, **kwargs
        )
    if is_plain(options.enabled):
        return fn(*args, **kwargs)
    if options.backend == "reentrant":
        return _reentrant.run(fn, name, options.preserve_rng_state, args, kwargs)
    return run_rerun(
        fn,
        args,
        kwargs,
        name,
        entered_from(sys._getframe(2)),
        options,
        logged if options.debug else None,
    )


def run_rerun(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    where: Line,
    options: Options,
    contexts: Callable[[Frame], tuple[Any, Any]] | None = None,
    prefix: str | None = None,
) -> Any:
    """One region that is called again in backward. `contexts` makes one context for the forward and one for the rerun;
    messages begin with `prefix`."""
    source = Rerun(fn, args, kwargs, options.preserve_rng_state)
    kind = Reported if _is_noted(options) else Frame
    frame = kind(source, name, where, options.early_stop, check_of(options.determinism_check))
    frame.prefix = prefix
    if contexts is not None:
        forward, source.context = contexts(frame)
        fn = functools.partial(call_within, forward, fn)
    frame.enter(source)
    try:
        result = fn(*args, **kwargs)
    finally:
        in_order = frame.leave(source)
        source.end()
    if not in_order:
        raise errors.crossed(frame)
    return result


def _is_noted(options: Options) -> bool:
    return (
        options.report
        or options.debug
        or (thread.region is not None and thread.region.noted is not None)
    )


def _run_replay(fn: Any, args: Any, kwargs: Any, name: str, options: Options) -> Any:
    if is_plain(options.enabled):
        return fn(*args, **kwargs)
    with _Block(name, entered_from(sys._getframe(2)), options, fn):
        return fn(*args, **kwargs)


# Compiled code in which these stand is compiled around them, and in what they run.
_RECORDS = (
    "a region that records operators needs eager mode: put the scope around the compiled code, or checkpoint a "
    "function in it with `@checkpointed`, which becomes torch's own operator"
)
_torch.leave_eager(_run_replay, _RECORDS)


# ---- the block door


class _Block:
    """One recorded region, entered and left."""

    __slots__ = ("_source", "_tape", "frame")

    def __init__(self, name: str, where: Line, options: Options, fn: Any = None) -> None:
        placement = None if options.policy is None else options.policy.placement
        hooks = _torch.enclosing_hooks()
        is_noted = _is_noted(options)
        owner = where if fn is None else getattr(fn, "__code__", None) or type(fn)
        site = (
            owner,
            placement,
            options.preserve_rng_state,
            hooks is None,
            is_noted,
            options.debug,
        )
        self._tape = Run(program_of(site), hooks, options.preserve_rng_state, options.policy)
        if placement is not None:
            self._tape.placement = placement
            # A rerun around, ours or torch's, would meet more slots than the forward had, once there is a plan.
            is_rerun = hooks is not None and (is_internal(hooks) or _torch.are_of_checkpoint(hooks))
            self._tape.holds_planned = not is_rerun
        log: Any = [] if options.debug else None
        self._source = Follow(self._tape, log)
        # What is replayed has the recorded metadata by construction.
        check = (
            None if options.determinism_check == "metadata" else check_of(options.determinism_check)
        )
        self._tape.is_checked = check is not None
        self.frame = (Reported if is_noted else Frame)(
            self._source, name, where, options.early_stop, check
        )
        if is_noted:
            self._tape.note = _note_with_stack if options.debug else note
        if options.debug:
            self.frame.on_error = functools.partial(_explain, self._source, log)

    def __enter__(self) -> None:
        outer = thread.region
        if outer is not None:
            outer.yield_to_inner(1)
        self._tape.__enter__()  # type: ignore[no-untyped-call]
        self.frame.enter(self._tape)

    def __exit__(self, *error: Any) -> None:
        tape = self._tape
        outer, in_order = tape.outer, self.frame.leave(tape)
        if not in_order:
            _torch.remove_mode(tape)
        else:
            tape.__exit__(*error)  # type: ignore[no-untyped-call]
            if outer is not None:
                outer.yield_to_inner(-1)
        complaint = tape.close()
        self._source.close(self.frame)
        complaint = complaint or self._source.complaint
        if error[0] is not None:
            return
        if not in_order:
            raise errors.crossed(self.frame)
        if complaint:
            warn(f"{self.frame.place}: {complaint}")

    def stats(self) -> Stats:
        return measure(self.frame)

    def report(self) -> Report:
        return report_of([self.frame])


def _explain(
    source: Follow, recompute: list[tuple[str, str]], error: errors.CheckpointError
) -> None:
    forward = [
        (str(step.func), step.note[-1]) for step in source.path().steps if step.func is not None
    ]
    explain(error, forward, recompute)


def _note_with_stack() -> tuple[str | None, ...]:
    return *note(), stack_of_user()


@contextmanager
def _excluded() -> Iterator[None]:
    """A block without recompute inside a recorded region: what autograd saves in it is kept there."""
    hooks, region = _torch.enclosing_hooks(), thread.region
    if not isinstance(region, Run) or hooks is None or hooks[1] is not unpack or is_plain():
        yield  # nothing would go to a tape
        return
    pack = hooks[0]

    def keep(tensor: Tensor) -> Any:
        region.keep_for_inner(tensor)
        return pack(tensor)

    _torch.push_hooks(keep, unpack)
    try:
        yield
    finally:
        _torch.pop_hooks()


class checkpoint_scope:
    """A block of code whose activations autograd does not hold: backward computes them again.

    The block is recorded operator by operator, and backward runs again just those operators that it needs. Python
    code is not run again. Scopes and checkpointed functions nest freely.

    The scope is lexical: tensors that operators *inside* the block save are dropped and brought back; what leaves the
    block and is saved by an operator outside is saved by that operator.

    Args:
        enabled: False makes this a plain block; inside another scope, one whose saved tensors that scope keeps.
        preserve_rng_state: random operators are replayed from the generator state that they met, so that the values
            are those of the forward. With False they are kept instead of replayed, and no state is stored. With
            `"all"` custom operators find Python's `random` and NumPy's global generator as they were, too; other
            Python code does not run again.
        early_stop: replay only the window of the tensor that is asked for. With False, the first replay of a backward
            covers the whole block.
        determinism_check: as for `checkpointed`.
        policy: what to keep besides what `keep` is given, as for `checkpointed`.
        debug: note the user's line for every operator, for error messages. Slow.
        report: note, for `report()`, what is saved and where, also in regions inside (as with `debug`). Slow.
        name: the region's name in messages.

    Options are keywords, and without them what they are for `checkpointed`.

    A scope object is entered once; `stats` (a frozen `Stats`, counts and bytes) and `report()` are right at any time
    after that.

    Raises:
        CheckpointError: when it is entered again; and from backward, when something that the recompute starts from
            was changed in place in the meantime.

    >>> import torch
    >>> from checkpointing import checkpoint_scope
    >>> x = torch.randn(4, 8, requires_grad=True)
    >>> with checkpoint_scope() as scope:
    ...     y = x.sin().exp().cos()
    >>> y.sum().backward()
    >>> scope.stats.ops_replayed
    2
    """

    __slots__ = ("_block", "_entered", "_name", "_options")

    def __init__(self, **options: Unpack[GivenToScope]) -> None:
        self._options = (
            options_of("checkpoint_scope", options, "replay") if options else _SCOPE_DEFAULTS
        )
        self._entered = False
        self._block: Any = None

    @property
    def name(self) -> str:
        return self._options.name or "scope"

    @property
    def stats(self) -> Stats:
        """Counts and bytes, as they are now."""
        return self._block.stats() if isinstance(self._block, _Block) else Stats()

    def report(self) -> Report:
        """What autograd would have held, what is held, and what was replayed, tensor by tensor, as it is now; with
        `report=True` also for the regions inside."""
        return self._block.report() if isinstance(self._block, _Block) else Report(())

    def __enter__(self) -> checkpoint_scope:
        if self._entered:
            raise errors.CheckpointError(
                f"scope '{self.name}' has been entered before: it describes one execution of one block. "
                "Make a new one with checkpoint_scope(...)."
            )
        self._entered = True
        block: Any = None
        if not is_plain(self._options.enabled):
            block = _Block(self.name, entered_from(sys._getframe(1)), self._options)
        elif not self._options.enabled:
            block = _excluded()
        if block is not None:
            block.__enter__()
            self._block = block
        return self

    def __exit__(self, *error: Any) -> None:
        if self._block is not None:
            self._block.__exit__(*error)


_torch.leave_eager(checkpoint_scope.__enter__, _RECORDS)

# What `help` and editors show.
_FN = inspect.Parameter("fn", inspect.Parameter.POSITIONAL_ONLY, default=None)
_SHOWN = [
    p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for p in inspect.signature(Options).parameters.values()
]
vars(checkpointed)["__signature__"] = inspect.Signature([_FN, *_SHOWN])
checkpoint_scope.__signature__ = inspect.Signature(_SHOWN[1:])  # type: ignore[attr-defined]
