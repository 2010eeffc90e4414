"""Causal depthwise convolution that never looks across a document boundary.

Shapes: B rows, L positions, C channels, K taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.conv.package import packaged_sum, takes
from titan_nemotron.ops.conv.reference import masked_sum
from titan_nemotron.ops.conv.shifted import shifted_sum
from titan_nemotron.ops.kernels import chosen

__all__ = ["causal_conv1d", "causal_conv1d_state", "causal_conv1d_step"]


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
    if x_BLC.shape[1] == 0 or path == "reference":
        return masked_sum(x_BLC, weight_CK, bias_C, document_ids_BL, initial_state_BCK)
    if path == "causal_conv1d" and takes(x_BLC, weight_CK, initial_state_BCK):
        return packaged_sum(x_BLC, weight_CK, bias_C, document_ids_BL)
    return shifted_sum(x_BLC, weight_CK, bias_C, document_ids_BL, initial_state_BCK)


def causal_conv1d_step(
    state_BCK: Tensor, x_BC: Tensor, weight_CK: Tensor, bias_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token of causal_conv1d for decoding: returns y [B, C] in x's dtype and the new state [B, C, K]."""
    state = torch.cat([state_BCK[:, :, 1:], x_BC.to(state_BCK.dtype)[:, :, None]], dim=2)
    y = (state * weight_CK.to(state.dtype)).sum(-1)
    if bias_C is not None:
        y = y + bias_C.to(state.dtype)
    return F.silu(y).to(x_BC.dtype), state


def causal_conv1d_state(state_BCK: Tensor, x_BLC: Tensor, document_ids_BL: Tensor) -> Tensor:
    """The initial_state with which causal_conv1d continues a sequence after x: the last K inputs that are not padding.

    state [B, C, K]: the one that x itself continued. Padding (document id -1) may only stand at a row's end; a row without
    a valid input keeps its state. Returns [B, C, K], oldest first, in the state's dtype.
    """
    history_BCS = torch.cat([state_BCK, x_BLC.transpose(1, 2).to(state_BCK.dtype)], dim=2)
    taps = torch.arange(state_BCK.shape[2], device=state_BCK.device)
    columns_BK = (document_ids_BL >= 0).sum(1)[:, None] + taps
    return history_BCS.gather(2, columns_BK[:, None].expand(-1, history_BCS.shape[1], -1))
