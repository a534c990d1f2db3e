"""Parameters are known by their identity: one that is exchanged, brought in anew or updated between
forward and backward is right under replay, and right or refused in a rerun."""

import copy
import functools
import operator
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from oracle import (
    DEPRECATED,
    RERUNS,
    WAYS,
    Programs,
    bits,
    data,
    integers as leaf,
    plain,
    replay,
    rerun,
    same,
    same_bits,
)
from torch import nn

from checkpointing import ChangedError, MismatchError, checkpointed, is_recomputing

program = Programs()


@pytest.mark.parametrize("left_there", [False, True])
@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_may_be_gathered_inside_the_region(left_there, frozen):
    """ZeRO-3 as its hooks do it: the full parameter is there only while its module runs."""
    shard, module, x = data(9), nn.Linear(3, 3, bias=False), leaf(2, 3)

    def gather(*_):
        module.weight.data = shard.clone().view(3, 3)

    def release(*_):
        if not left_there:
            module.weight.data = torch.empty(0)

    gather()
    module.weight.requires_grad_(not frozen)
    want = torch.autograd.grad(module(x).square().sum(), x)
    module.weight.data = torch.empty(0)
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(release)
    y = rerun(lambda x: module(x).square())(x)
    assert module.weight.numel() == (9 if left_there else 0)
    same(torch.autograd.grad(y.sum(), x), want)


@program()
def parameters_that_are_initialised_inside(door):
    """A lazy module that nobody has run before: the recompute finds what the forward has made."""
    module, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3)), leaf(2, 3)
    y = door(module)(x)
    return y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])


class Adapted(nn.Module):
    """Frozen layers behind an adapter that the first forward makes."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Identity()
        frozen = [nn.Linear(3, 3, bias=False).requires_grad_(False) for _ in range(2)]
        self.layers = nn.Sequential(frozen[0], nn.Tanh(), frozen[1])

    def forward(self, x):
        if not hasattr(self.adapter, "scale"):
            self.adapter.scale = nn.Parameter(torch.full((3,), 2.0))
        return self.layers(x * self.adapter.scale).exp()


@program()
def a_parameter_of_a_module_that_had_none(door):
    model, x = Adapted(), leaf(2, 3)
    y = door(model)(x)
    return y, *torch.autograd.grad(y.sum(), [x, model.adapter.scale])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.two(self.one(x).relu()).square()


def around(door):
    net, x = Net(), leaf(2, 4)
    for part in (net.one, net.two):
        part.forward = door(part.forward)
    new = {name: (p.detach() * 2).requires_grad_() for name, p in net.named_parameters()}
    torch.func.functional_call(net, new, (x,)).sum().backward()
    return x.grad, *(p.grad for p in new.values()), *(p.grad for p in net.parameters())


def give(module, weight):
    del module.weight
    module.weight = weight


def in_an_inner_loop(door):
    """Step by step, as `higher` does."""
    net, x, total = Net(), leaf(2, 4), 0
    base = weights = [leaf(4, 4), leaf(4, 4) * 2]
    for _ in range(2):
        net.one._parameters["weight"], net.two._parameters["weight"] = weights
        total = total + door(net)(x).sum()
        weights = [w * 2 for w in weights]
    return torch.autograd.grad(total, [x, *base])


def cached(door):
    """`parametrize.cached()`: the recompute makes the weight that the forward found."""
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), leaf(2, 4)
    with nn.utils.parametrize.cached():
        layer(x)
        y = door(layer)(x)
    y.sum().backward()
    return x.grad, *(p.grad for p in layer.parameters())


LOOPS = {"by a functional call": around, "in an inner loop": in_an_inner_loop, "cached": cached}


def swapped(net):
    net.one.weight, net.two.weight = net.two.weight, net.one.weight


EXCHANGES = {
    "assigned": lambda net: give(net.one, nn.Parameter(torch.zeros(4, 4))),
    "a tensor that is no parameter": lambda net: give(net.one, torch.zeros(4, 4)),
    "a child": lambda net: setattr(net, "two", nn.Linear(4, 4, bias=False)),
    "swapped": swapped,
}


def afterwards(door, change):
    net, x = Net(), leaf(2, 4)
    y, then = door(net)(x), [*net.parameters()]
    EXCHANGES[change](net)
    y.sum().backward()
    return x.grad, *(p.grad for p in (*then, *net.parameters()))


@pytest.mark.parametrize("door", [*RERUNS, "replay", "scope"])
@pytest.mark.parametrize("change", [*LOOPS, *EXCHANGES])
def test_parameters_that_are_exchanged_around_a_region(door, change):
    """Refused by a rerun, by the names that they have now, with the remedy; right under replay."""
    exchange = LOOPS.get(change) or functools.partial(afterwards, change=change)
    if door not in RERUNS:
        same_bits(WAYS[door], exchange)
        return
    one, two = r"saves the parameter Net\.one\.weight ", r".*saved the parameter Net\.two\.weight "
    match = one + two if change == "swapped" else r"parameter .*float32 tensor of shape"
    match = r"parametrizations\.weight\.original" if change == "cached" else match
    with pytest.raises(MismatchError, match=match) as caught:
        exchange(WAYS[door])
    assert "region '" in str(caught.value) and "backend='replay'" in str(caught.value)


def offloaded(goes, seen=None):
    """A model whose frozen weights hooks bring in anew, and take away again if it `goes`."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.PReLU(4)
    model = nn.Sequential(*layers).requires_grad_(False)

    def give(module):
        store = {name: p.detach().clone() for name, p in module.named_parameters()}

        def bring(device="cpu"):
            for name, value in store.items():
                parameter = nn.Parameter(value.to(device, copy=True), requires_grad=False)
                setattr(module, name, parameter)
                if seen is not None and device == "cpu":
                    seen.append(weakref.ref(parameter))

        module.register_forward_pre_hook(lambda *_: bring())
        if goes:
            module.register_forward_hook(lambda *_: bring("meta"))

    for module in model:
        give(module)
    return model


