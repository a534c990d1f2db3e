"""Recompute draws the numbers that the forward drew, and the stream goes on where plain code leaves it."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import fake_accelerator
import pytest
import torch
import torch.nn.functional as F
from oracle import bits, count
from oracle import s as scope
from torch import nn

from checkpointing import checkpoint_scope, checkpointed

HERE = Path(__file__).parent


DOORS = {
    "rerun": checkpointed,
    "replay": checkpointed(backend="replay"),
    "scope": scope,
    "rerun in scope": lambda fn: scope(checkpointed(fn)),
    "scope in rerun": lambda fn: checkpointed(scope(fn)),
    "late rerun": checkpointed(early_stop=False),
    "late replay": checkpointed(backend="replay", early_stop=False),
}
DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))


def observe(step):
    """Results and gradients of a step, and the random stream after it, in bits."""
    torch.manual_seed(7)
    return [*map(bits, step()), bits(torch.get_rng_state())]


def closure(door, x):
    """Dropout in the function."""
    return door(lambda x: F.dropout(x.sin(), 0.5).exp().sin())(x)


def keyword(door, x):
    """Dropout on a keyword argument."""
    return door(lambda *, x: F.dropout(x.sin(), 0.5).exp().sin())(x=x)


def container(door, x):
    """Dropout on a tensor in a nested container."""
    return door(lambda s: F.dropout(s["a"][0].sin(), 0.5).exp().sin())({"a": [x]})


def module(door, x):
    """A dropout module that the function is called with."""
    return door(lambda m, x: m(x.sin()).exp().sin())(nn.Dropout(0.5), x)


def module_itself(door, x):
    """A model with dropout layers."""
    return door(nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.1), nn.Softplus()))(x)


def in_place(door, x):
    """In-place dropout."""
    return door(lambda x: F.dropout(x.sin(), 0.5, inplace=True).exp().sin())(x)


def factories(door, x):
    """Numbers made from nothing."""

    def fn(x):
        a, b = torch.rand(50), torch.randn(50)
        c = torch.randint(0, 5, (50,)).float() + torch.randperm(50)
        return (x * a).sin() * (x + b).exp() * (x * c).cos()

    return door(fn)(x)


def like(door, x):
    """Numbers shaped like something that is there."""
    return door(lambda x: (x.sin() * torch.rand_like(x.exp()) + torch.randn_like(x)).exp().sin())(x)


def samplers(door, x):
    """In-place samplers, multinomial, Bernoulli, normal with tensors as arguments."""

    def fn(x):
        noise = torch.empty(50).uniform_() + torch.empty(50).normal_() + torch.empty(50).exponential_()
        index = torch.multinomial(x.detach().sigmoid(), 50, replacement=True)
        mask = torch.bernoulli(x.detach().sigmoid())
        normal = torch.normal(x.detach(), 0.5)
        return ((x * noise).sin() * mask + normal * x)[index].exp().sin()

    return door(fn)(x)


def leaky(door, x):
    """RReLU, whose operator both fills a tensor that it is given and returns one."""
    return door(lambda x: F.rrelu(x - 0.5, training=True).exp().sin())(x)


def leaky_in_place(door, x):
    """And in place."""
    return door(lambda x: F.rrelu_(x - 0.5, training=True).exp().sin())(x)


def dropouts(door, x):
    """Alpha and feature dropout, Gumbel softmax."""

    def fn(x):
        y = F.alpha_dropout(x, 0.3, training=True).sin()
        y = F.dropout1d(y.view(1, 5, 10), 0.4).view(-1).exp()
        return F.gumbel_softmax(y.sin(), tau=0.7).exp()

    return door(fn)(x)


def attention(door, x):
    """Attention with dropout."""
    return door(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).exp().sin())(x.view(1, 1, 10, 5))


def draws_between(door, x):
    """Draws before the region, after it, and between two of them."""
    fn = door(lambda x: F.dropout(x.sin(), 0.5).exp().sin())
    y = fn(x * torch.rand(50))
    y = fn(y * torch.rand(50))
    return y * torch.rand(50)


def reseeded_inside(door, x):
    """A seed set in the region."""

    def fn(x):
        y = F.dropout(x.sin(), 0.5)
        torch.manual_seed(3)
        return F.dropout(y.exp(), 0.5).sin()

    return door(fn)(x)


def forked_inside(door, x):
    """A fork of the stream in the region."""

    def fn(x):
        y = F.dropout(x.sin(), 0.5)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            y = F.dropout(y.exp(), 0.5)
        return F.dropout(y.sin(), 0.5).exp().sin()

    return door(fn)(x)


def unused_numbers(door, x):
    """Numbers that no gradient needs move the stream all the same."""

    def fn(x):
        torch.rand(17)
        y = x.sin().exp()
        torch.rand(5)
        return y.sin()

    return door(fn)(x)


def branches(door, x):
    """A branch that the numbers decide."""

    def fn(x):
        for _ in range(4):
            x = x.sin() if torch.rand(()) < 0.5 else x.exp().cos()
        return x

    return door(fn)(x)


PROGRAMS = [
    *(
        closure,
        keyword,
        container,
        module,
        module_itself,
        in_place,
        factories,
        like,
        samplers,
        leaky,
        leaky_in_place,
        dropouts,
    ),
    *(attention, draws_between, reseeded_inside, forked_inside, unused_numbers, branches),
]
PROGRAM = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)


@PROGRAM
@DOOR
@pytest.mark.parametrize("kind", ["leaf", "computed"])
def test_random_programs_are_plain(program, door, kind):
    """Output, gradients, and the stream after forward and after backward."""
    leaf = torch.linspace(-1, 1, 50).requires_grad_()

    def step(door):
        y = program(door, leaf if kind == "leaf" else leaf * 1.0)
        after_forward = torch.get_rng_state()
        torch.rand(3)  # what happens in between must not matter
        return [y, after_forward, *torch.autograd.grad(y.sum(), leaf)]

    assert observe(lambda: step(door)) == observe(lambda: step(lambda fn: fn))


@PROGRAM
@DOOR
def test_every_backward_draws_the_same(program, door):
    """With `retain_graph`, the second recompute gives what the first one gave."""
    leaf = torch.linspace(-1, 1, 50).requires_grad_()
    y = program(door, leaf * 1.0)
    first = torch.autograd.grad(y.sum(), leaf, retain_graph=True)
    torch.rand(11)
    assert bits(first[0]) == bits(torch.autograd.grad(y.sum(), leaf)[0])


def with_generator(fn, door, pass_it):
    """A step that draws from a generator of its own: closed over, or given to the function somehow."""
    leaf = torch.linspace(-1, 1, 50).requires_grad_()
    generator = torch.Generator().manual_seed(11)
    if pass_it is None:
        y = door(functools.partial(fn, generator=generator))(leaf)
    else:
        args, kwargs = pass_it(generator)
        y = door(fn)(leaf, *args, **kwargs)
    middle = generator.get_state()
    return [y, middle, *torch.autograd.grad(y.sum(), leaf), generator.get_state()]


@DOOR
@pytest.mark.parametrize(
    "pass_it",
    [lambda g: ((g,), {}), lambda g: ((), {"generator": g}), lambda g: (([{"g": g}],), {})],
    ids=["positional", "keyword", "nested"],
)
def test_generator_arguments(door, pass_it):
    """`torch.Generator`s among the arguments are drawn from as in the forward, and left where plain leaves them."""

    def fn(x, generator):
        generator = generator[0]["g"] if isinstance(generator, list) else generator
        y = x.sin() * torch.rand(50, generator=generator)
        return torch.bernoulli(y.exp().sigmoid(), generator=generator) * y.sin().exp() * torch.rand(50)

    step = functools.partial(with_generator, fn, pass_it=pass_it)
    assert observe(lambda: step(door)) == observe(lambda: step(lambda fn: fn))


@pytest.mark.parametrize("door", ["replay", "scope"])
def test_closed_over_generators_in_replay(door):
    """Replay sets the generator that the operator was given, however it got there."""

    def fn(x, generator):
        y = x.sin() * torch.rand(50, generator=generator)
        return (y.exp() + torch.empty(50).normal_(generator=generator)).sin().exp()

    step = functools.partial(with_generator, fn, pass_it=None)
    assert observe(lambda: step(DOORS[door])) == observe(lambda: step(lambda fn: fn))


@pytest.mark.parametrize("bound", ["partial", "method", "object"])
def test_generators_that_rerun_can_find(bound):
    """One bound by `functools.partial` is an argument; so is what a method's object has as an attribute."""

    class Noise:
        def __init__(self, generator):
            self.generator = generator

        def add(self, x):
            return (x.sin() * torch.rand(50, generator=self.generator)).exp().sin()

        __call__ = add

    def step(door):
        leaf = torch.linspace(-1, 1, 50).requires_grad_()
        noise = Noise(torch.Generator().manual_seed(11))
        fn = {
            "partial": lambda: functools.partial(lambda x, g: noise.add(x), g=noise.generator),
            "method": lambda: noise.add,
            "object": lambda: noise,
        }[bound]()
        y = door(fn)(leaf)
        return [y, *torch.autograd.grad(y.sum(), leaf), noise.generator.get_state()]

    assert observe(lambda: step(checkpointed)) == observe(lambda: step(lambda fn: fn))


