"""The private names of torch that this library uses, each with its reason.

It imports nothing of this package but `errors`, so it is the place to look when torch changes.
"""

from .names import *  # noqa: F403
from .names import (
    graph_task_id as graph_task_id,
    node_count as node_count,
    pop_hooks as pop_hooks,
    profiles as profiles,
    push_hooks as push_hooks,
)
from .tree import (
    ATOMS as ATOMS,
    Field as Field,
    leaves_of as leaves_of,
    map_tensors as map_tensors,
    put_together as put_together,
    take_apart as take_apart,
    tensors_in as tensors_in,
)
