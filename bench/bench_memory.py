"""What checkpoints that place themselves cost and save, as ratios against plain code and torch's
checkpoint by hand.

`python -m pytest bench` runs everything once and asserts bytes, which are exact; `python
bench/bench_memory.py` prints tables of peaks and times with their targets. One thread, whose own
time counts; the ways take turns, and the ratios of medians and of minima are shown.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from checkpointing import auto, checkpoint_scope, offload
from checkpointing.__main__ import step_of

sys.path.insert(0, str(Path(__file__).parent))
import programs
from ratios import timed

MIB = 2**20


def scoped(forward, policy):
    """A program in one scope."""

    def run():
        with checkpoint_scope(policy=policy) as run.scope:
            return forward()

    return run


def peak_of(forward):
    """Bytes at the peak of a step; the first one fills caches."""
    forward().backward()
    return step_of(forward).memory()[1]


def step(forward):
    return lambda: forward().backward()


# ---- one scope around everything

lstm = functools.partial(programs.lstm, width=512, batch=64)
unet = functools.partial(programs.unet, batch=4, size=128)

# Program, what it is compared with, and the most that peak and time may be of that.
MARKS = {
    "12 blocks, d=256": (
        programs.transformer,
        functools.partial(programs.transformer, by_hand=True),
        1.15,
        1.05,
    ),
    "LSTM cell, 256 steps": (lstm, lstm, 0.25, 1.45),
    "U-Net": (unet, unet, 0.65, 1.45),
}
# The same in small, for a quick run.
SIZES = {
    "12 blocks, d=256": {"width": 64, "batch": 2, "context": 64},
    "LSTM cell, 256 steps": {"steps": 64, "width": 32, "batch": 8},
    "U-Net": {"width": 8, "batch": 2, "size": 64},
}
DEPTHS = (64, 256, 1024)


def marks(name, **sizes):
    """A program under `auto()`, what it is compared with, and the targets."""
    build, reference, peak, time = MARKS[name]
    return scoped(build(**sizes), auto()), reference(**sizes), peak, time


def smallest_budget(forward):
    """What the warning says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scoped(forward, auto(budget=0))().backward()
    return int(re.search(r"A budget of (\d+) bytes", str(caught[0].message))[1])


def budgets(forward, count=10):
    """From the least that a checkpoint takes to what plain code holds."""
    forward().backward()
    least, most = smallest_budget(forward), step_of(forward).memory()[0]
    return [least + (most - least) * i // (count - 1) for i in range(count)]


# ---- for pytest-benchmark


@pytest.mark.parametrize("name", MARKS)
def bench_peak_of_auto(benchmark, name):
    """One scope around everything; the peak is a mark."""
    forward, reference, target, _ = marks(name, **SIZES[name])
    assert peak_of(forward) <= target * peak_of(reference)
    benchmark(step(forward))


def bench_depth():
    """A chain of equal layers: peak / plain falls as one over the square root of the depth."""
    build = functools.partial(programs.chain, width=16, batch=32)
    few, many = (peak_of(scoped(build(n), auto())) / peak_of(build(n)) for n in (64, 256))
    assert 0.4 <= many / few <= 0.62


def on_the_host(policy):
    """A forward of 64 layers: its loss, how many of their results are still where they were
    made, and the scope."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(64)]
    y, made = torch.randn(128, 64), []
    with checkpoint_scope(policy=policy) as scope:
        for layer in layers:
            y = layer(y).tanh()
            made.append(StorageWeakRef(y.untyped_storage()))
    return y.sum(), sum(not storage.expired() for storage in made), scope


def bench_memory_on_the_host(benchmark):
    """What waits there is a copy in memory of its own, and the original is free."""
    for policy, least in ((offload(), 63), (offload(auto()), 8)):
        on_the_host(policy)[0].backward()  # `auto()` keeps nothing the first time
        loss, here, scope = on_the_host(policy)
        assert here == 1  # the last result, of which the loss is made
        assert scope.stats.bytes_kept >= least * 128 * 64 * 4
        loss.backward()
        assert scope.stats.bytes_kept == 0
    benchmark(lambda: on_the_host(offload())[0].backward())


# ---- tables


def print_marks():
    for name in MARKS:
        forward, reference, most, slowest = marks(name)
        plain = MARKS[name][0]()
        peaks = {"plain": peak_of(plain), "auto": peak_of(forward), "compared": peak_of(reference)}
        times = timed({"auto": step(forward), "compared": step(reference)}, 7, 1, time.process_time)
        other = "torch's checkpoints by hand" if MARKS[name][1] is not MARKS[name][0] else "plain"
        print(
            f"{name}: peak {peaks['auto'] / MIB:.2f} MiB of {peaks['plain'] / MIB:.2f}, "
            f"{peaks['auto'] / peaks['compared']:.3f} of {other} (target {most}); "
            f"time {ratio(times, 'auto', 'compared')} (target {slowest})"
        )


def ratio(times, way, reference):
    """Medians and minima."""
    (median, least), (other_median, other_least) = times[way], times[reference]
    return f"{median / other_median:.3f} by medians, {least / other_least:.3f} by minima"


def print_depths():
    ratios = {}
    for n in DEPTHS:
        forward = programs.chain(n)
        plain = peak_of(forward)
        ways = {
            "auto()": auto(),
            "8 checkpoints": auto(budget=8 * 128 * 64 * 4),
            "1": auto(budget=128 * 64 * 4),
        }
        runs = {name: scoped(forward, policy) for name, policy in ways.items()}
        times = timed(
            {"plain": step(forward)} | {name: step(run) for name, run in runs.items()},
            5,
            1,
            time.process_time,
        )
        for name, run in runs.items():
            ratios.setdefault(name, []).append(peak_of(run) / plain)
            slower = ratio(times, name, "plain")
            print(f"chain of {n}, {name}: peak {ratios[name][-1]:.4f} of plain, time {slower}")
    for name, values in ratios.items():
        print(f"  {name}: peak / plain falls as n ** {slope(DEPTHS, values):.2f}")


def slope(xs, ys):
    """Of the line through the logarithms."""
    xs, ys = [*map(math.log, xs)], [*map(math.log, ys)]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum(
        (a - x) ** 2 for a in xs
    )


def print_budgets():
    for name, build in {
        "12 blocks": programs.transformer,
        "LSTM cell, 64 steps": functools.partial(programs.lstm, 64),
        "U-Net": programs.unet,
        "chain of 128": functools.partial(programs.chain, 128),
    }.items():
        forward = build()
        plain = peak_of(forward)
        runs = {budget: scoped(forward, auto(budget=budget)) for budget in budgets(forward)}
        times = timed(
            {"plain": step(forward)} | {str(b): step(run) for b, run in runs.items()},
            5,
            1,
            time.process_time,
        )
        print(f"{name}, plain: peak {plain / MIB:.2f} MiB")
        for budget, run in runs.items():
            loss = run()
            kept = run.scope.stats.bytes_kept
            loss.backward()
            assert kept <= budget
            print(
                f"  budget {budget / MIB:.3f} MiB: kept {kept / MIB:.3f}, "
                f"peak {peak_of(run) / plain:.3f}, {run.scope.stats.ops_replayed} operators again, "
                f"time {ratio(times, str(budget), 'plain')}"
            )


def main():
    torch.set_num_threads(1)
    print_marks()
    print_depths()
    print_budgets()


if __name__ == "__main__":
    main()
