"""Autograd constructs and Python control flow inside of regions, around them and between them; small models."""

import pytest
import torch
import torch.utils.checkpoint
from bitwise import REPLAY, RERUN, Table, integers, leaves
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from checkpointing import checkpoint_scope, checkpointed, keep

pytestmark = pytest.mark.filterwarnings("ignore")  # prototypes and betas of torch
case = Table(leaves())


# ---- custom functions


class NewStyle(Function):
    @staticmethod
    def forward(x, y):
        e = x.exp()
        return e * y, e

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, g, g2):
        _, y, e = ctx.saved_tensors
        assert g2 is None
        gx = g * e * y if ctx.needs_input_grad[0] else None
        return gx, (g * e if ctx.needs_input_grad[1] else None)


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.cos())
        ctx.plain = x.sin()
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] + 0 * ctx.plain


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2 + 0 * ctx.saved_tensors[0]


class SavesIntermediate(Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            d = x.detach().requires_grad_()
            y = d.sin().exp()
        ctx.inner = (d, y)
        return y.detach()

    @staticmethod
    def backward(ctx, g):
        d, y = ctx.inner
        return torch.autograd.grad(y, d, g)


@case
def new_style(x, y):
    a, e = NewStyle.apply(x.sin(), y * 2)
    b, _ = NewStyle.apply(x.detach(), y.cos())
    return a * b, e


@case(backwards=("first", "partial"))
def once_differentiable(x, y):
    return Once.apply(x * y).exp()


@case
def mark_dirty(x, y):
    h = x.sin()
    k = Dirty.apply(h)
    return k * h.exp()


@case(backwards=("first",))
def function_with_a_graph_inside(x, y):
    return SavesIntermediate.apply(x * y) * 2


# ---- custom operators
@torch.library.custom_op("bitwise_tests::scale", mutates_args=())
def scale(x: torch.Tensor, f: float) -> torch.Tensor:
    return x.clone() * f


scale.register_autograd(
    lambda ctx, g: (g * ctx.f * ctx.saved_tensors[0].cos(), None),
    setup_context=lambda ctx, inputs, output: (
        setattr(ctx, "f", inputs[1]),
        ctx.save_for_backward(inputs[0]),
    ),
)


@torch.library.custom_op("bitwise_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor, by: float) -> None:
    x.numpy()[...] += by


@torch.library.custom_op("bitwise_tests::bump_and_tell", mutates_args=("x",))
def bump_and_tell(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@case(backwards=("first", "partial"))
def custom_op(x, y):
    return scale(x.sin(), 2.0) * scale(y, 0.5).exp()


@case(whole=True, doors=REPLAY)
def custom_op_that_writes_outside(region, x, y):
    b = torch.ones(4, 6, dtype=x.dtype)

    def f(x):
        h = x * b.clone()
        bump(b, 1.0)
        t = bump_and_tell(b)
        return h.exp() * b.clone() * t

    return region(f, x), region(f, y), b


# ---- hooks
@case(whole=True)
def tensor_hooks(region, x, y):
    def f(x, y):
        h = x.sin()
        h.register_hook(lambda g: g * 2)
        k = (h * y).exp()
        k.register_hook(lambda g: g + h.detach())
        return k * h

    return region(f, x, y * 1)


@case(whole=True, make=leaves(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))))
def module_hooks(region, x, y, m):
    calls = []
    handles = [
        m[0].register_forward_hook(lambda m, i, o: o * 1.5),
        m[1].register_forward_pre_hook(lambda m, i: (i[0].cos(),)),
        m[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,)),
        m.register_forward_hook(lambda m, i, o: calls.append(1)),
    ]
    assert handles
    out = region(m, x * y)
    return out * len(calls)


@case(whole=True)
def retain_grad_inside(region, x, y):
    seen = []

    def f(x):
        h = x.sin()
        h.retain_grad()
        seen.append(h)
        return h.exp()

    return region(f, x)


# ---- islands
@case
def islands(x, y):
    with torch.no_grad():
        s = (x.exp() @ y.t()).softmax(-1)
        s.mul_(2)
    with torch.inference_mode():
        t = x * 2
        t.mul_(3)
    torch.set_grad_enabled(False)
    a = x.exp()
    torch.set_grad_enabled(True)
    return s @ x.sin() * y.detach().cos() * t.clone(), a * x.sin()


@case(whole=True)
def gradient_of_a_leaf_inside(region, x, y):
    def f(x):
        w = torch.ones(6, dtype=x.dtype, requires_grad=True)
        (x.detach() * w).exp().sum().backward()
        return x * w.grad

    return region(f, x)


# ---- other regions and hooks
@case(whole=True)
def torch_checkpoint_around(region, x, y):
    return torch.utils.checkpoint.checkpoint(
        lambda x, y: region(lambda x: F.dropout((x * y).sin(), 0.3).exp(), x).cos(),
        x,
        y,
        use_reentrant=False,
    )


@case(whole=True, backwards=("first",))
def reentrant_checkpoint_inside(region, x, y):
    def f(x, y):
        return torch.utils.checkpoint.checkpoint(
            lambda x: (x * 2).sin().exp(), x * y, use_reentrant=True
        ).cos()

    return region(f, x, y * 1)


