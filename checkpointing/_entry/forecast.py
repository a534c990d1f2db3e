"""The forecast: what a step would cost with each choice of checkpoints, before it is trained.

The function runs once, as a block that is recorded and never brought back. Whatever it has written
is put back afterwards: memory from outside, buffers that were exchanged, generators.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .. import _torch
from .._engine import CPU_RNG, Generators, entered_from, root_of, unpack
from .._plan import Block, Cost, Outlook
from .._record import Program, Run, Step
from .._replay import Replay
from .._rerun import Moment
from .api import disabled
from .policy import auto
from .sizes import bytes_of, size, unit_of

Calls = dict[str, list[Block]]  # of modules, by their class


class Row(NamedTuple):
    """What one choice of checkpoints would cost.

    `write` is what to write: the policy of a scope around the function, or a description. `peak`
    is the most bytes that forward and backward allocate beside what was there before, gradients
    that do not exist yet included. `kept` are the bytes that are kept for backward when it begins,
    and `recomputed` is the part of a forward that backward computes again, in floating-point
    operations of matrix products, convolutions and attention.
    """

    write: str
    peak: int
    kept: int
    recomputed: float


class Forecast(NamedTuple):
    """Rows, the largest peak first. `str()` is a table in 80 columns."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        rows = [
            f"{size(row.peak):>14} {row.recomputed:>11.2f} {size(row.kept):>11}  {row.write}"
            for row in self.rows
        ]
        return "\n".join(["peak of a step  recomputed        kept  what to write", *rows])

    def plot(self, path: str) -> None:
        """Draw recompute over peak into a file, an .svg or a .png. Needs matplotlib (the extra
        `plot`)."""
        import matplotlib.figure  # type: ignore[import-not-found, unused-ignore]

        unit, name = unit_of(self.rows[0].peak)
        lines: dict[str, Any] = defaultdict(list)
        for row in self.rows:  # one line through all peaks, and points
            lines[re.sub('".*"', "...", row.write)].append((row.peak / unit, row.recomputed))
        figure = matplotlib.figure.Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for label, places in lines.items():
            axes.plot(*zip(*places, strict=True), "o-", label=label)
        axes.legend()
        axes.set(
            xlim=0,
            xlabel=f"peak memory of a step ({name})",
            ylabel="recomputed FLOPs (1: a forward)",
        )
        figure.savefig(path)


class _Rehearsal(Run):
    """A run that is told apart from others by its program, and notes what it writes over."""

    def __init__(self) -> None:
        super().__init__(Program(), None, True, auto())
        # By storage, before it was written: the base of the tensor, whether it required grad, and
        # its values.
        self.moments: dict[int, Any] = {}
        self.buffers: dict[nn.Module, Any] = {}
        self.calls: Calls = defaultdict(list)
        self._open: list[int] = []

    def calls_module(self, module: nn.Module, args: Any) -> None:
        self._open.append(len(self.path))
        hooks = _torch.enclosing_hooks()
        if hooks is not None and hooks[1] is not unpack:
            raise ValueError(
                f"forecast: hooks around {type(module).__qualname__}, such as those of torch's own "
                "checkpoint, hide what autograd saves. Switch them off first."
            )
        if any(map(_torch.is_lazy, (*module.parameters(), *module.buffers()))):
            # Their weights would be put back to memory that nobody has initialised.
            raise ValueError("forecast: the model has lazy modules. Run it once first.")
        for each in module.modules():
            self.buffers.setdefault(each, dict(_torch.buffers_of_module(each)[0]))

    def has_called_module(self, module: nn.Module, *_: Any) -> None:
        calls, begin = self.calls[type(module).__qualname__], self._open.pop()
        while calls and calls[-1][0] >= begin:  # inside this one
            calls.pop()
        calls.append((begin, len(self.path)))

    def may_begin_anew(self) -> bool:
        if super().may_begin_anew():
            raise ValueError(
                "forecast: leave backward and the optimizer out of the function. If this comes "
                "from a step after it, a tensor of the forecast is in its graph: reset what the "
                "model carries from step to step, such as the state of spiking neurons."
            )
        return False

    def _before_write(self, step: Step, args: Any, kwargs: Any) -> None:
        if step.effect or step.updates:
            for tensor in step.info.targets_of(args, kwargs):
                storage = _torch.storage_id(tensor)
                if storage not in self.moments:
                    base = root_of(tensor)
                    moment = Moment([tensor], whole=True)
                    self.moments[storage] = base, base.requires_grad, moment
        super()._before_write(step, args, kwargs)


