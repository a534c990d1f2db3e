"""torch's own functions and ours, side by side: torch is the oracle for results, counts, warnings and errors.

A program takes the module whose functions it shall use. What it returns, the warnings on the way and the error that
ends it must be the same for both. Where the installed torch is too old to answer as 2.15 does, `since` says so, and
`answer` holds what 2.15 answers; ours must give that on every torch.
"""

import contextlib
import functools
import inspect
import itertools
import pickle
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as theirs
from oracle import Counting, tensors
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import checkpointing
import checkpointing.torch_compat as ours
from checkpointing import checkpoint_scope, checkpointed, is_recomputing

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
MM = torch.ops.aten.mm.default
SIN = torch.ops.aten.sin.default
NAMES_OF_2_15 = {
    *("checkpoint", "checkpoint_sequential", "CheckpointError", "CheckpointFunction", "check_backward_validity"),
    *("detach_variable", "get_device_states", "set_device_states", "noop_context_fn", "set_checkpoint_early_stop"),
    *("set_checkpoint_debug_enabled", "DefaultDeviceType", "CheckpointPolicy", "SelectiveCheckpointContext"),
    *("create_selective_checkpoint_contexts", "SAC_IGNORED_OPS", "GraphExecGroup"),
}


# ---- programs


@dataclass(frozen=True)
class Case:
    """`answer` is a result, or the class of an error and a sentence in it."""

    program: Callable[[Any], Any]
    since: tuple[int, int] = (2, 11)
    answer: Any = None


CASES: dict[str, Case] = {}


def case(program=None, *, since=(2, 11), answer=None):
    """Put a program into the table."""

    def add(program):
        assert (since == (2, 11)) == (answer is None), "an old torch does not know the answer"
        CASES[program.__name__] = Case(program, since, answer)
        return program

    return add if program is None else add(program)


def leaf(*shape):
    """The same numbers every time."""
    return torch.randn(*(shape or (4, 4)), generator=torch.Generator().manual_seed(0)).requires_grad_()


def gradient(y, *inputs):
    return torch.autograd.grad(y.sum(), inputs)


def region(m, fn, *args, **options):
    """The variant that everybody should use."""
    return m.checkpoint(fn, *args, use_reentrant=False, **options)


def selective(m, *args, **kwargs):
    """What `context_fn` takes."""
    return functools.partial(m.create_selective_checkpoint_contexts, *args, **kwargs)


class Fickle:
    """A function that goes another way every second time."""

    def __init__(self, first, second):
        self.ways = [first, second]

    def __call__(self, x):
        self.ways.reverse()
        return self.ways[1](x)


class Square(torch.autograd.Function):
    """Saves an input, something in between and its output; forgets nothing when asked twice."""

    @staticmethod
    def forward(ctx, x, scale):
        middle = x * scale
        result = middle * x
        ctx.save_for_backward(x, middle, result)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx, grad):
        x, middle, _ = ctx.saved_tensors
        return grad * (middle + x * ctx.scale), None


def counted(steps):
    """The same steps, and how often each has begun."""
    counts = [0] * len(steps)

    def count(i, x):
        counts[i] += 1
        return steps[i](x)

    return [functools.partial(count, i) for i in range(len(steps))], counts


def counting(*steps):
    """A function that runs these one after the other, and how often each has begun."""
    steps, counts = counted(steps)
    return lambda x: functools.reduce(lambda x, step: step(x), steps, x), counts


# ---- results


@case
def positional_and_keyword_arguments(m):
    x, y = leaf(), leaf(4)
    return gradient(region(m, lambda x, *, y, n: (x * y).sin() ** n, x, y=y, n=2), x, y)


@case
def non_tensor_arguments_and_results(m):
    x = leaf()
    y, *others = region(m, lambda x, k, f, **more: (f(x) * k, None, "s", [k], more), x, 3, torch.sin, a={"b": 1})
    return gradient(y, x), others


@case
def tensors_in_containers(m):
    x, y = leaf(), leaf(4)
    return gradient(region(m, lambda a, b: (a[0] * b["y"]).sin().exp(), [x], {"y": y}), x, y)


@case
def containers_as_results(m):
    x = leaf()
    result = region(m, lambda x: {"a": x.sin(), "b": (x.cos(), [x.exp()])}, x)
    return gradient(result["a"] + result["b"][0] * result["b"][1][0], x)


@case
def an_argument_as_result(m):
    x = leaf()
    same, y = region(m, lambda x: (x, x.sin()), x)
    return same is x, gradient(y, x)


@case
def a_module_whose_input_needs_no_gradient(m):
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)
    region(m, linear, torch.ones(2, 4)).sin().sum().backward()
    return linear.weight.grad, linear.bias.grad


@case
def dropout(m):
    x = leaf()
    y = region(m, lambda x: F.dropout(x.sin(), 0.5).exp(), x)
    torch.rand(3)
    return gradient(y, x), y, torch.rand(1)


@case
def dropout_without_rng(m):
    x = leaf()
    y = region(m, lambda x: F.dropout(x.sin(), 0.5).exp(), x, preserve_rng_state=False)
    torch.rand(3)
    return gradient(y, x), y, torch.rand(1)


@case
def autocast_around_the_forward(m):
    x, seen = leaf(), []
    with torch.autocast("cpu", torch.bfloat16):
        y = region(m, lambda x: (seen.append((x @ x).dtype), (x @ x).sin())[1], x)
    return gradient(y.float(), x), seen


@case
def autocast_around_the_backward(m):
    x, seen = leaf(), []
    y = region(m, lambda x: (seen.append((x @ x).dtype), (x @ x).sin())[1], x)
    with torch.autocast("cpu", torch.bfloat16):
        return gradient(y, x), seen


@case
def autocast_off_inside(m):
    x, seen = leaf(), []

    def fn(x):
        with torch.autocast("cpu", enabled=False):
            y = x @ x
        seen.append(y.dtype)
        return y.sin()

    with torch.autocast("cpu", torch.bfloat16):
        y = region(m, fn, x)
    return gradient(y, x), seen


@case
def the_device_of_a_context(m):
    x, seen = leaf(), []

    def fn(x):
        seen.append(torch.empty(0).device.type)
        return x.sin().exp()

    with torch.device("meta"):
        y = region(m, fn, x)
    return gradient(y, x), seen


