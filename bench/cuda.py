"""Peaks and times of a step of Llama in bfloat16 on a GPU, as ratios against torch's checkpoint per
layer.

`python bench/cuda.py [SIZES]` prints them, after a forecast. The allocator counts the peaks; the
ways take turns, and a step begins and ends with a synchronisation. Weights are random, gradients
are there before, and losses must agree. (Bits are compared by `pytest -m gpu`.)
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_scope, checkpointed, clear_programs, forecast

GIB = 2**30
SIZES = {
    "160m": {"hidden_size": 768, "intermediate_size": 2048, "layers": 12, "heads": 12},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "layers": 16, "heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "layers": 32, "heads": 32},
}
TOKENS = {"160m": (4, 1024), "1b": (2, 4096), "8b": (1, 8192)}

PER_LAYER: dict[str, Callable[[Any], Any]] = {
    "plain": lambda call: call,
    "torch per layer": lambda call: functools.partial(checkpoint, call, use_reentrant=False),
    "@checkpointed per layer": checkpointed,
    "scope per layer": functools.partial(checkpointed, backend="replay"),
}


def llama(size: str) -> Any:
    sizes = {**SIZES[size]}
    config = transformers.LlamaConfig(
        vocab_size=128_256 if size == "8b" else 32_000,
        num_hidden_layers=sizes.pop("layers"),
        num_attention_heads=sizes.pop("heads"),
        num_key_value_heads=8 if size != "160m" else 12,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        use_cache=False,
        **sizes,
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def table(size: str, rounds: int = 5) -> None:
    torch.manual_seed(0)
    model = llama(size)
    ids = torch.randint(32_000, TOKENS[size], device="cuda")
    layers = [(layer, layer.forward) for layer in model.model.layers]
    print(f"Llama {size}, {ids.shape[0]} x {ids.shape[1]:,} tokens, bfloat16", flush=True)
    begin = time.perf_counter()
    found = forecast(lambda: model(input_ids=ids, labels=ids).loss)
    print(f"forecast, {time.perf_counter() - begin:.1f} s:\n{found}", flush=True)
    budgets = [row.peak for row in found.rows if row.write.startswith("auto(peak=")]
    ways: dict[str, Any] = {
        **dict.fromkeys(PER_LAYER),
        "auto()": auto(),
        f"auto(peak={budgets[len(budgets) // 2] / GIB:.2f} GiB)": auto(
            peak=budgets[len(budgets) // 2]
        ),
        f"auto(peak={budgets[-1] / GIB:.2f} GiB)": auto(peak=budgets[-1]),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks, reserved, least, first, losses, predicted = {}, {}, {}, {}, {}, {}

    def step(way: str) -> None:
        policy = ways[way]
        for layer, call in layers:
            layer.forward = PER_LAYER.get(way, PER_LAYER["plain"])(call)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        if policy is None:
            loss = model(input_ids=ids, labels=ids).loss
        else:
            with checkpoint_scope(policy) as block:
                loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.cuda.synchronize()
        times[way].append(time.perf_counter() - begin)
        peaks[way] = torch.cuda.max_memory_allocated() - before
        reserved[way] = torch.cuda.max_memory_reserved() - before
        losses[way] = loss.item()
        if policy is not None:
            predicted[way] = block.stats.peak_predicted

    for way in list(ways):
        try:
            step(way)
            first[way] = times[way].pop()
            torch.cuda.empty_cache()
            step(way)
            least[way] = reserved[way]
            times[way].clear()
        except torch.OutOfMemoryError:
            del ways[way]
            print(f"{way}: out of memory", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    for _ in range(rounds):
        for way in ways:
            step(way)
    assert len(set(losses.values())) == 1
    torchs = statistics.median(times["torch per layer"])
    for way in ways:
        ms = statistics.median(times[way])
        more = f", predicted {predicted[way] / GIB:.3f}" if way in predicted else ""
        print(
            f"{way:<26} {1e3 * ms:>8.1f} ms, {ms / torchs:.3f} of torch's (first step "
            f"{first[way]:.2f} s); peak {peaks[way] / GIB:.3f} GiB{more}, reserved "
            f"{least[way] / GIB:.3f}; loss {losses[way]:.6f}",
            flush=True,
        )
    clear_programs()


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    for size in sys.argv[1:] or SIZES:
        table(size)
