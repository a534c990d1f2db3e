"""The comparison run: its table, its exit status, and the picture drawn with it."""

import functools
import importlib
import re
from collections import namedtuple
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
import torch
from beside import Code

from checkpointing import __main__ as job, checkpointed

SMALL = ["--steps", "2", "--layers", "3", "--width", "32", "--context", "64", "--batch", "4"]

TITLES = "way|held for backward|peak in a step|recomputed|ms/step|ratio|loss|against plain"
Row = namedtuple("Row", "held peak recomputed ms ratio loss verdict")


def run(*arguments):
    """Exit status, rows of the table by way, stderr."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = job.main([*SMALL, *arguments])
    heading, *lines = out.getvalue().splitlines()
    assert re.split(r" {2,}", heading.strip()) == TITLES.split("|")
    rows = {}
    for line in lines:
        way, *numbers, verdict = re.split(r" {2,}", line.strip())
        assert line.rindex(verdict) == heading.rindex("against plain")
        numbers = [float(word) for word in " ".join(numbers).replace("MiB", "").split()]
        rows[way] = Row(*numbers, verdict)
    return status, rows, err.getvalue()


compared = functools.cache(run)


def test_no_way_needs_more_than_torchs_does():
    """Bit-equal to plain, in one aligned table."""
    status, rows, err = compared()
    assert status == 0 and "step 3 of 3" in err
    assert list(rows) == list(job.WAYS)
    plain, *others = rows.values()
    for row in others:
        assert (row.loss, row.verdict) == (plain.loss, "bit-equal")
        assert 0 < row.held < plain.held / 2
        assert row.held < row.peak < plain.peak
    torchs = rows["torch.utils.checkpoint per block"]
    assert plain.recomputed == 0 and rows["one scope, auto()"].recomputed < torchs.recomputed < 1
    assert rows["@checkpointed per block"].held == torchs.held
    for way, limit in (("@checkpointed", 1.02), ("checkpoint_scope", 1.03)):
        assert rows[f"{way} per block"].peak <= limit * torchs.peak, way
    assert rows["one scope, auto()"].peak <= 1.15 * torchs.peak


def test_a_forecast_says_what_the_comparison_measures(capsys):
    _, measured, _ = compared()
    assert job.main(["forecast", *SMALL[2:]]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.endswith("what to write")
    peaks = {line.split("  ")[-1]: float(line.split()[0]) for line in lines}
    for write, way in {"plain": "plain", "auto()": "one scope, auto()"}.items():
        assert peaks[write] == pytest.approx(measured[way].peak, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "steps", "verdict"),
    [
        (job.each_block(lambda block, x: block(x) * 1.001), 2, "gradients, losses, weights"),
        (lambda *args: (job.WAYS["plain"](*args), torch.rand(()))[0], 1, "random stream"),
    ],
)
def test_a_way_that_differs_fails_the_run(monkeypatch, wrong, steps, verdict):
    """The table names what differs; the exit status is 1."""
    monkeypatch.setattr(job, "WAYS", {"plain": job.WAYS["plain"], "wrong": wrong})
    status, rows, _ = run("--steps", str(steps))
    assert status == 1
    assert rows["plain"].verdict == "bit-equal"
    assert rows["wrong"].verdict == f"other {verdict}"


@pytest.mark.parametrize(
    "arguments", [["--context", "many"], ["--steps", "0"], ["--layer-count=3"]], ids=" ".join
)
def test_wrong_values_get_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        job.main(arguments)
    out, err = capsys.readouterr()
    assert (exit_.value.code, out) == (2, "")
    assert arguments[0].partition("=")[0] in err


def test_the_picture_names_each_line(tmp_path):
    """An SVG with its words as text, without a date, drawn from counts alone."""
    pytest.importorskip("matplotlib")
    picture = importlib.import_module("picture")
    file = tmp_path / "picture.svg"
    picture.draw(str(file), [*SMALL, "--layers", "1", "--context", "16"])
    text = file.read_text(encoding="utf-8")
    assert "<dc:date>" not in text
    titles = ["forward", "backward", "torch's selective", "recomputed FLOPs"]
    for word in ["plain", picture.TORCH, picture.AUTO, *titles]:
        assert f">{word}" in text, word
    assert len(text) < 100_000


def test_bits_are_compared():
    zero, nan = torch.zeros(2), torch.tensor(float("nan"))
    assert job.same_bits(nan, nan) and not job.same_bits(zero, -zero)


def test_operations_and_bytes_are_counted():
    """A product takes two operations per element and step; backward adds its start and gradient."""
    x, w = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    plain = job.step_of(lambda: (x @ w).sum())
    assert (plain.flops_forward, plain.flops) == (2 * 2 * 3 * 4, 2 * 2 * 2 * 3 * 4)
    step = job.step_of(lambda: checkpointed(lambda x: (x @ w).exp())(x).sum())
    assert (step.flops_forward, step.flops, step.recomputed(plain)) == (48, 3 * 48, 1.0)
    z = torch.zeros(1000, requires_grad=True)
    assert job.step_of(lambda: z.exp().sum()).memory() == (4000 + 4, 4000 + 4 + 4 + 4000)


def test_the_command_exits_with_the_status():
    """It is what `python -m` does."""
    code = "import runpy; runpy.run_module('checkpointing', run_name='__main__', alter_sys=True)"
    command = Code(code, "--width", "wide")
    assert (command.outcome.returncode, command.outcome.stdout) == (2, "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_is_bit_equal():
    status, rows, _ = run("--device", "cuda")
    plain = rows.pop("plain")
    assert status == 0
    assert all(row.held < plain.held for row in rows.values())
