"""The limits of replay, one test for each section of LIMITS.md about them, and `opaque()`."""

import threading
from contextlib import nullcontext, suppress

import numpy
import pytest
import torch
from oracle import NO_ROOM, PLANNED, REGIONS, REPLAY, PassThrough, Table, leaves, rerun, scope
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from checkpointing import ChangedError, CheckpointError, auto, checkpoint_scope, keep, opaque

WHERE = pytest.mark.parametrize("door", ("replay", "scope", "planned"), indirect=True)
case = Table(leaves())
pytestmark = NO_ROOM


@pytest.fixture
def door(request):
    return REGIONS[request.param]


_library = torch.library.Library("checkpointing_limits", "FRAGMENT")
_library.define("scaled_like(Tensor x) -> Tensor")
_library.impl("scaled_like", lambda x: x * 2, "CompositeExplicitAutograd")
_library.define("new_scaled(Tensor x) -> Tensor")
_library.impl("new_scaled", lambda x: x * 3, "CompositeExplicitAutograd")
_library.define("add_to(Tensor x, *, Tensor(a!) out) -> ()")
_library.impl("add_to", lambda x, *, out: (out.add_(x), None)[1], "CompositeExplicitAutograd")
_library.define("second_transposed(Tensor y, Tensor(a) x) -> Tensor(a)")
_library.impl("second_transposed", lambda y, x: x.t(), "CompositeExplicitAutograd")


class Kept:
    @case
    def numpy_fills_the_rest(x, y):
        part, larger = torch.empty(4, 6, dtype=torch.float64), y.detach()[:2].exp()
        part[:2].copy_(x.detach()[:2])
        part.numpy()[2:] = 7
        larger.resize_(4, 6).numpy()[2:] = 7
        kept = keep(torch.empty(4, 6, dtype=torch.float64))
        kept.numpy()[:] = 7
        return (x * part.sin()).exp(), (x * larger.sin()).exp(), (x * kept.sin()).exp()

    @case
    def numpy_fills_what_is_copied_within_a_memory(x, y):
        first, last = (torch.empty(4, 6, dtype=torch.float64) for _ in range(2))
        first.numpy()[2:] = 7
        first[:2].copy_(first[2:])
        first[2:].copy_(x.detach()[:2])
        last[1].copy_(x.detach()[1])
        last[2:].copy_(last[:2])
        last[0].copy_(x.detach()[0])
        last.numpy()[2] = 7
        return (x * first.sin()).exp(), (x * last.sin()).exp()

    @case
    def numpy_in_opaque_that_raises(x, y):
        h = x.sin() * y
        n = torch.zeros(4, 6, dtype=torch.float64)
        before = h * (n + 1)
        with suppress(ValueError), opaque():
            n.numpy()[:] = numpy.arange(24.0).reshape(4, 6)
            raise ValueError
        return (h * n).exp(), before * h, n * y

    @case(whole=True, doors=REPLAY)
    def numpy_in_opaque_on_what_is_from_outside(region, x, y):
        n = torch.ones(4, 6, dtype=torch.float64)

        def f(x):
            before = x * (n + 1)
            with opaque():
                n.numpy()[:] = numpy.arange(24.0).reshape(4, 6)
            return before.sin() * (n * y)

        return region(f, x), region(lambda x: region(f, x).exp(), x)

    @case
    def another_thread_in_opaque(x, y):
        n = torch.ones(4, 6, dtype=torch.float64)
        h, views = x * (n * 2) @ y.t(), []
        with opaque():
            thread = threading.Thread(target=lambda: views.extend([n.mul_(3), h.t()]))
            thread.start()
            thread.join()
        return views[1] @ h, h.sin(), (x * n).sin() * y

    @case
    def custom_operators_that_look_like_others(x, y):
        """By names of those that read metadata alone; one views its second argument, one reads what
        it writes."""
        product = x @ y.t()
        with torch.no_grad():
            h = torch.ops.checkpointing_limits.scaled_like(x.sin())
            n = torch.ops.checkpointing_limits.new_scaled(y.sin())
            view = torch.ops.checkpointing_limits.second_transposed(x, product)
            filled = torch.empty(4, 6, dtype=torch.float64)
            filled.numpy()[:] = 7
            torch.ops.checkpointing_limits.add_to(n, out=filled)
        others = (view @ product).sin() * product, (x * filled).sin()
        return (x * h).exp() * (y * n).sin(), *others

    @case
    def operators_and_a_backward_in_opaque(x, y):
        """And in a scope in the block."""
        h, n = x * y, torch.ones(4, 6, dtype=torch.float64)
        with opaque():
            k = F.dropout((h * 2).sin(), 0.5)
            m = torch.rand(4, 6, dtype=torch.float64)
            m.numpy()[0] = 5
            (g,) = torch.autograd.grad(h.sin().sum(), x, create_graph=True)
        with checkpoint_scope():
            z = (x * n).exp()
            with opaque():
                n = n.clone()
                n.numpy()[0] = 9
            z, w = z * n, (z * n).sin() * y
        return k * m * h, F.dropout(k, 0.3), h * m * g.exp(), z, w

    @case
    def written_in_opaque_before_it_is_saved_again(x, y):
        n = torch.ones(4, 6, dtype=torch.float64)
        p = nn.Parameter(y.detach().clone(), requires_grad=False)
        with opaque():
            for tensor in (n, p, n[1:]):
                (x[:1] * tensor[:1]).sum()  # nobody wants its gradient
                tensor.mul_(3)
            h = x * n * p
        return h, x * p


