"""An exception anywhere leaves no hook, mode or state behind, and says where it happened."""

import contextlib
import gc
import itertools
import linecache
import re

import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import EARLY_STOP, WORD, WORDS, Counting, Watching, apply, bits, leaf, rerun, state

from checkpointing import CheckpointError, checkpoint_scope, disabled, is_recomputing, keep

pytestmark = [oracle.NO_ROOM, oracle.DEPRECATED]
RERUN = pytest.mark.parametrize("word", ["c", "cc", "sc"])
ERRORS = pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])


@contextlib.contextmanager
def unchanged(generator=torch.default_generator):
    """The state afterwards is that of before; the random streams, too."""
    now = lambda: (state(), bits([torch.get_rng_state(), generator.get_state()]))
    before = now()
    yield
    assert now() == before


def fails(error):
    """A function that raises `error` when it is first called."""
    errors = [error]

    def fail():
        if errors:
            raise errors.pop()("on purpose")

    return fail


@WORD
@EARLY_STOP
@ERRORS
def test_in_the_body(word, early_stop, error):
    """The forward fails half way, between operators; the half-recorded region goes with it."""
    fail = fails(error)

    def fn(x):
        h = x.sin().exp()
        fail()
        return h.tanh()

    x = leaf(3)
    with Watching() as watching:
        with unchanged(), pytest.raises(error, match="on purpose"):
            apply(word, fn, early_stop)(x)
        gc.collect()  # pytest's own excinfo is a cycle
        assert watching.alive() == []


