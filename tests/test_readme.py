"""The README's programs run, and its two commands are what CI and the reader take word for word."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PROGRAMS = [
    "\n" * README.count("\n", 0, found.start(1))
    + found[1]  # so that a traceback shows the README's line
    for found in re.finditer(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
]
COMMANDS = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs(program):
    """Each on its own, from its imports on; the parameters of its modules have gradients
    afterwards."""
    names = {"__name__": "readme"}
    exec(compile(program, "README.md", "exec"), names)
    model = names.get("model", names.get("layers"))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_there_are_programs():
    for door in (
        "checkpoint_modules(",
        "with checkpoint_scope(policy=auto())",
        "@checkpointed(policy=auto(peak=",
    ):
        assert any(door in program for program in PROGRAMS)


def test_the_first_two_commands():
    compare, test = COMMANDS[0].splitlines()
    assert compare == "pip install . && python -m checkpointing"
    assert test == "pip install '.[test]' && python -m pytest"
