"""Activation checkpointing for PyTorch: a decorator and a with-block over one engine."""

from ._ambient import register_state as register_state
from ._api import checkpoint_scope as checkpoint_scope
from ._api import checkpointed as checkpointed
from ._api import disabled as disabled
from ._api import forward_only as forward_only
from ._api import is_recomputing as is_recomputing
from ._modules import checkpoint_modules as checkpoint_modules
from ._policy import auto as auto
from ._policy import keep as keep
from ._policy import offload as offload
from ._policy import opaque as opaque
from ._policy import save_ops as save_ops
from ._policy import save_tagged as save_tagged
from ._policy import tag as tag
from ._program import clear_programs as clear_programs
from ._report import RegionReport as RegionReport
from ._report import Report as Report
from ._report import Stats as Stats
from ._report import TensorReport as TensorReport
from ._report import report as report
from .errors import ChangedError as ChangedError
from .errors import CheckpointError as CheckpointError
from .errors import MismatchError as MismatchError

__version__ = "0.1.0"
