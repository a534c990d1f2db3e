"""What a region kept, dropped and replayed: data first, then text.

What regions hold is found when somebody asks, by looking at what they refer to. Only regions with `report=True` note
anything while they run, in a `Record` that refers to no tensor; they are made of other classes (`Reported`, `Noting`),
so that the rest pays nothing for it.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
import time
import weakref
from collections.abc import Container, Iterable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from . import _torch, errors
from ._ambient import Generators
from ._auto import AutoTape
from ._check import Evidence, maker_of
from ._engine import Frame, Held, Holder, Recompute, is_parameter, named, root_of
from ._region import Region, thread
from ._replay import Replay, values_of
from ._rerun import Buffers, Pin
from ._tape import Op, Ref, Scratch, Tape, Value, Wrapped, tensors_of
from ._tree import Container as Taken
from ._where import Line, described, stack_of_user, user_frame


class TensorReport(NamedTuple):
    """One storage, with a tensor that lies on it.

    `kind` is `"saved"`, if autograd would have held it without the region. Anything else is held: an `"input"`;
    `"kept"`, by `keep`, a policy, or a cut of `auto`; `"spared"` by `auto`, where there was room; `"offloaded"`; a
    `"random state"`; a copy of `"buffers"`.

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

    `saved` is what autograd would have held, without parameters, each storage once, the largest first. (Without
    `report=True` it is what backward has not used yet; of a rerun, every saved tensor by itself.) `held` is what is
    held now, without parameters and other leaves that require grad; what a region around brings back isn't.
    `recomputes` says how often it was recomputed until now, `operators` how many of them were replayed, `seconds` how
    long that took on the host, without recomputes of other regions. None stands for what is not known: the first and
    the last without `report=True`, and operators of a rerun.
    """

    name: str
    module: str | None
    line: str
    bytes_saved: int
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
        return {"regions": [_plain(region) for region in self.regions]}

    def __str__(self) -> str:
        lines = ["would hold   held now   recomputed      region"]
        for region in self.regions[:_ROWS]:
            times = "" if region.recomputes is None else f"{region.recomputes} x"
            seconds = "" if region.seconds is None else f"{region.seconds:.3f} s"
            sizes = f"{_size(region.bytes_saved):>10} {_size(region.bytes_held):>10}"
            lines.append(f"{sizes} {times:>6} {seconds:>9}  {region.name}  {_place(region)}")
        if len(self.regions) > _ROWS:
            lines.append(f"and {len(self.regions) - _ROWS} more")
        for title, tensors in (
            ("held now", _sorted(tensor for region in self.regions for tensor in region.held)),
            ("autograd would hold", _sorted(tensor for region in self.regions for tensor in region.saved)),
        ):
            lines += ["", f"{title}, the largest of {len(tensors)}:"] if tensors else []
            for tensor in tensors[:_ROWS]:
                what = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
                operator = (tensor.operator or "").removeprefix("aten.").removesuffix(".default")
                lines.append(f"{_size(tensor.nbytes):>10}  {tensor.kind:<12}  {what:<26}  {operator}")
                lines += [f"{'':12}{_place(tensor)}"] if tensor.line else []
        return "\n".join(line if len(line) <= 80 else f"{line[:77]}..." for line in lines)


_ROWS = 10  # that people want to see of each


def _sorted(tensors: Iterable[TensorReport]) -> tuple[TensorReport, ...]:
    return tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes))


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.{2 * (unit != 'B')}f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _place(what: RegionReport | TensorReport) -> str:
    file, colon, rest = (what.line or "").partition(":")
    return ", ".join(filter(None, (what.module, os.path.basename(file) + colon + rest)))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        return [*map(_plain, value)] if fields is None else dict(zip(fields, map(_plain, value), strict=True))
    return value if value is None or isinstance(value, int | float | str) else str(value)


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
    >>> block = checkpointed(lambda x: x.sin().exp().cos(), name="block", report=True)
    >>> x = torch.ones(1024, requires_grad=True)
    >>> loss = block(block(x * 2)).sum()
    >>> [(region.name, region.bytes_saved, region.bytes_held) for region in report(loss).regions]
    [('block', 12288, 4096), ('block', 12288, 4096)]
    """
    for output in outputs:
        if not isinstance(output, Tensor):
            raise TypeError(f"report takes tensors, such as a loss, not {output!r}")
    found: dict[int, Record] = {}
    nodes: dict[Any, None] = {output.grad_fn: None for output in outputs}
    stack = [*nodes]
    while stack:
        node = stack.pop()
        if node is not None:
            for packed in _torch.saved_by(node):
                _find(packed, found)
            found.update({id(record.frame() or record): record for record in _records_at(node)})
            fresh = [other for other, _ in node.next_functions if other not in nodes]
            nodes.update(dict.fromkeys(fresh))
            stack += fresh
    return collect(found.values())


