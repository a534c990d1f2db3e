"""Random programs of regions in regions leave the bits of plain code behind, or a typed error.

A program is written without looking: what plain code can't do is dropped, line by line, until plain
code runs. Then it runs with regions.

A fixed set runs by default; `CHECKPOINTING_NESTS=20000` draws that many others. A program that
writes in place may be refused; how many of the fixed set are is known.
"""

import contextlib
import gc
import os
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from oracle import Double, Pair, PassThrough, SavesItsOutput, bits, noisy, state, tensors, weigh
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

import checkpointing
from checkpointing import auto, keep, offload, opaque, save_ops, save_tagged, tag, torch_compat

pytestmark = pytest.mark.filterwarnings("ignore")


@torch.library.custom_op("nests::bump", mutates_args=("x",))
def bump(x: Tensor) -> Tensor:
    """Writes its argument and makes another tensor."""
    x.mul_(0.5)
    return x + 1


def strided(x: Tensor) -> Tensor:
    """A view of a part of a tensor's memory, one number behind its first."""
    return x.as_strided((2,), (1,), x.storage_offset() + 1)


def spread(x: Tensor) -> Tensor:
    """A view of all of a tensor's memory, from its beginning."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def hooked(x: Tensor) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y


# ---- the grammar: most tensors are N x N, so that most lines fit most names


GRAMMAR = """
NEW
    {x}.sin() ; {x}.tanh() ; {x} * 0.5 ; {x} + 1 ; {x}.square() ; {x}.clone() ; {x}.relu() ;
    F.softmax({x}, -1) ; {x} * {y} ; {x} * {x} ; {x} + {y} ; {x} - {y} ; {x} @ {y} * 0.25 ;
    {x} @ w * 0.25 ; {x}.sum(0) ; torch.cat([{x}, {y}], 1)[:, ::2] ;
    torch.cat([{x}, {y}], 1)[:, :N] ; torch.cat([{x}, {y}])[1::2] ; {x}.sum(1, keepdim=True) ;
    {x} * {x}.detach().sum() ; {x}.clone().mul_(0.5) ; ({x} * 1.5).relu_()
OPERATORS
    {x}.cos() ; ({x} * 0.1).exp() ; {x}.sigmoid() ; {x}.cumsum(0) ; {x}.sort(0).values ;
    {x}.logsumexp(0) ; {x}.clamp(-0.5, 0.5) ; {x}.mean() ; {x}.amax(0) ; {x}.float().double() ;
    {x}.bfloat16().double() ; F.gelu({x}) ; F.layer_norm({x}, {x}.shape[-1:]) ;
    torch.complex({x}, {x} * 2).abs() ; torch.stack([{x}, {x}])[1] ; {x}.flip(0) ;
    SavesItsOutput.apply({x}) ; Pair.apply({x}, {y})[0] ; sum(Pair.apply({x}, {y})) ;
    F.max_pool1d({x}[None], 2)[0] ; {x} / ({y} * {y} + 1) ; {x}.t() @ {y} * 0.25 ;
    torch.where({x} > {y}, {x}, {y}) ; torch.addcmul({x}, {y}, {x}) ; {x}.lerp({y}, 0.3) ;
    F.linear({x}, w, {y}) * 0.25 ; torch._foreach_mul([{x}, {y}], 0.5)[1] ;
    torch.func.vmap(lambda s, t: (s * t).sin())({x}, {y}) ;
    torch.func.jvp(lambda t: (t * t).sin(), ({x}.detach(),), ({y}.detach(),))[1] ;
    {x} * float({x}.detach().sum()) ; {x}[{x}.detach() > 0] ; {x} * ({x}.detach() > 0).sum() ;
    {x} if torch.equal({x}, {y}) else {x} * {y} ; {x} * torch.tensor({x}.tolist()) ; bn({x}) ;
    lin({x}) ; drop({x}) ; bn(lin({x}).sin()) ; noisy({x}) ; hooked({x})
RANDOM
    F.dropout({x}, 0.3) ; {x} * torch.rand_like({x}) ; {x} + torch.rand(N, N) ;
    {x} + torch.normal({x}.detach(), 0.5) ; {x} * torch.bernoulli({x}.detach().sigmoid()) ;
    {x} * torch.empty(N, N).exponential_() ; {x}[torch.randperm(len({x}))] ;
    F.gumbel_softmax({x}) ;
    F.scaled_dot_product_attention({x}[None], {x}[None], {x}[None], dropout_p=0.3)[0]
