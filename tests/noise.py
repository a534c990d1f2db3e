"""An operator that is not deterministic, as kernels that add atomically are not."""

import itertools

import torch

SEED = [itertools.count()]  # of the next call's noise; steps that begin alike put another one here


@torch.library.custom_op("checkpointing_tests::shaken", mutates_args=())
def shaken(x: torch.Tensor) -> torch.Tensor:
    """Its argument, with other noise at each call."""
    noise = torch.Generator().manual_seed(next(SEED[0]))
    return x * (1 + 0.003 * torch.randn(x.shape, generator=noise))


shaken.register_autograd(lambda ctx, grad: grad)
