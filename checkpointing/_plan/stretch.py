"""A stretch: the steps that are planned at once, and the positions at which they may be cut.

All steps of a path are one stretch. Where a window would deliver more than a budget allows, its
steps are another one: what lies before is held, or made by others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from .model import Model
from .repeats import repeats


class Stretch:
    """Steps of a path whose slots one window would bring back."""

    def __init__(
        self, model: Model, slots: Iterable[int], held: frozenset[int], window: Sequence[int] = ()
    ) -> None:
        self.model, self.memories = model, model.memories
        self.is_all = not window
        self.first, self.last = (window[0], window[-1] + 1) if window else (0, model.count)
        self.live = model.live if self.is_all else [0] * model.count  # a replay is no forward
        # By position: memories that autograd has saved.
        self.wanted: dict[int, set[int]] = defaultdict(set)
        for slot in model.saves.keys() & slots:
            position, memory = model.saves[slot]
            if memory not in held:
                self.wanted[min(max(position, self.first), self.last - 1)].add(memory)
        # The position down to which backward needs them.
        self.saved = {
            number: at for at in sorted(self.wanted, reverse=True) for number in self.wanted[at]
        }
        dear = [m for m in self.memories.values() if not m.is_cheap and m.number not in held]
        # A window that reads it must have made it.
        self.dear = {m.number for m in dear if m.maker >= self.first}
        self.crossing = model.sums((m.maker + 1, m.last_use, m.cost) for m in dear)
        # The steps at which the blocks begin that the program repeats, by run of repeats.
        funcs = [step.func for step in model.path.steps] if self.is_all else []
        self.blocks = repeats(funcs, self.crossing)
        self.positions = self._candidates()

    def _candidates(self) -> list[int]:
        """Positions that little crosses, where blocks begin, and the ends."""
        crossing, first, last = self.crossing, self.first, self.last
        minima = [
            p
            for p in range(first + 1, last)
            if crossing[p] <= min(crossing[p - 1], crossing[p + 1]) and self.model.made[p - 1]
        ]
        size = (
            max(1.0, (last - first) / _MOST_CANDIDATES) if len(minima) > _MOST_CANDIDATES else 1.0
        )
        best: dict[int, int] = {}  # by part
        for p in sorted(minima, key=crossing.__getitem__):
            best.setdefault(int((p - first) / size), p)
        begins = [at for run in self.blocks for at in run if first < at < last]
        return [first, *sorted({*best.values(), *begins}), last]

    def cost(self, kept: Iterable[int]) -> int:
        """Bytes, to hold these memories."""
        return sum([self.memories[number].cost for number in kept])


_MOST_CANDIDATES = 64