MAKES
    torch.zeros(N, N) ; torch.full((N, N), 0.5, requires_grad=True) ;
    torch.empty(N, N).fill_(0.25) ; torch.empty(N, N).copy_({x}) ; torch.zeros_like({x}) ;
    torch.from_numpy({x}.detach().numpy() * 2) ; {x}.detach().clone().requires_grad_()
VIEW
    {x}.t() ; {x}[:, ::2] ; {x}[:, :-1] ; {x}[1:] ; {x}[0] ; {x}[0].expand(N, N) ;
    {x}[:, :1].expand(N, N) ; {x}.expand(2, N, N) ; {x}.reshape(-1)[: 2 * N - 1].unfold(0, N, 1) ;
    {x}.unfold(1, 2, 1) ; {x}.narrow(0, 1, 2) ; {x}.diagonal() ; {x}.view_as({x}) ; {x}.detach() ;
    {x}.contiguous() ; {x}.chunk(2)[1] ; {x}.unbind()[0] ; {x}.as_strided((2, 2), (1, 1)) ;
    {x}.movedim(0, -1) ; {x}[:0] ; {x}.unbind(1)[-1] ; [*{x}][1] ; {x}.split(2)[0] ; {x}.mT ;
    {x}.view(-1)[1:] ; strided({x}) ; spread({x}) ; {x}.tensor_split(3)[1] ; {x}[..., None] ;
    {x}.flatten()[::3] ; {x}.select(-1, 0) ; {x}[1:, 1:] ; torch.complex({x}, {x}).conj().imag ;
    torch.view_as_real(torch.complex({x}, {y}))[..., 0] ; {x}.view(torch.int64).view(torch.double)
PARTS
    {x}.unbind()[:2] ; {x}.unbind(-1)[1:3] ; {x}.chunk(2) ; {x}.split(3)[:2] ; [*{x}][1:3] ;
    ({x}[:2], {x}[1:]) ; ({x}.t(), {x}[0]) ; ({x}.view(-1)[:6], {x}.view(-1)[4:]) ;
    {x}.tensor_split(2, -1) ; ({x}.detach(), {x}[0]) ; ({x}[0].expand(N, N), {x}[0]) ;
    ({x}[:, :2], {x}.unfold(-1, 2, 1)) ; (spread({x}), strided({x}))
WRITE
    {t}.mul_(0.5) ; {t}.add_({y}) ; {t}.relu_() ; {t}.sin_() ; {t}.copy_({y}) ; {t}[0] = 0.25 ;
    {t}[:, ::2] *= 2 ; {t}.t().mul_(0.5) ; {t}.detach().add_(1) ;
    F.dropout({t}, 0.3, inplace=True) ; F.relu({t}, inplace=True) ; torch.relu_({t}) ;
    {t}.masked_fill_({t}.detach() > 0.3, 0.1) ; {t}[{t}.detach() > 0.3] = 0.2 ; {t}.cumsum_(0) ;
    {t}.index_add_(0, torch.tensor([0, 0]), {y}[:2]) ; {t}.uniform_() ; {t}.normal_() ;
    {t}.zero_() ; torch._foreach_mul_([{t}], 0.5) ; Double.apply({t}) ; bump({t}) ;
    {t}.diagonal().exp_() ; {t}.lerp_({y}, 0.2) ; torch._foreach_add_([{t}, {y}.clone()], {y}) ;
    torch._foreach_copy_([{t}[0], {t}[1]], [{y}[1], {y}[0]]) ; {t}.t_() ; {t}.unsqueeze_(0) ;
    torch._foreach_mul_([*{t}], 0.5) ; torch._foreach_lerp_([{t}], [{y}], 0.3) ;
    torch._foreach_addcmul_([{t}], [{y}], [{y}]) ; torch._foreach_sqrt_([{t}[:1].abs_(), {t}[1:]]) ;
    {t}.squeeze_().transpose_(0, -1) ; {t}.as_strided_((2, 2), (2, 1)) ;
    torch._foreach_zero_([{t}[0], {t}.t()[0]]) ; {t}.set_({y}.detach().clone())
PART
    [:2] ; [1:] ; [..., :2] ; [..., 1:] ; [0] ; [-1:] ; .t() ; .view(-1) ; .detach() ;
    .unbind()[1] ; .chunk(2)[0] ; .split(1)[-1] ; .narrow(-1, 0, 2) ; .diagonal() ; .mT ;
    [:, None] ; .squeeze() ; .flatten()[1:] ; .unfold(0, 2, 2) ; [::2]
