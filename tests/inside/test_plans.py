"""When plans are made."""

import pytest
import torch
from torch import nn

from checkpointing import auto, checkpoint_scope, clear_programs
from checkpointing._replay import replay


@pytest.mark.parametrize("change", ["sizes", "sizes and branches", "accumulated gradients"])
def test_a_plan_is_not_made_anew_at_every_change(change, monkeypatch):
    """Sizes that come and go, and gradients that exist at every other step, share one plan."""
    planned = []
    plan_of = replay.plan_of
    monkeypatch.setattr(replay, "plan_of", lambda *given: planned.append(step) or plan_of(*given))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    clear_programs()
    step = 0
    for step in range(24):
        x = torch.randn(4 if change == "accumulated gradients" else 4 << (step % 3), 64)
        with checkpoint_scope(policy=auto()):
            y = model(x if change != "sizes and branches" or step // 3 % 2 else x.sin())
        y.sum().backward()
        if step % 2:
            model.zero_grad()
    assert 0 < len(planned) <= 12
    assert max(planned) < 12
