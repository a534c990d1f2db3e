"""A stretch: the steps that are planned at once, and the positions at which they may be cut.

All steps of a path are one stretch. Where a window would deliver more than a budget allows, its
steps are another one: what lies before is held, or made by others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from functools import cached_property
from itertools import chain, compress, pairwise, takewhile

from .gradients import Span
from .model import Model
from .repeats import repeats


class Stretch:
    """Steps of a path whose slots one window would bring back."""

    def __init__(self, model: Model, held: Set[int]) -> None:
        """`held` are memories from which any window can start."""
        self.model, self.memories, self.held = model, model.memories, held
        # By position: memories that autograd has saved.
        self.wanted: dict[int, set[int]] = defaultdict(set)
        for position, memory in model.saves.values():
            if memory not in held:
                self.wanted[position].add(memory)
        # The position down to which backward needs them.
        self.saved = {
            number: at for at in sorted(self.wanted, reverse=True) for number in self.wanted[at]
        }
        made = {number for numbers in model.made for number in numbers} - held
        # A window that reads one must have made it. What is older is written here, but not made.
        memories = [m for m in map(self.memories.__getitem__, made) if m.maker >= 0]
        dear = [m for m in memories if not m.is_cheap]
        self.dear = {m.number for m in dear}
        self.reads = [(*filter(self.dear.__contains__, read),) for read in model.reads]
        # Of as many bytes, few memories are better than many. What nothing reads, such as a mask,
        # crosses no cut.
        spans = [
            (m.maker + 1, m.last_read, m.cost + _PER_MEMORY) for m in dear if m.last_read > m.maker
        ]
        self.crossing = model.sums(spans)
        self._longest_first = sorted(spans, key=_length, reverse=True)
        # A loop over rows or columns that it reads and overwrites stays whole: windows that begin
        # inside would begin with its first turn.
        self._in_loops = {at for m in dear for at in range(m.maker + 1, m.last_part + 1)}
        saved = [(at, model.count, self.memories[n].cost) for n, at in self.saved.items()]
        self._saved_before = model.sums(saved)  # bytes, by position; also those wanted there
        self.positions = self._candidates()

    def _candidates(self) -> list[int]:
        """The ends, and of the positions that no more crosses than the one before, in each part the
        one that the fewest bytes cross, and one before a step whose backward works with about the
        most bytes, such as a convolution with a stride: what was saved before should not be there
        then. Parts are even in steps and in saved bytes together, since a stem may save most of the
        bytes in a few steps."""
        crossing, count, there = self.crossing, self.model.count, self._saved_before
        backward, steps = self.model.backward, self.model.steps
        most = max(backward)
        found = [
            p
            for p in range(1, count)
            if p not in self._in_loops and self.model.made[p - 1] and crossing[p] <= crossing[p - 1]
        ]
        best: dict[tuple[int, bool], int] = {}  # by part
        for p in sorted(found, key=crossing.__getitem__):
            far = p / count + there[p] / max(1, there[count])
            is_demanding = steps[p].scratch > 0 and backward[p] >= _ABOUT * most
            best.setdefault((int(far / 2 * _MOST_CANDIDATES), is_demanding), p)
        return [0, *sorted(best.values()), count]

    @cached_property
    def blocks(self) -> list[range]:
        """The steps at which the blocks begin that the program repeats, by run of repeats. Who
        checkpoints by hand takes blocks that save more than they begin with: not the products
        beside each other that make queries, keys and values."""
        found = repeats([step.func for step in self.model.steps], self.crossing)
        return [run for run in found if self._are_worth_it(run)]

    def allow_cuts_at_blocks(self) -> None:
        """Blocks may begin where more crosses than at other positions. Of very many, such as the
        steps of a solver, only every second one is looked at, or fewer."""
        begins = sorted({*chain(*self.blocks)} - self._in_loops - {0, self.model.count})
        every = 1 + len(begins) // (_MOST_BLOCKS + 1)
        self.positions = sorted({*self.positions, *begins[::every]})

    @property
    def without_grad_mode(self) -> set[int]:
        """What others need of steps that ran with grad mode off."""
        return self._handed_on([not step.grad_mode for step in self.model.steps])

    def frozen(self, least: int) -> set[int]:
        """What others need of steps that autograd does not follow, such as frozen layers. Nothing,
        if its part of the least peak is more than a fifth of their part of the work."""
        is_frozen = [not step.differentiated for step in self.model.steps]
        found, work = self._handed_on(is_frozen), self.model.work
        part = sum(compress(work, is_frozen)) / max(1.0, sum(work))
        return found if self.cost(found) <= part * _OF_WORK * least else set()

    def _handed_on(self, inside: Sequence[bool]) -> set[int]:
        """Memories without gradient that steps inside make, and that autograd or steps outside
        need. Who checkpoints by hand never makes them again."""
        made, needed = set[int](), {*self.saved}
        for index, is_inside in enumerate(inside):
            if is_inside:
                made.update(self.model.made[index])
            else:
                needed.update(self.reads[index])
        return (self.dear & made & needed) - self.model.with_gradient

    def _across(self, run: range, n: int) -> int:
        """The bytes that cross cuts after so many steps in each block. What several of these cross
        counts once, such as a memory that all layers of a decoder attend to."""
        cuts = run[:-1]
        found = sum([self.crossing[at + n] for at in cuts])
        long = takewhile(lambda span: _length(span) >= run.step, self._longest_first)
        for first, last, nbytes in long:
            crossed = bisect_right(cuts, last - n) - bisect_left(cuts, first - n)
            found -= nbytes * max(0, crossed - 1)
        return found

    def middles(self, run: range) -> list[int]:
        """Where to cut each block in two, after the same number of steps in each: where what is
        kept at the cuts, and what the larger half of a block saves, are the fewest bytes."""
        saved, first, last = self._saved_before, run[-2], run[-1]

        def need(n: int) -> int:
            halves = saved[first + n] - saved[first], saved[last] - saved[first + n]
            return self._across(run, n) + max(halves)

        after = min(range(1, run.step + 1), key=need)
        return [at + after for at in run[:-1]]

    def _are_worth_it(self, run: range) -> bool:
        saved = [number for number, at in self.saved.items() if run[0] <= at < run[-1]]
        return 2 * sum([self.crossing[at] for at in run[:-1]]) <= self.cost(saved)

    @cached_property
    def alike(self) -> list[range]:
        """The runs whose blocks save about the same bytes, unlike those of a pyramid."""
        there, found = self._saved_before, []
        for run in self.blocks:
            sizes = [there[end] - there[begin] for begin, end in pairwise(run)]
            if max(sizes) <= _ALIKE * min(sizes):
                found.append(run)
        return found

    @property
    def work_of_blocks(self) -> float:
        """What a checkpoint around each of these blocks would repeat."""
        work = self.model.work
        return sum([sum(work[run[0] : run[-1]]) for run in self.alike])

    def cost(self, kept: Iterable[int]) -> int:
        """Bytes, to hold these memories."""
        return sum([self.memories[number].cost for number in kept])


def _length(span: Span) -> int:
    first, last, _ = span
    return last - first


_ALIKE = 1.5  # times the bytes that the smallest one saves
_ABOUT = 0.8  # of the most bytes that the backward of a step works with
_OF_WORK = 0.2  # of the peak: what may be spent so that no work of a forward is repeated
_MOST_CANDIDATES = 96
_MOST_BLOCKS = 192  # that are looked at; the time to find cuts is quadratic in them
_PER_MEMORY = 512  # bytes for which it is not worth it to hold one memory more
