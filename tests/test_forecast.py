"""The forecast: what it says before a step is what the step needs, and it leaves nothing behind."""

import contextlib
import functools
import gc
import random
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from oracle import bits, leaf, rerun, scope, through
from programs import Block
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, checkpoint_modules, clear_programs, forecast
from checkpointing.__main__ import step_of


class Decoder(nn.Module):
    """One stack of blocks, with a head."""

    def __init__(self, layers=4, width=64, vocabulary=256, dropout=0.0):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.head(through(self.layers, self.token(ids)))
        return F.cross_entropy(x.flatten(0, 1), ids.flatten())


class Reader(Block):
    def forward(self, x, memory):
        return super().forward(x + memory)


class Both(nn.Module):
    """An encoder, and a decoder whose layers all read what it makes."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(Block(64, 4) for _ in range(3))
        self.second = nn.ModuleList(Reader(64, 4) for _ in range(3))

    def forward(self, x):
        memory = through(self.first, x)
        for layer in self.second:
            x = layer(x, memory)
        return x.square().mean()


class Pyramid(nn.Module):
    """Stages with fewer rows and more features each."""

    def __init__(self):
        super().__init__()
        stages = [[Wide(32 * 2**n) for _ in range(3)] for n in range(3)]
        self.stages = nn.ModuleList(map(nn.ModuleList, stages))
        self.downs = nn.ModuleList(nn.Linear(64 * 2**n, 64 * 2**n) for n in range(2))

    def forward(self, x):
        for stage, down in zip(self.stages, self.downs, strict=False):
            x = down(through(stage, x).unflatten(0, (-1, 2)).flatten(1))
        return through(self.stages[-1], x).square().mean()


class Wide(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


IDS = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(0))
MODELS = {
    "decoder": (functools.partial(Decoder, dropout=0.1), IDS),
    "encoder and decoder": (Both, torch.linspace(-1, 1, 2 * 48 * 64).view(2, 48, 64)),
    "pyramid": (Pyramid, torch.linspace(-1, 1, 256 * 32).view(256, 32)),
}


def measured(model, loss, policy=None):
    """A step, the second one with this policy."""
    clear_programs()
    forward = loss if policy is None else scope(loss, policy=policy)
    model.zero_grad()
    forward().backward()
    model.zero_grad()
    step = step_of(forward)
    model.zero_grad()
    return step


@pytest.mark.parametrize(
    ("name", "bf16"), [*[(name, False) for name in MODELS], ("decoder", True), ("pyramid", True)]
)
def test_each_row_is_what_a_step_takes(name, bf16):
    make, x = MODELS[name]
    model = make()
    loss = torch.autocast("cpu", torch.bfloat16, enabled=bf16)(lambda: model(x))
    rows = forecast(loss).rows
    # In bfloat16, products work in memory of their own: much of what models as small as these need.
    most = 0.1 if bf16 else 0.05
    plain = measured(model, loss)
    assert len(rows) >= 6
    assert len({(row.peak, row.recomputed) for row in rows}) == len(rows)
    assert [row.peak for row in rows] == sorted([row.peak for row in rows], reverse=True)
    again = [row.recomputed for row in rows if row.write.startswith("auto(peak=")]
    assert again == sorted(again)
    assert again[0] == 0 or name == "pyramid"  # of which a little runs again
    for row in rows:
        if row.write == "plain":
            step = plain
        elif row.write.startswith("auto"):
            # Warnings are errors: no peak is below the least.
            step = measured(model, loss, eval(row.write, {"auto": auto}))
        else:
            names = {"model": model, "checkpoint_modules": checkpoint_modules}
            handle = eval(row.write, {**globals(), **names})
            step = measured(model, loss)
            handle.remove()
        assert row.peak == pytest.approx(step.memory()[1], rel=most), row
        assert row.recomputed == pytest.approx(step.recomputed(plain), abs=0.03), row


def test_a_table_and_a_picture_show_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    model = Decoder()
    found = forecast(lambda: model(IDS))
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found.rows)
    assert all(len(line) <= 80 for line in lines)
    assert [line.split("  ")[-1] for line in lines[1:]] == [row.write for row in found.rows]
    path = tmp_path / "costs.svg"
    found.plot(str(path))
    assert "checkpoint_modules(model, Block)" in path.read_text()


class Writing(nn.Module):
    """Whatever a forward may leave behind."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.generator = torch.Generator()

    def forward(self, x):
        y = F.dropout(self.linear(self.norm(x)), 0.5)
        y = y + torch.rand(8) * random.random() + torch.rand(8, generator=self.generator)
        for row, new in zip(self.cache, y.detach(), strict=True):
            row[:4].copy_(new[:4])
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        self.linear.weight.data.mul_(1.0)
        x.data[2:].add_(1)
        x.data[0].zero_()
        return (y * y.sigmoid()).sum()


