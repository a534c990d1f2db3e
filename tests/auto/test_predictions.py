"""The peak that a plan predicts, beside the one that is measured."""

import functools
import math

import oracle
import pytest
import torch
from oracle import NO_ROOM, memory_of, through
from planned import bytes_of, predicted, scoped
from torch import nn

from checkpointing import auto, checkpoint_scope

READERS = {  # of one activation: their gradients are added up
    "linear layers": lambda y: sum(head(y).square().sum() for head in linears(12, 48, 4)),
    "views": lambda y: sum((y.view(-1, 48) * n).sum() for n in range(8)),
    "a view, then a product": lambda y: (y * 2).sum() + y.flatten(0, 1).sin().sum(),
    "a product, then a view": lambda y: y.flatten(0, 1).sin().sum() + (y * 2).sum(),
    "products with itself": lambda y: (y @ y.mT).square().sum() + y[:, 0].sin().sum(),
    "rows, each with all": lambda y: (y.flatten(0, 1)[:256] @ y.flatten(0, 1)[:256].T).sum(),
    "a sum": lambda y: (y + (y * 2).sin()).square().sum() + (y * 3).sum(),
}


@NO_ROOM
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("policy", [{}, {"peak": 2**30}])
def test_sums_of_gradients_of_what_is_read_several_times_are_predicted(read, policy):
    """Autograd adds in place, but not to a gradient that comes through a view."""
    layer, x = nn.Linear(48, 48), torch.randn(16, 80, 48)
    oracle.with_gradients(layer.parameters())
    assert predicted(lambda: read(layer(x).tanh()), **policy) == pytest.approx(1, rel=0.02)


def test_results_of_operators_that_write_outside_are_predicted():
    """They are held: an observer of a quantisation must not run twice."""
    layers, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)), torch.rand(1000, 64)
    oracle.with_gradients(layers.parameters())
    on, states = torch.ones(1, dtype=torch.int64), torch.ones(6, 3, 1)
    points = torch.zeros(6, 1, dtype=torch.int32)

    def forward():
        y = x
        for layer, state, point in zip(layers, states, points, strict=True):
            y = nn.functional.gelu(layer(y))
            y = torch.fused_moving_avg_obs_fake_quant(y, on, on, *state, point, 0.01, 0, 255, 0)
        return y.square().mean()

    assert predicted(forward) == pytest.approx(1, rel=0.05)


def linears(count, width, out):
    return nn.ModuleList(nn.Linear(width, out) for _ in range(count))


def with_one_parameter(parts):
    weights, x = nn.ParameterList([torch.randn(16, 64, 64) / 8]), torch.randn(100, 64)

    def run():
        y = x
        for weight in parts(weights[0]):
            y = y + (y @ weight).tanh()
        return y

    return weights, run


