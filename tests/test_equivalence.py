"""Checkpointed programs are the plain ones, bit for bit: results, gradients, streams, buffers."""

import functools
import itertools

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from oracle import NO_ROOM, apply, bits, by_turns, called, differences, observe, weigh
from torch import nn
from torch.utils._pytree import tree_map_only

pytestmark = NO_ROOM


def leaf(*shape):
    return torch.randn(*shape).mul_(0.5).requires_grad_()


def of_two(fn):
    """A program of a function of two tensors."""
    return functools.wraps(fn)(lambda: (fn, (leaf(3, 4), leaf(4))))


class Programs:
    @of_two
    def several_outputs(x, w):
        """With some nothing is done, some don't want gradients, some are inputs."""
        h = x.exp() * w
        h.cos().tanh()
        return h.sin(), h.detach(), h.argmax(), [torch.ones(2), x, h * x.tanh()], w

    @of_two
    def views_and_writes(x, w):
        """Of inputs and of intermediate values, also as outputs, as plain autograd accepts them."""
        h = (x * w).sin().t()
        a, b = h.chunk(2)
        k = a.unsqueeze(0).expand(3, -1, -1) * b.reshape(-1)[:1]
        d = k.flatten().as_strided((2, 3), (3, 1), 1).exp()
        m = x.sin()
        m.mul_(2).add_(w)
        m = torch.relu_(m)
        n = m * w
        n += 1
        n.sigmoid_()
        return d, n, m.cos(), x.t()[1:].cos(), h.diagonal(), x.view(-1), *h.unbind(0)

    @of_two
    def dropout(x, w):
        """Random operators of every kind, and deterministic ones between them."""
        h = F.dropout((x * w).sin(), 0.3)
        h = h + torch.randn(4) * h.exp() * torch.rand_like(h)
        h = F.dropout(h.tanh(), 0.5)
        return h * torch.bernoulli(torch.full((3, 4), 0.5)), torch.randperm(5)

    @of_two
    def gradients_inside(x, w):
        """A part without gradients; a graph that is read twice, and one that is freed."""
        with torch.no_grad():
            scale = (x * w).abs().max()
            with torch.enable_grad():
                h = (x * w * scale).sin().exp()
        total = h.tanh().sum()
        (a,) = torch.autograd.grad(total, h, retain_graph=True)
        (b,) = torch.autograd.grad(total, x)
        return x.cos() * h.detach() * w * (a + b).sigmoid()

    @of_two
    def custom_functions(x, w):
        a, b = oracle.Pair.apply(x.exp(), w.sin().expand(3, 4))
        return (oracle.SavesItsOutput.apply(a) * b).tanh()

    def small_model():
        layers = nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4)
        return nn.Sequential(*layers), (leaf(2, 3, 4),)


@functools.cache
def seen(program, word, early_stop, computed, order):
    """What a program leaves behind in a nest: the `g`s of the word are some of its orders."""

    def run(region, fn, arguments):
        if computed:
            arguments = tree_map_only(torch.Tensor, lambda t: t * 1.25, arguments)
        return region(fn, *arguments)

    region = called(functools.partial(apply, word, early_stop=early_stop))
    higher = ("second",) * (order == 2) + ("third",) * (order > 2)
    return [observe(run, region, program, backward) for backward in ("first", "partial", *higher)]


def assert_same(program, word, early_stop=True, computed=False, order=3):
    """A word leaves the same behind as with nothing but its `g`s."""
    gradients = word.count("g")
    want = seen(program, "g" * gradients, True, computed, order - gradients)
    have = seen.__wrapped__(program, word, early_stop, computed, order - gradients)
    for one, other in zip(want, have, strict=True):
        assert not differences(one, other), (word, differences(one, other))


PROGRAMS = [program for name, program in vars(Programs).items() if not name.startswith("_")]
ONE = [(word, early_stop) for word in "crsapb" for early_stop in (True, False)]
NESTS = "cc", "ss", "sc", "cs", "cr", "rs", "csc", "scs", "pp", "pc", "cp", "sb"


TURNS = by_turns([(program, *one) for program in PROGRAMS for one in ONE], [True, False])
TURNS += itertools.product(PROGRAMS, NESTS, [True], [True])


@pytest.mark.parametrize(("program", "word", "early_stop", "computed"), TURNS)
def test_regions_in_any_nesting_are_the_plain_program(program, word, early_stop, computed):
    """f ~ c(f) ~ c(c(f)) ~ s(c(f)) and so on, with gradients up to the third order."""
    assert_same(program, word, early_stop, computed, order=3 if len(word) == 1 else 2)


SHORT = ["".join(letters) for n in (2, 3) for letters in itertools.product("crsg", repeat=n)]


@pytest.mark.parametrize("word", [w for w in SHORT if "g" in w and w.strip("g")])
def test_gradients_in_every_order_of_nesting(word):
    """grad(f) ~ grad(c(f)) ~ c(grad(f)) ~ s(grad(c(f))) and so on, to the third order."""
    assert_same(Programs.dropout, word)


@settings(max_examples=36)
@given(
    word=st.text("crsgapb", min_size=4, max_size=6).filter(lambda w: w.count("g") <= 3),
    early_stop=st.booleans(),
)
def test_long_words(word, early_stop):
    assert_same(Programs.several_outputs, word, early_stop=early_stop)


def region(word, early_stop=True):
    """Two outputs that share work, of one region; the leaves."""
    torch.manual_seed(0)
    leaves = leaf(3, 4), leaf(4, 4), leaf(4)

    def fn(x, w, v):
        h = F.dropout((x @ w).sin(), 0.2)
        return (h * v).exp_().tanh(), h.tanh() @ w

    return [*apply(word, fn, early_stop)(*leaves)], leaves


def one_output_only(outputs, leaves):
    del outputs[1]
    weigh(outputs).backward()


def batched(outputs, leaves):
    """Backward under vmap, which the recompute is no part of."""
    vectors = [torch.stack([torch.ones_like(y), torch.full_like(y, 2.0)]) for y in outputs]
    return torch.autograd.grad(outputs, leaves, vectors, is_grads_batched=True)


@pytest.mark.parametrize(("word", "early_stop"), [*ONE, ("cc", True), ("cs", True), ("sc", True)])
@pytest.mark.parametrize("way", [one_output_only, batched])
def test_every_way_to_run_backward(way, word, early_stop):
    def run(word):
        outputs, leaves = region(word, early_stop)
        found = way(outputs, leaves)
        return bits([found, [t.grad for t in leaves], torch.get_rng_state()])

    assert run(word) == run("")


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("door", ["c", "r", "s"])
def test_a_freed_graph_says_so(door, early_stop):
    outputs, _ = region(door, early_stop)
    weigh(outputs).backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        weigh(outputs).backward()
