"""What the block door costs: scopes and `auto()` over a floor, and programs over torch's own
checkpoint.

*Floor*: a dispatch mode that only calls the operator, saved-tensors hooks that only store the
tensor, and the same operators once more with grad mode off. `python -m pytest bench` runs
everything once and compares gradients bit for bit; `python bench/bench_scope.py` prints the ratios,
their marks and whether they are met. One thread.
"""

from __future__ import annotations

import functools
import gc
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from checkpointing import auto, checkpoint_scope

sys.path.insert(0, str(Path(__file__).parent))
from programs import Block
from ratios import added, mark, ratio, timed


class Nothing(TorchDispatchMode):
    """The cheapest mode there is."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Stored:
    """The cheapest hooks there are."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor.detach() if tensor.requires_grad else tensor


def plain(function, *args):
    return function(*args)


def floor(function, *args):
    hooks = torch.autograd.graph.saved_tensors_hooks(Stored, lambda stored: stored.tensor)
    with hooks, Nothing():
        return function(*args)


def by_torch(function, *args):
    return torch_checkpoint(function, *args, use_reentrant=False)


def scope(function, *args):
    with checkpoint_scope():
        return function(*args)


def one_auto(function, *args):
    with checkpoint_scope(policy=auto()):
        return function(*args)


WAYS = {"plain": plain, "floor": floor, "torch": by_torch, "scope": scope, "auto": one_auto}

# What an operator adds to plain, in parts of what the floor adds: marks for a scope and `auto()`.
OPERATORS = {
    "sin": (lambda: torch.sin, 1.25, 1.35),
    "linear": (lambda: nn.Linear(8, 8), 1.25, 1.35),
    "layer_norm": (lambda: nn.LayerNorm(8), 1.25, 1.35),
    "mul": (lambda: functools.partial(torch.mul, torch.randn(8, requires_grad=True)), 1.25, 1.35),
    "softmax": (lambda: lambda x: x.softmax(-1), 1.25, 1.35),
    "sin().mul_()": (lambda: lambda x: x.sin().mul_(0.9), 1.4, 1.5),
    "dropout": (lambda: lambda x: F.dropout(x, 0.1), 1.9, 2.0),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8), 1.9, 2.0),
}


def chain(name, n=50):
    """An operator, n times; without a module whose statistics would change from one way to the
    next."""
    torch.manual_seed(0)
    function = OPERATORS[name][0]()

    def run(x):
        for _ in range(n):
            x = function(x)
        return x

    return run, torch.randn(4, 8, requires_grad=True)


def steps(run, x, ways=tuple(WAYS)):
    """Forward and backward; the floor runs the operators once more, as a recompute must."""

    def step(name):
        def call():
            (grad,) = torch.autograd.grad(WAYS[name](run, x).sum(), x)
            if name == "floor":
                with torch.no_grad():
                    run(x)
            return grad

        return call

    return {name: step(name) for name in ways}


def bytes_of_operators(way, n=200):
    """Python objects that one operator of a chain leaves until backward, in bytes."""
    sizes = []
    for count in (n, 2 * n):
        run, x = chain("sin", count)
        WAYS[way](run, x)
        gc.collect()
        tracemalloc.start()
        y = WAYS[way](run, x)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        del y
    return (sizes[1] - sizes[0]) / n


class Each(nn.Module):
    """Six transformer blocks with dropout, each in a region of its own."""

    def __init__(self, width, way):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 4, 0.1) for _ in range(6))
        self.way = way

    def forward(self, x):
        for block in self.blocks:
            x = self.way(block, x)
        return x


# Program, shape of its input, marks of a scope per block (None: no blocks) and of one `auto()`.
PROGRAMS = {
    "blocks, width 64, 2 x 4 tokens": (64, (2, 4, 64), 1.08, None),
    "blocks, width 256, 4 x 128 tokens": (256, (4, 128, 256), 0.96, 0.96),
    "blocks, width 512, 4 x 128 tokens": (512, (4, 128, 512), 0.93, 0.92),
    "nn.GRU, 2 layers, 32 steps, 64 units": (None, (32, 4, 64), None, 1.15),
}


def program(name, way):
    """One step: blocks in regions of their own, or one region around everything."""
    width, shape, _, _ = PROGRAMS[name]
    torch.manual_seed(0)
    each = plain if way == "auto" else WAYS[way]
    model = nn.GRU(64, 64, 2) if width is None else Each(width, each)
    x = torch.randn(shape)
    around = WAYS[way] if width is None or way == "auto" else plain

    def step():
        model.zero_grad()
        result = around(model, x)
        (result[0] if width is None else result).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    return step


def growth(way, part):
    """Time per operator in a block of 10,000, over that in blocks of 100: forward or backward."""
    run, x = chain("sin", 100)

    def around(times):
        def many():
            y = x
            for _ in range(times):
                y = run(y)
            return y

        return lambda: WAYS[way](many)

    def once(times, repeats):
        forward = around(times)

        def call():
            for _ in range(repeats):
                y = forward().sum()
                if part == "backward":
                    torch.autograd.grad(y, x)

        return call

    times = timed({"long": once(100, 1), "short": once(1, 100)}, rounds=9, calls=1)
    return ratio(times, "long", "short")


# ---- for pytest


@pytest.mark.parametrize("name", OPERATORS)
def bench_operator(name):
    """The same bits on every way."""
    results = {}
    for way in WAYS:
        torch.manual_seed(0)
        run, x = chain(name, 5)
        torch.manual_seed(1)
        results[way] = steps(run, x, [way])[way]()
    assert all(torch.equal(result, results["plain"]) for result in results.values())


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "512" not in name])
@pytest.mark.parametrize("way", ["scope", "auto"])
def bench_program(name, way):
    assert all(map(torch.equal, program(name, way)(), program(name, "plain")()))


@pytest.mark.parametrize("way", ["scope", "auto"])
def bench_bytes(way):
    """Counted, not timed, so the mark is asserted even in a quick run. The first tensors of a
    process find no freed objects to use again."""
    assert min(bytes_of_operators(way) for _ in range(3)) <= 350


def main():
    torch.set_num_threads(1)
    for name, (_, *marks) in OPERATORS.items():
        times = timed(steps(*chain(name)), rounds=60, calls=4)
        base = times["plain"][0]
        shown = [
            f"{way} {1e6 * (median - base) / 50:.1f}"
            for way, (median, _) in times.items()
            if way != "plain"
        ]
        print(f"{name}: adds, in us,", ", ".join(shown))
        for way, target in zip(("scope", "auto"), marks, strict=True):
            mark(f"  {way} over floor", added(times, way, "floor"), target)
    for way in ("scope", "auto"):
        left = bytes_of_operators(way)
        print(f"bytes of Python objects that one operator leaves until backward, {way}: {left:.0f}")
    for name, (_, _, *marks) in PROGRAMS.items():
        marked = {way: m for way, m in zip(("scope", "auto"), marks, strict=True) if m is not None}
        times = timed(
            {way: program(name, way) for way in ("plain", "torch", *marked)}, rounds=30, calls=1
        )
        for way, target in marked.items():
            mark(f"{name}: {way} over torch", ratio(times, way, "torch"), target)
    for way in ("scope", "auto"):
        for part in ("forward", "backward"):
            mark(f"10,000 operators over 100, {way}, {part}", growth(way, part), 1.3)


if __name__ == "__main__":
    main()
