"""What a region writes, it writes once: buffers of modules, and tensors that are nobody's buffers but are written like
ones. The rerun starts from what they held before the forward; afterwards they hold what they hold."""

import gc
import threading
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import bits
from oracle import s as scope
from torch import nn
from torch.nn.utils import parametrizations

from checkpointing import (
    CheckpointError,
    _rerun,
    checkpoint_scope,
    checkpointed,
    is_recomputing,
    opaque,
)


def plain(fn):
    """No region."""
    return fn


DOORS = {
    "rerun": checkpointed,
    "rerun to the end": lambda fn: checkpointed(fn, early_stop=False),
    "replay": lambda fn: checkpointed(fn, backend="replay"),
    "scope": scope,
    "rerun in rerun": lambda fn: checkpointed(checkpointed(fn)),
    "scope in rerun": lambda fn: checkpointed(scope(fn)),
    "rerun in scope": lambda fn: scope(checkpointed(fn)),
}
DOOR = pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))


@pytest.fixture(autouse=True)
def nothing_is_known():
    """Every test is a first call."""
    _rerun._wrote_tensors.clear()
    _rerun._wrote_buffers.clear()


def leaf(*shape):
    """The same each time."""
    n = torch.Size(shape or (6, 4)).numel()
    return torch.linspace(-1, 1, n).view(shape or (6, 4)).clone().requires_grad_()


# ---- modules


@pytest.mark.parametrize("size", [4, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("training", [True, False])
def test_normalisation_that_a_scope_does_not_look_at_is_the_same_in_a_rerun_around(size, training):
    """What has been written before is told from fresh memory by its version: so the rerun's copies must have that."""

    def gradients(door):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(size).train(training)

        def f(x):
            with checkpoint_scope(), opaque():
                return norm(x)

        x = torch.randn(3, size)
        for _ in range(2):
            door(f)(x).square().sum().backward()
        return [bits(t) for t in (norm.weight.grad, norm.bias.grad, *norm.buffers())]

    assert gradients(checkpointed) == gradients(plain)


class Counting(nn.Module):
    """Counts its calls in a buffer, in whatever mode it is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return (self.linear(x) * self.calls.item()).sin().exp()


class Replacing(nn.Module):
    """Sets its buffer anew instead of writing it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean).sin().exp()


class CodeBook(nn.Module):
    """Vector quantisation whose code book is a moving average; `kind` says what it is kept in."""

    def __init__(self, kind, size=8):
        super().__init__()
        book = torch.linspace(-1, 1, size * 4).view(size, 4).clone()
        if kind == "parameter":
            self.book = nn.Parameter(book, requires_grad=False)
        else:
            self.register_buffer("book", book, persistent=kind == "buffer")
        self.register_buffer("usage", torch.zeros(size))

    def forward(self, x):
        codes = torch.cdist(x.detach(), self.book).argmin(1)
        quantised = self.book[codes]
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(codes, len(self.book)).to(x.dtype)
                self.usage.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
                self.book.mul_(0.9).add_(one_hot.t() @ x, alpha=0.1)
        return (x + (quantised - x).detach()).sin() * x.exp()


class OldStyle(nn.Module):
    """Writes through `.data`, which no version counter shows."""

    def __init__(self, size=4):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, 4))

    def forward(self, x):
        self.mean.data.mul_(0.9).add_(x.data.mean(0), alpha=0.1)
        return (x - self.mean[0]).sin().exp()


class PerDomain(nn.Module):
    """Running statistics in the rows of one buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, 4))
        self.register_buffer("var", torch.ones(2, 4))

    def forward(self, x):
        return F.batch_norm(x, self.mean[1], self.var[0], training=True).sin().exp()


def sequence(*modules):
    """With something to recompute on both sides."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *modules, nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


