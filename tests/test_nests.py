"""Random nests of regions: whatever is in them, they leave the bits of plain code behind, or a typed error.

A program is a tree of lines and regions, printed as Python source. It is made without looking: what plain code can't
do is dropped, line by line, until plain code runs. Then it runs with regions.

A fixed set runs by default; `CHECKPOINTING_NESTS=20000` draws that many others.

What a region may refuse is decided from the source (`may_refuse`): a rerun that writes what is not its own, and what
is written although a region has read or kept it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from oracle import tensors, weigh
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import checkpointing
from checkpointing import auto, offload, save_ops, save_tagged, torch_compat
from checkpointing._engine import Frame
from checkpointing._region import thread

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- the grammar: most tensors are N x N, so that most lines fit most names


def table(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


NEW = table("""
    {x}.sin()
    {x}.tanh()
    {x} * 0.5
    {x} + 1
    {x}.square()
    {x}.clone()
    {x}.relu()
    F.softmax({x}, -1)
    {x} * {y}
    {x} * {x}
    {x} + {y}
    {x} - {y}
    {x} @ {y} * 0.25
    {x} @ w * 0.25
    torch.cat([{x}, {y}], 1)[:, ::2]
    torch.cat([{x}, {y}], 1)[:, :N]
    torch.cat([{x}, {y}])[1::2]
    {x}.sum(0)
    {x}.sum(1, keepdim=True)
    {x} * {x}.detach().sum()
    {x}.clone().mul_(0.5)
    ({x} * 1.5).relu_()
""")
RANDOM = table("""
    F.dropout({x}, 0.3)
    {x} * torch.rand_like({x})
    {x} + torch.rand(N, N)
""")
VIEW = table("""
    {x}.t()
    {x}[:, ::2]
    {x}[:, :-1]
    {x}[1:]
    {x}[0]
    {x}[0].expand(N, N)
    {x}[:, :1].expand(N, N)
    {x}.expand(2, N, N)
    {x}.reshape(-1)[: 2 * N - 1].unfold(0, N, 1)
    {x}.unfold(1, 2, 1)
    {x}.narrow(0, 1, 2)
    {x}.diagonal()
    {x}.view_as({x})
    {x}.detach()
    {x}.contiguous()
    {x}.chunk(2)[1]
""")
WRITE = table("""
    {t}.mul_(0.5)
    {t}.add_({y})
    {t}.relu_()
    {t}.sin_()
    {t}.copy_({y})
    {t}[0] = 0.25
    {t}[:, ::2] *= 2
    {t}.t().mul_(0.5)
    {t}.detach().add_(1)
    F.dropout({t}, 0.3, inplace=True)
    F.relu({t}, inplace=True)
    torch.relu_({t})
""")
KEEP = table("""
    keep({x})
    keep({x})
    keep({x})
    keep({x}[:, ::2])
    keep({x}[:, :-1])
    keep({x}[0].expand(N, N))
    keep({x}.reshape(-1)[: 2 * N - 1].unfold(0, N, 1))
    tag({x}, 't')
""")
FORWARD_ONLY = table("""
    once_same({x})
    once_view({x})
    once_step({x})
    once_wide({x})
    once_new({x})
    once_mask({x})
""")
PAIRS = table("""
    keep(({x}, {y}))
    once_pair({x}, {y})
""")
GRAPH = ["once_graph({x})"]
BACKWARD = table("""
    grad([{x}], [{y}], create_graph=True)
    grad([{x}], [{y}])
    grad([{x} * {y}], [{y}], create_graph=True)
    own_backward({x})
""")
POLICIES = table("""
    policy=auto()
    policy=auto()
    policy=auto(budget=300)
    policy=auto(budget=10000)
    policy=save_ops(aten.mul.Tensor, aten.mm.default)
    policy=save_ops(aten.sin.default, aten.add.Tensor, aten.cat.default)
    policy=save_tagged('t')
    policy=offload(min_bytes=0)
    policy=offload(min_bytes=0, inputs=True)
    policy=offload(save_ops(aten.mul.Tensor), min_bytes=0)
    policy=offload(auto(), min_bytes=0, inputs=True)
    policy=offload(save_tagged('t'), min_bytes=0) | save_ops(aten.sin.default)
