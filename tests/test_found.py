"""What a rerun finds by itself, in attributes, containers, closures and modules: it is as it was in the forward, or an
error says that it is not. What the function does not read may change."""

import gc
import itertools
import weakref
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from checkpointing import CheckpointError, checkpointed


def leaf(*size: int) -> Tensor:
    return torch.linspace(0.1, 1, torch.Size(size).numel()).reshape(size).requires_grad_()


class Thing:
    """A tensor in each of the places where an object may have one."""

    def __init__(self, tensor: Tensor) -> None:
        self.attribute = tensor
        self.items = [tensor]
        self.table = {"a": {"b": tensor}}

    def by_attribute(self, x: Tensor) -> Tensor:
        return (x * 1.5 + self.attribute.exp()).sin()

    def by_item(self, x: Tensor) -> Tensor:
        return (x * 1.5 + self.items[0].exp()).sin()

    def by_table(self, x: Tensor) -> Tensor:
        return (x * 1.5 + self.table["a"]["b"].exp()).sin()


class ThingModule(Thing, nn.Module):
    def __init__(self, tensor: Tensor) -> None:
        nn.Module.__init__(self)
        Thing.__init__(self, tensor)


WAYS = ["by_attribute", "by_item", "by_table"]


@pytest.mark.parametrize("kind", [Thing, ThingModule])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_tensor_that_an_object_holds_is_guarded(kind: type[Thing], way: str, needs_grad: bool) -> None:
    tensor = torch.ones(3).requires_grad_(needs_grad)
    thing = kind(tensor)
    y = checkpointed(getattr(thing, way))(leaf(3))
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(CheckpointError, match=r"changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("kind", [Thing, ThingModule])
@pytest.mark.parametrize("way", WAYS)
def test_what_has_taken_its_place_is_not_read(kind: type[Thing], way: str) -> None:
    def gradients(wrap: Any) -> tuple[Tensor, ...]:
        thing, x = kind(torch.tensor(1.0)), leaf(3)
        function = wrap(getattr(thing, way))
        results = []
        for value in (1.0, 2.0, 3.0):
            thing.attribute = thing.items[0] = thing.table["a"]["b"] = torch.tensor(value)
            results.append(function(x))
        last = thing.attribute
        gradient = torch.autograd.grad(torch.stack(results).sum(), x)
        assert thing.attribute is last and thing.items[0] is last and thing.table["a"]["b"] is last
        return gradient

    assert torch.equal(*gradients(checkpointed), *gradients(lambda function: function))


def module_of(linear: nn.Module, x: Tensor) -> Tensor:
    return (x * linear.bias.exp()).sin()


@pytest.mark.parametrize("way", ["argument", "closure", "method"])
def test_a_parameter_that_is_read_but_not_saved_is_guarded(way: str) -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return module_of(self.linear, x)

    owner, x = Owner(), leaf(2, 3)
    run = {
        "argument": lambda: checkpointed(module_of)(owner.linear, x),
        "closure": lambda: checkpointed(lambda x: module_of(owner.linear, x))(x),
        "method": lambda: checkpointed(owner.forward)(x),
    }
    y = run[way]()
    with torch.no_grad():
        owner.linear.bias.mul_(2)
    with pytest.raises(CheckpointError, match=r"Linear\.bias.*changed in place"):
        y.sum().backward()


def test_a_parameter_that_autocast_has_cast_is_guarded() -> None:
    linear, x = nn.Linear(3, 3), leaf(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpointed(lambda x: linear(x).sin())(x)
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(CheckpointError, match=r"Linear\.weight.*changed in place"):
        y.sum().backward()


def test_what_the_function_does_not_read_may_change() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.table = nn.Linear(3, 3), nn.Linear(3, 3), [torch.ones(3)]

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x).sin()

    pair, x = Pair(), leaf(2, 3)
    (want,) = torch.autograd.grad(pair(x).sum(), x)
    y = checkpointed(pair)(x)
    with torch.no_grad():
        pair.other.weight.mul_(2)
        pair.table[0].mul_(2)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


def test_an_embedding_that_keeps_its_rows_short_works_twice() -> None:
    def gradients(wrap: Any) -> Tensor:
        torch.manual_seed(0)
        embedding = nn.Embedding(5, 3, max_norm=0.5)
        function = wrap(lambda rows, x: (embedding(rows) * x).sin())
        x = leaf(2, 3)
        results = [function(torch.tensor(rows), x) for rows in ([0, 1], [1, 2])]
        torch.stack(results).sum().backward()
        return embedding.weight.grad

    assert torch.equal(gradients(checkpointed), gradients(lambda function: function))


def test_a_buffer_that_the_first_forward_makes_is_none_again_in_the_rerun() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", None)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.detach() * 2 if self.seen is None else self.seen + 1
            return (x * self.seen).sin()

    def gradients(wrap: Any) -> list[Tensor]:
        lazy, x = Lazy(), leaf(3)
        function = wrap(lazy)
        results = [function(x), function(x)]
        return [*torch.autograd.grad(results[0].sum() + results[1].sum(), x), lazy.seen]

    for have, want in zip(gradients(checkpointed), gradients(lambda function: function), strict=True):
        assert torch.equal(have, want)


running = torch.zeros(())


def test_a_variable_that_the_function_sets_to_a_tensor_is_set_once() -> None:
    def gradients(wrap: Any) -> list[Tensor]:
        global running
        running = count = torch.zeros(())

        def function(x: Tensor) -> Tensor:
            global running
            nonlocal count
            running, count = running + x.detach().mean(), count + 1
            return (x * running * count).sin()

        x = leaf(3)
        results = [wrap(function)(x) for _ in range(3)]
        return [*torch.autograd.grad(torch.stack(results).sum(), x), running, count]

    for have, want in zip(gradients(checkpointed), gradients(lambda function: function), strict=True):
        assert torch.equal(have, want)


def test_an_object_that_remembers_results_does_not_chain_the_regions() -> None:
    class Remembers:
        last: Tensor | None = None

        def run(self, x: Tensor) -> Tensor:
            self.last = x.sin()
            return self.last.exp()

    remembers, inputs = Remembers(), []
    remembers.last = None
    gc.disable()
    try:
        for _ in range(4):
            x = leaf(3)
            checkpointed(remembers.run)(x)
            inputs.append(weakref.ref(x))
            del x
        assert [ref() is not None for ref in inputs] == [False, False, False, True]
    finally:
        gc.enable()


def test_a_state_that_belongs_to_a_graph_comes_back() -> None:
    class Cell:
        def __init__(self) -> None:
            self.state: Tensor | None = None

        def run(self, x: Tensor) -> Tensor:
            self.state = x.sin() if self.state is None else (self.state * x).sin()
            return self.state.exp()

    def gradients(wrap: Any) -> tuple[Tensor, ...]:
        cell, x = Cell(), leaf(3)
        results = [wrap(cell.run)(x) for _ in range(4)]
        cell.state = None
        return torch.autograd.grad(torch.stack(results).sum(), x)

    assert torch.equal(*gradients(checkpointed), *gradients(lambda function: function))


@dataclass
class Box:
    content: Any


class Pair(NamedTuple):
    one: Any
    two: Any


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (Box, ".content"),
        (lambda t: [Box({"k": t})], "[0].content['k']"),
        (lambda t: Pair(1, t), ".two"),
        (lambda t: OrderedDict(a=[t]), "['a'][0]"),
        (lambda t: defaultdict(list, a=t), "['a']"),
    ],
)
def test_the_error_names_the_path_to_the_argument(wrap: Any, path: str) -> None:
    tensor = torch.ones(3)
    y = checkpointed(lambda x, z: (x * 2).sin())(leaf(3), z=wrap(tensor))
    tensor.add_(1)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    assert f"kwargs['z']{path} (" in str(caught.value)


