"""What waits on the host, and when it is back. (Copies that run late: inside/test_devices.py.)"""

import pytest
import torch
from oracle import Watching, bits, rerun, through
from planned import NESTINGS, gradients, net as auto_net
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from checkpointing import auto, checkpoint_scope, keep, offload, report, save_ops, save_tagged, tag

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


def offloaded(y):
    """What waits elsewhere for the backward of `y`."""
    held = [tensor for region in report(y).regions for tensor in region.held]
    return [tensor for tensor in held if tensor.kind == "offloaded"]


def shapes(y):
    return sorted(tensor.shape for tensor in offloaded(y))


def net():
    """With tags, kept values, and regions inside."""
    dropout = rerun(lambda y: torch.dropout(y.sin(), 0.3, True))
    return auto_net(4, tag, lambda t: dropout(keep(t)))


scoped = NESTINGS["scope"]
PAIRS = [*((policy, "scope") for policy in POLICIES), *(("inputs, too", n) for n in NESTINGS)]
PAIRS += [("budget", "rerun around"), ("beside others", "function")]


@pytest.fixture(scope="module")
def right():
    return gradients(net, lambda fn: fn)


@pytest.mark.parametrize(("policy", "door"), dict.fromkeys(PAIRS))
def test_gradients_are_bit_equal(door, policy, right):
    assert gradients(net, lambda fn: NESTINGS[door](fn, POLICIES[policy])) == right


def test_what_is_too_small_to_be_moved_goes_to_the_hooks_around():
    packed, x = [], torch.linspace(-1, 1, 5, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor):
        y = scoped(lambda x: x.exp().sin().tanh(), offload(min_bytes=1000))(x)
    assert not offloaded(y)
    assert len({tensor.data_ptr() for tensor in packed}) == 3  # its input; of `exp` and `tanh`


@pytest.mark.parametrize("policy", [offload(), offload([SIN]), offload(auto())], ids=str)
def test_the_original_memory_is_free_after_the_copy(policy):
    """The copy has its own storage, and what was kept here is referred to by nobody."""
    x = torch.rand(100_000).requires_grad_()
    for _ in range(2):  # `auto()` keeps nothing the first time
        with Watching() as watching, checkpoint_scope(policy=policy) as scope:
            y = through([lambda y: y.exp().sin().tanh().sin()] * 4, x)
        y = y.sum()
        held, alive = offloaded(y), watching.alive("exp", "sin", "tanh")
        kept = scope.stats.bytes_kept
        y.backward()
    assert len(held) >= 2 and kept >= 800_000
    assert alive == []
    assert scope.stats.bytes_kept == 0


def test_parameters_stay_where_they_are():
    """Other leaves that require grad and views of them, too, whatever is asked for."""
    layer, x = nn.Linear(32, 32), torch.rand(32, 32).requires_grad_()
    with checkpoint_scope(policy=offload(min_bytes=0, inputs=True)):
        y = (layer(x) @ layer.weight.t()[:16].t()).sum() + (x[:3] * x[3:6]).sum()
    assert shapes(y) == [(32, 32)]  # the product that the other one reads
    y.backward()


@pytest.mark.parametrize("inputs", [False, True])
def test_inputs_go_on_request_only(inputs):
    """Without, they are saved as by any region; a smaller one stays."""
    big, small = torch.rand(1000), torch.rand(3)
    w = torch.rand(1000).requires_grad_()
    want = big.clone()
    want[:3] += small
    with checkpoint_scope(policy=offload(save_ops(), inputs=inputs)):
        y = (big * w).sum() + (small * w[:3]).sum()
    assert shapes(y) == [(1000,)] * inputs
    if inputs:  # a copy, which nobody can change
        big.zero_()
    assert bits(torch.autograd.grad(y, w)[0]) == bits(want)


@pytest.mark.parametrize(
    ("least", "found"), [(0, [(5,), (100,)]), (400, [(5,), (100,)]), ("4 kB", [(5,)]), (4001, [])]
)
def test_small_storages_stay(least, found):
    """Whole storages count, not the tensors on them."""
    x = torch.rand(1000).requires_grad_()
    with checkpoint_scope(policy=offload(min_bytes=least)) as scope:
        y = x[:100].tanh().sin()[0] + (x * 2)[:5].sin().sum()
    assert shapes(y) == found
    y.backward()
    assert scope.stats.ops_replayed == 0


@pytest.mark.parametrize(("first", "second"), [(0, "1 GiB"), ("1 GiB", 0)])
def test_of_two_places_the_first_one_counts(first, second):
    """For what autograd saves, what is kept by hand, and inputs."""
    policy = offload(min_bytes=first, inputs=True) | offload(min_bytes=second, inputs=True)
    x, big = torch.rand(1000).requires_grad_(), torch.rand(1000)
    with checkpoint_scope(policy=policy):
        y = keep((x * big).sin()).exp()
    assert len(offloaded(y)) == (3 if first == 0 else 0)
    y.sum().backward()


@pytest.mark.parametrize("choose", [lambda: save_ops(SIN), lambda: save_tagged("a")])
@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_choices_that_keep_a_value_the_first_one_says_where(choose, is_first):
    here, there = choose(), offload(choose(), min_bytes=0)
    with checkpoint_scope(policy=there | here if is_first else here | there):
        y = tag(torch.rand(1000).requires_grad_().sin(), "a").exp()
    assert len(offloaded(y)) == is_first
    y.sum().backward()


@pytest.mark.parametrize("kept", [None, auto()])
def test_expanded_tensors_come_back_expanded(kept):
    policy = offload(kept, min_bytes=0, inputs=True)
    x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()

    def step(region):
        y = region(lambda x, y: (x.expand(4, 5, 8) * y).sin())(x, x * 1)
        first = torch.autograd.grad(y.sum(), x, create_graph=True)
        return bits([y, *first, *torch.autograd.grad(first[0].sin().sum(), x)])

    assert step(lambda fn: scoped(fn, policy)) == step(lambda fn: fn)


def branches(x):
    stem = x.sin().exp()
    return [(stem.tanh() * i).sin().exp().sum() for i in (1, 2, 3)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("policy", [offload(), offload(auto()), offload([ADDMM])], ids=str)
def test_on_cuda(policy):
    layers = nn.ModuleList(nn.Linear(1024, 1024, device="cuda") for _ in range(16))
    x = torch.randn(4096, 1024, device="cuda").requires_grad_()

    steps = [each for layer in layers for each in (layer, torch.tanh, torch.sin)]
    run = lambda x: through(steps, x).square().sum()

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
