"""torch's own functions and ours, side by side: torch is the oracle.

A program takes the module whose functions it shall use. What it returns, the warnings on the way
and the error that ends it must be the same for both, or what later versions than 2.13 answer.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import re
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as theirs
from oracle import Counting, Hooks, at_once, bits, in_hooks, leaf, legacy, words
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import checkpointing.torch_compat as ours
from checkpointing import CheckpointError, checkpointed, disabled

pytestmark = oracle.DEPRECATED
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
MM = torch.ops.aten.mm.default
OWN = words("""
    checkpoint checkpoint_sequential CheckpointError CheckpointFunction check_backward_validity
    set_checkpoint_early_stop set_checkpoint_debug_enabled
""")
NAMES_OF_2_15 = OWN + words("""
    detach_variable get_device_states set_device_states noop_context_fn DefaultDeviceType
    CheckpointPolicy SelectiveCheckpointContext create_selective_checkpoint_contexts
    SAC_IGNORED_OPS GraphExecGroup
""")

CASES = {}


def case(program):
    CASES[program.__name__] = program
    return program


def gradient(y, *inputs):
    return torch.autograd.grad(y.sum(), inputs)


def region(m, fn, *args, **options):
    return m.checkpoint(fn, *args, use_reentrant=False, **options)


def reentrant(m, fn, *args, **options):
    return m.checkpoint(fn, *args, use_reentrant=True, **options)


def selective(m, *args, **kwargs):
    return functools.partial(m.create_selective_checkpoint_contexts, *args, **kwargs)


def fickle(*ways):
    """A function that goes another way every second time."""
    ways = itertools.cycle(ways)
    return lambda x: next(ways)(x)


@case
def selective_with_a_buffer_that_is_written(m):
    """The policy sees no copy of it."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), leaf()
    return gradient(region(m, net, x, context_fn=selective(m, [MM])), x)


def counted(steps):
    counts = [0] * len(steps)

    def count(i, x):
        counts[i] += 1
        return steps[i](x)

    return [functools.partial(count, i) for i in range(len(steps))], counts


def counting(*steps):
    """A function that runs these one after the other, and how often each has begun."""
    steps, counts = counted(steps)
    return lambda x: functools.reduce(lambda x, step: step(x), steps, x), counts


def inside_gradients(x):
    y = x.sin().exp()
    return y * torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def fails(x):
    raise ArithmeticError("no")


FUNCTIONS = {
    "plain": lambda x: x.sin().exp(),
    "dropout": lambda x: F.dropout(x.sin(), 0.5).exp(),
    "gradients inside": inside_gradients,
    "product": lambda x: (x @ x).sin(),
    "new tensors": lambda x: x.sin() * torch.ones(4, device=x.device).exp(),
    "nothing saved": lambda x: x + 1,
    "an error": fails,
}
AROUND = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a device": lambda: torch.device("cpu"),
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "early stop off": lambda: theirs.set_checkpoint_early_stop(False),
}
for (name, fn), where, preserve in itertools.product(FUNCTIONS.items(), AROUND, (True, False)):

    def program(m, fn=fn, around=AROUND[where], preserve=preserve):
        x, found = leaf(), []
        counted, counts = counting(fn)
        with around():
            y = region(m, counted, x, preserve_rng_state=preserve)
        torch.rand(3)
        if y.requires_grad:
            found = torch.autograd.grad(y.float().sum(), x, create_graph=True)
            found += gradient(found[0], x) if found[0].requires_grad else ()
        return y.detach(), [f.detach() for f in found], torch.rand(1), counts

    CASES[f"{name}, around it {where}, rng={preserve}"] = program


@case
def arguments_and_results_of_any_kind(m):
    def fn(x, k, text, inside, *, n, **more):
        return {"y": [(x * inside[0]["z"]).sin() ** n]}, x, None, k, text, more

    x, y = leaf(), leaf(4)
    result, same, *others = region(m, fn, x, 3, "s", [{"z": y}], n=2, b=1)
    return gradient(result["y"][0], x, y), same is x, others


def stops(m, switches, **argument):
    """How often the last step begins; it saves nothing, so an early stop never gets there."""
    fn, counts = counting(torch.sin, torch.cos, torch.clone)
    x = leaf()
    with contextlib.ExitStack() as around:
        for switch in switches:
            around.enter_context(m.set_checkpoint_early_stop(switch))
        y = region(m, fn, x, **argument)
    gradient(y, x)
    return counts


