"""Private names of torch, each with its reason (`names`); the memory of tensors (`memory`);
what operators and their derivatives do (`kernels`).

It imports nothing of this package: it is the place to look when torch changes.
"""

from .kernels import *  # noqa: F403
from .memory import *  # noqa: F403
from .names import *  # noqa: F403
