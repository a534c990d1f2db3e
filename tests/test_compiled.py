"""Compiled code in recorded regions stays compiled, and right to the bit; in compiled code, a call
of the drop-in becomes torch's own operator for checkpointed regions."""

import functools
import itertools
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.utils.checkpoint as theirs
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from oracle import PLANNED, apply, leaf, legacy, planned, python_calls, replay, rerun, scope
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import checkpointing.torch_compat as ours
from checkpointing import checkpoint_modules, checkpoint_scope, checkpointed, keep, offload

pytestmark = pytest.mark.filterwarnings("ignore")  # what the compiler says is not ours

MM = torch.ops.aten.mm.default
BACKENDS = ["aot_eager", "inductor", "shown"]  # the last one is inductor, with a private option
DOORS = {
    "scope": checkpoint_scope,
    "planned": lambda: checkpoint_scope(policy=PLANNED),
    "values": lambda: checkpoint_scope(determinism_check="values"),
    "debug": lambda: checkpoint_scope(debug=True),
    "plain": nullcontext,
}


@pytest.fixture(autouse=True)
def forgetful():
    """Each test compiles anew. Tracing a selective context leaves torch's notes for the next node
    behind."""
    torch._dynamo.reset()
    yield
    torch.fx.traceback.current_meta.clear()


@pytest.fixture(params=BACKENDS)
def compiler(request):
    """Compiles a function, and counts what it compiles and how often that runs."""
    import torch._inductor.config

    if request.param != "aot_eager" and not any(map(shutil.which, ["c++", "g++", "clang++", "cl"])):
        pytest.skip("inductor needs a C++ compiler")
    options = {"wrap_inductor_compiled_regions": True} if request.param == "shown" else {}
    inner = torch._dynamo.lookup_backend(request.param.replace("shown", "inductor"))

    def backend(graph, inputs):
        compiled = inner(graph, inputs)
        compiler.graphs += 1

        def run(*args):
            compiler.calls += 1
            return compiled(*args)

        return run

    compiler = functools.partial(torch.compile, backend=backend)
    compiler.graphs = compiler.calls = 0
    compiler.name = request.param
    with torch._inductor.config.patch(options):
        yield compiler


