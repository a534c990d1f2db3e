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
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from . import _torch, errors
from ._check import Check, Evidence, maker_of
from ._offload import Moved, Mover
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
    part: Held | Tensor
    operator: str | None  # that has made it, or read it first; or which argument it is
    note: tuple[str | None, ...] | None = None  # the module that ran then, and the user's line


class Source:
    """How a frame brings tensors back."""

    save: Callable[[Tensor], Any] | None = None  # what a holder must remember; None: only which parameter it shows

    def at_hand(self, holder: Holder, where: Frame) -> Tensor | None:
        """A holder's tensor, if nothing has to be computed for it."""
        raise NotImplementedError

    def recompute(self, request: Recompute) -> None:
        """Deliver `request.holder`, and on the way whatever else `request.wanted()` names."""
        raise NotImplementedError

    def knows(self, parameters: tuple[Tensor, ...]) -> bool:
        """Whether one of these belongs to a module that was there before the region."""
        return True

    def maker(self, holder: Holder) -> str | None:
        """The operator that made what the holder saved, if that is known; for messages."""
        return None

    def holdings(self, frame: Frame) -> Iterable[Holding]:
        """All that is held now for the holders that live, without parameters."""
        return ()

    def operator_of(self, holder: Holder) -> str | None:
        """The operator that made what the holder saves, while the region runs."""
        return None

    def hint(self, saved: Any, recomputed: Any) -> str:
        """What else is known about a mismatch of metadata, or (None) an error of the function; for messages."""
        return ""


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

    record: Any = None  # if somebody wants a report: what is told of it, and runs its recomputes
    complete = False  # backward may run before the region has ended (rule 6)
    on_error: Callable[[errors.CheckpointError], None] | None = None
    prefix: str | None = None  # how messages begin where other code matches on it; torch's functions set it

    def __init__(self, source: Source, name: str, entered_from: Line, early_stop: bool, check: Check) -> None:
        self.source = source
        self.save = source.save
        self.name = name
        self.entered_from = entered_from
        self.early_stop = early_stop
        self.check = check
        self.holders: list[weakref.ref[Holder]] = []
        self.tasks: dict[Any, TaskTensors] = {}
        # The worker threads of one graph task may open one frame at once: who waits wants what is being computed.
        self.lock = threading.RLock()

    def __str__(self) -> str:
        return self.prefix or self.place

    @property
    def place(self) -> str:
        code, _ = self.entered_from
        return f"region '{self.name}' (entered at {code.co_filename}:{line_number(self.entered_from)})"

    def enter(self, region: Region) -> None:
        """From here on this is where autograd saves, and `region` where `keep` and its like go."""
        here = thread.__dict__
        region.outer = here["region"]
        here["region"] = region
        push_hooks(self.pack, unpack)

    def leave(self, region: Region) -> None:
        pop_hooks()
        thread.region = region.outer
        self.complete = True

    def pack(self, tensor: Tensor) -> Holder:
        """Autograd's pack hook; it runs once per saved tensor."""
        holder = Holder()
        holder.frame = self
        holders, check, save = self.holders, self.check, self.save
        holder.slot = len(holders)
        if save is not None:
            holder.saved = save(tensor)
        elif type(tensor) is Tensor and tensor._base is None:
            holder.saved = None
        else:
            saved = holder.saved = parameter_in(tensor)
            if saved is not None and saved[2]:
                check = None  # it is compared by identity
        if check is not None:
            holder.metadata = check(tensor)
        holders.append(_ref(holder))
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
                request = Recompute(self, task, holder)
                if self.record is None and not profiles():
                    request.run()
                else:
                    with _torch.profiled_range(f"recompute:{self.name}"):
                        (Recompute.run if self.record is None else self.record.watch)(request)
                tensor = ready[slot]
                assert tensor is not None  # `run` raises if it can't deliver
                if len(ready) > 1 or task.memory is not None or group is not None:
                    self.remember(task, key)
            ready[slot] = None
        return tensor

    def remember(self, task: TaskTensors, key: Any) -> None:
        """Until the end of the graph task (or of torch's group of them), whatever becomes of it."""
        if task.guard is None and key != -1:  # outside of backward (`grad_fn._saved_self`) there is no end
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
    if (reader := _getframe().f_back) and reader.f_code is not _backward_code:  # None: a thread of the autograd engine
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
    _unfilled = -1  # the last node that has saved what its operator may fill only then, as RReLU its noise
    _stopped = False
    ran_to_its_end = False  # set by an in-order source that was not stopped
    rewound: Container[int] = ()  # storages that hold what they did before the forward, until the rerun ends

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
        return [holder for holder in live if holder is not None and (holder.slot not in ready or holder is opened)]

    @property
    def is_last(self) -> bool:
        """Whether this graph task has nothing left to open. Mostly one look: backward opens first what was saved
        last."""
        return all((holder := ref()) is None or holder.slot in self.ready for ref in self.frame.holders)

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
        self._count = len(holders)
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
        elif self.rewound and _torch.has_storage(given) and _torch.storage_id(given) in self.rewound:
            (tensor,) = without_recording(_torch.clones, [given])
        elif kind is Tensor and given._version == 0:
            self._unfilled = node_count()
        if slot < self._count:
            holder = frame.holders[slot]()
            if holder is not None:
                ready, saved = self.ready, holder.saved
                now = None if kind is Tensor and given._base is None else parameter_in(given)
                if now != saved:
                    self._compare_parameters(holder, now)
                if (slot not in ready or holder is self.holder) and (saved is None or not saved[2]):
                    check = frame.check
                    if check is not None and (found := check(tensor)) != holder.metadata:
                        self._note_mismatch(holder, found, given)
                    ready[slot] = tensor
                    self._versions[slot] = tensor._version
        elif frame.complete and not self._stopped:
            raise errors.too_many(frame, self._count, user_line())
        # An operator that has yet to fill what it has saved must still run.
        if slot >= self._last and (self._unfilled != node_count() or self._stopped):
            self._stopped = True
            raise _Stop
        return tensor

    _torch.mark_as_torchs_own(pack)

    def _compare_parameters(self, holder: Holder, found: Shown | None) -> None:
        """Where either run saves a parameter or a view of one, the other must save that very one, unwritten; but those
        that the function makes itself are new each time."""
        saved: Shown | None = holder.saved
        if saved is None or found is None or (saved[0] != found[0] and self.frame.source.knows((saved[3], found[3]))):
            raise errors.other_parameter(self.frame, holder.slot, user_line(), saved is not None, found is not None)
        if saved[0] == found[0] and saved[1] != found[1]:
            raise errors.changed(self.frame, named("a parameter", found[3]), saved[1], found[1])

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
                raise
        finally:
            here["region"], here["depth"] = region, depth
        self._check_outcome()

    def _explained(self, error: Any) -> Any:
        """An error, with what is known besides. Nothing that has been recomputed is to be used."""
        self.ready.clear()
        notes = [f"This happened during the recompute of {self.frame.place}."]
        if type(error) in (RuntimeError, errors.MismatchError) and (hint := self.frame.source.hint(None, None)):
            notes.append(hint)
        error.__notes__ = [*getattr(error, "__notes__", ()), *notes]  # as `add_note` does, since Python 3.11
        if isinstance(error, errors.CheckpointError) and self.frame.on_error is not None:
            self.frame.on_error(error)
        return error

    def _check_outcome(self) -> None:
        frame, ready = self.frame, self.ready
        if self._mismatches:
            _, expected, found, _ = self._mismatches[0]
            shown = 1 if type(expected) is Evidence else 3  # all that is computed from the first one differs as well
            hint = frame.source.hint(expected, found)
            raise self._explained(errors.different_metadata(frame, _node_name(), self._mismatches, shown, hint))
        for slot, version in self._versions.items():
            tensor = ready[slot]
            if tensor is not None and tensor._version != version:
                if slot == self.holder.slot:
                    raise self._explained(errors.overwritten(frame))
                del ready[slot]  # perhaps nobody asks for it, as in plain code that works
        if self.ran_to_its_end:  # the last slot that is wanted should have stopped it
            count, last = len(frame.holders), self.holder.slot
            if frame.early_stop or frame.complete:
                last = min(self._last, count - 1)
            if self._slot < last:
                raise self._explained(errors.different_number(frame, last, _node_name(), count, self._slot + 1))


