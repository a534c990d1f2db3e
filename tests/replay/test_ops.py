"""Every operator of torch's operator database, bit for bit, without a skip list.

Each sample is run plain twice, with other garbage in freshly allocated memory; what differs there is not deterministic by itself and is only checked not to fail.
By default a few samples of each operator in a few dtypes; `CHECKPOINTING_OPS=all` runs every one of them.
"""

from __future__ import annotations

import os
import warnings

import bitwise
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

common = pytest.importorskip("torch.testing._internal.common_methods_invocations")
pytestmark = pytest.mark.filterwarnings("ignore")

SHARDS = 16
ALL = os.environ.get("CHECKPOINTING_OPS") == "all"
SAMPLES = 10**9 if ALL else 4
DOORS = (bitwise.rerun, bitwise.replay, bitwise.scope)
F64, C128, F32, BF16 = torch.float64, torch.complex128, torch.float32, torch.bfloat16


class PassThrough(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODE = PassThrough()


def samples_of(op, dtype, grad, limit):
    """Some of an operator's samples, spread over all of them."""
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    step = max(1, len(samples) / limit)
    return [samples[int(i * step)] for i in range(min(limit, len(samples)))]


def fresh(value):
    """New leaves with the same bits and geometry."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            return value.detach().clone().requires_grad_(value.requires_grad)
        with torch.no_grad():
            base = value.detach()
            new = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device=base.device)
            if 0 in new.stride() and new.numel() > 1:
                new = base.clone()
            else:
                new.copy_(base)
        return new.requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(map(fresh, value))
    if type(value) is dict:
        return {k: fresh(v) for k, v in value.items()}
    return value


def dropped(value):
    """In place of the leaves, copies that the region makes and that it must make again."""
    if isinstance(value, Tensor):
        return value.clone() if value.requires_grad and value.layout == torch.strided else value
    if type(value) in (list, tuple):
        return type(value)(map(dropped, value))
    if type(value) is dict:
        return {k: dropped(v) for k, v in value.items()}
    return value


def leaves_in(value):
    return bitwise.tensors_in(value)


def programs(op, sample, number):
    """The operator as a function, on dropped arguments or on inputs; and its in-place and out= variants."""

    def squared(result):
        return [
            t * t if (t.is_floating_point() or t.is_complex()) and t.layout == torch.strided else t
            for t in bitwise.tensors_in(result)
        ] + [r for r in (result if isinstance(result, (list, tuple)) else [result]) if not isinstance(r, Tensor)]

    def functional(input, args, kwargs):
        if number % 2 == 0:
            input, args, kwargs = dropped(input), dropped(args), dropped(kwargs)
        return squared(op(input, *args, **kwargs))

    def inplace(input, args, kwargs):
        input = dropped(input)
        return squared(op.inplace_variant(input, *args, **kwargs))

    def out(input, args, kwargs):
        with torch.no_grad():
            result = op(input, *args, **kwargs)
            target = torch.empty_like(result)
            op(input, *args, **kwargs, out=target)
        x = next(t for t in bitwise.tensors_in([input, args, kwargs]) if t.requires_grad).sum()
        return [x * target]

    yield "function", functional
    if op.inplace_variant is not None and isinstance(sample.input, Tensor) and not sample.broadcasts_input:
        yield "in-place", inplace
    if op.supports_out and (ALL or number == 0):
        yield "out=", out


def check(op, dtype, limit, notes):
    grad = dtype in op.supported_backward_dtypes("cpu") if op.supports_autograd else False
    for number, sample in enumerate(samples_of(op, dtype, grad, limit)):
        for variant, function in programs(op, sample, number):

            def make():
                return tuple(bitwise.tensors_in(fresh([sample.input, list(sample.args), sample.kwargs])))

            def program(region, *leaves):
                queue = iter(leaves)

                def place(value):
                    if isinstance(value, Tensor):
                        return next(queue)
                    if type(value) in (list, tuple):
                        return type(value)(map(place, value))
                    if type(value) is dict:
                        return {k: place(v) for k, v in value.items()}
                    return value

                input, args, kwargs = place([sample.input, list(sample.args), sample.kwargs])
                return region(function, input, args, kwargs)

            for backward in ("first", "second"):
                with bitwise.garbage_in_fresh_memory(0x55):
                    want = bitwise.outcome(program, bitwise.plain, make, backward)
                if "exception" in want and variant != "function":
                    break
                with bitwise.garbage_in_fresh_memory(0xC3):
                    again = bitwise.outcome(program, bitwise.plain, make, backward)
                want.pop("error", None), again.pop("error", None)
                unstable = set(bitwise.differences(want, again))
                if "exception" not in want and "first" not in want and backward == "second":
                    break
                for door in DOORS:
                    with bitwise.garbage_in_fresh_memory(0x3A):
                        got = bitwise.outcome(program, door, make, backward)
                    got.pop("error", None)
                    if "exception" in want and got.get("exception") == want["exception"]:
                        continue
                    wrong = set(bitwise.differences(want, got)) - unstable
                    if wrong and door is not bitwise.rerun and "outputs" in wrong and "exception" not in got:
                        # Some composite operators take another way when any dispatch mode is active, in torch itself.
                        with MODE:
                            wrong -= set(
                                bitwise.differences(want, bitwise.outcome(program, bitwise.plain, make, backward))
                            )
                    if wrong:
                        notes.append(
                            f"{op.full_name} {dtype} #{number} {variant} {door.__name__} {backward}: "
                            + (
                                f"{got['exception']}: {got['message'][:300]}"
                                if "exception" in got
                                else f"differs in {sorted(wrong)}"
                                + (f" (plain: {want['exception']})" if "exception" in want else "")
                            )
                        )
                if "exception" in want:
                    break


def dtypes_of(op, number):
    """float64 and complex128 always, half and single precision for a sample of operators."""
    supported = op.supported_dtypes("cpu")
    yield from (d for d in (F64, C128) if d in supported)
    if ALL or number % 8 == 0:
        yield from (d for d in (F32, BF16) if d in supported)
    if not supported & {F64, C128}:
        yield from sorted(supported, key=str)[:1]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_operator(shard):
    """Outputs, gradients of two orders and the random stream; no frame stays behind."""
    torch.set_num_threads(1)
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, op in enumerate(common.op_db):
            if number % SHARDS == shard:
                for dtype in dtypes_of(op, number):
                    check(op, dtype, SAMPLES if dtype in (F64, C128) else 1, notes)
    assert not notes, "\n".join([f"{len(notes)} of them:", *notes])
