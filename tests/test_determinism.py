"""A recompute that makes other tensors is an error that says what, where, and both sides."""

import itertools
import re

import pytest
import torch
import torch.utils.checkpoint
from oracle import EACH_WAY, leaf, replay, rerun, through
from torch import nn
from torch._subclasses import FakeTensorMode

from checkpointing import CheckpointError, MismatchError, auto, checkpoint_scope, checkpointed

LINE = re.escape(__file__)


def two(first, later):
    """Something that differs between the first run and every later one."""
    return itertools.chain([first], itertools.repeat(later)).__next__


def failed(fn, *args, **options):
    """The message of the error that backward of a region raises."""
    y = checkpointed(fn, name="mine", **options)(*args)
    with pytest.raises(MismatchError) as caught:
        y.sum().abs().backward()
    assert str(caught.value).startswith(f"region 'mine' (entered at {__file__}:"), str(caught.value)
    return str(caught.value)


def repeated(often):
    return lambda x: through([lambda x: x.sin().exp()] * often(), x)


LATE = {"early_stop": False}
NUMBERS = {  # how often two runs repeat their operators, options, and what is said
    "fewer": (two(3, 1), {}, r"(?s)different number .*forward: 6.*during recomputation: 2"),
    "fewer, asked for": (two(3, 1), {}, r"ExpBackward0 asked for slot 5(?s:.*)keep\(\)"),
    "none": (two(1, 0), {}, "during recomputation: 0"),
    "none, unchecked": (two(1, 0), {"determinism_check": "none"}, "different number"),
    "more": (two(1, 2), LATE, rf"(?s)more tensors .*forward: 2.*{LINE}:\d+: [^\n]*x\.sin\(\)"),
}


@pytest.mark.parametrize("which", NUMBERS)
def test_another_number_of_tensors(which):
    often, options, said = NUMBERS[which]
    assert re.search(said, failed(repeated(often), leaf(3), **options))


def test_what_is_no_error():
    """More tensors where the rerun stops early; other dtypes and numbers where nothing checks."""
    checkpointed(repeated(two(1, 2)))(leaf(3)).sum().backward()
    which = two(torch.float32, torch.float64)
    checkpointed(lambda x: x.to(which()).sin(), determinism_check="none")(leaf(3)).sum().backward()


METADATA = {  # what is done to the tensor in forward and in the recompute, and how that is told
    "shape": (lambda x: x[:3], lambda x: x[:2], r"\[3\]", r"\[2\]"),
    "dtype": (torch.Tensor.float, torch.Tensor.double, "float32", "float64"),
    "device": (torch.clone, lambda x: x.to("meta"), r"type='cpu'", r"type='meta'"),
    "rank": (torch.clone, lambda x: x[None], r"Size\(\[3\]\)", r"Size\(\[1, 3\]\)"),
}


@pytest.mark.parametrize("what", METADATA)
@pytest.mark.parametrize("early_stop", [True, False])
def test_other_metadata(what, early_stop):
    *changes, saved, recomputed = METADATA[what]
    change, tanh = two(*changes), nn.Sequential(nn.Identity(), nn.Tanh())
    text = failed(lambda x: tanh(change()(x.exp()) * 1), leaf(3), early_stop=early_stop)
    for words in ("different metadata", "position 1", "slot 1", "made by", "TanhBackward0 asked"):
        assert words in text
    assert re.search(rf"saved metadata: .*{saved}", text)
    assert re.search(rf"recomputed metadata: .*{recomputed}", text)
    assert re.search(rf"saved in the recompute at {LINE}:\d+: .*tanh\(change", text)
    assert text.count("position") == 1
    tip = " ".join(torch.utils.checkpoint._debug_tip_msg.split()).partition("`debug=True`")[0]
    assert tip in text and "mark_dynamic" in text  # as torch says
    assert "opaque" not in text
    assert len(text) < 4000


def test_what_is_read_outside_of_backward_is_checked_too():
    functions = iter([torch.exp, torch.clone])
    y = checkpointed(lambda x: next(functions)(x.sin()))(leaf())
    with pytest.raises(MismatchError, match="a read outside of backward"):
        y.grad_fn._saved_result  # noqa: B018


