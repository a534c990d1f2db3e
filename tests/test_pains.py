"""What users of checkpointing complain about, one test or more for each complaint, by its number in the project's list.

'Plain' is the same program without checkpointing. Everything holds for rerun and for replay.
"""

import asyncio
import contextlib
import contextvars
import copy
import gc
import inspect
import io
import logging
import pickle
import re
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import bits, count, in_thread
from oracle import c as rerun
from oracle import r as replay
from oracle import s as scope
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from checkpointing import (
    CheckpointError,
    MismatchError,
    checkpoint_scope,
    checkpointed,
    disabled,
    forward_only,
    is_recomputing,
    keep,
    opaque,
    save_ops,
)
from checkpointing.torch_compat import GraphExecGroup, checkpoint, set_checkpoint_early_stop


def plain(fn, **options):
    """No region."""
    return fn


DOOR = pytest.mark.parametrize("door", [rerun, replay, scope])


def leaf(*shape):
    """Small integers, the same each time."""
    shape = torch.Size(shape or (4, 4))
    return (torch.arange(float(shape.numel())) % 5 - 2).view(shape).requires_grad_()


def same(door, program):
    """A program leaves the same bits behind with regions as without."""

    def run(door):
        torch.manual_seed(0)
        result = program(door)
        return [bits(t) for t in result], bits(torch.get_rng_state())

    assert run(door) == run(plain)


class Token:
    """Something to be watched."""


# ---- 1


