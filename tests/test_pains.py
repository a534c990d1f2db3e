"""What users of checkpointing complain about, one test for each complaint, by its number in the project's list.

'Plain' is the same program without checkpointing. Everything holds for rerun and for replay.
"""

import asyncio
import contextlib
import contextvars
import gc
import inspect
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import bits, count, in_thread
from oracle import c as rerun
from oracle import r as replay
from oracle import s as scope
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm
from torch.overrides import TorchFunctionMode

from checkpointing import (
    CheckpointError,
    _api,
    checkpointed,
    disabled,
    forward_only,
    is_recomputing,
    keep,
)
from checkpointing.torch_compat import checkpoint, set_checkpoint_early_stop


def plain(fn, **options):
    """No region."""
    return fn


DOOR = pytest.mark.parametrize("door", [rerun, replay, scope])


def leaf(*shape):
    """The same each time."""
    shape = torch.Size(shape or (4, 4))
    return torch.linspace(-1, 1, shape.numel()).view(shape).clone().requires_grad_()


def same(door, program):
    """A program leaves the same bits behind with regions as without."""

    def run(door):
        torch.manual_seed(0)
        result = program(door)
        return [bits(t) for t in result], bits(torch.get_rng_state())

    assert run(door) == run(plain)


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
    yield
    SCALE.reset(token)


@contextlib.contextmanager
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def attend(x):
    """Other kernels save other tensors."""
    q = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(q.sin(), q, q.exp(), is_causal=True).cos()


GLOBAL_STATE = {
    "function mode": (Doubling, lambda x: x.sin().exp()),
    "context variable": (scaled, lambda x: (x * SCALE.get()).sin().exp()),
    "default dtype": (in_double, lambda x: (x * torch.full((4,), 0.1)).sin().exp()),
    "attention kernel": (lambda: sdpa_kernel(SDPBackend.MATH), attend),
}


@pytest.mark.parametrize("state", GLOBAL_STATE)
@pytest.mark.parametrize("backward", ["here", "in another thread"])
@DOOR
def test_1_global_state_is_lost_in_recompute(door, state, backward):
    """Gone when backward runs."""
    around, fn = GLOBAL_STATE[state]

    def program(door):
        x = leaf()
        with around():
            y = door(fn)(x)
        (in_thread if backward != "here" else lambda f: f())(y.sum().backward)
        return y, x.grad

    same(door, program)


# ---- 2


@pytest.mark.parametrize("where", ["module", "function", "plain tensors"])
@DOOR
def test_2_batch_norm_is_updated_twice(door, where):
    """One batch is counted as one; running statistics as plain."""

    def program(door):
        norm, x = nn.BatchNorm1d(4), leaf(6, 4)
        mean, var = torch.zeros(4), torch.ones(4)
        fns = {
            "module": norm,
            "function": lambda x: norm(x.sin()).exp(),
            "plain tensors": lambda x: norm(F.batch_norm(x.sin(), mean, var, training=True)).exp(),
        }
        y = door(fns[where])(x)
        y.square().sum().backward()
        assert norm.num_batches_tracked == 1
        return y, x.grad, norm.weight.grad, *norm.buffers(), mean, var

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


def test_6_only_metadata_are_checked_of_a_tensor_that_changes():
    """The same with a tensor: it is named."""
    s = torch.zeros(1)

    def fn(z):
        s[0] += 1
        return (z * s[0]).sin()

    y = checkpointed(fn, determinism_check="values")(leaf())
    with pytest.raises(CheckpointError, match=r"'s' \(float32 tensor of shape \(1,\)\)"):
        y.sum().backward()


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


class Token:
    """Something to be watched."""


@DOOR
def test_8_early_stop_leaks_behind_a_custom_function(door):
    """It is freed without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        x, token = leaf(), Token()
        ref = weakref.ref(token)
        y = door(lambda x, token: SavesItsOutputLast.apply(x.sin()))(x, token)
        del token
        y.sum().backward()
        del y
        assert ref() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("caught", [Exception, BaseException])
@DOOR
def test_8_early_stop_is_swallowed_by_the_users_handler(door, caught):
    """Whatever the handler does, nothing of the signal is seen, and gradients are plain's."""
    seen = []

    def fn(x):
        for _ in range(3):
            try:
                x = x.sin().exp()
            except caught as error:
                seen.append(error)
                x = x * 1
        return x

    def program(door):
        x = leaf()
        y = door(fn)(x)
        y.sum().backward()
        return y, x.grad

    same(door, program)
    assert not [error for error in seen if isinstance(error, Exception)]