""")
OPTIONS = ["", "", "", "early_stop=False", "determinism_check='values'", "report=True"]
AROUND = ["torch.no_grad()", "opaque()", "opaque()"]
HOOKS = ["save_on_cpu()", "cloning()", "identical()"]
CALLED = ["rerun", "rerun", "rerun", "compat", "replay", "torchs", "torchs"]  # doors of functions
RERUNS = ("rerun", "compat", "torchs")
LEAVES = ("a", "b", "c", "w")


@dataclasses.dataclass(eq=False)
class Line:
    text: str
    reads: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    on: tuple[
        str | None, ...
    ] = ()  # for each name that it binds: whose memory that may lie on; None: its own
    writes: str | None = None
    holds: bool = False  # regions keep what it reads
    calls: Called | None = None  # a function that has been called before


@dataclasses.dataclass(eq=False)
class Block:
    """`with head:`"""

    door: str
    options: str
    body: list[Any]


@dataclasses.dataclass(eq=False)
class Called:
    """A function that a door is put around, and its first call."""

    door: str
    options: str
    name: str
    parameters: list[str]
    arguments: list[str]
    body: list[Any]
    results: list[tuple[str, str]]  # its name inside, and outside

    def returned(self) -> list[tuple[str, str]]:
        """Those whose lines are still there."""
        there = set(bound(self.body)) | set(self.parameters)
        found = [(inside, outside) for inside, outside in self.results if inside in there]
        return found or [(self.parameters[0], self.results[0][1])]


def bound(body: list[Any]) -> Iterator[str]:
    """The names that are bound in a body."""
    for node in body:
        if isinstance(node, Line):
            yield from node.binds
        elif isinstance(node, Block):
            yield from bound(node.body)
        else:
            yield from (outside for _, outside in node.returned())


@dataclasses.dataclass
class Program:
    body: list[Any]
    size: int = 4  # N

    def lines(self) -> list[tuple[str, Any]]:
        """Each line of the source, with the node that it stands for."""
        lines: list[tuple[str, Any]] = [
            (f"N = {self.size}", None),
            ("def program(a, b, c, w):", None),
        ]
        printed(self.body, 1, lines)
        return lines

    def source(self) -> str:
        return "\n".join(text for text, _ in self.lines()) + "\n"

    def nodes(self) -> list[tuple[list[Any], Any]]:
        """Every node with the body that it is in."""
        found: list[tuple[list[Any], Any]] = []
        stack = [self.body]
        while stack:
            body = stack.pop()
            for node in body:
                found.append((body, node))
                if not isinstance(node, Line):
                    stack.append(node.body)
        return found

    def doors(self) -> set[str]:
        return {node.door for _, node in self.nodes() if not isinstance(node, Line)}


def printed(body: list[Any], depth: int, lines: list[tuple[str, Any]]) -> None:
    indent = "    " * depth
    for node in body:
        if isinstance(node, Line):
            lines.append((indent + node.text, node))
        elif isinstance(node, Block):
            head = node.options if node.door == "with" else f"{node.door}({node.options})"
            lines.append((f"{indent}with {head}:", node))
            printed(node.body, depth + 1, lines)
            if not node.body:
                lines.append((f"{indent}    pass", node))
        else:
            inside, outside = zip(*node.returned(), strict=True)
            options = f", {node.options}" if node.options else ""
            lines.append((f"{indent}def {node.name}({', '.join(node.parameters)}):", node))
            printed(node.body, depth + 1, lines)
            lines.append((f"{indent}    return {', '.join(inside)},", node))
            lines.append((f"{indent}{node.name} = {node.door}({node.name}{options})", node))
            lines.append(
                (f"{indent}{', '.join(outside)}, = {node.name}({', '.join(node.arguments)})", node)
            )


class Writer:
    """Draws a program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names: list[str] = list(LEAVES)  # those that can be seen
        self.local: list[str] = []  # those of the innermost function
        self.fresh = 0
        self.level = 0  # how many blocks are around that are no regions
        self.called: list[Called] = []  # the functions that can be seen
        self.favourite = ""  # what several regions take, and may write
        self.in_torchs = False
        # Gradients of a backward inside do not flow through what `forward_only` functions return.
        self.backward_inside = self.chance(0.3)
        self.writes = self.chance(0.6)
        self.hooks = self.chance(0.4)
        # Inside torch's checkpoint `opaque` and a backward through its graph would call its function at once: a limit.
        self.torchs = self.chance(0.3)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def new(self) -> str:
        self.fresh += 1
        return f"v{self.fresh}"

    def pick(self) -> str:
        """Mostly what is new."""
        if self.chance(0.2):
            return self.random.choice(LEAVES)
        if self.chance(0.2) and self.favourite in self.names:
            return self.favourite
        if self.local and self.chance(0.5):
            return self.random.choice(self.local)
        return self.random.choice(self.names[-6:] if self.chance(0.7) else self.names)

    def program(self) -> Program:
        size = 4 if self.chance(0.7) else 26
        body: list[Any] = [self.value() for _ in range(self.random.randint(1, 2))]
        self.favourite = body[0].binds[0]
        around = self.random.choice(HOOKS) if self.hooks and self.chance(0.4) else None
        body += self.body(0)
        body += [self.region(0)]
        body += [self.simple() for _ in range(self.random.randrange(3))]
        if around:
            body = [Block("with", around, body)]
        return Program([*body, *self.end()], size)

    def body(self, depth: int) -> list[Any]:
        return [self.statement(depth) for _ in range(self.random.randint(1, 5 if depth else 3))]

    def statement(self, depth: int) -> Any:
        dice = self.random.random()
        if dice < (0.3 if depth < 3 else 0):
            return self.region(depth)
        if 0.3 <= dice < 0.38 and self.level < 2:
            return self.around(depth)
        if 0.38 <= dice < 0.41 and self.called:
            return self.again()
        return self.simple()

    def around(self, depth: int) -> Any:
        """What is no region."""
        heads = [*AROUND, *HOOKS * self.hooks]
        head = self.random.choice(heads or ["torch.enable_grad()"])
        if self.torchs and head == "opaque()":
            head = AROUND[0]
        self.level += 1
        block = self.block("with", head, depth)
        self.level -= 1
        return block

    def block(self, door: str, options: str, depth: int) -> Block:
        return Block(door, options, self.body(depth))

    def region(self, depth: int) -> Any:
        if self.chance(0.4):
            return self.block("scope", self.options(), depth + 1)
        door = self.random.choice([door for door in CALLED if door != "torchs" or self.torchs])
        options = self.options() if door == "replay" else ""
        if door == "rerun":
            options = self.random.choice(OPTIONS)
        arguments = [self.pick() for _ in range(self.random.randint(1, 3))]
        if self.chance(0.2):
            arguments.append(arguments[0])
        self.fresh += 1
        name = f"f{self.fresh}"
        parameters = [f"p{self.fresh}_{i}" for i in range(len(arguments))]
        names, local, in_torchs, called = self.names, self.local, self.in_torchs, self.called
        self.names, self.local = [*names, *parameters], [*parameters]
        self.in_torchs |= door == "torchs"
        body = []
        if self.writes and self.chance(0.2):  # as an activation in place, at the start of a block
            body += [self.write(parameters[0])]
        if self.chance(0.2) and KEEP:
            body += [self.keep()]
        body += self.body(depth + 1)
        inside = [self.random.choice(self.local[-3:]) for _ in range(self.random.randint(1, 2))]
        self.names, self.local, self.in_torchs = names, local, in_torchs
        results = [(one, self.new()) for one in dict.fromkeys(inside)]
        self.bind([outside for _, outside in results])
        node = Called(door, options, name, parameters, arguments, body, results)
        self.called = [*called, node]
        return node

    def again(self) -> Line:
        """A function that has been called before, called once more."""
        node = self.random.choice(self.called)
        arguments = [self.pick() for _ in node.parameters]
        result = self.new()
        self.bind([result])
        text = f"{result}, *_ = {node.name}({', '.join(arguments)})"
        return Line(text, tuple(arguments), (result,), (None,), calls=node)

    def options(self) -> str:
        return self.random.choice(POLICIES) if self.chance(0.6) else self.random.choice(OPTIONS)

    def bind(self, names: list[str]) -> None:
        self.names = [*self.names, *names]
        if self.local:
            self.local = [*self.local, *names]

    def simple(self) -> Line:
        kinds: list[Callable[[], Line]] = [self.value] * 8 + [self.view] * 3 + [self.drawn]
        kinds += (
            [self.keep] * (3 * bool(KEEP))
            + [self.once] * (2 * bool(FORWARD_ONLY))
            + [self.pair] * bool(PAIRS)
        )
        kinds += [self.backward] * (self.backward_inside and bool(BACKWARD))
        kinds += [self.write] * (4 * self.writes)
        return self.random.choice(kinds)()

    def line(
        self, template: str, is_view: bool = False, binds: int = 1, holds: bool = False
    ) -> Line:
        x, y = self.pick(), self.pick()
        names = tuple(self.new() for _ in range(binds))
        on = tuple((x, y)[i] if is_view else None for i in range(binds))
        left = ", ".join(names) + ("," if "grad(" in template else "")
        self.bind(list(names))
        reads = tuple(dict.fromkeys(n for n in ("x", "y") if f"{{{n}}}" in template))
        used = tuple({"x": x, "y": y}[n] for n in reads)
        return Line(f"{left} = {template.format(x=x, y=y)}", used, names, on, None, holds)

    def value(self) -> Line:
        return self.line(self.random.choice(NEW))

    def drawn(self) -> Line:
        return self.line(self.random.choice(RANDOM))

    def view(self) -> Line:
        return self.line(self.random.choice(VIEW), is_view=True)

    def keep(self) -> Line:
        return self.line(self.random.choice(KEEP), is_view=True, holds=True)

    def once(self) -> Line:
        if not self.backward_inside and self.chance(0.2) and GRAPH:
            return self.line(self.random.choice(GRAPH), holds=True)
        return self.line(self.random.choice(FORWARD_ONLY), is_view=True, holds=True)

    def pair(self) -> Line:
        return self.line(self.random.choice(PAIRS), is_view=True, binds=2, holds=True)

    def backward(self) -> Line:
        return self.line(BACKWARD[-1] if self.torchs else self.random.choice(BACKWARD))

    def write(self, target: str | None = None) -> Line:
        if self.in_torchs:  # torch does not notice it
            return self.value()
        t, y = (
            self.random.choice(self.local or self.names) if self.chance(0.7) else self.pick(),
            self.pick(),
        )
        t = target or t
        template = self.random.choice(WRITE)
        return Line(template.format(t=t, y=y), (t, y) if "{y}" in template else (t,), writes=t)

    def end(self) -> list[Line]:
        """Backward, in one of several ways."""
        outputs = self.names[4:][-3:] or ["a"]
        inputs = "a, b, w"
        lines = [Line(f"see({one})", (one,)) for one in outputs]
        whole = f"[{', '.join(outputs)}]"
        how = self.random.choice(("first", "twice", "second", "each", "plain"))
        if how == "first":
            lines += [Line(f"see(grad({whole}, [{inputs}]))")]
        elif how == "twice":
            lines += [Line(f"weigh({whole}).backward(retain_graph=True)")] * 2
        elif how == "second":
            lines += [
                Line(f"g = grad({whole}, [{inputs}], create_graph=True)", binds=("g",), on=(None,))
            ]
            lines += [Line("see(g)"), Line(f"see(grad(g, [{inputs}]))")]
        elif how == "each":
            lines += [Line(f"see(grad([{one}], [{inputs}]))") for one in reversed(outputs)]
        else:
            lines += [Line(f"weigh({whole}).backward()")]
        return lines


