"""Recompute sees what the forward saw: autocast, modes, default dtype and device, context variables, switches."""

import contextlib
import contextvars
import threading

import pytest
import torch
import torch.nn.functional as F
from oracle import bits
from oracle import s as scope
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from checkpointing import checkpointed


def leaf(*shape):
    """A tensor that wants a gradient."""
    return torch.rand(*shape or (4, 4)).requires_grad_()


def ramp():
    """The same leaf each time."""
    return torch.linspace(0.1, 1, 16).view(4, 4).clone().requires_grad_()


DOORS = {
    "rerun": checkpointed,
    "replay": checkpointed(backend="replay"),
    "scope": scope,
    "rerun in rerun": lambda fn: checkpointed(checkpointed(fn)),
    "rerun in scope": lambda fn: scope(checkpointed(fn)),
    "scope in rerun": lambda fn: checkpointed(scope(fn)),
}
DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))


class Scaling(TorchFunctionMode):
    """A function mode that changes what the sine is, and knows how often it was asked."""

    def __init__(self, factor=3.0):
        super().__init__()
        self.factor = factor
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is torch.Tensor.sin else result


@contextlib.contextmanager
def default_dtype(dtype):
    """`torch.set_default_dtype` for a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic(warn_only=False):
    """Deterministic algorithms for a block."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision(value):
    """Precision of matrix products for a block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def switched(name, value):
    """A switch of torch's for a block, by the end of the names of its getter and setter."""
    getter, setter = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


@contextlib.contextmanager
def variable(value):
    """A context variable for a block."""
    token = VARIABLE.set(value)
    try:
        yield
    finally:
        VARIABLE.reset(token)


LINEAR = nn.Linear(4, 4)

# What is entered around the forward, and a function that it changes.
STATES = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda x: LINEAR(LINEAR(x).sin()).exp()),
    "autocast to half": (lambda: torch.autocast("cpu", torch.float16), lambda x: (x @ x).sin() @ x),
    "autocast without cache": (
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        lambda x: LINEAR(LINEAR(x).sin()).exp(),
    ),
    "autocast off in autocast": (lambda: autocast_off(), lambda x: LINEAR(x).sin() @ x),
    "function mode": (lambda: Scaling(3.0), lambda x: x.sin().exp().sin()),
    "two function modes": (lambda: both(Scaling(3.0), Scaling(0.5)), lambda x: x.sin().exp().sin()),
    "torch.device": (lambda: torch.device("meta"), lambda x: (x * len(str(torch.empty(1).device))).sin().exp()),
    "default dtype": (lambda: default_dtype(torch.float64), lambda x: (x * torch.full((4,), 0.1)).sin().exp()),
    "math attention": (lambda: sdpa_kernel(SDPBackend.MATH), lambda x: attend(x)),
    "flash attention": (lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), lambda x: attend(x)),
    "context variable": (lambda: variable(2.5), lambda x: (x * VARIABLE.get()).sin().exp()),
    "deterministic": (
        deterministic,
        lambda x: (x * (1 + torch.are_deterministic_algorithms_enabled())).sin().exp(),
    ),
    "deterministic, warning only": (
        lambda: deterministic(warn_only=True),
        lambda x: (x * (1 + torch.is_deterministic_algorithms_warn_only_enabled())).sin().exp(),
    ),
    "matmul precision": (
        lambda: precision("medium"),
        lambda x: (x @ x * len(torch.get_float32_matmul_precision())).sin().exp(),
    ),
    "mkldnn off": (
        lambda: switched("mkldnn_enabled", False),
        lambda x: (x * (1 + torch._C._get_mkldnn_enabled())).sin().exp(),
    ),
    "nnpack off": (
        lambda: switched("nnpack_enabled", False),
        lambda x: (x * (1 + torch._C._get_nnpack_enabled())).sin().exp(),
    ),
    "attention in half": (
        lambda: switched("math_sdp_allow_fp16_bf16_reduction", True),
        lambda x: (x * (1 + torch._C._get_math_sdp_allow_fp16_bf16_reduction())).sin().exp(),
    ),
    "grad mode off inside": (contextlib.nullcontext, lambda x: no_grad_inside(x)),
    "enabled inside": (contextlib.nullcontext, lambda x: autocast_inside(x)),
}
# Without an effect on the results here: what is tested is that it does no harm.
SILENT = {"grad mode off inside", "enabled inside", "autocast off in autocast", "flash attention", "math attention"}
STATE = pytest.mark.parametrize("state", STATES)


