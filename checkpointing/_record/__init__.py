"""Programs: what a block does, recorded once and followed from then on.

It imports `_engine` and what is below. A program holds no tensor: a run says which
slots, values and numbers are those of this step.
"""

from .gathered import check_there as check_there
from .ops import tensors_of as tensors_of
from .program import (
    BROUGHT_BACK as BROUGHT_BACK,
    KEEP as KEEP,
    MOST_GROWTH as MOST_GROWTH,
    NOT_WRITTEN as NOT_WRITTEN,
    UNSEEN as UNSEEN,
    Filling as Filling,
    First as First,
    Known as Known,
    Like as Like,
    Parts as Parts,
    Slot as Slot,
    Step as Step,
    Value as Value,
    clear_programs as clear_programs,
    program_of as program_of,
    with_saves as with_saves,
)
from .run import (
    NOWHERE as NOWHERE,
    Answer as Answer,
    Placement as Placement,
    Places as Places,
    Run as Run,
    Wrapped as Wrapped,
    shapes_of as shapes_of,
    slots_of as slots_of,
)
