"""The comparison run, ``python -m checkpointing``: trains one small transformer in seven ways.

Every way starts from the same weights, seeds and batches. Afterwards its losses, gradients, weights
and random stream must be bit for bit those of plain; otherwise the exit status is 1. Memory is
the sum of all allocations in one step, from the profiler on the CPU and from the allocator on an
accelerator. Recompute is counted in floating-point operations. Timed steps carry no measurement,
and the ways take turns, so that a slow moment of the machine slows them all.

Rejected: the resident size of the process. It includes free memory of the heap and varies from run
to run.
"""

import argparse
import functools
import gc
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
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from checkpointing import auto, checkpoint_scope, checkpointed, keep

MIB = 2**20
HEADS = 4
VOCABULARY = 256  # bytes
DROPOUT = 0.1
TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)

Layer: TypeAlias = Callable[[Tensor], Tensor]
Call: TypeAlias = Callable[[Layer, Tensor], Tensor]
Way: TypeAlias = Callable[["Model", Tensor], Tensor]


class Block(nn.Module):
    """One pre-norm transformer block over ``(batch, context, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.Dropout(DROPOUT))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(4 * width, width),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention, then two linear layers."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x.add(self.mlp(x))


class Model(nn.Module):
    """A byte-level language model. Its blocks run through ``call``, in which the ways differ."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def loss(self, text: Tensor, call: Call) -> Tensor:
        """The loss of predicting each byte of ``text``, int64 (batch, context + 1)."""
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


def each_block(call: Call) -> Way:
    """Every block through ``call``."""
    return lambda model, text: model.loss(text, call)


def one_scope(call: Call, policy: Any = None) -> Way:
    """A scope around the whole model, and every block through ``call``."""

    def way(model: Model, text: Tensor) -> Tensor:
        with checkpoint_scope(policy=policy):
            return model.loss(text, call)

    return way


torch_checkpoint = functools.partial(checkpoint, use_reentrant=False)

WAYS: dict[str, Way] = {
    "plain": each_block(plain),
    "torch.utils.checkpoint per block": each_block(torch_checkpoint),
    "@checkpointed per block": each_block(checkpointed(plain)),
    "checkpoint_scope per block": each_block(scoped),
    "one scope, keep between blocks": one_scope(lambda block, x: keep(block(x))),
    "one scope, auto()": one_scope(plain, auto()),
    "nested scopes": one_scope(scoped),  # recomputes even the inputs of the blocks
}


