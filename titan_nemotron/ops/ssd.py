"""The Mamba-2 scan (state-space duality), restarted at every document.

Shapes: B rows, L positions, H heads, P channels of a head, G groups of heads, N state size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _time_step(dt: Tensor, dt_bias_H: Tensor, dt_limit: tuple[float, float]) -> Tensor:
    return F.softplus(dt + dt_bias_H).clamp(*dt_limit)


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

    A = -exp(A_log) is negative, one number a head; head h reads group h // (H / G) of B and C. S restarts from zero where
    a document starts; initial_state belongs to the document of position 0. At padding (id -1) y is 0 and S is carried
    through unchanged, so the final state is the one after the last valid token. chunk_size never changes the result.
    Returns y [B, L, H, P] in x's dtype and the final state [B, H, P, N] in at least fp32.
    """
    dtype = torch.promote_types(x_BLHP.dtype, torch.float32)
    num_rows, length, num_heads, _ = x_BLHP.shape
    repeat = num_heads // B_BLGN.shape[2]
    x, A, D = x_BLHP.to(dtype), A_H.to(dtype), D_H.to(dtype)
    B, C = (tensor.to(dtype).repeat_interleave(repeat, dim=2) for tensor in (B_BLGN, C_BLGN))
    dt = _time_step(dt_BLH.to(dtype), dt_bias_H.to(dtype), dt_limit)
    valid = document_ids_BL >= 0
    state = x.new_zeros(num_rows, num_heads, x.shape[3], B.shape[3])
    if initial_state_BHPN is not None:
        state = initial_state_BHPN.to(dtype)
    document = document_ids_BL[:, 0]
    outputs = []
    for t in range(length):
        document = torch.where(document < 0, document_ids_BL[:, t], document)
        restart = valid[:, t] & (document_ids_BL[:, t] != document)
        document = torch.where(valid[:, t], document_ids_BL[:, t], document)
        d = torch.where(valid[:, t, None], dt[:, t], 0)
        state = torch.where(restart[:, None, None, None], 0, state)
        update = (d[..., None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = torch.exp(d * A)[..., None, None] * state + update
        y = (state * C[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t]
        outputs.append(torch.where(valid[:, t, None, None], y, 0))
    y = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
    return y.to(x_BLHP.dtype), state


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
    """One token of ssd_scan for decoding: returns y [B, H, P] in x's dtype and the new state [B, H, P, N]."""
    document_ids = torch.zeros(x_BHP.shape[0], 1, dtype=torch.int32, device=x_BHP.device)
    y, state = ssd_scan(
        x_BHP[:, None], dt_BH[:, None], A_H, B_BGN[:, None], C_BGN[:, None], D_H, dt_bias_H, document_ids,
        dt_limit=dt_limit, initial_state_BHPN=state_BHPN,
    )  # fmt: skip
    return y[:, 0], state
