"""What users ask of `auto()`: a budget for what is kept, or the peak of a step."""

import functools
import itertools
import re

import oracle
import programs
import pytest
import torch
from oracle import NO_ROOM, PassThrough, bits, count, memory_of, through
from planned import BUILDS, bytes_of, known, scoped, units
from torch import nn

from checkpointing import auto, checkpoint_scope, clear_programs, keep, save_tagged, tag


class Meter(PassThrough):
    """Asks a scope before every third operator how much it keeps."""

    def __init__(self, scope):
        super().__init__()
        self.scope, self.seen, self.calls = scope, [0], itertools.count()

    def __torch_dispatch__(self, *args):
        if next(self.calls) % 3 == 0:
            self.seen.append(self.scope.stats.bytes_kept)
        return super().__torch_dispatch__(*args)


@pytest.mark.parametrize("name", BUILDS)
def test_a_budget_is_never_exceeded(name):
    """At no moment of the forward; from the least possible to more than plain needs."""
    plain, _ = bytes_of(BUILDS[name]())
    with pytest.warns(UserWarning, match="no room for checkpoints") as caught:
        known(BUILDS[name](), budget=0)
    least = int(re.search(r"A budget of (\d+) bytes", str(caught[0].message))[1])
    products = []
    for i in range(4):
        budget = least + (plain - least) * i // 3 if i < 3 else 2 * plain
        forward = BUILDS[name]()
        for _ in range(2):  # from the second time on the program is known
            with checkpoint_scope(policy=auto(budget=budget)) as scope, Meter(scope) as meter:
                loss = forward()
        assert 0 < max(meter.seen) <= budget
        assert scope.stats.bytes_kept <= budget
        ran = count(loss.backward)
        assert scope.stats.bytes_kept == 0
        products.append(sum(ran.get(op, 0) for op in ("addmm", "mm", "convolution", "bmm")))
    for more, less in itertools.pairwise(products):  # the dear ones are repeated less and less
        assert less <= more + 1
    # With more than plain needs, nothing is repeated but the zeros of a first state, and
    # `_unsafe_view`, which costs nothing, and which torch 2.15 does not count as a view.
    assert scope.stats.ops_replayed <= 12


def test_what_is_kept_by_hand_may_exceed_the_budget_but_not_silently():
    def run(budget):
        x = torch.rand(10, requires_grad=True)
        with checkpoint_scope(policy=auto(budget=budget)) as scope:
            for _ in range(5):
                x = keep(x.sin().exp())
        return scope.stats.bytes_kept

    assert run(5 * 40) == 5 * 40
    said = r"budget=199\): `keep`, .* A budget of 200 bytes"
    with pytest.warns(UserWarning, match=said):
        assert run(5 * 40 - 1) == 5 * 40


@pytest.mark.parametrize(
    ("options", "said"),
    [({"budget": 9}, "budget=9.* A budget of"), ({"peak": 9}, r"peak=9.*peak possible is \d+ by")],
    ids=str,
)
def test_the_warning_is_at_the_users_line_and_names_the_scope(options, said):
    """Where the block ends."""
    warns = pytest.warns(UserWarning, match=rf"region 'mine' .*auto\({said}")
    with warns as caught, checkpoint_scope(auto(**options), name="mine") as scope:
        y = units(50)()
    assert caught[0].filename == __file__
    y.backward()
    assert scope.stats.peak_asked == options.get("peak")


@pytest.mark.parametrize("options", [{"budget": 10**9}, {"peak": 10**9}], ids=str)
def test_nothing_is_done_or_said_where_everything_fits(options):
    """A budget is not a demand; nor is a block that ends in an exception."""
    for n in (49, 50, 54):  # plain code's peak is found to the byte
        loss, _ = known(units(n), **options)
        assert count(loss.backward).get("tanh", 0) == 0
    with pytest.raises(ZeroDivisionError), checkpoint_scope(policy=auto(budget=10)):
        units(50)()
        raise ZeroDivisionError


def test_what_is_dear_per_byte_is_kept_before_what_is_cheap():
    """Room for half of what is saved: products stay, and cheap operators run again."""
    w = torch.rand(64, 64)
    x = torch.rand(32, 64).requires_grad_()

    def run():
        y = x
        for _ in range(10):
            y = torch.tanh(y @ w).sin().exp()  # tanh saves its result, made by a product
        return y.sum()

    loss, scope = known(run, budget=16 * 32 * 64 * 4)
    ran = count(loss.backward)
    assert scope.stats.replays > 0
    assert ran.get("mm", 0) == 10  # those of backward itself
    assert ran["sin"] + ran["exp"] > 0


