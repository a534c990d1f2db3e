"""State that no argument shows: other random streams, `register_state`, variables closed over."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from oracle import DOORS, EACH_DOOR, WAYS, Programs, at_once, bits, integers as leaf, plain
from torch import nn

from checkpointing import checkpointed, is_recomputing, register_state

program = Programs()


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
    if door in (DOORS["rerun"], DOORS["rerun in rerun"]):
        assert step(door) != step(plain)


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
    """At forward; at recompute, and after it. One that has been removed is restored still."""
    (calls, snapshot, restore), order = counters(), []
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


@pytest.mark.parametrize(
    "who", ["function", "restore of one", "restore of one again", "snapshot of one"]
)
def test_states_are_put_back_after_an_error(who, request):
    """Wherever in the recompute it is; and so are buffers and streams. (NumPy's is another one.)"""
    request.addfinalizer(partial(np.random.set_bit_generator, np.random.get_bit_generator()))
    np.random.set_bit_generator(np.random.PCG64(5))
    value, fail, norm = {"good": 0}, [], nn.BatchNorm1d(4)

    def fail_if(name):
        if fail and who.startswith(name):
            fail.pop()
            if not fail:
                raise ValueError(who)

    def fn(x):
        y = norm(draws(x)).exp()
        fail_if("function")
        return y.cos()

    now = lambda: (value["good"], norm.training, streams(), bits(norm.state_dict()))
    one = register_state(lambda: fail_if("snapshot of one"), lambda _: fail_if("restore of one"))
    with register_state(value.copy, value.update), one:
        y = checkpointed(fn, preserve_rng_state="all")(leaf(4, 4))
        value["good"] = 1
        norm(leaf(4, 4)), norm.eval()
        before = now()
        fail += [1] * (1 + who.endswith("again"))
        with pytest.raises(ValueError, match=who):
            y.sum().backward()
        assert now() == before
        y.sum().backward()
        assert now() == before


def test_who_asks_for_states():
    """Reruns of all threads; a tape has what Python read, and grad mode off is a plain call."""
    calls, snapshot, restore = counters()
    with register_state(snapshot, restore):
        WAYS["replay"](lambda x: x.sin().exp())(leaf()).sum().backward()
        WAYS["scope"](lambda x: x.sin().exp())(leaf()).sum().backward()
        with torch.no_grad():
            checkpointed(lambda x: x.sin().exp())(leaf())
        assert calls == []
        at_once(lambda: checkpointed(lambda x: x.sin())(leaf()))
    at_once(lambda: checkpointed(lambda x: x.sin())(leaf()))
    assert calls == [("snapshot", False)]


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_function_assigns_itself_is_its_own_business(times):
    """It, or one that it defines: left as it is, as with torch's checkpoint."""

    def run(region):
        n, total, x = 0, torch.zeros(4), leaf()

        def fn(x):
            nonlocal n

            def add():
                nonlocal total
                total = total + x.detach()

            add()
            m = n
            del n
            y = x.sin()
            n = m + 1  # noqa: F841
            return y

        for _ in range(times):
            fn = region(fn)
        y = fn(x * 1) + fn(x * 1) * 2  # of leaves, torch's has slots
        found = [n, bits(total)]
        y.sum().backward()
        return *found, n, bits(total), bits(x.grad)

    theirs = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    assert run(WAYS["rerun to the end"]) == run(lambda fn: partial(theirs, fn, early_stop=False))


def test_what_it_only_reads_keeps_the_value_of_the_forward():
    """Also beside a variable that it assigns. Containers are the live ones, as they are by then."""
    n, factor, noted, table = 0, 2.0, [], {"n": 2.0}

    def fn(x):
        nonlocal n
        n += 1
        noted.append(table["n"])

        def inside():
            factor = 3.0
            return [factor for _ in range(2)]

        inside()
        return (x * factor).square(), (x * table["n"]).square()

    x = leaf()
    one, two = checkpointed(fn)(x)
    factor, table["n"] = 5.0, 3.0
    (of_one,) = torch.autograd.grad(one.sum(), x, retain_graph=True)
    (of_two,) = torch.autograd.grad(two.sum(), x)
    assert (n, factor, noted) == (3, 5.0, [2.0, 3.0, 3.0])
    assert torch.equal(of_one, 8 * x.detach())
    assert torch.equal(of_two, 2 * (x.detach() * 3) * 2)  # autograd holds the 2 itself


class Right:
    @program(*DOORS)
    def registered_state_is_the_forwards_in_recompute_and_the_present_one_afterwards(door):
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

    @program()
    def a_lambda_in_a_loop(door):
        """Closures see variables, not values; recompute sees the values of its own forward."""
        layers = [nn.Linear(4, 4) for _ in range(3)]
        x = y = leaf(2, 4)
        for i, layer in enumerate(layers):
            y = door(lambda y: layer(y).square() * (i + 1))(y)  # noqa: B023
        return torch.autograd.grad(y.sum(), [x, *(layer.weight for layer in layers)])

    @program("rerun", "rerun to the end", "replay", "scope")
    def variables_set_anew_afterwards(door):
        """Numbers, functions, tensors with and without a gradient, modules."""
        factor, act, t, module = 2.0, torch.relu, torch.full((4,), 3.0), nn.Linear(4, 4)
        x, p = leaf(), (then := leaf() * 2)
        y = door(lambda x, a=3.0, *, b=5.0: act(module(x * factor * a * b * t * p)))(x)
        factor, act, t, p, module = 7.0, torch.sin, torch.zeros(4), torch.zeros(4), None
        gradients = torch.autograd.grad(y.square().sum(), [x, then])
        assert (factor, act, module) == (7.0, torch.sin, None)
        return gradients

    @program()
    def methods_and_functions_that_are_defined_later_keep_their_variables(door):
        """Methods with `super()` and variables, also in a partial; recursion."""
        factor = 2.0

        class Base:
            def run(self, x):
                return x.square()

        class Derived(Base):
            weight = 3.0

            def run(self, n, x):
                return super().run(x * factor * n) * later(x, 2) * self.weight

        x, run = leaf(), Derived().run

        def later(x, n):
            return x if n == 0 else later(x * 2, n - 1)

        y = door(run)(5.0, x) + door(partial(run, 5.0))(x)
        factor = 3.0
        return torch.autograd.grad(y.sum(), x)


test_programs_are_plains = program.test()