@DOOR
def test_8_the_last_matmul_is_redone_for_nothing(door):
    """Its inputs are what backward needs."""
    x, w = leaf(), leaf()
    y = door(lambda x: x.sin() @ w)(x).sum()
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
def test_14_a_region_that_saves_its_own_output_leaks(door, backward):
    """Nothing but reference counts is needed."""
    gc.collect()
    gc.disable()
    try:
        x, token = leaf(), Token()
        ref = weakref.ref(token)
        y = door(lambda x, token: x.sin().exp())(x, token)
        del token
        if backward:
            y.sum().backward()
        del y
        assert ref() is None
    finally:
        gc.enable()


@DOOR
def test_14_memory_grows_with_the_steps(door):
    """A thousand steps, with buffers and random numbers in them, and the garbage collector off."""
    norm = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    mean = torch.zeros(4)

    def fn(x, mean):
        with torch.no_grad():
            mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (norm(x.sin()) - mean).exp()

    region, x = door(fn), leaf()

    def steps(n):
        for _ in range(n):
            region(x, mean).sum().backward()
            x.grad = None

    steps(20)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        steps(1000)
        assert len(gc.get_objects()) - before < 50
    finally:
        gc.enable()


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
def test_18_a_closed_over_buffer_is_changed_inside(door):
    """By the region itself: as plain."""

    def program(door):
        x, buffer = leaf(), torch.zeros(4)

        def fn(x):
            buffer.mul_(0.5).add_(x.detach().mean(0))
            return (x - buffer).sin().exp()

        for _ in range(3):
            y = door(fn)(x)
            y.sum().backward()
        return y, x.grad, buffer

    same(door, program)


# ---- 19


@DOOR
def test_19_torch_func_over_a_region(door, monkeypatch):
    """It runs, without a region, and says so once."""
    monkeypatch.setattr(_api, "_warned", [])

    def fn(x):
        return x.sin().exp().sum()

    x = leaf().detach()
    with pytest.warns(UserWarning, match=r"torch\.func") as caught:
        have = torch.func.grad(door(fn))(x), torch.func.vmap(door(fn))(x), torch.func.jacrev(door(fn))(x)
    assert len([w for w in caught if w.category is UserWarning]) == 1
    want = torch.func.grad(fn)(x), torch.func.vmap(fn)(x), torch.func.jacrev(fn)(x)
    assert list(map(bits, have)) == list(map(bits, want))


# ---- 20


def test_20_two_threads_run_backward_over_one_frame():
    """One recompute for the two gradients of one graph task, one for each graph task."""
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
    assert len(calls) == 2
    assert len(set(calls)) == 2


def is_a_region():
    """Whether regions are made here."""
    node = checkpointed(lambda x: x.sin().exp())(leaf()).grad_fn
    return not isinstance(node._raw_saved_result.data, torch.Tensor)


def stops_early():
    """Whether regions of the drop-in do."""
    node = checkpoint(lambda x: x.sin().exp(), leaf(), use_reentrant=False).grad_fn
    return node._raw_saved_result.data.frame.early_stop