def test_budgets_and_peaks_may_be_text():
    numbers = {"1.5 GiB": 3 * 2**29, "200 MB": 200 * 10**6, "3kb": 3000, "7": 7, "1e3": 1000}
    for text, number in numbers.items():
        assert auto(budget=text) == auto(budget=number)
    assert repr(auto(budget="2 KiB")) == "auto(budget=2048)"
    assert repr(auto(peak="1 KiB")) == "auto(peak=1024)"
    assert repr(auto()) == "auto()"
    with pytest.raises(ValueError, match="a budget or a peak"):
        auto(budget=1, peak=1)
    assert hash(auto(budget=5)) == hash(auto(budget=5)) != hash(auto(budget=6))
    for budget in (-1, "much", "-1 GB", "1 XB", 1.5, True):
        error = TypeError if type(budget) in (float, bool) else ValueError
        with pytest.raises(error, match="budget"):
            auto(budget=budget)


def test_auto_and_other_policies():
    x, w = torch.rand(8, 8).requires_grad_(), torch.rand(8, 8)

    def run():
        return through([lambda y: tag((y @ w).tanh(), "result").sin() / 8] * 30, x).sum()

    want = bits(torch.autograd.grad(run(), x)[0])
    for other, absent in (
        ([torch.ops.aten.mm.default], "mm"),
        (save_tagged("result"), "tanh"),
        (lambda ctx, op, *args, **kwargs: op == torch.ops.aten.mm.default, "mm"),
    ):
        for policy in (auto() | other, other | auto()):
            with checkpoint_scope(policy=policy):
                y = run()
            ran = count(lambda y=y: x.__setattr__("grad", None) or y.backward())
            assert ran.get(absent, 0) == (30 if absent == "mm" else 0)
            assert bits(x.grad) == want
    with pytest.raises(TypeError, match="can't both place"):
        auto() | auto(budget=3)


@NO_ROOM
def test_a_budget_of_nothing_needs_no_more_than_a_larger_one():
    """Or hardly more: of larger ones, only some are tried, but all of these."""
    blocks = nn.ModuleList(programs.Block(64, 4) for _ in range(4))
    made = lambda: (nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 300))
    heads, inputs = [nn.Sequential(*made()) for _ in range(6)], torch.randn(2, 64, 64)

    def forward():
        x = nn.Sequential(*blocks)(inputs)
        return sum(head(x).logsumexp(-1).mean() for head in heads)

    oracle.with_gradients(nn.ModuleList([blocks, *heads]).parameters())
    _, plain = bytes_of(forward)
    peaks = []
    for budget in (0, plain // 32):
        clear_programs()
        run = scoped(forward, budget=budget)
        run().backward()
        peaks.append(bytes_of(run)[1])
    assert peaks[0] <= 1.05 * peaks[1]


@NO_ROOM
def test_small_budgets_need_what_was_predicted_and_no_more_than_larger_ones():
    """What the pieces of a window start from goes when they have run, kept values among it."""
    forward = programs.transformer(6, 64, 2, 64)
    plain = bytes_of(forward)[1]
    peaks = []
    for n in range(3, 10, 2):
        clear_programs()
        run = scoped(forward, budget=plain >> n)
        run().backward()
        peaks.append(bytes_of(run)[1])
        assert peaks[-1] <= 1.02 * run.scope.stats.peak_predicted
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("part", [16, 24])
def test_a_budget_is_not_exceeded_where_a_smaller_one_is_enough(part):
    """As in a diffusion model of dense layers, for which some budgets were said to be too small."""
    make = lambda: (
        nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)
    )  # fmt: skip
    blocks = nn.ModuleList(nn.ModuleList(make()) for _ in range(6))
    first, times, last = nn.Linear(2, 64), nn.Linear(32, 64), nn.Linear(64, 2)
    x = torch.randn(2048, 2)

    def through(block, y, embedded):
        norm, shift, up, act, down = block
        h = up(norm(y) * (1 + shift(embedded)))
        return y + down(act(h))

    def forward():
        time, noise = torch.rand(2048, 1), torch.randn_like(x)
        scale, steps = torch.exp(-5 * time), torch.arange(16) * 0.3
        embedded = times(torch.cat([(time * steps).sin(), (time * steps).cos()], -1))
        y = first(scale.sqrt() * x + (1 - scale).sqrt() * noise)
        for block in blocks:
            y = through(block, y, embedded)
        return nn.functional.mse_loss(last(y), noise)

    oracle.with_gradients(nn.ModuleList([blocks, first, times, last]).parameters())
    run = scoped(forward)
    run().backward()
    budget = run.scope.stats.bytes_saved // part
    clear_programs()
    scoped(forward, budget=budget)()  # no warning


