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
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from . import auto, checkpoint_scope, checkpointed
from ._torch import flops_of, same_bits

MIB = 2**20
HEADS = 4
VOCABULARY = 256  # bytes
DROPOUT = 0.1
TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)

# ---- what is trained


class Model(nn.Module):
    """A byte-level language model. Its blocks run through ``call``, in which the ways differ."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.dropout = nn.Dropout(DROPOUT)
        block = functools.partial(nn.TransformerEncoderLayer, batch_first=True, norm_first=True)
        sizes = width, HEADS, 4 * width, DROPOUT, "gelu"
        self.blocks = nn.ModuleList(block(*sizes) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))

    def loss(self, text: Tensor, call: Any) -> Tensor:
        """The loss of predicting each byte of ``text``, int64 (batch, context + 1)."""
        x = self.dropout(self.token(text[:, :-1]) + self.position)
        for block in self.blocks:
            x = call(block, x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten())


def plain(block: Any, x: Tensor) -> Any:
    """One causal block over ``(batch, context, width)``."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
    return block(x, mask, is_causal=True)


def each_block(call: Any) -> Any:
    """Every block through ``call``."""
    return lambda model, text: model.loss(text, call)


def in_scope(call: Any, policy: Any = None) -> Any:
    """``call`` in a scope."""

    def scoped(*args: Any) -> Any:
        with checkpoint_scope(policy=policy):
            return call(*args)

    return scoped


torch_checkpoint = functools.partial(checkpoint, plain, use_reentrant=False)

WAYS = {
    "plain": each_block(plain),
    "torch.utils.checkpoint per block": each_block(torch_checkpoint),
    "@checkpointed per block": each_block(checkpointed(plain)),
    "checkpoint_scope per block": each_block(in_scope(plain)),
    "one scope, auto()": in_scope(each_block(plain), auto()),
}

# ---- what is measured


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
        self.total += flops_of(func, args, kwargs, result)
        return result


def step_on_cpu(forward: Callable[[], Tensor]) -> Step:
    """Add up the profiler's memory events: one for each block allocated or freed, in bytes."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages on stderr
    gc.collect()  # garbage would be counted when it is freed
    with profile(profile_memory=True) as profiled, Flops() as flops:  # type: ignore[no-untyped-call]
        loss, flops_forward = forward(), flops.total
        with record_function("between"):
            pass
        loss.backward()
    events: Any = profiled.profiler
    live, between = [0], 0
    for event in sorted(events.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live.append(live[-1] + event.nbytes())
        elif event.name() == "between":
            between = len(live)
    return Step(live[:between], live[between - 1 :], flops_forward, flops.total)


def step_on_accelerator(forward: Callable[[], Tensor]) -> Step:
    """Ask the allocator of the current device, which rounds each block up."""
    gc.collect()
    device = torch.accelerator
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    with Flops() as flops:  # type: ignore[no-untyped-call]
        loss, flops_forward = forward(), flops.total
        held = device.memory_allocated() - before
        loss.backward()
    peak = device.max_memory_allocated() - before
    return Step([held], [peak], flops_forward, flops.total)


class Training:
    """The training of one way."""

    def __init__(self, way: Any, options: Any) -> None:
        torch.manual_seed(0)
        self.way = way
        self.model = Model(options.layers, options.width, options.context).to(options.device)
        self.weights = [*self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.1)
        self.seconds: list[float] = []
        # Must be the same in all ways. The random stream is sampled after each step.
        self.results: dict[str, Any] = {"losses": [], "random stream": [], "weights": self.weights}

    def step(self, text: Tensor, seed: int) -> None:
        """One timed step of gradient descent."""
        self.optimizer.zero_grad()
        torch.manual_seed(seed)
        begin = clock(text)
        loss = self.way(self.model, text)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(clock(text) - begin)
        self.results["losses"].append(loss.detach())
        self.results["random stream"] += torch.rand(8), torch.rand(8, device=text.device)
        self.results["gradients"] = [weight.grad for weight in self.weights]

    def measured(self, text: Tensor) -> Step:
        """One more step, counted instead of timed."""
        self.model.zero_grad()
        step = step_on_cpu if text.is_cpu else step_on_accelerator
        return step(lambda: self.way(self.model, text))

    def verdict(self, others: dict[str, Any]) -> str:
        """Names the results that are not those of another way, bit for bit."""
        differs = [
            name
            for name, values in sorted(self.results.items())
            if not all(map(same_bits, values, others[name]))
        ]
        return f"other {', '.join(differs)}" if differs else "bit-equal"


def clock(text: Tensor) -> float:
    """Seconds, after the device has finished its work."""
    torch.get_device_module(text.device).synchronize()
    return time.perf_counter()


def batch_of(options: Any, number: int) -> Tensor:
    """The next piece of the text, int64 (batch, context + 1)."""
    size = options.batch * (options.context + 1)
    text = TEXT.roll(-number * size)[:size]
    return text.view(options.batch, -1).long().to(options.device)


HEADING = (
    "way                               held for backward  peak in a step  recomputed  ms/step"
    "  ratio    loss  against plain"
)
ROW = "{:<32} {:>14.2f} MiB  {:>10.2f} MiB {:>11.2f} {:>8.1f} {:>6.2f} {:>7.4f}  {}"


def train(options: Any) -> bool:
    """Train every way and print a table. Returns whether each is bit-equal to plain, the first."""
    ways = [Training(way, options) for way in WAYS.values()]
    for number in range(options.steps):
        text = batch_of(options, number)
        for way in ways:
            way.step(text, number)
        print(f"step {number + 1} of {options.steps}", file=sys.stderr, flush=True)
    verdicts = [way.verdict(ways[0].results) for way in ways]
    steps = [way.measured(text) for way in ways]
    times = [1e3 * statistics.median(way.seconds[1:] or way.seconds) for way in ways]
    print(HEADING)
    for name, way, step, ms, verdict in zip(WAYS, ways, steps, times, verdicts, strict=True):
        held, peak = (nbytes / MIB for nbytes in step.memory())
        recomputed, loss = step.recomputed(steps[0]), float(way.results["losses"][-1])
        print(ROW.format(name, held, peak, recomputed, ms, ms / times[0], loss, verdict))
    return {*verdicts} == {"bit-equal"}


SIZES = {
    "steps": (6, "timed steps of each way, one to warm up"),
    "layers": (12, "blocks"),
    "width": (128, f"features, a multiple of {HEADS}"),
    "context": (128, "bytes the model sees at once"),
    "batch": (8, "sequences in a step"),
}


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
