"""The oracle: plain code says what is right; code with regions must leave exactly the same bits.

Doors are ways to put a region around a function, and take it: `rerun`, `scope`. A word is a nest of
doors and gradients, a letter each, outermost first: `gsc` is the gradient of a scope around a
checkpointed function. What a word must equal is the word with nothing but its `g`s left.

    c  checkpointed (rerun)        s  a `with checkpoint_scope()` around the call
    r  checkpointed (replay)       g  the gradients with respect to the arguments
    a  a scope with `auto()`;  b  on a small budget;  p  for as small a peak as possible
    l  the legacy backend, which knows no `early_stop`

A `Table` holds programs, `program(region, *tensors, *modules)`: they call `region(function, *args)`
where a region may stand. Each is run plain and through every door, and compared in all that can be
seen of it: outputs, gradients of two orders, random stream, inputs and module state.
"""

import collections
import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import os
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _python_dispatch as dispatch

import checkpointing
from checkpointing import CheckpointError, auto, checkpoint_scope, checkpointed

Function = Callable[..., Any]
_libc = ctypes.CDLL(None)


# ---- doors


def plain(fn: Function, **options: Any) -> Function:
    return fn


def rerun(fn: Function, early_stop: bool = True, **options: Any) -> Function:
    """Checkpointed; recompute calls the function again."""
    return checkpointed(fn, early_stop=early_stop, **options)


def replay(fn: Function, early_stop: bool = True, **options: Any) -> Function:
    """Checkpointed; recompute replays operators."""
    return checkpointed(fn, backend="replay", early_stop=early_stop, **options)


def legacy(fn: Function, early_stop: bool = True, **options: Any) -> Function:
    return checkpointed(fn, backend="reentrant", **options)


def scope(fn: Function, early_stop: bool = True, **options: Any) -> Function:
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with checkpoint_scope(early_stop=early_stop, **options):
            return fn(*args, **kwargs)

    return scoped


def gradients(fn: Function, early_stop: bool = True) -> Function:
    """The gradients with respect to all tensors in the arguments, themselves differentiable."""

    def differentiated(*args: Any) -> tuple[Tensor | None, ...]:
        wanted = [t for t in tensors(args) if t.requires_grad]
        return torch.autograd.grad(weigh(fn(*args)), wanted, create_graph=True, allow_unused=True)

    return differentiated


# `auto()` makes no plan for blocks that save a few KiB. For as little memory as possible it does,
# and complains that more is needed.
PLANNED = auto(peak=1)
NO_ROOM = pytest.mark.filterwarnings("ignore:.*(A budget of|The least peak possible is)")
planned = functools.partial(scope, policy=PLANNED)
# Given once in a process: by whichever test comes first.
DEPRECATED = pytest.mark.filterwarnings("ignore:backend='reentrant' is deprecated:FutureWarning")

# Doors that take the options of a region.
DOORS: dict[str, Callable[..., Function]] = {
    "rerun": rerun,
    "replay": replay,
    "scope": scope,
    "rerun in rerun": lambda fn, **options: rerun(rerun(fn, **options), **options),
    "scope in rerun": lambda fn, **options: rerun(scope(fn, **options), **options),
    "rerun in scope": lambda fn, **options: scope(rerun(fn, **options), **options),
}
WAYS = {**DOORS, "rerun to the end": functools.partial(rerun, early_stop=False)}
RERUNS = ("rerun", "rerun to the end", "rerun in rerun")
EACH_DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))
EACH_WAY = pytest.mark.parametrize("door", [rerun, replay, scope], ids=["rerun", "replay", "scope"])
WORDS = ["c", "r", "s", "cc", "cs", "sc", "ss"]
WORD = pytest.mark.parametrize("word", WORDS)
EARLY_STOP = pytest.mark.parametrize("early_stop", [True, False], ids=["early", "late"])
LETTERS: dict[str, Callable[..., Function]] = {
    "a": functools.partial(scope, policy=auto()),
    "b": functools.partial(scope, policy=auto(budget=100)),
    "c": rerun,
    "g": gradients,
    "l": legacy,
    "p": planned,
    "r": replay,
    "s": scope,
}


def apply(word: str, fn: Function, early_stop: bool = True) -> Function:
    """`fn` inside a nest of doors and gradients, outermost first."""
    for letter in reversed(word):
        fn = LETTERS[letter](fn, early_stop=early_stop)
    return fn


