"""Programs: which operators a block ran, without any tensor.

A program is a tree of *steps*, one per operator call, views included. A path through the tree is
one way in which the block has run. A run of the block follows a path by comparing each operator
call with the steps that came next before; only calls that are new are recorded. So the structure of
a block is found once, and every later run pays no more than the comparison.

Tensors are named by *cells*: every tensor that a run meets, or that an operator returns, takes the
next free cell of its path. Steps refer to cells, and a run knows which tensor lies in each of its
cells. What a tensor holds changes when an operator writes to its memory, so a *value* is a cell
together with the last step that wrote to that memory, to any part of it.

Invariant: a step depends on nothing but its path. Programs are shared by all runs through one call
site, in every thread, and hold no tensor.

Rejected: naming tensors by storage and geometry, as a recording must where it cannot compare
objects. It has to be found out anew for every operator of every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .history import History
from .ops import NO_OPERATOR, Info

# A cell, and the last step that wrote to its memory; NOT_WRITTEN if none has.
Value = tuple[int, int]
NOT_WRITTEN = -1
Cells = list[Callable[[], Any]]  # weak references

NO_KEYWORDS: dict[str, Any] = {}

# Events: what else happens between two steps.
KEEP = "keep"
BROUGHT_BACK = "brought back"  # a backward inside the block has made this tensor again
FILLED = "filled"  # memory that was only allocated, in parts
# By compiled code, by an operator that has failed, or by a `forward_only` function.
WRITTEN_UNSEEN = "written unseen"
UNSEEN = "unseen"  # anything alive may have been written
FEWER_SAVES = "fewer saves"  # what autograd saves after the step before differs from here on

# The origin of a tensor that a run has not met: the cell of a tensor from outside on the same
# memory, one of these, or the layout of a tensor without a storage (sparse ones).
OWN = "memory of its own"
NO_STRIDES = "memory of its own, without strides"  # nested and quantized tensors
ON_MADE = "memory that recorded operators have made"
ZEROS = "efficient zeros"  # for which operators run in another way
Origin = int | str


@dataclass(slots=True, eq=False)
class Known:
    """An argument that the run has met: the tensor in a cell."""

    cell: int


class Met(Known):
    """An argument that this very call has met, as another argument."""


@dataclass(slots=True, eq=False)
class Hold:
    """A value that a replay starts from. The run holds it before the operator that reads it."""

    value: Value
    memory: int
    reader: Any = None  # an operator; None: autograd has saved it
    is_parameter: bool = False
    is_lent: bool = False
    is_hidden: bool = False  # from the hooks around the block: nothing is in it yet
    is_copied: bool = False  # since it may be written unseen
    is_read: bool = True  # whether a replay starts from it; else autograd alone has saved it
    is_used: bool = True  # else operators have only made views of it so far


@dataclass(slots=True, eq=False)
class First:
    """An argument that the run meets here. It takes the next cell."""

    cell: int
    origin: Origin
    memory: int
    is_parameter: bool
    requires_grad: bool
    beside: int | None  # if it is on memory that steps have made: a cell with another tensor there
    is_lent: bool = False  # a gathered parameter
    refers: Hold | None = None  # a parameter that is held by itself, from here on


@dataclass(slots=True, eq=False)
class Parts:
    """A list or tuple with tensors in it."""

    kind: Any
    items: list[Any]


class Like:
    """An argument of which an operator reads only the metadata: a replay gives it another one."""

    def __init__(self, tensor: Tensor) -> None:
        self.metadata = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    @cached_property
    def _is_in_order(self) -> bool:
        """Whether `empty_like` makes the same of one element that is expanded to these sizes. (Not
        where there is only one anyway, or none.)"""
        size, stride, *_ = self.metadata
        in_order = [*accumulate(reversed(size[1:]), mul, initial=1)]
        return size.numel() > 1 and [*stride] == in_order[::-1]

    def make(self) -> Tensor:
        size, stride, dtype, device = self.metadata
        if self._is_in_order:  # most are, and need no memory of that size
            return torch.empty_strided((), (), dtype=dtype, device=device).expand(size)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


@dataclass(slots=True, eq=False)
class Slot:
    """A tensor that autograd saved at this place of the program."""

    value: Value
    firsts: tuple[First, ...] = ()  # itself, if the run meets it here
    holds: tuple[Hold, ...] = ()
    is_read: bool = False  # whether a region inside takes it, rather than an operator
    is_usual: bool = False  # neither that, nor a tensor that is met here
    memory: int | None = None  # of which autograd saves something here for the first time
    cell: int = -1

    def __post_init__(self) -> None:
        self.cell = self.value[0]


@dataclass(slots=True, eq=False)
class Step:
    """One operator call, or an event between two of them (`keep`, `opaque`), at one place of a
    program."""

    index: int  # on its path; that of the root is -1
    func: Any
    # What another call must have, too: operator, grad mode, number of arguments, keywords.
    call: Any = None
    info: Info = NO_OPERATOR
    run: Any = None
    args: tuple[Any, ...] = ()  # templates as a run meets them; keywords last
    # Templates, as a replay passes them: by place or name.
    inputs: dict[Any, Any] = field(default_factory=dict)
    event: str | None = None
    count: int | None = None  # of its results; not known before it has run
    grad_mode: bool = True  # kernels may look at it
    cells_before: int = 0  # how many cells the path has filled before it
    reads: tuple[Value, ...] = ()
    differentiated: tuple[int, ...] = ()  # memories of what it reads that autograd follows
    writes: tuple[int, ...] = ()  # memories
    targets: tuple[int, ...] = ()  # cells that it writes to
    firsts: tuple[First, ...] = ()  # in the order of their cells
    holds: tuple[Hold, ...] = ()
    varies: tuple[int, ...] = ()  # places of the arguments that are numbers of the run
    offset: int | None = None  # the place of one that counts from that of its first argument
    reads_metadata: bool = False  # and nothing else, of its first argument
    updates: bool = False  # statistics, unseen
    fills_part: bool = False  # of memory that was only allocated
    effect: bool = False  # it is never replayed
    is_view: bool = False
    draws: bool = False  # random numbers, perhaps
    is_quick_draw: bool = False  # from the generator of the device of the first argument
    # By plans, after it: whose, what, and whether its bytes count.
    keeps: tuple[tuple[Any, Hold, bool], ...] = ()
    decides: tuple[Hold, ...] = ()  # there after it, and held by each run
    sure: tuple[int, ...] = ()  # cells of results that a replay makes with the same bits
    is_prepared: bool = False  # something is held or noted before it runs
    is_special: bool = False  # anything but an operator that reads tensors and returns new ones
    # What recording knows after it, beside what it knew before:
    memories: tuple[tuple[int, int], ...] = ()  # the memory of each new cell
    sizes: tuple[tuple[int, int], ...] = ()  # of memories that it made; those of the recorded run
    integers: tuple[int, ...] = ()  # memories that it made, which have no gradient
    gone: tuple[int, ...] = ()  # memories that nobody held any more, in the recorded run
    flops: float = 0.0  # floating-point operations, as far as torch counts them
    scratch: int = 0  # bytes that its backward works with
    scratch_of_forward: int = 0  # bytes that it allocates itself, beside its results
    reorders: bool = False  # its backward gets a gradient in order, and hands on another one
    states: tuple[tuple[int, str], ...] = ()  # of memories that have another one now
    saves: tuple[Slot, ...] = ()  # by autograd, after it and before the next one
    next: tuple[Step, ...] = ()  # with the first one, `saves` is complete
    line: Any = None  # of the user's code, where the shapes of results depend on data
    note: Any = (None, None)  # where the user's code called it, if somebody wants to know
    plan: Any = None

    @property
    def is_counted(self) -> bool:
        """Whether it computes something, and can be replayed."""
        return not any((self.event, self.is_view, self.effect))

    @property
    def is_alias(self) -> bool:
        """Whether it only shows memory that was there: views, and operators like `_unsafe_view`,
        which torch does not count among them."""
        return self.is_view or not (self.sizes or self.writes or self.event)

    @property
    def takes_part(self) -> bool:
        """Whether it is a view of a part of a tensor that requires grad, or an expanded one. Its
        backward makes a gradient as large as that tensor."""
        return self.is_view and self.scratch > 0

    def vary(self, places: list[int]) -> None:
        """From here on these arguments may be any numbers, sizes or generators of their types: each
        run has its own."""
        self.varies += (*places,)
        self.is_special = self.is_prepared = True
        self.args = tuple(
            type(arg) if place in places else arg for place, arg in enumerate(self.args)
        )


def event_after(step: Step, event: str, args: tuple[Any, ...]) -> Step:
    """A step for what has happened between this one and the next."""
    return Step(step.index + 1, None, (event,), event=event, effect=True, args=args)


class Program:
    """The tree of one call site."""

    def __init__(self) -> None:
        self.history = History()
        self.is_advised = False  # whether its user has been told of `auto()`
        # A weak reference to the run that may change the tree.
        self.writer: Callable[[], Any] = lambda: None
        self.forget()

    def forget(self) -> None:
        """Leave the tree to the runs that are in it. The next run records a new one."""
        self.root = Step(-1, None)
        self.size = 0
        self._last: Any = None  # the plan of the last run
        self.largest = 0  # bytes that autograd saved in the run after which it was recorded anew

    def is_written_by(self, run: Any) -> bool:
        """Whether this run may change the tree: until it is over, no other run may."""
        with _lock:
            writer = self.writer()
            if writer is None or writer.is_over:
                self.writer = ref(run)
                return True
            return writer is run

    def has_used(self, plan: Any) -> None:
        """A run has ended with this plan."""
        if self._last is not None:
            self._last.following = plan
        self._last = plan

    @property
    def expected(self) -> Any:
        """The plan of the next run, if it is the one that came after the last plan the time before:
        a discriminator and a generator may take turns."""
        return self._last and (self._last.following or self._last)

    def add(self, parent: Step, step: Step) -> Step:
        """A step that came after this one for the first time. A tree that has too many steps
        besides those of the present path is left to the runs that are in it, and recorded anew."""
        parent.next = (*parent.next, step)
        self.size += 1
        if self.size > MOST_STEPS + 2 * step.index:  # the second time for its plan
            self.forget()
        return step

    def has_planned(self, count: int) -> None:
        """A path of so many steps has a plan now. The plan takes about half as much memory as the
        steps, and is not shared by paths that begin alike, as these are."""
        self.size += count // 2

    def grow(self, plan: Any) -> None:
        """A plan was made for a run that has saved more bytes than the last one assumed. If the
        steps have the sizes of a much smaller run, the next one records them anew. Branches that
        grow in turn cause this once."""
        if plan.size > MOST_GROWTH * max(self.largest, plan.first_size):
            self.forget()
            self.largest = plan.size


_lock = threading.Lock()
MOST_STEPS = 40_000  # of one call site, besides those of the path that is recorded
MOST_SITES = 256
MOST_GROWTH = 1.5  # of the bytes that autograd saves, before a plan is made anew
_programs: dict[Any, Program] = {}


def program_of(site: Any) -> Program:
    """The program of a call site: anything that hashes, and lives as long as it is a key here."""
    found = _programs.get(site)
    if found is None:
        while len(_programs) >= MOST_SITES:
            _programs.pop(next(iter(_programs)), None)
        found = _programs.setdefault(site, Program())
    return found


def clear_programs() -> None:
    """Forget the programs of all call sites: every block is recorded again.

    Programs hold no tensors. They take about 2 KiB per operator, and 1 KiB more for each path that
    it is part of. A process keeps them for at most 256 call sites. Each has at most 40,000
    operators, to which every path adds half of its own; the longest path does not count. Blocks
    that are running, and backward passes that are still to come, keep the programs that they have.

    >>> from checkpointing import clear_programs
    >>> clear_programs()
    """
    _programs.clear()


def with_saves(
    root: Step, path: Iterable[Step], last: int
) -> Iterable[tuple[Step, Sequence[Slot]]]:
    """The steps from the root on, each with what autograd has saved after it; after the last one,
    so many tensors."""
    steps = [root, *path]
    for step, after in pairwise([*steps, event_after(steps[-1], FEWER_SAVES, (last,))]):
        count = after.args[0] if after.event is FEWER_SAVES else None
        yield step, step.saves[:count]
