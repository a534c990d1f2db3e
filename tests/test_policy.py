"""What to keep: policies as values, tags, `keep`, and regions inside regions."""

import itertools
import pickle
import types
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from oracle import (
    Hooks,
    apply,
    bits,
    count,
    leaf,
    memory_of,
    replay,
    rerun,
    same_bits,
    scope,
    seed,
    through,
)
from test_arguments import STRUCTURES
from torch.utils.checkpoint import CheckpointPolicy

import checkpointing
from checkpointing import checkpoint_scope, checkpointed, keep, offload, save_ops, save_tagged, tag

aten, auto = torch.ops.aten, checkpointing.auto
MM, SIN, EXP, TANH = aten.mm.default, aten.sin.default, aten.exp.default, aten.tanh.default


def first_half(x):
    return tag((tag(x.sin(), "a") @ x).exp(), "b").atan()


def program(x):
    """Each of its operators saves its input or its result."""
    return first_half(x).tanh().cos()


def in_halves(region, policy):
    return scope(lambda x: region(x).tanh().cos(), policy=policy)


def gradient(fn):
    seed(0)
    x = leaf(3, 3)
    (first,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
    return bits(first), bits(torch.autograd.grad(first.sin().sum(), x)[0])


def ran_again(fn, *args):
    """What backward runs of the operators of `program`, beyond what plain code's backward runs."""
    ran = Counter(count(fn(leaf(3, 3)).sum().backward))
    ran.subtract(count(program(leaf(3, 3)).sum().backward))
    names = ("sin", "mm", "exp", "atan", "tanh", "cos")
    return Counter({name: ran[name] for name in names if ran[name]})


DOORS = pytest.mark.parametrize("door", [scope, checkpointed], ids=["scope", "fn"])


def asking(ctx, op, *args, **kwargs):
    return op == EXP


PRINTED = {
    "save_ops()": lambda: save_ops(),
    "save_ops(aten.exp.default, aten.mm.default)": lambda: save_ops(MM, EXP),
    "save_tagged('a', 'b')": lambda: save_tagged("b", "a"),
    "save_ops(aten.mm.default) | save_tagged('a') | save_ops(aten.exp.default)": lambda: (
        save_ops(MM) | save_tagged("a") | [EXP]
    ),
    "save_ops(aten.mm.default) | save_tagged('a')": lambda: [MM] | save_tagged("a"),
    "offload()": lambda: offload(min_bytes="1 KiB"),  # by default
    "offload(auto(), device='cuda:1')": lambda: offload(auto(), device="cuda:1"),
    "offload(pin_memory=False)": lambda: offload(pin_memory=False),
    "offload() | save_ops(aten.sin.default)": lambda: offload() | save_ops(SIN),
}


@pytest.mark.parametrize("text", PRINTED)
def test_policies_are_frozen_printable_hashable(text):
    policy, same = PRINTED[text](), PRINTED[text]()
    assert policy == same
    assert len({policy, same}) == 1
    assert repr(policy) == text
    assert pickle.loads(pickle.dumps(policy)) == policy
    for field in vars(policy):
        with pytest.raises(AttributeError):
            setattr(policy, field, None)


def test_different_policies_differ():
    """In what they keep, not in the order in which that was written."""
    assert save_ops(MM, EXP) == save_ops(EXP, MM) != save_ops(MM)
    assert save_tagged("a") != save_tagged("b")
    assert save_ops() != save_tagged()
    assert offload() != offload(min_bytes=77)
    assert asking | save_tagged("a") == asking | save_tagged("a")
    higher = torch.ops.higher_order.cond
    for policy in (save_tagged("a", "b") | save_tagged("c"), save_ops(higher, MM)):
        assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: save_ops(aten.mm), ValueError, "name one of its overloads"),
        (lambda: save_tagged(3), TypeError, "a tag is a string"),
        (lambda: save_ops(MM) | None, TypeError, "None is no policy"),
        (lambda: save_ops(MM) | 3, TypeError, "not 3"),
        (lambda: checkpoint_scope(policy=3), TypeError, "not 3"),
        (lambda: checkpoint_scope(policy="mm"), TypeError, "not 'mm'"),
        (lambda: checkpoint_scope(auto), TypeError, r"`auto\(\)`, .* not <function auto"),
        (lambda: checkpoint_scope(policy=[torch.mm]), ValueError, "OpOverloads such as"),
        (lambda: tag(torch.ones(2), 3), TypeError, "a tag is a string"),
        (lambda: offload(device="meta"), ValueError, "meta"),
        (lambda: offload(device="nowhere"), RuntimeError, "nowhere"),
        (lambda: offload(min_bytes=-1), ValueError, "min_bytes"),
        (lambda: offload(min_bytes=None), TypeError, "min_bytes"),
        (lambda: offload(3), TypeError, "not 3"),
    ],
)
def test_mistakes_are_said_at_once(make, error, says):
    with pytest.raises(error, match=says):
        make()


