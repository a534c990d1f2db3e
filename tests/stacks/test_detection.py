"""Losses of detection and segmentation: targets are padded by rows and matched, image by image."""

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
    labels = {"mask_labels": found, "class_labels": [torch.tensor([0, 1]), torch.tensor([2])]}
    return {"pixel_values": torch.rand(2, 3, 32, 32), **labels}


def detr(kind):
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1] * 4, out_features=STAGES[-1:]
    )
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 5}
    sizes |= {f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    options = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    config = getattr(transformers, f"{kind}Config")(
        backbone_config=backbone, num_labels=3, auxiliary_loss=True, **sizes, **options
    )
    return getattr(transformers, f"{kind}ForObjectDetection")(config)


def boxes():
    padding = torch.ones(2, 64, 64, dtype=torch.long)
    padding[1, 40:] = 0
    labels = [
        {"class_labels": classes, "boxes": torch.rand(len(classes), 4) * 0.5 + 0.2}
        for classes in (torch.tensor([0, 1]), torch.tensor([2]))
    ]
    return {"pixel_values": torch.rand(2, 3, 64, 64), "pixel_mask": padding, "labels": labels}


MODELS = {
    "Mask2Former": (mask2former, masks),
    "DETR": (lambda: detr("Detr"), boxes),
    "Conditional DETR": (lambda: detr("ConditionalDetr"), boxes),
}


def steps(make, batch, policy=None, enabled=True):
    torch.manual_seed(0)
    model, seen = make().train(), []
    for _ in range(2):
        model.zero_grad()
        with checkpoint_scope(policy=policy, enabled=enabled):
            loss = model(**batch()).loss
        loss.backward()
        seen += [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    return bits(seen)


@pytest.mark.parametrize("policy", [None, auto(), auto(budget="1 MiB")], ids=["", "auto", "budget"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_its_loss_in_one_scope(name, policy):
    assert steps(*MODELS[name], policy) == steps(*MODELS[name], enabled=False)