def may_refuse(program: Program) -> bool:
    """Whether the contract lets a region refuse what the program writes."""
    root: dict[str, str] = {name: name for name in LEAVES}
    made: dict[str, tuple[Any, ...]] = dict.fromkeys(LEAVES, ())  # in which reruns
    read: set[str] = set()  # by regions that have ended, or held by others
    refused = False

    def walk(body: list[Any], reruns: tuple[Any, ...], regions: tuple[set[str], ...]) -> None:
        nonlocal refused
        for node in body:
            if isinstance(node, Line) and node.calls is not None:
                called = dataclasses.replace(node.calls, arguments=list(node.reads), results=[])
                called.results = [(node.calls.returned()[0][0], node.binds[0])]
                walk([called], reruns, regions)
                continue
            if isinstance(node, Line):
                used = {root[name] for name in node.reads if name in root}
                for seen in regions:
                    seen |= used
                if node.holds and regions:
                    read.update(used)
                for name, on in zip(node.binds, node.on, strict=True):
                    root[name] = root.get(on, name) if on else name
                    made.setdefault(root[name], reruns)
                if node.writes in root:
                    target = root[node.writes]
                    refused |= (
                        target in read
                        or made[target] != reruns[: len(made[target])]
                        or any(rerun not in made[target] for rerun in reruns)
                    )
                continue
            inner: set[str] = set()
            is_region = node.door != "with"
            deeper = reruns
            if isinstance(node, Called):
                for parameter, argument in zip(node.parameters, node.arguments, strict=False):
                    root[parameter] = root.get(argument, argument)
                    inner.add(root[parameter])
                    made.setdefault(root[parameter], reruns)
                deeper = (*reruns, node) if node.door in RERUNS else reruns
            walk(node.body, deeper, (*regions, inner) if is_region else regions)
            if isinstance(node, Called):
                for inside, outside in node.returned():
                    root[outside] = root.get(inside, inside)
            if is_region:
                read.update(inner)
            for seen in regions:
                seen |= inner

    walk(program.body, (), ())
    return refused