def _find(packed: Any, found: dict[int, Record]) -> None:
    """Add the region whose holder this is, and those around it, which hold its inputs."""
    if type(packed) is Holder and id(packed.frame) not in found:
        found[id(packed.frame)] = record_of(packed.frame)
        for _, part in _parts(packed.frame):
            _find(_packed(part), found)


# ---- numbers of a scope, and logs of operators


class Stats(NamedTuple):
    """One scope in numbers, as they are at the moment when they are asked for. Bytes are those of whole storages.

    `ops_recorded` counts operators on the tape (views and operators that return no tensors are not recorded),
    `ops_replayed` those that were run again, over all `replays` (of windows) so far. `bytes_saved` is what plain
    autograd would have held for backward: every saved storage once, without parameters. `bytes_held` is held now in
    order to recompute (inputs of the block and states of random generators), `bytes_kept` because it was kept.
    """

    ops_recorded: int = 0
    ops_replayed: int = 0
    replays: int = 0
    bytes_saved: int = 0
    bytes_held: int = 0
    bytes_kept: int = 0


def measure(frame: Frame, tape: Tape, source: Replay) -> Stats:
    """The present numbers of a scope."""
    held = kept = 0
    for tensor in held_by(frame, record_of(frame)):
        if tensor.kind in ("input", "random state"):
            held += tensor.nbytes
        else:
            kept += tensor.nbytes
    return Stats(tape.recorded, source.replayed, source.replays, tape.saved_bytes, held, kept)


class OpLog(TorchDispatchMode):
    """The operators that ran while it was entered, each with the stack of user code that led to it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[tuple[str, str]] = []
        self._numbers: Any = WeakTensorKeyDictionary()
        self._met = 0

    def __enter__(self) -> Any:
        self.lines.clear()  # of the recompute before this one
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = [self._text(value) for value in args] + [f"{key}={self._text(v)}" for key, v in (kwargs or {}).items()]
        call, stack, index = f"{func}({', '.join(parts)})", stack_of_user(), len(self.lines)
        self.lines.append((call, stack))  # which it may not survive
        result = func(*args, **(kwargs or {}))
        self.lines[index] = (f"{self._text(result, True)} = {call}", stack)
        return result

    def _text(self, value: Any, full: bool = False) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._text(part, full) for part in value)}]"
        if not isinstance(value, Tensor):
            return repr(value)
        if value not in self._numbers:
            self._numbers[value] = self._met = self._met + 1
        return f"${self._numbers[value]}" + f": {str(value.dtype)[6:]}{list(value.shape)}" * full


def explain(error: errors.CheckpointError, forward: list[tuple[str, str]], recompute: list[tuple[str, str]]) -> None:
    """Raise an error of `debug=True` again with the logs of both runs, under the headings of torch's."""
    logs = ""
    for title, lines in (("the original forward", forward), ("recomputation", recompute)):
        logs += f"\n\nOperations executed during {title}:\n"
        logs += "".join(f"  {i}: {op}\n{stack}" for i, (op, stack) in enumerate(lines)) or "  (none)\n"
    explained = type(error)(
        f"{error}\n\nAn error happened while unpacking tensors; these are the operators of both runs, each with the "
        f"lines of your code that led to it, innermost first.{logs}\nYou are seeing this error because you passed "
        "`debug=True` to checkpoint: the first operator that differs above shows where the two runs part."
    )
    vars(explained).update(__notes__=getattr(error, "__notes__", []))
    raise explained from error


def logged(frame: Frame) -> tuple[OpLog, OpLog]:
    """Contexts for the forward and the recompute that log their operators; errors of the frame show both."""
    forward, recompute = OpLog(), OpLog()
    frame.on_error = functools.partial(explain, forward=forward.lines, recompute=recompute.lines)
    return forward, recompute


# ---- what regions with `report=True` note


class Note(NamedTuple):
    """Where something happened, and by which operator."""

    operator: str | None
    module: str | None
    line: Line | None


Description = tuple[int, tuple[int, ...], torch.dtype]  # bytes of the storage, shape, dtype