def state_of(model, x):
    streams = torch.get_rng_state(), model.generator.get_state()
    return bits([model.state_dict(), [p.grad for p in model.parameters()], x, streams])


def test_memory_generators_and_gradients_are_afterwards_as_they_were():
    """Also after an exception, which comes through."""
    model, x = Writing(), torch.randn(4, 8)
    model(x.clone()).backward()
    buffers = [*model.buffers()]
    before, drawn = state_of(model, x), random.getstate()
    for key in ("loss", "mine"):
        with pytest.raises(KeyError, match="mine") if key == "mine" else contextlib.nullcontext():
            forecast(lambda: {"loss": model(x)}[key])  # noqa: B023
        assert state_of(model, x) == before
        assert random.getstate() == drawn
        assert all(old is new for old, new in zip(buffers, model.buffers(), strict=True))


def test_a_tensor_that_a_result_is_written_to_is_afterwards_a_leaf_again():
    x, w = torch.ones(4), leaf(4)
    forecast(lambda: x.mul_(w).exp().sum())
    assert x.is_leaf and not x.requires_grad and bits(x) == bits(torch.ones(4))


def test_buffers_are_put_back_if_a_module_is_called_before_one_that_contains_it():
    child, x = Writing(), torch.randn(4, 8)
    parent, before = nn.Sequential(child), child.mean
    forecast(lambda: child(x) + parent(x))
    assert child.mean is before


def test_the_step_after_a_forecast_is_that_without_one():
    def trained(sees):
        torch.manual_seed(0)
        model, x = Writing(), torch.randn(4, 8)
        random.seed(0)
        if sees:
            forecast(lambda: model(x))
        for _ in range(2):
            scope(model, policy=auto())(x).backward()
        return state_of(model, x)

    assert trained(True) == trained(False)


def test_nothing_stays_of_modules_that_hold_the_graph_of_the_function():
    """As the functional modules of `higher` do."""
    alive = weakref.WeakSet()

    def function():
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        alive.add(model)
        model.fast = model(torch.ones(4, 8)).exp()
        return model.fast.sum()

    forecast(function)
    gc.collect()
    assert not alive


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_buffers_of_scripted_modules_are_put_back():
    model, x = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))), torch.ones(4, 8)
    before = bits(model.state_dict())
    assert forecast(lambda: model(x).square().sum()).rows[0].write == "plain"
    assert bits(model.state_dict()) == before


@pytest.mark.parametrize("lazy", [nn.LazyLinear, lambda _: nn.LazyBatchNorm1d(affine=False)])
def test_lazy_modules_that_have_yet_to_run_are_an_error(lazy):
    """What was in their memory before their first numbers would come back, and be trained."""
    model, x = nn.Sequential(lazy(8), nn.Linear(8, 8)), torch.ones(4, 8)
    with pytest.raises(ValueError, match="lazy modules"):
        forecast(lambda: model(x).sum())
    model(x)
    assert forecast(lambda: model(x).sum()).rows[0].write == "plain"


