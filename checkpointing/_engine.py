"""The engine: what autograd stores in place of the tensors that a region saves, and how they come back.

While a region runs, autograd hands every tensor that it would save to `Frame.pack` and stores the small `Holder`
that it gets back. When backward opens a holder, the frame asks its *source* (rerun or replay) to bring slots back;
the source calls `deliver` for that holder and for whatever else it passes on the way. (A rerun passes all slots in
order, as autograd's pack hook: `Recompute.pack` counts them.) Checks, early stop and lifetimes live here, once; a
source only knows how to compute.

Who owns what (rule 9, no reference ever points back, so nothing here needs the garbage collector):

    autograd graph -> Holder -> Frame -> Source -> inputs;  Frame -weak-> Holder;  graph task -weak-> Frame

The rules that tests cite:

1. The innermost region owns what is saved inside it: autograd asks the innermost hooks only.
2. A region's inputs are saved by whatever encloses it; parameters are referenced, never copied.
3. Recompute starts as if no region were active (`thread.depth` and `thread.region`).
4. A recomputed tensor lives until the node that asked for it has run, and never past its graph task.
5. Recompute no more than needed: a rerun stops at the last live holder.
6. Backward inside a region works: a frame may be opened before its region has ended.
7. Bit-equal; recompute leaves RNG and buffers alone. 8. Never silently wrong. 9. Nothing outlives its use.
10. Grad mode off: a region is a plain call.

Rejected: keeping recomputed tensors on the holders (torch): a second read of `ctx.saved_tensors` then fails, and a
failed backward leaves them behind. Here they end with the graph task, whatever becomes of it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from . import _torch, errors
from ._check import Check, Evidence, maker_of
from ._region import Region, thread, without_recording
from ._torch import graph_task_id, node_count, pop_hooks, profiles, push_hooks
from ._tree import Field
from ._where import Line, described, line_number, user_line

# Bound once: these run for every saved tensor.
_ref = weakref.ref
_Parameter = nn.Parameter
_getframe, _backward_code = sys._getframe, _torch.run_backward_code


class Holding(NamedTuple):
    """Something that a recompute starts from, for reports."""

    kind: str
    part: Any  # a `Held` or a tensor
    operator: str | None  # that has made it, or read it first; or which argument it is
    note: tuple[str | None, ...] | None = None  # the module that ran then, and the user's line


class Source:
    """How a frame brings tensors back."""

    save: Callable[[Tensor], Any] | None = (
        None  # what a holder must remember; None: only which parameter it shows
    )

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A holder's tensor, if nothing has to be computed for it."""
        raise NotImplementedError

    def recompute(self, request: Recompute) -> None:
        """Deliver `request.holder`, and on the way whatever else `request.wanted()` names."""
        raise NotImplementedError

    def name_of(self, parameter: Tensor) -> str | None:
        """What a parameter is called in the modules that were there before the region."""
        return None

    def announce(self, tensor: Tensor) -> None:
        """A region inside is about to take this as an input, and to save an alias of it."""

    def maker(self, holder: Holder) -> str | None:
        """The operator that made what the holder saved, if that is known; for messages."""
        return None

    def holdings(self, frame: Frame) -> Iterable[Holding]:
        """All that is held now for the holders that live, without parameters."""
        return ()

    def operator_of(self, holder: Holder) -> str | None:
        """The operator that made what the holder saves, while the region runs."""
        return None

    def hint(self) -> str:
        """What helps where a recompute differs from the forward, for messages."""
        return errors.UNSEEN


class Holder:
    """What autograd stores in place of one saved tensor."""

    __slots__ = ("__weakref__", "frame", "metadata", "saved", "slot", "stock")

    frame: Frame
    slot: int
    metadata: Any  # what the determinism check compares
    stock: Any  # what a replay starts from; set when the block ends
    saved: Any  # what the source remembers; of a source that remembers nothing: which parameter it shows


