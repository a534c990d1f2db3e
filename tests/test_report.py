"""Reports: what autograd would have held, what is held, what was replayed, by region and by
tensor."""

import weakref

import pytest
import torch
from oracle import python_calls, through
from torch import nn

import checkpointing
from checkpointing import Report, auto, checkpoint_scope, checkpointed, keep, report

N = 1024 * 4  # bytes of one tensor
DOORS = pytest.mark.parametrize("backend", ["rerun", "replay"])


def leaf():
    return torch.ones(1024, requires_grad=True)


def chain(x):
    return x.sin().exp().tanh()


class Block(nn.Module):
    """One linear layer, whose result is kept; its input and its result are saved."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return keep(self.inner(x).tanh())


def kinds(region):
    kinds = {tensor.kind for tensor in region.held}
    return {kind: sum(t.nbytes for t in region.held if t.kind == kind) for kind in kinds}


@DOORS
@pytest.mark.parametrize("noted", [True, False])
def test_a_loss_tells_of_each_region_what_it_saves_and_holds(backend, noted):
    """Two regions one after the other: three tensors each would be saved, one each is held."""
    options = {"backend": backend, "report": noted, "name": "block"}
    block = checkpointed(chain, preserve_rng_state=False, **options)
    loss = block(block(leaf() * 2)).sum()
    first, second = report(loss).regions
    for region in (first, second):
        assert (region.name, region.bytes_held) == ("block", N)
        assert region.bytes_saved == (3 * N if noted or backend == "replay" else None)
        assert [(t.kind, t.nbytes, t.shape, t.dtype) for t in region.held] == [
            ("input", N, (1024,), torch.float32)
        ]
        assert [t.kind for t in region.saved] == ["saved"] * 3 * noted
        assert "test_report.py:" in region.line
        assert region.replays == (0 if backend == "replay" else None)
    assert first.held[0].operator == ("args[0]" if backend == "rerun" else "aten.sin.default")
    loss.backward(retain_graph=True)
    assert {region.replays for region in report(loss).regions} == {
        1 if backend == "replay" else None
    }
    loss.backward()
    assert report(loss) == Report(())


def test_a_scope_reports_itself_at_any_time():
    """Before the block, in it, between and after backward; the same sums as in its stats."""
    for _ in range(2):  # `auto` holds what it has planned from the second time on
        scope = checkpoint_scope(policy=auto(), report=True)
        assert scope.report() == Report(())
        with scope:
            x = through([chain] * 8, leaf() * 1)
            inside = scope.report().regions[0]
    (between,) = scope.report().regions
    assert inside.saved == between.saved
    kept = {t.operator.split(".")[1] for t in between.held if t.kind == "kept"}
    assert kept <= {"sin", "exp", "tanh"}
    assert between.bytes_saved == scope.stats.bytes_saved == sum(t.nbytes for t in between.saved)
    assert between.bytes_held == scope.stats.bytes_held + scope.stats.bytes_kept > 0
    assert scope.stats.cuts
    x.sum().backward()
    (after,) = scope.report().regions
    assert (after.bytes_saved, after.bytes_held) == (between.bytes_saved, 0)
    assert after.replays == scope.stats.replays > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_block_that_reports_itself_is_the_same_block():
    """The size of a nested tensor takes operators, which are none of the block."""
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        with checkpoint_scope(policy=lambda *_, **__: True) as scope:  # keeps the nested one, too
            n = torch.nested.as_nested_tensor([x, x[:1]])
            torch.nested.to_padded_tensor((n * 2).sin(), 0.0).exp().sum().sin()
            first, second = scope.stats, scope.stats
        assert first == second


def test_held_tensors_are_told_apart_and_sorted():
    """Inputs (closed over, too), what is kept or offloaded, random states, copies of buffers."""
    x, norm = leaf() * 2, nn.BatchNorm1d(4)
    with checkpoint_scope() as scope:  # a mask larger than the state that it is drawn from
        y = nn.functional.dropout(keep(x.sin()).exp().repeat(2), 0.5).tanh()
    held = scope.report().regions[0].held
    assert {t.kind for t in held} == {"input", "kept", "random state"}
    assert [t.nbytes for t in held] == sorted([t.nbytes for t in held], reverse=True)
    with checkpoint_scope(
        policy=checkpointing.offload([torch.ops.aten.exp.default], min_bytes=0)
    ) as scope:
        z = chain(x)
    assert kinds(scope.report().regions[0]) == {"input": N, "offloaded": N}
    for _ in range(2):
        with checkpoint_scope(policy=auto(budget=10 * N), report=True) as scope:
            w = chain(chain(chain(x)))
    assert kinds(scope.report().regions[0])["kept"] >= N
    region = checkpointed(lambda y: norm(x.view(-1, 4)).sum() * y, preserve_rng_state=False)
    v = region(leaf() * 3)
    assert kinds(report(v).regions[0]) == {"input": 2 * N, "buffers": 4 * 4 * 2 + 8}
    del y, z, w


def test_a_region_that_saves_no_more_than_indices_is_found():
    """Autograd has them as a list."""
    region = checkpointed(lambda x: x[torch.tensor([0, 2])], preserve_rng_state=False)
    y = region(leaf() * 2)
    (region,) = report(y).regions
    assert region.bytes_held == N


def test_notes_name_operator_module_and_line():
    """Where what is saved or kept was made, by the names that `named_modules` gives."""
    model, x = nn.Sequential(*(Block() for _ in range(3))), torch.ones(2, 8, requires_grad=True)
    with checkpoint_scope(report=True) as scope:
        y = model(x * 1).sum()
    (region,) = scope.report().regions
    kept = [t for t in region.held if t.kind == "kept"]
    assert {(t.operator, t.module) for t in kept} == {("aten.tanh.default", n) for n in "012"}
    assert all("self.inner(x).tanh()" in t.line for t in kept)
    assert {t.module for t in region.saved} == {"0.inner", "0", "1", "2"}
    y.backward()


@pytest.mark.parametrize("noted", [True, False])
def test_a_report_finds_regions_around_and_inside(noted):
    """What an outer region brings back isn't held inside."""
    inner = checkpointed(chain, name="inner", preserve_rng_state=False)
    with checkpoint_scope(name="outer", report=noted) as scope:
        y = inner(inner(leaf() * 2) + 1).sum()
    found = {(r.name, r.bytes_saved, r.held == ()) for r in report(y).regions}
    assert found == {("inner", 3 * N if noted else None, True), ("outer", 2 * N, True)}
    assert len(report(y).regions) == 3
    assert [region.name for region in scope.report().regions] == ["outer"]


