"""Plans: how to bring back what was saved on one path, computed from what the block did last time.

A plan is made by simulation (`model.py`): where to cut (`cuts.py`), what to keep beside
(`fill.py`), for which peak (`choose.py`). In a budget that has no room for that, windows make what
they deliver in pieces, and these in pieces again.

Invariant: a plan depends on byte counts and positions of the program alone, so it is the same on
every rank, and in each step. A site whose paths never come again is not planned: its blocks are
taken in pieces (`Run`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence
from itertools import pairwise
from typing import Any

from .._record import MOST_GROWTH, Hold, Path, Run, Step, Value
from .choose import choose, choose_first, choose_within
from .fill import Choice, Filling
from .groups import Group, grouped
from .model import Model
from .stretch import Stretch


class Plan:
    """How to bring back what was saved on one path."""

    whole: Group | None = None  # all slots, where nothing that `auto()` chose has been held
    peak = 0  # simulated
    exceeds = False  # whether it keeps more than its budget, which has no room for a checkpoint
    size = 0  # bytes that autograd saves, as the plan assumes
    first_size = 0  # those of the run whose bytes the steps have
    waiting: Sequence[int] = ()  # cells of parameters that it assumes to have no gradient
    kept: frozenset[Value] = frozenset()  # what a run should hold
    complaint = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = [Group(path, slots) for slots in grouped(path)]

    def suits(self, run: Run) -> bool:
        """Whether a run has the room that the plan assumes. A plan is not exchanged for one with
        more room: runs of several sizes, and runs that accumulate gradients, would plan anew at
        every change."""
        if run.store.placement is None:
            return True
        if any(map(_has_gradient, map(run.store.parameter, self.waiting))):
            return False
        return run.store.saved_bytes <= MOST_GROWTH * self.size

    def passes(self, step: Step) -> bool:
        """Whether a step is on its path."""
        steps = self.path.steps
        return step.index < len(steps) and steps[step.index] is step

    def can_go_on(self, held: Container[Value], step: Step) -> bool:
        """Whether a run has held all that the plan keeps before this step."""
        there = self.path.there_after
        return all(value in held or there(value) >= step.index for value in self.kept)

    def groups_for(self, run: Run) -> list[Group]:
        """What to give a run's holders: by what it holds."""
        if self.whole is None or run.store.held.keys() >= self.kept:
            return self.groups
        if run.store.is_checked:  # whatever is computed is to be compared
            return Plan(self.whole.path).groups
        return [self.whole]


def _has_gradient(parameter: Any) -> bool:
    return parameter is not None and parameter.grad is not None


def plan_of(run: Run, old: Plan | None = None) -> Plan:
    """The plan for what the run has done, or for `old` where that had less room."""
    path, store = run.so_far(), run.store
    if store.placement is None or not path.slots:
        return Plan(path)
    size = first_size = store.saved_bytes
    waiting: Sequence[int] = path.trained
    if old is not None:
        size, first_size, waiting = max(size, old.size), old.first_size, old.waiting
    waiting = [cell for cell in waiting if not _has_gradient(store.parameter(cell))]
    if run.sees_gathering and path.cuts:  # no window may cross where FSDP2 gives parameters back
        plan, choice = Plan(path), Choice()
    else:
        plan, choice = _planned(Model(path, run, waiting, size / max(1, first_size)), run)
    plan.size, plan.first_size, plan.waiting = size, first_size, waiting
    plan.peak = choice.peak + store.kept_bytes
    plan.complaint = _complaint(run, choice)
    return plan


def _planned(model: Model, run: Run) -> tuple[Plan, Choice]:
    """The plan for a run, and what it keeps."""
    store = run.store
    assert store.placement is not None
    path, (budget, _, peak) = model.path, store.placement
    by_user = frozenset([path.memory_of[cell] for cell, _ in path.kept])
    stretch = Stretch(model, range(len(path.slots)), by_user)
    if not stretch.saved:
        return Plan(path), Choice(peak=max(stretch.live, default=0))
    if budget is None:
        rest = None if peak is None else max(0, peak - store.kept_bytes)
        choice = choose(stretch, rest)
        return _laid_over(model, choice), choice
    rest = max(0, budget - store.kept_bytes)
    choice = choose_within(stretch, rest)
    for tried in _budgets(rest, choice.nbytes):
        first = choose_first(stretch, tried)
        plan = _laid_over(model, first)
        held = by_user.union(first.kept)
        backward = _split_all(plan.groups, model, held, max(tried, 1), first, first.forward)
        peak = max(first.forward, backward)
        if peak <= choice.peak * (_ABOUT if tried <= rest else _SURE):
            plan.exceeds = tried > rest
            return plan, first._replace(peak=peak, nbytes=tried, exceeds=plan.exceeds)
    return _laid_over(model, choice), choice