FILL
    {p}.mul_(0.5) ; {p}.add_(1) ; {p}.fill_(0.25) ; {p}.copy_({q}) ; {p}.zero_() ; {p}.sin_() ;
    {p}.masked_fill_({p}.detach() > 0.3, 0.1) ; {p}.index_fill_(-1, torch.tensor([0]), 2.0) ;
    {p}.add_({q}, alpha=2) ; {p}[:] = {q} ; {p}.uniform_() ; strided({p}).mul_(2) ;
    spread({p}).add_(1) ; {p}.lerp_({q}, 0.3) ; {p}.unsqueeze_(-1).transpose_(0, -1).add_(1) ;
    torch._foreach_mul_([{p}, {t}[:1]], 2.0) ; {p}.addcmul_({q}, {q}) ; F.relu_({p}) ;
    for i, o in enumerate({p}): o[: i + 1].fill_(i) ; for o in {p}.split(2): o[1:].mul_(0.5) ;
    for s, o in zip({q}, {p}): o[:2].copy_(s[:2]) ; for o in {p}: o[0].add_(o[-1])
MEMORY
    torch.zeros(N, N) ; {x}.detach() * 1 ; torch.empty(N, N).copy_({x}.detach()) ;
    {x}.detach().clone() ; torch.ones(3, N) ; torch.full((N, N), 0.5) ;
    torch.empty_like({x}).zero_() ; {x}.detach().t() * 2 ; torch.rand(N, N)
MULTI
    torch.var_mean({x}, 0) ; torch.std_mean({x}, -1, keepdim=True) ; torch.aminmax({x}, dim=0) ;
    torch.native_layer_norm({x}, {x}.shape[-1:], None, None, 1e-5)[:2] ; torch.slogdet({x} + 9) ;
    torch.linalg.qr({x} + torch.eye(N)) ; {x}.max(0) ; {x}.topk(2, 0) ; {x}.cummax(0) ; {x}.sort() ;
    torch._foreach_mul([{x}, {y}], 0.5) ; torch._foreach_add([{x}, {y}], [{y}, {x}]) ;
    torch._foreach_exp([{x} * 0.1, {x}]) ; torch.meshgrid({x}[0], {y}[0]) ; {x}.frexp() ;
    torch.unbind_copy({x})[:2] ; F.max_pool1d({x}, 2, return_indices=True) ; {x}.median(0) ;
    torch.split_copy({x}, 2)[:2] ; torch.native_dropout({x}, 0.3, True) ; {x}.mode(0) ;
    torch.sort(torch.stack([{x}, {y}]), 0, stable=True) ; {x}.aminmax() ; {x}.kthvalue(2, 0)
FAILS
    {x} @ torch.ones(N + 1, 2) ; {x}.view(7, 3) ; {x}.topk(99)[0] ; {x} + torch.ones(N + 1) ;
    F.layer_norm({x}, (N + 1,)) ; torch.cat([{x}, torch.ones(1)]) ;
    SavesItsOutput.apply({x}).view(7)
FAILS_AND_WRITES
    torch._foreach_mul_([{t}, torch.zeros(1).expand(2)], 2.0) ; {t}.add_({y}).view(7, 7, 7) ;
    torch._foreach_add_([{t}[0], torch.zeros(1).expand(2)], 1.0) ; {t}[:1].copy_({y}[:1]).view(5, 7)
OUT
    torch.mul({x}, {y}, out={t}) ; torch.sin({x}, out={t}) ; torch.cumsum({x}, 0, out={t})
KEEP
    keep({x}) ; keep({x}) ; keep({x}) ; keep({x}[:, ::2]) ; keep({x}[:, :-1]) ;
    keep({x}[0].expand(N, N)) ; keep({x}.reshape(-1)[: 2 * N - 1].unfold(0, N, 1)) ; tag({x}, 't') ;
    keep({x}.t()) ; strided(keep({x}.flatten()[1:])) ; spread(keep({x}[1:])) ; keep({x}.mT).mT ;
    keep(torch.complex({x}, {y}).conj()).real ; keep({x}.expand(2, N, N)) ; keep({x}[1:, 1:])
FORWARD_ONLY
    once_same({x}) ; once_view({x}) ; once_step({x}) ; once_wide({x}) ; once_new({x}) ;
    once_mask({x})
PAIRS
    keep(({x}, {y})) ; once_pair({x}, {y})
