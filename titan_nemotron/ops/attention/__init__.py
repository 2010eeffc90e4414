"""Causal attention inside documents, with grouped key/value heads.

Shapes: B rows, L positions, S keys, H query heads, K key/value heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.ops.attention.documents import attention_by_documents
from titan_nemotron.ops.attention.flex import attention_by_flex
from titan_nemotron.ops.kernels import chosen


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

    Query head h reads key/value head h // (H / K); v may have another head size Dv. Padding positions give 0.
    Softmax in at least fp32. Returns [B, L, H, Dv] in q's dtype.
    """
    match chosen("attention", q_BLHD):
        case "documents":
            return attention_by_documents(q_BLHD, k_BLKD, v_BLKD, layout.document_ids, scale, window)
        case "flex":
            return attention_by_flex(q_BLHD, k_BLKD, v_BLKD, layout, scale, window)
    return _reference(q_BLHD, k_BLKD, v_BLKD, layout, scale, window)


def cached_attention(
    q_BLHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask_BLS: Tensor | None, *, scale: float
) -> Tensor:
    """Attention of new queries over cached keys: query i of row b sees key j iff mask[b, i, j], all keys without a mask.

    A query that sees nothing gives 0. Returns [B, L, H, Dv] in q's dtype.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BSKD, v_BSKD))
    num_rows, num_heads, length, size = q.shape
    if length == 1:
        # The query heads of one key/value head stand in for positions: no key is copied once per query head.
        q = q.reshape(num_rows, k.shape[1], -1, size)
        mask = None if mask_BLS is None else mask_BLS[:, None].expand(-1, 1, q.shape[2], -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = out.reshape(num_rows, num_heads, 1, -1)
    else:
        mask = None if mask_BLS is None else mask_BLS[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    out = out.transpose(1, 2)
    return out if mask_BLS is None else torch.where(mask_BLS.any(-1)[:, :, None, None], out, 0)


def _reference(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, layout: DocumentLayout, scale: float, window: int | None
) -> Tensor:
    mask_BLL = layout.derive(("attention mask", window), lambda: _mask(layout.document_ids, window))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BLKD, v_BLKD))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BLL[:, None], scale=scale, enable_gqa=True)
    return torch.where(layout.valid[:, :, None, None], out.transpose(1, 2), 0)


def _mask(document_ids_BL: Tensor, window: int | None) -> Tensor:
    index = torch.arange(document_ids_BL.shape[1], device=document_ids_BL.device)
    mask = (document_ids_BL[:, :, None] == document_ids_BL[:, None, :]) & (index[:, None] >= index)
    if window is not None:
        mask &= index[:, None] - index <= window
    return mask
