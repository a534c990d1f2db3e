"""What a function closes over is as it was in the forward; parameters are known by their identity; everything else that
Python can reach is what it is when backward runs."""

import copy
import functools
import weakref

import pytest
import torch
import torch.utils.checkpoint
from oracle import bits
from oracle import s as scope
from torch import nn

from checkpointing import ChangedError, CheckpointError, MismatchError, checkpointed, is_recomputing


def leaf(*shape):
    """Small integers that want a gradient."""
    n = torch.Size(shape or (4,)).numel()
    return (torch.arange(1.0, n + 1) % 5 - 2).view(shape or (4,)).requires_grad_()


def plain(fn):
    """No region."""
    return fn


def replay(fn):
    return checkpointed(fn, backend="replay")


DOORS = {
    "rerun": checkpointed,
    "rerun to the end": lambda fn: checkpointed(fn, early_stop=False),
    "rerun in rerun": lambda fn: checkpointed(checkpointed(fn)),
    "replay": replay,
    "scope": scope,
}
DOOR = pytest.mark.parametrize("door", DOORS)
ONE_LEVEL = pytest.mark.parametrize("door", [door for door in DOORS if door != "rerun in rerun"])
RERUNS = ("rerun", "rerun to the end", "rerun in rerun")


def same(door, program):
    """A program leaves the same bits behind with regions as without."""

    def run(door):
        torch.manual_seed(0)
        return [None if t is None else bits(t) for t in program(door)]

    assert run(DOORS[door]) == run(plain)


# ---- the function's own variables


@DOOR
def test_a_lambda_in_a_loop(door):
    """Closures see variables, not values; recompute sees the values of its own forward."""

    def program(door):
        layers = [nn.Linear(4, 4) for _ in range(3)]
        x = y = leaf(2, 4)
        for i, layer in enumerate(layers):
            y = door(lambda y: layer(y).square() * (i + 1))(y)  # noqa: B023
        return torch.autograd.grad(y.sum(), [x, *(layer.weight for layer in layers)])

    same(door, program)


@ONE_LEVEL
def test_variables_set_anew_afterwards(door):
    """Numbers, functions, tensors with and without a gradient, modules; defaults and globals are the function's."""

    def program(door):
        factor, act, t, p, module = 2.0, torch.relu, torch.full((4,), 3.0), leaf() * 2, nn.Linear(4, 4)
        then = p

        def fn(x, a=3.0, *, b=5.0):
            return act(module(x * factor * a * b * t * p)) * len(TABLES)

        x = leaf()
        y = door(fn)(x)
        factor, act, t, p, module = 7.0, torch.sin, torch.zeros(4), torch.zeros(4), None
        gradients = torch.autograd.grad(y.square().sum(), [x, then])
        assert (factor, act, module) == (7.0, torch.sin, None)
        return gradients

    same(door, program)


TABLES = [1, 2]


def counts_up():
    n = 0

    def fn(x):
        nonlocal n
        n += 1
        return x.sin()

    return fn, lambda: n


def by_a_function_inside():
    n = 0

    def fn(x):
        def count():
            nonlocal n
            n += 1

        count()
        return x.sin()

    return fn, lambda: n


def by_a_loop():
    n = 0

    def fn(x):
        nonlocal n
        for n in range(n + 1, n + 2):  # noqa: B007, B020
            x = x.sin()
        return x

    return fn, lambda: n


def by_a_walrus():
    n = 0

    def fn(x):
        nonlocal n
        return sum([x.sin() for _ in range(2) if (n := n + 1)])

    return fn, lambda: n


def deleted_and_set():
    n = 0

    def fn(x):
        nonlocal n
        m = n
        del n
        y = x.sin()
        n = m + 1  # noqa: F841
        return y

    return fn, lambda: n


def a_state():
    h = torch.zeros(4)

    def fn(x):
        nonlocal h
        h = h.detach() + x.detach()
        return x.sin()

    return fn, lambda: h.sum().item()