class Doubling(TorchFunctionMode):
    """Changes what the sine is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.sin else result


SCALE = contextvars.ContextVar("SCALE", default=1.0)


@contextlib.contextmanager
def scaled():
    token = SCALE.set(3.0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    SCALE.reset(token)


def attend(x):
    """Other kernels save other tensors."""
    q = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(q.sin(), q, q.exp(), is_causal=True).cos()


GLOBAL_STATE = {
    "function mode": (Doubling, lambda x: x.sin().exp()),
    "context variable, default dtype": (scaled, lambda x: (x * SCALE.get() * torch.full((4,), 0.1)).sin().exp()),
    "attention kernel": (lambda: sdpa_kernel(SDPBackend.MATH), attend),
}


@pytest.mark.parametrize("state", GLOBAL_STATE)
@DOOR
def test_1_global_state_is_lost_in_recompute(door, state):
    """Gone when backward runs. (All of it: `test_ambient.py`.)"""
    around, fn = GLOBAL_STATE[state]

    def program(door):
        x = leaf()
        with around():
            y = door(fn)(x)
        in_thread(y.sum().backward)
        return y, x.grad

    same(door, program)


# ---- 2


@pytest.mark.parametrize("where", ["module", "function"])
@DOOR
def test_2_batch_norm_is_updated_twice(door, where):
    """One batch is counted as one; running statistics as plain."""

    def program(door):
        norm, x = nn.BatchNorm1d(4), leaf(6, 4)
        y = door(norm if where == "module" else lambda x: norm(x.sin()).exp())(x)
        y.square().sum().backward()
        assert norm.num_batches_tracked == 1
        return y, x.grad, norm.weight.grad, *norm.buffers()

    same(door, program)


@DOOR
def test_2_spectral_norms_vectors_are_updated_twice(door):
    """And its gradients are those of the vectors of the forward."""

    def program(door):
        linear, x = spectral_norm(nn.Linear(4, 4)), leaf()
        for _ in range(2):
            door(lambda x: linear(x).sin())(x).sum().backward()
        return x.grad, *(p.grad for p in linear.parameters()), *linear.buffers()

    same(door, program)


# ---- 3


@pytest.mark.parametrize("backward", ["inside", "outside"])
@DOOR
def test_3_autocast_caches_a_weight_that_two_regions_share(door, backward):
    """The second region finds in the cache what its recompute will not find."""

    def program(door):
        linear, x = nn.Linear(4, 4), leaf()
        with torch.autocast("cpu", torch.bfloat16):
            y = door(lambda x: linear(x).sin())(x)
            y = door(lambda x: linear(x).exp())(y)
            loss = linear(y).float().sum()
            if backward == "inside":
                loss.backward()
        if backward == "outside":
            loss.backward()
        return y, x.grad, linear.weight.grad, linear.bias.grad

    same(door, program)


# ---- 4


@DOOR
def test_4_side_effects_happen_twice(door):
    """`is_recomputing()` tells, `forward_only` is not called again, and replay runs no Python at all."""
    ran, noted, told = [], [], []
    note = forward_only(noted.append)

    def fn(x):
        ran.append(1)
        note(1)
        told.append(is_recomputing())
        return x.sin().exp()

    door(fn)(leaf()).sum().backward()
    assert noted == [1]
    assert ran == ([1, 1] if door is rerun else [1])
    assert told == ([False, True] if door is rerun else [False])
    assert not is_recomputing()


# ---- 5


@DOOR
def test_5_routing_differs_in_recompute(door):
    """A decision that is kept stands, though what it was made from comes out differently."""
    calls = []

    def experts(x):
        calls.append(1)
        scores = x.detach().sum(1)
        if len(calls) > 1:
            scores = -scores  # as with a kernel that rounds differently
        chosen = keep(scores.topk(2).indices)
        return (x[chosen] * (1 + chosen[:, None])).sin().exp()

    x = leaf()
    y = door(experts)(x)
    y.sum().backward()
    calls.clear()
    want = leaf()
    experts(want).sum().backward()
    assert bits(x.grad) == bits(want.grad)


# ---- 6


def test_6_only_metadata_are_checked():
    """What differs in its values only is found on request, and named; by default nothing is computed for it."""
    s = [0.0]

    def fn(z):
        s[0] += 1
        return (z * s[0]).sin()

    y = checkpointed(fn, determinism_check="values", name="mine")(leaf())
    with pytest.raises(
        CheckpointError, match=r"region 'mine'(.|\n)*position 0(.|\n)*MulBackward0(.|\n)*\(z \* s\[0\]\)"
    ):
        y.sum().backward()
    assert count(lambda: checkpointed(fn)(leaf())) == count(lambda: fn(leaf()))


# ---- 7

DROPOUT = nn.Dropout(0.5)

RANDOM = {
    "closure": lambda x, **_: (lambda: F.dropout(DROPOUT(x.sin()), 0.5).exp())(),
    "keyword": lambda x, p, **_: F.dropout(x.sin(), p["in"][0]).exp(),
    "nested": lambda x, p, **_: nn.Sequential(nn.Sequential(DROPOUT, nn.Tanh()), DROPOUT)(x * p["in"][0]).exp(),
    "generator": lambda x, g, **_: (x.sin() * torch.rand(4, 4, generator=g)).exp().sin(),
}


@pytest.mark.parametrize("random", RANDOM)
@DOOR
def test_7_random_numbers_differ_in_recompute(door, random):
    """Gradients and all streams afterwards as plain. (A second type of device: `test_rng.py`.)"""

    def program(door):
        x, g = leaf(), torch.Generator().manual_seed(3)
        y = door(RANDOM[random])(x, p={"in": [0.5]}, g=g)
        torch.rand(3)
        torch.rand(3, generator=g)
        y.sum().backward()
        return y, x.grad, g.get_state()

    same(door, program)


# ---- 8


class SavesItsOutputLast(torch.autograd.Function):
    """As many custom functions do."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("caught", [Exception, BaseException])
@DOOR
def test_8_early_stop(door, caught, no_gc):
    """The user's handler sees nothing of it, nothing leaks behind a custom Function, the last product is not redone."""
    seen = []

    def fn(x, token):
        for _ in range(3):
            try:
                x = SavesItsOutputLast.apply(x.sin())
            except caught as error:
                seen.append(type(error))
                x = x * 1
        return x

    def program(door):
        x, token = leaf(), Token()
        ref = weakref.ref(token)
        y = door(fn)(x, token)
        del token
        y.sum().backward()
        result = y.detach(), x.grad
        del y
        assert ref() is None
        return result

    same(door, program)
    assert not [error for error in seen if issubclass(error, Exception)]
    w = leaf()
    y = door(lambda x: x.sin() @ w)(leaf()).sum()
    assert count(y.backward).get("mm", 0) == 2  # the two of backward


# ---- 9


