"""A recompute that makes other tensors is an error that says what, where, and both sides."""

import re

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from checkpointing import CheckpointError, MismatchError, checkpoint_scope, checkpointed, keep
from checkpointing._check import values_of as fingerprint

LINE = re.escape(__file__)


class Two:
    """Something that differs between the first run and every later one."""

    def __init__(self, first, later):
        self.first, self.later, self.runs = first, later, 0

    def __call__(self):
        self.runs += 1
        return self.first if self.runs == 1 else self.later


def leaf(*shape):
    """A tensor that wants a gradient."""
    return torch.rand(*shape or (3,)).requires_grad_()


def failed(fn, *args, error=MismatchError, **options):
    """The message of the error that backward of a region raises."""
    y = checkpointed(fn, **{"name": "mine", **options})(*args)
    with pytest.raises(error) as caught:
        y.sum().backward()
    assert str(caught.value).startswith(f"region 'mine' (entered at {__file__}:"), str(caught.value)
    return str(caught.value)


# ---- number


def test_fewer_tensors():
    """The message has both numbers, the operator that asked, the slot, and a way out."""
    often = Two(3, 1)

    def fn(x):
        for _ in range(often()):
            x = x.sin().exp()
        return x

    text = failed(fn, leaf())
    assert "different number of tensors" in text
    assert "during forward: 6" in text
    assert "during recomputation: 2" in text
    assert re.search(r"ExpBackward0 asked for slot 5", text)
    assert "keep()" in text


def test_fewer_tensors_in_the_middle():
    """A tensor left out early shows as a shift of shapes or as a missing last one, never as wrong gradients."""
    skip = Two(False, True)

    def fn(x):
        y = x.sin()
        if not skip():
            y = y.exp()
        return y.cos()

    assert "different number of tensors" in failed(fn, leaf())


def test_no_tensors_at_all():
    """The recompute does nothing."""
    skip = Two(False, True)
    assert "during recomputation: 0" in failed(lambda x: x if skip() else x.sin().exp(), leaf())


def test_more_tensors_with_early_stop_are_not_looked_for():
    """The rerun stops at the last tensor that is needed; what would have come after it is nobody's concern."""
    often = Two(1, 2)

    def fn(x):
        for _ in range(often()):
            x = x.sin().exp()
        return x

    x = leaf()
    y = checkpointed(fn)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach().sin().exp())


def test_more_tensors_without_early_stop():
    """The message has the number of the forward, and the line that saved one too many."""
    often = Two(1, 2)

    def fn(x):
        for _ in range(often()):
            x = x.sin().exp()
        return x

    text = failed(fn, leaf(), early_stop=False)
    assert "more tensors during recomputation" in text
    assert "during forward: 2" in text
    assert re.search(rf"{LINE}:\d+: .*x\.sin\(\)", text)


# ---- metadata

METADATA = {
    "shape": (lambda x, which: x[: 3 if which == "first" else 2], r"\[3\]", r"\[2\]"),
    "dtype": (lambda x, which: x.to(torch.float32 if which == "first" else torch.float64), "float32", "float64"),
    "device": (lambda x, which: x.to("cpu" if which == "first" else "meta"), r"type='cpu'", r"type='meta'"),
    "rank": (lambda x, which: x if which == "first" else x[None], r"Size\(\[3\]\)", r"Size\(\[1, 3\]\)"),
}


@pytest.mark.parametrize("what", METADATA)
@pytest.mark.parametrize("early_stop", [True, False])
def test_other_metadata(what, early_stop):
    """The message has region, position, the operator that asked, both sides, and the line of the recompute."""
    change, saved, recomputed = METADATA[what]
    which = Two("first", "later")

    def fn(x):
        x = change(x.exp(), which())
        return x.cos()

    text = failed(fn, leaf(3), early_stop=early_stop)
    assert "different metadata" in text
    assert "position 1" in text
    assert "slot 1" in text
    assert "CosBackward0" in text
    assert re.search(rf"saved metadata: .*{saved}", text)
    assert re.search(rf"recomputed metadata: .*{recomputed}", text)
    assert re.search(rf"{LINE}:\d+: .*x\.cos\(\)", text)
    assert text.count("position") == 1


def test_every_tensor_that_differs_is_listed():
    """In order of their positions."""
    which = Two(3, 2)
    text = failed(lambda x: x[: which()].exp().sin().exp(), leaf(3))
    assert re.findall(r"position (\d+)", text) == ["0", "1", "2"]


def test_the_line_is_the_users():
    """Not one of torch's: a module's is the line of its call in user code."""
    width = Two(3, 2)
    model = nn.Sequential(nn.Tanh(), nn.Tanh())

    def fn(x):
        x = x[: width()] * 1
        return model(x)

    text = failed(fn, leaf(3))
    assert re.search(rf"{LINE}:\d+: .*model\(x\)", text)


