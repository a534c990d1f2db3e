"""Repeats: the blocks that a program consists of, by its operators alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Run = tuple[int, int, int]  # its first step, the first one after it, and the period


def repeats(funcs: Sequence[Any], costs: Sequence[int]) -> list[range]:
    """The steps at which the blocks begin that the program repeats, and at which the last one ends,
    by run of repeats: where costs are the least."""
    found: list[range] = []
    taken: list[Run] = []
    for begin, end, period in sorted(
        {*_runs(funcs)}, key=lambda run: (run[0] - run[1] + 2 * run[2], run)
    ):
        for first, last, _ in taken:
            if begin < first:
                end = min(end, first + period - 1)
            elif end > last:
                begin = max(begin, last - period + 1)
            else:
                end = begin
        if end - begin >= 3 * period:
            taken.append((begin, end, period))
            # What comes before the first block may look like the end of one.
            starts = range(begin, min(begin + period, end - period))
            start = min(starts, key=lambda at: costs[at + period])
            found.append(range(start, end + 1, period))
    return found


def _runs(funcs: Sequence[Any]) -> Iterable[Run]:
    """Where operators come again, by length: the next time that the same ones follow."""
    # By step: a number for the operators from it on, of which there are `length`.
    ranks = [id(func) for func in funcs]
    length = 1
    while length < len(ranks):
        numbers: dict[tuple[int, int], int] = {}
        pairs = zip(ranks, ranks[length:], strict=False)
        ranks = [numbers.setdefault(pair, len(numbers)) for pair in pairs]
        length *= 2
        begin, far = 0, _distances(ranks)
        for at, distance in enumerate([*far, -1]):
            period = far[begin]
            if distance == period:
                continue
            end = at + length - 1
            if period >= length // 2:
                yield begin, end + period, period
            begin = at
        if len(numbers) == len(ranks):
            break


def _distances(ranks: Sequence[int]) -> list[int]:
    """How far from each step the same comes again; 0 if it does not."""
    last: dict[int, int] = {}
    far = [0] * len(ranks)
    for at in range(len(ranks) - 1, -1, -1):
        far[at] = last.get(ranks[at], at) - at
        last[ranks[at]] = at
    return far