class ReadsTwice(torch.autograd.Function):
    """As kernels of state-space models do."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        _, y = ctx.saved_tensors
        x, _ = ctx.saved_tensors
        return grad * y, grad * x


@DOOR
def test_9_saved_tensors_are_read_twice(door):
    """As plain code may."""

    def program(door):
        x = leaf()
        y = door(lambda x: ReadsTwice.apply(x.sin(), x.exp()).cos())(x)
        y.sum().backward()
        return y, x.grad

    same(door, program)


# ---- 10


@DOOR
def test_10_offload_and_checkpoint_together(door):
    """Under `save_on_cpu`-like hooks, inputs and kept tensors are offloaded, parameters aren't."""
    p, base, packed = nn.Parameter(leaf().detach()), leaf(), []

    def fn(x):
        return keep(x @ p).square() @ p

    def pack(t):
        packed.append(t.data_ptr())
        return t.detach().clone()

    x = base * 2
    with saved_tensors_hooks(pack, lambda t: t):
        y = door(fn)(x)
    assert len(packed) == 2  # the input and the kept product
    assert x.data_ptr() in packed
    assert p.data_ptr() not in packed
    have = torch.autograd.grad(y.sum(), [base, p])
    want = torch.autograd.grad(fn(base * 2).sum(), [base, p])
    assert list(map(bits, have)) == list(map(bits, want))


# ---- 11


@pytest.fixture(scope="module")
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def blocks():
    """Two blocks with whole numbers for weights, and an input."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(((torch.arange(float(p.numel())) + i) % 3 - 1).view_as(p))
    return model, leaf(2, 4)


def sharded(model, **options):
    """Each block, then all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def gradients_of(model, x):
    return [bits(g.to_local() if hasattr(g := p.grad, "to_local") else g) for p in model.parameters()], bits(x.grad)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_11_fully_sharded_around_regions(group, backend, mixed):
    """Two forwards before one backward, with mixed precision, too."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def run(wrap):
        model, x = blocks()
        if wrap:
            for layer in model:
                layer.forward = checkpointed(layer.forward, backend=backend)
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
        model = sharded(model, **options)
        (model(x).float().sum() + model(x * 2).float().sum()).backward()
        return gradients_of(model, x)

    assert run(True) == run(False)


# ---- 12


@pytest.mark.filterwarnings("ignore:backend='reentrant' is deprecated:FutureWarning")
def test_12_ddp_with_the_reentrant_backend(group):
    """A block used twice: the error says what to use instead; that works."""

    class Twice(nn.Module):
        def __init__(self, backend):
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)
            self.run = checkpointed(self.block, backend=backend)

        def forward(self, x):
            return self.run(self.run(self.first(x)).relu())

    for backend in ("rerun", "replay", "reentrant"):
        model = nn.parallel.DistributedDataParallel(Twice(backend))
        with (
            pytest.raises(CheckpointError, match=r"DistributedDataParallel .*Use backend='rerun'")
            if backend == "reentrant"
            else contextlib.nullcontext()
        ):
            model(leaf()).sum().backward()


# ---- 13


@pytest.mark.filterwarnings("ignore:backend='reentrant' is deprecated:FutureWarning")
def test_13_frozen_inputs_lose_the_gradients_of_parameters():
    """The reentrant backend can't; it says why, before anything is lost. The others can."""
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)
    for door in (rerun, replay, scope):
        door(lambda x: linear(x).sin())(x).sum().backward()
    assert linear.weight.grad is not None
    with pytest.raises(CheckpointError, match="none of the inputs requires grad"):
        checkpointed(linear, backend="reentrant")(x)


# ---- 14


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "dropped"])
@DOOR
def test_14_a_region_that_saves_its_own_output_leaks(door, backward, no_gc):
    """Nothing but reference counts is needed."""
    x, token = leaf(), Token()
    ref = weakref.ref(token)
    y = door(lambda x, token: x.sin().exp())(x, token)
    del token
    if backward:
        y.sum().backward()
    del y
    assert ref() is None


@DOOR
def test_14_memory_grows_with_the_steps(door, no_gc):
    """A thousand steps, with buffers and random numbers in them."""
    model, x = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)), leaf()
    region = door(lambda x: model(x.sin()).exp())

    def steps(n):
        for _ in range(n):
            region(x).sum().backward()
            x.grad = None

    steps(20)
    before = len(gc.get_objects())
    steps(1000)
    assert len(gc.get_objects()) - before < 50


# ---- 15


@pytest.mark.filterwarnings("ignore")  # what the compiler says is not ours
@pytest.mark.parametrize("door", [rerun, scope])
def test_15_compiled_models(door):
    """`@checkpointed` compiles without a graph break; a scope is right, whatever it costs."""
    torch._dynamo.reset()
    linear = nn.Linear(4, 4)

    def program(door):
        x = leaf()
        model = lambda x: door(lambda x: linear(x).relu().square())(x * 2) + 1  # noqa: E731
        if door is not plain:
            model = torch.compile(model, backend="aot_eager", fullgraph=door is rerun)
        y = model(x)
        y.sum().backward()
        gradient, linear.weight.grad = linear.weight.grad, None
        return y, x.grad, gradient

    same(door, program)