@pytest.mark.parametrize("error", [CheckpointError, torch.utils.checkpoint.CheckpointError, RuntimeError])
def test_torchs_error_catches_ours(error):
    """Code written for torch's checkpoint keeps working."""
    which = Two(torch.float32, torch.float64)
    failed(lambda x: x.to(which()).sin(), leaf(), error=error)


def test_kinds_of_errors():
    """They share one base, and that one is torch's."""
    from checkpointing import ChangedError, CheckpointError as UnsupportedError

    for kind in (MismatchError, ChangedError, UnsupportedError):
        assert issubclass(kind, CheckpointError)
    assert issubclass(CheckpointError, torch.utils.checkpoint.CheckpointError)


def test_nested_regions_name_the_one_that_differs():
    """The inner region's tensors are the inner region's error."""
    which = Two(torch.float32, torch.float64)
    inner = checkpointed(lambda x: x.to(which()).sin(), name="inner")

    @checkpointed(name="outer")
    def outer(x):
        return inner(x.exp()).cos()

    y = outer(leaf())
    with pytest.raises(MismatchError, match=r"region '(inner|outer)'"):
        y.sum().backward()


def test_a_failed_check_can_be_tried_again():
    """Nothing wrong stays behind: when the reason is gone, backward succeeds."""
    scale = {"dtype": torch.float32}
    x = leaf()
    y = checkpointed(lambda x: x.to(scale["dtype"]).sin().exp())(x).sum()
    scale["dtype"] = torch.float64
    for _ in range(2):
        with pytest.raises(MismatchError):
            y.backward(retain_graph=True)
    assert x.grad is None
    scale["dtype"] = torch.float32
    y.backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach().sin().exp())


# ---- "values"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_values_finds_another_number(dtype):
    """One element of a thousand: the message names the position and the line; the default lets it pass."""
    x = torch.ones(1000, dtype=dtype, requires_grad=True)

    def run(**options):
        offset = torch.zeros(1000, dtype=dtype)

        def fn(x):
            y = x.exp()
            return (y + offset).sin() * y

        y = checkpointed(fn, name="mine", **options)(x)
        offset.data = offset.clone()
        offset.data[500] = 0.05
        return y.sum().abs()

    run().backward()
    with pytest.raises(MismatchError) as caught:
        run(determinism_check="values").backward()
    text = str(caught.value)
    assert text.startswith("region 'mine'")
    # exp saves position 0, the sine 1, the product 2 and 3 (the sine's result differs as well)
    assert re.findall(r"position (\d+)", text)[0] == "1"
    assert re.search(rf"{LINE}:\d+: .*\(y \+ offset\)\.sin\(\)", text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(5, 4, requires_grad=True),
        lambda: torch.rand(4, 5).t().requires_grad_(),
        lambda: torch.rand(0, 4, requires_grad=True),
        lambda: torch.rand((), requires_grad=True),
        lambda: torch.tensor([float("nan"), -0.0, float("inf")], requires_grad=True),
        lambda: torch.rand(3, dtype=torch.complex64).conj().requires_grad_(),
        lambda: torch.rand(5, 4, dtype=torch.complex128, requires_grad=True).imag,
        lambda: torch.rand(3, dtype=torch.bfloat16, requires_grad=True),
    ],
    ids=["2d", "transposed", "empty", "scalar", "odd numbers", "conjugate", "imaginary part", "half"],
)
@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_values_finds_nothing_where_nothing_differs(make, backend):
    """Any shape, layout and dtype; NaNs are equal to themselves."""
    x = make()

    def fn(x):
        mask = x.abs() > 0.5  # a bool tensor is saved, too
        index = torch.arange(x.numel()).view(x.shape)
        return torch.where(mask, x.sin(), x).flatten()[index].exp() * x

    y = checkpointed(fn, backend=backend, determinism_check="values")(x)
    y.sum().abs().backward()


def test_values_sees_swapped_elements_and_signs_of_zero():
    """The checksum is of bits in their order."""
    for first, later in (([1.0, 2.0], [2.0, 1.0]), ([0.0, 1.0], [-0.0, 1.0]), ([1.0, 1.0], [1.5, 0.5])):
        which = Two(torch.tensor(first), torch.tensor(later))
        x = torch.ones(2, requires_grad=True)
        text = failed(lambda x, which=which: (x * which()).sin(), x, determinism_check="values")
        assert "position 0" in text


