"""The entry points `checkpointed` and `checkpoint_scope`, and the one `Options` behind them.

An entry point decides whether there is a region at all (grad mode, `enabled`, `disabled()`), builds
a frame, and enters and leaves it so that nothing stays behind after an exception. The
engine does the rest.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial, wraps
from inspect import Parameter, Signature
from types import MethodType
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, overload
from weakref import ref

import torch
import torch.utils.checkpoint
from torch import Tensor, is_grad_enabled, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_dynamo_compiling
from typing_extensions import Unpack

from .. import _torch, errors
from .._engine import (
    CHECKS,
    DeterminismCheck,
    Line,
    check_of,
    entered_from,
    is_internal,
    thread,
    unpack,
    warn,
)
from .._record import Placement, Run, program_of
from .._replay import Replay
from .._rerun import PreserveRngState, Rerun, call_within
from . import reentrant as _reentrant
from .debug import logged
from .policy import as_policy
from .report import Notes, Report, Stats, measure, note, report_of

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)

Backend = Literal["rerun", "replay", "reentrant"]


class Options(NamedTuple):
    """The options of a region. `checkpointed` and `checkpoint_scope` document them."""

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
        """These options, with a backend, and with a `Policy` or None as the policy.

        Raises:
            ValueError: for options that contradict each other.
        """
        if self.backend is None:
            return self._replace(backend="rerun" if self.policy is None else "replay").checked()
        check = self.determinism_check
        watches = any([self.debug, self.report, check not in ("metadata", "none")])
        if self.backend not in ("rerun", "replay", "reentrant"):
            raise ValueError(f"backend is 'rerun', 'replay' or 'reentrant', not {self.backend!r}")
        if self.policy is not None and self.backend != "replay":
            raise ValueError(
                f"a policy needs recorded operators, which backend={self.backend!r} does not have: "
                "leave backend out, or say backend='replay'"
            )
        if self.backend == "reentrant" and watches:
            raise ValueError(
                "backend='reentrant' saves no tensors that could be checked or logged: leave "
                "determinism_check, debug and report out"
            )
        if self.preserve_rng_state not in (True, False, "all"):
            raise ValueError(
                f"preserve_rng_state is True, False or 'all', not {self.preserve_rng_state!r}"
            )
        if not (callable(check) or check in [*CHECKS]):
            known = ", ".join(map(repr, CHECKS))
            raise ValueError(
                f"determinism_check is one of {known} or a function of a tensor, not {check!r}"
            )
        return self._replace(policy=as_policy(self.policy), report=self.report or self.debug)


class GivenToScope(TypedDict, total=False):
    # For type checkers: the keywords of `checkpoint_scope`, and below those of `checkpointed`.
    enabled: bool
    preserve_rng_state: PreserveRngState
    early_stop: bool
    determinism_check: DeterminismCheck
    debug: bool
    report: bool
    name: str | None


class Given(GivenToScope, total=False):
    backend: Backend | None
    policy: Any


_ENTERED = {f"{__package__}.{name}" for name in ("api", "modules", "policy", "reentrant")}
for _name, _module in [*sys.modules.items()]:
    if _name.startswith(f"{__package__.partition('.')[0]}._") and _name not in _ENTERED:
        _torch.keep_dynamo_out(_module)  # hooks run it

_disabled = ContextVar("checkpointing.disabled", default=False)


@contextmanager
def switched(switch: ContextVar[Any], value: Any) -> Iterator[None]:
    """Give a switch this value inside, in this thread and context."""
    token = switch.set(value)
    try:
        yield
    finally:
        switch.reset(token)


def disabled() -> AbstractContextManager[None]:
    """Run every region that is entered inside, in this thread and context, as plain code.

    Regions that were entered before still recompute.

    Example:
        >>> import torch
        >>> from checkpointing import checkpointed, disabled
        >>> @checkpointed
        ... def f(x):
        ...     return x.sin().cos()
        >>> with disabled():
        ...     y = f(torch.ones(3, requires_grad=True))  # saves its activations
    """
    return switched(_disabled, True)


def is_recomputing() -> bool:
    """Whether this thread is recomputing a region, for side effects that must happen once.

    A replay runs no Python code again, so there only custom operators ever see `True`.

    Example:
        >>> import torch
        >>> from checkpointing import checkpointed, is_recomputing
        >>> calls = []
        >>> @checkpointed
        ... def f(x):
        ...     calls.append(is_recomputing())
        ...     return x.sin().cos()
        >>> f(torch.ones(3, requires_grad=True)).sum().backward()
        >>> calls
        [False, True]
    """
    return thread.depth > thread.aside


def forward_only(fn: Callable[P, R], /) -> Callable[P, R]:
    """Run a function in the forward only, not in recomputes: for metrics, counters and logging.

    In a recompute, calls return the results of the forward, in the order of calls. Arguments that
    the function returned, and views of them, are the recompute's own arguments. Other tensors are
    held from the forward on, without their graph, so that a backward *inside* the region sends no
    gradients through them. Containers are copied, other objects are the same.

    Outside of a region, and in a replay, which runs no Python code again, `fn` is just called.
    torch's own checkpoint calls it again, and so does a custom operator that a replay runs again.
    The legacy reentrant backend returns None in its recompute.

    Args:
        fn: a function, method or callable object. The order of this decorator, `staticmethod` and
            `classmethod` does not matter.

    Returns:
        A callable with the signature of `fn`.

    Raises:
        TypeError: for generator functions, async functions and classes.
        MismatchError: from backward, if the recompute calls the function where the forward did not,
            or where it raised.

    Example:
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
    @wraps(fn, updated=("__dict__",) if inspect.isroutine(fn) else ())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or thread.region is None:
            return fn(*args, **kwargs)
        return thread.region.once(fn, args, kwargs)

    return wrapper


