"""Programs that tests run in processes of their own."""

import functools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Program:
    """Python with these words after it, and what can be imported here. It runs once, when asked."""

    def __init__(self, *words, cwd=None, **env):
        path = os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
        env = {"PYTHONWARNINGS": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1", **env}
        self._args = [sys.executable, *words]
        self._how = {"cwd": cwd, "env": {**os.environ, "PYTHONPATH": path, **env}}

    @functools.cached_property
    def outcome(self):
        how = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, **self._how}
        return subprocess.run(self._args, check=False, timeout=300, **how)

    @property
    def output(self):
        assert self.outcome.returncode == 0, self.outcome.stderr
        return self.outcome.stdout


class Code(Program):
    """Given as text."""

    def __init__(self, code, *words):
        super().__init__("-c", code, *words)