def test_a_view_in_the_place_of_a_parameter_may_be_an_attribute_in_backward():
    """As FSDP1 does with `use_orig_params=True`: it is still what the module reads."""
    torch.manual_seed(0)
    x, flat = leaf(), nn.Parameter(torch.rand(16))

    def gradient(door):
        layer = nn.Linear(4, 4, bias=False)
        layer._parameters["weight"] = view = flat.view(4, 4)
        y = door(nn.Sequential(layer, nn.Tanh()))(x * 1)
        del layer._parameters["weight"]
        layer.weight = view
        return torch.autograd.grad(y.sum(), flat)[0]

    assert torch.equal(gradient(rerun), gradient(plain))


@program()
def frozen_weights_that_hooks_bring_in_anew(door):
    """Their identity is another at every call, their values are the same."""
    x = leaf(3, 4)
    for goes in (False, True):
        region = door(offloaded(goes))
        (region(x).square().sum() + region(region(x)).sum()).backward()
    return (x.grad,)


@pytest.mark.parametrize("door", RERUNS)
def test_frozen_weights_that_hooks_take_away_are_not_held(door, no_gc):
    """The memory that offloading saves is not lost to a region."""
    seen = []
    model, x = offloaded(True, seen), leaf(3, 4)
    y = WAYS[door](model)(x)
    assert len(seen) == 6 and all(ref() is None for ref in seen)
    y.sum().backward()
    # A rerun that stops in the last layer runs no hook behind it, so the module has its weight.
    left = [ref() for ref in seen if ref() is not None]
    last = [] if door == "rerun to the end" else [model[-1].weight]
    assert len(seen) > 6 and [*map(id, left)] == [*map(id, last)]
    y = WAYS[door](lambda x: model(x).tanh())(x)
    y.sum().backward()
    del left, last
    assert all(ref() is None for ref in seen)


class Frozen(nn.Module):
    """A frozen layer, frozen adapters, one of which is active, and a frozen table."""

    def __init__(self):
        super().__init__()
        self.layer, self.active = nn.Linear(4, 4), "a"
        self.adapters = nn.ModuleDict({name: nn.Linear(4, 4) for name in "ab"})
        self.weight, self.table = nn.Parameter(torch.ones(4)), nn.Parameter(torch.randn(16, 4))
        self.requires_grad_(False)

    def forward(self, x):
        return self.adapters[self.active](self.layer(x)).sin()

    def scaled(self, x):
        return (x * self.weight).square()

    def looked_up(self, x):
        return (x @ self.table[:4]).exp()


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


