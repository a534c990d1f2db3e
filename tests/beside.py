"""Programs that tests run in processes of their own: one after the other, beside the tests, from
the start.

A test file says at import what it will want (`wanted = Program(...)`), its tests ask for what
became of it.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

_programs = []
_folder = tempfile.TemporaryDirectory()
_runner = None


class Outcome(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Program:
    """Python with these words after it, as if in this process: what can be imported here can be
    there."""

    def __init__(self, *words, cwd=None, **env):
        self.wanted_by = sys._getframe(1).f_globals["__name__"]
        self.file = Path(_folder.name) / f"{len(_programs)}.json"
        path = os.pathsep.join([str(Path(__file__).parent.parent), *(p for p in sys.path if p)])
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "",
            "OMP_NUM_THREADS": "1",
            **env,
        }
        self.run = {
            "args": [sys.executable, *words],
            "env": env,
            "cwd": cwd and str(cwd),
            "file": str(self.file),
        }
        _programs.append(self)

    @property
    def outcome(self):
        while not self.file.exists():
            if _runner.poll() is not None and not self.file.exists():
                raise RuntimeError("what runs programs beside the tests has ended")
            time.sleep(0.01)
        return Outcome(*json.loads(self.file.read_text()))

    @property
    def output(self):
        code, stdout, stderr = self.outcome
        assert code == 0, stderr
        return stdout


def waiting():
    """The test files that want something: they had better come last."""
    return {program.wanted_by for program in _programs}


def start(modules):
    global _runner
    runs = [program.run for program in _programs if program.wanted_by in modules]
    if runs:
        _runner = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True)
        _runner.stdin.write(json.dumps(runs))
        _runner.stdin.close()


def stop():
    if _runner is not None:
        _runner.kill()
        _runner.wait()
    _folder.cleanup()


if __name__ == "__main__":
    for run in json.load(sys.stdin):
        file = Path(run.pop("file"))
        try:
            done = subprocess.run(
                **run,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
                stdin=subprocess.DEVNULL,
            )
            found = (done.returncode, done.stdout, done.stderr)
        except subprocess.TimeoutExpired as error:
            found = (1, "", str(error))
        file.with_suffix(".part").write_text(json.dumps(found))
        file.with_suffix(".part").rename(file)