def _budgets(budget: int, enough: int) -> list[int]:
    """What to try for a budget that is too small for the least peak: it, smaller ones, under which
    the peak may be less, and at last larger ones, which may have room for the first checkpoint."""
    if budget >= enough:
        return []
    sizes = [enough >> n for n in range(_MOST_HALVES, 0, -1)]
    smaller = [size for size in reversed(sizes) if size < budget]
    return [budget, *smaller, *[size for size in sizes if size > budget]]


def _laid_over(model: Model, choice: Choice) -> Plan:
    """The plan that keeps this."""
    if not choice.kept and not choice.cuts:
        return Plan(model.path)
    values = model.values(choice.kept)
    plan = Plan(model.path.placed(values, choice.cuts))
    plan.kept, plan.exceeds = frozenset(values), choice.exceeds
    if values:
        plan.whole = Group(model.path, [*range(len(model.path.slots))])
        plan.whole.parts = plan.groups
    return plan


def _split_all(
    groups: Sequence[Group],
    model: Model,
    held: frozenset[int],
    budget: int,
    choice: Choice,
    peak: int,
) -> int:
    """Split what needs more than `peak`. Returns the peak of backward."""
    ends = [0, *choice.cuts, model.count]
    found = [
        held_here + max(model.backward[start:end], default=0)
        for (held_here, _), (start, end) in zip(choice.parts, pairwise(ends), strict=True)
    ]
    for group in groups:
        at = [model.saves[slot][0] for slot in group.slots if slot in model.saves]
        part = bisect_right(choice.cuts, max(at, default=0))
        held_here, most = choice.parts[part]
        if most > peak:
            need = _split(group, model, held, budget, peak - held_here)
            most = min(most, held_here + need)
        found[part] = max(found[part], most)
    return max(found)


def _split(group: Group, model: Model, held: frozenset[int], budget: int, peak: int) -> int:
    """Where a window would deliver more than the budget, a first replay makes what smaller windows
    start from. Returns what backward needs then."""
    order, _ = group.path.slice_of([group.path.slots[slot].value for slot in group.slots])
    if not order:
        return 0
    stretch = Stretch(model, group.slots, held, order)
    need = Filling(stretch, ()).choice().peak
    if stretch.cost(stretch.dear & stretch.saved.keys()) <= budget:
        return need
    choice = choose_first(stretch, budget)
    if not choice.kept:
        return need
    group.split(model.values(choice.kept), choice.cuts)
    if max(len(part.slots) for part in group.parts) == len(group.slots):
        group.parts = []
        return need
    return _split_all(group.parts, model, held.union(choice.kept), budget, choice, peak)


def _complaint(run: Run, choice: Choice) -> str:
    """What to say of a budget, or of a peak, that is too small."""
    assert run.store.placement is not None
    (budget, _, peak), least = run.store.placement, run.store.kept_bytes
    if peak is not None and choice.peak + least > peak:
        why = "this block needs more in any plan. The least peak possible"
        return f"auto(peak={peak}): {why} is {choice.peak + least} bytes."
    if budget is None:
        return ""
    if least > budget:
        why = "`keep`, other policies, or FSDP2 keep more than that in this block"
    elif choice.exceeds:
        why = "no room for checkpoints that lower the peak, so more is kept"
        least += choice.nbytes
    else:
        return ""
    return f"auto(budget={budget}): {why}. A budget of {least} bytes is enough."


def attach(plan: Plan, old: Plan | None) -> None:
    """From here on runs hold what the plan keeps, as soon as it is there."""
    path = plan.path
    for step in path.steps if old is not None else ():
        if step.keeps:
            step.keeps = tuple([each for each in step.keeps if each[0] is not old])
    counted: set[int] = set()
    for value in sorted(plan.kept):
        memory = path.memory_of[value[0]]
        counts = memory not in counted and not plan.exceeds
        path.steps[path.there_after(value)].keeps += ((plan, Hold(value, memory, None), counts),)
        counted.add(memory)


_MOST_HALVES = 6  # of what the least peak needs: smaller budgets have no room for a checkpoint
_SURE, _ABOUT = 0.9, 1.1  # of the peak: the model is not exact
