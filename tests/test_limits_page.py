"""Limits that are no other test's subject: a section of LIMITS.md each."""

import contextlib
import copy
import functools
import itertools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import (
    DEPRECATED,
    PassThrough,
    at_once,
    integers as whole,
    leaf,
    plain,
    rerun as c,
    scope as s,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import checkpointing
from checkpointing import checkpoint_scope, checkpointed, is_recomputing, keep, opaque

TEXT = (Path(checkpointing.__file__).parent / "LIMITS.md").read_text(encoding="utf-8")
SECTIONS = TEXT.split("\n### ")[1:]


def test_sections_are_few_and_each_has_its_test():
    """A test, or a table of programs, that is there."""
    assert len(SECTIONS) <= 26
    for section in SECTIONS:
        ((file, name),) = re.findall(r"^<!-- (\S+)::(\w+) -->$", section, re.M)
        text = (Path(__file__).parents[1] / file).read_text()
        assert re.search(rf"^(def )?{name}\b", text, re.M), section


def test_another_thread_sees_buffers_as_they_were():
    norm, seen = nn.BatchNorm1d(4), []

    @checkpointed
    def fn(x):
        y = norm(x).sin()
        seen.extend(at_once(norm.num_batches_tracked.item) if is_recomputing() else [])
        return y.exp()

    y, _ = fn(leaf()), fn(leaf())
    y.sum().backward()
    assert seen == [1] and norm.num_batches_tracked == 2


@pytest.mark.parametrize("what", ["rrelu", "batch norm in opaque"])
def test_false_alarms_of_a_check_of_values(what):
    def gradient(**options):
        torch.manual_seed(0)
        x, norm = leaf(), opaque()(nn.BatchNorm1d(4))
        change = norm if what != "rrelu" else lambda y: F.rrelu(y - 0.5, training=True)
        y = s(lambda x: change(x.sin()).exp(), **options)(x)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(gradient(), gradient(enabled=False))
    with pytest.raises(checkpointing.CheckpointError):
        gradient(determinism_check="values")


class Momentum(nn.Module):
    """Updates a parameter in its forward, as momentum encoders do."""

    def __init__(self, wrap, trains, beside):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=trains)
        self.update, self.beside = wrap(self._add), beside

    def _add(self):
        with torch.no_grad():
            (self.weight.data if self.beside else self.weight).add_(1)

    def forward(self, x):
        self.update()
        return (x * (self.weight if self.weight.requires_grad else self.weight.clone())).square()


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("wrap", [plain, checkpointing.forward_only])
def test_parameters_that_a_region_writes(wrap, beside, trains):
    """Refused, but through `.data`: then written again. And what helps."""
    model = Momentum(wrap, trains, beside)
    y = checkpointed(model)(leaf()).sum()
    refused = pytest.raises(checkpointing.ChangedError, match=r"weight|parameter")
    with refused if wrap is plain and not beside else contextlib.nullcontext():
        y.backward()
    assert model.weight.tolist() == [3.0 if wrap is plain and beside else 2.0] * 4


@DEPRECATED
@pytest.mark.parametrize("backend", ["rerun", "reentrant"])
def test_parameters_of_a_module_that_are_written_before_backward(backend):
    """The legacy backend takes them as they are then."""
    model, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4, requires_grad=True)
    nn.init.ones_(model.weight)
    y = checkpointed(lambda x: model(x).square(), backend=backend)(x)
    with torch.no_grad():
        model.weight.mul_(2)
    refused = pytest.raises(checkpointing.ChangedError, match="weight")
    with refused if backend == "rerun" else contextlib.nullcontext():
        y.sum().backward()
        assert model.weight.grad.tolist() == [[16.0] * 4] * 4


def test_copies_that_are_not_deep():
    net = nn.Linear(4, 4)
    net.forward = checkpointed(net.forward)
    assert "forward" in vars(copy.deepcopy(net))
    assert pickle.loads(pickle.dumps(net)).forward.__func__ is nn.Linear.forward
    layer, x = nn.Linear(4, 4), leaf()
    with checkpointing.checkpoint_modules(nn.Sequential(layer), "0"):
        other = copy.copy(layer)
        other._parameters = {"weight": layer.weight * 2, "bias": layer.bias}
        assert not torch.equal(other(x), layer(x))
        assert torch.equal(other.forward(x), layer(x))
    with pytest.raises(KeyError):
        prune.l1_unstructured(checkpointed(layer), "weight", 0.5)


@pytest.mark.parametrize("door", [c, s])
def test_a_view_of_which_a_part_has_just_been_written(door):
    """Autograd makes its node when somebody asks for it, so a rerun makes it earlier."""

    def gradient(door):
        torch.manual_seed(1)
        leaf = torch.randn(3, 6, requires_grad=True)
        base = leaf * 1.0
        view = base.view(-1).view(3, 6)
        view[1] = view[1] * 2
        other, view = door(lambda view, base: (base.view(-1).view(3, 6), view * 1))(view, base)
        y = view[:, other[0].argsort()] * base.amax()
        return torch.autograd.grad(y.sum() + 0.5 * other.sum(), leaf)[0]

    want = gradient(plain)
    assert torch.allclose(gradient(door), want)
    assert door is c or torch.equal(gradient(door), want)


