"""Nothing outlives its use, with nothing but reference counts to see to it (rules 4 and 9)."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import Watching, apply

from checkpointing import CheckpointError, checkpoint_scope, is_recomputing, keep

pytestmark = pytest.mark.usefixtures("no_gc")

WORD = pytest.mark.parametrize("word", ["c", "r", "s", "cc", "cs", "sc", "ss"])
EARLY_STOP = pytest.mark.parametrize("early_stop", [True, False], ids=["early", "late"])


def leaf(*shape):
    """A small tensor that wants a gradient."""
    return torch.rand(*shape).requires_grad_()


def network(x, w):
    """Operators that save inputs, results and masks."""
    return (F.dropout((x @ w).sin(), 0.2).exp() @ w).tanh()


class Canary:
    """Something that can be referred to weakly; it dies with what holds it."""


# ---- graphs


@WORD
@EARLY_STOP
def test_a_graph_dies_without_backward(word, early_stop):
    """Dropping the output frees the region, what it holds and what the function closes over."""
    canary = Canary()
    dead = weakref.ref(canary)
    x, w = leaf(3, 3), leaf(3, 3)
    with Watching() as watching:
        y = apply(word, lambda x, w, canary=canary: network(x * 2, w) * bool(canary), early_stop)(x, w)
        del canary
        assert watching.alive()
        del y
    assert (watching.alive(), dead()) == ([], None)


@WORD
@EARLY_STOP
def test_a_graph_dies_after_backward(word, early_stop):
    """The loss may live on; the gradients do."""
    x, w = leaf(3, 3), leaf(3, 3)
    with Watching() as watching:
        y = apply(word, lambda x, w: network(x * 2, w), early_stop)(x, w).sum()
        y.backward()
        x.grad = w.grad = None
        alive = watching.alive()
    assert alive == ["sum"]


@WORD
def test_a_region_that_saves_its_own_output(word):
    """`exp` saves its result, which is what the region gives back: no cycle."""
    x = leaf(3)
    with Watching() as watching:
        y = apply(word, lambda x: x.sin().exp())(x)
        del y
        assert watching.alive() == []
        y = apply(word, lambda x: x.sin().exp())(x)
        y.sum().backward()
        del y
        x.grad = None
    assert watching.alive() == []


class Fails(torch.autograd.Function):
    """Reads what it has saved, and raises."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        assert ctx.saved_tensors
        raise ValueError


@WORD
def test_nothing_recomputed_outlives_a_backward_that_fails_in_a_custom_function(word):
    """The graph lives on."""
    y = apply(word, lambda x: Fails.apply(x.exp().sin().exp()).tanh())(leaf(3)).sum()
    with Watching() as watching:
        for _ in range(2):
            with contextlib.suppress(ValueError):
                y.backward(retain_graph=True)
    assert watching.alive("exp", "sin", "tanh") == []
    assert y.grad_fn is not None


@WORD
def test_inputs_that_are_outputs_die(word):
    """The same for a region that hands its argument through."""
    x = leaf(3)
    with Watching() as watching:
        h = x * 2
        y = apply(word, lambda h: (h, h.sin()))(h)
        del h
        y[1].sum().backward()
        del y
        x.grad = None
    assert watching.alive() == []


@WORD
def test_what_no_saved_tensor_needs_is_freed_when_the_region_ends(word):
    """After the block only the inputs and the output live."""
    x, w = leaf(3, 3), leaf(3, 3)
    with Watching() as watching:
        y = apply(word, lambda x, w: network(x, w).cos().neg())(x, w)
        assert watching.alive() == ["neg"]
    del y


def test_kept_values_die_as_backward_passes_by():
    """Each kept value goes with the layer that starts from it."""
    w = leaf(3, 3)
    living = []
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


@WORD
def test_an_exception_in_the_body_leaves_nothing(word):
    """The half-recorded region goes with the exception."""
    x, w = leaf(3, 3), leaf(3, 3)

    def fails(x, w):
        network(x, w)
        raise ValueError

    with Watching() as watching, pytest.raises(ValueError):
        apply(word, fails)(x, w)
    gc.collect()  # pytest's own excinfo is a cycle
    assert watching.alive() == []


# ---- what is recomputed