GRAPH
    once_graph({x})
BACKWARD
    grad([{x}], [{y}], create_graph=True) ; grad([{x}], [{y}]) ;
    grad([{x} * {y}], [{y}], create_graph=True) ; own_backward({x})
POLICIES
    policy=auto() ; policy=auto(peak=1) ; policy=auto(budget=300) ; policy=auto(budget=10000) ;
    policy=save_ops(aten.mul.Tensor, aten.mm.default) ;
    policy=[aten.sin.default, aten.add.Tensor, aten.cat.default] ;
    policy=lambda ctx, op, *args, **kwargs: 'softmax' in str(op) or 'clone' in str(op) ;
    policy=save_tagged('t') ; policy=offload(min_bytes=0) ;
    policy=offload(min_bytes=0, inputs=True) ;
    policy=offload(save_ops(aten.mul.Tensor), min_bytes=0) ;
    policy=offload(auto(peak=1), min_bytes=0, inputs=True) ;
    policy=offload(save_tagged('t'), min_bytes=0) | save_ops(aten.sin.default) ;
    preserve_rng_state=False
"""
PARTS_OF = re.split(r"^([A-Z_]+)$", GRAMMAR, flags=re.M)[1:]
G = SimpleNamespace(
    **{
        name: [template.strip() for template in text.split(";")]
        for name, text in zip(PARTS_OF[::2], PARTS_OF[1::2], strict=True)
    }
)
OPTIONS = ["", "", "", "early_stop=False", "report=True"]
OPTIONS += [f"determinism_check='{check}'" for check in ("values", "values", "none", "metadata")]
AROUND = ["torch.no_grad()", "opaque()", "opaque()", "torch.enable_grad()", "torch.autocast('cpu')"]
HOOKS = ["save_on_cpu()", "cloning()", "identical()"]
CALLED = ["rerun", "rerun", "rerun", "compat", "replay"]  # doors of functions
LEAVES = ("a", "b", "c", "w")
WRITES = "  # writes"  # behind each line that does


def block(head: str, body: list[str]) -> list[str]:
    return [f"{head}:", "    pass", *["    " + line for line in body]]


class Writer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names: list[str] = list(LEAVES)  # those that can be seen
        self.local: list[str] = []  # those of the innermost function
        self.fresh = 0
        self.level = 0  # how many blocks are around that are no regions
        self.called: list[tuple[str, int]] = []  # the functions that can be seen, with their arity
        self.favourite = ""  # what several regions take, and may write
        # Gradients of a backward inside do not flow through what `forward_only` functions return.
        self.backward_inside = self.chance(0.3)
        self.writes = self.chance(0.6)
        self.hooks = self.chance(0.4)
        self.rich = self.chance(0.5)  # all operators, loops and branches
        self.parts = self.writes and self.chance(0.6)  # memories are written in parts
        self.memories: list[str] = []

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def new(self) -> str:
        self.fresh += 1
        return f"v{self.fresh}"

    def pick(self) -> str:
        if self.chance(0.2):
            return self.random.choice(LEAVES)
        if self.memories and self.chance(0.2) and self.memories[-1] in self.names:
            return self.random.choice(self.among())
        if self.chance(0.2) and self.favourite in self.names:
            return self.favourite
        if self.local and self.chance(0.5):
            return self.random.choice(self.local)
        return self.random.choice(self.names[-6:] if self.chance(0.7) else self.names)

    def program(self) -> list[str]:
        size = 4 if self.chance(0.7) else 26
        body = [line for _ in range(self.random.randint(1, 2)) for line in self.value()]
        self.favourite = self.names[len(LEAVES)]
        around = self.random.choice(HOOKS) if self.hooks and self.chance(0.4) else None
        body += self.body(0)
        body += self.region(0)
        body += [line for _ in range(self.random.randrange(3)) for line in self.simple()]
        if around:
            body = block(f"with {around}", body)
        return [
            f"N = {size}",
            *block("def program(a, b, c, w, bn, lin, drop)", [*body, *self.end()]),
        ]

    def body(self, depth: int) -> list[str]:
        count = self.random.randint(1, 5 if depth else 3)
        return [line for _ in range(count) for line in self.statement(depth)]

    def statement(self, depth: int) -> list[str]:
        dice = self.random.random()
        if dice < (0.3 if depth < 3 else 0):
            return self.region(depth)
        if 0.3 <= dice < 0.38 and self.level < 2:
            return self.around(depth)
        if 0.38 <= dice < 0.41 and self.called:
            return self.again()
        return self.simple()

    def around(self, depth: int) -> list[str]:
        if self.chance(0.15):
            self.level += 1
            lines = block("try", [*self.body(depth), "raise KeyError"])
            self.level -= 1
            return [*lines, *block("except KeyError", [])]
        head = f"with {self.random.choice([*AROUND, *HOOKS * self.hooks])}"
        if self.rich and self.chance(0.5):
            head = f"if float({self.pick()}.sum()) < {self.random.randrange(-2, 3)}"
            head = self.random.choice([head, "for _ in range(2)"])
        self.level += 1
        body = self.body(depth)
        self.level -= 1
        return block(head, body)

    def region(self, depth: int) -> list[str]:
        if self.chance(0.4):
            lines = block(f"with scope({self.options()})", self.body(depth + 1))
            if self.chance(0.1):
                raised = block("try", [*lines, "    raise KeyError"])
                return [*raised, *block("except KeyError", [])]
            return lines
        doors = CALLED
        if self.writes and self.backward_inside:  # which makes a rerun repeat its writes
            doors = ["replay"]
        door = self.random.choice(doors)
        options = self.options() if door == "replay" else ""
        if door == "rerun":
            options = self.random.choice(OPTIONS)
        arguments = [self.pick() for _ in range(self.random.randint(1, 3))]
        if self.chance(0.2):
            arguments.append(arguments[0])
        self.fresh += 1
        name = f"f{self.fresh}"
        parameters = [f"p{self.fresh}_{i}" for i in range(len(arguments))]
        names, local, called = self.names, self.local, self.called
        self.names, self.local = [*names, *parameters], [*parameters]
        if door != "replay" and self.writes:  # what a function closes over that is called inside
            self.called = []
        body: list[str] = []
        if self.writes and self.chance(0.2):  # as an activation in place, at the start of a block
            body += self.write(parameters[0])
        if self.chance(0.2):
            body += self.line(G.KEEP)
        body += self.body(depth + 1)
        inside = [self.random.choice(self.local[-3:]) for _ in range(self.random.randint(1, 2))]
        self.names, self.local = names, local
        self.called = [*called, (name, len(parameters))]
        results = [self.new() for _ in dict.fromkeys(inside)]
        self.bind(results)
        # A line that makes a result may have been dropped: a parameter goes in its place.
        first, once = parameters[0], dict.fromkeys(inside)
        found = ", ".join(f"locals().get('{one}', {first})" for one in once)
        return [
            *block(f"def {name}({', '.join(parameters)})", [*body, f"return {found},"]),
            f"{name} = {door}({name}{options and ', '}{options})",
            f"{', '.join(results)}, = {name}({', '.join(arguments)})",
        ]

    def again(self) -> list[str]:
        """A function that has been called before, called once more."""
        (name, arity), result = self.random.choice(self.called), self.new()
        arguments = [self.pick() for _ in range(arity)]
        self.bind([result])
        return [f"{result}, *_ = {name}({', '.join(arguments)})"]

    def options(self) -> str:
        return self.random.choice(G.POLICIES) if self.chance(0.6) else self.random.choice(OPTIONS)

    def bind(self, names: list[str]) -> None:
        self.names = [*self.names, *names]
        if self.local:
            self.local = [*self.local, *names]

    def simple(self) -> list[str]:
        kinds: list[Callable[[], list[str]]] = [self.value] * 8 + [lambda: self.line(G.VIEW)] * 3
        kinds += [lambda: self.line(G.RANDOM if self.rich else G.RANDOM[:3])]
        kinds += [lambda: self.line(G.KEEP)] * 3 + [self.once] * 2 + [lambda: self.line(G.PAIRS, 2)]
        kinds += [lambda: self.line(G.BACKWARD)] * self.backward_inside
        kinds += [self.write] * (4 * self.writes)
        delete = lambda: [f"del {self.random.choice(self.local or self.names)}"]
        kinds += [lambda: self.line(G.MAKES), delete] * self.rich
        kinds += [lambda: self.line(G.PARTS, 2)] * 2 + [lambda: self.line(G.MULTI, 2), self.fails]
        kinds += [self.memory, self.memory, self.part] * self.parts
        kinds += [self.fill] * (6 * self.parts)
        return self.random.choice(kinds)()

    def line(self, templates: list[str], binds: int = 1) -> list[str]:
        template, names = self.random.choice(templates), [self.new() for _ in range(binds)]
        text = template.format(x=self.pick(), y=self.pick())
        self.bind(names)
        rest = ", *_" * (binds > 1) or "," * ("grad(" in template)
        return [f"{', '.join(names)}{rest} = {text}"]

    def value(self) -> list[str]:
        return self.line(G.OPERATORS if self.rich and self.chance(0.6) else G.NEW)

    def once(self) -> list[str]:
        is_graph = not self.backward_inside and self.chance(0.2)
        return self.line(G.GRAPH if is_graph else G.FORWARD_ONLY)

    def memory(self) -> list[str]:
        """One that nothing needs a gradient of, so that it may be written."""
        self.memories.append(f"v{self.fresh + 1}")
        return self.line(G.MEMORY)

    def among(self) -> list[str]:
        """The memories, and views of them, that can be seen."""
        return [name for name in self.memories if name in self.names]

    def part(self) -> list[str]:
        """Two views, of a memory or of a view of one."""
        if not (among := self.among()):
            return self.memory()
        text = self.random.choice(G.PARTS).format(x=self.random.choice(among))
        names = [self.new(), self.new()]
        self.memories += names
        self.bind(names)
        return [f"{names[0]}, {names[1]}, *_ = {text}"]

    def fill(self) -> list[str]:
        """A write to a view of a view."""
        if not (among := self.among()):
            return self.memory()
        t, q = self.random.choice(among), self.pick()
        p = t + "".join(self.random.choices(G.PART, k=self.random.randrange(4)))
        q += "".join(self.random.choices([".detach()", *G.PART], k=self.random.randrange(3)))
        return [self.random.choice(G.FILL).format(t=t, p=p, q=f"{q}.detach()") + WRITES]

    def fails(self) -> list[str]:
        """An operator that raises, and the exception is caught."""
        among = self.among()
        writes = bool(among) and self.chance(0.5)
        text = self.random.choice(G.FAILS_AND_WRITES if writes else G.FAILS)
        text = text.format(x=self.pick(), y=self.pick(), t=self.random.choice(among or ["c"]))
        return block("try", [text + WRITES * writes]) + block("except RuntimeError", [])

    def write(self, target: str | None = None) -> list[str]:
        among = self.local or self.names
        t = target or (self.random.choice(among) if self.chance(0.7) else self.pick())
        if self.rich and self.chance(0.1):
            text = self.random.choice(G.OUT).format(x=self.pick(), y=self.pick(), t=t)
            return [f"with torch.no_grad(): {text}{WRITES}"]
        template = self.random.choice(G.WRITE if self.rich else G.WRITE[:12])
        return [template.format(t=t, y=self.pick()) + WRITES]

    def end(self) -> list[str]:
        """Gradients of some of the results, last ones too."""
        names = self.names[len(LEAVES) :]
        outputs = [*self.random.sample(names, min(3, len(names))), *names[-3:]]
        # A line that makes a result may have been dropped.
        outputs = [*dict.fromkeys(outputs)]
        found = f"out = [v for v in map(locals().get, {outputs}) if v is not None]"
        inputs = "a, b, w, *lin.parameters()"
        first = f"g1 = grad(out, [{inputs}], create_graph=True)"
        backwards = [
            [f"see(grad(out, [{inputs}]))"],
            ["weigh(out).backward(retain_graph=True)"] * 2,
            *[[first, f"see([g1, grad(g1, [{inputs}])])"]] * 2,
            [f"for one in reversed(out): see(grad([one], [{inputs}]))"],
            ["weigh(out).backward()"],
        ]
        late = [f"with torch.no_grad(): {self.random.choice('cw')}.mul_(0.5){WRITES}"]
        late *= self.writes and self.chance(0.1)
        return [found, "see(out)", *late, *self.random.choice(backwards)]


# ---- running


def grad(outputs: list[Tensor], inputs: list[Tensor], create_graph: bool = False) -> list[Tensor]:
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return list(torch.autograd.grad(weigh(outputs), inputs, create_graph=create_graph, **options))


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


def same(value: Any, *_: Any) -> Any:
    """What plain code has in place of `keep` and `tag`."""
    assert all(tensor.grad_fn is None or tensor.requires_grad for tensor in tensors(value))
    return value


def called(function: Any, **_: Any) -> Any:
    """Plain code, with arguments that something could be done with."""
    return lambda *args: function(*same(args))


NAMES = {
    **{each.__name__: each for each in (SavesItsOutput, Pair, Double, auto, offload, save_ops)},
    **{f.__name__: f for f in (save_tagged, hooked, weigh, grad, own_backward, strided, spread)},
    "noisy": noisy,
    "bump": bump,
    "torch": torch,
    "F": F,
    "aten": torch.ops.aten,
}
OF_TORCH = {
    "save_on_cpu": save_on_cpu,
    "cloning": lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "identical": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
}
OURS = {
    "scope": checkpointing.checkpoint_scope,
    "rerun": checkpointing.checkpointed,
    "replay": lambda f, **options: checkpointing.checkpointed(f, backend="replay", **options),
    "compat": lambda f: partial(torch_compat.checkpoint, f, use_reentrant=False),
    **{f.__name__: f for f in (keep, opaque, tag)},
    **{name: checkpointing.forward_only(f) for name, f in ONCE.items()},
}
SHUT = {
    **dict.fromkeys(
        ("scope", "opaque", "save_on_cpu", "cloning", "identical"),
        lambda *_, **__: contextlib.nullcontext(),
    ),
    **dict.fromkeys(("rerun", "replay", "compat"), called),
    **dict.fromkeys(("keep", "tag"), same),
    **ONCE,
}
PLAIN = {**NAMES, **SHUT}
TORCHS = {**PLAIN, **OF_TORCH}
OPEN = {**NAMES, **OF_TORCH, **OURS}


@contextlib.contextmanager
def one_scope(**options: Any) -> Iterator[Any]:
    """Scopes that are all entered at this line."""
    with checkpointing.checkpoint_scope(**options) as scope:
        yield scope


def call(function: Any, *args: Any) -> Any:
    """The one function of all replays."""
    return function(*args)


SHARED = {
    **OPEN,
    "scope": one_scope,
    "replay": lambda f, **options: partial(OPEN["replay"](call, **options), f),
}


def run(source: str, space: dict[str, Any]) -> list[Any]:
    """Everything that can be seen of a program."""
    seen: list[Any] = []

    def see(value: Any) -> None:
        seen.append((bits(value), bits(torch.get_rng_state())))

    space = {**space, "see": see}
    exec(compile(source, "<program>", "exec"), space)
    oracle.seed(11)
    n = space["N"]
    a, b = torch.randn(n, n, requires_grad=True), torch.randn(n, n, requires_grad=True)
    c, w = torch.randn(n, n), nn.Parameter(torch.randn(n, n))
    bn, lin = nn.BatchNorm1d(n), nn.Linear(n, n)
    space["program"](a, b, c, w, bn, lin, nn.Dropout(0.3))
    see([a, b, c, w, *bn.buffers()])
    see([t.grad for t in (a, b, w, *bn.parameters(), *lin.parameters())])
    return seen


@lru_cache(maxsize=8)
def plain_run(source: str) -> list[Any]:
    return run(source, PLAIN)


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    """Only reference counts may free what the library makes. Numbers are doubles."""
    torch.set_default_dtype(torch.float64)
    gc.disable()
    yield
    gc.enable()
    torch.set_default_dtype(torch.float32)


def left_behind(*sources: str) -> str | None:
    """What programs have left behind since `freeze`, if anything."""
    # Plain code, too, leaves a cycle where hooks hand on a result, or where it is written later.
    if any(word in source for word in (WRITES, "identical(", "save_on_cpu(") for source in sources):
        return None
    count = oracle.tensors_alive()
    return f"{count} tensors left behind" if count else None


def repaired(lines: list[str]) -> list[str] | None:
    """The lines without those that plain code can't do."""
    for _ in range(60):
        try:
            plain_run("\n".join(lines))
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            failed = [frame.lineno - 1 for frame in frames if frame.filename == "<program>"]
            if not failed:
                return None
            place = failed[-1]
            if "modified by an inplace" in str(error) or "is a view and" in str(error):
                written = [i for i, line in enumerate(lines) if line.endswith(WRITES)]
                place = max(written, default=place)
            end, inside = place + 1, lines[place].removesuffix(lines[place].lstrip()) + " "
            while lines[end : end + 1] and lines[end].startswith(inside):
                end += 1
            lines = lines[:place] + lines[end:]
        else:
            return lines
    return None