# ---- 16


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad @ y.t(), x.t() @ grad


@pytest.mark.parametrize("matmul", [torch.mm, Matmul.apply], ids=["operator", "custom Function"])
@pytest.mark.parametrize("nested", [False, True])
def test_16_selective_saving(matmul, nested):
    """A policy sees calls: the first of two products is kept; an inner region obeys it, too."""
    mms = []

    def first(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.mm.default:
            mms.append(op)
            return len(mms) == 1
        return False

    def inner(x):
        return matmul(matmul(x, x).relu(), x).relu().square()

    x = leaf()
    region = checkpointed(replay(inner) if nested else inner, policy=first)
    y = region(x)
    mms.clear()
    ran = count(y.sum().backward)
    assert ran["mm"] == 4 + 1  # of backward, and the second product
    assert bits(x.grad) == bits(torch.autograd.grad(inner(x).sum(), x)[0])


# ---- 17


def test_17_in_place_with_selective_saving():
    """What is kept is what the product was, not what was made of it."""

    def program(door):
        x, y = leaf(), leaf()
        torch.autograd.backward(door(lambda x, y: torch.selu_(x @ y).square())(x, y).sum())
        return x.grad, y.grad

    same(lambda fn: fn if fn is plain else checkpointed(fn, policy=save_ops(torch.ops.aten.mm.default)), program)


# ---- 18


@pytest.mark.parametrize("place", ["kwargs['z']['a']", "kwargs['z']['b'][0]"])
@DOOR
def test_18_an_input_is_changed_later(door, place):
    """An error that names it (replay: what read it), as autograd's own for plain code."""
    z = {"a": torch.ones(4), "b": [torch.ones(4)]}
    y = door(lambda x, z: (x * z["a"] * z["b"][0]).sin())(leaf(), z=z)
    (z["a"] if place.endswith("['a']") else z["b"][0]).add_(1)
    match = place.replace("[", r"\[").replace("]", r"\]") if door is rerun else "float32 tensor of shape"
    with pytest.raises(CheckpointError, match=rf"{match}.*changed in place"):
        y.sum().backward()


@DOOR
def test_18_a_closed_over_tensor_is_changed_inside(door):
    """By the region itself: as plain under replay, an error that names it under rerun."""

    def program(door):
        x, statistics = leaf(), torch.zeros(4)

        def fn(x):
            statistics.mul_(0.5).add_(x.detach().sum(0))
            return (x - statistics).square()

        for _ in range(3):
            y = door(fn)(x)
            y.sum().backward()
        return y, x.grad, statistics

    if door is rerun:
        with pytest.raises(CheckpointError, match=r"'statistics'.*changed in place.*backend='replay'"):
            program(door)
    else:
        same(door, program)


# ---- 19


@DOOR
def test_19_torch_func_over_a_region(door):
    """It runs, without a region, and warns at most once."""

    def fn(x):
        return x.square().square().sum()

    x = leaf().detach()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        have = torch.func.grad(door(fn))(x), torch.func.vmap(door(fn))(x), torch.func.jacrev(door(fn))(x)
    assert len([w for w in caught if "torch.func" in str(w.message)]) <= 1
    want = torch.func.grad(fn)(x), torch.func.vmap(fn)(x), torch.func.jacrev(fn)(x)
    assert list(map(bits, have)) == list(map(bits, want))


# ---- 20


def test_20_two_threads_run_backward_over_one_frame():
    """One recompute for each graph task."""
    calls = []

    def fn(x):
        calls.append(threading.get_ident())
        return x.sin().exp().cos()

    x = leaf()
    y = checkpointed(fn)(x)
    want = torch.autograd.grad(fn(x).sum(), x)[0]
    calls.clear()
    grads, barrier = [], threading.Barrier(2)

    def backward():
        barrier.wait()
        grads.append(torch.autograd.grad(y.sum(), x, retain_graph=True)[0])

    threads = [threading.Thread(target=backward) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [bits(g) for g in grads] == [bits(want)] * 2
    assert len(calls) == len(set(calls)) == 2


def is_a_region():
    """Whether regions are made here."""
    return "sin" in count(checkpointed(lambda x: x.sin().exp())(leaf()).sum().backward)


def stops_early():
    """Whether regions of the drop-in do."""
    runs = []
    checkpoint(lambda x: (x.square().square(), runs.append(1))[0], leaf(), use_reentrant=False).sum().backward()
    return len(runs) == 1


@pytest.mark.parametrize(
    ("switch", "kind"), [(disabled, is_a_region), (lambda: set_checkpoint_early_stop(False), stops_early)]
)
def test_20_switches_show_in_other_threads_and_tasks(switch, kind):
    """Each is of one thread and one context."""
    seen = {}
    with switch():
        in_thread(lambda: seen.update(thread=kind()))
        assert not kind()

    async def one(started, finish):
        with switch():
            started.set()
            await finish.wait()
            seen["task"] = kind()

    async def other(started, finish):
        await started.wait()
        seen["other task"] = kind()
        finish.set()

    async def main():
        events = asyncio.Event(), asyncio.Event()
        await asyncio.gather(one(*events), other(*events))

    asyncio.run(main())
    assert seen == {"thread": True, "task": False, "other task": True}


# ---- 21


@DOOR
def test_21_errors_flood(door):
    """Region, slot, operator and line by default; logs of all operators on request only."""
    x, z = leaf(), torch.ones(4)
    texts = []
    for debug in (False, True):
        y = door(lambda x, z: (x * z).sin().exp(), debug=debug, name="mine")(x, z)
        z.add_(1)
        with pytest.raises(CheckpointError) as caught:
            y.sum().backward()
        texts.append(str(caught.value))
    assert texts[0].startswith(f"region 'mine' (entered at {__file__}:") or door is scope
    assert texts[0].count("\n") < 8
    assert "Operations executed" not in texts[0]
    assert "Operations executed" in texts[1]


# ---- 22


def test_22_what_is_held():
    """By a scope, in bytes: what autograd would have held, what is held for the recompute, what is kept."""
    x = leaf(10, 10)
    with checkpoint_scope() as held:
        y = keep((x * 2).sin()).exp().cos()
    assert (held.stats.bytes_saved, held.stats.bytes_kept, held.stats.bytes_held) == (800, 400, 400)
    del y


# ---- 23


def python_calls(run):
    """How many functions are called, Python's and C's."""
    calls = [0]

    def profile(frame, event, argument):
        calls[0] += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@DOOR
def test_23_a_region_costs_even_without_gradients(door, mode):
    """With grad mode off nothing of a region is made: no hooks, no operators, a few calls of functions."""
    x, hooks = leaf(), []

    def fn(x):
        hooks.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
        return x.sin().exp()

    with mode():
        assert count(lambda: door(fn)(x)) == {"sin": 1, "exp": 1}
        region = door(fn)
        assert python_calls(lambda: region(x)) < python_calls(lambda: fn(x)) + 30
    assert hooks == [None] * 3


# ---- 24


def everything():
    """State of this thread that must not change."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        bits(torch.get_rng_state()),
        is_recomputing(),
        SCALE.get(),
    )


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["body", "recompute", "hook", "tensor hook"])
@DOOR
def test_24_an_exception_leaves_state_behind(door, where, error):
    """Wherever it comes from; that of a recompute says of which region."""
    calls = []

    def fail(*_):
        raise error("reason")

    def fn(x):
        calls.append(1)
        y = F.dropout(x.sin(), 0.5) if where != "body" else x.sin()
        if where == "tensor hook":
            y.register_hook(fail)
        if where == "body" or (where == "recompute" and len(calls) > 1):
            fail()
        return y.exp().sin()

    x, state = leaf() * 2, everything()
    unpack = fail if where == "hook" else lambda t: t
    with contextlib.ExitStack() as around:
        around.enter_context(torch.autocast("cpu", torch.bfloat16))
        around.enter_context(saved_tensors_hooks(lambda t: t, unpack))
        run = door(fn)
        if where == "body":
            with pytest.raises(error, match="reason"):
                run(x)
        else:
            y = run(x)
    if where == "body":
        assert everything() == state
    elif where == "recompute" and door is not rerun:
        y.sum().backward()  # replay does not come by
    else:
        state = everything()
        with pytest.raises(error, match="reason") as caught:
            y.sum().backward()
        assert everything() == state
        if where == "recompute":
            assert re.search(f"recompute of region .*{__file__}:", "\n".join(caught.value.__notes__))


# ---- 25


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 0, 3, 1)])
@DOOR
def test_25_the_order_of_unpacking_is_relied_on(door, order):
    """Saved tensors are read in any order, by whomever; each read gives the value."""

    def program(door):
        x, outputs = leaf(), []

        def fn(x):
            for op in (torch.sin, torch.exp, torch.tanh, torch.cos, torch.sigmoid):
                x = op(x)
                outputs.append(x)
            return x

        y = door(fn)(x)
        nodes = [out.grad_fn for out in outputs]
        reads = {n: getattr(nodes[n], "_saved_result", None) for n in order}
        values = [(nodes[n]._saved_self if reads[n] is None else reads[n]).clone() for n in sorted(order)]
        return *values, torch.autograd.grad(y.sum(), x)[0]

    same(door, program)


# ---- 26


@DOOR
def test_26_parameters_are_resized_to_nothing_and_back(door):
    """As ZeRO does it, in the region and around it: as plain, no mismatch of metadata."""

    def program(door):
        weight, x = nn.Parameter(leaf().detach().clone()), leaf()
        full = weight.data.clone()

        def fn(x):
            weight.data = full
            y = (x.square() @ weight).square()
            if door is not plain:
                weight.data = torch.empty(0)
            return y

        y = door(fn)(x).sum()
        if door is not rerun:
            weight.data = full  # replay runs no Python: who takes the weight away brings it back
        y.backward()
        weight.data = full
        return y, x.grad, weight.grad

    same(door, program)


# ---- 27


def test_27_several_backwards_share_one_recompute():
    """Over separate parts of one region, under a `GraphExecGroup`."""
    calls = []

    def fn(x, y):
        calls.append(1)
        return x.sin().exp(), y.sin().exp()

    x, y = leaf(), leaf()
    a, b = checkpoint(fn, x, y, use_reentrant=False)
    with GraphExecGroup():
        a.sum().backward()
        b.sum().backward()
    assert len(calls) == 2
    assert bits(x.grad) == bits(y.grad) == bits(torch.autograd.grad(fn(x, y)[0].sum(), x)[0])


# ---- 28


@pytest.mark.parametrize("wrap", [lambda m: setattr(m.block, "forward", checkpointed(m.block.forward)), None])
def test_28_wrappers_change_names(wrap):
    """`state_dict` keys, `isinstance` and module names are what they were."""
    want, model = Model(Block), Model(Block if wrap else CheckpointedBlock)
    if wrap:
        wrap(model)
    assert list(model.state_dict()) == list(want.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in want.named_modules()]
    assert isinstance(model.block, Block)
    want.load_state_dict(model.state_dict())


# ---- 29


def test_29_a_buffer_is_filled_outside_the_dispatcher():
    """In `opaque()` it is kept, not recomputed to garbage."""

    def program(door):
        x = leaf()

        def fn(x):
            table = torch.empty(4)
            with opaque():
                table.numpy()[:] = [1, 2, 3, 4]
            return (x * table).square()

        door(fn)(x).sum().backward()
        return (x.grad,)

    same(scope, program)
    same(replay, program)


@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_29_a_later_write_that_no_version_shows(backend):
    """`determinism_check="values"` finds it."""
    table = torch.ones(4)
    y = checkpointed(lambda x: (x * table).square(), backend=backend, determinism_check="values")(leaf())
    table.numpy()[:] = 2
    with pytest.raises(MismatchError, match="position"):
        y.sum().backward()


# ---- 30


def generator(x):
    yield x


async def coroutine(x):
    return x


async def generates(x):
    yield x


@pytest.mark.parametrize("backend", ["rerun", "replay"])
@pytest.mark.parametrize("wrong", [generator, coroutine, generates, Token, 3], ids=repr)
def test_30_what_cannot_be_a_region_fails_late(wrong, backend):
    """At decoration, and in words."""
    with pytest.raises(TypeError, match="checkpointed") as caught:
        checkpointed(wrong, backend=backend)
    if inspect.isfunction(wrong):
        assert wrong.__name__ in str(caught.value)


# ---- 31


class Config:
    """An object with a large dict."""

    def __init__(self, n):
        self.table = {f"key {i}": [i] for i in range(n)}
        self.hidden = 4


def logger(n):
    """In a tree of its own."""
    manager = logging.Manager(logging.RootLogger(logging.WARNING))
    for i in range(n // 10):
        manager.loggerDict[f"a.{i}"] = [logging.PlaceHolder(manager.root)] * 10
    return manager.getLogger("a.b")


class Trainer:
    """A plain object with a module, a list of words and a list of lists."""

    def __init__(self, n, block):
        self.words, self.batches, self.block = [f"word {i}" for i in range(n)], [[i] for i in range(n)], block

    def step(self, x):
        return self.block(x)


LOGGER = CONFIG = None


class Layer(nn.Module):
    """Names a logger and a configuration, as transformers' do."""

    def __init__(self, config):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), config

    def forward(self, x, config=None):
        if LOGGER is not None and CONFIG is not None and self.config.hidden == 0:
            LOGGER.warning(CONFIG.table)
        return self.linear(x).relu()


def test_31_what_a_region_could_reach_costs_nothing():
    """As many calls of functions, forward and backward, however much there is around it."""

    def calls(n, way):
        global LOGGER, CONFIG
        LOGGER, CONFIG = logger(n), Config(n)
        layer, x = Layer(Config(n)), leaf()
        trainer = Trainer(n, layer)
        region = {
            "module": lambda: rerun(layer)(x),
            "method": lambda: rerun(layer.forward)(x),
            "method of a trainer": lambda: rerun(trainer.step)(x),
            "lambda in it": lambda: rerun(lambda x: trainer.block(x))(x),
            "argument": lambda: rerun(lambda x, trainer, config: trainer.step(x))(x, trainer, config=CONFIG),
        }[way]
        try:
            region().sum().backward()
            return python_calls(lambda: region().sum().backward())
        finally:
            LOGGER = CONFIG = None

    for way in ("module", "method", "method of a trainer", "lambda in it", "argument"):
        assert calls(50_000, way) == calls(0, way), way


# ---- 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x).relu().square()


@checkpointed
class CheckpointedBlock(Block):
    pass


class MethodBlock(Block):
    @checkpointed
    def forward(self, x):
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, kind, backend=None):
        super().__init__()
        self.block = kind()
        if backend is not None:
            self.run = checkpointed(self.block, backend=backend)

    def forward(self, x):
        return getattr(self, "run", self.block)(x * 2)


