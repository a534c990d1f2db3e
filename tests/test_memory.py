"""Bytes, each one counted: what is held for backward, what a step needs at its peak, what a scope
reports."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from oracle import apply, bits, leaf, memory_of
from torch import nn

from checkpointing import auto, checkpoint_scope, keep

# Memory is measured after collections, which are quick then.
pytestmark = pytest.mark.usefixtures("frozen")

DEPTH, WIDTH, ROWS = 12, 32, 64
ACTIVATION = ROWS * WIDTH * 4  # bytes


class Block(nn.Module):
    """A residual block, most of whose memory is its wide middle."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def per_block(door):
    def run(blocks, x):
        for block in blocks:
            x = apply(door, lambda x, block=block: block(x))(x)
        return x

    run.__name__ = f"{door} per block"
    return run


plain = per_block("")


def one_scope(blocks, x):
    """One scope around everything; recompute starts from the kept values."""
    with checkpoint_scope():
        for block in blocks:
            x = keep(block(x))
        return x


def bytes_of(run, depth=DEPTH):
    """Bytes held between forward and backward, and at the peak of both."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(depth))
    x = torch.rand(ROWS, WIDTH).requires_grad_()
    for parameter in (x, *blocks.parameters()):
        parameter.grad = torch.zeros_like(parameter)  # gradients are no part of it
    return memory_of(lambda: run(blocks, x).sum())


@pytest.mark.parametrize(
    "run", [per_block("c"), per_block("s"), one_scope], ids=lambda run: run.__name__
)
def test_each_further_block_costs_one_activation(run):
    """Its input, and a generator's state where a mask must be drawn again."""
    stash = torch.get_rng_state().nbytes
    bytes_of(run)
    (small, _), (large, _) = bytes_of(run, 6), bytes_of(run, 12)
    assert (large - small) / 6 in (ACTIVATION, ACTIVATION + stash)


@pytest.mark.parametrize("policy", [None, auto()], ids=["scope", "auto"])
@pytest.mark.parametrize("clipped", [False, True])
def test_training_steps_in_one_scope_need_what_forwards_in_scopes_do(policy, clipped):
    """Forward, backward, optimizer's step."""

    def trained(steps, around_all):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(6))
        optimizer = torch.optim.AdamW(blocks.parameters())
        x, losses = torch.rand(4 * ROWS, WIDTH), []

        def scope(wanted):
            return checkpoint_scope(policy=policy) if wanted else contextlib.nullcontext()

        def run(steps=steps):
            with scope(around_all):
                for _ in range(steps):
                    with scope(not around_all):
                        loss = plain(blocks, x).sum()
                    loss.backward()
                    if clipped:
                        nn.utils.clip_grad_norm_(blocks.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
            return torch.ones(1, requires_grad=True).sum()

        run(2)  # the state of the optimizer, and what the block does
        return memory_of(run).peak, bits([*losses, *blocks.parameters()])

    peak, want = trained(4, False)
    peak_in_one, have = trained(4, True)
    assert have == want
    assert peak_in_one <= 1.1 * peak
    assert trained(8, True)[0] <= 1.01 * peak_in_one


N = 1000 * 4  # bytes of one tensor below


def held_by(fn):
    """Bytes held between forward and backward, without the sum's 4."""
    x = leaf(1000)
    memory_of(lambda: fn(x).sum())
    return memory_of(lambda: fn(x).sum()).held - 4


@pytest.mark.parametrize("door", ["", "c", "r", "s"])
def test_a_region_holds_its_input_and_its_output(door):
    """Plain holds what two operators save."""

    def fn(x):
        return x.sin().exp().tanh() + 1

    stash = torch.get_rng_state().nbytes if door == "c" else 0
    assert held_by(apply(door, fn)) == (2 * N if door == "" else stash)


@pytest.mark.parametrize("door", ["r", "s"])
def test_an_input_that_no_recompute_reads_is_released(door):
    """A block holds what its recompute starts from, and not all that it touched."""

    def fn(x):
        a, b = x.neg(), x.neg()
        return apply(door, lambda a, b: a.exp() + (b + 1))(a, b)

    assert held_by(fn) == N


@pytest.mark.parametrize("door", ["r", "s"])
def test_a_replay_frees_what_it_has_used(door):
    """A chain of which only the end is saved, which runs again in one go."""

    def fn(x):
        for _ in range(20):
            x = x.neg()
        return x.sin()

    region, x = apply(door, fn), leaf(1000)
    assert memory_of(lambda: region(x).sum()).peak < 6 * N


@pytest.mark.parametrize("own", [False, True])
def test_stats_count_the_state_of_generators(own):
    """A mask that is larger than the state of its generator is drawn again."""
    x, generator = torch.rand(2000).requires_grad_(), torch.Generator()
    with checkpoint_scope() as scope:
        y = torch.rand(2000, generator=generator) * x if own else F.dropout(x * 2, 0.5)
    assert scope.stats.bytes_held == torch.get_rng_state().nbytes
    y.sum().backward()
    assert scope.stats.bytes_held == 0


def test_what_a_backward_inside_brings_back_is_not_held():
    """Its gradient's graph reads values that the block can make again."""
    x = torch.rand(1000).requires_grad_()
    with checkpoint_scope() as scope:
        h = x.sin().exp().tanh()
        (g,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        loss = (g * h).sum()
    assert scope.stats.bytes_held == 0
    loss.backward()