class Record:
    """What is noted of a region. It refers to no tensor, so nothing lives longer for it."""

    seconds: float | None = None  # None: not noted
    recomputes: int | None = None
    operators: int | None = None
    spared: Container[int] = ()  # values

    def __init__(self, frame: Frame, module: str | None) -> None:
        self.frame = weakref.ref(frame)
        self.name = frame.name
        self.entered = Note(None, module, frame.entered_from)
        self.inner: list[Record] = []  # of regions inside
        self.notes: dict[int, Note] = {}  # by value: where it was made, or first read
        self.saved: list[tuple[Note, Description]] = []

    def and_inner(self) -> list[Record]:
        return [self, *(record for inner in self.inner for record in inner.and_inner())]

    def watch(self, request: Recompute) -> None:
        """Run a recompute."""
        node, around = _torch.current_node(), thread.record
        if node is not None:  # which a report finds when backward has freed what it refers to
            _records_at(node, self)
        thread.record = self
        begin = time.perf_counter()
        try:
            request.run()
        finally:
            seconds = time.perf_counter() - begin
            self.seconds = (self.seconds or 0) + seconds
            if around is not None:  # it wants what this region brings back
                around.seconds -= seconds
            thread.record = around
            self.recomputes = (self.recomputes or 0) + 1
            self.operators = getattr(request.frame.source, "replayed", None)


class Reported(Frame):
    """A region that notes what is saved in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.record = Record(self, _module_path())
        self.record.recomputes, self.record.seconds = 0, 0.0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()  # that have been saved

    def enter(self, region: Region) -> None:
        super().enter(region)
        region.record = self.record
        if region.outer is not None and region.outer.record is not None:
            region.outer.record.inner.append(self.record)

    def pack(self, tensor: Tensor) -> Holder:
        holder, root = super().pack(tensor), root_of(tensor)
        note = _note(next((str(v.op.info.func) for v in values_of(holder.saved) if v.op), maker_of(tensor)))
        for value in values_of(holder.saved):
            self.record.notes.setdefault(value.id, note)
        if not is_parameter(root) and not (root.is_leaf and root.requires_grad):
            for part in _torch.plain_parts(tensor):
                storage = part.untyped_storage() if _torch.has_storage(part) else holder
                if storage not in self._storages:
                    self._storages.add(storage)
                    self.record.saved.append((note, _described(part)))
        return holder

    _torch.mark_as_torchs_own(pack)


class Noting(Tape):
    """A tape that notes where each value was made or first read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [t for t in tensors_of([*args, *(kwargs or {}).values(), result]) if _torch.has_storage(t)]
        values = [self._values.get(_torch.storage_id(tensor)) for tensor in tensors]
        fresh = {value.id for value in values if value is not None} - self.record.notes.keys()
        self.record.notes.update(dict.fromkeys(fresh, _note(str(func))) if fresh else ())
        return result

    def close(self) -> str | None:
        self.record.spared = {value.id for value in getattr(self, "_spare", ())}
        return super().close()


class NotingAuto(Noting, AutoTape):
    """The same for one that makes cuts."""


def _note(operator: str | None) -> Note:
    frame = user_frame(sys._getframe(1))
    return Note(operator, _module_path(), (frame.f_code, frame.f_lasti))


def _module_path() -> str | None:
    """The module whose `forward` runs, by its name in the outermost one whose `forward` runs."""
    modules = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _torch.module_call_code:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    names = [
        next((name for name, module in outer.named_modules() if module is inner), type(inner).__name__)
        for inner, outer in pairwise(modules)
    ]
    return ".".join(filter(None, reversed(names))) if modules else None


def _records_at(node: Any, *more: Record) -> list[Record]:
    records: dict[int, Record] = node.metadata.setdefault(__name__, {})
    records.update({id(record): record for record in more})
    return [*records.values()]


def _described(tensor: Tensor) -> Description:
    nbytes = tensor.untyped_storage().nbytes() if _torch.has_storage(tensor) else 0
    return nbytes, tuple(_torch.shape_of(tensor)), tensor.dtype


# ---- what is found when somebody asks


def record_of(frame: Frame) -> Record:
    """What the region has noted; or what can be told without that."""
    if frame.record is not None:
        return frame.record
    record = Record(frame, None)
    record.recomputes, record.operators = (
        getattr(frame.source, "replays", None),
        getattr(frame.source, "replayed", None),
    )
    for holder in filter(None, [ref() for ref in frame.holders]):
        for value in values_of(holder.saved):
            geometry = getattr(holder.saved, "geometry", None) or value.geometry
            if value.id not in record.notes and geometry is not None and (value.op or not value.is_parameter):
                record.notes[value.id] = note = Note(value.op and str(value.op.info.func), None, None)
                record.saved.append((note, (value.nbytes, tuple(geometry[0]), geometry[3])))
        if holder.saved is None and frame.check is not None:  # of a rerun
            shape, dtype, _ = holder.metadata.finding[0] if isinstance(holder.metadata, Evidence) else holder.metadata
            record.saved.append((Note(None, None, None), (math.prod(shape) * dtype.itemsize, tuple(shape), dtype)))
    return record