def test_as_strided_in_a_rerun_on_a_tensor_of_which_there_is_a_copy():
    given, x = torch.arange(10.0)[4:], torch.ones(2, requires_grad=True)

    def gradient(door):
        y = door(lambda t, x: (t.as_strided((2,), (1,), 3) * x).sin())(given, x)
        return torch.autograd.grad(y.sum(), x)[0]

    want = gradient(plain)
    assert torch.equal(gradient(c), want)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        assert torch.equal(gradient(s), want)
        assert not torch.equal(gradient(c), want)


def test_as_strided_beyond_a_kept_tensor_whose_neighbours_are_written():
    def f(x):
        rows = (x.detach() * 2).view(2, 4)
        shown = keep(rows[0]).as_strided((8,), (1,), 0) * 1
        rows[1].add_(1)
        return x * shown

    def gradient(door):
        x = torch.ones(8, requires_grad=True)
        return torch.autograd.grad(door(f)(x).sum(), x)[0]

    assert not torch.equal(gradient(s), gradient(plain))


def test_code_that_a_rerun_skips_is_the_first_to_read():
    """The scope then takes its inputs in another order. Their readers alone tell them apart."""
    x, v, w = leaf(), torch.rand(4, 4), torch.rand(4, 4)

    def gradient(run, reader):
        def body(x):
            y = x.sin()
            if not is_recomputing():
                reader(w)
            return (y * v.exp()).cos() * (x * w.exp())

        return torch.autograd.grad(run(body)(x * 1).sum(), x)[0]

    region = lambda body: checkpointed(s(body))
    with pytest.raises(checkpointing.MismatchError):
        gradient(region, torch.sum)
    assert not torch.equal(gradient(region, torch.exp), gradient(lambda body: body, torch.exp))


@pytest.mark.parametrize("function", [checkpointing.keep, checkpointing.forward_only(torch.clone)])
def test_code_that_a_rerun_skips_takes_values_in_order(function):
    def body(x):
        if not is_recomputing():
            function(x * 5)
        y = function(x.sin())
        return (y * x).exp()

    found, want = [torch.autograd.grad(f(x := leaf()).sum(), x)[0] for f in (c(body), body)]
    assert not torch.equal(found, want)


@pytest.mark.parametrize("outer", [c, s])
def test_results_of_a_subclass_come_to_a_rerun_inside_as_plain_tensors(outer):
    class Named(torch.Tensor):
        pass

    kinds, x = [], leaf()

    def inner(named):
        kinds.append(type(named))
        return named.as_subclass(torch.Tensor).exp()

    outer(lambda x: c(inner)(x.sin().as_subclass(Named)).sin())(x).sum().backward()
    assert kinds[0] is Named
    assert kinds[-1] is torch.Tensor


def test_tensors_whose_memory_is_exchanged_in_a_block():
    """Noticed where the reader is recorded, not where a later step alone does it."""

    def gradient(exchanges, **options):
        x, other = torch.ones(3, requires_grad=True), torch.full((3,), 5.0)
        with checkpoint_scope(**options):
            made = x.detach() * 2
            if exchanges:
                made.data = other
            y = (x * made).exp()
        return torch.autograd.grad(y.sum(), x)[0]

    want = gradient(True, enabled=False)
    assert torch.equal(gradient(True), want)
    checkpointing.clear_programs()
    gradient(False)
    assert not torch.equal(gradient(True), want)
    with checkpoint_scope(), pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(torch.ones(3) * 2, torch.ones(3) * 3)
    with PassThrough(), pytest.raises(RuntimeError, match="CausalBias"):
        causal_lower_right(4, 4)
    with checkpoint_scope(), pytest.raises(RuntimeError, match="CausalBias"):
        causal_lower_right(4, 4)

    def written(read, door):
        def body(x):
            a = x * 1.5
            write = door(lambda a, alias: (a.mul_(3) + alias).sin())
            return door(lambda a: (a + 1).exp())(a) + write(a, read(a))

        x = whole()
        return torch.autograd.grad((c(body) if door is s else body)(x).sum(), x)[0]

    for read in (torch.Tensor.detach, lambda a: a.data):
        assert torch.equal(written(read, s), written(read, plain))


@pytest.mark.parametrize("door", [c, s])
def test_a_parameter_whose_memory_is_exchanged_for_a_while(door):
    """A rerun stops before it is put back; a replay reads what has been put back."""
    x, w, other = leaf(), nn.Parameter(torch.rand(4, 4)), torch.rand(4, 4)

    def exchanged(x):
        own, w.data = w.data, other
        y = (x @ w).exp()
        w.data = own
        return y

    (want, there), (have, later) = (
        (torch.autograd.grad(fn(x * 1).sum(), w)[0], w.data_ptr())
        for fn in (exchanged, door(exchanged))
    )
    assert torch.equal(have, want) is (there != later) is (door is c)


