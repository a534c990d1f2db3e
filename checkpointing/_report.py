"""What a region kept, dropped and replayed: data first, then text.

What regions hold is found when somebody asks, by looking at what they refer to. Only regions with `report=True` note
anything while they run, in a `Record` that refers to no tensor; they are made of other classes (`Reported`, `Noting`),
so that the rest pays nothing for it.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _torch
from ._ambient import Generators
from ._auto import AutoTape
from ._buffers import Buffers
from ._check import maker_of
from ._engine import Frame, Holder, Recompute, is_referenced, named, root_of
from ._held import Held
from ._ops import tensors_of
from ._region import Region
from ._replay import Replay
from ._rerun import Pin
from ._tape import Tape
from ._tree import Container
from ._values import KEPT, Op, Ref, Scratch, SpecialOp, Value, Wrapped, values_of
from ._where import described, user_line
from ._windows import Path, is_counted
from ._windows import Replay as Follow


class TensorReport(NamedTuple):
    """One storage, with a tensor that lies on it.

    `kind` is `"saved"`, if autograd would have held it without the region. Anything else is held: an `"input"`;
    `"kept"`, by `keep`, a policy, or a cut of `auto`; `"spared"` by `auto`, where there was room; `"offloaded"`; a
    `"random state"`, or the smaller tensor that was drawn from it; a copy of `"buffers"`.

    `nbytes` are those of the storage; tensors without one, such as sparse ones, count 0. `shape` is that of the tensor,
    and of what is in it, if it is a DTensor or another wrapper.

    `operator` made it, or has read it first, if it is an input of a block; for an argument of a function it is which.
    `module` is the one whose `forward` ran then, as in `named_modules()` of the outermost one; `line` is the user's,
    `"file:line: expression"`. Both are None without `report=True`.
    """

    kind: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operator: str | None
    module: str | None
    line: str | None


class RegionReport(NamedTuple):
    """One region, as it is at the moment when it is asked for.

    `saved` is what autograd would have held, without parameters, each storage once, the largest first; `held` is what
    is held now, without parameters and other leaves that require grad; what a region around brings back isn't.
    `recomputes` says how often it was recomputed until now, `operators` how many of them were replayed, `seconds` how
    long that took on the host, with what regions around had to bring back for it.

    Without `report=True` nothing has been noted: `saved` is empty, and what is not known is None: `module`, `seconds`,
    and of a rerun `bytes_saved` and `recomputes`. (How many operators a rerun repeats is never known.)
    """

    name: str
    module: str | None
    line: str
    bytes_saved: int | None
    bytes_held: int
    recomputes: int | None
    operators: int | None
    seconds: float | None
    saved: tuple[TensorReport, ...]
    held: tuple[TensorReport, ...]


class Report(NamedTuple):
    """Regions, that first which saves most. `str()` is for people, in 80 columns."""

    regions: tuple[RegionReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same in dicts, lists, text and numbers, as `json.dumps` takes them."""

        def rows(tensors: Iterable[TensorReport]) -> list[dict[str, Any]]:
            return [tensor._asdict() | {"dtype": str(tensor.dtype)} for tensor in tensors]

        return {"regions": [r._asdict() | {"saved": rows(r.saved), "held": rows(r.held)} for r in self.regions]}

    def __str__(self) -> str:
        lines = ["would hold   held now   recomputed      region"]
        for region in self.regions[:_ROWS]:
            times = "" if region.recomputes is None else f"{region.recomputes} x"
            seconds = "" if region.seconds is None else f"{region.seconds:.3f} s"
            saved = "" if region.bytes_saved is None else _size(region.bytes_saved)
            where = _place(None if region.module == region.name else region.module, region.line)
            lines.append(f"{saved:>10} {_size(region.bytes_held):>10} {times:>6} {seconds:>9}  {region.name}  {where}")
        lines += [f"and {len(self.regions) - _ROWS} more"] if len(self.regions) > _ROWS else []
        for title, tensors in (
            ("held now", _sorted(tensor for region in self.regions for tensor in region.held)),
            ("autograd would hold", _sorted(tensor for region in self.regions for tensor in region.saved)),
        ):
            lines += ["", f"{title}, the largest of {len(tensors)}:"] if tensors else []
            for tensor in tensors[:_ROWS]:
                what = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
                operator = (tensor.operator or "").removeprefix("aten.").removesuffix(".default")
                lines.append(f"{_size(tensor.nbytes):>10}  {tensor.kind:<12}  {what:<26}  {operator}")
                lines += [f"{'':12}{_place(tensor.module, tensor.line)}"] if tensor.line else []
        return "\n".join(line.rstrip() if len(line) <= 80 else f"{line[:77]}..." for line in lines)


