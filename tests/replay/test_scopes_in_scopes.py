"""A scope holds what scopes and reruns inside it have read, as it was then."""

import functools

import pytest
import torch
from oracle import bits, plain, replay, scope
from torch import nn

from checkpointing import (
    ChangedError,
    auto,
    checkpoint_scope,
    checkpointed,
    disabled,
    forward_only,
    keep,
    opaque,
    save_ops,
)

DOORS = {
    "plain": plain,
    "scope": scope,
    "auto": functools.partial(scope, policy=auto()),
    "checked": functools.partial(scope, determinism_check="values"),
}
INNER = {**DOORS, "replay": functools.partial(replay, determinism_check="values")}


@pytest.mark.parametrize("outer", DOORS)
@pytest.mark.parametrize("inner", INNER)
def test_statistics_that_a_region_inside_reads_are_those_before_the_update(outer, inner):
    """A normalisation in it updates them unseen."""

    def found(outer, inner):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(4), torch.randn(5, 4, requires_grad=True)

        def read(x):
            y = norm((x.sin() * norm.running_mean.add(1)).sin() * norm.running_var.mul(1))
            return y * norm.running_mean.exp()

        for _ in range(2):
            outer(lambda x: inner(read)(x))(x).exp().sum().backward()
        return [bits(t) for t in (x.grad, norm.running_mean, norm.running_var)]

    assert found(DOORS[outer], INNER[inner]) == found(plain, plain)


@pytest.mark.parametrize("mark", [keep, lambda t: t], ids=["keep", "policy"])
@pytest.mark.parametrize("outer", DOORS)
def test_a_function_in_opaque_may_write_what_it_keeps(outer, mark):
    """The scope around does not see the write."""
    policy = save_ops(torch.ops.aten.mul.Tensor)
    f = replay(lambda a: mark(a * 1.5).relu_(), policy=policy)
    a = torch.tensor([-1.0, 2.0], requires_grad=True)
    DOORS[outer](lambda a: opaque()(f)(a))(a).sum().backward()
    assert a.grad.tolist() == [0, 1.5]


def test_what_follows_a_backward_inside_is_recorded_where_it_runs():
    """Not where the copies are made that `opaque` asks for."""

    def grads(scope):
        torch.manual_seed(0)
        a = torch.randn(4, 4, requires_grad=True)
        x = a.sin()

        def inner():
            with scope():
                forward_only(lambda: a.detach() * 2)()
                return x.tanh()

        with scope():
            with scope():
                u = x.exp()
                leaf = x.detach().requires_grad_()
                torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)
            with opaque():
                a.sin()
            y = checkpointed(inner)()
        (y.sum() + u.sum()).backward()
        return bits(a.grad)

    assert grads(checkpoint_scope) == grads(disabled)


def test_what_a_backward_inside_brings_back_by_itself_stays_what_it_is():
    """A rerun around the scopes meets the same inputs as the forward, in the same order."""
    torch.manual_seed(0)
    a, c = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    v, was = a.sin(), c.clone()

    @checkpointed
    def inner(p):
        with torch.enable_grad():
            leaf = c.detach().requires_grad_()
            assert torch.equal(leaf, was)
            torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)
            torch.autograd.grad((v * v).sum(), v, create_graph=True)
        with opaque():
            return a.sin()

    @checkpointed
    def outer(p):
        for _ in range(2):
            with checkpoint_scope():
                y = inner(a)
        return y * 1

    outer(a).sum().backward()
    assert torch.equal(a.grad, a.detach().cos())


def test_a_foreach_write_in_a_scope_counts_for_the_rerun_around_it():
    """In a dispatch mode, torch itself does not count these up."""

    @checkpointed
    def f(x, c):
        with checkpoint_scope():
            torch._foreach_mul_([c], 0.5)
        return x.logsumexp(0)

    x, c = torch.ones(3, requires_grad=True), torch.ones(3)
    y = f(x, c)
    with pytest.raises(ChangedError):
        y.backward()
    assert c.tolist() == [0.5] * 3
