"""Positions: where a run is in its program, and how the program grows there."""

from typing import Any
from weakref import ref

from torch import Tensor

from .. import _torch
from .._engine import Mover
from .match import Matcher
from .path import Path
from .program import (
    FEWER_SAVES,
    KEEP,
    UNSEEN,
    WRITTEN_UNSEEN,
    Program,
    Step,
    event_after,
    with_saves,
)
from .recorder import Recorder
from .store import Store


class Position:
    """A path through a program so far, and the tensors in its cells."""

    is_over = False
    is_alone = False  # whether its program is its own

    def __init__(self, program: Program, store: Store) -> None:
        self.program, self.store = program, store
        self.begin()

    def begin(self) -> None:
        """At the root of the program: nothing is known, held or counted."""
        self.store.begin()
        self.root = self.step = self.program.root
        self.path: list[Step] = []
        self.plan = self.program.expected  # which tells what to hold
        self.saved = 0  # how many tensors autograd has saved since the last step
        self.cells = self.store.cells
        self.known = Matcher(self.store)
        self._recorder: Recorder | None = None

    def _forget(self, step: Step) -> None:
        """The cells from this step on are empty again."""
        del self.cells[step.cells_before :]
        self.known.forget(step.cells_before)

    def _go_to(self, step: Step) -> None:
        """This is the step that has just been taken."""
        self.step = step
        self.saved = 0
        self.path.append(step)

    def finish_step(self) -> tuple[Step, ...]:
        """Nothing more is saved after this step. Returns the steps that came next before."""
        following = self.step.next  # before the saves: another thread may record
        while self.saved != len(self.step.saves):
            following = self._branch().next
        return following

    def own_program(self) -> None:
        """Before the program changes. While a run in another thread changes it, this one goes on in
        a program of its own, which nobody follows, from a step that has no next one."""
        if not self.program.is_written_by(self):
            self.program, self.is_alone = Program(), True
            self.program.is_written_by(self)
            # The step before does not know this one.
            self._go_to(event_after(self.step, FEWER_SAVES, (self.saved,)))

    # ---- what is new

    def _recorder_here(self) -> Recorder:
        recorder = self._recorder
        if recorder is None or recorder.at != (self.step, self.saved):
            steps = with_saves(self.root, self.path, self.saved)
            self._recorder = recorder = Recorder(self.store, self.known, steps)
        return recorder

    def _add(self, step: Step) -> None:
        """A new step has run, and its results are in their cells."""
        self._recorder_here().has_run(step)
        self.program.add(self.step, step)
        if self.plan is not None:
            self.use_plan(None)

    def use_plan(self, plan: Any) -> None:
        """From here on hold what this plan keeps; what others have kept is of no use."""
        self.plan = plan
        self.store.let_go(() if plan is None else plan.kept)

    # ---- events

    def _event(
        self, event: str, args: tuple[Any, ...] = (), results: tuple[Tensor, ...] = ()
    ) -> Step:
        """Something has happened between two steps."""
        step = self.known.find(self.finish_step(), (event,), args)
        if step is None:
            self.own_program()
            step = self._recorder_here().event(event, args)
        self.cells += map(ref, results)
        if step.count is None:
            self._add(step)
        if event is UNSEEN:
            self.store.before_unseen_writes(step)
        elif step.writes:
            self.store.has_been_written(step.writes)
        self._go_to(step)
        return step

    def written_unseen(self, tensor: Tensor) -> None:
        """Something has written to a tensor, and no operator has shown it."""
        self._event(WRITTEN_UNSEEN, (tensor,))

    def keep_at(self, tensor: Tensor, mover: Mover | None = None) -> None:
        """Hold a value where the mover says; None: as an input."""
        for part in filter(_torch.has_storage, _torch.plain_parts(tensor)):
            for asked in self._event(KEEP, (part,)).decides:
                self.store.keep(asked, mover)

    def _branch(self) -> Step:
        """After as many saves as there are now, the run goes another way than the step knows."""
        step = self.step
        known = self.known.find(step.next, (FEWER_SAVES,), (self.saved,))
        if known is None:
            self.own_program()
            if self.step is not step:
                return self.step
            known = self.program.add(step, event_after(step, FEWER_SAVES, (self.saved,)))
        self._go_to(known)
        return known

    def alive(self) -> list[int]:
        """Cells that somebody else holds."""
        return [cell for cell, tensor in enumerate(self.cells) if tensor() is not None]

    def so_far(self) -> Path:
        """What the run has done."""
        return Path(self.root, self.path, self.saved)
