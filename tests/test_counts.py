"""How often each operator runs, as exact integers. Time is never measured here."""

import gc

import pytest
import torch
import torch.nn.functional as F
from oracle import SavesItsOutput, apply, count, leaf, weigh, words

from checkpointing import ChangedError, checkpoint_scope, checkpointed, keep

DOOR = pytest.mark.parametrize("door", ["c", "r", "s"])
REPLAY = pytest.mark.parametrize("door", ["r", "s"])
EARLY_STOP = pytest.mark.parametrize("early_stop", [True, False], ids=["early", "late"])


def extra(fn, inputs, backward=lambda y: weigh(y).backward(), door="", early_stop=True, plain=None):
    """What a door adds to the operators of the plain program: in forward, and in backward."""

    def counts(fn):
        for x in inputs:
            x.grad = None
        results = []
        forward = count(lambda: results.append(fn(*inputs)))
        return forward, count(lambda: backward(results.pop()))

    sides = zip(counts(plain or fn), counts(apply(door, fn, early_stop)), strict=True)
    return tuple(
        {op: n for op in {**a, **b} if (n := b.get(op, 0) - a.get(op, 0))} for a, b in sides
    )


def once_each(text):
    return dict.fromkeys(words(text), 1)


def chain(x):
    """Three operators: the first saves its input, the others their results."""
    return x.sin().exp().tanh()


def two_outputs(x):
    h = x.sin().exp()
    return h.tanh(), h.sigmoid()


ADDED = {
    "two outputs share one recompute": (two_outputs, "sin exp tanh sigmoid"),
    "the last matmul saves its inputs only": (lambda x: (x @ x).sin() @ x, "mm sin"),
    "addition saves nothing": (lambda x: (x + 1).neg() - 2, ""),
}


@DOOR
@pytest.mark.parametrize(("fn", "names"), ADDED.values(), ids=ADDED)
def test_what_backward_needs_runs_once_more(fn, names, door):
    assert extra(fn, [leaf(3, 3)], door=door) == ({}, once_each(names))


@DOOR
@EARLY_STOP
@pytest.mark.parametrize("times", [1, 3])
def test_each_graph_task_recomputes_once(door, early_stop, times):
    """Every operator runs once more in each backward, and nothing is added to the forward."""

    def backward(y):
        total = y.sum()
        for _ in range(times):
            total.backward(retain_graph=True)

    added = {"sin": times, "exp": times, "tanh": times}
    assert extra(chain, [leaf(3)], backward, door, early_stop) == ({}, added)


@DOOR
def test_nested_regions_recompute_each_operator_once(door):
    """The outer region recomputes the inner one's inputs, the inner one the rest."""

    def fn(x):
        return apply(door, chain)(x.cos().sqrt())

    _, added = extra(fn, [leaf(3)], door=door, plain=lambda x: chain(x.cos().sqrt()))
    assert added == once_each("cos sqrt sin exp tanh")


@DOOR
def test_double_backward_recomputes_once_for_each_graph_task(door):
    """The first gradient is one graph task."""

    def backward(y):
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.sum().backward()

    x = leaf(3)
    _, added = extra(lambda x: x.sin().exp(), [x], backward, door)
    assert added == {"sin": 2, "exp": 2}


@DOOR
@EARLY_STOP
def test_two_reads_of_one_node_are_one_recompute(door, early_stop):
    """What has been read stays until the node has run."""
    fn = lambda x: SavesItsOutput.apply(x.sin().exp())  # noqa: E731
    _, added = extra(fn, [leaf(3)], door=door, early_stop=early_stop)
    assert (added["sin"], added["exp"]) == (1, 1)


def test_no_hooks_stay_on_the_nodes_of_custom_functions(frozen):
    x = torch.ones(3, requires_grad=True)
    y = checkpointed(lambda x: SavesItsOutput.apply(x.exp()) * 2)(x).sum()

    def objects_after(backwards):
        for _ in range(backwards):
            torch.autograd.grad(y, x, retain_graph=True)
        gc.collect()
        return len(gc.get_objects())

    assert objects_after(2) + 3 >= objects_after(20)


