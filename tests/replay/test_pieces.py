"""Blocks that go another way in every step: after a few steps `auto()` runs them in pieces."""

import functools

import pytest
import torch
from oracle import NO_ROOM, bits, memory_of, plain, scope, through
from torch import nn
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_scope, keep, opaque

pytestmark = NO_ROOM
STEPS = 10


class Layer(nn.Module):
    """It draws random numbers, has statistics, and saves much more than it begins with."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)).exp().tanh())))


def chosen(n, count):
    """Other layers in every step."""
    bits = (n * 7919 + 13) % (1 << count)
    return [place for place in range(count) if bits >> place & 1]


class Model(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.program = program
        self.register_buffer("state", torch.ones(32, 8))

    def forward(self, x, n):
        return self.program(self, x, chosen(n, 6)).square().mean()


class Programs:
    def written_in_place(m, x, places):
        """The stream is one memory, and a buffer changes between two layers."""
        x = x * 1.0
        for place in places:
            x += m.layers[place](x + m.state)
            m.state.mul_(0.5)
        return x

    def used_again(m, x, places):
        first = m.layers[0](x)
        for place in places:
            x = m.layers[place](x) * first
        return x

    def kept_and_unseen(m, x, places):
        for place in places:
            x = keep(m.layers[place](x))
            with opaque():
                m.state.mul_(0.5)
            x = x + m.state
        return x

    def frozen_at_first(m, x, places):
        with torch.no_grad():
            x = m.layers[0](x)
        return through([m.layers[place] for place in places], x)

    def statistics_read_between_updates(m, x, places):
        """Which count no version up."""
        norm = m.layers[0].norm
        for place in places:
            x = norm(m.layers[place](x)) - 0.5 * norm.running_mean
        return x

    def written_by_numpy(m, x, places):
        """The same, where nobody sees it."""
        for place in places:
            m.state.mul_(1.5)
            x = (m.layers[place](x) + m.state).sin()
            with opaque():
                m.state.numpy()[:] *= 0.5
            x = (x + m.state).sin()
        return x


PROGRAMS = [program for name, program in vars(Programs).items() if not name.startswith("_")]


def steps(program, region):
    torch.manual_seed(0)
    model = Model(program).double()
    seen = []
    for n in range(STEPS):
        x = torch.randn(32, 8, dtype=torch.float64, requires_grad=True)
        loss = region(lambda: model(x, n) + model(x, n + 1))  # noqa: B023
        loss.backward()
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen.append([loss.detach(), x.grad, torch.get_rng_state(), *grads])
        seen[-1] += [buffer.clone() for buffer in model.buffers()]
    return seen


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("policy", [auto(), auto(budget="1 MiB")], ids=str)
def test_every_step_leaves_the_same_bits(program, policy):
    cuts = []

    def region(function):
        with checkpoint_scope(policy) as scope:
            loss = function()
        cuts.append(scope.stats.cuts)
        return loss

    assert bits(steps(program, region)) == bits(steps(program, lambda function: function()))
    assert min(map(len, cuts[-4:])) > 2


def assert_as_little_memory(forward, factor, **options):
    """As with torch's checkpoint around each layer."""

    def by_hand(n):
        return forward(n, lambda layer: functools.partial(checkpoint, layer, use_reentrant=False))

    in_scope = scope(lambda n: forward(n, plain), policy=auto(**options))
    for n in range(6):
        in_scope(n).backward()
    for n in (8, 11):
        by_hand(n).backward()  # all gradients are there
        ours, theirs = (memory_of(lambda: run(n)).peak for run in (in_scope, by_hand))  # noqa: B023
        assert ours <= factor * theirs


@pytest.mark.parametrize("options", [{}, {"peak": "1 GiB"}, {"budget": "1 GiB"}], ids=str)
def test_no_more_memory_than_with_a_checkpoint_around_each_layer(options):
    """Also where more is allowed: nothing is planned any more."""
    layers, x = nn.ModuleList(Layer(32) for _ in range(8)), torch.randn(64, 32)

    def forward(n, around):
        return through([around(layers[place]) for place in chosen(n, 8)], x).square().mean()

    assert_as_little_memory(forward, 1.05, **options)


