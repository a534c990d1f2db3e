"""When plans are made."""

import pytest
import torch
from torch import nn

from checkpointing import auto, checkpoint_scope, clear_programs
from checkpointing._record import program as programs
from checkpointing._record.history import History
from checkpointing._replay import replay


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