_ROWS = 10  # that people want to see of each


def _sorted(tensors: Iterable[TensorReport]) -> tuple[TensorReport, ...]:
    return tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes))


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.{2 * (unit != 'B')}f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _place(module: str | None, line: str) -> str:
    file, colon, rest = line.partition(":")
    return ", ".join(filter(None, (module, os.path.basename(file) + colon + rest)))


def report(*outputs: Tensor) -> Report:
    """What the regions behind these tensors hold for backward, and what autograd would have held without them.

    Args:
        *outputs: tensors of any shape and dtype; mostly, a loss.

    Returns:
        The regions to whose tensors their autograd graph refers. Backward frees those. Once it has, only regions with
        `report=True` are found, if it has recomputed them. (Of `backend="reentrant"` nothing is known.)

    Raises:
        TypeError: for what is no tensor.

    >>> import torch
    >>> from checkpointing import checkpointed, report
    >>> block = checkpointed(lambda x: x.sin().exp().tanh(), report=True, preserve_rng_state=False)
    >>> x = torch.ones(1024, requires_grad=True)
    >>> (region,) = report(block(x * 2).sum()).regions
    >>> region.bytes_saved, region.bytes_held, region.held[0].operator
    (12288, 4096, 'args[0]')
    """
    for output in outputs:
        if not isinstance(output, Tensor):
            raise TypeError(f"report takes tensors, such as a loss, not {output!r}")
    found: dict[Any, Record] = {}
    nodes: dict[Any, None] = {output.grad_fn: None for output in outputs}
    stack = [*nodes]
    while stack:
        node = stack.pop()
        if node is not None:
            for packed in _torch.saved_by(node):
                _find(packed, found)
            found.update((record.frame() or record, record) for record in node.metadata.get(__name__, ()))
            fresh = [other for other, _ in node.next_functions if other not in nodes]
            nodes.update(dict.fromkeys(fresh))
            stack += fresh
    return collect(found.values())


def _find(packed: Any, found: dict[Any, Record]) -> None:
    """Add the region whose holder this is, and those around it, which hold its inputs."""
    if type(packed) is Holder and packed.frame not in found:
        found[packed.frame] = record_of(packed.frame)
        for _, part in _parts(packed.frame):
            _find(_packed(part), found)


class Stats(NamedTuple):
    """One scope in numbers, as they are at the moment when they are asked for. Bytes are those of whole storages.

    `ops_recorded` counts operators on the tape (views and operators that return no tensors are not recorded),
    `ops_replayed` those that were run again, over all `replays` (of windows) so far. `bytes_saved` is what plain
    autograd would have held for backward: every saved storage once, without parameters. `bytes_held` is held now in
    order to recompute (inputs of the block and states of random generators), `bytes_kept` because it was kept. `cuts`
    are positions among the recorded operators: recompute never crosses one, since what is needed there is kept.
    `peak_predicted` is how much memory a policy `auto()` expects forward and backward of the block to need at most, with
    gradients that do not exist yet; 0 without one, and while the block runs.
    """

    ops_recorded: int = 0
    ops_replayed: int = 0
    replays: int = 0
    bytes_saved: int = 0
    bytes_held: int = 0
    bytes_kept: int = 0
    cuts: tuple[int, ...] = ()
    peak_predicted: int = 0


def measure_run(frame: Frame, source: Follow) -> Stats:
    """The present numbers of a scope."""
    run = source.tape
    path = Path(run) if source.plan is None else source.plan.path
    steps = path.steps
    cuts = tuple([sum(map(is_counted, steps[:cut])) for cut in path.cuts])
    recorded = sum(map(is_counted, steps))
    stocks = {id(s): s for ref in frame.holders if (h := ref()) is not None and (s := getattr(h, "stock", None))}
    entries = [(c in path.given, entry) for s in stocks.values() for c, entry in s.held.items()]
    randoms = {i: state for s in stocks.values() for i, state in s.random.items()}
    if source.plan is None:
        entries, randoms = [(c in path.given, entry) for c, entry in run.held.items()], run.random
    sizes: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for is_given, entry in entries:
        part = entry
        if type(part) is tuple or part.is_parameter:
            continue
        for tensor in _tensors_in(_packed(part)):
            if not (tensor.is_leaf and tensor.requires_grad):
                key = _torch.storage_id(tensor) if _torch.has_storage(tensor) else id(tensor)
                sizes[is_given][key] = tensor.untyped_storage().nbytes() if _torch.has_storage(tensor) else 0
    held = sum(sizes[True].values()) + sum(state.nbytes for state in randoms.values())
    kept = sum(sizes[False].values())
    return Stats(
        recorded,
        source.replayed,
        source.replays,
        run.saved_bytes,
        held,
        kept,
        cuts,
        0 if source.plan is None else source.plan.peak,
    )


