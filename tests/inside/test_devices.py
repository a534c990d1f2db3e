"""Devices that are not there: streams on which copies run late, and an accelerator that sleeps."""

import contextlib
import functools
import types
import weakref

import pytest
import torch
from oracle import Watching, bits, through
from planned import NESTINGS, gradients
from test_offload import POLICIES, SIN, TANH, branches, net, scoped

from checkpointing import _torch, auto, checkpoint_scope, offload
from checkpointing._engine import offload as _offload
from checkpointing.torch_compat import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*(no room for checkpoints|A budget of)")


class FakeStreams:
    """Streams of a device on which copies run as late as they may: when somebody waits for them."""

    def __init__(self):
        self.entered, self.made, self.lost = [], [], 0

    def Stream(self, device):
        self.made.append(Side(self))
        return self.made[-1]

    def current_stream(self, device):
        """That of the computation, which is never behind."""
        return self

    def wait_event(self, event):
        side, position = event
        side.run(position)

    @contextlib.contextmanager
    def stream(self, side):
        self.entered.append(side)
        yield
        self.entered.pop()

    def copy(self, target, source):
        """In place of the library's: whoever looks at the target too early sees NaN."""
        target.untyped_storage().fill_(255)
        side = self.entered[-1]
        if side is self.made[0]:  # on the way out; torch's allocator looks after the other end
            source, target = weakref.ref(source), lambda target=target: target
        else:
            target, source = weakref.ref(target), lambda source=source: source

        def run():
            to, what = target(), source()
            if to is None or what is None:
                self.lost += 1  # its memory has been freed
            else:
                to.copy_(what)

        side.queue.append(run)


class Side:
    def __init__(self, streams):
        self.streams, self.queue, self.done = streams, [], 0

    def wait_stream(self, other):
        if isinstance(other, Side):
            position = len(other.queue)
            self.queue.append(lambda: other.run(position))

    def record_event(self):
        return self, len(self.queue)

    def run(self, position):
        while self.done < position:
            self.done += 1
            self.queue[self.done - 1]()


@pytest.fixture
def streams(monkeypatch):
    fake = FakeStreams()
    monkeypatch.setattr(_torch, "streams_of", lambda device: fake)
    monkeypatch.setattr(_offload, "_copy", fake.copy)
    like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t, pin_memory=False, **more: like(t, **more))
    return fake


@pytest.mark.parametrize(
    ("policy", "door"),
    [*((policy, "scope") for policy in POLICIES), ("inputs, too", "rerun around")],
)
def test_whoever_reads_waits_for_the_copy(door, policy, streams):
    right = gradients(net, lambda fn: fn)
    assert gradients(net, lambda fn: NESTINGS[door](fn, POLICIES[policy])) == right
    assert streams.lost == 0
    assert streams.made


def test_what_has_come_back_goes_when_it_has_been_used(streams):
    """A long backward does not collect it: at any time little more than one layer is here."""
    y = torch.rand(100).requires_grad_() * 1
    most = []
    with Watching() as watching:
        with checkpoint_scope(policy=offload([TANH], min_bytes=0)):
            y = through([torch.sin, torch.tanh] * 50, y)
        node = y.grad_fn
        while node.next_functions and node.next_functions[0][0] is not None:
            node.register_prehook(lambda grads: most.append(len(watching.alive())))
            node = node.next_functions[0][0]
        before = len(watching.alive())
        y.sum().backward(retain_graph=True)
    assert len(most) >= 100
    assert max(most) <= before + 10


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 1)])
def test_partial_backwards_in_any_order(order, streams):
    """Some twice; what is fetched ahead and never asked for gives its memory back in order."""
    x = torch.rand(500).requires_grad_()
    want = [bits(torch.autograd.grad(y, x, retain_graph=True)[0]) for y in branches(x)]
    for policy in (offload(), offload([SIN]), offload(auto())):
        ys = scoped(branches, policy)(x)
        have = [bits(torch.autograd.grad(ys[i], x, retain_graph=True)[0]) for i in order]
        assert have == [want[i] for i in order]
        del ys
    assert streams.lost == 0


def test_backward_inside_the_block(streams):
    """What is still on its way out can be asked for."""
    x = torch.rand(500).requires_grad_()

    def run(x):
        y = x.sin().exp()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (g.tanh() * y).sum()

    want = torch.autograd.grad(run(x), x)[0]
    for policy in (offload(), offload([SIN], inputs=True), offload(auto())):
        assert bits(torch.autograd.grad(scoped(run, policy)(x), x)[0]) == bits(want)
    assert streams.lost == 0


def test_few_copies_are_on_their_way_out_at_once(streams):
    """So that memory comes back while the block still runs; none is left when it ends."""
    y = torch.rand(1000).requires_grad_() * 1
    alive = []
    with Watching() as watching, checkpoint_scope(policy=offload()):
        for _ in range(20):
            y = y.sin()
            alive.append(len(watching.alive("sin")))
    assert max(alive) <= 6
    assert watching.alive("sin") == ["sin"]
    y.sum().backward()


region = functools.partial(checkpoint, use_reentrant=False)


def test_an_accelerator_first_used_in_a_region_is_refused(monkeypatch):
    """Its random state from before can't be known; torch's error."""
    module = types.SimpleNamespace(_initialized=False)
    monkeypatch.setattr("checkpointing._torch.names._device_module", module)

    def wakes(x):
        module._initialized = True
        return x.sin()

    with pytest.raises(RuntimeError, match="device state was initialized in the forward pass"):
        region(wakes, torch.rand(4, requires_grad=True))
    region(wakes, torch.rand(4, requires_grad=True))
    module._initialized = False
    region(wakes, torch.rand(4, requires_grad=True), preserve_rng_state=False)
