"""Reports: the memory that regions hold for backward, and that autograd would hold without them.

A report asks the frames when it is wanted. Only regions with `report=True` note anything while they
run: the tensors that are saved in them, as numbers and text. Notes and reports refer to no tensor,
so they keep nothing alive.

Rejected: notes that outlive their frame, to count and time recomputes. torch's profiler shows both,
in ranges named `recompute:<region>`.
"""

import re
import sys
import traceback
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .._engine import (
    Frame,
    Held,
    Holder,
    Moved,
    described,
    is_referenced,
    root_of,
    tensors_in,
    user_line,
)
from .._replay import Replay


class TensorReport(NamedTuple):
    """One storage, described by a tensor that uses it.

    `kind` is `"saved"` if autograd would hold it without the region. Storages of all other kinds
    are held now: an `"input"`; `"kept"`, by `keep` or a policy; `"offloaded"`; a `"random state"`;
    a copy of `"buffers"`.

    `nbytes` is the size of the storage in bytes; 0 for tensors without one, such as sparse ones.
    Wrappers such as DTensor are described by the tensors inside them.

    `operator` made the tensor, or read it first if it is an input of a block. For an argument of a
    function it is the name of the argument. `module` is the module whose `forward` ran then, by its
    name in the outermost one. `line` is your line, `"file:line: expression"`. Both are None without
    `report=True`, and for the inputs of a function.
    """

    kind: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    operator: str | None
    module: str | None
    line: str | None


class RegionReport(NamedTuple):
    """One region, at the moment of the report.

    `saved` lists the tensors that autograd would hold without the region, `held` those that are
    held now: each storage once, the largest first, without parameters and other leaves that require
    grad. `bytes_saved` and `bytes_held` are their sums. Tensors that a region around this one
    brings back are not held here. `line` is where the region was entered. `replays` counts the
    windows that a recorded block has replayed; it is None for a rerun.

    Without `report=True`, `saved` is empty, and the `bytes_saved` of a rerun are None.
    """

    name: str
    line: str
    bytes_saved: int | None
    bytes_held: int
    replays: int | None
    saved: tuple[TensorReport, ...]
    held: tuple[TensorReport, ...]


class Report(NamedTuple):
    """Regions, the largest first. `str()` is a table in 80 columns."""

    regions: tuple[RegionReport, ...]

    def __str__(self) -> str:
        lines = ["would hold   held now  region"]
        for region in self.regions[:_ROWS]:
            saved = "" if region.bytes_saved is None else size(region.bytes_saved)
            lines.append(
                f"{saved:>10} {size(region.bytes_held):>10}  {region.name}  {_short(region.line)}"
            )
        tensors = _sorted(t for region in self.regions for t in region.held + region.saved)
        lines += ["", f"the largest of {len(tensors)} tensors in {len(self.regions)} regions:"]
        for t in tensors[:_ROWS]:
            about = f"{t.dtype}{[*t.shape]}"[6:]
            lines.append(f"{size(t.nbytes):>10}  {t.kind:<12}  {about:<26}  {t.operator or ''}")
            if t.line is not None:
                lines.append(f"{'':12}{t.module or ''} {_short(t.line)}")
        return "\n".join(line[:80].rstrip() for line in lines)


_ROWS = 20  # of each table


def _sorted(tensors: Iterable[TensorReport]) -> tuple[TensorReport, ...]:
    return tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes))


def size(nbytes: int) -> str:
    """A number of bytes, as text."""
    unit = unit_of(nbytes)
    return f"{nbytes / 1024**unit:.2f} {UNITS[unit]}"