@case
def early_stop(m):
    decorated = m.set_checkpoint_early_stop(False)(lambda: stops(m, ()))
    arguments = {}, {"early_stop": True}, {"early_stop": False}
    ways = itertools.product([(), (None,), (True,), (False,), (False, True)], arguments)
    found = [stops(m, switches, **argument) for switches, argument in ways]
    return found, decorated(), decorated(), stops(m, ())


def two_backwards(m, context):
    """Through two parts of a graph, and how often its region has run by then."""
    x = leaf()
    fn, counts = counting(lambda x: ((y := x.sin().cos()), y.sin().cos()))
    y, z = region(m, fn, x)
    with context:
        (at_y,) = torch.autograd.grad(z.sum(), y)
        (at_x,) = torch.autograd.grad(y, x, at_y)
    return at_x, counts


def overlapping(m):
    """Two backwards of one group that need the same activations."""
    x = leaf()
    y = region(m, lambda x: x.sin().cos().exp(), x)
    with m.GraphExecGroup():
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return first, torch.autograd.grad((y * 2).sum(), x)


@case
def one_group_after_another(m):
    x = leaf()
    fn, counts = counting(lambda x: x.sin().cos().exp())
    y, found = region(m, fn, x), []
    for _ in range(2):
        with m.GraphExecGroup():
            found += torch.autograd.grad(y.sum(), x, retain_graph=True)
    return found, counts


@case
def segments_of_a_sequence(m):
    found = []
    for segments, use_reentrant in itertools.product((1, 2, 3, 4, 5, 7), (True, False)):
        x, (steps, counts) = leaf(), counted([torch.sin] * 7)
        m.checkpoint_sequential(steps, segments, x, use_reentrant=use_reentrant).sum().backward()
        found += counts, x.grad
    return found


@case
def kinds_of_sequences(m):
    layers, found = [nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()], []
    kinds = list, tuple, nn.ModuleList, lambda layers: nn.Sequential(*layers)
    for kind, preserve in itertools.product(kinds, (True, False)):
        x = leaf()
        options = {"use_reentrant": False, "preserve_rng_state": preserve}
        y = m.checkpoint_sequential(kind(layers), 2, x, **options)
        found.append((y, gradient(y, x)))
    return found


@case
def a_decorated_function(m):
    @m.checkpoint(use_reentrant=False, early_stop=False)
    def fn(x, *, k=1):
        """What it does."""
        nonlocal runs
        runs += 1
        return x.sin() * k

    x, runs = leaf(), 0
    same = torch.equal(gradient(fn(x, k=3), x)[0], x.detach().cos() * 3)
    return [same, runs, (fn.__name__, fn.__doc__)]


@case
def contexts_are_entered_around_both_runs(m):
    log, x = [], leaf()

    @contextlib.contextmanager
    def noting(name):
        log.append(f"enter {name}")
        yield
        log.append(f"exit {name}")

    def fn(x):
        log.append("fn")
        return x.sin()

    y = region(m, fn, x, context_fn=lambda: (noting("forward"), noting("again")))
    log.append("between")
    gradient(y, x)
    return log


ONLY = "`respect_saved_tensors_hooks` is only supported when use_reentrant=False"
suppressing = lambda: (contextlib.suppress(ArithmeticError), contextlib.nullcontext())


def with_debug(m, switch, debug=True):
    with m.set_checkpoint_debug_enabled(switch):
        return region(m, torch.sin, leaf(), debug=debug, context_fn=selective(m, [MM]))


def legacy_sine(m, **options):
    return reentrant(m, torch.sin, leaf(), **options)


def in_sequence(m, function, *inputs, **options):
    return m.checkpoint_sequential([function], 1, *inputs, use_reentrant=False, **options)