def test_a_failed_check_can_be_tried_again():
    table, x = {"dtype": torch.float32}, leaf(3)
    inner = checkpointed(lambda x: x.to(table["dtype"]).sin().exp(), name="inner")
    y = checkpointed(lambda x: inner(x.exp()).cos(), name="outer")(x).sum()
    table["dtype"] = torch.float64
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"region '(inner|outer)'"):
            y.backward(retain_graph=True)
    assert x.grad is None
    table["dtype"] = torch.float32
    y.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().exp().cos().sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_values_finds_another_number(dtype):
    """One element of a thousand. The error names the tensor, its operators and both lines."""
    x, zeros = torch.ones(1000, dtype=dtype, requires_grad=True), torch.zeros(1000, dtype=dtype)
    other = zeros.index_fill(0, torch.tensor(500), 0.05)

    def fn(x, offset):
        y = x.exp()
        return (y + offset()).sin() * y

    checkpointed(fn)(x, two(zeros, other)).sum().abs().backward()
    text = failed(fn, x, two(zeros, other), determinism_check="values")
    assert re.findall(r"position (\d+)", text) == ["1"]  # exp saves position 0
    assert "slot 1, made by AddBackward0" in text
    code = re.escape("return (y + offset()).sin() * y")
    for which in ("forward", "recompute"):
        assert re.search(rf"saved in the {which} at {LINE}:\d+: {code}", text)
    assert re.search(r"So do 1 more, in slots \[\d\]", text)


