"""Nothing outlives its use, with nothing but reference counts to see to it (rules 4 and 9)."""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import NO_ROOM, PLANNED, WORD, WORDS, SavesItsOutput, Watching, apply, by_turns, leaf

from checkpointing import CheckpointError, checkpoint_scope, forward_only, is_recomputing, keep

pytestmark = [NO_ROOM, pytest.mark.usefixtures("no_gc")]


def network(x, w):
    return (F.dropout((x @ w).sin(), 0.2).exp() @ w).tanh()


class Fails(torch.autograd.Function):
    """If it is told so, after it has read what it saved."""

    @staticmethod
    def forward(ctx, x, is_told):
        ctx.save_for_backward(x)
        ctx.is_told = is_told
        return x * 2

    @staticmethod
    def backward(ctx, g):
        assert ctx.saved_tensors
        if ctx.is_told:
            raise ZeroDivisionError
        return g * 2, None


REGIONS = {
    "network": lambda x, w: network(x * 2, w),
    "saves its own output": lambda x, w: x.sin().exp(),
    "hands its argument through": lambda x, w: (x, x.sin()),
    "a custom function": lambda x, w: SavesItsOutput.apply(x.sin()),
    "forward_only": lambda x, w: forward_only(torch.exp)(x) * 2,
}


@pytest.mark.parametrize(
    ("name", "word", "early_stop"), by_turns(itertools.product(REGIONS, WORDS), [True, False])
)
def test_a_graph_dies(name, word, early_stop):
    x, w = leaf(3, 3), leaf(3, 3)
    for backwards in (0, 1, 2):
        canary = {0}
        dead = weakref.ref(canary)
        with Watching() as watching:
            region = lambda x, w, canary=canary: (canary, REGIONS[name](x, w))[1]
            y = apply(word, region, early_stop)(x * 2, w)
            y = y if isinstance(y, torch.Tensor) else y[1]
            del canary, region
            assert watching.alive()
            for n in range(backwards):
                y.sum().backward(retain_graph=n + 1 < backwards)
            x.grad = w.grad = None
            del y
            assert (watching.alive(), dead()) == ([], None), backwards


@WORD
def test_what_no_saved_tensor_needs_is_freed_when_the_region_ends(word):
    x, w = leaf(40, 40), leaf(40, 40)  # a mask larger than the state of the generator
    with Watching() as watching:
        y = apply(word, lambda x, w: network(x, w).cos().neg())(x, w)
        assert watching.alive() == ["neg"]
    del y


@pytest.mark.parametrize("word", ["r", "s"])
def test_what_only_a_dropped_result_needs_is_not_held(word):
    def fn(x, data):
        h = x.sin()
        (h * data).exp()
        return h.exp()

    with Watching() as watching:
        y = apply(word, fn)(leaf(3), torch.ones(3))
        assert watching.alive("ones") == []
        y.sum().backward()


def test_kept_values_die_as_backward_passes_by():
    w, living = leaf(3, 3), []
    with Watching() as watching:
        with checkpoint_scope() as scope:
            x = leaf(3, 3) @ w
            for _ in range(4):
                x = keep((x @ w).sin())
                x.register_hook(lambda grad: living.append(len(watching.alive("sin"))))
            y = x.sum()
        del x
        kept = scope.stats.bytes_kept
        y.backward()
    assert kept == 3 * 9 * 4, "nothing needs the last one"
    assert sorted(living, reverse=True) == living
    assert watching.alive("sin") == []


@pytest.mark.parametrize("policy", [None, PLANNED])
def test_inputs_die_as_backward_passes_by_views_of_them(policy):
    """Though the window that backward opens first starts from all of them."""
    weights, living = [leaf(3) for _ in range(4)], []
    for w in weights:
        w.register_hook(lambda grad: living.append(len(watching.alive("ones"))))
    for _ in range(2):  # the first time nothing is planned
        with Watching() as watching:
            inputs = [torch.ones(4) for _ in weights]
            with checkpoint_scope(policy=policy):
                y = sum([w * x[:3] for w, x in zip(weights, inputs, strict=True)]).sin().sum()
            inputs.clear()
            y.backward()
    assert living[4:] == [3, 2, 1, 0]


BACKWARDS = {
    "retained": lambda y, inner: y.backward(retain_graph=True),
    "partial": lambda y, inner: torch.autograd.grad(y, inner, retain_graph=True),
    "failing in a hook": lambda y, inner: inner.register_hook(lambda g: 1 / 0) and y.backward(),
    "failing in a function": lambda y, inner: y.backward(retain_graph=True),
    # A gradient with a graph of its own holds holders, not tensors.
    "differentiable": lambda y, inner: torch.autograd.grad(y, inner, create_graph=True),
}


