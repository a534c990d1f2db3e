"""What `auto()` plans, on models it was tuned on and others: peak of a step over torch's checkpoint
per block, and recompute.

Gradients are allocated before, unless a row says otherwise; every allocation counts, told by the
profiler on the CPU. `python -m pytest bench/bench_plan.py` checks small versions; `python
bench/bench_plan.py [NAMES]` prints all rows.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_scope, clear_programs
from checkpointing.__main__ import step_of, traced

sys.path.insert(0, str(Path(__file__).parent))
import programs

MIB = 2**20
torch_checkpoint = functools.partial(checkpoint, use_reentrant=False)


def with_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def hugging_face(kind, layers=12, width=128, vocabulary=64, tokens=(4, 256), bf16=False, heads=4):
    """A language model of Hugging Face, plain and with each layer in torch's checkpoint."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": width, "d_ff": 4 * width, "d_kv": width // heads, "num_heads": heads}
        sizes |= {"decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.1}
        config = transformers.T5Config(vocab_size=vocabulary, num_layers=layers, **sizes)
        model = transformers.T5ForConditionalGeneration(config)
        blocks = [*model.encoder.block, *model.decoder.block]
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads
        )
        model = transformers.GPT2LMHeadModel(config)
        blocks = model.transformer.h
    else:
        sizes = {
            "hidden_size": width,
            "intermediate_size": width * 43 // 16,
            "num_attention_heads": heads,
        }
        config = transformers.LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, **sizes)
        model = transformers.LlamaForCausalLM(config)
        blocks = model.model.layers
    with_gradients(model)
    ids = torch.randint(0, vocabulary, tokens)
    calls = [block.forward for block in blocks]

    def forward(by_hand):
        for block, call in zip(blocks, calls, strict=True):
            block.forward = functools.partial(torch_checkpoint, call) if by_hand else call
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    return functools.partial(forward, False), functools.partial(forward, True)


