"""Plans: how to bring back what was saved on one path, computed from what the block did last time.

A plan is made by simulation (`model.py`): where to cut (`cuts.py`), what to keep beside
(`fill.py`), for which peak (`choose.py`). In a budget that has no room for that, windows make what
they deliver in pieces, and these in pieces again.

Invariant: a plan depends on byte counts and positions of the program, and on what else has waited
for backward in the last steps. So it is the same on every rank, and in each step like these.
A site whose paths never come again is not planned: its blocks are taken in pieces (`Run`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence, Set
from functools import cached_property
from itertools import chain, islice, pairwise
from operator import add

from torch import Tensor

from .._record import MOST_GROWTH, Hold, Path, Placement, Run, Step, Value
from .choose import choose, choose_first, choose_under, choose_within
from .cuts import PRECISION
from .fill import Filling
from .groups import Group
from .model import Model, still_waiting
from .stretch import Stretch


class Plan:
    """How to bring back what was saved on one path."""

    peak = 0  # simulated
    nbytes = 0  # of what it keeps, in its budget
    counted: Set[Value] = frozenset()  # one of each memory that it keeps, and nobody else holds
    exceeds = False  # whether it keeps more than its budget, which has no room for a checkpoint
    size = 0  # bytes that autograd saves, as the plan assumes
    first_size = 0  # those of the run whose bytes the steps have
    complaint = ""
    following: Plan | None = None  # at its site, the last time
    parts = 0  # other blocks at its site, or parts of the block, that wait for backward

    def __init__(self, path: Path, kept: Iterable[Value] = (), cuts: Iterable[int] = ()) -> None:
        self.kept = frozenset(kept)  # what a run should hold
        self.waiting: list[int] = []  # cells of parameters that it assumes to have no gradient
        # All slots, where nothing that `auto()` chose has been held.
        self.whole = Group(path, [*range(len(path.slots))])
        self.path = self.whole.split(self.kept, cuts)
        self.groups = self.whole.parts
        # The first slot that a backward with `retain_graph=True` has opened: from there on, all
        # stays for another one. And the slot that the plan assumes.
        self.retained = self.assumed = len(path.slots)

    @cached_property
    def needed(self) -> Set[Value]:
        """What its windows start from."""
        return set().union(*[group.needs(group.slots)[0] for group in self.groups])

    def suits(self, run: Run) -> bool:
        """Whether a run has the room that the plan assumes. A plan is not exchanged for one with
        more room: runs of several sizes, and runs that accumulate gradients, would plan anew at
        every change."""
        if run.store.placement is None:
            return True
        if self.parts != run.program.history.parts or self.retained < self.assumed:
            return False
        if still_waiting(run, self.waiting) != self.waiting:
            return False
        return self.growth(run) <= MOST_GROWTH and not self.is_outgrown(run)

    def growth(self, run: Run) -> float:
        """How many times the bytes that the plan assumes a run has saved; 1 if these are fewer."""
        return max(1.0, run.store.saved_bytes / max(1, self.size))

    def is_outgrown(self, run: Run) -> bool:
        """Whether a run has saved so much that it would need more than the user asks for, where the
        plan itself does not. It holds no more values then: the next plan makes them in backward."""
        assert run.store.placement is not None
        budget, _, peak = run.store.placement
        if peak is None:
            asked, needed = budget, self.nbytes + run.store.kept_bytes
        else:
            asked, needed = peak, self.peak
        return asked is not None and needed <= asked < self.growth(run) * needed

    def without_gradient(self, run: Run) -> Set[Tensor]:
        """The parameters that have no gradient yet, and get one."""
        waiting = map(run.store.parameter, still_waiting(run, self.path.trained))
        return {parameter for parameter in waiting if parameter is not None}

    def retains(self, slot: int) -> None:
        """A backward that another one follows has opened this slot."""
        self.retained = min(self.retained, slot)

    def passes(self, step: Step) -> bool:
        """Whether a step is on its path."""
        steps = self.path.steps
        return step.index < len(steps) and steps[step.index] is step

    def can_go_on(self, held: Container[Value], step: Step) -> bool:
        """Whether a run has held all that the plan keeps before this step."""
        there = self.path.there_after
        return all(value in held or there(value) >= step.index for value in self.kept)

    def groups_for(self, run: Run) -> Sequence[Group]:
        """What to give a run's holders: by what it holds."""
        there = self.kept & run.store.held.keys()
        if there == self.kept:
            return self.groups
        if run.store.is_checked:  # whatever is computed is to be compared
            return Plan(self.whole.path).groups
        return [self.whole.started_from(there)]


def plan_of(run: Run, old: Plan | None = None) -> Plan:
    """The plan for what the run has done, or for `old` where that had less room."""
    path, store = run.so_far(), run.store
    if store.placement is None or not path.slots:
        return Plan(path)
    size = first_size = store.saved_bytes
    waiting, retained = path.trained, len(path.slots)
    if old is not None:
        size, first_size, waiting = max(size, old.size), old.first_size, old.waiting
        retained = old.retained
    waiting = still_waiting(run, waiting)
    if run.sees_gathering and path.cuts:  # no window may cross where FSDP2 gives parameters back
        plan = Plan(path)
    else:
        model = Model(path, run, waiting, size / max(1, first_size), retained)
        plan = _planned(model, store.placement, store.kept_bytes, run.program.history.parts)
    plan.size, plan.first_size, plan.waiting = size, first_size, waiting
    plan.parts = run.program.history.parts
    plan.retained = plan.assumed = retained
    plan.peak += store.kept_bytes
    plan.complaint = _complaint(plan, store.placement, store.kept_bytes)
    return plan


