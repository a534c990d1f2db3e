"""Tricks of storage: views, in-place writes, several versions, `set_`, `resize_`, `.data`, reused
addresses."""

import pytest
import torch
from oracle import RERUN, Table


def tensors():
    return tuple(torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (4, 4, 6))


pytestmark = pytest.mark.filterwarnings("ignore")  # prototypes and betas of torch
case = Table(tensors)


@case
def zero_size_and_zero_dim(x, y, w):
    h = x.sin()
    empty = h[:0] * y[:0]
    e = torch.empty(0, 6, dtype=x.dtype)
    e.add_(1)
    return empty.exp() * empty, h.sum() * h[2, 3].exp(), torch.cat([e * x[:0], h]).exp()


@case
def conj_and_neg(x, y, w):
    z = torch.complex(x.sin(), y)
    c = z.conj()
    n = c.imag  # neg bit
    return (c * c).abs().square(), n * n.exp(), (c.t() @ z).real, z.real * (z * z.exp()).imag


@case
def conj_in_place(x, y, w):
    z = torch.view_as_complex((x * y).view(4, 3, 2)) * 2
    z.conj().mul_(z.detach().clone())
    return torch.view_as_real(z * z).square()


@case
def dtype_view_written(x, y, w):
    h, k = (x * 3).detach(), (x * 2).detach()
    h.view(torch.int64).bitwise_and_(-256)
    a = x * k.clone()
    k.view(torch.int32)[:, ::2].zero_()
    small = k.view(torch.int32).view(-1)[24:36]
    k.view(-1)[12:18].mul_(2)  # the same memory
    return x * h * h, a * k * x, x.view(-1)[:12] * small


@case
def in_place_on_views(x, y, w):
    h = x @ w
    h[1:3].mul_(2)
    h.t()[2].add_(y[0, :4])
    h.view(-1)[::5] = 1.5
    k = x.sin()
    v = k.view(2, 12)[:, 3:9].view(2, 2, 3)[0]
    v.copy_(y[:2, :3])
    v.t()[1].exp_()
    return h.exp() * h.sin(), k * k


@case(refused=RERUN)
def several_versions_of_one_buffer(x, y, w):
    h = x.exp()
    outs = []
    for i in range(4):
        b = torch.full((4, 6), float(i), dtype=x.dtype)
        b.cumsum_(0)
        outs.append(h * b.clone())
        b.neg_()
        outs.append(h * b)
    return outs


@case
def written_after_it_was_read_by_an_unsaving_op(x, y, w):
    h = x.sin()
    a = h + y
    b = a.exp()
    h.mul_(0)
    return a * b, h * y


@case(refused=RERUN)
def in_place_on_input(x, y, w):
    a = x * y[0].clone()
    y[1:3].mul_(x[1:3])
    z = (y + 1).sin()
    y.t()[0].exp_()
    return a * y * z


@case
def set_to_another(x, y, w):
    h, g = (x * 2).detach(), (y * 3).detach()
    h.set_(g)
    h.mul_(2)
    k = (y * 3).detach().exp()
    v = (x * 2).detach().set_(k.untyped_storage(), 2, (3, 4), (6, 1))
    return x * h * g, x[:3, :4] * v.sin() * v


@case
def resized(x, y, w):
    h, k = (x * 2).detach(), (x * 2).detach()
    h.resize_(5, 6)
    h[4].fill_(1.0)
    k.resize_(2, 6).mul_(2)
    e = torch.empty(0, dtype=x.dtype).resize_as_(x.detach()).copy_(y.detach()).exp_()
    return x * h[:4] * h[1:], x[:2] * k * k.exp(), x * e * e


@case
def resize_storage(x, y, w):
    h = (x * 2).detach()
    a = x * h.clone()
    h.untyped_storage().resize_(0)
    h.untyped_storage().resize_(4 * 6 * 8)
    h.copy_(y.detach())
    return a * h.sin() * h


@case
def write_through_data(x, y, w):
    h = x.sin()
    h.data.mul_(2)  # autograd doesn't see it
    k = h.exp()
    return k * h


@case
def data_that_is_read_and_written_later(x, y, w):
    h = (x * 2).detach()
    a = (x + h.data).sin()
    h.mul_(2)
    return a * x, (y + h.data).cos() * h, (x + h).exp()


@case(whole=True)
def output_written_outside(region, x, y, w):
    h = region(lambda x, y: (x * y) + 1, x, y * 1)
    h.mul_(2)
    h[1:].add_(x[1:])
    return h.sin()


@case
def empty_filled_by_slices(x, y, w):
    whole, part = torch.empty(4, 12, dtype=x.dtype), torch.empty(4, 6, dtype=x.dtype)
    whole[:, :6] = x.sin()
    whole[:, 6:] = y
    part[:2] = x[:2].sin()
    return whole.exp() * whole, part[:2].exp() * part[:2]


@case
def empty_filled_from_other_parts_of_itself(x, y, w):
    with torch.no_grad():
        twice, powers = torch.empty(8, 6, dtype=x.dtype), torch.empty(4, 6, dtype=x.dtype)
        twice[:4] = x
        twice[4:] = twice[:4]
        powers[0] = y[0]
        for i in range(3):
            torch.mul(powers[i], 2, out=powers[i + 1])
    return twice[2:6] * x, powers * y


@case(whole=True)
def empty_read_between_writes_in_nested_regions(region, x, y, w):
    def f(x):
        h = torch.empty(2, 6, dtype=x.dtype)
        h[0] = x[0].detach()
        z = (h[0] * 2) * x
        h[1] = 5.0
        return z.sin(), h * x[:2]

    return region(lambda x: region(f, x), x)


test_storage, test_nothing_stays = case.tests()