def recomputed(word, early_stop, backward, fn=network):
    """The operators of a recompute whose results live after `backward(y)`, while the graph does, too."""
    x, w = leaf(3, 3), leaf(3, 3)
    y = apply(word, fn, early_stop)(x, w)
    with Watching() as watching:
        backward(y)
        x.grad = w.grad = None
    names = [name for name, _ in watching.made]
    assert "tanh" in names and "mm" in names, "it was recomputed"
    return watching.alive()


@WORD
@EARLY_STOP
@pytest.mark.parametrize("retain_graph", [False, True], ids=["freed", "retained"])
def test_nothing_recomputed_is_alive_after_backward(word, early_stop, retain_graph):
    """Whether the graph is retained or not."""
    assert recomputed(word, early_stop, lambda y: y.sum().backward(retain_graph=retain_graph)) == []


@WORD
@EARLY_STOP
def test_nothing_recomputed_is_alive_after_a_partial_backward(word, early_stop):
    """Only some of the holders were opened; what else was recomputed on the way is dropped as well."""
    inner = []

    def fn(x, w):
        h = (x @ w).sin().exp()
        if not is_recomputing():
            inner.append(h)
        return (h @ w).tanh().cos()

    def backward(y):
        torch.autograd.grad(y.sum(), inner[0], retain_graph=True)

    assert recomputed(word, early_stop, backward, fn) == []


@WORD
@EARLY_STOP
def test_nothing_recomputed_is_alive_after_a_failing_backward(word, early_stop):
    """A hook raises in the middle of backward."""

    def hook(grad):
        raise ValueError

    def fn(x, w):
        h = (x @ w).sin().exp()
        h.requires_grad and h.register_hook(hook)
        return (h @ w).tanh().cos()

    def backward(y):
        try:
            y.sum().backward(retain_graph=True)
        except ValueError:
            pass
        else:
            raise AssertionError("the hook should have failed")

    assert recomputed(word, early_stop, backward, fn) == []


@WORD
@EARLY_STOP
def test_nothing_recomputed_is_alive_after_create_graph(word, early_stop):
    """A differentiable gradient holds holders, not tensors: dropping it leaves nothing."""

    x, w = leaf(3, 3), leaf(3, 3)
    y = apply(word, network, early_stop)(x, w)
    with Watching() as watching:
        gradient = torch.autograd.grad(y.sum(), x, create_graph=True)
        del gradient
    assert watching.alive() == []


@WORD
def test_a_recomputed_tensor_is_dead_once_its_node_has_run(word):
    """Backward of a chain: before each node runs, what the nodes before it asked for is gone."""
    x = leaf(3)

    def fn(x):
        return x.sin().exp().tanh().sigmoid()

    y = apply(word, fn)(x)
    alive = []
    with Watching() as watching:
        node = y.grad_fn
        while node.next_functions and node.next_functions[0][0].next_functions:
            node = node.next_functions[0][0]
            node.register_prehook(lambda grads: alive.append(watching.alive("sin", "exp", "tanh", "sigmoid")))
        del node
        y.sum().backward(retain_graph=True)
    assert alive == [["exp", "tanh"], ["exp"], []]


@pytest.mark.parametrize("word", ["c", "r", "s"])
def test_a_tensor_read_outside_of_backward_is_the_readers(word):
    """Reading a node's saved tensor recomputes it; the region holds on to nothing."""
    y = apply(word, lambda x: x.sin().exp())(leaf(3))
    with Watching() as watching:
        saved = y.grad_fn._saved_result
        assert torch.equal(saved, y)
        del saved
        assert watching.alive() == []


class SavesItsOutputLast(torch.autograd.Function):
    """Under early stop the recompute ends inside `apply`, after the output was saved."""

    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


@WORD
@EARLY_STOP
def test_a_custom_function_that_saves_its_output_last_does_not_leak(word, early_stop):
    """Neither the rerun's node nor its tensors survive the early stop."""
    x = leaf(3)
    for retain_graph in (True, False):
        y = apply(word, lambda x: SavesItsOutputLast.apply(x.sin()), early_stop)(x)
        with Watching() as watching:
            y.sum().backward(retain_graph=retain_graph)
            x.grad = None
        assert "sigmoid" in [name for name, _ in watching.made]
        assert watching.alive() == []


