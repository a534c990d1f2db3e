"""One rank: runs every program of its world size through every door, and writes a line for each into a file.

Weights are whole numbers between -1 and 1 before and after each step, in float64: the arithmetic is exact, whatever strides and
alignment a kernel meets. (But for mixed precision and batch normalisation: there the kernels and the shapes are the same.)
"""

import contextlib
import functools
import json
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_scope, checkpointed

N, WIDTH = 6, 8  # blocks, features


def scope(fn):
    def run(*args):
        with checkpoint_scope():
            return fn(*args)

    return run


SCOPES = []  # of one run


def under_auto(fn):
    def run(*args):
        with checkpoint_scope(policy=auto()) as it:
            SCOPES.append(it)
            return fn(*args)

    return run


def plain(fn):
    return fn


DOORS = {  # around each block, and around the whole model
    "plain": (plain, plain),
    "torch": (lambda fn: functools.partial(checkpoint, fn, use_reentrant=False), plain),
    "rerun": (checkpointed, plain),
    "replay": (functools.partial(checkpointed, backend="replay"), plain),
    "scope": (scope, plain),
    "auto": (plain, under_auto),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = Scale()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.dropout(self.up(self.scale(x)).relu(), 0.5))


class Scale(nn.Module):
    """A normalisation that does not normalise: exact."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.weight


class Net(nn.Module):
    """Blocks with regions inside, around, or around a lambda."""

    def __init__(self, door, where="around", block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(N))
        self.head = nn.Linear(WIDTH, 4)
        around = {"around": door, "lambda": lambda block: door(lambda x: block(x))}
        self.around = around.get(where, plain)
        for block in self.blocks if where == "inside" else ():
            block.forward = door(block.forward)
        self.double()
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(((torch.arange(p.numel()) * 7 // 3 + i) % 3 - 1).view_as(p))

    def forward(self, x):
        for block in self.blocks:
            x = self.around(block)(x)
        return self.head(x)


def once(model, x):
    (model(x) * torch.tensor([1.0, 2.0, -1.0, 3.0])).sum().backward()


def data(step, *shape):
    """Whole numbers, others on each rank and in each step."""
    g = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(-2, 3, shape or (4, WIDTH), generator=g).double()


# ---- programs: called with the doors for a block and for the model; they return the module whose parameters are trained, and the step


PROGRAMS = {2: {}, 4: {}}


def program(name, *args, world=2, **kwargs):
    def add(function):
        PROGRAMS[world][name] = functools.partial(function, *args, **kwargs)
        return function

    return add


# ---- DDP


def once_more(model, x):
    """Two backwards, of which the first leaves the gradients where they are."""
    with model.no_sync():
        once(model, x)
    once(model, 2 * x)


class Norm(Block):
    """With buffers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.BatchNorm1d(WIDTH)


class Twice(Net):
    def forward(self, x):
        for block in self.blocks:
            x = self.around(block)(self.around(block)(x) * 0.5)
        return self.head(x)


class Unused(Net):
    def forward(self, x):
        for block in self.blocks[::2]:
            x = self.around(block)(x)
        return self.head(x)


@program("ddp")
@program("ddp, with buffers", block=Norm)
@program("ddp, static graph", static_graph=True)
@program("ddp, unused parameters", kind=Unused, find_unused_parameters=True)
@program("ddp, no_sync", step=once_more)
@program("ddp, gradients as bucket views", gradient_as_bucket_view=True)
@program("ddp, a block used twice", kind=Twice)
@program("ddp, a block used twice, static graph", kind=Twice, static_graph=True)
@program("ddp, regions inside", where="inside")
def ddp(door, whole, kind=Net, step=once, where="around", block=Block, **options):
    model = nn.parallel.DistributedDataParallel(kind(door, where, block), bucket_cap_mb=0.001, **options)
    return model, lambda x: step(Model(whole, model), x)


class Model:
    """A model that is called through a door."""

    def __init__(self, whole, model):
        self.call = whole(model)
        self.no_sync = getattr(model, "no_sync", None)

    def __call__(self, x):
        return self.call(x)


# ---- FSDP2


