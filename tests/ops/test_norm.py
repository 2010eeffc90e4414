"""The norms: the definitions in fp64, the fused paths against them."""

import pytest
import torch

from tests.ops.support import of_largest, relative
from titan_nemotron.ops.norm import gated_rms_norm, rms_norm

SHAPES = [(2, 5, 12), (1, 1, 4), (7, 8), (0, 4), (3, 0, 8)]


def make(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """y, z and a weight; some channels nearly zero, so that eps counts."""
    random = torch.Generator().manual_seed(0)
    y, z, w = (torch.randn(s, generator=random, dtype=torch.float64) for s in (shape, shape, shape[-1:]))
    y[:1] *= 1e-3
    return [y, z, w]


CASES = {
    "plain": lambda y, z, w: rms_norm(y, w, 1e-5),
    "gated": lambda y, z, w: gated_rms_norm(y, z, w, w.shape[0] // 2, 1e-5),
    "one group": lambda y, z, w: gated_rms_norm(y, z, w, w.shape[0], 1e-5),
}


@pytest.mark.parametrize("norm", CASES.values(), ids=CASES)
def test_the_reference_has_the_right_derivatives(norm):
    leaves = [tensor.requires_grad_() for tensor in make((2, 3, 4))]
    assert torch.autograd.gradcheck(norm, leaves)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_fused_equals_the_definition(norm, shape, dtype, tolerance):
    def run(dtype):
        y, z, w = make(shape)
        leaves = [y.to(dtype).requires_grad_(), z.to(dtype).requires_grad_(), w.requires_grad_()]
        out = norm(*leaves)
        upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        return out, *torch.autograd.grad(out, leaves, upstream, allow_unused=True)

    for actual, expected in zip(run(dtype), run(torch.float64), strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None and expected.numel():
            assert relative(actual, expected) < tolerance


def test_a_strided_gate_and_a_block_compile_in_one_graph():
    """z is a slice of a projection; the compiled norms equal the eager ones."""
    projected = torch.randn(2, 3, 20)
    y, w = torch.randn(2, 3, 8), torch.randn(8)
    eager = gated_rms_norm(y, projected[..., :8], w, 4, 1e-5)
    compiled = torch.compile(gated_rms_norm, fullgraph=True, backend="aot_eager")(y, projected[..., :8], w, 4, 1e-5)
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e15, 1e18])
@pytest.mark.parametrize("norm", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_zero_and_huge_inputs(norm, scale, dtype, tolerance):
    """Forward and backward. The cube of the reciprocal underflows from 1e15 on, squares overflow beyond 1e18."""
    y, z, w = (tensor.to(dtype) for tensor in make((4, 8)))
    y = (y / y.abs().amax(1, keepdim=True) * scale).to(dtype)

    def run(dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (y, z, w)]
        out = norm(*leaves)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).bfloat16()
        return out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype), allow_unused=True)

    for actual, expected in zip(run(dtype), run(torch.float64), strict=True):
        if expected is not None:
            assert of_largest(actual, expected) < tolerance
    assert run(dtype)[0].any() == bool(scale)
