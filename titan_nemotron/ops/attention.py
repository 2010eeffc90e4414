"""Causal attention inside documents, with grouped key/value heads.

Shapes: B rows, L positions, S keys, H query heads, K key/value heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.layout import DocumentLayout


def attention(
    q_BLHD: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    layout: DocumentLayout,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """softmax(scale * q k^T + mask) v; query i sees key j iff same document, j <= i and, with a window, i - j <= window.

    Query head h reads key/value head h // (H / K). Padding positions give 0. Softmax in at least fp32.
    Returns [B, L, H, Dv] in q's dtype.
    """
    index = torch.arange(q_BLHD.shape[1], device=q_BLHD.device)
    ids = layout.document_ids
    mask = (ids[:, :, None] == ids[:, None, :]) & (index[:, None] >= index)
    if window is not None:
        mask &= index[:, None] - index <= window
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BLKD, v_BLKD))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=True)
    return torch.where(layout.valid[:, :, None, None], out.transpose(1, 2), 0)


def cached_attention(q_BLHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask_BLS: Tensor, *, scale: float) -> Tensor:
    """Attention of new queries over cached keys: query i of row b sees key j iff mask[b, i, j].

    A query that sees nothing gives 0. Returns [B, L, H, Dv] in q's dtype.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BSKD, v_BSKD))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BLS[:, None], scale=scale, enable_gqa=True)
    return torch.where(mask_BLS.any(-1)[:, :, None, None], out.transpose(1, 2), 0)