def collect(records: Iterable[Record]) -> Report:
    """The report of these regions, each with what lives of it."""
    return Report(tuple(sorted(map(_region, records), key=lambda region: -region.bytes_saved)))


def _region(record: Record) -> RegionReport:
    frame = record.frame()
    saved = _sorted(_tensor("saved", description, note) for note, description in record.saved)
    held = _sorted(() if frame is None else held_by(frame, record))
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in (saved, held)]
    if frame is not None and isinstance(frame.source, Replay):
        sizes[0] = frame.source.tape.saved_bytes  # also of what has been freed
    _, module, line = record.entered
    counts = record.recomputes, record.operators, record.seconds
    return RegionReport(record.name, module, described(line), *sizes, *counts, saved, held)


def _tensor(kind: str, description: Description, note: Note, operator: str | None = None) -> TensorReport:
    return TensorReport(kind, *description, operator or note.operator, note.module, note.line and described(note.line))


def held_by(frame: Frame, record: Record) -> list[TensorReport]:
    """What a region holds, each storage once."""
    found: dict[int, TensorReport] = {}
    for owner, part in _parts(frame):
        kind, note, operator = "input", record.entered, None
        tensors = _tensors_in(_packed(part))
        if type(owner) is Value:
            note = record.notes.get(owner.id, _NOWHERE)
        if type(part) is Generators:
            kind, tensors = "random state", [state for *_, state in part._streams if isinstance(state, Tensor)]
            operator = str(owner.info.func) if type(owner) is Op else None
        elif type(part) is Buffers:
            kind, tensors = "buffers", part._then._values
        elif type(part) is not Held:  # a tensor, which `auto` spares while the block runs
            kind = "spared"
        elif part.moved:
            kind = "offloaded"
        elif type(owner) is Pin or (type(owner) is Value and (owner.kept or owner.op)):
            kind = "spared" if type(owner) is Value and owner.id in record.spared else "kept"
        else:
            operator = str(part.name) if isinstance(part.name, _torch.OpOverload) else named(part.name)
        for tensor in tensors:
            if not (tensor.is_leaf and tensor.requires_grad):
                key = _torch.storage_id(tensor) if _torch.has_storage(tensor) else id(tensor)
                found[key] = _tensor(kind, _described(tensor), note, operator)
    return [*found.values()]


_NOWHERE = Note(None, None, None)


def _parts(frame: Frame) -> Iterator[tuple[Any, Any]]:
    """Whatever holds tensors in a region (parameters apart), with what of the region refers to it."""
    stack: list[Any] = [(None, [holder.saved for ref in frame.holders if (holder := ref()) is not None])]
    if isinstance(frame.source, Replay):  # while the block runs, it holds more than holders need
        stack.append((None, frame.source.tape._values))
        yield from getattr(frame.source.tape, "_spare", {}).items()
    else:
        stack.append((None, frame.source))
    seen = set()
    while stack:
        owner, whole = stack.pop()
        owner = whole if type(whole) in (Value, Op, Pin) else owner
        for part in gc.get_referents(whole):
            if id(part) not in seen:
                seen.add(id(part))
                if type(part) in _ENTERED:
                    stack.append((owner, part))
                elif type(part) in (Generators, Buffers) or (type(part) is Held and not part.is_parameter):
                    yield owner, part


_ENTERED = {list, tuple, dict, Value, Op, Ref, Scratch, Wrapped, Taken, Pin}


def _packed(part: Any) -> Any:
    """What hooks have made of a tensor; the tensor, if there were none."""
    packed = part.alias if type(part) is Held else part
    return packed.data if isinstance(packed, _torch.SavedTensor) else packed


def _tensors_in(packed: Any) -> list[Tensor]:
    if isinstance(packed, Tensor):
        return [packed]
    # Users' hooks give back anything with the tensor in it. A region around holds what its `Holder` stands for.
    parts = () if type(packed) is Holder else gc.get_referents(packed)
    return [part for part in parts if isinstance(part, Tensor)][:1]
