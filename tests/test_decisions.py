"""A replay never makes a decision again: what was chosen by rounded numbers is held.

A custom operator adds other noise at each call, as kernels that add atomically do. Plain code calls
it once, so its gradients say what is right, up to the noise itself.
"""

import functools
import itertools

import pytest
import torch
from oracle import NO_ROOM, PLANNED, SEED, replay, scope, seed, shaken, tensors, through
from torch import nn

from checkpointing import MismatchError, auto, checkpoint_scope, checkpointed, keep, offload

pytestmark = NO_ROOM
TOKENS, WIDTH, EXPERTS = 96, 16, 4
ALL = torch.arange(TOKENS)
CHOOSE = {
    "topk": lambda p: p.topk(2).indices,
    "topk of a view": lambda p: p.t().topk(2, dim=0).indices.t(),
    "sort": lambda p: p.sort(descending=True).indices[:, :2],
    "argmax": lambda p: p.argmax(-1, keepdim=True),
    "max": lambda p: p.max(-1, keepdim=True).indices,
    "multinomial": lambda p: p.multinomial(2),
    "bucketize": lambda p: torch.bucketize(p[:, :1].contiguous(), torch.linspace(0.1, 0.5, 3)),
    "long": lambda p: (p[:, :2] * EXPERTS).long().clamp(max=EXPERTS - 1),
}
FIND = {
    "where": lambda chosen, e: torch.where(chosen == e)[0],
    "nonzero": lambda chosen, e: (chosen == e).nonzero()[:, 0],
    "masked_select": lambda chosen, e: ALL[:, None].expand_as(chosen).masked_select(chosen == e),
    "mask": lambda chosen, e: ALL[(chosen == e).any(-1)],
}


def routed(choose, find):
    """A mixture of experts."""

    def use(x, p, w):
        chosen, y = choose(p), torch.zeros_like(x)
        for e in range(EXPERTS):
            tokens = find(chosen, e)
            y = y.index_add(0, tokens, (x[tokens] @ w[e]).tanh() * p[tokens, e, None])
        return y

    return use


def sections(x, p, w):
    """By counts: sort, and split."""
    chosen = p.argmax(-1)
    order = chosen.argsort(stable=True)
    ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0)[:-1]
    parts = torch.tensor_split(x[order], ends)
    return torch.cat([part.tanh() * (i + 1) for i, part in enumerate(parts)])


