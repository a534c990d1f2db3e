"""Every operator of torch's operator database, bit for bit, without a skip list.

Where a region differs from plain code, plain code runs once more, with other garbage in freshly
allocated memory: what differs there, too, is not deterministic by itself. By default one sample of
each operator; `CHECKPOINTING_OPS=all` runs every one of them, of every kind of number.
"""

import functools
import gc
import os
import warnings

import oracle
import pytest
import torch
from oracle import REGIONS, REPLAY, PassThrough, leaves, tensors, words
from torch import Tensor
from torch.utils._pytree import tree_map_only

common = pytest.importorskip("torch.testing._internal.common_methods_invocations")
pytestmark = pytest.mark.filterwarnings("ignore")

SHARDS = 16
ALL = os.environ.get("CHECKPOINTING_OPS") == "all"
# By default replay in one form, and a rerun by turns.
WHERE = [("replay", "rerun"), ("scope",), ("planned",), ("replay",), ("scope",), ("planned",)]
if ALL:
    WHERE = [("rerun", "replay", "scope", "planned")]
F64, C128, F32, BF16 = torch.float64, torch.complex128, torch.float32, torch.bfloat16
KINDS = ("unary", "binary", "pointwise", "reduce", "other")
LISTS = [op for kind in KINDS for op in getattr(common, f"foreach_{kind}_op_db")]


def dtypes_of(op, number):
    """float64 always, the others for a sample of operators."""
    supported = op.supported_dtypes("cpu")
    if F64 in supported:
        yield F64
    if C128 in supported and (ALL or number % 10 == 0 or F64 not in supported):
        yield C128
    if number % 13 == 0:
        yield from (d for d in (F32, BF16) if d in supported)
    if not supported & {F64, C128}:
        yield from sorted(supported, key=str)[:1]