@DOORS
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (None, "sin mm exp atan tanh"),
        ([MM], "sin exp atan tanh"),
        ((MM, EXP), "sin atan tanh"),
        ({TANH}, "sin mm exp"),
        (save_ops(MM, EXP, SIN, TANH), ""),
        (save_ops(MM) | [EXP], "sin atan tanh"),
        pytest.param(asking, "sin atan tanh", id="asking"),
        (asking | save_ops(TANH), "sin"),
        (save_tagged("a"), "mm exp atan tanh"),
        (save_tagged("b"), "sin atan tanh"),
        (save_tagged("b") | [TANH], "sin"),
        (save_tagged("c"), "sin mm exp atan tanh"),
    ],
    ids=str,
)
def test_what_is_kept_does_not_run_again(door, policy, again):
    """What makes a kept value runs only for others who need it."""
    assert ran_again(door(program, policy=policy)) == dict.fromkeys(again.split(), 1)
    assert gradient(door(program, policy=policy)) == gradient(program)


@pytest.mark.parametrize("answer", list(CheckpointPolicy), ids=lambda answer: answer.name)
def test_all_six_answers_act(answer):
    def policy(ctx, op, *args, **kwargs):
        assert not ctx.is_recompute
        return answer if op == EXP else CheckpointPolicy.PREFER_RECOMPUTE

    fn = scope(program, policy=policy)
    assert ran_again(fn).get("exp", 0) == ("RECOMPUTE" in answer.name)
    assert gradient(fn) == gradient(program)
    with checkpoint_scope(policy=policy) as entered:
        y = program(leaf(3, 3))
    assert (entered.stats.bytes_kept > 0) == ("RECOMPUTE" not in answer.name)
    del y


REFUSALS = ValueError, checkpointing.CheckpointError
NO_ANSWER = r"answers with a CheckpointPolicy or a bool.*aten\.mm"


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (lambda ctx, op, *args, **kwargs: None, NO_ANSWER),
        (lambda ctx, op, *args, **kwargs: "save", NO_ANSWER),
        (lambda op: True, r"policy, asked for aten\.mm.* takes 1 positional argument"),
    ],
)
def test_a_policy_that_can_not_be_asked_is_an_error_that_says_so(policy, error):
    """Also below `@`, where torch drops every TypeError and calls the operands unsupported."""
    x = leaf(3, 3)
    with pytest.raises(REFUSALS, match=error), checkpoint_scope(policy=policy):
        x @ x.T


def test_a_tag_is_nothing_without_a_policy_that_asks_for_it():
    x = leaf(3, 3)
    y = x.sin()
    node = y.grad_fn
    assert tag(y, "a") is y
    for policy in (None, save_tagged("b"), save_ops(MM)):
        with checkpoint_scope(policy=policy) as entered:
            z = x.sin()
            assert tag(z, "a") is z
        assert (entered.stats.ops_recorded, entered.stats.bytes_kept) == (1, 0)
    assert (y.grad_fn, y._version) == (node, 0)


@pytest.mark.parametrize(
    ("outer", "inner", "again"),
    [
        (None, [MM], "exp sin tanh"),
        (None, [MM, EXP], "sin tanh"),
        ([MM, TANH], [EXP], "sin"),
        ([EXP, TANH], [MM], "exp sin"),
        ([EXP, TANH], [], "exp mm sin"),
        ([EXP, TANH], None, "sin"),
        (save_tagged("a"), [EXP], "sin tanh"),
    ],
)
@DOORS
def test_the_inner_policy_wins_inside(outer, inner, again, door):
    """What the inner one keeps is not made again, for the outer one neither."""
    nested = in_halves((scope if inner is None else door)(first_half, policy=inner), outer)
    assert gradient(nested) == gradient(program)
    assert " ".join(sorted(ran_again(nested))).replace("atan ", "") == again


def test_a_region_that_is_called_again_makes_everything_again():
    """A policy needs a tape; that of a scope inside is made once more."""
    for region, times in ((checkpointed(first_half), 1), (checkpointed(scope(first_half)), 2)):
        fn = in_halves(region, [EXP])
        assert gradient(fn) == gradient(program)
        assert ran_again(fn)["exp"] == times


