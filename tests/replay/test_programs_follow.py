"""Blocks that change from step to step leave the bits of plain code, whatever the last step did."""

import collections
import functools
import random

import pytest
import torch
from changing import CASES, check
from oracle import NO_ROOM, at_once, bits, by_turns, planned, python_calls, replay, scope, words

from checkpointing import clear_programs

pytestmark = NO_ROOM
STEPS = (0, 0, 1, 0, 2, 3, 1, 3, 4, 5)
FOLLOWED = ("scope", "replay", "planned", "scope in rerun")
# A rerun refuses these: they exchange parameters, or write what was there before.
NOT_IN_RERUN = words("""
    parameters_exchanged parameter_or_not written_aliases views_that_die whole_step
""")
# The next step writes what the backward of this one reads.
NOT_LATE = words("freezing train_and_eval whole_step")


MAY_BE_LATE = [name for name in CASES if name not in NOT_LATE]
LATE = by_turns([(name,) for name in MAY_BE_LATE if name not in NOT_IN_RERUN], FOLLOWED[::3])
LATE += [(name, "scope") for name in MAY_BE_LATE if name in NOT_IN_RERUN]


def pairs():
    return [(name, door) for name in CASES for door in FOLLOWED[: 3 if name in NOT_IN_RERUN else 4]]


@pytest.mark.parametrize(("name", "door"), pairs())
def test_a_block_that_changes_from_step_to_step(name, door):
    """Recorded, followed, and after others; backward at once, and after the next forward."""
    steps = [(name, n) for n in STEPS]
    check(door, steps)
    if (name, door) in LATE:
        check(door, [(name, n) for n in (0, 1, 1, 2, 0, 3, 4, 5)], late=True)


@pytest.mark.parametrize("door", FOLLOWED)
def test_programs_of_all_shapes_through_one_site(door):
    steps = [(name, n) for name, each in pairs() if each == door for n in (1, 2, 1)]
    random.Random(5).shuffle(steps)
    check(door, steps)


@pytest.mark.parametrize("door", [scope, replay, planned])
def test_threads_through_one_site(door, quick_switches):
    def f(x, w, n):
        y = x @ w
        for _ in range(1 + n % 3):
            y = (y.sin() if n % 2 else y.cos()) * x.exp()
            y = y * w if n == 3 else y + w.tanh()
        return (y.exp() if n < 5 else y.sigmoid()) @ w

    def gradients(f, n):
        draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(n))
        x, w = (draw(8, 8, requires_grad=i < 1 + n % 2) for i in range(2))
        f(x, w, n).sum().backward()
        return bits([x.grad, w.grad])

    def work(k):
        for n in range(k, k + 12):
            assert gradients(region, n * (k + 1) % 8) == want[n * (k + 1) % 8]

    want, region = [gradients(f, n) for n in range(8)], door(f)
    for _ in range(2):
        clear_programs()
        at_once(*(functools.partial(work, k) for k in range(4)))


@pytest.mark.parametrize("door", [scope, replay, planned])
def test_each_step_may_bring_a_generator_of_its_own(door):
    """It costs no more than one that all of them share."""

    def draws(x, generator):
        return x * torch.rand(4, generator=generator).exp() * torch.rand(4, generator=generator)

    def step(run, seed):
        generator, x = torch.Generator().manual_seed(seed), torch.ones(4, requires_grad=True)
        run(x, generator).sum().backward()
        return bits([x.grad, generator.get_state()])

    def calls(region, seeds):
        found = []
        counts = [python_calls(lambda n=n: found.append(step(region, n))) for n in seeds]
        assert found == [step(draws, seed) for seed in seeds]
        return counts[-1]

    shared = torch.Generator()
    one = door(lambda x, generator: draws(x, shared.manual_seed(generator.initial_seed())))
    for _ in range(3):
        known = python_calls(lambda: step(one, 1))
    assert calls(door(draws), (1, 2, 3, 4)) < 1.2 * known


@pytest.mark.parametrize("door", [scope, replay])
def test_a_run_that_is_over_may_live_while_others_change_the_program(door):
    """Its graph does. Only the first run of each kind is recorded."""
    region = door(lambda x, n: x.sin().exp() if n else x.cos().tanh())
    x, graphs = torch.rand(4, requires_grad=True), []
    calls = [python_calls(lambda n=n: graphs.append(region(x, n))) for n in (0, 1, 1, 0, 1)]
    assert min(calls[:2]) > 1.5 * max(calls[2:]), calls


def test_plans_are_made_once_more_when_a_graph_waits_for_backward():
    """The second run of each kind learns that the graph of the one before is there."""
    region = planned(lambda x, n: x.sin().exp() if n else x.cos().tanh())
    x, last = torch.rand(4, requires_grad=True), collections.deque(maxlen=1)
    calls = [python_calls(lambda n=n: last.append(region(x, n))) for n in (0, 1, 1, 0, 1, 0)]
    assert min(calls[:2]) > 1.5 * max(calls[4:]), calls
