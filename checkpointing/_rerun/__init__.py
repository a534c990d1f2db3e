"""The first source: call the function again.

It imports `_engine` and what is below. What the function sees during a rerun is what it
saw in the forward: arguments, buffers, random numbers, switches.
"""

from .buffers import Moment
from .rerun import (
    Inputs,
    PreserveRngState,
    Rerun,
    call_within,
    contents_of,
)
