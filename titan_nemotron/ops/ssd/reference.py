"""The scan as its definition: one step after another. Differentiable by autograd in any dtype; slow.

Shapes: B rows, L positions, H heads, P channels of a head, G groups of heads, N state size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def sequential_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    document_ids_BL: Tensor,
    dt_limit: tuple[float, float],
    initial_state_BHPN: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ssd_scan."""
    dtype = torch.promote_types(x_BLHP.dtype, torch.float32)
    num_rows, length, num_heads, _ = x_BLHP.shape
    repeat = num_heads // B_BLGN.shape[2]
    x, A, D = x_BLHP.to(dtype), A_H.to(dtype), D_H.to(dtype)
    B, C = (tensor.to(dtype).repeat_interleave(repeat, dim=2) for tensor in (B_BLGN, C_BLGN))
    dt = F.softplus(dt_BLH.to(dtype) + dt_bias_H.to(dtype)).clamp(*dt_limit)
    valid = document_ids_BL >= 0
    state = x.new_zeros(num_rows, num_heads, x.shape[3], B.shape[3])
    if initial_state_BHPN is not None:
        state = initial_state_BHPN.to(dtype).clone()
    document = document_ids_BL.new_full((num_rows,), -1)
    outputs = []
    for t in range(length):
        restart = valid[:, t] & (document >= 0) & (document_ids_BL[:, t] != document)
        document = torch.where(valid[:, t], document_ids_BL[:, t], document)
        d = torch.where(valid[:, t, None], dt[:, t], 0)
        state = torch.where(restart[:, None, None, None], 0, state)
        update = (d[..., None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = torch.exp(d * A)[..., None, None] * state + update
        y = (state * C[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t]
        outputs.append(torch.where(valid[:, t, None, None], y, 0))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
    return y.to(x_BLHP.dtype), state
