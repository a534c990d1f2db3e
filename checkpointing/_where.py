"""Where user code is: the lines that messages and warnings name.

What is noted while a program runs is a code object and an instruction, which cost next to nothing; file and line are
looked up when a message needs them.
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import warnings
from types import CodeType, FrameType

import torch

Line = tuple[CodeType, int]  # a code object and an instruction in it

_NOT_USER_CODE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def entered_from(frame: FrameType) -> Line:
    """Where user code entered a region; `frame` is the caller of the door (a module's `__call__` may stand between)."""
    frame = user_frame(frame)
    return frame.f_code, frame.f_lasti


def user_frame(frame: FrameType) -> FrameType:
    """The innermost frame of user code, from `frame` outwards."""
    while frame.f_code.co_filename.startswith(_NOT_USER_CODE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Where user code is now: file, line, and the expression that runs (before Python 3.11: the line)."""
    frame = user_frame(sys._getframe(1))
    return described((frame.f_code, frame.f_lasti))


def described(where: Line) -> str:
    """`file:line: expression`."""
    code, instruction = where
    line = line_number(where)
    text = linecache.getline(code.co_filename, line).rstrip()
    if hasattr(code, "co_positions"):
        first, last, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
        if first == last == line and start is not None and end is not None:
            text = text.encode()[start:end].decode()
    return f"{code.co_filename}:{line}: {text.strip()}"


def line_number(where: Line) -> int:
    """`frame.f_lineno`, for a frame that has gone."""
    code, instruction = where
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return next(lines, code.co_firstlineno)


def stack_of_user() -> str:
    """The lines of user code on the stack, innermost first, one a line."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_USER_CODE):
            lines.append(f"    {frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}\n")
        frame = frame.f_back
    return "".join(lines)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, however many of torch's and our frames stand between."""
    depth, user = 1, user_frame(sys._getframe(1))
    while sys._getframe(depth) is not user:
        depth += 1
    warnings.warn(message, category, stacklevel=depth + 1)
