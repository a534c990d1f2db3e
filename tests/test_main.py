"""The comparison run: its table, its JSON, its exit status, and one line for every wrong value."""

import json
import subprocess
import sys

import pytest
import torch

from checkpointing import __main__ as job
from checkpointing import checkpointed

pytestmark = pytest.mark.usefixtures("frozen")  # memory is measured after collections, which are quick then

SMALL = ["--steps", "2", "--layers", "3", "--width", "32", "--context", "64", "--batch", "4"]


def run(capsys, *arguments):
    """Exit status, stdout and stderr of the job."""
    status = job.main([*SMALL, *arguments])
    return status, *capsys.readouterr()


def test_table_has_a_row_for_each_way_and_all_are_bit_equal(capsys):
    """The default output: progress on stderr, one aligned table on stdout; the random stream is left alone."""
    before = torch.get_rng_state()
    status, out, err = run(capsys)
    heading, *rows = out.splitlines()
    assert status == 0
    assert [title.strip() for title in heading.split("  ") if title.strip()] == [
        *("way", "held for backward", "peak in a step", "recomputed", "ms/step", "ratio", "loss", "against plain")
    ]
    assert [row.split("  ")[0] for row in rows] == list(job.WAYS)
    assert len({row.rindex("  bit-equal") for row in rows}) == 1
    assert "step 2 of 2" in err
    assert torch.equal(torch.get_rng_state(), before)


def test_json_is_all_that_stdout_has(capsys):
    """Options and rows, in whole bytes; no way needs more than torch's does, and nested scopes hold least."""
    status, out, _ = run(capsys, "--json")
    result = json.loads(out)
    rows = {row["way"]: row for row in result["rows"]}
    assert status == 0
    assert result["options"]["layers"] == 3
    assert result["options"]["torch"] == torch.__version__
    assert list(rows) == list(job.WAYS)
    plain = rows.pop("plain")
    for row in rows.values():
        assert row["bit_equal"] is True
        assert row["differences"] == []
        assert row["loss"] == plain["loss"]
        assert isinstance(row["held_bytes"], int)
        assert 0 < row["held_bytes"] < plain["held_bytes"] / 2
        assert row["held_bytes"] < row["peak_bytes"] < plain["peak_bytes"]
    assert min(rows.values(), key=lambda row: row["held_bytes"])["way"] == "nested scopes"
    torchs = rows["torch.utils.checkpoint per block"]
    assert plain["recomputed"] == 0 and rows["one scope, auto()"]["recomputed"] < torchs["recomputed"] < 1
    assert rows["@checkpointed per block"]["held_bytes"] == torchs["held_bytes"]
    limits = {
        "@checkpointed per block": 1.02,
        "checkpoint_scope per block": 1.02,
        "one scope, keep between blocks": 1.05,
        "one scope, auto()": 1.15,
    }
    for way, limit in limits.items():
        assert rows[way]["peak_bytes"] <= limit * torchs["peak_bytes"], way


def test_other_dtypes_are_bit_equal_too(capsys):
    """Half precision runs on the CPU as well."""
    small = ["--steps", "1", "--layers", "1", "--batch", "1", "--width", "16", "--context", "16"]
    status, out, _ = run(capsys, *small, "--dtype", "bfloat16", "--json")
    assert status == 0
    assert json.loads(out)["options"]["dtype"] == "bfloat16"


def test_a_way_with_other_gradients_fails_the_run(capsys, monkeypatch):
    """The table names the largest difference of the gradients; the exit status is 1."""
    monkeypatch.setattr(
        job,
        "WAYS",
        {
            "plain": job.WAYS["plain"],
            "wrong": lambda model, text: model.loss(text, lambda block, x: block(x) * 1.001),
        },
    )
    status, out, _ = run(capsys)
    assert status == 1
    assert out.splitlines()[1].endswith("bit-equal")
    assert out.splitlines()[2].endswith("other gradients, losses, weights")
    assert "random stream" not in out