class ReadsTwice(torch.autograd.Function):
    """Reads `ctx.saved_tensors` twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (first,) = ctx.saved_tensors
        (second,) = ctx.saved_tensors
        assert torch.equal(first, second)
        return grad * 2 * second


@WORD
@EARLY_STOP
def test_a_second_read_works_and_leaves_nothing(word, early_stop):
    """Both reads of one node are served by one recompute, and nothing stays."""
    x = leaf(3)
    y = apply(word, lambda x: ReadsTwice.apply(x.sin()), early_stop)(x)
    with Watching() as watching:
        y.sum().backward(retain_graph=True)
        gradient, x.grad = x.grad, None
        assert torch.equal(gradient, 2 * x.sin().detach() * x.cos().detach())
        names = [name for name, _ in watching.made]
        del gradient
    assert names.count("sin") == 2, "one in the recompute, one in this test"
    assert watching.alive() == []


@WORD
def test_a_mismatch_leaves_nothing(word):
    """A recompute that goes wrong drops what it has made."""
    x = leaf(3)
    h = [leaf(3) * 1, leaf(3) * 1]
    y = apply(word, lambda x: (x * h[0]).sin().exp() * h[1])(x)
    h[0] = leaf(4) * 1
    h[1] = h[1].detach()
    with Watching() as watching:
        try:
            y.sum().backward(retain_graph=True)
        except RuntimeError:
            assert word != "s"
    x.grad = None
    gc.collect()
    assert watching.alive("sin", "exp", "cos") == []


@pytest.mark.parametrize("fault", ["shape", "number", "parameter"])
def test_an_error_of_the_recompute_dies_with_its_handler(fault):
    """A traceback holds the frames that it passed: one of them that held the error would make both immortal."""
    linear, x = torch.nn.Linear(3, 3), leaf(3)
    dead = []
    for _ in range(3):  # the first makes torch remember things of its own
        canary = Canary()
        dead.append(weakref.ref(canary))

        def fn(x, canary=canary):
            if is_recomputing() and fault == "shape":
                x = x[:2]
            if is_recomputing() and fault == "number":
                return x.sin()
            return linear(x).sin() if fault == "parameter" else x.sin().exp()

        y = apply("c", fn)(x)
        with torch.no_grad():
            linear.weight.add_(1)
        with contextlib.suppress(CheckpointError):
            y.sum().backward()
            raise AssertionError
        del canary, fn, y
    assert [ref() for ref in dead[1:]] == [None, None]


# ---- many steps


@WORD
@EARLY_STOP
def test_a_thousand_steps_leave_no_growth(word, early_stop):
    """No object that the garbage collector would see and no tensor is left over."""
    x, w = leaf(3, 3), leaf(3, 3)
    fn = apply(word, network, early_stop)

    def steps(n):
        for i in range(n):
            y = fn(x, w)
            if i % 4:
                y.sum().backward(retain_graph=i % 4 == 1)
            x.grad = w.grad = None
            del y

    steps(8)
    before = len(gc.get_objects())
    with Watching() as watching:
        steps(4)
    assert watching.alive() == []
    del watching
    steps(1000 if early_stop else 100)
    assert len(gc.get_objects()) - before <= 2


@pytest.mark.parametrize("word", ["c", "s"])
def test_backward_again_and_again_over_one_graph_leaves_no_growth(word):
    """A thousand graph tasks over one retained region."""
    x, w = leaf(3, 3), leaf(3, 3)
    total = apply(word, network)(x, w).sum()
    torch.autograd.grad(total, x, retain_graph=True)
    before = len(gc.get_objects())
    for _ in range(1000):
        torch.autograd.grad(total, x, retain_graph=True)
    assert len(gc.get_objects()) - before <= 2


@pytest.mark.parametrize("word", ["c", "s"])
def test_one_long_block_forgets_what_it_dropped(word):
    """A region's tape doesn't hold a dead branch's values: their number stays the same however long it is."""
    x = leaf(3)
    counts = []

    def fn(x):
        for i in range(300):
            x.sin().exp().tanh()
            if i in (99, 299):
                counts.append(len(watching.alive()))
        return x.sin()

    with Watching() as watching:
        apply(word, fn)(x).sum().backward()
    assert counts[0] == counts[1]


def test_code_that_a_program_makes_is_not_remembered_forever():
    """What is known of a function's code holds the code, and some programs make some at every step."""
    known = {}
    for _ in range(20_001):
        code = compile("0", "made", "eval")
        remember(known, code, code)
        assert known[id(code)] is code
    assert len(known) <= 10_000
