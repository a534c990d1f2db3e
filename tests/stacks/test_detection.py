"""A loss of segmentation: it pads targets by rows, matches by assignment, and differs from image to
image."""

import pytest
import torch
from oracle import bits

from checkpointing import auto, checkpoint_scope

transformers = pytest.importorskip("transformers")
pytest.importorskip("scipy")
pytest.importorskip("PIL")

STAGES = ["stage1", "stage2", "stage3", "stage4"]


def mask2former():
    sizes = {"image_size": 32, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
    backbone = transformers.SwinConfig(**sizes, window_size=2, out_features=STAGES)
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_queries": 5}
    sizes |= {"encoder_feedforward_dim": 16, "dim_feedforward": 16, "train_num_points": 30}
    sizes |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    config = transformers.Mask2FormerConfig(backbone_config=backbone, **sizes)
    return transformers.Mask2FormerForUniversalSegmentation(config)


def masks():
    found = [(torch.rand(n, 32, 32) > 0.5).float() for n in (2, 1)]
    classes = [torch.tensor([0, 1]), torch.tensor([2])]
    return {
        "pixel_values": torch.rand(2, 3, 32, 32),
        "mask_labels": found,
        "class_labels": classes,
    }


def steps(policy=None, enabled=True):
    torch.manual_seed(0)
    model, seen = mask2former().train(), []
    for _ in range(2):
        model.zero_grad()
        with checkpoint_scope(policy=policy, enabled=enabled):
            loss = model(**masks()).loss
        loss.backward()
        seen += [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    return bits(seen)


@pytest.mark.parametrize("policy", [None, auto(), auto(budget="1 MiB")], ids=["", "auto", "budget"])
def test_a_model_and_its_loss_in_one_scope(policy):
    assert steps(policy) == steps(enabled=False)
