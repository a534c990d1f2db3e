"""Whatever `auto()` keeps: the bits of plain code, the same cuts each time, nothing left behind."""

import functools
import gc
import itertools
import warnings

import oracle
import pytest
import torch
from beside import Code
from oracle import Watching, bits, scope, through
from planned import BUILDS, NESTINGS, close, gradients, in_scope, net, scoped, units_of
from torch import nn

from checkpointing import auto, checkpoint_scope, checkpointed, clear_programs, keep, offload

HAVING = {
    "it": lambda x: x,
    "its data": lambda x: x.data,
    "a detached alias": torch.detach,
    "a part": lambda x: x.detach()[:, :4],
}


@pytest.mark.parametrize("has", HAVING.values(), ids=HAVING)
@pytest.mark.parametrize("has_it", list(itertools.product([True, False], repeat=2)))
def test_what_the_caller_has_and_autograd_has_not_saved_may_be_written(has, has_it):
    """A plan keeps a copy, in each step in which the caller has it."""
    teacher = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 16))
    student = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    x, seen = torch.randn(512, 32), []

    def forward(has_it):
        with torch.no_grad():
            logits = teacher(x)
        if has_it:
            seen.append(has(logits))
        y = student(x)
        return y.square().mean() + close(y, logits) + close(student(x.sin()), logits)

    def step(run, has_it):
        loss = run(has_it)
        while seen:
            seen.pop().fill_(9.0)
        return torch.autograd.grad(loss, [*student.parameters()])

    right = step(forward, False)
    run = scoped(forward, budget=40 * 1024)
    for each in has_it * 2:
        oracle.same(step(run, each), right)
    assert run.scope.stats.ops_replayed > 0


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("options", [{}, {"budget": 200_000}, {"budget": 20_000}], ids=str)
def test_the_same_program_makes_the_same_cuts(name, options):
    """In every step, and whenever the garbage collector runs."""
    run = scoped(BUILDS[name](), **options)
    warnings.simplefilter("ignore")
    run().backward()
    found, threshold = [], gc.get_threshold()
    for other in (*threshold[:1], 0, 1):  # as it is, never, and all the time
        gc.set_threshold(other)
        try:
            loss = run()
            found.append([run.scope.stats])
            loss.backward()
            found[-1].append(run.scope.stats)
        finally:
            gc.set_threshold(*threshold)
    assert found[0] == found[1] == found[2]


CUTS = """
import torch
import programs
from checkpointing import auto, checkpoint_scope
for options in ({}, {"budget": 300_000}):
    with checkpoint_scope(policy=auto(**options)) as scope:
        loss = programs.transformer(4, 32, 2, 32, dropout=0.1)()
    print(scope.stats)
    loss.backward()
    print(scope.stats)
"""


def test_the_same_cuts_in_another_process(capsys):
    """On every rank: nothing depends on addresses or hashes."""
    clear_programs()
    exec(CUTS, {})
    assert capsys.readouterr().out == Code(CUTS).output != ""


def in_place():
    """Many writes to one storage, random ones among them; results of several steps are saved."""
    x = torch.rand(8, 16).requires_grad_()

    def run():
        y, total = x * 1, 0
        for i in range(16):
            y = torch.dropout(y, 0.1, True)
            y.add_(torch.rand_like(y), alpha=0.1)
            y[:, :3].mul_(0.5)
            y.tanh_()
            z = y.clone()
            z[:, ::2] = y[:, ::2].sin()
            total = total + z.exp_().sum() * (1 + i)
        return total + y.sum()

    return run, [x], []


def sums():
    """Into memory that is exchanged now and then, all of it and one number: what an earlier replay
    has delivered or stored is not overwritten by a later one."""
    x = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)

    def run():
        h, s = x, torch.zeros_like(x)
        for i in range(16):
            h = (h * 1.01).sin()
            s = s.clone() if i % 6 == 0 else s
            s.add_(h.detach())
            s[3, 3].add_(1)
            h = h * (s * 0.1).cos()
        return h.sum()

    return run, [x], []


def rows():
    """A loss, and rows that are each made from the one above it. Autograd has saved that, so these
    can't have gradients: no part of their memory can be kept, and no window starts from less."""
    x = torch.rand(8, 8, dtype=torch.float64, requires_grad=True)
    held = []

    def run():
        loss = x.square().sum()
        y = torch.zeros_like(x)
        for i in range(8):
            y[i] = (x[i] * (y[i - 1] if i else 1)).tanh()
        held.append(y)
        return loss

    return run, [x], []


def draw(row, *others):
    row.uniform_()


WRITES = {  # what fills a row before it is read, and what is written later
    "as a part of a half": (draw, lambda row, other, half: half.add_(1)),
    "as `out`": (
        lambda row, other, half: torch.add(other, 1, out=row),
        lambda row, other, half: row.mul_(3),
    ),
    "moved": (draw, lambda row, other, half: other.as_strided_((16,), (1,), 0).add_(1)),
}


def split_twice(how):
    """Rows and halves of one memory, which the caller holds, too."""
    x = torch.rand(8, requires_grad=True)
    (before, later), held = WRITES[how], []

    def run():
        noise = torch.rand(4, 8)
        (other, row, *_), (half, _) = noise.unbind(), noise.split(2)
        shown = row.view(8)
        before(row, other, half)
        h = x * (shown * 1.0)
        later(row, other, half)
        held.append(noise)
        return (h.tanh() * row.detach()).sum()

    return run, [x], []


def inner_regions():
    """A checkpointed function and a scope in each layer, with a kept value in either."""
    function = checkpointed(lambda y: torch.dropout(keep(y).tanh(), 0.3, True))
    inside = scope(lambda y: keep(y.sin()).exp())
    return net(keep=lambda y: inside(function(y)))