ASSIGNS = [counts_up, by_a_function_inside, by_a_loop, by_a_walrus, deleted_and_set, a_state]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("make", ASSIGNS, ids=lambda make: make.__name__)
def test_what_a_function_assigns_itself_is_its_own_business(make, times):
    """Left as it is, as with torch's checkpoint: what the calls have done to it stays, and is not put back."""

    def run(door):
        (fn, read), x = make(), leaf()
        y = door(fn)(x) + door(fn)(x) * 2
        found = [read()]
        y.sum().backward()
        return *found, read(), bits(x.grad)

    def nested(region):  # around it so often
        return lambda fn: functools.reduce(lambda fn, _: region(fn), range(times), fn)

    def theirs(fn):
        return functools.partial(torch.utils.checkpoint.checkpoint, fn, use_reentrant=False, early_stop=False)

    assert run(nested(DOORS["rerun to the end"])) == run(nested(theirs))


def test_what_it_only_reads_keeps_the_value_of_the_forward_beside_it():
    """One is assigned, another is read; a variable of the same name in a function inside is another one."""
    n, factor = 0, 2.0

    def fn(x):
        nonlocal n
        n += 1

        def inside():
            factor = 3.0
            return [factor for _ in range(2)]

        inside()
        return (x * factor).square()

    x = leaf()
    y = checkpointed(fn)(x)
    factor = 5.0
    y.sum().backward()
    assert (n, factor) == (2, 5.0)
    assert torch.equal(x.grad, 8 * x.detach())


@ONE_LEVEL
@pytest.mark.parametrize("kind", ["data", "computed", "leaf", "parameter"])
def test_tensors_among_them_are_guarded_like_arguments(door, kind):
    """The message of a rerun has the variable's name."""
    made = {"data": torch.ones(4), "computed": leaf() * 2, "leaf": leaf(), "parameter": nn.Parameter(torch.ones(4))}
    weight = made[kind]
    x = leaf()
    y = DOORS[door](lambda x: ((weight * 2) * x).square())(x)
    with torch.no_grad():
        weight.add_(1)
    match = r"the variable 'weight' .*was changed in place" if door in RERUNS else "changed in place"
    with pytest.raises(ChangedError, match=match):
        y.sum().backward()


def test_containers_among_them_are_the_live_ones():
    """Side effects on them happen again, and what they hold is what it is when backward runs."""
    noted, table = [], {"n": 2.0}

    def fn(x):
        noted.append(table["n"])
        return (x * table["n"]).square()

    x = leaf()
    y = checkpointed(fn)(x)
    table["n"] = 3.0
    y.sum().backward()
    assert noted == [2.0, 3.0]
    assert torch.equal(x.grad, 2 * (x.detach() * 3) * 2)  # autograd holds the 2 itself


@DOOR
def test_functions_of_every_kind_keep_their_variables(door):
    """Methods with `super()` and variables; functions that are defined later; recursion."""

    def program(door):
        factor = 2.0

        class Base:
            def run(self, x):
                return x.square()

        class Derived(Base):
            def run(self, x):
                return super().run(x * factor) * later(x, 2)

        def call(x):
            return door(Derived().run)(x)

        def later(x, n):
            return x if n == 0 else later(x * 2, n - 1)

        x = leaf()
        y = call(x)
        factor = 3.0
        y.sum().backward()
        return (x.grad,)

    same(door, program)


@DOOR
def test_a_method_in_a_partial_keeps_its_variables(door):
    """It stays bound to its object when it is called again."""

    def program(door):
        factor = 2.0

        class Scale:
            weight = 3.0

            def run(self, n, x):
                return (x * factor * n * self.weight).square()

        x = leaf()
        y = door(functools.partial(Scale().run, 5.0))(x)
        factor = 7.0
        y.sum().backward()
        return (x.grad,)

    same(door, program)


counted = 0