class Shown:
    """Programs that read parts of tensors, or more than these hold. (The kernel of attention needs
    some memory itself.)"""

    def one_row_of_all():
        layers, x = linears(16, 32, 32), torch.randn(256, 32)

        def run():
            rows = torch.stack([layer(x).tanh() for layer in layers], 1)
            products = (rows @ rows.mT).flatten(1)
            return torch.cat([rows[:, 0], products], 1)

        return layers, run

    def a_row_of_each_layer():
        layers, x = linears(10, 64, 64), torch.randn(16, 32, 64)

        def run():
            y, rows = x, []
            for layer in layers:
                y = y + layer(y).tanh()
                rows.append(y[:, 0])
            return torch.stack(rows)

        return layers, run

    def keys_for_several_queries():
        layers, x = linears(8, 64, 96), torch.randn(4, 64, 64)

        def run():
            y = x
            for layer in layers:
                q, *kv = layer(y).split([64, 16, 16], -1)
                q = q.view(4, 64, 4, 16).transpose(1, 2)
                k, v = [each.view(4, 1, 64, 16).expand_as(q) for each in kv]
                attended = nn.functional.scaled_dot_product_attention(q, k, v)
                y = y + attended.transpose(1, 2).flatten(2)
            return y

        return layers, run

    def edges_that_read_their_nodes():
        """What the edges get is a view of the gradient of what was joined."""
        layers, nodes, edges = linears(6, 96, 32), torch.randn(250, 32), torch.randn(4000, 32)
        sources, targets = torch.arange(4000) % 250, torch.arange(4000) // 16

        def run():
            x, e = nodes, edges
            for layer in layers:
                made = layer(torch.cat([x[sources], x[targets], e], 1)).sigmoid()
                x, e = x + torch.zeros_like(x).index_add(0, targets, made), e + made
            return x

        return layers, run

    def gates_written_in_place():
        net, x = nn.GRU(64, 64, 2), torch.randn(10, 128, 64, requires_grad=True)
        return net, lambda: net(x)[0]

    def gates_written_in_place_of_cells():
        """Each window begins before its gates are split."""
        layers, x = linears(3, 32, 32), torch.randn(4000, 32)
        cells = nn.ModuleList(nn.GRUCell(32, 32) for _ in layers)

        def run():
            y = x
            for layer, cell in zip(layers, cells, strict=True):
                y = cell(layer(y), y)
            return y

        return nn.ModuleList([layers, cells]), run

    def weights_in_one_parameter():
        """As of scanned layers: their gradients wait for the last one."""
        return with_one_parameter(lambda weights: weights.unbind())

    def weights_of_one_parameter_by_index():
        return with_one_parameter(lambda weights: [weights[n] for n in range(16)])

    def weights_in_a_flat_parameter():
        split = lambda weights: weights.view(-1).split(64 * 64)
        return with_one_parameter(lambda weights: [part.view(64, 64) for part in split(weights)])

    def log_probabilities_by_time():
        """A kernel copies the gradient, which a CTC loss makes in the other order."""
        layers, x = linears(3, 64, 64).append(nn.Linear(64, 300)), torch.randn(8, 40, 64)
        labels, long, short = (
            torch.randint(1, 300, (8, 9)),
            torch.full((8,), 40),
            torch.full((8,), 9),
        )

        def run():
            found = through(layers, x).log_softmax(-1).transpose(0, 1)
            return nn.functional.ctc_loss(found, labels, long, short, reduction="none")

        return layers, run

    def norms_of_images():
        """Between permutations, as `LayerNorm2d`: both the image and the gradient are copied."""
        layers = nn.ModuleList(nn.Conv2d(16, 16, 3, 1, 1) for _ in range(4))
        norms, x = nn.ModuleList(nn.LayerNorm(16) for _ in layers), torch.randn(4, 16, 24, 24)

        def run():
            y = x
            for layer, norm in zip(layers, norms, strict=True):
                y = y + norm(layer(y).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).sigmoid()
            return y

        return nn.ModuleList([layers, norms]), run

    def images_that_are_joined():
        """What was joined gets views of one gradient, which is not in order for them."""
        layers = nn.ModuleList(nn.Conv2d(32, 32, 3, 1, 1) for _ in range(3))
        last, x = nn.Conv2d(96, 8, 1), torch.randn(4, 32, 24, 24)

        def run():
            return last(torch.cat([layer(x * 2) for layer in layers], 1))

        return nn.ModuleList([layers, last]), run

    def images_that_grow():
        """In the forward, a transposed convolution takes twice its result beside that."""
        frozen = nn.ModuleList(nn.ConvTranspose2d(16, 16, 4, 2, 1) for _ in range(3))
        frozen.requires_grad_(False)
        first, x = nn.Conv2d(3, 16, 3, 1, 1), torch.randn(4, 3, 8, 8)

        def run():
            with torch.no_grad():
                known = through(frozen, torch.randn(4, 16, 8, 8)).mean((2, 3))
            return first(x).mean((2, 3)) * known

        return first, run

    def halves_of_a_transposed_parameter():
        """Their sum is a third tensor: a gradient of a view is a view."""
        weights = nn.ParameterList([torch.randn(256, 512)])

        def run():
            return weights[0].t()[:256].tanh() * weights[0].t()[256:].sin()

        return weights, run

    def a_table_in_chunks():
        """A head whose logits are computed for parts of the words, one after the other."""
        layers, head, x = linears(4, 64, 64), nn.Linear(64, 800), torch.randn(100, 64)

        def run():
            y = through(layers, x)
            parts = head.weight.chunk(8)
            return torch.stack([nn.functional.linear(y, part).logsumexp(-1) for part in parts])

        return nn.ModuleList([layers, head]), run

    def a_recurrent_layer_that_saves_its_result():
        net, x = nn.LSTM(64, 64), torch.randn(32, 64, 64, requires_grad=True)
        return net, lambda: net(x)[0].exp()


