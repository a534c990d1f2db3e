"""Runs: one execution of a block, as a region: what autograd saves in it, and what it keeps.

A run follows its program (`follow.py`) and holds values (`store.py`). Here is what others ask of
it: autograd, the regions inside, `keep` and its like.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._engine import Mover, read_switches, thread
from .follow import Follower
from .ops import Info, info_of
from .pieces import Ends
from .program import BROUGHT_BACK, UNSEEN, Known, Program, Slot
from .store import Store

_RESTING, _ASIDE = -1, -2  # no depths of recomputes


class Run(Follower):
    """One execution of a block."""

    ends: Ends | None = None  # of its pieces, if the block is taken in pieces
    # What is saved next is an alias of this, which a region inside is about to take as an input.
    announced: Tensor | None = None
    _keeper: Mover | None = None  # takes what `keep` is given
    _saver: Mover | None = None  # takes all that autograd saves, which is then kept
    _parts = 0  # that have been left, and still wait for backward

    def __init__(
        self,
        program: Program,
        hooks: _torch.Hooks | None,
        preserve_rng_state: bool | str,
        policy: Any,
    ) -> None:
        self.policy = policy or getattr(thread.region, "policy", None)
        store = Store(hooks, preserve_rng_state)
        store.placement = policy and policy.placement  # not that of a region around
        super().__init__(program, store)
        self.switches = read_switches()
        self.around = hooks
        if self.policy is not None:
            self._ask = self.policy.on_op
            kept, saved, inputs = self.policy.places
            self._keeper, self._saver = store.mover(kept), store.mover(saved)
            store.hooks = store.mover(inputs) or hooks

    def close(self) -> None:
        """Drop what is needed only while the block runs."""
        try:
            self.store.close()
        finally:
            self.outer = self._recorder = self._compiled = self._gathering = None
            self.watchers = ()

    def end(self) -> None:
        """The block has ended, and holders have what they need."""
        self.store.release()
        self.store.pieces.clear()
        self.path, self.ends = [], None
        del self.known, self.cells  # they know what has been held
        self.is_over = True

    # ---- pieces

    def _begins_anew(self, info: Info) -> bool:
        ends = self.ends
        if ends is None or self.sees_gathering:
            return False
        if self._here["region"] is not self:
            return False
        # What an operator writes may have been saved before it is there.
        if self.saved and (info.targets or info.statistics):
            return False
        if not ends.may_be_here(self.path, self.cells):
            return False
        for slot in self.step.saves[: self.saved]:  # for the operator that comes next
            tensor = self.cells[slot.cell]()
            if tensor is not None and not slot.holds:
                self.keep_at(tensor)
        self._begin_at(ends.end())
        return True

    def _begin_at(self, holder: int) -> None:
        """From here on the block is like another run, whose first holder is this one."""
        store = self.store
        store.pieces.leave(store.holds())
        if self.ends is not None:
            self.ends.begin()
        if self._gathering is not None:
            self._gathering.begin()
        self.begin()
        store.first_holder = holder

    # ---- a backward inside the block

    def may_begin_anew(self) -> bool:
        """Whether the rest of the block can be treated as a new run, since a backward inside has
        begun. In hooks, each value that is met once more would be a slot, which a rerun must make
        at the same place. With `create_graph` alone, gradients are wanted in backward."""
        if self.store.hooks is not None or _torch.graph_task_id() == self.store.task:
            return False
        return not torch.is_grad_enabled()

    def may_rest_again(self) -> bool:
        """Whether a backward of what was left before, as of a second loss, has begun. What the run
        has written outside the block since then, it may still read: a new run would not copy it."""
        if self._depth == _RESTING or not self.may_begin_anew():
            return False
        return not any(step.effect and step.writes for step in self.path)

    def begin_anew(self, holders: list[Any]) -> None:
        """Holders have what they need, so the rest of the block is like another run, as in a loop
        of training steps. Until gradients are wanted again (backward itself and an optimizer's step
        want none), or something is written that is held, nothing is recorded."""
        self._begin_at(len(holders))
        self._holders = holders
        self._depth = _RESTING

    def _wakes_up(self, func: Any, args: Any, kwargs: Any) -> bool:
        if self._depth != _RESTING or self._here["depth"] != self.store.depth:
            return False
        info = info_of(func)
        if info.is_passed:
            return False
        written = info.targets_of(args, kwargs)
        if not (torch.is_grad_enabled() or self.store.pieces.hear_of(info, written)):
            return False
        self._depth = self.store.depth
        if any(holder() is not None for holder in self._holders):
            self._parts += 1
            if self._parts > 1:  # one may be that of a second loss
                self.program.history.leaves(self._parts)
        else:
            self._parts = 0
            self._holders.clear()
            self.store.first_holder = 0
        return True

    def adopt(self, tensor: Tensor, slot: Slot) -> None:
        """While the block still runs, a backward inside it has brought a value back in other
        memory. Who reads that reads the value: to hold it once more would be a waste, and a slot
        that no rerun would have."""
        if type(tensor) not in _torch.UNWRAPPED or not _torch.has_storage(tensor):
            return
        live = self.cells[slot.cell]()
        if live is None or _torch.storage_of(live) != _torch.storage_of(tensor):
            self._event(BROUGHT_BACK, (slot,), (tensor,))

    # ---- what autograd saves

    def save(self, tensor: Tensor) -> Slot:
        """What a holder needs to bring `tensor` back."""
        if self._later or self._compiled is not None or self.announced is not None:
            announced, self.announced = self.announced, None
            self.store.settle()
            saved = tensor if announced is None else announced
            if self._compiled is not None:
                self._compiled.look_at((saved,))
            return self._save(saved, is_read=announced is not None)
        saves, place = self.step.saves, self.saved
        if place < len(saves):  # the usual case
            slot = saves[place]
            if slot.is_usual and self.cells[slot.cell]() is tensor and self._saver is None:
                self.saved = place + 1
                if slot.memory is not None:
                    self.store.saved_bytes += _torch.memory_size(tensor)
                return slot
        return self._save(tensor)

    def _save(self, tensor: Tensor, is_read: bool = False) -> Slot:
        """Save whatever it is: also an input of a region inside, which others may have filled
        unseen."""
        slot = self._known_slot(tensor, is_read)
        while slot is None:
            self.own_program()
            step = self.step
            if any((step.next, step.plan, self.saved != len(step.saves))):
                self._branch()
                slot = self._known_slot(tensor, is_read)
            else:
                slot = self._recorder_here().slot(tensor, is_read)
                step.saves += (slot,)
        self.saved += 1
        for asked in slot.holds:
            self._hold(asked)
        if slot.memory is not None:
            self.store.saved_bytes += _torch.memory_size(tensor)
        if self._saver is not None:
            self.keep_at(tensor, self._saver)
        return slot

    def _known_slot(self, tensor: Tensor, is_read: bool) -> Slot | None:
        if self.saved == len(self.step.saves):
            return None
        slot = self.step.saves[self.saved]
        if slot.is_read is not is_read:
            return None
        met: list[Tensor] = []
        (template,) = slot.firsts or (Known(slot.cell),)
        if not self.known.matches(template, tensor, met):
            return None
        self.known.meet(slot.firsts, met)
        return slot

    # ---- what is kept

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold a value: recompute starts from it, and never crosses it."""
        self.store.settle()
        tensor = self.pin(tensor)
        self.keep_at(tensor, self._keeper)
        return tensor

    def keep_for_inner(self, tensor: Tensor) -> None:
        self.store.settle()
        self.keep_at(tensor, self._keeper)
        super().keep_for_inner(tensor)

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        """The value has a name, which the innermost policy may want to keep it by."""
        if self.policy is not None:
            self.store.settle()
            self._obey(self.policy.on_tag(name), tensor)
        return tensor

    # ---- as a region

    def look_away(self) -> None:
        """Memory may now change without any operator: copy values already read, and treat later
        reads as inputs from outside."""
        self.store.settle()
        self._event(UNSEEN)
        super().look_away()

    def once(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Replay repeats no Python, but a rerun around it does: then what the function does must
        leave no trace here, and what it returns comes from outside."""
        outer = self.outer
        while isinstance(outer, Run):
            outer = outer.outer
        if outer is None or self.outer is None:
            return function(*args, **kwargs)
        self.store.settle()
        alive = [tensor for cell in self.cells if (tensor := cell()) is not None]
        versions = {_torch.storage_of(t): (t, _torch.version(t)) for t in alive}
        depth, self._depth = self._depth, _ASIDE  # a run around the rerun records it
        try:
            value = self.outer.once(function, args, kwargs)
        finally:
            self._depth = depth
        for tensor, version in versions.values():
            if _torch.version(tensor) != version:
                self.written_unseen(tensor)
        return value