def test_globals_are_what_they_are_and_are_set_again():
    """A function that sets a global sets the one that everybody reads."""

    def fn(x):
        global counted
        counted += 1
        return (x * reads_it()).square()

    def program(door):
        global counted
        counted = 0
        x = leaf()
        y = door(fn)(x)
        counted = 0
        y.sum().backward()
        return (x.grad,)

    same("rerun", program)
    program(checkpointed)
    assert counted == 1


def reads_it():
    return counted


# ---- parameters are known by their identity


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.two(self.one(x).relu()).square()


def around(door):
    """Regions in a functional call."""
    net, x = Net(), leaf(2, 4)
    for part in (net.one, net.two):
        part.forward = door(part.forward)
    new = {name: (p.detach() * 2).requires_grad_() for name, p in net.named_parameters()}
    torch.func.functional_call(net, new, (x,)).sum().backward()
    return x.grad, *(p.grad for p in new.values()), *(p.grad for p in net.parameters())


def inside(door):
    """A functional call in a region, with parameters from around it, of which one comes of another."""
    net, x, base = Net(), leaf(2, 4), leaf(4, 4)
    new = {"one.weight": base * 2, "two.weight": base}
    door(lambda x: torch.func.functional_call(net, new, (x,)))(x).sum().backward()
    return x.grad, base.grad, *(p.grad for p in net.parameters())


def assigned(door):
    """A parameter set anew before backward."""
    net, x = Net(), leaf(2, 4)
    y, then = door(net)(x), net.one.weight
    net.one.weight = nn.Parameter(torch.zeros(4, 4))
    y.sum().backward()
    return x.grad, then.grad, net.one.weight.grad


def child(door):
    """A module set anew before backward."""
    net, x = Net(), leaf(2, 4)
    y, then = door(net)(x), net.two.weight
    net.two = nn.Linear(4, 4, bias=False)
    y.sum().backward()
    return x.grad, then.grad, net.two.weight.grad


def swapped(door):
    """Two parameters of one shape, exchanged."""
    net, x = Net(), leaf(2, 4)
    y = door(net)(x)
    net.one.weight, net.two.weight = net.two.weight, net.one.weight
    y.sum().backward()
    return x.grad, net.one.weight.grad, net.two.weight.grad


def to_a_tensor(door):
    """A tensor that is no parameter in its place."""
    net, x = Net(), leaf(2, 4)
    y, then = door(net)(x), net.one.weight
    del net.one.weight
    net.one.weight = torch.zeros(4, 4)
    y.sum().backward()
    return x.grad, then.grad


EXCHANGES = [around, assigned, child, swapped, to_a_tensor]


@DOOR
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.__name__)
def test_parameters_that_are_exchanged_around_a_region(door, exchange):
    """Refused by a rerun, with what is known and the remedy; right under replay."""
    if door in RERUNS:
        with pytest.raises(MismatchError, match=r"saves? .*parameter .*float32 tensor of shape") as caught:
            exchange(DOORS[door])
        text = str(caught.value)
        assert "region '" in text and "backend='replay'" in text
        assert "exchanged" not in text and "functional_call around" not in text and "opaque" not in text
    else:
        same(door, exchange)


def pre_hook(module, bring):
    """Weights come with every call, and stay."""
    module.register_forward_pre_hook(lambda *_: bring())


def both_hooks(module, bring):
    """... and go with it, as those of accelerate's `cpu_offload`."""
    pre_hook(module, bring)
    module.register_forward_hook(lambda *_: bring("meta"))


