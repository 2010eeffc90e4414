"""The linear map: both ways round equal the definition, forward and backward."""

import pytest
import torch

from titan_nemotron.ops import kernels
from titan_nemotron.ops.config import KernelsConfig
from titan_nemotron.ops.linear import FEW_ROWS, linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (2, 1), (4, 2), (8, 1), (3, 3), (), (0, 5)])
def test_equals_the_definition(shape, bias):
    random = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*size, generator=random, dtype=torch.float64) for size in ((*shape, 24), (10, 24), (10,))]
    leaves = leaves if bias else leaves[:2]
    upstream = torch.randn(*shape, 10, generator=random, dtype=torch.float64)

    def run(dtype: torch.dtype, function) -> list[torch.Tensor]:
        inputs = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        y = function(*inputs)
        assert y.is_contiguous()
        return [y.detach(), *torch.autograd.grad(y, inputs, upstream.to(dtype))]

    def definition(x, weight, bias=None):
        y = torch.einsum("...k,nk->...n", x, weight)
        return y if bias is None else y + bias

    for actual, expected in zip(run(torch.float32, linear), run(torch.float64, definition), strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.autograd.gradcheck(linear, [leaf.requires_grad_() for leaf in leaves])


def test_the_transposed_path_is_taken_for_few_rows_alone_and_can_be_turned_off(monkeypatch):
    taken = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *arguments: taken.append(arguments[0].shape[0]) or real(*arguments))
    weight = torch.randn(10, 24)
    for rows in range(12):
        linear(torch.randn(rows, 24), weight)
    assert len(taken) == FEW_ROWS[1] - FEW_ROWS[0] + 1
    kernels.configure(KernelsConfig(linear="reference"))
    try:
        linear(torch.randn(4, 24), weight)
    finally:
        kernels.configure(KernelsConfig())
    assert len(taken) == FEW_ROWS[1] - FEW_ROWS[0] + 1
