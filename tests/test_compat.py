"""torch's own functions and ours, side by side: torch is the oracle for results, warnings and errors."""

import functools
import warnings

import pytest
import torch
import torch.utils.checkpoint as theirs
from torch import nn

import checkpointing.torch_compat as ours
from checkpointing import checkpoint, checkpointed

MM = torch.ops.aten.mm.default


def leaf():
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True)


def gradient(y, x):
    return torch.autograd.grad(y.sum(), x)[0]


class Fickle:
    """A function that goes another way every second time."""

    def __init__(self, first, second):
        self.ways = [first, second]

    def __call__(self, x):
        self.ways.reverse()
        return self.ways[1](x)


def selective(m, ops):
    return functools.partial(m.create_selective_checkpoint_contexts, ops)


def backward_twice(m):
    x = leaf()
    y = m.checkpoint(lambda x: (x @ x).sin() @ x, x, use_reentrant=False, context_fn=selective(m, [MM])).sum()
    y.backward(retain_graph=True)
    y.backward()


def run(m, fn, **options):
    x = leaf()
    return gradient(m.checkpoint(fn, x, use_reentrant=False, **options), x)


PROGRAMS = {
    "plain": lambda m: run(m, lambda x: x.sin().cos()),
    "kwargs": lambda m: gradient(m.checkpoint(lambda x, y: x * y, leaf(), y=(y := leaf()), use_reentrant=False), y),
    "dropout": lambda m: run(m, lambda x: nn.functional.dropout(x.sin(), 0.5)),
    "without rng": lambda m: run(m, lambda x: x.sin(), preserve_rng_state=False),
    "debug": lambda m: run(m, lambda x: x.sin().cos(), debug=True),
    "debug and contexts": lambda m: run(m, torch.sin, debug=True, context_fn=selective(m, [MM])),
    "bad check": lambda m: run(m, torch.sin, determinism_check="x"),
    "no check": lambda m: run(m, lambda x: x.sin(), determinism_check="none"),
    "reentrant": lambda m: m.checkpoint(torch.sin, leaf(), use_reentrant=True).sum().backward(),
    "reentrant grad": lambda m: gradient(m.checkpoint(torch.sin, x := leaf(), use_reentrant=True), x),
    "reentrant kwargs": lambda m: m.checkpoint(torch.sin, leaf(), use_reentrant=True, foo=1),
    "reentrant, nothing to do": lambda m: m.checkpoint(torch.sin, torch.ones(2), use_reentrant=True).sum().item(),
    "selective list": lambda m: run(m, lambda x: (x @ x).sin() @ x, context_fn=selective(m, [MM])),
    "selective twice": backward_twice,
    "selective packet": lambda m: m.create_selective_checkpoint_contexts([torch.ops.aten.mm]),
    "selective nonsense": lambda m: m.create_selective_checkpoint_contexts(3),
    "fewer": lambda m: run(m, Fickle(lambda x: x.sin().exp().sin(), lambda x: x.sin().exp())),
    "more": lambda m: run(m, Fickle(lambda x: x.sin(), lambda x: x.sin().exp().sin()), early_stop=False),
    "other dtype": lambda m: run(m, Fickle(lambda x: x.sin().exp(), lambda x: x.sin().double().exp())),
    "sequential": lambda m: gradient(
        m.checkpoint_sequential([torch.sin, torch.cos, torch.exp], 2, x := leaf(), use_reentrant=False), x
    ),
    "sequential keywords": lambda m: m.checkpoint_sequential([torch.sin], 1, leaf(), use_reentrant=False, foo=1),
    "detach list": lambda m: m.detach_variable([leaf()]),
}


def observe(program, module):
    """The result bit for bit, or the error; and the classes of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = program(module)
        except Exception as error:
            kind = "checkpoint" if isinstance(error, theirs.CheckpointError) else type(error).__name__
            line = str(error).splitlines()[0].split(". ")[0]
            result = (kind if "use_reentrant" not in line else "RuntimeError", line)
    result = result.tolist() if isinstance(result, torch.Tensor) else result
    return result, [(w.category, str(w.message)[:40]) for w in caught if w.category is not DeprecationWarning]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_as_torch(name):
    """Results, first sentences of errors, and warnings."""
    if name in ("selective twice", "detach list"):
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if version < (2, 13):
            pytest.skip("torch itself answers otherwise before 2.13; ours answers as 2.15 does")
    want, have = observe(PROGRAMS[name], theirs), observe(PROGRAMS[name], ours)
    if name == "reentrant grad":  # ours is a CheckpointError, which is a RuntimeError, too
        assert have[0][1].startswith("When use_reentrant=True")
        return
    assert have == want


def test_use_reentrant_left_out_warns_at_the_caller():
    """And means True."""
    for call in (
        lambda: checkpoint(torch.sin, leaf()),
        lambda: ours.checkpoint_sequential([torch.sin, torch.cos], 2, leaf()),
    ):
        with pytest.warns(UserWarning, match="the use_reentrant parameter should be passed explicitly") as caught:
            y = call()
        assert "CheckpointFunction" in str(y.grad_fn.name()) or y.grad_fn is not None
        assert caught[0].filename == __file__


def test_every_public_name_of_torch_is_there():
    """As of the installed torch; data is torch's own."""
    assert set(theirs.__all__) <= set(ours.__all__)
    assert ours.CheckpointPolicy is theirs.CheckpointPolicy
    assert ours.GraphExecGroup is theirs.GraphExecGroup


def test_the_decorator_form():
    """On functions and methods."""

    class Thing:
        scale = 2.0

        @ours.checkpoint(use_reentrant=False)
        def method(self, x):
            return (x * self.scale).sin().exp()

    x = leaf()
    want = gradient((x * 2.0).sin().exp(), x)
    assert torch.equal(gradient(Thing().method(x), x), want)


def test_early_stop_can_be_switched_off_around_a_forward():
    """The switch counts where the forward runs."""
    runs = []

    def fn(x):
        y = x.sin().exp()
        runs.append("end")
        return y

    for enable, ends in ((True, 1), (False, 2)):
        runs.clear()
        with ours.set_checkpoint_early_stop(enable):
            y = ours.checkpoint(fn, x := leaf(), use_reentrant=False)
        gradient(y * 1, x)
        assert len(runs) == ends


def test_a_sequential_of_more_segments_than_functions_is_refused():
    """With a sentence that says so."""
    with pytest.raises(ValueError, match="between 1 and the number of functions"):
        ours.checkpoint_sequential([torch.sin], 2, leaf(), use_reentrant=False)


def test_options_that_the_reentrant_backend_lacks_are_refused():
    """With the sentence of torch 2.15."""
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        ours.checkpoint(torch.sin, leaf(), use_reentrant=True, debug=True)


def test_the_reentrant_backend():
    """Bit-equal, deprecated once, and clear about what it can't do."""
    from checkpointing import _reentrant

    _reentrant._warned.clear()
    with pytest.warns(FutureWarning, match="reentrant"):
        fn = checkpointed(lambda x: nn.functional.dropout(x.sin(), 0.5).exp(), backend="reentrant")
    x = leaf()
    torch.manual_seed(1)
    fn(x).sum().backward()
    have, state = x.grad.clone(), torch.get_rng_state()
    x.grad = None
    torch.manual_seed(1)
    fn.__wrapped__(x).sum().backward()
    assert torch.equal(have, x.grad) and torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="keyword"):
        fn(x=x)
    with pytest.raises(ours.CheckpointError, match="none of the inputs requires grad"):
        checkpointed(nn.Linear(4, 4), backend="reentrant")(torch.ones(4, 4))
