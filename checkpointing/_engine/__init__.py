"""The engine: frames, holders, graph tasks, and tensors that are held for backward.

It imports `_torch` and `errors` alone. It never knows which kind of frame recomputes, or how.
"""

from .check import (
    CHECKS,
    DeterminismCheck,
    check_of,
    maker_of,
)
from .frames import (
    Frame,
    Holder,
    Holding,
    Request,
    Stop,
    TaskTensors,
    identity,
    is_internal,
    reader,
    regions,
    unpack,
)
from .held import (
    Aliased,
    Held,
    Referenced,
    check_version,
    hold,
    hold_argument,
    note_written,
)
from .offload import (
    Destination,
    Moved,
    Mover,
    prefetch,
)
from .state import (
    CpuState,
    Generators,
    Undo,
    enter_context,
    enter_switches,
    has_rng,
    read_switches,
    undo_all,
)
from .tensors import (
    Name,
    is_parameter,
    is_referenced,
    named,
    root_of,
)
from .threads import (
    Region,
    aside,
    thread,
    without_recording,
)
from .tree import (
    ATOMS,
    Field,
    leaves_of,
    map_tensors,
    put_together,
    take_apart,
    tensors_in,
)
from .where import (
    Line,
    described,
    entered_from,
    stack_of_user,
    user_line,
    warn,
)
