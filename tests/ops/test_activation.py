"""Squared ReLU."""

import torch

from titan_nemotron.ops.activation import relu2


def test_values_and_derivatives():
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.testing.assert_close(relu2(x), x.clamp(min=0) ** 2)
    assert torch.autograd.gradcheck(relu2, x)
    compiled = torch.compile(relu2, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x)[0], 2 * x.clamp(min=0))
