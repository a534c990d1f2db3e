"""Small programs that each found a hole, in the language of nests (test_nests.py)."""

import itertools
import textwrap
from functools import partial

import pytest
import torch
from oracle import LETTERS, PLANNED, by_turns
from test_nests import OPEN, PLAIN, called, judge, run, watched  # noqa: F401
from torch.utils.checkpoint import checkpoint

from checkpointing import auto, clear_programs, offload

pytestmark = pytest.mark.filterwarnings("ignore")
_library = torch.library.Library("checkpointing_sites", "FRAGMENT")
_library.define("by_grad_mode(Tensor x) -> Tensor")
_kernel = lambda x: x * (2 + torch.is_grad_enabled())
_library.impl("by_grad_mode", _kernel, "CompositeExplicitAutograd")


def gives_what_it_has_saved(h):
    """A sum whose gradient is the very tensor that it has saved."""
    forward = staticmethod(lambda ctx, h: ctx.save_for_backward(h) or h.sum())
    backward = staticmethod(lambda ctx, grad: ctx.saved_tensors[0])
    functions = {"forward": forward, "backward": backward}
    return type("Gives", (torch.autograd.Function,), functions).apply(h)


SPLITS = [
    lambda h: h.chunk(2),
    lambda h: h.unsafe_chunk(2),
    lambda h: [part.view(2, 3)[1] for part in h.chunk(2)],
    lambda h: h[:6].expand(2, 6).unbind(),  # one row twice
    lambda h: h.unfold(0, 8, 4).unbind(),
    lambda h: [h.unfold(0, 6, 3)[:2], h.unfold(0, 6, 3)[2:3]],
    lambda h: [h.chunk(2)[0].as_strided((8,), (1,), 0), h.chunk(2)[1]],  # beyond the end
]
VIEWS = [
    lambda m: [m[i] for i in range(len(m))],
    lambda m: [*m.unbind()],
    lambda m: [*m],
    lambda m: [*m.chunk(len(m))],
    lambda m: [part.squeeze(0) for part in m.split(1)],
]
FILLS = [
    lambda v, n: v[:n].fill_(n),
    lambda v, n: v.__setitem__(slice(0, n), float(n)),
    lambda v, n: v[..., :n].copy_(torch.full_like(v[..., :n], n)),
    lambda v, n: v.t()[:n].mul_(0.5).add_(n),
    lambda v, n: v.view(-1)[n:].add_(n),
    lambda v, n: v.narrow(-1, 0, 2).mul_(n),
    lambda v, n: v.as_strided((2,), (1,), v.storage_offset() + 1).add_(n),
    lambda v, n: v.index_fill_(-1, torch.tensor([0, 2]), float(n)),
    lambda v, n: v[:2].unsqueeze_(-1).transpose_(0, 1).add_(n),  # reshaped in place
]
NAMES = {
    "by_turns": by_turns,
    "permutations": itertools.permutations,
    "product": itertools.product,
    "clear_programs": clear_programs,
    "gives": gives_what_it_has_saved,
    "splits": SPLITS,
    "views": VIEWS,
    "fills": [*zip(FILLS, FILLS, strict=True), *zip(FILLS, FILLS[1:] + FILLS[:1], strict=True)],
    "budgets": [None, auto(), PLANNED, auto(budget=100), auto(budget=10**6)],
    "plans": [None, auto(), PLANNED, offload(PLANNED, min_bytes=0, inputs=True)],
}
PLAIN = PLAIN | NAMES | {"in_plain_code_a_copy": torch.clone, "doors": [called] * 4}
PLAIN["theirs"] = called
in_plain_code = partial(run, space=PLAIN)
OPEN = OPEN | NAMES | {"in_plain_code_a_copy": lambda t: t}
OPEN["doors"] = [LETTERS[letter] for letter in "sprb"]
OPEN["theirs"] = lambda f: partial(checkpoint, f, use_reentrant=False)


