"""What every test runs under."""

import os

# Before torch is imported. One thread: the tensors of tests are small, and several ranks share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

try:
    from hypothesis import settings
except ImportError:  # the GPU tests, alone, do without
    pass
else:
    settings.register_profile("untimed", deadline=None)  # no test fails on a clock
    settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch.cuda sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