class Run:
    """The training of one way."""

    def __init__(self, way: Way, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.way = way
        self.device: torch.device = options.device
        self.model = Model(options.layers, options.width, options.context)
        self.model.to(self.device, getattr(torch, options.dtype))
        self.losses: list[Tensor] = []
        self.drawn: list[Tensor] = []  # random numbers after each step
        self.seconds: list[float] = []

    def step(self, text: Tensor, seed: int) -> None:
        """One timed step of gradient descent."""
        self.model.zero_grad()
        torch.manual_seed(seed)
        begin = clock(self.device)
        loss = self.way(self.model, text)
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
        self.seconds.append(clock(self.device) - begin)
        self.losses.append(loss.detach())
        self.drawn += torch.rand(8), torch.rand(8, device=self.device)

    def results(self) -> dict[str, list[Any]]:
        """Everything that must be the same in all runs."""
        weights = list(self.model.parameters())
        gradients = [weight.grad for weight in weights]
        return {
            "gradients": gradients,
            "losses": self.losses,
            "weights": weights,
            "random stream": self.drawn,
        }

    def measured(self, text: Tensor) -> "Step":
        """One more step, counted instead of timed."""
        self.model.zero_grad()
        step = step_on_cpu if self.device.type == "cpu" else step_on_accelerator
        return step(lambda: self.way(self.model, text))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in memory, including the sign of a zero and the bits of a NaN."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def clock(device: torch.device) -> float:
    """Seconds, after the device has finished its work."""
    torch.get_device_module(device).synchronize()
    return time.perf_counter()


class Step(NamedTuple):
    """One step: live bytes in excess of those before it, and floating-point operations."""

    forward: list[int]  # after each allocation and release; on an accelerator, at the end only
    backward: list[int]  # on an accelerator, the peak only
    flops_forward: int
    flops: int

    def memory(self) -> tuple[int, int]:
        """Bytes held between forward and backward, and at the peak of both."""
        return self.forward[-1], max(self.forward + self.backward)

    def recomputed(self, base: "Step") -> float:
        """The operations in excess of ``base``, as a fraction of a forward."""
        return (self.flops - base.flops) / base.flops_forward


class Flops(TorchDispatchMode):
    """Counts floating-point operations. (`FlopCounterMode` would hold outputs in a recompute.)"""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


def step_on_cpu(forward: Callable[[], Tensor]) -> Step:
    """Add up the profiler's memory events: one for each block allocated or freed, in bytes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages on stderr
    flops = Flops()  # type: ignore[no-untyped-call]
    gc.collect()  # garbage would be counted when it is freed
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, flops:
        loss, flops_forward = forward(), flops.total
        with record_function("between"):
            pass
        loss.backward()
    assert profiled.profiler is not None, "the profiler has run"
    live, between = [0], 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live.append(live[-1] + event.nbytes())
        elif event.name() == "between":
            between = len(live)
    return Step(live[:between], live[between - 1 :], flops_forward, flops.total)


def step_on_accelerator(forward: Callable[[], Tensor]) -> Step:
    """Ask the allocator of the current device, which rounds each block up."""
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with Flops() as flops:  # type: ignore[no-untyped-call]
        loss, flops_forward = forward(), flops.total
        held = torch.accelerator.memory_allocated() - before
        loss.backward()
    peak = torch.accelerator.max_memory_allocated() - before
    return Step([held], [peak], flops_forward, flops.total)


def batch_of(options: argparse.Namespace, number: int) -> Tensor:
    """The next piece of the text, int64 (batch, context + 1)."""
    size = options.batch * (options.context + 1)
    places = torch.arange(size) + number * size
    return TEXT[places % len(TEXT)].view(options.batch, -1).long().to(options.device)


HEADING = (
    "way                               held for backward  peak in a step  recomputed  ms/step"
    "  ratio    loss  against plain"
)
ROW = "{:<32} {:>14.2f} MiB  {:>10.2f} MiB {:>11.2f} {:>8.1f} {:>6.2f} {:>7.4f}  {}"


def train(options: argparse.Namespace) -> bool:
    """Train every way and print a table. Returns whether each is bit-equal to plain, the first."""
    runs = [Run(way, options) for way in WAYS.values()]
    for i in range(options.steps):
        batch = batch_of(options, i)
        for run in runs:
            run.step(batch, seed=i)
        progress = f"step {i + 1} of {options.steps}: loss {runs[0].losses[-1]:.4f}"
        print(progress, file=sys.stderr, flush=True)

    results = [run.results() for run in runs]  # before another step changes the gradients
    steps = [run.measured(batch) for run in runs]
    times = [1e3 * statistics.median(run.seconds[1:] or run.seconds) for run in runs]
    all_equal = True
    print(HEADING)
    for name, run, found, step, ms in zip(WAYS, runs, results, steps, times, strict=True):
        differs = [part for part in found if not all(map(same_bits, found[part], results[0][part]))]
        all_equal = all_equal and not differs
        verdict = f"other {', '.join(differs)}" if differs else "bit-equal"
        held, peak = (nbytes / MIB for nbytes in step.memory())
        loss = float(run.losses[-1])
        again = step.recomputed(steps[0])
        print(ROW.format(name, held, peak, again, ms, ms / times[0], loss, verdict))
    return all_equal


def positive(text: str) -> int:
    """A count from the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def available_device(text: str) -> torch.device:
    """A device from the command line that can hold a tensor and give it back."""
    try:
        tensor = torch.zeros(1, device=text)
        tensor.cpu()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} is not available: {reason}") from None
    return tensor.device


SIZES = {
    "steps": (6, "timed steps of each way, one to warm up"),
    "layers": (12, "blocks"),
    "width": (128, f"features, a multiple of {HEADS}"),
    "context": (128, "bytes the model sees at once"),
    "batch": (8, "sequences in a step"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpointing",
        usage=argparse.SUPPRESS,  # so that a wrong value gets one line
        description="Train a small transformer in seven ways; compare memory, time and bits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for name, (default, text) in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=text)
    parser.add_argument(
        "--device", type=available_device, default="cpu", help="cpu, cuda, xpu, ..."
    )
    dtypes = ("float32", "float64", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the weights")
    options = parser.parse_args(arguments)
    if options.width % HEADS:
        parser.error(f"argument --width: {options.width} is not a multiple of {HEADS}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the result is the exit status: 0 if every way is bit-equal, else 1.

    Args:
        arguments: the words of the command line; None takes those of the process.

    Raises:
        SystemExit: with status 2 and one line on stderr, if a value is wrong.
    """
    options = parse(arguments)
    device, devices = options.device, []
    if device.type != "cpu":  # bits are compared, so kernels must be deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.accelerator.set_device_index(device.index)
        devices.append(device.index)
    with torch.random.fork_rng(devices, device_type=device.type):
        return int(not train(options))


if __name__ == "__main__":
    sys.exit(main())