FOUR = torch.ones(4)
PLACE, VALUES = "in the place of the parameter Frozen.weight", "or a frozen one of the same values"
SCALED, ITSELF = operator.attrgetter("scaled"), lambda module: module
OTHERS = {  # what reads a frozen weight, how that is exchanged, and what the error says
    "values": (SCALED, lambda module: give(module, frozen(FOUR * 0)), PLACE),
    "values, by hooks": (
        SCALED,
        lambda module: setattr(module, "_parameters", {"weight": frozen(FOUR * 0)}),
        PLACE,
    ),
    "shape": (SCALED, lambda module: give(module, frozen(torch.ones(3, 4))), None),
    "dtype": (SCALED, lambda module: give(module, frozen(FOUR.double())), None),
    "trains": (SCALED, lambda module: give(module, nn.Parameter(FOUR)), None),
    "no parameter": (SCALED, lambda module: give(module, FOUR), None),
    "layer": (ITSELF, lambda module: setattr(module, "layer", Frozen().layer), VALUES),
    "adapter": (ITSELF, lambda module: setattr(module, "active", "b"), VALUES),
    # A part of it is saved, which has the same shape.
    "longer table": (
        operator.attrgetter("looked_up"),
        lambda module: setattr(module, "table", frozen(torch.randn(32, 4))),
        VALUES,
    ),
}


@pytest.mark.parametrize("door", RERUNS)
@pytest.mark.parametrize("other", OTHERS)
def test_frozen_weights_that_come_back_as_others_are_refused(door, other):
    """Another adapter, another teacher."""
    read, exchange, match = OTHERS[other]
    module, x = Frozen(), leaf(2, 1, 4)
    y = WAYS[door](read(module))(x)
    exchange(module)
    with pytest.raises(MismatchError, match=match):
        y.sum().backward()


@pytest.mark.parametrize("door", RERUNS)
def test_a_frozen_layer_may_be_exchanged_for_a_copy(door):
    module, x = Frozen(), leaf(2, 4)
    y = WAYS[door](module)(x).sum()
    want = torch.autograd.grad(y, x, retain_graph=True)
    module.layer = copy.deepcopy(module.layer)
    same(torch.autograd.grad(y, x), want)


class Streamed(nn.Linear):
    """A frozen layer that takes fresh memory for its weight, and may give it back at once."""

    def __init__(self, gives_back):
        super().__init__(4, 4, bias=False)
        self.gives_back, self.store = gives_back, self.weight.detach().clone()

    def forward(self, x):
        self.weight = nn.Parameter(self.store.clone(), requires_grad=False)
        y = super().forward(x)
        if self.gives_back:
            self.weight.untyped_storage().resize_(0)
        return y


@pytest.mark.parametrize("door", RERUNS)
@pytest.mark.parametrize("gives_back", [False, True])
def test_a_weight_that_the_function_sets_itself_is_no_other_one(door, gives_back):
    layer = Streamed(gives_back)
    layer.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    net, x = nn.Sequential(layer, nn.Linear(4, 4), nn.Tanh()), data(2, 4)
    WAYS[door](net)(x).sum().backward()
    have, net[1].weight.grad = net[1].weight.grad, None
    net[2](net[1](F.linear(x, layer.store))).sum().backward()
    assert torch.equal(have, net[1].weight.grad)


@pytest.mark.parametrize("door", RERUNS)
def test_a_frozen_weight_that_is_dropped_elsewhere_takes_no_other_ones_place(door):
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)).requires_grad_(False)
    x = leaf(2, 4)
    y = WAYS[door](lambda x: layers[2](layers[1](x).exp()).exp())(x)
    layers[0].weight = None
    y.sum().backward()


class Reads(nn.Module):
    """Reads parameters, most in ways in which no operator saves them; `later` not at all."""

    def __init__(self):
        super().__init__()
        self.embedding, self.bias = nn.Embedding(3, 4), nn.Parameter(torch.ones(4))
        self.last, self.later = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.saved = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = self.embedding(torch.tensor([0, 1, 0, 2])) * x
        return y.sin() + self.last, self.saved((x + self.bias).cos())


