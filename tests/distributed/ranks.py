"""Ranks: each runs every program of its world size through every door, and writes a row for each
into a file.

Weights are whole numbers from -1 to 1 before and after each step, in float64: the arithmetic is
exact, whatever strides and alignments kernels meet. (Mixed precision and batch normalisation run
the same kernels on the same shapes.)
"""

import functools
import gc
import json
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from oracle import plain
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, parallel
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_modules, checkpoint_scope, checkpointed, clear_programs

N, WIDTH = 3, 8  # blocks, features
# By world size and name: given the doors for a block and for the model, (model, step).
PROGRAMS = {1: {}, 2: {}, 4: {}}
UNSEEN = ("where", "training", "reshard_after_forward")  # what plain code does not look at
SCOPES = []  # of one step: each with its stats at its end


def program(name, *, world=2, **options):
    """Under this name, the function with these options."""

    def add(function):
        PROGRAMS[world][name] = functools.partial(function, **options)
        return function

    return add


def scope(fn, policy=None):
    def run(*args):
        with checkpoint_scope(policy=policy and policy()) as it:
            result = fn(*args)
        SCOPES.append((it, it.stats))
        return result

    return run


replay = functools.partial(checkpointed, backend="replay")
IN_PLACE = {checkpointed: {}, replay: {"backend": "replay"}}
DOORS = {  # for each block, for the model
    "plain": (plain, plain),
    "torch": (lambda fn: functools.partial(checkpoint, fn, use_reentrant=False), plain),
    "rerun": (checkpointed, plain),
    "replay": (replay, plain),
    "scope": (scope, plain),
    "auto": (plain, functools.partial(scope, policy=auto)),
    "scope in rerun": (lambda fn: checkpointed(scope(fn)), plain),
    "rerun in scope": (lambda fn: scope(checkpointed(fn)), plain),
}

# A function that is replayed is what a scope is: these are run through both.
REPLAYED = ("ddp", "fsdp2, inside", "fsdp2, around", "sequence parallel, around")
REPLAYED += ("fsdp2, the model twice, not resharded", "collectives, written afterwards")
# Four ranks leave out one door each time, by turns, which two ranks run with such a program. Depth
# makes no difference to a rerun of each block.
LEFT_OUT = {
    "fsdp2, around, deep": ["rerun"],
    "fsdp2, the model twice, not resharded": ["auto"],  # an error, as in a scope
    "fsdp2 x tensor parallel, inside": ["scope"],
    "fsdp2 x tensor parallel, around": ["rerun"],
    "fsdp2 x tensor parallel, the model": ["scope"],
    "fsdp2 x sequence parallel": ["auto"],
}


def doors(name):
    """Those that a program runs through; for `auto`, inside is the same as around."""
    nests = "collectives" in name
    left_out = LEFT_OUT.get(name, []) + ["auto"] * ("inside" in name or "lambda" in name)
    left_out += ["rerun"] * ("backward inside" in name)
    left_out += ["replay"] * (name not in REPLAYED)
    found = [door for door in DOORS if nests or " in " not in door]
    return [door for door in found if door not in left_out]


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    def __init__(self, norm=Scale):
        super().__init__()
        self.norm = norm()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.dropout(self.up(self.norm(x)).relu(), 0.5))


def put_inside(model, door):
    if door in IN_PLACE:
        checkpoint_modules(model, "blocks.*", **IN_PLACE[door])
        return
    for block in model.blocks:
        block.forward = door(block.forward)


