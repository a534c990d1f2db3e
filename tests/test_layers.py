"""The package is layered: imports point one way, private names of torch are in one room, no state
is process-wide. The README's programs run, and its two commands are what CI takes word for word."""

import ast
import contextlib
import functools
import gc
import re
import sys
from pathlib import Path

import pytest
import torch
from beside import Code
from oracle import leaf, replay, rerun

import checkpointing

PACKAGE = Path(checkpointing.__file__).parent

PATHS = sorted(PACKAGE.rglob("*.py"))
FILES = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PATHS]
TREES = dict(zip(FILES, (ast.parse(path.read_text("utf-8")) for path in PATHS), strict=True))
# Private names of torch that any file may use.
ALLOWED = "torch.utils._python_dispatch.TorchDispatchMode"


def imports(tree):
    """Every module that is imported anywhere in a file, and the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, None, alias.asname
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.level, node.module or "", alias.name, alias.asname


@functools.cache
def inner_imports(name):
    """What a file imports from this package, as paths in it."""
    here, found = name.split("."), []
    for level, module, part, _ in imports(TREES[name]):
        if level == 0 and module.partition(".")[0] != "checkpointing":
            continue
        base = here[:-level] if level else []
        inside = module if level else module.partition(".")[2]
        found.append(".".join([*base, inside or part]))
    return found


def torch_names(tree):
    """Full names of everything of torch's that a file uses."""
    known = {}
    for _, module, name, asname in imports(tree):
        if module.partition(".")[0] == "torch":
            full = module if name is None else f"{module}.{name}"
            known[asname or (name or "torch")] = full if name or asname else "torch"
            yield full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", ast.unparse(node)):
            head, _, rest = ast.unparse(node).partition(".")
            if head in known:
                yield f"{known[head]}.{rest}"


def room_of(path):
    return path.partition(".")[0]


def reached(start, next_of):
    """What can be reached from here, step by step."""
    found, waiting = set(), [start]
    while waiting:
        more = next_of(waiting.pop()) - found
        found |= more
        waiting += more
    return found


@functools.cache
def rooms_below(room):
    """The folders, and files at the top, from which a room imports."""
    paths = [other for name in FILES if room_of(name) == room for other in inner_imports(name)]
    return {room_of(path) for path in paths} - {room}


@pytest.mark.parametrize("name", FILES)
def test_imports_point_in_one_direction(name):
    """Between rooms, which are entered from their fronts, and within one."""
    room = room_of(name)

    def inside(path):
        found = {other for other in inner_imports(path) if room_of(other) == room}
        return {other for other in found if other in TREES and "." in other}

    assert room not in reached(room, rooms_below)
    assert not [path for path in inner_imports(name) if room_of(path) != room and "." in path]
    assert name not in reached(name, inside)


def test_the_map_names_each_room():
    """The docstring of the package says where to read on."""
    rooms = {room_of(name) for name in FILES} - {"__init__", "__main__"}
    assert {room for room in rooms if f"`{room}`" not in checkpointing.__doc__} == set()


def test_private_names_of_torch_are_in_one_room():
    """It is the place to look when torch changes."""

    def private(name):
        used = [full for full in torch_names(TREES[name]) if re.search(r"\b_(?!_)", full)]
        return [full for full in used if not f"{ALLOWED}.".startswith(f"{full}.")]

    assert len({room_of(name) for name in FILES if private(name)}) == 1


IMPORT = """
import sys, torch
before = set(sys.modules)
modules = [(name, module) for name, module in sys.modules.items() if module]
state = {name: dict(vars(module)) for name, module in modules if name.startswith("torch")}
random = torch.get_rng_state()
import checkpointing
print(sorted(m for m in set(sys.modules) - before if m.partition(".")[0] != "checkpointing"))
changed = [
    f"{name}.{key}"
    for name, old in state.items()
    for key, value in list(vars(sys.modules[name]).items())
    if not key.startswith("__") and key in old and old[key] is not value
]
print(changed)
print(torch.equal(random, torch.get_rng_state()))
print("torch_remat" in sys.modules or "numpy" in set(sys.modules) - before)
"""


def test_import_brings_in_nothing_but_the_package():
    """No module that `import torch` does not bring in anyway, and none of torch's is changed."""
    assert Code(IMPORT).output.splitlines() == ["[]", "[]", "True", "False"]


def test_no_state_builds_up_in_the_process():
    def step(seed):
        x = leaf()
        inner = rerun(lambda x: torch.nn.functional.dropout(x.sin(), 0.5).exp(), name=f"n{seed}")
        for door in (rerun, replay):
            with checkpointing.checkpoint_scope(name=f"s{seed}"):
                y = checkpointing.keep(door(inner)(x)).cos()
            y.sum().backward()
        with contextlib.suppress(KeyError), checkpointing.checkpoint_scope():
            raise KeyError

    def left():
        gc.collect()
        modules = [sys.modules.get(f"checkpointing.{name}") for name in FILES if name[:2] != "__"]
        values = [v for m in modules if m for n, v in vars(m).items() if n[:2] != "__"]
        tables = [len(value) for value in values if type(value) in (dict, list, set)]
        return tables, sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    step(0)
    before = left()
    for seed in range(1, 20):
        step(seed)
    assert left() == before


def test_everything_public_is_documented():
    """A docstring for each file and each exported name, which says that it lives here."""
    public = [n for n in dir(checkpointing) if not n.startswith("_") and n not in FILES]
    assert {"checkpointed", "checkpoint_scope", "keep", "CheckpointError"} <= set(public)
    for name in public:
        assert getattr(checkpointing, name).__doc__, name
        assert getattr(checkpointing, name).__module__.partition(".")[0] == "checkpointing", name
    assert all(ast.get_docstring(tree) for tree in TREES.values())


README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PROGRAMS = [
    "\n" * README.count("\n", 0, found.start(1))
    + found[1]  # so that a traceback shows the README's line
    for found in re.finditer(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
]
COMMANDS = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs(program):
    """Each on its own; the parameters of its modules have gradients afterwards."""
    names = {"__name__": "readme"}
    exec(compile(program, "README.md", "exec"), names)
    model = names.get("model", names.get("layers"))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_there_are_programs():
    doors = "checkpoint_modules(", "with checkpoint_scope(policy=auto())"
    for door in (*doors, "@checkpointed(policy=auto(peak="):
        assert any(door in program for program in PROGRAMS)


def test_the_first_two_commands():
    compare, test = COMMANDS[0].splitlines()
    assert compare == "pip install . && python -m checkpointing"
    assert test == "pip install '.[test]' && python -m pytest"
