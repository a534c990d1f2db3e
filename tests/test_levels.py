"""Recompute on several levels: a replay larger than the budget makes cuts of its own."""

import math
from collections import Counter

import pytest
import torch
from oracle import bits, memory_of

from checkpointing import auto, checkpoint_scope

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

# Memory is measured after collections, which are quick then.
pytestmark = pytest.mark.usefixtures("frozen")


def chain(n):
    x = torch.linspace(-1, 1, SIZE).requires_grad_()

    def run():
        y = x * 1
        for number in range(n):
            y = step(y, number)
        return y.sum()

    return run, x


def scoped(fn, budget):
    def run():
        with checkpoint_scope(policy=auto(budget=budget)) as run.scope:
            return fn()

    return run


def replayed(n, units):
    run, x = chain(n)
    want = torch.autograd.grad(run(), x)[0]
    call = scoped(run, units * UNIT)
    torch.autograd.grad(call(), x)  # from the second time on the program is known
    loss = call()
    ran.clear()
    have = torch.autograd.grad(loss, x)[0]
    assert bits(have) == bits(want)
    return list(ran)


@pytest.mark.parametrize(
    ("n", "units", "times"),
    [
        (8, 1, {1: 4, 2: 3}),
        (8, 2, {1: 6}),
        (8, 4, {1: 4}),
        (64, 1, {1: 10, 2: 22, 3: 20, 4: 10, 5: 1}),
        (64, 2, {1: 15, 2: 29, 3: 18}),
        (64, 8, {1: 55, 2: 1}),
        (64, 11, {1: 53}),
        (512, 1, {1: 18, 2: 60, 3: 130, 4: 144, 5: 109, 6: 40, 7: 10}),
        (512, 4, {1: 49, 2: 184, 3: 275}),
        (512, 32, {1: 480}),
    ],
)
def test_how_often_each_step_runs_again(n, units, times):
    """How many steps run again once, twice and so on."""
    often = Counter(replayed(n, units))
    assert dict(sorted(Counter(often.values()).items())) == times


def peak(n, units):
    run = scoped(chain(n)[0], units * UNIT)
    run().backward()
    return memory_of(run).peak / UNIT


def test_memory_grows_like_the_logarithm_of_depth_with_one_checkpoint():
    """Eight times the depth needs a few values more."""
    few, many = peak(64, 1), peak(512, 1)
    assert few <= 2 * math.log2(64)
    assert many <= min(2 * math.log2(512), few + 6)


@pytest.mark.parametrize("n", [64, 512])
def test_memory_grows_like_the_square_root_of_depth_with_as_many_checkpoints(n):
    """As without a budget, and no second level is needed."""
    units = round(math.sqrt(2 * n))
    assert peak(n, units) <= 2 * units + 6
    assert max(Counter(replayed(n, units)).values()) <= 2


def test_more_budget_never_means_more_work():
    """Nor much more memory than it grants."""
    work = [len(replayed(128, units)) for units in (1, 2, 3, 4, 8, 16, 32, 64)]
    assert work == sorted(work, reverse=True)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (1, 1, 3, 3)], ids=str)
@pytest.mark.parametrize("budget", [400, 1600])
@pytest.mark.filterwarnings("ignore:.*A budget of")
def test_partial_backwards_in_any_order(order, budget):
    """Results that leave a chain at several places; some are asked for twice."""
    x = torch.rand(100).requires_grad_()

    def run():
        y, outs = x * 1, []
        for i in range(60):
            y = torch.dropout(y.tanh(), 0.05, True).sin()
            if i % 15 == 14:
                outs.append(y.exp().sum())
        return outs

    def found(fn):
        torch.manual_seed(3)
        outs = fn()
        first = [torch.autograd.grad(outs[i], x, retain_graph=True) for i in order]
        return bits([first, torch.autograd.grad(sum(outs), x)])

    assert found(scoped(run, budget)) == found(run)


def rows(x):
    h, s = x, torch.zeros_like(x)
    for i in range(16):
        h = (h * 1.01).sin()
        s = s + 0
        s[i].mul_(2).add_(1)
        h = h + (s * h.detach()).sin()
    return h


def sums(x):
    """Into memory that is exchanged now and then, all of it and one number."""
    h, s = x, torch.zeros_like(x)
    for i in range(16):
        h = (h * 1.01).sin()
        s = s.clone() if i % 6 == 0 else s
        s.add_(h.detach())
        s[3, 3].add_(1)
        h = h * (s * 0.1).cos()
    return h


def chunks(x):
    """Parts of one memory, with versions of their own."""
    a, b = (x @ x.t()).unsafe_chunk(2)
    y, z = a.sin(), (b.repeat(8, 1) * 3).sin()
    b.mul_(5)
    return (y.repeat(8, 1) * z).sum() + (b.sin() * b).sum()


@pytest.mark.parametrize("program", [rows, sums, chunks])
@pytest.mark.parametrize("budget", [None, 3000, 25000])
@pytest.mark.filterwarnings("ignore:.*A budget of")
def test_writes_in_place_between_cuts_and_levels(program, budget):
    """What an earlier replay has delivered or stored is not overwritten by a later one."""
    torch.manual_seed(0)
    x = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(program(x).sum(), x)
    with checkpoint_scope(policy=auto(budget=budget)):
        y = program(x).sum()
    for retain in (True, False):
        assert bits(torch.autograd.grad(y, x, retain_graph=retain)[0]) == bits(want)