@contextlib.contextmanager
def autocast_off():
    """Autocast turned off inside autocast."""
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        yield


@contextlib.contextmanager
def both(outer, inner):
    """Two modes."""
    with outer, inner:
        yield


def attend(x):
    """Attention, whose kernel (and what it saves) depends on a switch."""
    q = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(q.sin(), q, q.exp()).exp()


def no_grad_inside(x):
    """A part without gradients."""
    with torch.no_grad():
        scale = x.sin().exp()
    return (x * scale).exp().sin()


def autocast_inside(x):
    """Autocast that is entered in the region."""
    with torch.autocast("cpu", torch.bfloat16):
        y = LINEAR(x.sin())
    return (y.float() @ x).exp()


def everything():
    """The whole state, to compare before with after."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._len_torch_function_stack(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.is_grad_enabled(),
        VARIABLE.get(),
        torch.empty(0).device,
    )


def step(fn, around, backward_around=contextlib.nullcontext):
    """Results and gradients, in bits; the state that backward finds is the state that it leaves."""
    x = ramp()
    with around():
        y = fn(x)
    with backward_around():
        before = everything()
        grads = torch.autograd.grad(y.sum(), [x, *LINEAR.parameters()], allow_unused=True)
        assert everything() == before
    return [bits(t) for t in (y, *grads)]


@STATE
@DOOR
def test_recompute_sees_the_state_of_the_forward(state, door):
    """Gone when backward runs, as in every training loop; gradients are plain's."""
    around, fn = STATES[state]
    want = step(fn, around)
    if state not in SILENT:
        assert want != step(fn, contextlib.nullcontext)
    assert step(door(fn), around) == want


@STATE
@DOOR
def test_recompute_does_not_see_the_state_of_backward(state, door):
    """Entered only when backward runs: the recompute doesn't see it."""
    around, fn = STATES[state]
    if state in ("torch.device", "function mode", "two function modes"):
        want = step(fn, contextlib.nullcontext)
        x = ramp()
        y = door(fn)(x).sum()
        with around():
            y.backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(fn(x).sum(), x)[0], rtol=0, atol=0)
        assert want
    else:
        assert step(door(fn), contextlib.nullcontext, around) == step(fn, contextlib.nullcontext, around)


@STATE
@DOOR
def test_backward_inside_of_the_state(state, door):
    """Forward and backward under the same state, as when a whole step is in it."""
    around, fn = STATES[state]
    if state == "torch.device":
        return  # backward's own tensors would be on the other device, in plain code as well
    assert step(door(fn), around, around) == step(fn, around, around)


@STATE
@DOOR
def test_on_another_thread(state, door):
    """Backward on a thread that knows nothing of the state."""
    around, fn = STATES[state]
    want = step(fn, around)
    x = ramp()
    with around():
        y = door(fn)(x)
    have = []

    def backward():
        grads = torch.autograd.grad(y.sum(), [x, *LINEAR.parameters()], allow_unused=True)
        have.extend(bits(t) for t in (y, *grads))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert have == want


@STATE
@DOOR
def test_the_state_is_left_as_it_was_after_an_error(state, door):
    """A recompute that fails restores everything."""
    around, fn = STATES[state]
    source = torch.ones(4, 4)
    x = ramp()
    with around():
        y = door(lambda x, s: fn(x * s))(x, source)
    before = everything()
    source.data_ptr()
    source.add_(1)
    with pytest.raises(RuntimeError):
        y.sum().backward()
    assert everything() == before


# ---- autocast's cache of weights


