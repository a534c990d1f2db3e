"""`auto()` on models at real widths and vocabularies, as ratios against torch's checkpoint per
layer.

One scope around model and loss, gradients allocated before, in float32 and under bfloat16 autocast;
random weights, nothing is downloaded. `python -m pytest bench/bench_real.py` runs two layers of
each model and compares gradients bit for bit; `python bench/bench_real.py [NAMES]` prints peaks,
recompute and times of six layers with their marks. One thread, whose own time counts.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_scope
from checkpointing.__main__ import step_of

sys.path.insert(0, str(Path(__file__).parent))
from ratios import mark, ratio, timed

transformers = pytest.importorskip(
    "transformers", reason="needs transformers, of the extra `bench`"
)

MIB = 2**20
MARKS = {"peak": 1.0, "recompute": 0.7, "time": 1.0}  # of torch's
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def llama(layers):
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
        "vocab_size": 32_000,
    }
    config = transformers.LlamaConfig(num_hidden_layers=layers, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config), "model.layers", tokens(2, 256, 32_000)


def bert(layers):
    config = transformers.BertConfig(num_hidden_layers=layers)
    return (
        transformers.BertForMaskedLM(config),
        "bert.encoder.layer",
        tokens(4, 128, config.vocab_size),
    )


def gpt2(layers):
    config = transformers.GPT2Config(n_layer=layers, use_cache=False)
    return transformers.GPT2LMHeadModel(config), "transformer.h", tokens(2, 128, config.vocab_size)


def vit(layers):
    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_hidden_layers=layers))
    images = {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(2, (4,))}
    (path,) = [
        name for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList)
    ]
    return model, path, images


def tokens(rows, length, vocabulary):
    """A batch of random text, each token its own label."""
    ids = torch.randint(vocabulary, (rows, length))
    return {"input_ids": ids, "labels": ids}


MODELS = {"Llama": llama, "BERT": bert, "GPT-2": gpt2, "ViT": vit}


def forwards(name, dtype, layers=6):
    """The forward of one model, plain, in torch's checkpoints and in one scope, and its
    parameters."""
    torch.manual_seed(0)
    model, path, batch = MODELS[name](layers)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain = {layer: layer.forward for layer in model.get_submodule(path)}

    def forward(way):
        torch.manual_seed(1)
        for layer, call in plain.items():
            layer.forward = (
                functools.partial(checkpoint, call, use_reentrant=False) if way == "torch" else call
            )
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            if way != "auto":
                return model(**batch).loss
            with checkpoint_scope(policy=auto()):
                return model(**batch).loss

    return {way: functools.partial(forward, way) for way in ("plain", "torch", "auto")}, list(
        model.parameters()
    )


def measured(ways):
    """A step of each way, in bytes and operations; the first one fills caches."""
    for forward in ways.values():
        forward().backward()
    return {way: step_of(forward) for way, forward in ways.items()}


# ---- for pytest-benchmark


NO_KERNELS = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no kernels for bf16: a step takes minutes",
)


@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=NO_KERNELS if DTYPES[name] else ()) for name in DTYPES]
)
@pytest.mark.parametrize("name", MODELS)
def bench_real_model(benchmark, name, dtype):
    """The bits of plain. Memory and recompute are counted, so they are asserted even in a quick
    run; of two layers the head of BERT is a larger part, of which a product is made again
    under bf16."""
    ways, parameters = forwards(name, DTYPES[dtype], layers=2)
    gradients = functools.partial(torch.autograd.grad, inputs=parameters, allow_unused=True)
    want, have = gradients(ways["plain"]()), benchmark.pedantic(lambda: gradients(ways["auto"]()))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(want, have, strict=True))
    ways["torch"]().backward()  # fills caches
    torchs, autos = (step_of(ways[way]) for way in ("torch", "auto"))
    assert autos.memory()[1] <= 1.04 * torchs.memory()[1]
    assert autos.flops <= torchs.flops + 0.15 * torchs.flops_forward


# ---- tables


def main(names):
    torch.set_num_threads(1)
    for name in names or MODELS:
        for dtype, kind in DTYPES.items():
            ways, _ = forwards(name, kind)
            steps = measured(ways)
            peaks = {way: step.memory()[1] for way, step in steps.items()}
            again = {way: step.recomputed(steps["plain"]) for way, step in steps.items()}
            print(
                f"{name}, {dtype}:",
                ", ".join(f"{way} {peak / MIB:.1f} MiB" for way, peak in peaks.items()),
                end="",
            )
            print(
                f"; recomputed {again['auto']:.2f} of a forward, torch {again['torch']:.2f}",
                flush=True,
            )
            mark("  peak, of torch's", 2 * (peaks["auto"] / peaks["torch"],), MARKS["peak"])
            mark(
                "  recompute, of torch's", 2 * (again["auto"] / again["torch"],), MARKS["recompute"]
            )
            run = {way: lambda forward=ways[way]: forward().backward() for way in ("torch", "auto")}
            mark(
                "  time, of torch's",
                ratio(timed(run, 7, 1, time.process_time), "auto", "torch"),
                MARKS["time"],
            )


if __name__ == "__main__":
    main(sys.argv[1:])
