"""Peaks and times of a step of Llama in bfloat16 on a GPU, as ratios against torch's checkpoint per
layer.

`python bench/cuda.py [SIZES]` prints them, after a forecast. The allocator counts the peaks; the
ways take turns, and a step ends with a synchronisation. Weights are random, gradients are there
before, and losses must agree. (Bits are compared by `pytest -m gpu`.)
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from forecast import SIZES as LARGE, llama
from ratios import ratio, timed
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_scope, checkpointed, clear_programs, forecast

GIB = 2**30
SIZES: dict[str, Any] = {
    "160m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "layers": 12,
        "heads": 12,
        "groups": 12,
        "vocabulary": 32_000,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "layers": 16,
        "heads": 32,
        "vocabulary": 32_000,
    },
    "8b": LARGE["8b"],
}
TOKENS = {"160m": (4, 1024), "1b": (2, 4096), "8b": (1, 8192)}
TORCH = "torch per layer"
PER_LAYER: dict[str, Callable[[Any], Any]] = {
    "plain": lambda call: call,
    TORCH: lambda call: functools.partial(checkpoint, call, use_reentrant=False),
    "@checkpointed per layer": checkpointed,
    "scope per layer": functools.partial(checkpointed, backend="replay"),
}


class Step(NamedTuple):
    """Seconds, bytes in excess of those before, and the loss."""

    seconds: float
    peak: int
    reserved: int
    predicted: int
    loss: float


def step_of(model: Any, ids: Any, policy: Any = None) -> Step:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, begin = torch.cuda.memory_allocated(), time.perf_counter()
    with checkpoint_scope(policy) if policy else contextlib.nullcontext() as block:
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.cuda.synchronize()
    return Step(
        time.perf_counter() - begin,
        torch.cuda.max_memory_allocated() - before,
        torch.cuda.max_memory_reserved() - before,
        block.stats.peak_predicted if policy else 0,
        loss.item(),
    )


def table(size: str) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, ids = llama(**SIZES[size]), torch.randint(32_000, TOKENS[size])
    plain = {layer: layer.forward for layer in model.model.layers}
    print(f"Llama {size}, {ids.shape[0]} x {ids.shape[1]:,} tokens, bfloat16", flush=True)
    found = forecast(lambda: model(input_ids=ids, labels=ids).loss)
    print(found, flush=True)
    asked = [row.peak for row in found.rows if row.write.startswith("auto(peak=")]
    policies: dict[str, Any] = {"auto()": auto()}
    for peak in (asked[len(asked) // 2], asked[-1]):
        policies[f"auto(peak={peak / GIB:.2f} GiB)"] = auto(peak=peak)

    def step(way: str) -> Step:
        for layer, call in plain.items():
            layer.forward = PER_LAYER.get(way, PER_LAYER["plain"])(call)
        return step_of(model, ids, policies.get(way))

    first, later = {}, {}
    for way in (*PER_LAYER, *policies):
        try:
            first[way] = step(way)
            torch.cuda.empty_cache()
            later[way] = step(way)
        except torch.OutOfMemoryError:
            print(f"{way}: out of memory", flush=True)
        torch.cuda.empty_cache()
    assert len({each.loss for each in later.values()}) == 1
    times = timed({way: functools.partial(step, way) for way in later}, rounds=5, calls=1)
    for way, each in later.items():
        predicted = f", predicted {each.predicted / GIB:.3f}" if each.predicted else ""
        print(
            f"{way:<26} {1e3 * times[way][0]:>8.1f} ms, {ratio(times, way, TORCH)[0]:.3f} of "
            f"torch's (first step {first[way].seconds:.2f} s); peak {each.peak / GIB:.3f} GiB"
            f"{predicted}, reserved {each.reserved / GIB:.3f}; loss {each.loss:.6f}",
            flush=True,
        )
    clear_programs()


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    for size in sys.argv[1:] or SIZES:
        table(size)