def is_plain(enabled: bool = True) -> bool:
    """Whether to run without a region (rule 10), as while a graph is traced: the trace contains the
    backward, or none, and a recompute would put the tensors of this run into it."""
    if not (enabled and is_grad_enabled()):
        return True
    if _disabled.get():
        return True
    if _torch.mode_count() and _torch.is_tracing():
        return True
    # A transform is taken over the region: `grad` and its like disable hooks; with `vmap`, tensors
    # are batches, which end with it.
    if _torch.hooks_are_enabled() and _torch.innermost_transform() is None:
        return False
    _warn_about_transforms()
    return True


@cache
def _warn_about_transforms() -> None:
    warn(
        "checkpointing: a torch.func transform (grad, vjp, jacrev, vmap, ...) is taken over a "
        "region, or saved-tensors hooks are disabled for another reason. Regions run as plain code "
        "and save no memory. Take gradients with torch.autograd.grad; inside a region vmap, jvp "
        "and jacfwd work, too. This is said once."
    )


# ---- functions


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
    """Recompute the activations of a function in backward, instead of saving them.

    Args:
        fn: a function, method, static or class method, lambda or callable object. Arguments and
            results may be any nesting of containers, dataclasses and objects. Of an `nn.Module`
            subclass, the `forward` is wrapped in place; `isinstance`, pickling and `state_dict`
            work as before. For a module *instance*, or another callable object, the result is an
            object that runs it.
        backend: `"rerun"` (the default) calls the function again. `"replay"` runs the recorded
            operators again, and only those that are needed. `"reentrant"` is torch's legacy way.
        enabled: False makes every call a plain one.
        preserve_rng_state: whether a rerun draws the random numbers of the forward: of the CPU, of
            every device among the arguments and modules, and of `torch.Generator`s among the
            arguments. `"all"` adds Python's `random` and NumPy's global generator (about 0.1 ms per
            region). A replay always does.
        early_stop: stop recomputing at the last tensor that is needed. With False, a recompute
            always covers the whole region.
        determinism_check: what must be equal in forward and recompute. `"metadata"` compares shape,
            dtype and device; `"values"` compares checksums (slow; not of 1-D uint8 tensors, which
            kernels use as scratch memory); a function of a tensor compares its results with `==`;
            `"none"` compares nothing.
        policy: the values to keep instead of recomputing them (implies replay): `auto()`,
            `save_ops(...)`, `save_tagged(...)`, `offload(...)`, combinations of them by `|`, a list
            of `OpOverload`s, or a function `(ctx, op, *args, **kwargs)` that returns a
            `torch.utils.checkpoint.CheckpointPolicy` or a bool. Inner regions without a policy
            follow it, too.
        debug: log the operators of forward and recompute, and show both in errors. Slow.
        report: note the saved tensors for `report(loss)`, also in inner regions, as does `debug`.
            Slow.
        name: the region's name in messages. Defaults to the function's.

    Options are keywords. Without them: backend=None, enabled=True, preserve_rng_state=True,
    early_stop=True, determinism_check="metadata", policy=None, debug=False, report=False,
    name=None.

    Returns:
        A callable with the signature of `fn`, or a decorator if `fn` is left out. For a bound
        method it is a bound method. `copy.deepcopy` and `pickle` copy it with its owner, and a copy
        runs its own parameters. (Python pickles a bound method by its name: one that replaced the
        method of its object is loaded as the method of the class.)

    Raises:
        TypeError: for generator functions, async functions, classes that are no modules, and
            classes of torch's own.
        ValueError: for options that contradict each other.
        CheckpointError: from backward, if a tensor cannot be recomputed exactly: an argument has
            been changed in place, or the function does something else the second time.

    Example:
        >>> import torch
        >>> from checkpointing import checkpointed
        >>> @checkpointed
        ... def block(x, w):
        ...     return torch.relu(x @ w).sin()
        >>> x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        >>> block(x, w).sum().backward()

    Source of the method: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost";
    saved-tensors hooks as in `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.
    """
    decorate = partial(wrap, run=run, options=options_of("checkpointed", options))
    return decorate if fn is None else decorate(fn)


