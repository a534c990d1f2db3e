"""DDP, FSDP2, tensor parallel and collectives, on two and four processes: see ranks.py."""

import itertools
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from beside import Program

from checkpointing import Stats

GLOO = dist.is_available() and dist.is_gloo_available()
pytestmark = pytest.mark.skipif(not GLOO, reason="needs gloo")
if dist.is_available():
    from ranks import PROGRAMS, N, doors

SECONDS = 280  # for everything, with processes of others beside; thirty-five on two idle cores
FILE = str(Path(__file__).with_name("ranks.py"))
ranks = Program("-W", "ignore", FILE, str(SECONDS), GLOO_SOCKET_IFNAME="lo")
ALL = [(name, world) for world, programs in PROGRAMS.items() for name in programs]
TOO_WIDE = "fsdp2, the model twice, not resharded"


@pytest.fixture(scope="module")
def table():
    """What each rank found for each program and door."""
    return {tuple(key): row for *key, row in map(json.loads, ranks.outcome.stdout.splitlines())}


def rows_of(table, name, world, door):
    rows = []
    for rank in range(world):
        row = table.get((rank, name, door))
        assert row is not None, f"not reached on rank {rank}: {ranks.outcome.stderr[-5000:]}"
        assert "error" not in row, f"on rank {rank}:\n{row['error']}"
        rows.append(row)
    return rows


CASES = [
    (*case, door)
    for case in ALL
    for door in doors(case[0])[2:]
    if case[0] != TOO_WIDE or door == "rerun"
]
CUTS = [(name, world) for name, world, door in CASES if door == "auto"]


@pytest.mark.parametrize("name, world, door", CASES)
def test_steps_are_those_without_regions(table, name, world, door):
    """Every bit of two steps, and no more collectives than with torch's checkpoint per block."""
    theirs, rows = (rows_of(table, name, world, which) for which in ("torch", door))
    assert [row["differs"] for row in rows] == [[]] * world
    have, most = (max(row["count"] for row in each) for each in (rows, theirs))
    assert have <= most, "collectives in two steps"


@pytest.mark.parametrize("name, world", CUTS)
def test_auto_cuts_at_the_same_places_on_every_rank(table, name, world):
    """As many as there are blocks, or nearly."""
    scopes = [row["scopes"] for row in rows_of(table, name, world, "auto")]
    assert scopes == scopes[:1] * world
    assert all(len(cuts) >= 2 for cuts, *_ in scopes[0])


HELD = [("fsdp2, inside", "scope"), ("fsdp2 x tensor parallel, around", "scope")]
for what in ("around", "around, not resharded", "the model"):
    HELD += [(f"fsdp2, {what}", "scope"), (f"fsdp2, {what}", "auto")]


@pytest.mark.parametrize("name, door", HELD)
def test_gathered_parameters_are_not_held(table, name, door):
    """Scopes hold what they hold where nothing is sharded."""

    def held(name, door):
        (row,) = rows_of(table, name, 1, door)
        found = [Stats(*stats) for _, stats, _ in row["scopes"]]
        return sum(stats.bytes_held + stats.bytes_kept for stats in found)

    assert held(name, door) <= held("ddp", "scope") + N * 32 * 8 * 8


def test_parameters_that_are_not_there(table):
    """A replay through several modules that FSDP2 has sharded and not resharded."""
    why = "has no memory now: FSDP2, or other code that streams weights, has freed it"
    for rank, door in itertools.product(range(2), ("replay", "scope")):
        assert why in table[rank, TOO_WIDE, door]["error"]
