"""What one reads first: each example of the README. All other tests are about one subject each."""

import pytest
import torch
from torch import nn

from checkpointing import (
    ChangedError,
    auto,
    checkpoint_modules,
    checkpoint_scope,
    checkpointed,
    forward_only,
    keep,
    offload,
    report,
    torch_compat,
)


@pytest.fixture
def layers():
    return nn.ModuleList(
        nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
        for _ in range(6)
    )


def forward(layers, x):
    for layer in layers:
        x = x + layer(x)
    return x.square().mean()


def gradients(loss, layers):
    """Of a step that draws the same random numbers each time."""
    torch.manual_seed(0)
    return torch.autograd.grad(loss(layers, torch.ones(8, 16)), [*layers.parameters()])


def assert_as_plain(loss, layers):
    assert all(map(torch.equal, gradients(loss, layers), gradients(forward, layers)))


def test_a_decorated_function_is_called_again_in_backward(layers):
    """Once, and every bit of the gradients is that of the plain program."""
    calls = []

    @checkpointed
    def block(layer, x):
        calls.append(layer)
        return x + layer(x)

    def loss(layers, x):
        for layer in layers:
            x = block(layer, x)
        return x.square().mean()

    assert_as_plain(loss, layers)
    assert calls == [*layers, *reversed(layers)]


def test_a_with_block_runs_its_python_once(layers):
    calls = []

    def loss(layers, x):
        with checkpoint_scope() as loss.scope:
            for layer in layers:
                calls.append(layer)
                x = keep(x + layer(x))
        return x.square().mean()

    assert_as_plain(loss, layers)
    assert calls == [*layers]
    assert loss.scope.stats.ops_replayed > 0


def test_modules_of_a_model_are_checkpointed_in_place(layers):
    """Its names and its state stay; `remove` makes it plain again."""
    names = list(layers.state_dict())
    with checkpoint_modules(layers, "*") as handle:
        assert_as_plain(forward, layers)
        assert len(handle.names) == 6 and list(layers.state_dict()) == names
        x = torch.ones(8, 16, requires_grad=True)
        assert len(report(forward(layers, x)).regions) == 6
    assert report(forward(layers, torch.ones(8, 16))).regions == ()


@pytest.mark.parametrize(
    "policy", [auto(), auto(budget="20 KiB"), auto(peak="1 MiB"), offload(auto())], ids=str
)
def test_one_block_around_the_model_finds_its_own_checkpoints(layers, policy):
    """From the second step on, when its operators are known."""

    def loss(layers, x):
        with checkpoint_scope(policy=policy) as loss.scope:
            return forward(layers, x)

    for _ in range(2):
        assert_as_plain(loss, layers)
    assert len(loss.scope.stats.cuts) >= 1


def test_side_effects_run_once(layers):
    """In a replay always, in a rerun if they are in a `forward_only` function."""
    seen = []
    note = forward_only(lambda x: seen.append(float(x.detach().mean())))

    @checkpointed
    def loss(layers, x):
        result = forward(layers, x)
        note(result)
        return result

    assert_as_plain(loss, layers)
    assert len(seen) == 1


def test_the_functions_of_torch_have_the_same_names_and_arguments(layers):
    def loss(layers, x):
        for layer in layers:
            x = x + torch_compat.checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    assert_as_plain(loss, layers)


def test_what_cannot_be_recomputed_is_an_error_that_says_what_to_do():
    scale, x = torch.full((4,), 2.0), torch.ones(4, requires_grad=True)
    y = checkpointed(lambda x, scale: (x * scale).sin(), name="scaled")(x, scale)
    scale.add_(1)
    with pytest.raises(ChangedError, match=r"region 'scaled'[\s\S]*args\[1\][\s\S]*clone"):
        y.sum().backward()
