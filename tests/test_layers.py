"""The package is layered: imports point down, private names of torch are in one file, no state is
process-wide."""

import ast
import contextlib
import gc
import sys
from pathlib import Path

import pytest
import torch
from beside import Program
from oracle import words

import checkpointing

PACKAGE = Path(checkpointing.__file__).parent

# The layout table of the design, from the top down.
LAYERS = words("""
    __init__ __main__ torch_compat _modules _api _report _debug _reentrant _policy
    _rerun _buffers _replay _plan _windows _run _record _compiled _gathered _program _ops
    _held _engine _check _ambient _offload _region _where _tree _torch errors
""")
FILES = sorted(path.stem for path in PACKAGE.glob("*.py"))
TREES = {name: ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8")) for name in FILES}
EACH = pytest.mark.parametrize("name", FILES)

# Private names of torch that may be used outside of `_torch.py`: the names, and where.
ALLOWED = {
    "torch.utils._pytree.SUPPORTED_NODES": {"_tree"},
    "torch.utils._python_dispatch.TorchDispatchMode": set(FILES),
}
# Private attributes of objects that are Python's, or that torch documents in its notes on autograd.
KNOWN_ATTRIBUTES = {"_getframe", "_asdict", "_fields", "_replace", "_version", "_base", "_schema"}


def names_of(node):
    """Those that a node of this package's code makes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Constant):  # `__slots__`
        return {node.value}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return {node.attr} if is_set and dotted(node.value) == "self" else set()


def imports(tree):
    """Every module that is imported anywhere in a file, and the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, None, alias.asname
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.level, node.module or "", alias.name, alias.asname


def inner_imports(tree):
    """The modules of this package that a file imports."""
    for level, module, name, _ in imports(tree):
        if level == 0 and module.partition(".")[0] != "checkpointing":
            continue
        path = module if level else module.partition(".")[2]
        yield path.partition(".")[0] or name


def is_private(part):
    """Whether a name starts with one underscore."""
    return part.startswith("_") and not (part.startswith("__") and part.endswith("__"))


def dotted(node):
    """`a.b.c` as text, or None for what is no such chain."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


OURS = {name for tree in TREES.values() for node in ast.walk(tree) for name in names_of(node)}


def torch_names(tree):
    """Full names of everything of torch's that a file uses, and their lines."""
    known = {}
    for _, module, name, asname in imports(tree):
        if module.partition(".")[0] == "torch":
            full = module if name is None else f"{module}.{name}"
            known[asname or (name or "torch")] = full if name or asname else "torch"
            yield full, 0
    for node in ast.walk(tree):
        text = dotted(node) if isinstance(node, ast.Attribute) else None
        if text is not None:
            head, _, rest = text.partition(".")
            if head in known:
                yield f"{known[head]}.{rest}", node.lineno


# ---- imports


def test_every_file_has_its_place():
    """A new file gets a line in the layout table first."""
    assert set(FILES) <= set(LAYERS)


@EACH
def test_imports_point_down(name):
    """A file imports only what is below it in the table."""
    below = LAYERS[LAYERS.index(name) + 1 :]
    up = {other for other in inner_imports(TREES[name]) if other in LAYERS and other not in below}
    assert up - {name} == set()


def test_the_package_reexports_and_does_nothing_else():
    """`from ._x import y as y` and a version."""
    for node in TREES["__init__"].body:
        reexport = isinstance(node, ast.ImportFrom) and all(a.asname == a.name for a in node.names)
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        module = isinstance(node, ast.ImportFrom) and node.module is None
        version = isinstance(node, ast.Assign) and dotted(node.targets[0]) in (
            "__version__",
            "__all__",
        )
        assert reexport or docstring or version or module, ast.unparse(node)


def test_no_import_of_torchs_tests():
    """`torch.testing._internal` is no library code."""
    for name, tree in TREES.items():
        assert not [full for full, _ in torch_names(tree) if full.startswith("torch.testing")], name


# ---- private names of torch


@EACH
def test_private_names_of_torch_are_in_one_file(name):
    """`_torch.py` is the place to look when torch changes."""
    if name == "_torch":
        return
    found = [
        f"{name}.py:{line}: {full}"
        for full, line in torch_names(TREES[name])
        if any(map(is_private, full.split(".")))
        and not any(
            full == allowed or full.startswith(f"{allowed}.") or allowed.startswith(f"{full}.")
            for allowed, files in ALLOWED.items()
            if name in files
        )
    ]
    assert found == []


@EACH
def test_private_attributes_of_torchs_objects_are_in_one_file(name):
    """Storages, operators and nodes have private attributes as well."""
    if name == "_torch":
        return
    found = [
        f"{name}.py:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and node.attr not in OURS | KNOWN_ATTRIBUTES
        and not (dotted(node) or "").startswith("torch.")
    ]
    assert found == []


# ---- nothing is left in the process


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
imported = Program("-c", IMPORT)


def test_import_brings_in_nothing_but_the_package():
    """No module that `import torch` does not bring in anyway, and none of torch's is changed."""
    assert imported.output.splitlines() == ["[]", "[]", "True", "False"]


@EACH
def test_nothing_is_patched_and_nothing_global_is_reassigned(name):
    """No `global`, no `__del__`, no assignment to an attribute of torch or of another module."""
    tree = TREES[name]
    modules = {
        asname or target or module.partition(".")[0] for _, module, target, asname in imports(tree)
    }
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{name}.py:{node.lineno}"
        assert not (isinstance(node, ast.FunctionDef) and node.name == "__del__"), (
            f"{name}.py:{node.lineno}"
        )
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            head = (dotted(node) or "").partition(".")[0]
            # `thread` is our own `threading.local`.
            assert head not in modules - {"thread"}, f"{name}.py:{node.lineno}: {ast.unparse(node)}"


def test_no_state_builds_up_in_the_process(frozen):
    """Regions of each kind, with an error among them."""

    def step(seed):
        x = torch.rand(4, 4).requires_grad_()
        inner = checkpointing.checkpointed(
            lambda x: torch.nn.functional.dropout(x.sin(), 0.5).exp(), name=f"n{seed}"
        )
        for backend in ("rerun", "replay"):
            with checkpointing.checkpoint_scope(name=f"s{seed}"):
                y = checkpointing.keep(checkpointing.checkpointed(inner, backend=backend)(x)).cos()
            y.sum().backward()
        with contextlib.suppress(KeyError), checkpointing.checkpoint_scope():
            raise KeyError

    def left():
        gc.collect()
        modules = [
            m
            for n, m in sys.modules.items()
            if n.startswith("checkpointing.") and "__main__" not in n
        ]
        tables = [
            len(v)
            for m in modules
            for n, v in vars(m).items()
            if type(v) in (dict, list, set) and n[:2] != "__"
        ]
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
