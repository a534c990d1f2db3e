"""With the libraries that people train with: what they write, and the bits and the recompute that
they get.

Each test says in two lines how regions are asked for. The run without them says what is right; that
an operator of the forward runs again for each region says that they are there.
"""

import contextlib
import functools
import re
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from oracle import Counting, bits
from torch import nn

import checkpointing
from checkpointing import checkpoint_modules, checkpoint_scope, torch_compat

IGNORED = [  # what libraries say about each other
    # transformers about peft's call
    "`(gradient_checkpointing_enable|is_gradient_checkpointing)` is deprecated:FutureWarning",
    "`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",  # torch; by lightning
]
pytestmark = [pytest.mark.filterwarnings(f"ignore:{line}") for line in IGNORED]
checkpoint = functools.partial(torch_compat.checkpoint, use_reentrant=False)


def observe(make, train, prepare=None):
    """What a run leaves behind, and how often the blocks' activation function ran in it."""
    torch.manual_seed(0)
    model = make()
    if prepare is not None:
        model = prepare(model) or model
    torch.manual_seed(1)
    with Counting() as counting:
        losses = train(model)
    left = bits([losses, [[p, p.grad] for p in model.parameters()], list(model.buffers())])
    return left, counting.ran[ACTIVATION[make]]


def assert_same(make, train, prepare=None, train_in_regions=None, outside=0, places=False):
    """The same bits with `prepare(model)`, or another way to train."""
    want, once = observe(make, train)
    have, twice = observe(make, train_in_regions or train, prepare)
    assert have == want
    assert once > outside
    assert once < twice if places else twice == 2 * once - outside


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, vocab_size=32)).train()


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32)).train()


def mixtral():
    """Experts and their loss. (Routers that noise shakes: test_decisions.py.)"""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_local_experts": 4}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, vocab_size=32, output_router_logits=True)
    return transformers.MixtralForCausalLM(config).train()


ACTIVATION = {gpt2: "tanh", llama: "silu", mixtral: "silu"}


def batch(step=0):
    tokens = (torch.arange(16).view(2, 8) * 7 + step) % 32
    return {"input_ids": tokens, "labels": tokens}


def samples():
    return [{key: value[0] for key, value in batch(i).items()} for i in range(4)]


def loss_in(region, model, inputs, use_cache=False):
    with region():
        return model(**inputs, use_cache=use_cache).loss


plain_loss = functools.partial(loss_in, contextlib.nullcontext)


def two_steps(model, loss_of=None):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for i in range(2):
        optimizer.zero_grad()
        loss = (loss_of or plain_loss)(model, batch(i))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def give_function(model):
    """Switch their own checkpointing on, then exchange the function that each layer calls."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)


def in_place(model):
    """A name that is not there is no harm, as long as another is."""
    checkpoint_modules(model, ["transformer.h.*", "model.layers.*"])


@pytest.mark.parametrize("make", [gpt2, llama, mixtral])
def test_transformers_with_a_cache(make):
    """By default there is one for keys and values; it is not written again."""
    without, scoped = (
        functools.partial(two_steps, loss_of=functools.partial(loss_in, region, use_cache=True))
        for region in (contextlib.nullcontext, checkpoint_scope)
    )
    assert_same(make, without, train_in_regions=scoped)
    assert_same(make, without, in_place)


@pytest.mark.parametrize("how", ["compute_loss", "modules", "function"])
def test_trainer(how, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class InScope(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            with checkpoint_scope():
                return super().compute_loss(*args, **kwargs)

    def train(model, trainer=transformers.Trainer):
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no",
            use_cpu=True, logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        return trainer(model, arguments, train_dataset=samples()).train().training_loss

    if how == "compute_loss":
        assert_same(gpt2, train, train_in_regions=functools.partial(train, trainer=InScope))
    else:
        assert_same(gpt2, train, in_place if how == "modules" else give_function)


@pytest.mark.parametrize("how", ["modules first", "modules after", "scope", "bf16"])
def test_accelerate(how):
    accelerate = pytest.importorskip("accelerate")

    def train(model, scope=False, modules=False):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        precision = "bf16" if how == "bf16" else "no"
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader(samples(), batch_size=2)
        prepared, optimizer, data = accelerator.prepare(model, optimizer, data)
        if modules:
            checkpoint_modules(prepared, "transformer.h.*")
        losses = []
        for inputs in data:
            optimizer.zero_grad()
            with checkpoint_scope(enabled=scope):
                loss = prepared(**inputs, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        assert len(losses) == 2
        return losses

    if how == "modules first":
        assert_same(gpt2, train, in_place)
    else:
        chosen = {"scope": how == "scope", "modules": how != "scope"}
        assert_same(gpt2, train, train_in_regions=functools.partial(train, **chosen))


def lora(make, **options):
    """Adapters on a frozen base, all of them with gradients."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make(), peft.LoraConfig(r=2, lora_dropout=0.1, **options))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    return model