def measure(frame: Frame, tape: Tape, source: Replay) -> Stats:
    """The present numbers of a scope."""
    if isinstance(source, Follow):
        return measure_run(frame, source)
    tensors = held_by(frame, frame.record or Record(frame))
    held = sum(tensor.nbytes for tensor in tensors if tensor.kind in ("input", "random state"))
    kept = sum(tensor.nbytes for tensor in tensors) - held
    cuts = tuple([tape.counted[cut] for cut in tape.cuts])
    return Stats(tape.recorded, source.replayed, source.replays, tape.saved_bytes, held, kept, cuts)


# ---- what regions with `report=True` note


class Record:
    """What is noted of a region. It refers to no tensor, so nothing lives longer for it."""

    module: str | None = None
    recomputes: Any = None
    operators: int | None = None
    seconds: Any = None

    def __init__(self, frame: Frame) -> None:
        self.frame = weakref.ref(frame)
        self.name, self.line = frame.name, described(frame.entered_from)
        self.inner: list[Record] = []  # of regions inside
        self.saved: list[TensorReport] = []
        self.notes: dict[int, Note] = {0: (None, None, None)}  # by value
        self.spared: set[int] = set()  # values

    def and_inner(self) -> list[Record]:
        return [self, *(record for inner in self.inner for record in inner.and_inner())]

    def watch(self, request: Recompute) -> None:
        """Run a recompute."""
        node, begin = _torch.current_node(), time.perf_counter()
        if node is not None:  # where a report finds it when backward has freed the rest
            node.metadata.setdefault(__name__, {})[self] = None
        try:
            request.run()
        finally:
            self.seconds += time.perf_counter() - begin
            self.recomputes += 1
            self.operators = getattr(request.frame.source, "replayed", None)


Note = tuple[str | None, str | None, str | None]  # the operator that made a value, the module and the user's line


class Reported(Frame):
    """A region that notes what is saved in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.record = record = Record(self)
        record.module, record.recomputes, record.seconds = _module_path(), 0, 0.0
        record.notes[0] = None, record.module, record.line
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()  # that have been saved

    def enter(self, region: Region) -> None:
        super().enter(region)
        region.record = self.record
        if region.outer is not None and region.outer.record is not None:
            region.outer.record.inner.append(self.record)

    def pack(self, tensor: Tensor) -> Holder:
        holder, root, record = super().pack(tensor), root_of(tensor), self.record
        values = values_of(holder.saved)
        operator = next((str(value.op.info.func) for value in values if value.op is not None), maker_of(tensor))
        where = _module_path(), user_line()
        record.notes.update((value.id, (operator, *where)) for value in values if value.id not in record.notes)
        if not is_referenced(root):
            for part in _torch.plain_parts(tensor):
                storage = part.untyped_storage() if _torch.has_storage(part) else holder
                if storage not in self._storages:
                    self._storages.add(storage)
                    record.saved.append(_tensor("saved", part, operator, *where))
        return holder

    _torch.mark_as_torchs_own(pack)


class Noting(Tape):
    """A tape that notes where each value was made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in filter(_torch.has_storage, tensors_of(result)):
            value = self._values.get(_torch.storage_id(tensor))
            if value is not None and value.op is not None and value.id not in self.record.notes:
                self.record.notes[value.id] = str(func), _module_path(), user_line()
        return result

    def close(self) -> str:
        self.record.spared = {value.id for value in getattr(self, "_spare", ())}
        return super().close()


class NotingAuto(Noting, AutoTape):
    """The same for one that makes cuts."""


def _module_path() -> str | None:
    """The module whose `forward` runs, by its name in the outermost one whose `forward` runs."""
    modules = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _torch.module_call_code:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    names = [
        next((name for name, module in outer.named_modules() if module is inner), type(inner).__name__)
        for inner, outer in pairwise(modules)
    ]
    return ".".join(filter(None, reversed(names))) if modules else None