def test_tags_ask_the_innermost_policy():
    """Regions without one are passed by."""
    inner = lambda x: tag(x.sin().exp(), "a").tanh().cos()
    for wrap, kept in (
        (scope, True),
        (checkpointed(backend="replay"), True),
        (lambda fn: scope(fn, policy=save_tagged("a")), True),
        (lambda fn: scope(fn, policy=save_tagged("b")), False),
        (lambda fn: scope(fn, policy=[MM]), False),
    ):
        fn = scope(wrap(inner), policy=save_tagged("a"))
        assert ("exp" not in count(fn(leaf(3, 3)).sum().backward)) == kept, wrap
    with checkpoint_scope(policy=save_tagged("a")) as entered:
        y = checkpointed(inner)(leaf(3, 3))
    assert entered.stats.bytes_kept == 0  # the function is called again, and makes it
    y.sum().backward()


def test_a_disabled_scope_inside_a_scope_keeps_what_it_saves():
    """As if its code stood outside; the code around it is recomputed."""

    def fn(x):
        y = x.sin() @ x
        with checkpoint_scope(enabled=False):
            y = y.exp().atan()
        return y.tanh().cos()

    assert ran_again(scope(fn)) == {"sin": 1, "atan": 1, "tanh": 1}  # mm's input, and tanh's result
    assert "exp" not in ran_again(scope(scope(fn)))
    for nest in (scope(fn), scope(scope(fn)), checkpointed(scope(fn)), scope(checkpointed(fn))):
        assert gradient(nest) == gradient(program)


ON_CPU = torch.autograd.graph.save_on_cpu


@pytest.mark.parametrize(
    ("word", "around"), [("c", nullcontext), ("r", nullcontext), ("s", nullcontext), ("", ON_CPU)]
)
def test_a_disabled_scope_may_hold_regions_and_stand_in_hooks(word, around):
    def write(x):
        x = (x * 2).mul_(2)
        return x.exp().atan()

    def fn(x):
        y = x.sin() @ x
        with around(), checkpoint_scope(enabled=False):
            y = apply(word, write)(y * 1)
        return y.tanh().cos()

    for nest in (scope(fn), scope(scope(fn)), checkpointed(scope(fn)), scope(checkpointed(fn))):
        assert gradient(nest) == gradient(fn)


