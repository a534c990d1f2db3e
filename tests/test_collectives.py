"""Collectives in a region: a rerun takes part in them again, on all ranks alike; replay holds what came in."""

import functools
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from beside import Program
from torch import nn

from checkpointing import checkpoint_scope, checkpointed

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


class SyncNorm(torch.autograd.Function):
    """What `nn.SyncBatchNorm` does on an accelerator: statistics of all ranks, gathered in the forward."""

    @staticmethod
    def forward(ctx, x, weight, running_mean):
        mine = torch.cat([x.mean(0), x.var(0, correction=0), torch.tensor([float(len(x))])])
        gathered = torch.empty(dist.get_world_size() * mine.numel())
        dist.all_gather_into_tensor(gathered, mine)
        gathered = gathered.view(-1, mine.numel())
        mean, n = (gathered[:, :4] * gathered[:, 8:]).sum(0) / gathered[:, 8].sum(), gathered[:, 8].sum()
        var = ((gathered[:, 4:8] + (gathered[:, :4] - mean) ** 2) * gathered[:, 8:]).sum(0) / n
        running_mean.mul_(0.9).add_(mean, alpha=0.1)
        scale = (var + 1e-5).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        return (x - mean) * scale * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, mean, scale = ctx.saved_tensors
        normal = (x - mean) * scale
        sums = torch.cat([grad.sum(0), (grad * normal).sum(0)])
        dist.all_reduce(sums)
        sums = sums / (len(x) * dist.get_world_size())
        return weight * scale * (grad - sums[:4] - normal * sums[4:]), (grad * normal).sum(0), None


class SyncBatchNorm(nn.Module):
    """With a weight and a running mean."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return SyncNorm.apply(x, self.weight, self.mean)


def in_place(x):
    total = x.sin().sum(0).detach()
    dist.all_reduce(total)
    return (x * total).exp().sin()


def asynchronous(x):
    total = x.sin().sum(0).detach()
    work = dist.all_reduce(total, async_op=True)
    y = x.exp()
    work.wait()
    return (y * total).sin()


def written_afterwards(x):
    total = x.sin().sum(0).detach()
    dist.all_reduce(total)
    y = x * total.clone()
    total.mul_(2)
    return (y * total).exp().sin()


def exchanged(x):
    mine, theirs = x.detach().sum(0), torch.empty(4)
    peer = 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]):
        work.wait()
    return (x * theirs).exp().sin()


def functional_style(x):
    total = functional.all_reduce(x.detach().sum(0), "sum", dist.group.WORLD)
    return (x * total).exp().sin()


def normalised(x):
    torch.manual_seed(0)
    return nn.Sequential(nn.Tanh(), SyncBatchNorm(), nn.Linear(4, 4), SyncBatchNorm())(x)


PROGRAMS = [in_place, asynchronous, written_afterwards, exchanged, functional_style, normalised]


def scope(fn):
    def run(x):
        with checkpoint_scope():
            return fn(x)

    return run


DOORS = {
    "rerun": checkpointed,
    "replay": functools.partial(checkpointed, backend="replay"),
    "scope": scope,
    "scope in rerun": lambda fn: checkpointed(scope(fn)),
    "rerun in scope": lambda fn: scope(checkpointed(fn)),
}


def step(program, door, rank):
    """Result and gradient."""
    torch.manual_seed(rank)
    x = torch.randn(6, 4, requires_grad=True)
    y = door(program)(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def main(rank, port):
    """One rank: prints what differs from plain."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for program in PROGRAMS:
        want = step(program, lambda fn: fn, rank)
        for name, door in DOORS.items():
            have = step(program, door, rank)
            if not all(map(torch.equal, have, want)):
                print(f"{program.__name__}, {name}: differs on rank {rank}")
    model = nn.Sequential(nn.Tanh(), SyncBatchNorm(), nn.Tanh())
    for name, door in DOORS.items():
        model[1].mean.zero_()
        torch.manual_seed(rank)
        door(model)(x := torch.randn(6, 4, requires_grad=True)).sum().backward()
        once = model[1].mean.clone()
        model[1].mean.zero_()
        model(x)
        if not torch.equal(once, model[1].mean):
            print(f"running mean, {name}: differs on rank {rank}")
    dist.destroy_process_group()
    print("done")


both = Program("-W", "ignore", __file__, GLOO_SOCKET_IFNAME="lo")


def test_collectives_in_a_region():
    """Two processes; every program and every door as plain, on both."""
    assert both.output == "done\ndone\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(int(sys.argv[1]), sys.argv[2]))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    command = [sys.executable, "-W", "ignore", __file__]
    ranks = [subprocess.Popen([*command, str(rank), port]) for rank in range(2)]
    sys.exit(max(rank.wait() for rank in ranks))