@case
def a_custom_function(m):
    x = leaf()
    return gradient(region(m, lambda x: Square.apply(x.sin(), 3).exp(), x), x)


@case
def second_derivatives(m):
    x = leaf()
    y = region(m, lambda x: x.sin().exp(), x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return gradient(first, x)


@case
def gradients_inside(m):
    x = leaf()

    def fn(x):
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * slope

    return gradient(region(m, fn, x), x)


@case
def nested_regions(m):
    x = leaf()
    outer, counts = counting(torch.sin, lambda x: region(m, lambda x: x.exp().cos(), x), torch.tanh)
    return gradient(region(m, outer, x), x), counts


@case
def threads_over_one_input(m):
    x, found = leaf(), [None] * 4

    def work(i):
        found[i] = gradient(region(m, lambda x: (x * (i + 1)).sin().exp(), x), x)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


@case
def replicas_in_threads_and_one_backward(m):
    """As `nn.DataParallel` does it: forwards in threads, backward in one."""
    torch.manual_seed(0)
    linear, parts, found = nn.Linear(4, 4), leaf(8, 4).chunk(2), [None] * 2

    def work(i):
        found[i] = region(m, linear, parts[i]).sin()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.cat(found).sum().backward()
    return linear.weight.grad, linear.bias.grad


@case
def without_grad_mode(m):
    runs = []
    with torch.no_grad():
        y = region(m, lambda x: (runs.append(1), x.sin())[1], leaf())
    return y, runs


@case
def in_inference_mode(m):
    with torch.inference_mode():
        return region(m, torch.sin, leaf()).is_inference()


# ---- how often, and up to where


@case
def one_recompute_for_each_backward(m):
    x = leaf()
    fn, counts = counting(torch.sin, torch.exp)
    y = region(m, fn, x).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    torch.autograd.grad(y, x)
    return counts


@case
def one_recompute_for_each_part_of_a_graph(m):
    x, runs = leaf(), []
    a, b = region(m, lambda x: (runs.append(1), (x.sin().exp(), x.cos().exp()))[1], x)
    return gradient(a, x), gradient(b, x), runs


@case
def nothing_saved_nothing_recomputed(m):
    x = leaf()
    fn, counts = counting(lambda x: x + 1)
    return gradient(region(m, fn, x), x), counts


@case
def saved_tensors_read_outside_of_a_backward(m):
    x = leaf()
    fn, counts = counting(torch.exp)
    y = region(m, fn, x)
    first, second = y.grad_fn._saved_result, y.grad_fn._saved_result
    y.sum().backward()
    return torch.equal(first, second), counts


def stops(m, switch, argument):
    """How often the last step begins; it saves nothing, so an early stop never gets there."""
    fn, counts = counting(torch.sin, torch.cos, torch.clone)
    around = contextlib.nullcontext() if switch == "no" else m.set_checkpoint_early_stop(switch)
    x = leaf()
    with around:
        y = region(m, fn, x, **argument)
    gradient(y, x)
    return counts


@case
def early_stop(m):
    return [
        stops(m, switch, argument)
        for switch in ("no", None, True, False)
        for argument in ({}, {"early_stop": True}, {"early_stop": False})
    ]


@case
def the_inner_early_stop_counts(m):
    with m.set_checkpoint_early_stop(False), m.set_checkpoint_early_stop(True):
        return stops(m, "no", {})


@case
def early_stop_after_an_error_inside(m):
    with contextlib.suppress(KeyError), m.set_checkpoint_early_stop(False):
        raise KeyError
    return stops(m, "no", {})


@case
def early_stop_as_a_decorator(m):
    decorated = m.set_checkpoint_early_stop(False)(lambda: stops(m, "no", {}))
    return decorated(), decorated()


@case
def a_group_of_backwards_shares_a_recompute(m):
    def run(context):
        x, runs = leaf(), []

        def fn(x):
            runs.append(1)
            y = x.sin().cos()
            return y, y.sin().cos()

        y, z = region(m, fn, x)
        with context:
            (at_y,) = torch.autograd.grad(z.sum(), y)
            (at_x,) = torch.autograd.grad(y, x, at_y)
        return at_x, runs

    return run(m.GraphExecGroup()), run(contextlib.nullcontext())


# ---- objects


@case
def arguments_are_the_very_objects(m):
    x, mask, others, seen = leaf(), torch.ones(4), [torch.zeros(4)], []
    product = x * 2
    given = (mask, others[0], product)

    def fn(product, mask, others, x):
        seen.append([a is b for a, b in zip((mask, others[0], product), given, strict=True)])
        return (product * mask + others[0]).exp() * x.sin()

    gradient(region(m, fn, product, mask, others=others, x=x), x)
    return seen


@case
def saved_tensors_are_the_very_objects(m):
    seen, mask = [], torch.ones(())

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask):
            ctx.save_for_backward(mask)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0] is mask)
            return grad, None

    x = leaf(())
    gradient(region(m, Saves.apply, x, mask), x)
    return seen


@case
def attributes_of_tensors(m):
    x, mask, seen = leaf(), torch.ones(4), []
    mask.kind = "causal"
    gradient(region(m, lambda x, mask: (seen.append(mask.kind), (x * mask).exp())[1], x, mask), x)
    return seen


# ---- sequences


def steps_of_seven(m, segments, use_reentrant):
    steps, counts = counted([torch.sin] * 7)
    x = leaf()
    y = m.checkpoint_sequential(steps, segments, x, use_reentrant=use_reentrant)
    y.sum().backward()
    return counts, x.grad


@case
def segments_of_a_sequence(m):
    return [steps_of_seven(m, n, reentrant) for n in (1, 2, 3, 4, 5, 7) for reentrant in (True, False)]


@case
def kinds_of_sequences(m):
    torch.manual_seed(0)
    layers, found = [nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh()], []
    for functions in (layers, tuple(layers), nn.Sequential(*layers), nn.ModuleList(layers)):
        torch.manual_seed(1)
        x = leaf()
        y = m.checkpoint_sequential(functions, 2, x, use_reentrant=False, preserve_rng_state=True)
        found.append((y, gradient(y, x)))
    return found


