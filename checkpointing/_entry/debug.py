"""The logs of `debug=True`: the operators of forward and recompute, shown in errors."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _torch
from .._engine import Frame, stack_of_user


class OpLog(TorchDispatchMode):
    """A log of operators, each with the lines of user code that led to it."""

    supports_higher_order_operators = True
    _lines: list[Any] = []  # noqa: RUF012  # before it is entered

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # see `Follower`

    def __enter__(self) -> Any:
        self._lines = []  # without those of the recompute before this one
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line = [f"{func}({_text([*args, *kwargs.values()])[1:-1]})", stack_of_user()]
        self._lines.append(line)  # the operator may raise
        result = func(*args, **kwargs)
        line[0] = f"{_text(result)} = {line[0]}"
        return result

    def __str__(self) -> str:
        return "".join(f"  {i}: {op}\n{stack}" for i, (op, stack) in enumerate(self._lines))


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]}{list(_torch.shape_of(value))}"
    return repr(value)


def logged(frame: Frame) -> tuple[OpLog, OpLog]:
    """Contexts that log the operators of the forward and of the recompute, for errors of the
    frame."""
    forward, recompute = OpLog(), OpLog()  # type: ignore[no-untyped-call]

    def explain(error: Any) -> None:
        """Raise an error again with both logs, under torch's headings."""
        explained = type(error)(
            f"{error}\n\nAn error happened while unpacking tensors; these are the operators of "
            "both runs, each with the lines of your code that led to it, innermost first."
            f"\n\nOperations executed during the original forward:\n{forward}"
            f"\n\nOperations executed during recomputation:\n{recompute}"
            "\nYou are seeing this error because you passed `debug=True` to checkpoint: the "
            "first operator that differs above shows where the two runs part."
        )
        explained.__notes__ = error.__notes__
        raise explained from error

    frame.on_error = explain
    return forward, recompute
