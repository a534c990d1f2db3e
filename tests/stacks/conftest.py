"""Other people's libraries, as they are; nothing is downloaded."""

import importlib.util
import os

import pytest
import torch

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    WANDB_DISABLED="true",
    TOKENIZERS_PARALLELISM="false",
)


@pytest.fixture(scope="session", autouse=True)
def torchvision_can_be_imported():
    """The kernels of its wheel on PyPI can't be loaded beside a torch for CPUs alone."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision"), library
