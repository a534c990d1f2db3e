"""Under `torch.compile` a call of the drop-in becomes torch's own operator for checkpointed
regions."""

import functools

import pytest
import torch
import torch.utils.checkpoint as theirs
from functorch.compile import min_cut_rematerialization_partition, nop
from oracle import leaf, replay, scope
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import checkpointing.torch_compat as ours
from checkpointing import checkpoint_modules, checkpointed

pytestmark = pytest.mark.filterwarnings("ignore")  # what the compiler says is not ours

MM = torch.ops.aten.mm.default


@pytest.fixture(autouse=True)
def forgetful():
    """Tracing a selective context leaves torch's notes for the next node behind."""
    yield
    torch.fx.traceback.current_meta.clear()


def fn(x, y):
    return torch.sigmoid(torch.matmul(torch.matmul(x, y).sin(), y))


def arguments():
    torch.manual_seed(0)
    return leaf(), leaf()


def products(program, **options):
    """How many matrix products the compiled forward and backward hold."""
    torch._dynamo.reset()
    found = []

    def compiler(graph, _):
        found.append(sum(node.target is MM for node in graph.graph.nodes))
        return nop(graph, _)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )
    inputs, same = arguments(), arguments()
    torch.compile(program, backend=backend, **options)(*inputs).sum().backward()
    program(*same).sum().backward()
    torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in same])
    return found


def called(**options):
    return lambda m: lambda x, y: m.checkpoint(fn, x, y, **options)


def kept(m):
    return called(
        use_reentrant=False,
        context_fn=functools.partial(m.create_selective_checkpoint_contexts, [MM]),
    )(m)


def region_of(inside):
    return lambda m: lambda x, y: m.checkpoint(inside(m), x, y, use_reentrant=False)


OTHERS = {"preserve_rng_state": False, "early_stop": False, "determinism_check": "none"}
PROGRAMS = {
    "rerun": called(use_reentrant=False),
    "reentrant": called(use_reentrant=True),
    "unsaid": called(),
    "options": called(use_reentrant=False, **OTHERS),
    "kept": kept,
    "nested": region_of(lambda m: lambda x, y: called(use_reentrant=False)(m)(x, y).sin()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_as_torchs(name):
    want, have = (products(PROGRAMS[name](m), fullgraph=True) for m in (theirs, ours))
    assert have == want == ([2, 4] if name == "kept" else [2, 6])


class Thing:
    @ours.checkpoint(use_reentrant=False)
    def run(self, x, y):
        return fn(x, y)


STEPS = [
    lambda pair: (pair[0] @ pair[1], pair[1]),
    lambda pair: (pair[0].sin() @ pair[1]).sigmoid(),
    torch.neg,
]


def sequence(x, y):
    return ours.checkpoint_sequential(STEPS, 3, (x, y), use_reentrant=False)


OPTIONS = {"use_reentrant": False, "respect_saved_tensors_hooks": True}
FORMS = {  # with the number of products in backward
    "function": (lambda: ours.checkpoint(use_reentrant=False)(fn), 6),
    "inside": (lambda: lambda x, y: ours.checkpoint(**OPTIONS)(fn)(x, y), 6),
    "method": (lambda: Thing().run, 6),
    "sequence": (lambda: sequence, 5),
    "own": (lambda: checkpointed(fn), 6),
    "own inside": (lambda: lambda x, y: checkpointed(fn)(x, y), 6),
    "own legacy": (lambda: checkpointed(fn, backend="reentrant"), 6),
    "switched off": (lambda: checkpointed(fn, enabled=False), 4),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_compile_in_one_graph(form):
    """torch's own decorator and `checkpoint_sequential` break the graph."""
    program, count = FORMS[form]
    assert products(program(), fullgraph=True) == [2, count]


def in_place(block):
    checkpoint_modules(block, type(block))
    return block


@pytest.mark.parametrize(
    ("door", "backend"),
    [
        (checkpointed, "inductor"),
        (ours.checkpoint(use_reentrant=False), "aot_eager"),
        (in_place, "aot_eager"),
    ],
)
def test_one_graph_for_all_sizes_with_the_results_of_eager_code(door, backend):
    torch._dynamo.reset()
    graphs, inner = [], torch._dynamo.lookup_backend(backend)

    class Block(nn.Module):
        def forward(self, x, y):
            return (x * y[0]).sin().exp() * y[1]

    y, region = leaf(), door(Block())

    def program(x, y):
        return region(x * 2, y).cos()

    def compiler(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return inner(graph, inputs)

    compiled = torch.compile(program, backend=compiler, fullgraph=True, dynamic=True)
    for n in (3, 5, 8):
        x = torch.randn(n, 4, requires_grad=True)
        have, want = (torch.autograd.grad(f(x, y).sum(), (x, y)) for f in (compiled, program))
        torch.testing.assert_close(have, want)
    (operators,) = graphs
    assert "tag_activation_checkpoint" in operators


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("door", ["replay", "scope", "policy"])
def test_regions_that_record_break_the_graph_and_are_right(door, seen_before):
    """Whatever was entered before: Dynamo guards the values of dicts that it traces."""
    torch._dynamo.reset()
    linear, x = nn.Linear(4, 4), leaf()

    def inside(x):
        return (linear(x).sin() @ x).exp()

    doors = {
        "replay": replay(inside),
        "policy": checkpointed(inside, policy=[MM]),
        "scope": scope(inside),
    }
    if seen_before:
        doors["replay"](x)
        doors["scope"](x)

    def gradients(program):
        return torch.autograd.grad(program(x).cos().sum(), [x, *linear.parameters()])

    compiled = torch.compile(lambda x: doors[door](x * 2).sin() + 1, backend="aot_eager")
    assert all(map(torch.equal, gradients(compiled), gradients(lambda x: inside(x * 2).sin() + 1)))


def test_in_the_place_of_torchs_function(monkeypatch):
    """Dynamo knows torch's function by identity."""
    for name in ours.__all__:
        monkeypatch.setattr(theirs, name, getattr(ours, name))
    assert products(called(use_reentrant=False)(theirs), fullgraph=True) == [2, 6]
    assert products(kept(theirs), fullgraph=True) == [2, 4]


@pytest.mark.parametrize("door", [ours.checkpoint(use_reentrant=False), checkpointed])
def test_compiled_autograd_over_eager_regions(door):
    """The recompute stays in eager mode, since a compiled one would save other tensors."""
    torch._dynamo.reset()
    runs, (x, y) = [], arguments()
    result = door(lambda x, y: (runs.append(1), fn(x, y))[1])(x, y).sum()
    compiler = functools.partial(torch.compile, backend="aot_eager")
    with torch._dynamo.compiled_autograd._enable(compiler):
        result.backward()
    assert runs == [1, 1]
    torch.testing.assert_close((x.grad, y.grad), torch.autograd.grad(fn(x, y).sum(), (x, y)))
