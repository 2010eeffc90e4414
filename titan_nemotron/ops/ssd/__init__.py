"""The Mamba-2 scan (state-space duality), restarted at every document.

Shapes: B rows, L positions, H heads, P channels of a head, G groups of heads, N state size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.kernels import chosen
from titan_nemotron.ops.ssd.chunked import chunked_scan
from titan_nemotron.ops.ssd.mamba import mamba_scan
from titan_nemotron.ops.ssd.reference import sequential_scan

__all__ = ["ssd_scan", "ssd_step"]


def ssd_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    document_ids_BL: Tensor,
    *,
    chunk_size: int = 128,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """With d = clamp(softplus(dt + dt_bias)):  S_t = exp(d_t A) S_{t-1} + d_t x_t B_t^T,  y_t = S_t C_t + D x_t.

    A = -exp(A_log) is negative, one number a head; head h reads group h // (H / G) of B and C. S restarts from zero
    where a document starts; initial_state belongs to the document of position 0. At padding (id -1) y is 0 and S is
    carried through unchanged, so the final state is the one after the last valid token. chunk_size never changes the
    result: it is a hint, which only the GPU path heeds. Source: Dao and Gu, "Transformers are SSMs", 2024.
    Returns y [B, L, H, P] in x's dtype and the final state [B, H, P, N] in at least fp32.
    """
    arguments = (x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, document_ids_BL, dt_limit, initial_state_BHPN)
    path = chosen("ssd", x_BLHP)
    if x_BLHP.shape[1] == 0 or path == "reference":
        return sequential_scan(*arguments)
    if path == "mamba_ssm":
        return mamba_scan(*arguments, chunk_size)
    return chunked_scan(*arguments)


def ssd_step(
    state_BHPN: Tensor,
    x_BHP: Tensor,
    dt_BH: Tensor,
    A_H: Tensor,
    B_BGN: Tensor,
    C_BGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """One token of ssd_scan for decoding: returns y [B, H, P] in x's dtype and the new state [B, H, P, N].

    A state of at least fp32 is updated in place: it is the largest thing that a decoding step writes.
    """
    dtype = torch.promote_types(x_BHP.dtype, torch.float32)
    num_groups, state_size = B_BGN.shape[1:]
    x, A, B, C = x_BHP.to(dtype), A_H.to(dtype), B_BGN.to(dtype), C_BGN.to(dtype)
    d = F.softplus(dt_BH.to(dtype) + dt_bias_H.to(dtype)).clamp(*dt_limit)
    num_rows, num_heads, channels = x.shape
    grouped = (num_rows, num_groups, num_heads // num_groups, channels)
    state = state_BHPN.to(dtype).mul_(torch.exp(d * A)[..., None, None])
    update = (d[..., None] * x).view(*grouped, 1)
    state.view(*grouped, state_size).addcmul_(update, B[:, :, None, None])
    # C first: the product with a single row on the right reads the state at a fifth of the speed.
    read = torch.bmm(C.reshape(-1, 1, state_size), state.view(-1, num_heads // num_groups * channels, state_size).mT)
    y = torch.addcmul(read.view(x.shape), D_H.to(dtype)[:, None], x)
    return y.to(x_BHP.dtype), state