def _tensor(kind: str, tensor: Tensor, *note: str | None) -> TensorReport:
    nbytes = tensor.untyped_storage().nbytes() if _torch.has_storage(tensor) else 0
    return TensorReport(kind, nbytes, tuple(_torch.shape_of(tensor)), tensor.dtype, *note)


# ---- what is found when somebody asks


def collect(records: Iterable[Record]) -> Report:
    """The report of these regions, each with what lives of it."""
    return Report(tuple(sorted(map(_region, records), key=lambda region: -(region.bytes_saved or region.bytes_held))))


def _region(record: Record) -> RegionReport:
    frame = record.frame()
    saved, held = _sorted(record.saved), _sorted(() if frame is None else held_by(frame, record))
    would_hold: int | None = sum(tensor.nbytes for tensor in saved)
    if frame is not None and frame.record is None:
        would_hold = frame.source.tape.saved_bytes if isinstance(frame.source, Replay) else None
    sizes = would_hold, sum(tensor.nbytes for tensor in held)
    counts = record.recomputes, record.operators, record.seconds
    return RegionReport(record.name, record.module, record.line, *sizes, *counts, saved, held)


def record_of(frame: Frame) -> Record:
    """What the region has noted, or counts anyhow."""
    record: Record = frame.record or Record(frame)
    if isinstance(frame.source, Replay):
        record.recomputes, record.operators = frame.source.replays, frame.source.replayed
    return record


def held_by(frame: Frame, record: Record) -> list[TensorReport]:
    """What a region holds, each storage once."""
    found: dict[int, TensorReport] = {}
    for owner, part in _parts(frame):
        kind, tensors = "kept" if type(owner) is Pin else "input", _tensors_in(_packed(part))
        operator, module, line = record.notes[0]
        if type(owner) is Value:
            operator, module, line = record.notes.get(owner.id, record.notes[0])
            kind = "spared" if owner.id in record.spared else "kept" if owner.state is KEPT or owner.op else kind
        if type(part) is Generators:
            kind, tensors = "random state", [state for *_, state in part._streams if isinstance(state, Tensor)]
            operator = str(owner.info.func) if isinstance(owner, Op) else None
        elif type(part) is Buffers:
            kind, tensors = "buffers", part._then.values
        elif not isinstance(part, Held):  # a tensor, which `auto` spares while the block runs
            kind = "spared"
        else:
            if kind == "input":
                operator = str(part.name) if isinstance(part.name, _torch.OpOverload) else named(part.name)
                kind = "random state" if operator == "a random tensor" else kind
            kind = "offloaded" if part.moved else kind
        for tensor in tensors:
            for plain in () if tensor.is_leaf and tensor.requires_grad else _torch.plain_parts(tensor):
                key = _torch.storage_id(plain) if _torch.has_storage(plain) else id(plain)
                found[key] = _tensor(kind, plain, operator, module, line)
    return [*found.values()]


def _parts(frame: Frame) -> Iterator[tuple[Any, Any]]:
    """Whatever holds tensors in a region (parameters apart), with what of the region refers to it."""
    saved = [holder.saved for ref in frame.holders if (holder := ref()) is not None]
    tape = frame.source.tape if isinstance(frame.source, Replay) else None
    # While a block runs, it holds more than holders need.
    stack: list[Any] = [(None, saved), (None, frame.source if tape is None else tape._values)]
    yield from getattr(tape, "_spare", {}).items()
    seen = set()
    while stack:
        owner, whole = stack.pop()
        owner = whole if isinstance(whole, (Value, Op, Pin)) else owner
        for part in gc.get_referents(whole):
            if id(part) not in seen:
                seen.add(id(part))
                if type(part) in _ENTERED:
                    stack.append((owner, part))
                elif type(part) in (Generators, Buffers) or (isinstance(part, Held) and not part.is_parameter):
                    yield owner, part


_ENTERED = {list, tuple, dict, Value, Op, SpecialOp, Ref, Scratch, Wrapped, Container, Pin}


def _packed(part: Any) -> Any:
    """What hooks have made of a tensor; the tensor, if there were none."""
    packed = part.packed if isinstance(part, Held) else part
    return packed.data if isinstance(packed, _torch.SavedTensor) else packed


def _tensors_in(packed: Any) -> list[Tensor]:
    # Users' hooks give back anything with the tensor in it. A region around holds what its `Holder` stands for.
    parts = [packed] if isinstance(packed, Tensor) else [] if type(packed) is Holder else gc.get_referents(packed)
    return [part for part in parts if isinstance(part, Tensor)][:1]
