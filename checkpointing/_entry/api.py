"""The entry points `checkpointed` and `checkpoint_scope`, and the one `Options` behind them.

An entry point decides whether there is a region at all (grad mode, `enabled`, `disabled()`), builds
a frame, and enters and leaves it so that nothing stays behind after an exception. The
engine does the rest.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial, wraps
from inspect import Parameter, Signature
from textwrap import shorten
from types import MethodType
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict, TypeVar, overload
from weakref import ref

import torch.utils.checkpoint
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self, Unpack

from .. import _torch, errors
from .._engine import (
    CHECKS,
    DeterminismCheck,
    check_of,
    entered_from,
    is_internal,
    thread,
    unpack,
    warn,
)
from .._record import Run, program_of
from .._replay import Replay
from .._rerun import PreserveRngState, Rerun, call_within
from . import reentrant as _reentrant
from .debug import logged
from .policy import as_policy
from .report import Notes, Report, note, region_of, report_of

F = TypeVar("F", bound=Callable[..., Any])  # a function, or a class of modules

Backend = Literal["rerun", "replay", "reentrant"]


class Options(NamedTuple):
    """The options of a region. `checkpointed` and `checkpoint_scope` document them."""

    backend: Backend | None = None
    enabled: bool = True
    preserve_rng_state: PreserveRngState = True
    early_stop: bool = True
    determinism_check: DeterminismCheck = "metadata"
    debug: bool = False
    report: bool = False
    name: str | None = None
    policy: Any = None


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


# The functions of this module are defined further down: Dynamo traces them.
for _name, _module in [*sys.modules.items()]:
    if _name.startswith(__package__.removesuffix("entry")):
        _torch.keep_dynamo_out(_module, _name)  # hooks run it

_disabled = ContextVar("checkpointing.disabled", default=False)
is_disabled = _disabled.get


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


def forward_only(fn: F, /) -> F:
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
            `classmethod` does not matter. Of an `nn.Module` subclass, the `forward` is wrapped in
            place.

    Returns:
        A callable with the signature of `fn`.

    Raises:
        TypeError: for generator functions, async functions, classes that are no modules, and
            classes of torch's own.
        MismatchError: from backward, if the recompute calls such functions more often than the
            forward did, in another order, or where one raised. (Where the forward called none, they
            are just called.)

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
    return wrap("forward_only", fn, _once)  # type: ignore[no-any-return]


def _once(fn: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Call a function, unless this is a recompute, which has its result."""
    if is_dynamo_compiling() or thread.region is None:
        return fn(*args, **kwargs)
    return thread.region.once(fn, args, kwargs)


def is_plain() -> bool:
    """Whether to run without a region (rule 10), as while a graph is traced: the trace contains the
    backward, or none, and a recompute would put the tensors of this run into it."""
    if not is_grad_enabled() or is_disabled():
        return True
    if _torch.mode_count() and _torch.is_tracing():
        return True
    # A transform is taken over the region: `grad` and its like disable hooks; with `vmap`, tensors
    # are batches, which end with it.
    if _torch.hooks_are_enabled() and _torch.innermost_transform() is None:
        return False
    _warn_once(
        "checkpointing: a torch.func transform (grad, vjp, jacrev, vmap, ...) is taken over a "
        "region, or saved-tensors hooks are disabled for another reason. Regions run as plain code "
        "and save no memory. Take gradients with torch.autograd.grad; inside a region vmap, jvp "
        "and jacfwd work, too. This is said once."
    )
    return True


_warn_once = cache(warn)


# ---- functions


