"""The choice of a path by device, and forcing it."""

from typing import get_args, get_type_hints

import pytest
import torch

from titan_nemotron.errors import UserError
from titan_nemotron.ops import kernels
from titan_nemotron.ops.config import KernelsConfig


@pytest.fixture(autouse=True)
def unforced():
    yield
    kernels.configure(KernelsConfig())


def test_the_table_offers_exactly_the_paths_that_exist():
    for op, hint in get_type_hints(KernelsConfig).items():
        if op in kernels.PATHS:
            assert set(get_args(hint)) == {"auto"} | {path.name for path in kernels.PATHS[op]}, op
    assert set(KernelsConfig.model_fields) == set(kernels.PATHS)


def test_fp64_takes_the_reference_and_fp32_the_fast_path():
    assert kernels.chosen("ssd", torch.zeros(1, dtype=torch.float64)) == "reference"
    assert kernels.chosen("ssd", torch.zeros(1)) == "chunked"


def test_a_forced_path_is_taken_and_described():
    kernels.configure(KernelsConfig(ssd="reference"))
    assert kernels.chosen("ssd", torch.zeros(1)) == "reference"
    assert "ssd: reference (forced)" in kernels.describe("cpu")


def test_a_forced_path_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setitem(kernels._INSTALLED, "mamba_ssm", False)
    with pytest.raises(UserError, match="ssd.*mamba_ssm.*install"):
        kernels.configure(KernelsConfig(ssd="mamba_ssm"))
    monkeypatch.setitem(kernels._INSTALLED, "mamba_ssm", True)
    kernels.configure(KernelsConfig(ssd="mamba_ssm"))
    with pytest.raises(UserError, match="ssd.*does not run on cpu"):
        kernels.chosen("ssd", torch.zeros(1))