class TaskTensors:
    """One frame's recomputed tensors in one graph task. It goes with the frame, or with the graph task, whichever ends
    first: `guard` watches an object that autograd's graph task owns (rule 4)."""

    __slots__ = ("__weakref__", "guard", "memory", "ready")

    def __init__(self) -> None:
        self.ready: dict[int, Tensor | None] = {}  # by slot: delivered; None once its node has it
        self.memory: Any = None  # what the source will want again
        self.guard: Any = None


def _forget(frame: weakref.ref[Frame], key: Any, _: object) -> None:
    alive = frame()
    if alive is not None:
        del alive.tasks[key]


class _Stop(BaseException):
    """Ends a rerun early. A BaseException, so that `except Exception` in the region does not catch it; and sticky:
    whoever swallows it meets it again at the next saved tensor. Made anew each time: an exception that outlives its
    handler holds on to every frame that it passed."""


class Frame:
    """One region: its holders, its source, and what has been recomputed for which graph task."""

    noted: list[Any] | None = None  # if somebody wants a report: the tensors that are saved
    complete = False  # backward may run before the region has ended (rule 6)
    on_error: Callable[[errors.CheckpointError], None] | None = None
    prefix: str | None = (
        None  # how messages begin where other code matches on it; torch's functions set it
    )
    written: frozenset[int] = (
        frozenset()
    )  # memory that regions inside write, which the recompute must deliver before

    def __init__(
        self, source: Source, name: str, entered_from: Line, early_stop: bool, check: Check
    ) -> None:
        self.source = source
        self.save = source.save
        self.name = name
        self.entered_from = entered_from
        self.early_stop = early_stop
        self.check = check
        self.holders: list[weakref.ref[Holder]] = []
        self.inputs: dict[
            int, tuple[object, int]
        ] = {}  # by slot: roles of what regions inside take, and its memory
        self.tasks: dict[Any, TaskTensors] = {}
        # The worker threads of one graph task may open one frame at once: who waits wants what is being computed.
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
        """From here on this is where autograd saves, and `region` where `keep` and its like go."""
        here = thread.__dict__
        region.outer = here["region"]
        here["region"] = region
        push_hooks(self.pack, unpack)

    def leave(self, region: Region) -> bool:
        """Returns whether all regions that were entered later have been left before this one, as they should be."""
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
            storage = _torch.storage_id(tensor) if _torch.has_storage(tensor) else 0
            self.inputs[len(self.holders)] = role, storage

    def pack(self, tensor: Tensor) -> Holder:
        """Autograd's pack hook; it runs once per saved tensor."""
        holder = Holder()
        holder.frame = self
        holders, check, save = self.holders, self.check, self.save
        holder.slot = len(holders)
        holders.append(_ref(holder))  # if a hook of the user fails below, the place is taken
        if save is not None:
            holder.saved = save(tensor)
        elif type(tensor) is Tensor and tensor._base is None:
            holder.saved = None
        else:
            saved = holder.saved = parameter_in(tensor)
            if saved is not None and saved[2] and tensor.requires_grad:
                check = None  # it is compared by identity
        if check is not None:
            holder.metadata = check(tensor)
        return holder

    _torch.mark_as_torchs_own(pack)

    def bring_back(self, holder: Holder, key: Any) -> Tensor:
        """Recompute for a holder whose tensor is not at hand: once per slot and graph task."""
        group = _torch.graph_exec_group()
        if group is not None:
            key = group  # it stands for the graph task
        with self.lock:
            task = self.tasks.get(key) or TaskTensors()
            ready, slot = task.ready, holder.slot
            tensor = ready.get(slot)  # another thread may have been quicker
            if tensor is None:
                if (
                    slot in ready and group is not None and self.prefix
                ):  # its functions refuse what torch's refuse
                    raise errors.overlapping(self)
                request = Recompute(self, task, holder)
                if not profiles():
                    request.run()
                else:
                    with _torch.profiled_range(f"recompute:{self.name}"):
                        request.run()
                tensor = ready[slot]
                assert tensor is not None  # `run` raises if it can't deliver
                if len(ready) > 1 or task.memory is not None or group is not None:
                    self.remember(task, key)
            ready[slot] = None
        return tensor

    def remember(self, task: TaskTensors, key: Any) -> None:
        """Until the end of the graph task (or of torch's group of them), whatever becomes of it."""
        if (
            task.guard is None and key != -1
        ):  # outside of backward (`grad_fn._saved_self`) there is no end
            owner = key
            if type(key) is int:
                owner = partial(int)
                _torch.at_graph_task_end(owner)  # which owns it until then
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
    if (
        reader := _getframe().f_back
    ) and reader.f_code is not _backward_code:  # None: a thread of the autograd engine
        _keep_until_done(holder, tensor)
    return tensor


