"""The engine: the holders that autograd stores for saved tensors, and how their tensors come back.

While a region runs, autograd passes every tensor that it would save to `Frame.pack` and stores the
small `Holder` that it returns. When backward opens a holder, the frame asks its *source* (rerun or
replay) for the tensor. The source calls `deliver` for that holder and for others that it computes
on the way. (A rerun passes all slots in order, as autograd's pack hook: `Recompute.pack` counts
them.) Checks, early stop and lifetimes are here, once; a source only computes.

References, none of which point back, so nothing needs the garbage collector (rule 9):

    autograd graph -> Holder -> Frame -> Source -> inputs
    Frame -weak-> Holder;  graph task -weak-> Frame

The rules that tests cite:

1. The innermost region owns the tensors that are saved inside it: autograd asks the innermost hooks
only. 2. A region's inputs are saved by the hooks that enclose it; parameters are referenced, never
copied. 3. Recompute starts as if no region were active (`thread.depth` and `thread.region`). 4. A
recomputed tensor lives until the node that asked for it has run, and never past its graph task. 5.
Recompute no more than needed: a rerun stops at the last live holder. 6. Backward inside a region
works: a frame may be opened before its region has ended. 7. Bit-equal; recompute leaves RNG and
buffers alone. 8. Never silently wrong. 9. Nothing outlives its use. 10. Grad mode off: a region is
a plain call.

Rejected: keeping recomputed tensors on the holders, as torch does. A second read of
`ctx.saved_tensors` then fails, and a failed backward leaves them behind. Here they end with the
graph task in any case.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any, NamedTuple
from weakref import ref as _ref

from torch import Tensor, nn

from .. import _torch, errors
from .._torch import Field, graph_task_id, node_count, pop_hooks, profiles, push_hooks
from .check import Check, Evidence, maker_of
from .threads import Region, thread, without_recording
from .where import Line, described, line_number, user_line

# Bound once: these run for every saved tensor.
_Parameter = nn.Parameter
_getframe, _backward_code = sys._getframe, _torch.run_backward_code


class Holding(NamedTuple):
    """One thing that a recompute starts from, for reports."""

    kind: str
    part: Any  # a `Held` or a tensor
    operator: str | None  # that made it, or read it first; or the name of the argument
    note: tuple[str | None, ...] | None = None  # the module that ran then, and the user's line


class Source:
    """How a frame brings tensors back."""

    # Returns the `saved` of a holder. None: the parameter that a tensor shows, if any.
    save: Callable[[Tensor], Any] | None = None
    hint = errors.UNSEEN  # the remedy where a recompute differs from the forward, for messages

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A holder's tensor, if it need not be computed."""
        raise NotImplementedError

    def recompute(self, request: Recompute) -> None:
        """Deliver `request.holder`, and others of `request.wanted()` that are computed on the
        way."""
        raise NotImplementedError

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a parameter in the modules that existed before the region."""
        return None

    def announce(self, tensor: Tensor) -> None:
        """A region inside is about to take this as an input. It saves an alias next."""

    def maker(self, holder: Holder) -> str | None:
        """The operator that made a holder's tensor, for messages."""
        return None

    def holdings(self, frame: Frame) -> Iterable[Holding]:
        """Everything that is held now for live holders, without parameters."""
        return ()

    def operator_of(self, holder: Holder) -> str | None:
        """The operator that made a holder's tensor, while the region runs."""
        return None


class Holder:
    """The object that autograd stores in place of one saved tensor."""

    __slots__ = ("__weakref__", "frame", "metadata", "saved", "slot", "stock")

    frame: Frame
    slot: int
    metadata: Any  # for the determinism check
    stock: Any  # the values that a replay starts from, once the block has ended
    saved: Any  # for the source; in a rerun, the parameter that the tensor shows, if any