def test_a_backward_inside_is_not_asked_about():
    asked, x = [], leaf(3)

    def policy(ctx, op, *args, **kwargs):
        asked.append(op.overloadpacket.__name__)
        return op is aten.cos.default

    with checkpoint_scope(policy=policy) as scope:
        h = x.sin()
        (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        (g * h).exp()
    assert "cos" not in asked and asked[-2:] == ["mul", "exp"]
    assert scope.stats.bytes_kept == 0


def test_a_plan_makes_room_for_gradients_that_do_not_exist_yet():
    w, peaks = torch.nn.Parameter(torch.rand(64, 64)), []
    for w.grad in (None, torch.zeros(64, 64)):
        with checkpoint_scope(policy=auto()) as entered:
            y = through([torch.tanh] * 100, leaf(64, 64))
            y = (y @ w).sum()
        peaks.append(entered.stats.peak_predicted)
    assert peaks[0] - peaks[1] == w.nbytes


STRUCTURES = {name: STRUCTURES[name] for name in ("nested", "OrderedDict", "Named", "Plain")}
STRUCTURE = pytest.mark.parametrize(("wrap", "unwrap"), STRUCTURES.values(), ids=STRUCTURES)
OTHERS = [lambda t: t, lambda t: types.SimpleNamespace(t=t), lambda t: "text"]

WAYS = [lambda fn: fn, scope, rerun, replay]
WAYS += [lambda fn: torch.no_grad()(rerun(fn)), lambda fn: checkpointing.disabled()(scope(fn))]


@pytest.mark.parametrize("build", [*OTHERS, *(wrap for wrap, _ in STRUCTURES.values())])
def test_keep_returns_its_argument(build):
    """The very same object, in the forward of every door and outside of all."""
    h = leaf(3).sin()
    value = build(h)
    assert all(door(lambda: keep(value))() is value for door in WAYS)
    h.exp().sum().backward()
    assert h._version == 0


@pytest.mark.parametrize("mark", [keep, lambda value: tag(value, "both")], ids=["keep", "tag"])
@STRUCTURE
def test_every_tensor_in_a_structure_is_kept(mark, wrap, unwrap):
    x = leaf(10)
    with checkpoint_scope(policy=save_tagged("both")) as entered:
        a, b = x.sin(), x.cos()
        value = wrap(a), wrap(b)
        assert mark(value) is value
        y = a.exp().sin() * b.exp().sin()
    assert entered.stats.bytes_kept == 80
    y.sum().backward()
    assert entered.stats.ops_replayed == 4  # the exponentials and their sines
    want = (x.sin().exp().sin() * x.cos().exp().sin()).sum()
    assert bits(x.grad) == bits(torch.autograd.grad(want, x)[0])


def test_bytes_kept_are_those_of_storages_counted_once():
    """Two views of one storage, kept twice, count once; what came from outside counts nothing."""
    x = leaf(10)
    with checkpoint_scope() as entered:
        y = x.sin()
        keep([y, y[:5], y.view(2, 5)])
        keep(y)
        keep(x)
        z = y.exp().sin()
    assert entered.stats.bytes_kept == 40
    z.sum().backward()
    assert entered.stats.bytes_kept == 0


def test_kept_values_take_from_the_budget_of_a_plan_that_was_made_for_smaller_ones():
    for size in (100, 100, 120):
        with checkpoint_scope(policy=auto(budget=1600)) as entered:
            y = through([torch.sin] * 12, keep(leaf(size).sin()))
    assert entered.stats.bytes_kept <= 1600
    del y


@STRUCTURE
def test_pinned_structures_are_like_the_ones_given(wrap, unwrap):
    runs, x = [], leaf(3)

    def fn(x):
        runs.append(keep(wrap(torch.full((3,), float(len(runs))))))
        return (x * (unwrap(runs[-1]) + 1)).sin().exp()

    checkpointed(fn)(x).sum().backward()
    assert type(runs[0]) is type(runs[1])
    assert bits(x.grad) == bits(torch.autograd.grad(x.sin().exp().sum(), x)[0])


@pytest.mark.parametrize("door", [rerun, replay, scope])
def test_a_kept_value_that_the_function_writes(door):
    """A replay copies it before that; a rerun refuses."""

    def step(door):
        x = leaf(3)
        y = door(lambda x: (keep(x.sin()).mul_(2) * x).square())(x)
        return torch.autograd.grad(y.sum(), x)

    if door is rerun:
        with pytest.raises(checkpointing.ChangedError, match="given to keep"):
            step(door)
    else:
        same_bits(door, step)


def test_a_kept_value_comes_back_where_a_rerun_makes_another_size():
    sizes, x = iter([3, 5]), leaf(3)
    y = checkpointed(lambda x: (x * keep([torch.ones(next(sizes))])[0].sum()).exp())(x)
    assert bits(*torch.autograd.grad(y.sum(), x)) == bits(3 * (3 * x.detach()).exp())


def test_a_kept_value_from_outside_that_has_changed_unseen_is_an_error():
    """No version counts what is written through `.data`; what hooks hold is a copy."""
    x, outside = leaf(3), types.SimpleNamespace(scale=torch.ones(3))
    with Hooks():
        y = checkpointed(lambda x: (x * keep(outside.scale)).exp())(x)
    outside.scale.data.add_(1)
    with pytest.raises(checkpointing.ChangedError, match="given to keep"):
        y.sum().backward()
    assert outside.scale.tolist() == [2, 2, 2]


@pytest.mark.parametrize("nested", [(), (3,), (0, 2)])
def test_pins_are_in_order(nested):
    """Several in a loop find their own, also in inner regions."""
    x = leaf(3)

    def slope(region):
        numbers = itertools.count(1.0)
        stage = lambda x: (x * keep(torch.tensor(next(numbers)))).sin()

        def fn(x):
            for i in range(5):
                x = (region(stage) if i in nested else stage)(x)
            return x

        return torch.autograd.grad(region(fn)(x).sum(), x)

    same_bits(rerun, slope)


def test_a_parameter_needs_no_pin():
    """It is handed back as it is, whatever else is kept."""
    x, w = leaf(3), torch.nn.Parameter(torch.full((), 3.0))
    body = lambda x: (keep((x * (v := keep(w))).square()) * v).square()
    same_bits(rerun, lambda door: torch.autograd.grad(door(body)(x).sum(), (x, w)))


@pytest.mark.parametrize("inside", [scope, lambda fn, **options: scope(scope(fn, **options))])
def test_what_a_policy_keeps_in_a_rerun_is_not_held_by_the_rerun(inside):
    """It calls the function again, which keeps it again."""
    x = torch.randn(64, 64, requires_grad=True)

    def held(**options):
        block = inside(lambda x: (x @ x).sin().exp().cos(), **options)
        return memory_of(lambda: checkpointed(lambda x: block(x).tanh())(x).sum()).held

    assert held(policy=save_ops(MM, SIN, EXP)) == held()