@pytest.mark.parametrize(("program", "name"), case.pairs())
def test_kept(program, name):
    program.check(name)


@pytest.mark.parametrize("policy", [None, [torch.ops.aten.mul.Tensor], auto(budget=16), PLANNED])
def test_what_a_scope_in_torchs_own_checkpoint_writes_is_copied_past_its_hooks(policy):
    """Neither what it keeps nor what it has read makes those run the function again at once."""
    calls = []

    def function(x):
        calls.append(1)
        x, outside = x * 2, torch.full((3,), 2.0)
        with checkpoint_scope(policy=policy):
            kept = (x * outside).sin() * 3
            y = torch.relu_(kept) * x
            return (y + outside.mul_(2)).sin() + y

    x = torch.ones(3, requires_grad=True)
    (want,) = torch.autograd.grad(function(x).sum(), x)
    out = checkpoint(function, x, use_reentrant=False)
    assert len(calls) == 2
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], want)
    assert len(calls) == 3


SAVERS = {
    "an operator": lambda h, w: h.sin() * w,
    "a view": lambda h, w: h[0].sin() * w,
    "a rerun": lambda h, w: rerun(lambda h: (h + 1).exp() * w)(h),
    "the closure of a rerun": lambda h, w: rerun(lambda w: (h + 1).exp() * w)(w),
    "a scope": scope(lambda h, w: (h + 1).exp() * w),
}


@WHERE
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("how", ["argument", "result", "exception"])
def test_what_is_saved_in_opaque_and_written_there_later(saver, how, door):
    def function(x, w):
        with suppress(ValueError), opaque():
            h = x * 2 if how != "result" else (x * 2).exp()
            y = SAVERS[saver](h, w)
            h.mul_(3)
            if how == "exception":
                raise ValueError
        return y

    x, w = torch.rand(4, 6, requires_grad=True), torch.rand(4, 6, requires_grad=True)
    y = door(function, x, w)
    with pytest.raises(ChangedError, match="changed in place"):
        y.sum().backward()
    assert x.grad is None


@WHERE
@pytest.mark.parametrize("write", [lambda p: p.data.mul_(2), lambda p: p.mul_(2)])
def test_a_parameter_that_is_written_after_opaque(write, door):
    def gradients(region):
        w, p = torch.ones(3, requires_grad=True), nn.Parameter(torch.arange(3.0))

        def function(w):
            y = (w + p).sin()
            with opaque():
                pass
            with torch.no_grad():
                write(p)
            return (y * w).sin() + (w * p)

        return torch.autograd.grad(region(function, w).sum(), [w, p])

    for have, want in zip(gradients(door), gradients(REGIONS["plain"]), strict=True):
        assert torch.equal(have, want)


def test_values_around_opaque_are_computed_once():
    """What is read after the block is kept: recompute never crosses it."""
    x = torch.randn(4, 6, requires_grad=True)
    with checkpoint_scope() as scope:
        h = x * 2
        with opaque():
            pass
        y = h.cos()
    y.sum().backward()
    assert scope.stats.ops_replayed == 0
    assert torch.equal(x.grad, -2 * (x.detach() * 2).sin())


@pytest.mark.parametrize("options", [{}, {"policy": PLANNED}], ids=str)
def test_unseen_writes_are_found_by_a_check_of_values(options):
    """The error names the first tensor that differs, the operator that made it, the user's line."""
    x = torch.randn(4, 6, requires_grad=True)
    with checkpoint_scope(determinism_check="values", **options):
        a = torch.zeros(4, 6) + 1
        a.numpy()[2] = 7
        y = (x.sin() * a).exp()
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    text = str(caught.value)
    assert "made by aten.add.Tensor" in text
    assert f"{__file__}:" in text and "x.sin() * a" in text and "opaque()" in text


