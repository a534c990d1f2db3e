"""What a block keeps for backward, and which operators bring back the rest.

It imports `_record` and what is below. A plan follows from a program alone, so all ranks have the
same one.
"""

from .plan import Plan as Plan, attach as attach, plan_of as plan_of
from .windows import (
    Found as Found,
    Group as Group,
    Instruction as Instruction,
    Path as Path,
    Window as Window,
    maker_of as maker_of,
)