@case
def a_sequence_of_functions_of_tuples(m):
    x = leaf()
    steps = [lambda pair: (pair[0].sin(), pair[1].exp()), lambda pair: pair[0] * pair[1]]
    return gradient(m.checkpoint_sequential(steps, 2, (x, x * 2), use_reentrant=False), x)


@case
def unknown_keywords_of_a_sequence(m):
    return m.checkpoint_sequential([torch.sin], 1, leaf(), use_reentrant=False, foo=1, bar=2)


@case
def a_sequence_of_two_inputs(m):
    return m.checkpoint_sequential([torch.add], 1, leaf(), leaf(), use_reentrant=False)


# ---- the decorator form


@case(since=(2, 15), answer=[True, 3, True])
def a_decorated_function(m):
    @m.checkpoint(use_reentrant=False, early_stop=False)
    def fn(x, *, k=1):
        """What it does."""
        runs.append(1)
        return x.sin() * k

    x, runs = leaf(), []
    same = torch.equal(gradient(fn(x, k=3), x)[0], x.detach().cos() * 3)
    gradient(fn(x), x)
    return [same, len(runs) - 1, (fn.__name__, fn.__doc__) == ("fn", "What it does.")]


@case(since=(2, 15), answer=[True, True, True, True])
def a_decorated_method(m):
    class Thing(nn.Module):
        scale = 2.0

        @m.checkpoint(use_reentrant=False)
        def forward(self, x):
            return (x * self.scale).sin().exp()

        @classmethod
        @m.checkpoint(use_reentrant=False)
        def of_class(cls, x):
            return (x * cls.scale).sin().exp()

        @staticmethod
        @m.checkpoint(use_reentrant=False)
        def static(x):
            return (x * 2.0).sin().exp()

        applied = m.checkpoint(use_reentrant=False)(functools.partial(lambda k, x: (x * k).sin().exp(), 2.0))

    x = leaf()
    (want,) = gradient((x * 2.0).sin().exp(), x)
    thing = Thing()
    return [torch.equal(gradient(fn(x), x)[0], want) for fn in (thing, thing.of_class, thing.static, thing.applied)]


@case(since=(2, 15), answer=(ValueError, "Unexpected keyword arguments: foo,bar"))
def unknown_keywords_of_the_decorator(m):
    return m.checkpoint(use_reentrant=False, foo=1, bar=2)


@case(since=(2, 15), answer=(ValueError, "Unexpected keyword arguments: y"))
def keywords_of_a_decorated_reentrant_function(m):
    return m.checkpoint(use_reentrant=True)(torch.mul)(leaf(), y=2)


@case
def no_function(m):
    return m.checkpoint(None, leaf(), use_reentrant=False)


# ---- contexts


@case
def contexts_are_entered_around_both_runs(m):
    log, x = [], leaf()

    @contextlib.contextmanager
    def noting(name):
        log.append(f"enter {name}")
        yield
        log.append(f"exit {name}")

    y = region(m, lambda x: (log.append("fn"), x.sin())[1], x, context_fn=lambda: (noting("forward"), noting("again")))
    log.append("between")
    gradient(y, x)
    return log


class Suppresses:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        return True


def fails(x):
    raise ArithmeticError("no")


@case(since=(2, 13), answer=(RuntimeError, "the forward context provided by context_fn suppressed an exception"))
def a_context_that_suppresses_errors(m):
    return region(m, fails, leaf(), context_fn=lambda: (Suppresses(), contextlib.nullcontext()))


@case
def three_contexts(m):
    return region(m, torch.sin, leaf(), context_fn=lambda: (1, 2, 3))


@case
def no_context_function(m):
    return region(m, torch.sin, leaf(), context_fn=None)


@case
def contexts_with_debug(m):
    return region(m, torch.sin, leaf(), debug=True, context_fn=selective(m, [MM]))


@case
def contexts_with_debug_from_around(m):
    with m.set_checkpoint_debug_enabled(True):
        return region(m, torch.sin, leaf(), context_fn=selective(m, [MM]))


@case
def contexts_with_debug_switched_off(m):
    with m.set_checkpoint_debug_enabled(True), m.set_checkpoint_debug_enabled(False):
        return region(m, torch.sin, leaf(), debug=True, context_fn=selective(m, [MM]))


@case
def contexts_with_debug_left_alone(m):
    with m.set_checkpoint_debug_enabled(None):
        return region(m, torch.sin, leaf(), debug=True, context_fn=selective(m, [MM]))


# ---- errors


@case
def an_unknown_determinism_check(m):
    return region(m, torch.sin, leaf(), determinism_check="values")


@case
def an_unknown_determinism_check_without_grad_mode(m):
    with torch.no_grad():
        return region(m, torch.sin, leaf(), determinism_check="x")


@case
def no_determinism_check(m):
    x = leaf()
    y = region(m, Fickle(lambda x: x.sin().exp(), lambda x: x.cos().exp()), x, determinism_check="none")
    return gradient(y, x)


@case
def an_error_in_the_forward(m):
    return region(m, fails, leaf())


@case
def an_error_in_the_recompute(m):
    x = leaf()
    return gradient(region(m, Fickle(lambda x: x.sin().exp(), fails), x), x)


@case
def a_backward_after_an_error_in_the_recompute(m):
    x, ways = leaf(), iter([torch.exp, fails, torch.exp])
    y = region(m, lambda x: next(ways)(x.sin()), x).sum()
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(y, x, retain_graph=True)
    return torch.autograd.grad(y, x)


MISMATCHES = {
    "fewer tensors": (lambda x: x.sin().exp().sin(), lambda x: x.sin().exp()),
    "more tensors": (lambda x: x.sin(), lambda x: x.sin().exp().sin()),
    "no tensors": (lambda x: x.sin().exp(), lambda x: x.detach()),
    "another dtype": (lambda x: x.sin().exp(), lambda x: x.sin().double().exp()),
    "another shape": (lambda x: x.sin().exp(), lambda x: x[:2].sin().exp()),
}
for name, ways in MISMATCHES.items():
    for stop in (True, False):

        def program(m, ways=ways, stop=stop):
            x = leaf()
            return gradient(region(m, Fickle(*ways), x, early_stop=stop), x)

        CASES[f"{name}, {'with' if stop else 'without'} early stop"] = Case(program)


