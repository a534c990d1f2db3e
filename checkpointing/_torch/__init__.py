"""Private names of torch, each with its reason (`names`); the memory of tensors (`memory`).

It imports nothing of this package: it is the place to look when torch changes.
"""

from .memory import *  # noqa: F403
from .names import *  # noqa: F403