def identity(tensor: Tensor) -> Tensor:
    """The unpack hook of a rerun, whose graph stores tensors."""
    return tensor


def is_internal(hooks: _torch.Hooks) -> bool:
    """Whether these hooks are those of a region or of a rerun, rather than the user's."""
    return hooks[1] is unpack or hooks[1] is identity


def _keep_until_done(holder: Holder, tensor: Tensor) -> None:
    """Python code reads this tensor, rather than the autograd engine for an operator of its own. The backward of a
    custom Function may read `ctx.saved_tensors` again: its tensors stay until it has run (rule 4)."""
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


class Recompute:
    """One recompute under way: the engine's side of the seam."""

    _mismatches: tuple[errors.Mismatch, ...] = ()
    _count = -1  # the slots that there are, for a source that passes them in order
    _slot = -1  # which it has passed
    _last = sys.maxsize  # where it is to be stopped
    _unfilled = (
        -1
    )  # the last node that has saved what its operator may fill only then, as RReLU its noise
    _stopped = False
    ran_to_its_end = False  # set by an in-order source that was not stopped
    rewound: Set[int] = (
        frozenset()
    )  # storages that hold what they did before the forward, until the rerun ends
    _inputs: Mapping[int, tuple[object, int]] = {}
    _is_watched = False
    _copies: _torch.Copies | None = None
    written: frozenset[int] = frozenset()  # which the forward has noted
    _role: object = None  # of what is packed next: None for what an operator saves

    def __init__(self, frame: Frame, task: TaskTensors, holder: Holder) -> None:
        self.frame = frame
        self.task = task
        self.ready = task.ready
        self.holder = holder
        self._versions: dict[int, int] = {}  # by slot: of what an in-order source has delivered

    def wanted(self, refs: Iterable[weakref.ref[Holder]] | None = None) -> list[Holder]:
        """The live holders that this graph task may still open, by slot; of all or of these."""
        ready, opened = self.ready, self.holder
        live = [ref() for ref in (self.frame.holders if refs is None else refs)]
        return [
            holder
            for holder in live
            if holder is not None and (holder.slot not in ready or holder is opened)
        ]

    @property
    def is_last(self) -> bool:
        """Whether this graph task has nothing left to open. Mostly one look: backward opens first what was saved
        last."""
        return all(
            (holder := ref()) is None or holder.slot in self.ready for ref in self.frame.holders
        )

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

    def begin_in_order(self) -> None:
        """A rerun is about to start: find the last slot that is wanted, where it is to be stopped (rule 5)."""
        holders, ready = self.frame.holders, self.ready
        self._count, self._inputs = len(holders), self.frame.inputs
        self._is_watched = bool(self.rewound or self._inputs)
        if self.frame.early_stop:
            for ref in reversed(holders):
                holder = ref()
                if holder is self.holder or (holder is not None and holder.slot not in ready):
                    self._last = holder.slot
                    break

    def pack(self, given: Tensor) -> Tensor:
        """Autograd's pack hook for a rerun: delivers what autograd saves to the slots in order, and raises the stop
        signal at the last one that is wanted (rule 5). What it returns is for the graph of the rerun: a tensor, so
        that backward inside the rerun works (rule 6); detached, because a graph must not own itself.
        """
        self._slot = slot = self._slot + 1
        kind, frame, tensor = type(given), self.frame, given
        if given.requires_grad:
            if kind is not _Parameter:
                tensor = given.detach()
        elif kind is Tensor and given._version == 0:
            self._unfilled = node_count()
        if self._is_watched:
            tensor = self._watch(slot, tensor)
        if slot < self._count:
            holder = frame.holders[slot]()
            if holder is not None:
                ready, saved = self.ready, holder.saved
                now = None if kind is Tensor and given._base is None else parameter_in(given)
                if now != saved:
                    self._compare_parameters(holder, now)
                is_at_hand = saved is not None and saved[2] and saved[3]() is not None
                if not is_at_hand and (slot not in ready or holder is self.holder):
                    check = frame.check
                    if check is not None and (found := check(tensor)) != holder.metadata:
                        self._note_mismatch(holder, found, given)
                    ready[slot] = tensor
                    self._versions[slot] = tensor._version
        elif frame.complete and not self._stopped:
            raise errors.too_many(frame, self._count, user_line(), frame.source.hint())
        # An operator that has yet to fill what it has saved must still run.
        if slot >= self._last and (self._unfilled != node_count() or self._stopped):
            self._stopped = True
            raise _Stop
        return tensor

    _torch.mark_as_torchs_own(pack)

    def announce(self, role: object, tensor: Tensor) -> None:
        """A region inside is about to take this as an input."""
        self._role, self._is_watched = role, True

    def replace(self, delivered: Tensor, copy: Tensor) -> None:
        """What was delivered is about to be written by the function: deliver a copy."""
        for slot, tensor in self.ready.items():
            if tensor is delivered:
                self.ready[slot] = copy
                self._versions[slot] = copy._version

    def _watch(self, slot: int, tensor: Tensor) -> Tensor:
        """What a region inside takes, that region must have taken in the forward, and no operator saved. What will be
        written, by such a region or when the rerun ends, is delivered as a copy."""
        role, self._role = self._role, None
        then, _ = self._inputs.get(slot, (None, 0))
        if slot < self._count and role != then:
            raise errors.other_role(self.frame, slot, user_line(), then, role)
        if self.rewound and _torch.is_on(tensor, self.rewound):
            return without_recording(_torch.copy, tensor)  # type: ignore[no-any-return]
        if then is None or self._inputs[slot][1] not in self.frame.written:
            return tensor
        self._copies = copies = self._copies or _torch.Copies()
        return without_recording(copies.copy, tensor)  # type: ignore[no-any-return]

    def _compare_parameters(self, holder: Holder, found: Shown | None) -> None:
        """Where either run saves a parameter that trains, or a view of one, the other must save that very one,
        unwritten. But those that the function makes itself are new each time, and hooks bring in frozen ones anew."""
        frame, saved = self.frame, holder.saved
        (then, must_stay), (now, must_be) = map(self._described, (saved, found))
        if saved is None or found is None or (saved[0] != found[0] and (must_stay or must_be)):
            raise errors.other_parameter(
                frame, holder.slot, user_line(), then, now, frame.source.hint()
            )
        if saved[0] == found[0] and saved[1] != found[1]:
            raise errors.changed(frame, now, saved[1], found[1])

    def _described(self, shown: Shown | None) -> tuple[str, bool]:
        """A parameter in words, and whether it is one that trains, of a module that was there before the region."""
        parameter = None if shown is None else shown[3]()
        if parameter is None:
            return "no parameter" if shown is None else "a parameter that is gone", False
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
            # The other case is what user code has made of the stop signal.
            if not (self._stopped and isinstance(error, Exception | SystemExit)):
                self._explained(error)
                if self._count >= 0 and errors.is_about_sizes(error):
                    raise self._explained(errors.other_sizes(self.frame, source.hint())) from error
                raise
        finally:
            here["region"], here["depth"] = region, depth
        self._check_outcome()

    def _explained(self, error: Any) -> Any:
        """An error, with what is known besides. Nothing that has been recomputed is to be used."""
        self.ready.clear()
        note = f"This happened during the recompute of {self.frame.place}."
        error.__notes__ = [
            *getattr(error, "__notes__", ()),
            note,
        ]  # as `add_note` does, since Python 3.11
        if isinstance(error, errors.CheckpointError) and self.frame.on_error is not None:
            self.frame.on_error(error)
        return error

    def _check_outcome(self) -> None:
        frame, ready = self.frame, self.ready
        if self._mismatches:
            _, expected, *_ = self._mismatches[0]
            shown = (
                1 if type(expected) is Evidence else 3
            )  # all that is computed from the first one differs as well
            hint = frame.source.hint()
            raise self._explained(
                errors.different_metadata(frame, _node_name(), self._mismatches, shown, hint)
            )
        for slot, version in self._versions.items():
            tensor = ready[slot]
            if tensor is not None and tensor._version != version:
                if slot == self.holder.slot:
                    raise self._explained(errors.overwritten(frame, slot in self._inputs))
                del ready[slot]  # perhaps nobody asks for it, as in plain code that works
        if self.ran_to_its_end:  # the last slot that is wanted should have stopped it
            count, last = len(frame.holders), self.holder.slot
            if frame.early_stop or frame.complete:
                last = min(self._last, count - 1)
            if self._slot < last:
                counts = count, self._slot + 1
                raise self._explained(
                    errors.different_number(frame, last, _node_name(), *counts, frame.source.hint())
                )


