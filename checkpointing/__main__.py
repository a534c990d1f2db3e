"""The comparison run, ``python -m checkpointing``: trains one small transformer each way, side by side.

Every way starts from the same weights, random state and batches. After the same steps its losses, gradients,
weights and random stream must be bit for bit those of plain; the exit status is 1 where they aren't.
Nothing is sampled: memory is every allocation of one step, told by the profiler on the CPU and by the allocator on an
accelerator, and recompute is counted in floating-point operations. The process's resident size was rejected: it
includes what the heap holds back and is never the same.
Timed steps carry no measurement, and the ways take turns, so that what slows the machine slows them all.
"""

import argparse
import functools
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from checkpointing import auto, checkpoint_scope, checkpointed, keep

MIB = 2**20
HEADS = 4
VOCABULARY = 256  # bytes
DROPOUT = 0.1
DTYPES = ("float32", "float64", "bfloat16", "float16")
TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)

Layer: TypeAlias = Callable[[Tensor], Tensor]
Call: TypeAlias = Callable[[Layer, Tensor], Tensor]
Way: TypeAlias = Callable[["Model", Tensor], Tensor]


class Block(nn.Module):
    """One pre-norm transformer block over ``(batch, context, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the past, then think about each position."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x.add(self.dropout(self.down(self.dropout(nn.functional.gelu(self.up(self.norm2(x)))))))


class Model(nn.Module):
    """A byte-level language model, whose blocks run through ``call``: that is where the ways come in."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def loss(self, text: Tensor, call: Call) -> Tensor:
        """The loss of predicting each byte of ``text``, int64 (batch, context + 1), from those before it."""
        x = self.dropout(self.token(text[:, :-1]) + self.position)
        for block in self.blocks:
            x = call(block, x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def plain(block: Layer, x: Tensor) -> Tensor:
    """The block as it is."""
    return block(x)


def scoped(block: Layer, x: Tensor) -> Tensor:
    """A scope around the block."""
    with checkpoint_scope():
        return block(x)


def one_scope(call: Call, policy: Any = None) -> Way:
    """A scope around everything."""

    def way(model: Model, text: Tensor) -> Tensor:
        with checkpoint_scope(policy=policy):
            return model.loss(text, call)

    return way


torch_checkpoint = functools.partial(checkpoint, use_reentrant=False)

WAYS: dict[str, Way] = {
    "plain": lambda model, text: model.loss(text, plain),
    "torch.utils.checkpoint per block": lambda model, text: model.loss(text, torch_checkpoint),
    "@checkpointed per block": lambda model, text: model.loss(text, checkpointed(plain)),
    "checkpoint_scope per block": lambda model, text: model.loss(text, scoped),
    "one scope, keep between blocks": one_scope(lambda block, x: keep(block(x))),
    "one scope, auto()": one_scope(plain, auto()),
    "nested scopes": one_scope(scoped),  # even the blocks' inputs are recomputed
}


class Run:
    """One way's training: its model, its place in the random stream, and what it has seen."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)  # the same weights and random state for every way
        self.name, self.way = name, WAYS[name]
        self.device: torch.device = options.device
        self.model = Model(options.layers, options.width, options.context)
        self.model.to(self.device, getattr(torch, options.dtype))
        self.parameters: list[Any] = list(self.model.parameters())
        self.random: list[Any] = [torch.random]  # what has the state of a generator
        if self.device.type != "cpu":
            self.random.append(torch.get_device_module(self.device))
        self.rng = [module.get_rng_state() for module in self.random]
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []

    def step(self, text: Tensor) -> None:
        """One timed step of gradient descent."""
        self.model.zero_grad(set_to_none=True)
        for module, state in zip(self.random, self.rng, strict=True):
            module.set_rng_state(state)
        begin = clock(self.device)
        loss = self.way(self.model, text)
        loss.backward()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.sub_(parameter.grad, alpha=0.1)
        self.seconds.append(clock(self.device) - begin)
        self.losses.append(loss.detach())
        self.rng = [module.get_rng_state() for module in self.random]

    def left(self) -> dict[str, list[Tensor]]:
        """What its training has left behind."""
        gradients = [parameter.grad for parameter in self.parameters]
        return {"gradients": gradients, "losses": self.losses, "weights": self.parameters, "random stream": self.rng}

    def differences(self, other: "Run") -> list[str]:
        """What isn't bit for bit as in ``other``."""
        return [part for part, tensors in self.left().items() if not all(map(same_bits, tensors, other.left()[part]))]

    def measured(self, text: Tensor, way: Way | None = None) -> "Step":
        """One more step, which nobody times."""
        self.model.zero_grad(set_to_none=True)
        step = step_on_cpu if self.device.type == "cpu" else step_on_accelerator
        return step(lambda: (way or self.way)(self.model, text))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in memory: also the sign of a zero and the bits of a NaN."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def clock(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    torch.get_device_module(device).synchronize()
    return time.perf_counter()


class Step(NamedTuple):
    """One step: live bytes, above what was there before, and floating-point operations."""

    forward: list[int]  # after each allocation and release; on an accelerator, at the end alone
    backward: list[int]  # on an accelerator, the peak alone
    flops_forward: int
    flops: int

    def memory(self) -> tuple[int, int]:
        """Bytes held between forward and backward, and at the peak of both."""
        return self.forward[-1], max(self.forward + self.backward)

    def recomputed(self, base: "Step") -> float:
        """How much more than ``base`` it has computed, as a part of a forward."""
        return (self.flops - base.flops) / base.flops_forward


class Flops(TorchDispatchMode):
    """Counts floating-point operations. (`FlopCounterMode` would hold what modules return in a recompute.)"""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def step_on_cpu(forward: Callable[[], Tensor]) -> Step:
    """Add up the profiler's memory events: one for each block allocated or freed, in bytes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it reports its own start and stop on stderr
    flops = Flops()  # type: ignore[no-untyped-call]
    gc.collect()  # what others have left would be counted when it goes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, flops:
        loss, flops_forward = forward(), flops.total
        with record_function("between"):
            pass
        loss.backward()
    assert profiled.profiler is not None, "the profiler has run"
    phases: list[list[int]] = [[0]]
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "between":
            phases.append(phases[0][-1:])
        elif event.name() == "[memory]":
            phases[-1].append(phases[-1][-1] + event.nbytes())
    return Step(phases[0], phases[1], flops_forward, flops.total)


def step_on_accelerator(forward: Callable[[], Tensor]) -> Step:
    """Ask the allocator of the current device, which rounds each block up."""
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with Flops() as flops:  # type: ignore[no-untyped-call]
        loss, flops_forward = forward(), flops.total
        held = torch.accelerator.memory_allocated()
        loss.backward()
    return Step([held - before], [torch.accelerator.max_memory_allocated() - before], flops_forward, flops.total)


def batch_of(options: argparse.Namespace, generator: torch.Generator) -> Tensor:
    """Some of the text, int64 (batch, context + 1)."""
    starts = torch.randint(len(TEXT) - options.context, (options.batch, 1), generator=generator)
    return TEXT[starts + torch.arange(options.context + 1)].long().to(options.device)


def train(options: argparse.Namespace, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Train every way, compare each with the first, plain, and count memory and operations of one more step."""
    draw = torch.Generator().manual_seed(1)
    runs = [Run(name, options) for name in WAYS]
    for i in range(options.steps):
        batch = batch_of(options, draw)
        turn = i % len(runs)
        for run in runs[turn:] + runs[:turn]:
            run.step(batch)
        progress(f"step {i + 1} of {options.steps}: loss {runs[0].losses[-1]:.4f}")

    differences = [run.differences(runs[0]) for run in runs]  # all compared before any of them goes on
    steps, rows = [run.measured(batch) for run in runs], []
    for run, differs, step in zip(runs, differences, steps, strict=True):
        (held, peak), again = step.memory(), step.recomputed(steps[0])
        ms = 1e3 * statistics.median(run.seconds[1:] or run.seconds)  # the first one warms up
        row = {"way": run.name, "held_bytes": held, "peak_bytes": peak, "recomputed": again, "ms_per_step": ms}
        rows.append(row | {"loss": float(run.losses[-1]), "bit_equal": not differs, "differences": differs})
    return rows


def torch_selective(block: Layer, x: Tensor) -> Any:
    """What torch has to keep the results of matrix products and attention."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op.overloadpacket in flop_registry

    return torch_checkpoint(block, x, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


# For the ways, in their order: all eyes can tell them apart.
COLOURS = ("black", "#e69f00", "#0072b2", "#009e73", "#56b4e9", "#d55e00", "#cc79a7")


def draw(options: argparse.Namespace) -> None:
    """Draw live bytes over one step, and below what budgets of `auto()` cost, into the file `options.plot`."""
    run, text = Run("plain", options), batch_of(options, torch.Generator().manual_seed(1))
    steps = {name: run.measured(text, way) for name, way in WAYS.items()}
    base, torchs = steps["plain"], steps["torch.utils.checkpoint per block"]

    def cost(step: Step) -> tuple[float, float]:
        return step.memory()[1] / MIB, step.recomputed(base)

    selective = cost(run.measured(text, lambda model, text: model.loss(text, torch_selective)))
    budgets = [int(base.forward[-1] * 0.7**i) for i in range(10)]
    costs = [cost(run.measured(text, one_scope(plain, auto(budget=budget)))) for budget in budgets]
    with checkpoint_scope(policy=auto()) as scope:
        run.model.loss(text, plain)
    cuts = [cut / scope.stats.ops_recorded for cut in scope.stats.cuts]

    matplotlib, figures = importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 9, "legend.frameon": False}):
        figure = figures.Figure(figsize=(8, 8), layout="constrained")
        above, below = figure.subplots(2)
        for (name, way), colour in zip(steps.items(), COLOURS, strict=True):
            points = []
            for phase, live in enumerate((way.forward, way.backward)):
                size = -(-len(live) // 200)  # the highest of so many events
                points += [(phase + i / len(live), max(live[i : i + size]) / MIB) for i in range(0, len(live), size)]
            above.plot(*zip(*points, strict=True), color=colour, label=name, linewidth=4 if way is torchs else 1.2)
        above.plot(cuts, [0] * len(cuts), "^", color=COLOURS[5], clip_on=False, zorder=9, label="cuts of auto()")
        above.axvspan(1, 2, color="0.93", zorder=0)
        above.set_yscale("function", functions=(lambda y: abs(y) ** 0.5, lambda y: y**2))
        above.set(xlim=(0, 2), ylim=0, ylabel="live memory (MiB, scale of square roots)")
        above.set_xticks((0.5, 1.5), ("forward", "backward"))
        figure.legend(loc="outside upper center", ncols=3)
        below.plot(*zip(*costs, strict=True), "o-", color=COLOURS[5], label="one scope, auto(budget=...), in MiB")
        for budget, point in zip(budgets, costs, strict=True):
            below.annotate(f"{budget / MIB:.0f}", point, (4, 4), textcoords="offset points", fontsize=8)
        below.plot(*cost(base), "*", color=COLOURS[0], markersize=9, label="plain")
        below.plot(*cost(torchs), "s", color=COLOURS[1], label="torch.utils.checkpoint per block")
        below.plot(*selective, "D", color=COLOURS[1], label="... that keeps matrix products and attention")
        below.set(xlim=0, xlabel="peak memory of a step (MiB)", ylabel="recomputed FLOPs (1: those of a forward)")
        below.legend()
        figure.savefig(options.plot, metadata={"Date": None})


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns: words to the left, numbers to the right."""
    lines = [("way", "held for backward", "peak in a step", "recomputed", "ms/step", "ratio", "loss", "against plain")]
    for row in rows:
        held, peak = (f"{row[key] / MIB:.2f} MiB" for key in ("held_bytes", "peak_bytes"))
        time, ratio = f"{row['ms_per_step']:.1f}", f"{row['ms_per_step'] / rows[0]['ms_per_step']:.2f}"
        differs = f"other {', '.join(row['differences'])}" if row["differences"] else "bit-equal"
        lines.append((row["way"], held, peak, f"{row['recomputed']:.2f}", time, ratio, f"{row['loss']:.4f}", differs))
    left, *numbers, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([first.ljust(left), *map(str.rjust, middle, numbers), last]) for first, *middle, last in lines
    )