def with_forward(backend):
    """The block's `forward` replaced on the instance."""
    model = Model(Block)
    model.block.forward = checkpointed(model.block.forward, backend=backend)
    return model


WRAPPED = {
    "decorated class": lambda: Model(CheckpointedBlock),
    "decorated method": lambda: Model(MethodBlock),
    "instance in an attribute": lambda: Model(Block, "rerun"),
    "instance in an attribute, replay": lambda: Model(Block, "replay"),
    "forward of the instance": lambda: with_forward("rerun"),
    "forward of the instance, replay": lambda: with_forward("replay"),
}


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "torch.save": saved_and_loaded,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("how", COPIES)
def test_32_copies_run_their_own_parameters(wrapped, how):
    """And get the gradients; the original's are left alone, and it still runs its own."""
    model = WRAPPED[wrapped]()
    twin, want = COPIES[how](model), Model(Block)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    want.load_state_dict(twin.state_dict())
    x, plain_x = leaf(), leaf()
    twin(x).sum().backward()
    want(plain_x).sum().backward()
    assert bits(x.grad) == bits(plain_x.grad)
    assert [bits(p.grad) for p in twin.parameters()] == [bits(p.grad) for p in want.parameters()]
    assert all(p.grad is None for p in model.parameters())
    assert (model.block.calls, twin.block.calls) == (0, 1)
    assert "relu" in count(model(leaf()).sum().backward)
    if not (wrapped.startswith("forward") and how in ("torch.save", "pickle")):  # pickled by name: the class's again
        assert "relu" in count(twin(leaf()).sum().backward)


