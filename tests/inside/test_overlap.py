"""Whether two tensors share memory."""

import random

import torch

from checkpointing import _torch


def test_tensors_that_share_an_element_overlap():
    """Ten thousand pairs of strided views, against the elements themselves."""
    random.seed(0)
    base = torch.arange(120)
    apart = 0
    for _ in range(10_000):
        views = []
        for _ in range(2):
            size = [random.randint(0, 4) for _ in range(random.randint(0, 3))]
            stride = [random.choice([0, 1, 2, 3, 5, 6, 12]) for _ in size]
            if random.random() < 0.5 and views and len(views[0].shape) == len(size):
                stride = views[0].stride()
            last = sum(step * max(0, n - 1) for n, step in zip(size, stride, strict=True))
            views.append(base.as_strided(size, stride, random.randint(0, 59 - min(59, last))))
        one, other = views
        share = not {*one.flatten().tolist()}.isdisjoint(other.flatten().tolist())
        found = _torch.overlap(one, other)
        assert found or not share
        apart += not found
    assert apart > 2_000
    x = torch.rand(2, 3)
    assert _torch.overlap(x[:0], x) is False
    assert _torch.overlap(x, x)
    assert _torch.overlap(x, x.view(torch.int32))
    assert not _torch.overlap(x, x.clone())
    assert not any(_torch.overlap(*x.chunk(3, 1)[n : n + 2]) for n in range(2))