SWITCHES = {
    "disabled": (disabled, is_a_region),
    "early stop": (lambda: set_checkpoint_early_stop(False), stops_early),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_20_switches_show_in_other_threads_and_tasks(switch):
    """Each is of one thread and one context."""
    context, kind = SWITCHES[switch]
    outside = kind()
    seen = {}
    with context():
        seen["inside"] = kind()
        in_thread(lambda: seen.update(thread=kind()))
    assert seen["thread"] == outside != seen["inside"]

    async def one(started, finish):
        with context():
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
    assert seen["task"] == seen["inside"]
    assert seen["other task"] == outside


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


# ---- 23


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@DOOR
def test_23_a_region_costs_even_without_gradients(door, mode, monkeypatch):
    """With grad mode off nothing of a region is made."""

    def forbidden(*args, **kwargs):
        raise AssertionError("a region was made")

    region = door(lambda x: x.sin().exp())
    for name in ("Frame", "Rerun", "Replay", "Tape"):
        monkeypatch.setattr(_api, name, forbidden)
    x = leaf()
    with mode():
        assert count(lambda: region(x)) == {"sin": 1, "exp": 1}


# ---- 24


def everything():
    """State of this thread that must not change."""
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
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
        y = F.dropout(x.sin(), 0.5)
        if where == "tensor hook":
            y.register_hook(fail)
        y = y.exp()
        if where == "body" or (where == "recompute" and len(calls) > 1):
            fail()
        return y.sin()

    unpack = fail if where == "hook" else lambda t: t
    x = leaf() * 2
    with scaled(), torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(lambda t: t, unpack):
        if where == "body":
            before = everything()[:-3], everything()[-2:]
            with pytest.raises(error, match="reason"):
                door(fn)(x)
            assert (everything()[:-3], everything()[-2:]) == before
            return
        y = door(fn)(x)
    if where == "recompute" and door is not rerun:
        y.sum().backward()  # replay does not come by
        return
    before = everything()
    with pytest.raises(error, match="reason") as caught:
        y.sum().backward()
    assert everything() == before
    if where == "recompute":
        notes = "\n".join(caught.value.__notes__)
        assert "recompute of region" in notes
        assert f"{__file__}:" in notes


# ---- 25


@pytest.mark.parametrize("order", ["as saved", "reversed", "from the middle"])
@DOOR
def test_25_the_order_of_unpacking_is_relied_on(door, order):
    """Saved tensors are read in any order, by whomever; each read gives the value."""

    def chain(door):
        x, outputs = leaf(), []

        def fn(x):
            for op in (torch.sin, torch.exp, torch.tanh, torch.cos, torch.sigmoid):
                x = op(x)
                outputs.append(x)
            return x

        y = door(fn)(x)
        return y, [out.grad_fn for out in outputs]

    def read(node):
        return node._saved_result if hasattr(node, "_saved_result") else node._saved_self

    def program(door):
        y, nodes = chain(door)
        numbers = list(range(5))
        numbers = {"as saved": numbers, "reversed": numbers[::-1], "from the middle": [2, 4, 0, 3, 1]}[order]
        values = {n: read(nodes[n]).clone() for n in numbers}
        (gradient,) = torch.autograd.grad(y.sum(), nodes[0].next_functions[0][0].variable)
        return *(values[n] for n in range(5)), gradient

    same(door, program)


# ---- 26


@DOOR
def test_26_parameters_are_resized_to_nothing_and_back(door):
    """As ZeRO does it, in the region and around it: as plain, no mismatch of metadata."""

    def program(door):
        weight, x = nn.Parameter(leaf().detach().clone()), leaf()
        full = weight.data.clone()

        def away():
            weight.data = torch.empty(0)

        def back():
            weight.data = full

        def fn(x):
            back()
            y = (x.sin() @ weight).exp()
            if door is not plain:
                away()
            return y

        y = door(fn)(x)
        y = y.sum()
        if door is not plain and door is not rerun:
            back()  # replay runs no Python: who takes the weight away brings it back
        y.backward()
        back()
        return y, x.grad, weight.grad

    same(door, program)


# ---- 30


def generator(x):
    """Computes nothing when it is called."""
    yield x


async def coroutine(x):
    """Neither."""
    return x


async def generates(x):
    """Nor this."""
    yield x


@pytest.mark.parametrize("backend", ["rerun", "replay"])
@pytest.mark.parametrize("wrong", [generator, coroutine, generates, Token, 3], ids=repr)
def test_30_what_cannot_be_a_region_fails_late(wrong, backend):
    """At decoration, and in words."""
    with pytest.raises(TypeError, match="checkpointed") as caught:
        checkpointed(wrong, backend=backend)
    if inspect.isfunction(wrong):
        assert wrong.__name__ in str(caught.value)
