"""What a step of a large Llama would need, forecast without memory.

`python bench/forecast.py 8b 70b` prints it.

Weights, gradients and activations are fake tensors, so this runs anywhere. Gradients are there
before, as when they are accumulated: the rows are activations alone.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
import transformers
from torch._subclasses import FakeTensorMode

from checkpointing import Forecast, forecast

SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "layers": 32, "heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "layers": 80, "heads": 64},
}


def llama(
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    groups: int = 8,
    vocabulary: int = 128_256,
) -> Any:
    """A Llama for up to 8,192 tokens; gradients are there."""
    config = transformers.LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def forecast_of(size: str, tokens: int = 8192) -> Forecast:
    """For one sequence, in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            model = llama(**SIZES[size])
            ids = torch.zeros(1, tokens, dtype=torch.long)
            return forecast(lambda: model(input_ids=ids, labels=ids).loss)
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    for size in sys.argv[1:] or SIZES:
        begin = time.perf_counter()
        print(f"Llama {size}, 1 x 8,192 tokens, bfloat16\n{forecast_of(size)}")
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{time.perf_counter() - begin:.1f} s, {used:.2f} GiB of memory in all\n")