@DOOR
def test_a_tape_around_does_not_record_a_recompute(door):
    """Backward in a block is part of it, and what it recomputes is not (rule 3)."""

    def recorded(fn, policy=None):
        x = leaf(3)
        with checkpoint_scope(policy=policy) as scope:
            torch.autograd.grad(fn(x.sin()).sum(), x)
        return scope.stats.ops_recorded

    def in_hooks(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return chain(x)

    assert recorded(chain) == recorded(chain, lambda ctx, op, *args, **kwargs: True)
    assert recorded(apply(door, chain)) <= recorded(in_hooks)


def test_without_early_stop_a_rerun_goes_to_the_end():
    """Then the last matmul, and whatever follows it, runs again."""
    _, added = extra(
        lambda x, w: ((x @ w).sin() @ w) + 1, [leaf(3, 3), leaf(3, 3)], door="c", early_stop=False
    )
    assert added == {"mm": 2, "sin": 1, "add": 1}


@DOOR
def test_recompute_stops_at_the_last_live_holder(door):
    """What only a dropped output needs, at the region's end, is not run."""

    def fn(x):
        a = x.sin().exp()
        return a, a.cos().tanh()

    region = apply(door, fn)
    _, added = extra(lambda x: region(x)[0], [leaf(3)], plain=lambda x: fn(x)[0])
    assert added == once_each("sin exp")


@REPLAY
def test_replay_skips_what_no_live_holder_needs(door):
    """A branch whose result was dropped is not run, nor is what backward never reads."""

    def fn(x):
        dropped = x.cos().tanh().sigmoid()
        h = x.sin()
        dropped.sum()
        (h + 1).floor()
        return h.exp()

    x = leaf(3)
    _, added = extra(fn, [x], door=door)
    assert added == {"sin": 1, "exp": 1}


def test_a_mask_is_drawn_in_the_window_beside_it():
    """Not in one of its own, which would cost as much again."""
    x, w = leaf(40, 40), leaf(40, 40)
    with checkpoint_scope() as scope:
        y = F.dropout((x @ w).sin() @ w, 0.5)
    y.sum().backward()
    assert scope.stats.replays == 1


@pytest.mark.parametrize("view_first", [True, False])
def test_a_view_of_an_input_pulls_in_nothing(view_first):
    """It runs no operators of a branch beside it, which in turn does not need the input."""
    w, u, x = leaf(3), leaf(4), torch.ones(8)
    branches = [lambda: (w * x[:3]).sum(), lambda: u.sin().exp().cos().sum()]
    with checkpoint_scope() as scope:
        results = [branch() for branch in branches[:: 1 if view_first else -1]]
    one, two = results[:: 1 if view_first else -1]
    one.backward()
    assert scope.stats.ops_replayed == 0
    x.zero_()
    two.backward()
    assert scope.stats.ops_replayed == 2


@REPLAY
def test_a_tensor_that_is_read_once_more_is_computed_alone(door):
    """By a hook, when its node has run."""
    x = leaf(3)
    y = apply(door, chain)(x)
    node = y.grad_fn.next_functions[0][0]
    x.register_hook(lambda grad: node._saved_result.sum() * 0 + grad)
    ran = count(lambda: y.sum().backward(retain_graph=True))
    assert [ran[name] for name in ("sin", "exp", "tanh")] == [2, 2, 1]


@REPLAY
def test_a_dropout_mask_does_not_pull_in_the_matmul_before_it(door):
    """A mask takes only its shape from the product, so the product isn't computed again."""
    _, added = extra(lambda x, w: F.dropout(x @ w, 0.5), [leaf(40, 40), leaf(40, 40)], door=door)
    assert added == {"bernoulli_": 1, "div_": 1, "empty_like": added.get("empty_like", 0)}


LIKE = [torch.rand_like, torch.randn_like, torch.ones_like, lambda h: h.new_full(h.shape, 2.0)]


@REPLAY
@pytest.mark.parametrize("like", LIKE)
def test_operators_that_read_only_metadata_pull_in_nothing(door, like):
    """Noise in the shape of a product, and constants."""
    _, added = extra(lambda x, w: like(x @ w) * x, [leaf(40, 40), leaf(40, 40)], door=door)
    assert "mm" not in added
    assert sum(added.values()) == 1


@DOOR
def test_parameters_are_not_recomputed(door):
    """What a module's operator has saved of its parameters is there."""
    norm = torch.nn.LayerNorm(4)
    y = apply(door, lambda x: norm(x.exp()))(leaf(2, 4))
    added = count(lambda: y.grad_fn._saved_weight.sum().item())
    assert added == count(lambda: norm.weight.detach().sum().item())
    assert y.grad_fn._saved_weight.data_ptr() == norm.weight.data_ptr()
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(ChangedError, match=r"float32 tensor of shape \(4,\).*changed in place"):
        _ = y.grad_fn._saved_weight


LAYERS = 5


def layers(x, w):
    for _ in range(LAYERS):
        x = keep((x @ w).sin().tanh() @ w)
    return x


@REPLAY
@EARLY_STOP
def test_keep_between_layers_replays_each_operator_at_most_once(door, early_stop):
    """Each layer starts from the value kept before it; each layer's last product is not redone."""
    _, added = extra(layers, [leaf(3, 3), leaf(3, 3)], door=door, early_stop=early_stop)
    assert added == {"mm": LAYERS, "sin": LAYERS, "tanh": LAYERS}


def test_keep_makes_one_window_for_each_layer():
    """With early stop every layer is a replay of its own, and a partial backward opens one."""
    x, w = leaf(3, 3), leaf(3, 3)
    for early_stop, replays in ((True, LAYERS), (False, 1)):
        with checkpoint_scope(early_stop=early_stop) as scope:
            y = layers(x, w)
        y.sum().backward()
        assert (scope.stats.ops_replayed, scope.stats.replays) == (3 * LAYERS, replays)
    with checkpoint_scope() as scope:
        first = keep((x @ w).sin().tanh())
        last = (first @ w).sin().tanh()
    torch.autograd.grad(last.sum(), first)
    assert (scope.stats.ops_replayed, scope.stats.replays) == (3, 1)


@REPLAY
def test_a_shared_mask_does_not_join_windows(door):
    """A table that all layers read is replayed where it is needed; layers stay apart."""

    def fn(x, w):
        mask = torch.ones(3, 3).tril().cos()
        for _ in range(LAYERS):
            x = keep((x @ w * mask).sin())
        return x

    _, added = extra(fn, [leaf(3, 3), leaf(3, 3)], door=door)
    assert (added["mm"], added.get("sin", 0)) == (LAYERS, 0)
    assert added["cos"] <= LAYERS