FINE = ("right", "refused", "skipped")


def judge(source: str, space: dict[str, Any], plain: Callable[..., Any] = plain_run) -> str:
    """Whether a program is right, refused or skipped, or what is wrong."""
    try:
        want = plain(source)
    except Exception:
        return "skipped"
    before = state()
    verdict = compared(source, space, want, WRITES in source)
    if state() != before:
        return f"left behind: {state()}"
    return verdict if verdict in FINE or not torch_fails(source, want) else "skipped"


def compared(source: str, space: dict[str, Any], want: list[Any], refusable: bool) -> str:
    try:
        return "right" if run(source, space) == want else "other bits"
    except checkpointing.CheckpointError as error:
        is_refusal = refusable and isinstance(error, checkpointing.ChangedError)
        return "refused" if is_refusal else repr(error)
    except Exception:
        return traceback.format_exc()


def torch_fails(source: str, want: list[Any]) -> bool:
    """Whether torch's own doors, or a mode that does nothing, differ, too: by layouts of copies."""
    try:
        have = run(source, TORCHS)
        with PassThrough():
            return want != have or want != run(source, PLAIN)
    except Exception:
        return True


@lru_cache(maxsize=100)
def written(seed: int) -> str:
    """A program that plain code can do, if one is left of what the writer makes."""
    return "\n".join(repaired(Writer(seed).program()) or [])


