"""What only a GPU shows. (On side streams: test_offload.py; the comparison: test_main.py.)"""

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_ROOM, planned, replay, rerun, scope
from torch import nn

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
pytestmark = [pytest.mark.gpu, CUDA, NO_ROOM]


@pytest.fixture(params=[rerun, replay, scope, planned])
def door(request):
    return request.param


@pytest.fixture
def layers():
    return nn.ModuleList(nn.Linear(256, 256, device="cuda") for _ in range(8))


def forward(layers, x):
    for layer in layers:
        x = F.dropout(layer(x).sin(), 0.25)
    return x.square().sum()


def gradients(fn, layers, x):
    torch.manual_seed(1)
    found = torch.autograd.grad(fn(layers, x), [x, *layers.parameters()])
    return [t.cpu() for t in (*found, torch.rand(4, device="cuda"), torch.rand(4))]


def inputs():
    return torch.randn(512, 256, device="cuda").requires_grad_()


def test_random_numbers_of_the_device_are_drawn_once(door, layers):
    x = inputs()
    assert all(map(torch.equal, gradients(door(forward), layers, x), gradients(forward, layers, x)))


def test_less_memory_is_held(door, layers):
    """By the allocator, between forward and backward."""

    def held(fn):
        x, before = inputs(), torch.cuda.memory_allocated()
        loss = fn(layers, x)
        return torch.cuda.memory_allocated() - before, loss

    (plain, _), (less, _) = held(forward), held(door(forward))
    assert less < 0.8 * plain


def test_regions_on_several_streams(door, layers):
    """Each region on a stream of its own; backward goes back over the same streams."""
    streams = [torch.cuda.Stream() for _ in range(2)]

    def on(stream, fn, *args):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return fn(*args)

    def joined(fn):
        def run(layers, x):
            parts = [on(stream, fn, layers, x * (i + 1)) for i, stream in enumerate(streams)]
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
            return parts[0] + parts[1]

        return run

    x = inputs()
    want = gradients(joined(forward), layers, x)
    for _ in range(5):
        assert all(map(torch.equal, gradients(joined(door(forward)), layers, x), want))


def test_capture_in_a_graph(door, layers):
    x = inputs()
    parameters = list(layers.parameters())

    def captured(fn):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                torch.autograd.grad(fn(layers, x), parameters)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = torch.autograd.grad(fn(layers, x), parameters)
        torch.manual_seed(7)
        seen = []
        for _ in range(2):
            graph.replay()
            seen += [t.cpu() for t in found]
        return seen

    want = captured(forward)
    assert not torch.equal(want[0], want[len(parameters)])
    assert all(map(torch.equal, captured(door(forward)), want))
