"""A step of Hugging Face models, a region per layer, as a ratio against torch's own checkpoint
in the same run.

The models have four layers of width 64 and random weights; nothing is downloaded. `python -m pytest
bench` runs each once and compares gradients bit for bit; `python bench/bench_models.py` prints the
ratios and whether they are met.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from checkpointing import auto, checkpoint_scope, checkpointed

sys.path.insert(0, str(Path(__file__).parent))
from ratios import mark, ratio, timed

transformers = pytest.importorskip(
    "transformers", reason="needs transformers, of the extra `bench`"
)

MOST = {
    "rerun": 0.92,
    "scope": 1.08,
    "auto": 1.15,
}  # of torch's step; `auto`: one block around the whole model

WAYS = {
    "plain": lambda forward: forward,
    "torch": lambda forward: functools.partial(torch_checkpoint, forward, use_reentrant=False),
    "rerun": checkpointed,
    "scope": functools.partial(checkpointed, backend="replay"),
    "auto": lambda forward: forward,
}


def gpt2():
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, n_positions=64, vocab_size=256, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config)
    return model, model.transformer.h


SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "use_cache": False,
}


def llama():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return model, model.model.layers


def bert():
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return model, model.bert.encoder.layer


MODELS = {"GPT-2": gpt2, "Llama": llama, "BERT": bert}


# Batches and lengths of one step, and of steps that all differ.
ONE_SIZE = ((2, 32),)
SIZES_OF_STEPS = ((2, 32), (1, 20), (3, 31), (2, 17), (4, 25), (1, 48), (2, 40), (3, 12))


def step(name, way, sizes=ONE_SIZE):
    """Forward and backward of a batch of tokens, for each of these sizes."""
    torch.manual_seed(0)
    model, layers = MODELS[name]()
    for layer in layers:
        layer.forward = WAYS[way](layer.forward)
    batches = [torch.randint(256, size) for size in sizes]

    def call():
        model.zero_grad()
        for tokens in batches:
            with checkpoint_scope(policy=auto()) if way == "auto" else contextlib.nullcontext():
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    return call


@pytest.mark.parametrize("way", MOST)
@pytest.mark.parametrize("name", MODELS)
def bench_model(benchmark, name, way):
    """The same bits as plain."""
    expected = step(name, "plain")()
    assert all(map(torch.equal, benchmark.pedantic(step(name, way)), expected))


@pytest.mark.parametrize("way", ["scope", "auto"])
def bench_sizes(benchmark, way):
    """Programs whose sizes change at every step: the same bits."""
    expected = step("GPT-2", "plain", SIZES_OF_STEPS)()
    assert all(map(torch.equal, benchmark.pedantic(step("GPT-2", way, SIZES_OF_STEPS)), expected))


def main():
    torch.set_num_threads(1)
    for name in MODELS:
        ways = {way: step(name, way, SIZES_OF_STEPS) for way in ("torch", "scope", "auto")}
        times = timed(ways, rounds=20, calls=1)
        for way in ("scope", "auto"):
            mark(
                f"{name}, other sizes at every step: {way} / torch",
                ratio(times, way, "torch"),
                1.15,
            )
        times = timed({way: step(name, way) for way in WAYS}, rounds=150, calls=1)
        print(
            f"{name}:",
            ", ".join(f"{way} {1e3 * median:.2f} ms" for way, (median, _) in times.items()),
        )
        for way, most in MOST.items():
            mark(f"  {way}: a step of {name}, of torch's", ratio(times, way, "torch"), most)


if __name__ == "__main__":
    main()
