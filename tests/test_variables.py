"""What a function closes over is as it was in the forward; parameters are known by their identity; everything else that
Python can reach is what it is when backward runs."""

import copy
import functools

import pytest
import torch
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


@DOOR
def test_a_counter_counts_forwards(door):
    """`nonlocal`: the rerun has a variable of its own, with the value of the forward."""

    def program(door):
        calls = 0

        def fn(x):
            nonlocal calls
            calls += 1
            return (x * calls).square()

        region, x = door(fn), leaf()
        y = region(x) + region(x) * 2
        calls = 10
        y.sum().backward()
        return x.grad, torch.tensor(calls)

    same(door, program)


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


def frozen(door):
    """Without gradients of its own."""
    net, x = Net().requires_grad_(False), leaf(2, 4)
    y = door(net)(x)
    net.one.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    y.sum().backward()
    return (x.grad,)


def to_a_tensor(door):
    """A tensor that is no parameter in its place."""
    net, x = Net(), leaf(2, 4)
    y, then = door(net)(x), net.one.weight
    del net.one.weight
    net.one.weight = torch.zeros(4, 4)
    y.sum().backward()
    return x.grad, then.grad


EXCHANGES = [around, assigned, child, swapped, frozen, to_a_tensor]


@DOOR
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.__name__)
def test_parameters_that_are_exchanged_around_a_region(door, exchange):
    """Refused by a rerun, with what happened and the remedy; right under replay."""
    if door in RERUNS:
        with pytest.raises(MismatchError, match=r"functional_call.* backend='replay'") as caught:
            exchange(DOORS[door])
        assert "region '" in str(caught.value)
    else:
        same(door, exchange)


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
    """The very parameters with their flags, memory and versions; the very children, dicts and lists."""
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
    assert seen[1][1] == before == state()


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