@pytest.mark.parametrize("door", [*RERUNS, "replay", "scope", "rerun in scope"])
@pytest.mark.parametrize(
    "name", ["embedding.weight", "bias", "saved.weight", "saved.weight, frozen"]
)
@pytest.mark.parametrize("how", ["module", "method", "lambda"])
def test_parameters_that_are_read_are_guarded(door, name, how):
    """From an optimizer's step, say, between forward and backward."""
    name, _, frozen = name.partition(", ")
    net, x = Reads().requires_grad_(not frozen), leaf(4, 4)
    region = {"module": net, "method": net.forward, "lambda": lambda x: net(x)}[how]
    one, two = WAYS[door](region)(x)
    with torch.no_grad():
        net.get_parameter(name).mul_(2)
    match = rf"parameter .*{name.split('.')[-1]}|{name}" if door in RERUNS else None
    with pytest.raises(ChangedError, match=match):
        (one.sum() + two.sum()).backward()


@pytest.mark.parametrize("door", RERUNS)
@pytest.mark.parametrize("name", ["embedding.weight", "bias"])
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.requires_grad_])
def test_parameters_that_are_read_and_then_exchanged_are_refused(door, name, kind):
    """By a step of an inner loop, say, that adapts a context and no weight."""
    net, x = Reads(), leaf(4, 4)
    one, two = WAYS[door](net)(x)
    owner, _, name = name.rpartition(".")
    module = net.get_submodule(owner)
    new = module.get_parameter(name).detach() * 2
    delattr(module, name)
    setattr(module, name, kind(new))
    with pytest.raises(MismatchError, match=rf"in the place of the parameter .*\.{name}"):
        (one.sum() + two.sum()).backward()


@pytest.mark.parametrize("door", RERUNS)
def test_a_parameter_of_no_module_may_be_exchanged_for_a_copy_only(door):
    """Weights in a list, as in functional code. One that the function makes is a copy, too."""
    x, weights = leaf(2, 4), [nn.Parameter(data(4, 4))]

    def fn(x):
        made = nn.Parameter(data(4))
        return (x @ weights[0] * made).square()

    def step(door, factor):
        y, x.grad = door(fn)(x), None
        weights[0] = nn.Parameter(weights[0].detach() * factor)
        y.sum().backward()
        return x.grad

    same(step(WAYS[door], 1), step(plain, 1))
    with pytest.raises(MismatchError, match=r"saves a parameter .* saved a parameter"):
        step(WAYS[door], 2)


@pytest.mark.parametrize("door", RERUNS)
def test_a_parameter_that_was_read_while_it_was_frozen_is_frozen_still(door):
    net, x = Reads().requires_grad_(False), leaf(4, 4)
    _, two = WAYS[door](net)(x)
    net.bias.requires_grad_(True)
    with pytest.raises(ChangedError, match=r"`requires_grad` of the parameter .*bias"):
        two.sum().backward()