class FailingMode(Counting):
    def __init__(self, error):
        super().__init__()
        self.fail = fails(error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "exp":
            self.fail()
        return super().__torch_dispatch__(func, types, args, kwargs)


PLACES = [("function", word) for word in ("c", "cc", "sc", "l")]
PLACES += itertools.product(["operator", "tensor hook"], WORDS)


@pytest.mark.parametrize(("where", "word"), PLACES)
@EARLY_STOP
@ERRORS
def test_in_backward(where, word, early_stop, error):
    fail, generator = fails(error), torch.Generator()

    def fn(x):
        h = F.dropout(x.sin(), 0.5) * torch.rand(3, generator=generator)
        if where == "function" and is_recomputing():
            with torch.no_grad():
                fail()
        h = h.exp()
        if where == "tensor hook" and h.requires_grad and not is_recomputing():
            h.register_hook(lambda grad: fail())
        return h.tanh()

    x = torch.ones(3, requires_grad=True)
    y = apply(word, fn, early_stop)(x).sum()
    with unchanged(generator):
        failing = FailingMode(error) if where == "operator" else contextlib.nullcontext()
        with unchanged(generator), failing, pytest.raises(error, match="on purpose"):
            y.backward(retain_graph=True)
        y.backward()


@pytest.mark.parametrize("door", ["function", "block"])
def test_the_recomputes_exception_says_which_region(door):
    if door == "function":
        y = rerun(lambda x: x.sin().exp().tanh(), name="mine")(leaf(3))  # the line
    else:
        with checkpoint_scope(name="mine"):  # the line
            y = leaf(3).sin().exp().tanh()
    with FailingMode(KeyboardInterrupt), pytest.raises(KeyboardInterrupt) as caught:
        y.sum().backward()
    note = "\n".join(caught.value.__notes__)
    line = int(re.search(rf"{re.escape(__file__)}:(\d+)", note)[1])
    assert "recompute" in note and "'mine'" in note
    assert linecache.getline(__file__, line).endswith("# the line\n")


@WORD
@pytest.mark.parametrize("when", [0, 1], ids=["pack", "unpack"])
def test_in_an_enclosing_saved_tensors_hook(word, when):
    fail, x = fails(ValueError), torch.ones(3, requires_grad=True)
    hooks = [lambda t: t, lambda t: t]
    hooks[when] = lambda t: (fail(), t)[1]

    def step():
        h = x * 2
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y = apply(word, lambda h: h.sin().exp().tanh())(h)
        y.sum().backward()

    with unchanged():
        with pytest.raises(ValueError):
            step()
        step()


@WORD
def test_the_region_around_is_the_innermost_again_after_an_exception(word):
    """`keep` finds it, and what `disabled` switched off is on again."""
    x = leaf(3)
    with checkpoint_scope() as scope:
        with contextlib.suppress(ValueError), disabled():
            raise ValueError
        with contextlib.suppress(ValueError):
            apply(word, lambda x: fails(ValueError)())(x)
        y = keep(x.sin()).exp().tanh()
    assert scope.stats.bytes_kept == x.nbytes
    assert oracle.count(y.sum().backward).get("exp") == 1


@pytest.mark.parametrize("stop", [True, False])
def test_a_value_that_the_function_overwrites_later_is_brought_back_as_it_was_or_refused(stop):
    """A rerun that stops right behind it has it still; one to the end has not, and says so."""
    x = torch.tensor([4.0, 16.0, 64.0], requires_grad=True)
    overwrites = lambda x: x.sqrt().mul_(2).square()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        overwrites(x).sum().backward()
    y = rerun(overwrites, early_stop=stop)(x).sum()
    if stop:
        y.backward()
        assert torch.equal(x.grad, torch.full((3,), 4.0))
    else:
        with pytest.raises(CheckpointError, match="overwritten later in the function"):
            y.backward()
        assert x.grad is None


@RERUN
@pytest.mark.parametrize("error", [None, RuntimeError, SystemExit, KeyboardInterrupt])
def test_what_a_function_makes_of_the_stop_signal(error, word):
    """An error of its own, or another way: all is there by then. An interrupt is the user's."""

    def fn(x):
        for _ in range(3):
            try:
                x = x.exp().mul(0.1)
            except BaseException as signal:
                if error is not None:
                    raise error from signal
                x = torch.zeros(3, requires_grad=True).sin().exp()
        return x

    x = leaf(3)
    (want,) = torch.autograd.grad(fn(x).sum(), x)
    y = apply(word, fn)(x).sum()
    interrupt = pytest.raises(KeyboardInterrupt)
    for _ in range(2):
        with unchanged(), interrupt if error is KeyboardInterrupt else contextlib.nullcontext():
            assert bits(torch.autograd.grad(y, x, retain_graph=True)[0]) == bits(want)


SCOPES = {
    "plain": contextlib.nullcontext,
    "scope": checkpoint_scope,
    "planned": lambda: checkpoint_scope(policy=oracle.PLANNED),
    "reported": lambda: checkpoint_scope(report=True),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "mode": Counting,
}


def task(x, kind):
    """A little of a model in a scope, which waits again and again."""
    y = x
    with SCOPES[kind]():
        for _ in range(3):
            yield
            y = torch.relu_(y.sin() * x).exp()
    return y.tanh()


def in_turns(tasks, order):
    """Let these go on in this order, then each to its end; what they return, or raise."""
    outcomes = {}
    for i in [*order, *list(range(len(tasks))) * 20]:
        try:
            if i not in outcomes:
                next(tasks[i])
        except StopIteration as stop:
            outcomes[i] = stop.value
        except CheckpointError as error:
            outcomes[i] = error
    return [outcomes[i] for i in range(len(tasks))]


PAIRS = itertools.combinations_with_replacement(["scope", "planned", "reported"], 2)


@pytest.mark.parametrize("kinds", [*PAIRS, ("scope",) * 3])
def test_scopes_of_several_tasks(kinds):
    """Who leaves while a later one is inside is told so."""
    x = leaf(3)
    (want,) = in_turns([task(x, "plain")], [])
    (want,) = torch.autograd.grad(want.sum(), x)
    crossed = 0
    for order in itertools.product(range(len(kinds)), repeat=6 - len(kinds)):
        with unchanged():
            results = in_turns([task(x, kind) for kind in kinds], order)
        for result in results:
            if isinstance(result, CheckpointError):
                crossed += 1
                assert "entered later is still open" in str(result) and __file__ in str(result)
            else:
                assert bits(torch.autograd.grad(result.sum(), x)[0]) == bits(want)
    assert crossed >= 2 ** len(kinds)


@pytest.mark.parametrize("other", ["hooks", "mode"])
def test_hooks_and_modes_of_others_survive(other):
    """What another task has entered in between stays where it is."""
    x, entered = leaf(3), SCOPES[other]()
    first, second = task(x, "scope"), task(x, "scope")
    with unchanged():
        next(first)
        with entered:
            inside = torch._C._len_torch_dispatch_stack()
            next(second)
            in_turns([first], [])
            in_turns([second], [])
            assert torch._C._len_torch_dispatch_stack() == inside - 1
            assert (state()["hooks"] is None) == (other == "mode")


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_that_leaves_a_scope_open(fails):
    """A generator waits in it; an exception of the function is not replaced."""
    waiting = []

    def function(x):
        waiting.append(task(x, "scope"))
        next(waiting[0])
        if fails:
            raise ValueError("on purpose")
        return x.sin()

    error, words = (ValueError, "on purpose") if fails else (CheckpointError, "still open")
    for door in "cr":
        with unchanged():
            with pytest.raises(error, match=words):
                apply(door, function)(torch.ones(3, requires_grad=True))
            waiting.pop().close()