CASES |= {
    "no function": lambda m: region(m, None, leaf()),
    "three contexts": lambda m: region(m, torch.sin, leaf(), context_fn=lambda: (1, 2, 3)),
    "no context function": lambda m: region(m, torch.sin, leaf(), context_fn=None),
    "a context that suppresses errors": lambda m: region(m, fails, leaf(), context_fn=suppressing),
    "contexts with debug": lambda m: with_debug(m, None),
    "contexts with debug from around": lambda m: with_debug(m, True, False),
    "contexts with debug switched off": lambda m: with_debug(m, False),
    "an unknown check": lambda m: region(m, torch.sin, leaf(), determinism_check="values"),
    "an unknown check without grad mode": torch.no_grad()(
        lambda m: region(m, torch.sin, leaf(), determinism_check="x")
    ),
    "a group of backwards shares a recompute": lambda m: two_backwards(m, m.GraphExecGroup()),
    "backwards without a group don't": lambda m: two_backwards(m, contextlib.nullcontext()),
    "backwards that overlap in a group": overlapping,
    "unknown keywords of a sequence": lambda m: in_sequence(m, torch.sin, leaf(), foo=1, bar=2),
    "a sequence of two inputs": lambda m: in_sequence(m, torch.add, leaf(), leaf()),
    "unknown keywords of the decorator": lambda m: m.checkpoint(use_reentrant=False, foo=1, bar=2),
    "keywords of a decorated function": lambda m: m.checkpoint(use_reentrant=True)(fails)(1, y=2),
    "a policy that lists packets": lambda m: selective(m, [torch.ops.aten.mm])(),
    "no determinism check": lambda m: gradient(
        region(m, fickle(torch.exp, torch.sigmoid), x := leaf(), determinism_check="none"), x
    ),
    "reentrant contexts": lambda m: legacy_sine(m, context_fn=selective(m, [MM])),
    "reentrant debug": lambda m: legacy_sine(m, debug=True),
    "reentrant and hooks to respect": lambda m: legacy_sine(m, respect_saved_tensors_hooks=False),
    "reentrant and detached results": lambda m: backward_twice(
        reentrant(m, torch.Tensor.detach, leaf())
    ),
    "the variant left out": lambda m: m.checkpoint(torch.sin, leaf()),
    "the variant left out of a sequence": lambda m: m.checkpoint_sequential([fails], 1, leaf()),
    "a list to detach": lambda m: m.detach_variable([leaf()]),
}
ANSWERS = {  # a result, or the class of an error and a sentence in it
    "a_decorated_function": [True, 2, ("fn", "What it does.")],
    "unknown keywords of the decorator": (ValueError, "Unexpected keyword arguments: foo,bar"),
    "keywords of a decorated function": (ValueError, "Unexpected keyword arguments: y"),
    "reentrant contexts": (ValueError, ONLY),
    "reentrant debug": (ValueError, ONLY),
    "reentrant and hooks to respect": (ValueError, ONLY),
}

MISMATCHES = {
    "fewer tensors": (lambda x: x.sin().exp().sin(), lambda x: x.sin().exp()),
    "more tensors": (lambda x: x.sin(), lambda x: x.sin().exp().sin()),
    "no tensors": (lambda x: x.sin().exp(), lambda x: x.detach()),
    "another dtype": (lambda x: x.sin().exp(), lambda x: x.sin().double().exp()),
    "another shape": (lambda x: x.sin().exp(), lambda x: x[:2].sin().exp()),
}
for name, stop in itertools.product(MISMATCHES, (True, False)):

    def program(m, ways=MISMATCHES[name], stop=stop):
        return gradient(region(m, fickle(*ways), x := leaf(), early_stop=stop), x)

    CASES[f"{name}, {'with' if stop else 'without'} early stop"] = program

Answer = theirs.CheckpointPolicy


def saves(*ops, answer=Answer.MUST_SAVE, otherwise=Answer.PREFER_RECOMPUTE):
    return lambda ctx, op, *args, **kwargs: answer if op in ops else otherwise


def two_products(x):
    return ((x @ x).sin() @ x).sigmoid()


def every_second(m):
    """A policy with a state, which is asked in the forward only."""
    asked = itertools.count()
    return lambda ctx, op, *args, **kwargs: op is MM and next(asked) % 2 == 0


POLICIES = {
    "a list": [MM],
    "a bool": lambda ctx, op, *args, **kwargs: op is MM,
    "PREFER_SAVE of everything": saves(otherwise=Answer.PREFER_SAVE),
    "MUST_CPU_OFFLOAD": saves(MM, answer=Answer.MUST_CPU_OFFLOAD),
    "views": [torch.ops.aten.view.default, torch.ops.aten.t.default],
    "several results": [torch.ops.aten.var_mean.correction],
}
SELECTED = {
    "two products": two_products,
    "views": lambda x: (x.t().view(16).sin() * torch.arange(4).view(2, 2).sum()).exp(),
    "several results": lambda x: torch.mul(*torch.var_mean(x @ x)),
}
for (name, policy), fn in itertools.product((POLICIES | {"every second": None}).items(), SELECTED):

    def program(m, policy=policy, fn=SELECTED[fn]):
        x = leaf()
        y = region(m, fn, x, context_fn=selective(m, policy or every_second(m)))
        with Counting() as counted:
            found = gradient(y, x)
        return found, {op: counted.ran[op] for op in ("mm", "sin", "sigmoid", "var_mean")}

    CASES[f"policy: {name}, {fn}"] = program