class Layer(nn.Module):
    """It draws random numbers, and updates a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512))
        self.register_buffer("total", torch.zeros(512))

    def forward(self, x):
        y = nn.functional.dropout((x * self.weight).sin(), 0.5)
        self.total += y.detach()[0]
        return y * x


def step(model, run, door, n):
    torch.manual_seed(n)
    x = torch.randn(n, 512, requires_grad=True)
    with DOORS[door]() as scope:
        loss = run(run(x * 2)).sum()
    found = [loss, *torch.autograd.grad(loss, [x, model.weight])]
    return [*found, model.total.clone(), torch.rand(2)], scope and scope.stats.ops_replayed


def test_compiled_before_inside_and_after_a_block(compiler):
    """Shapes are static at first; a second one makes the compiler take them as dynamic."""
    models = Layer(), Layer()
    models[1].load_state_dict(models[0].state_dict())
    runs = [compiler(model) for model in models]
    sizes = [("plain", 4), ("scope", 4), ("planned", 6), ("plain", 8), ("values", 4), ("scope", 6)]
    for i, (door, n) in enumerate([*sizes, ("debug", 8), ("plain", 4)]):
        (want, _), (have, replayed) = map(step, models, runs, ["plain", door], [n, n])
        assert all(map(torch.equal, want, have)), door
        assert (compiler.graphs, compiler.calls) == (1 + (i > 1), 4 * i + 4)  # static, dynamic
        if door == "scope":  # recomputed where torch shows operators, kept where not
            assert replayed == {"aot_eager": 8, "inductor": 1, "shown": 1}[compiler.name]


def test_what_compiled_code_writes_in_place_is_noticed(compiler):
    """Also where no operator shows it; between two other writes; and after parts were filled."""
    double = compiler(lambda x: x.mul_(2))

    def gradient(door):
        x = torch.arange(32.0).reshape(4, 8).requires_grad_()
        with DOORS[door]():
            other, made, again = x.detach() + 2, x.detach() + 1, x.detach() + 1
            before = made + 1
            double(made)
            double(other[1:3])
            again.add_(1)
            double(again)
            again.add_(1)
            parts = torch.empty_like(made)
            parts[:1], parts[1:] = made[:1], made[1:]
            double(parts)
            loss = ((made * x).sin() * before * other * x + (again * x).sin()).sum()
            loss = loss + (parts * x).sin().sum()
        return torch.autograd.grad(loss, x)[0]

    want = gradient("plain")
    for door in ("scope", "planned"):
        assert torch.equal(gradient(door), want), door


def breaks(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos() * y


def backward_inside(run, x):
    leaf = x.detach().requires_grad_()
    return run(x * torch.autograd.grad(run(leaf * 2).sum(), leaf)[0])


PROGRAMS = {
    "graph break": lambda run, x: run(x * 2).sin(),
    "backward inside": backward_inside,
    "scope inside": lambda run, x: run(scope(run)(x * 2) * 2),
    "rerun inside": lambda run, x: checkpointed(lambda x: run(x * 2).sin())(x * 3),
    "no grad": lambda run, x: torch.no_grad()(lambda: run(x * 2))() * x,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_code_in_regions_of_every_kind(name):
    program = functools.partial(PROGRAMS[name], torch.compile(breaks, backend="aot_eager"))
    x = torch.randn(4, 8, requires_grad=True)
    (want,) = torch.autograd.grad(program(x).sum(), x)
    for word in ("s", "r", "cs"):
        (have,) = torch.autograd.grad(apply(word, program)(x).sum(), x)
        assert torch.equal(want, have), word


@pytest.mark.parametrize("door", [scope, replay])
def test_a_region_that_records_breaks_a_whole_graph_with_one_sentence(door):
    whole = torch.compile(lambda x: door(torch.sin)(x), backend="aot_eager", fullgraph=True)
    sentence = "a region that records operators needs eager mode: put"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=sentence):
        whole(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("compiler", ["aot_eager"], indirect=True)
def test_what_a_scope_in_compiled_code_calls_is_compiled(compiler):
    """The lines of the function that enters it run eagerly."""

    program, x = scope(lambda x: (x * 2).sin()), torch.ones(2, requires_grad=True)
    for function in (compiler(program), program):
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
        assert torch.equal(gradient, 2 * (x * 2).cos())
    assert (compiler.graphs, compiler.calls) == (1, 1)


def test_in_place_operators_are_recomputed_where_a_compiler_is_loaded():
    """They are no writes of compiled code."""
    import torch._inductor.output_code

    x = torch.rand(4, requires_grad=True)
    with checkpoint_scope() as scope:
        y = x.sin().mul_(2).exp()
    assert scope.stats.bytes_held == 0
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() * 2).exp().sum(), x)[0])
    with checkpoint_scope() as scope:
        first, second = x.sin().unsafe_chunk(2)
        y = first.mul_(2).sigmoid_() * second.mul_(2).exp()
    assert scope.stats.bytes_held == 0


def test_the_stack_is_not_searched_for_a_compiler_at_each_tensor_that_is_saved():
    """A block that is entered far down the stack takes as many calls as any other."""
    import torch._inductor.output_code

    def down(frames):
        return down(frames - 1) if frames else scope(lambda x: (x * 2).sin().exp())(x)

    x = torch.rand(4, requires_grad=True)
    _, near, far = (python_calls(lambda n=n: down(n)) - n for n in (0, 0, 99))
    assert near == far


TRACED = {
    "scope": scope,
    "planned": planned,
    "replay": replay,
    "rerun": rerun,
    "a scope in a rerun": lambda fn: rerun(scope(fn)),
    "a rerun in a scope": lambda fn: scope(rerun(fn)),
    "disabled in a scope": lambda fn: scope(scope(fn, enabled=False)),
    "offload": lambda fn: scope(fn, policy=offload(min_bytes=0)),
    "reported": lambda fn: scope(fn, report=True),
    "reentrant": legacy,
}
DROP_IN = {"drop-in": lambda fn: functools.partial(ours.checkpoint, fn, use_reentrant=False)}


def kept_and_dropped(x, w):
    """Another mask in the recompute would be seen, and so would what is kept."""
    h = keep((x @ w).sin()) * torch.full((4, 4), 2.0)
    return torch.relu_(nn.functional.dropout(h.exp(), 0.5)) @ w


def slopes(function):
    def run(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        out = function(x, w)
        return (out, *torch.autograd.grad(out.square().sum(), (x, w)))

    return run


def assert_right_for_others(graph):
    """What a graph has been traced with is not in it."""
    found = []
    for function in (graph, slopes(kept_and_dropped)):
        torch.manual_seed(1)
        found.append(function(torch.randn(4, 4), torch.randn(4, 4)))
    assert all(map(torch.equal, *found))


def traced(function, mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(slopes(function), tracing_mode=mode)(torch.randn(4, 4), torch.randn(4, 4))


def targets(traced):
    return [str(node.target) for node in traced.graph.nodes]


@functools.cache
def targets_of_plain_code(mode):
    return targets(traced(kept_and_dropped, mode))


MODES = ["real", "fake", "symbolic"]
SIMPLE = ["scope", "planned", "replay", "rerun"]  # the others by turns
NESTS = zip((door for door in TRACED if door not in SIMPLE), itertools.cycle(MODES))


@pytest.mark.parametrize(("door", "tracing_mode"), [*itertools.product(SIMPLE, MODES), *NESTS])
def test_traced_by_make_fx(door, tracing_mode):
    """The graph is that of plain code, and holds no activation of the traced run."""
    have = traced(TRACED[door](kept_and_dropped), tracing_mode)
    assert targets(have) == targets_of_plain_code(tracing_mode)
    assert_right_for_others(have)
    x = torch.ones(3, requires_grad=True)
    with checkpoint_scope() as scope:  # which works as ever after that
        x.sin().exp()
    assert scope.stats.ops_recorded == 2


@pytest.mark.parametrize("door", TRACED)
def test_traced_by_aot_function(door):
    """Which looks at a function before it traces it."""
    assert_right_for_others(slopes(aot_function(TRACED[door](kept_and_dropped), nop)))


@pytest.mark.parametrize("door", [*TRACED.values(), *DROP_IN.values()], ids=[*TRACED, *DROP_IN])
def test_exported(door):
    """Regions leave no trace in inference programs."""

    class Model(nn.Module):
        def forward(self, x, w):
            return door(lambda x, w: keep((x @ w).sin()).cos())(x, w)

    program = torch.export.export(Model(), (torch.randn(4, 4), torch.randn(4, 4)), strict=False)
    operators = [target for target in targets(program) if target.startswith("aten")]
    assert operators == ["aten.matmul.default", "aten.sin.default", "aten.cos.default"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("modules", ["*", lambda name, module: name == ""], ids=["parts", "all"])
def test_a_model_in_regions_is_exported_like_the_model(modules, strict):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4)
    want = targets(torch.export.export(model, (x,), strict=strict))
    checkpoint_modules(model, modules)
    assert targets(torch.export.export(model, (x,), strict=strict)) == want


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
    contexts = functools.partial(m.create_selective_checkpoint_contexts, [MM])
    return called(use_reentrant=False, context_fn=contexts)(m)


OTHERS = {"preserve_rng_state": False, "early_stop": False, "determinism_check": "none"}
CALLS = {
    "rerun": called(use_reentrant=False),
    "reentrant": called(use_reentrant=True),
    "unsaid": called(),
    "options": called(use_reentrant=False, **OTHERS),
    "kept": kept,
    "nested": lambda m: (
        lambda x, y: m.checkpoint(
            lambda x, y: called(use_reentrant=False)(m)(x, y).sin(), x, y, use_reentrant=False
        )
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_compiled_as_torchs(name):
    want, have = (products(CALLS[name](m), fullgraph=True) for m in (theirs, ours))
    assert have == want == ([2, 4] if name == "kept" else [2, 6])


class Product(nn.Module):
    def forward(self, x, y):
        return fn(x, y)


class Thing:
    @ours.checkpoint(use_reentrant=False)
    def run(self, x, y):
        return fn(x, y)


STEPS = [lambda xy: (xy[0] @ xy[1], xy[1]), lambda xy: (xy[0].sin() @ xy[1]).sigmoid(), torch.neg]


OPTIONS = {"use_reentrant": False, "respect_saved_tensors_hooks": True}
FORMS = {  # with the number of products in backward
    "function": (lambda: ours.checkpoint(use_reentrant=False)(fn), 6),
    "inside": (lambda: lambda x, y: ours.checkpoint(**OPTIONS)(fn)(x, y), 6),
    "method": (lambda: Thing().run, 6),
    "sequence": (
        lambda: lambda *xy: ours.checkpoint_sequential(STEPS, 3, xy, use_reentrant=False),
        5,
    ),
    "own": (lambda: checkpointed(fn), 6),
    "own inside": (lambda: lambda x, y: checkpointed(fn)(x, y), 6),
    "own instance": (lambda: checkpointed(Product()), 6),
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


BEGUN = ours.checkpoint(use_reentrant=False)
COMPILED = [(checkpointed, "inductor"), (BEGUN, "aot_eager"), (in_place, "aot_eager")]


@pytest.mark.parametrize(("door", "backend"), COMPILED)
def test_one_graph_for_all_sizes_with_the_results_of_eager_code(door, backend):
    graphs, inner = [], torch._dynamo.lookup_backend(backend)

    class Block(nn.Module):
        def forward(self, x, y):
            return (x * y[0]).sin().exp() * y[1]

    y, region = leaf(), door(Block())
    program = lambda x, y: region(x * 2, y).cos()

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
    linear, x = nn.Linear(4, 4), leaf()
    inside = lambda x: (linear(x).sin() @ x).exp()
    doors = {"replay": replay(inside), "scope": scope(inside)}
    doors["policy"] = checkpointed(inside, policy=[MM])
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


def test_compiled_autograd_over_eager_regions():
    """The recompute stays in eager mode, since a compiled one would save other tensors."""
    compiler = functools.partial(torch.compile, backend="aot_eager")
    for door in (BEGUN, checkpointed):
        runs, (x, y) = [], arguments()
        result = door(lambda x, y: (runs.append(1), fn(x, y))[1])(x, y).sum()  # noqa: B023
        with torch._dynamo.compiled_autograd._enable(compiler):
            result.backward()
        assert runs == [1, 1]
        torch.testing.assert_close((x.grad, y.grad), torch.autograd.grad(fn(x, y).sum(), (x, y)))
