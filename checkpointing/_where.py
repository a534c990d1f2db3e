"""Where user code is: the lines that messages and warnings name.

What is noted while a program runs is a code object and an instruction, which cost next to nothing; file and line are
looked up when a message needs them.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import warnings
from types import CodeType, FrameType

import torch

Line = tuple[CodeType, int]  # a code object and an instruction in it

_NOT_USER_CODE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def entered_from(frame: FrameType) -> Line:
    """Where user code is, from `frame` outwards (a module's `__call__` may stand between)."""
    while frame.f_code.co_filename.startswith(_NOT_USER_CODE) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def user_line() -> str:
    """Where user code is now."""
    return described(entered_from(sys._getframe(1)))


def described(where: Line) -> str:
    """`file:line: code`."""
    file, line = where[0].co_filename, line_number(where)
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"


def line_number(where: Line) -> int:
    """`frame.f_lineno`, for a frame that has gone."""
    code, instruction = where
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return next(lines, code.co_firstlineno)


def stack_of_user() -> str:
    """The lines of user code on the stack, innermost first, one a line."""
    return "".join(
        f"    {frame.f_code.co_filename}:{line}:{frame.f_code.co_name}\n"
        for frame, line in traceback.walk_stack(sys._getframe(1))
        if not frame.f_code.co_filename.startswith(_NOT_USER_CODE)
    )


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, however many of torch's and our frames stand between."""
    depth = 1
    while sys._getframe(depth).f_code.co_filename.startswith(_NOT_USER_CODE):
        depth += 1
    warnings.warn(message, category, stacklevel=depth + 1)