@overload
def checkpointed(fn: F, /, **options: Unpack[Given]) -> F: ...
@overload
def checkpointed(fn: None = None, /, **options: Unpack[Given]) -> Callable[[F], F]: ...
def checkpointed(fn: Any = None, /, *given: Any, **options: Unpack[Given]) -> Any:
    """Recompute the activations of a function in backward, instead of saving them.

    Args:
        fn: a function, method, static or class method, lambda or callable object. Arguments and
            results may be any nesting of containers, dataclasses and objects. Of an `nn.Module`
            subclass, the `forward` is wrapped in place; `isinstance`, pickling and `state_dict`
            work as before. For a module *instance* the result is a module that runs it, and has
            its parameters, attributes and `state_dict`; for another callable object, an object that
            runs it.
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
            `torch.utils.checkpoint.CheckpointPolicy` or a bool. Inner scopes and replays without a
            policy follow it, too.
        debug: log the operators of forward and recompute, and show both in errors. Slow.
        report: note the saved tensors for `report(loss)`, also in inner regions, as does `debug`.
            Slow.
        name: the region's name in messages. Defaults to the function's.

    Options are keywords. Without them: backend=None, enabled=True, preserve_rng_state=True,
    early_stop=True, determinism_check="metadata", debug=False, report=False, name=None,
    policy=None.

    Returns:
        A callable with the signature of `fn`, or a decorator if `fn` is left out. For a bound
        method it is a bound method. `copy.deepcopy` and `pickle` copy it with its owner, and a copy
        runs its own parameters. (Python pickles a bound method by its name: one that replaced the
        method of its object is loaded as the method of the class.)

    Raises:
        TypeError: for generator functions, async functions, classes that are no modules, and
            classes of torch's own.
        ValueError: for other values of these options, or options that contradict each other.
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
    if given:
        raise TypeError(
            "checkpointed takes one positional argument, the function. Call what it returns: "
            "checkpointed(fn)(x). Options are keywords."
        )
    its_run = partial(run, options_of("checkpointed", options))
    decorate = partial(wrap, "checkpointed", run=its_run)
    return decorate if fn is None else decorate(fn)


def options_of(entry: str, given: Any, *its_own: Any) -> Options:
    """The options given to an entry point, with a backend (`its_own`, if it has one), and with a
    `Policy` or None as the policy.

    Raises:
        TypeError: for options that the entry point does not have.
        ValueError: for other values of these options, or options that contradict each other.
    """
    known = Options._fields[len(its_own) :]
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{entry} has no option {name!r}, only {', '.join(known)}")
        choices = _CHOICES.get(name, (value,))
        if value not in choices:
            *others, last = map(repr, choices)
            raise ValueError(f"{name} is {', '.join(others)} or {last}, not {value!r}")
    options = Options(*its_own, **given)
    policy, check = as_policy(options.policy), options.determinism_check
    backend = options.backend or ("rerun" if policy is None else "replay")
    if policy is not None and backend != "replay":
        raise ValueError(
            f"a policy needs recorded operators, which backend={backend!r} does not have: leave "
            "backend out, or say backend='replay'"
        )
    if not (callable(check) or check in [*CHECKS]):
        raise ValueError(
            f"determinism_check is one of {[*CHECKS]} or a function of a tensor, not {check!r}"
        )
    is_noted = options.report or options.debug
    if backend == "reentrant":
        if is_noted or check not in ("metadata", "none"):
            raise ValueError(
                "backend='reentrant' saves no tensors that could be checked or logged: leave "
                "determinism_check, debug and report out"
            )
        _warn_once(
            "backend='reentrant' is deprecated: backend='rerun', the default, supports more and is "
            "faster. Leave backend out.",
            FutureWarning,
        )
    return options._replace(backend=backend, policy=policy, report=is_noted)


_CHOICES: dict[str, Sequence[Any]] = {
    "backend": (None, "rerun", "replay", "reentrant"),
    "preserve_rng_state": (True, False, "all"),
    **dict.fromkeys(("enabled", "early_stop", "debug", "report"), (True, False)),
}


def wrap(entry: str, fn: Any, run: Any, name: str = "") -> Any:
    """A callable that calls `run(fn, args, kwargs, name)`."""
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(wrap(entry, fn.__func__, run))
    if isinstance(fn, type):
        if not issubclass(fn, nn.Module) or fn.__module__.partition(".")[0] == "torch":
            raise TypeError(
                f"{entry} can't wrap the class {fn.__name__}: it is torch's own, or no nn.Module. "
                "Derive a module from it, or decorate a method."
            )
        fn.forward = wrap(entry, fn.forward, run, fn.__qualname__)
        return fn
    if not callable(fn):
        raise TypeError(
            f"{entry} wraps functions, methods, modules and callable objects, not "
            f"{shorten(repr(fn), 80)}. Call what it returns: {entry}(fn)(x). Options are keywords."
        )
    refuse_generators(entry, fn)
    if isinstance(fn, MethodType):
        return MethodType(wrap(entry, fn.__func__, run), fn.__self__)
    if not inspect.isroutine(fn):
        kind = CheckpointedModule if isinstance(fn, nn.Module) else CheckpointedObject
        return kind(fn, run)
    name = name or getattr(fn, "__qualname__", repr(fn))

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(fn, args, kwargs, name)

    wrapper._enters_region = run is not _once  # type: ignore[attr-defined]
    return wrapper


class CheckpointedObject:
    """A callable object, run in regions. It is copied and pickled with that object."""

    def __init__(self, fn: Any, run: Any) -> None:
        self.__wrapped__, self._run, self._enters_region = fn, run, run is not _once

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn = self.__wrapped__
        return self._run(fn, args, kwargs, type(fn).__qualname__)


class CheckpointedModule(nn.Module):
    """A module, run in regions. Names, states and attributes are those of the module itself."""

    forward = CheckpointedObject.__call__

    def __init__(self, fn: Any, run: Any) -> None:
        super().__init__()
        # The name that torch's distributed checkpoints leave out.
        self._checkpoint_wrapped_module, self._run = fn, run
        self.register_load_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]
        self._enters_region = run is not _once
        del self.training

    @property
    def __wrapped__(self) -> Any:
        return self._checkpoint_wrapped_module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # such as `__deepcopy__`, which would copy that module alone
            return super().__getattr__(name)
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Who replaces `forward` (accelerate's hooks) calls the one that was found here.
        if name.startswith("_") or name == "forward":
            super().__setattr__(name, value)
        else:
            setattr(self.__wrapped__, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self.__wrapped__[index]

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self.__wrapped__.add_module(name, module)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.__wrapped__.register_buffer(*args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self.__wrapped__.register_parameter(name, param)

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self  # FSDP2 looks here for the modules that it has sharded
            yield from self.__wrapped__.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *about: Any) -> None:
        inside = prefix + _INSIDE
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[inside + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *about)


_INSIDE = "_checkpoint_wrapped_module."  # which its own loading puts before each key


def _leave_out(_: nn.Module, incompatible: Any) -> None:
    """Name keys as in the state of the module itself."""
    for keys in incompatible:
        keys[:] = [key.replace(_INSIDE, "") for key in keys]


def refuse_generators(entry: str, fn: Any) -> None:
    code = fn.func if isinstance(fn, partial) else fn
    if not inspect.isroutine(code):
        code = code.forward if isinstance(code, nn.Module) else type(code).__call__
    is_async = inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code)
    if is_async or inspect.isgeneratorfunction(code):
        kind = "async" if is_async else "generator"
        raise TypeError(
            f"{entry} can't wrap the {kind} function {getattr(fn, '__qualname__', fn)}: calling it "
            "computes nothing. Decorate a plain function that it calls."
        )


def run(options: Options, fn: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Call a function in a region."""
    if not options.enabled or torch.compiler.is_exporting():
        return fn(*args, **kwargs)
    name = options.name or name
    if options.backend == "replay":
        return _run_replay(fn, args, kwargs, name, options)
    if is_dynamo_compiling():
        return torch.utils.checkpoint.checkpoint(
            fn,
            *args,
            use_reentrant=options.backend == "reentrant",
            preserve_rng_state=bool(options.preserve_rng_state),
            **kwargs,
        )
    if is_plain():
        return fn(*args, **kwargs)
    if options.backend == "reentrant":
        return _reentrant.run(fn, name, options.preserve_rng_state, args, kwargs)
    return run_rerun(fn, args, kwargs, name, options)


