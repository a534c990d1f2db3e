"""What both sources share: frames, holders, graph tasks, and tensors that are held for backward.

It imports `_torch` and `errors` alone. An engine never knows which source recomputes, or how.
"""

from .ambient import (
    Ambient as Ambient,
    Generators as Generators,
    Undo as Undo,
    enter_switches as enter_switches,
    has_rng as has_rng,
    read_switches as read_switches,
    register_state as register_state,
    undo_all as undo_all,
)
from .check import (
    CHECKS as CHECKS,
    DeterminismCheck as DeterminismCheck,
    check_of as check_of,
    maker_of as maker_of,
)
from .frames import (
    Frame as Frame,
    Holder as Holder,
    Holding as Holding,
    Name as Name,
    Recompute as Recompute,
    Source as Source,
    identity as identity,
    is_internal as is_internal,
    is_parameter as is_parameter,
    is_referenced as is_referenced,
    named as named,
    root_of as root_of,
    unpack as unpack,
)
from .held import (
    Aliased as Aliased,
    Held as Held,
    Referenced as Referenced,
    check_version as check_version,
    hold as hold,
    hold_argument as hold_argument,
    note_written as note_written,
)
from .offload import (
    Destination as Destination,
    Moved as Moved,
    Mover as Mover,
    prefetch as prefetch,
)
from .threads import (
    Region as Region,
    aside as aside,
    put_before as put_before,
    thread as thread,
    without_recording as without_recording,
)
from .where import (
    Line as Line,
    described as described,
    entered_from as entered_from,
    stack_of_user as stack_of_user,
    user_line as user_line,
    warn as warn,
)
