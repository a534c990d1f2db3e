"""DDP, FSDP2, tensor parallel and collectives, on two and four processes: see ranks.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpointing import Stats

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
if dist.is_available():
    from ranks import DOORS, PROGRAMS

RANKS = Path(__file__).with_name("ranks.py")
SECONDS = 200  # for everything, with processes of others beside
ALL = [(name, world) for world, programs in PROGRAMS.items() for name in programs]
TOO_WIDE = "fsdp2, the model twice in a region, not resharded"


@pytest.fixture(scope="session")
def tables(tmp_path_factory):
    """By world size and rank: its rows, by program and door. The processes are started once."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(RANKS.parents[2]), *sys.path])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", str(RANKS), str(SECONDS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=SECONDS + 60)
    found = {"ended": done.stderr[-5000:]}
    for world in PROGRAMS:
        files = [folder / f"{world}.{rank}" for rank in range(world)]
        rows = [map(json.loads, file.read_text().splitlines()) if file.exists() else [] for file in files]
        found[world] = [{(name, door): row for name, door, row in of_rank} for of_rank in rows]
    return found


def rows_of(tables, name, world, door):
    """What each rank found."""
    rows = []
    for rank, table in enumerate(tables[world]):
        row = table.get((name, door))
        assert row is not None, f"not reached on rank {rank}: {tables['ended']}"
        assert "error" not in row, f"on rank {rank}:\n{row['error']}"
        rows.append(row)
    return rows


CASES = [(*case, door) for case in ALL for door in list(DOORS)[2:] if case[0] != TOO_WIDE or door == "rerun"]


@pytest.mark.parametrize("name, world, door", CASES, ids=[f"{name}-{door}" for name, _, door in CASES])
def test_steps_are_those_without_regions(tables, name, world, door):
    """Every bit of three steps, and no more collectives than with torch's checkpoint per block."""
    counts = {}
    for which in ("plain", "torch", door):
        rows = rows_of(tables, name, world, which)
        counts[which] = sorted({row["count"] for row in rows})
    assert [row["differs"] for row in rows] == [[]] * world
    print(f"collectives in three steps: {counts}")
    assert max(counts[door]) <= max(counts["torch"])


@pytest.mark.parametrize("name, world", [case for case in ALL if case[0] != TOO_WIDE])
def test_auto_cuts_at_the_same_places_on_every_rank(tables, name, world):
    """As many as there are blocks, or nearly."""
    scopes = [row["scopes"] for row in rows_of(tables, name, world, "auto")]
    assert scopes == scopes[:1] * world
    assert all(len(cuts) >= 2 for cuts, *_ in scopes[0])


@pytest.mark.parametrize("door", ["scope", "auto"])
@pytest.mark.parametrize("where", ["inside", "around", "around, not resharded", "the model"])
def test_gathered_parameters_are_not_held(tables, where, door):
    """Scopes hold what they hold where nothing is sharded, and at most four activations more, but no parameters."""

    def held(name, door):
        row = rows_of(tables, name, 2, door)[0]
        return sum(Stats(*stats).bytes_held + Stats(*stats).bytes_kept for _, stats, _ in row["scopes"])

    assert held(f"fsdp2, {where}", door) <= held("ddp", "scope") + 4 * 4 * 8 * 8


def test_parameters_that_are_not_there(tables):
    """A replay through several modules that FSDP2 has sharded and not resharded, and whose parameters another backward
    has given back: an error on every rank."""
    for table in tables[2]:
        for door in ("replay", "scope"):
            assert "has no memory at this moment. FSDP2 has given it back" in table[TOO_WIDE, door]["error"]
