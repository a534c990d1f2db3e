"""Every error this library raises on purpose, and the sentences in them.

A message says what happened, where (the region's name and the line where it was entered) and what to do.
Code that catches `torch.utils.checkpoint.CheckpointError` catches these too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError

__all__ = ["ChangedError", "CheckpointError", "MismatchError", "UnsupportedError"]


class CheckpointError(_TorchCheckpointError):
    """A region can't be recomputed exactly. The kinds below say why."""


class MismatchError(CheckpointError):
    """The recompute saved other tensors than the forward did."""


class ChangedError(CheckpointError):
    """A tensor that the recompute starts from was changed in place after the region had read it."""


class UnsupportedError(CheckpointError):
    """The region does something that can't be brought back."""


# slot, what was saved, what was recomputed, and what else is known: operators, lines and expressions
Mismatch = tuple[int, object, object, str]


def different_number(where: object, slot: int, op: str, saved: int, recomputed: int) -> MismatchError:
    return MismatchError(
        f"{where}: A different number of tensors was saved during the original forward and recomputation.\n"
        f"Number of tensors saved during forward: {saved}\n"
        f"Number of tensors saved during recomputation: {recomputed}.\n"
        f"{op} asked for slot {slot}, which the recompute never reached. The function took another path the "
        "second time: make it depend on its arguments only, or pin the decision with keep()."
    )


def too_many(where: object, saved: int, line: str) -> MismatchError:
    return MismatchError(
        f"{where}: trying to save more tensors during recomputation than during the original forward pass.\n"
        f"Number of tensors saved during forward: {saved}. The first one too many is saved at {line}.\n"
        "The function took another path the second time: make it depend on its arguments only, or pin the "
        "decision with keep()."
    )


def different_metadata(where: object, op: str, mismatches: Sequence[Mismatch]) -> MismatchError:
    rows = "".join(
        f"tensor at position {slot}:\n"
        f"saved metadata: {_readable(saved)}\n"
        f"recomputed metadata: {_readable(recomputed)}\n"
        f"({details})\n"
        for slot, saved, recomputed, details in mismatches
    )
    return MismatchError(
        f"{where}: Recomputed values for the following tensors have different metadata than during the forward pass.\n"
        f"{rows}{op} asked for the recompute. Something that the region reads besides its arguments has changed in "
        "between, or has been written where no operator shows it: such code belongs into `with opaque():`."
    )


def _readable(metadata: object) -> object:
    if isinstance(metadata, tuple) and len(metadata) == 3:
        return dict(zip(("shape", "dtype", "device"), metadata, strict=True))
    return metadata


def another_size(where: object, op: str, was: int, now: int) -> MismatchError:
    return MismatchError(
        f"{where}: {op} made {was} bytes in the forward, and {now} in the recompute, so it depends on something "
        "besides its arguments. `keep` its result, or call it inside `with opaque():`."
    )


def changed(where: object, what: str, was: int | None = None, now: int | None = None) -> ChangedError:
    versions = "" if now is None else f" (it was at version {was}, it is at version {now} now)"
    return ChangedError(
        f"{where}: {what} was changed in place after the region had read it{versions}, so the region can't be "
        "recomputed exactly. (In autograd's words, a variable needed for gradient computation has been modified by an "
        "inplace operation.) Change it after backward, or hand the region a clone of it."
    )


def replaced(where: object, what: str) -> ChangedError:
    return ChangedError(
        f"{where}: {what} is not the tensor that it was when the region read it, so the region can't be recomputed "
        "exactly. Set it after backward, or pass the tensor itself as an argument."
    )


def overwritten(where: object) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: a tensor that is needed for backward is overwritten later in the function by an in-place operator, "
        "for which plain autograd raises an error, too. Use the operator that is not in-place, or backend='replay', "
        "which tells the versions of a tensor apart."
    )


def overlapping(where: object) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: Unpack is being triggered for a tensor that was already unpacked once. Performing two backward "
        "calls that overlap, which need the same saved tensor, is not allowed under one GraphExecGroup: it shares one "
        "recompute between backward calls over separate parts of the graph. Run them without the group, or each in "
        "one of its own."
    )


def written(where: object, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: the function has written {what}, of which there is no copy from before: it is large, and earlier "
        "calls, if any, left it alone. Use backend='replay', or run the step again: it is copied from now on."
    )


def not_recorded(where: object, function: str) -> MismatchError:
    return MismatchError(
        f"{where}: the recompute calls {function}, which is forward_only, where the forward has no result of it: it "
        "raised there, or was not called. Catch its exceptions inside of it, and let nothing but the region's "
        "arguments decide how often it is called."
    )


def read_in_another_order(where: object, line: str) -> MismatchError:
    return MismatchError(
        f"{where}: in a scope inside, the recompute reads tensors from outside of the scope in another order than the "
        f"forward did, at {line}. Code that is_recomputing() skips must not be the first to read one there: put it "
        "into a function with @forward_only."
    )


def sharing_memory(where: object, what: str, other: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: the function has written {what} and {other}, which share memory, so their values from before can't "
        "be put back. Pass the one tensor that both are parts of, or use backend='replay'."
    )


def used_up(where: object, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: {what} is an iterator, which the forward may have used up, so that the function can't be called "
        "again with it. Pass a list, or what the function takes from the iterator; or use backend='replay'."
    )


def hidden(what: str, error: TypeError) -> CheckpointError:
    """For a function of the user that torch calls while an operator runs: under `x @ y` and its like torch takes every
    TypeError to mean that these operands are not supported, and drops it."""
    return CheckpointError(f"{what} raised a TypeError: {error}")
