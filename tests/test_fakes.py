"""Dry runs: a block under `FakeTensorMode` is followed, planned and replayed as with memory."""

import contextlib
import functools

import programs
import pytest
import torch
from oracle import plain, scope, through
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from checkpointing import auto, checkpoint_scope, checkpointed, clear_programs, keep, save_ops

WIDTH, aten = 64, torch.ops.aten


class Block(programs.Block):
    def __init__(self):
        super().__init__(WIDTH, 4, 0.1)


class Routed(Block):
    """Which rows are read depends on data only in their order."""

    def forward(self, x):
        rows = self.norm1(x).sum(-1).topk(16, -1).indices
        chosen = x.gather(1, rows[..., None].expand(-1, -1, WIDTH))
        return super().forward(x) + super().forward(chosen).mean(1, keepdim=True)


class Writing(Block):
    def forward(self, x):
        y = super().forward(x)
        padded = torch.zeros_like(y)
        for row in range(len(y)):
            padded[row][:8].copy_(y[row][:8])
        return y.mul_(2) + padded.tanh_()


class Convolving(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.ReLU())


@torch.library.custom_op("fakes::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)


class Attending(Block):
    """By torch's kernel, with dropout and without, and an operator that torch does not know."""

    def forward(self, x):
        for dropout in (0.0, 0.1):
            x = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)
        return twice(super().forward(x)).sin()


def whole(**options):
    def run(blocks, x):
        with checkpoint_scope(**options) as run.scope:
            return through(blocks, x).square().mean()

    return run


def each(door):
    def run(blocks, x):
        run.regions = [*map(door, blocks)]  # torch's tracker asks for modules in backward
        return through(run.regions, x).square().mean()

    return run


WAYS = {
    "plain": each(plain),
    "rerun": each(checkpointed),
    "scope": each(scope),
    "keep": each(lambda block: scope(lambda x: block(keep(x * 2)))),
    "products": whole(policy=save_ops(aten.mm.default, aten.addmm.default)),
    "auto": whole(policy=auto()),
    "budget": whole(policy=auto(budget="150 KiB")),
    "peak": whole(policy=auto(peak="2 MiB")),
}


@functools.cache
def measured(name, kind=Block, forward="real", backward="real"):
    """The peak of the second step as torch's tracker sees it, and what the block counts."""
    clear_programs()
    way, fake = WAYS[name], FakeTensorMode()
    modes = {"real": contextlib.nullcontext(), "fake": fake}
    with modes[forward]:
        torch.manual_seed(0)
        blocks, x = nn.ModuleList(kind() for _ in range(2)), torch.randn(4, 32, WIDTH)
    tracker = MemTracker()
    tracker.track_external(blocks, x)
    for watching in (contextlib.nullcontext(), tracker):
        blocks.zero_grad()
        with modes[backward], watching:
            with modes[forward]:
                loss = way(blocks, x)
            loss.backward()
            del loss
    peak = sum(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())
    scope = getattr(way, "scope", None)
    return peak, None if scope is None else scope.stats


MODELS = [(name, Block) for name in WAYS if name != "plain"]
MODELS += [("auto", Routed), ("scope", Convolving), ("auto", Convolving)]
MODELS += [("scope", Attending), ("auto", Attending)]


@pytest.mark.parametrize(("name", "kind"), MODELS)
@pytest.mark.filterwarnings("ignore:.*A budget of")
def test_a_dry_run_needs_what_a_real_run_needs(name, kind):
    """To the byte, with as many operators recomputed."""
    assert measured(name, kind, "fake", "fake") == measured(name, kind)


def test_a_dry_run_of_writes_through_views_is_close():
    """After a write, autograd makes views of fake tensors in more steps than those of real ones."""
    real, fake = measured("auto", Writing), measured("auto", Writing, "fake", "fake")
    assert fake[0] == pytest.approx(real[0], rel=0.03)


@pytest.mark.parametrize("name", ["scope", "auto"])
def test_backward_may_run_outside_of_the_mode(name):
    """A replay enters the mode again."""
    found = measured(name, Block, "fake", "real")
    assert found[1:] == measured(name)[1:]
    assert torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


def test_real_and_dry_runs_share_a_site():
    way, counts = WAYS["auto"], []
    torch.manual_seed(0)
    for mode in (None, None, FakeTensorMode(), None, FakeTensorMode()):
        with mode or contextlib.nullcontext():
            blocks, x = nn.ModuleList(Block() for _ in range(2)), torch.randn(4, 32, WIDTH)
            way(blocks, x).backward()
        counts.append(way.scope.stats)
    assert counts[2:] == counts[1:-1]  # the first step plans while it runs