def run_rerun(
    fn: Any,
    args: Any,
    kwargs: Any,
    name: str,
    options: Options,
    contexts: Any = None,
    prefix: str | None = None,
) -> Any:
    """Run a region whose function is called again in backward. `contexts` are one for the forward
    and one for the rerun; messages begin with `prefix`."""
    frame = Rerun(
        fn,
        args,
        kwargs,
        options.preserve_rng_state,
        name,
        entered_from(sys._getframe(3)),
        options.early_stop,
        check_of(options.determinism_check),
    )
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
    if is_plain():
        return fn(*args, **kwargs)
    # All calls share a program, wherever they are.
    with _Block(name, options, (getattr(fn, "__code__", type(fn)), 0)):
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

    def __init__(self, name: str, options: Options, site: Any = None) -> None:
        policy, rng, hooks = options.policy, options.preserve_rng_state, _torch.enclosing_hooks()
        placement = policy and policy.placement
        is_noted = _is_noted(options)
        line = entered_from(sys._getframe(2))
        code, instruction = site or line
        by_construction = options.determinism_check == "metadata"
        check = None if by_construction else check_of(options.determinism_check)
        asked = placement, rng, hooks is None, is_noted, options.debug, check is None
        # A weak reference hashes a code object once, rather than in each run.
        run = Run(program_of((ref(code), instruction, asked)), hooks, rng, policy)
        run.store.is_checked = check is not None
        self.frame = frame = Replay(run, name, line, options.early_stop, check)
        if hooks is not None:
            # A rerun around the block, ours or torch's, expects the same slots in each run,
            # whatever has been planned.
            run.holds_planned = not (is_internal(hooks) or _torch.are_of_checkpoint(hooks))
        elif placement is not None and placement.place is None:  # pieces offload nothing
            frame.allow_pieces(placement.budget)
        if is_noted:
            run.note, run.is_noted, frame.notes = note, True, Notes()
        self._modes: list[Any] = [run]
        if options.debug:
            log, frame.context = logged(frame)
            self._modes.append(log)

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()
        self.frame.enter(self.frame.run)

    def __exit__(self, error: Any, *_: Any) -> None:
        frame = self.frame
        in_order = frame.leave(frame.run)
        for mode in reversed(self._modes):
            _torch.remove_mode(mode)
        try:
            frame.run.close()
            complaint = frame.close()
        except Exception:
            if error is None:
                raise
            # Else an interrupt has left the run between two steps. The interrupt is raised.
        if error is not None:
            return
        if not in_order:
            raise errors.crossed(frame)
        if complaint:
            warn(f"{frame.title}: {complaint}")