class TaskTensors:
    """The recomputed tensors of one frame in one graph task. They end with the first of the two:
    `guard` watches an object that the graph task owns (rule 4)."""

    guard: Any = None
    memory: Any = None  # for the source

    def __init__(self) -> None:
        self.ready: dict[int, Tensor | None] = {}  # by slot; None once its node has the tensor


def _forget(frame: _ref[Frame], key: Any, _: object) -> None:
    alive = frame()
    if alive is not None:
        del alive.tasks[key]


class _Stop(BaseException):
    """Ends a rerun early. It is a BaseException, so that `except Exception` in the region does not
    catch it; if it is swallowed, the next saved tensor raises it again. Each is made anew, since an
    exception holds on to the stack frames that it passed."""


class Frame:
    """One region: its holders, its source, and the recomputed tensors of each graph task."""

    noted: list[Any] | None = None  # for a report: the tensors that are saved
    complete = False  # backward may run before the region has ended (rule 6)
    on_error: Callable[..., None] | None = None
    prefix: str | None = None  # of messages, for code that matches torch's
    written: frozenset[int] = frozenset()  # storages that regions inside write after reading

    def __init__(
        self, source: Source, name: str, entered_from: Line, early_stop: bool, check: Check
    ) -> None:
        self.source = source
        self.save = source.save
        self.name = name
        self.entered_from = entered_from
        self.early_stop = early_stop
        self.check = check
        self.holders: list[_ref[Holder]] = []
        # By slot: the roles of tensors that regions inside take, and their storages.
        self.inputs: dict[int, tuple[object, int | None]] = {}
        self.tasks: dict[Any, TaskTensors] = {}
        # Threads of one graph task may open one frame at once, mostly for the same recompute.
        self.lock = threading.RLock()

    def __str__(self) -> str:
        return self.prefix or self.place

    @property
    def place(self) -> str:
        code, _ = self.entered_from
        return (
            f"region '{self.name}' (entered at {code.co_filename}:{line_number(self.entered_from)})"
        )

    def enter(self, region: Region) -> None:
        """From here on autograd saves here, and `keep` and the like go to `region`."""
        here = thread.__dict__
        region.outer = here["region"]
        here["region"] = region
        push_hooks(self.pack, unpack)

    def leave(self, region: Region) -> bool:
        """Returns whether all regions that were entered later have been left before this one."""
        self.complete = True
        here = thread.__dict__
        inner = here["region"]
        if inner is region:
            pop_hooks()
            here["region"] = region.outer
            return True
        while inner is not None and inner.outer is not region:
            inner = inner.outer
        if inner is not None:  # else it was entered in another thread
            inner.outer = region.outer
            _torch.remove_hooks(self.pack)
        return False

    def announce(self, role: object, tensor: Tensor) -> None:
        """A region inside is about to take this as an input."""
        if self.save is not None:  # slots are not matched by position
            self.source.announce(tensor)
        else:
            self.inputs[len(self.holders)] = role, _torch.storage_of(tensor)

    def pack(self, tensor: Tensor) -> Holder:
        """Autograd's pack hook; it runs once per saved tensor."""
        holder = Holder()
        holder.frame = self
        holders, check, save = self.holders, self.check, self.save
        holder.slot = len(holders)
        holders.append(_ref(holder))  # the slot is taken even if a user's hook fails below
        if save is not None:
            holder.saved = save(tensor)
        elif type(tensor) is Tensor and tensor._base is None:
            holder.saved = None
        else:
            saved = holder.saved = parameter_in(tensor)
            is_whole = saved is not None and saved[2]
            if is_whole and tensor.requires_grad:
                check = None  # it is compared by identity
        if check is not None:
            holder.metadata = check(tensor)
        return holder

    _torch.mark_as_torchs_own(pack)

    def bring_back(self, holder: Holder, key: Any) -> Tensor:
        """Recompute for a holder, once per slot and graph task."""
        group = _torch.graph_exec_group()
        if group is not None:
            key = group  # torch's context that joins graph tasks
        with self.lock:
            task = self.tasks.get(key) or TaskTensors()
            ready, slot = task.ready, holder.slot
            tensor = ready.get(slot)  # another thread may have computed it
            if tensor is None:
                is_second_read = slot in ready and group is not None
                if is_second_read and self.prefix is not None:
                    raise errors.overlapping(self)  # as torch does
                request = Recompute(self, task, holder)
                if not profiles():
                    request.run()
                else:
                    with _torch.profiled_range(f"recompute:{self.name}"):
                        request.run()
                tensor = ready[slot]
                assert tensor is not None  # `run` raises if it cannot deliver
                has_more = len(ready) > 1 or task.memory is not None
                if has_more or group is not None:
                    self.remember(task, key)
            ready[slot] = None
        return tensor

    def remember(self, task: TaskTensors, key: Any) -> None:
        """Hold tensors until the end of the graph task, or of torch's group, even if that fails."""
        # Outside of backward (`grad_fn._saved_self`) there is no end.
        if task.guard is None and key != _torch.NO_GRAPH_TASK:
            owner = key
            if type(key) is int:
                owner = partial(int)
                _torch.at_graph_task_end(owner)  # owned until then
            task.guard = _ref(owner, partial(_forget, _ref(self), key))
            self.tasks[key] = task


