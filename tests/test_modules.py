"""`checkpoint_modules`: regions around whole modules, in place, and nothing else is changed."""

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import re
import weakref

import pytest
import torch
from oracle import bits, count, seed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from checkpointing import CheckpointError, auto, checkpoint_modules, checkpointed, forward_only
from checkpointing.torch_compat import checkpoint


class Block(nn.Module):
    """Exact arithmetic: whole numbers in, whole numbers out, as long as they are small."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.dropout(self.norm(self.linear(x)).relu())


class Model(nn.Module):
    def __init__(self, kind=Block, n=3):
        super().__init__()
        self.stem, self.layers = nn.Linear(4, 4), nn.ModuleList(kind() for _ in range(n))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x


def keeps_products(ctx, op, *args, **kwargs):
    return op == torch.ops.aten.addmm.default


X = (torch.arange(32.0) % 5 - 2).view(8, 4)
OPTIONS = {
    "rerun": {},
    "replay": {"backend": "replay"},
    "policy": {"policy": keeps_products},
    "checks": {"preserve_rng_state": "all", "determinism_check": "values", "debug": True},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def step(model, run=None):
    """The bits that one step leaves behind, and how many blocks were computed again in backward."""
    seed(1)
    model.zero_grad()
    loss = (model if run is None else run)(X).square().sum()
    again = count(loss.backward).get("relu", 0)
    grads = [p.grad for p in model.parameters()]
    return bits([loss, grads, [*model.buffers()], torch.get_rng_state()]), again


def looks(model):
    """What a model shows of itself."""
    signature = inspect.signature(model.layers[0].forward)
    return [*model.state_dict()], [*map(type, model.modules())], signature, repr(model)


def state(model):
    """What a model is made of."""
    named = model.named_modules()
    return [(name, type(m), set(vars(m)), len(m._forward_hooks)) for name, m in named]


def plain(model):
    """What a step of it does without regions; the model is left alone."""
    return step(copy.deepcopy(model))[0]


@each_option
def test_bits_are_those_of_the_plain_model(options):
    """Two steps, then a third one without regions: outputs, gradients, buffers, random stream."""
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    with checkpoint_modules(model, Block, **options):
        assert step(model) == (step(twin)[0], 3)
        assert step(model) == (step(twin)[0], 3)
    assert step(model) == (step(twin)[0], 0)


LAYERS = [f"layers.{i}" for i in range(3)]
PARTS = [f"{layer}.{name}" for layer in LAYERS for name in ("norm", "dropout")]
BOTH_KINDS = ["stem", "layers.[12]", nn.Dropout]
SELECTIONS = {
    "class": (Block, LAYERS),
    "classes": ((nn.Dropout, nn.BatchNorm1d), PARTS),
    "one name": ("layers.1", ["layers.1"]),
    "one part of a name": ("layers.*", LAYERS),
    "a star alone, and what is never called": ("*", ["stem"]),
    "a piece of a part": ("layers.*.d*", PARTS[1::2]),
    "several": (BOTH_KINDS, ["stem", PARTS[1], LAYERS[1], PARTS[3], LAYERS[2], PARTS[5]]),
    "function": (lambda name, m: name.endswith("2") and isinstance(m, Block), ["layers.2"]),
    "the model itself": (Model, [""]),
    "everything": (nn.Module, None),
}


@pytest.mark.parametrize("select", SELECTIONS)
def test_select(select):
    model = Model()
    select, names = SELECTIONS[select]
    if names is None:
        names = [name for name, module in model.named_modules() if module is not model.layers]
    before, want, face = state(model), plain(model), looks(model)
    handle = checkpoint_modules(model, select)
    assert looks(model) == face
    assert list(handle.names) == names
    assert repr(handle).startswith(f"CheckpointedModules('{names[0]}'")
    assert step(model)[0] == want
    handle.remove()
    assert state(model) == before


def test_shared_modules_once():
    """A module with several names is one region a call, whichever name is picked."""
    model = Model()
    model.layers[2] = model.layers[0]
    model.again = model.layers[0]
    want = plain(model)
    with checkpoint_modules(model, "again") as handle:
        assert (handle.names, step(copy.deepcopy(model))) == (("again",), (want, 2))
    assert checkpoint_modules(model, Block).names == ("layers.0", "layers.1")
    assert step(model) == (want, 3)


Decorated = checkpointed(type("Decorated", (Block,), {}))


class DecoratedMethod(Block):
    @checkpointed
    def forward(self, x, *, scale=1.0):
        return super().forward(x, scale=scale)


class Holding(nn.Module):
    """With a region in an attribute."""

    def __init__(self, backend="rerun"):
        super().__init__()
        self.block = Block()
        self.run = checkpointed(self.block, backend=backend)

    def forward(self, x, *, scale=1.0):
        return self.run(x, scale=scale)


def with_handle(select="layers.1", **options):
    model = Model()
    checkpoint_modules(model, select, **options)
    return model


def with_decorated_forwards(wrap=checkpointed):
    model = Model()
    for layer in model.layers:
        layer.forward = wrap(layer.forward)
    return model


REGIONS = {
    **{name: functools.partial(with_handle, "layers.*", **OPTIONS[name]) for name in OPTIONS},
    "decorated class": lambda: Model(Decorated),
    "decorated method": lambda: Model(DecoratedMethod),
    "instance in an attribute": lambda: Model(Holding),
    "replay in an attribute": lambda: Model(lambda: Holding("replay")),
    "instance as a layer": lambda: Model(lambda: checkpointed(Block())),
    "replay as a layer": lambda: Model(lambda: checkpointed(Block(), backend="replay")),
    "forward": with_decorated_forwards,
    "forward, replay": lambda: with_decorated_forwards(checkpointed(backend="replay")),
    "forward in the drop-in": lambda: with_decorated_forwards(checkpoint(use_reentrant=False)),
    "forward in a partial": lambda: with_decorated_forwards(
        lambda forward: functools.partial(checkpoint, forward, use_reentrant=False)
    ),
}

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}
WITH_FORWARDS = {
    **COPIES,
    "AveragedModel": lambda model: AveragedModel(model).module,
    "pickled by the forward of a block": lambda model: pickle.loads(
        pickle.dumps((model.layers[0].forward, model))
    )[1],
    "after a forward": lambda model: copy.deepcopy((model.layers[1].forward, model))[1],
}
# Of options the two that choose the backend in all ways, the others by turns.
WAYS = dict.fromkeys(("rerun", "replay"), WITH_FORWARDS)
WAYS |= {"policy": [*WITH_FORWARDS][::2], "checks": [*WITH_FORWARDS][1::2]}


@pytest.mark.parametrize(
    ("regions", "how"), [(name, how) for name in REGIONS for how in WAYS.get(name, COPIES)]
)
def test_copies_run_their_own_parameters_in_regions(regions, how):
    """And get the gradients; the original's are left alone, and it still runs its own."""
    model = REGIONS[regions]()
    twin, plain_twin = WITH_FORWARDS[how](model), Model()
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    names, states = plain_twin.state_dict(), twin.state_dict().items()
    values = [value for name, value in states if ".run." not in name]  # the same once more
    plain_twin.load_state_dict(dict(zip(names, values, strict=True)))
    before = bits(model.state_dict())
    is_by_name = regions in ("forward", "forward, replay") and how == "pickle"
    assert step(twin) == (step(plain_twin)[0], 0 if is_by_name else 3)
    assert all(p.grad is None for p in model.parameters()) and bits(model.state_dict()) == before
    assert step(model)[1] == 3


