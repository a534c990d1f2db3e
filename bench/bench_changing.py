"""Blocks whose program changes at every step, in `auto()` and with torch's checkpoint around each
layer: peak, and time of the first 16 steps and of later ones, as ratios.

Gradients are allocated before. `python -m pytest bench/bench_changing.py` checks small versions;
`python bench/bench_changing.py [NAMES]` prints all rows.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_scope, clear_programs
from checkpointing.__main__ import step_of

sys.path.insert(0, str(Path(__file__).parent))
from programs import Block

FIRST = 16  # steps
by_torch = functools.partial(functools.partial, checkpoint, use_reentrant=False)


class Experts(nn.Module):
    """Rows go through the two experts that they prefer."""

    def __init__(self, width, count):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x):
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        out = torch.zeros_like(h)
        for number in chosen.unique().tolist():
            rows, place = torch.where(chosen == number)
            made = self.experts[number](h[rows]) * weights[rows, place, None]
            out.index_add_(0, rows, made)
        return x + out


class Cross(nn.Module):
    """A block that also reads what an encoder has made."""

    def __init__(self, width):
        super().__init__()
        self.block, self.query = Block(width, 4), nn.Linear(width, width)
        self.pair = nn.Linear(width, 2 * width)

    def forward(self, x, memory):
        k, v = self.pair(memory).chunk(2, -1)
        x = x + F.scaled_dot_product_attention(self.query(x), k, v)
        return self.block(x)


class Dense(nn.Module):
    """It reads all that was made before."""

    def __init__(self, before, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(before * width), nn.Linear(before * width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, *parts):
        return self.down(F.gelu(self.up(self.norm(torch.cat(parts, -1)))))


def four_heads(width):
    return Block(width, 4)


def blocks(count, width, kind=four_heads):
    return nn.ModuleList(kind(width) for _ in range(count))


# Each makes modules, and a function of the step's random numbers, the input, and what to put around
# a module.


def experts(width=128, count=64, tokens=64):
    layers = nn.ModuleList(Experts(width, count) for _ in range(4))

    def run(draw, x, around):
        for layer in layers:
            x = around(layer)(x)
        return x

    return layers, run, (tokens, width)


def drop(width=128):
    layers = blocks(8, width)

    def run(draw, x, around):
        for layer in layers:
            if draw.random() > 0.3:
                x = around(layer)(x)
        return x

    return layers, run, (4, 128, width)


def exits(depths, width=128):
    """One of these depths."""
    layers = blocks(12, width)

    def run(draw, x, around):
        for layer in layers[: draw.choice(depths)]:
            x = around(layer)(x)
        return x

    return layers, run, (4, 128, width)


def times(width=128):
    layers = blocks(1, width)

    def run(draw, x, around):
        for _ in range(draw.randint(10, 30)):
            x = around(layers[0])(x)
        return x

    return layers, run, (2, 128, width)


def hidden(width=128):
    """All hidden states are returned, as with `output_hidden_states=True`."""
    layers = blocks(10, width)

    def run(draw, x, around):
        states = [x]
        for layer in layers:
            if draw.random() > 0.3:
                states.append(around(layer)(states[-1]))
        return torch.stack(states).mean(0)

    return layers, run, (4, 128, width)


def in_place(width=128):
    """The stream is one memory."""
    layers = blocks(8, width)

    def run(draw, x, around):
        x = x * 1.0
        for layer in layers:
            if draw.random() > 0.3:
                made = around(layer)(x)
                x = x + made if around is by_torch else x.add_(made)  # torch's refuses it
        return x

    return layers, run, (4, 128, width)


def unet(width=64):
    """Half as many rows, and twice as wide, on each of three levels; each comes back once more."""
    widths = [width << level for level in range(3)]
    down = nn.ModuleList(blocks(3, each) for each in widths)
    up = nn.ModuleList(blocks(3, each) for each in widths)
    wider = nn.ModuleList(nn.Linear(2 * each, 2 * each) for each in widths[:-1])
    back = nn.ModuleList(nn.Linear(2 * each, 2 * each) for each in widths[:-1])
    joined = nn.ModuleList(nn.Linear(2 * each, each) for each in widths)

    def run(draw, x, around):
        def some(x, layers):
            for layer in layers:
                if draw.random() > 0.3:
                    x = around(layer)(x)
            return x

        skips = []
        for level, layers in enumerate(down):
            x = some(x, layers)
            skips.append(x)
            if level < 2:
                n, rows, _ = x.shape
                x = wider[level](x.reshape(n, rows // 2, -1))
        for level in reversed(range(3)):
            x = joined[level](torch.cat([x, skips.pop()], -1))
            x = some(x, up[level])
            if level:
                n, rows, _ = x.shape
                x = back[level - 1](x).reshape(n, 2 * rows, -1)
        return x

    return nn.ModuleList([down, up, wider, back, joined]), run, (2, 512, width)


def encoder_decoder(width=128):
    encoder, decoder = blocks(5, width), blocks(5, width, Cross)

    def run(draw, x, around):
        y = x.flip(1)
        for layer in encoder:
            if draw.random() > 0.3:
                x = around(layer)(x)
        for layer in decoder:
            if draw.random() > 0.3:
                y = around(layer)(y, x)
        return y

    return nn.ModuleList([encoder, decoder]), run, (4, 128, width)


def dense(width=64):
    layers = nn.ModuleList(Dense(n + 1, width) for n in range(8))

    def run(draw, x, around):
        parts = [x]
        for layer in layers:
            made = around(layer)(*parts)
            parts.append(made if draw.random() > 0.3 else made + parts[-1])
        return torch.cat(parts, -1)

    return layers, run, (512, width)


def rnn(width=128):
    """A cell that takes another number of turns; all outputs are read."""
    cell, head = nn.GRUCell(width, width), nn.Linear(width, width)

    def run(draw, x, around):
        state, seen = torch.zeros_like(x), []
        for _ in range(draw.randint(20, 60)):
            state = around(cell)(x, state)
            seen.append(state)
        return head(torch.stack(seen))

    return nn.ModuleList([cell, head]), run, (32, width)


def convolutions(width=16):
    """Residual blocks with batch normalisation, and stochastic depth."""

    def block():
        return nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip

    layers = nn.ModuleList(block() for _ in range(10))

    def run(draw, x, around):
        for layer in layers:
            if draw.random() > 0.3:
                x = x + around(layer)(x)
        return x

    return layers, run, (4, width, 32, 32)


ROWS = {
    "experts": experts,
    "experts small": functools.partial(experts, 32, 16, 32),
    "drop": drop,
    "exits": functools.partial(exits, range(4, 13)),
    "few": functools.partial(exits, (4, 8, 12)),  # so that each is planned
    "times": times,
    "hidden": hidden,
    "in place": in_place,
    "unet": unet,
    "encoder, decoder": encoder_decoder,
    "dense": dense,
    "rnn": rnn,
    "convolutions": convolutions,
}


def build(name):
    """Two ways to run step `n`, with modules of their own."""
    clear_programs()  # all share one site
    ways = {}
    for way in ("auto", "torch"):
        torch.manual_seed(0)
        modules, run, shape = ROWS[name]()
        for parameter in modules.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ways[way] = functools.partial(step, run, shape, way)
    return ways


def step(run, shape, way, n):
    torch.manual_seed(n)
    x, draw = torch.randn(shape), random.Random(n)
    if way == "torch":
        return run(draw, x, by_torch).square().mean()
    with checkpoint_scope(auto()):
        return run(draw, x, lambda module: module).square().mean()


def timed(ways, numbers):
    """Milliseconds of each step."""
    found = {way: [] for way in ways}
    for n in numbers:
        for way, forward in ways.items():
            start = time.process_time()
            forward(n).backward()
            found[way].append((time.process_time() - start) * 1e3)
    return found


def peaks(ways, numbers):
    """Peak over torch's, by step."""
    found = []
    for n in numbers:
        ours, theirs = (
            step_of(functools.partial(ways[way], n)).memory()[1] for way in ("auto", "torch")
        )
        found.append(ours / theirs)
    return found


def show(name, later=24):
    ways = build(name)
    first = timed(ways, range(FIRST))
    after = timed(ways, range(FIRST, FIRST + later))
    found = peaks(ways, range(FIRST + later, FIRST + later + 6))
    slowest = [max(first[way] + after[way]) for way in ways]
    begin = sum(first["auto"]) / sum(first["torch"])
    median = statistics.median(after["auto"]) / statistics.median(after["torch"])
    print(
        f"{name:18} peak {statistics.median(found):.2f}, at most {max(found):.2f};"
        f" time: first {begin:.2f}, later {median:.2f};"
        f" slowest step {slowest[0]:.0f} ms (torch's {slowest[1]:.0f})",
        flush=True,
    )


@pytest.mark.parametrize("name", ["drop", "hidden", "experts small"])
def bench_changing(benchmark, name):
    ways = build(name)
    timed(ways, range(8))
    found = benchmark.pedantic(peaks, args=(ways, range(8, 11)), rounds=1, iterations=1)
    assert statistics.median(found) <= 1.1


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ROWS:
        show(name)
