"""State that no argument shows: the random streams of Python and NumPy, and what `register_state`
names."""

import random

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from oracle import (
    DOORS,
    EACH_DOOR,
    Programs,
    at_once,
    bits,
    integers as leaf,
    plain,
    replay,
    rerun,
    scope,
)
from torch import nn

from checkpointing import checkpointed, is_recomputing, register_state

program = Programs(DOORS)


def draws(x):
    """Numbers from three streams, after which two of them have moved."""
    scale = random.random() + float(np.random.rand()) + torch.rand(())
    return (x * scale).square().square() * random.gauss(0, 1)


def streams():
    return random.getstate(), repr(np.random.get_state(legacy=False)), bits(torch.get_rng_state())


@EACH_DOOR
def test_all_preserves_the_random_numbers_of_python_and_numpy(door):
    """Gradients as plain, and so are the three streams afterwards; True preserves torch's only."""

    def step(door, **options):
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        x = leaf()
        y = door(draws, **options)(x)
        random.random(), np.random.rand()
        y.sum().backward()
        return bits(x.grad), streams()

    assert step(door, preserve_rng_state="all") == step(plain)
    if door in (rerun, DOORS["rerun in rerun"]):
        assert step(door) != step(plain)


def test_all_restores_the_streams_after_an_error():
    """The recompute fails after it has drawn; NumPy's global generator may be another one."""

    def fn(x):
        y = draws(x)
        if is_recomputing():
            raise ValueError("the second time")
        return y.square()

    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        y = checkpointed(fn, preserve_rng_state="all")(leaf())
        state = streams()
        with pytest.raises(ValueError, match="the second time"):
            y.sum().backward()
        assert streams() == state
    finally:
        np.random.set_bit_generator(before)


@program(*DOORS)
def registered_state_is_the_forwards_in_recompute_and_the_present_one_afterwards(door):
    """With other forwards in between, and two backwards."""
    state, generator = {"amax": 1.0}, torch.Generator().manual_seed(7)
    hidden = register_state(generator.get_state, generator.set_state)

    def scaled(x):
        y = x * state["amax"] * torch.randint(1, 5, (4,), generator=generator)
        state["amax"] += 1
        return y

    with hidden, register_state(state.copy, state.update):
        fn, x = (lambda x: scaled(scaled(x).square()).square()), leaf()
        first, second = door(fn)(x), door(fn)(x * 2)
        return [
            *torch.autograd.grad(second.sum(), x, retain_graph=True),
            *torch.autograd.grad(first.sum(), x, retain_graph=True),
            *torch.autograd.grad(first.sum() + second.sum(), x),
            state["amax"],
        ]


def counters():
    """A state that notes how often it is asked for and put back, and in which grad mode."""
    calls = []

    def snapshot():
        assert not torch.is_grad_enabled()
        calls.append(("snapshot", is_recomputing()))
        return len(calls)

    def restore(state):
        assert not torch.is_grad_enabled()
        calls.append(("restore", state))

    return calls, snapshot, restore


def test_when_states_are_asked_for_and_put_back():
    """At forward; at recompute, after which the state of now is put back. When it has been removed,
    regions that have one restore it still, else their recompute would be wrong."""
    calls, snapshot, restore = counters()
    order = []
    with register_state(lambda: "a", order.append), register_state(lambda: "b", order.append):
        handle = register_state(snapshot, restore)
        y = checkpointed(lambda x: x.sin().exp())(leaf())
        handle.remove()
        handle.remove()
        assert calls == [("snapshot", False)]
        y.sum().backward()
    checkpointed(lambda x: x.sin().exp())(leaf()).sum().backward()
    assert calls == [("snapshot", False), ("snapshot", True), ("restore", 1), ("restore", 2)]
    assert order == ["a", "b", "b", "a"]


@pytest.mark.parametrize("who", ["function", "restore of one", "snapshot of one"])
def test_states_are_put_back_after_an_error(who):
    """Wherever in the recompute it is; and so are the buffers."""
    value, fail, norm = {"good": 0}, [], nn.BatchNorm1d(4)

    def fail_if(name):
        if fail and who == name:
            fail.clear()
            raise ValueError(who)

    def fn(x):
        y = norm(x.sin()).exp()
        fail_if("function")
        return y.cos()

    one = register_state(lambda: fail_if("snapshot of one"), lambda _: fail_if("restore of one"))
    with register_state(value.copy, value.update), one:
        y = checkpointed(fn)(leaf(4, 4))
        value["good"] = 1
        norm(leaf(4, 4)), norm.eval()
        buffers = bits(dict(norm.named_buffers()))
        fail.append(1)
        with pytest.raises(ValueError, match=who):
            y.sum().backward()
        assert value["good"] == 1 and not norm.training
        assert bits(dict(norm.named_buffers())) == buffers
        y.sum().backward()
        assert value["good"] == 1


def test_who_asks_for_states():
    """Reruns of all threads; a tape has what Python read, and grad mode off is a plain call."""
    calls, snapshot, restore = counters()
    with register_state(snapshot, restore):
        replay(lambda x: x.sin().exp())(leaf()).sum().backward()
        scope(lambda x: x.sin().exp())(leaf()).sum().backward()
        with torch.no_grad():
            checkpointed(lambda x: x.sin().exp())(leaf())
        assert calls == []
        at_once(lambda: checkpointed(lambda x: x.sin())(leaf()))
    at_once(lambda: checkpointed(lambda x: x.sin())(leaf()))
    assert calls == [("snapshot", False)]


test_programs_are_plains = program.test()
