"""Frames: the holders that autograd stores for saved tensors, and how their tensors come back.

While a region runs, autograd passes every tensor that it would save to `Frame.pack` and stores the
small `Holder` that it returns. When backward opens a holder, its frame computes the tensor and
others on the way, and delivers them to the `Task`: the tensors of this graph task. How it computes
is up to the kind of frame: a rerun calls a function again, a replay runs recorded operators again.
Checks, errors and lifetimes are here, once.

References, none of which point back, so nothing needs the garbage collector (rule 9):

    autograd graph -> Holder -> Frame -> what a recompute starts from
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

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from weakref import ref as _ref

from torch import Tensor

from .. import _torch, errors
from .._torch import graph_task_id, pop_hooks, push_hooks, run_backward_code
from .check import Check, Evidence
from .threads import Region, thread, within
from .where import Line, described, line_number


class Regions:
    """The regions of this process. (Counts on the class `Frame` would empty Python's caches of its
    attributes at every region.)"""

    entered = 0  # since the last replay
    is_alone = False  # whether one region was entered between backward passes that replay


regions = Regions()


class Holding(NamedTuple):
    """One thing that a recompute starts from, for reports."""

    kind: str
    part: Any  # a `Held` or a tensor
    operator: str | None = None  # that made it, or read it first; or the name of the argument
    note: tuple[str | None, ...] = (None, None)  # the module that ran then, and the user's line


class Holder:
    """The object that autograd stores in place of one saved tensor."""

    __slots__ = ("__weakref__", "frame", "metadata", "saved", "slot")

    frame: "Frame"
    slot: int
    metadata: Any  # for the determinism check
    saved: Any  # what the frame needs to bring the tensor back, besides the slot


class Task(dict[int, Tensor | None]):
    """The recomputed tensors of one frame in one graph task, by slot; None once its node has the
    tensor. They end with the first of the two: `guard` watches an object that the graph task owns
    (rule 4)."""

    guard: Any = None
    mismatches: tuple[errors.Mismatch, ...] = ()  # between the last recompute and the forward


class Stop(BaseException):
    """Ends a rerun early. It is a BaseException, so that `except Exception` in the region does not
    catch it; if it is swallowed, the next saved tensor raises it again. Each is made anew, since an
    exception holds on to the stack frames that it passed."""


def reader() -> str:
    """The node of the autograd graph that asks for a tensor, for messages."""
    node = _torch.current_node()
    return "a read outside of backward" if node is None else str(node.name())


class Frame:
    """One region: its holders, and the recomputed tensors of each graph task."""

    hint: str  # the remedy where a recompute differs from the forward, for messages
    notes: Any = None  # for a report: of the tensors that are saved
    saved_bytes: int | None = None  # that autograd would hold, if that is known without notes
    replays: int | None = None  # of a recorded block: how many windows have run again
    complete = False  # whether the region has ended; backward may run before that (rule 6)
    on_error: Callable[[errors.CheckpointError], None] | None = None
    context: AbstractContextManager[Any] | None = None  # entered around each recompute
    prefix: str | None = None  # of messages, for code that matches torch's
    kind_of_task: type[Task] = Task
    written: frozenset[int] = frozenset()  # storages that regions inside write after reading

    def __init__(self, name: str, entered_from: Line, early_stop: bool, check: Check) -> None:
        self.name = name
        self.entered_from = entered_from
        self.early_stop = early_stop
        self.check = check
        self.holders: list[_ref[Holder]] = []
        self.tasks: dict[Any, Task] = {}
        # Threads of one graph task may open one frame at once, mostly for the same recompute.
        self.lock = threading.RLock()

    def __str__(self) -> str:
        return self.prefix or self.title

    @property
    def title(self) -> str:
        code, _ = self.entered_from
        return (
            f"region '{self.name}' (entered at {code.co_filename}:{line_number(self.entered_from)})"
        )

    # ---- what each kind of frame does in its own way

    def pack(self, tensor: Tensor) -> Holder:
        """Autograd's pack hook; it runs once per saved tensor."""
        raise NotImplementedError

    def at_hand(self, holder: Holder) -> Tensor | None:
        """The tensor of a holder, if it need not be computed."""
        raise NotImplementedError

    def note_written(self, storages: Set[int]) -> None:
        """A region inside writes to these storages."""
        self.written |= storages

    def recompute(self, holder: Holder, task: Task) -> None:
        """Deliver the tensor of this holder, and others that are wanted and computed on the way."""
        raise NotImplementedError

    def maker(self, holder: Holder, tensor: Tensor) -> str | None:
        """The operator that made the tensor of a holder, for messages and reports."""
        return None if tensor.grad_fn is None else tensor.grad_fn.name()

    def holdings(self) -> Iterable[Holding]:
        """Everything that is held now for live holders, without parameters."""
        raise NotImplementedError

    # ---- the region

    def enter(self, region: Region) -> None:
        """From here on autograd saves here, and `keep` and the like go to `region`."""
        here = thread.__dict__
        region.outer = here["region"]
        here["region"] = region
        regions.entered += 1
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
        while inner is not None:  # a region of another thread is not among them
            if inner.outer is region:
                inner.outer = region.outer
                _torch.remove_hooks(self.pack)
            inner = inner.outer
        return False

    # ---- backward

    def bring_back(self, holder: Holder) -> Tensor:
        """Recompute for a holder, once per slot and graph task."""
        with self.lock:
            task, slot = self.task(), holder.slot
            if task.get(slot) is None:  # else another thread has computed it
                if slot in task and self.prefix is not None and _torch.graph_exec_group():
                    raise errors.overlapping(self)  # as torch does
                task.pop(slot, None)  # its node has had it, and opens it again
                try:
                    with _torch.profiled_range(f"recompute:{self.name}"):
                        self._answer(holder, task)
                except BaseException as error:
                    task.clear()  # no recomputed tensor is used after an error
                    task.mismatches = ()
                    self._explain(error)
                    raise
            tensor = task[slot]
            assert tensor is not None  # `recompute` raises if it cannot deliver
            task[slot] = None
        return tensor

    def _answer(self, holder: Holder, task: Task) -> None:
        """Recompute, with this thread's regions out of the way (rule 3), and check the outcome."""
        with within(None), _torch.outside_of_batch():
            self.recompute(holder, task)
        if task.mismatches:
            raise errors.different_metadata(self, reader(), task.mismatches)

    def wanted(self, task: Task, order: Callable[..., Iterator[Any]] = iter) -> Iterator[Holder]:
        """The holders that a graph task may still open, by slot; `reversed`: the last one first."""
        for weak in order(self.holders):
            holder = weak()
            if holder is not None and holder.slot not in task:
                yield holder

    def note_mismatch(
        self, holder: Holder, found: Any, tensor: Tensor, task: Task, more: str = ""
    ) -> None:
        """The check has found something else than in the forward."""
        expected, details = holder.metadata, f"slot {holder.slot}"
        made_by = self.maker(holder, tensor)
        if made_by is not None:
            details += f", made by {made_by}"
        if type(expected) is Evidence:
            details += f"; saved in the forward at {described(expected.line)}"
        task.mismatches += ((holder.slot, expected, found, details + more),)

    def _explain(self, error: Any) -> None:
        """Add a note, and the logs of the region, to an error."""
        note = f"This happened during the recompute of {self.title}."
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # `add_note` needs Python 3.11
        if isinstance(error, errors.CheckpointError) and self.on_error is not None:
            self.on_error(error)

    def task(self) -> Task:
        """The tensors of this graph task. They are held until its end, or that of torch's group,
        which joins graph tasks, even if that fails."""
        key: Any = _torch.graph_exec_group() or graph_task_id()
        task = self.tasks.get(key)
        if task is None:
            task = self.kind_of_task()
            # Outside of backward (`grad_fn._saved_self`) there is no end.
            if key != _torch.NO_GRAPH_TASK:
                owner = key
                if type(key) is int:
                    owner = partial(int)
                    _torch.at_graph_task_end(owner)  # owned until then
                weak: Any = _ref(self)  # alive as long as the guard, which it owns
                task.guard = _ref(owner, lambda _: weak().tasks.pop(key))
                self.tasks[key] = task
        return task


def unpack(holder: Holder) -> Tensor:
    """Autograd's unpack hook, the same for all regions."""
    frame = holder.frame
    task = frame.tasks.get(graph_task_id())
    if task is not None and (tensor := task.get(holder.slot)) is not None:
        task[holder.slot] = None
    elif holder.saved is None or (tensor := frame.at_hand(holder)) is None:
        tensor = frame.bring_back(holder)
    reader = sys._getframe().f_back  # None in a thread of the autograd engine
    if reader is not None and reader.f_code is not run_backward_code:
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
    node, slot = _torch.current_node(), holder.slot
    if not isinstance(node, _torch.PythonNode):
        return
    task = holder.frame.task()
    task[slot] = tensor
    weak = _ref(task)  # a backward that fails in this node leaves the hook behind

    def done(*_: Any) -> None:
        handle.remove()
        if (task := weak()) is not None:
            task[slot] = None

    handle = node.register_hook(done)