def test_the_text_has_80_columns():
    """Sizes in KiB, MiB, GiB; long lines are cut."""
    block = checkpointed(chain, report=True, name="a_name_that_is_rather_long" * 3)
    y = through([block] * 22, leaf() * 2)
    found = report(y)
    lines = str(found).splitlines()
    assert max(map(len, lines)) == 80
    assert lines[1].split()[:2] == ["12.00", "KiB"]
    assert lines[22] == "the largest of 110 tensors in 22 regions:"
    assert len(lines) == 23 + 20 + sum("return x.sin().exp().tanh()" in line for line in lines)
    large = found.regions[0]._replace(bytes_saved=5 * 2**30)
    assert "5.00 GiB" in str(Report((large,)))


def test_bad_input_and_plain_code():
    with pytest.raises(TypeError, match="report takes tensors"):
        report([torch.ones(2)])
    with pytest.raises(ValueError, match="leave determinism_check, debug and report out"):
        checkpointed(chain, backend="reentrant", report=True)
    with checkpointing.disabled(), checkpoint_scope(report=True) as scope:
        y = chain(leaf())
    assert scope.report() == report(y) == report(torch.ones(2)) == Report(())
    assert "no region: none was entered with grad mode on" in str(Report(()))
    assert "in 1 region:" in str(report(checkpointed(chain)(leaf())))


@DOORS
def test_a_report_holds_nothing_alive(backend, no_gc):
    x = leaf() * 2
    y = checkpointed(chain, backend=backend, report=True)(x)
    found, dead = report(y), [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [ref() for ref in dead] == [None, None]
    assert found.regions[0].bytes_held >= N


@DOORS
def test_regions_without_notes_call_nothing_of_reports(backend):
    """Fewer functions run, in forward and backward, than in one that is reported."""

    def calls(**options):
        block = checkpointed(chain, backend=backend, **options)
        block(leaf() * 2).sum().backward()
        return python_calls(lambda: block(leaf() * 2).sum().backward())

    assert calls() == calls(report=False) < calls(report=True)


@DOORS
def test_recompute_shows_in_torchs_profiler(backend):
    """As a range named after the region, and no operator of it is seen by modes."""
    y = checkpointed(chain, backend=backend, name="block")(leaf() * 2).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        y.backward()
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["recompute:block"] == 1