MODULES = {
    "BatchNorm1d": lambda: sequence(nn.BatchNorm1d(4)),
    "BatchNorm1d, last": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "BatchNorm1d, alone": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d, cumulative": lambda: sequence(nn.BatchNorm1d(4, momentum=None)),
    "BatchNorm1d, not affine": lambda: sequence(nn.BatchNorm1d(4, affine=False)),
    "BatchNorm1d, no statistics": lambda: sequence(nn.BatchNorm1d(4, track_running_stats=False)),
    "BatchNorm2d": lambda: sequence(nn.Unflatten(1, (2, 2, 1)), nn.BatchNorm2d(2), nn.Flatten()),
    "BatchNorm3d": lambda: sequence(nn.Unflatten(1, (2, 2, 1, 1)), nn.BatchNorm3d(2), nn.Flatten()),
    "LazyBatchNorm1d": lambda: sequence(nn.LazyBatchNorm1d()),
    "LazyLinear": lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh()),
    "SyncBatchNorm": lambda: sequence(nn.SyncBatchNorm(4)),
    "InstanceNorm1d": lambda: sequence(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()
    ),
    "spectral_norm": lambda: sequence(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "spectral_norm, old": lambda: sequence(nn.utils.spectral_norm(nn.Linear(4, 4))),
    "weight_norm": lambda: sequence(parametrizations.weight_norm(nn.Linear(4, 4))),
    "counter": lambda: sequence(Counting()),
    "replaced": lambda: sequence(Replacing()),
    "code book": lambda: sequence(CodeBook("buffer")),
    "code book, not persistent": lambda: sequence(CodeBook("transient")),
    "code book, parameter": lambda: sequence(CodeBook("parameter")),
    "code book, large": lambda: sequence(CodeBook("buffer", 5000)),
    "code book, large parameter": lambda: sequence(CodeBook("parameter", 5000)),
    "through .data": lambda: sequence(OldStyle()),
    "through .data, large": lambda: sequence(OldStyle(5000)),
    "rows of one buffer": lambda: sequence(PerDomain()),
    "nested": lambda: nn.Sequential(sequence(nn.BatchNorm1d(4)), sequence(CodeBook("buffer"))),
}
MODULE = pytest.mark.parametrize("module", MODULES)


class Held:
    """A model that is no module."""

    def __init__(self, module):
        self.parts = {"norm": [module]}

    def call(self, x):
        """By a method."""
        return self.parts["norm"][0](x)


GLOBAL = nn.ModuleDict()


def by_global(x):
    """By a module that is a global, in a function that another one calls."""
    return GLOBAL["it"](x)


def of_global(module):
    """A function of it."""
    GLOBAL["it"] = module
    return lambda x: by_global(x)


WAYS = {
    "module": lambda module: module,
    "forward": lambda module: module.forward,
    "closure": lambda module: lambda x: module(x),
    "closure over a method": lambda module: (lambda forward: lambda x: forward(x))(module.forward),
    "closure over a list": lambda module: (lambda modules: lambda x: modules[0](x))([module]),
    "closure over functions": lambda module: (lambda fs: lambda x: fs[0](x))([lambda x: module(x)]),
    "method of an object": lambda module: Held(module).call,
    "global": of_global,
}


def train(module, decorate, steps=3):
    """All that a few steps leave behind."""
    torch.manual_seed(0)
    fn = decorate(module)
    seen = []
    for _ in range(steps):
        x = leaf()
        y = fn(x)
        y.square().sum().backward()
        seen += [y, x.grad]
    seen += [*(p.grad for p in module.parameters()), *module.parameters(), *module.buffers()]
    return [None if t is None else bits(t) for t in seen]


def made(name):
    """A new module, the same each time."""
    torch.manual_seed(1)
    return MODULES[name]()


@MODULE
@DOOR
def test_buffers_of_modules_are_written_once(module, door):
    """Gradients, parameters and buffers as plain, after a few steps of training."""
    assert train(made(module), door) == train(made(module), plain)


@MODULE
@pytest.mark.parametrize("way", WAYS)
def test_a_rerun_finds_modules(module, way):
    """Wherever a function can be seen to have them from."""
    want = train(made(module), plain)
    assert train(made(module), lambda module: checkpointed(WAYS[way](module))) == want


@MODULE
@DOOR
def test_buffers_in_eval_mode(module, door):
    """Some write even then."""

    def step(door):
        return train(made(module).eval(), door)

    if "Lazy" in module:
        return  # these can't be evaluated before they have been trained
    assert step(door) == step(plain)


