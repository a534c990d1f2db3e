"""What a run has of its own: the values that it holds, random states, and numbers.

A program says when a value is to be held; the store holds it, under that value. Before an operator
writes to a memory, what is held there and overlaps with the target is replaced by a copy, by the
geometry that both have in this very run.

Invariant: a value that is held stays as it was when it was read, or fetching it is an error.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._engine import CPU_RNG, Aliased, Destination, Generators, Held, Mover, hold, thread
from .ops import generators_of
from .pieces import Pieces, must_copy
from .program import NOT_WRITTEN, Cells, Hold, Step, Value

# What to do with a value: False to recompute it, True to keep it, or where it is kept.
Answer = bool | Destination


class Places(NamedTuple):
    """Where a policy puts things about which it is not asked. None: where they would be without
    it."""

    kept: Destination | None = None  # what `keep` is given
    saved: Destination | None = None  # all that autograd saves, which is then kept
    inputs: Destination | None = None


class Placement(NamedTuple):
    """What the user asks of a plan."""

    budget: int | None  # bytes that may be kept
    place: Destination | None = None  # where they are kept
    peak: int | None = None  # bytes that the step may need


class Store:
    """The values that a run holds, and what else differs from run to run."""

    first_holder = 0  # of the block's, which the run has made
    placement: Placement | None = None  # what `auto()` is asked for
    is_checked = False  # whether values are compared when they come back

    def __init__(self, hooks: Any, preserve_rng_state: bool | str) -> None:
        self.movers: dict[Destination, Mover] = {}
        self.pieces = Pieces()
        self.hooks = hooks  # or a mover: who takes inputs
        self.preserve_rng_state = preserve_rng_state
        self.task = _torch.graph_task_id()  # of the rerun that this is part of, if of one
        self.depth = thread.depth
        # What to do when the last operator has returned, which has still to count versions up.
        self.later: list[Callable[[], Any]] = []

    def begin(self) -> None:
        """Hold nothing, and count from 0."""
        self.release()
        self.saved_bytes = self.kept_bytes = self.decided_bytes = self._planned_bytes = 0

    def release(self) -> None:
        """Hold nothing: others have what they need."""
        self.cells: Cells = []
        self.held: dict[Value, Held] = {}
        self._planned: dict[Value, int] = {}  # what plans alone keep: bytes of a budget
        self.random: dict[int, Any] = {}  # by step: where the generators stood
        # By step and place: arguments that differ from the program's.
        self.numbers: dict[int, Any] = {}
        # By step: of results whose shapes do not follow from those of the arguments.
        self.shapes: dict[int, list[torch.Size]] = {}
        # By memory that was only allocated, and type: the parts that have been filled, and their
        # bytes.
        self._filled: dict[Any, dict[_torch.Layout, int]] = defaultdict(dict)
        self._on: dict[int, list[Hold]] = defaultdict(list)  # what is held, by memory
        # By value that other runs may write before backward, until it is copied: its memory.
        self._states: dict[Value, int] = {}

    def mover(self, place: Answer | None) -> Mover | None:
        """Who takes tensors to a place; None if nobody has to."""
        if not isinstance(place, Destination):
            return None
        return self.movers.setdefault(place, Mover(place))

    def settle(self) -> None:
        """The last operator has returned."""
        while self.later:
            self.later.pop(0)()

    def parameter(self, cell: int) -> Tensor | None:
        """The parameter, or another strided leaf, in a cell, if it is held by itself."""
        held: Any = self.held.get((cell, NOT_WRITTEN))
        is_one = type(held) is Aliased and held.is_parameter and _torch.is_strided(held.packed)
        return held.packed if is_one else None

    def keeps(self, cell: int) -> bool:
        """Whether the memory that was first in a cell is held. A parameter that is held by itself
        may have other memory by now, as in a momentum encoder (`weight.data = ...`)."""
        return (cell, NOT_WRITTEN) in self.held and self.parameter(cell) is None

    def close(self) -> None:
        """The block has ended."""
        self.settle()
        for mover in self.movers.values():
            mover.settle()

    # ---- holding

    def hold(self, asked: Hold) -> None:
        """From here on a replay can start from what is in this cell now."""
        tensor = self.cells[asked.value[0]]()
        self._unplan(asked.value)  # another plan would let it go
        if asked.value not in self.held:
            hooks = self.hooks
            # Autograd saves it before it is filled; or nobody sees whether that is so (`opaque()`).
            if asked.is_hidden or asked.is_lent or (hooks is not None and self._is_apart()):
                hooks = None
            self._hold_as(asked, tensor, hooks, asked.reader or "a tensor that it saved")
            if asked.is_lent:
                self.held[asked.value].is_parameter = True
        if asked.is_copied:
            self._states[asked.value] = asked.memory

    def _is_apart(self) -> bool:
        """Whether a backward inside the block runs, which a rerun of the enclosing region may meet
        at another time."""
        return (thread.depth, _torch.graph_task_id()) != (self.depth, self.task)

    def refer(self, asked: Hold, parameter: Tensor) -> None:
        """Hold a parameter by itself."""
        self.held[asked.value] = Aliased(parameter, "a parameter", True)
        self._on[asked.memory].append(asked)

    def keep(self, asked: Hold, mover: Mover | None) -> None:
        """Hold a value that could be computed. The mover says where; None: as an input."""
        tensor = self.cells[asked.value[0]]()
        self._unplan(asked.value)
        self._hold_kept(asked, tensor, mover)
        self.kept_bytes += _torch.memory_size(tensor)

    def keep_planned(self, asked: Hold, counts: bool) -> None:
        """Hold what a plan keeps, if there is room; `counts`: in the budget."""
        tensor = self._unheld(asked.value)
        if tensor is None:
            return
        assert self.placement is not None
        budget, place, _ = self.placement
        nbytes = _torch.memory_size(tensor) if counts else 0
        if budget is not None and self._planned_bytes + self.kept_bytes + nbytes > budget:
            return
        self._planned[asked.value] = nbytes
        self._planned_bytes += nbytes
        self._hold_kept(asked, tensor, self.mover(place))
        if asked.is_copied:
            self._states[asked.value] = asked.memory

    def decide(self, asked: Hold) -> None:
        """Hold a decision."""
        tensor = self._unheld(asked.value)
        self._unplan(asked.value)
        if tensor is not None:
            self._hold_as(asked, tensor, None, "a decision")
            nbytes = _torch.memory_size(tensor)
            self.decided_bytes += nbytes
            self.kept_bytes += nbytes

    def _hold_kept(self, asked: Hold, tensor: Tensor, mover: Mover | None) -> None:
        """What is too small to be moved is held like an input."""
        is_moved = mover is not None and mover.takes(tensor)
        self._hold_as(asked, tensor, mover if is_moved else self.hooks, "a kept tensor")

    def _unheld(self, value: Value) -> Tensor | None:
        """A value that exists, and is not held yet."""
        return None if value in self.held else self.cells[value[0]]()

    def _hold_as(self, asked: Hold, tensor: Tensor, hooks: Any, name: Any) -> None:
        held: Any = None
        try:
            held = hold(tensor, hooks, name)
        finally:  # a hook of the user may raise, and the block go on
            self.held[asked.value] = held or hold(tensor, None, name)
            if not asked.is_hidden:
                self._on[asked.memory].append(asked)

    # ---- memory that is about to be written

    def holds_on(self, memories: tuple[int, ...]) -> bool:
        """Whether something is held on one of these."""
        return not self._on.keys().isdisjoint(memories)

    def before_write(self, step: Step, targets: list[Tensor]) -> None:
        """Copy what is held where a step writes."""
        if self.pieces and (step.effect or step.updates):
            self.pieces.before_write(step, targets)
        for memory in step.writes:
            for asked in self._on.pop(memory, ()):
                held = self.held[asked.value]
                if not step.updates and self._lies_apart(asked, held, targets):
                    self._on[memory].append(asked)
                    self.later.append(held.renew)
                elif must_copy(step, held, asked):
                    self._freeze(asked, held)

    def copy_states(self, values: Set[Value]) -> None:
        """Copy those of these values that may be written before backward: by other runs, or by the
        user, who still has what a plan keeps."""
        for value in values & self._states.keys():
            if value in self._planned and not self.held[value].is_shared:
                continue
            there = self._on[self._states.pop(value)]
            for asked in [each for each in there if each.value == value]:
                there.remove(asked)
                self._freeze(asked, self.held[value])

    def before_unseen_writes(self, step: Step) -> None:
        """Copy all that is held, but parameters."""
        for asked, held in self.holds():
            if not (asked.is_parameter or held.is_stale):
                self._freeze(asked, held)
        self.pieces.before_unseen_write(step)
        for there in self._on.values():
            there[:] = [asked for asked in there if asked.is_parameter]

    def holds(self) -> list[tuple[Hold, Held]]:
        """What is held, and may be written later."""
        return [(asked, self.held[asked.value]) for there in self._on.values() for asked in there]

    def has_been_written(self, memories: tuple[int, ...]) -> None:
        """Nobody saw it: it is too late to copy."""
        for memory in memories:
            self._on.pop(memory, None)

    def has_filled(self, memory: int, part: Tensor, source: Tensor | None) -> bool:
        """Whether a memory that was only allocated is filled, with this part. Of a copy of another
        part, as in circular padding, what has been filled in that one counts. Parts that overlap do
        not count, nor do more than a few."""
        parts, layout = self._filled[memory, part.dtype], _torch.layout_of(part)
        if layout is None:
            return False
        filled = [layout]
        if source is not None and _torch.storage_of(source) == _torch.storage_of(part):
            copied = _torch.layout_of(source)
            if copied is None or source.dtype != part.dtype or copied[:-1] != layout[:-1]:
                return False
            shared = [_torch.shared_part(copied, other) for other in parts]
            shift = layout[-1] - copied[-1]
            filled = [(*each[:-1], each[-1] + shift) for each in shared if each is not None]
        for each in filled:
            if len(parts) == _MOST_PARTS:
                return False
            if any(_torch.layouts_overlap(each, other) for other in parts):
                return False
            parts[each] = each[0].numel() * part.itemsize
        return sum(parts.values()) == _torch.memory_size(part)

    def _lies_apart(self, asked: Hold, held: Held, targets: list[Tensor]) -> bool:
        tensor = held.packed if type(held) is Aliased else self.cells[asked.value[0]]()
        if tensor is None:
            return False
        return not any(_torch.overlap(tensor, target) for target in targets)

    def _freeze(self, asked: Hold, held: Held) -> None:
        held.freeze(self.cells[asked.value[0]]())

    def forget(self, step: Step) -> None:
        """A step has failed. The cells from it on are empty again."""
        self._drop([value for value in self.held if value[0] >= step.cells_before])
        self.numbers.pop(step.index, None)

    def let_go(self, kept: Container[Value]) -> None:
        """Of what plans keep, hold only this."""
        self._drop([value for value in self._planned if value not in kept])

    def _unplan(self, value: Value) -> None:
        self._planned_bytes -= self._planned.pop(value, 0)

    def _drop(self, values: Iterable[Value]) -> None:
        for value in values:
            del self.held[value]
            self._unplan(value)
        for there in self._on.values():
            there[:] = [asked for asked in there if asked.value in self.held]

    # ---- random states, numbers and shapes

    def generators(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Where the generators stand that an operator is about to draw from."""
        is_custom, preserve = step.info.custom, self.preserve_rng_state
        if not (is_custom or preserve):
            return None
        if step.is_quick_draw and type(args[0]) is Tensor and args[0].is_cpu:
            return Generators([CPU_RNG])
        return generators_of(args, kwargs, is_custom and preserve == "all")

    def has_drawn(self, step: Step, state: Any) -> bool:
        """Note from where random numbers were drawn. Returns whether to keep them instead."""
        if step.info.custom and not state.have_moved():
            return False
        if self.preserve_rng_state:
            self.random[step.index] = state
            return False
        return True


_MOST_PARTS = 32  # in which memory is filled
