"""Draws the picture of the README: live memory over one step, and below it the cost of budgets.

`python bench/picture.py FILE`, with matplotlib; the FILE is an .svg or a .png. The options of the
comparison run (`python -m checkpointing --help`) may follow. Nothing is timed, so the picture is
the same each time.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from checkpointing import __main__ as job, auto

TORCH, AUTO = "torch.utils.checkpoint per block", "one scope, auto()"
STYLE: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 9}
BLACK, ORANGE, BLUE = "black", "#d55e00", "#0072b2"  # for colour-blind readers, too
PARTS = 200  # of forward, and of backward


def selective(block: Any, x: torch.Tensor) -> Any:
    """torch's selective checkpointing: keeps the results of matrix products and attention."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op.overloadpacket in flop_registry

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return job.torch_checkpoint(block, x, context_fn=contexts)


def curve(step: job.Measured) -> list[float]:
    """The most live MiB in each part of forward and of backward."""
    return [
        max(live[len(live) * i // PARTS : len(live) * (i + 1) // PARTS + 1]) / job.MIB
        for live in (step.forward, step.backward)
        for i in range(PARTS)
    ]


def draw(file: str, arguments: Sequence[str] = ()) -> None:
    """Measure on the CPU, and write the picture."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    options = job.parser.parse_args(arguments)
    text = job.batch_of(options)

    def measured(way: Any) -> job.Measured:
        torch.manual_seed(0)
        model = job.model_of(options)
        for _ in range(2):  # `auto()` makes its plan in the first
            model.zero_grad()
            step = job.step_of(lambda: way(model, text))
        return step

    def cost(step: job.Measured) -> tuple[float, float]:
        return step.memory()[1] / job.MIB, step.recomputed(plain)

    plain, torchs, autos = (measured(job.WAYS[name]) for name in ("plain", TORCH, AUTO))
    budgets = [int(plain.forward[-1] * 0.7**i) for i in range(10)]
    whole = job.each_block(job.plain)
    costs = [cost(measured(job.in_scope(whole, auto(budget=budget)))) for budget in budgets]

    with rc_context(STYLE):
        figure = Figure(figsize=(8, 8), layout="constrained")
        above, below = figure.subplots(2)
        label = functools.partial(dict, textcoords="offset points")
        for name, step, colour, lift in (
            ("plain", plain, BLACK, 0),
            (TORCH, torchs, ORANGE, 6),
            (AUTO, autos, BLUE, 28),
        ):
            heights = curve(step)
            above.plot(heights, color=colour)
            above.annotate(name, (PARTS, max(heights)), **label(xytext=(6, lift), color=colour))
        above.set(xlim=(0, 2 * PARTS), ylim=0, ylabel="live memory (MiB)")
        above.set_xticks((PARTS / 2, 3 * PARTS / 2), ("forward", "backward"))

        below.plot(*zip(*costs, strict=True), "o-", color=BLUE)
        below.annotate("one scope, auto(budget=...)", costs[4], **label(xytext=(6, 6), color=BLUE))
        for name, step in (
            (TORCH, torchs),
            ("torch's selective checkpoint", measured(job.each_block(selective))),
        ):
            below.plot(*cost(step), "s", color=ORANGE)
            below.annotate(name, cost(step), **label(xytext=(6, 8), color=ORANGE))
        below.set(
            xlim=0,
            ylim=(None, 1.1),
            xlabel="peak memory of a step (MiB)",
            ylabel="recomputed FLOPs (1: a forward)",
        )
        figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


if __name__ == "__main__":
    draw(sys.argv[1], sys.argv[2:])
