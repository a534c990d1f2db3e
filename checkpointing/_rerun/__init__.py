"""The first way to bring tensors back: call the function again.

It imports `_engine` and what is below. What the function sees during a rerun is what it
saw in the forward: arguments, buffers, random numbers, switches.
"""

from .ambient import register_state
from .buffers import Moment
from .inputs import Inputs, contents_of
from .rerun import Call, PreserveRngState, Rerun, call_within
