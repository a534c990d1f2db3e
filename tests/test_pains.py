"""What users of checkpointing complain about, by its number in the project's list, where no other file tests it.

'Plain' is the same program without checkpointing. Everything holds for rerun and for replay. Elsewhere are:

    1, 3  test_ambient     2  test_buffers             4  test_state, test_api   5  test_keep
    6, 21 test_determinism 7  test_rng                 8, 9  test_counts, test_exceptions, test_lifetimes; here
    10    test_arguments, test_keep                    13 test_compat_reentrant  14 test_lifetimes
    15    test_compat_compile                          17 test_policy            18, 26 test_arguments
    19    test_transforms  20 test_threads, test_compat                          22 test_memory
    24    test_exceptions  27 test_compat              28, 30 test_api           29 replay/test_limits
"""

import contextlib
import contextvars
import functools
import logging
import sys
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from oracle import COPIES, bits, count
from oracle import c as rerun
from oracle import r as replay
from oracle import s as scope
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from checkpointing import CheckpointError, MismatchError, checkpointed
from checkpointing.torch_compat import checkpoint


def plain(fn, **options):
    """No region."""
    return fn


DOOR = pytest.mark.parametrize("door", [rerun, replay, scope])


def leaf(*shape):
    """Small integers, the same each time."""
    shape = torch.Size(shape or (4, 4))
    return (torch.arange(float(shape.numel())) % 5 - 2).view(shape).requires_grad_()


def same(door, program):
    """A program leaves the same bits behind with regions as without."""

    def run(door):
        torch.manual_seed(0)
        result = program(door)
        return [bits(t) for t in result], bits(torch.get_rng_state())

    assert run(door) == run(plain)


class Token:
    """Something to be watched."""


# ---- 8


@pytest.mark.parametrize("early_stop", [True, False])
@DOOR
def test_8_an_early_stop_is_nothing_that_the_users_handlers_see(door, early_stop):
    """A block of `except Exception` around the last tensor that is wanted."""
    seen = []

    def fn(x):
        try:
            return x.sin().exp()
        except Exception as error:
            seen.append(error)
            raise

    def program(door):
        x = leaf()
        door(fn, early_stop=early_stop)(x).sum().backward()
        return (x.grad,)

    same(door, program)
    assert seen == []


# ---- 11


@pytest.fixture(scope="module")
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def blocks():
    """Two blocks with whole numbers for weights, and an input."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(((torch.arange(float(p.numel())) + i) % 3 - 1).view_as(p))
    return model, leaf(2, 4)


def sharded(model, **options):
    """Each block, then all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def gradients_of(model, x):
    return [bits(g.to_local() if hasattr(g := p.grad, "to_local") else g) for p in model.parameters()], bits(x.grad)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("backend", ["rerun", "replay", "torch's wrapper"])