@MODULE
def test_forwards_before_backwards(module):
    """Each region has the buffers of its own beginning, whatever the forwards after it wrote."""

    def step(door):
        torch.manual_seed(0)
        it = made(module)
        fn = door(it)
        xs = [leaf(), leaf() * 2, leaf() * 3]
        for x in xs:
            x.retain_grad()
        ys = [fn(x) for x in xs]
        for y in (ys[1], ys[2], ys[0]):
            y.square().sum().backward(retain_graph=True)
        sum(y.sum() for y in ys).backward()
        seen = [*ys, *(x.grad for x in xs), *(p.grad for p in it.parameters()), *it.buffers()]
        return [None if t is None else bits(t) for t in seen]

    try:
        want = step(plain)
    except RuntimeError:
        return  # plain refuses: a later forward has written what an earlier one saved
    assert step(checkpointed) == want


def test_a_layer_that_is_skipped_at_first():
    """Stochastic depth: calls that leave the statistics alone teach nothing wrong."""

    def step(door):
        torch.manual_seed(1)
        norm, book, x = nn.BatchNorm1d(4), CodeBook("buffer"), leaf()
        fn = door(lambda x, skip: (x if skip else book(norm(x))).sin().exp())
        for skip in (True, True, False, True, False):
            fn(x, skip).sum().backward()
        return [bits(t) for t in (x.grad, norm.weight.grad, *norm.buffers(), *book.buffers())]

    assert step(checkpointed) == step(plain)


def test_a_large_buffer_that_is_left_alone_is_not_copied_again_and_guarded():
    """It is compared once; from then on a change between forward and backward is an error."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(5000, 4))

        def forward(self, x):
            return (x * self.table[0]).sin().exp()

    table = Table()
    fn = checkpointed(table)
    for _ in range(2):
        fn(leaf()).sum().backward()
    y = fn(leaf())
    assert all(buffer.before is None for buffer in y.grad_fn._raw_saved_result.data.frame.source.buffers._buffers)
    table.table.add_(1)
    with pytest.raises(CheckpointError, match=r"Table\.table .*changed in place"):
        y.sum().backward()


def test_a_large_buffer_that_is_written_for_the_first_time_is_refused_once():
    """Its value from before is gone; the next forward copies it."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(5000, 4))

        def forward(self, x, write):
            if write:
                self.table.mul_(0.5)
            return (x * self.table[0].clone()).sin().exp()

    table = Table()
    fn = checkpointed(table)
    fn(leaf(), False).sum().backward()
    with pytest.raises(CheckpointError, match=r"has written Table\.table"):
        fn(leaf(), True).sum().backward()
    x = leaf()
    fn(x, True).sum().backward()
    want = leaf()
    (want * 0.25).sin().exp().sum().backward()
    assert bits(x.grad) == bits(want.grad)
    assert table.table[0, 0] == 0.25


class ByMode(nn.Module):
    """Another function in training mode; it saves as much."""

    def forward(self, x):
        return (x * (2 if self.training else 3)).sin().exp()


class Drawing(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x):
        return (x * torch.rand(4, generator=self.generator)).sin().exp()


class Unregistered(nn.Module):
    """Keeps its statistics in plain attributes."""

    def __init__(self):
        super().__init__()
        self.mean, self.var = statistics()
        self.average = torch.zeros(3, 4)

    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return (F.batch_norm(x, self.mean, self.var, training=True) - self.average[1]).sin().exp()


@DOOR
def test_modules_are_in_the_mode_of_the_forward(door):
    """Evaluation may begin before backward; afterwards the modules are in the mode in which they were."""

    def step(door):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), ByMode())
        x = leaf()
        y = door(model)(x)
        model.eval()
        y.sum().backward()
        assert not any(module.training for module in model.modules())
        return [bits(t) for t in (y, x.grad, *(p.grad for p in model.parameters()), *model.buffers())]

    assert step(door) == step(plain)


