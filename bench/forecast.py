"""What a step of a large Llama would need, forecast without memory.

`python bench/forecast.py 8b 70b` prints it.

Weights, gradients and activations are fake tensors, so this runs anywhere. Gradients are there
before, as when they are accumulated: the rows are activations alone.
"""

from __future__ import annotations

import resource
import sys
import time

import torch
import transformers
from torch._subclasses import FakeTensorMode

from checkpointing import Forecast, forecast

SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "layers": 32, "heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "layers": 80, "heads": 64},
}


def forecast_of(size: str, tokens: int = 8192) -> Forecast:
    """For one sequence, in bfloat16."""
    sizes = {**SIZES[size]}
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        num_hidden_layers=sizes.pop("layers"),
        num_attention_heads=sizes.pop("heads"),
        num_key_value_heads=8,
        max_position_embeddings=tokens,
        **sizes,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            model = transformers.LlamaForCausalLM(config)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            ids = torch.zeros(1, tokens, dtype=torch.long)
            return forecast(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    for size in sys.argv[1:] or SIZES:
        begin = time.perf_counter()
        print(f"Llama {size}, 1 x 8,192 tokens, bfloat16\n{forecast_of(size)}")
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{time.perf_counter() - begin:.1f} s, {used:.2f} GiB of memory in all\n")