@case
def overlapping_backwards_in_a_group(m):
    x = leaf()
    y = region(m, lambda x: x.sin().cos(), x).sum()
    with m.GraphExecGroup():
        y.backward(retain_graph=True)
        y.backward()


@case
def a_group_in_a_group(m):
    with m.GraphExecGroup(), m.GraphExecGroup():
        pass


# ---- selective checkpointing


def saves(*ops, answer=ours.CheckpointPolicy.MUST_SAVE, otherwise=ours.CheckpointPolicy.PREFER_RECOMPUTE):
    """A policy function."""
    return lambda ctx, op, *args, **kwargs: answer if op in ops else otherwise


def two_products(x):
    return ((x @ x).sin() @ x).sigmoid()


SERIAL = itertools.count()  # names of operators, which are registered once

POLICIES = {
    "a list": [MM],
    "an empty list": [],
    "a bool": lambda ctx, op, *args, **kwargs: op is MM,
    "MUST_SAVE": saves(MM),
    "PREFER_SAVE": saves(MM, answer=ours.CheckpointPolicy.PREFER_SAVE),
    "PREFER_SAVE of everything": saves(otherwise=ours.CheckpointPolicy.PREFER_SAVE),
    "MUST_RECOMPUTE": saves(otherwise=ours.CheckpointPolicy.MUST_RECOMPUTE),
    "PREFER_RECOMPUTE": saves(),
    "MUST_CPU_OFFLOAD": saves(MM, answer=ours.CheckpointPolicy.MUST_CPU_OFFLOAD),
    "PREFER_CPU_OFFLOAD": saves(MM, answer=ours.CheckpointPolicy.PREFER_CPU_OFFLOAD),
}
for name, policy in POLICIES.items():

    def program(m, policy=policy):
        x = leaf()
        y = region(m, two_products, x, context_fn=selective(m, policy))
        with Counting() as counted:
            found = gradient(y, x)
        return found, {op: counted.ran[op] for op in ("mm", "sin", "sigmoid")}

    CASES[f"policy: {name}"] = Case(program)


@case(since=(2, 13), answer=[True, 7])
def every_second_product_is_kept(m):
    """A policy with a state is asked in the forward only."""
    x, asked = leaf(), [0]

    def fn(x):
        return ((x @ x) @ x @ x).sin()

    def policy(ctx, op, *args, **kwargs):
        asked[0] += op is MM
        return op is MM and asked[0] % 2 == 1

    y = region(m, fn, x, context_fn=selective(m, policy))
    with Counting() as counted:
        (found,) = gradient(y, x)
    return [torch.equal(found, gradient(fn(x), x)[0]), counted.ran["mm"]]


@case(since=(2, 13), answer=[(False, "Tensor", "aten.mm.default"), (False, "tuple", "aten.var_mean.correction")])
def what_a_policy_is_told(m):
    told, x = [], leaf()

    def policy(ctx, op, *args, **kwargs):
        told.append((ctx.is_recompute, type(ctx.op_output).__name__, str(op)))
        return False

    gradient(region(m, lambda x: torch.var_mean(x @ x)[0], x, context_fn=selective(m, policy)), x)
    return told


@case
def two_results_of_one_operator(m):
    x = leaf()
    kept = [torch.ops.aten.var_mean.correction]
    y = region(m, lambda x: torch.mul(*torch.var_mean(x)), x, context_fn=selective(m, kept))
    with Counting() as counted:
        found = gradient(y, x)
    return found, counted.ran["var_mean"]


@case
def views_are_kept(m):
    x, integers = leaf(), torch.arange(4)
    kept = [torch.ops.aten.view.default, torch.ops.aten.t.default]
    y = region(
        m, lambda x, i: (x.t().view(16).sin() * i.view(2, 2).sum()).exp(), x, integers, context_fn=selective(m, kept)
    )
    return gradient(y, x)


@case(since=(2, 13), answer=(RuntimeError, "Tensor cached during selective activation checkpoint has been mutated"))
def a_kept_result_that_is_written_in_place(m):
    """As `torch.selu_` of a kept product does."""
    x = leaf()
    y = region(m, lambda x: x.sin().mul_(2).cos().exp(), x, context_fn=selective(m, [SIN]))
    return gradient(y, x)


@case(since=(2, 13), answer=[True])
def a_kept_result_that_may_be_written_in_place(m):
    """On the user's own risk: the recompute doubles once more what has been doubled."""
    x = leaf()
    contexts = selective(m, [SIN], allow_cache_entry_mutation=True)
    (found,) = gradient(region(m, lambda x: x.sin().mul_(2).cos().exp(), x, context_fn=contexts), x)
    doubled = 4 * x.sin()
    return [torch.allclose(found, doubled.cos().exp() * -doubled.sin() * 2 * x.cos())]


@case(since=(2, 13), answer=(RuntimeError, "Trying to backward an extra time"))
def a_second_backward(m):
    x = leaf()
    y = region(m, two_products, x, context_fn=selective(m, [MM])).sum()
    y.backward(retain_graph=True)
    y.backward()


@case(since=(2, 13), answer=(RuntimeError, "aten.tan.default encountered during backward but not found in storage"))
def an_operator_that_the_forward_did_not_run(m):
    x = leaf()
    fn = Fickle(lambda x: (x @ x).sin().exp(), lambda x: x.tan().sin().exp())
    return gradient(region(m, fn, x, context_fn=selective(m, [MM])), x)


@case(since=(2, 13), answer=(RuntimeError, "aten.sin.default invocation index 1 encountered during backward"))
def an_operator_that_runs_more_often(m):
    x = leaf()
    fn = Fickle(lambda x: x.sin().exp().cos(), lambda x: x.sin().sin().exp().cos())
    return gradient(region(m, fn, x, context_fn=selective(m, [MM])), x)


@case
def a_policy_that_lists_packets(m):
    return m.create_selective_checkpoint_contexts([torch.ops.aten.mm])


@case
def a_policy_that_lists_numbers(m):
    return m.create_selective_checkpoint_contexts([3])


@case
def a_policy_that_is_a_number(m):
    return m.create_selective_checkpoint_contexts(3)


@case
def regions_with_policies_nest(m):
    x = leaf()

    def outer(x):
        return region(m, two_products, x, context_fn=selective(m, [MM])).exp() @ x

    return gradient(region(m, outer, x), x)