def unpack(holder: Holder) -> Tensor:
    """Autograd's unpack hook, the same for all regions."""
    frame, key = holder.frame, graph_task_id()
    task = frame.tasks.get(key)
    if task is not None and (tensor := task.ready.get(holder.slot)) is not None:
        task.ready[holder.slot] = None
    elif holder.saved is None or (tensor := frame.source.at_hand(holder, frame)) is None:
        tensor = frame.bring_back(holder, key)
    reader = _getframe().f_back  # None in a thread of the autograd engine
    if reader is not None and reader.f_code is not _backward_code:
        _keep_until_done(holder, tensor)
    return tensor


def identity(tensor: Tensor) -> Tensor:
    """The unpack hook of a rerun, whose graph stores the tensors themselves."""
    return tensor


def is_internal(hooks: _torch.Hooks) -> bool:
    """Whether these are hooks of a region or of a rerun, not of the user."""
    return hooks[1] in (unpack, identity)


def _keep_until_done(holder: Holder, tensor: Tensor) -> None:
    """The reader is Python code, not a built-in node. The backward of a custom Function may read
    `ctx.saved_tensors` again, so its tensors stay until it has run (rule 4)."""
    node, frame, slot = _torch.current_node(), holder.frame, holder.slot
    if not isinstance(node, _torch.PythonNode):
        return
    key = _torch.graph_exec_group() or graph_task_id()
    task = frame.tasks.get(key) or TaskTensors()
    frame.remember(task, key)
    task.ready[slot] = tensor
    weak = _ref(task)  # a backward that fails in this node leaves the hook behind

    def done(*_: Any) -> None:
        handle.remove()
        if (task := weak()) is not None:
            task.ready[slot] = None

    handle = node.register_hook(done)  # type: ignore[attr-defined]


NEVER = sys.maxsize  # a slot that is never reached
NO_NODE = -1


