"""Activation checkpointing for PyTorch: a decorator and a with-block over one engine.

In the order of reading, from the outside in:

- `_entry`: what users call, the options and policies that they give, what they are told.
- `_engine`: frames, holders and graph tasks; tensors that are held for backward.
- `_rerun`: a region whose function is called again.
- `_record`: a block as a program, recorded once and followed from then on.
- `_replay`: a region whose recorded operators run again.
- `_plan`: what a replay keeps, and what it brings back together.
- `_torch`: private names of torch. `errors`: every message. `torch_compat`: torch's own functions.
"""

from ._entry import (
    Forecast as Forecast,
    RegionReport as RegionReport,
    Report as Report,
    Stats as Stats,
    TensorReport as TensorReport,
    auto as auto,
    checkpoint_modules as checkpoint_modules,
    checkpoint_scope as checkpoint_scope,
    checkpointed as checkpointed,
    disabled as disabled,
    forecast as forecast,
    forward_only as forward_only,
    is_recomputing as is_recomputing,
    keep as keep,
    offload as offload,
    opaque as opaque,
    report as report,
    save_ops as save_ops,
    save_tagged as save_tagged,
    tag as tag,
)
from ._record import clear_programs as clear_programs
from ._rerun import register_state as register_state
from .errors import (
    ChangedError as ChangedError,
    CheckpointError as CheckpointError,
    MismatchError as MismatchError,
)

__version__ = "0.1.0"
