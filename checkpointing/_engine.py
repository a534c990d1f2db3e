"""The engine: what autograd stores in place of the tensors that a region saves, and how they come back.

While a region runs, autograd hands every tensor that it would save to `Frame.pack` and stores the small `Holder`
that it gets back. When backward opens a holder, the frame asks its *source* (rerun or replay) to bring slots back;
the source calls `deliver(slot, tensor)` for that slot and for whatever else it passes on the way. (A rerun passes
all slots in order, as autograd's pack hook: it delivers through `Recompute.packer`, which counts them.) Checks, early
stop and lifetimes live here, once; a source only knows how to compute.

Who owns what (rule 9, no reference ever points back, so nothing here needs the garbage collector):

    autograd graph -> Holder -> Frame -> Source -> inputs;  Frame -weak-> Holder;  graph task -weak-> Frame

The rules that tests cite:

1. The innermost region owns what is saved inside it: autograd asks the innermost hooks only.
2. A region's inputs are saved by whatever encloses it; leaves that require grad are referenced, never copied.
3. Recompute starts as if no region were active (`_Thread.depth` and `_Thread.region`).
4. A recomputed tensor lives until the node that asked for it has run, and never past its graph task.
5. Recompute no more than needed: `deliver` stops a rerun at the last live holder.
6. Backward inside a region works: a frame may be opened before its region has ended.
7. Bit-equal; recompute leaves RNG and buffers alone. 8. Never silently wrong. 9. Nothing outlives its use.
10. Grad mode off: a region is a plain call.

Rejected: keeping recomputed tensors on the holders (torch): a second read of `ctx.saved_tensors` then fails, and a
failed backward leaves them behind. Here they end with the graph task, whatever becomes of it.
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from types import CodeType, FrameType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from . import _torch, errors
from ._offload import Moved, Mover

# Bound once: these run for every saved tensor.
_ref = weakref.ref
_getframe = sys._getframe
_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, _torch.set_grad_enabled
_current_node = _torch.current_node
_graph_exec_group = _torch.graph_exec_group
_graph_task_id = _torch.graph_task_id
_node_count = _torch.node_count
_Parameter = torch.nn.Parameter
_at_graph_task_end = _torch.at_graph_task_end
_in_batched_backward = _torch.in_batched_backward
_PythonNode = _torch.PythonNode
_backward_code = _torch.run_backward_code

Line = tuple[CodeType, int]  # where code was running: cheap to note, see `_line`


class _Thread(threading.local):
    """What this thread is doing. `depth` counts nested recomputes and what else no tape should see, `aside` the latter
    alone; `region` is where `keep` goes.

    Hot code goes through `thread.__dict__`, which is this thread's own: one slow access instead of many.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.aside = 0
        self.region: Keeper | None = None
        self.computed = False  # what is being saved for an inner region was computed in the enclosing one


thread = _Thread()