@pytest.mark.parametrize("way", WAYS)
def test_generators_of_modules(way):
    """Attributes of modules inside."""

    def step(door):
        model, x = nn.Sequential(Drawing(), nn.Tanh(), Drawing()), leaf()
        y = door(WAYS[way](model))(x)
        torch.rand(3, generator=model[0].generator)
        y.sum().backward()
        return bits(y), bits(x.grad), [bits(m.generator.get_state()) for m in (model[0], model[2])]

    assert step(checkpointed) == step(plain)


@DOOR
def test_tensors_that_modules_have_not_registered(door):
    """They are written once as well."""

    def step(door):
        model, x = nn.Sequential(nn.Tanh(), Unregistered()), leaf()
        fn = door(lambda x: model(x))
        for _ in range(3):
            fn(x).sum().backward()
        return [bits(t) for t in (x.grad, model[1].mean, model[1].var, model[1].average)]

    assert step(door) == step(plain)


# ---- tensors that belong to no module


class Object:
    """With attributes."""


def statistics():
    """Running mean and variance."""
    return [torch.zeros(4), torch.ones(4)]


def normalised(x, mean, var, w):
    """Between other operators."""
    return F.batch_norm(x.sin(), mean, var, w, training=True).exp()


def average(x, mean):
    """A moving average."""
    with torch.no_grad():
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return (x - mean).sin().exp()


def arguments():
    """Statistics as arguments."""
    mean, var = statistics()
    return normalised, (mean, var, W), {}, [mean, var]


def keywords():
    """In nested keyword arguments."""
    mean, var = statistics()
    return lambda x, s: normalised(x, s["a"], s["b"][0], W), (), {"s": {"a": mean, "b": [var]}}, [mean, var]


def closure():
    """In a closure."""
    mean, var = statistics()
    return lambda x: normalised(x, mean, var, W), (), {}, [mean, var]


def attribute():
    """Attributes of an argument."""
    o = Object()
    o.mean, o.var = statistics()
    return lambda x, o: normalised(x, o.mean, o.var, W), (o,), {}, [o.mean, o.var]


def closed_over_attribute():
    """Attributes of an object in a closure."""
    o = Object()
    o.mean, o.both = statistics()[0], {"var": statistics()[1]}
    return lambda x: normalised(x, o.mean, o.both["var"], W), (), {}, [o.mean, o.both["var"]]


class Model:
    """With statistics of its own, and no module."""

    def __init__(self):
        self.mean, self.var = statistics()

    def method(self, x):
        """Uses them."""
        return normalised(x, self.mean, self.var, W)


def own_attribute():
    """Attributes of what a method is bound to."""
    model = Model()
    return model.method, (), {}, [model.mean, model.var]


class Averaging(nn.Module):
    """With one attribute of its own."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x):
        return average(x, self.mean)


def attribute_in_place_of_torchs():
    """A module without one of those that every module has: as many attributes as a module without any of its own."""
    module = Averaging()
    del module._state_dict_pre_hooks
    return module, (), {}, [module.mean]


def partial():
    """Arguments of a partial function."""
    import functools

    mean, var = statistics()
    return functools.partial(normalised, mean=mean, var=var, w=W), (), {}, [mean, var]


ELSEWHERE = types.ModuleType("elsewhere")
exec(
    """
import torch
import torch.nn.functional as F
from torch import nn
mean, var = torch.zeros(4), torch.ones(4)
norm = nn.BatchNorm1d(4)
def normalise(x):
    return F.batch_norm(x, mean, var, training=True).sin()
def call(x):
    return norm(x).sin()
