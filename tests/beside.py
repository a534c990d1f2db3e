"""Programs that tests run in processes of their own."""

import functools
import os
import subprocess
import sys
from pathlib import Path


class Program:
    """Python with these words after it, as if in this process: what can be imported here can be
    there. It runs once, when a test asks for what became of it."""

    def __init__(self, *words, cwd=None, **env):
        path = os.pathsep.join([str(Path(__file__).parent.parent), *(p for p in sys.path if p)])
        own = {"PYTHONPATH": path, "PYTHONWARNINGS": "", "OMP_NUM_THREADS": "1"}
        self._args = [sys.executable, *words]
        self._env = {**os.environ, **own, **env}
        self._cwd = cwd

    @functools.cached_property
    def outcome(self):
        return subprocess.run(
            self._args,
            env=self._env,
            cwd=self._cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )

    @property
    def output(self):
        done = self.outcome
        assert done.returncode == 0, done.stderr
        return done.stdout
