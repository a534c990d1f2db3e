"""What tests of `auto()` share: scopes, measurements of a step, and programs."""

import oracle
import programs
import torch
from oracle import bits, memory_of, scope, through
from torch import nn

from checkpointing import auto, checkpoint_scope, checkpointed, keep


def scoped(fn, **options):
    def run(*args):
        with checkpoint_scope(policy=auto(**options)) as run.scope:
            return fn(*args)

    return run


def bytes_of(run):
    """Held between forward and backward, and at the peak; the first run fills caches."""
    run().backward()
    return memory_of(run)


def predicted(forward, **options):
    """What a plan says of the peak of a step, as a part of it."""
    run = scoped(forward, **options)
    peak = bytes_of(run).peak
    return run.scope.stats.peak_predicted / peak


def units_of(x, n, wide=1):
    """A chain of `n` operators, each of which saves its result, and perhaps longer tensors."""
    y = through([torch.tanh] * n, x * 1)
    return y.sum() if wide == 1 else y.expand(wide, -1).sin().sin().sum()


def units(n):
    x = torch.linspace(-1, 1, 1000).requires_grad_()
    return lambda: units_of(x, n)


def known(fn, **options):
    """The loss and the scope of a run; from the second one on the program is known."""
    run = scoped(fn, **options)
    run()
    return run(), run.scope


def close(y, logits):
    return nn.functional.kl_div(y.log_softmax(-1), logits.softmax(-1), reduction="batchmean")


BUILDS = {
    "transformer": lambda: programs.transformer(3, 32, 2, 32, dropout=0.1),
    "outputs": lambda: programs.lstm(6, 16, 4, outputs=True),
    "unet": lambda: programs.unet(4, 3, 1, 32),
    "chain": lambda: programs.chain(20, 16, 16),
}


def gradients(build, wrap):
    """Gradients of first and second order, statistics and the random stream, in bits."""
    torch.manual_seed(0)
    run, wanted, buffers = build()
    first = torch.autograd.grad(wrap(run)(), wanted)
    again = torch.autograd.grad(wrap(run)(), wanted, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in again), wanted)
    return bits([*first, *again, *second, *buffers, torch.get_rng_state()])


def net(depth=4, tag=lambda t, name: t, keep=lambda t: t):
    """Dropout, batch norm, in-place operators and views; tags and kept values on request."""
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2))
        for _ in range(depth)
    )
    x = torch.rand(8, 16).requires_grad_()

    def run():
        y, parts = x, []
        for layer in layers:
            y = tag(y + layer(y), "a")
            y[:, :2].mul_(0.5)
            parts.append(y[2:4].t())
            y = keep(y.clone())
            y.add_(1)
        return sum(part.tanh().sum() for part in parts) + y.sin().sum()

    return run, [x, *layers.parameters()], list(layers.buffers())


def in_scope(fn, policy):
    return scope(fn, policy=policy)


NESTINGS = {
    "scope": in_scope,
    "function": lambda fn, policy: checkpointed(in_scope(fn, policy), policy=policy),
    "scopes": lambda fn, policy: in_scope(in_scope(fn, policy), policy),
    "rerun around": lambda fn, policy: checkpointed(in_scope(fn, policy)),
    "scope around": lambda fn, policy: scope(in_scope(fn, policy)),
    "kept by hand": lambda fn, policy: in_scope(lambda: keep(fn()), policy),
    "offloaded": lambda fn, policy: oracle.in_hooks(in_scope(fn, policy)),
}


def perceptrons(count, outputs=64):
    made = lambda: (nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, outputs))
    return [nn.Sequential(*made()) for _ in range(count)]
