"""Buffers of modules in training mode are written once: a rerun rewinds them in place and puts them
back. Large ones and those of modules in evaluation mode are guarded."""

import functools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import at_once, bits, count, plain
from oracle import s as scope
from torch import nn
from torch.nn.utils import parametrizations

from checkpointing import ChangedError, auto, checkpoint_scope, checkpointed, is_recomputing, opaque

RERUNS = {
    "rerun": checkpointed,
    "rerun to the end": lambda fn: checkpointed(fn, early_stop=False),
    "rerun in rerun": lambda fn: checkpointed(checkpointed(fn)),
    "scope in rerun": lambda fn: checkpointed(scope(fn)),
    "rerun in scope": lambda fn: scope(checkpointed(fn)),
}
REPLAYS = {"replay": lambda fn: checkpointed(fn, backend="replay"), "scope": scope}
DOORS = {**RERUNS, **REPLAYS}
DOOR = pytest.mark.parametrize("door", DOORS)


def leaf():
    return (torch.arange(24.0).view(6, 4) % 5 - 2).requires_grad_()


# ---- modules that write their buffers


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return (x * self.calls.item()).square()


class SetAnew(nn.Module):
    """Assigns its buffer instead of writing it; with None before the first forward, if `lazy`."""

    def __init__(self, lazy=False):
        super().__init__()
        self.register_buffer("mean", None if lazy else torch.zeros(4))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.mean = x.detach().sum(0) if self.mean is None else self.mean * 0.5 + x.detach().sum(0)
        return (x * self.mean).square()


class SavedAndSetAnew(SetAnew):
    """Autograd saves the buffer itself, which is put back before its node has run."""

    def forward(self, x):
        y = (x * self.mean).square()
        self.mean = self.mean * 3 + 1
        self.last.add_(1)
        return y


class CodeBook(nn.Module):
    """Vector quantisation whose code book moves."""

    def __init__(self, size=8, persistent=True):
        super().__init__()
        self.register_buffer("book", (torch.arange(size * 4.0).view(size, 4) % 7) - 3, persistent)

    def forward(self, x):
        codes = (x.detach()[:, None] - self.book).abs().sum(2).argmin(1)
        chosen = self.book[codes]
        with torch.no_grad():
            self.book.mul_(0.5).add_(
                F.one_hot(codes, len(self.book)).float().t() @ x.detach(), alpha=0.5
            )
        return (x * chosen).square()


class Shared(nn.Module):
    """One memory in several places: a buffer of two modules, a view of a buffer, a list beside
    it."""

    def __init__(self, how):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.child = nn.Module()
        self.child.register_buffer(
            "mean", self.mean if how == "two modules" else self.mean.view(2, 2)
        )
        self.stats = [self.mean]
        self.how = how

    def forward(self, x):
        self.mean.add_(x.detach().sum(0))
        other = self.stats[0] if self.how == "list" else self.child.mean.view(4)
        return (x * other.clone() + self.mean.clone()).square()


class Rows(nn.Module):
    """Running statistics in rows and columns of one buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("both", torch.stack([torch.zeros(4), torch.ones(4)]))

    def forward(self, x):
        return F.batch_norm(x, self.both[0], self.both[1], training=True).square()


class OldStyle(nn.Module):
    """Writes through `.data`, which no version counter shows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.data.mul_(0.5).add_(x.data.sum(0))
        return (x * self.mean.clone()).square()


class WrittenThenSaved(nn.Module):
    """Autograd saves a buffer that the same call has written before, with a trace in its version
    or without."""

    def __init__(self, how):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4, momentum=0.5, affine=False)
        self.how = how

    def forward(self, x):
        if self.how == "lerp_":
            self.mean.lerp_(x.detach().sum(0), 0.5)
        elif self.how == "data":
            self.mean.data.mul_(0.5).add_(x.data.sum(0))
        else:
            with torch.no_grad():
                self.norm(x)
        mean = self.norm.running_mean if self.how == "kernel" else self.mean
        return torch.addcmul(x, x * mean, mean[None].expand_as(x))


