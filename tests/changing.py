"""Blocks that change from step to step.

A case is step `n` of a training loop, `case(n, region, m)`, with `region(function, *args)` where a
region may stand; `m` makes leaves and keeps what lives from one step to the next. It returns
tensors.
"""

import functools
import warnings
from types import SimpleNamespace

import torch
from oracle import REGIONS, bits, differences, seed, tensors, weigh
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from checkpointing import keep, opaque


class Memory(SimpleNamespace):
    """What a loop keeps, and the leaves of the step."""

    def leaf(self, *shape, dtype=torch.float64, wants=True):
        if dtype is torch.int64:
            return torch.ones(shape, dtype=dtype)
        self.leaves.append(torch.randn(shape, dtype=dtype, requires_grad=wants))
        return self.leaves[-1]

    def once(self, name, make):
        if not hasattr(self, name):
            made = make()
            setattr(self, name, made.double() if isinstance(made, nn.Module) else made)
        self.modules += [made for made in [getattr(self, name)] if isinstance(made, nn.Module)]
        return getattr(self, name)


def on(*shapes):
    """A case that is one region, `f(n, *tensors)`, on leaves of these shapes."""

    return lambda f: (
        lambda n, region, m: region(
            lambda *tensors: f(n, *tensors), *[m.leaf(*shape) for shape in shapes]
        )
    )