@case
def a_custom_operator_is_kept(m):
    with torch.library._scoped_library("checkpointing_test", "FRAGMENT"):
        runs, name = [], f"sine_and_two_{next(SERIAL)}"

        @torch.library.custom_op(f"checkpointing_test::{name}", mutates_args=())
        def sine_and_two(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            runs.append(1)
            return x.sin(), 2

        sine_and_two.register_autograd(
            lambda ctx, grad, _: grad * ctx.saved_tensors[0].cos(),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        )
        x, op = leaf(), getattr(torch.ops.checkpointing_test, name)
        y = region(m, lambda x: (op(x)[0] * x.exp()).sin(), x, context_fn=selective(m, [op.default]))
        return gradient(y, x), runs


# ---- selective checkpointing under the hooks of the user


def under_hooks(where, respect):
    """What the hooks see, where they enclose regions in this way."""

    def program(m):
        seen, x = [], leaf() * 1

        def hooks():
            return torch.autograd.graph.saved_tensors_hooks(
                lambda t: (seen.append(f"pack {tuple(t.shape)}"), t * 1)[1], lambda t: (seen.append("unpack"), t)[1]
            )

        def fn(x):
            return (x @ x).sin().exp()

        def kept(fn, x):
            return region(m, fn, x, context_fn=selective(m, [MM]), respect_saved_tensors_hooks=respect)

        def within(run):
            def call(x):
                with hooks():
                    return run(x)

            return call

        y = {
            "around": within(lambda x: kept(fn, x)),
            "inside": lambda x: kept(within(fn), x),
            "around two regions": within(lambda x: region(m, lambda x: kept(fn, x).sin(), x)),
            "around two regions with policies": within(lambda x: kept(lambda x: kept(fn, x) @ x, x)),
            "between two regions": lambda x: region(m, within(lambda x: kept(fn, x)), x),
            "around the backward": lambda x: kept(fn, x),
            "around no policy": within(lambda x: region(m, fn, x, respect_saved_tensors_hooks=respect)),
            "nowhere": lambda x: kept(fn, x),
        }[where](x)
        found = within(lambda y: gradient(y, x))(y) if where == "around the backward" else gradient(y, x)
        return found, seen

    def tell(m):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _, seen = program(m)
        assert {w.category for w in caught} <= {FutureWarning}
        return [sum("pack (" in text for text in seen), seen.count("unpack"), len(caught)]

    return tell


# Where the hooks are; how many tensors they pack, unpack, and warnings: by default, respected, not respected.
SEEN = {
    "around": ([1, 1, 1], [2, 2, 0], [1, 1, 0]),
    "inside": ([4, 4, 1], [5, 4, 0], [4, 4, 0]),
    "around two regions with policies": ([1, 1, 3], [4, 3, 0], [1, 1, 0]),
    "between two regions": ([1, 1, 1], [2, 2, 0], [1, 1, 0]),
    "around the backward": ([0, 0, 0], [0, 0, 0], [0, 0, 0]),
    "around no policy": ([1, 1, 0], [1, 1, 0], [1, 1, 0]),
    "nowhere": ([0, 0, 0], [0, 0, 0], [0, 0, 0]),
}
if VERSION >= (2, 14):
    for where, answers in SEEN.items():
        for respect, answer in zip((None, True, False), answers, strict=True):
            CASES[f"hooks {where}, respect={respect}"] = Case(under_hooks(where, respect), (2, 15), answer)


# ---- the reentrant variant


def reentrant(m, fn, *args, **options):
    return m.checkpoint(fn, *args, use_reentrant=True, **options)


@case
def reentrant_gradients(m):
    x, y = leaf(), leaf(4)
    first, *others = reentrant(m, lambda x, y, k: ((x * y).sin() * k, k, None, "s"), x, y, 3)
    first.sum().backward()
    return x.grad, y.grad, others


@case
def reentrant_recomputes_everything_once(m):
    x = leaf()
    fn, counts = counting(torch.sin, torch.exp, torch.clone)
    y = reentrant(m, fn, x).sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad, counts


@case
def reentrant_dropout(m):
    x, found = leaf(), []
    for preserve in (True, False):
        y = reentrant(m, lambda x: F.dropout(x.sin(), 0.5), x, preserve_rng_state=preserve)
        torch.rand(3)
        y.sum().backward()
        found.append((y, x.grad.clone(), torch.rand(1)))
    return found


@case
def reentrant_autocast(m):
    x, seen = leaf(), []
    with torch.autocast("cpu", torch.bfloat16):
        y = reentrant(m, lambda x: (seen.append((x @ x).dtype), x @ x)[1], x)
    y.float().sum().backward()
    return x.grad, seen


@case
def reentrant_regions_nest(m):
    x = leaf()
    reentrant(m, lambda x: reentrant(m, torch.sin, x).exp() * region(m, torch.cos, x), x).sum().backward()
    return x.grad


@case
def reentrant_inside_of_containers_nothing_differentiates(m):
    x, y = leaf(), leaf(4)
    reentrant(m, lambda x, others: (x * others[0]).sin(), x, [y]).sum().backward()
    return x.grad, y.grad


@case
def reentrant_and_a_detached_result(m):
    x = leaf()
    y, detached = reentrant(m, lambda x: (x.sin(), x.detach()), x)
    y.sum().backward()
    return x.grad, detached.requires_grad


@case
def reentrant_and_nothing_but_detached_results(m):
    reentrant(m, lambda x: x.detach(), leaf()).sum().backward()


@case
def reentrant_where_nothing_requires_grad(m):
    return reentrant(m, torch.sin, torch.ones(2)).requires_grad


@case
def reentrant_keywords(m):
    return reentrant(m, torch.mul, leaf(), other=2)


@case
def reentrant_and_autograd_grad(m):
    x = leaf()
    return gradient(reentrant(m, torch.sin, x), x)


@case
def reentrant_and_backward_with_inputs(m):
    x = leaf()
    reentrant(m, torch.sin, x).sum().backward(inputs=[x])


@case
def reentrant_twice_without_retain_graph(m):
    y = reentrant(m, torch.sin, leaf()).sum()
    y.backward()
    y.backward()


@case
def reentrant_and_an_argument_changed_in_place(m):
    x = leaf() * 1
    y = reentrant(m, torch.sin, x).sum()
    x.add_(1)
    y.backward()


ONLY_WITHOUT = (ValueError, "`respect_saved_tensors_hooks` is only supported when use_reentrant=False")


@case(since=(2, 15), answer=ONLY_WITHOUT)
def reentrant_contexts(m):
    return reentrant(m, torch.sin, leaf(), context_fn=selective(m, [MM]))


@case(since=(2, 15), answer=ONLY_WITHOUT)
def reentrant_debug(m):
    return reentrant(m, torch.sin, leaf(), debug=True)


@case(since=(2, 15), answer=ONLY_WITHOUT)
def reentrant_and_hooks_to_respect(m):
    return reentrant(m, torch.sin, leaf(), respect_saved_tensors_hooks=False)


@case
def reentrant_ignores_the_other_switches(m):
    with m.set_checkpoint_debug_enabled(True), m.set_checkpoint_early_stop(False):
        return reentrant(m, torch.sin, leaf(), determinism_check="x", early_stop=False)


@case
def the_variant_left_out(m):
    return m.checkpoint(torch.sin, leaf())


@case
def the_variant_left_out_of_a_sequence(m):
    return m.checkpoint_sequential([torch.sin, torch.cos], 2, leaf())


@case
def the_function_class_itself(m):
    x = leaf()
    m.CheckpointFunction.apply(lambda x, k: x.sin() * k, True, x, 2).sum().backward()
    return x.grad


# ---- small helpers


@case
def detached_variables(m):
    x = leaf()
    parts = m.detach_variable((x, 3, x.detach(), x * 2))
    return [(p.requires_grad, p.is_leaf, p is x) if isinstance(p, torch.Tensor) else p for p in parts]


@case(since=(2, 13), answer=(RuntimeError, "Only tuple of tensors is supported. Got Unsupported input type: list"))
def a_list_of_variables_to_detach(m):
    return m.detach_variable([leaf()])


@case
def validity_of_inputs(m):
    return m.check_backward_validity([torch.ones(2), 3]), m.check_backward_validity([leaf(), 3])


@case
def device_states(m):
    m.set_device_states([], [])
    return m.get_device_states(leaf(), {"a": torch.ones(2)}), m.DefaultDeviceType.get_device_type()


@case
def contexts_that_do_nothing(m):
    return [type(context).__name__ for context in m.noop_context_fn()]


# ---- the test of them all


def plain_value(value):
    """Something that can be compared; tensors bit for bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.requires_grad, value.detach().tolist()
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, dict):
        return {key: plain_value(part) for key, part in value.items()}
    return value


@dataclass(frozen=True)
class Observed:
    result: Any
    error: tuple[type[Exception], str] | None  # not itself, whose frames hold what torch 2.11 has entered
    warnings: list[warnings.WarningMessage]


def observe(program, module):
    """What a program does with the functions of a module."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result, error = plain_value(program(module)), None
        except Exception as failed:
            result, error = None, (type(failed), str(failed))
    return Observed(result, error, caught)


def first_sentence(text):
    return text.strip().splitlines()[0].split(". ")[0].split(": [")[0].rstrip(".")


def spoken(warning):
    """The text; of an older torch only the beginning, since the threats have changed."""
    text = str(warning.message)
    return text if VERSION >= (2, 15) else text.split(". ")[0]


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_torch(name):
    """Results, errors (class and first sentence), and warnings (class, text, and the user's line)."""
    case = CASES[name]
    have = observe(case.program, ours)
    if case.answer is not None:
        if have.error is None:
            assert have.result == plain_value(case.answer)
        else:
            assert issubclass(have.error[0], case.answer[0]) and case.answer[1] in have.error[1]
    if case.since <= VERSION:
        want = observe(case.program, theirs)
        assert have.result == want.result
        assert (have.error is None) == (want.error is None), have.error or want.error
        if want.error is not None:
            assert issubclass(have.error[0], want.error[0]), have.error
            assert first_sentence(want.error[1]) in have.error[1]
        said = [[(w.category, spoken(w)) for w in seen.warnings] for seen in (have, want)]
        assert said[0] == said[1]
    assert {w.filename for w in have.warnings} <= {__file__}


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.since > (2, 11)])
def test_answers_of_newer_torches_are_written_down(name):
    """So that ours is held to them on every torch."""
    assert CASES[name].answer is not None