class Recompute:
    """One recompute under way: the part of it that is the engine's.

    A rerun calls the function in `run_in_order`, which passes the saved tensors to `pack`, slot by
    slot. Other sources call `deliver`.
    """

    is_in_order = False
    _ran_to_its_end = False
    rewound: Set[int] = frozenset()  # storages with older values, until the rerun ends
    written: frozenset[int] = frozenset()  # storages that the forward knows inner regions write
    _mismatches: tuple[errors.Mismatch, ...] = ()
    _count = 0  # the slots of the forward
    _passed = 0  # slots so far
    _stop_at = NEVER  # the slot at which to stop
    _filling = NO_NODE  # the last node whose saved memory the operator may still fill, as RReLU
    _stopped = False
    _is_watched = False
    _copies: _torch.Copies | None = None
    _changed: _torch.Leaves | None = None  # parameters that the region must not read
    _role: object = None  # of the tensor that is packed next: None if an operator saves it

    def __init__(self, frame: Frame, task: TaskTensors, holder: Holder) -> None:
        self.frame = frame
        self.task = task
        self.ready = ready = task.ready
        ready.pop(holder.slot, None)  # its node has had it, and opens it again
        self.holder = holder
        self._versions: dict[int, int] = {}  # by slot: of the tensors that a rerun has delivered

    def wanted(self) -> list[Holder]:
        """The holders that this graph task may still open, by slot."""
        live = [holder for ref in self.frame.holders if (holder := ref()) is not None]
        return [holder for holder in live if holder.slot not in self.ready]

    @property
    def is_last(self) -> bool:
        """Whether this graph task has nothing left to open. Mostly the first look tells, since
        backward opens the last slots first."""
        ready = self.ready
        return all((holder := ref()) is None or holder.slot in ready for ref in self.frame.holders)

    def deliver(self, holder: Holder, tensor: Tensor) -> None:
        """Take one recomputed tensor, for one of the holders that are wanted."""
        check = self.frame.check
        if check is not None and (found := check(tensor)) != holder.metadata:
            self._note_mismatch(holder, found, None)
        self.ready[holder.slot] = tensor

    def _note_mismatch(self, holder: Holder, found: Any, given: Tensor | None) -> None:
        expected, details = holder.metadata, f"slot {holder.slot}"
        made_by = self.frame.source.maker(holder) if given is None else maker_of(given)
        if made_by is not None:
            details += f", made by {made_by}"
        if type(expected) is Evidence:
            details += f"; saved in the forward at {described(expected.line)}"
        if given is not None:
            details += f"; saved in the recompute at {user_line()}"
        self._mismatches += ((holder.slot, expected, found, details),)

    def run_in_order(self, function: Callable[[], Any]) -> None:
        """Rerun a function. It may turn the stop signal into another exception; what is raised
        after that, where state is put back, is an error."""
        self._begin_in_order()
        push_hooks(self.pack, identity)
        try:
            function()
            self._ran_to_its_end = True
        except (Exception, SystemExit):
            if not self._stopped:
                raise
        finally:
            pop_hooks()

    def _begin_in_order(self) -> None:
        """Find the last slot that is wanted, to stop there (rule 5)."""
        self.is_in_order = True
        holders = self.frame.holders
        self._count = len(holders)
        self._is_watched = bool(self.rewound or self.frame.inputs or self._changed)
        if self.frame.early_stop:
            for ref in reversed(holders):
                holder = ref()
                if holder is not None and holder.slot not in self.ready:
                    self._stop_at = holder.slot
                    break

    def pack(self, given: Tensor) -> Tensor:
        """Autograd's pack hook for a rerun: delivers saved tensors to the slots in order, and stops
        at the last one that is wanted (rule 5). It returns a tensor for the graph of the rerun, so
        that backward inside the rerun works (rule 6); detached, because a graph must not own
        itself.
        """
        slot = self._passed
        self._passed = slot + 1
        tensor = given
        if given.requires_grad:
            if type(given) is not _Parameter:
                tensor = given.detach()
        elif type(given) is Tensor and given._version == 0:
            self._filling = node_count()
        if self._is_watched:
            tensor = self._watch(slot, given, tensor)
        if slot < self._count:
            holder = self.frame.holders[slot]()
            if holder is not None:
                self._take(holder, given, tensor)
        elif self.frame.complete and not self._stopped:
            raise errors.too_many(self.frame, self._count, user_line())
        # An operator that has yet to fill the memory that it saved must still run.
        if slot >= self._stop_at and (self._stopped or self._filling != node_count()):
            self._stopped = True
            raise _Stop
        return tensor

    def _take(self, holder: Holder, given: Tensor, tensor: Tensor) -> None:
        """Compare a saved tensor with that of the forward, and deliver it where it is wanted."""
        saved, slot = holder.saved, holder.slot
        found = None
        if type(given) is not Tensor or given._base is not None:
            found = parameter_in(given)
        if found != saved:
            self._compare_parameters(holder, found)
        if saved is not None:
            _, _, is_whole, parameter = saved
            if is_whole and parameter() is not None:
                return  # it is at hand
        if slot in self.ready:
            return
        check = self.frame.check
        if check is not None and (now := check(tensor)) != holder.metadata:
            self._note_mismatch(holder, now, given)
        self.ready[slot] = tensor
        self._versions[slot] = tensor._version

    _torch.mark_as_torchs_own(pack)

    def announce(self, role: object, tensor: Tensor) -> None:
        """A region inside is about to take this as an input."""
        self._role, self._is_watched = role, True

    def guard(self, parameters: list[Tensor], inputs: list[Tensor]) -> None:
        """Refuse slots that depend on these parameters otherwise than through the inputs."""
        self._changed = _torch.Leaves(parameters, inputs)

    def replace(self, delivered: Tensor, copy: Tensor) -> None:
        """The function is about to write a delivered tensor: deliver a copy instead."""
        for slot, tensor in self.ready.items():
            if tensor is delivered:
                self.ready[slot] = copy
                self._versions[slot] = copy._version

    def _watch(self, slot: int, given: Tensor, tensor: Tensor) -> Tensor:
        """Compare roles: a region inside must take in the recompute what it took in the forward. A
        tensor that such a region writes, or that changes when the rerun ends, is delivered as a
        copy."""
        changed = None if self._changed is None else self._changed.below(given.grad_fn)
        if changed is not None:
            raise errors.changed(self.frame, self._described((0, 0, True, _ref(changed)))[0])
        role, self._role = self._role, None
        then, storage = self.frame.inputs.get(slot, (None, None))
        if slot < self._count and role != then:
            raise errors.other_role(self.frame, slot, user_line(), then, role)
        if _torch.is_on(tensor, self.rewound):
            return without_recording(_torch.copy, tensor)
        if storage not in self.frame.written:
            return tensor
        self._copies = copies = self._copies or _torch.Copies()
        return without_recording(copies.copy, tensor)

    def _compare_parameters(self, holder: Holder, found: Shown | None) -> None:
        """Where either run saves a parameter that trains, or a view of one, the other must save the
        same one, unwritten. Parameters that the function makes are new each time, and hooks may
        bring in frozen ones anew."""
        frame, saved = self.frame, holder.saved
        (then, must_stay), (now, must_be) = map(self._described, (saved, found))
        if saved is not None and found is not None:
            if saved[0] == found[0]:
                raise errors.changed(frame, now, saved[1], found[1])
            if not (must_stay or must_be):
                return
        raise errors.other_parameter(frame, holder.slot, user_line(), then, now)

    def _described(self, shown: Shown | None) -> tuple[str, bool]:
        """A parameter for messages, and whether it trains and existed before the region."""
        if shown is None:
            return "no parameter", False
        parameter = shown[3]()
        if parameter is None:
            return "a parameter that is gone", False
        name = self.frame.source.name_of(parameter)
        text = named(f"the parameter {name}" if name else "a parameter", parameter)
        return text, parameter.requires_grad and name is not None

    def run(self) -> None:
        """Let the source work, with this thread's regions out of the way (rule 3)."""
        source = self.frame.source
        here = thread.__dict__
        region, depth = here["region"], here["depth"]
        try:
            here["region"], here["depth"] = None, depth + 1
            if _torch.in_batched_backward():
                with _torch.outside_of_batch():
                    source.recompute(self)
            else:
                source.recompute(self)
        except _Stop:
            if not self._stopped:  # that of an enclosing rerun
                raise
        except BaseException as error:
            self._explained(error)
            if self.is_in_order and errors.is_about_sizes(error):
                raise self._explained(errors.other_sizes(self.frame)) from error
            raise
        finally:
            here["region"], here["depth"] = region, depth
            self._changed = None  # it knows nodes, whose hooks know this object
        self._check_outcome()

    def _explained(self, error: Any) -> Any:
        """An error with a note and its logs. No recomputed tensor is used after it."""
        self.ready.clear()
        note = f"This happened during the recompute of {self.frame.place}."
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # `add_note` needs Python 3.11
        if isinstance(error, errors.CheckpointError) and self.frame.on_error is not None:
            self.frame.on_error(error)
        return error

    def _check_outcome(self) -> None:
        if self._mismatches:
            _, expected, *_ = self._mismatches[0]
            # A wrong value spreads: show the first one only.
            shown = 1 if type(expected) is Evidence else 3
            raise self._explained(
                errors.different_metadata(self.frame, _node_name(), self._mismatches, shown)
            )
        for slot, version in self._versions.items():
            tensor = self.ready[slot]
            if tensor is None or tensor._version == version:
                continue
            if slot == self.holder.slot:
                raise self._explained(errors.overwritten(self.frame, slot in self.frame.inputs))
            del self.ready[slot]  # an error only if backward asks for it, as in plain code
        if self._ran_to_its_end:
            self._check_count()

    def _check_count(self) -> None:
        """The last slot that is wanted should have stopped the rerun."""
        frame, last = self.frame, self.holder.slot
        count = len(frame.holders)
        if frame.early_stop or frame.complete:
            last = min(self._stop_at, count - 1)
        if self._passed <= last:
            raise self._explained(
                errors.different_number(frame, last, _node_name(), count, self._passed)
            )


