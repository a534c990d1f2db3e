"""Subclasses of tensor and other layouts: exact, or refused with a clear error."""

import pytest
import torch
from oracle import ALL, REGIONS, RERUN, Table, bits, leaves
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import checkpointing


class Tagged(Tensor):
    """Only decorates; stays through operators by `__torch_function__`."""


pytestmark = pytest.mark.filterwarnings("ignore")  # prototypes and betas of torch
case = Table(leaves())


@case
def tagged(x, y):
    h = x.sin().as_subclass(Tagged)
    k = h * y
    return (k.exp() * h).as_subclass(Tensor)


@case
def wrapper_that_stays(x, y):
    t = TwoTensor((x * 2).detach(), (y * 3).detach()).requires_grad_()
    h = (t.sin() * t).exp()
    ones = (torch.ones((), dtype=x.dtype) for _ in "ab")
    (g,) = torch.autograd.grad(h.sum(), t, TwoTensor(*ones), create_graph=False)
    return x * g.a, y * g.b * x


@case(whole=True)
def wrapper_that_stays_across(region, x, y):
    t = TwoTensor((x * 2).detach(), (y * 3).detach()).requires_grad_()
    h = region(lambda t: (t.sin() * t).exp(), t)
    k = region(lambda h: h.cos() * h.t().t(), h)
    (g,) = torch.autograd.grad(k, t, TwoTensor(x.detach(), y.detach()))
    return x * g.a * y * g.b


@case
def wrapper_written_in_place(x, y):
    t = TwoTensor((x * 2).detach(), (y * 3).detach())
    t.mul_(2)
    t[1:].add_(1)
    u = t.exp()
    return x * u.a * t.b


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


@case
def strided_nested(x, y):
    n = torch.nested.as_nested_tensor([x[:1].sin(), x[1:]])
    h = (n * 2).sin() * n
    return torch.cat([t * t for t in h.unbind()])


@case
def sparse_coo(x, y):
    i = torch.tensor([[0, 1, 3], [2, 0, 1]])
    s = torch.sparse_coo_tensor(i, x.sin()[0, :3], (4, 4))
    d = torch.sparse.mm(s, y)
    return d.exp() * s.to_dense()[:, :1] * (s * 2).coalesce().values().sum()


@case(backwards=("first", "partial"))
def sparse_csr_with_grad(x, y):
    v = x.sin()[0, :3]
    s = torch.sparse_csr_tensor(torch.tensor([0, 1, 2, 3, 3]), torch.tensor([2, 0, 1]), v, (4, 4))
    return (s @ y).exp(), (s.to_dense() * 2).sin()


@case(make=leaves(lambda: nn.Embedding(7, 6, sparse=True)), backwards=("first", "partial"))
def sparse_gradients(x, y, m):
    return (m(torch.tensor([1, 2, 2, 5])) * x).exp()


@case(backwards=("first", "partial"))
def mkldnn(x, y):
    h = x.float().to_mkldnn()
    h = torch.relu(h)
    return h.to_dense().exp() * y.float()


@pytest.mark.parametrize("door", ALL)
def test_distributed_tensors(door, mesh):
    """Made inside, kept, redistributed, and as parameters."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    size = 3 + ALL.index(door)  # what is found out about shapes is remembered
    model = nn.Sequential(nn.Linear(6, size), nn.GELU(), nn.Linear(size, 6)).double()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x, y = (torch.randn(size, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def function(x, y):
        a = DTensor.from_local(x * 1, mesh, [Shard(0)])
        b = DTensor.from_local(y * 1, mesh, [Replicate()])
        c = checkpointing.keep(a.sin() * b.redistribute(mesh, [Shard(0)])).exp()
        return (c @ b.t()).redistribute(mesh, [Replicate()]).to_local() @ model(x)

    got, want = REGIONS[door](function, x, y), function(x, y)
    wanted = (x, y, *model.parameters())
    got_first, want_first = (
        torch.autograd.grad(o.sin().sum(), wanted, create_graph=True) for o in (got, want)
    )
    got_second, want_second = (
        torch.autograd.grad((g[0] * g[1]).sum(), (x, y)) for g in (got_first, want_first)
    )
    assert bits([got, *got_first, *got_second]) == bits([want, *want_first, *want_second])


test_subclasses, test_nothing_stays = case.tests()