@pytest.mark.parametrize(
    "first, later",
    [
        ([1, 1, 1, 0, 0], [0, 0, 0, 0, 1]),
        ([3, 0, 0], [0, 1, 0]),
        ([1, 0, 1], [0, 2, 0]),
        ([5, 7], [7, 5]),
        ([0, 0, 1], [1, 0, 0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.int32], ids=str)
def test_values_tells_small_integers_apart(first, later, dtype):
    """Masks and indices have few bits set: no two of them may look the same."""
    first, later = torch.tensor(first).to(dtype), torch.tensor(later).to(dtype)
    assert (fingerprint(first) == fingerprint(later)) == torch.equal(first, later)
    assert fingerprint(first) == fingerprint(first.clone())


def test_values_names_the_first_tensor_its_operators_and_the_lines_of_both_runs():
    """Not all that is computed from it, which differs as well."""
    s = [0.0]

    def fn(z):
        s[0] += 1
        y = z.exp()
        if s[0] > 1:
            return (y * s[0]).sin().cos().exp()
        return (y * s[0]).sin().cos().exp()

    text = failed(fn, leaf(), determinism_check="values")
    first = fn.__code__.co_firstlineno
    assert re.findall(r"position (\d+)", text) == ["1"]
    assert "slot 1, made by MulBackward0" in text
    assert "SinBackward0 has saved it as 'self'" in text
    assert re.search(rf"saved in the forward at {LINE}:{first + 5}: \(y \* s\[0\]\)\.sin\(\)", text)
    assert re.search(rf"saved in the recompute at {LINE}:{first + 4}: \(y \* s\[0\]\)\.sin\(\)", text)
    assert "so do 2 more, in slots [2, 3]" in text


def test_metadata_names_operators_and_the_line_of_the_recompute():
    """What the default knows without having noted anything in the forward."""
    which = Two(3, 2)
    text = failed(lambda x: (x[: which()] * 2).sin(), leaf(3))
    assert "slot 0, made by MulBackward0" in text
    assert "SinBackward0 has saved it as 'self'" in text
    assert re.search(rf"saved in the recompute at {LINE}:\d+: \(x\[: which\(\)\] \* 2\)\.sin\(\)", text)


def test_values_in_a_scope():
    """What has been changed behind autograd's back is found, and named."""
    source, x = torch.ones(3), leaf()
    with checkpoint_scope(determinism_check="values", name="mine"):
        y = (x * source).sin().exp()
    source.numpy()[1] = 7
    with pytest.raises(MismatchError) as caught:
        y.sum().backward()
    text = str(caught.value)
    assert text.startswith(f"region 'mine' (entered at {__file__}:")
    assert re.search(r"position \d", text)


def test_values_follows_pain_6():
    """`s[0] += 1; (z * s[0]).sin()`: default settings don't look, "values" names the tensor."""

    def run(**options):
        s = torch.zeros(1)

        def fn(z):
            with torch.no_grad():
                s[0] += 1
            return (z * s[0]).sin()

        return checkpointed(fn, **options)(leaf())

    with pytest.raises(CheckpointError, match=r"position \d|changed in place"):
        run(determinism_check="values").sum().backward()


# ---- other checks


def test_a_function_as_check():
    """It is called for every saved tensor and every recomputed one; `==` of its results decides."""
    which = Two(1.0, 1.01)
    seen = []

    def rounded(tensor):
        seen.append(tensor)
        return round(float(tensor.sum()), 0)

    x = torch.ones(3, requires_grad=True)
    checkpointed(lambda x: (x * which()).sin().exp(), determinism_check=rounded)(x).sum().backward()
    assert len(seen) == 4
    assert not any(tensor.requires_grad for tensor in seen)

    which = Two(1.0, 2.0)
    text = failed(lambda x: (x * which()).sin(), x, determinism_check=rounded)
    assert re.search(r"saved metadata: .*3", text)
    assert re.search(r"recomputed metadata: .*6", text)


@pytest.mark.parametrize("result", [lambda t: t.sum(), lambda t: t.detach().clone(), lambda t: (t.shape, t.dtype)])
def test_a_check_may_return_tensors(result):
    """Tensors are compared by value."""
    x = torch.ones(3, requires_grad=True)
    y = checkpointed(lambda x: x.sin().exp(), determinism_check=result)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach().sin().exp())


@pytest.mark.parametrize("backend", ["rerun", "replay"])
def test_a_check_is_not_recorded(backend):
    """What a check computes is part of no region, and saves nothing."""
    x = leaf()
    y = checkpointed(lambda x: x.sin().exp(), backend=backend, determinism_check=lambda t: (t * 2).cos().sum())(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach().sin().exp())


def test_a_check_that_raises():
    """Its exception comes out, in forward and in backward."""

    def check(tensor):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        checkpointed(lambda x: x.sin(), determinism_check=check)(leaf())
    y = checkpointed(lambda x: x.sin(), determinism_check=Raising())(leaf())
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()


def test_a_check_with_another_signature_is_an_error_that_says_so():
    """Torch drops every TypeError that it meets below `@`, and calls the operands unsupported."""
    with pytest.raises(CheckpointError, match=r"determinism_check=.* missing 1 required positional argument"):
        checkpointed(lambda x: x @ x, determinism_check=lambda a, b: a)(leaf())


class Raising:
    """A check that works once."""

    def __init__(self):
        self.runs = 0

    def __call__(self, tensor):
        self.runs += 1
        return 1 / (2 - self.runs)


def test_none_checks_nothing_but_the_number():
    """Another dtype and other numbers pass; a tensor that isn't there can't."""
    which = Two(torch.float32, torch.float64)
    checkpointed(lambda x: x.to(which()).sin(), determinism_check="none")(leaf()).sum().backward()
    skip = Two(False, True)
    text = failed(lambda x: x if skip() else x.sin().exp(), leaf(), determinism_check="none")
    assert "different number" in text


def test_a_parameter_that_is_away_is_no_mismatch():
    """A parameter resized to nothing while the region ran, as ZeRO does (pain 26)."""
    p, x = nn.Parameter(torch.rand(3)), leaf()
    full = p.data.clone()

    def fn(x):
        p.data = full.clone()
        y = (x * p).sin()
        p.data = torch.empty(0)
        return y

    y = checkpointed(fn)(x)
    y.sum().backward()
    want = torch.autograd.grad((x * full).sin().sum(), x)[0]
    assert torch.equal(x.grad, want)


# ---- debug


def test_debug_logs_operators_of_both_runs():
    """In order, with the lines of user code that led to them."""
    often = Two(2, 1)

    def fn(x):
        for _ in range(often()):
            x = x.sin()
        return x.exp().cos()

    text = failed(fn, leaf(), debug=True)
    forward, recompute = re.split("Operations executed during ", text)[1:]
    assert forward.startswith("the original forward:")
    assert recompute.startswith("recomputation:")
    names = r"\d+: .*aten\.(\w+)\.default"
    assert [n for n in re.findall(names, forward) if n != "detach"] == ["sin", "sin", "exp", "cos"]
    assert [n for n in re.findall(names, recompute) if n != "detach"] == ["sin", "exp", "cos"]
    assert f"{__file__}:{fn.__code__.co_firstlineno + 2}:fn" in forward
    assert f"{__file__}:{fn.__code__.co_firstlineno + 2}:fn" in recompute


def test_debug_says_nothing_when_all_is_well(capsys, caplog):
    """Logs are shown on failure only; gradients are plain's."""
    x = leaf()
    checkpointed(lambda x: x.sin().exp(), debug=True)(x).sum().backward()
    with checkpoint_scope(debug=True):
        y = x.sin().exp()
    y.sum().backward()
    assert capsys.readouterr() == ("", "")
    assert not caplog.records
    torch.testing.assert_close(x.grad, 2 * x.detach().cos() * x.detach().sin().exp())


def test_errors_are_short_without_debug():
    """Region, position, operator and line; no flood (pain 21)."""
    which = Two(torch.float32, torch.float64)
    text = failed(lambda x: x.to(which()).sin().exp().sin().exp(), leaf())
    assert len(text) < 4000
    assert "Operations executed" not in text


# ---- a way out


def test_keep_pins_what_would_differ():
    """A decision that is kept stands in the rerun (pain 5)."""
    which = Two(1.0, 2.0)
    x = torch.ones(3, requires_grad=True)

    @checkpointed(determinism_check="values")
    def fn(x):
        scale = keep(torch.full((), which()))
        return (x * scale).sin().exp()

    fn(x).sum().backward()
    assert which.runs == 2
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach().sin().exp())


@pytest.mark.parametrize("use", [torch.exp, lambda h: h[1:].sin(), torch.sin], ids=["read", "view", "saved"])
def test_an_operator_that_makes_another_size_in_replay_is_an_error(use):
    """Whoever reads the result in replay, or what of it was saved."""
    calls = []

    def made(x):
        calls.append(None)
        return x.new_ones(3 + len(calls)) * x.sum()

    with torch.library._scoped_library("checkpointing_tests", "FRAGMENT") as library:
        library.define("growing(Tensor x) -> Tensor")
        library.impl("growing", made, "CompositeExplicitAutograd")
        x = torch.rand(3)
        w = torch.ones((), requires_grad=True)
        with checkpoint_scope(name="grown"):
            y = use(torch.ops.checkpointing_tests.growing(x * 2) * w) * w
        with pytest.raises(CheckpointError, match=r"grown.*growing.* made 16 bytes .* 20 in the recompute"):
            y.sum().backward()
