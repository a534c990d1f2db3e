"""Run one program plain and through every door, and compare what it does bit for bit.

A program is a function `program(region, *tensors, *modules)`: it calls `region(function, *args)` where a region may
stand, and returns tensors. `observe` runs it on fresh tensors and modules and writes down everything that can be
seen of it: outputs, gradients of two orders, random stream, module state.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkpointing
from checkpointing import checkpoint_scope, checkpointed

_libc = ctypes.CDLL(None)


# ---- doors: region(function, *args, **kwargs)
def plain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def rerun(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return checkpointed(function)(*args, **kwargs)


def rerun_checked(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return checkpointed(function, determinism_check="values", early_stop=False)(*args, **kwargs)


def replay(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return checkpointed(function, backend="replay", early_stop=False)(*args, **kwargs)


def scope(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with checkpoint_scope():
        return function(*args, **kwargs)


def scope_checked(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with checkpoint_scope(determinism_check="values"):
        return function(*args, **kwargs)


def scope_auto(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with checkpoint_scope(policy=checkpointing.auto()):
        return function(*args, **kwargs)


def scope_in_scope(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with checkpoint_scope(), checkpoint_scope():
        return function(*args, **kwargs)


def scope_in_rerun(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return rerun(scope, function, *args, **kwargs)


def rerun_in_scope(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return scope(rerun, function, *args, **kwargs)


def scope_in_save_on_cpu(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return scope(function, *args, **kwargs)


RERUN = (rerun, rerun_checked, rerun_in_scope, scope_in_rerun)
REPLAY = (replay, scope, scope_auto, scope_checked, scope_in_scope, scope_in_save_on_cpu)
DOORS = REPLAY + RERUN


# ---- bits
def bits(value: Any) -> Any:
    """Something that is equal for two values exactly when they are the same bit for bit."""
    if value is None or isinstance(value, (int, bool, str, bytes, torch.Size, torch.dtype)):
        return value
    if isinstance(value, float | complex):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    if not isinstance(value, Tensor):
        return repr(value)
    tensor = value.detach()
    if tensor._is_zerotensor():
        tensor = tensor.clone()
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return (type(tensor).__name__, tuple(tensor.shape), [bits(getattr(tensor, n)) for n in names])
    head = (tuple(tensor.shape), tensor.dtype, tensor.layout, str(tensor.device))
    if tensor.is_meta:
        return head
    if tensor.layout == torch.sparse_coo:
        return (*head, bits(tensor._indices()), bits(tensor._values()))
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (*head, bits(tensor.crow_indices()), bits(tensor.col_indices()), bits(tensor.values()))
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (*head, bits(tensor.ccol_indices()), bits(tensor.row_indices()), bits(tensor.values()))
    if tensor.is_mkldnn:
        return (*head, bits(tensor.to_dense()))
    if tensor.is_quantized:
        return (*head, bits(tensor.int_repr()))
    if tensor.is_nested:
        return (str(tensor.dtype), [bits(t) for t in tensor.unbind()])
    flat = tensor.resolve_conj().resolve_neg().contiguous()
    return (*head, tensor.stride(), flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what differs between two observations."""
    return [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]


# ---- observing
def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    return []


def weights_like(tensors: list[Tensor]) -> list[Tensor]:
    """Fixed cotangents, the same in every run."""
    out = []
    for t in tensors:
        if t.layout != torch.strided or t.is_nested or hasattr(t, "__tensor_flatten__"):
            out.append(torch.ones_like(t))
            continue
        real = torch.linspace(0.5, 1.5, max(t.numel(), 1), dtype=torch.float64)[: t.numel()]
        out.append(real.reshape(t.shape).to(t.dtype))
    return out


def observe(
    program: Callable[..., Any],
    region: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    backward: str,
) -> dict[str, Any]:
    """Everything that can be seen of one run. `backward` is a key of BACKWARDS."""
    torch.manual_seed(1)
    leaves = make()
    modules = [m for m in leaves if isinstance(m, nn.Module)]
    inputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    inputs += [p for m in modules for p in m.parameters() if p.requires_grad]
    torch.manual_seed(2)
    seen: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returned = program(region, *leaves)
        seen["outputs"] = bits(returned)
        seen["rng after forward"] = bits(torch.get_rng_state())
        outputs = [t for t in tensors_in(returned) if t.requires_grad]
        del returned
        if outputs:
            BACKWARDS[backward](seen, outputs, inputs)
        seen["rng"] = bits(torch.get_rng_state())
        seen["module state"] = [bits(dict(m.state_dict())) for m in modules]
        seen["inputs"] = bits([t.detach() for t in leaves if isinstance(t, Tensor)])
        seen["grad"] = bits([t.grad for t in inputs])
    return seen


def _first(seen: Any, outputs: Any, inputs: Any) -> None:
    torch.autograd.backward(outputs, weights_like(outputs))


def _second(seen: Any, outputs: Any, inputs: Any) -> None:
    """Gradients of gradients, with a graph of the first ones."""
    grads = torch.autograd.grad(outputs, inputs, weights_like(outputs), create_graph=True, allow_unused=True)
    seen["first"] = bits(list(grads))
    again = [g for g in grads if g is not None and g.requires_grad]
    if again:
        seen["second"] = bits(list(torch.autograd.grad(again, inputs, weights_like(again), allow_unused=True)))