@each_option
@pytest.mark.parametrize("hooked", [False, True])
def test_shallow_copies_run_their_own_parameters(options, hooked):
    """By `copy.copy`, or with another class, as facebookresearch's `higher` makes them."""
    block, x = Block(), X.clone().requires_grad_()
    checkpoint_modules(nn.Sequential(block), "0", **options)

    class Other(Block):
        def forward(self, x, *, scale=1.0):
            return super().forward(x, scale=scale * 3)

    other = Other()
    vars(other)["forward"] = block.forward
    for twin in (copy.copy(block), other):
        twin._modules = copy.deepcopy(block._modules)
        twin.linear.weight.data.mul_(2)
        if hooked:
            twin._forward_hooks = {0: lambda *_: None}
        want = copy.deepcopy(twin)
        del want.forward
        assert step(twin) == (step(want)[0], 1)
    assert block.linear.weight.grad is None
    assert torch.equal(block.forward(x), Block.forward(block, x)) or block.training


def test_a_handle_is_for_its_own_model():
    """Copies have regions of their own, and with a copy of the handle they can be removed."""
    model = Model()
    handle = checkpoint_modules(model, Block)
    twin, (other, its_handle) = copy.deepcopy(model), copy.deepcopy((model, handle))
    handle.remove()
    assert [step(each)[1] for each in (model, twin, other)] == [0, 3, 3]
    its_handle.remove()
    for layer in twin.layers:
        del layer.forward
    assert [step(each)[1] for each in (twin, other)] == [0, 0]