def called(door: Function) -> Function:
    """The region of a program in a table: it calls a function through a door."""
    return lambda function, /, *args, **kwargs: door(function)(*args, **kwargs)


REGIONS = {
    "plain": called(plain),
    "scope": called(scope),
    "replay": called(functools.partial(replay, early_stop=False)),
    "planned": called(planned),
    "in hooks": called(lambda fn: in_hooks(scope(fn))),
    "rerun": called(rerun),
    "scope in rerun": called(DOORS["scope in rerun"]),
}
RERUN = ("rerun", "scope in rerun")
REPLAY = ("scope", "replay", "planned", "in hooks")
ALL = (*REPLAY, *RERUN)


# ---- tensors


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape or (4, 4)).requires_grad_()


def integers(*shape: int) -> Tensor:
    """Small integers that want a gradient, the same each time."""
    numbers = torch.arange(1.0, torch.Size(shape or (4,)).numel() + 1) % 5 - 2
    return numbers.view(shape or (4,)).requires_grad_()


def data(*shape: int) -> Tensor:
    return integers(*shape or (3,)).detach() + 3


def through(layers: Any, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def words(text: str) -> list[str]:
    return text.split()


def by_turns(rows: Iterable[tuple[Any, ...]], options: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Each row once, with that option which its items have met least often."""
    met: Counter[Any] = Counter()
    found = []
    for row in rows:
        often = lambda one, row=row: (sum(met[item, one] for item in enumerate(row)), met[one])
        option = min(options, key=often)
        met.update([option, *((item, option) for item in enumerate(row))])
        found.append((*row, option))
    return found


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    is_open = isinstance(value, list | tuple | collections.deque)
    return [t for part in value for t in tensors(part)] if is_open else []


def weigh(result: Any) -> Tensor:
    """One number that every differentiable element of `result` has its own share in."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors(result):
        if tensor.requires_grad:
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            weights = torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).reshape(real.shape)
            total = total + (real * weights).sum()
    return total


def bits(value: Any) -> Any:
    """Something that is equal for two values just if they are the same bit for bit."""
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(bits, value)]
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value):
        return type(value).__name__, bits(vars(value))
    if not isinstance(value, Tensor):
        return value if isinstance(value, str | bytes | int | None) else repr(value)
    tensor = value.detach()
    head = (value.requires_grad, type(value).__name__, value.dtype, value.layout, str(value.device))
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [bits(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
        return (*head, tuple(tensor.shape), parts)
    if tensor.is_nested:
        return (*head, bits(tensor.unbind()))
    head = (*head, tuple(tensor.shape))
    if tensor.is_meta:
        return head
    if tensor.layout is torch._mkldnn:
        return (*head, bits(tensor.to_dense()))
    if tensor.layout is not torch.strided:
        tensor = tensor if tensor.is_sparse else tensor.to_sparse()
        return (*head, bits([tensor._indices(), tensor._values()]))
    if tensor.is_quantized:
        return (*head, bits(tensor.int_repr()))
    data = tensor.resolve_conj().resolve_neg()
    data = (data.clone() if data._is_zerotensor() else data).contiguous().view(-1)
    data = data.as_strided(data.shape, (1,))  # one number may have any stride
    numbers = data.view(torch.uint8).cpu().numpy().tobytes() if data.numel() else b""
    return (*head, tensor.stride(), numbers)


def same(have: Any, want: Any) -> None:
    assert [bits(t) for t in have] == [bits(t) for t in want]


# ---- what can be seen of a program


def seed(number: int) -> None:
    """As `torch.manual_seed`, which formats the stack anew for each accelerator that is absent."""
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


def streams() -> Any:
    """The random streams of the CPU and, where there is one, of the GPU."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return bits([torch.get_rng_state(), *on_gpu])


def weights_like(outputs: list[Tensor]) -> list[Tensor]:
    """Fixed cotangents, the same in every run; sums and products of them are exact."""
    return [
        torch.ones_like(t)
        if t.layout != torch.strided or t.is_nested or hasattr(t, "__tensor_flatten__")
        else (0.5 + torch.arange(t.numel(), device=t.device).remainder(32) / 32)
        .reshape(t.shape)
        .to(t.dtype)
        for t in outputs
    ]


def _first(seen: Any, outputs: Any, inputs: Any) -> None:
    torch.autograd.backward(outputs, weights_like(outputs))


def _of_order(orders: int) -> Function:
    """Gradients of gradients, each with a graph of those before."""

    def run(seen: Any, outputs: Any, inputs: Any) -> None:
        for order in range(1, orders + 1):
            more = {"create_graph": order < orders, "allow_unused": True}
            found = torch.autograd.grad(outputs, inputs, weights_like(outputs), **more)
            seen[f"gradients of order {order}"] = bits(found)
            seen[f"random stream after order {order}"] = streams()
            outputs = [t for t in found if t is not None and t.requires_grad]
            if not outputs:
                break

    return run


def _partial(seen: Any, outputs: Any, inputs: Any) -> None:
    """One output and one input at a time, last first; then all of them."""
    for i, out in enumerate(reversed(outputs)):
        for j, inp in enumerate(inputs[:3]):
            weights = weights_like([out])
            found = torch.autograd.grad(out, inp, weights, retain_graph=True, allow_unused=True)
            seen[f"output -{i} by input {j}"] = bits(found)
    torch.autograd.backward(outputs, weights_like(outputs))


BACKWARDS = {"first": _first, "second": _of_order(2), "third": _of_order(3), "partial": _partial}


def observe(program: Function, region: Function, make: Function, backward: str) -> dict[str, Any]:
    seed(1)
    leaves = make()
    modules = [m for m in leaves if isinstance(m, nn.Module)]
    inputs = [t for t in tensors(leaves) if t.requires_grad]
    inputs += [p for m in modules for p in m.parameters() if p.requires_grad]
    seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returned = program(region, *leaves)
        seen = {"outputs": bits(returned), "stream after forward": streams()}
        outputs = [t for t in tensors(returned) if t.requires_grad]
        del returned
        if outputs:
            BACKWARDS[backward](seen, outputs, inputs)
    seen["random stream"] = streams()
    seen["module state"] = [bits(dict(m.state_dict())) for m in modules]
    seen["inputs"] = bits([t.detach() for t in tensors(leaves)])
    seen["grad"] = bits([t.grad for t in inputs])
    return seen


def outcome(program: Any, region: Any, make: Any, backward: str) -> dict[str, Any]:
    """As `observe`, with an exception as part of what is seen."""
    try:
        return observe(program, region, make, backward)
    except Exception as error:
        return {"exception": type(error).__name__, "message": str(error), "error": error}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what differs between two observations."""
    return [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]


@contextlib.contextmanager
def garbage_in_fresh_memory(byte: int) -> Iterator[None]:
    """Let malloc fill what it hands out with `byte`."""
    perturb = getattr(_libc, "mallopt", lambda option, byte: None)
    perturb(-6, byte)  # M_PERTURB
    try:
        yield
    finally:
        perturb(-6, 0)


@dataclasses.dataclass
class Case:
    """A program, with its doors; those that are `refused` may raise a CheckpointError instead."""

    program: Any
    make: Any
    refused: Any = ()
    backwards: Any = ("first", "second", "partial")
    doors: Any = ALL
    _wanted: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def check(self, door: str) -> None:
        for backward in self.backwards:
            found = functools.partial(outcome, self.program, make=self.make, backward=backward)
            want, got = self._wanted.get(backward) or found(REGIONS["plain"]), found(REGIONS[door])
            if door in self.refused and isinstance(got.get("error"), CheckpointError):
                continue
            if "error" in want:
                assert (backward, got.get("exception")) == ("second", want["exception"])
                continue
            self._wanted[backward] = want
            if "error" in got:
                raise got["error"]
            assert not differences(want, got), f"{backward}: differs in {differences(want, got)}"

    def check_lifetimes(self, door: str) -> None:
        """Frames die with the graph: after a backward and without one."""
        # What torch makes only once, such as what it compiles, stays alive.
        self.program(REGIONS["plain"], *self.make())
        # An argument that its own function writes, which backward refuses, owns it.
        if door not in self.refused:
            with no_garbage():
                self.program(REGIONS[door], *self.make())
        # Torch itself keeps a graph of several outputs whose backward has failed.
        if "exception" not in outcome(self.program, REGIONS[door], self.make, "first"):
            with no_garbage():
                outcome(self.program, REGIONS[door], self.make, "first").clear()


class Table:
    """Programs of one file; those that aren't `whole` are themselves functions in a region."""

    def __init__(self, make: Function) -> None:
        self.make = make
        self.cases: dict[str, Case] = {}

    def __call__(self, *functions: Any, make: Any = None, whole: bool = False, **more: Any) -> Any:
        def register(function: Any) -> Any:
            def program(region: Any, x: Any, y: Any, *more: Any) -> Any:
                return region(function, x, y * 1.5, *more)  # a leaf, and a result

            assert function.__name__ not in self.cases
            case = Case(function if whole else program, make or self.make, **more)
            self.cases[function.__name__] = case
            return function

        return register(*functions) if functions else register

    def pairs(self, doors: Any = ALL, but: Any = ()) -> list[Any]:
        """Each program with each of its doors, for `parametrize`."""
        return [
            pytest.param(case, door, id=f"{name}-{door}")
            for name, case in self.cases.items()
            for door in doors
            if door in case.doors and name not in but
        ]

    def tests(self, cycles: tuple[str, ...] = ()) -> tuple[Function, Function]:
        """The tests of this table; in `cycles`, plain code makes one, too."""

        @pytest.mark.parametrize(("program", "door"), self.pairs())
        def bit_for_bit(program: Case, door: str) -> None:
            program.check(door)

        @pytest.mark.parametrize(("program", "door"), self.pairs(("scope", "rerun"), cycles))
        def nothing_stays(program: Case, door: str) -> None:
            program.check_lifetimes(door)

        return bit_for_bit, nothing_stays


def leaves(*modules: Function, shape: tuple[int, ...] = (4, 6), **options: Any) -> Function:
    """Two tensors of numbers that want gradients, and modules."""
    options = options or {"dtype": torch.float64}

    def make() -> tuple[Any, ...]:
        seed(3)
        two = [torch.randn(shape, **options, requires_grad=True) for _ in range(2)]
        return (*two, *[m().to(**options) for m in modules])

    return make


# ---- what programs are made of


def same_place() -> Any:
    """Hooks that copy; what comes back has the strides and the alignment that it had."""

    def pack(t: Tensor) -> Any:
        if t.layout is not torch.strided or t.is_nested or type(t) is not Tensor or t.is_meta:
            return t.detach()
        copy = t.detach().untyped_storage().clone()
        whole = torch.empty(0, dtype=t.dtype, device=t.device)
        whole.set_(copy, t.storage_offset(), t.size(), t.stride())
        return torch._neg_view(whole) if t.is_neg() else whole.conj() if t.is_conj() else whole

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)


def in_hooks(fn: Function, hooks: Function = same_place) -> Function:
    """`fn` where other hooks send away what it saves."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with hooks():
            return fn(*args, **kwargs)

    return run


class SavesItsOutput(torch.autograd.Function):
    """Reads twice what it has saved last: under early stop the recompute ends inside `apply`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(first, second)
        return grad * first * (1 - second)


class Pair(torch.autograd.Function):
    """Saves an input and an output, has two outputs, and looks at which gradients are needed."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        e = x.tanh()
        return e * y, e

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, e = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (g * y + h) * (1 - e * e) if wanted[0] else None, g * e if wanted[1] else None


class Double(torch.autograd.Function):
    """Writes its input in place and saves the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2 + 0 * ctx.saved_tensors[0]


@torch.library.custom_op("oracle::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Random, which nothing about it tells."""
    return x + torch.rand(x.shape, dtype=x.dtype)


noisy.register_autograd(lambda ctx, g: g)
SEED = [itertools.count()]  # of the next call's noise; steps that begin alike put another one here


@torch.library.custom_op("oracle::shaken", mutates_args=())
def shaken(x: Tensor) -> Tensor:
    """Its argument, with other noise at each call, as kernels that add atomically make it."""
    noise = torch.Generator().manual_seed(next(SEED[0]))
    return x * (1 + 0.003 * torch.randn(x.shape, generator=noise))


shaken.register_autograd(lambda ctx, g: g)


class Hooks(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that copy what they are given, and know what it was and how often it came back."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.places: list[int] = []
        self.unpacked = 0
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor:
        self.places.append(tensor.data_ptr())
        self.packed.append(tensor.detach().clone())
        return self.packed[-1].clone()

    def unpack(self, copied: Tensor) -> Tensor:
        self.unpacked += 1
        return copied.clone()


def same_bits(door, program):
    """A program leaves the same bits behind with regions as without."""

    def run(door):
        seed(0)
        result = program(door)
        return [bits(t) for t in result], streams()

    assert run(door) == run(plain)


class Programs:
    """Programs, `program(door)`, which leave the same bits behind through each of their doors."""

    def __init__(self, default: Any = (*RERUNS, "replay", "scope")) -> None:
        self.default, self.cases = default, []

    def __call__(self, *doors: str) -> Any:
        def add(program: Any) -> Any:
            for door in doors or self.default:
                name = f"{program.__name__}-{door}"
                self.cases.append(pytest.param(WAYS[door], program, id=name))
            return program

        return add

    def test(self) -> Any:
        @pytest.mark.parametrize(("door", "program"), self.cases)
        def test(door: Any, program: Any) -> None:
            same_bits(door, program)

        return test


# ---- what runs, and what lives


def with_gradients(parameters: Iterable[Tensor]) -> None:
    """Gradients are there already, and so are no part of what is counted."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def python_calls(run):
    """How many functions are called, Python's and C's."""
    calls = [0]

    def profile(frame, event, argument):
        calls[0] += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls[0]


# Operators that compute nothing: they differ between torch versions and between sources.
UNCOUNTED = words("detach alias as_strided view t transpose expand empty_strided new_empty")


class PassThrough(dispatch.TorchDispatchMode):
    """A mode that does nothing: some composite operators take another way in any."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counting(PassThrough):
    """Counts the operators that run while it is entered, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in UNCOUNTED:
            self.ran[name] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, all from the same moment on."""
    barrier, results, errors = threading.Barrier(len(functions)), [None] * len(functions), []

    def run(i: int, fn: Callable[[], Any]) -> None:
        try:
            torch.set_num_threads(1)
            barrier.wait(timeout=120)
            results[i] = fn()
        except BaseException as error:
            errors.append(error)

    items = enumerate(functions)
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]
    return results


def count(run: Callable[[], object]) -> dict[str, int]:
    with Counting() as counting:
        run()
    return dict(counting.ran)


class Watching(dispatch.TorchDispatchMode):
    """Knows of every storage that an operator makes while it is entered whether it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tensors([args, kwargs])}
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self.made.append((func.overloadpacket.__name__, StorageWeakRef(storage)))
        return result

    def alive(self, *names: str) -> list[str]:
        """The operators whose results live, in the order in which they ran."""
        living = [name for name, ref in self.made if not ref.expired()]
        return [name for name in living if not names or name in names]


class Step(NamedTuple):
    """What a forward and its backward need: bytes beyond those before them."""

    held: int  # between the two
    peak: int


def memory_of(forward: Callable[[], Tensor]) -> Step:
    """Each block that is allocated or freed, from torch's profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages on stderr
    gc.collect()  # garbage would be counted when it is freed
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = forward()
        with record_function("between"):
            pass
        loss.backward()
    live = held = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif event.name() == "between":
            held = live
    return Step(held, peak)


def freeze() -> None:
    """What is there now is left out of `tensors_alive`."""
    gc.collect()
    gc.freeze()


def tensors_alive() -> int:
    """How many tensors Python knows of that have been made since `freeze`."""
    kinds = Counter(map(type, gc.get_objects()))
    return sum(count for kind, count in kinds.items() if issubclass(kind, Tensor))


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """No tensor that is made inside is there at the end, without the garbage collector (rule 9)."""
    freeze()
    gc.disable()
    try:
        yield
        assert tensors_alive() == 0
    finally:
        gc.enable()


def is_in_a_region() -> bool:
    """Whether one holds what functions that it does not repeat return."""
    dead = weakref.ref(checkpointing.forward_only(lambda: {0})())
    return dead() is not None


def state() -> dict[str, Any]:
    """All that a region or a recompute changes while it runs, and no user does."""
    return {
        "in a region": is_in_a_region(),
        "recomputing": checkpointing.is_recomputing(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "functions enabled": torch._C._is_torch_function_enabled(),
        "excluded keys": repr(torch._C._dispatch_tls_local_exclude_set()),
        "in a mode": dispatch.is_in_any_mode_without_ignore_compile_internals(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
    }