def _twice(seen: Any, outputs: Any, inputs: Any) -> None:
    """One graph, two backward calls."""
    torch.autograd.backward(outputs, weights_like(outputs), retain_graph=True)
    torch.autograd.backward(outputs, weights_like(outputs))


def _partial(seen: Any, outputs: Any, inputs: Any) -> None:
    """One output and one of the first inputs at a time, last first."""
    for i, out in enumerate(reversed(outputs)):
        for j, inp in enumerate(inputs[:6]):
            got = torch.autograd.grad(out, inp, weights_like([out]), retain_graph=True, allow_unused=True)
            seen[f"output -{i} by input {j}"] = bits(list(got))


BACKWARDS = {"first": _first, "second": _second, "twice": _twice, "partial": _partial}


def outcome(program: Any, region: Any, make: Any, backward: str) -> dict[str, Any]:
    """As `observe`, with an exception as part of what is seen."""
    try:
        return observe(program, region, make, backward)
    except Exception as error:
        return {"exception": type(error).__name__, "message": str(error), "error": error}


_M_PERTURB = -6


@contextlib.contextmanager
def garbage_in_fresh_memory(byte: int) -> Iterator[None]:
    """Let malloc fill what it hands out with `byte`, so that results that depend on unwritten memory differ."""
    if not hasattr(_libc, "mallopt"):
        yield
        return
    _libc.mallopt(_M_PERTURB, byte)
    try:
        yield
    finally:
        _libc.mallopt(_M_PERTURB, 0)


# ---- tables of programs
class Table:
    """Programs of one test file. `refused` names the doors that may raise a CheckpointError instead; `doors` are those
    that make sense (a function that is called again writes again)."""

    def __init__(self, make: Callable[[], tuple[Any, ...]]) -> None:
        self.make = make
        self.cases: dict[str, Case] = {}

    def __call__(
        self, function: Any = None, *, make: Any = None, whole: bool = False, refused: Any = (), **more: Any
    ) -> Any:
        def register(function: Any) -> Any:
            if whole:  # it places the regions itself
                program = function
            else:

                def program(region: Any, *leaves: Any) -> Any:
                    return region(function, *[_not_leaf(i, t) for i, t in enumerate(leaves)])

            assert function.__name__ not in self.cases
            self.cases[function.__name__] = Case(program, make or self.make, refused, **more)
            return function

        return register if function is None else register(function)

    def pairs(self, but: tuple[str, ...] = ()) -> list[Any]:
        """Each program with each of its doors, for `parametrize`."""
        return [
            pytest.param(case, door, id=f"{name}-{door.__name__}")
            for name, case in self.cases.items()
            for door in case.doors
            if name not in but
        ]


def _not_leaf(i: int, t: Any) -> Any:
    """Every second tensor is a result rather than a leaf."""
    return t * 1.5 if i % 2 and isinstance(t, Tensor) and t.requires_grad else t


class Case:
    def __init__(
        self, program: Any, make: Any, refused: Any, backwards: Any = tuple(BACKWARDS), doors: Any = DOORS
    ) -> None:
        self.program, self.make, self.refused, self.backwards, self.doors = program, make, refused, backwards, doors
        self._wanted: dict[str, dict[str, Any]] = {}

    def _want(self, backward: str) -> dict[str, Any]:
        """What plain code leaves behind."""
        want = self._wanted.get(backward) or outcome(self.program, plain, self.make, backward)
        if "exception" not in want:
            self._wanted[backward] = want
        return want

    def check_lifetimes(self, region: Any) -> None:
        """Frames die with the graph: after a backward and without one."""
        if region not in self.refused:  # an argument that its own function writes, which backward refuses, owns it
            with no_garbage():
                self.program(region, *self.make())
        # Torch itself keeps a graph of several outputs whose backward has failed.
        if "exception" not in outcome(self.program, region, self.make, "first"):
            with no_garbage():
                outcome(self.program, region, self.make, "first").clear()

    def check(self, region: Any) -> None:
        """Same as plain, for every kind of backward; `refused` doors may raise a CheckpointError instead."""
        for backward in self.backwards:
            want = self._want(backward)
            got = outcome(self.program, region, self.make, backward)
            error = got.get("error")
            if region in self.refused and isinstance(error, checkpointing.CheckpointError):
                continue
            if "exception" in want:
                assert backward == "second" and got.get("exception") == want["exception"], (backward, want, got)
                continue
            if "exception" in got:
                raise AssertionError(f"{backward}: {got['exception']}: {got['message']}") from error
            assert not differences(want, got), f"{backward}: differs in {differences(want, got)}"


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Frames that are made inside are gone at the end, without the garbage collector (rule 9)."""
    from checkpointing import _engine

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    init = _engine.Frame.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        alive.add(self)

    gc.disable()
    _engine.Frame.__init__ = noting
    try:
        yield
        assert not alive, f"{len(alive)} frames are alive: {list(map(str, alive))[:3]}"
    finally:
        _engine.Frame.__init__ = init
        gc.enable()