# ---- better than torch


def test_saved_tensors_may_be_read_twice():
    """torch raises 'already unpacked once'; a custom Function's tensors stay until its backward has run."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, grad):
            first, second = ctx.saved_tensors, ctx.saved_tensors
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            return grad * ctx.saved_tensors[1]

    x = leaf()
    fn, counts = counting(torch.sin, Twice.apply)
    assert torch.equal(gradient(region(ours, fn, x), x)[0], gradient(x.sin().exp(), x)[0])
    assert counts == [2, 2]


@pytest.mark.parametrize("segments", [0, -1, 3])
def test_a_sequence_is_cut_into_segments_that_exist(segments):
    """torch divides by zero, or runs everything in one."""
    with pytest.raises(ValueError, match=r"between 1 and the number of functions \(2\)"):
        ours.checkpoint_sequential([torch.sin, torch.cos], segments, leaf(), use_reentrant=False)


def test_an_argument_changed_in_place_is_named():
    """torch raises autograd's error for positional tensors and computes something else for all others."""
    for hand_over in (lambda x: ((x,), {}), lambda x: ((), {"x": x}), lambda x: (([x],), {})):
        x = leaf() * 1
        args, kwargs = hand_over(x)
        y = region(ours, lambda x: (x[0] if isinstance(x, list) else x).sin().exp(), *args, **kwargs)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_switches_stay_in_their_thread():
    """torch's are global variables."""
    found = []
    with ours.set_checkpoint_early_stop(False):
        worker = threading.Thread(target=lambda: found.append(stops(ours, "no", {})))
        worker.start()
        worker.join()
    assert found == [[2, 2, 1]]


def test_torchs_own_switches_count_too():
    """Somebody who has changed one import still calls the other functions of torch's module."""
    with theirs.set_checkpoint_early_stop(False):
        assert stops(ours, "no", {}) == [2, 2, 2]
        with ours.set_checkpoint_early_stop(True):
            assert stops(ours, "no", {}) == [2, 2, 1]
    with theirs.set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match="debug=True is incompatible"):
        region(ours, torch.sin, leaf(), context_fn=selective(ours, [MM]))


