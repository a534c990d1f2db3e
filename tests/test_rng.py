"""Recompute draws the numbers of the forward; the stream goes on where plain code leaves it."""

import functools
import json

import fake_accelerator
import pytest
import torch
import torch.nn.functional as F
from beside import Code
from oracle import DOORS, EACH_DOOR, NO_ROOM, memory_of, same_bits
from torch import nn

from checkpointing import checkpoint_scope, forward_only

pytestmark = NO_ROOM


def samplers(x):
    """From nothing, in place, shaped like another; by multinomial, Bernoulli, normal of tensors."""
    noise = torch.empty(50).uniform_() + torch.empty(50).normal_() + torch.empty(50).exponential_()
    more = torch.randint(0, 5, (50,)).float() + torch.randperm(50) + torch.rand_like(x.exp())
    index = torch.multinomial(x.detach().sigmoid(), 50, replacement=True)
    mask = torch.bernoulli(x.detach().sigmoid())
    normal = torch.normal(x.detach(), 0.5)
    y = (x * noise).sin() * mask + normal * x + (x * more).cos() * torch.rand(50)
    return (y + torch.randn(50)).exp()[index].sin() * x


def dropouts(x):
    """Alpha and feature dropout, Gumbel softmax, RReLU, attention."""
    y = F.alpha_dropout(x, 0.3, training=True).sin()
    y = F.dropout1d(y.view(1, 5, 10), 0.4).view(-1).exp()
    y = F.rrelu(F.gumbel_softmax(y.sin(), tau=0.7).exp() - 1.1, training=True)
    y = F.rrelu_(y * 2, training=True)
    q = y.view(1, 1, 10, 5)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).exp().sin()


def reseeded(x):
    """In a fork of the stream and out of it; beside numbers that decide, or that nobody needs."""
    torch.rand(17)
    y = F.dropout(x.sin(), 0.5)
    for _ in range(4):
        y = y.sin() if torch.rand(()) < 0.5 else y.exp().cos()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        y = F.dropout(y.exp(), 0.5)
    y = F.dropout(y.sin(), 0.5).exp()
    torch.manual_seed(3)
    torch.rand(5)
    return F.dropout(y, 0.5).sin()


sample = forward_only(lambda x: torch.rand_like(x).mean())


def sampled(x):
    """A function that runs in the forward only draws between two others."""
    x = F.dropout(x.sin(), 0.5)
    return F.dropout(x * sample(x), 0.5).sin()


def between(door, x):
    fn = door(lambda x: F.dropout(x.sin(), 0.5, inplace=True).exp().sin())
    y = fn(x * torch.rand(50))
    return fn(y * torch.rand(50)) * torch.rand(50)


def dropout(x):
    return F.dropout(x.sin(), 0.5).exp().sin()


LAYERS = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.1), nn.Softplus())
PROGRAMS = {
    "closure": lambda door, x: door(lambda y: dropout(x) * y)(torch.ones(50)),
    "keyword": lambda door, x: door(lambda *, x: dropout(x))(x=x),
    "container": lambda door, x: door(lambda s: dropout(s["a"][0]))({"a": [x]}),
    "module argument": lambda door, x: door(lambda m, x: m(x.sin()).exp().sin())(LAYERS[0], x),
    "module": lambda door, x: door(LAYERS)(x),
    # Noise that is saved before it is there, by the last operator of all.
    "filled last": lambda door, x: door(lambda x: F.rrelu(x.sin(), training=True))(x),
    "one number, filled last": lambda door, x: door(
        lambda x: F.rrelu(-x.square().sum(), training=True)
    )(x),
    "between": between,
}
for f in (samplers, dropouts, reseeded, sampled):
    PROGRAMS[f.__name__] = lambda door, x, f=f: door(f)(x)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@EACH_DOOR
def test_random_programs_are_plain(program, door):
    leaf = torch.linspace(-1, 1, 50).requires_grad_()

    def step(door):
        y = program(door, leaf * 1.0)
        seen = [y, torch.get_rng_state()]
        for retain in (True, False):
            torch.rand(3)  # what happens in between must not matter
            seen += torch.autograd.grad(y.sum(), leaf, retain_graph=retain)
            seen += [torch.get_rng_state()]
        return seen

    same_bits(door, step)


class Owner(nn.Module):
    """With a generator in an attribute, beside others."""

    def __init__(self, fn, get, **attributes):
        super().__init__()
        self.fn, self.get = fn, get
        vars(self).update(attributes)

    def forward(self, x):
        return self.fn(x, self.get(self))