def _node_name() -> str:
    node = _torch.current_node()
    return "a read outside of backward" if node is None else str(node.name())


# ---- what recompute starts from

# Formatted only when it is needed: (parent, key) stands for `parent[key]`, an operator for what it reads.
Name = str | tuple[object, object] | object


def named(name: Name, tensor: Tensor | None = None) -> str:
    """A tensor as messages name it."""
    if isinstance(name, tuple):
        parent, key = name
        name = f"{named(parent)}.{key}" if isinstance(key, Field) else f"{named(parent)}[{key!r}]"
    text = name if isinstance(name, str) else "a tensor that it saved" if name is None else f"what {name} read"
    if tensor is None:
        return text
    return f"{text} ({tensor.dtype} tensor of shape {tuple(_torch.shape_of(tensor))})".replace("torch.", "")


def root_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of; itself, if of nothing."""
    return tensor if tensor._base is None else tensor._base


def is_parameter(root: Tensor) -> bool:
    """Whether a region refers to this tensor and to its views rather than saving them (rule 2)."""
    kind = type(root)
    return kind is _Parameter or (kind is not Tensor and isinstance(root, _Parameter))


def parameter_in(tensor: Tensor) -> Shown | None:
    """What of a parameter a tensor shows, if any."""
    kind = type(tensor)
    if kind is _Parameter:
        return id(tensor), tensor._version, True, tensor
    root = tensor._base if kind is Tensor else tensor
    return (id(root), tensor._version, root is tensor, root) if root is not None and is_parameter(root) else None


# The id of a parameter, its version, whether it is all of it, and itself: last, so that no two tensors are compared.
Shown = tuple[int, int, bool, Tensor]


def copy_of(tensor: Tensor, version: int) -> Tensor:
    """A copy that others may write, at the version that the original had: saved versions are compared."""
    copy = _torch.copy(tensor)
    _torch.set_version(copy, version)
    return copy


def _alias(tensor: Tensor) -> Tensor:
    """A detached alias, made unseen: a subclass runs operators for it."""
    return _torch.alias(tensor) if type(tensor) is Tensor else without_recording(_torch.alias, tensor)


class Held:
    """A tensor from outside of a region (or kept inside) that its recompute starts from.

    | what it is | what is held | whose version is guarded (rule 8) |
    |---|---|---|
    | a parameter, or a view of one (rule 2) | the tensor, or an alias | its own |
    | an argument of a rerun (`in_graph`) | what autograd saves for an operator, with its graph | its own, by autograd |
    | anything else, no hooks around | an alias | its own |
    | ... hooks of the user around | what they made of it | a tensor's in that, else its own while it lives |
    | ... a region of ours around | a `Holder` there | nobody's: a region tells versions apart |
    | ... a `Mover` | a copy | nobody's |
    """

    __slots__ = ("_guard", "_hooks", "_unpack", "_version", "is_parameter", "name", "packed")

    def __init__(self, tensor: Tensor, hooks: _torch.Hooks | Mover | None, name: Name, in_graph: bool = False) -> None:
        self.name = name
        self._hooks = hooks
        self._unpack: Callable[[Any], Tensor] | None = None  # None: what is held, at this version
        self._version = 0
        self._guard: Any = None  # where it is packed: the tensor whose version counts
        if in_graph and hooks is None and type(tensor) is Tensor and tensor._base is None and tensor.requires_grad:
            self.packed: Any = _save_input(tensor, False)  # fast path of what follows
            self._unpack, self.is_parameter = _unpack_saved, False
            return
        root = root_of(tensor)
        is_ours = type(hooks) is not tuple or is_internal(hooks)
        # A leaf lives as long as its graph: there is nothing to gain by saving it elsewhere, but users' hooks may look.
        self.is_parameter = is_parameter(root) or (is_ours and root.requires_grad and root.is_leaf)
        if in_graph and self.is_parameter:
            self.packed = tensor
        elif in_graph and not tensor.is_inference():
            self.packed, self._unpack = _save_input(tensor, False), _unpack_saved
        else:
            alias = self.packed = tensor if self.is_parameter and root is tensor else _alias(tensor)
            stays = hooks is None or self.is_parameter or tensor.is_meta or _torch.is_cast_of_parameter(root)
            if isinstance(hooks, Mover) and not stays and hooks.takes(alias):
                self.packed, self._unpack = without_recording(hooks.send, alias), Moved.bring
            elif type(hooks) is tuple and not stays:
                pack, self._unpack = hooks
                self.packed = pack(tensor if self._unpack is unpack else alias) if is_ours else without_recording(pack, alias)
        if self._unpack is None:
            self._version = _torch.version(self.packed)
        elif not is_ours:  # what they made may lie on the same memory, and outlive the tensor
            made = self.packed if type(self.packed) is tuple else (self.packed,)
            live = next((part for part in made if isinstance(part, Tensor)), tensor)
            self._guard, self._version = _ref(live), _torch.version(live)

    @property
    def moved(self) -> Moved | None:
        """What it is, if it waits elsewhere."""
        return self.packed if type(self.packed) is Moved else None

    @property
    def is_packed(self) -> bool:
        """Whether fetching it may cost a copy or a recompute."""
        return self._unpack is not None

    def freeze(self, copied: Callable[[], Tensor] | None = None) -> None:
        """The tensor is about to be written by the region itself: hold a copy from here on. `copied` makes one, where
        the tensor is at hand: hooks of others may be slow, or recompute."""
        unpack_ = self._unpack
        if unpack_ is None:
            self.packed = without_recording(_torch.clone_storage, self.packed)
            self._version, self.is_parameter = _torch.version(self.packed), False
        elif unpack_ is Moved.bring:
            self.packed.settle()
        elif unpack_ is identity:
            # To pack once more would be a slot that the forward did not have: what was delivered becomes the copy.
            copy = without_recording(_torch.clone_storage, self.packed)
            _torch.set_version(copy, _torch.version(self.packed))
            torch.utils.swap_tensors(self.packed, copy)
        elif unpack_ is not unpack:  # an enclosing region of ours tells versions apart
            pack = cast(_torch.Hooks, self._hooks)[0]
            self.packed = without_recording(
                lambda packed: pack(copied() if copied else unpack_(packed).clone()), self.packed
            )
            self._guard = None

    def fetch(self, where: object) -> Tensor:
        tensor = live = self.packed
        if self._unpack is not None:
            live = self._guard and self._guard()
            try:
                tensor = self._unpack(tensor)
            except RuntimeError as error:  # of autograd, about an argument
                if isinstance(error, errors.CheckpointError) or "modified by an inplace" not in str(error):
                    raise
                raise errors.changed(where, named(self.name)) from error
        if live is not None and (version := _torch.version(live)) != self._version:
            raise errors.changed(where, named(self.name, live), self._version, version)
        return tensor  # type: ignore[no-any-return]


_save_input, _unpack_saved = _torch.save_input, _torch.SavedTensor.unpack
