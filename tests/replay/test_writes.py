"""Writes that schemas hide, that go outside, that nobody sees; random operators; inputs that change later."""

import ctypes

import bitwise
import pytest
import torch
from bitwise import DOORS, REPLAY, RERUN, Table
from torch import nn

import checkpointing
from checkpointing import checkpoint_scope


def two(*modules):
    def make():
        torch.manual_seed(3)
        return (
            torch.randn(4, 6, dtype=torch.float64, requires_grad=True),
            torch.randn(4, 6, dtype=torch.float64, requires_grad=True),
            *[m().double() for m in modules],
        )

    return make


case = Table(two())


def norm(name, build, shape, refused=()):
    def program(x, y, m):
        h = m((x @ y.t() @ x).reshape(shape).sin())
        return h.exp(), h * h

    program.__name__ = name
    case(program, make=two(build), refused=refused)

    def many(region, x, y, m):
        a = region(m, (x * 1).reshape(shape).sin()).exp()
        b = region(m, (y * 2).reshape(shape)).exp()
        return a * b, region(m, region(m, a))

    many.__name__ = name + "_several_forwards"
    case(many, make=two(build), whole=True, refused=refused)

    def closure(region, x, y, m):
        def f(x):
            return m(x.reshape(shape).sin()).exp()

        return region(f, x) * region(f, y * 2), region(lambda x: f(f(x).reshape(4, 6)), x)

    closure.__name__ = name + "_in_a_closure"
    case(closure, make=two(build), whole=True, doors=REPLAY, refused=refused)

    def eval_only(region, x, y, m):
        m(x.reshape(shape)), m.eval()
        return region(m, (x * y).reshape(shape)).exp()

    eval_only.__name__ = name + "_eval"
    # what writes in evaluation mode, too, is refused
    case(eval_only, make=two(build), whole=True, refused=RERUN)


norm("batch_norm_1d", lambda: nn.BatchNorm1d(6), (4, 6))
norm("batch_norm_2d", lambda: nn.BatchNorm2d(3), (4, 3, 2, 1))
norm("batch_norm_cumulative", lambda: nn.BatchNorm1d(6, momentum=None), (4, 6))
norm("batch_norm_no_stats", lambda: nn.BatchNorm1d(6, track_running_stats=False), (4, 6))
norm("batch_norm_no_affine", lambda: nn.BatchNorm1d(6, affine=False), (4, 6))
# where the module is an argument of a rerun: nobody knows its buffers
norm(
    "instance_norm",
    lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    (4, 3, 2),
    refused=(bitwise.scope_in_rerun,),
)
norm("instance_norm_no_stats", lambda: nn.InstanceNorm1d(3), (4, 3, 2))
norm("group_norm", lambda: nn.GroupNorm(2, 6), (4, 6))
norm("layer_norm", lambda: nn.LayerNorm(6), (4, 6))
norm("local_response", lambda: nn.LocalResponseNorm(2), (4, 3, 2))


