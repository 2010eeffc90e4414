"""Causal attention inside documents, with grouped key/value heads.

Shapes: B rows, L positions, T = B * L tokens, S keys, H query heads, K key/value heads, D head size.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.layout import DocumentLayout
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
            return _by_documents(q_BLHD, k_BLKD, v_BLKD, layout, scale, window)
        case "flex":
            return _flex(q_BLHD, k_BLKD, v_BLKD, layout, scale, window)
    return _reference(q_BLHD, k_BLKD, v_BLKD, layout, scale, window)


def cached_attention(q_BLHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask_BLS: Tensor, *, scale: float) -> Tensor:
    """Attention of new queries over cached keys: query i of row b sees key j iff mask[b, i, j].

    A query that sees nothing gives 0. Returns [B, L, H, Dv] in q's dtype.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BSKD, v_BSKD))
    num_rows, num_heads, length, size = q.shape
    if length == 1:
        # The query heads of one key/value head stand in for positions: no key is copied once per query head.
        q = q.reshape(num_rows, k.shape[1], -1, size)
        mask = mask_BLS[:, None].expand(-1, 1, q.shape[2], -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = out.reshape(num_rows, num_heads, 1, -1)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BLS[:, None], scale=scale, enable_gqa=True)
    return torch.where(mask_BLS.any(-1)[:, :, None, None], out.transpose(1, 2), 0)


def _derived(layout: DocumentLayout, key: Any, make: Callable[[], Any]) -> Any:
    if key not in layout.derived:
        layout.derived[key] = make()
    return layout.derived[key]


# --- reference: one mask over the row


def _reference(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, layout: DocumentLayout, scale: float, window: int | None
) -> Tensor:
    mask_BLL = _derived(layout, ("attention mask", window), lambda: _mask(layout.document_ids, window))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BLKD, v_BLKD))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BLL[:, None], scale=scale, enable_gqa=True)
    return torch.where(layout.valid[:, :, None, None], out.transpose(1, 2), 0)


def _mask(document_ids_BL: Tensor, window: int | None) -> Tensor:
    index = torch.arange(document_ids_BL.shape[1], device=document_ids_BL.device)
    mask = (document_ids_BL[:, :, None] == document_ids_BL[:, None, :]) & (index[:, None] >= index)
    if window is not None:
        mask &= index[:, None] - index <= window
    return mask


# --- CPU: one causal call a document, five times faster than a mask over the row
#
# The calls are hidden in custom operators that take tensors alone, so that a compiled block does not depend on how the
# rows are packed. These are seen as T = B * L tokens.


def _by_documents(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, layout: DocumentLayout, scale: float, window: int | None
) -> Tensor:
    size, size_v = q_BLHD.shape[-1], v_BLKD.shape[-1]
    # The fused kernel wants one head size; zeros change neither a score nor an output that is kept.
    q, k, v = (F.pad(tensor, (0, max(size, size_v) - tensor.shape[-1])) for tensor in (q_BLHD, k_BLKD, v_BLKD))
    out, _ = _documents_forward(q, k, v, layout.document_ids, scale, window)
    return out[..., :size_v] if size > size_v else out


