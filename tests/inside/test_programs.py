"""Programs that grow too large; when plans are made, and pieces; whether tensors overlap."""

import gc
import random
import weakref

import pytest
import torch
from changing import CASES, check
from torch import nn

from checkpointing import _torch, auto, checkpoint_scope, clear_programs
from checkpointing._record import program as programs
from checkpointing._record.history import History
from checkpointing._replay import replay


@pytest.mark.parametrize("name", CASES)
def test_a_program_that_is_left_in_the_middle(name, monkeypatch):
    """The tree grows too large while a run is in it."""
    monkeypatch.setattr(programs, "MOST_STEPS", 7)
    check("scope", [(name, n) for n in (0, 0, 1, 0, 2, 3, 1)])


def test_nothing_grows_with_the_number_of_programs(monkeypatch):
    monkeypatch.setattr(programs, "MOST_STEPS", 600)
    clear_programs()
    alive = weakref.WeakSet()

    def step(i):
        x = torch.randn(8, 8, requires_grad=True)
        given = lambda ctx, op, *args, **kwargs: x is None  # noqa: E731
        alive.update([x, given])
        with checkpoint_scope(policy=given if i % 50 == 0 else auto()):
            y = x
            for k in range(9):
                y = y.sin() if i >> k & 1 else y * 1.5
        y.sum().backward()

    def steps():
        gc.collect()
        return sum(type(each) is programs.Step for each in gc.get_objects())

    before = steps()
    for i in range(300):
        step(i)
    assert steps() - before < 900
    assert not alive


@pytest.mark.parametrize("change", ["sizes", "sizes and branches", "accumulated gradients"])
def test_a_plan_is_not_made_anew_at_every_change(change, monkeypatch):
    """Sizes that come and go, and gradients that exist at every other step, share one plan."""
    planned = []
    plan_of = replay.plan_of
    monkeypatch.setattr(replay, "plan_of", lambda *given: planned.append(step) or plan_of(*given))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    clear_programs()
    step = 0
    for step in range(24):
        x = torch.randn(4 if change == "accumulated gradients" else 4 << (step % 3), 64)
        with checkpoint_scope(policy=auto()):
            y = model(x if change != "sizes and branches" or step // 3 % 2 else x.sin())
        y.sum().backward()
        if step % 2:
            model.zero_grad()
    assert 0 < len(planned) <= 12
    assert max(planned) < 12


def test_a_block_in_pieces_holds_nothing_that_plans_keep():
    """Another thread may have planned whole paths in the tree that it follows."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def step():
        x = torch.ones(64, 64, requires_grad=True)
        with checkpoint_scope(auto()) as step.scope:
            y = layers(x)
        return torch.autograd.grad(y.sum(), x)[0]

    step()
    want = step()
    (program,) = programs._programs.values()
    program.history.in_pieces = True
    assert torch.equal(step(), want)


def test_pieces_end_where_least_is_alive():
    """Between two layers, and not in the middle of one, where half as much has been saved for each
    byte that is alive."""
    down = nn.Linear(256, 32)

    def layer(x):
        wide = torch.cat([x.sin(), x.cos(), x.exp(), x.tanh()] * 2, -1)
        return down(wide.sigmoid().square())

    def step(count):
        x = torch.ones(64, 32, requires_grad=True)
        with checkpoint_scope(auto()) as step.scope:
            for _ in range(count):
                x = layer(x)
        x.sum().backward()

    for count in (8, 9, 10, 11):
        step(count)
    (program,) = programs._programs.values()
    assert program.history.in_pieces
    assert 64 * 32 * 4 <= program.history.most_alive < 64 * 256 * 4
    for count in (12, 13, 14):
        step(count)
        stats = step.scope.stats
        assert all(cut % (stats.ops_recorded // count) == 0 for cut in stats.cuts[:-1])


def test_few_ways_are_planned_and_many_are_not():
    known_mostly = [True] * 3 + [False] * 5 + [True, False, False] * 4
    assert not any(map(History().went, known_mostly))
    assert not any(map(History().went, [True, False] * 8))  # several models, two steps each
    history = History()
    assert [history.went(True) for _ in range(4)] == [False, False, False, True]
    assert history.in_pieces
    history.nbytes = 100
    assert not any(history.came_in((n % 3,), 200) for n in range(20))
    assert [history.came_in((5 + n % 2,), 100) for n in range(6)] == [False] * 5 + [True]
    assert not history.in_pieces


def test_the_sizes_of_pieces_are_found_anew_where_blocks_have_grown():
    history = History()
    history.in_pieces, history.nbytes = True, 100
    assert history.came_in((0,), 201)
    assert not history.in_pieces
    assert history.went(True)


def test_tensors_that_share_an_element_overlap():
    """Ten thousand pairs of strided views, against the elements themselves."""
    random.seed(0)
    base = torch.arange(120)
    apart = 0
    for _ in range(10_000):
        views = []
        for _ in range(2):
            size = [random.randint(0, 4) for _ in range(random.randint(0, 3))]
            stride = [random.choice([0, 1, 2, 3, 5, 6, 12]) for _ in size]
            if random.random() < 0.5 and views and len(views[0].shape) == len(size):
                stride = views[0].stride()
            last = sum(step * max(0, n - 1) for n, step in zip(size, stride, strict=True))
            views.append(base.as_strided(size, stride, random.randint(0, 59 - min(59, last))))
        one, other = views
        share = not {*one.flatten().tolist()}.isdisjoint(other.flatten().tolist())
        found = _torch.overlap(one, other)
        assert found or not share
        apart += not found
    assert apart > 2_000
    x = torch.rand(2, 3)
    assert _torch.overlap(x[:0], x) is False
    assert _torch.overlap(x, x)
    assert _torch.overlap(x, x.view(torch.int32))
    assert not _torch.overlap(x, x.clone())
    assert not any(_torch.overlap(*x.chunk(3, 1)[n : n + 2]) for n in range(2))
