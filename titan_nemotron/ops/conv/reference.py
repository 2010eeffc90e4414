"""The convolution as its definition, differentiable by autograd in any dtype.

Shapes: B rows, L positions, C channels, K taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_sum(
    x_BLC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    document_ids_BL: Tensor,
    initial_state_BCK: Tensor | None,
) -> Tensor:
    """See causal_conv1d."""
    taps, length = weight_CK.shape[1], x_BLC.shape[1]
    if length == 0:
        return x_BLC.clone()
    dtype = torch.promote_types(x_BLC.dtype, torch.float32)
    x, weight = x_BLC.to(dtype), weight_CK.to(dtype)
    if initial_state_BCK is None:
        history = x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    else:
        history = initial_state_BCK[:, :, 1:].transpose(1, 2).to(dtype)
    first = document_ids_BL[:, :1].expand(-1, taps - 1)
    x = torch.cat([history, x], dim=1)
    ids = torch.cat([first, document_ids_BL], dim=1)
    y = torch.zeros_like(x_BLC, dtype=dtype)
    for tap in range(taps):
        same = ids[:, tap : tap + length] == document_ids_BL
        y = y + torch.where(same.unsqueeze(-1), x[:, tap : tap + length], 0) * weight[:, tap]
    if bias_C is not None:
        y = y + bias_C.to(dtype)
    y = torch.where((document_ids_BL >= 0).unsqueeze(-1), F.silu(y), 0)
    return y.to(x_BLC.dtype)