@pytest.mark.parametrize("door", ["rerun", "replay", "scope"])
def test_a_failing_recompute_leaves_the_stream_alone(door):
    """A recompute that raises has moved no generator."""
    generator = torch.Generator().manual_seed(5)
    x, source = torch.rand(3).requires_grad_(), torch.ones(3)

    def fn(x, source, generator):
        y = F.dropout(x, 0.5) * torch.rand(3, generator=generator)
        return (y.exp() * source).sin()

    y = DOORS[door](fn)(x, source, generator)
    before = bits(torch.get_rng_state()), bits(generator.get_state())
    source.add_(1)
    with pytest.raises(RuntimeError):
        y.sum().backward()
    assert (bits(torch.get_rng_state()), bits(generator.get_state())) == before


def test_without_preserving_rerun_draws_anew_and_says_nothing():
    """`preserve_rng_state=False` is the user's word that it doesn't matter: the stream is not touched."""
    leaf = torch.linspace(-1, 1, 1000).requires_grad_()
    y = checkpointed(lambda x: F.dropout(x.sin(), 0.5).exp(), preserve_rng_state=False)(leaf)
    stream = torch.get_rng_state()
    (gradient,) = torch.autograd.grad(y.sum(), leaf)
    assert bits(torch.get_rng_state()) != bits(stream)
    mask = (y != 1).float()
    assert bits(gradient) != bits(mask * 2 * y.detach() * leaf.detach().cos())