class Keeper(Protocol):
    """A region, as code inside it meets it."""

    @property
    def policy(self) -> Any:
        """What holds here, and in regions inside that bring no policy of their own."""

    def keep(self, tensor: Tensor) -> Tensor: ...

    @property
    def see_statistics(self) -> Callable[[Tensor, FrameType], None] | None:
        """Called with vectors that the code in this frame saves and that need no gradient, before their operator runs,
        if anyone wants to know."""

    def once(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call that a recompute must not repeat."""

    def tag(self, tensor: Tensor, name: str) -> Tensor: ...

    def keep_for_inner(self, tensor: Tensor) -> None:
        """A region inside this one keeps the tensor and saves it here: don't recompute it."""

    def look_away(self) -> None:
        """Something happens now that no operator shows."""

    def yield_to_inner(self, change: int) -> None:
        """A region that obeys its policy by itself has been entered inside this one (1), or left (-1)."""


class Source(Protocol):
    """How a frame brings tensors back."""

    @property
    def guards_leaves(self) -> bool | None:
        """Whose versions the engine compares: those of leaves that require grad (False), of all leaves (True), or of
        none (None), because the source does it by itself. Views of leaves count as leaves."""

    @property
    def see_statistics(self) -> Callable[[Tensor, FrameType], None] | None:
        """As for `Keeper`."""

    @property
    def save(self) -> Callable[[Tensor], Any] | None:
        """What a holder must remember of a tensor that autograd saves now; None if nothing."""

    @property
    def at_hand(self) -> Callable[[Holder, Frame], Tensor | None] | None:
        """A quick way to what needs no recompute, if the source has one; it may always answer None."""

    def maker(self, holder: Holder) -> str | None:
        """What has made the tensor, for messages, where the source knows."""

    def recompute(self, request: Recompute) -> None:
        """Deliver `request.holder.slot`, and on the way whatever else `request.wants`."""


class Holder:
    """What autograd stores in place of one saved tensor."""

    __slots__ = ("__weakref__", "frame", "metadata", "saved", "slot")

    frame: Frame
    slot: int
    metadata: Any  # what the determinism check compares
    saved: Any  # what the source remembers


class Recomputed:
    """One frame's recomputed tensors in one graph task. It goes with the frame, or with the graph task, whichever ends
    first: `guard` watches an object that autograd's graph task owns (rule 4)."""

    __slots__ = ("__weakref__", "guard", "inputs", "plan", "ready", "stages", "versions")

    def __init__(self) -> None:
        self.ready: dict[int, Tensor | None] = {}  # by slot: delivered; None once its node has it
        self.versions: dict[int, int] = {}  # by slot: of what was delivered, where not 0
        self.inputs: dict[Any, Tensor] | None = None  # what the source has fetched and will want again
        self.plan: Any = None  # the source's notes
        self.stages: dict[int, Any] = {}  # and what it holds on to for what is opened later
        self.guard: Any = None


def _forget(frame: weakref.ref[Frame], key: Any, _: object = None) -> None:
    alive = frame()
    if alive is not None:
        alive.tasks.pop(key, None)


class _Stop(BaseException):
    """Ends a rerun early. A BaseException, so that `except Exception` in the region does not catch it; and sticky:
    whoever swallows it meets it again at the next saved tensor. Made anew each time: an exception that outlives its
    handler holds on to every frame that it passed."""


class Frame:
    """One region: its holders, its source, and what has been recomputed for which graph task."""

    __slots__ = (
        "__weakref__",
        "check",
        "checksums",
        "complete",
        "early_stop",
        "entered_from",
        "holders",
        "leaves",
        "lock",
        "name",
        "on_error",
        "parameters",
        "source",
        "tasks",
        "title",
    )

    def __init__(
        self,
        source: Source,
        name: str,
        entered_from: Line,
        early_stop: bool = True,
        check: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.source = source
        self.name = name
        self.entered_from = entered_from
        self.early_stop = early_stop
        self.check = check
        self.holders: list[weakref.ref[Holder]] = []
        self.leaves: dict[int, int] = {}  # by slot: versions of leaves, which nobody else guards
        self.parameters: dict[int, int] = {}  # by slot: versions of parameters that the source does not recompute
        self.checksums: dict[int, int] | None = None  # by slot: of what a tape inside saves where a rerun may differ
        self.complete = False  # backward may run before the region has ended (rule 6)
        self.on_error: Callable[[errors.CheckpointError], None] | None = None
        self.title: str | None = None  # how messages begin, where other code matches on it
        self.tasks: dict[Any, Recomputed] = {}
        self.lock = threading.RLock()  # the worker threads of one graph task may open one frame at once

    def __str__(self) -> str:
        return self.title or self.place

    @property
    def place(self) -> str:
        code, instruction = self.entered_from
        return f"region '{self.name}' (entered at {code.co_filename}:{_line(code, instruction)})"

    def packer(self) -> Callable[[Tensor], Holder]:
        """Autograd's pack hook for this region; it runs once per saved tensor."""
        source, check = self.source, self.check
        plain_check = check is metadata_of
        save, guards, see_statistics = source.save, source.guards_leaves, source.see_statistics
        if plain_check and save is None and guards is None and see_statistics is None:
            return self._pack
        is_quick = plain_check or check is None
        holders, leaves, parameters = self.holders, self.leaves, self.parameters
        unfilled: list[_Unfilled] = []  # of the last node, to be checked again when its operator has run
        node = -1

        def pack(tensor: Tensor) -> Holder:
            nonlocal node
            holder = Holder()
            holder.frame = self
            holder.slot = slot = len(holders)
            if plain_check:
                try:
                    holder.metadata = (tensor.shape, tensor.dtype, tensor.device)
                except RuntimeError:
                    holder.metadata = metadata_of(tensor)
            elif check is None:
                holder.metadata = None
            else:
                if unfilled and node != _node_count():
                    for evidence in unfilled:
                        evidence.settle()
                    unfilled.clear()
                holder.metadata = check(tensor)
                if may_be_unfilled(tensor) or (thread.aside and not tensor.requires_grad):  # in `opaque()`, unseen
                    holder.metadata = _Unfilled(tensor, holder.metadata, check)
                    unfilled.append(holder.metadata)
                    node = _node_count()
            if save is not None:
                holder.saved = save(tensor)
            if guards is not None:
                if type(tensor) is _Parameter and tensor.requires_grad and is_quick:
                    holder.saved = tensor  # there is nothing to recompute (rule 2)
                    parameters[slot] = tensor._version
                elif tensor.is_leaf:
                    if tensor.requires_grad or (guards and not thread.computed):
                        leaves[slot] = tensor._version
                elif tensor._base is not None and tensor._base.is_leaf:
                    leaves[slot] = tensor._version
            if see_statistics is not None and tensor.dim() == 1 and tensor.is_leaf and not tensor.requires_grad:
                see_statistics(tensor, _getframe(1))
            holders.append(_ref(holder))
            return holder

        _torch.mark_as_torchs_own(pack)
        return pack

    def _pack(self, tensor: Tensor) -> Holder:
        """The pack hook where the source compares metadata and wants to know nothing else."""
        holder = Holder()
        holder.frame = self
        holder.slot = len(self.holders)
        try:
            holder.metadata = (tensor.shape, tensor.dtype, tensor.device)
        except RuntimeError:
            holder.metadata = metadata_of(tensor)
        self.holders.append(_ref(holder))
        return holder

    _torch.mark_as_torchs_own(_pack)

    def parameter_of(self, holder: Holder) -> Tensor:
        """What is not recomputed."""
        parameter: Tensor = holder.saved
        version = self.parameters[holder.slot]
        if parameter._version != version:
            raise errors.changed(self, named("a leaf", parameter), version, parameter._version)
        return parameter

    def bring_back(self, holder: Holder, key: Any) -> Tensor:
        """Recompute for a holder whose tensor is not at hand: once per slot and graph task."""
        group = _graph_exec_group()
        if group is not None:
            key = group  # it stands for the graph task
        with self.lock:
            task = self.tasks.get(key)
            if task is None:
                task = Recomputed()
                if key != -1:  # outside of backward (`grad_fn._saved_self`) nothing is remembered
                    forget = partial(_forget, _ref(self), key)
                    owner = group
                    if owner is None:
                        owner = partial(forget)
                        _at_graph_task_end(owner)  # called if the backward succeeds, and freed in any case
                    task.guard = _ref(owner, forget)
                    self.tasks[key] = task
                if self.parameters:
                    task.ready.update(dict.fromkeys(self.parameters))
            ready, slot = task.ready, holder.slot
            tensor = ready.get(slot)  # another thread may have been quicker
            if tensor is None:
                if self.title is not None and slot in task.ready and type(key) is not int:
                    raise errors.overlapping(self)
                Recompute(self, task, holder).run()
                tensor = ready[slot]
                assert tensor is not None  # `run` raises if it can't deliver
            ready[slot] = None
        return tensor


def copy_of(tensor: Tensor, version: int) -> Tensor:
    """A copy that others may write, at the version that the original had: saved versions are compared."""
    copy = _torch.copy(tensor)
    if version > 0:
        _torch.set_version(copy, version)
    return copy


def identity(tensor: Tensor) -> Tensor:
    """The unpack hook of a rerun, whose graph stores tensors."""
    return tensor


def checked(hooks: _torch.Hooks) -> _torch.Hooks:
    """These hooks of a region around, or of its rerun: what they are given in the rerun must be what it was in the
    forward, bit for bit."""
    pack, unpack_ = hooks
    rerun = getattr(pack, "__self__", None)

    def checked_pack(tensor: Tensor) -> Any:
        found = without_recording(checksum, tensor)
        if type(rerun) is Recompute:
            rerun.expect(found)
        packed = pack(tensor)
        if type(packed) is Holder:
            if packed.frame.checksums is None:
                packed.frame.checksums = {}
            packed.frame.checksums[packed.slot] = found
        return packed

    return checked_pack, unpack_


def is_internal(hooks: _torch.Hooks) -> bool:
    """Whether these hooks are those of a region or of a rerun, rather than the user's."""
    return hooks[1] is unpack or hooks[1] is identity


def unpack(holder: Holder) -> Tensor:
    """Autograd's unpack hook, the same for all regions."""
    frame = holder.frame
    key = _graph_task_id()
    task = frame.tasks.get(key)
    tensor = None if task is None else task.ready.get(holder.slot)
    if tensor is None:
        at_hand = frame.source.at_hand
        if at_hand is not None:
            tensor = at_hand(holder, frame)
        elif holder.slot in frame.parameters:
            tensor = frame.parameter_of(holder)
        if tensor is None:
            tensor = frame.bring_back(holder, key)
    else:
        task.ready[holder.slot] = None  # type: ignore[union-attr]
    try:
        reader = _getframe(1)
    except ValueError:  # a thread of the autograd engine
        return tensor
    if reader.f_code is not _backward_code:
        _keep_until_done(holder, tensor)
    return tensor


def _keep_until_done(holder: Holder, tensor: Tensor) -> None:
    """Python code reads this tensor, rather than the autograd engine for an operator of its own. The backward of a
    custom Function may read `ctx.saved_tensors` again: its tensors stay until it has run (rule 4)."""
    node = _current_node()
    task = holder.frame.tasks.get(_graph_exec_group() or _graph_task_id())
    if task is None or not isinstance(node, _PythonNode):
        return
    slot = holder.slot
    task.ready[slot] = tensor
    handle: Any = None
    weak = _ref(task)  # a backward that fails in this node leaves the hook behind

    def done(*_: Any) -> None:
        nonlocal handle
        handle.remove()
        handle = None
        task = weak()
        if task is not None and slot in task.ready:
            task.ready[slot] = None

    handle = node.register_hook(done)  # type: ignore[attr-defined]


# Formatted only when it is needed: (parent, key) stands for `parent[key]`, an operator for what it reads.
Name = str | tuple[object, object] | object


def named(name: Name, tensor: Tensor | None = None) -> str:
    """A tensor as messages name it."""
    if isinstance(name, tuple):
        name = f"{name[0]}[{name[1]!r}]"
    text = name if isinstance(name, str) else "a tensor that it saved" if name is None else f"what {name} read"
    return text if tensor is None else f"{text} ({describe(tensor)})"


def root_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of; itself, if of nothing."""
    base = tensor._base
    return tensor if base is None or (tensor.requires_grad and _torch.is_leaf(tensor)) else base


def is_parameter(root: Tensor) -> bool:
    """Whether a region refers to this tensor and to its views rather than saving them (rule 2)."""
    return root.is_leaf and (root.requires_grad or type(root) is nn.Parameter)


class Held:
    """A tensor from outside of a region (or kept inside) that its recompute starts from.

    It is saved by whatever encloses the region, so it may be offloaded, or recomputed itself. Leaves that require
    grad, and views of them, are referenced, never copied (rule 2). Where an alias is held, its version is guarded
    (rule 8); our own frames know versions themselves.
    """

    __slots__ = ("_live", "_pack", "_packed", "_unpack", "_version", "is_parameter", "name")

    def __init__(self, tensor: Tensor, hooks: _torch.Hooks | Mover | None, name: Name) -> None:
        self.name = name
        self._version: int | None = _torch.version(tensor)
        self._unpack: Callable[[Any], Tensor] | None = None
        self._live: Callable[[], Tensor | None] | None = None
        root = root_of(tensor)
        self.is_parameter = is_parameter(root)
        if self.is_parameter and root is tensor:
            self._packed: Any = tensor
            return
        alias = _torch.alias(tensor)
        is_inference = self._version < 0  # and its alias is not
        if is_inference:
            self._version = _torch.version(alias)
        stays = hooks is None or self.is_parameter or tensor.is_meta or _torch.is_cast_of_parameter(root)
        if stays or (type(hooks) is Mover and not hooks.takes(alias)):
            self._packed = alias
        elif type(hooks) is Mover:
            self._packed = without_recording(hooks.send, alias)
            self._unpack = Moved.bring
            self._version = None  # a copy, which nobody can change
        else:
            self._pack, self._unpack = cast(_torch.Hooks, hooks)
            pack = self._pack
            if self._unpack is unpack:
                computed = thread.computed
                thread.computed = computed or not root.is_leaf  # and may be written when it has been used
                try:
                    self._packed = pack(alias)
                finally:
                    thread.computed = computed
            else:
                users = _torch.storage_users(alias), sys.getrefcount(alias)
                self._packed = without_recording(pack, alias)
                # Hooks that did not copy hold the storage: then an alias costs nothing, and guards it for good.
                shares = _torch.storage_users(alias) > users[0] or sys.getrefcount(alias) > users[1]
                if shares or not is_inference:
                    self._live = (lambda: alias) if shares else weakref.ref(tensor)

    @property
    def alias(self) -> Tensor:
        """The tensor itself, where no hooks have packed it."""
        return cast(Tensor, self._packed)

    @property
    def moved(self) -> Moved | None:
        """What it is, if it waits elsewhere."""
        return self._packed if type(self._packed) is Moved else None

    @property
    def is_packed(self) -> bool:
        """Whether fetching it may cost a copy or a recompute."""
        return self._unpack is not None

    def freeze(self) -> None:
        """The tensor is about to be written by the region itself: hold a copy from here on."""
        if self._unpack is unpack:  # an enclosing region of ours tells versions apart
            return
        if self._unpack is Moved.bring:
            self._packed.settle()
            return
        if self._unpack is None:
            self._packed = without_recording(_torch.clone_storage, self._packed)
        elif self._unpack is identity:
            # To pack once more would be a slot that the forward did not have: what was delivered becomes the copy.
            copy = without_recording(_torch.clone_storage, self._packed)
            _torch.set_version(copy, _torch.version(self._packed))
            torch.utils.swap_tensors(self._packed, copy)
        elif self._live is not None and not isinstance(self._live, weakref.ref):
            pack, unpack_ = self._pack, self._unpack
            self._packed = without_recording(lambda packed: pack(unpack_(packed).clone()), self._packed)
        self._live = None
        self._version = 0 if self._unpack is not None else _torch.version(self._packed)
        self.is_parameter = False

    def fetch(self, where: Frame) -> Tensor:
        if self._unpack is None:
            tensor: Tensor = self._packed
            now: int | None = _torch.version(tensor)
        else:
            tensor = self._unpack(self._packed)
            live = None if self._live is None else self._live()
            now = self._version if live is None else _torch.version(live)
        if now != self._version and self._version is not None:
            raise errors.changed(where, named(self.name, tensor), self._version, now)
        return tensor

    @property
    def is_guarded(self) -> bool:
        return self._version is not None

    def stop_guarding(self) -> None:
        """The recompute does not start from what the tensor holds later."""
        self._version = None


class Recompute:
    """One recompute under way: the engine's side of the seam."""

    __slots__ = (
        "_count",
        "_last",
        "_mismatches",
        "_slot",
        "_stopped",
        "_unchecked",
        "_unfilled",
        "frame",
        "holder",
        "ran_to_its_end",
        "task",
        "written",
    )

    def __init__(self, frame: Frame, task: Recomputed, holder: Holder) -> None:
        self.frame = frame
        self.task = task
        self.holder = holder
        self._mismatches: tuple[errors.Mismatch, ...] = ()
        self._unchecked: tuple[tuple[int, Any, Tensor], ...] = ()  # what may be filled only later
        self._count = -1  # the slots that there are, for a source that passes them in order
        self._slot = -1  # which it has passed
        self._last = sys.maxsize  # where it is to be stopped
        self._unfilled = -1  # see `may_be_unfilled`: the last node that has saved such
        self.ran_to_its_end = False  # set by an in-order source that was not stopped
        self._stopped = False
        self.written: set[int] | None = None  # storages that an in-order source writes again

    def wants(self, holder: Holder | None) -> bool:
        """Whether a recompute that passes this holder's slot should deliver it."""
        return holder is not None and (holder.slot not in self.task.ready or holder is self.holder)

    def wanted(self, refs: Iterable[weakref.ref[Holder]] | None = None) -> list[Holder]:
        """The live holders that this graph task may still open, by slot; of all or of these."""
        ready, opened = self.task.ready, self.holder
        live = [ref() for ref in (self.frame.holders if refs is None else refs)]
        return [holder for holder in live if holder is not None and (holder.slot not in ready or holder is opened)]

    @property
    def is_last(self) -> bool:
        """Whether this graph task has nothing left to open. Mostly one look: backward opens first what was saved
        last."""
        ready = self.task.ready
        return all((holder := ref()) is None or holder.slot in ready for ref in self.frame.holders)

    @property
    def whole_region(self) -> bool:
        """Early stop is off: recompute the region to its end, whatever is wanted."""
        return not self.frame.early_stop

    def deliver(self, holder: Holder, tensor: Tensor) -> None:
        """Take one recomputed tensor, for one of the holders that are wanted."""
        check = self.frame.check
        if check is not None:
            metadata = check(tensor)
            if holder.metadata != metadata:
                self._mismatch(holder.slot, holder.metadata, metadata, None, self.frame.source.maker(holder))
        self.task.ready[holder.slot] = tensor

    def packer(self) -> Callable[[Tensor], Tensor]:
        """Autograd's pack hook for a rerun: delivers what autograd saves to the slots in order, and raises the stop
        signal at the last one that is wanted (rule 5). What it returns is for the graph of the rerun: a tensor, so
        that backward inside the rerun works (rule 6); detached, because a graph must not own itself (autograd has
        already detached what is no output of the operator).
        """
        frame = self.frame
        self._count = last = len(frame.holders)
        if frame.early_stop:
            while True:
                last -= 1
                if self.wants(frame.holders[last]()):
                    break
            self._last = last
        return self._pack

    def _pack(self, given: Tensor) -> Tensor:
        self._slot = slot = self._slot + 1
        frame, tensor = self.frame, given
        if tensor.requires_grad:
            tensor = tensor.detach()
        elif tensor._version == 0 and type(tensor) is Tensor:
            self._unfilled = _node_count()
        if self.written is not None and _torch.has_storage(tensor) and _torch.storage_id(tensor) in self.written:
            tensor = copy_of(tensor, tensor._version)
        if slot < self._count:
            holder, ready, check = frame.holders[slot](), self.task.ready, frame.check
            if holder is not None and (slot not in ready or holder is self.holder):  # `wants`, without a call
                metadata = holder.metadata
                if check is metadata_of:
                    try:
                        found: Any = (tensor.shape, tensor.dtype, tensor.device)
                    except RuntimeError:
                        found = metadata_of(tensor)
                    if metadata != found:
                        self._mismatch(slot, metadata, found, given)
                elif check is not None:
                    found = check(tensor)
                    if type(metadata) is _Unfilled:
                        if metadata.before != found:
                            self._unchecked += ((slot, metadata, tensor),)
                    elif metadata != found:
                        self._mismatch(slot, metadata, found, given)
                ready[slot] = tensor
                if tensor._version:
                    self.task.versions[slot] = tensor._version
        elif frame.complete and not self._stopped:
            raise errors.too_many(frame, self._count, user_line())
        if slot >= self._last and (self._unfilled != _node_count() or self._stopped):
            self._stopped = True
            raise _Stop(self)
        return tensor

    _torch.mark_as_torchs_own(_pack)

    def expect(self, found: int) -> None:
        """A tape inside is about to save a tensor with this checksum."""
        checksums = self.frame.checksums or {}
        saved = checksums.get(self._slot + 1, found)
        # If it is none of the others, a kernel may have given other bits, or a generator.
        if saved != found and found in checksums.values():
            raise errors.read_in_another_order(self.frame, user_line())

    def _mismatch(self, slot: int, expected: Any, found: Any, given: Tensor | None, made_by: str | None = None) -> None:
        """`given`: what the rerun saves, which knows what made it; None in replay, which runs no line of the user's."""
        lines = []
        if type(expected) is _Unfilled:
            expected = expected.before
        if type(expected) is Evidence:
            made_by = made_by or expected.made_by
            lines = [f"saved in the forward at {describe_line(expected.line)}"]
        if given is not None:
            made_by = made_by or _maker_of(given)
            lines.append(f"saved in the recompute at {user_line()}")
        details = f"slot {slot}" if made_by is None else f"slot {slot}, made by {made_by}"
        self._mismatches += ((slot, expected, found, "; ".join([details, *lines])),)

    def _check_filled(self) -> None:
        """What a rerun has saved before the operator filled it."""
        for slot, expected, tensor in self._unchecked:
            found = expected.check(tensor)
            if expected != found:
                self._mismatch(slot, expected, found, None)
        self._unchecked = ()
        self._mismatches = tuple(sorted(self._mismatches, key=lambda mismatch: mismatch[0]))

    def _explain_mismatches(self) -> errors.CheckpointError:
        (slot, expected, found, details), *rest = self._mismatches  # in the order in which they were computed
        if type(expected) is Evidence:  # all that is computed from the first one differs as well
            rest, others = [], [other for other, *_ in rest]
            details += f"; so do {len(others)} more, in slots {others}" if others else ""
        return errors.different_metadata(self.frame, _node_name(), [(slot, expected, found, details), *rest])

    def run(self) -> None:
        """Let the source work, with this thread's regions out of the way (rule 3)."""
        frame = self.frame
        here = thread.__dict__
        region, depth = here["region"], here["depth"]
        try:
            here["region"], here["depth"] = None, depth + 1
            try:
                if _in_batched_backward():
                    with _torch.outside_of_batch():
                        frame.source.recompute(self)
                else:
                    frame.source.recompute(self)
            except _Stop as stop:
                if stop.args[0] is not self:
                    raise
            if self._unchecked:
                self._check_filled()
        except _Stop:  # of an enclosing rerun
            raise
        except BaseException as error:
            # The other case is what user code has made of the stop signal.
            if not (self._stopped and isinstance(error, Exception | SystemExit)):
                add_note(error, f"This happened during the recompute of {frame.place}.")
                if isinstance(error, errors.CheckpointError) and frame.on_error is not None:
                    frame.on_error(error)
                raise
        finally:
            here["region"], here["depth"] = region, depth
        if self._mismatches or frame.leaves or self._count >= 0:
            found = self._find_error()
            if found is not None:
                self._give_up(found)
                try:
                    raise found
                finally:
                    del found  # its traceback holds this frame

    def _give_up(self, error: errors.CheckpointError) -> None:
        frame = self.frame
        if frame.title is not None:
            add_note(error, f"This happened during the recompute of {frame.place}.")
        self.task.ready.clear()
        if frame.on_error is not None:
            frame.on_error(error)

    def _find_error(self) -> errors.CheckpointError | None:
        frame, ready = self.frame, self.task.ready
        if self._mismatches:
            return self._explain_mismatches()
        if frame.leaves:
            for slot, version in frame.leaves.items():
                leaf = ready.get(slot)
                if leaf is not None and leaf._version != version:
                    return errors.changed(frame, named("a leaf", leaf), version, leaf._version)
        if self._count >= 0:
            versions = self.task.versions
            overwritten = []
            for slot, tensor in ready.items():
                if tensor is not None and tensor._version and tensor._version != versions.get(slot):
                    overwritten.append(slot)
            for slot in overwritten:
                if slot == self.holder.slot:
                    return errors.overwritten(frame)
                del ready[slot]  # perhaps nobody asks for it, as in plain code that works
            if self.ran_to_its_end:  # the last slot that is wanted should have stopped it
                count, last = self._slot + 1, self.holder.slot
                if self._last != sys.maxsize:
                    last = self._last
                elif frame.complete:
                    last = len(frame.holders) - 1
                if count <= last:
                    return errors.different_number(frame, last, _node_name(), len(frame.holders), count)
        return None


def add_note(error: BaseException, note: str) -> None:
    """`BaseException.add_note`, which Python 3.10 lacks."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


def metadata_of(tensor: Tensor) -> tuple[Any, torch.dtype, torch.device]:
    """What `determinism_check="metadata"` compares."""
    return (_torch.shape_of(tensor), tensor.dtype, tensor.device)


def may_be_unfilled(tensor: Tensor) -> bool:
    """Whether this may be memory that an operator has saved and will fill only then, such as the noise of RReLU."""
    return not tensor.requires_grad and type(tensor) is Tensor and _torch.version(tensor) == 0


def checksum(tensor: Tensor) -> int:
    """64 bits that depend on every bit of the tensor and on its place."""
    parts = _torch.parts_of(tensor)
    if parts is not None:
        numbers = [checksum(p) if isinstance(p, Tensor) else zlib.crc32(repr(p).encode()) for p in parts]
        return reduce(lambda total, number: (total * 0x100000001B3 + number) & _MASK, numbers, len(numbers))
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    flat = flat.view(_SAME_SIZE[flat.element_size()])
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        # Each element with its position through the finaliser of SplitMix64, so that no two changes cancel out.
        mixed = flat[start : start + _CHUNK].to(torch.int64)
        mixed = mixed + torch.arange(start + 1, start + 1 + mixed.numel(), device=flat.device) * -0x61C8864680B583EB
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += int(mixed.sum())
    return total & _MASK


_MASK = 0xFFFFFFFFFFFFFFFF
_CHUNK = 1 << 22  # elements: the integers in between take eight bytes each


_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Unfilled:
    """What a check says of such memory: before the operator has run, and after. Which of them counts, nobody knows: the
    first, if the region itself has written the tensor since."""

    __slots__ = ("_after", "_tensor", "before", "check")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Tensor, before: Any, check: Callable[[Tensor], Any]) -> None:
        self._tensor: Tensor | None = tensor
        self._after: Any = None
        self.before = before
        self.check = check

    def settle(self) -> None:
        if self._tensor is not None:
            self._after = self.check(self._tensor)
            self._tensor = None

    def __eq__(self, found: object) -> bool:
        self.settle()
        return bool(found == self.before or found == self._after)


class Evidence:
    """What a costly check has found in a tensor, and where that was saved; equal if the finding is."""

    __slots__ = ("finding", "line", "made_by")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: Tensor, finding: object) -> None:
        self.finding = finding
        self.line = entered_from(sys._getframe(1))
        self.made_by = _maker_of(tensor)

    def __eq__(self, other: object) -> bool:
        return type(other) is Evidence and bool(self.finding == other.finding)

    def __str__(self) -> str:
        return str(self.finding)


def _maker_of(tensor: Tensor) -> str | None:
    """The operator that made it, where autograd knows."""
    return None if tensor.grad_fn is None else str(tensor.grad_fn.name())


def describe(tensor: Tensor) -> str:
    """A tensor as messages name it."""
    return f"{tensor.dtype} tensor of shape {tuple(_torch.shape_of(tensor))}".replace("torch.", "")


def entered_from(frame: FrameType) -> Line:
    """Where user code entered a region; `frame` is the caller of the door."""
    code = frame.f_code
    if id(code) not in _user_code:  # a module's `__call__` stands between, or not seen before
        frame = _user_frame(frame)
        code = frame.f_code
    return code, frame.f_lasti


def _line(code: CodeType, instruction: int) -> int | None:
    """`frame.f_lineno`, which searches a table, for a frame that has gone."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return next(lines, code.co_firstlineno)


def depth_of_user(frame: FrameType) -> int:
    """How many frames `frame` is below the innermost one of user code."""
    user, depth = _user_frame(frame), 0
    while frame is not user and frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _user_frame(frame: FrameType) -> FrameType:
    while True:
        code = frame.f_code
        if id(code) in _user_code:
            return frame
        if not code.co_filename.startswith(_NOT_USER_CODE):
            remember(_user_code, code, code)
            return frame
        if frame.f_back is None:
            return frame
        frame = frame.f_back  # a module's `__call__` stands between


# Code objects that are neither torch's nor ours: few, one per place that enters a region. By id, because the hash of a
# code object is that of all its constants.
_user_code: dict[int, CodeType] = {}


def remember(known: dict[int, Any], code: CodeType, value: Any) -> None:
    """`value`, which holds the code: else its id might be another's one day. A program that makes code as it runs makes
    more and more of it, so not forever."""
    if len(known) >= 10_000:
        known.clear()
    known[id(code)] = value


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, however many of torch's and our frames stand between."""
    depth, user = 1, _user_frame(sys._getframe(1))
    while sys._getframe(depth) is not user:
        depth += 1
    warnings.warn(message, category, stacklevel=depth + 1)


@contextmanager
def aside() -> Iterator[None]:
    """What runs inside is no tape's business."""
    thread.depth += 1
    thread.aside += 1
    try:
        yield
    finally:
        thread.depth -= 1
        thread.aside -= 1


def without_recording(function: Callable[[Any], Any], value: Any) -> Any:
    """Call a check or a hook of the user so that no tape sees what it does."""
    here = thread.__dict__
    depth, aside = here["depth"], here["aside"]
    grad_mode = _is_grad_enabled()
    try:
        here["depth"], here["aside"] = depth + 1, aside + 1
        _set_grad_enabled(False)
        if torch.is_inference_mode_enabled():  # what comes of it may be wanted outside
            with torch.inference_mode(False), torch.no_grad():
                return function(value)
        return function(value)
    finally:
        _set_grad_enabled(grad_mode)
        here["depth"], here["aside"] = depth, aside


_NOT_USER_CODE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def user_line() -> str:
    """Where user code is now, innermost: file, line, and the expression that runs (before Python 3.11: the line)."""
    frame = _user_frame(sys._getframe(1))
    return describe_line((frame.f_code, frame.f_lasti))


def describe_line(where: Line) -> str:
    code, instruction = where
    line = _line(code, instruction) or code.co_firstlineno
    text = linecache.getline(code.co_filename, line).rstrip()
    if hasattr(code, "co_positions"):
        first, last, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
        if first == last == line and start is not None and end is not None:
            text = text.encode()[start:end].decode()
    return f"{code.co_filename}:{line}: {text.strip()}"


def stack_of_user() -> str:
    """The lines of user code on the stack, innermost first, one a line."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_USER_CODE):
            lines.append(f"    {frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}\n")
        frame = frame.f_back
    return "".join(lines)


def _node_name() -> str:
    node = _current_node()
    return "a read outside of backward" if node is None else str(node.name())