def test_hooks_of_the_modules_run_once():
    model, seen = Model(), []
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    handle = checkpoint_modules(model, Block)
    model.layers[0].register_forward_hook(lambda *_: seen.append("after"))
    model.layers[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    assert step(model)[1] == 3 and seen == ["before", "after", "backward"]
    handle.remove()
    assert step(model)[1] == 0 and seen == ["before", "after", "backward"] * 2


def test_handles_are_removed_in_any_order_and_more_than_once():
    """Nothing is left behind; what waits for backward is still recomputed."""
    model = Model()
    before = state(model)
    for order in itertools.permutations(range(3)):
        handles = [checkpoint_modules(model, select) for select in ("layers.*", nn.Linear, Model)]
        for i in (*order, *order):
            handles[i].remove()
        assert state(model) == before
    with pytest.raises(KeyError), checkpoint_modules(model, Block):
        loss = model(X).sum()
        raise KeyError
    assert state(model) == before
    assert count(loss.backward)["relu"] == 3
    message = r"CheckpointedModules\('layers.0', .* once more"
    with pytest.raises(CheckpointError, match=message), handles[0]:
        pass


Static = type("Static", (nn.Module,), {"forward": staticmethod(torch.sin)})


def hooked(model, layer=1):
    """With a forward replaced as accelerate's hooks do."""
    module = model.layers[layer]
    old = module.forward
    module._old_forward = old
    module.forward = functools.update_wrapper(
        functools.partial(lambda m, *a, **k: m._old_forward(*a, **k), module), old
    )
    return model


THERE = r"There are 1 Model '', .*3 Block 'layers\.\*', "
NONE = r"ValueError: .* picks no module of this Model"
KIND = "TypeError: .* select is a class, a pattern .* not"
IN_REGION = r"ValueError: .*layers\.1 \(Block\) runs in a region already\. .*remove\(\)"
NO_FORWARD = "TypeError: .* no method `forward`"
UNKNOWN = "TypeError: .* no option 'polcy', only backend, enabled,"
BOTH = {"backend": "rerun", "policy": auto()}
ERRORS = {
    "a class that is not there": (Model, nn.Conv2d, f"ValueError: .*Conv2d picks no .* {THERE}"),
    "a function that picks none": (Model, lambda *_: False, rf"{NONE}\. {THERE}"),
    "a name with a slip": (Model, "layer.*", f"ValueError: .* picks no .* {THERE}"),
    "the list of layers": (Model, "layers", f"ValueError: .* picks no .* {THERE}"),
    "no prefix": (lambda: nn.Sequential(Model()), "layers.*", r"Val.* 3 Block '\*\.layers\.\*'"),
    "no module": (lambda: Model, Block, "TypeError: .* takes a module, not <class"),
    "a module as select": (Model, nn.ReLU(), f"{KIND} ReLU"),
    "a handle before": (with_handle, Block, IN_REGION),
    "a forward decorated before": (with_decorated_forwards, "layers.1", IN_REGION),
    "a hook over a region": (lambda: hooked(with_handle()), Block, IN_REGION),
    "a decorated instance": (
        lambda: nn.Sequential(checkpointed(Block())),
        "*",
        r"ValueError: .*0 \(CheckpointedModule\) runs in a region already",
    ),
    "a decorated class": (lambda: Model(Decorated), Block, r".*layers\.0 \(Decorated\) runs in"),
    "a scripted module": (lambda: torch.jit.script(nn.Sequential(nn.ReLU())), "*", NO_FORWARD),
    "a static forward": (lambda: nn.Sequential(Static()), "*", f"{NO_FORWARD} in Python"),
    "an unknown option": (Model, Block, UNKNOWN, {"polcy": 1}),
    "a contradiction": (Model, Block, "ValueError: .* needs recorded operators", BOTH),
    "an error in the function": (Model, lambda name, _: {"": False}[name], "KeyError: 'stem'"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("case", ERRORS)
def test_errors_leave_the_model_as_it_was(case):
    make, select, message, *options = ERRORS[case]
    model = make()
    before = state(model) if isinstance(model, nn.Module) else None
    with pytest.raises((ValueError, TypeError, KeyError)) as caught:
        checkpoint_modules(model, select, **(options[0] if options else {}))
    assert re.match(message, f"{caught.typename}: {caught.value}")
    assert before is None or state(model) == before


class Forwarding(nn.Module):
    """As wrappers of peft do, it has the attributes of the module inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x)


def test_a_wrapper_around_a_region_is_no_region():
    model = nn.Sequential(Forwarding(checkpointed(Block())))
    assert checkpoint_modules(model, Forwarding).names == ("0",)


def test_a_function_that_runs_in_the_forward_only_is_no_region():
    """In the place of a forward: a module with it can be taken."""
    model = nn.Sequential(nn.Identity(), forward_only(nn.Identity()))
    model[0].forward = forward_only(functools.partial(torch.mul, other=2))
    assert checkpoint_modules(model, "*").names == ("0", "1", "1")


def test_forwards_that_somebody_else_has_replaced():
    """Hooks like accelerate's, below a region and over one; both may be taken off in any order."""
    model = Model()
    want = plain(model)
    before = state(hooked(model, 0))
    handle = checkpoint_modules(model, Block)
    twin = copy.deepcopy(model)
    del twin.layers[0]._old_forward
    with pytest.raises(AttributeError, match="_old_forward"):  # its region runs the hook, too
        twin(X)
    hooked(model)
    assert step(model) == (want, 3)
    handle.remove()
    assert step(model)[1] == 0 and "forward" in vars(model.layers[1])  # the hook stays
    model.layers[1].forward = model.layers[1]._old_forward  # as accelerate takes its hooks off
    del model.layers[1]._old_forward
    assert step(model)[1] == 0
    del model.layers[1].forward
    assert state(model) == before


def test_no_cycle_holds_the_parameters(no_gc):
    model = with_handle()
    step(model)
    layer, weight = weakref.ref(model.layers[1]), weakref.ref(model.layers[1].linear.weight)
    del model
    assert layer() is None and weight() is None


@pytest.mark.parametrize("when", ["before", "after", "around"])
@each_option
def test_fully_sharded(group, when, options):
    model = Model()
    want, before = plain(model), state(model)
    handle = None if when != "before" else checkpoint_modules(model, Block, **options)
    mesh = init_device_mesh("cpu", (1,))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    if handle is None:
        handle = checkpoint_modules(model, Block if when == "after" else Model, **options)
    seed(1)
    loss = model(X).square().sum()
    assert count(loss.backward)["relu"] == 3
    assert [bits(p.grad.to_local()) for p in model.parameters()] == want[2][1:]
    assert all(isinstance(m, Block) for m in model.layers)
    handle.remove()
    assert [name for name, _ in model.named_modules()] == [name for name, *_ in before]
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.filterwarnings("ignore")  # what the compiler says is not ours
@pytest.mark.parametrize("how", ["model", "in place", "blocks"])
def test_compiled(how):
    """As plain: before there are regions, with them and after."""
    models, runs = [Model(n=2)], []
    for layer in models[0].layers:
        layer.dropout.p = 0.0
    models.append(copy.deepcopy(models[0]))
    options = {"backend": "aot_eager", "fullgraph": True}
    torch._dynamo.reset()
    for model in models:
        for part in {"in place": [model], "blocks": model.layers}.get(how, []):
            part.compile(**options)
        runs.append(torch.compile(model, **options) if how == "model" else model)
    for in_regions in (False, True, False):
        with checkpoint_modules(models[0], Block) if in_regions else contextlib.nullcontext():
            have, want = (step(*each)[0] for each in zip(models, runs, strict=True))
        assert have == want