def test_a_way_that_moves_the_random_stream_fails_the_run(capsys, monkeypatch):
    """Also where the gradients of the only step are still the same."""

    def one_draw_more(model, text):
        loss = model.loss(text, job.plain)
        torch.rand(())
        return loss

    monkeypatch.setattr(job, "WAYS", {"plain": job.WAYS["plain"], "wrong": one_draw_more})
    status, out, _ = run(capsys, "--steps", "1", "--json")
    plain, wrong = json.loads(out)["rows"]
    assert status == 1
    assert plain["bit_equal"] is True
    assert wrong["bit_equal"] is False
    assert wrong["differences"] == ["random stream"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], ["--steps", "'0'", "positive"]),
        (["--layers", "-1"], ["--layers", "'-1'", "positive"]),
        (["--batch", "1.5"], ["--batch", "'1.5'", "positive"]),
        (["--context", "many"], ["--context", "'many'", "positive"]),
        (["--context", "100000000"], ["--context", "too long"]),
        (["--width", "30"], ["--width", "30", "multiple of 4"]),
        (["--device", "abacus"], ["--device", "'abacus'", "not a device"]),
        (["--device", "meta"], ["--device", "'meta'", "not available"]),
        (["--device", "cuda"], ["--device", "'cuda'", "not available"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "float32"]),
        (["--layer", "3"], ["unrecognized", "--layer"]),
        (["--plot", "a.gif"], ["--plot", "'a.gif'", ".svg", ".png"]),
        (["--plot", "no/such/a.svg"], ["--plot", "'no/such/a.svg'", "no folder"]),
    ],
    ids=" ".join,
)
def test_wrong_values_get_one_line_and_status_2(capsys, monkeypatch, arguments, words):
    """No usage, no traceback, nothing on stdout."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(SystemExit) as exit_:
        job.main(arguments)
    out, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("python -m checkpointing: ")
    assert all(word in err for word in words)


def test_plot_without_matplotlib_is_one_line_that_names_the_extra(capsys, monkeypatch):
    """Nothing runs before."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as exit_:
        job.main(["--plot", "a.svg"])
    _, err = capsys.readouterr()
    assert exit_.value.code == 2
    assert err.count("\n") == 1
    assert "pip install 'checkpointing[plot]'" in err


def test_the_picture_is_the_same_each_time_and_shows_every_way(tmp_path):
    """An SVG with its words as text, without a date, drawn from counts alone."""
    pytest.importorskip("matplotlib")
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        assert job.main([*SMALL, "--plot", str(file)]) == 0
    text = files[0].read_text(encoding="utf-8")
    assert text == files[1].read_text(encoding="utf-8")
    for word in [*job.WAYS, "forward", "backward", "cuts of auto()", "plain", "recomputed FLOPs"]:
        assert f">{word}" in text, word
    assert len(text) < 150_000


def test_operations_are_counted_in_forward_and_in_recompute():
    """A product of matrices takes two per element and step; backward of this one needs one more, and the recompute
    none: what backward reads is given."""
    x, w = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    plain = job.step_on_cpu(lambda: (x @ w).sum())
    assert (plain.flops_forward, plain.flops) == (2 * 2 * 3 * 4, 2 * 2 * 2 * 3 * 4)
    step = job.step_on_cpu(lambda: checkpointed(lambda x: (x @ w).exp())(x).sum())
    assert (step.flops_forward, step.flops, step.recomputed(plain)) == (48, 3 * 48, 1.0)


def test_the_command_exits_with_the_status():
    """The whole way, in a process of its own."""
    command = [sys.executable, "-m", "checkpointing", "--width", "7"]
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


def test_cpu_memory_is_counted_to_the_byte():
    """Exp holds its result; the loss is there too. Backward adds its own start and the gradient."""
    x = torch.zeros(1000, requires_grad=True)
    assert job.step_on_cpu(lambda: x.exp().sum()).memory() == (4000 + 4, 4000 + 4 + 4 + 4000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_is_bit_equal_and_measured_by_the_allocator(capsys):
    """The same table, with the allocator's bytes."""
    status, out, _ = run(capsys, "--device", "cuda", "--json")
    plain, *others = json.loads(out)["rows"]
    assert status == 0
    assert all(row["held_bytes"] < plain["held_bytes"] for row in others)