@pytest.mark.parametrize("door", ["replay", "scope"])
def test_without_preserving_replay_is_exact_and_stashes_nothing(door):
    """What random operators made is kept instead."""
    options = {"preserve_rng_state": False}

    def off(fn):
        if door == "replay":
            return checkpointed(fn, backend="replay", **options)

        def run(*args, **kwargs):
            with checkpoint_scope(**options) as entered:
                y = fn(*args, **kwargs)
            assert 0 < entered.stats.bytes_kept < 5000  # a state is 5,056 bytes
            assert entered.stats.bytes_held < 5000
            return y

        return run

    leaf = torch.linspace(-1, 1, 50).requires_grad_()

    def step(door):
        y = closure(door, leaf)
        return [y, *torch.autograd.grad(y.sum(), leaf)]

    assert observe(lambda: step(off)) == observe(lambda: step(lambda fn: fn))


def test_regions_without_randomness_stash_nothing_in_replay():
    """A scope in which nothing is drawn holds no state."""
    leaf = torch.rand(50).requires_grad_()
    with checkpoint_scope() as quiet:
        y = leaf.sin().exp().sin()
    with checkpoint_scope() as noisy:
        z = F.dropout(leaf.sin(), 0.5).exp().sin()
    assert quiet.stats.bytes_held == 0
    assert noisy.stats.bytes_held >= torch.get_rng_state().nbytes
    del y, z


def test_a_dropout_mask_is_replayed_without_what_is_before_it():
    """The mask needs the shape of its input only: backward of what follows runs no matrix product again."""
    x, w = torch.rand(4, 4).requires_grad_(), torch.rand(4, 4)
    with checkpoint_scope():
        y = F.dropout(x @ w, 0.5)
    ran = count(y.sum().backward)
    assert ran["bernoulli_"] == 1
    assert ran["mm"] == 1  # the gradient's own


def test_the_global_seed_of_python_is_left_alone():
    """A recompute does not reseed: `initial_seed` stays what the user set."""
    torch.manual_seed(123)
    y = closure(checkpointed, torch.rand(3).requires_grad_())
    y.sum().backward()
    assert torch.initial_seed() == 123


# ---- another device


@pytest.fixture(scope="module", params=["flat", "opaque"])
def outcomes(request):
    """What became of each case, in a process of its own."""
    command = [sys.executable, "-W", "error", str(HERE / "fake_accelerator.py"), request.param]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment(), cwd=HERE.parent, timeout=100
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def environment():
    """This process's, with the way to this package."""
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


@pytest.mark.parametrize("case", fake_accelerator.CASES)
def test_on_an_accelerator(outcomes, case):
    """Beside the CPU, a device with a stream of its own."""
    assert outcomes[case] is None, f"\n{outcomes[case]}"