class Attention(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        attention = torch.softmax(q @ k.transpose(-1, -2) / 8, -1)
        x = x + self.out(attention @ v)
        return x + self.mlp(x), attention


def attention(maps=False, bf16=False):
    """Eight blocks; the maps may be collected by the caller until backward."""
    torch.manual_seed(0)
    blocks, x = (
        with_gradients(nn.ModuleList(Attention() for _ in range(8))),
        torch.randn(8, 192, 64),
    )

    def forward(by_hand, collected):
        y = x
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            for block in blocks:
                y, seen = torch_checkpoint(block, y) if by_hand else block(y)
                if maps:
                    collected.append(seen.detach())
            return y.float().square().mean()

    kept: list = []
    ways = [functools.partial(forward, by_hand, kept) for by_hand in (False, True)]
    return (*ways, kept.clear)


def lstms(width=128, steps=60, batch=32):
    torch.manual_seed(0)
    cells = with_gradients(nn.ModuleList(nn.LSTMCell(width, width) for _ in range(3)))
    xs = torch.randn(steps, batch, width)

    def forward():
        state = [(torch.zeros(batch, width), torch.zeros(batch, width)) for _ in cells]
        for x in xs:
            for i, cell in enumerate(cells):
                state[i] = cell(x, state[i])
                x = state[i][0]
        return x.square().mean()

    return forward, forward


class Layer(nn.Module):
    """A residual block without attention."""

    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(
            *(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.mlp(x)


def two_ways(parts, run, fresh):
    """`run` takes what calls a block; gradients are None before the step if it is `fresh`."""
    model = nn.ModuleList(parts)
    ways = [functools.partial(run, call) for call in (lambda block, x: block(x), torch_checkpoint)]
    if not fresh:
        with_gradients(model)
    return (*ways, functools.partial(model.zero_grad, set_to_none=True)) if fresh else ways


def pyramid(fresh=False, depths=(3, 3, 9, 3)):
    """Early blocks have many activations, late ones many parameters."""
    torch.manual_seed(0)
    widths = [64 << n for n in range(len(depths))]
    stages = nn.ModuleList(
        nn.ModuleList(Layer(width) for _ in range(depth))
        for width, depth in zip(widths, depths, strict=True)
    )
    down = nn.ModuleList(nn.Linear(4 * width, 2 * width) for width in widths[:-1])
    x = torch.randn(4, 256 * 4 ** (len(depths) - 3), 64)

    def run(call):
        y = x
        for n, stage in enumerate(stages):
            if n:
                y = down[n - 1](y.reshape(len(y), -1, 4 * y.shape[2]))
            for block in stage:
                y = call(block, y)
        return y.square().mean()

    return two_ways([stages, down], run, fresh)


def towers(layers=8, vocabulary=20_000, fresh=False):
    """Two stacks of blocks beside a head."""
    torch.manual_seed(0)
    first = nn.ModuleList(programs.Block(96, 4) for _ in range(layers))
    second = nn.ModuleList(programs.Block(64, 4) for _ in range(layers * 3 // 4))
    ends = nn.ModuleList([nn.Linear(96, 64), nn.Linear(64, 64), nn.Linear(64, vocabulary)])
    a, b = torch.randn(2, 64, 96), torch.randn(2, 96, 64)

    def run(call):
        y, z = a, b
        for block in first:
            y = call(block, y)
        for block in second:
            z = call(block, z)
        logits = ends[2](ends[0](y) + ends[1](z)[:, :64])
        return logits.log_softmax(-1)[..., 0].sum()

    return two_ways([first, second, ends], run, fresh)


def two_losses(layers=8, vocabulary=4000, fresh=False):
    """A small loss, over the gates of all layers, after the large one."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(programs.Block(64, 4) for _ in range(layers))
    gates = nn.ModuleList(nn.Linear(64, 8) for _ in blocks)
    head, x = nn.Linear(64, vocabulary), torch.randn(2, 96, 64)

    def run(call):
        y, seen = x, []
        for block, gate in zip(blocks, gates, strict=True):
            seen.append(gate(y))
            y = call(block, y)
        loss = head(y).log_softmax(-1)[..., 0].mean()
        return loss + torch.cat(seen).softmax(-1).mean((0, 1)).square().sum()

    return two_ways([blocks, gates, head], run, fresh)


def transformer(fresh=False, **sizes):
    """`fresh`: gradients are None before the step."""
    forward, by_hand = programs.transformer(**sizes), programs.transformer(**sizes, by_hand=True)
    if not fresh:
        return forward, by_hand

    def clear():
        for call in (forward, by_hand):
            for cell in call.__closure__:
                if isinstance(cell.cell_contents, nn.ModuleList):
                    cell.cell_contents.zero_grad(set_to_none=True)

    return forward, by_hand, clear


# The most of torch's peak, and of a forward that runs again; None: as torch's.
ROWS = {
    "GPT-2, width 128": (lambda: hugging_face("gpt2"), 1.0, None),
    "GPT-2, width 128, bf16": (lambda: hugging_face("gpt2", bf16=True), 1.0, None),
    "GPT-2, 24 layers, bf16": (lambda: hugging_face("gpt2", layers=24, bf16=True), 1.0, None),
    "Llama, width 128": (lambda: hugging_face("llama"), 1.0, None),
    "Llama, width 128, bf16": (lambda: hugging_face("llama", bf16=True), 1.0, None),
    "attention": (lambda: attention(), 1.0, None),
    "attention, bf16": (lambda: attention(bf16=True), 1.0, None),
    "attention, maps": (lambda: attention(maps=True), 1.0, None),
    "attention, maps, bf16": (lambda: attention(maps=True, bf16=True), 1.0, None),
    "transformer": (lambda: transformer(), 1.0, None),
    "transformer, no gradients": (lambda: transformer(fresh=True), 1.0, 0.40),
    "T5, 6 + 6 layers": (
        lambda: hugging_face("t5", layers=6, vocabulary=32_128, tokens=(2, 96)),
        1.0,
        None,
    ),
    "two towers": (lambda: towers(), 1.0, None),
    "two losses": (lambda: two_losses(), 1.0, None),
    "pyramid": (lambda: pyramid(), 1.0, None),
    "pyramid, no gradients": (lambda: pyramid(fresh=True), 1.0, None),
    "192 layers": (lambda: transformer(layers=192, width=64, batch=1, context=32), 1.0, 1.0),
    "GPT-2, 124 million": (
        lambda: hugging_face("gpt2", width=768, heads=12, vocabulary=50257, tokens=(2, 256)),
        1.0,
        None,
    ),
    "GPT-2, 124 million, bf16": (
        lambda: hugging_face(
            "gpt2", width=768, heads=12, vocabulary=50257, tokens=(2, 256), bf16=True
        ),
        1.0,
        None,
    ),
}


def scoped(forward, **options):
    def run():
        with warnings.catch_warnings(), checkpoint_scope(policy=auto(**options)) as run.scope:
            warnings.simplefilter("ignore")
            return forward()

    return run


def measured(row, **options):
    """Peaks and recompute of a step: plain, torch's, and ours: the first step and a later one. The
    function that is returned has the peak of a step in which operations are not counted."""
    clear_programs()  # all rows have one call site, whose program knows the bytes of its first run
    forward, by_hand, *clear = row()
    run = scoped(forward, **options)

    def step(call, measure=step_of):
        for each in clear:
            each()
        return measure(call)

    step(forward)
    first = step(run)
    for _ in range(2):
        step(run)
    steps = {"plain": step(forward), "torch": step(by_hand), "first": first, "auto": step(run)}
    _, live = step(lambda: run().backward(), traced)
    run.peak = max(live)
    return steps, run


def show(name):
    row, peak, again = ROWS[name]
    steps, run = measured(row)
    peaks = {way: step.memory()[1] / MIB for way, step in steps.items()}
    found = peaks["auto"] / peaks["torch"]
    recomputed = {way: step.recomputed(steps["plain"]) for way, step in steps.items()}
    again = recomputed["torch"] + 0.005 if again is None else again
    where = ("backward", "forward")[max(steps["auto"].forward) > max(steps["auto"].backward)]
    predicted = run.scope.stats.peak_predicted / MIB
    print(
        f"{name:28s} peak {found:.3f} <= {peak} {'met' if found <= peak else 'MISSED'}; recomputed "
        f"{recomputed['auto']:.3f} <= {again:.3f} "
        f"{'met' if recomputed['auto'] <= again else 'MISSED'}; MiB "
        + ", ".join(f"{way} {size:.1f}" for way, size in peaks.items())
        + f"; in {where}, predicted {predicted:.1f}; cuts {len(run.scope.stats.cuts)}",
        flush=True,
    )


# ---- for pytest-benchmark

QUICK = {
    "attention": (lambda: attention(), 1.01),
    "attention, maps": (lambda: attention(maps=True), 1.01),
    "transformer": (lambda: transformer(layers=8, width=64), 1.01),
    "transformer, no gradients": (lambda: transformer(fresh=True, layers=8, width=64), 1.01),
    "two towers": (lambda: towers(layers=4, vocabulary=4000), 1.01),
    "two losses": (lambda: two_losses(layers=4), 1.01),
    "pyramid": (lambda: pyramid(depths=(2, 2, 4)), 1.01),
    "pyramid, no gradients": (lambda: pyramid(fresh=True, depths=(2, 2, 4)), 1.01),
    "LSTMs": (lambda: lstms(width=32, steps=20, batch=8), 0.55),  # of plain
}


@pytest.mark.parametrize("name", QUICK)
def bench_plan(benchmark, name):
    """Memory is counted, so it is asserted even in a quick run: the peak, and that the plan
    knows it."""
    row, most = QUICK[name]
    steps, run = benchmark.pedantic(lambda: measured(row))
    peaks = {way: step.memory()[1] for way, step in steps.items()}
    assert peaks["auto"] <= most * peaks["torch"]
    assert peaks["first"] <= 1.6 * peaks["auto"]
    assert abs(run.scope.stats.peak_predicted / run.peak - 1) <= 0.05


# ---- tables


def show_budgets():
    row = lstms
    base = measured(row)[0]["auto"].memory()[1]
    for budget in (16, 8, 4, 2):
        steps, _ = measured(row, budget=budget * MIB)
        again = steps["auto"].recomputed(steps["plain"])
        print(
            f"LSTMs, budget {budget} MiB: peak {steps['auto'].memory()[1] / base:.2f} of no budget "
            f"(first {steps['first'].memory()[1] / base:.2f}), recomputed {again:.2f}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in [n for n in ROWS if not sys.argv[1:] or any(part in n for part in sys.argv[1:])]:
        start = time.perf_counter()
        show(name)
    if not sys.argv[1:] or "budgets" in sys.argv[1:]:
        show_budgets()
