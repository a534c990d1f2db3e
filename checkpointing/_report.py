"""Reports: what a region saved, what it holds for backward, and what was recomputed. Data first, then text.

A region's source tells what it holds when somebody asks (`Source.holdings`). Only regions with `report=True` note
anything while they run, in a `Record` that refers to no tensor, so that the rest pays nothing for it.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _torch
from ._check import maker_of
from ._engine import Frame, Holder, Recompute, is_referenced, root_of
from ._held import Held
from ._offload import Moved
from ._region import Region
from ._tree import map_tensors
from ._where import described, user_line


class TensorReport(NamedTuple):
    """One storage, with a tensor that lies on it.

    `kind` is `"saved"`, if autograd would have held it without the region. Anything else is held: an `"input"`;
    `"kept"`, by `keep` or a policy; `"offloaded"`; a `"random state"`; a copy of `"buffers"`.

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
        if node is None:
            continue
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
        for holding in packed.frame.source.holdings(packed.frame):
            _find(_packed(holding.part), found)


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


def measure(frame: Frame) -> Stats:
    """The present numbers of a scope."""
    source: Any = frame.source
    tensors = held_by(frame, record_of(frame))
    held = sum(tensor.nbytes for tensor in tensors if tensor.kind in ("input", "random state"))
    kept = sum(tensor.nbytes for tensor in tensors) - held
    recorded, cuts = source.counts()
    peak = 0 if source.plan is None else source.plan.peak
    return Stats(recorded, source.replayed, source.replays, source.tape.saved_bytes, held, kept, cuts, peak)


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


class Reported(Frame):
    """A region that notes what is saved in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.record = record = Record(self)
        record.module, record.recomputes, record.seconds = module_path(), 0, 0.0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()  # that have been saved

    def enter(self, region: Region) -> None:
        super().enter(region)
        region.record = self.record
        if region.outer is not None and region.outer.record is not None:
            region.outer.record.inner.append(self.record)

    def pack(self, tensor: Tensor) -> Holder:
        holder, root = super().pack(tensor), root_of(tensor)
        if is_referenced(root):
            return holder
        operator = self.source.operator_of(holder) or maker_of(tensor)
        for part in _torch.plain_parts(tensor):
            storage = part.untyped_storage() if _torch.has_storage(part) else holder
            if storage not in self._storages:
                self._storages.add(storage)
                self.record.saved.append(_tensor("saved", part, operator, *note()))
        return holder

    _torch.mark_as_torchs_own(pack)


def note() -> tuple[str | None, str | None]:
    """Where an operator runs: the module, and the user's line."""
    return module_path(), user_line()


def module_path() -> str | None:
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
        would_hold = getattr(getattr(frame.source, "tape", None), "saved_bytes", None)
    sizes = would_hold, sum(tensor.nbytes for tensor in held)
    counts = record.recomputes, record.operators, record.seconds
    return RegionReport(record.name, record.module, record.line, *sizes, *counts, saved, held)


def record_of(frame: Frame) -> Record:
    """What the region has noted, or counts anyhow."""
    record: Record = frame.record or Record(frame)
    record.recomputes = getattr(frame.source, "replays", record.recomputes)
    record.operators = getattr(frame.source, "replayed", record.operators)
    return record


def held_by(frame: Frame, record: Record) -> list[TensorReport]:
    """What a region holds, each storage once."""
    found: dict[int, TensorReport] = {}
    for kind, part, operator, noted in frame.source.holdings(frame):
        note = noted[:2] if noted else (record.module, record.line if frame.record else None)
        for tensor in _tensors_in(_packed(part)):
            if tensor.is_leaf and tensor.requires_grad:
                continue
            for plain in _torch.plain_parts(tensor):
                key = _torch.storage_id(plain) if _torch.has_storage(plain) else id(plain)
                shown = "offloaded" if isinstance(part, Held) and part.moved else kind
                found[key] = _tensor(shown, plain, operator, *note)
    return [*found.values()]


def _packed(part: Held | Tensor) -> Any:
    """What hooks have made of a tensor; the tensor, if there were none."""
    packed = part.packed if isinstance(part, Held) else part
    return packed.data if isinstance(packed, _torch.SavedTensor) else packed


def _tensors_in(packed: Any) -> list[Tensor]:
    """The tensor in what hooks have made of it: mostly a tuple. A region around holds what its `Holder` stands for."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, packed.away if type(packed) is Moved else packed)
    return found[:1]