HOLES = {
    "an operator that fails and has written what a block in a rerun reads before and after": """
    def inner(w):
        m = torch.ones(4)
        with scope():
            y = w * (m * 1)
            try:
                m.index_add_(0, torch.tensor([0, 1, 77]), torch.ones(3))
            except IndexError:
                pass
            return y + w * m
    see(grad([rerun(inner)(w)], [w]))""",
    "what follows a backward inside is recorded where it runs": """
    x = a.sin()
    with scope():
        with scope():
            u = x.exp()
            own_backward(x)
        with opaque():  # which asks for copies
            a.sin()
        def inner():
            with scope():
                once_new(a)
                return x.tanh()
        y = rerun(inner)()
    see(grad([y, u], [a]))""",
    "what a backward inside brings back by itself stays what it is": """
    v, was = a.sin(), c.clone()
    def inner(p):
        with torch.enable_grad():
            assert torch.equal(c, was)
            own_backward(c)
            grad([v * v], [v], create_graph=True)
        with opaque():
            return a.sin()
    inner = rerun(inner)
    def outer(p):
        for _ in range(2):
            with scope():
                y = inner(a)
        return y * 1
    see(grad([rerun(outer)(a)], [a]))""",
    "what one plan keeps may be an input of the next one, after a backward inside": """
    for is_other in (False, True, False, False):
        with scope(policy=auto(peak=1)):
            if is_other:
                y = lin(a)
                lin(a + 1)
                y = a + y
            else:
                x = a * (a @ b)
                y = x.cos()
                z = a * y
                t = z.detach().requires_grad_()
                (g,) = grad([t * a], [t], create_graph=True)
                y = a + sum([y * z + a, g * x]).tanh()
        see(grad([y.square()], [a]))""",
    "what a scope in a rerun has read is what it was when the scope writes it, seen or unseen": """
    for around in (torch.enable_grad, opaque):
        def f(p):
            h = p.detach() * 2
            with scope():
                y = (h + 1).sin() * p
                with around():
                    h.mul_(3)
            return (y * h).sin()
        see(grad([rerun(f)(a * 1)], [a]))""",
    "a view made and written without grad, of which torch does not tell the `grad_fn`, is kept": """
    for policy in (save_ops(aten.copy_.default), save_ops(aten.copy_.default) | auto()):
        for _ in range(3):
            with scope(policy):
                y = a * 1
                with torch.no_grad():
                    y[1:].copy_(torch.zeros(3, 4))
                    for row in y.unbind(0):
                        row.copy_(torch.ones(4))
                    torch.add(torch.ones(4, 4), 1, out=y)
                y = y.view_as(y).square()
            first = grad([y], [a], create_graph=True)
            see([first, grad([first[0].sin()], [a])])""",
    "statistics that a region inside reads are those before a normalisation in it updates them": """
    def read(x):
        y = bn((x.sin() * bn.running_mean.add(1)).sin() * bn.running_var.mul(1))
        return y * bn.running_mean.exp()
    some = {"enabled": False}, {}, {"policy": auto()}, {"determinism_check": "values"}
    for outer, inner, _ in product(some, some, (1, 2)):
        with scope(**outer):
            with scope(**inner):
                y = read(a)
            z = replay(read, determinism_check="values")(a)
        see(grad([y.exp(), z.exp()], [a]))""",
    "a function in `opaque` may write what it keeps: the scope around does not see the write": """
    some = {"enabled": False}, {}, {"policy": auto()}, {"determinism_check": "values"}
    for outer, mark in product(some, (keep, lambda t: t)):
        f = replay(lambda a: mark(a * 1.5).relu_(), policy=save_ops(aten.mul.Tensor))
        with scope(**outer):
            with opaque():
                y = f(a)
        see(grad([y], [a]))""",
    "saved before `opaque` writes it, also where a policy holds on to it while there is room": """
    for policy, _ in product(budgets, (1, 2)):
        x, n = torch.rand(12, requires_grad=True), torch.full((12,), 2.0)
        with scope(policy):
            y = x * in_plain_code_a_copy(n)
            with opaque():
                n.mul_(3)
            y = (y * n).sin()
        see(grad([y], [x]))""",
    # (What a plan keeps may come back on the memory of the block, as in plain code.)
    "brought back by a backward inside on its own memory, when what it had first is written": """
    for policy, create_graph, _ in product(budgets, (False, True), (1, 2)):
        x = torch.rand(12, requires_grad=True)
        with scope(policy):
            h = x.sin()
            again = h.detach().requires_grad_()
            (g,) = grad([gives(again)], [again], create_graph=create_graph)
            g = g.detach().clone() if policy in budgets[2:] else in_plain_code_a_copy(g.detach())
            h.mul_(3)
            y = x * g * (h + 1)
        see(grad([y], [x]))""",
    "a part that is delivered before another one is written": """
    for policy, split, _ in product(budgets, splits, (1, 2)):
        x = torch.rand(12, requires_grad=True)
        with scope(policy):
            h = x.sin()
            first, second = split(h)
            y = in_plain_code_a_copy(first).cos()
            with torch.no_grad():
                second.mul_(3)
            y = y.sum() + (h * x).sum()
        see(grad([y], [x]))""",
    "a state is copied before it is written, in whatever scope, or in a block inside": """
    writes = [
        lambda state: state.add_(1),
        lambda state: torch._foreach_add_([state], 1.0),
        lambda state: torch._foreach_lerp_([state], [state * 2], 0.5),
    ]
    none = torch.enable_grad
    scopes = (none, scope), (none, lambda: scope(auto())), (save_on_cpu, scope), (scope, scope)
    for i, j, is_inner, is_large in by_turns(by_turns(product(range(3), range(4)), (0, 1)), (0, 1)):
        write, two, size = writes[i], scopes[j], 4096 if is_large else 16
        inner = scope if is_inner else none
        clear_programs()
        for turns in (2, 4, 3, 5, 2, 6, 4, 7, 3, 5, 6, 2):
            x, state = torch.linspace(0, 1, size).requires_grad_(), torch.ones(size)
            with two[0](), two[1]():
                y = x
                for turn in range(turns):
                    for _ in range(4):
                        y = (y * state.clone()).square().cos()
                    with inner():
                        y = y * 0.5
                        if turn or size == 16:
                            write(state)
                    for _ in range(3):
                        y = y.sin().cos()
            see([grad([y], [x]), state])""",
    "views that are made first and written through views of them": """
    for i, j, rows, some in by_turns(by_turns(product(range(4), range(5)), (2, 3)), (0, 1)):
        door, parts = doors[i], views[j]
        clear_programs()
        for fill, other in fills[some::2]:
            def f(w):
                out = torch.zeros(rows, 3)
                for i, part in enumerate(parts(out)):
                    (fill if i % 2 else other)(part, 1 + i % 2)
                return (w * out).sin() * out
            f = door(f)
            for _ in range(2):
                w = torch.arange(3.0 * rows).reshape(rows, 3).requires_grad_()
                see(grad([f(w)], [w]))""",
    "a view that moves over its memory lies where each run has it: all of them share programs": """
    def moves(w, offset):
        m = w.detach() * 1
        p, q = m[:4], m[4:]
        q.as_strided_((2,), (1,), offset)
        q.mul_(3)
        return (w[:4] * p).sin() * p
    def past(w, _):
        m = w.detach() * 1
        p, q = m[:4], m[4:]
        q.mul_(3)
        return (w * p.as_strided((8,), (1,), 0)).sin()
    for door, offsets in product(doors, ((4, 4, 2, 2), (0, 4), (6, 0, 6))):
        clear_programs()
        for f, offset in product((door(moves), door(past)), offsets):
            w = torch.arange(8.0).requires_grad_()
            see(grad([f(w, offset)], [w]))""",
    "results that a block returns are kept only where autograd has them: they may be written": """
    for _ in range(3):
        y, results = torch.linspace(-4, 4, 2048 * N).view(-1, N), []
        with scope(policy=auto()):
            for _ in range(6):
                results.append(y @ b + 1.0)
                y = torch.relu(results[-1] * 0.5)
        with torch.no_grad():
            for state in results:
                state.mul_(2)
        see(grad([y], [b]))""",
    "checks that change at one site: what one run compares another may not have noted": """
    for check in ("metadata", "values", "none", "metadata", "values"):
        with scope(determinism_check=check):
            y = bn(a.sin()).exp()
        see(grad([y], [a]))""",
    "what `opaque` in a scope in torch's own checkpoint copies goes through torch's hooks": """
    def f(x):
        x = x * 2
        for _ in range(2):
            with scope():
                y = x.sin().exp()
                with opaque():
                    z = y.cos()
        return y + z
    see(grad([theirs(f)(a)], [a]))""",
    "what is saved in `opaque` and written after it, or in a block inside": """
    for policy, is_inside in product((None, auto(peak=1)), (False, True)):
        def f(a):
            with opaque():
                h = a * 2
                y = rerun(lambda h: (h + 1).exp())(h)
                if is_inside:
                    with opaque():
                        h.mul_(3)
            return y * h.mul_(3)
        with scope(policy):
            y = f(a)
        see([grad([y], [a]), grad([replay(f)(a)], [a])])""",
    "results leave a chain at several places, and are asked for in any order, some twice": """
    orders = (0, 1, 2, 3), (2, 0, 3, 1), (1, 1, 3, 3)
    for budget, order in product((128, 512), orders):
        with scope(policy=auto(budget=budget)):
            y, outs = a * 1, []
            for i in range(20):
                y = torch.dropout(y.tanh(), 0.05, True).sin()
                if i % 5 == 4:
                    outs.append(y.exp().sum())
        see([grad([outs[i]], [a]) for i in order])
        see(grad(outs, [a]))""",
    "parts of a window in a small budget, after which backward wants what is kept by hand": """
    w, x = torch.arange(8.0, requires_grad=True), torch.ones(8, requires_grad=True)
    def run():
        b = x * 1
        c = b.clone()
        t = (c * c.sum() * w[0]).sum() + (w * 0).sum()
        h = x * 1 + t.detach() * 0 + b.detach().sum() * 0 + w * 2
        b = h * 1
        p, q = b.tensor_split(2)
        g = b[3:11:2].expand(2, -1)[0]
        u = (w[:2] * p[2:5]).sum()
        for part in b[4:7], p[1:5:2]:
            kept = keep(part)
            u = u + (kept.detach().clone() * w[0]).sum()
        t = t + u + (w * 0).sum()
        h = h * 1 + u.detach() * 0 + g.detach().sum() * 0 + w * 2
        return t + (h * h).sum() * 0.5, [b, p, q, g]
    for budget, _ in product((64, 128, 10**6), (1, 2)):
        with scope(policy=auto(budget=budget)):
            y, others = run()
        see(grad([y], [w, x]))""",
}


