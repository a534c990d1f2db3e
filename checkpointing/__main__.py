"""The comparison run, ``python -m checkpointing``: trains one small transformer in five ways.

Every way starts from the same weights, seeds and text. Its losses, gradients, weights and random
stream must be bit for bit those of plain; otherwise the exit status is 1. Memory is the sum of all
allocations in one step, from the profiler. Recompute is counted in floating-point operations. Times
are those of the quickest of several steps without any measurement, and the ways take turns, so that
a slow moment of the machine slows them all.

Rejected: the resident size of the process. It includes free memory of the heap and varies from run
to run.
"""

import argparse
import gc
import os
import sys
import time
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from . import auto, checkpoint_scope, checkpointed, forecast
from ._torch import flops_of, same_bits

MIB = 2**20

# ---- what is trained


def model_of(options: Any) -> Any:
    """A language model of 256 tokens, without positions."""
    width = options.width
    blocks = [
        nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        for _ in range(options.layers)
    ]
    return nn.Sequential(
        nn.Embedding(256, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 256)
    ).to(options.device)


def batch_of(options: Any) -> Tensor:
    """Text, int64 (batch, context + 1): the model learns to count to ten."""
    text = torch.arange(options.context + 1, device=options.device) % 10
    return text.expand(options.batch, -1)


def each_block(call: Any) -> Any:
    """The loss of a model, each block of which runs through ``call``."""

    def loss(model: Any, text: Tensor) -> Tensor:
        embedding, *blocks, norm, head = model
        x = embedding(text[:, :-1])
        for block in blocks:
            x = call(block, x)
        return nn.functional.cross_entropy(head(norm(x)).flatten(0, 1), text[:, 1:].flatten())

    return loss


def plain(block: Any, x: Tensor) -> Any:
    """One causal block over ``(batch, context, width)``."""
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
    return block(x, mask, is_causal=True)


def in_scope(call: Any, policy: Any = None) -> Any:
    """``call`` in a scope."""

    def scoped(*args: Any) -> Any:
        with checkpoint_scope(policy):
            return call(*args)

    return scoped


torch_checkpoint = partial(checkpoint, plain, use_reentrant=False)
WAYS = {
    "plain": each_block(plain),
    "torch.utils.checkpoint per block": each_block(torch_checkpoint),
    "@checkpointed per block": each_block(checkpointed(plain)),
    "checkpoint_scope per block": each_block(in_scope(plain)),
    "one scope, auto()": in_scope(each_block(plain), auto()),
}

# ---- what is measured


class Measured(NamedTuple):
    """One step: live bytes in excess of those before it, and floating-point operations."""

    forward: list[int]  # after each allocation and release
    backward: list[int]
    flops_forward: int
    flops: int

    def memory(self) -> tuple[int, int]:
        """Bytes held between forward and backward, and at the peak of both."""
        return self.forward[-1], max(self.forward + self.backward)

    def recomputed(self, base: "Measured") -> float:
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


def step_of(forward: Any, device: str = "cpu") -> Measured:
    """Run a forward that returns a loss, and its backward, and measure both."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages on stderr
    gc.collect()  # garbage would be counted when it is freed
    loss, live, flops = counted(forward, device)
    _, changes, more = counted(loss.backward, device)
    return Measured(live, [live[-1] + change for change in changes], flops, flops + more)


def counted(run: Any, device: str) -> Any:
    """The result, the live bytes and the operations. In a mode, tensors have Python objects, so
    autograd adds no gradients of shared parameters in place."""
    with Flops() as flops:  # type: ignore[no-untyped-call]
        result, live = traced(run, device)
    return result, live, flops.total


def traced(run: Any, device: str = "cpu") -> Any:
    """The result, and the live bytes after each of the profiler's memory events, of which there is
    one for each block allocated or freed."""
    memory: Any = torch.profiler.profile(profile_memory=True)
    with memory:
        result = run()
    changes = [
        event.nbytes()
        for event in sorted(memory.profiler.kineto_results.events(), key=lambda e: e.start_ns())
        if (event.name(), event.device_type().name) == ("[memory]", device.upper())
    ]
    return result, [*accumulate(changes, initial=0)]


def training(way: Any, options: Any) -> Any:
    """Train in one way, then measure one more step. Yields what is known after each step: what was
    measured, the milliseconds of the quickest one, and all that must be the same in each way."""
    torch.manual_seed(0)
    model, text = model_of(options), batch_of(options)
    weights = [*model.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    times = []
    found = {"losses": [], "random stream": [], "weights": weights}
    for seed in range(options.steps):
        torch.manual_seed(seed)
        begin = time.perf_counter()
        loss = way(model, text)
        loss.backward()
        optimizer.step()
        torch.get_device_module(options.device).synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
        found["losses"].append(loss.detach())
        found["random stream"].append(torch.rand(8, device=text.device))
        found["gradients"] = [weight.grad for weight in weights]
        yield None, min(times), found
        optimizer.zero_grad()
    yield step_of(lambda: way(model, text), text.device.type), min(times), found


parser = argparse.ArgumentParser(
    prog="python -m checkpointing",
    description="Train a small transformer in five ways; compare memory, time and bits. The width "
    "(a multiple of 4) is in features, the context in tokens, the batch in sequences. With "
    "`forecast`, say what each choice of checkpoints would cost, without training.",
)
for name, default in {"steps": 6, "layers": 12, "width": 128, "context": 128, "batch": 8}.items():
    parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
parser.add_argument("what", nargs="?", choices=["forecast"], help="instead of training")
parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, cuda, xpu, ...")


def main(arguments: Any = None) -> int:
    """Train every way and print a table; the result is the exit status: 0 if each is bit-equal to
    plain, the first, else 1.

    Args:
        arguments: the words of the command line; None takes those of the process.
    """
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps is 1 or more")
    if options.device.type != "cpu":  # bits are compared, so kernels must be deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if options.what:
        print(forecast(partial(WAYS["plain"], model_of(options), batch_of(options))))
        return 0
    turns = zip(*[training(way, options) for way in WAYS.values()], strict=True)
    for number, turn in enumerate(turns, 1):
        base, quickest, plains = turn[0]
        print(f"step {number} of {options.steps + 1}", file=sys.stderr)
    status = 0
    print(
        "way                               held for backward  peak in a step  recomputed  ms/step"
        "  ratio    loss  against plain"
    )
    for name, (step, ms, found) in zip(WAYS, turn, strict=True):
        held, peak = step.memory()
        differs = [key for key in sorted(found) if not all(map(same_bits, found[key], plains[key]))]
        verdict = f"other {', '.join(differs)}" if differs else "bit-equal"
        print(
            f"{name:<32} {held / MIB:>14.2f} MiB  {peak / MIB:>10.2f} MiB "
            f"{step.recomputed(base):>11.2f} {ms:>8.1f} {ms / quickest:>6.2f} "
            f"{found['losses'][-1]:>7.4f}  {verdict}"
        )
        status |= bool(differs)
    return status


if __name__ == "__main__":
    sys.exit(main())
