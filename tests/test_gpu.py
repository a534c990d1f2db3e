"""What only a GPU shows. (On side streams: test_offload.py; the comparison: test_main.py.)"""

import contextlib
import functools

import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import PLANNED, Table, bits, plain, planned, replay, rerun, scope, streams
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from checkpointing import CheckpointError, auto, checkpoint_scope, forecast, offload

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
pytestmark = [
    pytest.mark.gpu,
    CUDA,
    oracle.NO_ROOM,
    pytest.mark.filterwarnings("ignore:.*determinis"),
    # Torch warns once in a process, of plain code too: whichever test comes first.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Bits are compared, so kernels must be deterministic."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")  # as cuDNN's recurrent layers need
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[rerun, replay, scope, planned])
def door(request):
    return request.param


# ---- kernels with a state, a random stream or a choice of their own


def leaves(*modules):
    """Two tensors of shape (4, 64, 256) that want gradients, and modules."""

    def make():
        torch.manual_seed(3)
        two = [torch.randn(4, 64, 256, device="cuda", requires_grad=True) for _ in range(2)]
        return (*two, *[module().cuda() for module in modules])

    return make


case = Table(leaves())


def attention(kernel, x, y, **options):
    q, k, v = (t.bfloat16().unflatten(-1, (4, 64)).transpose(1, 2) for t in (x, y, x * y))
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, **options).sin()


@case
def flash_attention(x, y):
    return attention(SDPBackend.FLASH_ATTENTION, x, y, dropout_p=0.25, is_causal=True)


@case
def efficient_attention(x, y):
    mask = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16).fill_diagonal_(-1)
    return attention(SDPBackend.EFFICIENT_ATTENTION, x, y, dropout_p=0.25, attn_mask=mask)


@case
def cudnn_attention(x, y):
    return attention(SDPBackend.CUDNN_ATTENTION, x, y, dropout_p=0.25, is_causal=True)


@case
def attention_in_parts(x, y):
    return attention(SDPBackend.MATH, x, y, dropout_p=0.25)


@case(
    make=leaves(lambda: nn.LSTM(256, 128, 2, dropout=0.25, batch_first=True)),
    refused=("rerun", "scope in rerun"),
)
def an_lstm_of_cudnn(x, y, lstm):
    first, state = lstm(x.sin())
    return (first * lstm(y, state)[0]).exp()


@case(make=leaves(lambda: nn.GRU(256, 128, bidirectional=True)))
def a_gru_of_cudnn(x, y, gru):
    return (gru(x)[0] * y).sin()


@case(make=leaves(lambda: nn.Sequential(nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16), nn.ReLU())))
def convolutions_and_statistics(x, y, layers):
    images = (x * y).view(4, 4, 64, 64).contiguous(memory_format=torch.channels_last)
    return layers(images).exp() * layers(images.sin())


@case(make=leaves(lambda: nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())))
def autocast_to_bfloat16(x, y, layers):
    with torch.autocast("cuda", torch.bfloat16):
        return layers(x) * layers(layers(y))


@case(make=leaves(lambda: nn.Linear(256, 256)))
def autocast_to_float16_with_its_cache(x, y, layer):
    with torch.autocast("cuda", torch.float16):
        return layer(x).sin() + F.dropout(layer(y), 0.5)


@case
def both_random_streams(x, y):
    x = F.dropout(x.sin(), 0.25) * torch.rand(256).cuda()
    return x * torch.rand_like(y) * torch.randn(1).item()


@case
def a_generator_of_the_device(x, y):
    generator = torch.Generator("cuda").manual_seed(5)
    noise = [torch.rand(256, device="cuda", generator=generator) for _ in range(2)]
    return (x * noise[0]).sin() * (y * noise[1]).cos()


@case
def rows_that_are_hit(x, y):
    """Sizes that the host waits for, and sums over rows that occur several times."""
    rows = (x.detach().sum(-1) > 0).nonzero(as_tuple=True)
    most = x.flatten(0, 1).index_select(0, y.detach().flatten(0, 1).argmax(-1))
    return x[rows].exp() * 2, most.sort(-1).values.sin()


@case
def to_the_host_and_back(x, y):
    host = torch.empty(x.shape, pin_memory=True)
    host.copy_(x.detach(), non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return (host.sin().to("cuda", non_blocking=True) * y).exp() * x.cpu().cos().cuda()


@case(backwards=("first", "partial"))  # gradients of gradients differ from one plain run to another
def transforms_and_solvers(x, y):
    """By cuFFT and cuSOLVER."""
    waves = torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(y)).sin()
    square = x[:, :, :64] / 64 + torch.eye(64, device="cuda") * 4
    return waves * 1e-3, torch.linalg.solve(square, y).sin()


@case
def work_on_a_stream_of_its_own(x, y):
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        inner = (x * y).sin().exp()
    here.wait_stream(side)
    return inner.cos() * x