def positive(text: str) -> int:
    """A count, from the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def available_device(text: str) -> torch.device:
    """A device that is there and whose memory can be measured, from the command line."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device") from None
    here = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if here is None or here.type != device.type else torch.accelerator.device_count()
    if device.type != "cpu" and (device.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"{text!r} is not available: {count} such devices are found")
    return device


def picture(text: str) -> str:
    """The file of a picture that can be drawn, from the command line."""
    if not text.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither an .svg nor a .png")
    if not os.access(os.path.dirname(text) or ".", os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder of this name to write to")
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'checkpointing[plot]'") from None
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpointing",
        usage=argparse.SUPPRESS,  # so that a wrong value gets one line
        description="Train a small transformer each way; compare memory, recompute, time and, bit for bit, gradients.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=positive, default=6, help="timed steps of each way, one to warm up")
    parser.add_argument("--layers", type=positive, default=12, help="blocks")
    parser.add_argument("--width", type=positive, default=128, help=f"features, a multiple of {HEADS}")
    parser.add_argument("--context", type=positive, default=128, help="bytes the model sees at once")
    parser.add_argument("--batch", type=positive, default=8, help="sequences in a step")
    parser.add_argument("--device", type=available_device, default="cpu", help="cpu, cuda, cuda:1, xpu, ...")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and activations")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="draw memory and recompute into this .svg or .png")
    options = parser.parse_args(arguments)
    if options.plot and options.device.type != "cpu":
        parser.error(f"argument --plot: only the CPU tells of each allocation, not {options.device}")
    if options.width % HEADS:
        parser.error(f"argument --width: {options.width} is not a multiple of {HEADS}, the number of heads")
    if options.context >= len(TEXT):
        parser.error(f"argument --context: {options.context} is too long: the text has {len(TEXT)} bytes")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the result is the exit status: 0 if every way is bit-equal to plain, else 1.

    Args:
        arguments: the command line's words; None takes the process's own.

    Raises:
        SystemExit: with status 2 and one line on stderr, where a value is wrong.
    """
    options = parse(arguments)
    devices, kind = [], options.device.type
    if kind != "cpu":  # comparing bits needs kernels that give the same bits twice
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        devices = [options.device.index or 0]
        torch.accelerator.set_device_index(devices[0])
    with torch.random.fork_rng(devices, device_type=kind):
        if options.plot:
            draw(options)
            return 0
        rows = train(options, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if options.json:
        print(
            json.dumps({"options": vars(options) | {"torch": torch.__version__}, "rows": rows}, indent=2, default=str)
        )
    else:
        print(table(rows))
    return int(not all(row["bit_equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
