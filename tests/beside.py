"""Programs that tests run in processes of their own."""

import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {"PYTHONWARNINGS": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}


class Outcome(NamedTuple):
    """How a program has ended, and what it has said."""

    returncode: int
    stdout: str
    stderr: str


class Program:
    """Python with these words after it, as if in this process: what can be imported here can be
    there. It runs once, when a test asks for what became of it."""

    def __init__(self, *words, cwd=None, **env):
        path = os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
        self._args = [sys.executable, *words]
        self._env = {**os.environ, "PYTHONPATH": path, **ENVIRONMENT, **env}
        self._cwd = cwd

    @functools.cached_property
    def outcome(self):
        done = subprocess.run(
            self._args,
            env=self._env,
            cwd=self._cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    @property
    def output(self):
        done = self.outcome
        assert done.returncode == 0, done.stderr
        return done.stdout


class Code(Program):
    """A program in a fork of a process that has imported torch and this library, and has not used
    them: it begins at once."""

    def __init__(self, code, *words):
        self._code, self._words = code, words

    @functools.cached_property
    def outcome(self):
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("stdout", "stderr")]
            process = _server().Process(target=_run, args=(self._code, self._words, files))
            process.start()
            process.join(300)
            process.kill()
            process.join()
            return Outcome(process.exitcode, *(file.read_text() for file in files))


@functools.cache
def _server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["oracle"])
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        forkserver.ensure_running()
    finally:
        for name in ENVIRONMENT:
            os.environ.pop(name)
        os.environ.update(before)
    return context


def _run(code, words, files):
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
    sys.argv = ["-c", *words]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        sys.exit(1)
