"""Attention on a GPU: flex attention with a block mask made from the layout.

Shapes: B rows, L positions, H query heads, K key/value heads, D head size.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.layout import DocumentLayout


def attention_by_flex(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, layout: DocumentLayout, scale: float, window: int | None
) -> Tensor:
    """ops.attention.attention on a GPU: q [B, L, H, D], k and v [B, L, K, D or Dv] -> [B, L, H, Dv], 0 at padding.

    Source: torch.nn.attention.flex_attention. The block mask is made once for each layout and window, and kept there.
    """
    # Inside a compiled block the call is traced with the rest; outside, uncompiled flex attention would build all scores.
    attend = _flex_attention() if torch.compiler.is_compiling() else _compiled_flex_attention()
    block_mask = layout.derive(("block mask", window), lambda: make_block_mask(layout, window))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BLKD, v_BLKD))
    out = attend(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return torch.where(layout.valid[:, :, None, None], out.transpose(1, 2), 0)


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled_flex_attention() -> Any:
    return torch.compile(_flex_attention())


def make_block_mask(layout: DocumentLayout, window: int | None, block: int = 128) -> Any:
    """The BlockMask of a layout, from the first and last segment of each block: no [L, L] mask is ever built.

    A run of padding counts as a document of its own, so that no query is left without a key.
    """
    from torch.nn.attention.flex_attention import BlockMask

    ids_BL = layout.document_ids
    length, device = ids_BL.shape[1], ids_BL.device
    segment_BL = F.pad(ids_BL.diff(dim=1) != 0, (1, 0)).cumsum(1, dtype=torch.int32)

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (segment_BL[b, q] == segment_BL[b, k]) & (q >= k)
        return inside if window is None else inside & (q - k <= window)

    starts = torch.arange(0, length, block, device=device)
    ends = (starts + block - 1).clamp(max=length - 1)
    first, last = segment_BL[:, starts], segment_BL[:, ends]
    some = (starts[:, None] >= starts) & (last[:, None, :] >= first[:, :, None])
    every = (starts[:, None] > starts) & (first[:, None, :] == last[:, :, None])
    every &= (ends - starts == block - 1)[:, None]  # torch counts what lies beyond the row as masked
    if window is not None:
        some &= starts[:, None] - ends <= window
        every &= ends[:, None] - starts <= window

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=block, mask_mod=mask, seq_lengths=(length, length)
    )
