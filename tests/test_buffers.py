"""Buffers of modules in training mode are written once: a rerun rewinds them in place and puts them
back. Large ones and those of modules in evaluation mode are guarded."""

import contextlib
import copy
import functools
import operator
import threading
import types
import warnings

import oracle
import pytest
import torch
import torch.nn.functional as F
from oracle import WAYS, at_once, bits, count, plain, seed
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations

from checkpointing import (
    ChangedError,
    CheckpointError,
    MismatchError,
    auto,
    checkpoint_scope,
    checkpointed,
    report,
)
from checkpointing.torch_compat import checkpoint

pytestmark = oracle.NO_ROOM
REPLAY = {"replay": oracle.replay, "scope": oracle.scope, "planned": oracle.planned}
REPLAY["in hooks"] = lambda fn: oracle.in_hooks(oracle.scope(fn))
REENTRANT = {"reentrant": lambda fn: functools.partial(checkpoint, fn, use_reentrant=True)}
DOORS = {**WAYS, **REPLAY, **REENTRANT}
DOOR = pytest.mark.parametrize("door", DOORS)
leaf = functools.partial(oracle.integers, 6, 4)


class WithBuffers(nn.Module):
    """With these buffers, and perhaps a function of the module and its input as its `forward`."""

    count, size = 0, None  # beside them

    def __init__(self, function=None, persistent=True, **buffers):
        super().__init__()
        self.function = function
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent)

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_buffer_that_is_written_with_a_gradient_is_refused(early_stop, detached):
    """The state of a recurrent net, which the caller detaches: a rerun would leave its graph."""
    module = WithBuffers(lambda module, x: (module.state.mul_(x), x.sin())[1], state=torch.ones(4))
    y = checkpointed(module, early_stop=early_stop)(oracle.integers(4))
    if detached:
        module.state.detach_()
    with pytest.raises(ChangedError, match=r"a buffer, with a gradient, .* backend='replay'"):
        y.sum().backward()


