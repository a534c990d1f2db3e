"""Interleaved medians: the machine is noisy, so only ratios of times taken in one run mean something."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

Ways = dict[str, Callable[[], Any]]


def timed(
    ways: Ways, rounds: int, calls: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, float]]:
    """Median and least seconds per call of each way; the ways take turns, `calls` calls a turn and some before
    that are not timed."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        for _ in range(calls):
            call()
    for _ in range(rounds):
        for name, call in ways.items():
            for _ in range(calls // 4):  # what the one before has left behind: cold caches, garbage
                call()
            start = clock()
            for _ in range(calls):
                call()
            times[name].append((clock() - start) / calls)
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def medians(ways: Ways, rounds: int, calls: int) -> dict[str, float]:
    """The medians alone."""
    return {name: median for name, (median, _) in timed(ways, rounds, calls).items()}


def added(times: dict[str, float], way: str, reference: str) -> float:
    """What `way` adds to plain, as a fraction of what `reference` adds."""
    return (times[way] - times["plain"]) / (times[reference] - times["plain"])
