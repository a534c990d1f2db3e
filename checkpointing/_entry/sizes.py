"""Numbers of bytes as text, for people to write and to read."""

import re
from typing import Any


def bytes_of(name: str, given: Any) -> int:
    """A number of bytes, given as such or as text; `name` is that of the argument."""
    wrong = f"{name} is an int, in bytes, such as 10**9, or text like '1.5 GiB', not {given!r}"
    if isinstance(given, str):
        match = re.fullmatch(
            r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*(?:([kmgt])(i?))?b?\s*", given.lower()
        )
        if match is None:
            raise ValueError(wrong)
        number, prefix, binary = match.groups("")
        given = int(float(number) * (1024 if binary else 1000) ** " kmgt".find(prefix))
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(wrong)
    if given < 0:
        raise ValueError(wrong)
    return int(given)


def size(nbytes: int) -> str:
    """A number of bytes, as text."""
    unit, name = unit_of(nbytes)
    return f"{nbytes / unit:.2f} {name}"


def unit_of(nbytes: int) -> tuple[int, str]:
    """The unit for a number of bytes, and its name."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 3)
    return 1024**power, ("B", "KiB", "MiB", "GiB")[power]