class Cases:
    def numbers(n, region, m):
        number = (1, 1.0, True, 0.0, -0.0, float("nan"))[n]

        def f(x, k):
            y = x * number + (k * number).sum() + torch.copysign(x, torch.full_like(x, number))
            z = k * number, torch.add(x, x.sin(), alpha=float(number)).exp()
            return (y / 3).sin() * torch.full((8, 8), number), z

        return region(f, m.leaf(8, 8), m.leaf(4, dtype=torch.int64))

    @on((8, 8))
    def keywords(n, x):
        more = ({}, {"alpha": 2}, {"alpha": 2.0}, {"alpha": 3}, {}, {"alpha": -0.0})[n]
        bounds = ({"min": 0}, {"max": 0}, {"min": 0.0}, {"max": -0.0}, {"min": -1, "max": 1})[n % 5]
        return torch.add(x, x.exp(), **more).clamp(**bounds).exp()

    def views_of_inputs(n, region, m):
        def f(x, table):
            rotated = x * table[n : n + 4].unsqueeze(0) + x.flip(-1) * table.narrow(0, n % 3, 4)
            kept = keep(rotated.sin() @ rotated.mT)
            picked = kept.select(1, n % 4) * table[:2]
            return rotated.exp() * table[0], kept[0, n % 2 :].exp(), picked

        return region(f, m.leaf(2, 4, 4), m.leaf(12, 4, wants=False)[: 11 - n // 5])

    @on((9, 9))
    def sizes_that_depend_on_data(n, x):
        return x[x > n / 2 - 1].sin().exp(), x.detach().gt(0).nonzero() * x.sum()

    @on((8,))
    def lists_of_numbers(n, x):
        with torch.no_grad():
            number = (0.0, -0.0, 1.0, 2.0, 0.0, -0.0)[n]
            mask = torch._foreach_mul([torch.ones(8)], [number])[0]
        return torch.copysign(x, mask).sin(), x * mask

    def parts_in_other_numbers(n, region, m):
        def f(x, y):
            parts = x.split((2, 3, 4, 6, 12, 5)[n])
            return [part.sin().exp() for part in (*parts, *y.unbind(), torch.cat(parts[: n + 1]))]

        return region(f, m.leaf(12), m.leaf(n + 1, 4))

    @on((8, 4))
    def lists_of_tensors(n, x):
        parts = [*(x.detach() * 1).unbind()]
        torch._foreach_mul_(parts[: n + 1], [float(k + n) for k in range(n + 1)])
        torch._foreach_lerp_(parts[n:], parts[: len(parts) - n], 0.1 * n)
        return x * torch.stack(parts), torch._foreach_exp([*x.unbind()])[n]

    @on((8,))
    def lists_that_are_written_under_views(n, x):
        y = x.sin()
        first, rest = y[: n % 3 + 1], y[n % 3 + 1 :]
        torch._foreach_add_([y], [x * x])
        return first.exp() * (n + 1), rest.clone()

    @on((4, 9))
    def rows_that_are_filled(n, x):
        """As detection pads its targets; each row as far as its own step says."""
        padded = torch.zeros(4, 9, dtype=x.dtype)
        for i, (row, source) in enumerate(zip(padded, x.detach(), strict=True)):
            row[: n + i].copy_(source[: n + i])
        for part in padded.split(1 + n % 3, 1):
            part[1:].mul_(n + 1)
        return x * padded, (x[:n] * padded[:n].t().contiguous().t()).exp()

    @on((8, 4), (4, 8, 3), (1, 8, 9))
    def tensors_that_are_none_in_some_steps(n, x, w, series):
        """What is there otherwise has been made, and is gone."""
        low, bias, rows = x.detach().amin(0) / 2, x.detach().sum(1)[:4], torch.arange(4) * 2
        if n % 2:
            low = bias = None
        if n % 3:
            rows = None
        clamped = x.detach().clamp(low, x.detach().amax(0) / 2)
        picked = torch.ops.aten.index.Tensor(x.detach() * 1, [rows, torch.arange(4)])
        return F.conv1d(series, w, bias).sin().exp(), (x + clamped).exp(), picked.sum() * x.sin()

    def layouts_that_change(n, region, m):
        """An adjacency that is dense, sparse, or nested."""
        mask = torch.eye(4, dtype=torch.float64)
        nested = [
            functools.partial(torch.nested.nested_tensor, [mask, mask[:2]], layout=layout)
            for layout in (torch.jagged, torch.strided)
        ]
        adjacency = (mask.clone, mask.to_sparse, mask.to_sparse_csr, *nested, mask.to_sparse)[n]()

        def f(x):
            like = torch.zeros_like(adjacency)
            dense = like.to_padded_tensor(0.0) if like.is_nested else like.to_dense()
            return (x * (dense.sum() + 1)).sin().exp()

        return region(f, m.leaf(4, 4))

    @on((8, 16), (16, 16))
    def loops_and_stochastic_depth(n, x, w):
        for i in range(1 + 2 * n):
            if n < 4 or torch.rand(()).item() < 0.5:
                x = F.dropout((x @ w / 4).tanh() * (i + 1), 0.1 * (i + n) / 20) + x
        return x

    def freezing(n, region, m):
        layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8)
        net = m.once("net", lambda: nn.Sequential(*layers))
        for i, p in enumerate(net.parameters()):
            p.requires_grad_((i + n) % 3 != 0)
        return region(lambda x: net(x).sin().exp() * x, m.leaf(6, 8, wants=n != 1))

    def train_and_eval(n, region, m):
        layers = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.ReLU(inplace=True)
        net = m.once("net", lambda: nn.Sequential(*layers)).train(n % 2 == 0)
        net[1].momentum, net[2].p = None if n == 4 else 0.1 * (n + 1), n / 5
        return region(lambda x: net(x * 2).sin().exp(), m.leaf(2, 3, 9))

    def autocast(n, region, m):
        net = m.once("net", lambda: nn.Linear(16, 16)).float()

        def f(x):
            kind = torch.bfloat16 if n % 3 else torch.float16
            with torch.autocast("cpu", kind, n % 2 == 0, cache_enabled=n < 3):
                return net(net(x).sin()).exp()

        return region(f, m.leaf(4, 16, dtype=torch.float32))

    @on((8, 8), (8, 8))
    def grad_mode(n, x, w):
        with torch.set_grad_enabled(n % 2 == 0):
            y = (x @ w).sin()
        with torch.set_grad_enabled(n != 3):
            z = torch.inference_mode(n == 4)(lambda: w.detach().exp())()
        return (x @ w * (y.detach() if n == 5 else y)).exp() * z.clone()

    def switches(n, region, m):
        before = torch.get_default_dtype()
        torch.set_default_dtype((torch.float32, torch.float64, torch.bfloat16)[n % 3])
        try:
            tenth = lambda: torch.rand(8) * torch.tensor([0.1])
            return region(lambda x: (x * torch.ones(8)).exp() * tenth(), m.leaf(8, 8))
        finally:
            torch.set_default_dtype(before)

    def parameters_exchanged(n, region, m):
        net = m.once("net", lambda: nn.Linear(8, 8))
        if n % 2:
            net.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
        other = {"weight": m.leaf(8, 8), "bias": m.leaf(8)} if n > 2 else {}
        return region(
            lambda x: functional_call(net, other, functional_call(net, other, x).sin()).exp(),
            m.leaf(4, 8),
        )

    def parameter_or_not(n, region, m):
        def f(x, weight):
            before = (x @ (weight.t() * 2)).sin() * weight.cos()
            with opaque():
                if not weight.requires_grad:
                    weight.numpy()[:] += 1
            return before.exp() @ weight.t().clone()[:, 1:], weight.sin()

        def weight():
            copied = y.detach().clone()
            made = nn.Parameter(copied) if n % 2 else copied if n % 3 else y * 2
            m.leaves += [made] * made.is_leaf
            return made

        x, y = m.leaf(8, 8), m.leaf(8, 8)
        inside = lambda x, weight: region(f, x, weight)[0].sin()
        return region(f, x, weight()), region(inside, x, weight())

    def written_aliases(n, region, m):
        x, base = m.leaf(4, 8), torch.randn(6, 8, dtype=torch.float64)
        a, moved = base[:4], base.t()[:, :4].t()
        others = base[:4], base[1:5], base[2:].clone(), base[2:].detach(), base[:4].clone()
        b = (*others, moved)[n]

        def f(x):
            first, second = x * a.sin(), x.exp() * b.cos()
            a.mul_(2) if n % 2 else b.add_(1)
            return (first * second * b.tanh()).sin() * a.exp(), x * b.clone().cos()

        return region(f, x)

    def views_that_die(n, region, m):
        base = torch.randn(6, 8, dtype=torch.float64)
        others = base[2:], base.clone()[:4], base.t()[:, :4].t(), base[1:5], base[:4]
        views = [(base[:4], *others)[n]]
        del others

        def f(x):
            y = x * views.pop().sin()
            (base.mul_(2) if n % 2 else base[1:].add_(1)) if n != 4 else None
            return (y * base[2:].cos()).exp()

        return region(f, m.leaf(4, 8))

    def strides_and_dtypes(n, region, m):
        kinds = torch.float64, torch.float32, torch.complex64, torch.float64, torch.bfloat16
        kind = (*kinds, torch.float16)[n]
        x, y = m.leaf(8, 8, dtype=kind), m.leaf(8, 8, dtype=torch.int64 if n == 3 else kind)
        views = x.t(), x[::2, ::2], x.conj(), x.expand(2, 8, 8), x.contiguous()
        x = (*views, x.unfold(0, 2, 1)[..., 0])[n]

        def f(x, y):
            return (x * y[: x.shape[-2], : x.shape[-1]]).sin().sum(-1) * 2, x.abs().exp()

        return region(f, x, y)

    def noise_like_other_strides(n, region, m):
        x = m.leaf(8, 8)
        return region(lambda x: torch.rand_like(x.sin()) * x.exp(), x.t() if n % 2 else x)

    @on((8, 8), (8, 8))
    def subclasses_and_layouts(n, x, w):
        if n % 3 == 2:
            return torch.sparse.mm(x.to_sparse(), w).sin().exp()
        a, b = (TwoTensor(x, x * 2), TwoTensor(w, w * 2)) if n % 3 else (x, w)
        y = (a * 2 @ b).sin().exp()
        return (y.a * y.b if n % 3 else y * y) @ w

    @on((9, 8))
    def memory_filled_unseen(n, x):
        rest = torch.empty(0 if n in (0, 3) else 4 + n, 8, dtype=torch.float64)
        rest[: n % 3].copy_(x.detach()[: n % 3]) if n else rest
        rest.numpy()[n % 3 :] = n + 1
        return (x[: len(rest)] * rest.sin()).exp() * rest

    @on((6, 8))
    def memory_filled_in_parts(n, x):
        keys = torch.empty(6, 12, dtype=torch.float64)
        width = (4, 4, 2, 4, 0, 4)[n]
        keys[:, 4:].copy_(x * 2)
        keys[:, :width].copy_(x[:, :width].sin())
        if n == 1:
            keys[:, 2:6].copy_(keys[:, 4:8].flip(0))
        if n > 3:
            keys[:, :4].copy_(keys[:, n : n + 4])
        elif width < 4 or n == 3:
            keys.detach().numpy()[:, width:4] = n
        return (keys.exp() * keys).sin()

    @on((9, 8))
    def resized_and_given_as_out(n, x):
        out = x.detach()[:2].exp()
        out.resize_(1 + n, 8)
        out.numpy()[2:] = n
        others = torch.empty(0), torch.empty(9, 8), torch.zeros(18, 8)[:9], torch.ones(8, 9).t()
        other = others[n % 4].double()
        torch.exp(x.detach(), out=other)
        return (x[: 1 + n] * out.sin()).exp() * other[: 1 + n].cos()

    def exchanged_memory(n, region, m):
        def f(x):
            y = x.detach().sin()
            z = (y.data if n % 3 else y).view(-1)
            return (x.view(-1) * z).exp() * z * other.view(-1)

        x, other = m.leaf(8, 8), torch.randn(8, 8, dtype=torch.float64)
        if n % 2:
            other.data = x.data
        return region(f, x)

    def whole_step(n, region, m):
        layers = nn.Linear(8, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8)
        net = m.once("net", lambda: nn.Sequential(*layers))
        adam = m.once("adam", lambda: torch.optim.Adam(net.parameters(), foreach=True))

        def f(x):
            if n != 3:
                net(net(x).sin()).exp().mean().backward()
                adam.step() if n % 2 == 0 else None
                adam.zero_grad(set_to_none=n > 3)
            return net(x).sin().exp()

        return region(f, m.leaf(4, 8))

    def generators(n, region, m):
        generator = m.once("generator", torch.Generator) if n % 2 else torch.Generator()
        generator.manual_seed(n)

        def f(x):
            y = x * torch.rand(8, 8, generator=generator, dtype=torch.float64)
            y = y * (torch.randn_like(x) if n % 3 else torch.empty_like(x).uniform_(0.0, 1.0 + n))
            return F.dropout(y.exp(), n / 5).sin(), generator.get_state()

        return region(f, m.leaf(8, 8))


CASES = {name: case for name, case in vars(Cases).items() if not name.startswith("_")}


def forward(case, n, region, m):
    m.leaves, m.modules = [], []
    seed(n)
    outputs = tensors(case(n, region, m))
    seen = {"outputs": bits(outputs), "random stream": bits(torch.get_rng_state())}
    wanted = {id(t): t for t in [*m.leaves, *(p for each in m.modules for p in each.parameters())]}
    return seen, outputs, [t for t in wanted.values() if t.requires_grad], m.modules


def backward(n, seen, outputs, wanted, modules):
    loss = weigh(outputs)
    if n % 3 == 2:
        first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        seen["first"], loss = bits(first), weigh(first)
    if loss.requires_grad:
        seen["gradients"] = bits(torch.autograd.grad(loss, wanted, allow_unused=True))
    seen["state"] = bits([dict(module.state_dict()) for module in modules])
    seen["random stream after backward"] = bits(torch.get_rng_state())


def loop(door, steps, late=False):
    """What each step leaves behind; `late`: each backward comes after the next forward."""
    memories, waiting, seen = {}, [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, n in steps:
            m = memories.setdefault(name, Memory())
            waiting.append((n, *forward(CASES[name], n, REGIONS[door], m)))
            seen.append(waiting[-1][1])
            while len(waiting) > late:
                backward(*waiting.pop(0))
        while waiting:
            backward(*waiting.pop(0))
    return seen


@functools.lru_cache(maxsize=2)
def plain_loop(steps, late):
    return loop("plain", steps, late)


def check(door, steps, late=False):
    wanted = plain_loop(tuple(steps), late)
    for step, want, have in zip(steps, wanted, loop(door, steps, late), strict=True):
        assert not differences(want, have), f"step {step}: {differences(want, have)}"
