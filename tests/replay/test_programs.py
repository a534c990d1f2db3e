"""Random programs: whatever a program does, it leaves the same bits behind with regions in it as without.

Hypothesis draws a *plan*, a tree of small numbers that shrinks well. `Writer` turns it into Python source, one
statement after the other, and runs each one as it writes it: so it knows the shapes, what autograd has saved and which
region has read what, and leaves out what plain code could not do. The source then runs twice, with regions and without.

A fixed set of programs runs by default. `CHECKPOINTING_PROGRAMS=20000` draws that many, others each time.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import bits, same_place, tensors, weigh
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import checkpointing
from checkpointing import auto, checkpoint_scope, checkpointed, keep, offload, opaque, save_ops

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- what programs are made of


class Cube(torch.autograd.Function):
    """Reads what it has saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3 * ctx.saved_tensors[0] * ctx.saved_tensors[0]


class Pair(torch.autograd.Function):
    """Saves an input and an output, has two outputs, and looks at which gradients are needed."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        e = x.tanh()
        return e * y, e

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, e = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (g * y + h) * (1 - e * e) if wanted[0] else None, g * e if wanted[1] else None


class Double(torch.autograd.Function):
    """Writes its input in place and saves the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2 + 0 * ctx.saved_tensors[0]


@torch.library.custom_op("bitwise_programs::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws, and has no tag that says so."""
    return x + torch.rand(x.shape, dtype=x.dtype)


noisy.register_autograd(lambda ctx, g: g)


@torch.library.custom_op("bitwise_programs::bump", mutates_args=("x",))
def bump(x: Tensor) -> Tensor:
    """Writes its argument and makes another tensor."""
    x.mul_(0.5)
    return x + 1


def filled(x: Tensor, value: float) -> Tensor:
    """Writes without torch."""
    x.numpy()[...] = value
    return x


def grad(outputs: list[Tensor], inputs: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    """Gradients, zeros where there are none."""
    found = torch.autograd.grad(
        weigh(outputs),
        inputs,
        create_graph=create_graph,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(found)


def templates(text: str) -> tuple[str, ...]:
    """Those in a text, which semicolons divide."""
    return tuple(part.strip() for part in text.split(";"))


UNARY = templates("""
    {x}.sin() ; {x}.cos() ; {x}.exp() ; {x}.tanh() ; {x}.sigmoid() ; {x} * 0.7 ; {x} + 1 ; {x}.square() ;
    {x}.clone() ; {x}.relu() ; {x}.cumsum(0) ; {x}.sort(0).values ; {x}.logsumexp(0) ; {x}.clamp(-0.5, 0.5) ;
    {x}.mean() ; {x}.sum(0) ; {x}.amax(0) ; {x}.float().double() ; {x}.bfloat16().double() ; {x}.contiguous() ;
    F.softmax({x}, -1) ; F.gelu({x}) ; F.silu({x}) ; F.layer_norm({x}, {x}.shape[-1:]) ;
    torch.complex({x}, {x} * 2) ; {x}.abs() ; torch.stack([{x}, {x}]) ; {x}.flip(0) ; Cube.apply({x}) ;
    F.max_pool1d({x}[None], 2)[0] ; F.conv1d({x}[None], {x}[None])
""")
BINARY = templates("""
    {x} + {y} ; {x} - {y} ; {x} * {y} ; {x} / ({y} * {y} + 1) ; {x} @ {y} ; {x}.t() @ {y} ;
    torch.where({x} > {y}, {x}, {y}) ; torch.maximum({x}, {y}) ; torch.addcmul({x}, {y}, {x}) ; {x}.lerp({y}, 0.3) ;
    torch.cat([{x}, {y}]) ; torch.stack([{x}, {y}]).prod(0) ; Pair.apply({x}, {y})[0] ; sum(Pair.apply({x}, {y})) ;
    F.linear({x}, w, {y}) ; torch.linalg.solve(w @ w.t() + 9 * torch.eye(4), {x}.t()) * {y}.t() ;
    torch._foreach_mul([{x}, {y}], 0.5)[1] ; torch.func.vmap(lambda s, t: (s * t).sin())({x}, {y}) ;
    torch.func.jvp(lambda t: (t * t).sin(), ({x}.detach(),), ({y}.detach(),))[1] ;
    torch.einsum('ij,kj->ik', {x}, {y})
""")
VIEWS = templates("""
    {x}.view(-1) ; {x}.reshape(-1) ; {x}.t() ; {x}[1:] ; {x}[:0] ; {x}[0] ; {x}[..., ::2] ; {x}[None] ;
    {x}.expand(2, *{x}.shape) ; {x}.diagonal() ; {x}.unfold(0, 2, 1) ; {x}.as_strided((2, 2), (1, 1)) ;
    {x}.movedim(0, -1) ; {x}.chunk(2)[1] ; {x}.unbind()[0] ; {x}.squeeze() ; {x}.detach() ; {x}.view_as({x}) ;
    {x}.real ; {x}.imag ; {x}.conj() ; {x}.conj().imag ; torch.view_as_real({x}) ;
    torch.view_as_complex({x}.view(-1, 2)) ; {x}.detach().view(torch.int64) ; {x}.detach().view(torch.float64)
""")
RANDOM = templates("""
    F.dropout({x}, 0.4) ; {x} * torch.rand_like({x}) ; {x} * torch.rand({x}.shape) ;
    {x} + torch.normal(0.0, 1.0, {x}.shape, generator=g) ;
    {x} * torch.bernoulli({x}.detach().sigmoid(), generator=g) ;
    {x} * {x}.new_empty({x}.shape).uniform_(generator=g) ; {x} * {x}.new_empty({x}.shape).exponential_() ;
    noisy({x}) ; {x}[torch.randperm(len({x}))] ;
    F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None], dropout_p=0.3)[0] ;
    torch.native_dropout({x}, 0.5, True)[0] ; F.gumbel_softmax({x}) ;
    torch.func.vmap(lambda t: t * torch.rand(4), randomness='different')({x})
""")
DECIDED = templates("""
    {x} * float({x}.detach().sum()) ; {x}[{x}.detach() > 0] ; {x} * ({x}.detach() > 0).sum() ;
    {x}[({x}.detach() > 0).nonzero()[:, 0]] ; {x} * {x}.detach().unique().numel() ;
    {x} if torch.equal({x}, {y}) else {x} * {y} ; {x} * torch.tensor({x}.tolist())
""")
MODULES = templates("""
    bn({x}) ; lin({x}) ; drop({x}) ; bn(lin({x}).sin()) ; {x} * ema ; {x} * ema.clone() ; {x} * count
""")
MAKES = templates("""
    torch.zeros(3, 4) ; torch.full((3, 4), 0.5, requires_grad=True) ; torch.empty(3, 4).fill_(0.25) ;
    torch.empty(3, 4).copy_({x}) ; torch.empty_like({x}).copy_({x}) ; torch.zeros_like({x}) ; {x}.new_zeros(4) ;
    torch.arange(4.0) ; torch.from_numpy({x}.detach().numpy() * 2) ; filled(torch.empty(3, 4), 0.5) ;
    filled({x}.new_empty({x}.shape), 2) ; {x}.detach().clone().requires_grad_()
""")
TARGETS = (
    "{t}",
    "{t}[1:]",
    "{t}[0]",
    "{t}.t()",
    "{t}.view(-1)[::2]",
    "{t}.detach()",
    "{t}.diagonal()",
)
WRITES = templates("""
    {t}.mul_(0.5) ; {t}.add_({y}) ; {t}.mul_({y}) ; {t}.copy_({y}) ; {t}.sin_() ; {t}.tanh_() ; {t}.sigmoid_() ;
    {t}.exp_() ; {t}.zero_() ; {t}.fill_(0.3) ; {t}.neg_() ; {t}.clamp_(-0.5, 0.5) ; {t}[...] = 0.5 ;
    torch.relu_({t}) ; {t}.masked_fill_({t}.detach() > 0.3, 0.1) ; {t}[{t}.detach() > 0.3] = 0.2 ;
    {t}.index_add_(0, torch.tensor([0, 0]), {y}[:2]) ; {t}.addcmul_({y}, {y}) ; {t}.lerp_({y}, 0.2) ;
    {t}.cumsum_(0) ; {t}.uniform_() ; {t}.normal_(generator=g) ; {t}.bernoulli_(0.5) ;
    F.dropout({t}, 0.4, inplace=True) ; F.leaky_relu({t}, inplace=True) ;
    torch._foreach_mul_([{t}], 0.5) ; torch._foreach_add_([{t}, {t}], {y}) ; Double.apply({t}) ;
    {t}.view(torch.int64).bitwise_and_(-256) ; bump({t}) ; {t}.unsqueeze_(0) ; {t}.t_() ;
    {t}.resize_({t}.numel() // 2) ; {t}.set_({y}.detach()) ; {t}.requires_grad_()
""")
OUTS = templates("""
    torch.mul({x}, {y}, out={t}) ; torch.sin({x}, out={t}) ; torch.mm({x}, {y}, out={t}) ;
    torch.cumsum({x}, 0, out={t})
""")
OUTSIDE = templates("""
    ema.lerp_({x}.detach().mean(0), 0.1) ; count.add_(1) ; ema.mul_(0.9).add_(count) ;
    F.batch_norm({x}, ema, var, training=True) ; torch.mul(ema, 0.5, out=ema) ; bump(ema)
""")
SEEDS = ("torch.manual_seed(3)", "g.manual_seed(4)", "torch.rand(2)", "bn.eval()", "bn.train()")
POLICIES = (
    "",
    "policy=[aten.mul.Tensor]",
    "policy=[aten.sin.default, aten.add.Tensor, aten.mm.default]",
    "policy=lambda ctx, op, *args, **kwargs: 'softmax' in str(op) or 'clone' in str(op) or '_.' in str(op)",
    "policy=lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD if op is aten.mul.Tensor else False",
    "policy=lambda ctx, op, *args, **kwargs: True",
    "policy=auto()",
    "policy=auto(budget=100)",
    "policy=auto(budget=300)",
    "policy=auto(budget=1000)",
    "policy=offload(min_bytes=0)",
    "policy=offload(auto(budget=200), min_bytes=0, inputs=True)",
    "policy=offload(save_ops(aten.sin.default), min_bytes=0) | [aten.mul.Tensor]",
    "early_stop=False",
    "determinism_check='values'",
    "preserve_rng_state=False",
)
RERUN_OPTIONS = ("", "early_stop=False")
CONTEXTS = (
    "torch.no_grad()",
    "torch.enable_grad()",
    "torch.inference_mode()",
    "hooks()",
    "torch.autocast('cpu')",
)


# ---- the doors of a program, open and shut
def _same(value: Any, **options: Any) -> Any:
    return value


OPEN = {
    "scope": checkpoint_scope,
    "rerun": checkpointed,
    "replay": lambda f, **options: checkpointed(f, backend="replay", **options),
    "torch_checkpoint": lambda f: (
        lambda *args: torch.utils.checkpoint.checkpoint(f, *args, use_reentrant=False)
    ),
    "keep": keep,
    "opaque": opaque,
    "hooks": same_place,
}
SHUT = dict.fromkeys(OPEN, _same) | dict.fromkeys(("opaque", "hooks"), contextlib.nullcontext)
SHUT["scope"] = lambda **options: contextlib.nullcontext()
OF_TORCH = ("torch_checkpoint", "hooks")
NAMES = {
    "torch": torch,
    "F": F,
    "aten": torch.ops.aten,
    "noisy": noisy,
    "bump": bump,
    **{f.__name__: f for f in (auto, offload, save_ops, Cube, Pair, Double, filled, weigh, grad)},
    "CheckpointPolicy": torch.utils.checkpoint.CheckpointPolicy,
}


def arguments() -> dict[str, Any]:
    """Of every program: leaves, a tensor without gradient, buffers, modules and a generator."""
    torch.manual_seed(11)
    return {
        "a": torch.randn(3, 4, requires_grad=True),
        "b": torch.randn(3, 4, requires_grad=True),
        "w": torch.randn(4, 4, requires_grad=True),
        "k": torch.randn(3, 4),
        "ema": torch.zeros(4),
        "var": torch.ones(4),
        "count": torch.zeros(()),
        "bn": nn.BatchNorm1d(4),
        "lin": nn.Linear(4, 4),
        "drop": nn.Dropout(0.3),
        "g": torch.Generator().manual_seed(5),
    }


# ---- plans
NUMBER = st.integers(0, 255)
TABLES = {
    "unary": UNARY,
    "binary": BINARY,
    "view": VIEWS,
    "random": RANDOM,
    "decided": DECIDED,
    "module": MODULES,
    "make": MAKES,
    "write": WRITES,
    "out": OUTS,
    "outside": OUTSIDE,
    "seed": SEEDS,
    "unseen": ("{t}.detach().numpy()[...] *= 0.5", "{t}.detach().numpy()[:1] = 0.25"),
    "keep": ("keep({x})",),
    "grad": ("grad([{x}], [{y}])[0]", "grad([{x}], [{y}], create_graph=True)[0]"),
    "hook": ("{x}.register_hook(lambda g: g * 2)",),
    "del": ("del {x}",),
}
OFTEN = ("unary", "binary", "unary", "view", "binary", "write", "write", "random", "keep")
SIMPLE = st.tuples(st.sampled_from((*TABLES, *OFTEN)), NUMBER, NUMBER, NUMBER, NUMBER)
BLOCKS = ("scope", "rerun") * 2 + (
    "opaque",
    "replay",
    "torch_checkpoint",
    "context",
    "if",
    "for",
    "for_scope",
)


def block(children: Any) -> Any:
    return st.tuples(
        st.sampled_from(BLOCKS), NUMBER, NUMBER, st.lists(children, min_size=1, max_size=8)
    )


STATEMENT = st.recursive(SIMPLE, block, max_leaves=16)
BACKWARD = st.tuples(
    st.sampled_from(("first", "second", "one", "middle", "backward", "del")), NUMBER, NUMBER
)
PLAN = st.tuples(
    st.lists(st.one_of(SIMPLE, block(STATEMENT), STATEMENT), min_size=1, max_size=14),
    st.lists(BACKWARD, min_size=1, max_size=5),
)


class PassThrough(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Notes the storages that operators read and write."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self.writer = writer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = self.writer
        found.reads.update(map(storage, tensors([list(args), kwargs])))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found.writes.update(map(storage, tensors(value)))
        if "batch_norm" in str(func):
            found.writes.update(map(storage, args[3:5]))
        for name in kwargs:
            if name.startswith("out"):
                found.writes.update(map(storage, tensors(kwargs[name])))
        with torch._C._SetExcludeDispatchKeyGuard(
            torch._C.DispatchKey.ZeroTensor, False
        ):  # else torch crashes
            result = func(*args, **kwargs)
        found.see(result)
        return result


def storage(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage()._cdata


class Writer:
    """Turns a plan into source, running what it writes.

    `saved` are the storages that autograd has saved, which plain code must not write any more; `born` tells when a
    storage was first seen, because what is called again must not write what was there before; `guarded` are the
    storages that a region has read that is over, for writing which a region may raise.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.space: dict[str, Any] = {**NAMES, **SHUT, **arguments()}
        self.scopes: list[list[str]] = [[n for n, v in self.space.items() if isinstance(v, Tensor)]]
        self.alive: list[Any] = []
        self.saved: set[int] = set()
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.born: dict[int, int] = {}
        self.guarded: set[int] = set()
        self.regions: list[str] = []
        self.rerun_since = -1
        self.may_refuse = False
        self.loop = 0
        self.loops = 0
        self.inside_torchs = 0
        self.policies = 0
        self.unseen = 0
        self.fresh = 0
        self.depth = 1
        self.leaves = {storage(self.space[n]) for n in ("a", "b", "w")}
        self.globals = {storage(self.space[n]) for n in ("ema", "var", "count")}
        for value in self.space.values():
            self.see(value)
            if isinstance(value, nn.Module):
                self.see([*value.parameters(), *value.buffers()])
                self.leaves.update(map(storage, value.parameters()))

    def see(self, value: Any) -> None:
        for tensor in tensors(value):
            self.alive.append(tensor)
            self.born.setdefault(storage(tensor), len(self.born))

    def write(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def run(self, line: str) -> bool:
        """Run a statement as plain code, and write it down if that can be done."""
        writes = set(self.writes)
        try:
            exec(line, self.space)
        except Exception:
            self.writes = writes
            return False
        self.write(line)
        return True

    # ---- names
    def new(self) -> str:
        self.fresh += 1
        return f"v{self.fresh}"

    def names(self) -> list[str]:
        """The tensors that a statement may read: the newest first."""
        found = [n for names in reversed(self.scopes) for n in reversed(names) if n in self.space]
        return list(dict.fromkeys(found))

    def pick(self, number: int, names: list[str] | None = None) -> str:
        names = self.names() if names is None else names
        return names[number % len(names)]

    def assign(self, expression: str, rebind: str | None = None) -> bool:
        name = rebind or self.new()
        writes = set(self.writes)
        try:
            value = eval(expression, self.space)
        except Exception:
            value = None
        if value is None:
            self.writes = writes
            return False
        if not isinstance(value, Tensor) or value.numel() > 200 or value.dim() > 4:
            return False
        if value.is_floating_point() and not bool((value.detach().abs() < 100).all()):
            return False
        self.see(value)
        self.space[name] = value
        self.write(f"{name} = {expression}")
        if rebind is None:
            self.scopes[-1].append(name)
        return True

    # ---- statements
    def statement(self, plan: Any) -> None:
        kind, *numbers = plan
        if kind in TABLES:
            self.simple(kind, *numbers)
        elif kind in ("rerun", "torch_checkpoint", "replay"):
            self.function(kind, *numbers)
        else:
            self.with_block(kind, *numbers)

    def simple(self, kind: str, which: int, first: int, second: int, third: int) -> None:
        table = TABLES[kind]
        template = table[which % len(table)]
        if self.inside_torchs and any(
            name in template for name in ("=g", "g.", "bn(")
        ):  # torch does not restore them
            return
        x, y = self.pick(first), self.pick(second)
        if kind == "unseen":
            names = [n for n in self.names() if self.may_write(self.space[n], False)]
            if self.unseen and names:
                self.run(template.format(t=self.pick(first, names)))
        elif kind in ("write", "out"):
            self.in_place(template, first, second, third, kind == "out")
        elif kind == "outside":
            if self.rerun_since < 0:
                self.outside(template.format(x=x))
        elif kind == "seed":
            # A rerun that finds a module in another mode than its forward did is not exact.
            if "bn." not in template or not (
                self.rerun_since >= 0
                or any("rerun(" in line or "torch_checkpoint(" in line for line in self.lines)
            ):
                self.run(template)
        elif kind == "hook":
            value = self.space[x]  # torch crashes where a view has been given another storage
            if (
                value._base is None
                and value.grad_fn is not None
                and self.born[storage(value)] >= self.rerun_since
            ):
                self.run(template.format(x=x))
        elif kind == "del":
            if x in self.scopes[-1][1:] and not self.loop and x not in arguments_names:
                self.scopes[-1].remove(x)
                self.run(f"del {x}")
        elif kind == "grad" and self.inside_torchs:
            return  # torch's checkpoint would call the function again, in the middle of its first call
        elif kind != "keep" or not (self.loops and self.rerun_since >= 0):
            if kind == "keep" and self.rerun_since >= 0:
                template = "keep({x} * 0.9)"  # a rerun has another tensor in its place, which no other name should stand for
            # to bind a name again lets go of what it stood for
            rebind = (
                x
                if third % 4 == 0
                and x in self.scopes[-1]
                and x not in arguments_names
                and not self.loop
                else None
            )
            if (
                self.assign(template.format(x=x, y=y), rebind) and kind == "keep"
            ):  # regions guard what they keep
                self.guarded.add(storage(self.space[rebind or f"v{self.fresh}"]))

    def in_place(self, template: str, first: int, second: int, third: int, out: bool) -> None:
        refuse = third >= 240
        names = [n for n in self.names() if self.may_write(self.space[n], refuse)]
        if not names:
            return
        t = self.pick(first, names)
        target = t if out or third % 2 else TARGETS[third // 2 % len(TARGETS)].format(t=t)
        if storage(self.space[t]) in self.guarded:
            self.may_refuse = True
        y = self.pick(second)
        takes = "set_" in template
        if takes and (
            not self.may_write(self.space[y], False) or target != t or self.rerun_since >= 0
        ):
            return
        if (
            out
            and "mm" not in template
            and self.space[t].shape != self.space[self.pick(second + 1)].shape
        ):
            return
        line = template.format(t=target, x=self.pick(second + 1), y=y)
        if out:
            with torch.no_grad():
                self.run(f"with torch.no_grad(): {line}")
        else:
            self.run(line)
        value = self.space.get(t)
        if (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and not bool((value.detach().abs() < 1e4).all())
        ):
            self.run(f"{t}.detach().zero_()")

    def may_write(self, tensor: Any, refuse: bool) -> bool:
        sid = storage(tensor)
        if sid in self.saved or self.born.get(sid, -1) < self.rerun_since:
            return False
        return refuse or sid not in self.guarded

    def is_usable(self, name: str) -> bool:
        """Whether torch lets one ask for its node: not for a view whose base has been written in another grad mode."""
        try:
            return bool(self.space[name].grad_fn) or True
        except RuntimeError:
            return False

    def outside(self, line: str) -> None:
        names = [n for n in ("ema", "var", "count") if n in line]
        if all(self.may_write(self.space[n], False) for n in names):
            self.run(line)

    # ---- blocks
    def with_block(self, kind: str, which: int, first: int, children: Any) -> None:
        if kind in ("for", "for_scope") and self.loop:
            return
        if kind in ("scope", "for_scope"):
            options = POLICIES[which % len(POLICIES)]
            header, context = f"with scope({options}):", contextlib.nullcontext()
        elif kind == "opaque":
            header, context = "with opaque():", contextlib.nullcontext()
        elif kind == "context":
            text = CONTEXTS[which % len(CONTEXTS)]
            if "autocast" in text and "rerun" in self.regions:
                return
            header, context = f"with {text}:", eval(text, self.space)
        elif kind == "if":
            x = self.pick(first)
            condition = f"float({x}.real.sum()) < {which % 5 - 2}"
            try:
                holds = eval(condition, self.space)
            except Exception:
                return
            header, context = (
                f"if {condition}:" if holds else f"if not {condition}:",
                contextlib.nullcontext(),
            )
        else:
            header, context = f"for _ in range({2 + which % 2}):", contextlib.nullcontext()
        if kind == "for_scope":
            self.write(f"for _ in range({2 + which % 2}):")
            self.depth += 1
        start = len(self.lines)
        self.unseen += kind == "opaque"
        self.write(header)
        self.depth += 1
        self.loop += kind in ("for", "for_scope")
        self.loops += kind in ("for", "for_scope")
        body = len(self.lines)
        with contextlib.ExitStack() as stack:
            stack.enter_context(context)
            if "scope" in kind:
                stack.enter_context(
                    self.region("scope", keeps="policy" in options or "rng" in options)
                )
            elif "hooks" in header:
                stack.enter_context(self.region("hooks"))
            for child in children:
                self.statement(child)
        if len(self.lines) == body:
            self.write("pass")
        self.unseen -= kind == "opaque"
        self.depth -= 1
        if kind == "for_scope":
            self.depth -= 1
        self.loop -= kind in ("for", "for_scope")
        self.loops -= kind in ("for", "for_scope")
        if kind in ("for", "for_scope"):  # once more, to know what the next round does
            source = textwrap.dedent("\n".join(self.lines[start:]))
            first = len(self.born)
            with contextlib.suppress(Exception):
                exec(source, self.space)
            if any(f"{door}(" in source for door in OPEN):
                self.guarded |= {s for s, born in self.born.items() if born >= first}

    @contextlib.contextmanager
    def region(self, kind: str, extra: set[int] = frozenset(), keeps: bool = False) -> Any:
        before, self.reads = self.reads, set()
        written, self.writes = self.writes, set()
        start = len(self.born)
        since = self.rerun_since
        if kind == "rerun":
            self.rerun_since = start
        self.regions.append(kind)
        self.policies += keeps
        yield
        self.policies -= keeps
        self.regions.pop()
        self.rerun_since = since
        inner, inner_writes = self.reads, self.writes
        inner |= extra
        self.reads = before | inner
        self.writes = written | inner_writes
        self.guarded |= inner & self.leaves  # which are referenced
        if kind == "rerun":
            self.guarded |= inner & self.globals
        if kind != "hooks" and (not self.regions or self.regions[-1] != "scope"):
            held = {s for s in inner if self.born.get(s, 0) < start}
            self.guarded |= held if kind == "rerun" else held - inner_writes
        if kind == "scope" and keeps:
            self.guarded |= {s for s, born in self.born.items() if born >= start}

    def function(self, kind: str, which: int, first: int, children: Any) -> None:
        """A function, called once. One that is called again sees only its parameters, modules and the generator."""
        again = kind != "replay"
        if (
            kind == "torch_checkpoint" and self.policies
        ):  # regions in its rerun would not know the policy around it
            return
        self.fresh += 1
        name = f"f{self.fresh}"
        outer = list(dict.fromkeys([self.pick(first), self.pick(which), "a"]))
        if not all(map(self.is_usable, outer)):
            return
        parameters = [f"p{self.fresh}_{i}" for i in range(len(outer))]
        for p, o in zip(parameters, outer, strict=True):
            self.space[p] = self.space[o]
        self.write(f"def {name}({', '.join(parameters)}):")
        self.depth += 1
        scopes = self.scopes
        self.scopes = (
            [list(reversed(parameters))] if again else [*scopes, list(reversed(parameters))]
        )
        options = RERUN_OPTIONS[which % 2] if again else POLICIES[which % len(POLICIES)]
        loop, self.loop = self.loop, 0
        unseen, self.unseen = self.unseen, 0
        self.inside_torchs += kind == "torch_checkpoint"
        given = {storage(self.space[p]) for p in parameters if again}
        with self.region(
            "rerun" if again else "scope", given, "policy" in options or "rng" in options
        ):
            for child in children:
                self.statement(child)
        results = [n for n in self.scopes[-1] if n in self.space][-2:]
        self.write(f"return {', '.join(results)},")
        self.depth -= 1
        self.loop = loop
        self.unseen = unseen
        self.inside_torchs -= kind == "torch_checkpoint"
        self.scopes = scopes
        names = [self.new() for _ in results]
        for n, r in zip(names, results, strict=True):
            self.space[n] = self.space[r]
        self.scopes[-1].extend(names)
        call = (
            f"{kind}({name}, {options})"
            if options and kind != "torch_checkpoint"
            else f"{kind}({name})"
        )
        self.write(f"{', '.join(names)}, = {call}({', '.join(outer)})")

    # ---- the end
    def finish(self, plans: Any) -> None:
        outputs = [n for n in self.names() if n not in arguments_names][:6] or ["a"]
        self.write(f"see('outputs', [{', '.join(outputs)}])")
        inputs = "a, b, w, *lin.parameters(), *bn.parameters()"
        for kind, first, second in plans:
            outputs = [n for n in outputs if n in self.space] or ["a"]
            some = [outputs[i] for i in range(len(outputs)) if (first + 1) >> i & 1] or outputs
            if kind == "first":
                self.run(f"see('first', grad([{', '.join(some)}], [{inputs}]))")
            elif kind == "second":
                self.run(f"g1 = grad([{', '.join(some)}], [{inputs}], create_graph=True)")
                self.run("see('of order one', g1)")
                self.run(f"see('of order two', grad(g1, [{inputs}]))")
            elif kind == "one":
                self.run(
                    f"see('one', grad([{self.pick(first, outputs)}], [{self.pick(second, ['a', 'b', 'w'])}]))"
                )
            elif kind == "middle":
                self.run(
                    f"see('middle', grad([{self.pick(first, outputs)}], [{self.pick(second, self.names())}]))"
                )
            elif kind == "backward":
                self.run(f"weigh([{', '.join(some)}]).backward(retain_graph=True)")
            elif len(outputs) > 1:
                del self.space[some[0]]
                self.write(f"del {some[0]}")


arguments_names = ("a", "b", "w", "k", "ema", "var", "count")


def write_program(plan: Any) -> tuple[str, bool]:
    """The source of `def program(...)`, and whether a region may refuse it."""
    torch.manual_seed(12)
    writer = Writer()
    writer.space["see"] = lambda *args: None

    def note(tensor: Tensor) -> Tensor:
        writer.saved.add(storage(tensor))
        writer.alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), Reads(writer):
        for statement in plan[0]:
            writer.statement(statement)
        writer.finish(plan[1])
    return "\n".join([f"def program({', '.join(arguments())}):", *writer.lines]), writer.may_refuse


def run(source: str, doors: dict[str, Any]) -> list[tuple[str, Any]]:
    """Everything that can be seen of a program."""
    seen: list[tuple[str, Any]] = []

    def see(what: str, values: Any) -> None:
        seen.append((what, [(v.requires_grad, bits(v)) for v in values]))
        seen.append((f"random stream after {what}", bits(torch.get_rng_state())))

    space = {**NAMES, **doors, "see": see}
    exec(compile(source, "<program>", "exec"), space)
    given = arguments()
    torch.manual_seed(12)
    space["program"](**given)
    given_tensors = [v for v in given.values() if isinstance(v, Tensor)]
    seen.append(("arguments", bits([t.detach() for t in given_tensors])))
    seen.append((".grad", bits([t.grad for t in given_tensors])))
    seen.append(
        (
            "modules",
            [bits(dict(m.state_dict())) for m in given.values() if isinstance(m, nn.Module)],
        )
    )
    seen.append(("generator", bits(given["g"].get_state())))
    return seen


def compare(
    source: str, want: list[tuple[str, Any]], doors: dict[str, Any], may_refuse: bool
) -> tuple[str, Exception | None] | None:
    """What is wrong with a program, if anything."""
    try:
        have = run(source, doors)
    except Exception as error:
        if may_refuse and isinstance(error, checkpointing.CheckpointError):
            COUNTS["refused"] += 1
            return None
        return f"{type(error).__name__}: {error}", error
    differs = [w[0] for w, h in zip(want, have, strict=True) if w != h]
    return (f"differs from plain: {differs[0]}", None) if differs else None


def check(plan: Any) -> None:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source, may_refuse = write_program(plan)
            try:
                want = run(source, SHUT)
            except Exception as error:
                COUNTS["plain code fails"] += 1
                COUNTS[str(error)[:60]] = COUNTS.get(str(error)[:60], 0) + 1
                return
            COUNTS["checked"] += 1
            failure = compare(source, want, OPEN, may_refuse)
            if failure is None:
                return
            of_torch = {**SHUT, **{name: OPEN[name] for name in OF_TORCH}}
            if any(
                compare(source, want, of_torch, False) for _ in range(20)
            ):  # hooks may be given unfilled memory
                COUNTS["torch's own doors fail"] += 1
                return
            with PassThrough():  # some composite operators take another way in any dispatch mode
                if compare(source, want, SHUT, False):
                    return
            raise AssertionError(f"{failure[0]}\n\n{source}") from failure[1]
    finally:
        torch.set_default_dtype(dtype)


COUNTS: dict[str, int] = {
    "checked": 0,
    "refused": 0,
    "plain code fails": 0,
    "torch's own doors fail": 0,
}
DEEP = int(os.environ.get("CHECKPOINTING_PROGRAMS", "0"))


@settings(max_examples=DEEP or 130, derandomize=not DEEP, suppress_health_check=list(HealthCheck))
@given(PLAN)
def test_random_programs(plan: Any) -> None:
    """Outputs, gradients of two orders, random streams, buffers and arguments are those of the plain program."""
    check(plan)
