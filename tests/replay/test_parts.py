"""A memory that is written in parts: views are made first, and then views of them are written."""

import pytest
import torch
from oracle import NO_ROOM, planned, replay, scope

from checkpointing import auto, checkpointed, clear_programs

pytestmark = NO_ROOM


DOORS = {
    "scope": scope,
    "planned": planned,
    "replay": replay,
    "budget": lambda fn: checkpointed(fn, backend="replay", policy=auto(budget=64)),
}
VIEWS = {
    "indexed": lambda m: [m[i] for i in range(len(m))],
    "unbind": lambda m: [*m.unbind()],
    "iterated": lambda m: [*m],
    "chunks": lambda m: [*m.chunk(len(m))],
    "split": lambda m: [part.squeeze(0) for part in m.split(1)],
}
WRITES = {
    "slice": lambda v, n: v[:n].fill_(n),
    "item": lambda v, n: v.__setitem__(slice(0, n), float(n)),
    "copy": lambda v, n: v[..., :n].copy_(torch.full_like(v[..., :n], n)),
    "transposed": lambda v, n: v.t()[:n].mul_(0.5).add_(n),
    "flat": lambda v, n: v.view(-1)[n:].add_(n),
    "narrow": lambda v, n: v.narrow(-1, 0, 2).mul_(n),
    "strided": lambda v, n: v.as_strided((2,), (1,), v.storage_offset() + 1).add_(n),
    "indexed": lambda v, n: v.index_fill_(-1, torch.tensor([0, 2]), float(n)),
    "reshaped in place": lambda v, n: v[:2].unsqueeze_(-1).transpose_(0, 1).add_(n),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("views", VIEWS)
def test_views_that_are_made_first_and_written_through_views_of_them(views, rows, door):
    """Whatever order the rows are written in, no write is lost."""
    writes = [*WRITES.values()]
    others = [*writes[1:], *writes[:1]]
    for write, other in [*zip(writes, writes, strict=True), *zip(writes, others, strict=True)]:

        def fill(w, first=write, second=other):
            out = torch.zeros(rows, 3)
            parts = VIEWS[views](out)
            for i, part in enumerate(parts):
                (first if i % 2 else second)(part, 1 + i % 2)
            return (w * out).sin() * out

        w, region = torch.arange(3.0 * rows).reshape(rows, 3).requires_grad_(), DOORS[door](fill)
        (want,) = torch.autograd.grad(fill(w).sum(), w)
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(region(w).sum(), w)[0], want), (write, other)
    clear_programs()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("offsets", [(4, 4, 2, 2), (0, 4), (6, 0, 6)])
def test_a_view_that_moves_over_its_memory(offsets, door):
    """Where it lies is that of each run: programs are shared by all of them."""
    w = torch.arange(8.0).requires_grad_()

    def moves(w, offset):
        m = w.detach() * 1
        p, q = m[:4], m[4:]
        q.as_strided_((2,), (1,), offset)
        q.mul_(3)
        return (w[:4] * p).sin() * p

    def past(w, _):
        m = w.detach() * 1
        p, q = m[:4], m[4:]
        q.mul_(3)
        return (w * p.as_strided((8,), (1,), 0)).sin()

    for function in (moves, past):
        region = DOORS[door](function)
        for offset in offsets:
            want = torch.autograd.grad(function(w, offset).sum(), w)
            assert torch.equal(torch.autograd.grad(region(w, offset).sum(), w)[0], want[0])
