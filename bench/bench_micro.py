"""Microbenchmarks of regions, as ratios against torch's own checkpoint and torch_remat in the
same run.

`python -m pytest bench` runs everything once (so that it can't rot); `python bench/bench_micro.py`
prints the ratios, their targets and whether they are met. One thread, tiny tensors: what is
measured is overhead.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from checkpointing import checkpoint_scope, checkpointed, keep
from checkpointing.__main__ import step_of

sys.path.insert(0, str(Path(__file__).parent))
from ratios import added, mark, ratio, timed

try:
    import torch_remat
except ImportError:  # an optional rival
    torch_remat = None


class Nothing(TorchDispatchMode):
    """The cheapest mode there is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def one_op(x):
    return x.sin()


def ten_ops(x):
    for _ in range(10):
        x = x.sin()
    return x


def blocks(norm):
    """Four blocks of Linear and a normalisation."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm(8)) for _ in range(4)))


FUNCTIONS = {
    "one op": one_op,
    "ten ops": ten_ops,
    "four blocks of Linear and BatchNorm": blocks(nn.BatchNorm1d),
    "four blocks of Linear and LayerNorm": blocks(nn.LayerNorm),
}
# What a way adds to plain, at most, as a fraction of what torch's checkpoint adds.
MARKS = {
    ("one op", "rerun"): 0.40,
    ("ten ops", "rerun"): 0.46,
    ("four blocks of Linear and BatchNorm", "rerun"): 0.70,
    ("four blocks of Linear and LayerNorm", "rerun"): 0.50,
    ("one op", "scope"): 0.90,
    ("ten ops", "scope"): 0.90,
}


def scoped(function):
    def call(x):
        with checkpoint_scope():
            return function(x)

    return call


def regions(function):
    """Every way to run a function under a region."""
    ways = {
        "plain": function,
        "torch": lambda x: torch_checkpoint(function, x, use_reentrant=False),
        "rerun": checkpointed(function),
        "rerun without rng": checkpointed(function, preserve_rng_state=False),
        "replay": checkpointed(function, backend="replay"),
        "scope": scoped(function),
    }
    if torch_remat is not None:
        ways["torch_remat"] = torch_remat.checkpoint()(function)  # which never preserves RNG
    return ways


def steps(function):
    """Forward and backward of every way."""
    x = torch.randn(8, 8, requires_grad=True) * 1

    def step(way):
        return lambda: torch.autograd.grad(way(x).sum(), x)

    return {name: step(way) for name, way in regions(function).items()}


def recordings():
    """A hundred operators plain, under a mode that does nothing, and under a scope."""
    x = torch.randn(8, 8)

    def hundred():
        y = x
        for _ in range(100):
            y = torch.mul(y, x)
        return y

    def under(mode):
        def call():
            with mode():
                return hundred()

        return call

    return {"plain": hundred, "nothing": under(Nothing), "scope": under(checkpoint_scope)}


def calls_without_grad():
    """A decorated call that needs no gradient: grad mode off, and nothing that requires grad."""
    x, decorated = torch.randn(8, 8), checkpointed(ten_ops)

    def grad_off():
        with torch.no_grad():
            return decorated(x)

    def plain_off():
        with torch.no_grad():
            return ten_ops(x)

    return {
        "plain, grad off": plain_off,
        "grad off": grad_off,
        "plain": lambda: ten_ops(x),
        "none": lambda: decorated(x),
    }


def peak_of(step):
    """Peak bytes of the second step."""
    step().backward()
    return step_of(step).memory()[1]


def memory():
    """Peak bytes of a 12-block model: torch per block, a region per block, and one scope with
    `keep`."""
    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        for _ in range(12)
    )
    x = torch.randn(256, 64)

    for parameter in blocks.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(block):
        def call():
            y = x
            for layer in blocks:
                y = block(layer, y)
            return y.square().mean()

        return call

    def one_scope():
        with checkpoint_scope():
            y = x
            for layer in blocks:
                y = keep(y + layer(y))
        return y.square().mean()

    return {
        "plain": peak_of(step(lambda layer, y: y + layer(y))),
        "torch": peak_of(
            step(lambda layer, y: y + torch_checkpoint(layer, y, use_reentrant=False))
        ),
        "rerun": peak_of(step(lambda layer, y: y + checkpointed(layer)(y))),
        "one scope": peak_of(one_scope),
    }


def import_times(runs):
    """Seconds that `import checkpointing` takes after `import torch`, each in a new process; the
    first one compiles."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    program = """
import time, torch
start = time.perf_counter()
import checkpointing
print(time.perf_counter() - start)
"""
    command = [sys.executable, "-c", program]
    times = [
        float(subprocess.run(command, capture_output=True, check=True, env=environment).stdout)
        for _ in range(runs + 1)
    ]
    return times[1:]


# ---- for pytest-benchmark


@pytest.mark.parametrize("way", sorted(regions(one_op)))
@pytest.mark.parametrize("name", FUNCTIONS)
def bench_region(benchmark, name, way):
    """Forward and backward of a small region."""
    benchmark(steps(FUNCTIONS[name])[way])


@pytest.mark.parametrize("way", sorted(recordings()))
def bench_recording(benchmark, way):
    """A hundred recorded operators."""
    benchmark(recordings()[way])


@pytest.mark.parametrize("way", sorted(calls_without_grad()))
def bench_without_grad(benchmark, way):
    """A decorated call that needs no region."""
    benchmark(calls_without_grad()[way])


def bench_peak_memory():
    """Exact bytes, so the marks are asserted even in a quick run."""
    peaks = memory()
    assert peaks["rerun"] <= 1.02 * peaks["torch"]
    assert peaks["one scope"] <= 1.05 * peaks["torch"]


def bench_import():
    """In a process of its own; the time is for the table."""
    assert len(import_times(1)) == 1


def print_regions():
    for name, function in FUNCTIONS.items():
        times = timed(steps(function), rounds=300, calls=8)
        print(
            f"{name}:",
            ", ".join(f"{way} {1e6 * median:.1f} us" for way, (median, _) in times.items()),
        )
        for (marked, way), target in MARKS.items():
            if marked == name:
                mark(f"  what {way} adds of what torch adds", added(times, way, "torch"), target)
        for rival, way in (
            ("torch", "rerun without rng"),
            ("torch_remat", "rerun"),
            ("torch_remat", "scope"),
        ):
            if rival in times:
                print(f"  {way} adds {added(times, way, rival)[1]:.3f} of what {rival} adds")


def main():
    torch.set_num_threads(1)
    print_regions()
    times = timed(recordings(), rounds=100, calls=2)
    mark("recording, of what an empty mode adds", added(times, "scope", "nothing"), 2.5)
    times = timed(calls_without_grad(), rounds=300, calls=20)
    mark("grad off, of plain", ratio(times, "grad off", "plain, grad off"), 1.25)
    mark("nothing requires grad, of plain", ratio(times, "none", "plain"), 1.25)
    peaks = memory()
    for way, target in (("rerun", 1.02), ("one scope", 1.05)):
        mark(f"peak of {way}, of torch's per block", (peaks[way] / peaks["torch"],) * 2, target)
    median = 1e3 * statistics.median(import_times(15))
    mark("milliseconds of import beyond torch, median", (median, median), 15)


if __name__ == "__main__":
    main()