@case
def save_on_cpu_inside(x, y):
    h = x.sin()
    with torch.autograd.graph.save_on_cpu():
        k = (h * y).exp()
    return k * h.cos()


@case
def user_hooks_inside(x, y):
    h = x.sin()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().numpy().copy(), lambda a: torch.from_numpy(a)
    ):
        k = (h * y).exp()
    return k * h


@case(whole=True, make=integers)
def user_hooks_around(region, x, y):
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().numpy().copy(), lambda a: torch.from_numpy(a)
    ):
        h = x.relu()
        k = region(lambda h, y: (h * y.t()).relu() * h, h, y.detach().t())
        return region(lambda k: (k.t() @ k).clamp(-9, 9).square(), k)


@case(whole=True)
def regions_in_regions(region, x, y):
    def inner(h):
        return F.dropout(h.exp(), 0.2) * h

    def middle(h, y):
        return region(inner, h * y).sin() * region(inner, y)

    return region(lambda x, y: region(middle, x, y) + region(middle, y, x.cos()), x, y * 1)


@case(whole=True)
def mixed_doors(region, x, y):
    def f(x):
        with checkpoint_scope():
            a = checkpointed(lambda x: x.exp().sin())(x)
            b = checkpointed(lambda x: x.cos() * a, backend="replay")(a)
        return a * b

    return region(f, x) * region(lambda x: f(f(x)), y)


@case(whole=True, refused=RERUN)
def kept_values(region, x, y):
    def f(x, y):
        h = x
        for i in range(5):
            h = (h * y).sin() + F.dropout(h, 0.2)
            if i % 2:
                h = keep(h)
            h[i % 4].mul_(1.5) if i == 3 else None
        return keep(h).exp(), h * 2

    return region(f, x, y * 1)


@case(whole=True, refused=RERUN)
def kept_then_written(region, x, y):
    def f(x):
        h = keep(x.exp())
        k = h.clone()
        g = keep(k * 2)
        g.mul_(h)
        return g.sin() * h

    return region(f, x)


# ---- decisions by data
@case
def decisions_by_data(x, y):
    h = x
    while h.abs().max().item() > 0.2:
        h = (h * 0.6).sin()
    h = h * 2 if torch.equal(h, h.clone()) and bool((h < 2).all()) else h.exp()
    i = (h > 0).nonzero()
    u, inv, counts = torch.unique((h * 3).detach().round(), return_inverse=True, return_counts=True)
    m = h[h.detach() > 0.1].exp()
    try:
        torch.mm(h, h)
    except RuntimeError:
        h = h.exp()
    k = torch.topk(h, 3).values * torch.kthvalue(y, 2).values[:, None]
    return (
        m * m,
        h[i[:, 0], i[:, 1]].square(),
        (u[inv] * counts[inv]).view_as(h) * h,
        k,
        torch.cummax(x * y, 1).values,
    )


# ---- small models, of an input of 4 by 6
class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 1, bias=False),
            nn.BatchNorm2d(4, momentum=None),
            nn.SiLU(inplace=True),
            nn.Dropout2d(0.3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        )

    def forward(self, x):
        return self.body(x.expand(3, 4, 6)[:, None] * torch.arange(1.0, 4).view(3, 1, 1, 1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(5, 4, bidirectional=True)
        self.rnn = nn.RNNCell(8, 4)
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x):
        h, (c, n) = self.lstm(x.view(2, 2, 6))
        packed = nn.utils.rnn.pack_padded_sequence(h, torch.tensor([2, 1]), batch_first=True)
        g, _ = self.gru(packed)
        g, _ = nn.utils.rnn.pad_packed_sequence(g, batch_first=True)
        a, b = self.cell(self.rnn(g[:, 0]))
        return g * 2, c.sum() * n.exp(), a * b


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(6, 2, 12, dropout=0.1, batch_first=True)

    def forward(self, x):
        e = self.embed(torch.tensor([[1, 2, 0, 5], [3, 4, 4, 0]])) + x
        mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
        h = self.encoder(e, mask=mask, is_causal=True)
        return self.decoder(h, e)


class Scaled(nn.Module):
    """`max_norm` writes the weight in the forward."""

    def __init__(self):
        super().__init__()
        self.scaled = nn.Embedding(9, 6, max_norm=1.0)

    def forward(self, x):
        return (self.scaled(torch.tensor([1, 2, 2, 5])) * x).exp()


for model in (ConvNet, Recurrent, Transformer, Scaled):

    def _whole(x, y, m):
        return m(x * 1), m((x * y).sin())

    def _module(region, x, y, m):
        return region(m, x * 1), region(m, y)

    _whole.__name__ = f"model_{model.__name__}"
    _module.__name__ = f"module_{model.__name__}"
    case(_whole, make=leaves(model))
    if model not in (Recurrent, Transformer):  # slow, and much like the others
        case(_module, make=leaves(model), whole=True)


# Plain code makes a cycle in these, too.
test_constructs, test_nothing_stays = case.tests(
    ("retain_grad_inside", "tensor_hooks", "save_on_cpu_inside")
)
