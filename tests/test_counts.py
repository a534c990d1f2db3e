"""How often each operator runs, as exact integers. Time is never measured here."""

import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from oracle import EARLY_STOP, SavesItsOutput, apply, count, in_hooks, leaf, weigh, words
from torch.autograd.graph import saved_tensors_hooks

from checkpointing import ChangedError, checkpoint_scope, checkpointed, keep

DOOR = pytest.mark.parametrize("door", ["c", "r", "s"])
REPLAY = pytest.mark.parametrize("door", ["r", "s"])
LAYERS = 5


def added(program, door, early_stop=True, backward=lambda y: weigh(y).backward()):
    """What regions in `program(region)(x, w)` add to backward's operators; forward's stay."""

    def counts(word):
        x, w, results = leaf(40, 40), leaf(40, 40), []
        run = program(lambda fn: apply(word, fn, early_stop))
        forward = count(lambda: results.append(run(x, w)))
        return forward, Counter(count(lambda: backward(results.pop())))

    (forward, once), (forward_in_regions, again) = map(counts, ("", door))
    assert forward_in_regions == forward
    again.subtract(once)
    return {name: n for name, n in again.items() if n}


def once_each(text):
    return dict.fromkeys(words(text), 1)


def chain(x, w=None):
    """Three operators: the first saves its input, the others their results."""
    return x.sin().exp().tanh()


def two_outputs(x, w):
    h = x.sin().exp()
    return h.tanh(), h.sigmoid()


def dropped_branches(x, w):
    dropped = x.cos().tanh().sigmoid()
    h = x.sin()
    dropped.sum()
    (h + 1).floor()
    return h.exp()


def layers(x, w):
    """Each starts from the value kept before it; its last product is not made again."""
    for _ in range(LAYERS):
        x = keep((x @ w).sin().tanh() @ w)
    return x


def layers_that_share_a_mask(x, w):
    """It is made where it is needed; layers stay apart."""
    mask = x.detach().tril().cos()
    for _ in range(LAYERS):
        x = keep((x @ w * mask).sin())
    return x


ADDED = [  # doors, the function, and what runs again
    ("crs", two_outputs, once_each("sin exp tanh sigmoid")),
    ("crs", lambda x, w: (x + 1).neg() - 2, {}),  # saves nothing
    ("crs", lambda x, w: SavesItsOutput.apply(x.sin().exp()), once_each("sin exp sigmoid")),
    ("rs", lambda x, w: (x @ x).sin() @ x, once_each("mm sin")),  # the last one saves its inputs
    ("rs", dropped_branches, once_each("sin exp")),
    # What takes only its shape from a product does not pull it in.
    ("rs", lambda x, w: F.dropout(x @ w, 0.5), once_each("empty_like bernoulli_ div_")),
    ("rs", lambda x, w: torch.rand_like(x @ w) * x, once_each("rand_like")),
    ("rs", lambda x, w: torch.randn_like(x @ w) * x, once_each("randn_like")),
    ("rs", lambda x, w: torch.ones_like(x @ w) * x, once_each("ones_like")),
    ("rs", lambda x, w: (x @ w).new_full((40, 40), 2.0) * x, once_each("new_full")),
    ("rs", layers, dict.fromkeys(words("mm sin tanh"), LAYERS)),
    ("rs", layers_that_share_a_mask, dict.fromkeys(words("tril cos mm mul"), LAYERS)),
]


@EARLY_STOP
@pytest.mark.parametrize(
    ("door", "fn", "again"), [(door, *case) for doors, *case in ADDED for door in doors]
)
def test_what_backward_needs_runs_once_more(door, fn, again, early_stop):
    assert added(lambda region: region(fn), door, early_stop) == again


def test_a_rerun_stops_at_the_last_tensor_that_is_wanted():
    """Without early stop, the last matmul runs again, and whatever follows it."""
    program = lambda region: region(lambda x, w: ((x @ w).sin() @ w) + 1)
    assert added(program, "c") == once_each("mm sin")
    assert added(program, "c", early_stop=False) == {"mm": 2, "sin": 1, "add": 1}


def test_a_rerun_stops_at_a_count_that_is_saved_last():
    """The last tensor of a loss is a number of tokens, or of those that count; metrics follow."""

    def program(region):
        def mean(x, w):
            loss = (x @ w).sin().sum() / (w > 0).sum().float()
            log.append("metrics")
            return loss

        def classes(x, w):
            loss = F.cross_entropy(x @ w, torch.arange(40))
            log.append("metrics")
            return loss

        return lambda x, w: region(mean)(x, w) + region(classes)(x, w)

    log = []
    x, w = leaf(40, 40), leaf(40, 40)
    program(checkpointed)(x, w).backward()
    assert len(log) == 2


@DOOR
@EARLY_STOP
@pytest.mark.parametrize("times", [1, 3])
def test_each_graph_task_recomputes_once(door, early_stop, times):
    backward = lambda y: [y.sum().backward(retain_graph=True) for _ in range(times)]
    again = added(lambda region: region(chain), door, early_stop, backward)
    assert again == dict.fromkeys(words("sin exp tanh"), times)


def test_a_rerun_stops_at_the_input_of_a_region_inside():
    """Also if the operator before it has saved a tensor of floats last: the deviation of a norm."""

    def program(region):
        normed = lambda x: F.layer_norm(x, (40,))
        return region(lambda x, w: region(lambda x: region(chain)(normed(x)))(normed(x)))

    again = once_each("sin exp tanh")
    assert added(program, "c") == {**again, "native_layer_norm": 2}


@DOOR
def test_nested_regions_recompute_each_operator_once(door):
    """The outer region recomputes the inner one's inputs, the inner one the rest."""
    nested = added(lambda region: region(lambda x, w: region(chain)(x.cos().sqrt())), door)
    assert nested == once_each("cos sqrt sin exp tanh")


@DOOR
def test_double_backward_recomputes_once_for_each_graph_task(door):
    """The first gradient is one graph task."""
    inputs = []

    def backward(y):
        (first,) = torch.autograd.grad(y.sum(), inputs.pop(0), create_graph=True)
        first.sum().backward()

    inner = lambda x: x.sin().exp()
    run = lambda region: lambda x, w: inputs.append(x) or region(inner)(x)
    assert added(run, door, backward=backward) == {"sin": 2, "exp": 2}


@DOOR
def test_recompute_stops_at_the_last_live_holder(door):
    """What only a dropped output needs, at the region's end, is not run."""
    two = lambda x, w: ((a := x.sin().exp()), a.cos().tanh())
    again = added(lambda region: lambda x, w: region(two)(x, w)[0], door)
    assert again == once_each("sin exp")


def test_no_hooks_stay_on_the_nodes_of_custom_functions():
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

    hooked = in_hooks(chain, lambda: saved_tensors_hooks(lambda t: t, lambda t: t))
    assert recorded(chain) == recorded(chain, lambda ctx, op, *args, **kwargs: True)
    assert recorded(apply(door, chain)) <= recorded(hooked)


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


@DOOR
def test_parameters_are_not_recomputed(door):
    norm = torch.nn.LayerNorm(4)
    y = apply(door, lambda x: norm(x.exp()))(leaf(2, 4))
    added = count(lambda: y.grad_fn._saved_weight.sum().item())
    assert added == count(lambda: norm.weight.detach().sum().item())
    assert y.grad_fn._saved_weight.data_ptr() == norm.weight.data_ptr()
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(ChangedError, match=r"float32 tensor of shape \(4,\).*changed in place"):
        _ = y.grad_fn._saved_weight


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
