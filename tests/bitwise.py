"""Tables of programs, each run plain and through every door, and compared in all that can be seen
of it.

A program is a function `program(region, *tensors, *modules)`: it calls `region(function, *args)`
where a region may stand, and returns tensors. Seen are outputs, gradients of two orders, random
stream, inputs and module state.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import bits, c, no_garbage, planned, r, s, same_place, tensors
from torch import Tensor, nn

from checkpointing import CheckpointError

_libc = ctypes.CDLL(None)
Function = Callable[..., Any]


def _hooked(fn: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        with same_place():
            return s(fn)(*args, **kwargs)

    return run


def _door(transform: Function) -> Function:
    return lambda function, /, *args, **kwargs: transform(function)(*args, **kwargs)


DOORS = {
    "plain": _door(lambda fn: fn),
    "scope": _door(s),
    "replay": _door(lambda fn: r(fn, early_stop=False)),
    "planned": _door(planned),
    "in hooks": _door(_hooked),
    "rerun": _door(c),
    "scope in rerun": _door(lambda fn: c(s(fn))),
}
plain = DOORS["plain"]
RERUN = ("rerun", "scope in rerun")
REPLAY = ("scope", "replay", "planned", "in hooks")
ALL = (*REPLAY, *RERUN)


def weights_like(outputs: list[Tensor]) -> list[Tensor]:
    """Fixed cotangents, the same in every run; sums and products of them are exact."""
    return [
        torch.ones_like(t)
        if t.layout != torch.strided or t.is_nested or hasattr(t, "__tensor_flatten__")
        else (0.5 + torch.arange(t.numel()).remainder(32) / 32).reshape(t.shape).to(t.dtype)
        for t in outputs
    ]


def _first(seen: Any, outputs: Any, inputs: Any) -> None:
    torch.autograd.backward(outputs, weights_like(outputs))


def _second(seen: Any, outputs: Any, inputs: Any) -> None:
    """Gradients of gradients, with a graph of the first ones."""
    grads = torch.autograd.grad(
        outputs, inputs, weights_like(outputs), create_graph=True, allow_unused=True
    )
    seen["first order"] = bits(grads)
    again = [g for g in grads if g is not None and g.requires_grad]
    if again:
        found = torch.autograd.grad(again, inputs, weights_like(again), allow_unused=True)
        seen["second order"] = bits(found)


def _partial(seen: Any, outputs: Any, inputs: Any) -> None:
    """One output and one input at a time, last first; then all of them."""
    for i, out in enumerate(reversed(outputs)):
        for j, inp in enumerate(inputs[:3]):
            weights = weights_like([out])
            found = torch.autograd.grad(out, inp, weights, retain_graph=True, allow_unused=True)
            seen[f"output -{i} by input {j}"] = bits(found)
    torch.autograd.backward(outputs, weights_like(outputs))


BACKWARDS = {"first": _first, "second": _second, "partial": _partial}


def observe(program: Function, region: Function, make: Function, backward: str) -> dict[str, Any]:
    torch.manual_seed(1)
    leaves = make()
    modules = [m for m in leaves if isinstance(m, nn.Module)]
    inputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    inputs += [p for m in modules for p in m.parameters() if p.requires_grad]
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returned = program(region, *leaves)
        seen = {"outputs": bits(returned), "stream after forward": bits(torch.get_rng_state())}
        outputs = [t for t in tensors(returned) if t.requires_grad]
        del returned
        if outputs:
            BACKWARDS[backward](seen, outputs, inputs)
    seen["random stream"] = bits(torch.get_rng_state())
    seen["module state"] = [bits(dict(m.state_dict())) for m in modules]
    seen["inputs"] = bits([t.detach() for t in leaves if isinstance(t, Tensor)])
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
    """A program; `refused` names the doors that may raise a CheckpointError instead, `doors` those
    that make sense."""

    program: Any
    make: Any
    refused: Any = ()
    backwards: Any = tuple(BACKWARDS)
    doors: Any = ALL
    _wanted: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def check(self, door: str) -> None:
        """Same as plain, for every kind of backward."""
        for backward in self.backwards:
            want = self._wanted.get(backward) or outcome(self.program, plain, self.make, backward)
            got = outcome(self.program, DOORS[door], self.make, backward)
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
        # An argument that its own function writes, which backward refuses, owns it.
        if door not in self.refused:
            with no_garbage():
                self.program(DOORS[door], *self.make())
        # Torch itself keeps a graph of several outputs whose backward has failed.
        if "exception" not in outcome(self.program, DOORS[door], self.make, "first"):
            with no_garbage():
                outcome(self.program, DOORS[door], self.make, "first").clear()


class Table:
    """The programs of one test file. One that isn't `whole` is itself the function in the
    region."""

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
        def nothing_stays(program: Case, door: str, frozen: None) -> None:
            """Frames die with the graph, without the garbage collector, also without a backward."""
            program.check_lifetimes(door)

        return bit_for_bit, nothing_stays


def leaves(*modules: Function) -> Function:
    """Two tensors of numbers that want gradients, and modules."""

    def make() -> tuple[Any, ...]:
        torch.manual_seed(3)
        two = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        return (*two, *[m().double() for m in modules])

    return make
