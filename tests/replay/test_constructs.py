"""Autograd constructs, models, tricks of storage, subclasses, layouts, in and around regions."""

import pytest
import torch
from oracle import ALL, REGIONS, REPLAY, RERUN, Table, bits, leaves
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

from checkpointing import keep

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


@torch.library.custom_op("tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor, by: float) -> None:
    x.numpy()[...] += by


class NoSin(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] * 3 if func is torch.sin else func(*args, **(kwargs or {}))


@torch.library.custom_op("tests::full_of_tricks", mutates_args=())
def full_of_tricks(x: torch.Tensor) -> torch.Tensor:
    by_rows = torch.func.vmap(lambda row: row.sin().sum() * row)(x)
    _, tangent = torch.func.jvp(torch.exp, (x,), (by_rows,))
    with NoSin():
        return torch.sin(tangent) + torch._efficientzerotensor(x.shape, dtype=x.dtype)


@torch.library.custom_op("tests::mirrored", mutates_args=())
def mirrored(z: torch.Tensor) -> torch.Tensor:
    return z.conj() * z.imag


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


class Tagged(Tensor):
    """Only decorates; stays through operators by `__torch_function__`."""


class Constructs:
    @case
    def functions_and_hooks_of_the_user(x, y):
        h = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach().numpy().copy(), lambda a: torch.from_numpy(a)
        ):
            k = (h * y).exp()
        a, e = NewStyle.apply(h, y * 2)
        b, _ = NewStyle.apply(x.detach(), y.cos())
        return a * b, e, k * h

    @case(backwards=("first",))
    def function_with_a_graph_inside(x, y):
        return SavesIntermediate.apply(x * y) * 2

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

    @case(make=leaves(Recurrent))
    def recurrent(x, y, m):
        return m(x * 1), m((x * y).sin())

    @case(make=leaves(lambda: nn.Embedding(9, 6, max_norm=1.0)), whole=True)
    def weights_written_in_the_forward(region, x, y, m):
        f = lambda x: (m(torch.tensor([1, 2, 2, 5])) * x).exp()
        return region(f, x * 1), region(lambda x: f(x * 1) * f((x * y).sin()), y)

    @case
    def zero_size_and_zero_dim(x, y):
        h = x.sin()
        empty = h[:0] * y[:0]
        e = torch.empty(0, 6, dtype=x.dtype)
        e.add_(1)
        return empty.exp() * empty, h.sum() * h[2, 3].exp(), torch.cat([e * x[:0], h]).exp()

    @case
    def conj_and_neg(x, y):
        z, w = torch.complex(x.sin(), y), torch.view_as_complex((x * y).view(4, 3, 2)) * 2
        c = z.conj()
        n = c.imag  # neg bit
        w.conj().mul_(w.detach().clone())
        parts = (c * c).abs().square(), n * n.exp(), (c.t() @ z).real, z.real * (z * z.exp()).imag
        return *parts, torch.view_as_real(w * w).square()

    @case
    def written_through_views(x, y):
        """Of another dtype, too."""
        h, k = (x * 3).detach(), (x * 2).detach()
        h.view(torch.int64).bitwise_and_(-256)
        a = x * k.clone()
        k.view(torch.int32)[:, ::2].zero_()
        small = k.view(torch.int32).view(-1)[24:36]
        k.view(-1)[12:18].mul_(2)  # the same memory
        m, n = x @ y.t(), x.sin()
        m[1:3].mul_(2)
        m.t()[2].add_(y[0, :4])
        m.view(-1)[::5] = 1.5
        v = n.view(2, 12)[:, 3:9].view(2, 2, 3)[0]
        v.copy_(y[:2, :3])
        v.t()[1].exp_()
        return x * h * h, a * k * x, x.view(-1)[:12] * small, m.exp() * m.sin(), n * n

    @case
    def written_after_it_was_read_by_an_unsaving_op(x, y):
        h, k = x.sin(), x.sin()
        a = h + y
        b = a.exp()
        h.mul_(0)
        k.data.mul_(2)  # autograd doesn't see it
        return a * b, h * y, k.exp() * k

    @case(refused=RERUN)
    def several_versions_of_a_buffer_and_of_an_input(x, y):
        a = x * y[0].clone()
        y[1:3].mul_(x[1:3])
        z = (y + 1).sin()
        y.t()[0].exp_()
        h = x.exp()
        outs = [a * y * z]
        for i in range(4):
            b = torch.full((4, 6), float(i), dtype=x.dtype)
            b.cumsum_(0)
            outs.append(h * b.clone())
            b.neg_()
            outs.append(h * b)
        return outs

    @case
    def set_to_another_and_resized(x, y):
        h, g = (x * 2).detach(), (y * 3).detach()
        h.set_(g)
        h.mul_(2)
        k = (y * 3).detach().exp()
        v = (x * 2).detach().set_(k.untyped_storage(), 2, (3, 4), (6, 1))
        larger, smaller, m = (x * 2).detach(), (x * 2).detach(), (x * 2).detach()
        larger.resize_(5, 6)
        larger[4].fill_(1.0)
        smaller.resize_(2, 6).mul_(2)
        e = torch.empty(0, dtype=x.dtype).resize_as_(x.detach()).copy_(y.detach()).exp_()
        a = x * m.clone()
        m.untyped_storage().resize_(0)
        m.untyped_storage().resize_(4 * 6 * 8)
        m.copy_(y.detach())
        resized = x * larger[:4] * larger[1:], x[:2] * smaller * smaller.exp(), x * e * e
        return x * h * g, x[:3, :4] * v.sin() * v, *resized, a * m.sin() * m

    @case
    def empty_filled_in_parts(x, y):
        whole, part = torch.empty(4, 12, dtype=x.dtype), torch.empty(4, 6, dtype=x.dtype)
        whole[:, :6] = x.sin()
        whole[:, 6:] = y
        part[:2] = x[:2].sin()
        with torch.no_grad():  # from other parts of itself
            twice, powers = torch.empty(8, 6, dtype=x.dtype), torch.empty(4, 6, dtype=x.dtype)
            twice[:4] = x
            twice[4:] = twice[:4]
            powers[0] = y[0]
            for i in range(3):
                torch.mul(powers[i], 2, out=powers[i + 1])
        return whole.exp() * whole, part[:2].exp() * part[:2], twice[2:6] * x, powers * y

    @case(whole=True)
    def empty_read_between_writes_in_nested_regions(region, x, y):
        """And an output that is written outside."""

        def f(x):
            h = torch.empty(2, 6, dtype=x.dtype)
            h[0] = x[0].detach()
            z = (h[0] * 2) * x
            h[1] = 5.0
            return z.sin(), h * x[:2]

        h = region(lambda x, y: (x * y) + 1, x, y * 1)
        h.mul_(2)
        h[1:].add_(x[1:])
        return h.sin(), *region(lambda x: region(f, x), x)

    @case(whole=True)
    def wrapper_that_stays_across(region, x, y):
        t = TwoTensor((x * 2).detach(), (y * 3).detach()).requires_grad_()
        h = region(lambda t: (t.sin() * t).exp(), t)
        k = region(lambda h: h.cos() * h.t().t(), h)
        (g,) = torch.autograd.grad(k, t, TwoTensor(x.detach(), y.detach()))
        return x * g.a * y * g.b

    @case
    def wrapper_written_in_place(x, y):
        t = TwoTensor((x * 2).detach(), (y * 3).detach()).requires_grad_()
        h = (t.sin() * t).exp()
        ones = (torch.ones((), dtype=x.dtype) for _ in "ab")
        (g,) = torch.autograd.grad(h.sum(), t, TwoTensor(*ones))
        t = TwoTensor((x * 2).detach(), (y * 3).detach())
        t.mul_(2)
        t[1:].add_(1)
        return x * t.exp().a * t.b, x * g.a, y * g.b * x

    @case(whole=True)
    def jagged_from_before(region, x, y):
        n = torch.nested.nested_tensor_from_jagged(x.sin(), offsets=torch.tensor([0, 1, 4]))
        h = region(lambda n: (n * 2).exp() * n, n)
        return region(lambda h: h.sin().values() * y.exp(), h)

    # A rerun makes another ragged size.
    @case(make=leaves(lambda: nn.Linear(6, 6)), refused=RERUN)
    def jagged_through_layers(x, y, m):
        n = torch.nested.nested_tensor_from_jagged(x * 1, offsets=torch.tensor([0, 1, 4]))
        h = nn.functional.relu(m(n))
        h = nn.functional.layer_norm(h, (6,))
        return h.values().exp() * y

    # A rerun makes another ragged size.
    @case(refused=RERUN)
    def jagged_attention(x, y):
        """Matrix products that consist of others, but have kernels for nested tensors."""
        n = torch.nested.nested_tensor_from_jagged(x * 1, offsets=torch.tensor([0, 1, 4]))
        q = n.unflatten(-1, [2, 3]).transpose(1, 2)
        h = nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)
        return h.values().exp() * y

    @case(whole=True, make=leaves(lambda: nn.Linear(6, 4)), doors=REPLAY)
    def steps_with_jagged_tensors_in_one_region(region, x, y, m):
        """Autograd asks them for their sizes by operators that the dispatcher does not know."""

        def steps(x):
            for _ in range(2):
                parts = torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged)
                y = torch.nested.to_padded_tensor(m(parts).relu(), 0.0)
                y.exp().mean().backward()
            return x * 1

        return region(steps, x.detach()), [p.grad.clone() for p in m.parameters()], x * 1

    @case
    def gradients_inside_that_have_kernels_of_their_own(x, y):
        """They consist of others on some devices, with other roundings."""
        parts = []
        for function in (nn.functional.silu, nn.functional.mish):
            for create_graph in (False, True):
                w = (torch.arange(900.0, requires_grad=True) / 100 - 4.5).float()
                out = function(w * x.sum().float()).sum() * 1.7
                parts += torch.autograd.grad(out, w, create_graph=create_graph)
        return [part.double() * y.sum() for part in parts]

    @case
    def transforms_and_modes_inside_operators(x, y):
        tricky = full_of_tricks(full_of_tricks(x.detach().sin() / 9).exp() / 99)
        return x * tricky, (y * tricky.exp()).sin()

    @case(backwards=("first", "partial"))
    def conj_inside_operators(x, y):
        """Under a mode, an operator would compute with numbers that `conj` has yet to change."""
        z = torch.complex(x.sin(), y * 1)
        with torch.inference_mode():
            inside = torch.fft.hfft(z.detach()), torch.linalg.vecdot(z.detach(), z.detach().exp())
        wave, product = map(torch.clone, inside)
        h = torch.linalg.pinv(z)[:1].real * mirrored(z.detach()).abs()[:, :1].T
        ways = (lambda z: z.conj() * 2), (lambda z: z.conj() * 3)
        picked = torch.cond(x.sum() > 0, *ways, (z.detach(),))
        return h.exp(), x * wave[:, :6] * product.real[:, None], y * picked.angle()

    @case
    def nested_sparse_and_tagged(x, y):
        n = torch.nested.as_nested_tensor([x[:1].sin(), x[1:]])
        h = (n * 2).sin() * n
        s = torch.sparse_coo_tensor(torch.tensor([[0, 1, 3], [2, 0, 1]]), x.sin()[0, :3], (4, 4))
        d = torch.sparse.mm(s, y).exp() * s.to_dense()[:, :1] * (s * 2).coalesce().values().sum()
        t = x.sin().as_subclass(Tagged)
        tagged = ((t * y).exp() * t).as_subclass(Tensor)
        return torch.cat([t * t for t in h.unbind()]), d, tagged

    @case(backwards=("first", "partial"))
    def sparse_csr_and_mkldnn(x, y):
        rows, columns = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([2, 0, 1])
        s = torch.sparse_csr_tensor(rows, columns, x.sin()[0, :3], (4, 4))
        h = torch.relu(x.float().to_mkldnn()).to_dense().exp() * y.float()
        return (s @ y).exp(), (s.to_dense() * 2).sin(), h

    @case(make=leaves(lambda: nn.Embedding(7, 6, sparse=True)), backwards=("first", "partial"))
    def sparse_gradients(x, y, m):
        return (m(torch.tensor([1, 2, 2, 5])) * x).exp()


# Plain code makes a cycle in it, too.
test_constructs, test_nothing_stays = case.tests(("tensor_hooks",))


@pytest.mark.parametrize("door", ALL)
def test_distributed_tensors(door, mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

    size = 3 + ALL.index(door)  # what is found out about shapes is remembered
    model = nn.Sequential(nn.Linear(6, size), nn.GELU(), nn.Linear(size, 6)).double()
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh, plan)
    x, y = (torch.randn(size, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(x, y):
        a = DTensor.from_local(x * 1, mesh, [Shard(0)])
        b = DTensor.from_local(y * 1, mesh, [Replicate()])
        c = keep(a.sin() * b.redistribute(mesh, [Shard(0)])).exp()
        return (c @ b.t()).redistribute(mesh, [Replicate()]).to_local() @ model(x)

    def found(region):
        out, wanted = region(function, x, y), (x, y, *model.parameters())
        first = torch.autograd.grad(out.sin().sum(), wanted, create_graph=True)
        return bits([out, *first, *torch.autograd.grad((first[0] * first[1]).sum(), (x, y))])

    assert found(REGIONS[door]) == found(REGIONS["plain"])