def options_of(entry: str, given: Any, *backend: Any) -> Options:
    """The options given to an entry point, checked; `backend` if it has one of its own."""
    known = Options._fields[len(backend) :]
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"{entry} has no option {unknown[0]!r}, only {', '.join(known)}")
    options = Options(*backend, **given).checked()
    if options.backend == "reentrant":
        _reentrant.warn_once()
    return options


def wrap(fn: Any, run: Callable[..., Any], options: Any, name: str = "") -> Any:
    """A callable that calls `run(options, fn, args, kwargs, name)`."""
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(wrap(fn.__func__, run, options))
    if isinstance(fn, type):
        if not issubclass(fn, nn.Module):
            reason = "is no nn.Module"
        elif fn.__module__.partition(".")[0] == "torch":
            reason = "is torch's own: derive from it"
        else:
            fn.forward = wrap(fn.forward, run, options, fn.__qualname__)
            return fn
        raise TypeError(
            f"checkpointed can't wrap the class {fn.__name__}: it {reason}, or decorate a method."
        )
    if not callable(fn):
        raise TypeError(
            f"checkpointed wraps functions, methods, modules and callable objects, not {fn!r}"
        )
    refuse_generators("checkpointed", fn)
    if isinstance(fn, MethodType):
        return MethodType(wrap(fn.__func__, run, options), fn.__self__)
    if not inspect.isroutine(fn):
        return CheckpointedObject(fn, run, options)
    name = name or fn.__qualname__

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(options, fn, args, kwargs, name)

    vars(wrapper)["enters_region"] = True
    return wrapper


def is_in_region(fn: Any) -> bool:
    """Whether calling a function enters a region, as far as `functools.wraps` tells."""

    def enters(fn: Any) -> bool:
        return getattr(fn, "enters_region", False)

    return enters(inspect.unwrap(fn, stop=enters))


class CheckpointedObject:
    """A callable object, run in regions. It is copied and pickled with that object."""

    def __init__(self, fn: Any, run: Callable[..., Any], options: Any) -> None:
        self.__wrapped__, self.run, self.options = fn, run, options

    @property
    def enters_region(self) -> Any:
        return self.options.enabled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn = self.__wrapped__
        return self.run(self.options, fn, args, kwargs, type(fn).__qualname__)


def refuse_generators(entry: str, fn: Any) -> None:
    code = fn.func if isinstance(fn, partial) else fn
    if not inspect.isroutine(code):
        code = code.forward if isinstance(code, nn.Module) else type(code).__call__
    is_async = inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)
    if is_async or inspect.isgeneratorfunction(code):
        kind, name = "async" if is_async else "generator", getattr(fn, "__qualname__", fn)
        raise TypeError(
            f"{entry} can't wrap the {kind} function {name}: calling it computes nothing. Decorate "
            "a plain function that it calls."
        )