def offloaded(hooks, seen=None, trains=False):
    """A model whose weights hooks bring in anew: saved as a view, as a whole, and by a kernel of many arguments."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.PReLU(4)
    model = nn.Sequential(*layers).requires_grad_(trains)

    def give(module):
        store = {name: p.detach().clone() for name, p in module.named_parameters()}

        def bring(device="cpu"):
            for name, value in store.items():
                parameter = nn.Parameter(value.to(device, copy=True), requires_grad=trains)
                setattr(module, name, parameter)
                if seen is not None and device == "cpu":
                    seen.append(weakref.ref(parameter))

        hooks(module, bring)

    for module in model:
        give(module)
    return model


@DOOR
@pytest.mark.parametrize("hooks", [pre_hook, both_hooks], ids=lambda hooks: hooks.__name__)
def test_frozen_weights_that_hooks_bring_in_anew(door, hooks):
    """Their identity is another at every call, their values are the same."""

    def program(door):
        model, x = offloaded(hooks), leaf(3, 4)
        region = door(model)
        (region(x).square().sum() + region(region(x)).sum()).backward()
        return (x.grad,)

    same(door, program)


@pytest.mark.parametrize("door", ["rerun", "rerun to the end", "rerun in rerun"])
def test_frozen_weights_that_hooks_take_away_are_not_held(door, no_gc):
    """The memory that offloading saves is not lost to a region."""
    seen = []
    model, x = offloaded(both_hooks, seen), leaf(3, 4)
    y = DOORS[door](model)(x)
    assert len(seen) == 6 and all(ref() is None for ref in seen)
    y.sum().backward()
    assert len(seen) > 6 and all(ref() is None for ref in seen)


@pytest.mark.parametrize("door", RERUNS)
@pytest.mark.parametrize("change", ["shape", "dtype", "trains", "no parameter"])
def test_weights_that_come_back_as_others_are_refused(door, change):
    """Another shape, another dtype; one that trains; a tensor in its place."""
    module, x = nn.Module(), leaf(2, 1, 4)
    module.weight = nn.Parameter(torch.ones(4), requires_grad=False)
    module.forward = lambda x: (x * module.weight).square()
    y = DOORS[door](module)(x)
    del module.weight
    module.weight = {
        "shape": lambda: nn.Parameter(torch.ones(3, 4), requires_grad=False),
        "dtype": lambda: nn.Parameter(torch.ones(4).double(), requires_grad=False),
        "trains": lambda: nn.Parameter(torch.ones(4)),
        "no parameter": lambda: torch.ones(4),
    }[change]()
    with pytest.raises(MismatchError):
        y.sum().backward()


@pytest.mark.parametrize("door", RERUNS)
def test_frozen_weights_that_are_written_are_still_guarded(door):
    """As long as they are the same ones."""
    net, x = Net().requires_grad_(False), leaf(2, 4)
    y = DOORS[door](net)(x)
    net.two.weight.mul_(2)
    with pytest.raises(ChangedError, match=r"Net\.two\.weight|Linear\.weight"):
        y.sum().backward()


def switched_adapter(net):
    net.one.weight, net.other = net.other, net.one.weight


@pytest.mark.parametrize("door", RERUNS)
def test_an_adapter_that_is_switched_is_named(door):
    """Both parameters, by where the module has them now; no guess at why."""
    net, x = Net(), leaf(2, 4)
    net.other = nn.Parameter(torch.ones(4, 4))
    y = DOORS[door](net)(x)
    switched_adapter(net)
    with pytest.raises(MismatchError, match=r"saves the parameter Net\.one\.weight .*saved the parameter Net\.other "):
        y.sum().backward()


@pytest.mark.parametrize("door", RERUNS)
def test_weights_cached_around_a_region(door):
    """`parametrize.cached()`: the recompute makes the weight that the forward found; nothing was exchanged."""
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), leaf(2, 4)
    with nn.utils.parametrize.cached():
        layer(x)
        y = DOORS[door](layer)(x)
    with pytest.raises(MismatchError) as caught:
        y.sum().backward()
    assert "exchanged" not in str(caught.value)
    assert "parametrizations.weight.original" in str(caught.value)


@DOOR
def test_parameters_that_are_exchanged_inside_a_region(door):
    """Both runs save the same ones."""
    same(door, inside)


def makes_leaves(x):
    w = torch.ones(4, requires_grad=True)
    return (x * w * w).square()


def makes_parameters(x):
    w = nn.Parameter(torch.full((4,), 2.0))
    return (x * w * w).square()


def makes_modules(x):
    torch.manual_seed(1)
    return nn.Linear(4, 4)(x).square()


def adapts(x):
    """A step of MAML inside a region."""
    w = torch.ones(4, requires_grad=True)
    (g,) = torch.autograd.grad((x * w).square().sum(), w, create_graph=True)
    return (x * (w - g * 0.5)).square()


@DOOR
@pytest.mark.parametrize("makes", [makes_leaves, makes_parameters, makes_modules, adapts], ids=lambda f: f.__name__)
def test_leaves_that_the_function_makes(door, makes):
    """They are new each time, and fine."""

    def program(door):
        x = leaf(4)
        door(makes)(x).sum().backward()
        return (x.grad,)

    same(door, program)


@DOOR
@pytest.mark.parametrize("how", ["closure", "argument", "module", "view"])
def test_a_step_of_an_optimizer_between_forward_and_backward(door, how):
    """As autograd says for plain code, with the region's name."""
    net, x = nn.Linear(4, 4), leaf(2, 4)
    w = net.weight
    calls = {
        "closure": lambda door: door(lambda x: (x.relu() @ w).square())(x),
        "argument": lambda door: door(lambda x, w: (x.relu() @ w).square())(x, w),
        "module": lambda door: door(lambda x: net(net(x)))(x).square(),
        "view": lambda door: door(lambda x: (x.relu() @ w[:, :2]).square())(x),
    }
    y = calls[how](DOORS[door])
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(CheckpointError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("door", ["rerun", "replay"])
def test_parameters_that_the_region_did_not_use_may_change(door):
    """The rest of the module is stepped meanwhile; nothing is copied of it or compared."""

    def program(door):
        net, x = Net(), leaf(2, 4)
        y = door(lambda x: net.one(x).square())(x)
        with torch.no_grad():
            net.two.weight.mul_(2)
        y.sum().backward()
        return x.grad, net.one.weight.grad

    same(door, program)


@pytest.mark.parametrize("door", ["rerun", "replay"])
def test_a_compiled_block_in_a_region_whose_other_parameters_were_stepped(door):
    """The block's guards hold in the rerun as in the forward."""

    def program(door):
        torch._dynamo.reset()
        net, x = Net(), leaf(2, 4)
        block = torch.compile(net.one, backend="eager") if door is not plain else net.one
        y = door(lambda x: block(x).square())(x)
        with torch.no_grad():
            net.two.weight.mul_(2)
        y.sum().backward()
        return x.grad, net.one.weight.grad

    same(door, program)


# ---- a recompute changes nothing of the user's


def test_a_rerun_finds_and_leaves_everything_as_the_user_has_it():
    """The very parameters with their flags, memory and versions; the very children, dicts and lists. Training flags
    are those of the forward meanwhile."""
    net, seen = Net(), []
    net.tables = {"a": [1, 2]}

    def state():
        modules = [(id(m), id(m._parameters), id(m._modules), m.training) for m in net.modules()]
        parameters = [(id(p), p.requires_grad, p.data_ptr(), p._version) for p in net.parameters()]
        return modules, parameters, id(net.tables), copy.deepcopy(net.tables), list(net.state_dict())

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


def test_a_variable_that_something_else_in_the_region_sets():
    """A helper or a hook that shares it by `nonlocal` finds what the forward found, and what it sets is dropped."""

    def step(door):
        scale, x = torch.tensor(2.0), leaf(4, 4)

        def note(*given):
            nonlocal scale
            scale = scale + given[-1].detach().sum()

        def fn(x):
            note(x)
            return (x * scale).square()

        fn = door(fn)
        (fn(x).sum() + fn(x).sum()).backward()
        return scale, x.grad

    want = step(lambda fn: fn)
    for door in (checkpointed, lambda fn: checkpointed(fn, backend="replay")):
        assert all(map(torch.equal, step(door), want))