@pytest.mark.parametrize("grouped", [True, False])
def test_a_group_shares_a_replay_too(grouped):
    """The window of the first backward holds what the second one needs, too."""
    x = leaf()
    with checkpoint_scope() as scope:
        y = x.sin().cos()
        z = y.sin().cos()
    with ours.GraphExecGroup() if grouped else contextlib.nullcontext():
        (at_y,) = torch.autograd.grad(z.sum(), y)
        (at_x,) = torch.autograd.grad(y, x, at_y)
    assert torch.equal(at_x, gradient(x.sin().cos().sin().cos(), x)[0])
    assert (scope.stats.replays, scope.stats.ops_replayed) == ((1, 3) if grouped else (2, 4))


@pytest.mark.parametrize("door", [checkpointed, checkpointed(backend="replay")])
def test_backwards_of_other_regions_may_overlap_in_a_group(door):
    """Only the drop-in refuses that, as torch does."""
    x = leaf()
    y = door(lambda x: x.sin().cos())(x).sum()
    with ours.GraphExecGroup():
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(y, x)[0])


# ---- errors in full


@pytest.mark.parametrize("debug", ["argument", "around"])
@pytest.mark.parametrize("name", MISMATCHES)
def test_debug_shows_the_operators_of_both_runs(name, debug):
    """With the lines that led to them; torch's headings, and its error as the cause."""
    x, fn = leaf(), Fickle(*MISMATCHES[name])
    with ours.set_checkpoint_debug_enabled(True if debug == "around" else None):
        y = region(ours, fn, x, debug=debug == "argument", early_stop=False)
    with pytest.raises(ours.CheckpointError) as caught:
        y.sum().backward()
    text = str(caught.value)
    for phrase in (
        "An error happened while unpacking tensors",
        "Operations executed during the original forward",
        "Operations executed during recomputation",
        "You are seeing this error because you passed `debug=True` to checkpoint",
    ):
        assert phrase in text
    forward, recompute = text.split("Operations executed during ")[1:]
    assert "float32[4, 4] = aten.sin.default($" in forward
    assert f"{__file__}:" in forward
    assert ("aten.sin" in recompute) is (name != "no tensors")
    assert first_sentence(str(caught.value.__cause__)) in text
    assert isinstance(caught.value.__cause__, ours.CheckpointError)


def test_debug_shows_the_recompute_that_failed():
    """Not those before it."""
    x, ways = leaf(), iter([torch.sin, torch.sin, torch.sin, torch.Tensor.double])
    y = region(ours, lambda x: next(ways)(x).exp(), x, debug=True).sum()
    for _ in range(2):
        torch.autograd.grad(y, x, retain_graph=True)
    with pytest.raises(ours.CheckpointError) as caught:
        y.backward()
    forward, recompute = str(caught.value).split("Operations executed during ")[1:]
    assert "aten.sin" in forward and "aten.sin" not in recompute and recompute.count("aten.exp") == 1


def test_debug_says_nothing_when_nothing_is_wrong(capfd):
    """Neither output nor other gradients."""
    x = leaf()
    assert torch.equal(
        gradient(region(ours, lambda x: x.sin().exp(), x, debug=True), x)[0], gradient(x.sin().exp(), x)[0]
    )
    assert capfd.readouterr() == ("", "")


def test_errors_count_tensors_as_torch_does():
    """The numbers under the first sentence, too."""
    for name in ("fewer tensors", "no tensors", "another dtype", "another shape"):
        texts = []
        for m in (theirs, ours):
            x = leaf()
            with pytest.raises(theirs.CheckpointError) as caught:
                gradient(region(m, Fickle(*MISMATCHES[name]), x, early_stop=False), x)
            texts.append(
                [line for line in str(caught.value).splitlines() if line.startswith(("Number", "saved", "recomp"))]
            )
        assert texts[0] == texts[1] and texts[0]


def test_an_accelerator_first_used_in_a_region_is_refused(monkeypatch):
    """Its random state from before can't be known; torch's error."""
    module = types.SimpleNamespace(_initialized=False)
    monkeypatch.setattr("checkpointing._torch._device_module", module)

    def wakes(x):
        module._initialized = True
        return x.sin()

    with pytest.raises(RuntimeError, match="device state was initialized in the forward pass of a Checkpoint"):
        region(ours, wakes, leaf())
    region(ours, wakes, leaf())
    module._initialized = False
    region(ours, wakes, leaf(), preserve_rng_state=False)


# ---- the module


def test_every_public_name_of_torch_is_there():
    """As of 2.15 and of the installed torch; data and enums are torch's own objects."""
    assert set(ours.__all__) == NAMES_OF_2_15
    assert set(theirs.__all__) <= NAMES_OF_2_15
    assert all(hasattr(ours, name) for name in NAMES_OF_2_15)
    for name in (
        *("CheckpointPolicy", "SelectiveCheckpointContext", "GraphExecGroup", "DefaultDeviceType", "SAC_IGNORED_OPS"),
        *("noop_context_fn", "get_device_states", "set_device_states"),
    ):
        assert getattr(ours, name) is getattr(theirs, name)
    assert issubclass(ours.CheckpointError, theirs.CheckpointError)
    assert checkpointing.checkpoint is ours.checkpoint
    assert checkpointing.checkpoint_sequential is ours.checkpoint_sequential


def test_private_names_of_torch_are_there():
    """Other people's code imports those, too; what exists nowhere is an error."""
    assert ours._infer_device_type(torch.ones(2)) == theirs._infer_device_type(torch.ones(2))
    assert ours._CachingTorchDispatchMode is theirs._CachingTorchDispatchMode
    with pytest.raises(AttributeError):
        ours._no_such_name  # noqa: B018
    with pytest.raises(AttributeError):
        ours.no_such_name  # noqa: B018


