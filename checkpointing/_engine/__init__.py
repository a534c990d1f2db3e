"""The engine: frames, holders, graph tasks, and tensors that are held for backward.

It imports `_torch` and `errors` alone. It never knows which kind of frame recomputes, or how.
"""

from .check import CHECKS, DeterminismCheck, check_of
from .frames import (
    Frame,
    Holder,
    Holding,
    Stop,
    Task,
    identity,
    is_internal,
    reader,
    regions,
    unpack,
)
from .held import Aliased, hold, hold_argument, note_written
from .offload import Destination, Moved, Mover
from .state import (
    CPU_RNG,
    Generators,
    Undo,
    enter_context,
    enter_switches,
    read_switches,
    rngs_of,
    undo_all,
)
from .tensors import (
    Held,
    Name,
    is_another,
    is_parameter,
    is_referenced,
    named,
    root_of,
)
from .threads import Region, aside, thread, within, without_recording
from .tree import ATOMS, Field, map_tensors, put_together, take_apart, tensors_in
from .where import described, entered_from, name_of, stack_of_user, user_line, warn