class Net(nn.Module):
    """Blocks, with regions around them or around lambdas, if not inside."""

    def __init__(self, door, where="around", block=Block, n=N):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(n))
        self.head = nn.Linear(WIDTH, 4)
        ways = {"around": door, "lambda": lambda block: door(lambda x: block(x))}
        self.around = ways.get(where, plain)
        self.double()
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(((torch.arange(p.numel()) * 7 // 3 + i) % 3 - 1).view_as(p))

    def run(self, block, x):
        return self.around(block)(x)

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class Twice(Net):
    def run(self, block, x):
        return super().run(block, super().run(block, x) / 2)


class Unused(Net):
    def run(self, block, x):
        return x if block is self.blocks[0] else super().run(block, x)


def data(step, *shape):
    """Whole numbers, others on each rank and in each step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(-2, 3, shape or (32, WIDTH), generator=generator).double()


def once(call, step, *shape, factor=1):
    (call(factor * data(step, *shape)) * torch.tensor([1.0, 2.0, -1.0, 3.0])).sum().backward()


def two_forwards(call, step):
    (call(data(step)) + 2 * call(2 * data(step))).sum().backward()


def two_backwards(call, step):
    once(call, step)
    once(call, step, factor=2)


@program("ddp")
@program("ddp, regions inside", where="inside")
@program("ddp, with buffers", block=lambda: Block(functools.partial(nn.BatchNorm1d, WIDTH)))
@program("ddp, unused parameters", kind=Unused, find_unused_parameters=True)
@program("ddp, no_sync", accumulate=True)
@program("ddp, a block used twice", kind=Twice)
@program("ddp, a block used twice, static graph", kind=Twice, static_graph=True)
def ddp(door, whole, kind=Net, where="around", block=Block, accumulate=False, **options):
    net = kind(door, where, block)
    if where == "inside":
        put_inside(net, door)
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001, **options)

    def step(i):
        if accumulate:
            with model.no_sync():
                once(whole(model), i, factor=2)
        once(whole(model), i)

    return model, step


KEPT = {"reshard_after_forward": False}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TENSOR = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
SEQUENCE = {
    "norm": parallel.SequenceParallel(),
    "up": parallel.ColwiseParallel(input_layouts=Shard(1)),
    "down": parallel.RowwiseParallel(output_layouts=Shard(1)),
}


@functools.cache
def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))


def in_sequence(call, step):
    once(call, step, 16, 3, WIDTH)


@program("fsdp2, inside", where="inside")
@program("fsdp2, inside, mixed precision", where="inside", mp_policy=MIXED)
@program("fsdp2, around")
@program("fsdp2, around, deep", n=6)
@program("fsdp2, around, not resharded", **KEPT)
@program("fsdp2, around, two forwards", step=two_forwards)
@program("fsdp2, around, frozen", frozen=True)
@program("fsdp2, around, root only", root_only=True)
@program("fsdp2, compiled", where="inside", compiled=True)
@program("fsdp2, a lambda", where="lambda")
@program("fsdp2, the model", where="whole")
@program("fsdp2, the model, not resharded", where="whole", **KEPT)
@program("fsdp2, the model twice in a region", where="whole", two=True)
@program("fsdp2, the model twice, not resharded", where="whole", two=True, **KEPT)
@program("fsdp2, one process", world=1, shape=(1, 1))
@program("fsdp2, one process, the model", world=1, shape=(1, 1), where="whole")
@program("fsdp2, one process, the model twice", world=1, shape=(1, 1), where="whole", two=True)
@program("fsdp2, one process, backward inside", world=1, shape=(1, 1), training=True)
@program("fsdp2, backward inside", training=True)
@program("fsdp2, backward inside, twice", training=True, step=two_backwards)
@program("tensor parallel, inside", where="inside", shape=(1, 2), plan=TENSOR)
@program("sequence parallel, around", shape=(1, 2), plan=SEQUENCE, step=in_sequence)
@program("fsdp2 x tensor parallel, inside", world=4, where="inside", shape=(2, 2), plan=TENSOR)
@program("fsdp2 x tensor parallel, around", world=4, shape=(2, 2), plan=TENSOR)
@program("fsdp2 x tensor parallel, the model", world=4, where="whole", shape=(2, 2), plan=TENSOR)
@program("fsdp2 x sequence parallel", world=4, shape=(2, 2), plan=SEQUENCE, step=in_sequence)
def sharded(door, whole, where="around", shape=(2, 1), plan=None, step=once, **options):
    """In the order that STACKS.md recommends. (The other one: test_modules.py.)"""
    flags = ("frozen", "compiled", "two", "root_only", "training")
    frozen, compiled, two, root_only, training = (options.pop(flag, False) for flag in flags)
    mesh, is_sharded = mesh_of(shape), plan is None or shape[0] > 1
    if where == "whole" or (training and door is scope):
        door, whole = plain, door if whole is plain else whole
    model = Net(door, where, n=options.pop("n", N))
    for i, block in enumerate(model.blocks):
        block.requires_grad_(not (frozen and i % 2))
        if plan is not None:
            parallel.parallelize_module(block, mesh["model"], plan)
    if where == "inside":
        put_inside(model, door)
    for block in model.blocks:
        if compiled:
            block.compile(backend="aot_eager")
        if is_sharded and not root_only:
            fully_shard(block, mesh=mesh["data"], **options)
    if is_sharded:
        fully_shard(model, mesh=mesh["data"], **options)
    run = (lambda x: model(x) + model(2 * x)) if two else model
    if training:
        return model, whole(functools.partial(step, run))
    return model, functools.partial(step, whole(run))


class Synced(torch.autograd.Function):
    """As `nn.SyncBatchNorm` on an accelerator: sums over all ranks, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, weight, running):
        total = x.sum(0)
        dist.all_reduce(total)
        running.mul_(0.5).add_(total.sign())
        ctx.save_for_backward(x, weight, total)
        return x * weight + total.sign()

    @staticmethod
    def backward(ctx, grad):
        x, weight, total = ctx.saved_tensors
        both = grad.sum(0)
        dist.all_reduce(both)
        return grad * weight * total.sign() + both.sign(), (grad * x).sum(0), None


class SyncNorm(Scale):
    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, x):
        return Synced.apply(x, self.weight, self.running)


def written_afterwards(x):
    total = x.detach().sum(0).sign()
    work = dist.all_reduce(total, async_op=True)
    y = x.relu()
    work.wait()
    y = y * total.clone()
    total.mul_(2)
    return y * total


def exchanged(x):
    mine, theirs = x.detach().sum(0).sign(), torch.empty(WIDTH).double()
    peer = 1 - dist.get_rank()
    both = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return x * theirs


LATE: list[torch.Tensor] = []  # what threads of the backend still hold, on one rank


def differentiable(x):
    world, half = dist.group.WORLD, [len(x) // 2] * 2
    every = functional.all_gather_tensor_autograd(x, 0, world)
    mine = functional.reduce_scatter_tensor_autograd(every.relu(), "sum", 0, world)
    given = x.relu() * x
    LATE.extend([given] * dist.get_rank())
    return mine + functional.all_to_all_single_autograd(given, half, half, world).relu()


class Talk(Block):
    def __init__(self, function):
        super().__init__(SyncNorm)
        self.function = function

    def forward(self, x):
        return super().forward(self.function(x).clamp(-2, 2))


@program("collectives, written afterwards", function=written_afterwards)
@program("collectives, exchanged", function=exchanged)
@program("collectives, differentiable", function=differentiable)
def collectives(door, whole, function):
    model = Net(door, block=functools.partial(Talk, function))
    return model, functools.partial(once, whole(model))


def taken_part():
    """In how many collectives this process has taken part, as the backend itself counts them."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(name, program):
    """Two steps: all that there is to compare, by name; the collectives."""
    clear_programs()  # all programs share the sites here
    torch.manual_seed(dist.get_rank())
    model, step = program(*DOORS[name])
    found, count = {}, 0
    for i in range(2):
        SCOPES.clear()
        LATE.clear()
        before = taken_part()
        step(i)
        count += taken_part() - before
        for key, p in model.named_parameters():
            if p.grad is not None:
                found[f"step {i}, gradient of {key}"] = local(p.grad).clone()
                grad = p.grad
                if isinstance(p, DTensor):
                    grad = grad.redistribute(p.device_mesh, p.placements)
                with torch.no_grad():
                    local(p).sub_(local(grad).sign()).clamp_(-1, 1)
                p.grad = None
    found.update((key, local(value).clone()) for key, value in model.state_dict().items())
    found["the random state"] = torch.get_rng_state()
    return found, count, [(it.stats.cuts, then, it.stats) for it, then in SCOPES]


def main(rank, world, folder, only=""):
    """What a rank finds is in the file `world.rank`: a row for each program and door."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store of {world}", world)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timeout)
    wanted = {}
    with open(f"{folder}/{world}.{rank}", "w") as file:
        for name, program in PROGRAMS[world].items():
            same = repr([item for item in program.keywords.items() if item[0] not in UNSEEN])
            same += program.func.__name__
            for door in doors(name) if only in name else ():
                if door == "plain" and same in wanted:
                    continue
                try:
                    found, count, scopes = train(door, program)
                    if door == "plain":
                        wanted[same] = found
                    want = wanted[same]
                except Exception:
                    row = {"error": traceback.format_exc()}
                else:
                    differs = [key for key in want if not torch.equal(found[key], want[key])]
                    row = {"differs": differs, "count": count, "scopes": scopes}
                print(json.dumps([rank, name, door, row]), file=file, flush=True)
    dist.destroy_process_group()


def import_all():
    """What torch imports when it first compiles, which each rank would import; garbage collections
    of the ranks look at none of it. Not a backward: where torch is built for GPUs, none may run
    before a fork."""
    with torch.no_grad():
        torch.compile(Block(), backend="aot_eager")(torch.ones(2, WIDTH))
    torch._dynamo.reset()
    gc.freeze()


def run(seconds, *given):
    """Prints a row for each rank, program and door."""
    import_all()
    fork, end = multiprocessing.get_context("fork"), time.monotonic() + float(seconds)
    with tempfile.TemporaryDirectory() as folder:
        places = [(rank, world) for world in PROGRAMS for rank in range(world)]
        ranks = [fork.Process(target=main, args=(*place, folder, *given)) for place in places]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0, end - time.monotonic()))
            if process.is_alive():
                print(f"a rank was killed after {seconds} seconds", file=sys.stderr)
                process.kill()
        for file in Path(folder).glob("*.*"):
            print(file.read_text(), end="")


if __name__ == "__main__":
    run(*sys.argv[1:])