@contextmanager
def _put_back(run: _Rehearsal) -> Iterator[None]:
    """Afterwards, generators, buffers and memory from outside are as they were."""
    generators = Generators([CPU_RNG], python=True)
    try:
        with (
            register_module_forward_pre_hook(run.calls_module),
            register_module_forward_hook(run.has_called_module, always_call=True),
        ):
            yield
    finally:
        for base, required_grad, moment in run.moments.values():
            if base.requires_grad and not required_grad:
                base.detach_()
            moment.go_back()
        for module, buffers in run.buffers.items():
            now = _torch.buffers_of_module(module)[0]
            for name, tensor in buffers.items():  # a scripted module has no `update`
                now[name] = tensor
        for state in (*reversed(run.store.random.values()), generators):
            state.enter([])
        # The graph of the function holds the run, and modules may hold that graph.
        run.moments.clear()
        run.buffers.clear()


def forecast(function: Callable[[], Any], /) -> Forecast:
    """Say what a training step would cost with each choice of checkpoints.

    The function runs once, with gradients enabled and without backward, and inner regions of this
    library run as plain code. Buffers, random states and other memory that operators write are put
    back; what Python notes elsewhere, such as a counter, is not.

    The peak of forward and backward is then simulated for plain code, for a checkpoint around each
    block that the program repeats, for `auto()`, and for `auto(peak=...)` from the largest peak to
    the least. The simulation leaves out the memory that kernels work in.

    Under `torch._subclasses.FakeTensorMode`, with the model made in the same mode, this takes no
    memory, and little time.

    Args:
        function: takes nothing, and returns what backward begins with, such as a loss. Leave
            backward out.

    Returns:
        A `Forecast`: `rows` are named tuples of bytes and fractions, `str()` is a table, and
        `plot(path)` draws them. Peaks leave out what was there before: parameters, inputs, states
        of the optimizer.

    Raises:
        ValueError: if autograd saves nothing in the function, if a backward runs in it, if
            checkpoints of another library around modules hide what they save, or if a lazy module
            has yet to run.

    Example:
        >>> import torch
        >>> from checkpointing import forecast
        >>> layers = [torch.nn.Linear(64, 64) for _ in range(8)]
        >>> model = torch.nn.Sequential(*layers)
        >>> found = forecast(lambda: model(torch.ones(512, 64)).tanh().sum())
        >>> found.rows[0].write, found.rows[0].recomputed
        ('plain', 0.0)

    Source of the method: the simulation of `auto()`, which plans by it.
    """
    run = _Rehearsal()
    frame = Replay(run, "forecast", entered_from(sys._getframe()), True, None)
    with _put_back(run), disabled(), torch.enable_grad(), run:
        frame.enter(run)
        try:
            _result = function()  # which lives until its costs are known
        finally:
            frame.leave(run)
        run.finish_step()
        if not run.store.saved_bytes:
            raise ValueError(
                "forecast: autograd saves nothing in this function. Leave backward out of it."
            )
        rows = _rows(run)
        run.close()
    return Forecast(tuple(rows))


def _rows(run: _Rehearsal) -> list[Row]:
    outlook = Outlook(run)
    plain, least = outlook.plain(), max(1, outlook.planned(0).peak)
    costs = {"plain": plain, "auto()": outlook.planned(None), **_by_hand(outlook, run.calls)}
    ratio = max(1.0, plain.peak / least)
    for number in range(_MOST_PEAKS):  # from the least peak up, until nothing runs again
        text = size(int(_AT_LEAST * least * ratio ** (number / _MOST_PEAKS)))
        costs[f'auto(peak="{text}")'] = cost = outlook.planned(bytes_of("peak", text))
        if not cost.recomputed:
            break
    rows = {  # that differ by something: the first of those that don't
        (cost.peak, cost.recomputed): Row(write, *cost) for write, cost in reversed(costs.items())
    }
    return sorted(rows.values(), key=lambda row: (-row.peak, row.recomputed))


def _by_hand(outlook: Outlook, calls: Calls) -> dict[str, Cost]:
    """The cost of a checkpoint around each call of the modules that are most like the blocks that
    the program repeats."""
    blocks = outlook.repeats()
    if not blocks:
        return {}

    def likeness(name: str) -> float:
        """How well the calls of a class cover the blocks: 1 at most for each."""
        return sum(
            max(
                max(0, min(end, last) - max(begin, first)) / (max(end, last) - min(begin, first))
                for first, last in calls[name]
            )
            for begin, end in blocks
        )

    name = max(calls, key=likeness, default="")
    if len(calls[name]) < 2:
        return {"a checkpoint around each block": outlook.by_hand(blocks)}
    return {f"checkpoint_modules(model, {name})": outlook.by_hand(calls[name])}


_MOST_PEAKS = 10  # that are tried, each by the same factor larger than the one before
_AT_LEAST = 1.005  # so that rounding to two digits after the point gives no less