@pytest.mark.parametrize(
    ("how", "word", "early_stop"), by_turns(itertools.product(BACKWARDS, WORDS), [True, False])
)
def test_nothing_recomputed_is_alive_after_backward(how, word, early_stop):
    inner = []

    def fn(x, w):
        h = (x @ w).sin().exp()
        if not is_recomputing():
            inner.append(h)
        return Fails.apply((h @ w).tanh(), how == "failing in a function").cos()

    x, w = leaf(3, 3), leaf(3, 3)
    y = apply(word, fn, early_stop)(x, w).sum()
    with Watching() as watching:
        with contextlib.suppress(ZeroDivisionError):
            BACKWARDS[how](y, inner.pop())
            assert "failing" not in how
        x.grad = w.grad = None
    assert {"tanh", "mm"} <= {name for name, _ in watching.made}, "it was recomputed"
    assert watching.alive() == []


CHAINS = [
    (lambda x: x.sin().exp().tanh().sigmoid(), "sin exp tanh", [["exp", "tanh"], ["exp"], []]),
    # A custom function may read it more than once until it has run.
    (lambda x: SavesItsOutput.apply(x.sin()), "sigmoid", [[]]),
]


@WORD
@pytest.mark.parametrize(("fn", "names", "want"), CHAINS)
def test_a_recomputed_tensor_is_dead_once_its_node_has_run(word, fn, names, want):
    """Before each node of a chain runs, what the nodes before it asked for is gone."""
    y, alive = apply(word, fn)(leaf(3)), []
    with Watching() as watching:
        node = y.grad_fn.next_functions[0][0]
        while node.next_functions:
            node.register_prehook(lambda grads: alive.append(watching.alive(*names.split())))
            node = node.next_functions[0][0]
        del node
        y.sum().backward(retain_graph=True)
    assert {*names.split()} <= {name for name, _ in watching.made}
    assert alive == want


FAULTS = {
    "shape": lambda x, linear: (x[:2] if is_recomputing() else x).sin().exp(),
    "number": lambda x, linear: x.sin() if is_recomputing() else x.sin().exp(),
    "parameter": lambda x, linear: linear(x).sin(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_the_recompute_dies_with_its_handler(fault):
    """A traceback holds frames, one of which must not hold the error."""
    linear, x, dead = torch.nn.Linear(3, 3), leaf(3), []
    for _ in range(3):  # the first makes torch remember things of its own
        canary = {0}
        dead.append(weakref.ref(canary))
        with Watching() as watching:
            y = apply("c", lambda x, canary=canary: FAULTS[fault](x, linear))(x)
            with torch.no_grad():
                linear.weight.add_(1)
            with contextlib.suppress(CheckpointError):
                y.sum().backward()
                raise AssertionError
            del canary, y
    assert [ref() for ref in dead[1:]] == [None, None]
    assert watching.alive() == []


@WORD
def test_many_steps_leave_no_growth(word):
    """No object that the garbage collector would see and no tensor is left over."""
    x, w, norm = leaf(3, 3), leaf(3, 3), torch.nn.BatchNorm1d(3)
    fn = apply(word, lambda x, w: norm(network(x, w)))

    def steps(n):
        for i in range(n):
            y = fn(x, w)
            if i % 4:
                y.sum().backward(retain_graph=i % 4 == 1)
            x.grad = w.grad = None
            del y

    steps(8)
    before = len(gc.get_objects())
    steps(100)
    assert len(gc.get_objects()) - before <= 2


class Remembers(torch.nn.Module):
    """As models do that show their attention maps, and as the old `nn.utils.weight_norm` does."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))

    def forward(self, x):
        self.map = (x @ self.weight).sin()
        return self.map @ self.weight


@WORD
def test_a_module_that_remembers_a_tensor_of_the_recompute_dies(word):
    module = Remembers()
    dead = weakref.ref(module)
    fn = apply(word, module.forward)
    x = leaf(3, 3) * 1
    canary = weakref.ref(x)
    fn(x).sum().backward()
    del x
    assert canary() is None
    del module, fn
    gc.collect()  # a module is a cycle if a hook knows it
    assert dead() is None


def test_code_that_a_program_makes_is_not_remembered_forever():
    """Some programs make functions at every step: a recorded region knows the latest of them."""
    made = []
    for n in range(300):
        names = {}
        exec(compile(f"def fn(x):\n    return x.sin() * {n}", "made", "exec"), names)
        fn = names.pop("fn")
        made.append(weakref.ref(fn.__code__))
        for word in "cr":
            apply(word, fn)(leaf(1)).backward()
    assert not any(ref() for ref in made[:40])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 0, 3, 1)])
@pytest.mark.parametrize("word", ["c", "r", "s"])
def test_saved_tensors_are_read_in_any_order_by_whomever(word, order):
    """Each read gives the value, which is the reader's: the region holds on to nothing."""
    outputs, x = [], leaf(4, 4)

    def fn(x):
        for op in (torch.exp, torch.tanh, torch.exp, torch.sigmoid, torch.tanh):
            x = op(x)
            outputs.extend([] if is_recomputing() else [x])
        return x

    y = apply(word, fn)(x)
    nodes = [out.grad_fn for out in outputs]
    with Watching() as watching:
        reads = {n: nodes[n]._saved_result for n in order}
        assert all(torch.equal(reads[n], outputs[n]) for n in order)
        del reads
        assert watching.alive() == []
    (want,) = torch.autograd.grad(fn(x).sum(), x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
