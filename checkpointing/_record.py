"""Runs: a block follows its program, and records what is new.

The mode sits below autograd, autocast and function modes, where every tensor is plain data. An operator call that does
as a known next step does *is* that step; otherwise a new step is recorded and the run goes on from there. A tensor is
known by the identity of its object, through weak references: torch keeps the Python object of a tensor as long as the
tensor lives, so a live reference is proof.

Following is `__torch_dispatch__`, `_matches` and `save`. Recording looks at storages and at the operator's schema, to
find who wrote to the memory that an argument uses; that is `_Recorder`. It may take its time: it runs once for each
new step, in all runs together.

Invariant: replaying a step on its inputs gives the bits that it gave the first time. Where that cannot be promised,
the run holds the tensor: memory that existed before, memory that is read before a step wrote to it, memory that
somebody else writes.

Rejected: holding results strongly while recording. It changes what torch does, and what it saves.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import _torch
from ._ambient import read_switches
from ._compiled import INDUCTOR, WRITTEN_UNSEEN, see_compiled_code
from ._engine import is_parameter, root_of
from ._gathered import lend
from ._held import Aliased, Held, hold, note_written
from ._offload import Destination, Mover
from ._ops import INFOS, Info, generators_of, tensors_of
from ._program import NOT_WRITTEN, Filling, First, Known, Like, Parts, Program, Slot, Step, Thing, Value
from ._region import Region, aside, thread

# What to do with a value: False to recompute it, True to keep it, or where it is kept.
Answer = bool | Destination


class Places(NamedTuple):
    """Where a policy puts things about which it is not asked; None: where they would be without it."""

    kept: Destination | None  # what `keep` is given
    saved: Destination | None  # all that autograd saves, which is then kept
    inputs: Destination | None


class Placement(NamedTuple):
    """What the user asks of a plan."""

    budget: int | None  # bytes that may be kept
    place: Destination | None = None  # where they are kept


NOWHERE = Places(None, None, None)

# Events: what else happens between two steps.
KEEP = "keep"
BROUGHT_BACK = "brought back"  # a backward inside the block has made this tensor again
UNSEEN = "unseen"  # anything alive may have been written
FEWER_SAVES = "fewer saves"  # what autograd saves after the step before differs from here on
PLANNED = "planned"

# What is known of a memory:
MADE = "made by recorded operators"
UNFILLED = "allocated, and not yet filled by a recorded operator"
OUTSIDE = "from outside, or written from there"

# In place of the cell that an unknown tensor shares its memory with:
ON_MADE_MEMORY = -2
NO_MEMORY = -3  # efficient zeros, for which operators run in another way

RESTING = -1  # no depth of recomputes

_Parameter = nn.Parameter
_plain_dispatch = Tensor.__torch_dispatch__
_is_grad_enabled, _graph_task_id = torch.is_grad_enabled, _torch.graph_task_id
_storage_id, _has_storage = _torch.storage_id, _torch.has_storage
_EXACT = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_NUMBERS = frozenset({int, float, complex, list, tuple, torch.Size})
_NOTHING: dict[str, Any] = {}
_modules = sys.modules


class Run(TorchDispatchMode, Region):
    """One execution of a block."""

    supports_higher_order_operators = True
    is_over = False
    is_alone = False  # whether its program is its own
    is_checked = False  # whether values are compared when they come back
    sees_compiled_code = sees_gathering = False

    def __init__(
        self, program: Program, hooks: _torch.Hooks | None, preserve_rng_state: bool | str, policy: Any
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = program
        self._begin()
        self.note: Callable[[], Any] | None = None  # what to note of each operator that is recorded
        self.switches = read_switches()
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
        self._inner = 0  # how many runs have been entered just inside this one: they ask for themselves
        self.placement: Placement | None = None  # what `auto()` is asked for
        self.holds_planned = False  # whether what a plan keeps is held from the forward on
        self.first_holder = 0  # of the block's, which this has made
        self.alive: frozenset[int] = frozenset()  # cells that somebody else holds when the block has ended
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
        self.held: dict[Any, Any] = {}  # by cell, or by value if a plan keeps it: what a recompute may start from
        self.random: dict[int, Any] = {}  # by step: where the generators stood
        self.numbers: dict[int, Any] = {}  # by step: arguments that differ from the program's
        self.sizes: dict[int, list[int]] = {}  # by step: what a custom operator has made, in bytes
        self.stocks: dict[int, Any] = {}  # by slot: what a backward inside the block starts from
        self.saved = 0  # how many tensors autograd has saved since the last step
        self.saved_bytes = self.kept_bytes = self.planned_bytes = 0
        self._pending: list[tuple[Any, Any]] = []  # written just now, and to be kept
        self._recorder: _Recorder | None = None  # while something is recorded
        self._shared: dict[int, int] = {}  # by storage: the first cell from outside there
        self._made: dict[int, int] = {}  # by storage: a cell there; of so many cells:
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
        if self._here["depth"] != self._depth and not self._wakes_up(func, args):  # an operator of a recompute (rule 3)
            return func(*args, **(kwargs or _NOTHING))
        if types and any(_dispatches(kind) for kind in types):
            return _leave_to_subclass(func, types, args, kwargs)
        if self._pending:
            self.settle()
        following = self.step.next  # of another thread, which may record: read before the saves
        while self.saved != len(self.step.saves):
            following = self._branch().next
        cells = self.cells
        mark = len(cells)
        if not types:
            grad_mode = _is_grad_enabled()
            for step in following:
                if step.func is not func or step.grad_mode is not grad_mode or len(step.args) != len(args):
                    continue
                for known, arg in zip(step.args, args):  # noqa: B905  the usual cases, past one call
                    kind = type(known)
                    if kind is Known:
                        if cells[known.cell]() is not arg:
                            break
                    elif known is not arg and not self._matches(known, arg):
                        break
                else:
                    if (not kwargs and not step.kwargs) or self._matches_keywords(step.kwargs, kwargs or _NOTHING):
                        if step.is_special:
                            return self._run(step, args, kwargs, mark)
                        result = step.run(*args, **kwargs) if kwargs else step.run(*args)
                        if type(result) is Tensor:
                            cells.append(ref(result))
                        else:
                            step = self._take(step, args, kwargs, result, mark)
                        self.step = step
                        self.saved = 0
                        self.path.append(step)
                        if self._ask is not None:
                            self._decide(step, args, kwargs, result)
                        return result
                if len(cells) > mark:
                    self._go_back_to(mark)
        return self._do_something_new(func, types, args, kwargs or _NOTHING)

    def _take(self, step: Step, args: Any, kwargs: Any, result: Any, mark: int) -> Step:
        """Put the tensors of a result into the next cells. Returns the step that this was: with as many results."""
        tensors = tensors_of(result)
        if step.count is not None and len(tensors) != step.count:  # `split`, `unbind`: as many as there is room for
            step = self._with_other_results(step, args, kwargs or _NOTHING, tensors, mark)
        self.cells += map(ref, tensors)
        return step

    def _with_other_results(self, step: Step, args: Any, kwargs: Any, tensors: list[Tensor], mark: int) -> Step:
        self.numbers.pop(step.index, None)
        for other in self.step.next:
            self._go_back_to(mark)
            if other.func is step.func and other.count == len(tensors) and other.grad_mode is step.grad_mode:
                is_same = len(other.args) == len(args) and all(map(self._matches, other.args, args))
                if is_same and self._matches_keywords(other.kwargs, kwargs):
                    return other
        self._go_back_to(mark)
        assert step.info is not None
        recorder = self._record()
        step = recorder.step(step.info, step.func, args, kwargs)
        self.cells += map(ref, recorder.met)
        recorder.has_run(step, tensors)
        return self.program.add(step)

    def _matches(self, known: Any, arg: Any) -> bool:
        """Whether an argument is what it was."""
        if known is arg:
            return True
        kind = type(known)
        if kind is Known:
            return self.cells[known.cell]() is arg
        if kind is First:
            return isinstance(arg, Tensor) and self._meets(known, arg)
        if kind is Filling:
            is_same = self.cells[known.cell]() is arg
            return is_same and known.covers == (arg.nbytes >= arg.untyped_storage().nbytes())
        if kind is Parts:
            items = known.items
            return type(arg) is known.kind and len(arg) == len(items) and all(map(self._matches, items, arg))
        if kind is Thing:
            return type(arg) is known.kind
        if type(arg) is not kind or kind is Slot or kind is torch.ScriptObject:
            return False
        if kind is float or kind is complex:  # the same bits: 0.0 is not -0.0
            return repr(known) == repr(arg)
        return bool(known == arg)

    def _matches_keywords(self, known: Any, kwargs: dict[str, Any]) -> bool:
        known = known or _NOTHING
        return known.keys() == kwargs.keys() and all(self._matches(known[name], kwargs[name]) for name in known)

    def _meets(self, first: First, tensor: Tensor) -> bool:
        """Whether a tensor comes from where it came from then. If so, it takes the next cell."""
        cells = self.cells
        if first.was is not None:
            if cells[first.was]() is not tensor:
                return False
        elif self.shares(tensor, first.cell) != first.shares or (
            not first.is_lent and is_parameter(root_of(tensor)) is not first.is_parameter
        ):
            return False
        else:
            self.take_first(tensor, first.cell)
        cells.append(ref(tensor))
        return True

    def take_first(self, tensor: Tensor, cell: int) -> None:
        """The tensor is from outside: who uses its memory from here on shares it with this cell."""
        if _has_storage(tensor):
            self._shared[_storage_id(tensor)] = self._shared_with(tensor, cell)

    def shares(self, tensor: Tensor, cell: int) -> int:
        """With which cell from outside an unknown tensor shares its memory: with `cell`, if with none."""
        if not _has_storage(tensor):
            return cell
        shared = self._shared_with(tensor, cell)
        if shared == cell and type(tensor) is not _Parameter:
            if self._is_made(_storage_id(tensor)):
                return ON_MADE_MEMORY
            if _torch.is_zeros(tensor):
                return NO_MEMORY
        return shared

    def _shared_with(self, tensor: Tensor, cell: int) -> int:
        shared = self._shared.get(_storage_id(tensor), cell)
        is_there = shared >= len(self.cells) or self.cells[shared]() is not None or shared in self.held
        return shared if is_there else cell

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
            if tensor is not None and _has_storage(tensor):
                made.setdefault(_storage_id(tensor), cell)
        self._looked_at = len(cells)
        cell_there = made.get(place)
        if cell_there is None:
            return False
        if cells[cell_there]() is not None:
            return True
        alive = [cells[cell]() for cell in range(cell_there, len(cells))]
        return any(t is not None and _has_storage(t) and _storage_id(t) == place for t in alive)

    def _go_back_to(self, mark: int) -> None:
        """Forget the cells that a comparison has filled which then failed."""
        del self.cells[mark:]
        self._looked_at = min(self._looked_at, mark)
        self._shared = {place: cell for place, cell in self._shared.items() if cell < mark}
        self._made = {place: cell for place, cell in self._made.items() if cell < mark}

    # ---- a backward inside the block

    @property
    def may_begin_anew(self) -> bool:
        """Whether a backward inside the block, which is running, needs nothing more of what the run knows. In hooks,
        each value that is met once more would be a slot, which a rerun must make at the same place."""
        keeps_graph = _is_grad_enabled()  # with `create_graph` alone
        return self.hooks is None and not keeps_graph and _graph_task_id() != self._graph_task

    def begin_anew(self, holders: list[Any]) -> None:
        """Holders have what they need, so the rest of the block is like another run, as in a loop of training steps.
        Until gradients are wanted again (backward itself and an optimizer's step want none), nothing is recorded."""
        self._begin()
        self._holders, self.first_holder = holders, len(holders)
        self._awake, self._depth = self._here["depth"], RESTING

    def _wakes_up(self, func: Any, args: Any) -> bool:
        rests = self._depth == RESTING and self._here["depth"] == self._awake
        if not rests or not _is_grad_enabled() or not self.info_of(func, args).has_tensors:
            return False
        self._depth = self._awake
        if not any(ref() is not None for ref in self._holders):
            self._holders.clear()
            self.first_holder = 0
        return True

    # ---- running a step

    def _run(self, step: Step, args: Any, kwargs: Any, mark: int) -> Any:
        """Run an operator that does more than to read tensors that are known, and to return new ones."""
        try:
            return self._run_special(step, args, kwargs or _NOTHING, mark)
        except BaseException:
            if self.step is not step:
                self._go_back_to(mark)
                self._recorder = None
            raise

    def _run_special(self, step: Step, args: Any, kwargs: Any, mark: int) -> Any:
        for first in step.holds:
            self._hold(first)
        for cell in step.freezes:
            self._freeze(cell, step)
        if step.targets and self._around is not None:
            targets = [self.cells[cell]() for cell in step.targets]
            note_written(self._around, {_storage_id(tensor) for tensor in targets if _has_storage(tensor)})
        if step.likes:
            self._note_metadata(step, args)
        state: Any = None
        if step.draws:
            info = step.info
            assert info is not None
            if step.is_quick_draw and type(args[0]) is Tensor and args[0].is_cpu:
                state = _CpuState() if self._preserve_rng_state else None
            elif self._preserve_rng_state or info.custom:
                state = generators_of(args, kwargs, info.custom and self._preserve_rng_state == "all")
        result = step.run(*args, **kwargs) if kwargs else step.run(*args)
        if type(result) is Tensor:
            self.cells.append(ref(result))
        else:
            step = self._take(step, args, kwargs, result, mark)
        self.step = step
        self.saved = 0
        self.path.append(step)
        if step.keeps and self.holds_planned:
            self._keep_planned(step)
        if step.draws:
            self._has_drawn(step, state, result)
        if step.effect and step.info.gathers:  # type: ignore[union-attr]
            lend(self, tensors_of((kwargs or _NOTHING).get("out")))
        if self._ask is not None:
            self._decide(step, args, kwargs, result)
        return result

    def _has_drawn(self, step: Step, state: Any, result: Any) -> None:
        """Note from where random numbers were drawn, or keep them where that takes less memory."""
        assert step.info is not None
        if step.info.custom:
            self.sizes[step.index] = sizes_of(result)
            if not state.have_moved():
                return
        if self._preserve_rng_state:
            self.random[step.index] = state
        else:
            self._pending += [(True, tensor) for tensor in tensors_of(result)]

    def _note_metadata(self, step: Step, args: Any) -> None:
        """The operator reads only how this argument looks: that belongs to the run."""
        own = list(self.numbers.get(step.index) or step.inputs)
        for place in step.likes:
            own[place] = Like(args[place])
        self.numbers[step.index] = own

    def _hold(self, first: First) -> None:
        """From here on a recompute can start from what is in this cell now."""
        tensor = self.cells[first.cell]()
        if first.is_lent:
            lend(self, [tensor])
        if type(tensor) is _Parameter and not first.copies:
            self.held[first.cell] = tensor, tensor._version
            return
        hooks = self.hooks
        if first.hides or first.is_lent or self._here["depth"] != self._depth or _graph_task_id() != self._graph_task:
            # Autograd saves it before it is filled; or nobody sees whether that is so (`opaque()`); or a backward
            # inside the block runs, which a rerun of the enclosing region may meet at another time.
            hooks = None
        held = self._hold_as(first.cell, tensor, hooks, first.name, "an input")
        held.is_parameter |= first.is_lent
        if first.copies:
            held.freeze(lambda: _torch.copy(tensor))

    def _hold_as(self, key: Any, tensor: Tensor, hooks: Any, name: Any, role: object = None) -> Held:
        try:
            held = hold(tensor, hooks, name, role)
        except BaseException:  # of a hook of the user: the block may go on
            self.held[key] = hold(tensor, None, name, role)
            raise
        self.held[key] = held
        return held

    def _freeze(self, cell: int, step: Step) -> None:
        """What is held there is about to be written: hold a copy."""
        held = self.held.get(cell)
        if type(held) is tuple:
            parameter, version = held
            held = self.held[cell] = Aliased(parameter, "a parameter", version=version)
        # Custom operators count versions up before they run.
        if held is not None and (not held.is_stale or (step.info is not None and step.info.custom)):
            tensor = self.cells[cell]()
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
        if type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            return self._save_parts(tensor)
        saves, place = self.step.saves, self.saved
        if place < len(saves):
            slot = saves[place]
            first = slot.first
            is_same = self.cells[slot.cell]() is tensor if first is None else self._meets(first, tensor)
            if is_same and (slot.joins is not self._joins or slot.is_read is not self.is_read):
                self._go_back_to(slot.cell if first is not None else len(self.cells))
            elif is_same:
                if first is not None or slot.counts or self._save_at is not None:
                    return self._save_in(slot, tensor)
                self.saved = place + 1
                return slot
        return self._save_something_new(tensor)

    def _save_input(self, tensor: Tensor) -> Any:
        """The same for what a region inside reads, while autograd saves also what is to be filled yet."""
        self.is_read = True
        try:
            return self.save(tensor)
        finally:
            self.is_read = False

    def _save_parts(self, tensor: Any) -> Wrapped:
        """A wrapper subclass is saved part by part."""
        is_part = self._joins

        def save(part: Tensor) -> Any:
            saved = self.save(part)
            self._joins = True
            return saved

        try:
            return Wrapped(tensor, save)
        finally:
            self._joins = is_part

    def _save_something_new(self, tensor: Tensor) -> Any:
        self.own_program()
        step = self.step
        if step.next or step.plan is not None or self.saved != len(step.saves):
            self._branch()
            return self.save(tensor)
        recorder = self._record()
        slot = recorder.slot(tensor)
        slot.joins, slot.is_read = self._joins, self.is_read
        self.cells += [ref(tensor)] * (slot.first is not None)
        step.saves.append(slot)
        return self._save_in(slot, tensor)

    def _save_in(self, slot: Slot, tensor: Tensor) -> Slot:
        first = slot.first
        self.saved += 1
        if first is not None and first.holds:
            self._hold(first)
        if slot.counts:
            self.saved_bytes += tensor.untyped_storage().nbytes() if _has_storage(tensor) else 0
        if self._save_at is not None:
            self.keep_at(tensor, self._save_at)
        return slot

    def _branch(self) -> Step:
        """After as many saves as there are now, the run goes another way than the step knows."""
        step = self.step
        for known in step.next:
            if known.event is FEWER_SAVES and known.args == (self.saved,):
                break
        else:
            if not self.own_program():
                return self.step
            known = self.program.add(self._fewer_saves())
        self.step = known
        self.saved = 0
        self.path.append(known)
        return known

    def finish_step(self) -> None:
        """Nothing more is saved after the last step."""
        if self.step.plan is None:
            self.own_program()
        while self.saved != len(self.step.saves):
            self._branch()

    def _fewer_saves(self) -> Step:
        step = Step(self.step, None, (self.saved,))
        step.event, step.effect = FEWER_SAVES, True
        return step

    # ---- recording

    def own_program(self) -> bool:
        """Before the program changes. While a run in another thread changes it, this one goes on in a program of its
        own, which nobody follows. Returns whether nothing had to be done for that."""
        if self.program.is_written_by(self):
            return True
        self.program, self.is_alone = Program(), True
        self.program.writer = ref(self)
        step = self._fewer_saves()  # which the step before does not know
        self.step, self.saved = step, 0
        self.path.append(step)
        return False

    def _record(self) -> _Recorder:
        self.own_program()
        recorder = self._recorder
        if recorder is None or len(recorder.memory_of) != len(self.cells):  # it has followed in between
            recorder = self._recorder = _Recorder(self)
        return recorder

    def _do_something_new(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if INDUCTOR in _modules and not self.sees_compiled_code:
            see_compiled_code(self)
            return self.__torch_dispatch__(func, types, args, kwargs)
        info = self.info_of(func, args)
        if info.name in _PASSED or not info.has_tensors:
            return info.run(*args, **kwargs)
        mark = len(self.cells)
        step = self._with_own_numbers(func, args, kwargs)
        if step is not None:
            return self._run(step, args, kwargs, mark)
        recorder = self._record()
        step = recorder.step(info, func, args, kwargs)
        self.cells += [ref(tensor) for tensor in recorder.met]
        if self.note is not None:
            step.note = self.note()
        result = self._run(step, args, kwargs, mark)
        recorder.has_run(step, tensors_of(result))
        formula = None if self.placement is None else _torch.flop_formula(func)
        if formula is not None:
            step.flops = formula(args, kwargs, result)
        if self.placement is not None:
            step.gone = recorder.gone()
        self.program.add(step)
        return result

    def info_of(self, func: Any, args: Any) -> Info:
        return INFOS.get(id(func)) or Info(func)

    def _with_own_numbers(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Step | None:
        """A known next step that differs in numbers alone: the run has its own."""
        mark = len(self.cells)
        grad_mode = _is_grad_enabled()
        for step in self.step.next:
            if step.func is not func or step.grad_mode is not grad_mode or len(step.args) != len(args):
                continue
            if (step.kwargs or _NOTHING).keys() != kwargs.keys():
                continue
            pairs = [*zip(step.args, args, strict=True), *((v, kwargs[k]) for k, v in (step.kwargs or {}).items())]
            if all(self._matches(known, arg) or _are_numbers(known, arg) for known, arg in pairs):
                self.numbers[step.index] = [
                    arg if given is known and _are_numbers(known, arg) else given
                    for given, known, arg in zip(step.inputs, step.args, args, strict=True)
                ]
                if kwargs:
                    self.numbers[step.index].append(
                        {k: kwargs[k] if _are_numbers(v, kwargs[k]) else v for k, v in step.named.items()}
                    )
                return step
            self._go_back_to(mark)
        return None

    # ---- events

    def _event(self, event: str, args: tuple[Any, ...] = (), results: tuple[Tensor, ...] = ()) -> Step:
        """Something has happened between two steps."""
        following = self.step.next
        while self.saved != len(self.step.saves):
            following = self._branch().next
        mark = len(self.cells)
        for known in following:
            if known.event is event:
                if all(map(self._matches, known.args, args)):
                    self.cells += map(ref, results)
                    break
                self._go_back_to(mark)
        else:
            recorder = self._record()
            known = recorder.event(event, args)
            self.cells += map(ref, recorder.met)
            recorder.has_run(known, results)
            self.cells += map(ref, results)
            self.program.add(known)
        for cell in known.freezes:
            self._freeze(cell, known)
        self.step = known
        self.saved = 0
        self.path.append(known)
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
            hooks = self.hooks if mover is None or not mover.takes(tensor) else mover
            self._hold_as(step.first_cell, tensor, hooks, "a kept tensor")
            self.kept_bytes += tensor.untyped_storage().nbytes()

    def adopt(self, tensor: Tensor, slot: Slot) -> None:
        """While the block still runs, a backward inside it has brought a value back in other memory. Who reads that
        reads the value: to hold it once more would be a waste, and a slot that no rerun would have."""
        if type(tensor) is Tensor and _has_storage(tensor):
            self._event(BROUGHT_BACK, (slot,), (tensor,))

    def look_away(self) -> None:
        """Whatever is alive may be written unseen: what has been read of it must not change, and whoever reads it from
        here on reads something from outside."""
        self.settle()
        self._event(UNSEEN)
        super().look_away()

    def settle(self) -> None:
        """Keep what the last operator has written: it has the version now that it should have."""
        while self._pending:
            answer, tensor = self._pending.pop(0)
            if answer is PLANNED:
                self._hold_planned(*tensor)
            else:
                self._obey(answer, tensor)

    def _keep_planned(self, step: Step) -> None:
        """Hold what plans keep after this step: that of the last run, until this one goes another way."""
        plan = self.program.expected
        is_expected = plan is not None and plan.path.steps[step.index : step.index + 1] == [step]
        for each in step.keeps:
            if is_expected and each[0] not in plan.kept:
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
        budget, place = self.placement
        nbytes = 0
        if counts and _has_storage(tensor):
            nbytes = tensor.untyped_storage().nbytes()
        if budget is not None and self.planned_bytes + self.kept_bytes + nbytes > budget:
            return
        mover = None if place is None else self._mover(place)
        hooks = self.hooks if mover is None or not mover.takes(tensor) else mover
        self._hold_as(value, tensor, hooks, "a kept tensor")
        self.planned_bytes += nbytes

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        """The value has a name, which the innermost policy may want to keep it by."""
        if self.policy is not None:
            self._obey(self.policy.on_tag(name), tensor)
        return tensor

    def _decide(self, step: Step, args: Any, kwargs: Any, result: Any) -> None:
        """Ask the policy about what the operator has made."""
        info = step.info
        if self._inner or info is None or info.ignored or _graph_task_id() != self._graph_task:
            return  # in a backward inside, others' hooks call functions again at times that differ in a rerun
        answer = self._ask(step.func, args, dict(kwargs or _NOTHING), result)  # type: ignore[misc]
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
        return None if destination is None else self.movers.setdefault(destination, Mover(destination))

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay repeats no Python, but a rerun around it does: then what the function does must leave no trace here,
        and what it returns comes from outside."""
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

    def close(self) -> str:
        """Drop what is needed only while the block runs. Returns what to warn of."""
        try:
            self.settle()
            for mover in self.movers.values():
                mover.settle()
        finally:
            self.outer = None
            self._recorder = None
            if self.placement is not None:
                self.alive = frozenset([cell for cell, tensor in enumerate(self.cells) if tensor() is not None])
            self.cells = []
        return ""


_PASSED = frozenset({"aten::_nested_tensor_size", "aten::_efficientzerotensor"})


def _are_numbers(known: Any, arg: Any) -> bool:
    """Whether two arguments are plain numbers, or sizes, of one kind."""
    kind = type(known)
    if kind is not type(arg) or kind not in _NUMBERS:
        return False
    if kind in (list, tuple, torch.Size):
        return all(type(n) in (int, float) for n in (*known, *arg))
    return True


def _dispatches(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor has a `__torch_dispatch__` of its own. (A `DeviceMesh` comes by, too: no tensor.)"""
    return getattr(kind, "__torch_dispatch__", _plain_dispatch) is not _plain_dispatch


def _leave_to_subclass(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if any(issubclass(kind, _torch.FakeTensor) for kind in types):
        return func(*args, **(kwargs or _NOTHING))  # their own mode is at work, to find out shapes
    return NotImplemented  # the subclass takes itself apart, and plain tensors come by


class _CpuState:
    """Where the generator of the CPU stood."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = _torch.get_cpu_state()

    @property
    def states(self) -> list[Tensor]:
        return [self.state]

    @property
    def nbytes(self) -> int:
        return self.state.nbytes

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
        self.parts = {name: save(part) if isinstance(part, Tensor) else part for name, part in parts.items()}


def sizes_of(result: Any) -> list[int]:
    """The bytes of each tensor in a result."""
    return [tensor.untyped_storage().nbytes() for tensor in tensors_of(result) if _has_storage(tensor)]


def slots_of(saved: Any) -> Iterable[Slot]:
    """The slots behind what a holder saved: one for a plain tensor."""
    if type(saved) is Slot:
        return (saved,)
    if type(saved) is Wrapped:
        return [slot for part in saved.parts.values() for slot in slots_of(part)]
    return ()


def with_saves(run: Run) -> Iterable[tuple[Step, list[Slot]]]:
    """The steps of a run so far, from the root, each with what autograd has saved after it."""
    steps = [run.root, *run.path]
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if after is None:
            yield step, step.saves[: run.saved]
        else:
            yield step, step.saves[: after.args[0]] if after.event is FEWER_SAVES else step.saves


class _Recorder:
    """What recording knows: which memory each cell uses, and what has become of it. It follows from the path."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._start()
        self.memory_of: list[int] = []  # by cell
        self._born: list[float] = []  # by cell: after which step; the halves are what was saved after a step
        self._state: dict[int, str] = {}  # by memory
        self._written: dict[int, int] = {}  # by memory: the last step that wrote to it
        self._writers: dict[int, list[Step]] = defaultdict(list)  # by memory
        self._layouts: list[Any] = []  # by cell: its type, and how it lies in memory
        self._again: set[int] = set()  # memory from outside that the block writes
        self._lost: set[int] = set()  # cells that steps have filled which are not replayed
        self._held: set[int] = set()  # cells that are held, and views of them
        self._starts: set[int] = set()  # cells that are held
        self._copied: set[int] = set()  # cells that hold a copy
        self._read: set[int] = set()  # held cells that an operator reads
        self._held_on: dict[int, list[int]] = defaultdict(list)  # by memory: what to copy before it is written
        self._cells_on: dict[int, list[int]] = defaultdict(list)  # by memory
        self._parameters: set[int] = set()  # memories
        self._lent: set[int] = set()  # memories of gathered parameters
        self._saved: set[int] = set()  # memories that autograd has saved
        self._names: dict[int, int] = {}  # by id of a tensor: its cell
        self._places: dict[int, int] = {}  # by storage: its memory
        self._sizes: dict[int, int] = {}  # by memory that may still live: bytes
        for step, saves in with_saves(run):
            for first in step.firsts:
                self._add_first(first, step.index)
            self._add_results(step)
            for slot in saves:
                self._add_slot(slot, step.index)

    def _add_first(self, first: First, born: float) -> None:
        memory, cell = first.memory, first.cell
        self._state.setdefault(memory, OUTSIDE)
        if first.shares == ON_MADE_MEMORY:
            self._state[memory] = OUTSIDE
        self._add_cell(cell, memory, born)
        if first.is_parameter:
            self._parameters.add(memory)
        if not first.holds:
            return
        self._held.add(cell)
        self._starts.add(cell)
        if first.copies:
            self._copied.add(cell)
        elif not first.hides:
            self._held_on[memory].append(cell)
        if first.name is not None:
            self._read.add(cell)

    def _add_results(self, step: Step) -> None:
        """Learn what a step has changed."""
        self._state.update(step.states)
        if step.info is not None and step.info.gathers:
            self._lent.update([memory for memory, _ in step.states])
        self._sizes.update(step.sizes)
        for memory in step.gone:
            self._sizes.pop(memory, None)
        for memory in step.writes:
            self._written[memory] = step.index
            self._writers[memory].append(step)
            self._held_on.pop(memory, None)
            if self._state[memory] is OUTSIDE:
                self._again.add(memory)
        self._read.update([cell for cell, _ in step.reads if cell in self._held])
        for cell, memory in step.memories:
            self._add_cell(cell, memory, step.index, is_name=step.event is not KEEP)
            if step.effect:
                self._lost.add(cell)
            elif step.is_view and self._state[memory] is OUTSIDE:
                self._held.add(cell)
        if step.event is KEEP and not step.effect:
            self._held_on[step.memories[0][1]].append(step.first_cell)
        if step.event is UNSEEN:
            for memory in self._state:
                if memory not in self._parameters:
                    self._state[memory] = OUTSIDE
                    self._written[memory] = step.index
                    self._writers[memory].append(step)
                    self._held_on.pop(memory, None)

    def _add_slot(self, slot: Slot, index: int) -> None:
        if slot.first is not None:
            self._add_first(slot.first, index + 0.5)
            if slot.is_read:  # if it was allocated here, something unseen has filled it
                self._state[slot.first.memory] = OUTSIDE
        self._saved.add(self.memory_of[slot.cell])

    def _add_cell(self, cell: int, memory: int, born: float, is_name: bool = True) -> None:
        assert cell == len(self.memory_of), "cells are filled in order"
        self.memory_of.append(memory)
        self._born.append(born)
        self._cells_on[memory].append(cell)
        tensor = self._tensor_in(cell)
        self._layouts.append((None, None) if tensor is None else (tensor.dtype, _torch.layout_of(tensor)))
        if tensor is not None and is_name:
            self._names[id(tensor)] = cell
            if _has_storage(tensor):
                self._places[_storage_id(tensor)] = memory

    def _tensor_in(self, cell: int) -> Any:
        cells = self._run.cells
        return cells[cell]() if cell < len(cells) else self.met[cell - len(cells)]

    # ---- names

    def _find(self, tensor: Tensor) -> int | None:
        """The cell of a tensor; None if it is not known."""
        cell = self._names.get(id(tensor))
        if cell is None or self._tensor_in(cell) is not tensor:
            return None
        is_moved = _has_storage(tensor) and self._places.get(_storage_id(tensor)) != self.memory_of[cell]
        return None if is_moved else cell  # `tensor.data = ...` has given it other memory

    def _memory_at(self, tensor: Tensor) -> int | None:
        """The known memory that a tensor uses, as far as something there is alive."""
        memory = self._places.get(_storage_id(tensor)) if _has_storage(tensor) else None
        if memory is None or all(self._tensor_in(cell) is None for cell in self._cells_on[memory]):
            return None
        return memory

    def _value(self, cell: int) -> Value:
        """What is in a cell: as the last step left it that wrote there, rather than to another part of its memory."""
        writers = self._writers[self.memory_of[cell]]
        return cell, next((step.index for step in reversed(writers) if cell not in step.spares), NOT_WRITTEN)

    def _spared(self, cell: int) -> frozenset[int]:
        """The cells on its memory that a write to this one leaves alone."""
        (kind, layout), others = self._layouts[cell], self._cells_on[self.memory_of[cell]]
        layouts = {other: self._layouts[other] for other in others}
        return frozenset([n for n, (its, lies) in layouts.items() if its is kind and _torch.lie_apart(layout, lies)])

    def _is_there(self, cell: int) -> bool:
        """Whether a replay can come by what is in a cell now."""
        memory = self.memory_of[cell]
        if cell in self._lost:
            return False
        if self._state[memory] is OUTSIDE:
            return cell in self._held and self._born[cell] > self._written.get(memory, NOT_WRITTEN)
        return self._state[memory] is MADE

    def _first(self, tensor: Tensor, was: int | None, **more: Any) -> First:
        """A new cell for a tensor."""
        cell = len(self._run.cells) + len(self.met)
        self.met.append(tensor)
        shares = cell
        memory = cell if was is None else self.memory_of[was]
        if was is None:
            shares = self._run.shares(tensor, cell)
            if shares == ON_MADE_MEMORY:
                there = self._memory_at(tensor)
                memory = cell if there is None else there
            elif shares != cell and shares != NO_MEMORY:
                memory = self.memory_of[shares]
        first = First(cell, was, shares, memory)
        first.is_parameter = is_parameter(root_of(tensor))
        first.requires_grad = tensor.requires_grad
        if memory in self._lent:
            first.is_lent = first.is_parameter = True
        elif first.is_parameter and shares == cell and self._memory_at(tensor) is not None:
            first.is_lent = True  # on memory that the block has made: gathered from one process
        for name, value in more.items():
            setattr(first, name, value)
        self._add_first(first, len(self._run.path) + (0.5 if more.get("name", 0) is None else 0))
        if was is None:
            self._run.take_first(tensor, cell)
        self._firsts.append(first)
        return first

    def _name(self, tensor: Tensor) -> Known | First:
        """The template of a tensor whose contents do not matter."""
        cell = self._find(tensor)
        return Known(cell) if cell is not None else self._first(tensor, None)

    def _read_tensor(self, tensor: Tensor, reader: Any, copies: bool = False) -> Known | First:
        """The template of a tensor whose contents an operator reads."""
        cell = self._find(tensor)
        if cell is not None and self._is_there(cell):
            memory = self.memory_of[cell]
            needs_copy = self._state[memory] is OUTSIDE and (copies or memory in self._again)
            if not needs_copy or cell in self._copied:
                self._reads.append(self._value(cell))
                return Known(cell)
        copies = copies or (cell is not None and self.memory_of[cell] in self._again)
        first = self._first(tensor, cell, holds=True, copies=copies, name=reader)
        self._reads.append((first.cell, NOT_WRITTEN))
        return first

    def _base(self, tensor: Tensor, reader: Any) -> tuple[Known | First, bool]:
        """The template of a tensor that a view is made of, and whether a replay can come by its memory."""
        cell = self._find(tensor)
        if cell is None:
            holds = self._run.hooks is None or is_parameter(root_of(tensor))
            first = self._first(tensor, None, holds=holds, name=reader)
            if holds:
                self._reads.append((first.cell, NOT_WRITTEN))
            return first, holds
        is_there = self._is_there(cell) or (cell not in self._lost and self._state[self.memory_of[cell]] is UNFILLED)
        if is_there:
            self._reads.append(self._value(cell))
        return Known(cell), is_there

    def _map(self, function: Callable[[Tensor], Any], arg: Any) -> Any:
        """A template of an argument, with `function` of the tensors in it."""
        if isinstance(arg, Tensor):
            return function(arg)
        if (type(arg) is list or type(arg) is tuple) and tensors_of(arg):
            return Parts(type(arg), [self._map(function, part) for part in arg])
        return arg

    # ---- steps

    def _start(self) -> None:
        self.met: list[Tensor] = []
        self._reads: list[Value] = []
        self._firsts: list[First] = []

    def _begin(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Step:
        run = self._run
        self._start()
        return Step(run.step, func, args, kwargs or None)

    def _end(self, step: Step) -> Step:
        step.reads, step.firsts = tuple(self._reads), tuple(self._firsts)
        step.holds = tuple([first for first in self._firsts if first.holds])
        return step

    def step(self, info: Info, func: Any, args: Any, kwargs: dict[str, Any]) -> Step:
        """What an operator is about to do."""
        step = self._begin(func, args, kwargs)
        step.info, step.grad_mode = info, _is_grad_enabled()
        step.run = info.run if not any(map(_torch.is_zeros, tensors_of(args))) else _torch.with_zeros(info.run)
        if info.ignored:
            self._step_of_view(step, args, kwargs)
        else:
            self._step_of_operator(step, info, args, kwargs)
        self._end(step)
        step.is_special = bool(
            step.effect or step.holds or step.freezes or step.likes or step.draws or step.run is not info.run
        )
        return step

    def _step_of_view(self, step: Step, args: Any, kwargs: dict[str, Any]) -> None:
        step.is_view = True
        bases = []

        def base(tensor: Tensor) -> Known | First:
            template, is_there = self._base(tensor, step.func)
            bases.append(is_there)
            return template

        step.args = step.inputs = [self._map(base, arg) for arg in args]
        step.kwargs = step.named = {name: self._map(base, arg) for name, arg in kwargs.items()} or None
        step.effect = not all(bases) or step.info.base == "set_"  # type: ignore[union-attr]

    def _step_of_operator(self, step: Step, info: Info, args: Any, kwargs: dict[str, Any]) -> None:
        func, places = step.func, info.targets
        targets = [kwargs.get(p) if type(p) is str else args[p] for p in places]
        written = [tensor for target in targets for tensor in tensors_of(target)]
        if any(self._is_unfilled(tensor) for tensor in written):
            # The operator may read one part of this memory and write to another: then it has been filled unseen.
            read = [arg for place, arg in enumerate(args) if place not in places]
            self._fill(step, [tensor for tensor in tensors_of(read) if self._is_unfilled(tensor)])
        fills = info.overwrites or info.allocates
        outside = [self._is_outside(tensor, fills) for tensor in written]
        step.effect = info.communicates or (info.inplace and all(outside))
        step.draws = info.may_draw and not step.effect
        step.is_quick_draw = not info.custom and not any(type(a) is torch.Generator for a in (*args, *kwargs.values()))

        def target(tensor: Tensor) -> Any:
            return self._target(step, tensor, fills)

        def read_it(tensor: Tensor) -> Any:
            if step.effect:
                return self._name(tensor)
            if self._is_unfilled(tensor):
                self._fill(step, [tensor])
            return self._read_tensor(tensor, func)

        def template(place: int | str, arg: Any) -> Any:
            if place in places:
                return self._map(target, arg)
            if step.effect and isinstance(arg, torch.ScriptObject):
                return Thing(type(arg))
            if step.effect or not isinstance(arg, Tensor):
                return self._map(read_it, arg)
            if place == 0 and info.metadata_only and _has_storage(arg):
                step.likes = (0,)
                return self._name(arg)
            if info.statistics is not None and place in info.statistics[0]:
                return self._statistics(step, arg, info.statistics[1] is None or args[info.statistics[1]])
            return read_it(arg)

        step.args = [template(place, arg) for place, arg in enumerate(args)]
        step.kwargs = {name: template(name, arg) for name, arg in kwargs.items()} or None
        step.inputs, step.named = [*step.args], step.kwargs
        for place in step.likes:
            step.inputs[place] = Like(args[place])
        if info.statistics is not None and (info.statistics[1] is None or args[info.statistics[1]]):
            for place in info.statistics[0]:
                step.inputs[place] = None

    def _is_unfilled(self, tensor: Tensor) -> bool:
        cell = self._find(tensor)
        return cell is not None and self._state[self.memory_of[cell]] is UNFILLED

    def _is_outside(self, tensor: Tensor, fills: bool) -> bool:
        """Whether what is written cannot be made again: it was there before, or something unseen has filled it."""
        cell = self._find(tensor)
        if cell is None or cell in self._lost:
            return True
        state = self._state[self.memory_of[cell]]
        return state is OUTSIDE or (state is UNFILLED and not fills)

    def _fill(self, step: Step, tensors: list[Tensor]) -> None:
        """Something unseen has filled these: a raw kernel, `ctypes`, NumPy."""
        for tensor in tensors:
            cell = self._find(tensor)
            assert cell is not None
            self._state[self.memory_of[cell]] = OUTSIDE
            step.states += ((self.memory_of[cell], OUTSIDE),)

    def _target(self, step: Step, tensor: Tensor, fills: bool) -> Any:
        """The template of a tensor that the operator writes."""
        info = step.info
        assert info is not None
        is_outside = self._is_outside(tensor, fills)
        if is_outside and not step.effect:  # a replay lets it write to a copy
            template: Any = self._read_tensor(tensor, step.func, copies=True)
        else:
            template = self._name(tensor)
            if not is_outside:  # after whoever wrote to its memory before, also to another part
                self._reads.append((template.cell, self._written.get(self.memory_of[template.cell], NOT_WRITTEN)))
        if is_outside:
            step.targets += (template.cell,)
        memory = self.memory_of[template.cell]
        if info.gathers:
            step.states += ((memory, OUTSIDE),)  # as it was before it had been given back, if it was there before
            return template
        state = self._state[memory]
        if not is_outside and not step.effect and state is UNFILLED:
            covers = tensor.nbytes >= tensor.untyped_storage().nbytes()
            if covers or not info.overwrites:
                step.states += ((memory, MADE),)
            if info.allocates:
                step.states += ((memory, UNFILLED),)
            if tensor._base is not None or not covers:
                template = Filling(template.cell, covers)
        elif not is_outside and info.allocates:  # `resize_`
            step.states += ((memory, UNFILLED),)
        elif step.effect and state is not OUTSIDE:
            step.states += ((memory, OUTSIDE),)
        if len(info.targets) == 1:
            step.spares = self._spared(template.cell)
        if memory not in step.writes:
            step.writes += (memory,)
            step.freezes += tuple(self._held_on[memory])
        return template

    def _statistics(self, step: Step, tensor: Tensor, updates: bool) -> Any:
        """The template of statistics that a normalisation reads, or updates without saying so."""
        if not updates:
            return self._read_tensor(tensor, step.func, copies=True)
        template = self._name(tensor)
        memory = self.memory_of[template.cell]
        step.writes += (memory,)
        step.states += ((memory, OUTSIDE),)
        # Something else than the node that saves it has read it.
        read = [cell for cell in self._held_on[memory] if cell in self._read or self._run.is_checked]
        step.freezes += tuple(read)
        return template

    def has_run(self, step: Step, results: Iterable[Tensor]) -> None:
        """What has become of it."""
        info = step.info
        results = [*results]
        step.count = len(results)
        step.first_cell = cell = len(self.memory_of)
        self.met = results
        for tensor in results:
            known = None if info is not None and info.base == "set_" else self._find(tensor)
            memory = self.memory_of[known] if known is not None else self._memory_at(tensor)
            if step.event is BROUGHT_BACK or memory is None:
                memory = cell
                state = MADE if _has_storage(tensor) and not step.effect else OUTSIDE
                if info is not None and info.allocates and state is MADE:
                    state = UNFILLED
                step.states += ((memory, state),)
                step.sizes += ((memory, tensor.untyped_storage().nbytes() if _has_storage(tensor) else 0),)
            step.memories += ((cell, memory),)
            cell += 1
        self._add_results(step)
        self.met = []

    def gone(self) -> tuple[int, ...]:
        """Memories of recorded operators that nobody holds any more."""
        gone = [m for m in self._sizes if all(self._tensor_in(cell) is None for cell in self._cells_on[m])]
        for memory in gone:
            del self._sizes[memory]
        return tuple(gone)

    def event(self, event: str, args: tuple[Any, ...]) -> Step:
        """What else has happened."""
        step = self._begin(None, args, {})
        step.event = event
        if event is KEEP:
            (tensor,) = args
            cell = self._find(tensor)
            step.effect = cell is None or not self._is_there(cell) or self._state[self.memory_of[cell]] is OUTSIDE
            if cell is not None and not step.effect:
                self._reads.append(self._value(cell))
            step.args = [self._name(tensor)]
        elif event is BROUGHT_BACK:
            (slot,) = args
            self._reads.append(slot.value)
            step.effect = self._value(slot.cell) != slot.value
        elif event is WRITTEN_UNSEEN:
            step.args = [self._name(*args)]
            memory = self.memory_of[step.args[0].cell]
            step.effect, step.writes, step.states = True, (memory,), ((memory, OUTSIDE),)
        else:
            step.effect = True
            if event is UNSEEN:
                alive = [m for m in self._held_on if m not in self._parameters]
                step.freezes = tuple([cell for memory in alive for cell in self._held_on[memory]])
        step.inputs = step.args
        return self._end(step)

    def slot(self, tensor: Tensor) -> Slot:
        """What autograd saves now."""
        self._start()
        cell = self._find(tensor)
        if cell is not None and self._is_there(cell):
            slot = Slot(*self._value(cell), None)
        else:
            # Autograd saves it before the operator runs that fills it: there is nothing in it yet.
            hides = cell is not None and self._state[self.memory_of[cell]] is UNFILLED and not self._run.is_read
            if cell is not None and self._run.is_read:  # then something unseen has filled it
                self._state[self.memory_of[cell]] = OUTSIDE
            first = self._first(tensor, cell, holds=True, hides=hides, name=None)
            slot = Slot(first.cell, NOT_WRITTEN, first)
        memory = self.memory_of[slot.cell]
        slot.is_held = slot.cell in self._starts
        slot.nbytes = tensor.nbytes if _has_storage(tensor) else 0
        if memory not in self._saved and memory not in self._parameters:
            self._saved.add(memory)
            slot.counts = True
        return slot