def test_11_fully_sharded_around_regions(group, backend, mixed):
    """Two forwards before one backward, with mixed precision, too."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def run(wrap):
        model, x = blocks()
        if wrap and backend == "torch's wrapper":
            wrapper = functools.partial(checkpoint_wrapper, checkpoint_fn=checkpoint, use_reentrant=False)
            model = nn.Sequential(*map(wrapper, model))
        elif wrap:
            for layer in model:
                layer.forward = checkpointed(layer.forward, backend=backend)
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
        model = sharded(model, **options)
        (model(x).float().sum() + model(x * 2).float().sum()).backward()
        return gradients_of(model, x)

    assert run(True) == run(False)


# ---- 12


@pytest.mark.filterwarnings("ignore:backend='reentrant' is deprecated:FutureWarning")
def test_12_ddp_with_the_reentrant_backend(group):
    """A block used twice: the error says what to use instead; that works."""

    class Twice(nn.Module):
        def __init__(self, backend):
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)
            self.run = checkpointed(self.block, backend=backend)

        def forward(self, x):
            return self.run(self.run(self.first(x)).relu())

    for backend in ("rerun", "replay", "reentrant"):
        model = nn.parallel.DistributedDataParallel(Twice(backend))
        with (
            pytest.raises(CheckpointError, match=r"DistributedDataParallel .*Use backend='rerun'")
            if backend == "reentrant"
            else contextlib.nullcontext()
        ):
            model(leaf()).sum().backward()


# ---- 16


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad @ y.t(), x.t() @ grad


@pytest.mark.parametrize("matmul", [torch.mm, Matmul.apply], ids=["operator", "custom Function"])
@pytest.mark.parametrize("nested", [False, True])
def test_16_selective_saving(matmul, nested):
    """A policy sees calls: the first of two products is kept; an inner region obeys it, too."""
    mms = []

    def first(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.mm.default:
            mms.append(op)
            return len(mms) == 1
        return False

    def inner(x):
        return matmul(matmul(x, x).relu(), x).relu().square()

    x = leaf()
    region = checkpointed(replay(inner) if nested else inner, policy=first)
    y = region(x)
    mms.clear()
    ran = count(y.sum().backward)
    assert ran["mm"] == 4 + 1  # of backward, and the second product
    assert bits(x.grad) == bits(torch.autograd.grad(inner(x).sum(), x)[0])


# ---- 23


def python_calls(run):
    """How many functions are called, Python's and C's."""
    calls = [0]

    def profile(frame, event, argument):
        calls[0] += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@DOOR
def test_23_a_region_costs_even_without_gradients(door, mode):
    """With grad mode off: no operators, and a few calls of functions."""
    x, fn = leaf(), lambda x: x.sin().exp()
    region = door(fn)
    with mode():
        assert count(lambda: region(x)) == {"sin": 1, "exp": 1}
        assert python_calls(lambda: region(x)) < python_calls(lambda: fn(x)) + 30


# ---- 25


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 0, 3, 1)])
@DOOR
def test_25_the_order_of_unpacking_is_relied_on(door, order):
    """Saved tensors are read in any order, by whomever; each read gives the value."""

    def program(door):
        x, outputs = leaf(), []

        def fn(x):
            for op in (torch.sin, torch.exp, torch.tanh, torch.cos, torch.sigmoid):
                x = op(x)
                outputs.append(x)
            return x

        y = door(fn)(x)
        nodes = [out.grad_fn for out in outputs]
        reads = {n: getattr(nodes[n], "_saved_result", None) for n in order}
        values = [(nodes[n]._saved_self if reads[n] is None else reads[n]).clone() for n in sorted(order)]
        return *values, torch.autograd.grad(y.sum(), x)[0]

    same(door, program)


# ---- 29


@DOOR
def test_29_a_later_write_that_no_version_shows(door):
    """`determinism_check="values"` finds it."""
    table = torch.ones(4)
    y = door(lambda x: (x * table).square(), determinism_check="values")(leaf())
    table.numpy()[:] = 2
    with pytest.raises(MismatchError, match="position"):
        y.sum().backward()


# ---- 31


class Config:
    """An object with a large dict."""

    def __init__(self, n):
        self.table = {f"key {i}": [i] for i in range(n)}
        self.hidden = 4


def logger(n):
    """In a tree of its own."""
    manager = logging.Manager(logging.RootLogger(logging.WARNING))
    for i in range(n // 10):
        manager.loggerDict[f"a.{i}"] = [logging.PlaceHolder(manager.root)] * 10
    return manager.getLogger("a.b")


class Trainer:
    """A plain object with a module, a list of words and a list of lists."""

    def __init__(self, n, block):
        self.words, self.batches, self.block = [f"word {i}" for i in range(n)], [[i] for i in range(n)], block

    def step(self, x):
        return self.block(x)


LOGGER = CONFIG = None


class Layer(nn.Module):
    """Names a logger and a configuration, as transformers' do."""

    def __init__(self, config):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), config

    def forward(self, x, config=None):
        if LOGGER is not None and CONFIG is not None and self.config.hidden == 0:
            LOGGER.warning(CONFIG.table)
        return self.linear(x).relu()