def samples_of(op, dtype, grad):
    """All of an operator's samples, or the one in the middle."""
    oracle.seed(0)
    samples = list(op.sample_inputs_func(op, "cpu", dtype, grad))
    return samples if ALL else samples[len(samples) // 2 :][:1]


mapped = functools.partial(tree_map_only, Tensor)


def fresh(tensor):
    """A new leaf with the same bits and geometry."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.no_grad():
        base = tensor.detach()
        new = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device)
        new = base.clone() if 0 in new.stride() and new.numel() > 1 else new.copy_(base)
    return new.requires_grad_(tensor.requires_grad)


def dropped(tensor):
    """In place of a leaf, a copy that the region makes and that it must make again."""
    return tensor.clone() if tensor.requires_grad and tensor.layout == torch.strided else tensor


def squared(result):
    """The results, used once more, and whatever else is returned: numbers, truth values."""
    parts = result if isinstance(result, (list, tuple)) else [result]
    others = [part for part in parts if not isinstance(part, Tensor)]
    is_open = lambda t: t.layout == torch.strided and (t.is_floating_point() or t.is_complex())
    return [t * t if is_open(t) else t for t in tensors(result)] + others


def programs(op, sample, number):
    """The operator on arguments that are dropped, or on inputs."""

    def functional(input, args, kwargs):
        if number % 2 == 0:
            input, args, kwargs = mapped(dropped, [input, args, kwargs])
        return squared(op(input, *args, **kwargs))

    def inplace(input, args, kwargs):
        input = mapped(dropped, input)
        return squared(op.inplace_variant(input, *args, **kwargs)) + squared(input)

    def out(input, args, kwargs):
        with torch.no_grad():
            target = mapped(torch.empty_like, op(input, *args, **kwargs))
            op(input, *args, **kwargs, out=target)
        x = next(t for t in tensors([input, args, kwargs]) if t.requires_grad).sum()
        return [x * t if t.layout == torch.strided else t for t in tensors(target)]

    yield "function", functional
    is_list = isinstance(sample.input, list)
    can_write = isinstance(sample.input, Tensor) or is_list
    is_wider = getattr(sample, "broadcasts_input", False)
    if op.inplace_variant is not None and can_write and not is_wider:
        yield "in-place", inplace
    if getattr(op, "supports_out", False) and not is_list and (ALL or number == 0):
        yield "out=", out


STATISTICS = words("""
    native_batch_norm _native_batch_norm_legit _batch_norm_with_update nn.functional.instance_norm
    nn.functional.batch_norm
""")


def check(op, dtype, notes, turn):
    where = WHERE[turn % len(WHERE)]
    grad = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    # A rerun writes running statistics that are arguments again: kernels leave no trace.
    where = [door for door in where if door != "rerun" or op.name not in STATISTICS]
    for number, sample in enumerate(samples_of(op, dtype, grad)):
        arguments = [sample.input, list(sample.args), sample.kwargs]
        for variant, function in programs(op, sample, number):

            def program(region, *leaves, fn=function, args=arguments):
                queue = iter(leaves)
                return region(fn, *mapped(lambda _: next(queue), args))

            make = lambda arguments=arguments: tuple(tensors(mapped(fresh, arguments)))
            for door, wrong in compare(program, make, where, variant == "function"):
                notes.append(f"{op.name} {dtype} #{number} {variant} {door} {wrong}")


def compare(program, make, where, must_run):
    def observed(region, backward, byte):
        with oracle.garbage_in_fresh_memory(byte):
            seen = oracle.outcome(program, region, make, backward)
        error = seen.pop("error", None)
        if error is not None:
            error.__traceback__ = None
        return seen

    backward = "second"
    want = observed(REGIONS["plain"], backward, 0x55)
    if "exception" in want:
        if not must_run:
            return
        backward = "first"  # not differentiable twice
        want = observed(REGIONS["plain"], backward, 0x55)
    for door in where:
        got = observed(REGIONS[door], backward, 0x3A)
        if "exception" in want and got.get("exception") == want["exception"]:
            continue
        wrong = set(oracle.differences(want, got))
        if not wrong:
            continue
        wrong -= set(oracle.differences(want, observed(REGIONS["plain"], backward, 0xC3)))
        if wrong and door != "rerun" and "outputs" in wrong and "exception" not in got:
            # Some composite operators take another way in any dispatch mode, in torch itself.
            with PassThrough():
                wrong -= set(oracle.differences(want, observed(REGIONS["plain"], backward, 0x55)))
        if wrong:
            error = f"{got['exception']}: {got['message'][:300]}" if "exception" in got else ""
            yield door, f"{error or sorted(wrong)} (plain: {want.get('exception')})"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operator(shard):
    """Outputs, gradients of two orders and the random stream."""
    notes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, op in enumerate([*common.op_db, *LISTS]):
            if number % SHARDS == shard:
                for dtype in dtypes_of(op, number):
                    check(op, dtype, notes, number // SHARDS)
    gc.collect()
    assert not notes, "\n".join([f"{len(notes)} of them:", *notes])


def fused(name, p, g, s):
    """A step of an optimizer: of a parameter with its gradient and three moments."""
    common = {"lr": 0.1, "weight_decay": 0.1, "maximize": False}
    if name == "sgd":
        more = {"momentum": 0.9, "dampening": 0.0, "nesterov": True, "is_first_step": False}
        torch._fused_sgd_([p], [g], [s[0]], **common, **more)
    else:
        more = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": True}
        steps = [torch.ones(())]
        torch._fused_adamw_([p], [g], [s[0]], [s[1]], [s[2]], steps, **common, **more)


@pytest.mark.parametrize("door", REPLAY)
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_of_fused_optimizers(name, where, door):
    """They write several tensors at once, of the region or from before it, once."""

    def program(region, x, y):
        p, s = y.detach() * 1, torch.linspace(0, 1, 72, dtype=x.dtype).view(3, 4, 6)
        state = s.clone().unbind() if where == "outside" else None

        def function(x):
            weight = p if where == "outside" else p * 2
            moments = (s * 2).unbind() if state is None else state
            before = (x * weight.clone()).exp()
            fused(name, weight, x.detach().sin(), moments)
            return before * weight.clone(), x * moments[0].clone(), x * moments[1].clone()

        return region(function, x), p

    oracle.Case(program, leaves(), backwards=("second",)).check(door)
