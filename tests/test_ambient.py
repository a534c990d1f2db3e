"""Recompute sees the forward's autocast, modes, dtype, device, context variables and switches."""

import collections
import contextlib
import contextvars
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import DOORS, EACH_DOOR, Programs, at_once, bits, python_calls, state as state_of_torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from checkpointing import checkpointed
from checkpointing.torch_compat import checkpoint

program = Programs(DOORS)


def leaf():
    return (torch.arange(1.0, 17) / 16).view(4, 4).requires_grad_()


class Scaling(TorchFunctionMode):
    """A function mode that changes what the sine is; in another order, two of them do otherwise."""

    def __init__(self, factor=3.0):
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * self.factor + 1 if func is torch.Tensor.sin else result


class Doubling(torch.Tensor):
    """A subclass that changes what the sine is, where it may."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        return result * 2 if func is torch.Tensor.sin else result


@contextlib.contextmanager
def two_modes():
    with Scaling(3.0), Scaling(0.5):
        yield


@contextlib.contextmanager
def set_to(getter, setter, value):
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


def attend(x):
    """Attention, whose kernel (and what it saves) depends on a switch."""
    q = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(q.sin(), q, q.exp()).exp()


LINEAR, MODE, BF16 = nn.Linear(4, 4), Scaling(), torch.autocast("cpu", torch.bfloat16)
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
SINES = lambda x: x.sin().exp().sin()
LINEARS = lambda x: LINEAR(LINEAR(x).sin()).exp()


def times(number):
    return lambda x: (x * number()).sin().exp()


def setting(getter, setter):
    return lambda value: lambda: set_to(getter, setter, value)


asks_for_the_device = times(lambda: len(str(torch.empty(1).device)))
device = setting(lambda: None, torch.set_default_device)
dtype = setting(torch.get_default_dtype, torch.set_default_dtype)
deterministic = setting(lambda: False, torch.use_deterministic_algorithms)
warnings_alone = setting(lambda: 0, torch.set_deterministic_debug_mode)
precision = setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
variable = setting(VARIABLE.get, VARIABLE.set)

# What is entered around the forward, and a function that it changes.
STATES = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), LINEARS),
    "autocast to half": (lambda: torch.autocast("cpu", torch.float16), lambda x: (x @ x).sin() @ x),
    "autocast without cache": (lambda: torch.autocast("cpu", cache_enabled=False), LINEARS),
    "two function modes": (two_modes, SINES),
    "one function mode again and again": (lambda: MODE, SINES),
    "torch.device": (lambda: torch.device("meta"), asks_for_the_device),
    "default device": (device("meta"), asks_for_the_device),
    "default dtype": (dtype(torch.float64), times(lambda: torch.full((4,), 0.1))),
    "math attention": (lambda: sdpa_kernel(SDPBackend.MATH), attend),
    "context variable": (variable(2.5), times(VARIABLE.get)),
    "deterministic": (
        deterministic(True),
        times(lambda: 1 + torch.are_deterministic_algorithms_enabled()),
    ),
    "warnings of what is not deterministic": (
        warnings_alone(1),
        times(lambda: 1 + torch.get_deterministic_debug_mode()),
    ),
    "precision": (precision("medium"), times(lambda: len(torch.get_float32_matmul_precision()))),
    "kernels": (
        lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
        times(lambda: 1 + torch.backends.mkldnn.enabled),
    ),
    "enabled inside": (contextlib.nullcontext, lambda x: (BF16(LINEAR)(x.sin()).float() @ x).exp()),
    "subclasses off": (
        torch._C.DisableTorchFunctionSubclass,
        lambda x: x.as_subclass(Doubling).sin().exp().as_subclass(torch.Tensor).sin(),
    ),
}
# Without an effect on the results here: they do no harm.
SILENT = {"enabled inside", "math attention"}
# Backward itself, in plain code as well, can't be run in these.
FORWARD_ONLY = {"torch.device", "default device"}
STATE = pytest.mark.parametrize("state", STATES)
# The legacy backend makes casts anew: gradients of one that is used twice are added otherwise.
CACHED = {"autocast", "autocast to half"}
REENTRANT = {**DOORS, "reentrant": lambda fn: lambda x: checkpoint(fn, x, use_reentrant=True)}


def everything():
    """The whole state, to compare before with after."""
    return {
        **state_of_torch(),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "precision": torch.get_float32_matmul_precision(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "variable": VARIABLE.get(),
        "device": torch.empty(0).device,
    }


def step(fn, around, backward_around=contextlib.nullcontext, run=lambda backward: backward()):
    """Results and gradients, in bits; the state that backward finds is the state that it leaves."""
    x, grads = leaf(), []
    LINEAR.zero_grad()

    def backward():
        before = everything()
        y.sum().backward()
        grads.extend(p.grad for p in (x, *LINEAR.parameters()))
        assert everything() == before

    with around():
        y = fn(x)
    with backward_around():
        run(backward)
    return [bits(t) for t in (y, *grads)]


@STATE
@pytest.mark.parametrize("door", REENTRANT)
def test_recompute_sees_the_state_of_the_forward_and_not_that_of_backward(state, door):
    """Gone when backward runs, in this thread or in another; entered then; around all of a step."""
    (around, fn), door = STATES[state], REENTRANT[door]
    want = step(fn, around)
    if state not in SILENT:
        assert want != step(fn, contextlib.nullcontext)
    if door is REENTRANT["reentrant"] and state in CACHED:
        return
    assert step(door(fn), around) == want
    assert step(door(fn), around, run=at_once) == want
    if state not in FORWARD_ONLY:
        for forward in (contextlib.nullcontext, around):
            assert step(door(fn), forward, around) == step(fn, forward, around)


@STATE
@EACH_DOOR
def test_the_state_is_left_as_it_was_after_an_error(state, door):
    around, fn = STATES[state]
    source, x = torch.ones(4, 4), leaf()
    with around():
        y = door(lambda x, s: fn(x * s))(x, source)
    before = everything()
    source.add_(1)
    with pytest.raises(RuntimeError):
        y.sum().backward()
    assert everything() == before


@program()
def backwards_in_another_grad_mode(door):
    """Whatever backward is called in, the recompute is in that of the forward."""
    found = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        y = door(lambda x: (x.square() * x.exp()).cumsum(0).exp())(x := leaf()).sum()
        with mode():
            y.backward()
        found.append(x.grad.clone())
    return found


@program()
def backward_of_a_tensor_of_a_subclass(door):
    """Which torch calls with the functions of subclasses off; the recompute has them."""
    x = leaf()
    door(lambda x: x.as_subclass(Doubling).sin().exp().sin())(x).sum().backward()
    return x.grad


def with_a_cast_weight(door, inside):
    linear, x, seen = nn.Linear(4, 4), leaf(), []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            first = linear(x)
            y = door(lambda x: linear(linear(x)).sin())(first.relu())
            y = door(lambda x: linear(x).cos())(y)
            if inside:
                y.sum().backward(retain_graph=True)
            # Shares the cast: their gradients are added in it.
            loss = (linear(y) * 2 + first).float().sum()
        loss.backward()
        seen += [t.clone() for t in (y, x.grad, linear.weight.grad, linear.bias.grad)]
        with torch.no_grad():  # a cast that a recompute has left behind would now be an old one
            linear.weight.mul_(2)
    return seen


@program()
def weights_that_autocast_has_cast(door):
    """Before two regions, and used after them; backward in the context or after it."""
    return with_a_cast_weight(door, False) + with_a_cast_weight(door, True)


@program()
def steps_inside_one_autocast(door):
    """The optimizer writes weights whose casts autocast goes on with."""
    linear, seen = nn.Linear(4, 4), []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            x = leaf()
            door(lambda x: linear(linear(x).sin()))(x).float().square().sum().backward()
            torch.optim.SGD(linear.parameters(), 0.5).step()
            seen += [x.grad, linear.weight.detach().clone()]
    return seen


@program()
def backward_in_autocast_of_another_dtype(door):
    """Whose casts of the same weights are others."""
    linear, x = nn.Linear(4, 4), leaf()
    with torch.autocast("cpu", torch.bfloat16):
        y = door(lambda x: linear(linear(x).sin()))(x)
    with torch.autocast("cpu", torch.float16):
        z = linear(x)
        (y.float() - z.float()).square().sum().backward()
        z = linear(x)
    return x.grad, linear.weight.grad, linear.bias.grad, z


test_programs_are_plains = program.test()


@pytest.mark.parametrize("stop", [True, False])
def test_a_switch_that_a_function_puts_back_without_try_stays_set_where_the_rerun_is_stopped(stop):
    """A limit, of torch's own checkpoint as well."""

    identity = nn.Identity()

    def fn(x):
        torch.set_default_dtype(torch.float64)
        hook = identity.register_forward_hook(lambda *_: None)
        y = identity(x).exp()
        hook.remove()
        torch.set_default_dtype(torch.float32)
        return y

    with set_to(torch.get_default_dtype, torch.set_default_dtype, torch.float32):
        checkpointed(fn, early_stop=stop)(leaf()).sum().backward()
        assert torch.get_default_dtype() is (torch.float64 if stop else torch.float32)
        assert bool(identity._forward_hooks) is stop