@pytest.mark.parametrize("build", [value for name, value in vars(Shown).items() if name[0] != "_"])
def test_the_gradients_of_parts_and_of_expanded_tensors_are_predicted(build):
    model, run = build()
    oracle.with_gradients(model.parameters())
    most = 0.1 if build is Shown.keys_for_several_queries else 0.02
    assert predicted(lambda: run().square().mean()) == pytest.approx(1, rel=most)


class Read:
    """Programs that read a matrix twice."""

    def table_and_head(w):
        return nn.functional.linear(nn.functional.embedding(torch.arange(8), w), w)

    def table_and_head_in_bfloat16(w):
        with torch.autocast("cpu", torch.bfloat16):
            return Read.table_and_head(w).float()

    def table_for_two_towers(w):
        rows = [nn.functional.embedding(torch.arange(8) + n, w) for n in (0, 9)]
        return rows[0] * rows[1]

    def products(w):
        return ((torch.ones(1, 2000) @ w).tanh() @ w.t()).tanh()

    def products_with_the_transposed(w):
        return (torch.ones(1, 64) @ w.t()).tanh() @ w


@pytest.mark.parametrize("read", [value for name, value in vars(Read).items() if name[0] != "_"])
def test_the_sum_of_two_gradients_is_predicted(read):
    """It is a third one, beside both, only where autograd has the first one as a view."""
    w = nn.Parameter(torch.randn(2000, 64))
    oracle.with_gradients([w])
    assert predicted(lambda: read(w).square().mean()) == pytest.approx(1, rel=0.02)


def test_what_a_window_starts_from_is_there_until_all_that_it_makes_is_used():
    """The budget has room for the result of a `tanh`, which others are made from."""
    pairs = [(nn.Linear(32, 128), nn.Linear(128, 32)) for _ in range(8)]
    head, x = nn.Linear(32, 64), torch.randn(256, 32)
    oracle.with_gradients([p for layer in [*sum(pairs, ()), head] for p in layer.parameters()])

    def forward():
        y = x
        for up, down in pairs:
            z = up(y)
            y = y + down(0.5 * z * (1 + (0.8 * (z + 0.04 * z.pow(3))).tanh()))
        return head(y).logsumexp(-1).mean()

    assert predicted(forward, budget=400_000) == pytest.approx(1, rel=0.02)


