"""Reruns, the first way to bring tensors back: call the function again.

It imports `_engine` and what is below. During a rerun, the function sees the arguments, buffers,
random numbers and switches of the forward.
"""

from .ambient import register_state
from .buffers import Moment
from .rerun import Call, PreserveRngState, Rerun, call_within
