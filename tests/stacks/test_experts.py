"""Mixtures of experts, with noise before each router, as kernels on a GPU make it."""

import itertools
import warnings

import pytest
import torch
from noise import SEED, shaken
from oracle import bits

from checkpointing import auto, checkpoint_modules, checkpoint_scope, offload

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "intermediate_size": 16}
SIZES |= {"max_position_embeddings": 64}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK |= {"qk_nope_head_dim": 8, "moe_intermediate_size": 16}
MODELS = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True},
    "DeepseekV3": DEEPSEEK,
}
DOORS = {
    "per layer": None,
    "auto": auto(),
    "budget": auto(budget="4 KiB"),
    "offload": offload(auto(), min_bytes=0),
}


def steps(name, policy=None, regions=False, noise=True):
    """The gradients of three steps, and the losses. (A bias of the router is updated between.)"""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    for key, module in model.named_modules():
        if noise and key.endswith((".gate", ".router")):
            module.register_forward_pre_hook(lambda module, args: (shaken(args[0]), *args[1:]))
    if regions and policy is None:
        checkpoint_modules(model, "model.layers.*", backend="replay")
    losses, found = [], []
    for step in range(3):
        SEED[0] = itertools.count(1000 * step)
        tokens = (torch.arange(96).view(2, 48) * 7 + step) % 32
        model.zero_grad()
        with checkpoint_scope(policy=policy, enabled=policy is not None):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(torch.cat([grad.flatten() for grad in grads]))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer += 0.01 * (step - 1)
    return losses, found


@pytest.mark.parametrize("policy", DOORS.values(), ids=list(DOORS))
@pytest.mark.parametrize("name", MODELS)
def test_routes_are_never_chosen_again(name, policy):
    want, right = steps(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*A budget of.*")
        have, found = steps(name, policy, regions=True)
    assert have == want
    for one, two in zip(right, found, strict=True):
        assert torch.cosine_similarity(one, two, dim=0) > 0.99


@pytest.mark.parametrize("policy", [None, auto()], ids=["per layer", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_without_noise_the_bits_are_those_of_plain_code(name, policy):
    want = steps(name, noise=False)
    assert bits(steps(name, policy, regions=True, noise=False)) == bits(want)