def _excluded() -> AbstractContextManager[Any]:
    """Keep the tensors that are saved in a block, in the recorded region around it."""
    region, hooks = thread.region, _torch.enclosing_hooks()
    if is_plain() or not isinstance(region, Run):
        return nullcontext()
    if hooks is None or hooks[1] is not unpack:  # hooks of the user take the tensors
        return nullcontext()
    pack = hooks[0]

    def keep(tensor: Tensor) -> Any:
        region.keep_for_inner(tensor)
        return pack(tensor)

    return torch.autograd.graph.saved_tensors_hooks(keep, unpack)


class Stats(NamedTuple):
    """A scope in numbers, at the moment of the question. Bytes are sizes of whole storages.

    Attributes:
        ops_recorded: operators of the block, without views and those that return no tensors.
        ops_replayed: operators that were run again so far.
        replays: windows that were replayed so far.
        bytes_saved: the memory that plain autograd would hold for backward, without parameters. If
            several backward passes run in the block, the sum over them.
        bytes_held: held now for recompute: inputs of the block and states of random generators.
        bytes_kept: held now because of `keep`, a policy, or a choice that is never made again.
        cuts: positions among the recorded operators. Every value that is needed there is kept, so
            no recompute crosses a cut.
        peak_predicted: the most memory that forward and backward of the block need according to the
            plan of `auto()`, with gradients; 0 without `auto()`, and until the block has ended or a
            backward in it has begun. If an earlier run was larger, this is what that one needed.
        peak_asked: that of `auto(peak=...)`, in bytes; else None.
    """

    ops_recorded: int = 0
    ops_replayed: int = 0
    replays: int = 0
    bytes_saved: int = 0
    bytes_held: int = 0
    bytes_kept: int = 0
    cuts: tuple[int, ...] = ()
    peak_predicted: int = 0
    peak_asked: int | None = None


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
    _block: Any = None  # once it is entered
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
        if not self._frames:
            return Stats()
        (frame,) = self._frames
        region = region_of(frame)
        kept = sum(t.nbytes for t in region.held if t.kind not in ("input", "random state"))
        recorded, cuts = frame.counts()
        policy = self._options.policy
        placement = policy and policy.placement
        return Stats(
            recorded,
            frame.replayed,
            frame.replays,
            frame.saved_bytes,
            region.bytes_held - kept,
            kept,
            cuts,
            frame.peak,
            placement and placement.peak,
        )

    def report(self) -> Report:
        """The memory that autograd would have held, and that is held now, tensor by tensor. With
        `report=True` also that of inner regions."""
        return report_of(self._frames)

    def __enter__(self) -> Self:
        if self._block is not None:
            raise errors.CheckpointError(
                f"scope '{self.name}' has been entered before: it describes one execution of one "
                "block. Make a new one with checkpoint_scope(...)."
            )
        self._block = nullcontext()
        if not self._options.enabled:
            self._block = _excluded()
        elif not is_plain():
            self._block = _Block(self.name, self._options)
            self._frames = (self._block.frame,)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "checkpoint_scope is no decorator: write `with checkpoint_scope(...):`, or decorate "
            "the function with `@checkpointed(backend='replay', ...)`"
        )


_torch.leave_eager(checkpoint_scope.__enter__, _RECORDS)

# The signatures that `help` and editors show.
_SHOWN = inspect.signature(Options).parameters
_KEYWORDS = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in _SHOWN.values()]
checkpointed.__signature__ = Signature(  # type: ignore[attr-defined]
    [Parameter("fn", Parameter.POSITIONAL_ONLY, default=None), *_KEYWORDS]
)
checkpoint_scope.__signature__ = Signature(  # type: ignore[attr-defined]
    [_SHOWN["policy"], *_KEYWORDS[1:-1]]
)