Pair = collections.namedtuple("Pair", "items layer")
CONTENTS = {  # what is in the variable, and how something is put into it
    "number": (lambda: 1.0, lambda c, n: VARIABLE.set(c + n)),
    "list": (lambda: [1], lambda c, n: c.append(n)),
    "dict": (lambda: {"a": 1}, lambda c, n: c.update({n: n})),
    "set": (lambda: {1}, lambda c, n: c.add(n)),
    "nested": (lambda: ({"a": [({2},)]},), lambda c, n: c[0]["a"][0][0].add(n)),
    "named tuple": (lambda: Pair([], weakref.ref(LINEAR)), lambda c, n: c.items.append(n)),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_context_variables_are_those_of_the_forward_and_collections_in_them_are_copies(kind):
    """At any depth; what a recompute puts in is dropped, what others have put in since stays."""
    make, put = CONTENTS[kind]
    made, seen = make(), []

    @checkpointed
    def fn(x):
        seen.append(repr(VARIABLE.get()))
        put(VARIABLE.get(), 7)
        return x.sin().exp()

    def run():
        VARIABLE.set(made)
        y = fn(leaf())
        put(made, 8)
        value, now = VARIABLE.get(), repr(VARIABLE.get())
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        assert VARIABLE.get() is value
        assert (repr(value), len(set(seen)), len(seen)) == (now, 1, 3)

    contextvars.copy_context().run(run)


@pytest.mark.parametrize("door", [DOORS["rerun"], DOORS["replay"]], ids=["rerun", "replay"])
def test_newer_settings_of_precision_are_left_alone(door):
    """They contradict the legacy one, which is then as it is during the recompute."""
    setter = torch._C._set_fp32_precision_setter
    y = door(lambda x: (x @ x).sin().exp())(leaf())
    setter("generic", "all", "tf32")
    try:
        y.sum().backward()
        assert torch._C._get_fp32_precision_getter("generic", "all") == "tf32"
    finally:
        setter("generic", "all", "none")


COLLECTED = contextvars.ContextVar("COLLECTED", default=None)


@EACH_DOOR
def test_a_collector_in_a_context_variable_keeps_nothing_alive(door, no_gc):
    """What the recompute makes is not collected."""
    made, collected = [], []

    def layer(x):
        made.append(weakref.ref(y := x.sin()))
        COLLECTED.get().append(y)
        return y.exp()

    def run():
        COLLECTED.set(collected)
        y = door(layer)(door(layer)(leaf()))
        y.sum().backward(retain_graph=True)
        assert [ref() for ref in made[:2]] == collected
        assert [ref() for ref in made[2:]] == [None] * (len(made) - 2)
        collected.clear()
        y.sum().backward()  # whose recompute needs none of them
        assert collected == [] and not any(ref() is not None for ref in made)

    contextvars.copy_context().run(run)


def test_what_torch_keeps_in_context_variables_is_not_copied():
    """Its compiler leaves hundreds of settings there, in every process that has compiled once."""
    settings = contextvars.ContextVar("torch._inductor.config._get_dict_cache")

    def calls(count):
        settings.set(dict.fromkeys(map(str, range(count)), ()))
        return python_calls(lambda: DOORS["rerun"](torch.sin)(leaf()).sum().backward())

    _, few, many = (contextvars.copy_context().run(calls, n) for n in (0, 0, 1000))
    assert few == many