def _node_name() -> str:
    node = _torch.current_node()
    return "a read outside of backward" if node is None else str(node.name())


# ---- names and parameters

# Formatted only when it is needed: (parent, key) stands for `parent[key]`, an operator for what it reads.
Name = str | tuple[object, object] | object


def named(name: Name, tensor: Tensor | None = None) -> str:
    """A tensor as messages name it."""
    if isinstance(name, tuple):
        parent, key = name
        name = f"{named(parent)}.{key}" if isinstance(key, Field) else f"{named(parent)}[{key!r}]"
    text = (
        name
        if isinstance(name, str)
        else "a tensor that it saved"
        if name is None
        else f"what {name} read"
    )
    if tensor is None:
        return text
    return f"{text} ({tensor.dtype} tensor of shape {tuple(_torch.shape_of(tensor))})".replace(
        "torch.", ""
    )


def root_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of; itself, if of nothing."""
    return tensor if tensor._base is None else tensor._base


def is_parameter(root: Tensor) -> bool:
    """Whether a region refers to this tensor and to its views rather than saving them (rule 2)."""
    kind = type(root)
    return kind is _Parameter or (kind is not Tensor and isinstance(root, _Parameter))


def is_referenced(root: Tensor) -> bool:
    """The same for what is no parameter: a leaf lives as long as its graph, so nothing is gained by saving it."""
    return is_parameter(root) or (root.requires_grad and root.is_leaf)


def parameter_in(tensor: Tensor) -> Shown | None:
    """What of a parameter a tensor shows, if any."""
    kind = type(tensor)
    root = tensor._base if kind is Tensor else tensor
    if root is None or not (kind is _Parameter or is_parameter(root)):
        return None
    # One that trains lives as long as the graph, which ends in it. Frozen ones may go: they have been brought in.
    ref = _ref(root)
    return id(ref), tensor._version, root is tensor, ref


# What tells a parameter apart, its version, whether it is all of it, and itself: last, so that no two are compared.
Shown = tuple[int, int, bool, weakref.ref[Tensor]]