def _segments(document_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Start of every run of one document or of padding, and whether it is padding."""
    first = torch.ones_like(document_ids_BL, dtype=torch.bool)
    first[:, 1:] = document_ids_BL[:, 1:] != document_ids_BL[:, :-1]
    starts = first.flatten().nonzero()[:, 0]
    return starts, document_ids_BL.flatten()[starts] < 0


def _calls(document_ids_BL: Tensor, window: int | None) -> list[tuple[int, int, int]]:
    """(first key, first query, end) of each call over the flattened tokens; padding is in none.

    The keys of a call are those from the first key to the end. Without a window, or in a document that it covers, keys
    and queries are the document; else the queries of a longer document come in blocks of the window's size.
    """
    starts, padding = (tensor.tolist() for tensor in _segments(document_ids_BL))
    calls = []
    for start, end, skip in zip(starts, [*starts[1:], document_ids_BL.numel()], padding):
        block = end - start if window is None or end - start <= window + 1 else max(window, 64)
        for first in range(start, end, block) if not skip else ():
            key = start if window is None else max(start, first - window)
            calls.append((key, first, min(first + block, end)))
    return calls


def _call_mask(call: tuple[int, int, int], window: int | None, like: Tensor) -> Tensor | None:
    """The additive mask of a call that looks back beyond its own queries; None where causal says all."""
    key, first, end = call
    if window is None or end - key <= window + 1:
        if key == first:
            return None
        window = end - key
    q, k = torch.arange(first, end)[:, None], torch.arange(key, end)
    return torch.zeros(end - first, end - key, dtype=like.dtype).masked_fill((k > q) | (q - k > window), -torch.inf)


def _common_length(document_ids_BL: Tensor, window: int | None) -> int | None:
    """The length of all documents when one batched causal call does for all of them."""
    starts, padding = _segments(document_ids_BL)
    if starts.numel() == 0 or bool(padding.any()):
        return None
    length = document_ids_BL.numel() // starts.numel()
    if bool((starts != length * torch.arange(starts.numel())).any()):
        return None
    return length if window is None or length <= window + 1 else None


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.library.custom_op("titan_nemotron::document_attention", mutates_args=())
def _documents_forward(
    q: Tensor, k: Tensor, v: Tensor, document_ids_BL: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """out [B, L, H, D] and the log-sum-exp of the scores [T, H]."""
    num_heads = q.shape[2]
    length = _common_length(document_ids_BL, window)
    if length is not None:
        batch = (tensor.reshape(-1, length, *tensor.shape[2:]).transpose(1, 2) for tensor in (q, k, v))
        out, lse = _flash(*batch, 0.0, True, scale=scale)
        return out.transpose(1, 2).reshape(q.shape), lse.transpose(1, 2).reshape(-1, num_heads)
    out = q.new_zeros(q.shape)
    q, k, v, out_THD = (tensor.reshape(-1, *tensor.shape[2:]) for tensor in (q, k, v, out))
    lse_TH = torch.zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for call in _calls(document_ids_BL, window):
        _, first, end = call
        mask = _call_mask(call, window, q)
        part, lse = _flash(*_heads_first(q, k, v, call), 0.0, mask is None, attn_mask=mask, scale=scale)
        out_THD[first:end] = part[0].transpose(0, 1)
        lse_TH[first:end] = lse[0].transpose(0, 1)
    return out, lse_TH


def _heads_first(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, call: tuple[int, int, int]) -> tuple[Tensor, ...]:
    key, first, end = call
    parts = (q_THD[first:end], k_TKD[key:end], v_TKD[key:end])
    return tuple(part.transpose(0, 1)[None] for part in parts)


@torch.library.custom_op("titan_nemotron::document_attention_backward", mutates_args=())
def _documents_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_TH: Tensor,
    document_ids_BL: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    length = _common_length(document_ids_BL, window)
    if length is not None:
        batch = (tensor.reshape(-1, length, *tensor.shape[2:]).transpose(1, 2) for tensor in (grad, q, k, v, out))
        lse = lse_TH.reshape(-1, length, lse_TH.shape[1]).transpose(1, 2).contiguous()
        grads = _flash_backward(*batch, lse, 0.0, True, scale=scale)
        return tuple(g.transpose(1, 2).reshape(like.shape) for g, like in zip(grads, (q, k, v)))  # type: ignore[return-value]
    grads = tuple(torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))
    dq, dk, dv = (tensor.flatten(0, 1) for tensor in grads)
    grad, q, k, v, out = (tensor.reshape(-1, *tensor.shape[2:]) for tensor in (grad, q, k, v, out))
    for call in _calls(document_ids_BL, window):
        key, first, end = call
        mask = _call_mask(call, window, q)
        above, saved = (tensor[first:end].transpose(0, 1)[None] for tensor in (grad, out))
        lse = lse_TH[first:end].T[None].contiguous()
        parts = _flash_backward(
            above, *_heads_first(q, k, v, call), saved, lse, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        for total, part, start in zip((dq, dk, dv), parts, (first, key, key)):
            total[start:end] += part[0].transpose(0, 1)
    return grads


@_documents_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, document_ids_BL: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[0] * q.shape[1], q.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), lse


@_documents_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, document_ids_BL, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, document_ids_BL)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _documents_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *grads, None, None, None


_documents_forward.register_autograd(_gradients, setup_context=_keep)


# --- GPU: flex attention with a block mask made from the layout


def _flex(
    q_BLHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, layout: DocumentLayout, scale: float, window: int | None
) -> Tensor:
    # Inside a compiled block the call is traced with the rest; outside, uncompiled flex attention would build all scores.
    attend = _flex_attention() if torch.compiler.is_compiling() else _compiled_flex_attention()
    block_mask = _derived(layout, ("block mask", window), lambda: _block_mask(layout, window))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHD, k_BLKD, v_BLKD))
    out = attend(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return torch.where(layout.valid[:, :, None, None], out.transpose(1, 2), 0)


def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled_flex_attention() -> Any:
    return torch.compile(_flex_attention())


def _block_mask(layout: DocumentLayout, window: int | None, block: int = 128) -> Any:
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
