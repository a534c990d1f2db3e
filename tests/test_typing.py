"""Type checkers see through the doors: mypy --strict on a program that asks for the types."""

import re
from pathlib import Path

import pytest
from beside import Program
from oracle import words

ROOT = Path(__file__).parent.parent

PROGRAM = """
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from checkpointing import Stats, checkpoint_scope, checkpointed, disabled
from checkpointing import is_recomputing, keep
from checkpointing.torch_compat import checkpoint


@checkpointed
def bare(
    x: Tensor, n: int = 1, /, *rest: float, flag: bool = False, **others: str
) -> tuple[Tensor, int]:
    return x, n


@checkpointed(backend="replay", early_stop=False, name="block")
def options(x: Tensor, *, scale: float) -> dict[str, Tensor]:
    return {"x": x * scale}


def plain(x: Tensor) -> Tensor:
    return x


direct = checkpointed(plain, determinism_check="values")
check = checkpointed(plain, determinism_check=lambda t: t.sum())


class Owner:
    @checkpointed
    def method(self, x: Tensor, y: int) -> Tensor:
        return x * y

    static = staticmethod(checkpointed(plain))

    @classmethod
    @checkpointed
    def make(cls, x: Tensor) -> Tensor:
        return x


@checkpointed
class Block(nn.Module):
    width: int = 3

    def forward(self, x: Tensor, flip: bool = False) -> Tensor:
        return x


@checkpointed(early_stop=False)
class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


x = torch.ones(3)
reveal_type(bare)  # def bare
reveal_type(options)  # def options
reveal_type(direct)  # def direct
reveal_type(checkpointed(lambda t: 3))  # lambda
assert_type(bare(x, 2, 1.0, flag=True, other="a"), tuple[Tensor, int])
assert_type(options(x, scale=2.0), dict[str, Tensor])
assert_type(direct(x), Tensor)
assert_type(check(x), Tensor)
assert_type(Owner().method(x, 3), Tensor)
assert_type(Owner.static(x), Tensor)
assert_type(Owner.make(x), Tensor)
assert_type(Block, type[Block])
assert_type(Block(), Block)
assert_type(Block().width, int)
assert_type(Block().forward(x, flip=True), Tensor)
assert_type(Other(), Other)
assert_type(checkpoint(bare, x, 3, use_reentrant=False), tuple[Tensor, int])
assert_type(keep(x), Tensor)
assert_type(keep((x, [x])), tuple[Tensor, list[Tensor]])
assert_type(is_recomputing(), bool)
with checkpoint_scope(name="s", enabled=True) as scope, disabled():
    assert_type(scope, checkpoint_scope)
    assert_type(scope.stats, Stats)
    assert_type(scope.stats.bytes_kept, int)
    assert_type(scope.name, str)


def after() -> int:
    with checkpoint_scope():
        return 1
"""

# Every line with a comment is an error, and no other.
WRONG = """
from torch import Tensor, nn

from checkpointing import checkpoint_scope, checkpointed


@checkpointed
def fn(x: Tensor, *, scale: float) -> Tensor:
    return x


fn(1, scale=2.0)  # error
fn(1)  # error
fn(x=2)  # error
checkpointed(fn, backend="eager")  # error
checkpointed(fn, True)  # error
checkpointed(determinism_check="value")  # error
checkpointed(use_reentrant=False)  # error
checkpoint_scope(backend="replay")  # error
checkpoint_scope(None, True)  # error
with checkpoint_scope() as scope:
    scope.stats = None  # error
    scope.stats.bytes_kept = 3  # error
"""


CHECK = f"""
import os, sys, tempfile
from mypy.main import main
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    for name, program in (("right", {PROGRAM!r}), ("wrong", {WRONG!r})):
        with open(name + ".py", "w", encoding="utf-8") as file:
            file.write(program)
    main(args=[*sys.argv[1:], "right.py", "wrong.py"], stdout=sys.stdout, stderr=sys.stderr)
"""
HOW = words(
    "--strict --no-error-summary --config-file= --follow-imports=silent --hide-error-context"
)
checked = Program("-c", CHECK, *HOW, f"--cache-dir={ROOT / '.mypy_cache'}", MYPYPATH=str(ROOT))


@pytest.fixture(scope="module")
def found():
    """Lines of a strict run over both programs, as (file, line, kind, text)."""
    pytest.importorskip("mypy", reason="mypy is not installed (it is in the extra `dev`)")
    process = checked.outcome
    assert process.returncode < 2, process.stdout + process.stderr
    lines = re.findall(r"(right|wrong)\.py:(\d+): (\w+): (.*)", process.stdout)
    return [(file, int(line), kind, text) for file, line, kind, text in lines]


def test_doors_keep_signatures(found):
    """Arguments, keyword arguments, defaults, results, methods and module classes."""
    assert [entry for entry in found if entry[0] == "right" and entry[2] == "error"] == []
    text = re.sub(r"torch\._tensor\.|builtins\.", "", "\n".join(text for *_, text in found))
    assert re.findall(r'Revealed type is "(.*)"', text) == [
        "def (Tensor, int =, *rest: float, flag: bool =, **others: str) -> tuple[Tensor, int]",
        "def (x: Tensor, *, scale: float) -> dict[str, Tensor]",
        "def (x: Tensor) -> Tensor",
        "def (t: Any) -> int",
    ]


def test_wrong_uses_are_errors(found):
    """What would raise at run time is found before."""
    errors = {line for file, line, kind, _ in found if (file, kind) == ("wrong", "error")}
    assert errors == {i for i, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# error")}
