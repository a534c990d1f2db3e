"""The doors: what users call, the options and policies that they give, and what they are told.

It may import every other room. A door decides, region by region, whether to rerun or to replay.
"""

from .api import (
    CheckpointedObject,
    Options,
    Stats,
    checkpoint_scope,
    checkpointed,
    disabled,
    forward_only,
    is_disabled,
    is_plain,
    is_recomputing,
    run_rerun,
    switched,
    wrap,
)
from .forecast import Forecast, forecast
from .modules import checkpoint_modules
from .policy import auto, keep, offload, opaque, save_ops, save_tagged, tag
from .reentrant import CheckpointFunction, check_backward_validity
from .report import RegionReport, Report, TensorReport, report