def test_a_partial_among_the_arguments_is_looked_into() -> None:
    tensor = torch.ones(3)
    y = checkpointed(lambda x, f: f(x).sin())(leaf(3), partial(torch.mul, tensor))
    tensor.add_(1)
    with pytest.raises(CheckpointError, match="changed in place"):
        y.sum().backward()


def test_a_backward_under_autocast_leaves_the_casts_around_it() -> None:
    weights = torch.linspace(0.3, 1.7, 6).reshape(2, 3)

    def gradients(wrap: Any) -> list[Tensor]:
        torch.manual_seed(0)
        linear, x = nn.Linear(3, 3), leaf(2, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = linear(x)
            wrap(lambda x: linear(x).sin())(x).sum().backward()
            second = linear(x * 0.7)  # shares the cast of the weight with the first: their gradients are added in it
        loss = (first * weights).sum() + (second * weights * weights).sum()
        return [*torch.autograd.grad(loss, [x, linear.weight, linear.bias])]

    for have, want in zip(gradients(checkpointed), gradients(lambda function: function), strict=True):
        assert torch.equal(have, want)


def test_code_that_turns_the_stop_into_an_exit_does_not_exit() -> None:
    def function(x: Tensor) -> Tensor:
        try:
            return x.sin().exp()
        except BaseException:
            raise SystemExit(3) from None

    x = leaf(3)
    (want,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.equal(torch.autograd.grad(checkpointed(function)(x).sum(), x)[0], want)


@pytest.mark.parametrize("way", ["argument", "module", "nested argument"])
@pytest.mark.parametrize("before", [False, True])
def test_a_parameter_may_be_frozen_or_thawed_before_backward(way: str, before: bool) -> None:
    def gradients(wrap: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        linear, x = nn.Linear(3, 3), leaf(2, 3)
        linear.requires_grad_(before)
        if way == "module":
            y = wrap(linear)(x)
        elif way == "argument":
            y = wrap(lambda x, weight: (x @ weight).sin())(x, linear.weight)
        else:
            y = wrap(lambda x, given: (x @ given["weight"]).sin())(x, {"weight": linear.weight})
        linear.requires_grad_(not before)
        y.sin().sum().backward()
        assert linear.weight.requires_grad is not before
        return [x.grad, linear.weight.grad]

    (have, have_none), (want, want_none) = gradients(checkpointed), gradients(lambda function: function)
    assert torch.equal(have, want)
    assert have_none is want_none is None


in_a_global: Any = None  # set by the test below


def by_global(x: Tensor) -> Tensor:
    return (x @ in_a_global).sin()


@pytest.mark.parametrize("way", ["closure", "global", "default", "partial", "object", *WAYS])
@pytest.mark.parametrize("kind", [Thing, ThingModule])
@pytest.mark.parametrize("before", [False, True])
def test_a_tensor_that_is_no_argument_may_be_frozen_or_thawed_before_backward(
    way: str, kind: type[Thing], before: bool
) -> None:
    """Without a word the rerun would save one tensor more, or less, and the next ones in the wrong slots."""

    def gradients(wrap: Any) -> list[Tensor | None]:
        global in_a_global
        x, w = leaf(3, 3), torch.full((3, 3), 0.5, requires_grad=before)
        in_a_global, thing = w, kind(w)

        def by_default(x: Tensor, w: Tensor = w) -> Tensor:
            return (x @ w).sin()

        if way == "object":
            y = wrap(lambda thing, x: (x @ thing.attribute).sin())(thing, x)
        else:
            others = {
                "closure": lambda x: (x @ w).sin(),
                "global": by_global,
                "default": by_default,
                "partial": partial(lambda w, x: (x @ w).sin(), w),
            }
            y = wrap(others[way] if way in others else getattr(thing, way))(x)
        w.requires_grad_(not before)
        y.exp().sum().backward()
        assert w.requires_grad is not before
        return [x.grad, w.grad]

    (have, have_none), (want, want_none) = gradients(checkpointed), gradients(lambda function: function)
    assert torch.equal(have, want)
    assert have_none is want_none is None


@pytest.mark.parametrize(
    "kind", [iter, lambda parts: (part for part in parts), lambda parts: map(torch.abs, parts), zip]
)
def test_an_iterator_that_the_forward_has_used_up_is_an_error(kind: Any) -> None:
    """The rerun would take what comes next, or nothing, and perhaps save as many tensors all the same."""

    def function(x: Tensor, given: dict[str, Any]) -> Tensor:
        for _ in given["parts"]:
            x = x + 1
        return x.sin()

    y = checkpointed(function)(leaf(3), {"parts": kind([torch.ones(3)])})
    with pytest.raises(CheckpointError, match=r"args\[1\]\['parts'\] is an iterator.*Pass a list"):
        y.sum().backward()


def test_counters_give_numbers_to_names() -> None:
    numbers, x = itertools.count(), leaf(3)
    named = checkpointed(lambda x, numbers: {f"name {next(numbers)}": x.sin().exp()})
    named(x, numbers).popitem()[1].sum().backward()
    assert x.grad is not None


def test_containers_may_be_in_themselves() -> None:
    def gradient(wrap: Any) -> Tensor:
        x = leaf(3)
        items: list[Any] = [x * 2]
        table: dict[str, Any] = {"items": items}
        items.append(table)
        y = wrap(lambda items: items[1]["items"][0].sin() * items[0].exp())(items)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(gradient(checkpointed), gradient(lambda function: function))


def test_a_changed_tensor_is_not_read_as_a_list_either() -> None:
    """`tolist` reads memory without an operator."""
    thing = Thing(torch.ones(3))
    y = checkpointed(lambda x: (x * thing.attribute.tolist()[0]).sin())(leaf(3))
    thing.attribute.add_(1)
    with pytest.raises(CheckpointError, match=r"thing\.attribute.*changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("given", [(), (torch.ones(3),)])
def test_a_default_that_the_call_does_not_read_may_change(given: tuple[Tensor, ...]) -> None:
    scale = torch.ones(3)

    def function(x: Tensor, *given: Tensor, other: Tensor = scale) -> Tensor:
        return (x * given[0] if given else x).sin().exp()

    x = leaf(3)
    y = checkpointed(function)(x, *given)
    scale.add_(1)
    assert torch.equal(*torch.autograd.grad(y.sum(), x), *torch.autograd.grad(function(x, *given).sum(), x))


def test_what_the_function_sets_is_not_set_again_by_the_rerun() -> None:
    class Keeps:
        value: Tensor | None = None

        def run(self, x: Tensor) -> Tensor:
            self.value = x.detach() * 2
            return x.sin().exp()

    keeps, mine = Keeps(), torch.zeros(3)
    keeps.value = mine
    y = checkpointed(keeps.run, early_stop=False)(leaf(3))
    keeps.value = mine
    y.sum().backward()
    assert keeps.value is mine


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_the_precision_of_all_products_is_that_of_the_forward_and_then_that_of_now(precision: str, when: str) -> None:
    def set_precision(value: str) -> None:
        # Not `torch.backends.fp32_precision = value`: torch's operator database, once imported, forbids that.
        torch._C._set_fp32_precision_setter("generic", "all", value)

    def state() -> list[str]:
        backends = torch.backends
        return [
            p.fp32_precision for p in (backends, backends.mkldnn.matmul, backends.mkldnn.conv, backends.cuda.matmul)
        ]

    seen, before = [], state()

    def function(x: Tensor) -> Tensor:
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        return x.sin().exp()

    try:
        set_precision(precision if when == "forward" else "none")
        y = checkpointed(function)(leaf(3))
        set_precision("none" if when == "forward" else precision)
        now = state()
        y.sum().backward()
        assert state() == now
    finally:
        set_precision("none")
    assert seen[0] == seen[1]
    assert state() == before
