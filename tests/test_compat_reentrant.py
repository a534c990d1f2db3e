"""The legacy backend through our own door: bit-equal, or an error that says why it can't be."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from beside import Code
from oracle import bits, leaf
from torch import nn

from checkpointing import CheckpointError, checkpointed, disabled, forward_only, is_recomputing
from checkpointing.torch_compat import checkpoint_sequential

# Given once in a process: by whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:backend='reentrant' is deprecated:FutureWarning")


def reentrant(fn, **options):
    return checkpointed(fn, backend="reentrant", **options)


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
        (dropped, lambda x: reentrant(dropped)(x)),
        (dropped, lambda x: checkpoint_sequential([dropped, torch.clone], 2, x, True)),
        (dropped, lambda x: reentrant(lambda x: reentrant(dropped)(x))(x)),
        (dropped, lambda x: reentrant(lambda x: checkpointed(dropped)(x))(x)),
        (dropped, lambda x: reentrant(lambda x: in_replay(dropped)(x))(x)),
        (dropped, checkpointed(lambda x: reentrant(dropped)(x))),
        (dropped, in_replay(lambda x: reentrant(dropped)(x))),
        (from_generator, lambda x: reentrant(drawn)(x, GENERATOR)),
        (from_generator, lambda x, g=GENERATOR: reentrant(lambda x: drawn(x, g))(x)),
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
    fn = reentrant(lambda x, k=1: x.sin() * k, enabled=how != "enabled")
    with {"disabled": disabled, "no_grad": torch.no_grad}.get(how, torch.enable_grad)():
        y = fn(leaf(), k=2)
    assert (y.grad_fn is None) is (how == "no_grad")


def test_an_error_in_the_recompute_leaves_nothing_behind():
    def fn(x):
        y = F.dropout(x, 0.5)
        if is_recomputing():
            raise KeyError("second run")
        return y.sin()

    y = reentrant(fn)(leaf())
    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before) and not is_recomputing()
    assert forward_only(lambda: 1)() == 1  # which a region would be asked about


def test_keywords_are_refused():
    ran = []
    with pytest.raises(ValueError, match=r"Unexpected keyword arguments: k.*backend='rerun'"):
        reentrant(lambda x, k: ran.append(1))(leaf(), k=1)
    assert ran == []


@pytest.mark.parametrize("call", [torch.autograd.grad, lambda y, x: y.backward(inputs=[x])])
def test_gradients_of_chosen_inputs_are_refused(call):
    sine, x = reentrant(lambda x: x.sin()), leaf()
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
        reentrant(fn)(torch.ones(2, 3), *args)
    reentrant(fn)(torch.ones(2, 3, requires_grad=True), *args).sum().backward()


def test_nothing_that_requires_grad_at_all_is_a_warning():
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True") as caught:
        y = reentrant(lambda x: x.sin())(torch.ones(3))
    assert not y.requires_grad
    assert caught[0].filename == __file__


DEPRECATED = """
import warnings
import torch
from checkpointing import checkpointed
from checkpointing.torch_compat import checkpoint, checkpoint_sequential

x = torch.ones(3, requires_grad=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
    checkpoint_sequential([torch.sin, torch.cos], 2, x, use_reentrant=True).sum().backward()
    checkpointed(torch.sin)(x)
    print(len(caught))
    for _ in range(3):
        checkpointed(torch.sin, backend="reentrant")(x)  # line 15
(warning,) = caught
print(warning.category.__name__, warning.filename, warning.lineno, str(warning.message))
"""


def test_it_is_deprecated_once_per_process_and_not_through_the_drop_in():
    """A `FutureWarning` at the first line that chooses it."""
    before, said = Code(DEPRECATED).output.splitlines()
    assert before == "0"
    assert said.startswith("FutureWarning <string> 15 ") and "backend='rerun'" in said


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