@pytest.mark.parametrize("door", [*RERUNS, "replay", "scope"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_saved_parameter_trains_as_in_the_forward(door, frozen):
    """Or it is refused: the recompute of a frozen discriminator that has been thawed would save the
    input, too, which is as large as the result of `sigmoid`."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sigmoid())
    x = leaf(4, 4)

    def step(door):
        x.grad = None
        net.requires_grad_(not frozen)
        loss = door(lambda x: net(x * 1))(x).square().sum()
        net.requires_grad_(frozen)
        loss.backward()
        return x.grad

    if door in RERUNS:
        with pytest.raises(ChangedError, match=r"`requires_grad` of the parameter .*0\.weight"):
            step(WAYS[door])
    else:
        same(step(WAYS[door]), step(plain))


@program(*RERUNS, "replay")
def parameters_whose_update_does_not_matter(door):
    """Read after all that is recomputed, or not read."""
    net, x = Reads(), leaf(4, 4)
    one, two = door(net)(x)
    with torch.no_grad():
        net.last.mul_(2)
        net.later.weight.mul_(2)
    (one.sum() + two.sum()).backward()
    return x.grad, *(p.grad for p in net.parameters())


@program()
def an_optimizer_that_steps_in_backward(door):
    """Each parameter as soon as its gradient is there; every region could reach all of them."""
    torch.manual_seed(1)
    net, x = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))), leaf(4)

    def step(p):
        with torch.no_grad():
            p.sub_(p.grad)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        y = x
        for i in range(3):
            y = door(lambda y, i=i: net[i](y) * 2)(y)
        y.sum().backward()
    return x.grad, *net.parameters()


@program("rerun", "rerun in rerun", "scope in rerun", "rerun in scope")
def steps_in_regions_that_add_their_gradients_once(door):
    """Also where what the inner one takes does not require grad: nothing has yet to fill it."""
    layer, x = nn.Linear(6, 1), data(4, 6)

    def step(x):
        loss = layer(x).square().mean()
        loss.backward()
        return loss.detach()

    return door(step)(x), replay(door(step))(x), *(p.grad for p in layer.parameters())


@program("rerun", "rerun in rerun")
def steps_with_weighted_losses_add_their_gradients_once(door):
    """Weights and targets are no memory that an operator has yet to fill."""
    layer, x, w = nn.Linear(6, 2), data(4, 6), torch.tensor([2.0, 3.0])
    classes = torch.tensor([0, 1, 1, 0])
    ones = F.one_hot(classes).float()
    losses = (
        lambda y: F.cross_entropy(y, classes, weight=w),
        lambda y: F.binary_cross_entropy_with_logits(y, ones, weight=w, pos_weight=w),
        lambda y: F.layer_norm(y, (2,), w).mean(),
    )
    for loss in losses:
        door(lambda x, loss=loss: [made := loss(layer(x)), made.backward()][0])(x)
    return [p.grad for p in layer.parameters()]


@program()
def parameters_that_are_exchanged_inside_a_region(door):
    """By a functional call, with parameters from around it, of which one comes of another."""
    net, x, base = Net(), leaf(2, 4), leaf(4, 4)
    new = {"one.weight": base * 2, "two.weight": base}
    door(lambda x: torch.func.functional_call(net, new, (x,)))(x).sum().backward()
    return x.grad, base.grad, *(p.grad for p in net.parameters())


def test_a_rerun_finds_and_leaves_everything_as_the_user_has_it():
    net, seen = Net(), []
    net.tables = {"a": [1, 2]}

    def state():
        return (
            [(id(m), id(m._parameters), id(m._modules), m.training) for m in net.modules()],
            [(id(p), p.requires_grad, p.data_ptr(), p._version) for p in net.parameters()],
            (id(net.tables), copy.deepcopy(net.tables)),
            list(net.state_dict()),
        )

    def fn(x):
        seen.append((is_recomputing(), state()))
        return net(x)

    y = checkpointed(fn)(leaf(2, 4))
    net.eval()
    before = state()
    y.sum().backward()
    assert [recomputing for recomputing, _ in seen] == [False, True]
    assert seen[1] == (True, seen[0][1])
    assert seen[0][1] != before == state()


class Writes(nn.Module):
    """Writes its weight before it reads it."""

    def __init__(self, change):
        super().__init__()
        self.change, self.weight = change, nn.Parameter(data(4))

    def forward(self, x):
        with torch.no_grad():
            self.change(self.weight)
        return x * self.weight.exp()


def left_by(door, net):
    x = leaf(4)
    door(net)(x).sum().backward()
    return x.grad, net.weight.grad, net.weight.detach()


@program("replay", "scope")
def a_parameter_that_the_function_writes(door):
    """As layers do that normalise their weights in each forward (EDM2, `max_norm`)."""
    return left_by(door, Writes(lambda weight: weight.mul_(0.5)))


@program()
def a_parameter_to_which_the_function_gives_the_same_values_again(door):
    return left_by(door, Writes(lambda weight: weight.clamp_(0, 1)))


@DEPRECATED
@pytest.mark.parametrize("door", [*RERUNS, "reentrant"])
def test_a_rerun_that_writes_other_values_to_a_parameter_is_refused(door):
    """They are what the forward has left, also after the error."""
    net, x = Writes(lambda weight: weight.mul_(0.5)), leaf(4)
    y = WAYS.get(door, functools.partial(checkpointed, backend="reentrant"))(net)(x)
    weight, version = net.weight.detach().clone(), net.weight._version
    with pytest.raises(ChangedError, match=r"that the function writes.*backend='replay'"):
        y.sum().backward()
    assert bits(net.weight.detach()) == bits(weight)
    assert net.weight._version == version


@program()
def leaves_that_the_function_makes(door):
    def fn(x):
        torch.manual_seed(1)
        w, p = torch.ones(4, requires_grad=True), nn.Parameter(torch.full((4,), 2.0))
        (g,) = torch.autograd.grad((x * w).square().sum(), w, create_graph=True)
        return nn.Linear(4, 4)(x * (w - g * 0.5) * p * p).square()

    x = leaf(4)
    door(fn)(x).sum().backward()
    return (x.grad,)


test_programs_are_plains = program.test()