def test_a_function_in_which_nothing_is_saved_is_an_error():
    with pytest.raises(ValueError, match="autograd saves nothing"):
        forecast(lambda: torch.ones(3).sin())


def test_a_backward_in_the_function_is_an_error_unless_its_gradients_are_in_the_loss():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), leaf(4, 8)
    before = bits(model.state_dict())

    def step():
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return model(x).sum()

    def penalty():
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return (grad.norm(2, 1) - 1).square().mean()

    with pytest.raises(ValueError, match="leave backward and the optimizer out"):
        forecast(step)
    assert bits(model.state_dict()) == before
    assert forecast(penalty).rows[0].write == "plain"


def test_a_state_that_leads_from_a_step_into_the_forecast_is_an_error():
    states, x = [torch.ones(4, 8)], leaf(4, 8)

    def step():
        states.append((states[-1] * x).sin())
        return states[-1].exp().sum()

    forecast(step)
    with pytest.raises(ValueError, match="reset what the model carries"):
        step().backward()


def test_checkpoints_that_hide_what_is_saved_are_an_error():
    model, x = Decoder(3), IDS
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    with pytest.raises(ValueError, match="hooks around LayerNorm"):
        forecast(lambda: model(x))


def test_gradients_are_enabled_and_regions_inside_are_plain_code():
    model, x = Decoder(3), IDS
    bare = forecast(lambda: model(x))
    checkpoint_modules(model, Block)
    with torch.no_grad():
        assert forecast(lambda: model(x)).rows == bare.rows


def test_a_dry_run_says_what_a_run_says():
    def rows():
        model, x = Decoder(dropout=0.1), torch.zeros(2, 48, dtype=torch.long)
        return forecast(lambda: model(x)).rows

    with FakeTensorMode():
        dry = rows()
    assert dry == rows()


def test_a_dry_run_of_a_large_model_takes_no_memory():
    with FakeTensorMode():
        model, x = Decoder(4, 8192, 50_000), torch.zeros(2, 4096, dtype=torch.long)
        plain, *_, least = forecast(lambda: model(x)).rows
    assert plain.peak > 16 * 2**30
    assert least.peak < plain.peak


def test_what_derivatives_allocate_on_the_way_is_not_simulated():
    x = torch.randn(1 << 16, requires_grad=True)

    def loss():
        return through([lambda y: torch.atan2(y, y.detach() + 1)] * 8, x).sum()

    least = forecast(loss).rows[-1].peak
    forward = scope(loss, policy=auto(peak=least))
    forward().backward()
    assert 1.03 * least < step_of(forward).memory()[1] <= 2 * least


# ---- a scope that saves next to nothing


def loss_of(layers, x):
    return through(layers, x).square().mean()


def warned(run, rows=1 << 17):
    """Narrow layers on many rows: each saves 20 MiB and computes little."""
    torch.manual_seed(0)
    layers, x = nn.ModuleList(Wide(8) for _ in range(8)), torch.randn(rows, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(layers, x).backward()
    return [str(one.message) for one in caught]


def test_a_scope_around_a_whole_model_says_once_that_it_needs_a_policy():
    (message,) = warned(scope(loss_of, name="model"))
    assert message.startswith("region 'model' (entered at ")
    assert "checkpoint_scope(auto())" in message


def branches(layers, x):
    return loss_of(layers[:4], x) + loss_of(layers[4:], x)


QUIET = {
    "branches": scope(branches),
    "each": lambda layers, x: loss_of(map(scope, layers), x),
    "planned": scope(loss_of, policy=auto()),
    "halves": lambda layers, x: scope(loss_of)(layers[4:], scope(through)(layers[:4], x)),
    "tail": lambda layers, x: scope(loss_of)(layers[4:], through(map(rerun, layers[:4]), x)),
    "little": scope(loss_of),
}


@pytest.mark.parametrize("name", QUIET)
def test_scopes_that_lower_the_peak_and_small_ones_say_nothing(name):
    assert warned(QUIET[name], rows=1 << 14 if name == "little" else 1 << 17) == []
