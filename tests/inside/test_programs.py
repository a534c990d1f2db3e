"""Programs that grow too large."""

import gc
import weakref

import pytest
import torch
from changing import CASES, check

from checkpointing import auto, checkpoint_scope, clear_programs
from checkpointing._record import program as programs


@pytest.mark.parametrize("name", CASES)
def test_a_program_that_is_left_in_the_middle(name, monkeypatch):
    """The tree grows too large while a run is in it."""
    monkeypatch.setattr(programs, "MOST_STEPS", 7)
    check("scope", [(name, n) for n in (0, 0, 1, 0, 2, 3, 1)])


def test_nothing_grows_with_the_number_of_programs(monkeypatch):
    """300 different programs through one site."""
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