def _node_name() -> str:
    node = _torch.current_node()
    return "a read outside of backward" if node is None else str(node.name())


# ---- names and parameters

# Formatted only when it is needed: (parent, key) stands for `parent[key]`, an operator for its
# input.
Name = str | tuple[object, object] | object


def named(name: Name, tensor: Tensor | None = None) -> str:
    """A tensor as messages name it."""
    if isinstance(name, tuple):
        parent, key = name
        name = f"{named(parent)}.{key}" if isinstance(key, Field) else f"{named(parent)}[{key!r}]"
    if isinstance(name, str):
        text = name
    elif name is None:
        text = "a tensor that it saved"
    else:
        text = f"an input of {name}"
    if tensor is None:
        return text
    shape = tuple(_torch.shape_of(tensor))
    return f"{text} ({tensor.dtype} tensor of shape {shape})".replace("torch.", "")


def root_of(tensor: Tensor) -> Tensor:
    """The base of a view; the tensor itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def is_parameter(root: Tensor) -> bool:
    """Whether a region references this tensor and its views, rather than saving them (rule 2)."""
    kind = type(root)
    if kind is Tensor:
        return False
    return kind is _Parameter or isinstance(root, _Parameter)


def is_referenced(root: Tensor) -> bool:
    """The same, with leaves that require grad: they live as long as their graph."""
    if root.is_leaf and root.requires_grad:
        return True
    return is_parameter(root)


def parameter_in(tensor: Tensor) -> Shown | None:
    """The parameter that a tensor is, or a view of."""
    kind = type(tensor)
    root = tensor._base if kind is Tensor else tensor
    if root is None or not (kind is _Parameter or is_parameter(root)):
        return None
    # One that trains lives as long as the graph, which ends in it. A frozen one may go.
    ref = _ref(root)
    return id(ref), tensor._version, root is tensor, ref


# The identity of a parameter, its version, whether it is all of it, and itself: last, so that no
# two parameters are compared.
Shown = tuple[int, int, bool, _ref[Tensor]]
