"""What a block keeps for backward, and which operators bring back the rest.

It imports `_record` and what is below. A plan follows from a program alone, so all ranks have the
same one.
"""

from .groups import Group
from .outlook import Block, Cost, Outlook
from .plan import Plan, attach, plan_of
from .windows import Instruction, Window