def in_place(x, p, w):
    chosen = torch.zeros(TOKENS, dtype=torch.int64)
    chosen.copy_(p.argmax(-1))
    first = chosen[: TOKENS // 2]
    chosen += 1
    return x[(chosen == 2).nonzero()[:, 0]].sin(), x[: TOKENS // 2][first == 3].sin()


def varying(x, p, w):
    """As many results as there are different numbers."""
    parts = x.split([int(n) for n in torch.bincount(p.argmax(-1), minlength=EXPERTS)])
    chosen = torch.stack([part.argmax(0) for part in p.split(30)])
    return [part.tanh() for part in parts], [(c == 0).nonzero() * x[0, 0] for c in chosen.unbind()]


FURTHER = {
    "mask": lambda x, p, w: x[p.max(-1).values > 0.3].sin(),
    "mask of two": lambda x, p, w: (x[(p[:, 0] > 0.2) & (p[:, 1] < 0.15)]).sin(),
    "masked_scatter": lambda x, p, w: x.sin().masked_scatter(p[:, :1] > 0.2, x[p[:, 0] > 0.2]),
    "unique": lambda x, p, w: torch.unique((p.detach() * 20).round())[:, None] * x.sin()[0],
    "unique of integers": lambda x, p, w: x[torch.unique(p.argmax(-1))].sin(),
    "sections": sections,
    "repeat_interleave": lambda x, p, w: x.repeat_interleave((p[:, 0] * 9).long(), 0).sin(),
    "scatter": lambda x, p, w: (
        x.sin() * torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0).sum(1, keepdim=True)
    ),
    "in place": in_place,
    "varying": varying,
}

ROUTERS = [("topk", find) for find in FIND]
ROUTERS += zip([*CHOOSE][1:], itertools.cycle(FIND))
ROUTES = {f"{choose}, {find}": routed(CHOOSE[choose], FIND[find]) for choose, find in ROUTERS}


class Layer(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use, self.router = use, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        found = tensors(self.use(x, self.router(shaken(x)).softmax(-1), self.experts))
        if found[0].shape == x.shape:
            return x + found[0]
        return x * sum(part.mean() for part in found if part.numel()) + x


def per_layer(door):
    return lambda layers, x: through(map(door, layers), x).square().sum()


def around(**options):
    return lambda layers, x: scope(plain, **options)(layers, x)


plain = per_layer(lambda layer: layer)
DOORS = {
    "replay per layer": per_layer(replay),
    "scope per layer": per_layer(scope),
    "planned": around(policy=PLANNED),
    "budget": around(policy=auto(budget="4 KiB")),
    "offload": around(policy=offload(PLANNED, min_bytes=0)),
}


def by_turns(programs):
    """Each with a plan and through a region per layer; the first with all that plans can do."""
    for number, one in enumerate(programs):
        per_layer = ("replay per layer", "scope per layer")[number % 2]
        for door in DOORS if number == 0 else (per_layer, "planned"):
            yield one, door


def gradients(door, use, steps=2):
    """Of some steps, with the noise of plain code in the forward."""
    seed(0)
    layers = [Layer(use) for _ in range(2)]
    found = []
    for step in range(steps):
        SEED[0] = itertools.count(1000 * step)
        x = torch.randn(TOKENS, WIDTH)
        loss = door(layers, x.requires_grad_())
        loss.backward()
        grads = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
        found.append(torch.cat([grad.flatten() for grad in [x.grad, *grads]]))
    return found


@functools.cache
def wanted(use):
    return gradients(plain, use)


@pytest.mark.parametrize(
    ("use", "door"),
    [
        pytest.param(table[name], DOORS[door], id=f"{name}, {door}")
        for table in (ROUTES, FURTHER)
        for name, door in by_turns(table)
    ],
)
def test_routes_are_never_chosen_again(use, door):
    """Sizes are those of the forward."""
    for one, two in zip(wanted(use), gradients(door, use), strict=True):
        assert torch.cosine_similarity(one, two, dim=0) > 0.99


def test_what_is_too_large_to_be_held_is_an_error_that_names_it():
    """A mask of a megabyte, of a tensor of four: not a raw error of autograd."""
    SEED[0] = itertools.count()
    x = torch.randn(1 << 20, requires_grad=True)
    with checkpoint_scope(name="large"):
        y = x[shaken(x) > 1].sin()
    with pytest.raises(MismatchError) as caught:
        y.sum().backward()
    text = str(caught.value)
    assert "aten.index.Tensor" in text and "not deterministic" in text and "keep" in text
    assert f"{__file__}:" in text and "y = x[shaken(x) > 1].sin()" in text

    with checkpoint_scope():
        y = x[keep(shaken(x) > 1)].sin()
    y.sum().backward()
    assert x.grad.count_nonzero() == y.numel()


def test_a_rerun_names_what_can_help():
    """It decides again; the other backend does not, nor does what `keep` holds."""
    SEED[0] = itertools.count()
    torch.manual_seed(0)
    layer = Layer(ROUTES["topk, where"])
    x = torch.randn(50 * TOKENS, WIDTH, requires_grad=True)
    with pytest.raises(MismatchError, match=r"(?s)int64.*Indices or masks.*backend='replay'"):
        checkpointed(layer)(x).sum().backward()
    layer.use = routed(lambda p: keep(CHOOSE["topk"](p)), FIND["where"])
    checkpointed(layer)(x).sum().backward()


def held_bytes(fn, *args):
    with checkpoint_scope() as scope:
        y = fn(*args)
    kept = scope.stats.bytes_kept
    y.sum().backward()
    return kept


def test_decisions_count_as_kept():
    x, p = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(TOKENS, EXPERTS)
    p.requires_grad_()
    chosen = held_bytes(lambda x, p: x[p.softmax(-1).topk(2).indices[:, 0]].sin(), x, p)
    assert chosen == TOKENS * 2 * 8
    assert held_bytes(lambda x, p: x[p.topk(2).indices[:, 0]].sin(), x, p) == 0  # surely the same
    assert held_bytes(lambda x, p: x.sin().cos() * p.sum(), x, p) == 0
    pool = nn.MaxPool1d(2)
    assert held_bytes(lambda x, p: pool(x.sin()).cos(), x, p) == 0
    vocabulary = torch.randn(1 << 17, requires_grad=True)
    assert held_bytes(lambda x: x.sin().sort().values.cos(), vocabulary) == 0  # too large


@pytest.mark.parametrize("inside", [scope, replay, lambda block: scope(scope(block))])
def test_what_a_block_in_a_rerun_keeps_is_what_its_rerun_meets(inside):
    """The rerun calls the block again, and its scores come out otherwise."""
    calls, x = itertools.count(), torch.randn(6, 8, requires_grad=True)

    def block(x):
        scores = x.detach().sum(0) * (1 if next(calls) == 0 else -1)
        return x[:, keep(scores.argsort()[:3])].sin().exp()

    chosen = x.detach().sum(0).argsort()[:3]
    (want,) = torch.autograd.grad(x[:, chosen].sin().exp().cos().tanh().sum(), x)
    y = checkpointed(lambda x: inside(block)(x).cos().tanh())(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
    assert next(calls) == 2