def with_default(fn, g):
    class Owning(nn.Module):
        def forward(self, x, g=g):
            return fn(x, g)

    return Owning()


def callable_with_default(fn, g):
    class Callable:
        def __call__(self, x, g=g):
            return fn(x, g)

    return Callable()


PASSED = {
    "positional": lambda door, fn, g, x: door(fn)(x, g),
    "keyword": lambda door, fn, g, x: door(fn)(x, generator=g),
    "nested": lambda door, fn, g, x: door(lambda x, s: fn(x, s[0]["g"]))(x, [{"g": g}]),
    "partial": lambda door, fn, g, x: door(functools.partial(fn, generator=g))(x),
    "closed over": lambda door, fn, g, x: door(lambda x: fn(x, g))(x),
    "default": lambda door, fn, g, x: door(lambda x, g=g: fn(x, g))(x),
    "list in a default": lambda door, fn, g, x: door(lambda x, *, s=(g,): fn(x, s[0]))(x),
    "default of a module": lambda door, fn, g, x: door(with_default(fn, g))(x),
    "default of a module's forward": lambda door, fn, g, x: door(with_default(fn, g).forward)(x),
    "default of an object": lambda door, fn, g, x: door(callable_with_default(fn, g))(x),
    "list of a module": lambda door, fn, g, x: door(Owner(fn, lambda m: m.a[1], a=[1, g]))(x),
    "dict of a module": lambda door, fn, g, x: door(
        nn.Sequential(nn.Identity(), Owner(fn, lambda m: m.a["g"], a={"g": g}, n=3))
    )(x),
}


@EACH_DOOR
@pytest.mark.parametrize("how", PASSED)
def test_generators(door, how):
    def fn(x, generator):
        y = x.sin() * torch.rand(50, generator=generator)
        noise = torch.empty(50).normal_(generator=generator)
        mask = torch.bernoulli(y.exp().sigmoid(), generator=generator)
        return mask * (y + noise).sin().exp() * torch.rand(50)

    def step(door):
        leaf = torch.linspace(-1, 1, 50).requires_grad_()
        generator = torch.Generator().manual_seed(11)
        y = PASSED[how](door, fn, generator, leaf)
        seen = [y, generator.get_state(), *torch.autograd.grad(y.sum(), leaf)]
        return [*seen, generator.get_state()]

    same_bits(door, step)


def drawn_in_place(x):
    """Into parts, and into memory that has been read."""
    noise, others = torch.zeros(3, 50), torch.zeros(2, 50)
    noise[0].uniform_()
    torch.rand(50, out=noise[1])
    noise[2] += F.dropout(noise[0], 0.5)
    row, over = others[1], x.detach().sin()
    before = over.exp()
    others.bernoulli_()
    over.uniform_()
    return (x * noise).sin().exp() * row * (before + over)


@pytest.mark.parametrize("door", ["replay", "scope"])
def test_without_preserving_replay_is_exact_and_stashes_nothing(door):
    """What random operators made is kept instead."""
    leaf = torch.linspace(-1, 1, 50).requires_grad_()
    off = {"preserve_rng_state": False}
    for program in (dropout, drawn_in_place):
        step = lambda door, f=program: [y := door(f)(leaf), *torch.autograd.grad(y.sum(), leaf)]
        same_bits(functools.partial(DOORS[door], **off), step)
    with checkpoint_scope(**off) as entered:
        y = dropout(leaf)
    assert 0 < entered.stats.bytes_kept < 5000  # a state is 5,056 bytes
    assert entered.stats.bytes_held < 5000
    del y


@pytest.fixture(scope="module")
def outcomes():
    code = (
        "import warnings; warnings.simplefilter('error'); import fake_accelerator as it; it.main()"
    )
    return json.loads(Code(code).output)


@pytest.mark.parametrize("kind", fake_accelerator.KINDS)
@pytest.mark.parametrize("case", fake_accelerator.CASES)
def test_on_an_accelerator(outcomes, kind, case):
    """Beside the CPU, a device with a stream of its own."""
    assert outcomes[kind][case] is None, f"\n{outcomes[kind][case]}"


@pytest.mark.parametrize(("dropout_p", "states"), [(0.0, 0), (0.5, 4)])
def test_attention_without_dropout_holds_no_random_state(dropout_p, states):
    q, size = torch.randn(1, 2, 8, 4, requires_grad=True), torch.get_rng_state().nbytes

    def forward():
        y = q
        with checkpoint_scope():
            for _ in range(4):
                y = F.scaled_dot_product_attention(y, y, y, dropout_p=dropout_p)
        return y.sum()

    assert memory_of(forward).held // size == states