def test_pieces_end_between_two_layers_though_half_a_layer_saves_enough():
    """In the middle of such a layer, as much is alive as at its end, or twice as much."""
    layer = functools.partial(nn.TransformerEncoderLayer, 64, 4, 256, batch_first=True)
    layers, x = nn.ModuleList(layer(norm_first=True) for _ in range(24)), torch.randn(16, 16, 64)

    def forward(n, around):
        return through([around(layer) for layer in layers[: 12 + n]], x).square().mean()

    assert_as_little_memory(forward, 1.1)


def in_a_budget(values, count, kept=0):
    """The stats of a scope around `count` layers, with a budget of so many values that is not
    exceeded. The user keeps the first `kept` values."""
    layer = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Tanh(), nn.Linear(256, 32))
    x = torch.randn(64, 32)

    def forward():
        with checkpoint_scope(auto(budget=values * x.nbytes)) as forward.scope:
            y = x
            for place in range(count):
                y = layer(y)
                y = keep(y) if place < kept else y
            return y.sum()

    assert memory_of(forward).held <= (values + 0.5) * x.nbytes
    return forward.scope.stats


@pytest.mark.parametrize(
    ("values", "kept", "whole"), [(24, 0, False), (36, 8, False), (24, 8, True), (12, 0, True)]
)
def test_pieces_are_taken_where_a_budget_has_room_for_them(values, kept, whole):
    """Beside what the user keeps; else each path is planned."""
    for count in (10, 11, 12, 13):
        in_a_budget(values, count, kept)
    assert (in_a_budget(values, 9, kept).peak_predicted > 0) is whole


def test_where_pieces_run_out_of_a_budget_paths_are_planned_from_then_on():
    for count in (10, 11, 12, 13):
        in_a_budget(20, count)
    assert in_a_budget(20, 23).peak_predicted == 0
    assert in_a_budget(20, 14).peak_predicted > 0


def test_what_is_read_from_outside_makes_no_piece_larger():
    """Each turn reads a part of one input: its memory counts in no piece."""
    cell, x = nn.GRUCell(64, 64), torch.randn(32, 20, 64)

    def forward(n, around):
        state = torch.zeros(32, 64)
        for turn in range(8 + n):
            state = around(cell)(x[:, turn], state)
        return state.sum()

    assert_as_little_memory(forward, 1.1)


def test_a_site_with_a_backward_inside_stays_whole():
    """What that brings back has to be known until the block ends."""
    layer = Layer().double()
    for n in range(8):
        x = torch.randn(32, 8, dtype=torch.float64, requires_grad=True)
        with checkpoint_scope(auto()) as scope:
            y = x
            for _ in range(n + 1):
                y = layer(y)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = (gradient * y).sum()
        loss.backward()
    assert scope.stats.peak_predicted > 0


def test_memory_that_a_piece_has_written_is_copied_once():
    """However many pieces read it until it is written again."""
    state, layers = torch.ones(64, 64), nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

    def step(n):
        x = torch.ones(64, 64, requires_grad=True)
        with checkpoint_scope(auto()) as step.scope:
            state.mul_(0.5)
            for layer in layers[: 5 + n % 7]:
                x = layer(x * state).exp().tanh().sin()
        return x.sum()

    for n in range(8):
        step(n).backward()
    state.fill_(1.0)
    held = memory_of(lambda: step(6)).held
    pieces = len(step.scope.stats.cuts) + 1
    assert pieces > 4
    assert held <= (pieces + 3) * 64 * 64 * 4


def test_a_check_of_values_knows_statistics_that_a_later_piece_updates():
    norm, layers = nn.BatchNorm1d(8), nn.ModuleList(Layer() for _ in range(6))
    for n in range(STEPS):
        x = torch.randn(32, 8, requires_grad=True)
        with checkpoint_scope(auto(), determinism_check="values") as scope:
            for place in chosen(n, 6):
                x = norm(layers[place](norm(x)))
        x.sum().backward()
    assert scope.stats.cuts