class Ema(nn.Module):
    """A counter, an average and a largest value: written by `forward`, each in its own way."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("top", torch.zeros(6))

    def forward(self, x):
        self.count += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.top = torch.maximum(self.top, x.detach().amax(0))
        return (x - self.mean.clone()) * self.top.clone() / self.count.clone()


norm("ema", Ema, (4, 6))
norm("spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), (4, 6))
norm("old_spectral_norm", lambda: nn.utils.spectral_norm(nn.Linear(6, 6)), (4, 6))
norm("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), (4, 6))
norm("orthogonal", lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), (4, 6))
norm("observer", lambda: nn.Sequential(torch.ao.quantization.MovingAverageMinMaxObserver(), nn.Linear(6, 6)), (4, 6))
norm(
    "fake_quantize",
    lambda: torch.ao.quantization.FakeQuantize(
        observer=torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    ),
    (4, 6),
)
norm("dropout", lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 6), nn.AlphaDropout(0.2)), (4, 6))
norm("rrelu", nn.RReLU, (4, 6))
norm("rrelu_in_place", lambda: nn.Sequential(nn.Linear(6, 6), nn.RReLU(inplace=True)), (4, 6))
norm(
    "conv_bn_relu",
    lambda: nn.Sequential(
        nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Conv1d(4, 3, 1), nn.BatchNorm1d(3)
    ),
    (4, 3, 2),
)


@case(whole=True, make=two(lambda: nn.BatchNorm1d(6)), doors=REPLAY)
def functional_batch_norm_on_buffers(region, x, y, m):
    def f(x):
        h = nn.functional.batch_norm(x.sin(), m.running_mean, m.running_var, m.weight, m.bias, training=True)
        return h * h.exp()

    return region(f, x), region(f, y)


@case(whole=True, make=two(lambda: nn.BatchNorm1d(6)), doors=REPLAY)
def statistics_read_inside(region, x, y, m):
    def f(x):
        before = m.running_mean.clone()
        h = m(x.sin())
        return h * m.running_mean.clone() * before.exp() * m.running_var.clone()

    return region(f, x), region(f, y)


# ---- outside: each write once
@case(whole=True, doors=REPLAY)
def activation_in_place_from_before(region, x, y):
    h = x @ y.t()
    k = region(lambda: nn.functional.relu_(h).exp() * 2)
    g = h * 1
    return k, region(lambda: (g.mul_(2) + 1).sin() * h)


@case(whole=True, doors=REPLAY)
def counter_outside(region, x, y):
    count = torch.zeros((), dtype=torch.float64)

    def f(x):
        count.add_(1)
        return x.sin() * count.clone()

    return region(f, x), region(f, x), region(f, y), count


@case(whole=True, doors=REPLAY)
def accumulate_outside(region, x, y):
    total = torch.zeros(4, 6, dtype=torch.float64)

    def f(x):
        h = x.exp()
        total.add_(h.detach())
        total[1:3].mul_(0.5)
        return h * total.clone()

    return region(f, x), region(f, y), total


@case(whole=True, doors=REPLAY)
def outside_written_after_read(region, x, y):
    b = torch.ones(4, 6, dtype=torch.float64)

    def f(x):
        h = x * b.clone()
        k = (x + b).sin()  # reads b, saves x + b
        b.mul_(3)
        m = k * h
        b.sub_(1)
        return m * (b + x).exp()

    return region(f, x), region(f, y), b


@case(whole=True, doors=REPLAY)
def leaf_written_under_no_grad(region, x, y):
    w = torch.ones(6, dtype=torch.float64, requires_grad=True)

    def f(x):
        h = x.sin() + w
        with torch.no_grad():
            w.mul_(0.5)
        return h.exp()

    return region(f, x), region(f, y)


# ---- unseen
def numpy_write(t):
    t.numpy()[...] *= 2


def ctypes_write(t):
    ctypes.memset(t.data_ptr(), 0, t.numel() * t.element_size() // 2)


@case
def empty_filled_by_numpy(x, y):
    b = torch.empty(4, 6, dtype=x.dtype)
    b.numpy()[...] = x.detach().numpy() * 2
    return x * b * b.exp()


@case
def empty_filled_by_ctypes(x, y):
    b = torch.empty(4, 6, dtype=x.dtype)
    ctypes.memset(b.data_ptr(), 0x3F, b.numel() * 8)
    h = b * 2
    return x * b * h.sin() * y


@case
def empty_like_filled_by_numpy(x, y):
    h = x.sin()
    b = torch.empty_like(h)
    b.numpy()[...] = h.detach().numpy()
    b.add_(1)
    return h * b


@case
def empty_filled_by_numpy_in_two_steps(x, y):
    b = torch.empty(4, 6, dtype=x.dtype)
    b[:2].numpy()[...] = 1.0
    a = x[:2] * b[:2].clone()
    b[2:].numpy()[...] = 2.0
    return a.exp().sum() * (x * b)


@case
def from_numpy(x, y):
    a = x.detach().numpy() * 2
    t = torch.from_numpy(a)
    return x * t * t.exp()


@case(whole=True, doors=REPLAY)
def from_numpy_of_an_array_filled_later(region, x, y):
    import numpy as np

    a = np.zeros((4, 6))
    t = torch.from_numpy(a)

    def f(x):
        a[...] = x.detach().numpy()
        return x * t.sin()

    return region(f, x)


@case
def frombuffer_and_tensor(x, y):
    t = torch.tensor(x.detach().tolist(), dtype=x.dtype)
    u = torch.frombuffer(bytearray(x.detach().numpy().tobytes()), dtype=torch.float64).view(4, 6)
    return x * t * u.exp()


@case
def scalar_tensors(x, y):
    return x * torch.tensor(2.5, dtype=x.dtype) * torch.as_tensor(x.detach().numpy().mean()) * torch.arange(6.0)


# ---- random
@case
def every_random_op(x, y):
    g = torch.Generator().manual_seed(7)
    a = torch.rand(4, 6, generator=g, dtype=x.dtype) * torch.randn_like(x)
    a = a + torch.randint(0, 5, (4, 6)) + torch.randint_like(x, 3) + torch.normal(0.0, 1.0, (4, 6), generator=g)
    a = a + torch.bernoulli(torch.sigmoid(x.detach())) + torch.poisson(x.detach().abs()) + torch.randperm(6)
    b = torch.empty_like(x).uniform_(generator=g)
    b.exponential_().log_normal_().geometric_(0.5).cauchy_().random_(10).bernoulli_(0.3, generator=g)
    m = torch.multinomial(x.detach().abs() + 0.1, 2)
    n = torch.normal(x.detach(), y.detach().abs() + 0.1)
    d = torch._standard_gamma(y.abs() + 0.5)
    return x * a * n, x * b.clamp(-3, 3), x.gather(1, m).exp(), nn.functional.gumbel_softmax(x.sin()), d * d


@case
def native_dropout_and_attention(x, y):
    q = x.view(1, 2, 2, 6)
    h = nn.functional.scaled_dot_product_attention(q.sin(), q, q * 2, dropout_p=0.3)
    k, _ = torch.native_dropout(h, 0.4, True)
    return k.exp(), nn.functional.feature_alpha_dropout(h, 0.3, True) * k


@case
def seeded_inside(x, y):
    a = nn.functional.dropout(x.sin(), 0.5)
    torch.manual_seed(5)
    b = nn.functional.dropout(a.exp(), 0.5)
    s = torch.get_rng_state()
    c = torch.rand_like(x) * b
    torch.set_rng_state(s)
    return a * c, torch.rand_like(x) * c


@case
def forked_inside(x, y):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        a = torch.rand_like(x) * x.sin()
    return nn.functional.dropout(a.exp(), 0.2)


@case
def distributions(x, y):
    d = torch.distributions.Normal(x.sin(), y.abs() + 0.1)
    e = torch.distributions.Gamma(x.abs() + 0.5, y.abs() + 0.5)
    c = torch.distributions.Categorical(logits=x.sin())
    return d.rsample() * e.rsample(), c.log_prob(c.sample()), d.log_prob(d.sample())


@torch.library.custom_op("bitwise_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws, and isn't tagged."""
    return x + torch.rand(x.shape, dtype=x.dtype)