def backward_twice(y, retain_graph=False):
    y.sum().backward(retain_graph=retain_graph)
    y.sum().backward()


def selected(*ways, **options):
    """A program that ends with an error, or with what torch computes."""
    ways = ways * 2 if len(ways) == 1 else ways
    contexts = lambda m: selective(m, [torch.ops.aten.sin.default], **options)
    return lambda m: gradient(region(m, fickle(*ways), x := leaf(), context_fn=contexts(m)), x)


CASES |= {
    "a second backward under a policy": lambda m: backward_twice(
        region(m, two_products, leaf(), context_fn=selective(m, [MM])), retain_graph=True
    ),
    "a second backward without retain_graph": lambda m: backward_twice(legacy_sine(m)),
    "a kept result is written in place": selected(lambda x: x.sin().mul_(2).cos().exp()),
    "and may be": selected(lambda x: x.sin().mul_(2).cos().exp(), allow_cache_entry_mutation=True),
    "an operator that the forward did not run": selected(
        lambda x: (x @ x).sin().exp(), lambda x: x.tan().sin().exp()
    ),
    "an operator that runs more often": selected(
        lambda x: x.sin().exp().cos(), lambda x: x.sin().sin().exp().cos()
    ),
}


# ---- selective checkpointing under the hooks of the user, which torch asks about since 2.14


def under_hooks(where, respect):
    """What the hooks see, where they enclose regions in this way."""

    def program(m):
        hooks, x = Hooks(), leaf() * 1
        option = {"respect_saved_tensors_hooks": respect}
        within = lambda fn: in_hooks(fn, lambda: hooks)
        kept = lambda fn: lambda x: region(m, fn, x, context_fn=selective(m, [MM]), **option)
        inner = kept(two_products)
        y = {
            "around": within(inner),
            "inside": kept(within(two_products)),
            "around two regions with policies": within(kept(lambda x: inner(x) @ x)),
            "between two regions": lambda x: region(m, within(inner), x),
            "around the backward": inner,
            "around no policy": within(lambda x: region(m, two_products, x, **option)),
            "nowhere": kept(lambda x: region(m, two_products, x).sin()),
        }[where](x)
        with hooks if where == "around the backward" else contextlib.nullcontext():
            return gradient(y, x), len(hooks.packed), hooks.unpacked

    return program


HOOKS = ["around", "inside", "around two regions with policies", "between two regions"]
HOOKS += ["around the backward", "around no policy", "nowhere"]
if VERSION >= (2, 14):
    for where, respect in itertools.product(HOOKS, (None, True, False)):
        CASES[f"hooks {where}, respect={respect}"] = under_hooks(where, respect)

for name, fn, options in (
    ("plain", lambda x: x.sin().exp(), {}),
    ("dropout", lambda x: F.dropout(x.sin(), 0.5), {}),
    ("dropout without rng", lambda x: F.dropout(x.sin(), 0.5), {"preserve_rng_state": False}),
    ("ignored options", torch.sin, {"determinism_check": "x", "early_stop": False}),
):

    def program(m, fn=fn, options=options):
        x = leaf()
        fn, counts = counting(fn, torch.clone)
        with m.set_checkpoint_debug_enabled(True), m.set_checkpoint_early_stop(False):
            y = reentrant(m, fn, x, **options)
        torch.rand(3)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return y, x.grad, counts, torch.rand(1)

    CASES[f"reentrant: {name}"] = program


@case
def a_group_in_a_group(m):
    with m.GraphExecGroup(), m.GraphExecGroup():
        pass


@case
def reentrant_and_an_argument_changed_in_place(m):
    x = leaf() * 1
    y = reentrant(m, torch.sin, x)
    x.add_(1)
    y.sum().backward()


