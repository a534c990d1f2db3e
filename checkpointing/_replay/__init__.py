"""The second source: run recorded operators again, just those that are needed.

It imports all but `_entry` and `_rerun`. What it brings back has the bits of the forward.
"""

from .replay import Replay