def test_a_parameter_that_torchs_own_checkpoint_takes_as_an_argument():
    """With a scope in it, in a region: other gradients. By closure it is right."""
    x, w = leaf(), nn.Parameter(torch.rand(4, 4))
    body = lambda x, w: (x * w).sin().exp() * w
    theirs = functools.partial(checkpoint, use_reentrant=False)
    by_closure = s(lambda x, w: theirs(lambda x: s(body)(x, w), x))
    want, have, others = (
        torch.autograd.grad(fn(x * 2, w).sum(), (x, w))
        for fn in (body, by_closure, s(functools.partial(theirs, s(body))))
    )
    assert all(map(torch.equal, have, want))
    assert not any(map(torch.equal, others, want))


def two_storages(w):
    numbers = np.ones(4, dtype=np.float32)
    p, q = torch.from_numpy(numbers), torch.from_numpy(numbers)
    y = (w * p).sin()
    q.mul_(2)
    return y + (w * p).cos()


def sparse_values(w):
    values = torch.ones(4)
    indices = torch.arange(4).expand(2, 4)
    matrix = torch.sparse_coo_tensor(indices, values, check_invariants=False)
    y = w * torch.mv(matrix, torch.ones(4)).sin()
    values.mul_(2)
    return y


MEAN = torch.zeros(4)
with torch.inference_mode():
    TABLE = torch.ones(4)


def given_other_memory(w):
    weight = nn.Parameter(torch.ones(4), requires_grad=False)
    y = w * weight.clone()
    weight.data = weight.data * 2
    return y


UNSEEN = {
    "other memory": ([s], given_other_memory),
    "data": ([c, s], lambda w: w.sin().exp()),
    "numbered": ([c, s], lambda w: w.sin().exp()),
    "two storages": ([s], two_storages),
    "sparse values": ([s], sparse_values),
    "apply_": ([s], lambda w: (w * torch.zeros(4).add_(1).apply_(lambda n: n + 1)).sin().exp()),
    "hook": ([c], lambda w: w.register_hook(lambda grad: grad * 2) and (w * 1).sin().exp()),
    "statistics": ([s], lambda w: (w + MEAN).sin().exp()),
    "default": ([c], lambda w, table=TABLE: (w * table.clone()).square()),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_torch_shows_to_nobody(name):
    (doors, fn), kept = UNSEEN[name], []

    def step(door):
        x = torch.ones(4, requires_grad=True)
        w = x * 1
        MEAN.zero_()
        with torch.inference_mode():
            TABLE.fill_(1)
        numbered = lambda tensor: kept.append(tensor) or len(kept) - 1
        hooks = torch.autograd.graph.saved_tensors_hooks(numbered, kept.__getitem__)
        with hooks if name == "numbered" else contextlib.nullcontext():
            y = door(fn)(w)
        if name == "data":
            w.data.mul_(2)
        if name == "numbered":
            w.detach().mul_(2)
        if name == "default":
            with torch.inference_mode():
                TABLE.mul_(2)
        if name == "statistics":
            F.batch_norm(w.detach().expand(2, 4) * 3, MEAN, MEAN + 1, training=True)
        y.sum().backward()
        return x.grad.tolist()

    want = step(plain)
    assert want not in map(step, doors)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # of torch, for forward mode
def test_derivatives_that_torch_computes_otherwise_in_a_mode():
    """By a backward inside a block; equal but for rounding, which depends on the machine."""
    x = torch.rand(16, 16, dtype=torch.float64).requires_grad_()
    formulas = [lambda x: x.prod(0), lambda x: x.cumprod(0), torch.det]
    formulas += [lambda x: x.masked_fill(x > 0.5, x.sum())]

    def body(formula):
        y = formula(x) * torch.linspace(1, 2, 16, dtype=x.dtype).exp()
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    def by_forward_mode(door):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.cos())
            y = door(lambda x: F.layer_norm(x, (16,)))(dual)
            tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
        return torch.autograd.grad(tangent.square().sum(), x)[0]

    pairs = [(body(formula), s(body)(formula)) for formula in formulas]
    pairs += [(by_forward_mode(plain), by_forward_mode(s))]
    for want, have in pairs:
        torch.testing.assert_close(have, want)
    assert not all(itertools.starmap(torch.equal, pairs))


def test_a_loss_that_torch_computes_otherwise_in_a_mode():
    """With other saved tensors, so that a rerun that does not see the mode is refused."""
    x, labels = leaf(16, 1, 4), torch.ones(1, 2).long()
    lengths = torch.tensor([16]), torch.tensor([2])

    def gradient(door):
        loss = door(lambda x: F.ctc_loss(x.log_softmax(-1), labels, *lengths))(x * 1)
        return torch.autograd.grad(loss, x)[0]

    for door in (c, s, lambda fn: c(s(fn))):
        assert torch.equal(gradient(door), gradient(plain))
    with pytest.raises(checkpointing.MismatchError):
        gradient(lambda fn: s(c(fn)))
