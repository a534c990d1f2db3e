"""Programs whose memory is worth measuring. Each one is built with its gradients already there,
so that they are no part of what is counted, and is a function without arguments that returns
a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

Forward = Callable[[], Tensor]


def _with_gradients(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)


class Block(nn.Module):
    """A pre-norm transformer block over (batch, context, width)."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.dropout(
            self.out(
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
        )
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def transformer(
    layers: int = 12,
    width: int = 256,
    batch: int = 4,
    context: int = 128,
    by_hand: bool = False,
    dropout: float = 0.0,
) -> Forward:
    """Blocks; `by_hand` each in a torch checkpoint."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
    x = torch.randn(batch, context, width)
    _with_gradients(blocks.parameters())

    def forward() -> Tensor:
        y = x
        for block in blocks:
            y = torch_checkpoint(block, y, use_reentrant=False) if by_hand else block(y)
        return y.square().mean()

    return forward


def lstm(steps: int = 256, width: int = 256, batch: int = 32, outputs: bool = False) -> Forward:
    """An unrolled LSTM cell; its loss reads the last state, or the outputs of all steps."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(width, width)
    head = nn.Linear(width, width)
    xs = torch.randn(steps, batch, width)
    _with_gradients([*cell.parameters(), *head.parameters()])

    def forward() -> Tensor:
        h, c = torch.zeros(batch, width), torch.zeros(batch, width)
        seen = []
        for x in xs:
            h, c = cell(x, (h, c))
            if outputs:
                seen.append(h)
        return head(torch.stack(seen) if outputs else h).square().mean()

    return forward


class _Twice(nn.Sequential):
    """Two convolutions, each with normalisation and activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()),
        )


class UNet(nn.Module):
    """An encoder, and a decoder that reads what each level of the encoder has made."""

    def __init__(self, width: int = 16, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(_Twice(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.middle = _Twice(widths[-1], widths[-1] * 2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.join = nn.ModuleList(_Twice(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


def unet(width: int = 16, levels: int = 4, batch: int = 2, size: int = 64) -> Forward:
    torch.manual_seed(0)
    net = UNet(width, levels)
    x = torch.randn(batch, 3, size, size)
    _with_gradients(net.parameters())
    return lambda: net(x).square().mean()


def chain(layers: int, width: int = 64, batch: int = 128) -> Forward:
    """Equal layers, one after the other."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    x = torch.randn(batch, width)
    _with_gradients(net.parameters())
    return lambda: net(x).square().mean()