""",
    ELSEWHERE.__dict__,
)


def elsewhere():
    """Globals of a function of another file: found when autograd saves them."""
    ELSEWHERE.mean, ELSEWHERE.var = statistics()
    return lambda x: ELSEWHERE.normalise(x.sin()).exp(), (), {}, [ELSEWHERE.mean, ELSEWHERE.var]


def norm_elsewhere():
    """A module that is a global of another file: with its count of batches."""
    ELSEWHERE.norm = nn.BatchNorm1d(4)
    return lambda x: ELSEWHERE.call(x.sin()).exp(), (), {}, list(ELSEWHERE.norm.buffers())


def views():
    """Rows of larger tensors."""
    means, variances = torch.zeros(2, 4), torch.ones(2, 4)
    return lambda x, m, v: normalised(x, m, v, W), (means[1], variances[0]), {}, [means, variances]


def bank():
    """Rows taken in the region."""
    means, variances = torch.zeros(2, 4), torch.ones(2, 4)
    return lambda x, m, v: normalised(x, m[1], v[0], W), (means, variances), {}, [means, variances]


def without_gradient():
    """Of data: autograd saves nothing, and the write leaves no trace."""
    mean, var = statistics()
    data = torch.linspace(0, 1, 24).view(6, 4)
    return (
        lambda x, m, v: (x * F.batch_norm(data, m, v, training=True)).sin().exp(),
        (mean, var),
        {},
        [mean, var],
    )


def instance_norm():
    """Writes them by a visible copy."""
    mean, var = torch.zeros(2), torch.ones(2)
    return lambda x, m, v: F.instance_norm(x.view(6, 2, 2).sin(), m, v).exp(), (mean, var), {}, [mean, var]


def moving_average():
    """Closed over."""
    mean = torch.zeros(4)
    return lambda x: average(x, mean), (), {}, [mean]


def moving_average_argument():
    """Passed in."""
    mean = torch.zeros(4)
    return average, (mean,), {}, [mean]


def through_data():
    """As old code does it."""
    mean = torch.zeros(4)

    def fn(x, mean):
        mean.data.mul_(0.9).add_(x.data.mean(0), alpha=0.1)
        return (x - mean).sin().exp()

    return fn, (mean,), {}, [mean]


def code_book():
    """Two dimensions, read and written."""
    book, usage = torch.linspace(-1, 1, 32).view(8, 4).clone(), torch.zeros(8)

    def fn(x, book, usage):
        codes = torch.cdist(x.detach(), book).argmin(1)
        quantised = book[codes]
        with torch.no_grad():
            one_hot = F.one_hot(codes, 8).to(x.dtype)
            usage.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            book.mul_(0.9).add_(one_hot.t() @ x, alpha=0.1)
        return (x + (quantised - x).detach()).sin() * x.exp()

    return fn, (book, usage), {}, [book, usage]


def counter():
    """A number; autograd saves it after the write."""
    n = torch.zeros((), dtype=torch.long)

    def fn(x):
        n.add_(1)
        return (x * n).sin().exp()

    return fn, (), {}, [n]


def data():
    """The function changes the data that it is given."""
    d = torch.arange(4.0)

    def fn(x, d):
        d.mul_(2)
        return (x * d).sin().exp()

    return fn, (d,), {}, [d]


def columns():
    """Columns of one tensor, which lie in each other's gaps."""
    both = torch.stack([torch.zeros(4), torch.ones(4)], 1)
    return lambda x, m, v: normalised(x, m, v, W), (both[:, 0], both[:, 1]), {}, [both]


def argument_and_closure():
    """Written as the one, read as the other."""
    mean = torch.zeros(4)

    def fn(x, m):
        with torch.no_grad():
            m.add_(x.mean(0))
        return (x * mean.clone()).sin().exp()

    return fn, (mean,), {}, [mean]


def same_in_two_places():
    """One tensor, passed twice."""
    mean = torch.zeros(4)

    def fn(x, a, b):
        with torch.no_grad():
            a.add_(x.mean(0))
        return (x * a.clone() - b).sin().exp()

    return fn, (mean, mean), {}, [mean]


W = torch.linspace(0.5, 1, 4)
PLACES = [
    *(arguments, keywords, closure, attribute, closed_over_attribute, own_attribute, partial, elsewhere),
    attribute_in_place_of_torchs,
    *(norm_elsewhere, views, bank, without_gradient, instance_norm, moving_average, moving_average_argument),
    *(through_data, code_book, counter, data, same_in_two_places, columns, argument_and_closure),
]
PLACE = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


