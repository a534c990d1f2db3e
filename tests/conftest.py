"""One thread, fixed seeds, and the same Hypothesis examples on every run."""

import contextlib
import gc
import getpass
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from oracle import seed
from torch.utils.flop_counter import FlopCounterMode

from checkpointing import clear_programs

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))  # its programs
torch.set_num_threads(1)
with contextlib.suppress(ImportError):  # the compiler shows progress where tqdm is installed
    import tqdm

    tqdm.tqdm.monitor_interval = 0  # its thread makes objects while tests count them

# Inductor's cache doesn't tell instruction sets apart (torch 2.15): other code ends the process.
_cache = f"torchinductor_{getpass.getuser()}_{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _cache))

settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random stream, and without programs."""
    seed(0)
    clear_programs()


@pytest.fixture(scope="module", autouse=True)
def old_objects_frozen():
    """What is there already is left out of counts, and of collections, which take less time."""
    with FlopCounterMode(display=False):
        torch.ones(3).sin()
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_gc():
    """Only reference counts may free what the test makes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def quick_switches():
    """Threads take turns often, so that races show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def _group():
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


group = pytest.fixture(_group, scope="module", name="group")
own_group = pytest.fixture(_group, name="own_group")


@pytest.fixture
def mesh(own_group):
    """Of this process alone, for one test: some modules ask whether there is a group."""
    return torch.distributed.init_device_mesh("cpu", (1,))