CHANNELS_LAST = {"memory_format": torch.channels_last}
ABOUT = {"least": 0.95, "most": 1.05}
HAS_AVX512 = "512" in torch.backends.cpu.get_cpu_capability()
DILATED = {} if HAS_AVX512 else ABOUT  # which have no kernels of their own without it
CONVOLUTIONS = [  # copies of images and weights; where channels are last, weights with more of them
    (nn.Conv2d(96, 192, 3, 2, 1), (2, 96, 8, 8), {}, {}),
    (nn.Conv2d(96, 24, 2, 2), (2, 96, 8, 8), {}, {}),
    (nn.ConvTranspose2d(96, 24, 4, 2, 1), (2, 96, 8, 8), {}, {}),
    (nn.Conv2d(96, 96, 3, padding=1), (4, 96, 2, 2), {}, {}),  # wider than the image
    (nn.ConvTranspose2d(16, 1, 4, 2, 1), (2, 16, 16, 16), {}, {}),
    (nn.Sequential(nn.Flatten(2), nn.Conv1d(96, 24, 3)), (2, 96, 8, 8), CHANNELS_LAST, {}),
    (nn.Conv2d(96, 96, 7, padding=3, groups=96), (2, 96, 8, 8), CHANNELS_LAST, {}),
    *((nn.Conv2d(32, 64, 3, dilation=2), (2, 32, n, n), {}, DILATED) for n in (12, 36)),
    # Torch unfolds few images, and those in float64: a matrix of all that the kernel covers.
    (nn.Conv2d(8, 16, 3, padding=1), (1, 8, 32, 32), {}, ABOUT),
    (nn.Conv2d(8, 16, 3, padding=1).double(), (4, 8, 32, 32), {}, ABOUT),
    (nn.Conv2d(8, 16, 3, padding=2, dilation=2).double(), (4, 8, 32, 32), {}, ABOUT),
    (nn.Conv3d(8, 8, 3, padding=1), (1, 8, 16, 16, 16), {}, ABOUT),
]


@pytest.mark.parametrize(("layer", "shape", "layout", "limits"), CONVOLUTIONS)
def test_what_the_backward_of_a_convolution_works_with_is_predicted(layer, shape, layout, limits):
    """What a plan counts is at least what is needed: other processors may need less."""
    x = torch.randn(shape, dtype=next(layer.parameters()).dtype).to(**layout).requires_grad_()
    found = predicted(lambda: layer(x * 2).square().mean(), budget="1 GiB")
    assert limits.get("least", 1 / 1.1) <= found <= limits.get("most", math.inf)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_what_a_convolution_of_frames_without_a_gradient_works_with_is_predicted(channels):
    """Frames in colour are read as they are; those with fewer or more channels are copied."""
    layer, frames = nn.Conv2d(channels, 16, 8, 4), torch.randn(16, channels, 64, 64)
    assert 1.05 * predicted(lambda: layer(frames / 2).square().mean()) >= 1


@pytest.mark.parametrize("is_video", [False, True])
@pytest.mark.parametrize("wide", [13, 14, 16])
def test_what_makes_patches_of_images_in_colour_works_with_is_predicted(wide, is_video):
    """Their three channels are not padded. Wide patches have no kernel of their own, which takes
    more for each thread. (Other processors may need less.)"""
    widest = 14 if HAS_AVX512 else 13
    layer = (nn.Conv3d if is_video else nn.Conv2d)(3, 96, wide, wide)
    x = torch.randn(2, wide, 3, 2 * wide, 2 * wide).transpose(1, 2)
    run = scoped(lambda: layer((x if is_video else x[:, :, 0].clone()) / 2).square().mean())
    _, peak = bytes_of(run)
    most = 4 + 4 * torch.get_num_threads() * (wide > widest)
    assert peak / 1.1 <= run.scope.stats.peak_predicted <= most * layer.weight.nbytes


def against_zeros(loss):
    return lambda x: loss(x, torch.zeros_like(x))