@PLACE
@DOOR
def test_plain_tensors_are_written_once(place, door):
    """Gradients and what was written, after a few steps, as plain; and their versions, which other graphs compare."""

    def step(door):
        fn, args, kwargs, written = place()
        region = door(fn)
        x = leaf()
        seen = []
        for _ in range(3):
            y = region(x, *args, **kwargs)
            y.square().sum().backward(retain_graph=True)
            y.square().sum().backward()
            seen.append(bits(y))
        return [*seen, bits(x.grad), *map(bits, written)], [t._version for t in written]

    assert step(door) == step(plain)


@pytest.mark.parametrize(
    "place", [p for p in PLACES if p not in (counter, data, same_in_two_places)], ids=lambda p: p.__name__
)
def test_plain_tensors_and_several_forwards(place):
    """Two regions of one function, then their backwards, the last first."""

    def step(door):
        fn, args, kwargs, written = place()
        region = door(fn)
        x = leaf()
        first, second = region(x, *args, **kwargs), region(x * 2, *args, **kwargs)
        second.sum().backward()
        first.square().sum().backward()
        return [bits(first), bits(second), bits(x.grad), *map(bits, written)]

    assert step(checkpointed) == step(plain)


class Recurrent:
    """Its state is set anew by each call, and has a gradient."""

    def __init__(self, state):
        self.state = state
        self.states = {"last": state}
        self.linear = nn.Linear(4, 4)

    def step(self, x):
        """One step."""
        state = torch.zeros(6, 4) if self.state is None else self.state
        self.state = (self.linear(x) + state).tanh()
        self.states["last"] = self.state
        return self.state.exp()


class RecurrentModule(nn.Module):
    """The same as a module."""

    def __init__(self, state):
        super().__init__()
        self.state = state
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        state = torch.zeros(6, 4) if self.state is None else self.state
        self.state = (self.linear(x) + state).tanh()
        return self.state.exp()


@pytest.mark.parametrize("state", ["none", "zeros"])
@pytest.mark.parametrize("kind", ["object", "module", "closure"])
@DOOR
def test_state_that_is_set_anew(door, kind, state):
    """Each region has the state that it met; the last state stays."""

    def step(door):
        torch.manual_seed(0)
        initial = None if state == "none" else torch.zeros(6, 4)
        model = RecurrentModule(initial) if kind == "module" else Recurrent(initial)
        fn = door(model if kind == "module" else model.step if kind == "object" else lambda x: model.step(x))
        x = leaf()
        y = fn(x) + fn(x * 2) * 3 + fn(x.exp())
        y.sum().backward()
        return bits(y), bits(x.grad), bits(model.state), *(bits(p.grad) for p in model.linear.parameters())

    assert step(door) == step(plain)


def test_tensors_that_share_memory_are_refused():
    """Two arguments that overlap can't be put back one by one."""
    both = torch.zeros(6)

    def fn(x, a, b):
        a.add_(1), b.mul_(2)
        return (x * a.clone() + b.clone()).sin()

    with pytest.raises(CheckpointError, match=r"args\[1\] .* and args\[2\] .* share memory"):
        checkpointed(fn)(leaf(), both[:4], both[2:]).sum().backward()


# ---- what modules are made of


@DOOR
def test_functional_call_around_regions(door):
    """Parameters and buffers of the forward, though the module has its own again when backward runs."""

    def step(door):
        torch.manual_seed(0)
        model = nn.Sequential(*(sequence(nn.BatchNorm1d(4)) for _ in range(2)))
        for block in model:
            block.forward = door(block.forward)
        parameters = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        x = leaf()
        y = torch.func.functional_call(model, (parameters, buffers), (x,))
        y.sum().backward()
        seen = [y, x.grad, *(p.grad for p in parameters.values()), *buffers.values(), *model.buffers()]
        return [bits(t) for t in seen]

    assert step(door) == step(plain)


@DOOR
def test_functional_call_in_a_region(door):
    """With tensors of a closure in place of the module's."""

    def step(door):
        torch.manual_seed(0)
        model = sequence(nn.BatchNorm1d(4))
        parameters = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        fn = door(lambda x: torch.func.functional_call(model, (parameters, buffers), (x,)).exp())
        for _ in range(2):
            y = fn(x := leaf())
            y.sum().backward()
        seen = [y, x.grad, *(p.grad for p in parameters.values()), *buffers.values(), *model.buffers()]
        return [bits(t) for t in seen]

    assert step(door) == step(plain)