def _planned(model: Model, asked: Placement, others: int, parts: int) -> Plan:
    """The plan for what the user asks, beside what others keep."""
    budget, _, peak = asked
    stretch = Stretch(model, model.held)
    if not stretch.saved:
        plan = Plan(model.path)
        plan.peak = max(*model.live, *model.backward)
        return plan
    if peak is not None:
        return _laid_over(choose_under(stretch, max(0, peak - others)))
    if budget is None:
        return _laid_over(choose(stretch, parts))
    rest = max(0, budget - others)
    plan = _laid_over(choose_within(stretch, rest))
    if plan.nbytes > rest:
        plan = _in_small_budget(stretch, rest, plan)
    plan.exceeds = plan.nbytes > rest
    return plan


def _in_small_budget(stretch: Stretch, budget: int, enough: Plan) -> Plan:
    """The plan for a budget that is smaller than what `enough` keeps, which has the least peak. It
    is that of the budget, or of a smaller one, if its peak is no larger; else that of a larger one,
    since less budget should not mean a larger peak."""
    halves = [enough.nbytes >> n for n in range(1, _MOST_HALVES + 1)]
    smaller = (_in_pieces(stretch, n) for n in [budget, *[n for n in halves if n < budget]])
    within = [*islice((plan for plan in smaller if plan.peak <= _about(enough.peak)), 1)]
    larger = [_in_pieces(stretch, n) for n in halves if n > budget]
    least = min([plan.peak for plan in (*within, *larger, enough)])
    # Those of the smaller ones that have been looked at, and are not `within`, need more.
    found = chain(within, smaller, larger, [enough])
    return next(plan for plan in found if plan.peak <= _about(least))


def _about(peak: int) -> int:
    """The largest peak that counts as equal to this one: each of the two is found by bisection."""
    return peak + 2 * peak // PRECISION


def _in_pieces(stretch: Stretch, budget: int) -> Plan:
    """A plan in a budget that is too small for the least peak."""
    first = choose_first(stretch, budget)
    plan = _laid_over(first)
    forward = max(first.forward)
    plan.peak = max(forward, _split_all(plan.groups, first, budget, forward))
    plan.nbytes = budget
    return plan


def _laid_over(choice: Filling) -> Plan:
    """The plan that keeps this."""
    model = choice.model
    values = {number: model.values([number]) for number in choice.kept}
    plan = Plan(model.path, chain(*values.values()), choice.cuts)
    plan.counted = {min(values[n]) for n in values if values[n] and model.memories[n].cost}
    plan.peak, plan.nbytes = choice.peak, choice.nbytes
    return plan


def _split_all(groups: Sequence[Group], choice: Filling, budget: int, peak: int) -> int:
    """Split what needs more than `peak`. Returns the peak of backward."""
    model, ends = choice.model, choice.ends
    held = [choice.held[end - 1] for end in ends[1:]]
    backward = [max(model.backward[start:end]) for start, end in pairwise(ends)]
    found: list[int] = [*map(add, held, backward)]
    for group in groups:
        at = [model.saves[slot][0] for slot in group.slots if slot in model.saves]
        part = bisect_right(ends, max(at, default=0)) - 1
        most = choice.peaks[part]
        if most > peak:
            most = min(most, held[part] + _split(group, choice, budget, peak - held[part]))
        found[part] = max(found[part], most)
    return max(found)


def _split(group: Group, choice: Filling, budget: int, peak: int) -> int:
    """Where a window would deliver more than the budget, a first replay makes what smaller windows
    start from. Returns what backward needs then."""
    order = group.path.slice_of([group.path.slots[slot].value for slot in group.slots]).steps
    if not order:
        return 0
    held = choice.stretch.held | choice.kept
    part = choice.model.part(order, group.slots, held)
    stretch = Stretch(part, held)
    need = Filling(stretch, ()).peak
    if stretch.cost(stretch.dear & stretch.saved.keys()) <= budget:
        return need
    found = choose_first(stretch, budget)
    # If nothing is kept, a part may be the whole group again. If the parts need no less, they would
    # be split in vain, too.
    if not found.kept or found.peak >= need:
        return need
    group.split(part.values(found.kept), [part.first + cut for cut in found.cuts])
    return _split_all(group.parts, found, budget, peak)


def _complaint(plan: Plan, asked: Placement, least: int) -> str:
    """What to say of a budget, or of a peak, that is too small; others keep at least this."""
    budget, _, peak = asked
    if peak is not None and plan.peak > peak:
        why = "this block needs more. The least peak possible"
        other = "A small auto(budget=...) may need less, and repeats more."
        return f"auto(peak={peak}): {why} is {plan.peak} bytes. {other}"
    if budget is None:
        return ""
    if least > budget:
        why = "`keep`, other policies, decisions, or FSDP2 keep more than that in this block"
    elif plan.exceeds:
        why = "no room for checkpoints that lower the peak, so more is kept"
        least += plan.nbytes
    else:
        return ""
    return f"auto(budget={budget}): {why}. A budget of {least} bytes is enough."


def attach(plan: Plan, old: Plan | None) -> None:
    """From here on runs hold what the plan keeps, as soon as it is there."""
    path = plan.path
    for step in path.steps if old is not None else ():
        if step.keeps:
            step.keeps = tuple([each for each in step.keeps if each[0] is not old])
    saved = {path.memory_of[slot.cell] for slot in path.slots}
    for value in sorted(plan.kept):  # in the same order on every rank
        memory = path.memory_of[value[0]]
        asked = Hold(value, memory, is_copied=memory not in saved)
        kept = plan, asked, value in plan.counted and not plan.exceeds
        path.steps[path.there_after(value)].keeps += (kept,)


_MOST_HALVES = 6  # of what the least peak needs: smaller budgets have no room for a checkpoint