SCHEDULES = [(net, "scope", budget) for budget in (None, 6000, 13_000)]
SCHEDULES += [(in_place, "scope", budget) for budget in (None, 2100, 1)]
SCHEDULES += [(sums, "scope", budget) for budget in (None, 3000, 25_000)]
SCHEDULES += [(rows, "scope", budget) for budget in (None, 0)]
SCHEDULES += [
    (functools.partial(split_twice, how), "scope", budget)
    for how in WRITES
    for budget in (None, 100, 1)
]
SCHEDULES += [(build, door, 1400) for build in (net, inner_regions) for door in NESTINGS]


@functools.cache
def right(build):
    return gradients(build, lambda fn: fn)


@pytest.mark.parametrize(("build", "door", "budget"), SCHEDULES)
def test_every_schedule_is_bit_equal(build, door, budget):
    """First and second order, in every nesting, on one level and on several."""
    warnings.simplefilter("ignore")
    assert gradients(build, lambda fn: NESTINGS[door](fn, auto(budget=budget))) == right(build)


POLICIES = [auto(), auto(budget=12_000), auto(budget=5000)]
POLICIES += [offload(), offload([torch.ops.aten.tanh.default], inputs=True), offload(auto())]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_nothing_outlives_its_use(policy, no_gc):
    """Without the garbage collector: after backward, without one, after an exception, after two."""
    warnings.simplefilter("ignore")
    x = torch.rand(1000).requires_grad_()
    with Watching() as watching:
        for backwards in range(3):
            y = in_scope(units_of, policy)(x, 40)
            for n in range(1, backwards + 1):
                torch.autograd.grad(y, x, retain_graph=n < backwards)
            del y
            assert watching.alive() == [], backwards
        with pytest.raises(ZeroDivisionError), checkpoint_scope(policy=policy):
            units_of(x, 40)
            raise ZeroDivisionError
        assert watching.alive() == []


def sharded(depth, wide):
    """Layers whose weights are gathered for them and given back after them, as by FSDP2."""
    import torch.distributed.fsdp  # which defines its operators

    shards = [torch.rand(32, 32) / 16 for _ in range(depth)]
    weights = [nn.Parameter(torch.empty(32, 32), requires_grad=False) for _ in range(depth)]

    def give_back(i):
        weights[i].untyped_storage().resize_(0)

    def gather(i):
        weight = weights[i]
        if not weight.untyped_storage().nbytes():
            weight.untyped_storage().resize_(shards[i].nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
                torch.ops.fsdp.copy_(weight, shards[i])

    def in_backward(y, function, i):
        y = y.view_as(y)
        y.register_hook(lambda grad: function(i))
        return y

    def run(y):
        for i in range(depth):
            y = in_backward(y, give_back, i)
            gather(i)
            y = through([torch.tanh, torch.sin] * wide, (y @ weights[i]).sin())
            give_back(i)
            y = in_backward(y, gather, i)
        return y.sum()

    for i in range(depth):
        give_back(i)
    return run, torch.rand(64, 32, requires_grad=True)


@pytest.mark.parametrize("budget", [None, 8192, 10**5, 10**6])
@pytest.mark.parametrize("wide", [0, 4])
def test_what_goes_from_one_sharded_module_to_the_next_is_kept(wide, budget):
    """Whatever it costs: in backward the weights of one of them at a time are there."""
    run, x = sharded(24, wide)
    (want,) = torch.autograd.grad(run(x), x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*A budget of.*")
        loss = scoped(run, budget=budget)(x)
    assert bits(torch.autograd.grad(loss, x)[0]) == bits(want)


_library = torch.library.Library("c10d_functional", "FRAGMENT")
_library.define("sends_for_a_while(Tensor x) -> ()")
_library.impl("sends_for_a_while", lambda x: on_the_way.append(x), "CompositeExplicitAutograd")
on_the_way: list[torch.Tensor] = []


@pytest.mark.parametrize("options", [{}, {"budget": 40_000}], ids=str)
def test_how_long_a_tensor_is_sent_decides_nothing(options):
    """Threads refer to it, which differs from run to run."""

    def run(x, most):
        for _ in range(40):
            x = x.tanh().sin()
            torch.ops.c10d_functional.sends_for_a_while(x.detach())
            del on_the_way[: max(0, len(on_the_way) - most)]
        return x.sum()

    found = []
    for most in (0, 5):
        fn = scoped(run, **options)
        fn(torch.linspace(-1, 1, 1000).requires_grad_(), most)
        found.append((fn.scope.stats.cuts, fn.scope.stats.bytes_kept))
        on_the_way.clear()
    assert found[0] == found[1]


def test_recording_and_planning_take_the_same_time_for_each_row_of_a_stack():
    weight = torch.randn(16, 16, requires_grad=True)

    def calls_with(n):
        run = scoped(lambda x: torch.stack([row @ weight for row in x]).tanh().sum())
        x = torch.randn(n, 32, 16)
        return oracle.python_calls(lambda: run(x).backward())

    calls_with(8)
    assert calls_with(200) <= 2.2 * calls_with(100)


def test_sparse_tensors_that_are_written_in_place_are_planned():
    """They have no bytes of their own."""
    x = torch.eye(4).to_sparse().requires_grad_()
    forward = lambda: torch.sparse.sum((x * 2).mul_(3))
    (wanted,) = torch.autograd.grad(forward(), x)
    (found,) = torch.autograd.grad(scoped(forward)(), x)
    assert torch.equal(found.to_dense(), wanted.to_dense())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_are_joined_are_planned():
    """They have no sizes."""
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    scoped(lambda: torch.cat([torch.nested.nested_tensor(parts)] * 2))()