LORA = {
    gpt2: functools.partial(lora, gpt2, target_modules=["c_attn"], fan_in_fan_out=True),
    llama: functools.partial(lora, llama, target_modules=["q_proj", "v_proj"]),
}
ACTIVATION |= {LORA[make]: ACTIVATION[make] for make in LORA}


@pytest.mark.parametrize("how", ["scope", "modules"])
def test_lightning(how, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model, scope):
            super().__init__()
            self.model, self.scope, self.losses = model, scope, []

        def training_step(self, inputs, _):
            with checkpoint_scope(enabled=self.scope):
                loss = self.model(**inputs, use_cache=False).loss
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(model, scope=False):
        data = torch.utils.data.DataLoader(samples(), batch_size=2)
        module = Module(model, scope)
        features = ["checkpointing", "progress_bar", "model_summary"]
        quiet = {"logger": False, **{f"enable_{feature}": False for feature in features}}
        options = {"max_steps": 2, "accelerator": "cpu", "default_root_dir": tmp_path}
        lightning.Trainer(**options, **quiet).fit(module, data)
        assert len(module.losses) == 2
        return module.losses

    if how == "modules":
        assert_same(gpt2, train, in_place)
    else:
        assert_same(gpt2, train, train_in_regions=functools.partial(train, scope=True))


def vit():
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "embed_dim": 24, "depth": 3, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **sizes, drop_rate=0.1)


def unet():
    diffusers = pytest.importorskip("diffusers")
    sizes = {"layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}
    return diffusers.UNet2DModel(
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        **sizes,
    ).train()


class Block(nn.Sequential):
    """Wrapped by its class."""


def mlp():
    def block():
        return Block(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.GELU(), nn.Linear(16, 8)
        )

    return nn.Sequential(block(), block(), block())


ACTIVATION |= {vit: "gelu", unet: "silu", mlp: "gelu"}


def three_backwards(model):
    images = torch.randn(*(4, 8) if isinstance(model, nn.Sequential) else (2, 3, 32, 32))
    losses = []
    for _ in range(3):
        out = model(images, 5) if hasattr(model, "time_proj") else model(images)
        losses.append(getattr(out, "sample", out).square().mean())
        losses[-1].backward()
    return [loss.detach() for loss in losses]


PAGE = Path(checkpointing.__file__).parent / "STACKS.md"
LISTINGS = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
LINES = [block for listing in LISTINGS for block in listing.split("\n\n")]
MAKERS = {"transformers": llama, "peft": LORA[llama], "timm": vit, "diffusers": unet, "torch": mlp}


@pytest.mark.parametrize("lines", LINES, ids=lambda lines: lines.splitlines()[0])
def test_the_lines_of_the_page(lines, monkeypatch):
    """Each block of lines there, on a model of the library that its comment begins with."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as theirs

    library = re.match(r"# (\w+)", lines)[1]
    whole = torch.utils.checkpoint
    monkeypatch.setattr(whole, "checkpoint", whole.checkpoint)  # to be put back
    names = {"torch": torch, "torch_compat": torch_compat, "partial": functools.partial}
    names |= {**vars(theirs), **vars(checkpointing), "Block": Block}

    def run(model, batch=None):
        here = names | {"model": model, "batch": dict(batch or {}, use_cache=False)}
        exec(lines, here)
        return here.get("loss")

    in_regions = functools.partial(two_steps, loss_of=run)
    make = MAKERS.get(library)
    if library == "any":
        assert_same(llama, two_steps, train_in_regions=in_regions, places=True)
    elif make in (llama, LORA[llama]):
        assert_same(make, two_steps, run)
    else:
        assert_same(make, three_backwards, run, outside=15 if make is unet else 0)
