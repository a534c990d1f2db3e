"""Code in the wild that calls torch's functions, with ours in their place: what comes out is what plain code gives."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import checkpointing.torch_compat as ours

VARIANTS = pytest.mark.parametrize("use_reentrant", [False, True])


class Block(nn.Module):
    """Everything that a recompute must not disturb: dropout, running statistics, options, something to leave out."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.calls = 0

    def forward(self, x, mask=None, scale=1.0, *, flag=False):
        self.calls += 1
        y = F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)
        y = x + y * scale
        return (y if mask is None else y * mask), flag


def plain(block, x, mask):
    return block(x, mask, 0.5, flag=True)[0]


def by_call(checkpoint, block, x, mask):
    """As transformers does: the bound `__call__` of a module."""
    return checkpoint(functools.partial(block.__call__, flag=True), x, mask, 0.5)[0]


def by_closure(checkpoint, block, x, mask):
    """As diffusers and older models do."""

    def create_custom_forward(module):
        def custom_forward(*inputs):
            return module(*inputs, flag=True)

        return custom_forward

    return checkpoint(create_custom_forward(block), x, mask, 0.5)[0]


def by_method(checkpoint, block, x, mask):
    """As Swin transformers do."""
    return checkpoint(block.forward, x, mask, 0.5)[0]


def train(call):
    """Two steps of three blocks: losses, gradients, buffers, the random stream."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3))
    seen = []
    for _ in range(2):
        x, mask = torch.randn(4, 8, requires_grad=True), torch.ones(4, 1)
        y = x
        for block in blocks:
            y = call(block, y, mask)
        loss = y.square().mean()
        loss.backward()
        seen += [loss.detach(), x.grad, torch.rand(1), *(b.clone() for b in blocks.buffers())]
    return seen + [p.grad for p in blocks.parameters()], [block.calls for block in blocks]


@VARIANTS
@pytest.mark.parametrize("pattern", [by_call, by_closure, by_method])
def test_ways_to_call(pattern, use_reentrant):
    """As models call it; statistics are updated once in both variants."""
    checkpoint = functools.partial(ours.checkpoint, use_reentrant=use_reentrant)
    want, _ = train(plain)
    have, calls = train(functools.partial(pattern, checkpoint))
    assert calls == [4, 4, 4]
    for i, (a, b) in enumerate(zip(want, have, strict=True)):
        assert torch.equal(a, b), i


# ---- torch's wrappers


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)))

    def forward(self, x):
        return self.blocks(x)


def gradients(model, x=None):
    x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_() if x is None else x
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@VARIANTS
def test_apply_activation_checkpointing(use_reentrant):
    """Wrapped in place; names in the state dict stay."""
    torch.manual_seed(0)
    model = Model()
    wrapped = copy.deepcopy(model)
    wrap = functools.partial(checkpoint_wrapper, checkpoint_fn=ours.checkpoint, use_reentrant=use_reentrant)
    apply_activation_checkpointing(
        wrapped, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, nn.Sequential) and len(m) == 3
    )
    assert sum(isinstance(m, CheckpointWrapper) for m in wrapped.modules()) == 2
    for a, b in zip(gradients(model), gradients(wrapped), strict=True):
        assert torch.equal(a, b)
    assert wrapped.state_dict().keys() == model.state_dict().keys()
    wrapped.load_state_dict(model.state_dict())


# ---- distributed, in one process


@pytest.fixture(scope="module")
def group():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Twice(nn.Module):
    """A block that is used more than once."""

    def __init__(self, use_reentrant, times):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.Linear(8, 8), nn.Linear(8, 8)
        self.use_reentrant, self.times = use_reentrant, times

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = ours.checkpoint(self.block, x, use_reentrant=self.use_reentrant).tanh()
        return x


@pytest.mark.parametrize("times, use_reentrant", [(1, True), (1, False), (2, False)])
def test_distributed_data_parallel(group, times, use_reentrant):
    """Gradients as without it."""
    model = Twice(use_reentrant, times)
    for a, b in zip(
        gradients(model), gradients(nn.parallel.DistributedDataParallel(copy.deepcopy(model))), strict=True
    ):
        assert torch.equal(a, b)


# ---- transformers, where they are installed


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="an optional test of code in the wild")


def small(transformers, name):
    """A model with random weights, and a batch."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    tokens = torch.tensor([[3, 5, 7, 9, 11, 2], [4, 6, 8, 2, 0, 0]])
    batch = {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": tokens}
    if name == "llama":
        config = transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, num_key_value_heads=1, **shape)
        return transformers.LlamaForCausalLM(config), batch
    if name == "bert":
        config = transformers.BertConfig(vocab_size=32, max_position_embeddings=16, **shape)
        return transformers.BertForMaskedLM(config), batch
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
        return transformers.GPT2LMHeadModel(config), {**batch, "use_cache": False}
    config = transformers.ViTConfig(image_size=8, patch_size=4, **shape)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).reshape(2, 3, 8, 8),
        "labels": torch.tensor([0, 1]),
    }


@pytest.mark.filterwarnings("ignore")
@VARIANTS
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "vit"])
def test_transformers(transformers, name, use_reentrant):
    """`gradient_checkpointing_enable`, with its function set to ours: every bit as without."""
    seen = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model, batch = small(transformers, name)
        model.train()
        regions = []
        if checkpointed:
            options = {"use_reentrant": use_reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

            def checkpoint(*args, regions=regions, options=options):
                regions.append(1)
                return ours.checkpoint(*args, **options)

            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
        if name != "vit":
            model.enable_input_require_grads()
        torch.manual_seed(1)
        loss = model(**batch).loss
        loss.backward()
        seen.append([loss.detach(), torch.get_rng_state(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(regions) == 2
    for i, (a, b) in enumerate(zip(*seen, strict=True)):
        assert torch.equal(a, b), i