noisy.register_autograd(lambda ctx, g: g)


@case
def untagged_custom_random_op(x, y):
    h = noisy(x.sin())
    return h * h.exp() * torch.rand_like(x)


@case
def python_randomness(x, y):
    import random

    random.seed(3)
    return x.sin() * random.random()


@case
def batch_norm_with_out(x, y):
    mean, var = torch.zeros(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype)
    with torch.no_grad():
        out = [torch.empty(n, dtype=x.dtype) for n in ((4, 6), (6,), (6,))]
        for _ in range(2):
            torch.native_batch_norm(x * 2, None, None, mean, var, True, 0.1, 1e-5, out=out)
    return y * out[0], (y * mean).exp() * var, y * out[1]


@pytest.mark.parametrize(("program", "door"), case.pairs())
def test_writes(program, door):
    """Bit for bit; every write happens once."""
    program.check(door)


# ---- what changes after the region has read it
CHANGES = {
    "in place": lambda t: t.mul_(2),
    "a view in place": lambda t: t.view(-1)[:3].zero_(),
    "a detached alias in place": lambda t: t.detach().add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("door", DOORS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("what", ["argument", "closure", "leaf"])
def test_inputs_changed_later(what, door, change):
    """Never silently wrong: an error, or the gradient of the values that were read."""
    x = torch.randn(4, 6, requires_grad=True)
    y = torch.randn(4, 6)
    w = torch.randn(4, 6, requires_grad=True)
    if what == "argument":
        out = door(lambda x, y: (x * y).sin() * y, x, y)
    elif what == "closure":
        out = door(lambda x: (x * y).sin() * y, x)
    else:
        out = door(lambda x: (x * w).sin(), x)
    with torch.no_grad():
        CHANGES[change](w if what == "leaf" else y)
    if what == "closure" and door in RERUN:
        return  # what a function reads besides its arguments is its own affair; documented
    with pytest.raises(
        (checkpointing.CheckpointError, RuntimeError), match=r"(chang|modif).*in.?place|different metadata"
    ):
        out.sum().backward()


def test_parameter_refilled():
    """ZeRO, FSDP: a parameter's storage is emptied after forward and refilled before backward."""
    w = torch.nn.Parameter(torch.randn(6, 6))
    x = torch.randn(4, 6, requires_grad=True)
    want = torch.autograd.grad(((x @ w).sin() @ w.t()).sum(), [x, w])
    with checkpoint_scope():
        out = ((x @ w).sin() @ w.t()).sum()
    data = w.detach().clone()
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(data.numel() * 4)
    with torch.autograd._unsafe_preserve_version_counter(w), torch.no_grad():
        w.copy_(data)
    assert bitwise.bits(torch.autograd.grad(out, [x, w])) == bitwise.bits(want)


def test_values_check_finds_an_unseen_write():
    """NumPy writes on a value that a recorded operator had made; only the checksum can know."""
    x = torch.randn(4, 6, requires_grad=True)
    with checkpoint_scope(determinism_check="values"):
        h = (x * 2).detach()
        numpy_write(h)
        out = x * h
    with pytest.raises(checkpointing.CheckpointError):
        out.sum().backward()