def test_signatures_are_those_of_2_15():
    """Names, order, kinds and defaults."""
    parameters = inspect.signature(ours.checkpoint).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert list(parameters) == ["function", "args", *list(defaults)[1:], "kwargs"]
    assert defaults == {
        "function": None,
        "use_reentrant": None,
        "preserve_rng_state": True,
        "context_fn": theirs.noop_context_fn,
        "determinism_check": "default",
        "debug": False,
        "early_stop": True,
        "respect_saved_tensors_hooks": None,
    }
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(defaults)[1:])
    for name in ("checkpoint_sequential", "create_selective_checkpoint_contexts", "detach_variable"):
        want, have = (inspect.signature(getattr(m, name)).parameters for m in (theirs, ours))
        assert [(p.name, p.kind, p.default) for p in have.values()] == [
            (p.name, p.kind, p.default) for p in want.values()
        ]


def test_the_decorator_can_be_pickled():
    """As torch's can."""
    again = pickle.loads(pickle.dumps(ours.checkpoint(use_reentrant=False)))
    x = leaf()
    assert torch.equal(gradient(again(torch.sin)(x), x)[0], x.detach().cos())


@pytest.mark.parametrize("form", ["call", "decorator", "sequence", "torch's wrapper"])
def test_warnings_point_at_the_users_line(form):
    """Not at torch's or ours, which Python's filters would show once and for all."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    call = {
        "call": lambda: ours.checkpoint(torch.sin, leaf()),
        "decorator": lambda: ours.checkpoint()(torch.sin)(leaf()),
        "sequence": lambda: ours.checkpoint_sequential([torch.sin, torch.cos], 2, leaf()),
        "torch's wrapper": lambda: checkpoint_wrapper(nn.Tanh(), checkpoint_fn=ours.checkpoint)(leaf()),
    }[form]
    with pytest.warns(UserWarning, match="the use_reentrant parameter should be passed explicitly") as caught:
        call()
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, call.__code__.co_firstlineno)]


def test_regions_of_torch_and_ours_nest():
    """Either may be the outer one."""
    x = leaf()
    (want,) = gradient(x.sin().exp().cos(), x)
    for outer, inner in ((theirs, ours), (ours, theirs)):
        y = region(outer, lambda x: region(inner, lambda x: x.sin().exp(), x).cos(), x)  # noqa: B023
        assert torch.equal(gradient(y, x)[0], want)


def test_a_function_can_tell_that_it_is_recomputed():
    """In both variants."""
    for reentrant in (True, False):
        seen = []
        x = leaf()
        y = ours.checkpoint(lambda x: (seen.append(is_recomputing()), x.sin())[1], x, use_reentrant=reentrant)  # noqa: B023
        y.sum().backward()
        assert seen == [False, True]


def test_a_function_mode_sees_both_runs_or_neither():
    """What was active around the forward is active in the recompute; torch forgets it."""

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.sin else result

    x = leaf()
    with Doubles():
        y = region(ours, lambda x: torch.sin(x).exp(), x)
    assert torch.equal(gradient(y, x)[0], gradient((torch.sin(x) * 2).exp(), x)[0])


@pytest.mark.parametrize("theirs_too", [False, True])
def test_contexts_are_torchs_classes_and_may_be_torchs(theirs_too):
    """Other code asks whether the mode of a region is one of those; torch's own contexts work in our regions."""
    m, seen, x = theirs if theirs_too else ours, [], leaf()

    def fn(x):
        seen.append(type(torch.utils._python_dispatch._get_current_dispatch_mode()))
        return two_products(x)

    y = region(ours, fn, x, context_fn=selective(m, [MM]))
    with Counting() as counted:
        found = gradient(y, x)
    assert torch.equal(found[0], gradient(two_products(x), x)[0])
    assert counted.ran["mm"] == 4  # two for each of the products in backward
    assert issubclass(seen[0], theirs._CachingTorchDispatchMode)
    assert issubclass(seen[1], theirs._CachedTorchDispatchMode)


@pytest.mark.parametrize("way", ["dropped", "backward", "retained"])
def test_kept_tensors_go_when_they_are_used(no_gc, way):
    """Or with the graph; no cycle holds them."""
    x = leaf()
    with Held() as holding:
        y = region(ours, lambda x: (x @ x).sin().exp(), x, context_fn=selective(ours, [MM])).sum()
        assert holding.nbytes == x.nbytes + y.nbytes
        if way != "dropped":
            y.backward(retain_graph=way == "retained")
            x.grad = None
        if way != "retained":
            del y
    assert holding.nbytes == (4 if way == "retained" else 0)


def test_objects_that_lead_to_the_whole_program(no_gc):
    """A closure over `self` of a test case or a trainer: found is what is near, in bounded time."""

    class Link:
        def __init__(self, last):
            self.call = lambda: last

    link = None
    for _ in range(3000):
        link = Link(link)
    x = leaf()
    assert torch.equal(
        gradient(region(ours, lambda x: (link, x.sin())[1].exp(), x), x)[0], gradient(x.sin().exp(), x)[0]
    )


# ---- memory


class Held(TorchDispatchMode):
    """The bytes of the storages that operators made while it was entered and that live."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tensors([args, kwargs or {}])}
        for tensor in tensors([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self.made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    @property
    def nbytes(self):
        return sum(nbytes for ref, nbytes in self.made if not ref.expired())


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("offloads", [False, True])
def test_as_many_bytes_are_held_as_with_torch(no_gc, use_reentrant, offloads):
    """Of each region its input, or the copy that hooks have made of it, and nothing of what happens inside."""
    layer = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))
    for m in (theirs, ours):
        x = leaf(8, 8)
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
        with Held() as holding:
            with hooks if offloads else contextlib.nullcontext():
                y = x * 1
                for _ in range(3):
                    y = m.checkpoint(layer, y, use_reentrant=use_reentrant)
            assert holding.nbytes == 4 * x.nbytes
            y.sum().backward()
            layer.zero_grad()
            del y
            assert holding.nbytes == x.grad.nbytes


@pytest.mark.parametrize("way", ["dropped", "backward", "retained", "failed"])
def test_a_graph_dies_with_its_last_reference(no_gc, way):
    """No cycle, whatever became of it."""
    x = leaf()
    with Held() as holding:
        mask = torch.ones(4)
        y = region(ours, lambda x, mask: (x * mask).sin().exp(), x * 2, mask).sum()
        if way in ("backward", "retained"):
            y.backward(retain_graph=way == "retained")
        if way == "failed":
            mask.add_(1)
            with pytest.raises(RuntimeError):
                y.backward()
    x.grad = None
    del y, mask
    assert holding.nbytes == 0
