"""Programs that tests run in processes of their own."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 300  # for a program
Outcome = namedtuple("Outcome", "returncode stdout stderr")


def options_of(**env):
    """What can be imported here can be imported there."""
    path = os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
    fixed = {"PYTHONWARNINGS": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    return {"env": {**os.environ, "PYTHONPATH": path, **fixed, **env}, "text": True}


class Run:
    """Runs once, when asked; gives an `Outcome`."""

    @property
    def output(self):
        assert self.outcome.returncode == 0, self.outcome.stderr
        return self.outcome.stdout


class Program(Run):
    """Python with these words after it."""

    def __init__(self, *words, cwd=None, **env):
        self._args = [sys.executable, *words]
        self._how = {"cwd": cwd, **options_of(**env)}

    @functools.cached_property
    def outcome(self):
        how = {"capture_output": True, "stdin": subprocess.DEVNULL, **self._how}
        return subprocess.run(self._args, check=False, timeout=SECONDS, **how)


# Another Python, which has imported torch and nothing else of ours. For each line that it reads it
# forks: the child runs the program, as if it had been given with `-c`.
PARENT = f"""
import json, os, signal, sys
import torch
for line in sys.stdin:
    code, words, folder = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm({SECONDS})
    for number, name in enumerate(["stdin", "stdout", "stderr"]):
        os.dup2(os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT), number)
    sys.argv[1:] = words
    exec(compile(code, "<string>", "exec"), {{"__name__": "__main__"}})
    break
"""


@functools.cache
def parent():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", PARENT], **pipes, **options_of())
    atexit.register(process.communicate)
    return process


class Code(Run):
    """Given as text, with words after it; torch is there at once."""

    def __init__(self, code, *words):
        self._given = code, words

    @functools.cached_property
    def outcome(self):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps([*self._given, folder]), file=parent().stdin, flush=True)
            status = int(parent().stdout.readline())
            read = [Path(folder, name).read_text() for name in ("stdout", "stderr")]
        return Outcome(status, *read)
