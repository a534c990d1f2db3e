"""Following: a block does as its program says, and what is new is recorded.

The mode sits below autograd, autocast and function modes, where every tensor is plain data. An
operator call that does as a known next step does *is* that step. Otherwise a `Recorder` is asked
for a new step, and the run goes on from there. A tensor is known by the identity of its object,
through weak references: torch keeps the Python object of a tensor as long as the tensor lives, so a
live reference is proof.

A call is compared first, without any effect; then the tensors that it meets take their cells, what
it needs is held, and it runs.

Rejected: holding results strongly while a block runs. It changes what torch does, and what it
saves.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _torch
from .._engine import Region, note_written, root_of, thread
from .compiled import INDUCTOR, CompiledCode
from .gathered import Gathering
from .ops import Info, by_place, info_of, tensors_of
from .position import Position
from .program import FILLED, NO_KEYWORDS, Hold, Like, Program, Step
from .store import Answer, Store

_plain_dispatch = Tensor.__torch_dispatch__
_is_grad_enabled, _graph_task_id = torch.is_grad_enabled, _torch.graph_task_id


class Follower(TorchDispatchMode, Position, Region):
    """A run of a block, on its way through the program."""

    supports_higher_order_operators = True
    around: _torch.Hooks | None = None  # hooks, which hear of writes to memory from outside
    sees_gathering = False
    holds_planned = True  # whether what a plan keeps is held from the forward on
    note: Callable[[], Any] | None = None  # what to note of each operator that is recorded
    watchers: tuple[CompiledCode | Gathering, ...] = ()
    _ask: Any = None  # what to keep of results
    _compiled: CompiledCode | None = None
    _gathering: Gathering | None = None

    def __init__(self, program: Program, store: Store) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        Position.__init__(self, program, store)
        self.fake_mode = _torch.fake_mode()
        self._here = thread.__dict__
        self._depth = store.depth
        self._later = store.later
        self._sees_more()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps `__torch_dispatch__` once more, and every operator pays for it.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Else compiled code runs eagerly in the block, and in torch 2.13 also after it.
        return True

    # ---- comparing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = NO_KEYWORDS
    ) -> Any:
        if types or self.watchers or self._later or self._here["depth"] != self._depth:
            other_way = self._other_way(func, types, args, kwargs)
            if other_way is not None:
                return other_way(func, types, args, kwargs)
        following = self.step.next  # another thread may record: read before the saves
        if self.saved != len(self.step.saves):
            following = self.finish_step()
        names: tuple[str, ...] = ()
        given = args
        if kwargs:
            names, given = (*kwargs,), (*args, *kwargs.values())
        call = func, _is_grad_enabled(), len(args), names
        step = self.known.find(following, call, given)
        if step is None:
            return self._do_something_new(call, given, types, args, kwargs)
        if step.is_special or (step.writes and self.store.holds_on(step.writes)):
            return self._run(step, args, kwargs)
        try:
            result = step.run(*args, **kwargs) if kwargs else step.run(*args)
        except BaseException:
            self._has_failed(step, args, kwargs)
            raise
        if type(result) is Tensor:
            self.cells.append(ref(result))
        else:
            step = self._take(step, args, kwargs, result)
        self.step = step
        self.saved = 0
        self.path.append(step)
        if step.keeps or self._ask is not None:
            self._decide(step, args, kwargs, result)
        return result

    def _other_way(
        self, func: Any, types: Any, args: Any, kwargs: Any
    ) -> Callable[..., Any] | None:
        """How to run an operator that is not just followed."""
        # One of a recompute is not (rule 3).
        if self._here["depth"] != self._depth and not self._wakes_up(func, args, kwargs):
            return _leave_alone
        if not self._follows(func, types):
            return _leave_to_subclass
        self.store.settle()
        return self._watched if self.watchers else None

    def _follows(self, func: Any, types: Any) -> bool:
        """Whether tensors of these types are like plain ones here."""
        # A `DeviceMesh` comes by, too: no tensor.
        dispatches = [getattr(kind, "__torch_dispatch__", _plain_dispatch) for kind in types]
        if {*dispatches} <= {_plain_dispatch}:
            return True
        # Fake tensors are asked for their device at any time.
        if func is torch.ops.prim.device.default or _torch.fake_mode() is not self.fake_mode:
            return False
        return all(issubclass(kind, _torch.FakeTensor) for kind in types)

    def _watched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Follow an operator, with those who watch before and after."""
        values, watchers = (*args, *kwargs.values()), self.watchers
        for watcher in watchers:
            if not watcher.before(values):
                return func(*args, **kwargs)
        self.watchers = ()
        try:
            result = self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.watchers = (*watchers, *self.watchers)
        if self._compiled is not None:
            self._compiled.after(self.step, args, kwargs, result)
        return result

    def _sees_more(self) -> bool:
        """Whether somebody watches from here on who did not before."""
        if self._compiled is not None or INDUCTOR not in sys.modules:
            return False
        self._compiled = CompiledCode(self)
        self.watchers += (self._compiled,)
        return True

    def _lend(self, tensors: list[Tensor]) -> None:
        """FSDP2 has gathered parameters into the memory of these."""
        if self._gathering is None:
            self.sees_gathering, self._gathering = True, Gathering(self)
            self.watchers += (self._gathering,)
        self._gathering.lend(tensors)

    # ---- running

    def _run(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Run an operator that also writes, draws random numbers, or reads what has to be held."""
        store, state = self.store, None
        try:
            if step.is_prepared:
                self._prepare(step, args, kwargs)
            if step.writes:
                self._before_write(step, args, kwargs)
            draws = step.draws and step.info.draws(args, kwargs)
            if draws:
                state = store.generators(step, args, kwargs)
            result = step.run(*args, **kwargs)
            step = self._take(step, args, kwargs, result)
        except BaseException:
            self._has_failed(step, args, kwargs)
            raise
        self._go_to(step)
        if draws and store.has_drawn(step, state):
            self._later += [partial(self._obey, True, tensor) for tensor in tensors_of(result)]
        self._has_run(step, args, kwargs, result)
        self._decide(step, args, kwargs, result)
        return result

    def _has_run(self, step: Step, args: Any, kwargs: Any, result: Any) -> None:
        store, info = self.store, step.info
        if info.gathers:
            self._lend(info.targets_of(args, kwargs))
        if info.custom or info.sizes_depend_on_data:
            store.shapes[step.index] = shapes_of(result)
        if step.fills_part and len(step.writes) == 1:
            source = args[1] if step.func is _torch.COPY else None
            for target in info.targets_of(args, kwargs):
                if store.has_filled(step.writes[0], target, source):
                    self._later.append(partial(self._event, FILLED, (target,)))

    def _hold(self, asked: Hold) -> None:
        if asked.is_lent:
            self._lend([self.cells[asked.value[0]]()])
        self.store.hold(asked)
        if asked.is_copied and not self._is_idle(asked):
            self.store.copy_states({asked.value})

    def _is_idle(self, asked: Hold) -> bool:
        """Whether it is a parameter from which no window of the plan starts, as in a momentum
        encoder. Other memory may be freed before the block ends, and nobody would see it."""
        if self.plan is None or asked.value in self.plan.needed:
            return False
        return _torch.is_whole_parameter(root_of(self.cells[asked.value[0]]()))

    def _prepare(self, step: Step, args: Any, kwargs: Any) -> None:
        """Before an operator runs, hold what a replay starts from, and note the arguments that it
        passes otherwise than the program."""
        given = (*args, *kwargs.values())
        own = {place: given[place] for place in step.varies}
        if step.reads_metadata:
            like = Like(args[0])
            if like.metadata != step.inputs[0].metadata:
                own[0] = like
        if step.offset is not None:  # in a storage that may be another one
            own[step.offset] = args[step.offset] - args[0].storage_offset()
        if own:
            self.store.numbers[step.index] = own
        for asked in step.holds:
            self._hold(asked)

    def _before_write(self, step: Step, args: Any, kwargs: Any) -> None:
        store, info = self.store, step.info
        is_heard = self.around is not None or store.pieces or info.is_uncounted
        if is_heard or store.holds_on(step.writes):
            written = info.targets_of(args, kwargs)
            if step.effect:
                note_written(self.around, {*map(_torch.storage_of, written)})
            store.before_write(step, written)
            if info.is_uncounted:
                torch.autograd.graph.increment_version(written)

    def _take(self, step: Step, args: Any, kwargs: Any, result: Any) -> Step:
        """Put the tensors of a result into the next cells, record a step that is new, and hold its
        decisions. Returns the step that this was: with as many results."""
        tensors = tensors_of(result)
        # `split`, `unbind`: as many as there is room for.
        if step.count not in (None, len(tensors)):
            step = self._with_other_results(step, len(tensors), args, kwargs)
        self.cells += map(ref, tensors)
        if step.count is None:
            self._add_new(step, args, kwargs, result)
        for asked in step.decides:
            self._after(step, self.store.decide, asked)
        return step

    def _with_other_results(self, step: Step, count: int, args: Any, kwargs: Any) -> Step:
        self._forget(step)
        following = tuple([other for other in self.step.next if other.count == count])
        found = self.known.find(following, step.call, (*args, *kwargs.values()))
        other = found or self._new_step(step.call, args, kwargs)
        self._prepare(other, args, kwargs)
        return other

    def _has_failed(self, step: Step, args: Any, kwargs: Any) -> None:
        """An operator has raised. Nobody has seen what it has written before that."""
        self._forget(step)
        self.store.forget(step)
        self._recorder = None
        for tensor in step.info.targets_of(args, kwargs):
            self.written_unseen(tensor)

    def _do_something_new(self, call: Any, given: Any, types: Any, args: Any, kwargs: Any) -> Any:
        func = call[0]
        if func in _torch.TAKE_STORAGE and not types:
            # A program knows memory by tensors, and holds none.
            args = (args[0], _torch.whole(args[1], args[0]), *args[2:])
            return self.__torch_dispatch__(_torch.TAKE_STORAGE[func], types, args)
        info = info_of(func)
        if info.is_passed:
            return info.run(*args, **kwargs)
        parts = _torch.parts_of(func, tensors_of(given)) if info.is_composite else None
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        if self._sees_more() or self._begins_anew(info):
            return self.__torch_dispatch__(func, types, args, kwargs)
        self.own_program()
        step = self.known.find_with_other_numbers(self.step.next, call, given)
        return self._run(step or self._new_step(call, args, kwargs), args, kwargs)

    def _new_step(self, call: Any, args: Any, kwargs: Any) -> Step:
        """A step that is added to the program when it has run."""
        self.own_program()
        step = self._recorder_here().step(call, by_place(args, kwargs))
        if self.note is not None:
            step.note = self.note()
        return step

    def _add_new(self, step: Step, args: Any, kwargs: Any, result: Any) -> None:
        if self.store.placement is not None:
            step.scratch = _torch.scratch_of(step.func, args, result)
            step.scratch_of_forward = _torch.scratch_of_forward(step.func, args, result)
            step.reorders = _torch.reorders(step.func, args, result)
            for cell in step.targets:
                step.scratch += _torch.scratch_in_place(step.func, self.cells[cell]())
            if not step.is_view:
                step.flops = _torch.flops_of(step.func, args, kwargs, result)
        self._add(step)

    # ---- what a run does beside following

    def _wakes_up(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the run goes on, though recomputes are under way."""
        return False

    def _begins_anew(self, info: Info) -> bool:
        """Whether what comes next is another piece of the block."""
        return False

    # ---- what is kept of results

    def _after(self, step: Step, function: Callable[..., Any], *given: Any) -> None:
        """Call a function after a step: when its operator has returned, if that has still to count
        versions up, or has made a tensor from nothing. (Torch replaces such a tensor by an alias if
        somebody holds it already.)"""
        if step.writes or not step.reads:
            self._later.append(partial(function, *given))
        else:
            function(*given)

    def _obey(self, answer: Answer, tensor: Tensor) -> None:
        """Do what the policy has answered."""
        if not answer:
            return
        mover = self.store.mover(answer)
        self.keep_at(tensor, mover)
        if mover is None:
            Region.keep_for_inner(self, tensor)

    def _decide(self, step: Step, args: Any, kwargs: Any, result: Any) -> None:
        """Keep what a plan, or the answer of the policy, keeps of an operator's results."""
        if step.keeps and self.holds_planned and not self.program.history.brings_back:
            # By the plan of the last run, until this one goes another way; then by one that keeps
            # what has been held so far.
            if self.plan is None or not self.plan.passes(step):
                held = self.store.held
                plans = [plan for plan, *_ in step.keeps if plan.can_go_on(held, step)]
                self.use_plan(plans[-1] if plans else None)
            for plan, asked, counts in step.keeps:
                if plan is self.plan and not plan.is_outgrown(self):
                    self._after(step, self.store.keep_planned, asked, counts)
        if self._ask is None or step.info.is_view:
            return
        if not self._is_innermost():  # a run inside asks for itself
            return
        # In a backward inside, others' hooks call functions again at times that differ in a rerun.
        if _graph_task_id() != self.store.task:
            return
        answer = self._ask(step.func, args, dict(kwargs), result)
        if answer:  # when the operator has returned, which has still to count versions up
            self._later += [partial(self._obey, answer, tensor) for tensor in tensors_of(result)]

    def keep_what_is_there(self, plan: Any) -> None:
        """Hold the values of a new plan that still exist and have not been written."""
        if not self.holds_planned:
            return
        for step in plan.path.steps:
            for each, asked, counts in step.keeps:
                if each is plan and plan.path.is_current(asked.value):
                    self.store.keep_planned(asked, counts)

    def _is_innermost(self) -> bool:
        """Whether no other run has been entered inside this one."""
        region = self._here["region"]
        while not isinstance(region, Follower | None):
            region = region.outer
        return region in (None, self)


def _leave_alone(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator as without a block: versions are counted up."""
    info = info_of(func)
    result = info.run(*args, **kwargs)
    if info.is_uncounted:
        torch.autograd.graph.increment_version(info.targets_of(args, kwargs))
    return result


def _leave_to_subclass(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if any(issubclass(kind, _torch.FakeTensor) for kind in types):
        return func(*args, **kwargs)  # their own mode is at work, to find out shapes
    return NotImplemented  # the subclass takes itself apart, and plain tensors come by


def shapes_of(result: Any) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_of(result)]
