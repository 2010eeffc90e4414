"""The linear map: every way to multiply few rows equals the definition, forward and backward."""

import pytest
import torch

from titan_nemotron.ops import kernels
from titan_nemotron.ops.config import KernelsConfig
from titan_nemotron.ops.linear import FEW_ROWS, linear


@pytest.fixture(params=["transposed", "blocks", "auto"])
def path(request):
    kernels.configure(KernelsConfig(linear=request.param))
    yield request.param
    kernels.configure(KernelsConfig())


@pytest.mark.parametrize("outputs", [10, 640, 451])  # one block, ten, eleven or none
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (2, 1), (4, 2), (8, 1), (3, 3), (), (0, 5)])
def test_equals_the_definition(shape, bias, outputs, path):
    random = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(*size, generator=random, dtype=torch.float64) for size in ((*shape, 24), (outputs, 24), (outputs,))
    ]
    leaves = leaves if bias else leaves[:2]
    upstream = torch.randn(*shape, outputs, generator=random, dtype=torch.float64)

    def run(dtype: torch.dtype, function) -> list[torch.Tensor]:
        inputs = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        y = function(*inputs)
        assert y.is_contiguous()
        return [y.detach(), *torch.autograd.grad(y, inputs, upstream.to(dtype))]

    def definition(x, weight, bias=None):
        y = torch.einsum("...k,nk->...n", x, weight)
        return y if bias is None else y + bias

    for actual, expected in zip(run(torch.float32, linear), run(torch.float64, definition), strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=3e-5, rtol=1e-5)  # sums of 640 products
    if outputs == 10:
        assert torch.autograd.gradcheck(linear, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("path, product", [("transposed", "mm"), ("blocks", "bmm")])
def test_a_path_is_taken_for_few_rows_alone_and_can_be_turned_off(path, product, monkeypatch):
    taken = []
    real = getattr(torch, product)
    monkeypatch.setattr(torch, product, lambda *arguments: taken.append(arguments) or real(*arguments))
    weight = torch.randn(10, 24)
    expected = FEW_ROWS[1] - FEW_ROWS[0] + 1
    kernels.configure(KernelsConfig(linear=path))
    try:
        for rows in range(12):
            linear(torch.randn(rows, 24), weight)
        assert len(taken) == expected
        linear(torch.randn(4, 24, dtype=torch.bfloat16), weight.bfloat16())  # measured in fp32 alone
        kernels.configure(KernelsConfig(linear="reference"))
        linear(torch.randn(4, 24), weight)
    finally:
        kernels.configure(KernelsConfig())
    assert len(taken) == expected