LOSSES = ("binary_cross_entropy_with_logits", "huber_loss", "mse_loss", "smooth_l1_loss")
PICKED = torch.zeros(8, 8, 100, 1, dtype=torch.int64)
MASK = torch.rand(8, 100, 100) > 0.5
FILTERS = nn.Parameter(torch.randn(100, 100, 51, dtype=torch.complex64))
oracle.with_gradients([FILTERS])
products = functools.partial(torch.einsum, "bix,iox->box")  # as in a Fourier neural operator
WORKING = {name: against_zeros(getattr(nn.functional, name)) for name in LOSSES}
WORKING |= {
    name: getattr(torch, name)
    for name in oracle.words("""
        abs acos asin asinh atan atanh cos cosh digamma exp2 lgamma log10 log1p log2 nan_to_num
        reciprocal rsqrt sin sinh sqrt tan""")
}
PUT = torch.arange(8 * 100 * 100).view(8, 100, 100) % 10
WORKING |= {
    f"scatter_reduce, {how}": lambda x, how=how: torch.ones(8, 10, 100).scatter_reduce(
        1, PUT, x, how
    )
    for how in ("mean", "amax", "amin", "prod")
}
WORKING |= {
    "acosh": lambda x: torch.acosh(x + 1.5),
    "add of another type": lambda x: x.bfloat16().exp() + x,
    "amax": lambda x: x.amax(-1),
    "batch norm": nn.BatchNorm1d(100),
    "cdist": lambda x: torch.cdist(x, x[:, :80]),
    "cdist of one norm": lambda x: torch.cdist(x, x[:, :80], p=1.0),
    "clamp": lambda x: x.clamp(-1, 1),
    "cumprod": lambda x: x.cumprod(-1),
    "div": lambda x: x.exp() / (x + 2),
    "div, expanded": lambda x: x.exp() / x.mean(2, keepdim=True).expand_as(x),
    "dropout by hand": lambda x: x * (torch.rand_like(x) > 0.1) / 0.9,
    "frequencies": lambda x: torch.fft.fftfreq(100) * x,
    "gather": lambda x: x.unsqueeze(1).expand(-1, 8, -1, -1).gather(3, PICKED),
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "irfft of columns": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), dim=1),
    "irfft of products": lambda x: torch.fft.irfft(products(torch.fft.rfft(x), FILTERS)),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "logaddexp": lambda x: torch.logaddexp(x, x * 2),
    "logsumexp": lambda x: x.logsumexp(-1),
    "masked_select": lambda x: x.masked_select(MASK),
    "max_pool1d": lambda x: nn.functional.max_pool1d(x, 2),
    "maximum": lambda x: torch.maximum(x, x.exp()),
    "mul by a mask": lambda x: x.exp() * (x > 0.5),
    "mul of rows and columns": lambda x: x.sum(1, keepdim=True) * x.sum(2, keepdim=True),
    "norm": lambda x: x.norm(dim=-1),
    "pow": lambda x: x**3,
    "prelu": nn.PReLU(),
    "prod": lambda x: x.prod(-1),
    "roll of two dimensions": lambda x: x.exp().roll((1, 2), (1, 2)),
    "sort": lambda x: x.sort(-1).values,
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var(-1),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
}
ROW = torch.eye(100)  # a product with it is a view, in which operators in place write
WORKING |= {
    "relu_": lambda x: x.relu_(),
    "sqrt_": lambda x: x.sqrt_(),
    "relu_ of a view": lambda x: (x @ ROW).relu_(),
    "sigmoid_ of a view": lambda x: (x @ ROW).sigmoid_(),
}


@pytest.mark.parametrize("make", [nn.Parameter, torch.Tensor.requires_grad_])
def test_gradients_of_weights_that_are_no_parameters_are_predicted(make):
    """As in functional code. They are taken, not added up."""
    weights, x = [make(torch.randn(64, 64)) for _ in range(12)], torch.randn(32, 64)

    def step():
        with checkpoint_scope(auto()) as step.scope:
            y = x
            for weight in weights:
                y = (y @ weight).tanh()
            loss = y.square().mean()
        return sum(map(torch.sum, torch.autograd.grad(loss, weights))).requires_grad_()

    step()
    assert step.scope.stats.peak_predicted == pytest.approx(memory_of(step).peak, rel=0.02)


@pytest.mark.parametrize("operator", WORKING.values(), ids=WORKING)
def test_what_an_operator_works_with_is_predicted(operator):
    """Derivatives of several operators, copies, and gradients that integers don't have."""
    x = torch.rand(8, 100, 100).add(0.1).div(2.3).requires_grad_()
    x.grad = torch.zeros_like(x)
    if isinstance(operator, nn.Module):
        oracle.with_gradients(operator.parameters())
    assert abs(predicted(lambda: (operator(x * 2) * 2).sum()) - 1) <= 0.02