def unit_of(nbytes: int) -> int:
    return min(max(nbytes.bit_length() - 1, 0) // 10, 3)


UNITS = ("B", "KiB", "MiB", "GiB")


def _short(line: str) -> str:
    return re.sub(r"^[^:]*/", "", line)  # no folders


def report(*outputs: Tensor) -> Report:
    """Describe the regions behind these tensors: the memory that they hold, and that they save.

    Args:
        *outputs: tensors of any shape and dtype, usually a loss.

    Returns:
        The regions to whose tensors the autograd graph of `outputs` refers: none after backward,
        which frees them, and none of `backend="reentrant"`. A scope's own `report()` works at any
        time.

    Raises:
        TypeError: if an argument is not a tensor.

    Example:
        >>> import torch
        >>> from checkpointing import checkpointed, report
        >>> options = {"report": True, "preserve_rng_state": False}
        >>> block = checkpointed(lambda x: x.sin().exp().tanh(), **options)
        >>> x = torch.ones(1024, requires_grad=True)
        >>> (region,) = report(block(x * 2).sum()).regions
        >>> region.bytes_saved, region.bytes_held, region.held[0].operator
        (12288, 4096, 'args[0]')

    Source of the method: `jax.ad_checkpoint.print_saved_residuals`.
    """
    for output in outputs:
        if not isinstance(output, Tensor):
            raise TypeError(f"report takes tensors, such as a loss, not {output!r}")
    nodes = _torch.nodes_from([output.grad_fn for output in outputs], {None})
    parts = [saved for node in nodes for saved in _torch.saved_by(node)]
    frames: dict[Frame, None] = {}
    for part in parts:
        packed = _packed(part)
        if isinstance(packed, Holder) and packed.frame not in frames:
            frames[packed.frame] = None
            # Regions around it hold its inputs.
            parts += [holding.part for holding in packed.frame.holdings()]
    return report_of(frames)


def _packed(part: Any) -> Any:
    """A tensor that is saved or held, or the object that hooks have made of it."""
    if isinstance(part, Held):
        part = part.packed
    return part.data if isinstance(part, _torch.SavedTensor) else part


def report_of(frames: Iterable[Frame]) -> Report:
    """The report of these regions."""
    regions = map(_region, frames)
    return Report(tuple(sorted(regions, key=lambda r: -(r.bytes_saved or r.bytes_held))))


def _region(frame: Frame) -> RegionReport:
    saved, held = _sorted(frame.notes or ()), _held_by(frame)
    return RegionReport(
        frame.name,
        described(frame.entered_from),
        frame.saved_bytes if frame.notes is None else _bytes_of(saved),
        _bytes_of(held),
        frame.replays,
        saved,
        held,
    )


def _bytes_of(tensors: Iterable[TensorReport]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _held_by(frame: Frame) -> tuple[TensorReport, ...]:
    """Each storage that a region holds, once. A region around it holds what is in its slots."""
    found = {}
    for kind, part, operator, note in frame.holdings():
        if type(part) is Moved:
            kind = "offloaded"
        for tensor in tensors_in(_packed(part))[:1]:
            for plain in () if is_referenced(tensor) else _torch.plain_parts(tensor):
                key = _torch.storage_of(plain) or id(plain)
                found[key] = _described(kind, plain, operator, *note)
    return _sorted(found.values())


def _described(kind: str, tensor: Tensor, *about: str | None) -> TensorReport:
    nbytes, shape = _torch.memory_size(tensor), tuple(_torch.shape_of(tensor))
    return TensorReport(kind, nbytes, shape, tensor.dtype, *about)


class Stats(NamedTuple):
    """A scope in numbers, at the moment of the question. Bytes are sizes of whole storages.

    Attributes:
        ops_recorded: operators of the block, without views and those that return no tensors.
        ops_replayed: operators that were run again so far.
        replays: windows that were replayed so far.
        bytes_saved: the memory that plain autograd would hold for backward, without parameters.
        bytes_held: held now for recompute: inputs of the block and states of random generators.
        bytes_kept: held now because of `keep`, a policy, or a choice that is never made again.
        cuts: positions among the recorded operators. Every value that is needed there is kept, so
            no recompute crosses a cut.
        peak_predicted: the most memory that forward and backward of the block need according to the
            plan of `auto()`, with gradients; 0 without `auto()` and while the block runs.
        peak_asked: that of `auto(peak=...)`, in bytes; else None.
    """

    ops_recorded: int = 0
    ops_replayed: int = 0
    replays: int = 0
    bytes_saved: int = 0
    bytes_held: int = 0
    bytes_kept: int = 0
    cuts: tuple[int, ...] = ()
    peak_predicted: int = 0
    peak_asked: int | None = None


def measure(frame: Replay) -> Stats:
    """The present numbers of a scope."""
    tensors = _held_by(frame)
    kept = _bytes_of(t for t in tensors if t.kind not in ("input", "random state"))
    recorded, cuts = frame.counts()
    placement = frame.run.store.placement
    return Stats(
        recorded,
        frame.replayed,
        frame.replays,
        frame.saved_bytes,
        _bytes_of(tensors) - kept,
        kept,
        cuts,
        frame.plan.peak if frame.plan else 0,
        placement and placement.peak,
    )


class Notes(list[TensorReport]):
    """The tensors that are saved in a region, each storage once."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # storages

    def add(self, holder: Holder, tensor: Tensor) -> None:
        """Note a tensor of `holder.frame`."""
        if is_referenced(root_of(tensor)):
            return
        about = holder.frame.maker(holder, tensor), *note()
        for part in _torch.plain_parts(tensor):
            storage = part.untyped_storage() if _torch.has_storage(part) else holder
            if storage not in self._known:
                self._known.add(storage)
                self.append(_described("saved", part, *about))


def note() -> tuple[str | None, str | None]:
    """Where an operator runs: the module, by its name in the outermost one, and the user's line."""
    frames = traceback.walk_stack(sys._getframe(1))
    modules = [f.f_locals["self"] for f, _ in frames if f.f_code is _torch.module_call_code]
    if not modules:
        return None, user_line()
    names = {module: name for name, module in modules[-1].named_modules()}
    return names.get(modules[0], type(modules[0]).__name__), user_line()