def one(seed: int) -> tuple[str, str]:
    source = written(seed)
    oracle.freeze()
    verdict = judge(source, OPEN) if source else "skipped"
    return source, left_behind(source) or verdict


DEEP = int(os.environ.get("CHECKPOINTING_NESTS", "0"))
START = random.randrange(1 << 40) if DEEP else 0
SEEDS = range(START, START + (DEEP or 84))


def test_nests() -> None:
    """A fixed set of programs: right, or refused where they write in place."""
    found = {seed: one(seed) for seed in SEEDS}
    wrong = [f"seed {seed}: {said}\n{s}" for seed, (s, said) in found.items() if said not in FINE]
    assert not wrong, f"{len(wrong)} of {len(SEEDS)} programs, such as\n" + "\n".join(wrong[:3])
    kinds = Counter(verdict for _, verdict in found.values())
    assert kinds["refused"] <= 0.1 * len(SEEDS), kinds


def varied(lines: list[str], draw: random.Random) -> list[str]:
    """The same program, in which lines read other tensors, or options or sizes are others."""
    found = [*lines]
    if draw.random() < 0.2:
        found[0] = f"N = {draw.choice((4, 5, 26))}"
    for i in draw.choices(range(2, len(lines)), k=3):
        if " = " in lines[i] and "(f" not in lines[i]:
            name, text = lines[i].split(" = ", 1)
            read = re.findall(r"\b[vp]\d\w*|\b[abcw]\b(?!')", text)
            if read:
                other = rf"\b{draw.choice(read)}\b"
                found[i] = f"{name} = {re.sub(other, draw.choice(LEAVES), text, count=1)}"
        elif "with scope(" in lines[i]:
            found[i] = re.sub(r"scope\(.*\)", f"scope({draw.choice(OPTIONS)})", lines[i])
    return found


