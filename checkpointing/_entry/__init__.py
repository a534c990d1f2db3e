"""The doors: what users call, the options and policies that they give, and what they are told.

It may import every other room. A door decides, region by region, which source brings tensors back.
"""

from .api import (
    Options as Options,
    checkpoint_scope as checkpoint_scope,
    checkpointed as checkpointed,
    disabled as disabled,
    forward_only as forward_only,
    is_plain as is_plain,
    is_recomputing as is_recomputing,
    run_rerun as run_rerun,
)
from .debug import logged as logged
from .modules import checkpoint_modules as checkpoint_modules
from .policy import (
    auto as auto,
    keep as keep,
    offload as offload,
    opaque as opaque,
    save_ops as save_ops,
    save_tagged as save_tagged,
    tag as tag,
)
from .reentrant import (
    CheckpointFunction as CheckpointFunction,
    check_backward_validity as check_backward_validity,
)
from .report import (
    RegionReport as RegionReport,
    Report as Report,
    Stats as Stats,
    TensorReport as TensorReport,
    report as report,
)