class Grown(Counter):
    """Rotary embeddings that grow, as those of transformers: a number beside a cache says what
    is in it. None in it at first: the cache is made when the module is first called."""

    def __init__(self, length):
        super().__init__()
        self.length = 0
        self.grow(length)

    def grow(self, length):
        if length > self.length:
            self.length = length
            self.register_buffer("scale", torch.full((4,), float(length)), persistent=False)

    def forward(self, x):
        self.grow(len(x))
        return super().forward(x * self.scale)


class Renamed(nn.Module):
    """Buffers in their order, of which one goes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.full((4,), 2.0))
        self.register_buffer("second", torch.full((4,), 3.0))

    def forward(self, x):
        for buffer in list(self.buffers()):
            x = (x + 1) * buffer
        if hasattr(self, "first"):
            del self.first
        return x.square()


class Cached(nn.Module):
    """What it derives from a buffer is cached by the tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("calls", torch.zeros(()))
        self.derived = functools.lru_cache(lambda scale: scale.square())
        self.derived(self.scale)

    def forward(self, x):
        self.calls.add_(1)
        return (x * self.derived(self.scale)).square()


class Resized(nn.Module):
    """As an observer: the first data says how large the buffer is, or later ones do."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("least", torch.full((size,), 1.0))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        now = x.detach().amin(0)
        if self.calls == 0:
            self.least.resize_(now.shape).copy_(now)
        self.least.copy_(torch.minimum(self.least * 0.5, now))
        self.calls += 1
        return (x * self.least.clone()).square()


def scripted(module, by=torch.jit.script):
    torch._C._jit_set_profiling_mode(
        False
    )  # which compiles anew, with other bits, what runs the second time
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return by(module)


class ScriptedAnew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.ones(()))
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x):
        self.calls = self.calls + 1
        self.sum.add_(x.detach().sum(0))
        return (x * self.calls + self.sum.clone()).tanh()


class Seeded(nn.Module):
    """Dropout with a generator of its own, and a module that has another."""

    def __init__(self, inner=None):
        super().__init__()
        self.rng = torch.Generator().manual_seed(3)
        self.inner = inner

    def forward(self, x):
        x = x * torch.rand(x.shape, generator=self.rng)
        return x.square() if self.inner is None else self.inner(x).square()


def sequence(*modules):
    """With something to recompute on both sides."""
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *modules, nn.Tanh())


MODULES = {
    "BatchNorm1d": lambda: sequence(nn.BatchNorm1d(4)),
    "BatchNorm1d, alone": lambda: nn.BatchNorm1d(4),
    "BatchNorm1d, last": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "BatchNorm1d, cumulative": lambda: sequence(nn.BatchNorm1d(4, momentum=None)),
    "BatchNorm1d, not affine": lambda: sequence(nn.BatchNorm1d(4, affine=False)),
    "BatchNorm1d, no statistics": lambda: sequence(nn.BatchNorm1d(4, track_running_stats=False)),
    "BatchNorm2d": lambda: sequence(nn.Unflatten(1, (2, 2, 1)), nn.BatchNorm2d(2), nn.Flatten()),
    "SyncBatchNorm": lambda: sequence(nn.SyncBatchNorm(4)),
    "InstanceNorm1d": lambda: sequence(
        nn.Unflatten(1, (2, 2)),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(),
    ),
    "spectral_norm": lambda: sequence(parametrizations.spectral_norm(nn.Linear(4, 4))),
    "spectral_norm, old": lambda: sequence(nn.utils.spectral_norm(nn.Linear(4, 4))),
    "weight_norm": lambda: sequence(parametrizations.weight_norm(nn.Linear(4, 4))),
    "counter": Counter,
    "set anew": SetAnew,
    "saved and set anew": SavedAndSetAnew,
    "None that becomes a tensor": lambda: SetAnew(lazy=True),
    "code book": CodeBook,
    "code book, not persistent": lambda: CodeBook(persistent=False),
    "two modules": lambda: Shared("two modules"),
    "view of another": lambda: Shared("view"),
    "in a list, too": lambda: Shared("list"),
    "rows of one": Rows,
    "through .data": OldStyle,
    "written, then saved": lambda: WrittenThenSaved("lerp_"),
    "written through .data, then saved": lambda: WrittenThenSaved("data"),
    "written by a kernel, then saved": lambda: WrittenThenSaved("kernel"),
    "grown": lambda: Grown(2),
    "made when it is needed": lambda: Grown(0),
    "one that goes": Renamed,
    "cached by the tensor": Cached,
    "resized from none": lambda: Resized(0),
    "resized from one": lambda: Resized(1),
    "resized from more": lambda: Resized(9),
    "scripted": lambda: nn.Sequential(nn.Linear(4, 4), scripted(ScriptedAnew()), nn.Tanh()),
    "all of it scripted": lambda: scripted(nn.Sequential(nn.Linear(4, 4), ScriptedAnew())),
    "a generator of its own": lambda: sequence(Seeded(Seeded())),
    "nested": lambda: nn.Sequential(sequence(nn.BatchNorm1d(4)), Counter()),
}
MODULE = pytest.mark.parametrize("module", MODULES)


def made(name):
    torch.manual_seed(1)
    return MODULES[name]()


def left(model, *tensors):
    state = {name: (bits(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    grads = [None if p.grad is None else bits(p.grad) for p in model.parameters()]
    streams = [bits(m.rng.get_state()) for m in model.modules() if isinstance(m, Seeded)]
    return (
        list(state),
        state,
        grads,
        streams,
        [m.training for m in model.modules()],
        [bits(t) for t in tensors],
    )


def train(model, fn, steps=3):
    torch.manual_seed(0)
    seen = []
    for _ in range(steps):
        x = leaf()
        y = fn(x)
        y.square().sum().backward()
        seen += [y, x.grad]
    return left(model, *seen)


@MODULE
@DOOR
def test_buffers_are_written_once(module, door):
    """Gradients, parameters, and buffers with their versions and their order in `state_dict` are
    as plain."""
    model, want = made(module), made(module)
    assert train(model, DOORS[door](model)) == train(want, want)


# Of those that are written before they are saved plain autograd can have one forward at a time.
@pytest.mark.parametrize("module", [name for name in MODULES if "then saved" not in name])
@pytest.mark.parametrize("door", ["rerun", "rerun to the end", "scope in rerun"])
def test_each_region_has_the_buffers_of_its_own_beginning(module, door):
    """Three forwards, and then their backwards in another order."""

    def run(door):
        model = made(module)
        fn, xs = door(model), [leaf(), leaf(), leaf()]
        ys = [fn(x) for x in xs]
        for i in (1, 2, 0):
            ys[i].square().sum().backward()
        return left(model, *ys, *(x.grad for x in xs))

    assert run(DOORS[door]) == run(plain)


# ---- where modules are looked for


class Owner:
    """An object that is no module, and has one."""

    def __init__(self, module):
        self.part = module

    def call(self, x):
        return self.part(x)


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


def by_default(module):
    def fn(x, module=module):
        return module(x)

    return fn


WAYS = {
    "module": lambda module: module,
    "forward": lambda module: module.forward,
    "partial": lambda module: functools.partial(lambda m, x: m(x), module),
    "closure": lambda module: lambda x: module(x),
    "closure over a method": lambda module: (lambda forward: lambda x: forward(x))(module.forward),
    "closure over a list": lambda module: (lambda modules: lambda x: modules[0](x))([module]),
    "attribute of the object it is bound to": lambda module: Owner(module).call,
    "global that its code names": of_global,
    "default": by_default,
    "global that a function in a region names": lambda module: checkpointed(
        of_global(module), policy=auto()
    ),
    "closure over a partial": lambda module: (lambda part: lambda x: part(x))(
        functools.partial(module)
    ),
    "argument of a partial in the closure": lambda module: (lambda part: lambda x: part(x))(
        functools.partial(lambda m, x: m(x), module)
    ),
    "global that a comprehension names": of_global_in_parts,
}
GIVEN = {  # among the arguments, at any depth of containers, and as methods
    "argument": (lambda m, x: m(x), lambda module: module),
    "in containers": (lambda s, x: s[0]["m"](x), lambda module: [{"m": module}]),
    "bound method": (lambda m, x: m(x), lambda module: module.forward),
}


def region_of(way, door, module):
    if way == "keyword":
        return functools.partial(door(lambda x, m: m(x)), m=module)
    if way in WAYS:
        return door(WAYS[way](module))
    fn, given = GIVEN[way]
    return functools.partial(door(fn), given(module))


WAY = pytest.mark.parametrize("way", [*WAYS, *GIVEN, "keyword"])


@WAY
@pytest.mark.parametrize("module", ["BatchNorm1d", "counter", "set anew", "two modules"])
def test_where_modules_are_looked_for(module, way):
    """The function, what it is bound to and the attributes of that, its closure, globals that
    its code names, arguments."""
    model, want = made(module), made(module)
    assert train(model, region_of(way, checkpointed, model)) == train(want, want)


# ---- what is guarded

GUARDED = {"large": lambda: CodeBook(5000), "evaluation mode": lambda: CodeBook().eval()}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", GUARDED)
def test_large_buffers_and_those_in_evaluation_mode_that_are_written_are_refused_by_rerun(
    what, door
):
    """The error names the buffer and the remedy, with which it is as plain."""
    model, want = GUARDED[what](), GUARDED[what]()
    if door in REPLAYS:
        assert train(model, DOORS[door](model)) == train(want, want)
    else:
        with pytest.raises(
            ChangedError, match=r"CodeBook\.book .* was changed in place .*backend='replay'"
        ):
            train(model, DOORS[door](model))


@pytest.mark.parametrize("what", GUARDED)
def test_they_are_guarded_until_backward(what):
    """Another's write in between is an error."""
    module = GUARDED[what]()
    fn = checkpointed(lambda x: (x * module.book[0]).square())
    x = leaf()
    assert "clone" not in count(lambda: fn(x))
    fn(x).sum().backward()
    want = leaf()
    (want * module.book[0]).square().sum().backward()
    assert bits(x.grad) == bits(want.grad)
    y = fn(leaf())
    module.book.add_(1)
    with pytest.raises(ChangedError, match=r"CodeBook\.book"):
        y.sum().backward()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_region_runs_no_operators_but_the_copies(mode):
    """One clone per buffer in training mode, none otherwise."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), leaf()
    getattr(model, mode)()
    want = count(lambda: model(x))
    have = count(lambda: checkpointed(model)(x))
    copies = {"clone": 3} if mode == "train" else {}
    assert have == {**want, **copies}
    y = checkpointed(lambda x: model(x).relu())(x)
    ran = count(y.sum().backward)
    assert (ran.get("clone", 0), ran.get("_foreach_copy_", 0)) == (
        (5, 2) if mode == "train" else (0, 0)
    )


# ---- in place


def test_the_rerun_has_the_very_tensors():
    """Not copies: aliases, caches and whatever else is keyed by a tensor stay what they are."""
    seen = []

    class Looks(Counter):
        def forward(self, x):
            seen.append(
                (id(self.calls), id(vars(self)["_buffers"]), self.calls.item(), self.calls._version)
            )
            return super().forward(x)

    checkpointed(Looks())(leaf()).sum().backward()
    assert len(seen) == 2
    assert seen[0] == seen[1]


class WritesWhatItSaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        y = x * self.scale
        self.scale += 1
        return y.square()


@pytest.mark.parametrize("door", ["rerun", "rerun to the end"])
def test_a_buffer_that_is_written_after_it_was_saved_is_brought_back_as_it_was(door):
    """Plain autograd refuses; a rerun delivers neither what was written since nor what is there
    now."""
    model, x = WritesWhatItSaved(), leaf()
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        WritesWhatItSaved()(leaf()).sum().backward()
    DOORS[door](model)(x).sum().backward()
    assert torch.equal(x.grad, 8 * x)
    assert torch.equal(model.scale, torch.full((4,), 3.0))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_buffers_and_training_flags_are_put_back_after_an_error(error):
    """Values, versions and the tensors themselves; flags that the rerun sets are dropped, too."""
    model = nn.Sequential(nn.BatchNorm1d(4), Counter(), SetAnew(), nn.Dropout(0.5))

    def fn(x):
        model[3].eval()
        y = model(x)
        if is_recomputing():
            raise error
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


@pytest.mark.parametrize("size", [4, 20_000], ids=["small", "large"])
def test_an_opaque_block_finds_versions_that_tell_written_from_fresh(size):
    """A scope in a rerun looks at them."""

    def run(door):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm1d(size).train(size == 4), torch.randn(3, size, requires_grad=True)

        def f(x):
            with checkpoint_scope(), opaque():
                return norm(x)

        for _ in range(2):
            door(f)(x).square().sum().backward()
        return left(norm, x.grad)

    assert run(checkpointed) == run(plain)


# ---- threads


@pytest.mark.parametrize(
    "shared", [nn.GELU(), nn.BatchNorm1d(4).eval()], ids=["no state", "buffers, evaluation"]
)
@pytest.mark.parametrize("door", ["rerun", "replay"])
def test_ranks_that_are_threads_share_a_module_with_a_barrier_in_the_region(door, shared):
    """No lock is held while user code runs."""
    barrier = threading.Barrier(2, timeout=30)
    want = torch.autograd.grad(shared(nn.BatchNorm1d(4)(x := leaf())).square().sum(), x)[0]

    def rank():
        own = nn.BatchNorm1d(4)

        def fn(x):
            barrier.wait()
            return shared(own(x)).square()

        x = leaf()
        for _ in range(3):
            x.grad = None
            DOORS[door](fn)(x).sum().backward()
        assert bits(x.grad) == bits(want)

    at_once(rank, rank)


@pytest.mark.parametrize("door", ["rerun", "replay"])
def test_threads_that_train_one_module(door):
    """Gradients are those of all steps."""
    linear = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        linear.weight.fill_(1.0)
    counter, lock = Counter(), threading.Lock()
    grads = []

    def fn(x):
        return counter(linear(x)) if door == "replay" else linear(x).square()

    def trainer():
        for _ in range(20):
            x = leaf()
            with lock:
                y = DOORS[door](fn)(x)
                scale = counter.calls.item() if door == "replay" else 1
            (gradient,) = torch.autograd.grad(y.sum(), linear.weight)
            grads.append(gradient / scale**2)

    at_once(trainer, trainer)
    want = torch.autograd.grad(linear(leaf()).square().sum(), linear.weight)[0]
    assert [bits(g) for g in grads] == [bits(want)] * 40
    if door == "replay":
        assert counter.calls == 40


def test_wide_normalisation_is_written_once():
    """However large its statistics: its kernels change no version that could be guarded."""
    norm = nn.BatchNorm1d(20_000)
    checkpointed(norm)(torch.ones(2, 20_000, requires_grad=True)).sum().backward()
    assert norm.num_batches_tracked == 1
    assert (norm.running_mean == 0.1).all()


def test_a_buffer_of_64_kib_is_written_once():
    """The largest that is copied before every forward."""
    module = nn.Module()
    module.register_buffer("calls", torch.zeros(1 << 14))
    module.forward = lambda x: (x * module.calls.add_(1)[0]).square()
    checkpointed(module)(leaf()).sum().backward()
    assert module.calls.nbytes == 64 * 1024 and module.calls[0] == 1


@pytest.mark.parametrize(
    "make", [lambda t: t.to_sparse(), lambda t: t.to(torch.complex64).conj(), lambda t: t[:, ::2]]
)
def test_buffers_of_odd_layouts(make):
    """Sparse, conjugate and with gaps."""
    module, x = nn.Module(), torch.ones(4, 2, requires_grad=True)
    module.register_buffer("odd", make(torch.eye(4)))
    version = module.odd._version
    odd = lambda: module.odd.to_dense() if module.odd.is_sparse else module.odd.resolve_conj()  # noqa: E731
    module.forward = lambda x: (odd().real @ x[: odd().shape[1]]).square()
    checkpointed(module)(x).sum().backward()
    assert (x.grad[: odd().shape[1]] >= 0).all()
    assert module.odd._version == version


class Registers(nn.Module):
    """Makes its buffer when it is first called."""

    def forward(self, x):
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros(()))
        self.calls += 1
        return (x * self.calls.clone()).square()


def test_the_first_buffer_of_a_module_made_inside_a_region_is_written_again():
    """A limit, which one call before lifts."""

    def calls(before):
        model = Registers()
        for _ in range(before):
            model(leaf())
        checkpointed(model)(leaf()).sum().backward()
        return model.calls.item() - before

    assert (calls(before=0), calls(before=1)) == (2, 1)


class Initialised(nn.Module):
    """By the first data that it meets; that it has been, an attribute says."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.is_new = True

    def forward(self, x):
        if self.is_new:
            self.scale.copy_(x.detach().abs().sum(0) + 1)
            self.is_new = False
        return (x * self.scale).square()


