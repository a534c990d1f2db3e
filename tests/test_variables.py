"""Variables that a function closes over: a rerun finds those of its own forward, of containers the
live ones, and leaves alone what the function itself assigns."""

import functools

import pytest
import torch
import torch.utils.checkpoint
from oracle import WAYS, Programs, bits, integers as leaf
from torch import nn

from checkpointing import checkpointed

program = Programs()


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
    p = then = leaf() * 2

    def fn(x, a=3.0, *, b=5.0):
        return act(module(x * factor * a * b * t * p))

    x = leaf()
    y = door(fn)(x)
    factor, act, t, p, module = 7.0, torch.sin, torch.zeros(4), torch.zeros(4), None
    gradients = torch.autograd.grad(y.square().sum(), [x, then])
    assert (factor, act, module) == (7.0, torch.sin, None)
    return gradients


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

    theirs = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    assert run(WAYS["rerun to the end"]) == run(
        lambda fn: functools.partial(theirs, fn, early_stop=False)
    )


def test_what_it_only_reads_keeps_the_value_of_the_forward_beside_it():
    """A variable that it assigns beside one that it reads."""
    n, factor = 0, 2.0

    def fn(x):
        nonlocal n
        n += 1

        def inside():
            factor = 3.0
            return [factor for _ in range(2)]

        inside()
        return (x * factor).square()

    x = leaf()
    y = checkpointed(fn)(x)
    factor = 5.0
    y.sum().backward()
    assert (n, factor) == (2, 5.0)
    assert torch.equal(x.grad, 8 * x.detach())


def test_containers_among_them_are_the_live_ones():
    """Side effects on them happen again, and what they hold is what it is when backward runs."""
    noted, table = [], {"n": 2.0}

    def fn(x):
        noted.append(table["n"])
        return (x * table["n"]).square()

    x = leaf()
    y = checkpointed(fn)(x)
    table["n"] = 3.0
    y.sum().backward()
    assert noted == [2.0, 3.0]
    assert torch.equal(x.grad, 2 * (x.detach() * 3) * 2)  # autograd holds the 2 itself


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

    def call(x):
        return door(Derived().run)(5.0, x) + door(functools.partial(Derived().run, 5.0))(x)

    def later(x, n):
        return x if n == 0 else later(x * 2, n - 1)

    x = leaf()
    y = call(x)
    factor = 3.0
    return torch.autograd.grad(y.sum(), x)


test_programs_are_plains = program.test()
