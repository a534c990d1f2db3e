"""The comparison run, ``python -m checkpointing``: trains one small transformer in five ways.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from checkpointing import auto, checkpoint_scope, checkpointed

MIB = 2**20
HEADS = 4
VOCABULARY = 256  # bytes
DROPOUT = 0.1
TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)

Layer = Callable[[Tensor], Tensor]
Call = Callable[[Layer, Tensor], Tensor]
Way = Callable[["Model", Tensor], Tensor]


class Block(nn.TransformerEncoderLayer):
    """One causal pre-norm transformer block over ``(batch, context, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__(
            width, HEADS, 4 * width, DROPOUT, "gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Attention, then two linear layers."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, mask, is_causal=True)


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


def one_scope(policy: Any) -> Way:
    """A scope around the whole model."""

    def way(model: Model, text: Tensor) -> Tensor:
        with checkpoint_scope(policy=policy):
            return model.loss(text, plain)

    return way


torch_checkpoint = functools.partial(checkpoint, use_reentrant=False)

WAYS: dict[str, Way] = {
    "plain": each_block(plain),
    "torch.utils.checkpoint per block": each_block(torch_checkpoint),
    "@checkpointed per block": each_block(checkpointed(plain)),
    "checkpoint_scope per block": each_block(scoped),
    "one scope, auto()": one_scope(auto()),
}


class Run:
    """The training of one way."""

    def __init__(self, way: Way, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.way = way
        self.device: torch.device = options.device
        self.model = Model(options.layers, options.width, options.context).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.seconds: list[float] = []
        # Must be the same in all runs. The random stream is sampled after each step.
        self.results: dict[str, list[Any]] = {"losses": [], "random stream": []}

    def step(self, text: Tensor, seed: int) -> None:
        """One timed step of gradient descent."""
        self.optimizer.zero_grad()
        torch.manual_seed(seed)
        begin = clock(self.device)
        loss = self.way(self.model, text)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(clock(self.device) - begin)
        self.results["losses"].append(loss.detach())
        self.results["random stream"] += torch.rand(8), torch.rand(8, device=self.device)
        self.results["weights"] = list(self.model.parameters())
        self.results["gradients"] = [weight.grad for weight in self.model.parameters()]

    def measured(self, text: Tensor) -> "Step":
        """One more step, counted instead of timed."""
        self.model.zero_grad()
        step = step_on_cpu if self.device.type == "cpu" else step_on_accelerator
        return step(lambda: self.way(self.model, text))

    def differences(self, other: "Run") -> list[str]:
        """The results that are not those of another run, bit for bit."""
        mine, others = self.results, other.results
        return [name for name in sorted(mine) if not all(map(same_bits, mine[name], others[name]))]


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
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        return result


def step_on_cpu(forward: Callable[[], Tensor]) -> Step:
    """Add up the profiler's memory events: one for each block allocated or freed, in bytes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages on stderr
    gc.collect()  # garbage would be counted when it is freed
    flops = Flops()  # type: ignore[no-untyped-call]
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
    allocated = torch.accelerator.memory_allocated
    torch.accelerator.reset_peak_memory_stats()
    before = allocated()
    with Flops() as flops:  # type: ignore[no-untyped-call]
        loss, flops_forward = forward(), flops.total
        held = allocated() - before
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
    plain_run = runs[0]
    for i in range(options.steps):
        batch = batch_of(options, i)
        for run in runs:
            run.step(batch, seed=i)
        print(f"step {i + 1} of {options.steps}", file=sys.stderr, flush=True)
    steps = [run.measured(batch) for run in runs]
    times = [1e3 * statistics.median(run.seconds[1:] or run.seconds) for run in runs]
    print(HEADING)
    for name, run, step, ms in zip(WAYS, runs, steps, times, strict=True):
        differs = ", ".join(run.differences(plain_run))
        verdict = f"other {differs}" if differs else "bit-equal"
        held, peak = (nbytes / MIB for nbytes in step.memory())
        again, loss = step.recomputed(steps[0]), float(run.results["losses"][-1])
        print(ROW.format(name, held, peak, again, ms, ms / times[0], loss, verdict))
    return not any(run.differences(plain_run) for run in runs)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpointing",
        description="Train a small transformer in five ways; compare memory, time and bits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, (default, text) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, cuda, xpu, ...")
    return parser.parse_args(arguments)


SIZES = {
    "steps": (6, "timed steps of each way, one to warm up"),
    "layers": (12, "blocks"),
    "width": (128, f"features, a multiple of {HEADS}"),
    "context": (128, "bytes the model sees at once"),
    "batch": (8, "sequences in a step"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the result is the exit status: 0 if every way is bit-equal, else 1.

    Args:
        arguments: the words of the command line; None takes those of the process.

    """
    options = parse(arguments)
    if options.device.type != "cpu":  # bits are compared, so kernels must be deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.accelerator.set_device_index(options.device.index or 0)
    with torch.random.fork_rng([]):
        return int(not train(options))


if __name__ == "__main__":
    sys.exit(main())