@case
def reentrant_arguments_and_results(m):
    def fn(x, y, k, inside):
        return (x * y).sin() * k + inside[0], x.detach(), k, None, "s"

    x, y, hidden = leaf(), leaf(4), leaf(4)
    first, detached, *others = reentrant(m, fn, x, y, 3, [hidden])
    first.sum().backward()
    return x.grad, y.grad, hidden.grad, detached.requires_grad, others


@case
def helpers(m):
    x = leaf()
    parts = m.detach_variable((x, 3, x.detach(), x * 2))
    m.CheckpointFunction.apply(lambda x, k: x.sin() * k, True, x, 2).sum().backward()
    m.set_device_states([], [])
    for values in ([leaf(), 3], [torch.ones(2), 3]):
        m.check_backward_validity(values)
    states = m.get_device_states(leaf(), {"a": torch.ones(2)})
    return parts, [part is x for part in parts], x.grad, states


def observe(program, module):
    """What a program does with the functions of a module: its result, its error, its warnings."""
    torch.manual_seed(0)
    result = error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = bits(program(module))
        except Exception as failed:
            error = failed
    return result, error, caught


def first_sentence(text):
    return text.strip().splitlines()[0].split(". ")[0].split(": [")[0].rstrip(".")


def metadata(error):
    """Of tensors that differ, in the lines under the first sentence."""
    return re.findall(r"(?m)^(?:Number|saved|recomp).*", str(error))


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_torch(name):
    result, error, caught = observe(CASES[name], ours)
    assert {w.filename for w in caught if w.category is UserWarning} <= {__file__}
    if name in ANSWERS and VERSION < (2, 14):
        answer = ANSWERS[name]
        if error is None:
            assert result == bits(answer)
        else:
            assert isinstance(error, answer[0]) and answer[1] in str(error)
        return
    their_result, their_error, their_warnings = observe(CASES[name], theirs)
    assert result == their_result
    assert (error is None) == (their_error is None), error or their_error
    if error is not None:
        assert isinstance(error, type(their_error))
        assert first_sentence(str(their_error)) in str(error)
        assert metadata(their_error) in (metadata(error), [])
    # Each version threatens in other words, and torch's own warnings may point into torch.
    said, they_said = (
        [(w.category, str(w.message).split(". ")[0]) for w in seen]
        for seen in (caught, their_warnings)
    )
    assert said == they_said


def test_a_sequence_is_one_and_cut_into_segments_that_exist():
    """torch divides by zero, or runs everything in one."""
    for segments in (0, -1, 3):
        with pytest.raises(ValueError, match=r"between 1 and the number of functions \(2\)"):
            ours.checkpoint_sequential([torch.sin] * 2, segments, leaf(), use_reentrant=False)
    for m in (ours, theirs):
        with pytest.raises(TypeError):
            m.checkpoint_sequential(nn.Bilinear(4, 4, 4), 1, leaf(), leaf())


def test_switches_stay_in_their_thread():
    """torch's are global variables, which count, too."""
    with ours.set_checkpoint_early_stop(False):
        found = at_once(lambda: stops(ours, ()))
    with theirs.set_checkpoint_early_stop(False):
        found += [stops(ours, ()), stops(ours, (True,))]
    assert found == [[2, 2, 1], [2, 2, 2], [2, 2, 1]]
    refused = pytest.raises(ValueError, match="debug=True is incompatible")
    with theirs.set_checkpoint_debug_enabled(True), refused:
        region(ours, torch.sin, leaf(), context_fn=selective(ours, [MM]))


@pytest.mark.parametrize("door", [checkpointed, checkpointed(backend="replay")])
def test_backwards_of_other_regions_may_overlap_in_a_group(door):
    """Only the drop-in refuses that, as torch does."""
    x = leaf()
    y = door(lambda x: x.sin().cos())(x).sum()
    with ours.GraphExecGroup():
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(y, x)[0])


def test_debug_says_what_torch_says_around_the_operators_of_both_runs():
    """Its headings, and its error as the cause. (The operators: test_determinism.py.)"""
    with ours.set_checkpoint_debug_enabled(True):
        y = region(ours, fickle(*MISMATCHES["another shape"]), leaf())
    with pytest.raises(ours.CheckpointError) as caught:
        y.sum().backward()
    text, cause = str(caught.value), caught.value.__cause__
    assert "An error happened while unpacking tensors" in text
    assert "You are seeing this error because you passed `debug=True` to checkpoint" in text
    assert "float32[4, 4] = aten.sin.default(float32[4, 4])" in text
    assert isinstance(cause, ours.CheckpointError) and first_sentence(str(cause)) in text


