"""Programs: what a block does, recorded once and followed from then on.

It imports `_engine` and what is below. A program holds no tensor: a run says which
slots, values and numbers are those of this step.
"""

from .follow import shapes_of
from .ops import tensors_of
from .path import Path, Slice
from .pieces import Ends, size_pieces
from .program import (
    BROUGHT_BACK,
    KEEP,
    MOST_GROWTH,
    NOT_WRITTEN,
    UNSEEN,
    First,
    Hold,
    Known,
    Like,
    Parts,
    Program,
    Slot,
    Step,
    Value,
    clear_programs,
    program_of,
)
from .run import Run
from .store import Answer, Placement, Places
