"""What waits on the host: where it is, when it comes back, and that nothing depends on the
order."""

import contextlib
import weakref

import pytest
import torch
from oracle import Watching, bits
from test_auto import NESTINGS, gradients, net as auto_net
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from checkpointing import (
    _torch,
    auto,
    checkpoint_scope,
    checkpointed,
    keep,
    offload,
    save_ops,
    save_tagged,
    tag,
)
from checkpointing._engine import offload as _offload

pytestmark = pytest.mark.filterwarnings("ignore:.*(no room for checkpoints|A budget of)")
aten = torch.ops.aten
ADDMM, SIN, TANH = aten.addmm.default, aten.sin.default, aten.tanh.default

POLICIES = {
    "everything": offload(min_bytes=0),
    "inputs, too": offload(min_bytes=0, inputs=True),
    "operators": offload([ADDMM], min_bytes=0),
    "tags": offload(save_tagged("a"), min_bytes=0),
    "auto": offload(auto(), min_bytes=0),
    "budget": offload(auto(budget=2000), min_bytes=0),
    "beside others": offload(auto(), min_bytes=500, inputs=True)
    | save_ops(ADDMM)
    | save_tagged("a"),
}


@pytest.fixture
def sent(monkeypatch):
    """The storages that were sent away: their bytes, and weak references, in order."""
    seen = []
    send = _offload.Mover.send

    def spy(self, tensor):
        seen.append((tensor.untyped_storage().nbytes(), StorageWeakRef(tensor.untyped_storage())))
        return send(self, tensor)

    monkeypatch.setattr(_offload.Mover, "send", spy)
    return seen


def net():
    """With tags, kept values, and regions inside."""
    dropout = checkpointed(lambda y: torch.dropout(y.sin(), 0.3, True))
    return auto_net(4, tag, lambda t: dropout(keep(t)))


scoped = NESTINGS["scope"]
PAIRS = [(policy, "scope") for policy in POLICIES] + [
    ("inputs, too", door) for door in NESTINGS if door != "scope"
]


@pytest.fixture(scope="module")
def right():
    return gradients(net, lambda fn: fn)


@pytest.mark.parametrize(
    ("policy", "door"), [*PAIRS, ("budget", "rerun around"), ("beside others", "function")]
)
def test_gradients_are_bit_equal(door, policy, right):
    """To second order, in every nesting."""
    assert gradients(net, lambda fn: NESTINGS[door](fn, POLICIES[policy])) == right


def test_the_original_memory_is_free_after_the_copy(sent):
    """The copy has its own storage, and what was kept here is referred to by nobody."""
    x = torch.rand(1000).requires_grad_()
    for policy in (offload(), offload([SIN]), offload(auto())):
        for _ in range(2):  # `auto()` keeps nothing the first time
            sent.clear()
            with checkpoint_scope(policy=policy) as scope:
                y = x.exp().sin().tanh().sin().exp().sin().tanh().sin()
        y = y.sum()
        assert len(sent) >= 2
        assert all(storage.expired() for _, storage in sent[:-1]), policy
        assert scope.stats.bytes_kept >= 8000
        y.backward()
        assert scope.stats.bytes_kept == 0


def test_parameters_stay_where_they_are(sent):
    """Other leaves that require grad and views of them, too, whatever is asked for."""
    layer, x = nn.Linear(32, 32), torch.rand(32, 32).requires_grad_()
    with checkpoint_scope(policy=offload(min_bytes=0, inputs=True)):
        y = (layer(x) @ layer.weight.t()[:16].t()).sum() + (x[:3] * x[3:6]).sum()
    assert {nbytes for nbytes, _ in sent} == {32 * 32 * 4}  # the product that the other one reads
    mine = {t.untyped_storage()._cdata for t in (*layer.parameters(), x)}
    assert not mine & {storage.cdata for _, storage in sent}
    y.backward()


def test_inputs_go_on_request_only(sent):
    """Without, they are saved as by any region; a smaller one stays."""
    big, small = torch.rand(1000), torch.rand(3)
    w = torch.rand(1000).requires_grad_()
    want = big.clone()
    want[:3] += small
    for inputs, sizes in ((False, []), (True, [4000])):
        with checkpoint_scope(policy=offload(save_ops(), inputs=inputs)):
            y = (big * w).sum() + (small * w[:3]).sum()
        assert [n for n, _ in sent] == sizes
        if inputs:  # a copy, which nobody can change
            big.zero_()
        assert bits(torch.autograd.grad(y, w)[0]) == bits(want)


@pytest.mark.parametrize(
    ("least", "sizes"), [(0, {400, 4000}), (400, {400, 4000}), ("4 kB", {4000}), (4001, set())]
)
def test_small_storages_stay(sent, least, sizes):
    """Whole storages count, not the tensors on them."""
    x = torch.rand(1000).requires_grad_()
    with checkpoint_scope(policy=offload(min_bytes=least)) as scope:
        y = x[:100].tanh().sin()[0] + (x * 2)[:5].sin().sum()
    assert {nbytes for nbytes, _ in sent} == sizes
    y.backward()
    assert scope.stats.ops_replayed == 0


