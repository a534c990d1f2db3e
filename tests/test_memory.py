"""Bytes, each one counted: what is held, what a step needs at its peak; recompute on several
levels, where a replay larger than the budget makes cuts of its own."""

import contextlib
import functools
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from oracle import apply, bits, leaf, memory_of, through, with_gradients
from planned import scoped
from torch import nn

from checkpointing import auto, checkpoint_scope, keep

SIZE = 1000
UNIT = 4 * SIZE
ran: list[int] = []


@torch.library.custom_op("levels::step", mutates_args=())
def step(x: torch.Tensor, number: int) -> torch.Tensor:
    """One step of a chain, which notes that it runs and saves its result."""
    ran.append(number)
    return x.tanh()


@step.register_fake
def _(x, number):
    return torch.empty_like(x)


step.register_autograd(
    lambda ctx, grad: (grad * (1 - ctx.saved_tensors[0] ** 2), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def chain(n):
    x = torch.linspace(-1, 1, SIZE).requires_grad_()

    def run():
        y = x * 1
        for number in range(n):
            y = step(y, number)
        return y.sum()

    return run, x


@functools.cache
def measured(n, units):
    """How often each step runs again, and the peak of memory in units."""
    run, x = chain(n)
    (want,) = torch.autograd.grad(run(), x)
    call = scoped(run, budget=units * UNIT)
    call().backward()  # from the second time on the program is known
    loss = call()
    ran.clear()
    (have,) = torch.autograd.grad(loss, x)
    assert bits(have) == bits(want)
    often = Counter(ran)
    return often, memory_of(call).peak / UNIT


@pytest.mark.parametrize(
    ("n", "units", "times"),
    [
        (8, 1, {1: 5, 2: 2}),
        (8, 2, {1: 6}),
        (8, 4, {1: 4}),
        (64, 1, {1: 11, 2: 20, 3: 20, 4: 10, 5: 2}),
        (64, 2, {1: 16, 2: 25, 3: 20, 4: 1}),
        (64, 8, {1: 22, 2: 37}),
        (64, 11, {1: 53}),
        (128, 4, {1: 39, 2: 45, 3: 40}),
        (256, 1, {1: 15, 2: 44, 3: 72, 4: 70, 5: 42, 6: 10, 7: 2}),
        (256, 23, {1: 233}),
    ],
)
def test_how_often_each_step_runs_again(n, units, times):
    """How many steps run again once, twice and so on."""
    often, _ = measured(n, units)
    assert dict(sorted(Counter(often.values()).items())) == times


def test_memory_grows_like_the_logarithm_of_depth_with_one_checkpoint():
    """Eight times the depth needs a few values more."""
    (_, few), (_, many) = measured(32, 1), measured(256, 1)
    assert few <= 2 * math.log2(32)
    assert many <= min(2 * math.log2(256), few + 6)


@pytest.mark.parametrize("n", [64, 256])
def test_memory_grows_like_the_square_root_of_depth_with_as_many_checkpoints(n):
    """As without a budget, and no second level is needed."""
    units = round(math.sqrt(2 * n))
    often, peak = measured(n, units)
    assert peak <= 2 * units + 6
    assert max(often.values()) <= 2


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
    with_gradients([x, *blocks.parameters()])
    return memory_of(lambda: run(blocks, x).sum())


@pytest.mark.parametrize("run", [per_block("c"), per_block("s"), one_scope])
def test_each_further_block_costs_one_activation(run):
    """Its input, and a generator's state where a mask must be drawn again."""
    stash = torch.get_rng_state().nbytes
    bytes_of(run)
    (small, _), (large, _) = bytes_of(run, 6), bytes_of(run, 12)
    assert (large - small) / 6 in (ACTIVATION, ACTIVATION + stash)


@pytest.mark.parametrize("policy", [None, auto()], ids=["scope", "auto"])
@pytest.mark.parametrize("clipped", [False, True])
def test_training_steps_in_one_scope_need_what_forwards_in_scopes_do(policy, clipped):
    def trained(steps, around_all):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block() for _ in range(4))
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

    peak, want = trained(3, False)
    peak_in_one, have = trained(3, True)
    assert have == want
    assert peak_in_one <= 1.1 * peak
    assert trained(6, True)[0] <= 1.01 * peak_in_one


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
    region, x = apply(door, lambda x: through([torch.neg] * 20, x).sin()), leaf(1000)
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


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_memory_is_held_unless_its_parts_fill_it(dim):
    """As the keys of an attention are filled, of which two parts are made in two ways."""
    x = torch.rand(8, 8, 8).requires_grad_()

    def counts(*parts):
        with checkpoint_scope() as scope:
            h, keys = x * 2, x.new_empty(x.shape)
            for start, end in parts:
                keys.narrow(dim, start, end - start).copy_(h.narrow(dim, start, end - start))
            loss = keys.sin().exp().sum()
        nbytes = scope.stats.bytes_held
        loss.backward()
        return nbytes, scope.stats.ops_replayed

    assert counts((3, 8), (0, 3)) == counts((0, 4), (4, 8)) == (0, 6)
    assert counts((0, 4), (4, 8), (1, 2)) == (0, 7)
    assert counts((0, 4), (5, 8)) == counts((0, 4), (3, 8)) == (x.nbytes, 2)


def test_each_backward_may_need_another_part():
    """There are more such parts than windows that a plan remembers."""
    x = leaf(5)

    def gradient(parts, region):
        with region:
            stem = x.sin().exp()
            every = [(stem * n).sin().exp() for n in range(4)]
        some = [every[n].sum() for n in parts]
        del stem, every  # what nobody needs is gone
        return bits(*torch.autograd.grad(some, x))

    for size in (1, 2, 3):
        for parts in itertools.combinations(range(4), size):
            assert gradient(parts, checkpoint_scope()) == gradient(parts, contextlib.nullcontext())


def test_memory_that_is_read_before_all_of_it_is_filled_is_held_once():
    """Like the stages of a Runge-Kutta step."""
    x = torch.rand(8, 8).requires_grad_()

    def step(y):
        stages = y.new_empty(8, 8, 5)
        for n in range(5):
            stages.data[..., n] = y.sin()
            y = y * (stages[..., : n + 1] + 1).sum(-1)
        return y

    def run():
        return step(step(x * 1)).sum()

    with checkpoint_scope() as scope:
        loss = run()
    assert scope.stats.bytes_held == 2 * 5 * x.nbytes
    (got,) = torch.autograd.grad(loss, x)
    assert torch.equal(got, *torch.autograd.grad(run(), x))


def test_memory_that_parts_have_just_filled_may_be_kept():
    x = torch.rand(8, 8).requires_grad_()
    with checkpoint_scope() as scope:
        h, rows = x * 2, torch.empty(8, 8)
        rows[:4].copy_(h[:4])
        rows[4:].copy_(h[4:])
        loss = keep(rows).sin().exp().sum()
    assert scope.stats.bytes_kept == rows.nbytes
    loss.backward()
    assert scope.stats.ops_replayed == 2


def product_of_parts(x):
    one, two = x.sin().exp().split(500)
    return (one * two).tanh()


@pytest.mark.parametrize("fn", [lambda x: x.sin().exp().tanh(), product_of_parts])
def test_what_a_backward_inside_brings_back_is_not_held(fn):
    """Its gradient's graph reads values that the block can make again, also as parts of one
    memory (the weights of a force field, or queries and keys)."""
    x = torch.rand(1000).requires_grad_()
    with checkpoint_scope() as scope:
        h = fn(x)
        (g,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        loss = g.square().sum() + h.sum()
    assert scope.stats.bytes_held == 0
    loss.backward()


@pytest.mark.parametrize("when", ["before", "in", "in, afterwards"])
def test_what_a_block_holds_of_a_momentum_encoder(when):
    """A copy, if it writes the parameters and reads them."""
    weights = [torch.eye(64) for _ in range(4)]
    encoder = nn.ParameterList([nn.Parameter(w, requires_grad=False) for w in weights])
    x, y = torch.ones(2, 64), torch.ones(2, 64, requires_grad=True)

    def update():
        with torch.no_grad():
            for weight in encoder:
                weight.mul_(0.5)

    def run():
        if when == "before":
            update()
        with checkpoint_scope():
            if when == "in":
                update()
            with torch.no_grad():
                target = functools.reduce(torch.mm, encoder, x)
            if when == "in, afterwards":
                update()
            return (y.sin() - target).square().sum()

    run().backward()
    held = memory_of(run).held
    if when != "before":
        assert held >= sum(weight.nbytes for weight in encoder)
    else:
        assert held <= 4 * y.nbytes


AVERAGES = {
    "in place": lambda mean, new: mean.mul_(0.5).add_(new, alpha=0.5),
    "through data": lambda mean, new: mean.data.mul_(0.5).add_(new.data, alpha=0.5),
    "as a list": lambda mean, new: torch._foreach_lerp_([mean], [new], 0.5),
}


class Student(nn.Module):
    """Beside the mean of its weights over time, which each forward updates."""

    def __init__(self, average, layers=8):
        super().__init__()
        made = lambda: [nn.Parameter(torch.eye(64).clone()) for _ in range(layers)]
        self.average, self.own, self.means = average, nn.ParameterList(made()), made()

    @torch.no_grad()
    def target(self, x):
        for mean, weight in zip(self.means, self.own, strict=True):
            self.average(mean, weight)
        return functools.reduce(torch.mm, self.means, x)

    def forward(self, x, depends=False):
        target = self.target(x)
        y = self.own[0] * x.square().sum()
        return (y.exp() * target.mean(0)).sum() if depends else y.square().sum()


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("policy", [None, auto()], ids=str)
def test_a_momentum_encoder_is_copied_only_where_a_window_starts_from_it(policy, average):
    """As far as a plan is known: that of the run before."""
    net, x = Student(AVERAGES[average]), torch.full((2, 64), 0.125)

    def run():
        net.own[0].grad = None
        with checkpoint_scope(policy=policy):
            return net(x)

    weights = sum(weight.nbytes for weight in net.own)
    assert memory_of(run).peak > weights
    assert memory_of(run).peak < 0.75 * weights


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("policy", [None, auto()], ids=str)
def test_a_momentum_encoder_that_a_new_path_starts_from_is_as_it_was(policy, average):
    """Though the next block writes it before backward, and the plan had no use for it."""

    def train(scope):
        net, x = Student(AVERAGES[average], layers=2), torch.full((2, 64), 0.125)
        for depends in (False, False, True, False, True):
            losses = []
            for _ in range(2):
                with scope():
                    losses.append(net(x, depends))
            for loss in losses:
                loss.backward()
            with torch.no_grad():
                net.own[0].sub_(net.own[0].grad, alpha=2**-6)
        return bits([*net.own, *net.means, net.own[0].grad])

    assert train(lambda: checkpoint_scope(policy=policy)) == train(contextlib.nullcontext)


def test_a_parameter_that_is_viewed_and_read_between_two_updates_is_as_it_was():
    """Though no window had started from it so far."""
    x, weight = torch.ones(4, requires_grad=True), nn.Parameter(torch.ones(4), requires_grad=False)
    alias = weight.detach()
    for depends in (False, False, True):
        alias.fill_(1)
        with checkpoint_scope():
            alias.mul_(2)
            weight.view(2, 2)
            y = weight.clone()
            alias.mul_(2)
            loss = (x * y if depends else x).square().sum()
        (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(grad, 8 * x)