class Counter(WithBuffers):
    def __init__(self):
        super().__init__(calls=torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return (x * self.calls.item()).square()


def set_anew(self, x):
    """Assigns its buffer instead of writing it; it may be None before the first forward."""
    self.mean = x.detach().sum(0) if self.mean is None else self.mean * 0.5 + x.detach().sum(0)
    return (x * self.mean).square()


def set_anew_from_the_input(self, x):
    self.mean = 0 * self.mean + x.detach()[1]
    return (x * self.mean).square()


def moved(self, x):
    """The buffer gets other memory: that of a result."""
    y = torch.tanh(x + self.mean)
    self.mean.data = y.detach()
    return y * y.detach().flip(0)


def in_inference_mode(self, x):
    """Statistics of features that do not train."""
    with torch.inference_mode():
        features = F.batch_norm(x, self.mean, self.variance, training=True)
    return (x * features.clone()).square()


def beside_a_count(self, x):
    """Statistics that are written in place."""
    self.count += 1
    self.mean.mul_(0.5).add_(x.detach().sum())
    return (x * self.mean[:4]).square()


def for_a_size(kind, self, x):
    """A table of positions, made anew when another size is asked for."""
    if self.size != kind(x.shape):
        self.size = kind(x.shape)
        self.table = torch.arange(x.numel()).view(x.shape) % 5 - len(x)
    return (x * self.table).square()


def grows(self, x):
    """Rotary embeddings: the table is made anew as sequences grow."""
    self.count = len(x)
    if self.size is None or self.count > self.size:
        self.size = self.count
        self.table = torch.arange(x.numel()).view(x.shape) % 7 - self.size
    return (x * self.table[: self.count]).square()


def beside_the_last_one(self, x):
    """The last input is a buffer, which is None at first, and so no number that tells a cache."""
    self.mean, self.last = self.mean * 3 + 1, x.detach()
    return (x * self.mean).square()


def beside_what_it_makes(self, x):
    """A spiking neuron: what appears beside its state is no number that tells a cache."""
    self.mean = self.mean * 0.5 + x.detach().sum(0)
    self.reset, self.seen = (self.mean > 0).float(), [*getattr(self, "seen", []), x.detach()]
    self.mode, self.is_ready = "spiking", True
    self.train()
    return (x * self.mean).square()


def streamed(self, x):
    """The memory of a buffer is there while it is used."""
    self.mean.untyped_storage().resize_(16)
    self.mean.data.fill_(2)
    y = x * self.mean.clone()
    self.mean.untyped_storage().resize_(0)
    return y.square()


def saved_and_set_anew(self, x):
    """Autograd saves the buffer itself, which is put back before its node has run."""
    y = (x * self.mean).square()
    self.mean = self.mean * 3 + 1
    self.last.add_(1)
    return y


class CodeBook(WithBuffers):
    """Vector quantisation whose code book moves."""

    def __init__(self, size=8):
        super().__init__(book=(torch.arange(size * 4.0).view(size, 4) % 7) - 3)

    def forward(self, x):
        codes = (x.detach()[:, None] - self.book).abs().sum(2).argmin(1)
        chosen, places = self.book[codes], F.one_hot(codes, len(self.book)).float()
        self.book.mul_(0.5).add_(places.t() @ x.detach(), alpha=0.5)
        return (x * chosen).square()


class Shared(WithBuffers):
    """One memory in two places: two modules, a view of a buffer, a list beside it."""

    def __init__(self, how):
        super().__init__(mean=torch.zeros(4))
        self.child = WithBuffers(mean=self.mean if how == "two modules" else self.mean.view(2, 2))
        self.stats = [self.mean]
        self.how = how

    def forward(self, x):
        self.mean.add_(x.detach().sum(0))
        other = self.stats[0] if self.how == "list" else self.child.mean.view(4)
        return (x * other.clone() + self.mean.clone()).square()


def rows(self, x):
    return F.batch_norm(x, self.both[0], self.both[1], training=True).square()


def then_saved(write):
    """Saves a buffer that the same call has written, with a trace in its version or without."""

    def forward(self, x):
        write(self.mean, x.detach())
        return torch.addcmul(x, x * self.mean, self.mean[None].expand_as(x))

    return lambda: WithBuffers(forward, mean=torch.zeros(4))


def odd(self, x):
    """Reads a buffer that is sparse, conjugate or with gaps."""
    dense = self.odd.to_dense() if self.odd.is_sparse else self.odd.resolve_conj()
    return (x @ dense.real).square()


class Grown(Counter):
    """Rotary embeddings: a number beside a cache says what is in it, at first nothing."""

    length = 0

    def grow(self, length):
        if length > self.length:
            self.length = length
            self.register_buffer("scale", torch.full((4,), float(length)), persistent=False)
        return self

    def forward(self, x):
        self.grow(len(x))
        return super().forward(x * self.scale)


def drops_one(self, x):
    for buffer in list(self.buffers()):
        x = (x + 1) * buffer
    if hasattr(self, "first"):
        del self.first
    return x.square()


def resized(self, x):
    """As an observer: the first data says how large the buffer is, or later ones do."""
    now = x.detach().amin(0)
    if self.calls == 0:
        self.least.resize_(now.shape).copy_(now)
    self.least.copy_(torch.minimum(self.least * 0.5, now))
    self.calls += 1
    return (x * self.least.clone()).square()


def scripted(module, by=torch.jit.script):
    # Profiling compiles anew, with other bits, what runs the second time.
    torch._C._jit_set_profiling_mode(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return by(module)


class ScriptedAnew(WithBuffers):
    def __init__(self):
        super().__init__(calls=torch.ones(()), sum=torch.zeros(4))

    def forward(self, x):
        self.calls = self.calls + 1
        self.sum.add_(x.detach().sum(0))
        return (x * self.calls + self.sum.clone()).tanh()


def with_modes():
    """Modules that behave otherwise in evaluation, some of them one level down."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), inner)


def sequence(*modules):
    """With something to recompute on both sides."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *modules, nn.Tanh())


MODULES = {
    "BatchNorm1d": lambda: sequence(nn.BatchNorm1d(4)),
    "modes": with_modes,
    "BatchNorm1d, alone": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d, cumulative": lambda: sequence(nn.BatchNorm1d(4, momentum=None)),
    "one that is used twice": lambda: sequence(*[nn.BatchNorm1d(4)] * 2),
    "InstanceNorm1d": lambda: sequence(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "fake quantization": lambda: sequence(
        quantization.FakeQuantize(quantization.MovingAverageMinMaxObserver, 0, 255)
    ),
    "spectral_norm": lambda: sequence(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "spectral_norm, old": lambda: sequence(nn.utils.spectral_norm(nn.Linear(4, 4))),
    "counter": Counter,
    "set anew": lambda: WithBuffers(set_anew, mean=torch.zeros(4)),
    "set anew, not persistent": lambda: WithBuffers(set_anew, False, mean=torch.zeros(4)),
    "set anew, not persistent, beside the last input": lambda: WithBuffers(
        beside_the_last_one, False, mean=torch.zeros(4), last=None
    ),
    "set anew, not persistent, beside what it makes": lambda: WithBuffers(
        beside_what_it_makes, False, mean=torch.zeros(4)
    ),
    "in inference mode": lambda: WithBuffers(
        in_inference_mode, mean=torch.zeros(4), variance=torch.ones(4)
    ),
    "moved": lambda: WithBuffers(moved, mean=torch.zeros(6, 4)),
    "from the input": lambda: WithBuffers(set_anew_from_the_input, mean=torch.zeros(4)),
    "from the input, not persistent": lambda: WithBuffers(
        set_anew_from_the_input, False, mean=torch.zeros(4)
    ),
    "beside a count, then saved": lambda: WithBuffers(beside_a_count, False, mean=torch.zeros(4)),
    "saved and set anew": lambda: WithBuffers(
        saved_and_set_anew, mean=torch.zeros(4), last=torch.zeros(())
    ),
    "None that becomes a tensor": lambda: WithBuffers(set_anew, mean=None, last=torch.zeros(())),
    "code book": CodeBook,
    "code book in evaluation": lambda: CodeBook().eval(),
    "code book of 64 KiB, the most that is copied": lambda: CodeBook(4096),
    "statistics in evaluation": lambda: WithBuffers(
        lambda self, x: F.batch_norm(x, self.mean, self.var, training=True).sin(),
        mean=torch.zeros(4),
        var=torch.ones(4),
    ).eval(),
    "two modules": lambda: Shared("two modules"),
    "view of another": lambda: Shared("view"),
    "in a list, too": lambda: Shared("list"),
    "rows of one": lambda: WithBuffers(rows, both=torch.stack([torch.zeros(4), torch.ones(4)])),
    "written, then saved": then_saved(lambda mean, x: mean.lerp_(x.sum(0), 0.5)),
    "written through .data, then saved": then_saved(lambda mean, x: mean.data.add_(x.sum(0))),
    "written by a kernel, then saved": then_saved(
        lambda mean, x: F.batch_norm(x, mean, torch.ones(4), training=True)
    ),
    # However large: its kernels change no version that could be guarded.
    "wide normalisation": lambda: nn.Sequential(nn.Linear(4, 20_000), nn.BatchNorm1d(20_000)),
    "sparse": lambda: WithBuffers(odd, odd=torch.eye(4).to_sparse()),
    "conjugate": lambda: WithBuffers(odd, odd=torch.eye(4).to(torch.complex64).conj()),
    "with gaps": lambda: WithBuffers(odd, odd=torch.eye(4)[:, ::2]),
    "grown": lambda: Grown().grow(2),
    "made when it is needed": Grown,
    "one that goes": lambda: WithBuffers(
        drops_one, first=torch.full((4,), 2.0), second=torch.full((4,), 3.0)
    ),
    **{
        f"resized from {n}": lambda n=n: WithBuffers(
            resized, least=torch.full((n,), 1.0), calls=torch.zeros(1)
        )
        for n in (0, 1, 9)
    },
    "scripted": lambda: nn.Sequential(nn.Linear(4, 4), scripted(ScriptedAnew()), nn.Tanh()),
    "all of it scripted": lambda: scripted(nn.Sequential(nn.Linear(4, 4), ScriptedAnew())),
}


def made(name):
    seed(1)
    return MODULES[name]()


def left(model, *tensors):
    named = [*model.state_dict(keep_vars=True).items(), *model.named_buffers()]
    state = [(name, bits(t), t._version) for name, t in named]
    grads = [p.grad for p in model.parameters()]
    return state, bits([grads, tensors]), [m.training for m in model.modules()]


def train(model, fn, steps=3, backward_in_evaluation=False):
    seed(0)
    seen = []
    for _ in range(steps):
        x = leaf()
        y = fn(x)
        if backward_in_evaluation:
            model.eval()
        there = [*model.buffers()]
        loss = y.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert all(map(operator.is_, model.buffers(), there))
        if backward_in_evaluation:
            model.train()
        seen += [y, x.grad]
    return left(model, *seen)


@functools.cache
def plainly_trained(name, *more):
    model = made(name)
    return train(model, model, *more)


@pytest.mark.parametrize("module", MODULES)
@DOOR
def test_buffers_are_written_once(module, door):
    """Gradients and buffers, with their versions and their order in `state_dict`, are plain's."""
    model, steps = made(module), 2 if door in (*oracle.RERUNS, "reentrant") else 3
    assert train(model, DOORS[door](model), steps) == plainly_trained(module, steps)


@functools.cache
def interleaved(module, door):
    model = made(module)
    fn, xs = door(model), [leaf(), leaf(), leaf()]
    ys = [fn(x) for x in xs]
    for i in (1, 2, 0):
        ys[i].square().sum().backward()
    return left(model, *ys, *(x.grad for x in xs))


# Of those that are written before they are saved plain autograd can have one forward at a time.
@pytest.mark.parametrize("module", [name for name in MODULES if "then saved" not in name])
@pytest.mark.parametrize("door", ["rerun", "rerun to the end", "scope in rerun"])
def test_each_region_has_the_buffers_of_its_own_beginning(module, door):
    """Three forwards, and then their backwards in another order."""
    assert interleaved(module, DOORS[door]) == interleaved(module, plain)


NORM = nn.Identity()


def by_global(x):
    return NORM(x)


def of_global(module):
    global NORM
    NORM = module
    return by_global


def of_global_in_parts(module):
    of_global(module)
    return lambda x: sum([NORM(part) for part in (x,)])


def over(door, it):
    return door(lambda x: (it[0] if isinstance(it, list) else it)(x))


PLACES = {
    "module": lambda door, m: door(m),
    "forward": lambda door, m: door(m.forward),
    "partial": lambda door, m: door(functools.partial(lambda m, x: m(x), m)),
    "closure": lambda door, m: door(lambda x: m(x)),
    "closure over a method": lambda door, m: over(door, m.forward),
    "closure over a list": lambda door, m: over(door, [m]),
    "closure over a partial": lambda door, m: over(door, functools.partial(m)),
    "attribute of the object it is bound to": lambda door, m: door(
        types.MethodType(lambda self, x: self.part(x), types.SimpleNamespace(part=m))
    ),
    "default": lambda door, m: door(lambda x, m=m: m(x)),
    "global that its code names": lambda door, m: door(of_global(m)),
    "global that a function in a region names": lambda door, m: door(
        checkpointed(of_global(m), backend="replay")
    ),
    "global that a comprehension names": lambda door, m: door(of_global_in_parts(m)),
    "argument": lambda door, m: functools.partial(door(lambda m, x: m(x)), m),
    "keyword": lambda door, m: functools.partial(door(lambda x, m: m(x)), m=m),
    "in containers": lambda door, m: functools.partial(door(lambda s, x: s[0]["m"](x)), [{"m": m}]),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("module", ["BatchNorm1d", "counter", "set anew", "two modules", "modes"])
def test_where_modules_are_looked_for(module, place):
    model, options = made(module), (2, True)
    region = PLACES[place](checkpointed, model)
    assert train(model, region, *options) == plainly_trained(module, *options)


LARGE = {"CodeBook.book": CodeBook(5000)}
LARGE["WithBuffers.mean"] = WithBuffers(beside_a_count, False, mean=torch.zeros(20_000))


@DOOR
@pytest.mark.parametrize("name", LARGE)
def test_large_buffers_that_are_written_are_refused_by_rerun(name, door):
    """The error names the buffer and the remedy, with which it is as plain."""
    model, want = copy.deepcopy(LARGE[name]), copy.deepcopy(LARGE[name])
    if door in REPLAY:
        assert train(model, DOORS[door](model)) == train(want, want)
    else:
        with pytest.raises(
            ChangedError, match=rf"{name} .* was changed in place .*backend='replay'"
        ):
            train(model, DOORS[door](model))


@DOOR
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("size", [4, 20_000])
def test_statistics_of_a_module_of_ones_own_are_written_once(size, is_training, door):
    """Whatever their size and its mode, though no version shows it."""

    def function(self, x):
        x = x.repeat(1, size // 4)
        return F.batch_norm(x, self.mean, self.var, training=True, momentum=0.5).sin()

    buffers = {"mean": torch.zeros(size), "var": torch.ones(size)}
    model, want = (
        WithBuffers(function, **copy.deepcopy(buffers)).train(is_training) for _ in range(2)
    )
    assert train(model, DOORS[door](model)) == train(want, want)


def test_statistics_that_another_module_updates_in_evaluation_mode_are_written_twice_by_a_rerun():
    norm = nn.BatchNorm1d(2).eval()
    update = lambda x: F.batch_norm(x, norm.running_mean, norm.running_var, training=True).sin()
    checkpointed(update)(torch.ones(3, 2).requires_grad_()).sum().backward()
    assert norm.running_mean.tolist() == pytest.approx([0.19, 0.19])  # plain code has 0.1


@DOOR
def test_a_buffer_whose_memory_is_given_back(door):
    model, x = WithBuffers(streamed, mean=torch.zeros(4)), leaf()
    model.mean.untyped_storage().resize_(0)
    run = DOORS[door](model)
    for _ in range(3):
        x.grad = None
        run(x).sum().backward()
        assert torch.equal(x.grad, 8 * x)


@pytest.mark.parametrize("policy", [None, auto()], ids=str)
def test_a_frozen_parameter_whose_memory_is_given_back(policy):
    model, x = WithBuffers(lambda self, x: streamed(self, streamed(self, x))), leaf()
    model.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
    model.mean.untyped_storage().resize_(0)
    for _ in range(3):
        with checkpoint_scope(policy=policy):
            loss = model(x).sum()
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad, 256 * x**3)


def depends_later(self, x):
    """On a streamed tensor, from the fourth call on."""
    y = streamed(self, torch.ones(4))
    if self.count < 3:
        return x.square().sum()
    return (x * y).square().sum()


@pytest.mark.parametrize("policy", [None, auto()], ids=str)
def test_a_buffer_whose_memory_is_given_back_before_it_is_known_to_be_needed(policy):
    """It is copied when it is read, though no plan so far had a use for it."""

    def twice(self, x):
        loss = depends_later(self, x)
        streamed(self, x.detach())
        return loss

    model, x = WithBuffers(twice, mean=torch.zeros(4)), leaf()
    model.mean.untyped_storage().resize_(0)
    for model.count in range(6):
        with checkpoint_scope(policy=policy):
            loss = model(x)
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad, (2 if model.count < 3 else 32) * x)


def test_a_frozen_parameter_whose_memory_is_given_back_before_it_is_known_to_be_needed():
    """It is refused: if it were copied at once, so would momentum encoders be, for nothing."""
    model, x = WithBuffers(depends_later), leaf()
    model.mean = nn.Parameter(torch.zeros(4), requires_grad=False)
    model.mean.untyped_storage().resize_(0)
    for model.count in range(4):
        with checkpoint_scope():
            loss = model(x)
        if model.count < 3:
            loss.backward()
    with pytest.raises(CheckpointError, match="no memory now"):
        loss.backward()


def test_a_buffer_that_is_a_few_columns_of_a_large_one_is_not_copied_with_all_of_it():
    table = torch.ones(4000, 40)
    model, x = WithBuffers(lambda self, x: (x * self.column).square(), column=table[:4, 0]), leaf()
    y = checkpointed(model)(x)
    assert sum(region.bytes_held for region in report(y).regions) < table.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x)


CACHES = {"grows": (grows, 1), "grows from a large one": (grows, 8192)}
CACHES |= {f.__name__: (functools.partial(for_a_size, f), 0) for f in (tuple, list, sum)}


@DOOR
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_that_is_made_anew_is_read_as_the_region_left_it(cache, door):
    """And left as the last region left it; a size beside it says what is in it."""

    def train(module, run, lengths):
        x = leaf()
        parts = [x.view(n) if isinstance(n, tuple) else x[:n] for n in lengths]
        losses = [run(part).sum() for part in parts]
        for loss in reversed(losses):
            loss.backward()
        table = [module.table] * (function is grows)
        return bits([x.grad, table, *map(module, (*parts, parts[-1], x[:2], x))])

    function, rows = CACHES[cache]
    for lengths in ([3], [5, 2], [2, 4], [2, 5, 3], *[[6, 3, (3, 8), 5]] * (rows == 0)):
        module, want = (WithBuffers(function, False, table=torch.zeros(rows, 4)) for _ in "ab")
        if door == "scope in rerun":  # where only the forward makes it
            with pytest.raises(MismatchError):
                train(module, DOORS[door](module), lengths)
        else:
            assert train(module, DOORS[door](module), lengths) == train(want, want, lengths)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_region_runs_no_operators_but_the_copies(mode):
    """One clone per buffer in training mode, none otherwise. (Modes see none of saved buffers.)"""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), leaf()
    getattr(model, mode)()
    want = count(lambda: model(x))
    have = count(lambda: checkpointed(model)(x))
    copies = {"clone": 3} if mode == "train" else {}
    assert have == {**want, **copies}
    y = checkpointed(lambda x: model(x).relu())(x)
    ran = count(y.sum().backward)
    copied = ran.get("clone", 0), ran.get("_foreach_copy_", 0)
    assert copied == ((3, 2) if mode == "train" else (0, 0))


@pytest.mark.parametrize("door", ["rerun", "rerun to the end"])
def test_a_buffer_that_is_written_after_it_was_saved_is_brought_back_as_it_was(door):
    """Plain autograd refuses. A rerun delivers neither a later value nor the present one."""

    def forward(model, x):
        y = x * model.scale
        model.scale += 1
        return y.square()

    model = WithBuffers(forward, scale=torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        model(leaf()).sum().backward()
    x = leaf()
    DOORS[door](model)(x).sum().backward()
    assert torch.equal(x.grad, 18 * x)
    assert torch.equal(model.scale, torch.full((4,), 4.0))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_buffers_and_training_flags_are_put_back_after_an_error(error):
    """Values, versions and the tensors themselves; flags that the rerun sets are dropped, too."""
    model, runs = nn.Sequential(nn.BatchNorm1d(4), Counter(), made("set anew"), nn.Dropout(0.5)), []

    def fn(x):
        model[3].eval()
        y = model(x)
        if runs:
            raise error
        runs.append(1)
        return y

    def state():
        buffers = [(name, id(b), b._version, bits(b)) for name, b in model.named_buffers()]
        return buffers, [m.training for m in model.modules()]

    y = checkpointed(fn, early_stop=False)(leaf())
    model(leaf())
    model.eval()
    model[3].train()
    before = state()
    with pytest.raises(error):
        y.sum().backward()
    assert state() == before


@pytest.mark.parametrize("door", ["rerun", "replay"])
def test_ranks_that_are_threads_share_a_module_with_a_barrier_in_the_region(door):
    """No lock is held while user code runs."""
    shared, barrier = nn.BatchNorm1d(4).eval(), threading.Barrier(2, timeout=30)
    want = torch.autograd.grad(shared(nn.BatchNorm1d(4)(x := leaf())).square().sum(), x)[0]

    def rank():
        own = nn.BatchNorm1d(4)

        def fn(x):
            barrier.wait()
            return shared(own(x)).square()

        for _ in range(3):
            x = leaf()
            DOORS[door](fn)(x).sum().backward()
            assert bits(x.grad) == bits(want)

    at_once(rank, rank)


def registers(self, x):
    if not hasattr(self, "calls"):
        self.register_buffer("calls", torch.zeros(()))
    self.calls += 1
    return (x * self.calls.clone()).square()


def registers_in_a_scope(self, x):
    """The recompute finds it there."""
    with checkpoint_scope():
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((4,), 2.0))
        y = (x * self.scale).sin()
    return y.exp()


def initialised(self, x):
    """By the first data that it meets; that it has been, an attribute says."""
    if not hasattr(self, "is_old"):
        self.scale.copy_(x.detach().abs().sum(0) + 1)
        self.is_old = True
    return (x * self.scale).square()


@pytest.mark.parametrize(
    ("function", "buffers"),
    [(registers, {}), (registers_in_a_scope, {}), (initialised, {"scale": torch.ones(4)})],
)
def test_a_buffer_is_rewound_and_an_attribute_beside_it_is_not(function, buffers):
    """Nor is what the first call registers: limits, which one call before lifts."""
    refused = pytest.raises(MismatchError, match="took another path the second time")

    def after_calls(door, before):
        model, x = copy.deepcopy(WithBuffers(function, **buffers)), leaf()
        for _ in range(before):
            model(x)
        door(model)(x).sum().backward()
        return bits([x.grad, list(model.buffers())])

    assert after_calls(checkpointed, 1) == after_calls(plain, 1)
    with refused if function is registers_in_a_scope else contextlib.nullcontext():
        assert after_calls(checkpointed, 0) != after_calls(plain, 0)


SWITCHES = {
    "to training": (lambda m: m.eval(), lambda m: m.train()),
    "one of them": (lambda m: m[3].eval(), lambda m: (m[3].train(), m[1].eval())),
    "validation": (lambda m: None, lambda m: (m.eval(), m(leaf().detach()), m.train())),
    "validation, and still there": (lambda m: None, lambda m: (m.eval(), m(leaf().detach()))),
}


@pytest.mark.parametrize("switch", SWITCHES)
@DOOR
def test_a_rerun_finds_the_training_flags_of_the_forward(switch, door):
    """Whatever they are when backward runs, they are afterwards."""
    before, between = SWITCHES[switch]

    def run(door):
        seed(0)
        model, x = made("modes"), leaf()
        before(model)
        y = door(model)(x)
        between(model)
        y.square().sum().backward()
        return left(model, y, x.grad)

    assert run(DOORS[door]) == run(plain)


@DOOR
def test_training_flags_stay_where_a_function_sets_them_and_its_rerun_is_stopped(door):
    """As in adversarial training, which evaluates the model for an attack. No operator after
    `train()` saves a tensor."""

    def evaluating(model, x):
        model.eval()
        y = model(x).sin()
        model.train()
        return y

    model, x = made("modes"), leaf()
    for _ in range(2):
        DOORS[door](evaluating)(model, x).sum().backward()
        assert all(m.training for m in model.modules())


def test_frozen_torchscript_has_no_training_flag():
    """And no buffers either: what it computes is all there is."""
    module, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), leaf()
    frozen = scripted(module, lambda module: torch.jit.freeze(torch.jit.script(module)))
    beside = nn.Dropout(0.0)
    y = checkpointed(lambda x: beside(frozen(x)).sin())(x)
    beside.eval()
    y.sum().backward()
    (want,) = torch.autograd.grad(frozen(x).sin().sum(), x)
    assert torch.allclose(x.grad, want)
    assert not hasattr(frozen, "training")


@pytest.mark.parametrize("module", ["BatchNorm1d", "saved and set anew"])
@DOOR
def test_buffers_of_a_distributed_module(mesh, module, door):
    """`distribute_module` makes a DTensor of each: rewound as others are."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def run(door):
        model = distribute_module(made(module), mesh)
        x = distribute_tensor(leaf().detach(), mesh, [Shard(0)]).requires_grad_()
        for _ in range(2):
            door(model)(x).square().sum().backward()
        tensors = [*model.buffers(), x.grad, *(p.grad for p in model.parameters())]
        return [bits(t.to_local()) for t in tensors]

    assert run(DOORS[door]) == run(plain)


@pytest.mark.parametrize(("count", "times"), [(100, 1), (101, 2)])
def test_long_lists_are_not_searched_for_modules(count, times):
    """They may be data: what their modules write is written again."""
    norms = [nn.BatchNorm1d(3) for _ in range(count)]
    region = checkpointed(lambda x: norms[-1](x).sin().exp())
    region(torch.rand(4, 3, requires_grad=True)).sum().backward()
    assert int(norms[-1].num_batches_tracked) == times