TENSORS = {
    "2d": lambda: torch.rand(5, 4, requires_grad=True),
    "transposed": lambda: torch.rand(4, 5).t().requires_grad_(),
    "empty": lambda: torch.rand(0, 4, requires_grad=True),
    "scalar": lambda: torch.rand((), requires_grad=True),
    "odd numbers": lambda: torch.tensor([float("nan"), -0.0, float("inf")], requires_grad=True),
    "conjugate": lambda: torch.rand(3, dtype=torch.complex64).conj().requires_grad_(),
    "imaginary": lambda: torch.rand(5, 4, dtype=torch.complex128, requires_grad=True).imag,
    "half": lambda: torch.rand(3, dtype=torch.bfloat16, requires_grad=True),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_values_finds_nothing_where_nothing_differs(make, backend):
    def fn(x):
        mask = x.abs() > 0.5  # a bool tensor is saved, too
        index = torch.arange(x.numel()).view(x.shape)
        return torch.where(mask, x.sin(), x).flatten()[index].exp() * x

    checkpointed(fn, backend=backend, determinism_check="values")(make()).sum().abs().backward()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_values_of_sparse_tensors_are_compared(backend):
    rows = torch.eye(3).to_sparse_csr()
    fn = lambda x: (rows @ x.sin()).exp()
    checkpointed(fn, backend=backend, determinism_check="values")(leaf(3, 3)).sum().backward()


@pytest.mark.parametrize("around", [FakeTensorMode, lambda: torch.device("meta")])
@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_values_that_do_not_exist_are_not_compared(around, backend):
    with around():
        x = torch.rand(3, requires_grad=True)
        fn = lambda x: x.sin().exp()
        checkpointed(fn, backend=backend, determinism_check="values")(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize(
    ("first", "later", "use"),
    [
        ([1.0, 2.0], [2.0, 1.0], lambda x, t: (x * t).sin()),
        ([0.0, 1.0], [-0.0, 1.0], lambda x, t: (x * t).sin()),
        ([1, 1, 1, 0, 0], [0, 0, 0, 0, 1], lambda x, t: x.index_select(0, t)),
        ([True, False, False], [False, False, True], lambda x, t: torch.where(t, x, 0.0)),
    ],
)
def test_values_tells_small_numbers_apart(first, later, use):
    """The checksum is of bits in their order."""
    which = two(torch.tensor(first), torch.tensor(later))
    text = failed(lambda x: use(x, which()), leaf(len(first)), determinism_check="values")
    assert "position 0" in text


def test_a_function_as_check():
    """`==` of its results decides, which the error shows."""
    which, x = two(1.0, 1.01), torch.ones(3, requires_grad=True)
    rounded = lambda tensor: round(float(tensor.sum()), 0)
    checkpointed(lambda x: (x * which()).sin().exp(), determinism_check=rounded)(x).sum().backward()
    which = two(1.0, 2.0)
    text = failed(lambda x: (x * which()).sin(), x, determinism_check=rounded)
    assert re.search(r"(?s)saved metadata: .*3.*recomputed metadata: .*6", text)


@pytest.mark.parametrize("backend", ["rerun", "replay"])
@pytest.mark.parametrize(
    "check", [lambda t: (t * 2).cos().sum(), lambda t: t.clone(), lambda t: (t.shape, t.dtype)]
)
def test_a_check_may_compute_and_return_tensors(backend, check):
    """They are compared by value. What it computes is part of no region and wants no gradient."""
    x, modes = torch.ones(3, requires_grad=True), []

    def noted(tensor):
        modes.append(tensor.requires_grad or torch.is_grad_enabled())
        return check(tensor)

    y = checkpointed(lambda x: x.sin().exp(), backend=backend, determinism_check=noted)(x).sum()
    (have,) = torch.autograd.grad(y, x, create_graph=True)
    assert torch.equal(have, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert modes == [False] * 4


@EACH_WAY
@pytest.mark.parametrize("debug", [True, False])
def test_debug_logs_operators_of_both_runs(door, debug):
    """In order, with the lines of user code that led to them; without it nothing of the kind."""
    source = torch.ones(3)
    fn = lambda x, source: (x * source).sin().exp()
    y = door(fn, debug=debug)(leaf(3), source)
    source.add_(1)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    _, *logs = re.split("Operations executed during ", str(caught.value))
    runs = ["the original forward", "recomputation"] if debug else []
    assert [log.split(":")[0] for log in logs] == runs
    assert debug or str(caught.value).count("\n") < 8
    if debug:
        operators = re.findall(r"\d+: .*aten\.(\w+)\.", logs[0])
        assert [name for name in operators if name != "detach"] == ["mul", "sin", "exp"]
        assert f"{__file__}:{fn.__code__.co_firstlineno}" in logs[0]


def test_debug_leaves_all_names_of_arguments_to_the_function():
    """Layers with cross-attention have an argument `context`."""
    x = leaf(3)
    fn = lambda x, context, function: (x * context * function).sin()
    checkpointed(fn, debug=True)(x, context=2, function=3).sum().backward()
    assert torch.equal(x.grad, 6 * (x.detach() * 6).cos())


@pytest.mark.parametrize("use", [torch.exp, lambda h: h[1:].sin(), torch.sin])
def test_an_operator_that_makes_another_size_in_replay_is_an_error(use):
    """Whoever reads the result in replay, or what of it was saved."""
    sizes = itertools.count(4)
    made = lambda x: x.new_ones(next(sizes)) * x.sum()
    with torch.library._scoped_library("checkpointing_tests", "FRAGMENT") as library:
        library.define("growing(Tensor x) -> Tensor")
        library.impl("growing", made, "CompositeExplicitAutograd")
        w = torch.ones((), requires_grad=True)
        with checkpoint_scope(name="grown"):
            y = use(torch.ops.checkpointing_tests.growing(torch.rand(3) * 2) * w) * w
        said = r"grown.*growing.* returned shapes \[4\] .* \[5\] in the recompute"
        with pytest.raises(CheckpointError, match=said):
            y.sum().backward()


def test_the_first_step_of_auto_compares_also_what_its_plan_keeps():
    """The caller still has what each layer returns, so that nothing need make it again."""
    numbers, layers = itertools.count(1), [nn.Sequential(nn.Linear(64, 64), nn.Tanh())] * 8
    with torch.library._scoped_library("checkpointing_tests", "FRAGMENT") as library:
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", lambda x: x * next(numbers), "CompositeExplicitAutograd")
        results = [leaf(256, 64)]
        with checkpoint_scope(auto(), determinism_check="values"):
            for layer in layers:
                other = torch.ops.checkpointing_tests.scaled(torch.rand(256, 64))
                results.append(layer(results[-1]) + other)
        with pytest.raises(MismatchError, match=r"TanhBackward0|AddmmBackward0"):
            results[-1].sum().backward()


def test_jagged_tensors_made_inside_have_other_ragged_sizes_each_time():
    """As under torch's own checkpoint."""

    def ragged(x):
        offsets = torch.tensor([0, 1, 4])
        return torch.nested.nested_tensor_from_jagged(x.sin(), offsets).sin().values()

    x = torch.ones(4, 3, requires_grad=True)
    with pytest.raises(MismatchError, match="metadata"):
        rerun(ragged)(x).sum().backward()
    replay(ragged)(x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])