@pytest.mark.parametrize("first", [0, "1 GiB"])
def test_of_two_places_the_first_one_counts(first, sent):
    """For what autograd saves, what is kept by hand, and inputs."""
    second = "1 GiB" if first == 0 else 0
    policy = offload(min_bytes=first, inputs=True) | offload(min_bytes=second, inputs=True)
    x, big = torch.rand(1000).requires_grad_(), torch.rand(1000)
    with checkpoint_scope(policy=policy):
        y = keep((x * big).sin()).exp()
    assert len(sent) == (4 if first == 0 else 0)
    y.sum().backward()


def test_a_policys_own_answer_to_offload_stands(sent):
    """Inside of `offload`, whose place takes larger ones only."""
    offloads = lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD  # noqa: E731
    with checkpoint_scope(policy=offload(offloads, min_bytes=5000)):
        y = torch.rand(1000).requires_grad_().sin().exp()
    assert {nbytes for nbytes, _ in sent} == {4000}
    y.sum().backward()


def test_what_is_kept_by_hand_goes_along(sent):
    """`keep` in the block, and in blocks inside that bring no policy."""
    x = torch.rand(1000).requires_grad_()
    with checkpoint_scope(policy=offload(save_ops())):
        y = keep(x.sin()).exp()
        with checkpoint_scope():
            y = keep(y.sin()).exp()
    assert len(sent) == 2
    want = x.sin().exp().sin().exp()
    assert bits(torch.autograd.grad(y.sum(), x)) == bits(torch.autograd.grad(want.sum(), x))


def branches(x):
    stem = x.sin().exp()
    return [(stem.tanh() * i).sin().exp().sum() for i in (1, 2, 3)]


@pytest.mark.parametrize("policy", [offload(), offload([aten.exp.default])], ids=str)
def test_writes_after_the_copy(policy):
    """In the block and after it: what waits elsewhere is what was saved."""
    x = torch.rand(500).requires_grad_()
    with checkpoint_scope(policy=policy):
        y = x.sin()
        z = y.exp()
        w = z.cos()
        with torch.no_grad():
            z.mul_(0.5)
            u = z.tanh()
    with torch.no_grad():
        z.zero_()
        y.zero_()
    assert u.sum() > 0
    want = x.sin().exp().cos()
    assert bits(torch.autograd.grad(w.sum(), x)) == bits(torch.autograd.grad(want.sum(), x))


def test_what_has_come_back_goes_when_it_has_been_used(streams):
    """A long backward does not collect it: at any time little more than one layer is here."""
    y = torch.rand(100).requires_grad_() * 1
    most = []
    with Watching() as watching:
        with checkpoint_scope(policy=offload([TANH], min_bytes=0)):
            for _ in range(50):
                y = y.sin().tanh()
        node = y.grad_fn
        while node.next_functions and node.next_functions[0][0] is not None:
            node.register_prehook(lambda grads: most.append(len(watching.alive())))
            node = node.next_functions[0][0]
        before = len(watching.alive())
        y.sum().backward(retain_graph=True)
    assert len(most) >= 100
    assert max(most) <= before + 10


def test_nothing_outlives_its_use(no_gc):
    """After backward, without one, after an exception."""
    x = torch.rand(1000).requires_grad_()
    with Watching() as watching:
        for policy in (offload(), offload([TANH], inputs=True), offload(auto())):
            sum(scoped(branches, policy)(x)).backward()
            x.grad = None
            assert watching.alive() == []
            scoped(branches, policy)(x)
            assert watching.alive() == []
            with pytest.raises(ZeroDivisionError), checkpoint_scope(policy=policy):
                branches(x)
                raise ZeroDivisionError
            assert watching.alive() == []


class FakeStreams:
    """Streams of a device on which copies run as late as they may: when somebody waits for them."""

    def __init__(self):
        self.compute, self.entered = Compute(), []
        self.made, self.lost = [], 0

    def Stream(self, device):
        self.made.append(Side(self))
        return self.made[-1]

    def current_stream(self, device):
        return self.compute

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


class Compute:
    """The stream of the computation, which is never behind."""

    def wait_event(self, event):
        side, position = event
        side.run(position)


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
    monkeypatch.setattr(_offload, "_SIDE_STREAMS", {})
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda t, *, pin_memory=False, **kwargs: empty_like(t, **kwargs)
    )
    return fake


@pytest.mark.parametrize(
    ("policy", "door"), [*PAIRS[: len(POLICIES)], ("inputs, too", "rerun around")]
)
def test_whoever_reads_waits_for_the_copy(door, policy, right, streams):
    """However late copies run; and no memory is used anew before."""
    assert gradients(net, lambda fn: NESTINGS[door](fn, POLICIES[policy])) == right
    assert streams.lost == 0
    assert streams.made


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("policy", [offload(), offload(auto()), offload([ADDMM])], ids=str)
def test_on_cuda(policy):
    """Bit-equal to plain, with less memory at the peak, and copies on streams of their own."""
    layers = nn.ModuleList(nn.Linear(1024, 1024, device="cuda") for _ in range(16))
    x = torch.randn(4096, 1024, device="cuda").requires_grad_()

    def run(x):
        for layer in layers:
            x = layer(x).tanh().sin()
        return x.square().sum()

    def step(fn):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = torch.autograd.grad(fn(x), [x, *layers.parameters()])
        torch.cuda.synchronize()
        return [bits(t.cpu()) for t in found], torch.cuda.max_memory_allocated() - before

    step(run)
    want, plain = step(run)
    step(scoped(run, policy))
    have, peak = step(scoped(run, policy))
    assert have == want
    assert peak < 0.6 * plain
    assert len(_offload._SIDE_STREAMS) >= 2
