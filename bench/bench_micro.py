"""Microbenchmarks of regions, as ratios against torch's own checkpoint and torch_remat in the same run.

`python -m pytest bench` runs everything once (so that it can't rot); `python bench/bench_micro.py` prints the ratios
and their targets. One thread, tiny tensors: what is measured is overhead.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from checkpointing import checkpoint_scope, checkpointed, keep

sys.path.insert(0, str(Path(__file__).parent))
from ratios import added, medians

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


class Normalised(nn.Module):
    """A BatchNorm and one operator more."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x).sin()


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
    """Peak bytes of one step on the CPU: torch's profiler reports every allocation."""
    step()
    with profile(profile_memory=True, acc_events=True) as prof:
        step()
    total = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


def memory():
    """Peak bytes of a 12-block model: torch per block, a region per block, and one scope with `keep`."""
    blocks = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(12)
    )
    x = torch.randn(256, 64)

    def step(block):
        def call():
            y = x
            for layer in blocks:
                y = block(layer, y)
            y.square().mean().backward()
            blocks.zero_grad()

        return call

    def one_scope():
        with checkpoint_scope():
            y = x
            for layer in blocks:
                y = keep(y + layer(y))
        y.square().mean().backward()
        blocks.zero_grad()

    return {
        "plain": peak_of(step(lambda layer, y: y + layer(y))),
        "torch": peak_of(step(lambda layer, y: y + torch_checkpoint(layer, y, use_reentrant=False))),
        "rerun": peak_of(step(lambda layer, y: y + checkpointed(layer)(y))),
        "one scope": peak_of(one_scope),
    }


# ---- for pytest-benchmark


@pytest.mark.parametrize("way", sorted(regions(one_op)))
@pytest.mark.parametrize("function", [one_op, ten_ops])
def bench_region(benchmark, function, way):
    """Forward and backward of a small region."""
    benchmark(steps(function)[way])


@pytest.mark.parametrize("way", sorted(regions(one_op)))
def bench_buffers(benchmark, way):
    """Forward and backward of a small module with running statistics."""
    benchmark(steps(Normalised())[way])


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


def main():
    torch.set_num_threads(1)
    for function in (one_op, ten_ops):
        times = medians(steps(function), rounds=15, calls=200)
        print(function.__name__, {name: f"{1e6 * t:.1f} us" for name, t in times.items()})
        for way, target in (("rerun", 0.4), ("rerun without rng", 0.4), ("scope", 0.9)):
            print(f"  {way} adds {added(times, way, 'torch'):.2f} of what torch adds (target {target})")
        if "torch_remat" in times:
            print(f"  rerun adds {added(times, 'rerun', 'torch_remat'):.2f} of what torch_remat adds")
    times = medians(steps(Normalised()), rounds=15, calls=200)
    print("BatchNorm inside", {name: f"{1e6 * t:.1f} us" for name, t in times.items()})
    for way in ("rerun", "rerun without rng"):
        print(f"  {way} adds {added(times, way, 'torch'):.2f} of what torch adds (target 0.6)")
    times = medians(recordings(), rounds=15, calls=20)
    print(f"recording adds {added(times, 'scope', 'nothing'):.2f} of what a mode that does nothing adds (target 2.5)")
    times = medians(calls_without_grad(), rounds=15, calls=500)
    print(f"grad off: {times['grad off'] / times['plain, grad off']:.2f} of plain (target 1.25)")
    print(f"nothing requires grad: {times['none'] / times['plain']:.2f} of plain (target 1.25)")
    peaks = memory()
    print("peak bytes", peaks)
    for way, target in (("rerun", 1.02), ("one scope", 1.05)):
        print(f"  {way}: {peaks[way] / peaks['torch']:.3f} of torch's per block (target {target})")


if __name__ == "__main__":
    main()