@NO_ROOM
@pytest.mark.parametrize("holds_states", [False, True])
def test_what_the_user_holds_takes_nothing_from_a_budget(holds_states):
    """The last value, in a variable, and hidden states in a list: the plan keeps the others."""
    layers, held = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))] * 8, []

    def run():
        x = torch.ones(64, 64, requires_grad=True)
        with checkpoint_scope(auto(budget=run.budget)) as run.scope:
            states = [x := x + layer(x) for layer in layers]
            loss = x.square().mean()
        held[:] = states if holds_states else ()
        return loss

    for run.budget in range(25_000, 500_000, 75_000):
        clear_programs()
        run().backward()
        held.clear()
        assert bytes_of(run)[1] <= 1.05 * run.scope.stats.peak_predicted


def test_a_peak_is_kept_and_costs_no_more_than_a_smaller_one():
    """From the least one to plain's: measured by the profiler."""
    forward = programs.transformer(6, 64, 2, 64)
    plain = bytes_of(forward)[1]
    with pytest.warns(UserWarning, match="The least peak possible is") as caught:
        run = scoped(forward, peak=0)
        run().backward()
    least = int(re.search(r"least peak possible is (\d+) bytes", str(caught[0].message))[1])
    again = []
    for n in range(4):
        peak = least + (plain - least) * n // 3
        clear_programs()
        run = scoped(forward, peak=peak)
        assert bytes_of(run)[1] <= 1.03 * peak
        assert run.scope.stats.peak_predicted <= peak == run.scope.stats.peak_asked
        again.append(run.scope.stats.ops_replayed)
    assert again == sorted(again, reverse=True)
    assert again[0] > again[-1]


def test_larger_batches_keep_to_the_peak_too():
    """The first one of a size needs a little more. A smaller one has the plan of the largest."""
    layers = nn.Sequential(*[programs.Block(64, 4) for _ in range(8)])
    oracle.with_gradients(layers.parameters())

    def forward(rows):
        return layers(torch.randn(rows, 32, 64)).square().mean()

    asked = int(0.6 * bytes_of(lambda: forward(10)).peak)
    run = scoped(forward, peak=asked)
    run(10).backward()
    for rows in (10, 12, 14, 22, 10):
        first, second = (memory_of(functools.partial(run, rows)).peak for _ in range(2))
        assert first <= 1.1 * asked
        assert second <= 1.02 * asked
        assert rows == 10 or abs(run.scope.stats.peak_predicted - second) <= 0.05 * second


@pytest.mark.parametrize("wide", [1000, 2000])
def test_what_auto_reaches_can_be_asked_for(wide):
    """Logits that are capped, as Gemma's: the least peak is that of checkpoints around blocks."""
    blocks = nn.ModuleList(programs.Block(64, 4) for _ in range(4))
    head, ids = nn.Linear(64, wide), torch.randint(wide, (4, 64))
    oracle.with_gradients(nn.ModuleList([blocks, head]).parameters())
    x = torch.randn(4, 64, 64)

    def forward():
        y = x
        for block in blocks:
            y = block(y)
        logits = 30 * torch.tanh(head(y) / 30)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    held, peak = bytes_of(scoped(forward))
    for options in ({"peak": peak}, {"budget": held}):
        assert bytes_of(scoped(forward, **options)).peak <= 1.01 * peak


def test_the_stats_of_a_block_with_a_backward_inside_are_those_of_what_came_before_it():
    """As if the scope had ended there; and twice the bytes and cuts with two of them."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8)]
    model, x = nn.Sequential(*blocks), torch.randn(128, 64)
    found = []
    for steps in (0, 1, 2):
        for _ in range(3):  # later steps have gradients from the first on
            with checkpoint_scope(auto()) as entered:
                for _ in range(max(1, steps)):
                    loss = model(x).square().mean()
                    if steps:
                        loss.backward()
            if not steps:
                loss.backward()
        found.append(entered.stats)
    outside, once, twice = found
    assert outside.peak_predicted == once.peak_predicted == twice.peak_predicted > 0
    assert 2 * outside.bytes_saved == 2 * once.bytes_saved == twice.bytes_saved > 0
    assert len(outside.cuts) == len(once.cuts) == len(twice.cuts) / 2 > 0