@pytest.mark.parametrize("what", ["parameter", "child"])
@DOOR
def test_parts_of_a_module_that_are_replaced_before_backward(door, what):
    """The recompute has the parts of the forward, and leaves those of now."""

    def step(door):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        old, x = model[0], leaf()
        weight = old.weight
        y = door(model)(x).sin()
        if what == "child":
            model[0] = new = nn.Linear(4, 4)
        else:
            old.weight = new = nn.Parameter(torch.zeros(4, 4))
        y.sum().backward()
        assert (model[0] if what == "child" else old.weight) is new
        return bits(y), bits(x.grad), bits(weight.grad)

    assert step(door) == step(plain)


def test_what_is_written_with_a_gradient():
    """The argument becomes part of the graph, as plain; nothing is kept alive by it."""

    def fn(x, out, token):
        out.copy_(x.sin())
        return out.exp() * x

    class Token:
        pass

    gc.collect()
    gc.disable()
    try:
        x, token, out = leaf(), Token(), torch.zeros(6, 4)
        ref = weakref.ref(token)
        y = checkpointed(fn)(x, out, token)
        del token
        y.sum().backward()
        assert out.requires_grad
        del y, out
        assert ref() is None
    finally:
        gc.enable()
    want = leaf()
    fn(want, torch.zeros(6, 4), None).sum().backward()
    assert bits(x.grad) == bits(want.grad)


def test_arguments_that_are_left_alone_are_the_very_objects():
    """Copies are handed out only of what is written."""
    table, vector, identities = torch.ones(3, 4), torch.ones(4), []

    def fn(x, table, vector):
        identities.append((table is TABLE[0], vector is TABLE[1]))
        return (x * table[0] * vector).sin().exp()

    TABLE = [table, vector]
    for _ in range(3):
        checkpointed(fn)(leaf(), table, vector).sum().backward()
    assert identities == [(True, True)] * 6


@pytest.mark.parametrize("how", ["argument", "closure", "global"])
def test_a_change_after_the_region_is_still_an_error(how):
    """Only what the region itself writes is put back: a vector that is copied each time is guarded as well."""
    vector = torch.ones(4)
    if how == "argument":
        y = checkpointed(lambda x, v: (x + v).sin().exp())(leaf(), vector)
    elif how == "closure":
        y = checkpointed(lambda x: (x + vector).sin().exp())(leaf())
    else:
        vector = W
        y = checkpointed(lambda x: (x + W).sin().exp())(leaf())
    vector.add_(1)
    try:
        with pytest.raises(CheckpointError, match="changed in place"):
            y.sum().backward()
    finally:
        vector.sub_(1)


def test_values_compares_what_the_function_finds_by_itself_and_does_not_repair_it():
    """A function that is none of its arguments' is what this check is for (pain 6)."""
    s = torch.zeros(1)

    def fn(z):
        s[0] += 1
        return (z * s[0]).sin()

    want = torch.autograd.grad(fn(z := leaf()).sum(), z)
    y = checkpointed(fn)(z)
    s.zero_()
    s += 1
    y = checkpointed(fn, determinism_check="values")(z)
    with pytest.raises(CheckpointError, match=r"'s' .*changed in place"):
        y.sum().backward()
    assert want


def test_a_tensor_too_large_for_a_try_is_refused_once():
    """More than a megabyte is not copied on a suspicion; from the second forward on it is known."""
    big = torch.ones(600_000)

    def fn(x, big):
        big.mul_(0.5)
        return (x * big[0].clone()).sin().exp()

    region = checkpointed(fn)
    with pytest.raises(CheckpointError, match=r"has written args\[1\]"):
        region(leaf(), big).sum().backward()
    x = leaf()
    region(x, big).sum().backward()
    want = leaf()
    (want * 0.25).sin().exp().sum().backward()
    assert bits(x.grad) == bits(want.grad)
    assert big[0] == 0.25


