"""Reports: the memory that regions hold for backward, and that autograd would hold without them.

A report asks the frames when it is wanted. Only regions with `report=True` note anything while they
run: the tensors that are saved in them, as numbers and text. Notes and reports refer to no tensor,
so they keep nothing alive.

Rejected: notes that outlive their frame, to count and time recomputes. torch's profiler shows both,
in ranges named `recompute:<region>`.
"""

import re
import traceback
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from .. import _torch
from .._engine import (
    Frame,
    Held,
    Holder,
    Moved,
    aside,
    described,
    is_referenced,
    root_of,
    tensors_in,
    user_line,
)
from .sizes import size


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

    Without `report=True`, `saved` is empty, the `bytes_saved` of a rerun are None, and those of a
    recorded block count leaves that are no parameters.
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
        if not self.regions:
            return "no region: none was entered with grad mode on, or backward has freed them"
        lines = ["would hold   held now  region"]
        for region in self.regions[:_ROWS]:
            saved = "" if region.bytes_saved is None else size(region.bytes_saved)
            lines.append(
                f"{saved:>10} {size(region.bytes_held):>10}  {region.name}  {_short(region.line)}"
            )
        tensors = _sorted(t for region in self.regions for t in region.held + region.saved)
        where = "1 region" if len(self.regions) == 1 else f"{len(self.regions)} regions"
        lines += ["", f"the largest of {len(tensors)} tensors in {where}:"]
        for t in tensors[:_ROWS]:
            about = f"{t.dtype}{[*t.shape]}"[6:]
            lines.append(f"{size(t.nbytes):>10}  {t.kind:<12}  {about:<26}  {t.operator or ''}")
            if t.line is not None:
                lines.append(f"{'':12}{t.module or ''} {_short(t.line)}")
        return "\n".join(line[:80].rstrip() for line in lines)


_ROWS = 20  # of each table


def _sorted(tensors: Iterable[TensorReport]) -> tuple[TensorReport, ...]:
    return tuple(sorted(tensors, key=lambda tensor: -tensor.nbytes))


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
            raise TypeError(f"report takes tensors, such as a loss, not {type(output).__name__}")
    parts = [
        saved
        for node in _torch.nodes_from([output.grad_fn for output in outputs], {None})
        for saved in _torch.saved_by(node)
    ]
    frames = []
    for part in parts:
        packed = _packed(part)
        if isinstance(packed, Holder) and packed.frame not in frames:
            frames.append(packed.frame)
            # Regions around it hold its inputs.
            parts += [holding.part for holding in packed.frame.holdings()]
    return report_of(frames)


def _packed(part: Any) -> Any:
    """A tensor that is saved or held, or the object that hooks have made of it."""
    while isinstance(part, Held):
        part = part.packed
    return part.data if isinstance(part, _torch.SavedTensor) else part


def report_of(frames: Iterable[Frame]) -> Report:
    """The report of these regions."""
    regions = sorted(map(region_of, frames), key=lambda r: -(r.bytes_saved or r.bytes_held))
    return Report(tuple(regions))


def region_of(frame: Frame) -> RegionReport:
    held: dict[Any, TensorReport] = {}
    with aside():  # the block may still run, and the size of a nested tensor takes operators
        for kind, part, operator, note in frame.holdings():
            if type(part) is Moved:
                kind = "offloaded"
            # A region around this one holds what is in its slots.
            for tensor in tensors_in(_packed(part))[:1]:
                held |= _by_storage(kind, tensor, operator, *note)
    saved = _sorted(frame.notes.values()) if frame.notes else ()
    return RegionReport(
        frame.name,
        described(frame.entered_from),
        frame.saved_bytes if frame.notes is None else sum(tensor.nbytes for tensor in saved),
        sum(tensor.nbytes for tensor in held.values()),
        frame.replays,
        saved,
        _sorted(held.values()),
    )


def _by_storage(kind: str, tensor: Tensor, *about: str | None) -> dict[Any, TensorReport]:
    """The storages of a tensor that is not referenced, by weak references, which never equal those
    of later ones."""
    if is_referenced(root_of(tensor)):
        return {}
    return {
        ref(_torch.memory_of(part)): TensorReport(
            kind, _torch.memory_size(part), tuple(_torch.shape_of(part)), part.dtype, *about
        )
        for part in _torch.plain_parts(tensor)
    }


class Notes(dict[Any, TensorReport]):
    """The tensors that are saved in a region, by storage."""

    def add(self, holder: Holder, tensor: Tensor) -> None:
        """Note a tensor of `holder.frame`."""
        maker = holder.frame.maker(holder, tensor)
        for storage, found in _by_storage("saved", tensor, maker, *note()).items():
            self.setdefault(storage, found)


def note() -> tuple[str | None, str | None]:
    """Where an operator runs: the module, by its name in the outermost one, and the user's line."""
    modules = [
        frame.f_locals["self"]
        for frame, _ in traceback.walk_stack(None)
        if frame.f_code is _torch.module_call_code
    ]
    if not modules:
        return None, user_line()
    names = {module: name for name, module in modules[-1].named_modules()}
    return names.get(modules[0], type(modules[0]).__name__), user_line()
