"""Regions, backwards and switches of several threads at once."""

import threading
import time

import pytest
import torch
from beside import Code
from oracle import apply, at_once, bits, count, leaf
from torch import nn

from checkpointing import checkpointed, is_recomputing, keep

pytestmark = pytest.mark.usefixtures("quick_switches")
WORD = pytest.mark.parametrize("word", ["c", "r", "s", "cs", "sc"])


def network(x, w):
    h = keep((x @ w).sin().exp())
    return (h @ w).tanh() * h


@WORD
@pytest.mark.parametrize("early_stop", [True, False], ids=["early", "late"])
def test_two_backwards_over_one_frame(word, early_stop):
    x, w = leaf(4, 4), leaf(4, 4)
    y = apply(word, network, early_stop)(x, w).sum()

    def backwards():
        return bits([torch.autograd.grad(y, [x, w], retain_graph=True) for _ in range(10)])

    want = bits([torch.autograd.grad(network(x, w).sum(), [x, w])] * 10)
    assert at_once(*[backwards] * 3) == [want] * 3


@pytest.mark.parametrize("door", ["c", "r", "s"])
def test_a_region_is_seen_by_its_own_thread_only(door):
    opened, done = threading.Event(), threading.Event()
    x, z = leaf(3), leaf(3)

    def fn(x):
        opened.set()
        assert done.wait(20)
        return x.sin().exp()

    def other():
        assert opened.wait(20)
        try:
            y = keep(z.cos().exp()).tanh()
            return count(lambda: torch.autograd.grad(y.sum(), z)).get("exp", 0)
        finally:
            done.set()

    def region():
        y = apply(door, fn)(x)
        return count(lambda: torch.autograd.grad(y.sum(), x)).get("exp", 0)

    assert at_once(region, other) == [1, 0]


HURRIED = """
import gc, sys, time
import torch
from oracle import at_once
from checkpointing import checkpointed

sys.setswitchinterval(1e-6)
gc.callbacks.append(lambda *_: time.sleep(0))  # lets go of the GIL
gc.set_threshold(2, 2, 2)
region = checkpointed(lambda x: x.sin().exp())

def work():
    x = torch.rand(3, requires_grad=True)
    for _ in range(200):
        region(x).sum().backward()

at_once(*[work] * 4)
"""


def test_garbage_collection_while_the_generator_is_read_is_no_deadlock():
    """Torch holds the generator's mutex there, another thread the GIL."""
    assert Code(HURRIED).output == ""


def test_recomputes_of_one_region_take_turns():
    """Else one thread would find the buffers as the other has rewound them."""
    norm, inside, most = nn.BatchNorm1d(4), [], []

    @checkpointed(early_stop=False)
    def fn(x):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.02 * is_recomputing())
        y = norm(x).sin(), x.mul(2).cos()
        inside.pop()
        return y

    x = leaf(3, 4)
    outputs = fn(x)
    buffers = bits(dict(norm.named_buffers()))
    at_once(*[lambda y=y: torch.autograd.grad(y.sum(), x, retain_graph=True) for y in outputs])
    assert most == [1, 1, 1]
    assert bits(dict(norm.named_buffers())) == buffers
