"""Routed experts: the definition, grouped products against it, empty experts, rows of no expert, dispatch and combine."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_nemotron.models.layers.moe import LocalDispatch
from titan_nemotron.ops import kernels
from titan_nemotron.ops.config import KernelsConfig
from titan_nemotron.ops.experts import _columns_of_few, gather_rows, permute_rows, relu2_experts, sum_rows

counts = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def inputs(seed: int, counts: list[int], tail: int, size: int, hidden: int) -> tuple[list[Tensor], Tensor]:
    """x, up, down, weights in fp64, and the ends of the experts' rows; `tail` rows belong to no expert."""
    random = torch.Generator().manual_seed(seed)
    rows, experts = sum(counts) + tail, len(counts)
    shapes = ((rows, size), (experts, hidden, size), (experts, size, hidden), (rows,))
    leaves = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
    return leaves, torch.tensor(counts).cumsum(0).to(torch.int32)


def with_gradients(leaves: list[Tensor], offsets: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    y = relu2_experts(*leaves, offsets)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream.to(dtype))]


def test_the_reference_has_the_right_values_and_derivatives():
    (x, up, down, weights), offsets = inputs(0, [2, 0, 3], 1, 3, 4)
    y = relu2_experts(x, up, down, weights, offsets)
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        expected = down[expert] @ (weights[row] * torch.relu(up[expert] @ x[row]) ** 2)
        torch.testing.assert_close(y[row], expected)
    assert not y[5].any()
    assert torch.autograd.gradcheck(lambda *leaves: relu2_experts(*leaves, offsets), (x, up, down, weights))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    counts=counts,
    tail=st.sampled_from([0, 0, 3]),
    sizes=st.sampled_from([(8, 12), (4, 4), (7, 12), (8, 5)]),  # rows of a multiple of 16 bytes, and others
)
def test_grouped_products_equal_the_loop(seed, counts, tail, sizes):
    leaves, offsets = inputs(seed, counts, tail, *sizes)
    actual, expected = (with_gradients(leaves, offsets, dtype) for dtype in (torch.float32, torch.float64))
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a.double(), e, atol=1e-4, rtol=1e-4)
    for grad in actual[2:4]:
        assert not grad[torch.tensor(counts) == 0].any()
    if tail:
        assert not actual[0][-tail:].any() and not actual[1][-tail:].any() and not actual[4][-tail:].any()


@pytest.mark.parametrize("product", ["transposed", "blocks"])
@pytest.mark.parametrize("counts", [[1, 1], [2, 0, 3, 1], [8, 1, 1], [0, 4, 4, 0]])
def test_a_few_rows_of_most_experts_are_multiplied_together_and_equal_the_loop(counts, product):
    leaves, offsets = inputs(1, counts, 0, 8, 12)
    assert _columns_of_few(sum(counts), offsets) is not None
    kernels.configure(KernelsConfig(linear=product))
    try:
        actual, expected = (with_gradients(leaves, offsets, dtype) for dtype in (torch.float32, torch.float64))
    finally:
        kernels.configure(KernelsConfig())
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a.double(), e, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("counts", [[9, 1, 1], [0, 0, 3], [5, 5], [1, 0, 0, 0, 3]])
def test_many_rows_or_few_experts_are_not(counts):
    assert _columns_of_few(sum(counts), torch.tensor(counts).cumsum(0).to(torch.int32)) is None


@pytest.mark.parametrize("counts", [[0, 0], [64, 0], [0, 33, 31]])
def test_bf16_and_an_upstream_gradient_without_strides(counts):
    leaves, offsets = inputs(0, counts, 0, 16, 8)
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    relu2_experts(*leaves, offsets).sum().backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    relu2_experts(*exact, offsets).sum().backward()
    for leaf, expected in zip(leaves, exact):
        scale = expected.grad.abs().max().clamp(min=1) if expected.numel() else 1
        torch.testing.assert_close(leaf.grad.double() / scale, expected.grad / scale, atol=0.02, rtol=0)


def test_compiled():
    leaves, offsets = inputs(0, [3, 0, 5], 1, 8, 12)
    leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]
    compiled = torch.compile(relu2_experts, fullgraph=True, backend="aot_eager")
    outputs = [run(*leaves, offsets) for run in (relu2_experts, compiled)]
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in outputs]
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@settings(max_examples=30)
@given(seed=st.integers(0, 99), tokens=st.integers(0, 9), experts=st.integers(1, 5), data=st.data())
def test_dispatch_and_combine(seed, tokens, experts, data):
    topk = data.draw(st.integers(1, experts))
    random = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=random).topk(topk).indices
    x = torch.randn(tokens, 3, generator=random, dtype=torch.float64).requires_grad_()
    weights = torch.rand(tokens, topk, generator=random, dtype=torch.float64)
    dispatcher = LocalDispatch(experts)
    rows, row_weights, offsets, handle = dispatcher.dispatch(x, chosen, weights)
    expert_of_row = torch.searchsorted(offsets, torch.arange(tokens * topk), right=True)
    assert offsets.dtype == torch.int32 and offsets[-1] == tokens * topk
    for token in range(tokens):
        for k in range(topk):
            row = handle.places_TK[token, k]
            assert torch.equal(rows[row], x[token]) and row_weights[row] == weights[token, k]
            assert expert_of_row[row] == chosen[token, k]
    torch.testing.assert_close(dispatcher.combine(rows, handle), topk * x)
    if tokens:
        y = torch.randn(tokens * topk, 3, generator=random, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: gather_rows(x, *handle), x)
        assert torch.autograd.gradcheck(lambda y: sum_rows(y, *handle), y)


def test_a_permutation_and_its_way_back():
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(permute_rows(x, order, order.argsort()), x[order])
    assert torch.autograd.gradcheck(lambda x: permute_rows(x, order, order.argsort()), x)
    assert torch.autograd.gradgradcheck(lambda x: permute_rows(x, order, order.argsort()), x)