@DOOR
@pytest.mark.parametrize("cache", [True, False])
def test_two_regions_share_a_weight_under_autocast(door, cache):
    """The second region finds the first one's cast of the weight in the cache; the recompute must not miss it."""
    linear = nn.Linear(4, 4)

    def run(door):
        linear.zero_grad()
        x = ramp()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            first = door(lambda x: linear(x).sin())
            y = first(x)
            y = door(lambda x: linear(x).exp())(y)
            y = linear(y)
            loss = y.float().sum()
        loss.backward()
        return [bits(t) for t in (y, x.grad, linear.weight.grad, linear.bias.grad)]

    assert run(door) == run(lambda fn: fn)


@DOOR
def test_a_weight_cast_before_the_region(door):
    """The cache was filled by plain code; plain code after the region uses it, too."""
    linear = nn.Linear(4, 4)

    def run(door):
        linear.zero_grad()
        x = ramp()
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x).sin()
            y = door(lambda x: linear(linear(x)).exp())(y)
            y = linear(y)
            loss = y.float().sum()
            loss.backward()  # inside, as some do
        return [bits(t) for t in (y, x.grad, linear.weight.grad, linear.bias.grad)]

    assert run(door) == run(lambda fn: fn)


@DOOR
def test_backward_leaves_no_stale_cast_behind(door):
    """A forward after a backward in one autocast block reads the weight as it is now."""
    linear = nn.Linear(4, 4)

    def run(door):
        with torch.no_grad():
            linear.weight.fill_(0.5)
        out = []
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                x = ramp()
                y = door(lambda x: linear(x).sin().exp())(x)
                y.float().sum().backward()
            with torch.no_grad():
                linear.weight -= 0.1 * linear.weight.grad
            out += [y, x.grad, linear.weight.clone()]
        linear.zero_grad()
        return [bits(t) for t in out]

    assert run(door) == run(lambda fn: fn)


# ---- function modes


@DOOR
def test_function_modes_are_run_in_rerun_and_not_in_replay(door):
    """A mode sees the functions of a rerun, as it saw those of the forward; a tape is below it."""
    mode = Scaling()
    with mode:
        y = door(lambda x: x.sin().exp())(leaf())
    forward = mode.calls
    y.sum().backward()
    assert mode.calls >= forward
    assert torch._C._len_torch_function_stack() == 0


def test_the_order_of_modes_is_kept():
    """Outermost first, as in the forward."""
    order = []

    class Noting(TorchFunctionMode):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.sin:
                order.append(self.name)
            return func(*args, **(kwargs or {}))

    with Noting("outer"), Noting("inner"):
        y = checkpointed(lambda x: x.sin().exp())(leaf())
    forward = list(order)
    order.clear()
    with Noting("backward"):
        y.sum().backward()
    assert forward == ["inner", "outer"]
    assert order == forward


def test_a_mode_may_be_used_again_after_it():
    """The rerun enters the mode object that the forward had; the user may enter it anew meanwhile."""
    mode = Scaling()
    x = leaf()
    with mode:
        y = checkpointed(lambda x: x.sin().exp())(x)
        with torch._C.DisableTorchFunctionSubclass():
            pass
    with mode:
        y.sum().backward()
        assert bits(x.sin().detach()) == bits(torch.sin(x.detach()) * 1.0 * 3.0)
    assert torch._C._len_torch_function_stack() == 0


# ---- device and dtype contexts


@DOOR
def test_device_context(door):
    """`with torch.device(...)` is a function mode: factories in the region make tensors there, twice."""
    seen = []

    def fn(x):
        made = torch.ones(3)
        seen.append(made.device.type)
        return x.sin().exp()

    x = leaf()
    with torch.device("meta"):
        y = door(fn)(x)
    y.sum().backward()
    assert set(seen) == {"meta"}


@DOOR
def test_set_default_device(door):
    """The function form of it."""
    seen = []

    def fn(x):
        seen.append(torch.ones(3).device.type)
        return x.sin().exp()

    x = leaf()
    try:
        torch.set_default_device("meta")
        y = door(fn)(x)
    finally:
        torch.set_default_device(None)
    y.sum().backward()
    assert set(seen) == {"meta"}
    assert torch.ones(1).device.type == "cpu"


