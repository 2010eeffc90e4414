"""What the tests of operations share."""

from typing import Any

import torch
from torch import Tensor

from titan_nemotron.ops.attention.spans import Span, span_attention, span_attention_backward


def make_documents(seed: int, num_rows: int, length: int, boundary: float, padding: float) -> Tensor:
    """Document ids [rows, length]: each position starts a document, or is padding, with the given probabilities."""
    random = torch.Generator().manual_seed(seed)
    ids = (torch.rand(num_rows, length, generator=random) < boundary).cumsum(1)
    return torch.where(torch.rand(num_rows, length, generator=random) < padding, -1, ids)


def relative(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; where a gradient cancels, 0.1 an element stands for |expected|."""
    return float((actual.double() - expected).norm() / max(float(expected.norm()), 0.1 * expected.numel() ** 0.5))


def of_largest(actual: Tensor, expected: Tensor) -> float:
    """Largest error over the largest expected value, whatever its size; infinite when something is not finite."""
    if not actual.isfinite().all():
        return float("inf")
    error, largest = (actual.double() - expected).abs().amax(), expected.abs().amax()
    return float(error / largest) if largest else float(error)


class SpanAttention(torch.autograd.Function):
    """ops.attention.spans on 60 queries and 50 keys with the gradients that a ring would take: spans that leave gaps."""

    SPANS = (Span(2, 9, 3, 20, causal=False), Span(10, 30, 20, 50, causal=False), Span(40, 44, 40, 44, causal=True))

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        out, lse = span_attention(*qkv, SpanAttention.SPANS, 0.25)
        ctx.save_for_backward(*qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return span_attention_backward(grad, *ctx.saved_tensors, SpanAttention.SPANS, 0.25)
