"""Runs: a block follows its program, and records what is new.

The mode sits below autograd, autocast and function modes, where every tensor is plain data. An
operator call that does as a known next step does *is* that step. Otherwise the run asks a
`Recorder` for a new step, and goes on from there. A tensor is known by the identity of its object,
through weak references: torch keeps the Python object of a tensor as long as the tensor lives, so a
live reference is proof.

Following is `__torch_dispatch__`, `_matches` and `save`. What a run has of its own are the tensors
that it holds, the states of random number generators, and numbers that differ from run to run.

Rejected: holding results strongly while a block runs. It changes what torch does, and what it
saves.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _torch
from .._engine import (
    Aliased,
    Destination,
    Held,
    Mover,
    Region,
    aside,
    hold,
    is_parameter,
    note_written,
    read_switches,
    root_of,
    thread,
)
from .compiled import INDUCTOR, see_compiled_code
from .gathered import lend
from .ops import INFOS, Info, generators_of, tensors_of
from .program import (
    BROUGHT_BACK,
    FEWER_SAVES,
    KEEP,
    NO_KEYWORDS,
    UNSEEN,
    WRITTEN_UNSEEN,
    Filling,
    First,
    Known,
    Like,
    Parts,
    Program,
    Slot,
    Step,
    Thing,
    Value,
    Varying,
)
from .recorder import NO_MEMORY, ON_MADE_MEMORY, Recorder

# What to do with a value: False to recompute it, True to keep it, or where it is kept.
Answer = bool | Destination


class Places(NamedTuple):
    """Where a policy puts things about which it is not asked. None: where they would be without
    it."""

    kept: Destination | None  # what `keep` is given
    saved: Destination | None  # all that autograd saves, which is then kept
    inputs: Destination | None


class Placement(NamedTuple):
    """What the user asks of a plan."""

    budget: int | None  # bytes that may be kept
    place: Destination | None = None  # where they are kept
    peak: int | None = None  # bytes that the step may need


NOWHERE = Places(None, None, None)

PLANNED, PASSED, DECIDED = "planned", "passed", "decided"  # in place of an answer
RESTING = -1  # no depth of recomputes

_plain_dispatch = Tensor.__torch_dispatch__
_is_grad_enabled, _graph_task_id = torch.is_grad_enabled, _torch.graph_task_id
_storage_id, _has_storage = _torch.storage_id, _torch.has_storage
_storage_of = _torch.storage_of
_modules = sys.modules


class Run(TorchDispatchMode, Region):
    """One execution of a block."""

    supports_higher_order_operators = True
    is_over = False
    is_alone = False  # whether its program is its own
    is_checked = False  # whether values are compared when they come back
    sees_compiled_code = sees_gathering = False

    def __init__(
        self,
        program: Program,
        hooks: _torch.Hooks | None,
        preserve_rng_state: bool | str,
        policy: Any,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = program
        self._begin()
        self.note: Callable[[], Any] | None = None  # what to note of each operator that is recorded
        self.switches = read_switches()
        self.fake_mode = _torch.fake_mode()
        self._here = here = thread.__dict__
        self._depth = here["depth"]
        self._graph_task = _graph_task_id()  # of the rerun that this is part of, if of one
        self._preserve_rng_state = preserve_rng_state
        self.outer = outer = here["region"]
        self.policy = outer.policy if policy is None and outer is not None else policy
        self._ask = None if self.policy is None else self.policy.on_op
        self.movers: dict[Destination, Mover] = {}
        kept, saved, inputs = NOWHERE if self.policy is None else self.policy.places
        self._keeper, self._save_at = self._mover(kept), self._mover(saved)
        self.hooks: Any = hooks if inputs is None else self._mover(inputs)
        self._around = hooks
        # How many runs have been entered just inside this one: they ask for themselves.
        self._inner = 0
        self.placement: Placement | None = None  # what `auto()` is asked for
        self.holds_planned = False  # whether what a plan keeps is held from the forward on
        self.first_holder = 0  # of the block's, which this has made
        self._announced: Tensor | None = None
        self.is_read = False  # whether what is saved is read by a region inside
        self._joins = False  # whether what is saved is another part of the tensor before
        if INDUCTOR in _modules:
            see_compiled_code(self)

    def _begin(self) -> None:
        """At the root of the program: nothing is known of any tensor."""
        self.root = self.step = self.program.root
        self.path: list[Step] = []
        self.cells: list[Callable[[], Any]] = []
        # By cell, or by value if a plan keeps it: what a recompute may start from.
        self.held: dict[Any, Any] = {}
        self.random: dict[int, Any] = {}  # by step: where the generators stood
        # By step and place: arguments that differ from the program's.
        self.numbers: dict[int, Any] = {}
        # By step: of results whose shapes do not follow from those of the arguments.
        self.shapes: dict[int, list[torch.Size]] = {}
        self.stocks: dict[int, Any] = {}  # by slot: what a backward inside the block starts from
        self.saved = 0  # how many tensors autograd has saved since the last step
        self.saved_bytes = self.kept_bytes = self.planned_bytes = self.decided_bytes = 0
        self._pending: list[tuple[Any, Any]] = []  # written just now, and to be kept
        self._recorder: Recorder | None = None  # while something is recorded
        self._shared: dict[int | None, int] = {}  # by storage: the first cell from outside there
        self._made: dict[int | None, int] = {}  # by storage: a cell there; of so many cells:
        self._looked_at = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps `__torch_dispatch__` once more, and every operator pays for it.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else compiled code runs eagerly in the block, and in torch 2.13 also after it.
        return True

    # ---- following

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or NO_KEYWORDS
        # An operator of a recompute (rule 3).
        if self._here["depth"] != self._depth and not self._wakes_up(func, args):
            return func(*args, **kwargs)
        if types and not self._follows(func, types):
            return _leave_to_subclass(func, types, args, kwargs)
        if self._pending:
            self.settle()
        following = self.step.next  # another thread may record: read before the saves
        if self.saved != len(self.step.saves):
            following = self._following()
        cells = self.cells
        mark = len(cells)
        step = self._known_step(following, func, args, kwargs)
        if step is None:
            return self._do_something_new(func, types, args, kwargs)
        if step.is_special:
            return self._run(step, args, kwargs, mark)
        try:
            result = step.run(*args, **kwargs) if kwargs else step.run(*args)
        except BaseException:
            self._has_failed(step, args, kwargs, mark)
            raise
        if type(result) is Tensor:
            cells.append(ref(result))
        else:
            step = self._take(step, args, kwargs, result, mark)
        self.step = step
        self.saved = 0
        self.path.append(step)
        if step.keeps or self._ask is not None:
            self._decide(step, args, kwargs, result)
        return result

    def _follows(self, func: Any, types: Any) -> bool:
        """Whether tensors of these types are like plain ones here."""
        if not any(map(_dispatches, types)):
            return True
        if func is _torch.DEVICE or _torch.fake_mode() is not self.fake_mode:
            return False
        return all(issubclass(kind, _torch.FakeTensor) for kind in types)

    def _following(self) -> tuple[Step, ...]:
        """The steps that came next before, after as many saves as there are now."""
        following = self.step.next
        while self.saved != len(self.step.saves):
            following = self._branch().next
        return following

    def _known_step(
        self, following: tuple[Step, ...], func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Step | None:
        """Which of these steps a call is, if any."""
        cells = self.cells
        mark = len(cells)
        names: tuple[str, ...] = ()
        given = args
        if kwargs:
            names, given = (*kwargs,), (*args, *kwargs.values())
        call = func, _is_grad_enabled(), len(args), names
        for step in following:
            if step.call != call:
                continue
            # The usual cases, past one call.
            for known, arg in zip(step.args, given):  # noqa: B905
                kind = type(known)
                if kind is Known:
                    if cells[known.cell]() is not arg:
                        break
                elif known is not arg:
                    is_plain = type(arg) is kind and kind in step.plain
                    if not (known == arg if is_plain else self._matches(known, arg)):
                        break
            else:
                return step
            if len(cells) > mark:
                self._go_back_to(mark)
        return None

    def _take(self, step: Step, args: Any, kwargs: Any, result: Any, mark: int) -> Step:
        """Put the tensors of a result into the next cells. Returns the step that this was: with as
        many results."""
        tensors = tensors_of(result)
        # `split`, `unbind`: as many as there is room for.
        if step.count is None or len(tensors) == step.count:
            self.cells += map(ref, tensors)
            return step
        step = self._with_other_results(step, args, kwargs, tensors, mark)
        self.cells += map(ref, tensors)
        self._hold_decisions(step)
        return step

    def _with_other_results(
        self, step: Step, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], mark: int
    ) -> Step:
        held = {**self.held}  # the same cells again
        self._go_back_to(mark)
        self.numbers.pop(step.index, None)
        others = tuple([other for other in self.step.next if other.count == len(tensors)])
        other = self._known_step(others, step.func, args, kwargs)
        if other is not None:
            self.held = held
            self._note_numbers(other, args, kwargs)
            return other
        self.own_program()
        recorder = self._recorded()
        step = recorder.step(step.info, step.func, args, kwargs)
        self.held = held
        self.cells += map(ref, recorder.met)
        recorder.has_run(step, tensors)
        return self.program.add(step)

    def _matches(self, known: Any, arg: Any) -> bool:
        """Whether an argument is what it was."""
        if known is arg:
            return True
        matches = _TEMPLATES.get(type(known))
        return _are_same(known, arg) if matches is None else matches(self, known, arg)

    def _meets(self, first: First, tensor: Any) -> bool:
        """Whether this is a tensor, and comes from where it came from then. If so, it takes the
        next cell."""
        if not isinstance(tensor, Tensor) or not self._comes_from(first, tensor):
            return False
        self.cells.append(ref(tensor))
        return True

    def _comes_from(self, first: First, tensor: Tensor) -> bool:
        """The same of a tensor, with what the run notes of one that is from outside."""
        if first.was is not None:
            return self.cells[first.was]() is tensor
        if self.shares(tensor, first.cell) != first.shares:
            return False
        if _torch.is_whole_parameter(tensor):
            is_same_kind = first.is_parameter
        else:
            is_same_kind = first.is_lent or is_parameter(root_of(tensor)) is first.is_parameter
            is_same_kind &= not first.is_referenced
        if is_same_kind:
            self.take_first(first, tensor)
        return is_same_kind

    def take_first(self, first: First, tensor: Tensor) -> None:
        """The tensor is from outside: who uses its memory from here on shares it with this cell."""
        cell = first.cell
        if first.shares == cell or first.shares < 0:
            self._shared[_storage_of(tensor)] = cell
        if first.is_referenced:
            self.held[cell] = tensor, tensor._version

    def shares(self, tensor: Tensor, cell: int) -> int:
        """With which cell from outside an unknown tensor shares its memory: with `cell`, if with
        none."""
        place = _storage_of(tensor)
        if place is None:
            return cell
        shared = self._shared.get(place)
        if shared is not None:
            cells = self.cells
            if shared >= len(cells) or cells[shared]() is not None or shared in self.held:
                return shared
        if not _torch.is_whole_parameter(tensor):
            if self._is_made(place):
                return ON_MADE_MEMORY
            if _torch.is_zeros(tensor):
                return NO_MEMORY
        return cell

    def is_from_outside(self, tensor: Tensor) -> bool:
        """Whether a tensor uses memory that the run has met."""
        cell = self._shared.get(_storage_id(tensor))
        return cell is not None and self.cells[cell]() is not None

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor uses memory that recorded operators have made."""
        return not self.is_from_outside(tensor) and self._is_made(_storage_id(tensor))

    def _is_made(self, place: int) -> bool:
        """Whether a storage belongs to something that this run has made."""
        cells, made = self.cells, self._made
        for cell in range(self._looked_at, len(cells)):
            tensor = cells[cell]()
            if tensor is not None:
                made.setdefault(_storage_of(tensor), cell)
        self._looked_at = len(cells)
        cell_there = made.get(place)
        if cell_there is None:
            return False
        if cells[cell_there]() is not None:
            return True
        alive = [cells[cell]() for cell in range(cell_there, len(cells))]
        return place in [_storage_of(tensor) for tensor in alive if tensor is not None]

    def _go_to(self, step: Step) -> None:
        """This is the step that has just been taken."""
        self.step = step
        self.saved = 0
        self.path.append(step)

    def _go_back_to(self, mark: int) -> None:
        """Forget the cells that a comparison has filled which then failed."""
        del self.cells[mark:]
        self._looked_at = min(self._looked_at, mark)
        self._shared = {place: cell for place, cell in self._shared.items() if cell < mark}
        self._made = {place: cell for place, cell in self._made.items() if cell < mark}
        for cell in [key for key in self.held if type(key) is int and key >= mark]:
            del self.held[cell]

    # ---- a backward inside the block

    @property
    def may_begin_anew(self) -> bool:
        """Whether a backward inside the block, which is running, needs nothing more of what the run
        knows. In hooks, each value that is met once more would be a slot, which a rerun must make
        at the same place."""
        keeps_graph = _is_grad_enabled()  # with `create_graph` alone
        return self.hooks is None and not keeps_graph and _graph_task_id() != self._graph_task

    def begin_anew(self, holders: list[Any]) -> None:
        """Holders have what they need, so the rest of the block is like another run, as in a loop
        of training steps. Until gradients are wanted again (backward itself and an optimizer's step
        want none), nothing is recorded."""
        self._begin()
        self._holders, self.first_holder = holders, len(holders)
        self._awake, self._depth = self._here["depth"], RESTING

    def _wakes_up(self, func: Any, args: Any) -> bool:
        if self._depth != RESTING or self._here["depth"] != self._awake:
            return False
        if not _is_grad_enabled() or not self.info_of(func, args).has_tensors:
            return False
        self._depth = self._awake
        if not any(ref() is not None for ref in self._holders):
            self._holders.clear()
            self.first_holder = 0
        return True

    # ---- running a step

    def _run(self, step: Step, args: Any, kwargs: Any, mark: int) -> Any:
        """Run an operator that does more than to read tensors that are known, and to return new
        ones."""
        state: Any = None
        try:
            if step.varies:
                self._note_numbers(step, args, kwargs)
            if step.needs_preparation:
                self._prepare(step, args)
            if step.draws:
                state = self._random_state(step, args, kwargs)
            result = step.run(*args, **kwargs) if kwargs else step.run(*args)
            if type(result) is Tensor:
                self.cells.append(ref(result))
            else:
                step = self._take(step, args, kwargs, result, mark)
        except BaseException:
            self._has_failed(step, args, kwargs, mark)
            raise
        self._go_to(step)
        self._has_run(step, state, kwargs, result)
        if step.keeps or self._ask is not None:
            self._decide(step, args, kwargs, result)
        return result

    def _has_run(self, step: Step, state: Any, kwargs: Any, result: Any) -> None:
        info = step.info
        if step.draws:
            self._has_drawn(step, state, result)
        if info.gathers:
            lend(self, tensors_of(kwargs.get("out")))
        if info.custom or info.sizes_depend_on_data:
            self.shapes[step.index] = shapes_of(result)
        if step.decides:
            self._hold_decisions(step)

    def _has_failed(self, step: Step, args: Any, kwargs: dict[str, Any], mark: int) -> None:
        """An operator has raised. Nobody has seen what it has written before that."""
        self._go_back_to(mark)
        self.numbers.pop(step.index, None)
        self._recorder = None
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for place in step.info.targets:
            for tensor in tensors_of(given.get(place)):
                self._event(WRITTEN_UNSEEN, (tensor,))

    def _prepare(self, step: Step, args: Any) -> None:
        """Before an operator runs: hold what a recompute starts from, and what the operator is
        about to write."""
        for first in step.holds:
            self._hold(first)
        for cell in step.freezes:
            self._freeze(cell, step)
        for value in step.passes:
            self._pass(value, step, args)
        if step.targets and self._around is not None:
            targets = [self.cells[cell]() for cell in step.targets]
            note_written(self._around, {*map(_storage_of, targets)})
        if step.reads_metadata:
            self._note_metadata(step, args)
        if step.offset is not None:  # what a replay reads may lie elsewhere in its storage
            own = self.numbers.setdefault(step.index, {})
            own[step.offset] = args[step.offset] - args[0].storage_offset()

    def _random_state(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Where the generators stand that an operator is about to draw from."""
        if step.is_quick_draw and type(args[0]) is Tensor and args[0].is_cpu:
            return _CpuState() if self._preserve_rng_state else None
        is_custom = step.info.custom
        if is_custom:
            return generators_of(args, kwargs, self._preserve_rng_state == "all")
        return generators_of(args, kwargs, False) if self._preserve_rng_state else None

    def _has_drawn(self, step: Step, state: Any, result: Any) -> None:
        """Note from where random numbers were drawn, or keep them where that takes less memory."""
        if step.info.custom and not state.have_moved():
            return
        if self._preserve_rng_state:
            self.random[step.index] = state
        else:
            self._pending += [(True, tensor) for tensor in tensors_of(result)]

    def _note_numbers(self, step: Step, args: Any, kwargs: Any) -> None:
        given = (*args, *kwargs.values())
        self.numbers[step.index] = {place: given[place] for place in step.varies}

    def _note_metadata(self, step: Step, args: Any) -> None:
        """The operator reads only how this argument looks: if not as it did, that belongs to the
        run."""
        if not step.inputs[0].suits(args[0]):
            self.numbers[step.index] = {**self.numbers.get(step.index, {}), 0: Like(args[0])}

    def _hold(self, first: First) -> None:
        """From here on a recompute can start from what is in this cell now."""
        tensor = self.cells[first.cell]()
        if first.is_lent:
            lend(self, [tensor])
        if _torch.is_whole_parameter(tensor) and not first.copies:
            self.held[first.cell] = tensor, tensor._version
            return
        hooks = self.hooks
        # Autograd saves it before it is filled; or nobody sees whether that is so (`opaque()`).
        if first.hides or first.is_lent:
            hooks = None
        # A backward inside the block runs, which a rerun of the enclosing region may meet at
        # another time.
        if self._here["depth"] != self._depth or _graph_task_id() != self._graph_task:
            hooks = None
        held = self._hold_as(first.cell, tensor, hooks, first.name, "an input")
        held.is_parameter |= first.is_lent
        if first.copies:
            held.freeze(lambda: _torch.copy(tensor))

    def _hold_as(
        self, key: Any, tensor: Tensor, hooks: Any, name: Any, role: object = None
    ) -> Held:
        try:
            held = hold(tensor, hooks, name, role)
        except BaseException:  # of a hook of the user: the block may go on
            self.held[key] = hold(tensor, None, name, role)
            raise
        self.held[key] = held
        return held

    def _pass(self, value: Value, step: Step, args: Any) -> None:
        """The memory of a kept value is about to be written: hold a copy, unless only other parts
        are."""
        held = self.held.get(value)
        if held is None:
            return
        tensor = held.packed if type(held) is Aliased else self.cells[value[0]]()
        written = [args[place] for place in step.info.targets if type(place) is int]
        is_seen = tensor is not None and 0 < len(written) == len(step.info.targets)
        if is_seen and not any(_torch.overlap(tensor, target) for target in tensors_of(written)):
            self._pending.append((PASSED, held))
        else:
            self._freeze(value, step)

    def _freeze(self, key: Any, step: Step) -> None:
        """What is held is about to be written: hold a copy."""
        held = self.held.get(key)
        if type(held) is tuple:
            parameter, version = held
            held = self.held[key] = Aliased(parameter, "a parameter", version=version)
        if held is None:
            return
        # Custom operators count versions up before they run.
        if step.info.custom or not held.is_stale:
            tensor = self.cells[key if type(key) is int else key[0]]()
            held.freeze(None if tensor is None else lambda: _torch.copy(tensor))

    # ---- what autograd saves

    def announce(self, tensor: Tensor) -> None:
        """A region inside is about to take this as an input: what is saved next is an alias."""
        self._announced = tensor

    def save(self, tensor: Tensor) -> Any:
        """What a holder needs to bring `tensor` back."""
        if self._announced is not None:
            tensor, self._announced = self._announced, None
            return self._save_input(tensor)
        if self._pending:
            self.settle()
        saves, place = self.step.saves, self.saved
        if place < len(saves):  # the usual case
            slot = saves[place]
            if slot.is_usual and self.cells[slot.cell]() is tensor and self._save_at is None:
                self.saved = place + 1
                if slot.counts:
                    self.saved_bytes += _torch.memory_size(tensor)
                return slot
        return self._save(tensor)

    def _save(self, tensor: Tensor) -> Any:
        """The same for whatever is saved, as a part of another tensor or as an input, too."""
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            return self._save_parts(tensor)
        saves, place = self.step.saves, self.saved
        if place < len(saves):
            slot = saves[place]
            first = slot.first
            is_same = (
                self.cells[slot.cell]() is tensor if first is None else self._meets(first, tensor)
            )
            if is_same and (slot.joins, slot.is_read) == (self._joins, self.is_read):
                return self._save_in(slot, tensor)
            if is_same and first is not None:
                self._go_back_to(slot.cell)
        return self._save_something_new(tensor)

    def _save_input(self, tensor: Tensor) -> Any:
        """The same for what a region inside reads, while autograd saves also what is to be filled
        yet."""
        self.is_read = True
        try:
            return self._save(tensor)
        finally:
            self.is_read = False

    def _save_parts(self, tensor: Any) -> Wrapped:
        """A wrapper subclass is saved part by part."""
        is_part = self._joins

        def save(part: Tensor) -> Any:
            saved = self._save(part)
            self._joins = True
            return saved

        try:
            return Wrapped(tensor, save)
        finally:
            self._joins = is_part

    def _save_something_new(self, tensor: Tensor) -> Any:
        self.own_program()
        step = self.step
        if any((step.next, step.plan, self.saved != len(step.saves))):
            self._branch()
            return self._save(tensor)
        recorder = self._recorded()
        slot = recorder.slot(tensor)
        slot.joins, slot.is_read = self._joins, self.is_read
        slot.is_usual = not any((slot.first, slot.joins, slot.is_read))
        self.cells += [ref(tensor)] * (slot.first is not None)
        step.saves.append(slot)
        return self._save_in(slot, tensor)

    def _save_in(self, slot: Slot, tensor: Tensor) -> Slot:
        self.saved += 1
        for first in slot.holds:
            self._hold(first)
        if slot.counts:
            self.saved_bytes += _torch.memory_size(tensor)
        if self._save_at is not None:
            self.keep_at(tensor, self._save_at)
        return slot

    def _branch(self) -> Step:
        """After as many saves as there are now, the run goes another way than the step knows."""
        step = self.step
        for known in step.next:
            if known.event is FEWER_SAVES and known.args[0] == self.saved:
                break
        else:
            self.own_program()
            if self.step is not step:
                return self.step
            known = self.program.add(self._fewer_saves())
        self._go_to(known)
        return known

    def finish_step(self) -> None:
        """Nothing more is saved after the last step."""
        while self.saved != len(self.step.saves):
            self._branch()

    def _fewer_saves(self) -> Step:
        step = Step(self.step, None)
        step.event, step.effect, step.args = FEWER_SAVES, True, [self.saved]
        return step

    # ---- recording

    def own_program(self) -> None:
        """Before the program changes. While a run in another thread changes it, this one goes on in
        a program of its own, which nobody follows, from a step that has no next one."""
        if self.program.is_written_by(self):
            return
        self.program, self.is_alone = Program(), True
        self.program.writer = ref(self)
        self._go_to(self._fewer_saves())  # which the step before does not know

    def _recorded(self) -> Recorder:
        recorder = self._recorder
        # It has followed in between.
        if recorder is None or len(recorder.memory_of) != len(self.cells):
            recorder = self._recorder = Recorder(self)
        return recorder

    def _do_something_new(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if INDUCTOR in _modules and not self.sees_compiled_code:
            see_compiled_code(self)
            return self.__torch_dispatch__(func, types, args, kwargs)
        info = self.info_of(func, args)
        if info.is_passed or not info.has_tensors:
            return info.run(*args, **kwargs)
        mark = len(self.cells)
        self.own_program()
        step = self._with_other_numbers(func, args, kwargs)
        if step is not None:
            return self._run(step, args, kwargs, mark)
        recorder = self._recorded()
        step = recorder.step(info, func, args, kwargs)
        self.cells += [ref(tensor) for tensor in recorder.met]
        if self.note is not None:
            step.note = self.note()
        result = self._run(step, args, kwargs, mark)
        recorder.has_run(step, tensors_of(result))
        self._hold_decisions(step)
        if self.placement is not None:
            step.gone = recorder.gone()
            step.flops = _torch.flops_of(func, args, kwargs, result)
        self.program.add(step)
        return result

    def info_of(self, func: Any, args: Any) -> Info:
        return INFOS.get(id(func)) or Info(func)

    def _with_other_numbers(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Step | None:
        """A known next step that differs in numbers alone. It will not compare them any more."""
        mark = len(self.cells)
        call = func, _is_grad_enabled(), len(args), (*kwargs,)
        given = (*args, *kwargs.values())
        for step in self.step.next:
            if step.call != call:
                continue
            others = []
            for place, (known, arg) in enumerate(zip(step.args, given, strict=True)):
                if self._matches(known, arg):
                    continue
                if not _are_numbers(known, arg):
                    break  # what follows may name a cell that this argument has not taken
                others.append(place)
            else:
                step.vary(others)
                return step
            self._go_back_to(mark)
        return None

    # ---- events

    def _event(
        self, event: str, args: tuple[Any, ...] = (), results: tuple[Tensor, ...] = ()
    ) -> Step:
        """Something has happened between two steps."""
        following = self._following()
        mark = len(self.cells)
        for known in following:
            if known.event is event:
                if all(map(self._matches, known.args, args)):
                    self.cells += map(ref, results)
                    break
                self._go_back_to(mark)
        else:
            self.own_program()
            recorder = self._recorded()
            known = recorder.event(event, args)
            self.cells += map(ref, recorder.met)
            recorder.has_run(known, results)
            self.cells += map(ref, results)
            self.program.add(known)
        for cell in known.freezes:
            self._freeze(cell, known)
        self._go_to(known)
        return known

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold a value: recompute starts from it, and never crosses it."""
        self.keep_at(tensor, self._keeper)
        return tensor

    def keep_at(self, tensor: Tensor, mover: Mover | None) -> None:
        """The same; `mover` says where, None: as an input."""
        if hasattr(tensor, "__tensor_flatten__"):
            for part in _torch.plain_parts(tensor):
                self.keep_at(part, mover)
            return
        if not _has_storage(tensor):
            return
        step = self._event(KEEP, (tensor,), (tensor,))
        if not step.effect:
            self._hold_as(step.first_cell, tensor, self._taker(mover, tensor), "a kept tensor")
            self.kept_bytes += _torch.memory_size(tensor)

    def _taker(self, mover: Mover | None, tensor: Tensor) -> Any:
        """Who takes a tensor that is held: the mover, where it takes such, or the hooks."""
        return self.hooks if mover is None or not mover.takes(tensor) else mover

    def adopt(self, tensor: Tensor, slot: Slot) -> None:
        """While the block still runs, a backward inside it has brought a value back in other
        memory. Who reads that reads the value: to hold it once more would be a waste, and a slot
        that no rerun would have."""
        if type(tensor) in _torch.UNWRAPPED and _has_storage(tensor):
            self._event(BROUGHT_BACK, (slot,), (tensor,))

    def look_away(self) -> None:
        """Whatever is alive may be written unseen: what has been read of it must not change, and
        whoever reads it from here on reads something from outside."""
        self.settle()
        self._event(UNSEEN)
        super().look_away()

    def settle(self) -> None:
        """Keep what the last operator has written: it has the version now that it should have."""
        while self._pending:
            answer, tensor = self._pending.pop(0)
            if answer is PLANNED:
                self._hold_planned(*tensor)
            elif answer is DECIDED:
                self._hold_decision(tensor)
            elif answer is PASSED:
                tensor.renew()
            else:
                self._obey(answer, tensor)

    def _hold_decisions(self, step: Step) -> None:
        for value in step.decides:
            if step.writes:  # when the operator has returned, which has still to count versions up
                self._pending.append((DECIDED, value))
            else:
                self._hold_decision(value)

    def _hold_decision(self, value: Value) -> None:
        tensor = self.cells[value[0]]()
        if tensor is not None and value not in self.held:
            self._hold_as(value, tensor, None, "a decision")
            nbytes = _torch.memory_size(tensor)
            self.decided_bytes += nbytes
            self.kept_bytes += nbytes

    def _keep_planned(self, step: Step) -> None:
        """Hold what plans keep after this step: that of the last run, until this one goes another
        way."""
        plan = self.program.expected
        for each in step.keeps:
            if plan is not None and plan.drops(each[0], step):
                continue
            if step.writes:  # when the operator has returned, which has still to count versions up
                self._pending.append((PLANNED, each))
            else:
                self._hold_planned(*each)

    def _hold_planned(self, value: Value, counts: bool) -> None:
        tensor = self.cells[value[0]]()
        if tensor is None:
            return
        assert self.placement is not None
        budget, place, _ = self.placement
        if budget is not None:
            nbytes = _torch.memory_size(tensor) if counts else 0
            if self.planned_bytes + self.kept_bytes + nbytes > budget:
                return
            self.planned_bytes += nbytes
        hooks = self.hooks if place is None else self._taker(self._mover(place), tensor)
        if hooks is None and type(tensor) is Tensor:  # the usual case, past other questions
            self.held[value] = Aliased(_torch.alias(tensor), "a kept tensor")
        else:
            self._hold_as(value, tensor, hooks, "a kept tensor")

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        """The value has a name, which the innermost policy may want to keep it by."""
        if self.policy is not None:
            self._obey(self.policy.on_tag(name), tensor)
        return tensor

    def _decide(self, step: Step, args: Any, kwargs: Any, result: Any) -> None:
        """Keep what a plan, or the answer of the policy, keeps of an operator's results."""
        if step.keeps and self.holds_planned:
            self._keep_planned(step)
        if self._ask is None or step.info.ignored:
            return
        if self._inner or _graph_task_id() != self._graph_task:
            # In a backward inside, others' hooks call functions again at times that differ in a
            # rerun.
            return
        answer = self._ask(step.func, args, dict(kwargs), result)
        if answer:  # when the operator has returned, which has still to count versions up
            self._pending += [(answer, tensor) for tensor in tensors_of(result)]

    def _obey(self, answer: Answer, tensor: Tensor) -> None:
        """Do what the policy has answered."""
        if not answer:
            return
        mover = self._mover(answer) if isinstance(answer, Destination) else None
        self.keep_at(tensor, mover)
        if mover is None and self.outer is not None:
            self.outer.keep_for_inner(tensor)

    def _mover(self, destination: Destination | None) -> Mover | None:
        return (
            None if destination is None else self.movers.setdefault(destination, Mover(destination))
        )

    def once(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Replay repeats no Python, but a rerun around it does: then what the function does must
        leave no trace here, and what it returns comes from outside."""
        outer = self.outer
        while isinstance(outer, Run):
            outer = outer.outer
        if outer is None:
            return function(*args, **kwargs)
        with aside():
            return outer.once(function, args, kwargs)

    def keep_for_inner(self, tensor: Tensor) -> None:
        self.keep(tensor)
        super().keep_for_inner(tensor)

    def yield_to_inner(self, change: int) -> None:
        self._inner += change

    def close(self) -> None:
        """Drop what is needed only while the block runs."""
        try:
            self.settle()
            for mover in self.movers.values():
                mover.settle()
        finally:
            self.outer = None
            self._recorder = None

    def alive(self) -> list[int]:
        """Cells that somebody else holds."""
        return [cell for cell, tensor in enumerate(self.cells) if tensor() is not None]


def _matches_parts(run: Run, known: Parts, arg: Any) -> bool:
    if type(arg) is not known.kind or len(arg) != len(known.items):
        return False
    return all(map(run._matches, known.items, arg))


def _is_known(run: Run, known: Known, arg: Any) -> bool:
    return run.cells[known.cell]() is arg


def _matches_filling(run: Run, known: Filling, arg: Any) -> bool:
    if not _is_known(run, known, arg):
        return False
    return bool(known.covers == (arg.nbytes >= arg.untyped_storage().nbytes()))


# By the type of a template: whether an argument is what it was.
_TEMPLATES: dict[type, Callable[[Run, Any, Any], bool]] = {
    Known: _is_known,
    First: Run._meets,
    Filling: _matches_filling,
    Parts: _matches_parts,
    Varying: lambda run, known, arg: known.kind is type(arg) and _is_plain(arg),
    Thing: lambda run, known, arg: known.kind is type(arg),
}


def _are_same(known: Any, arg: Any) -> bool:
    """Whether two arguments that hold no tensor are the same."""
    kind = type(known)
    if type(arg) is not kind or kind in (Slot, torch.ScriptObject):
        return False
    if kind in (float, complex, list, tuple):  # 0.0 is not -0.0, nor 0
        return bool(_bits(known) == _bits(arg))
    return bool(known == arg)


def _bits(number: Any) -> Any:
    """What tells numbers apart that are equal, and nan from nan."""
    if type(number) is float:
        return struct.pack("d", number)
    if type(number) is complex:
        return _bits(number.real), _bits(number.imag)
    return [*map(_bits, number)] if type(number) in (list, tuple) else repr(number)


def _are_numbers(known: Any, arg: Any) -> bool:
    """Whether two arguments are plain numbers, or sizes, of one kind."""
    return type(known) is type(arg) and _is_plain(known) and _is_plain(arg)


def _is_plain(number: Any) -> bool:
    if type(number) in (list, tuple, torch.Size):
        return {*map(type, number)} <= {int, float}
    return type(number) in (int, float, complex)


def _dispatches(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor has a `__torch_dispatch__` of its own. (A `DeviceMesh` comes by,
    too: no tensor.)"""
    return getattr(kind, "__torch_dispatch__", _plain_dispatch) is not _plain_dispatch


def _leave_to_subclass(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if any(issubclass(kind, _torch.FakeTensor) for kind in types):
        return func(*args, **kwargs)  # their own mode is at work, to find out shapes
    return NotImplemented  # the subclass takes itself apart, and plain tensors come by


class _CpuState:
    """Where the generator of the CPU stood."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = _torch.get_cpu_state()

    @property
    def states(self) -> list[Tensor]:
        return [self.state]

    def enter(self, undo: Any) -> None:
        if all(function is not _torch.set_cpu_state for function, _ in undo):
            undo.append((_torch.set_cpu_state, _torch.get_cpu_state()))
        _torch.set_cpu_state(self.state)


class Wrapped:
    """A wrapper subclass, taken apart into slots."""

    def __init__(self, tensor: Any, save: Callable[[Tensor], Any]) -> None:
        names, self.context = tensor.__tensor_flatten__()
        self.kind = type(tensor)
        self.size, self.stride = tensor.size(), tensor.stride()
        parts = {name: getattr(tensor, name) for name in names}  # a `DeviceMesh` may be one of them
        self.parts = {
            name: save(part) if isinstance(part, Tensor) else part for name, part in parts.items()
        }


def shapes_of(result: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_of(result)]


def slots_of(saved: Any) -> Iterable[Slot]:
    """The slots behind what a holder saved: one for a plain tensor."""
    if type(saved) is Slot:
        return (saved,)
    if type(saved) is Wrapped:
        return [slot for part in saved.parts.values() for slot in slots_of(part)]
    return ()