def test_a_tensor_that_only_lends_its_sizes_takes_no_memory_in_a_replay():
    """As in graph networks, where sums over edges begin with `messages.new_zeros(...)`. It gets no
    gradient, either."""
    layers, rest = (nn.ModuleList(nn.Linear(64, 64) for _ in range(5)) for _ in range(2))
    x, edges = torch.rand(500, 64), torch.randint(500, (2, 3000))

    def forward():
        y = x
        for layer, other in zip(layers, rest, strict=True):
            messages = y.index_select(0, edges[0])
            places = edges[1][:, None].expand_as(messages)
            sums = messages.new_zeros(500, 64).scatter_add_(0, places, messages)
            y = y + (layer(sums) + other(y)).tanh()
        return y.square().mean()

    oracle.with_gradients(nn.ModuleList([layers, rest]).parameters())
    assert predicted(forward) == pytest.approx(1, rel=0.02)


def test_the_copy_that_a_softmax_makes_of_a_part_is_predicted():
    """Logits without the last ones, of a model that does not train."""
    layer, head, x = nn.Linear(64, 64), torch.rand(64, 500), torch.randn(8, 64, 64)
    oracle.with_gradients(layer.parameters())

    def forward():
        with torch.no_grad():
            least = (x @ head)[:, :-1].log_softmax(-1).amin(-1)
        return (layer(x)[:, :-1].amax(-1) - least).square().sum()

    assert predicted(forward) == pytest.approx(1, rel=0.02)


def test_the_copy_that_a_softmax_makes_of_a_part_in_a_window_is_predicted():
    """As in linear attention: queries are a third of what one layer makes."""
    ups = [nn.Conv1d(8, 384, 1, bias=False) for _ in range(3)]
    downs, x = [nn.Conv1d(128, 8, 1) for _ in ups], torch.randn(2, 8, 256)
    oracle.with_gradients(nn.ModuleList([*ups, *downs]).parameters())

    def forward():
        y = x
        for up, down in zip(ups, downs, strict=True):
            parts = up(nn.functional.normalize(y, dim=1)).chunk(3, 1)
            q, k, v = [part.view(2, 4, 32, 256) for part in parts]
            context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
            read = torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2) / 2)
            y = y + nn.functional.normalize(down(read.reshape(2, 128, 256)), dim=1)
        return y.square().mean()

    assert predicted(forward) == pytest.approx(1, rel=0.002)


ROWS = {
    "rows": lambda p: p.__getitem__,
    "slices": lambda p: lambda n: p[n : n + 1].squeeze(0),
    "chunks of rows": lambda p: lambda n: torch.cat([part.tanh() for part in p[n].chunk(3, -1)], 1),
    "rows read again": lambda p: lambda n: p[n].sin() * p[n],
    "a list": lambda p: list(p).__getitem__,
    "unbind": lambda p: p.unbind().__getitem__,
}


@pytest.mark.parametrize("rows_of", ROWS.values(), ids=ROWS)
def test_steps_that_each_take_a_row_of_one_tensor_need_no_more_than_plain_code(rows_of):
    """As in a recurrent net over a projection. Windows would need that, which nobody saves. Where
    each step takes its row, the gradient of that is as large as all of it."""
    x = torch.randn(24, 32, 32)
    project, again, out = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)
    oracle.with_gradients(nn.ModuleList([project, again, out]).parameters())

    def forward():
        h, loss = torch.zeros(32, 32), 0
        row = rows_of(project(x))
        for n in range(24):
            h = out((row(n) + again(h)).sigmoid()).tanh()
            loss = loss + h.square().mean()
        return loss

    assert abs(predicted(forward) - 1) <= 0.05
    run = scoped(forward)
    run().backward()
    assert bytes_of(run).peak <= bytes_of(forward).peak