@pytest.mark.skipif(VERSION >= (2, 14), reason="torch can do it")
def test_an_option_that_torch_can_not_honour_is_refused():
    """Rather than ignored: the memory that it should save would not be saved."""
    contexts = selective(ours, [MM])
    region(ours, two_products, leaf(), context_fn=contexts, respect_saved_tensors_hooks=False)
    with pytest.raises(ValueError, match=r"needs torch 2\.14"):
        region(ours, two_products, leaf(), context_fn=contexts, respect_saved_tensors_hooks=True)


def test_every_public_name_of_torch_is_there():
    """As of 2.15 and of the installed torch; data, enums and contexts are torch's own objects."""
    assert set(ours.__all__) == {*NAMES_OF_2_15} >= set(theirs.__all__)
    mine = {name for name in NAMES_OF_2_15 if getattr(ours, name) is not getattr(theirs, name)}
    assert mine == {*OWN}
    assert issubclass(ours.CheckpointError, theirs.CheckpointError)
    assert ours._infer_device_type is theirs._infer_device_type  # others import private ones, too
    for name in ("_no_such_name", "no_such_name"):
        with pytest.raises(AttributeError):
            getattr(ours, name)


def test_signatures_are_those_of_2_15():
    names = words("""
        function args use_reentrant preserve_rng_state context_fn determinism_check debug early_stop
        respect_saved_tensors_hooks kwargs
    """)
    assert [*inspect.signature(ours.checkpoint).parameters] == names
    same = ["checkpoint_sequential", "detach_variable", *["checkpoint"] * (VERSION >= (2, 14))]
    for name in same:
        want, have = (inspect.signature(getattr(m, name)).parameters for m in (theirs, ours))
        assert [*have] == [*want]
        for mine, its in zip(have.values(), want.values(), strict=True):
            assert (mine.kind, mine.default) == (its.kind, its.default)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_decorator_can_be_copied(again):
    """With its options. (Copies of what it has decorated: test_modules.py.)"""
    decorator, x = again(ours.checkpoint(use_reentrant=False)), leaf()
    assert torch.equal(gradient(decorator(torch.sin)(x), x)[0], x.cos())


@pytest.mark.parametrize("form", ["call", "decorator", "sequence", "torch's wrapper"])
def test_warnings_point_at_the_users_line(form):
    """Not at torch's or ours, which Python's filters would show once and for all."""
    wrapped = checkpoint_wrapper(nn.Tanh(), checkpoint_fn=ours.checkpoint)
    call = {
        "call": lambda: ours.checkpoint(torch.sin, leaf()),
        "decorator": lambda: ours.checkpoint()(torch.sin)(leaf()),
        "sequence": lambda: ours.checkpoint_sequential([torch.sin, torch.cos], 2, leaf()),
        "torch's wrapper": lambda: wrapped(leaf()),
    }[form]
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed") as caught:
        call()
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, call.__code__.co_firstlineno)]


@pytest.mark.parametrize("outer, inner", [(theirs, ours), (ours, theirs), (ours, ours)])
@pytest.mark.parametrize("policies", [(), ("outer",), ("inner",), ("outer", "inner")])
def test_regions_of_torch_and_ours_nest(outer, inner, policies):
    """Either may be the outer one, with the same contexts around it."""
    options = {"context_fn": selective(theirs, [MM])}
    if VERSION >= (2, 14):
        options["respect_saved_tensors_hooks"] = True
    around, inside = (options if name in policies else {} for name in ("outer", "inner"))
    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        y = region(outer, lambda x: region(inner, two_products, x, **inside) @ x, x, **around)
    assert torch.equal(gradient(y, x)[0], gradient(two_products(x) @ x, x)[0])


# ---- the legacy backend through our own door


def dropped(x):
    return F.dropout(x.sin(), 0.5).exp()


def drawn(x, generator):
    return (x * torch.rand(4, 4, generator=generator)).exp()


GENERATOR = torch.Generator()
from_generator = functools.partial(drawn, generator=GENERATOR)
in_replay = checkpointed(backend="replay")