def test_31_what_a_region_could_reach_costs_nothing():
    """As many calls of functions, forward and backward, however much there is around it."""

    def calls(n, way):
        global LOGGER, CONFIG
        LOGGER, CONFIG = logger(n), Config(n)
        layer, x = Layer(Config(n)), leaf()
        trainer = Trainer(n, layer)
        region = {
            "module": lambda: rerun(layer)(x),
            "method": lambda: rerun(layer.forward)(x),
            "method of a trainer": lambda: rerun(trainer.step)(x),
            "lambda in it": lambda: rerun(lambda x: trainer.block(x))(x),
            "argument": lambda: rerun(lambda x, trainer, config: trainer.step(x))(x, trainer, config=CONFIG),
        }[way]
        try:
            region().sum().backward()
            return python_calls(lambda: region().sum().backward())
        finally:
            LOGGER = CONFIG = None

    for way in ("module", "method", "method of a trainer", "lambda in it", "argument"):
        assert calls(50_000, way) == calls(0, way), way


# ---- 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.linear(x).relu().square()


@checkpointed
class CheckpointedBlock(Block):
    pass


class MethodBlock(Block):
    @checkpointed
    def forward(self, x):
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, kind, backend=None):
        super().__init__()
        self.block = kind()
        if backend is not None:
            self.run = checkpointed(self.block, backend=backend)

    def forward(self, x):
        return getattr(self, "run", self.block)(x * 2)


def with_forward(backend):
    """The block's `forward` replaced on the instance."""
    model = Model(Block)
    model.block.forward = checkpointed(model.block.forward, backend=backend)
    return model