def test_a_buffer_is_rewound_and_an_attribute_beside_it_is_not():
    """A limit, which one call before lifts."""

    def gradient(door, before):
        model, x = Initialised(), leaf()
        for _ in range(before):
            model(x)
        door(model)(x).sum().backward()
        return bits(x.grad)

    assert gradient(checkpointed, before=1) == gradient(plain, before=1)
    assert gradient(checkpointed, before=0) != gradient(plain, before=0)


def test_a_buffer_that_is_deleted_before_backward():
    """The rerun finds it, and afterwards it is gone."""
    module, x = nn.Module(), torch.ones(3, requires_grad=True)
    module.register_buffer("twice", torch.full((3,), 2.0))
    module.forward = lambda x: (x * module.twice).square()
    y = checkpointed(module)(x)
    del module.twice
    y.sum().backward()
    assert (x.grad == 8).all()
    assert not hasattr(module, "twice")


# ---- training flags


def regular():
    """With modules that behave otherwise in evaluation."""
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), inner)


SWITCHES = {
    "to evaluation": (lambda m: None, lambda m: m.eval()),
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
        torch.manual_seed(0)
        model, x = regular(), leaf()
        before(model)
        y = door(model)(x)
        between(model)
        y.square().sum().backward()
        return left(model, y, x.grad)

    assert run(DOORS[door]) == run(plain)


@WAY
def test_training_flags_of_modules_wherever_they_are_looked_for(way):
    """The same places as for buffers."""

    def run(door):
        torch.manual_seed(0)
        model, x = regular(), leaf()
        y = region_of(way, door, model)(x)
        model.eval()
        y.square().sum().backward()
        return left(model, y, x.grad)

    assert run(checkpointed) == run(plain)


# ---- tensors of other types


@pytest.mark.parametrize("door", DOORS)
def test_a_memory_estimate_with_fake_tensors(door):
    """Nothing is computed; shapes come out, and buffers are written once."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        x = torch.randn(6, 4, requires_grad=True)
        for _ in range(2):
            DOORS[door](model)(x).square().sum().backward()
    assert x.grad.shape == x.shape
    assert type(model[1].running_mean) is FakeTensor
    assert model[1].num_batches_tracked._version == 3  # one of which made it


def test_a_wrapper_whose_view_is_saved_while_it_is_rewound():
    """What lies on a rewound buffer is known by the tensors that it consists of."""
    from torch.testing._internal.two_tensor import TwoTensor

    def run(door):
        module, x = nn.Module(), TwoTensor(leaf().detach(), leaf().detach() * 2).requires_grad_()
        module.register_buffer("mean", TwoTensor(torch.ones(4), torch.ones(4)))

        def forward(x):
            module.mean.add_(1)
            return (x * module.mean).sin() * module.mean[None].expand(6, 4)

        module.forward = forward
        for _ in range(2):
            door(module)(x).sum().backward()
        return bits([x.grad.a, x.grad.b, module.mean.a, module.mean.b])

    assert run(checkpointed) == run(plain)


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


def test_the_first_call_of_a_lazy_module_with_debug():
    """Its parameters have no shapes yet."""
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)), leaf()
    checkpointed(model, debug=True)(x).sum().backward()
    assert x.grad is not None and model[0].weight.grad is not None


class Doubles(nn.Module):
    """Writes its buffer, sets it anew, and saves a view of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.scale.add_(1)
        y = x * self.scale
        self.scale = self.scale * 2
        return (y + self.scale[None].expand(6, 4)).tanh() * self.scale[None].expand(6, 4)


@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm1d(4), Doubles], ids=["BatchNorm1d", "set anew"]
)
@pytest.mark.parametrize("door", DOORS)
def test_buffers_of_a_distributed_module(mesh, make, door):
    """`distribute_module` makes a DTensor of each: rewound as others are."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    def run(door):
        torch.manual_seed(0)
        model = distribute_module(nn.Sequential(nn.Linear(4, 4), make(), nn.Tanh()), mesh)
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
    checkpointed(lambda x: norms[-1](x).sin().exp())(
        torch.rand(4, 3, requires_grad=True)
    ).sum().backward()
    assert int(norms[-1].num_batches_tracked) == times