@pytest.mark.parametrize(
    ("plain", "fn"),
    [
        (dropped, lambda x: legacy(dropped)(x)),
        (dropped, lambda x: ours.checkpoint_sequential([dropped, torch.clone], 2, x, True)),
        (dropped, lambda x: legacy(lambda x: legacy(dropped)(x))(x)),
        (dropped, lambda x: legacy(lambda x: checkpointed(dropped)(x))(x)),
        (dropped, lambda x: legacy(lambda x: in_replay(dropped)(x))(x)),
        (dropped, checkpointed(lambda x: legacy(dropped)(x))),
        (dropped, in_replay(lambda x: legacy(dropped)(x))),
        (from_generator, lambda x: legacy(drawn)(x, GENERATOR)),
        (from_generator, lambda x, g=GENERATOR: legacy(lambda x: drawn(x, g))(x)),
    ],
)
def test_bits_as_without(plain, fn):
    def observe(fn):
        torch.manual_seed(0)
        GENERATOR.manual_seed(1)
        x = leaf()
        y = fn(x * 2).cos()
        y.sum().backward()
        return bits([y, x.grad, torch.get_rng_state(), GENERATOR.get_state()])

    assert observe(fn) == observe(plain)


@pytest.mark.parametrize("how", ["enabled", "disabled", "no_grad"])
def test_ways_to_switch_it_off(how):
    fn = legacy(lambda x, k=1: x.sin() * k, enabled=how != "enabled")
    with {"disabled": disabled, "no_grad": torch.no_grad}.get(how, torch.enable_grad)():
        y = fn(leaf(), k=2)
    assert (y.grad_fn is None) is (how == "no_grad")


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_drop_in_is_switched_off_with_all_regions(use_reentrant):
    runs = []
    with disabled():
        y = ours.checkpoint(
            lambda x: runs.append(1) or x.sin(), leaf(), use_reentrant=use_reentrant
        )
    y.sum().backward()
    assert runs == [1]


def test_keywords_are_refused():
    ran = []
    with pytest.raises(ValueError, match=r"Unexpected keyword arguments: k.*backend='rerun'"):
        legacy(lambda x, k: ran.append(1))(leaf(), k=1)
    assert ran == []


@pytest.mark.parametrize("call", [torch.autograd.grad, lambda y, x: y.backward(inputs=[x])])
def test_gradients_of_chosen_inputs_are_refused(call):
    sine, x = legacy(lambda x: x.sin()), leaf()
    said = r"incompatible with \.grad\(\) or passing an `inputs`.*backend='rerun'"
    with pytest.raises(CheckpointError, match=said):
        call(sine(x).sum(), x)
    sine(x).sum().backward()
    assert torch.equal(x.grad, x.cos())


LINEAR = nn.Linear(3, 3)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (nn.Linear(3, 3), ()),
        (nn.Linear(3, 3).forward, ()),
        ((lambda p: lambda x: x * p)(nn.Parameter(torch.ones(3))), ()),
        (lambda x, m: m(x), (nn.Linear(3, 3),)),
        (functools.partial(lambda m, x: m(x), nn.Linear(3, 3)), ()),
        (lambda x: LINEAR(x), ()),
    ],
    ids=["module", "method", "closure", "argument", "partial", "global"],
)
def test_parameters_that_would_get_no_gradients_are_refused(fn, args):
    """Where no input requires grad, as with a frozen embedding before the first block."""
    with pytest.raises(CheckpointError, match=r"none of the inputs requires grad.*backend='rerun'"):
        legacy(fn)(torch.ones(2, 3), *args)
    legacy(fn)(torch.ones(2, 3, requires_grad=True), *args).sum().backward()


def test_nothing_that_requires_grad_at_all_is_a_warning():
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True") as caught:
        y = legacy(lambda x: x.sin())(torch.ones(3))
    assert not y.requires_grad
    assert caught[-1].filename == __file__  # the first may say that the backend is deprecated


def test_ddp_with_the_reentrant_backend(group):
    """A block used twice: the error says what to use instead; that works."""

    refused = pytest.raises(CheckpointError, match=r"DistributedDataParallel .*Use backend='rerun'")
    for backend, often in (("rerun", 2), ("replay", 2), ("reentrant", 1), ("reentrant", 2)):
        block = nn.Linear(4, 4)
        block.forward = checkpointed(block.forward, backend=backend)
        net = nn.Sequential(nn.Linear(4, 4), *[block, nn.ReLU()] * often)
        model = nn.parallel.DistributedDataParallel(net)
        fails = backend == "reentrant" and often == 2
        with refused if fails else contextlib.nullcontext():
            model(leaf(4, 4)).sum().backward()
        assert fails or all(p.grad is not None for p in model.parameters())
