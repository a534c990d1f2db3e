"""Whole models with their losses. Targets of detection and segmentation are padded by rows and
matched, image by image; noise before each router of experts is that of kernels on a GPU."""

import functools
import itertools

import pytest
import torch
from oracle import NO_ROOM, SEED, bits, shaken

from checkpointing import auto, checkpoint_modules, checkpoint_scope, offload

transformers = pytest.importorskip("transformers")
pytestmark = NO_ROOM
STAGES = ["stage1", "stage2", "stage3", "stage4"]
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "intermediate_size": 16}
SIZES |= {"max_position_embeddings": 64}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK |= {"qk_nope_head_dim": 8, "moe_intermediate_size": 16}
EXPERTS = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True},
    "DeepseekV3": DEEPSEEK,
}
DETECTORS = "Mask2Former", "Detr", "ConditionalDetr"


def made(name):
    if name in EXPERTS:
        config = getattr(transformers, f"{name}Config")(**SIZES, **EXPERTS[name])
        return getattr(transformers, f"{name}ForCausalLM")(config)
    pytest.importorskip("scipy")
    pytest.importorskip("PIL")
    if name == "Mask2Former":
        sizes = {
            "image_size": 32,
            "embed_dim": 8,
            "depths": [1, 1, 1, 1],
            "num_heads": [1, 1, 2, 2],
        }
        backbone = transformers.SwinConfig(**sizes, window_size=2, out_features=STAGES)
        sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_queries": 5}
        sizes |= {"encoder_feedforward_dim": 16, "dim_feedforward": 16, "train_num_points": 30}
        sizes |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2}
        config = transformers.Mask2FormerConfig(backbone_config=backbone, **sizes, num_labels=3)
        return transformers.Mask2FormerForUniversalSegmentation(config)
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1] * 4, out_features=STAGES[-1:]
    )
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 5}
    sizes |= {f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    options = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    config = getattr(transformers, f"{name}Config")(
        backbone_config=backbone, num_labels=3, auxiliary_loss=True, **sizes, **options
    )
    return getattr(transformers, f"{name}ForObjectDetection")(config)


def batch(name, step):
    classes = torch.tensor([0, 1]), torch.tensor([2])
    if name in EXPERTS:
        tokens = (torch.arange(96).view(2, 48) * 7 + step) % 32
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if name == "Mask2Former":
        masks = [(torch.rand(len(of), 32, 32) > 0.5).float() for of in classes]
        images = torch.rand(2, 3, 32, 32)
        return {"pixel_values": images, "mask_labels": masks, "class_labels": [*classes]}
    padding = torch.ones(2, 64, 64, dtype=torch.long)
    padding[1, 40:] = 0
    labels = [{"class_labels": of, "boxes": torch.rand(len(of), 4) * 0.5 + 0.2} for of in classes]
    return {"pixel_values": torch.rand(2, 3, 64, 64), "pixel_mask": padding, "labels": labels}


def steps(name, policy=None, regions=True, noise=False):
    """The losses and gradients of three steps. (A bias of the router is updated between.)"""
    torch.manual_seed(0)
    model = made(name).train()
    for key, module in model.named_modules():
        if noise and key.endswith((".gate", ".router")):
            module.register_forward_pre_hook(lambda module, args: (shaken(args[0]), *args[1:]))
    if regions and policy == "per layer":
        checkpoint_modules(model, "model.layers.*", backend="replay")
        regions, policy = False, None
    losses, found = [], []
    for step in range(3):
        SEED[0] = itertools.count(1000 * step)
        given = batch(name, step)
        model.zero_grad()
        with checkpoint_scope(policy=policy, enabled=regions):
            loss = model(**given).loss
        loss.backward()
        losses.append(loss.item())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(torch.cat([grad.flatten() for grad in grads]))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer += 0.01 * (step - 1)
    return losses, found


plain = functools.cache(functools.partial(steps, regions=False))
OF_EXPERTS = ["per layer", auto(), auto(budget="4 KiB"), offload(auto(), min_bytes=0)]
TURNS = {"Mixtral": OF_EXPERTS, "Qwen3Moe": OF_EXPERTS[::2], "DeepseekV3": OF_EXPERTS[1::2]}
RIGHT = itertools.product(DETECTORS, [None, auto(), auto(budget="1 MiB")])


@pytest.mark.parametrize(
    ("name", "policy"), [(name, policy) for name in TURNS for policy in TURNS[name]], ids=str
)
def test_routes_are_never_chosen_again(name, policy):
    want, right = plain(name, noise=True)
    have, found = steps(name, policy, noise=True)
    assert have == want
    for one, two in zip(right, found, strict=True):
        assert torch.cosine_similarity(one, two, dim=0) > 0.99


@pytest.mark.parametrize(
    ("name", "policy"), [*RIGHT, *itertools.product(EXPERTS, OF_EXPERTS[:2])], ids=str
)
def test_without_noise_the_bits_are_those_of_plain_code(name, policy):
    assert bits(steps(name, policy)) == bits(plain(name))
