"""Causal depthwise convolution that never looks across a document boundary.

Shapes: B rows, L positions, C channels, K taps.
"""

from torch import Tensor

from titan_nemotron.ops.conv.reference import convolve_one, masked_sum
from titan_nemotron.ops.conv.shifted import shifted_sum
from titan_nemotron.ops.kernels import chosen

__all__ = ["causal_conv1d"]


def causal_conv1d(
    x_BLC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    document_ids_BL: Tensor,
    initial_state_BCK: Tensor | None = None,
) -> Tensor:
    """y[t] = silu(bias + sum_j weight[K-1-j] * x[t-j]) over the taps j whose token lies in t's document.

    initial_state [B, C, K]: the last K inputs before position 0 (oldest first); they belong to the document of position
    0, as when a sequence is continued; zeros otherwise. Padding positions (document id -1) give 0. Computed in at least
    fp32. Source: Dao and Gu, "Transformers are SSMs", 2024. Returns [B, L, C] in x's dtype.
    """
    path = chosen("conv", x_BLC)
    if x_BLC.shape[1] == 1 and initial_state_BCK is not None:
        return convolve_one(x_BLC, weight_CK, bias_C, document_ids_BL, initial_state_BCK)
    if path == "reference" or x_BLC.shape[1] == 0:
        return masked_sum(x_BLC, weight_CK, bias_C, document_ids_BL, initial_state_BCK)
    return shifted_sum(x_BLC, weight_CK, bias_C, document_ids_BL, initial_state_BCK)