# ---- 33


@pytest.mark.parametrize("how", ["module", "lambda", "method", "drop-in"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_33_sharded_first_and_regions_second(group, how, frozen, backend):
    """A region around a module that FSDP2 has sharded already."""

    def run(wrap):
        model, x = blocks()
        if frozen:
            model[0].requires_grad_(False)
        model = sharded(model)
        y = x * 2
        for layer in model:
            if not wrap:
                y = layer(y)
            elif how == "drop-in":
                y = checkpoint(layer, y, use_reentrant=False)
            else:
                fn = {"module": layer, "lambda": lambda y: layer(y), "method": layer.__call__}[how]  # noqa: B023
                y = checkpointed(fn, backend=backend)(y)
        y.sum().backward()
        return [g if g is None else bits(g.to_local()) for g in (p.grad for p in model.parameters())], bits(x.grad)

    assert run(True) == run(False)


# ---- 34


COLLECTED = contextvars.ContextVar("COLLECTED", default=None)


@DOOR
def test_34_collectors_in_context_variables(door, no_gc):
    """Nothing is collected twice; neither what was collected nor what a recompute collects is kept alive."""
    made = []

    def layer(x):
        y = x.sin()
        made.append(weakref.ref(y))
        COLLECTED.get()["attentions"][0].append(y)
        return y.exp()

    def run():
        collected = {"attentions": [[]], "names": {"a"}}
        COLLECTED.set(collected)
        x = leaf()
        y = x
        for _ in range(3):
            y = door(layer)(y)
        kept = collected["attentions"][0]
        assert [ref() for ref in made] == kept
        y.sum().backward(retain_graph=True)
        assert len(kept) == 3
        assert all(ref() is None for ref in made[3:])
        kept.clear()
        assert not any(ref() is not None for ref in made)
        y.sum().backward()  # whose recompute needs none of them
        assert kept == []
        assert not any(ref() is not None for ref in made)

    contextvars.copy_context().run(run)


def test_34_what_a_recompute_reads_of_a_collector_is_what_the_forward_read():
    """Lists, dicts and sets at any depth are those of the forward, as copies."""
    seen = []

    def layer(x):
        collected = COLLECTED.get()
        seen.append(copy.deepcopy(collected))
        collected["n"][0] += 1
        collected["deep"]["set"].add(collected["n"][0])
        return (x * collected["n"][0]).square()

    def run():
        COLLECTED.set(collected := {"n": [0], "deep": {"set": set()}})
        x = leaf()
        first, second = checkpointed(layer)(x), checkpointed(layer)(x)
        collected["n"][0] = 7
        second.sum().backward()
        first.sum().backward()
        assert collected == {"n": [7], "deep": {"set": {1, 2}}}
        assert COLLECTED.get() is collected
        assert seen == [seen[0], seen[1], seen[1], seen[0]]
        assert bits(x.grad) == bits((2 * x + 8 * x).detach())

    contextvars.copy_context().run(run)


# ---- 35


@DOOR
def test_35_a_frozen_base_with_adapters(door):
    """An input that `requires_grad_()` has made a leaf goes through the hooks around, as torch's does."""

    def program(door):
        frozen, adapter = nn.Linear(4, 4).requires_grad_(False), nn.Parameter(leaf().detach())
        hidden = (leaf().detach() + 1).requires_grad_()
        with save_on_cpu():
            y = door(lambda x: (frozen(x).relu() + x @ adapter).square())(hidden)
        y.sum().backward()
        return y, hidden.grad, adapter.grad

    same(door, program)
    packed, x, p = [], leaf(), nn.Parameter(leaf().detach())
    with saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        door(lambda x: (x @ p).square())(x)
        with_torch = len(packed)
        torch.utils.checkpoint.checkpoint(lambda x: (x @ p).square(), x, use_reentrant=False)
    assert packed == [x.data_ptr()] * 2
    assert with_torch == 1


# ---- 37


class Cache:
    """As transformers' `DynamicCache`: an object with layers, which grow."""

    def __init__(self):
        self.layers = [Token(), Token()]
        for layer in self.layers:
            layer.keys = torch.zeros(0, 4)

    def update(self, keys, i):
        self.layers[i].keys = torch.cat([self.layers[i].keys, keys])
        return self.layers[i].keys


@pytest.mark.parametrize("view", [False, True])
@DOOR
def test_37_a_cache_is_grown_inside_a_region(door, view):
    """Rerun: an error of a few lines that names the argument and says what helps; replay handles it."""

    def attend(x, past):
        keys = past.update(x * 2, 1)
        return (x @ keys.t()).square() if view else keys.square()

    def program(door):
        cache, x = Cache(), leaf()
        y = door(attend)(x, past=cache)
        y.sum().backward()
        return x.grad, cache.layers[1].keys.detach()

    if door is not rerun:
        same(door, program)
        return
    with pytest.raises(MismatchError) as caught:
        program(door)
    text = str(caught.value)
    for words in ("kwargs['past'] was changed by the region itself", "use_cache=False", "backend='replay'"):
        assert words in text
    assert text.count("\n") < 16
    assert len(text) < 2000