@pytest.mark.parametrize("name", HOLES)
def test_programs_that_each_found_a_hole_are_right(name):
    head = "N = 4\ndef program(a, b, c, w, bn, lin, drop):"
    assert judge(head + HOLES[name], OPEN, in_plain_code) == "right"


SITES = {  # kinds of runs that go through one site, and what each does
    "one tensor twice or two, of which none needs a gradient": """
    "one", "two", "one that is known"
    m, n = torch.rand(4), torch.rand(4)
    z = {"one": m * m, "two": m * n, "one that is known": (x * 2) * m}[kind]
    y = (w * z).sin() * z""",
    "views of which a region inside meets two in its first write, and writes the third itself": """
    None
    def inner(first, whole, last, w):
        last.add_(1)
        first.mul_(2)
        return ((whole + 1) * w).sin()
    m = w.detach() * 1.5
    y = rerun(inner)(m[:2], m, m[3:], w * 1) * m""",
    **{
        f"numbers by their bits: {kinds}": f"""
    {kinds}
    y = w * torch.ones(4).copysign(torch.full((4,), kind)).sin()"""
        for kinds in ("0.0, -0.0", "float('nan'), -float('nan')", "1, 1.0, -1.0")
    },
    "memory that two tensors share or not: then a write to one is none to the other": """
    "apart", "shared"
    m, n = x[:3], x[1:] if kind == "shared" else x[1:].clone()
    y = w[1:] * (m * n)
    m.mul_(3)
    y = y * (n * 1)""",
    "kernels that look at the grad mode, as attention does": """
    True, False
    with torch.set_grad_enabled(kind):
        h = torch.ops.checkpointing_sites.by_grad_mode(x * 2)
    y = w * h""",
    "an operator that fails, and meets first what it was given second": """
    None
    m, other = x.view(2, 2), torch.ones(3, 3)
    try:
        torch.mm(m, other)
    except RuntimeError:
        pass
    y = other.sum() + w.view(2, 2) * (m * 1)
    x.mul_(3)
    y = (y * (m * 1)).sin()""",
    "a foreach operator that fails at the second tensor and has written the first one": """
    None
    m = (w * 1.0).detach()
    try:
        with torch.no_grad():
            torch._foreach_mul_([m, torch.zeros(3).expand(2, 3)], 3.0)
    except RuntimeError:
        pass
    y = (w * m).sin() * m""",
    "a view or a copy, by its strides, where the operator does not come in parts": """
    False, True
    with torch.inference_mode():
        m = (x.view(2, 2).t() if kind else x.view(2, 2)) * 1
        m.reshape(4).add_(1)
    y = w.view(2, 2) * m.clone()""",
    "an argument that is a tensor, or none": """
    False, True
    bias = lin.bias if kind else None
    y = torch.nn.functional.conv1d(x.view(1, 1, 4), w.view(4, 1, 1), bias)
    y = y.sin() * y""",
    "nested tensors in another shape, where the operator does not come in parts": """
    None
    with torch.inference_mode():
        n = torch.nested.nested_tensor([torch.ones(2, 4), x[None]])
        n = n.reshape(2, -1, 2, 2).sin().reshape(2, -1, 4)
        m = torch.nested.to_padded_tensor(n, 0.0)[1, 0]
    y = w * m.clone()""",
    "a memory that is filled in many parts": """
    None
    m = torch.empty(40, 4)
    for n, row in enumerate(m):
        row.copy_(x * n)
    y = (w * m).sin() * m""",
    "numbers with an imaginary part": """
    2j, complex(-0.0, 2.0), complex(0.0, 2.0), 3 + 1j
    y = torch.view_as_real((w.sin() * kind).exp()).sin()""",
    "an alias of one tensor or of another, made as by `copy.copy`": """
    0, 1
    made = [w.detach() * 2, w.detach() * 3]
    alias = torch.empty(0).set_(made[kind].untyped_storage(), 1, (3,), (1,))
    y = (w * made[0].clone()).sin() * (w * made[1].clone()).cos()
    alias.mul_(2)
    y = y + (w * made[0].clone()).sin() * (w * made[1].clone()).cos()""",
    "a parameter around one tensor that the block has made, or another, or a copy": """
    0, 1, 2
    made = [w.detach() * 2, w.detach() * 3]
    parameter = torch.nn.Parameter([*made, made[0].clone()][kind])
    y = (w * made[0].clone()).sin() * (w * made[1].clone()).cos() * parameter.sum()
    with torch.no_grad():
        parameter.mul_(2)
    y = y + (w * made[0].clone()).sin() * (w * made[1].clone()).cos()""",
    "a tensor that is set to other memory after a region inside has taken it": """
    None
    made, other = w.detach() * 2, w.detach() * 3
    y = rerun(lambda w, made: w * (made + 1))(w * 1, made)
    with torch.no_grad():
        made.set_(other)
    y = (y * made).sin()""",
    "a kept value of which a copy is kept, with another offset": """
    None
    h = keep(torch.cat([w, w])[2:8]).as_strided((2,), (1,), 3)
    y = (h * h).sin() * h""",
}


@pytest.mark.parametrize("name", SITES)
def test_each_run_through_one_site_is_right(name):
    """Recorded or followed, whatever has gone through it before."""
    kinds, _, body = SITES[name].strip().partition("\n")
    source = f"""N = 4
def program(a, b, c, w, bn, lin, drop):
    for policy, order in product(plans, permutations([{kinds}])):
        clear_programs()
        for kind in order * 2:
            w, x = torch.rand(4, requires_grad=True), torch.rand(4)
            with scope(policy):
{textwrap.indent(body, " " * 12)}
            see(grad([y], [w]))"""
    assert judge(source, OPEN, in_plain_code) == "right"