def shared(seed: int) -> Iterator[tuple[str, str]]:
    """Programs that share their sites, in random order, and what became of them."""
    draw = random.Random(seed)
    lines = Writer(seed).program()
    programs = [repaired(lines), *(repaired(varied(lines, draw)) for _ in range(3))]
    sources = ["\n".join(lines) for lines in programs if lines]
    oracle.freeze()
    for source in draw.choices(sources, k=3 * len(sources)):
        said = judge(source, SHARED)
        # What is wrong alone, too, is the subject of the test above.
        yield source, said if said in FINE or judge(source, OPEN) in FINE else "skipped"
        if draw.random() < 0.05:
            checkpointing.clear_programs()
    yield "\n".join(sources), left_behind(*sources) or "right"


def test_nests_that_share_their_sites() -> None:
    """One decorated function and one `with` statement for all of them."""
    wrong = [
        f"seed {seed}: {said}\n{source}"
        for seed in SEEDS[:: 1 if DEEP else 10]
        for source, said in shared(seed)
        if said not in FINE
    ]
    assert not wrong, f"{len(wrong)} runs are wrong, such as\n" + "\n".join(wrong[:3])


def test_the_generator_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `keep` that hands over something else is noticed."""
    other = lambda x: [t * 1.5 for t in x] if isinstance(x, tuple) else x * 1.5
    monkeypatch.setitem(OPEN, "keep", other)
    found = [source for source, verdict in map(one, range(24)) if verdict not in FINE]
    assert len(found) > 3
    assert all("keep(" in source for source in found)
