"""What a region kept, dropped and replayed: data first, then text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from . import errors
from ._engine import Frame, stack_of_user
from ._replay import Replay, slice_of, values_of
from ._tape import Tape


@dataclass(frozen=True, slots=True)
class Stats:
    """One scope in numbers, as they are at the moment when they are asked for. Bytes are those of whole storages."""

    ops_recorded: int = 0
    """Operators on the tape (views and operators that return no tensors are not recorded)."""
    ops_replayed: int = 0
    """Operators run again, over all replays so far."""
    replays: int = 0
    """How many windows have been replayed."""
    bytes_saved: int = 0
    """What plain autograd would have held for backward: every saved storage once, without parameters."""
    bytes_held: int = 0
    """What is held now in order to recompute: inputs of the block and states of random generators."""
    bytes_kept: int = 0
    """What is held now because it was kept."""


def measure(frame: Frame, tape: Tape, source: Replay) -> Stats:
    """The present numbers of a scope."""
    holders = [holder for ref in frame.holders if (holder := ref()) is not None]
    wanted = [value for holder in holders for value in values_of(holder.saved)]
    ops = slice_of(holders)
    values = {value.id: value for value in [*wanted, *(v for op in ops for v in op.reads)]}.values()
    starts = [value for value in values if value.op is None and not value.is_parameter]
    kept = sum(value.nbytes for value in starts if value.kept)
    held = sum(value.nbytes for value in starts if not value.kept)
    held += sum(op.rng.nbytes for op in ops if op.rng is not None)
    return Stats(tape.recorded, source.replayed, source.replays, tape.saved_bytes, held, kept)


class OpLog(TorchDispatchMode):
    """The operators that ran while it was entered, each with the stack of user code that led to it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.lines.append((str(func), stack_of_user()))
        return func(*args, **(kwargs or {}))


def explain(error: errors.CheckpointError, forward: list[tuple[str, str]], recompute: list[tuple[str, str]]) -> None:
    """Add the logs of both runs to an error that was raised under `debug=True`."""
    text = "".join(
        f"\n\n{title}:\n" + ("".join(f"  {i}: {op}\n{stack}" for i, (op, stack) in enumerate(lines)) or "  (none)\n")
        for title, lines in (
            ("Operators executed during the original forward", forward),
            ("Operators executed during recomputation", recompute),
        )
    )
    error.args = (f"{error}{text}", *error.args[1:])
