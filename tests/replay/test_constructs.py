"""Autograd constructs and Python control flow inside of regions, around them and between them;
small models."""

import pytest
import torch
from oracle import REPLAY, Table, leaves
from torch import nn
from torch.autograd import Function

pytestmark = pytest.mark.filterwarnings("ignore")  # prototypes and betas of torch
case = Table(leaves())


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


class SavesIntermediate(Function):
    """A graph inside, and a backward that can't be differentiated."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            d = x.detach().requires_grad_()
            y = d.sin().exp()
        ctx.save_for_backward(x.cos())
        ctx.inner = (d, y)
        return y.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        d, y = ctx.inner
        return torch.autograd.grad(y, d, g)[0] + ctx.saved_tensors[0]


@case
def new_style(x, y):
    a, e = NewStyle.apply(x.sin(), y * 2)
    b, _ = NewStyle.apply(x.detach(), y.cos())
    return a * b, e


@case(backwards=("first",))
def function_with_a_graph_inside(x, y):
    return SavesIntermediate.apply(x * y) * 2


@torch.library.custom_op("tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor, by: float) -> None:
    x.numpy()[...] += by


@case(whole=True, doors=REPLAY)
def custom_op_that_writes_outside(region, x, y):
    b = torch.ones(4, 6, dtype=x.dtype)

    def f(x):
        h = x * b.clone()
        bump(b, 1.0)
        return h.exp() * b.clone()

    return region(f, x), region(f, y), b


@case(whole=True)
def tensor_hooks(region, x, y):
    def f(x, y):
        h = x.sin()
        h.register_hook(lambda g: g * 2)
        k = (h * y).exp()
        k.register_hook(lambda g: g + h.detach())
        return k * h

    return region(f, x, y * 1)


@case
def user_hooks_inside(x, y):
    h = x.sin()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().numpy().copy(), lambda a: torch.from_numpy(a)
    ):
        k = (h * y).exp()
    return k * h


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(5, 4, bidirectional=True)

    def forward(self, x):
        h, (c, n) = self.lstm(x.view(2, 2, 6))
        packed = nn.utils.rnn.pack_padded_sequence(h, torch.tensor([2, 1]), batch_first=True)
        g, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return g * 2, c.sum() * n.exp()


@case(make=leaves(Recurrent))
def recurrent(x, y, m):
    return m(x * 1), m((x * y).sin())


class Scaled(nn.Module):
    """`max_norm` writes the weight in the forward."""

    def __init__(self):
        super().__init__()
        self.scaled = nn.Embedding(9, 6, max_norm=1.0)

    def forward(self, x):
        return (self.scaled(torch.tensor([1, 2, 2, 5])) * x).exp()


@case(make=leaves(Scaled), whole=True)
def weights_written_in_the_forward(region, x, y, m):
    return region(m, x * 1), region(lambda x: m(x * 1) * m((x * y).sin()), y)


# Plain code makes a cycle in it, too.
test_constructs, test_nothing_stays = case.tests(("tensor_hooks",))