# ---- running


def cloning() -> Any:
    """Hooks that copy, each time they are given something."""
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


def identical() -> Any:
    """Hooks that hand on what they are given."""
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def grad(outputs: list[Tensor], inputs: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    found = torch.autograd.grad(
        weigh(outputs),
        inputs,
        create_graph=create_graph,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(found)


def own_backward(x: Tensor) -> list[Tensor]:
    """Through a graph of its own, which it frees."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return [torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)[0]]


ONCE: dict[str, Callable[..., Any]] = {
    "once_same": lambda x: x,
    "once_view": lambda x: x.t(),
    "once_step": lambda x: x[:, ::2],
    "once_wide": lambda x: x[0].expand(x.shape),
    "once_new": lambda x: x.detach() * 2,
    "once_mask": lambda x: (x.detach()[:1] > 0).double().expand(x.shape),
    "once_graph": lambda x: x.sin() * x,
    "once_pair": lambda x, y: (x, y.t()),
}


def compat(function: Any) -> Any:
    return lambda *args: torch_compat.checkpoint(function, *args, use_reentrant=False)


def torchs(function: Any) -> Any:
    return lambda *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def same(value: Any, *_: Any) -> Any:
    """What plain code has in place of `keep` and `tag`."""
    for tensor in tensors(value):
        assert tensor.grad_fn is None or tensor.requires_grad
    return value


def called(function: Any, **_: Any) -> Any:
    """Plain code, with arguments that something could be done with: autograd forbids some views of what was written."""

    def call(*args: Tensor) -> Any:
        for tensor in args:
            same(tensor)
        return function(*args)

    return call


def nothing(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


NAMES = {
    "torch": torch,
    "F": F,
    "aten": torch.ops.aten,
    **{f.__name__: f for f in (auto, offload, save_ops, save_tagged, weigh, grad, own_backward)},
}
OF_TORCH = {"torchs": torchs, **{f.__name__: f for f in (save_on_cpu, cloning, identical)}}
OURS = {
    "scope": checkpointing.checkpoint_scope,
    "rerun": checkpointing.checkpointed,
    "replay": lambda f, **options: checkpointing.checkpointed(f, backend="replay", **options),
    "compat": compat,
    "keep": checkpointing.keep,
    "tag": checkpointing.tag,
    "opaque": checkpointing.opaque,
    **{name: checkpointing.forward_only(f) for name, f in ONCE.items()},
}
SHUT = {
    **dict.fromkeys(("scope", "opaque", "save_on_cpu", "cloning", "identical"), nothing),
    **dict.fromkeys(("rerun", "replay", "compat", "torchs"), called),
    **dict.fromkeys(("keep", "tag"), same),
    **ONCE,
}
PLAIN = {**NAMES, **SHUT}
HOOKED = {**PLAIN, **{name: f for name, f in OF_TORCH.items() if name != "torchs"}}
TORCHS = {**PLAIN, **OF_TORCH}
OPEN = {**NAMES, **OF_TORCH, **OURS}


def run(source: str, space: dict[str, Any]) -> list[Any]:
    """Everything that can be seen of a program."""
    seen: list[Any] = []

    def see(value: Any) -> None:
        seen.append((copies(value), torch.get_rng_state()))

    space = {**space, "see": see}
    exec(compile(source, "<program>", "exec"), space)
    torch.manual_seed(11)
    n = space["N"]
    a, b = torch.randn(n, n, requires_grad=True), torch.randn(n, n, requires_grad=True)
    c, w = torch.randn(n, n), torch.nn.Parameter(torch.randn(n, n))
    space["program"](a, b, c, w)
    see([a, b, c, w])
    see([t.grad for t in (a, b, w)])
    return seen


def copies(value: Any) -> Any:
    """What a value holds now, in the layout that it has."""
    if isinstance(value, list | tuple):
        return [copies(part) for part in value]
    if value is None:
        return None
    whole = value.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=value.dtype).set_(
        whole, value.storage_offset(), value.size(), value.stride()
    )
    return copy.requires_grad_(value.requires_grad)


def bits(value: Any) -> Any:
    """Equal for two values just if they are the same, bit for bit, in the same layout."""
    if isinstance(value, list | tuple):
        return tuple(map(bits, value))
    if value is None:
        return None
    return value.requires_grad, value.shape, value.stride(), value.detach().numpy().tobytes()


FRAMES: weakref.WeakSet[Frame] = weakref.WeakSet()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Know the frames that are made inside; only reference counts may free them."""
    plain_init = Frame.__init__

    def init(self: Frame, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        FRAMES.add(self)

    gc.collect()
    gc.disable()
    Frame.__init__ = init
    try:
        yield
    finally:
        Frame.__init__ = plain_init
        gc.enable()


def left_behind(source: str, refusable: bool) -> str | None:
    """What a program must not leave behind."""
    # Plain code, too, leaves a cycle where hooks hand on a result; so does what is written after it has been saved.
    if refusable or "identical(" in source or "save_on_cpu(" in source:
        FRAMES.clear()
    if FRAMES and "torchs(" in source:  # torch's checkpoint leaves cycles
        gc.collect()
    found = {
        "regions": len(FRAMES) > 0,
        "a region": thread.region is not None,
        "a depth": thread.depth or thread.aside,
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "dispatch modes": bool(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack() > 0,
        "grad mode": not torch.is_grad_enabled(),
    }
    FRAMES.clear()
    thread.region, thread.depth, thread.aside = None, 0, 0
    return next((what for what, is_there in found.items() if is_there), None)


class PassThrough(TorchDispatchMode):
    """A mode that does nothing: some composite operators take another way in any."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def repair(program: Program) -> Any:
    """Drop what plain code can't do. Returns what plain code leaves behind; None if it can't be made to run."""
    for _ in range(60):
        try:
            return run(program.source(), PLAIN)
        except Exception as error:
            lines = program.lines()
            frames = [
                f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<program>"
            ]
            node = lines[frames[-1].lineno - 1][1] if frames else None
            if "modified by an inplace" in str(error) or "is a view and" in str(error):
                node = next(
                    (n for _, n in reversed(lines) if isinstance(n, Line) and n.writes), node
                )
            if node is None:
                return None
            for body, each in program.nodes():
                if each is node and node in body:
                    body.remove(node)
    return None


@dataclasses.dataclass
class Verdict:
    """What became of a program: 'right', 'refused', 'skipped', or what is wrong."""

    kind: str
    text: str = ""
    trace: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind not in ("right", "refused", "skipped")


def judge(source: str, refusable: bool) -> Verdict:
    try:
        want, hooked = run(source, PLAIN), run(source, HOOKED)
    except Exception as error:
        return Verdict("skipped", f"plain code fails: {error}")
    verdict = compared(source, want, hooked)
    behind = left_behind(source, refusable)
    if behind is not None:
        return Verdict("left behind", f"{behind} ({verdict.kind}: {verdict.text})")
    if refusable and verdict.kind in ("CheckpointError", "ChangedError"):
        return Verdict("refused", f"{verdict.kind}: {verdict.text}")
    if verdict.is_finding and torch_fails(source, want, hooked):
        return Verdict("skipped", "torch's own doors fail")
    return verdict


def compared(source: str, want: list[Any], hooked: list[Any]) -> Verdict:
    """What becomes of a program with regions: plain code gives `want`, or with hooks around `hooked`."""
    try:
        have = run(source, OPEN)
    except Exception as error:
        kind = type(error).__name__
        typed = isinstance(error, checkpointing.CheckpointError)
        trace = "" if typed else "".join(traceback.format_exception(error))
        return Verdict(kind if typed else f"untyped {kind}", sentence(error), trace)
    if bits(have) in (bits(want), bits(hooked)):
        return Verdict("right")
    if is_close(want, have):
        # hooks that copy may give kernels another layout, which then add in another order
        return (
            Verdict("other bits, close")
            if bits(want) == bits(hooked)
            else Verdict("skipped", "hooks change bits")
        )
    return Verdict("other numbers", first_difference(want, have))


def torch_fails(source: str, *want: Any) -> bool:
    """Whether torch's own doors alone, or a mode that does nothing, give something else too."""
    try:
        have = run(source, TORCHS)
        with PassThrough():
            moded = run(source, HOOKED)
    except Exception:
        return True
    right = [bits(each) for each in want]
    return bits(have) not in right or bits(moded) not in right


def is_close(want: Any, have: Any) -> bool:
    pairs = list(zip(tensors(want), tensors(have), strict=False))
    return all(
        t.shape == o.shape and torch.allclose(t, o, rtol=1e-9, atol=1e-9, equal_nan=True)
        for t, o in pairs
    )


def first_difference(want: list[Any], have: list[Any]) -> str:
    for place, (w, h) in enumerate(zip(want, have, strict=True)):
        for t, o in zip(tensors(w), tensors(h), strict=False):
            if bits(t) != bits(o):
                if t.shape != o.shape or t.stride() != o.stride():
                    return (
                        f"in see no. {place}: {t.shape} {t.stride()} became {o.shape} {o.stride()}"
                    )
                what = (
                    "the random stream"
                    if t.dtype is torch.uint8
                    else f"by {(t - o).abs().max():.2g}"
                )
                return f"in see no. {place}: {what}"
    return f"something that is no tensor: {str(bits(want))[:80]}"


def sentence(error: BaseException) -> str:
    """What an error says, without the place."""
    text = re.sub(r"^.*?\(entered at .*?\): ", "", str(error), flags=re.DOTALL)
    text = re.sub(r"\(torch.*?\)|\(float64.*?\)|\(it was at.*?\)", "", text)
    return text.partition("\n")[0]


# ---- many of them


@contextlib.contextmanager
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def one(seed: int) -> tuple[Program, Verdict]:
    program = Writer(seed).program()
    if repair(program) is None:
        return program, Verdict("skipped", "plain code fails")
    return program, judge(program.source(), may_refuse(program))


LIMITS = {
    33: "torch's own checkpoint, with a scope in it, in a region, that takes a parameter as an argument"
}
DEEP = int(os.environ.get("CHECKPOINTING_NESTS", "0"))
START = random.randrange(1 << 40) if DEEP else 0
SEEDS = [seed for seed in range(START, START + (DEEP or 200)) if seed not in LIMITS]


def test_nests() -> None:
    """A fixed set of programs: right, or refused where the contract allows it."""
    wrong = []
    with doubles(), watched():
        for seed in SEEDS:
            program, verdict = one(seed)
            if verdict.is_finding:
                wrong.append(f"seed {seed}: {verdict.kind}: {verdict.text}\n\n{program.source()}")
    assert not wrong, f"{len(wrong)} of {len(SEEDS)} programs, such as\n" + "\n".join(wrong[:3])


def test_the_generator_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `keep` that hands over something else is noticed."""
    monkeypatch.setitem(
        OPEN, "keep", lambda x: [t * 1.5 for t in x] if isinstance(x, tuple) else x * 1.5
    )
    with doubles(), watched():
        found = [program.source() for program, verdict in map(one, range(40)) if verdict.is_finding]
    assert len(found) > 3
    assert all("keep(" in source for source in found)