def run(options: Options, fn: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Call a function in a region."""
    name = options.name or name
    if options.backend == "replay":
        return _run_replay(fn, args, kwargs, name, options)
    if is_dynamo_compiling() and options.enabled:
        return torch.utils.checkpoint.checkpoint(
            fn,
            *args,
            use_reentrant=options.backend == "reentrant",
            preserve_rng_state=bool(options.preserve_rng_state),
            **kwargs,
        )
    if is_plain(options.enabled):
        return fn(*args, **kwargs)
    if options.backend == "reentrant":
        return _reentrant.run(fn, name, options.preserve_rng_state, args, kwargs)
    return run_rerun(fn, args, kwargs, name, entered_from(sys._getframe(2)), options)


def run_rerun(
    fn: Any,
    args: Any,
    kwargs: Any,
    name: str,
    line: Line,
    options: Options,
    contexts: Any = None,
    prefix: str | None = None,
) -> Any:
    """Run a region whose function is called again in backward. `contexts` are one for the forward
    and one for the rerun; messages begin with `prefix`."""
    check, rng = check_of(options.determinism_check), options.preserve_rng_state
    frame = Rerun(fn, args, kwargs, rng, name, line, options.early_stop, check)
    frame.prefix = prefix
    if _is_noted(options):
        frame.is_noted, frame.notes = True, Notes()
    if options.debug:
        contexts = logged(frame)
    if contexts is not None:
        forward, frame.context = contexts
        fn = partial(call_within, forward, fn)
    frame.enter(frame)
    try:
        result = fn(*args, **kwargs)
    finally:
        in_order = frame.leave(frame)
        frame.outer = None
        frame.end()
    if not in_order:
        raise errors.crossed(frame)
    return result


def _is_noted(options: Options) -> bool:
    return options.report or getattr(thread.region, "is_noted", False)


def _run_replay(fn: Any, args: Any, kwargs: Any, name: str, options: Options) -> Any:
    if is_plain(options.enabled):
        return fn(*args, **kwargs)
    with _Block(name, entered_from(sys._getframe(3)), options, fn):
        return fn(*args, **kwargs)


# For functions that break the graph of compiled code.
_RECORDS = (
    "a region that records operators needs eager mode: put the scope around the compiled code, or "
    "checkpoint a function in it with `@checkpointed`, which becomes torch's own operator"
)
_torch.leave_eager(_run_replay, _RECORDS)


# ---- blocks


class _Block:
    """One recorded region, entered and left."""

    def __init__(self, name: str, line: Line, options: Options, fn: Any = None) -> None:
        policy, rng, hooks = options.policy, options.preserve_rng_state, _torch.enclosing_hooks()
        placement = policy and policy.placement
        is_noted = _is_noted(options)
        code, instruction = line if fn is None else (getattr(fn, "__code__", type(fn)), 0)
        by_construction = options.determinism_check == "metadata"
        check = None if by_construction else check_of(options.determinism_check)
        asked = placement, rng, hooks is None, is_noted, options.debug, check is None
        # A weak reference hashes a code object once, rather than in each run.
        program = program_of((ref(code), instruction, *asked))
        self._run = run = Run(program, hooks, rng, policy)
        run.store.placement = placement
        # A rerun around the block, ours or torch's, expects the same slots in each run, whatever
        # has been planned.
        in_rerun = hooks is not None and (is_internal(hooks) or _torch.are_of_checkpoint(hooks))
        run.holds_planned = placement is not None and not in_rerun
        run.store.is_checked = check is not None
        self.frame = frame = Replay(run, name, line, options.early_stop, check)
        if hooks is None and placement == Placement(None):
            frame.allow_pieces()
        if is_noted:
            run.note, run.is_noted, frame.notes = note, True, Notes()
        self._log = None
        if options.debug:
            self._log, frame.context = logged(frame)

    def __enter__(self) -> None:
        self._run.__enter__()  # type: ignore[no-untyped-call]
        self.frame.enter(self._run)
        if self._log is not None:
            self._log.__enter__()

    def __exit__(self, *error: Any) -> None:
        run, frame = self._run, self.frame
        if self._log is not None:
            _torch.remove_mode(self._log)
        in_order = frame.leave(run)
        if in_order:
            run.__exit__(*error)  # type: ignore[no-untyped-call]
        else:
            _torch.remove_mode(run)
        run.close()
        complaint = frame.close()
        if error[0] is not None:
            return
        if not in_order:
            raise errors.crossed(frame)
        if complaint:
            warn(f"{frame.title}: {complaint}")


@contextmanager
def _excluded() -> Iterator[None]:
    """Keep the tensors that are saved in a block, in the recorded region around it."""
    hooks, region = _torch.enclosing_hooks(), thread.region
    if is_plain() or not isinstance(region, Run):
        yield  # nothing is recorded
        return
    if hooks is None or hooks[1] is not unpack:
        yield  # hooks of the user take the tensors
        return
    pack = hooks[0]

    def keep(tensor: Tensor) -> Any:
        region.keep_for_inner(tensor)
        return pack(tensor)

    with saved_tensors_hooks(keep, unpack):
        yield


class checkpoint_scope:
    """Recompute the activations of a block of code in backward, instead of saving them.

    The block is recorded operator by operator. Backward runs again those operators that it needs,
    and no Python code. Scopes and checkpointed functions nest in any order.

    A scope covers the operators inside the block. If an operator after the block saves one of the
    block's results, that tensor stays in memory.

    Args:
        enabled: False makes this a plain block. Inside another scope, that scope then keeps the
            tensors that are saved in the block.
        preserve_rng_state: whether random operators are replayed from the generator state of the
            forward. With False, their results are kept instead. `"all"` restores Python's `random`
            and NumPy's global generator, too, for custom operators.
        early_stop: replay only the window of the tensor that backward asks for. With False, the
            first replay of a backward covers the whole block.
        determinism_check: as for `checkpointed`.
        policy: the values to keep, as for `checkpointed`, besides those that are given to `keep`.
        debug: note the user's line for every operator, for error messages. Slow.
        report: note the saved tensors for `report()`, also in inner regions, as does `debug`. Slow.
        name: the region's name in messages.

    A policy may be given by position, all other options are keywords, with the defaults of
    `checkpointed`.

    A scope object is entered once. After that, `stats` (a `Stats` of counts and bytes) and
    `report()` describe it at any time.

    Raises:
        CheckpointError: if it is entered again; and from backward, if a tensor that the recompute
            starts from has been changed in place.

    Example:
        >>> import torch
        >>> from checkpointing import checkpoint_scope
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> with checkpoint_scope() as scope:
        ...     y = x.sin().exp().cos()
        >>> y.sum().backward()
        >>> scope.stats.ops_replayed
        2
    """

    _options = Options("replay")
    _entered = False
    _block: Any = nullcontext()
    _frames: tuple[Replay, ...] = ()

    def __init__(self, policy: Any = None, **options: Unpack[GivenToScope]) -> None:
        if options or policy is not None:
            self._options = options_of("checkpoint_scope", {**options, "policy": policy}, "replay")

    @property
    def name(self) -> str:
        return self._options.name or "scope"

    @property
    def stats(self) -> Stats:
        """Counts and bytes, as they are now."""
        return measure(*self._frames) if self._frames else Stats()

    def report(self) -> Report:
        """The memory that autograd would have held, and that is held now, tensor by tensor. With
        `report=True` also that of inner regions."""
        return report_of(self._frames)

    def __enter__(self) -> checkpoint_scope:
        if self._entered:
            raise errors.CheckpointError(
                f"scope '{self.name}' has been entered before: it describes one execution of one "
                "block. Make a new one with checkpoint_scope(...)."
            )
        self._entered = True
        if not self._options.enabled:
            self._block = _excluded()
        elif not is_plain():
            self._block = _Block(self.name, entered_from(sys._getframe(1)), self._options)
            self._frames = (self._block.frame,)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)


_torch.leave_eager(checkpoint_scope.__enter__, _RECORDS)

# The signatures that `help` and editors show.
_SHOWN = [
    p.replace(kind=Parameter.KEYWORD_ONLY, annotation=p.annotation.__forward_arg__)
    for p in inspect.signature(Options).parameters.values()
]
vars(checkpointed)["__signature__"] = Signature(
    [Parameter("fn", Parameter.POSITIONAL_ONLY, default=None), *_SHOWN]
)
checkpoint_scope.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter("policy", Parameter.POSITIONAL_OR_KEYWORD, default=None),
        *[option for option in _SHOWN[1:] if option.name != "policy"],
    ]
)
