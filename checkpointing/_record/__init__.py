"""Programs: what a block does, recorded once and followed from then on.

It imports `_engine` and what is below. A program holds no tensor: a run says which
slots, values and numbers are those of this step.
"""

from .gathered import check_there
from .ops import tensors_of
from .program import (
    BROUGHT_BACK,
    KEEP,
    MOST_GROWTH,
    NOT_WRITTEN,
    UNSEEN,
    Filling,
    First,
    Known,
    Like,
    Parts,
    Program,
    Slot,
    Step,
    Value,
    clear_programs,
    program_of,
    with_saves,
)
from .run import (
    NOWHERE,
    Answer,
    Placement,
    Places,
    Run,
    Wrapped,
    shapes_of,
    slots_of,
)