@torch.library.custom_op("checkpointing_limits::numpy_noise", mutates_args=())
def numpy_noise(x: Tensor) -> Tensor:
    return x + torch.from_numpy(numpy.random.rand(*x.shape))


numpy_noise.register_autograd(lambda ctx, g: g)


def test_custom_operators_that_draw_from_elsewhere():
    """With the generators of Python and NumPy if asked to; else a check of values finds them."""

    def gradient(**options):
        numpy.random.seed(4)
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        with checkpoint_scope(**options):
            y = numpy_noise(x * 2).exp()
        y.sum().backward()
        return x.grad.tolist(), numpy.random.rand()

    assert gradient(preserve_rng_state="all") == gradient(enabled=False)
    with pytest.raises(CheckpointError, match="numpy_noise"):
        gradient(determinism_check="values")


@pytest.mark.parametrize("door", ("replay", "scope", "planned", "rerun"), indirect=True)
@pytest.mark.parametrize("read", [torch.mul, lambda x, w: F.batch_norm(x, torch.zeros(6), w)])
def test_what_has_been_changed_is_named(read, door):
    """By what read it first, by its shape and its dtype; as an argument of a rerun."""
    w = torch.ones(6)
    out = door(lambda x, ws: read(x, ws[0]).sin(), torch.randn(4, 6, requires_grad=True), [w])
    w.add_(1)
    text = r"(an input of aten.mul.Tensor|a tensor that it saved) \(float32 .* \(6,\)\)"
    text = r"args\[1\]\[0\]" if door is REGIONS["rerun"] else text
    with pytest.raises(ChangedError, match=rf"{text} was changed"):
        out.sum().backward()


def decided(x):
    index = (x @ x).detach().argmax(-1, keepdim=True)
    return (x * (index > 1)).exp(), index


HELD = {"a decision": decided, "a kept tensor": lambda x: (keep(k := x.sin().cos()).exp().sin(), k)}


@WHERE
@pytest.mark.parametrize("what", HELD)
def test_what_a_block_holds_and_returns_is_refused_if_it_is_written_after_it(what, door):
    y, held = door(HELD[what], torch.eye(4).requires_grad_())
    with torch.no_grad():
        held.add_(1)
    with pytest.raises(ChangedError, match=rf"{what} .* was changed in place"):
        y.sum().backward()


@WHERE
@pytest.mark.parametrize("numpy", [False, True])
def test_memory_that_changes_under_a_saved_tensor(numpy, door):
    """Backward gets what the operator read."""
    x = torch.ones(3, requires_grad=True)

    def function(x):
        n = torch.full((3,), 2.0)
        y = x * n
        with opaque() if numpy else nullcontext():
            (n.numpy() if numpy else n.data)[:] = 5
        return y

    door(function, x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


@WHERE
@pytest.mark.parametrize("inside", [False, True])
def test_a_mode_that_changes_results_belongs_inside(inside, door):
    """Around the block it is below what is recorded, and not there when that runs again."""
    x = torch.ones(3, requires_grad=True)

    def function(x):
        with Doubles() if inside else nullcontext():
            return x.sin().exp()

    with nullcontext() if inside else Doubles():
        y = door(function, x)
    y.sum().backward()
    without = (x.sin() * (1 + inside)).exp().mul(x.cos()).detach()
    assert torch.equal(x.grad, without) or (door is REGIONS["planned"] and x.grad.isfinite().all())


@WHERE
def test_composite_operators_compute_as_under_any_dispatch_mode(door):
    many, one = torch.randn(4, 3, 3, requires_grad=True), torch.randn(1, 3, 3)
    weight = nn.Parameter(torch.randn(3, 3))

    @torch.inference_mode()
    def linear(many):
        return F.linear(many.detach().transpose(0, 1), weight, one[0, 0])

    values = lambda many: torch.linalg.svdvals(many.detach())
    for function in (lambda many: many @ one, values, linear):
        with PassThrough():
            want = function(many)
        assert torch.equal(door(function, many), want)


@WHERE
def test_operators_that_call_others_inside_run_without_autocast(door):
    """As under any dispatch mode. With arguments of autocast's dtype they do the same."""
    weight, x = torch.randn(4, 4, 4), torch.randn(3, 4)
    product = lambda x, weight: F.bilinear(x, x.sin(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        in_block = door(product, x, weight)
        with PassThrough():
            assert torch.equal(in_block, product(x, weight))
        assert not torch.equal(in_block, product(x, weight))
        x, weight = x.bfloat16(), weight.bfloat16()
        assert torch.equal(door(product, x, weight), product(x, weight))