# ---- several threads


def test_backwards_of_two_frames_of_one_module_in_two_threads():
    """While one rerun has put a buffer back, the other must not take that for its present value."""
    import sys

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        torch.manual_seed(1)
        mean = torch.zeros(4)
        norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
        fn = checkpointed(lambda x: average(norm(x), mean))
        for _ in range(20):
            ys = [fn(leaf() * i) for i in range(1, 5)]
            before = [bits(t) for t in (mean, *norm.buffers())]
            threads = [threading.Thread(target=y.sum().backward) for y in ys]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert [bits(t) for t in (mean, *norm.buffers())] == before
    finally:
        sys.setswitchinterval(interval)


def test_buffers_are_put_back_after_an_error():
    """Wherever it happens in the rerun."""
    norm, mean = nn.BatchNorm1d(4), torch.zeros(4)

    def fn(x):
        y = average(norm(x), mean)
        if is_recomputing():
            raise KeyboardInterrupt
        return y.exp()

    y = checkpointed(fn)(leaf())
    before = [bits(t) for t in (mean, *norm.buffers())], [id(t) for t in (mean, *norm.buffers())], mean._version
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert before == (
        [bits(t) for t in (mean, *norm.buffers())],
        [id(t) for t in (mean, *norm.buffers())],
        mean._version,
    )


# ---- variables of the function


@DOOR
def test_a_loop_variable_in_a_closure(door):
    """Closures see variables, not values; recompute sees the values of its own forward."""
    torch.manual_seed(1)
    layers = [nn.Linear(4, 4) for _ in range(3)]

    def run(door):
        x = y = leaf()
        for i, layer in enumerate(layers):
            y = door(lambda y: layer(y).sin() * (i + 1))(y)  # noqa: B023
        return [bits(g) for g in torch.autograd.grad(y.sum(), [x, *(layer.weight for layer in layers)])]

    assert run(door) == run(plain)


SCALE = 2.0


@DOOR
def test_a_global_that_is_set_anew(door):
    """Or the loop is not in a function."""
    global SCALE

    def run(door):
        global SCALE
        x = y = leaf()
        for SCALE in (2.0, 3.0, torch.tensor(0.5)):
            y = door(lambda y: (y * SCALE).sin())(y)  # noqa: B023
        return bits(torch.autograd.grad(y.sum(), x)[0])

    assert run(door) == run(plain)


@DOOR
def test_a_global_that_holds_one_function_after_the_other(door):
    """Also functions of torch, when their name is not that of the variable."""
    global ACT

    def run(door):
        global ACT
        x = y = leaf()
        for ACT in (torch.sin, torch.tanh, torch.nn.functional.softplus, torch.nn.functional.silu):
            y = door(lambda y: ACT(y).exp())(y)  # noqa: B023
        return bits(torch.autograd.grad(y.sum(), x)[0])

    assert run(door) == run(plain)


def test_variables_that_the_function_sets_are_its_own():
    """Counters of calls count the rerun, as they count in the forward."""
    calls = 0

    def fn(x):
        nonlocal calls
        calls += 1
        return x.sin().exp()

    y = checkpointed(fn)(leaf())
    calls = 10
    y.sum().backward()
    assert calls == 11


def test_functions_keep_their_defaults_and_globals_when_their_variables_are_put_back():
    """The rerun's function differs in nothing else."""
    factor = 2.0

    def fn(x, a=3.0, *, b=5.0):
        return (x * factor * a * b).sin() * len(TABLES)

    x = leaf()
    y = checkpointed(fn)(x)
    factor = 7.0
    y.sum().backward()
    want = leaf()
    ((want * 2.0 * 3.0 * 5.0).sin() * len(TABLES)).sum().backward()
    assert bits(x.grad) == bits(want.grad)


TABLES = [1, 2]


def test_values_compares_variables():
    """Set anew by the code around, they are a difference that this check reports."""
    factor = 2.0
    y = checkpointed(lambda x: (x * factor).sin(), determinism_check="values")(leaf())
    factor = 3.0
    with pytest.raises(CheckpointError, match="position 0"):
        y.sum().backward()
