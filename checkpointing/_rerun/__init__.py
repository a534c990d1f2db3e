"""The first source: call the function again.

It imports `_engine` and what is below. What the function sees during a rerun is what it
saw in the forward: arguments, buffers, random numbers, switches.
"""

from .rerun import (
    Inputs as Inputs,
    PreserveRngState as PreserveRngState,
    Rerun as Rerun,
    call_within as call_within,
    contents_of as contents_of,
)
