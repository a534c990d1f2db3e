"""The private names of torch that this library uses, each with its reason.

It imports nothing of this package but `errors`, so it is the place to look when torch changes.
"""

from .names import *  # noqa: F403
from .names import (
    graph_task_id,
    node_count,
    pop_hooks,
    profiles,
    push_hooks,
)
