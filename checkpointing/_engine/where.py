"""Lines of user code, for messages and warnings.

A running region notes only a code object and an instruction, which costs next to nothing. File and
line are looked up when a message needs them.
"""

import linecache
import os
import sys
import traceback
import warnings
from types import CodeType, FrameType
from typing import Any

Line = tuple[CodeType, int]  # a code object and an instruction in it

_NOT_USER_CODE = tuple(
    sys.modules[package].__path__[0] + os.sep for package in ("torch", __name__.partition(".")[0])
)


def entered_from(frame: FrameType) -> Line:
    """The innermost user code from `frame` outwards (a module's `__call__` may be between)."""
    while frame.f_code.co_filename.startswith(_NOT_USER_CODE) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def name_of(function: Any) -> str:
    """A function, or an object that is called like one, as messages name it."""
    return getattr(function, "__qualname__", type(function).__qualname__)


def user_line() -> str:
    """The innermost line of user code, now."""
    return described(entered_from(sys._getframe(1)))


def described(line: Line) -> str:
    """`file:line: code`."""
    file, number = line[0].co_filename, line_number(line)
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def line_number(line: Line) -> int:
    """`frame.f_lineno` of a frame that no longer exists."""
    code, instruction = line
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            return number
    return code.co_firstlineno


def stack_of_user() -> str:
    """The lines of user code on the stack, innermost first."""
    return "".join(
        f"    {frame.f_code.co_filename}:{line}:{frame.f_code.co_name}\n"
        for frame, line in traceback.walk_stack(sys._getframe(1))
        if not frame.f_code.co_filename.startswith(_NOT_USER_CODE)
    )


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, past all frames of torch and of this package."""
    depth = 1
    while sys._getframe(depth).f_code.co_filename.startswith(_NOT_USER_CODE):
        depth += 1
    warnings.warn(message, category, stacklevel=depth + 1)