def two_forwards(model, x):
    (model(x).sum() + model(x * 2).sum()).backward()


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@program("fsdp2, regions inside", where="inside")
@program("fsdp2, regions inside, not resharded", where="inside", reshard_after_forward=False)
@program("fsdp2, regions around")
@program("fsdp2, regions around, not resharded", reshard_after_forward=False)
@program("fsdp2, a lambda", where="lambda")
@program("fsdp2, a lambda, not resharded", where="lambda", reshard_after_forward=False)
@program("fsdp2, around the model", where="whole")
@program("fsdp2, around the model, not resharded", where="whole", reshard_after_forward=False)
@program("fsdp2, mixed precision inside", where="inside", mp_policy=MIXED)
@program("fsdp2, mixed precision around", mp_policy=MIXED)
@program("fsdp2, two forwards, inside", where="inside", step=two_forwards)
@program("fsdp2, two forwards, around", step=two_forwards)
@program("fsdp2, two forwards, around, not resharded", step=two_forwards, reshard_after_forward=False)
@program("fsdp2, frozen", frozen=True)
@program("fsdp2, frozen, inside", where="inside", frozen=True)
@program("fsdp2, two forwards in one region", where="whole", twice=True)
@program("fsdp2, two forwards in one region, not resharded", where="whole", twice=True, reshard_after_forward=False)
@program("fsdp2, root only", root_only=True)
@program("fsdp2, root only, inside", root_only=True, where="inside")
def fsdp2(door, whole, where="around", step=once, frozen=False, root_only=False, twice=False, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if where == "whole" and whole is plain:
        door, whole = plain, door
    model = Net(door, where)
    for block in model.blocks[::2] if frozen else ():
        block.requires_grad_(False)
    for block in () if root_only else model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    call = whole((lambda x: model(x) + model(2 * x)) if twice else model)
    return model, lambda x: step(call, x)


# ---- tensor parallel


def sequence(model, x):
    once(model, data(int(x[0, 0]), 2, 3, WIDTH))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "scale": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


@program("tensor parallel, regions inside", where="inside")
@program("tensor parallel, regions around")
@program("sequence parallel, regions inside", where="inside", plan=SEQUENCE, step=sequence)
@program("sequence parallel, regions around", plan=SEQUENCE, step=sequence)
@program("fsdp2 x tensor parallel, regions inside", where="inside", shape=(2, 2), world=4)
@program("fsdp2 x tensor parallel, regions around", shape=(2, 2), world=4)
@program("fsdp2 x tensor parallel, not resharded", shape=(2, 2), world=4, reshard_after_forward=False)
@program("fsdp2 x sequence parallel", plan=SEQUENCE, step=sequence, shape=(2, 2), world=4)
def parallel(door, whole, where="around", plan=PLAN, step=once, shape=(1, 2), **options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
    model = Net(door, where)
    for block in model.blocks:
        parallelize_module(block, mesh["model"], plan)
        if shape[0] > 1:
            fully_shard(block, mesh=mesh["data"], **options)
    if shape[0] > 1:
        fully_shard(model, mesh=mesh["data"], **options)
    return model, lambda x: step(whole(model), x)


# ---- what runs them


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(name, program):
    """Everything that there is to compare after three steps, by name; the collectives; the cuts of `auto()`."""
    SCOPES.clear()
    torch.manual_seed(dist.get_rank())
    model, step = program(*DOORS[name])
    found, seen = {}, collectives()
    count = 0
    for i in range(3):
        before = collectives()
        step(data(i))
        count += collectives() - before
        for key, p in model.named_parameters():
            if p.grad is not None:
                found[f"step {i}, gradient of {key}"] = local(p.grad).clone()
                grad = p.grad.redistribute(p.device_mesh, p.placements) if isinstance(p, DTensor) else p.grad
                with torch.no_grad():
                    local(p).sub_(local(grad).sign()).clamp_(-1, 1)
                p.grad = None
    found.update((key, local(value).clone()) for key, value in model.state_dict().items())
    found["random state"] = torch.get_rng_state()
    del seen
    return found, count, [[it._block._tape.cuts, it.stats] for it in SCOPES]


def collectives():
    """How many this process has taken part in, as the backend itself counts them."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def line(program, door, want):
    try:
        found, count, cuts = trained(door, program)
    except Exception:
        return None, {"error": traceback.format_exc()}
    differs = [key for key in found if want is not None and not same(found[key], want.get(key))]
    return found, {"differs": differs, "count": count, "cuts": cuts, "compared": len(found)}


def same(a, b):
    return b is not None and a.dtype == b.dtype and torch.equal(a, b)


def main(rank, world, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    with open(f"{folder}/{rank}", "w") as file:
        for name, program in PROGRAMS[world].items():
            if len(sys.argv) > 4 and sys.argv[4] not in name:
                continue
            want = None
            for door in DOORS:
                found, result = line(program, door, want)
                want = found if door == "plain" else want
                print(json.dumps([name, door, result]), file=file, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