WRAPPED = {
    "decorated class": lambda: Model(CheckpointedBlock),
    "decorated method": lambda: Model(MethodBlock),
    "instance in an attribute": lambda: Model(Block, "rerun"),
    "instance in an attribute, replay": lambda: Model(Block, "replay"),
    "forward of the instance": lambda: with_forward("rerun"),
    "forward of the instance, replay": lambda: with_forward("replay"),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("how", COPIES)
def test_32_copies_run_their_own_parameters(wrapped, how):
    """And get the gradients; the original's are left alone, and it still runs its own."""
    model = WRAPPED[wrapped]()
    twin, want = COPIES[how](model), Model(Block)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    want.load_state_dict(twin.state_dict())
    x, plain_x = leaf(), leaf()
    twin(x).sum().backward()
    want(plain_x).sum().backward()
    assert bits(x.grad) == bits(plain_x.grad)
    assert [bits(p.grad) for p in twin.parameters()] == [bits(p.grad) for p in want.parameters()]
    assert all(p.grad is None for p in model.parameters())
    assert (model.block.calls, twin.block.calls) == (0, 1)
    assert "relu" in count(model(leaf()).sum().backward)
    if not (wrapped.startswith("forward") and how in ("torch.save", "pickle")):  # pickled by name: the class's again
        assert "relu" in count(twin(leaf()).sum().backward)


# ---- 33


@pytest.mark.parametrize("how", ["module", "lambda", "method", "drop-in"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_33_sharded_first_and_regions_second(group, how, frozen, backend):
    """A region around a module that FSDP2 has sharded already."""

    def run(wrap):
        model, x = blocks()
        if frozen:
            model[0].requires_grad_(False)
        model = sharded(model)
        y = x * 2
        for layer in model:
            if not wrap:
                y = layer(y)
            elif how == "drop-in":
                y = checkpoint(layer, y, use_reentrant=False)
            else:
                fn = {"module": layer, "lambda": lambda y: layer(y), "method": layer.__call__}[how]  # noqa: B023
                y = checkpointed(fn, backend=backend)(y)
        y.sum().backward()
        return [g if g is None else bits(g.to_local()) for g in (p.grad for p in model.parameters())], bits(x.grad)

    assert run(True) == run(False)


# ---- 34


COLLECTED = contextvars.ContextVar("COLLECTED", default=None)


@DOOR
def test_34_collectors_in_context_variables(door, no_gc):
    """Nothing is collected twice; neither what was collected nor what a recompute collects is kept alive."""
    made = []

    def layer(x):
        y = x.sin()
        made.append(weakref.ref(y))
        COLLECTED.get()["attentions"][0].append(y)
        return y.exp()

    def run():
        collected = {"attentions": [[]], "names": {"a"}}
        COLLECTED.set(collected)
        x = leaf()
        y = x
        for _ in range(3):
            y = door(layer)(y)
        kept = collected["attentions"][0]
        assert [ref() for ref in made] == kept
        y.sum().backward(retain_graph=True)
        assert len(kept) == 3
        assert all(ref() is None for ref in made[3:])
        kept.clear()
        assert not any(ref() is not None for ref in made)
        y.sum().backward()  # whose recompute needs none of them
        assert kept == []
        assert not any(ref() is not None for ref in made)

    contextvars.copy_context().run(run)


# ---- 35


@DOOR
def test_35_a_frozen_base_with_adapters(door):
    """An input that `requires_grad_()` has made a leaf goes through the hooks around, as torch's does."""

    def program(door):
        frozen, adapter = nn.Linear(4, 4).requires_grad_(False), nn.Parameter(leaf().detach())
        hidden = (leaf().detach() + 1).requires_grad_()
        with save_on_cpu():
            y = door(lambda x: (frozen(x).relu() + x @ adapter).square())(hidden)
        y.sum().backward()
        return y, hidden.grad, adapter.grad

    same(door, program)
    packed, x, p = [], leaf(), nn.Parameter(leaf().detach())
    with saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        door(lambda x: (x @ p).square())(x)
        with_torch = len(packed)
        torch.utils.checkpoint.checkpoint(lambda x: (x @ p).square(), x, use_reentrant=False)
    assert packed == [x.data_ptr()] * 2
    assert with_torch == 1


# ---- 37


class Cache:
    """As transformers' `DynamicCache`: an object with layers, which grow."""

    def __init__(self):
        self.layers = [Token(), Token()]
        for layer in self.layers:
            layer.keys = torch.zeros(0, 4)

    def update(self, keys, i):
        self.layers[i].keys = torch.cat([self.layers[i].keys, keys])
        return self.layers[i].keys


@pytest.mark.parametrize("view", [False, True])
@DOOR
def test_37_a_cache_is_grown_inside_a_region(door, view):
    """Rerun: an error of a few lines that names the argument and says what helps; replay handles it."""

    def attend(x, past):
        keys = past.update(x * 2, 1)
        return (x @ keys.t()).square() if view else keys.square()

    def program(door):
        cache, x = Cache(), leaf()
        y = door(attend)(x, past=cache)
        y.sum().backward()
        return x.grad, cache.layers[1].keys.detach()

    if door is not rerun:
        same(door, program)
        return
    with pytest.raises(MismatchError) as caught:
        program(door)
    text = str(caught.value)
    for words in ("finds kwargs['past'] as left by the forward", "use_cache=False", "backend='replay'"):
        assert words in text
    assert text.count("\n") < 16
    assert len(text) < 2000


def test_37_what_a_cache_holds_decides_what_is_computed():
    """T5 and Whisper, without `use_cache=False`: another parameter is met, with the same remedy."""
    layer, w = types.SimpleNamespace(keys=None), torch.nn.Parameter(torch.ones(3))

    def attend(x, past):
        layer.keys = x * w if layer.keys is None else layer.keys
        return layer.keys.sin() * x

    past = types.SimpleNamespace(cache=types.SimpleNamespace(layers=[layer]))
    with pytest.raises(MismatchError, match="no parameter where the forward saved a parameter") as caught:
        rerun(attend)(torch.ones(3, requires_grad=True), past=past).sum().backward()
    assert "kwargs['past'] and the variable 'layer' as left by the forward" in str(caught.value)


def test_37_a_function_that_fails_on_its_grown_cache_says_so():
    """What names the argument and what helps, from the function's own exception."""
    cache, x = Cache(), leaf()
    y = rerun(lambda x, past: past.update(x * 2, 1) * torch.ones(x.shape))(x, past=cache)
    with pytest.raises(MismatchError, match=r"kwargs\['past'\] as left by the forward.*use_cache=False") as caught:
        y.square().sum().backward()
    assert "must match the size" in str(caught.value.__cause__)
