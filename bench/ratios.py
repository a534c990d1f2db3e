"""Times of ways that take turns: the machine is noisy, so only ratios of times taken in one run
mean something."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

Ways = dict[str, Callable[[], Any]]


def timed(
    ways: Ways, rounds: int, calls: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, float]]:
    """Median and 10% quantile of the seconds per call of each way. The ways take short turns, so
    that what slows the machine slows them all; every turn begins with calls that are not
    timed."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        for _ in range(calls):
            call()
    for _ in range(rounds):
        for name, call in ways.items():
            for _ in range(
                max(1, calls // 4)
            ):  # what the one before has left behind: cold caches, garbage
                call()
            start = clock()
            for _ in range(calls):
                call()
            times[name].append((clock() - start) / calls)
    return {
        name: (statistics.median(values), sorted(values)[len(values) // 10])
        for name, values in times.items()
    }


def added(
    times: dict[str, tuple[float, float]], way: str, reference: str, base: str = "plain"
) -> tuple[float, float]:
    """What `way` adds to `base`, as a fraction of what `reference` adds: of medians, and of 10%
    quantiles."""
    (a, b), (c, d), (e, f) = times[way], times[reference], times[base]
    return (a - e) / (c - e), (b - f) / (d - f)


def ratio(times: dict[str, tuple[float, float]], way: str, reference: str) -> tuple[float, float]:
    """`way` over `reference`: of medians, and of 10% quantiles."""
    (a, b), (c, d) = times[way], times[reference]
    return a / c, b / d


def mark(what: str, ratios: tuple[float, float], target: float) -> None:
    """Print a ratio and whether it meets its target: the 10% quantiles decide."""
    median, quantile = ratios
    verdict = "met" if quantile <= target else "MISSED"
    print(f"{what}: {quantile:.3f} (medians {median:.3f}), target {target}: {verdict}", flush=True)
