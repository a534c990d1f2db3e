"""Compiled code in recorded regions: it stays compiled, and right to the bit."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from checkpointing import auto, checkpoint_scope, checkpointed

pytestmark = pytest.mark.filterwarnings("ignore")  # what the compiler says is not ours

SHOWN = {"wrap_inductor_compiled_regions": True}  # as one operator
BACKENDS = {"aot_eager": ("aot_eager", {}), "inductor": ("inductor", {}), "shown": ("inductor", SHOWN)}
DOORS = {
    "scope": checkpoint_scope,
    "auto": lambda: checkpoint_scope(policy=auto()),
    "values": lambda: checkpoint_scope(determinism_check="values"),
    "outside": nullcontext,
}


@pytest.fixture(params=BACKENDS)
def compiler(request):
    """Compiles a function; what it compiles and how often that runs is counted."""
    import torch._inductor.config

    torch._dynamo.reset()
    name, options = BACKENDS[request.param]
    inner = torch._dynamo.lookup_backend(name)

    def backend(graph, inputs):
        compiled = inner(graph, inputs)
        compiler.graphs += 1

        def run(*args):
            compiler.calls += 1
            return compiled(*args)

        return run

    def compiler(function, **dynamic):
        return torch.compile(function, backend=backend, **dynamic)

    compiler.graphs = compiler.calls = 0
    compiler.is_hidden = request.param == "inductor"
    with torch._inductor.config.patch(options):
        yield compiler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.outer(nn.functional.dropout(self.norm(self.inner(x)).relu(), 0.5))


def step(model, run, door, n):
    """All that a step shows: result, gradients, buffers, and the random numbers after it."""
    torch.manual_seed(n)
    x = torch.randn(n, 8, requires_grad=True)
    with DOORS[door]() as scope:
        loss = (run(x * 2) * 3).sin().sum()
    held = scope and (scope.stats.bytes_held, scope.stats.ops_recorded)
    found = [loss, *torch.autograd.grad(loss, [x, *model.parameters()]), torch.rand(2)]
    return found + [b.clone() for b in model.buffers()], held


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_before_inside_and_after_a_block(compiler, dynamic):
    torch.manual_seed(0)
    want, have = nn.Sequential(Block(), Block()), None
    have = copy.deepcopy(want)
    runs = [compiler(model, dynamic=dynamic) for model in (want, have)]
    for i, door in enumerate(["outside", "scope", "auto", "outside", "values"]):
        n = 4 + 2 * dynamic * i
        (first, _), (second, held) = step(want, runs[0], "outside", n), step(have, runs[1], door, n)
        assert all(map(torch.equal, first, second)), door
        assert (compiler.graphs, compiler.calls) == (1, 2 * i + 2)


def test_what_is_compiled_in_the_block_is_recomputed_where_it_is_shown_and_kept_where_not(compiler):
    model = Block()
    run = compiler(model)
    _, (held, recorded) = step(model, run, "scope", 4)
    assert (held > 4 * 16 * 4) == compiler.is_hidden
    _, (again, _) = step(model, run, "scope", 4)
    assert again == held and compiler.graphs == 1
    assert recorded == (3 if compiler.is_hidden else 4) or recorded > 9