@DOOR
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_backward_in_another_grad_mode(door, mode):
    """Whatever backward is called in, the recompute is in that of the forward."""

    def step(door):
        LINEAR.zero_grad()  # gradients made in inference mode can't be added to
        x = ramp()
        y = door(lambda x: (LINEAR(x).sin() * x.exp()).cumsum(0).exp())(x).sum()
        with mode():
            y.backward()
        LINEAR.zero_grad()
        return bits(x.grad.clone())

    assert step(door) == step(lambda fn: fn)


# ---- context variables


def test_context_variables_set_in_a_region_stay_in_the_forward():
    """A rerun's changes to context variables are its own; the forward's are the caller's."""

    @checkpointed
    def fn(x):
        VARIABLE.set(VARIABLE.get() + 1)
        return (x * VARIABLE.get()).sin().exp()

    def run():
        y = fn(leaf())
        assert VARIABLE.get() == 2.0
        y.sum().backward()
        assert VARIABLE.get() == 2.0

    contextvars.copy_context().run(run)


def test_context_variables_in_nested_regions():
    """Each region has the values of its own entry."""
    seen = []

    def note(x):
        seen.append(VARIABLE.get())
        return (x * VARIABLE.get()).sin().exp()

    inner = checkpointed(note)

    @checkpointed
    def outer(x):
        with variable(5.0):
            return inner(x).sin()

    with variable(3.0):
        y = outer(leaf())
    assert seen == [5.0]
    y.sum().backward()
    assert set(seen) == {5.0}
    assert VARIABLE.get() == 1.0


# ---- attention


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@DOOR
def test_the_kernel_of_attention_is_the_forwards(door, backend):
    """Other kernels save other tensors: the number of saved tensors tells which one ran in the recompute."""
    q = leaf(1, 2, 8, 4)
    with sdpa_kernel(backend):
        y = door(attention := (lambda q: F.scaled_dot_product_attention(q.sin(), q, q, is_causal=True).exp()))(q)
        want = torch.autograd.grad(attention(q).sum(), q)
    other = SDPBackend.MATH if backend is not SDPBackend.MATH else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(other):
        have = torch.autograd.grad(y.sum(), q)
    assert bits(have[0]) == bits(want[0])


# ---- precision


PRECISIONS = [("generic", "all"), *((b, o) for b in ("cuda", "mkldnn") for o in ("all", "matmul", "conv", "rnn"))]
SETTINGS = {
    "generic tf32": lambda: torch._C._set_fp32_precision_setter("generic", "all", "tf32"),
    "generic ieee": lambda: torch._C._set_fp32_precision_setter("generic", "all", "ieee"),
    "mkldnn bf16": lambda: torch._C._set_fp32_precision_setter("mkldnn", "all", "bf16"),
    "products ieee": lambda: torch._C._set_fp32_precision_setter("mkldnn", "matmul", "ieee"),
    "legacy": lambda: torch.set_float32_matmul_precision("medium"),
    "nothing": lambda: None,
}


@pytest.fixture
def precisions():
    """What they are, and how to set none of them; puts all of them back."""

    def now():
        return [torch._C._get_fp32_precision_getter(*which) for which in PRECISIONS]

    def nothing():
        torch.set_float32_matmul_precision("highest")
        for which in PRECISIONS:
            torch._C._set_fp32_precision_setter(*which, "none")

    before = now()
    nothing()
    yield now, nothing
    nothing()
    for which, value in zip(PRECISIONS, before, strict=True):
        torch._C._set_fp32_precision_setter(*which, value)


@pytest.mark.parametrize("later", SETTINGS)
@pytest.mark.parametrize("first", SETTINGS)
@DOOR
def test_a_recompute_leaves_every_precision_as_it_was(door, first, later, precisions):
    """Also what follows from a more general one: setting that afterwards does what it would have done."""

    now, nothing = precisions

    def after(door):
        SETTINGS[first]()
        y = door(lambda x: (x @ x).sin().exp())(leaf(4, 4))
        SETTINGS[later]()
        before = now()
        y.sum().backward()
        assert now() == before
        torch._C._set_fp32_precision_setter("generic", "all", "none")
        found = [now()]
        torch._C._set_fp32_precision_setter("mkldnn", "all", "none")
        found.append(now())
        nothing()
        return found

    assert after(door) == after(lambda fn: fn)