@case(make=leaves(lambda: nn.TransformerEncoderLayer(256, 4, 512, 0.1, batch_first=True)))
def a_transformer_layer(x, y, layer):
    return layer(x) * layer(y.sin())


test_bit_for_bit, _ = case.tests()


def test_a_rerun_refuses_dropout_whose_random_state_cudnn_keeps_to_itself():
    x = torch.randn(4, 8, 16, device="cuda").requires_grad_()
    one, two = nn.LSTM(16, 16, 2).cuda(), nn.LSTM(16, 16, 2, dropout=0.5).cuda()
    assert rerun(one)(x)[0].requires_grad
    assert rerun(two.eval())(x)[0].requires_grad
    with pytest.raises(CheckpointError, match=r"dropout in LSTM.* to itself"):
        rerun(two.train())(x)
    assert rerun(two, preserve_rng_state=False)(x)[0].requires_grad


def gradient(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def gradients_of_one_function_after_another(x):
    first = gradient(x.sin() * x.exp(), x)
    return first * gradient(x.cos() * x.sigmoid().square(), x)


def gradients_of_gradients(x):
    first = gradient(x.sin() * x.exp() * x.sigmoid(), x)
    return first * gradient(first.sin() * x.cos(), x)


def test_gradients_in_a_function(door):
    """Where one goes over nodes that another has made, a rerun would save tensors in another order
    than the forward did, in two threads."""
    x = torch.linspace(0, 1, 64, device="cuda").requires_grad_()
    for f in (gradients_of_one_function_after_another, gradients_of_gradients):
        refused = door is rerun and f is gradients_of_gradients
        with pytest.raises(CheckpointError) if refused else contextlib.nullcontext():
            assert torch.equal(gradient(door(f)(x), x), gradient(f(x), x))


# ---- training


def model_and_batches():
    torch.manual_seed(4)
    layers = [
        nn.TransformerEncoderLayer(256, 4, 1024, 0.1, batch_first=True, norm_first=True)
        for _ in range(6)
    ]
    model = nn.Sequential(nn.Embedding(512, 256), *layers, nn.Linear(256, 512)).cuda()
    return model, [torch.randint(512, (4, 65), device="cuda") for _ in range(4)]


def trained(region, dtype):
    """Weights, losses and random streams after four steps: autocast, scaled losses, gradients that
    are clipped, and a fused optimizer."""
    model, batches = model_and_batches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    losses = []

    def loss_of(tokens):
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            logits = model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    for tokens in batches:
        loss = region(loss_of)(tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.detach())
    return bits([losses, [*model.parameters()]]), streams()


@functools.cache
def trained_plainly(dtype):
    return trained(plain, dtype)


DOORS = {
    "rerun": rerun,
    "replay": replay,
    "scope": scope,
    "auto": functools.partial(scope, policy=auto()),
    "budget": functools.partial(scope, policy=auto(budget="4 MiB")),
    "least": functools.partial(scope, policy=PLANNED),
    "offload": functools.partial(scope, policy=offload(auto())),
    "scope in rerun": lambda fn: rerun(scope(fn)),
    "rerun in scope": lambda fn: scope(rerun(fn)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", DOORS)
def test_training_leaves_the_same_bits(name, dtype):
    assert trained(DOORS[name], dtype) == trained_plainly(dtype)


def peak_of(step):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def linear_stack():
    """Twelve products and tanh, (16384, 512) each, with gradients there before."""
    layers = nn.ModuleList(nn.Linear(512, 512, device="cuda") for _ in range(12))
    oracle.with_gradients(layers.parameters())
    x = torch.randn(16384, 512, device="cuda")
    return lambda: functools.reduce(lambda x, layer: layer(x).tanh(), layers, x).square().mean()


@pytest.mark.parametrize("policy", [None, auto(budget="320 MiB"), auto(budget="160 MiB")])
def test_the_peak_is_as_predicted(policy):
    """By the allocator's own count, which is in blocks of 512 bytes."""
    loss = linear_stack()
    step = loss if policy is None else scope(loss, policy=policy)
    step().backward()  # kernels take the memory that they work in
    measured = peak_of(lambda: step().backward())
    if policy is None:
        predicted = forecast(loss).rows[0].peak
    else:
        with checkpoint_scope(policy) as block:
            value = loss()
        value.backward()
        predicted = block.stats.peak_predicted
    assert predicted == pytest.approx(measured, rel=0.05)


# ---- streams, capture, memory


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
    sides = [torch.cuda.Stream() for _ in range(2)]

    def on(stream, fn, *args):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return fn(*args)

    def joined(fn):
        def run(layers, x):
            parts = [on(stream, fn, layers, x * (i + 1)) for i, stream in enumerate(sides)]
            for stream in sides:
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
