"""The errors of this library, and their messages.

A message names the problem, the region with the line where it was entered, and the fix. Code that
catches `torch.utils.checkpoint.CheckpointError` catches these, too.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError


class CheckpointError(_TorchCheckpointError):
    """A region can't be recomputed exactly, or is used in a way that is not supported.

    Mostly raised from backward; it derives from `torch.utils.checkpoint.CheckpointError`, and so
    from `RuntimeError`.
    """


class MismatchError(CheckpointError):
    """The recompute does not save the tensors that the forward saved.

    Example:
        >>> import torch
        >>> from checkpointing import MismatchError, checkpointed
        >>> sizes = [3, 2]
        >>> region = checkpointed(lambda x: x[: sizes.pop(0)].exp().sin())
        >>> y = region(torch.ones(3, requires_grad=True))
        >>> try:
        ...     y.sum().backward()
        ... except MismatchError as error:
        ...     print("different metadata" in str(error))
        True
    """


class ChangedError(CheckpointError):
    """An input of the recompute was changed in place after the region had read it.

    Example:
        >>> import torch
        >>> from checkpointing import ChangedError, checkpointed
        >>> x, w = torch.ones(3, requires_grad=True), torch.ones(3)
        >>> y = checkpointed(lambda x, w: (x * w).exp().sin())(x, w)
        >>> w += 1
        >>> try:
        ...     y.sum().backward()
        ... except ChangedError as error:
        ...     print("args[1] was changed in place" in str(error))
        True
    """


# The slot, the two sides of the comparison, and details: operators, lines and expressions.
Mismatch = tuple[int, object, object, str]


def different_number(frame: Any, slot: int, op: str, saved: int, recomputed: int) -> MismatchError:
    return MismatchError(
        f"{frame}: A different number of tensors was saved during the original forward and "
        "recomputation.\n"
        f"Number of tensors saved during forward: {saved}\n"
        f"Number of tensors saved during recomputation: {recomputed}.\n"
        f"{op} asked for slot {slot}, which the recompute never reached. "
        f"{frame.hint}\n{_TIP}"
    )


def too_many(frame: Any, saved: int, line: str) -> MismatchError:
    return MismatchError(
        f"{frame}: trying to save more tensors during recomputation than during the original "
        "forward pass.\n"
        f"Number of tensors saved during forward: {saved}. The first one too many is saved at "
        f"{line}.\n"
        f"{frame.hint}\n{_TIP}"
    )


def different_metadata(frame: Any, op: str, mismatches: Sequence[Mismatch]) -> MismatchError:
    shown = 3 if isinstance(mismatches[0][1], tuple) else 1  # a wrong value spreads
    rows = ""
    for slot, saved, recomputed, details in mismatches[:shown]:
        rows += (
            f"tensor at position {slot}:\n"
            f"saved metadata: {_readable(saved)}\n"
            f"recomputed metadata: {_readable(recomputed)}\n({details})\n"
        )
    if others := [slot for slot, *_ in mismatches[shown:]]:
        rows += f"So do {len(others)} more, in slots {others}.\n"
    if any(_is_decision(saved) for _, saved, *_ in mismatches):
        rows += f"{_DECIDED}\n"
    return MismatchError(
        f"{frame}: Recomputed values for the following tensors have different metadata than during "
        "the forward pass.\n"
        f"{rows}{op} asked for the recompute. {frame.hint}\n{_TIP}"
    )


def is_about_sizes(error: BaseException) -> bool:
    return type(error) is RuntimeError and bool(re.search("[Ss]ize|shape", str(error)))


def other_sizes(frame: Any) -> MismatchError:
    return MismatchError(
        f"{frame}: the recompute meets tensors of other sizes than the forward. {frame.hint}"
    )


CALLED_AGAIN = (
    "The recompute calls the function again, and this time it did something else: make it depend "
    "on its arguments only, pin the decision with keep(), or use backend='replay', which calls "
    "nothing again. If the function adds to an object that it was given (a KV cache), the "
    "recompute finds that as left by the forward: pass use_cache=False."
)
UNSEEN = "Some code wrote memory without an operator: put that code into `with opaque():`."
_TIP = (
    "Tip: To see a more detailed error message, either pass `debug=True` to the region, or to all "
    "of them by set_checkpoint_debug_enabled(True). If this error occurs under torch.compile with "
    "automatic_dynamic_shapes enabled, the recompute may have run another graph. Use "
    "torch._dynamo.mark_dynamic() to explicitly mark varying dimensions as dynamic upfront, or: "
    "Call torch._C._dynamo.eval_frame._set_lru_cache(False) to disable LRU cache reordering."
)


_DECIDED = (
    "Indices or masks are among them: a kernel that is not deterministic came before a choice "
    "(`topk`, `argmax`, a comparison). Pin the choice with keep(), or use backend='replay', which "
    "never chooses again."
)


def _is_decision(saved: object) -> bool:
    if not isinstance(saved, tuple):
        return False
    _, dtype, _ = saved
    return not (dtype.is_floating_point or dtype.is_complex)


def _readable(found: object) -> object:
    """Metadata by name; other findings as they are."""
    if not isinstance(found, tuple):
        return found
    return dict(zip(("shape", "dtype", "device"), found, strict=True))


def other_shapes(
    frame: object, op: str, line: str | None, was: list[Any], now: list[Any]
) -> MismatchError:
    then, again = [str([*map(list, shapes)])[1:-1] for shapes in (was, now)]
    reason = f"a kernel before it is not deterministic\n(called from {line})"
    if line is None:
        reason = "it depends on more than its arguments"
    return MismatchError(
        f"{frame}: {op} returned shapes {then} in the forward, but {again} in "
        f"the recompute: {reason}.\n`keep` its result, or what it depends on, or call it inside "
        "`with opaque():`."
    )


def changed(frame: object, name: str) -> ChangedError:
    return ChangedError(
        f"{frame}: {name} was changed in place after the region had read it, so the region "
        "can't be recomputed exactly. (In autograd's words, one of the variables needed for "
        "gradient computation has been modified by an inplace operation.) Change it after "
        "backward, or hand the region a clone of it. If a function writes it itself, use "
        "backend='replay', which tells the versions of a tensor apart; if a block writes it after "
        "a backward inside, end the block before that."
    )


def other_parameter(frame: Any, slot: int, line: str, then: str, now: str) -> MismatchError:
    return MismatchError(
        f"{frame}: in slot {slot}, at {line}, the recompute saves {now} where the forward saved "
        f"{then}. Both must save the same parameter, or a frozen one of the same values. "
        f"{frame.hint}"
    )


def exchanged(frame: Any, name: str) -> MismatchError:
    return MismatchError(
        f"{frame}: a module has another tensor in the place of {name} than in the forward. "
        "Exchange it after backward, or use backend='replay', which calls nothing again."
    )


def other_role(frame: object, slot: int, line: str) -> MismatchError:
    return MismatchError(
        f"{frame}: in slot {slot}, at {line}, the recompute meets another input of a region inside "
        "than the forward did, or one of the two meets none. The function took another path the "
        "second time, or one tensor of the forward is two in the recompute: make it depend on its "
        "arguments only, or use backend='replay', which calls nothing again."
    )


def overwritten(frame: object) -> CheckpointError:
    return CheckpointError(
        f"{frame}: a tensor that backward or a region inside needs is overwritten later in the "
        "function by an in-place operator. Use the operator that is not in-place, or "
        "backend='replay', which tells the versions of a tensor apart."
    )


def given_back(frame: object, shape: Sequence[int]) -> CheckpointError:
    return CheckpointError(
        f"{frame}: a tensor of shape {list(shape)} has no memory now: FSDP2, or other code that "
        "streams weights, has freed it. The region can't fill it again. Put a region into each "
        "sharded module, or let FSDP2 reshard after every forward and backward: "
        "reshard_after_forward=True, set_reshard_after_backward(True)."
    )


def overlapping(frame: object) -> CheckpointError:
    return CheckpointError(
        f"{frame}: Unpack is being triggered for a tensor that was already unpacked once. "
        "Performing two backward calls that overlap (i.e. require the same saved activation in "
        "order to compute gradients) is not allowed while under the "
        "torch.utils.checkpoint.GraphExecGroup context. Use a group for each of them."
    )


def gradients_of_gradients(frame: object) -> CheckpointError:
    return CheckpointError(
        f"{frame}: the function takes gradients of gradients on an accelerator. The recompute runs "
        "in one of autograd's threads, where it would save tensors in another order. Use "
        "backend='replay' or `with checkpoint_scope():`, which do not call the function again."
    )


def unseen_dropout(frame: object, module: object) -> CheckpointError:
    return CheckpointError(
        f"{frame}: cuDNN keeps the random state of the dropout in {module} to itself, so the "
        "recompute would draw other numbers. Use backend='replay' or `with checkpoint_scope():`, "
        "which keep its results, or preserve_rng_state=False."
    )


def crossed(frame: object) -> CheckpointError:
    return CheckpointError(
        f"{frame}: this region has ended, and a region that was entered later is still open. "
        "Regions must end in the reverse order: do not `await` or `yield` inside a region while "
        "other tasks or generators enter theirs."
    )


def suppressed() -> RuntimeError:
    return RuntimeError(
        "torch.utils.checkpoint: the forward context provided by context_fn suppressed an "
        "exception raised during the checkpointed forward. This is not supported because "
        "checkpoint cannot return a value for a failed forward."
    )


def not_recorded(frame: object, function: str) -> MismatchError:
    return MismatchError(
        f"{frame}: the recompute calls {function}, which is forward_only, but has no result of it: "
        "in the forward it raised, or was not called at this place. Results are matched in order: "
        "make the calls depend on the arguments of the region only."
    )


def hidden(name: str, error: TypeError) -> CheckpointError:
    """For a user's function that torch calls inside an operator. Of `x @ y`, Python would take a
    TypeError to mean that the operands are not supported."""
    return CheckpointError(f"{name} raised a TypeError: {error}")
