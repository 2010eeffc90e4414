"""Attention of spans of queries to spans of keys, with the log-sum-exp that joins it to attention over other keys.

What a ring of ranks computes: each step knows some of the keys. If step i gives out_i and lse_i, then all keys give
lse = log sum_i exp(lse_i) and out = sum_i exp(lse_i - lse) out_i (Liu et al., "Ring Attention", 2023). A backward needs no
step's own result: with the scores s of its keys, p = exp(s - lse) and dot(grad, out) of the whole are enough.

Shapes: T queries, S keys, H query heads, K key/value heads, D head size of queries and keys, E of values.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.kernels import chosen


class Span(NamedTuple):
    """Queries [query, query_end) read keys [key, key_end): all of them, or with `causal`, of as many, those up to their own."""

    query: int
    query_end: int
    key: int
    key_end: int
    causal: bool

    @property
    def queries(self) -> slice:
        """Their places."""
        return slice(self.query, self.query_end)

    @property
    def keys(self) -> slice:
        """Their places."""
        return slice(self.key, self.key_end)


def span_attention(
    q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, spans: Sequence[Span], scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v inside each span, and the logarithm of the softmax's denominator.

    No two spans share a query. Query head h reads key/value head h // (H / K). Returns out [T, H, E] in q's dtype and lse
    [T, H] in at least fp32; a query in no span has 0 and -inf. No gradients: span_attention_backward gives them.
    """
    out_THE = q_THD.new_zeros(*q_THD.shape[:2], v_SKE.shape[-1])
    lse_TH = torch.full(q_THD.shape[:2], -torch.inf, dtype=_wide(q_THD), device=q_THD.device)
    for causal in (True, False):
        if some := [span for span in spans if span.causal == causal]:
            _forward_of(q_THD)(q_THD, k_SKD, v_SKE, some, scale, out_THE, lse_TH)
    return out_THE, lse_TH


def span_attention_backward(
    grad_THE: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    out_THE: Tensor,
    lse_TH: Tensor,
    spans: Sequence[Span],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the keys of these spans contribute to the gradients of q, and the gradients of k and v, in their dtypes.

    out and lse are those over all keys, of this call and of others. Sums of several contributions are the caller's.
    """
    grads = torch.zeros_like(q_THD), torch.zeros_like(k_SKD), torch.zeros_like(v_SKE)
    for causal in (True, False):
        if some := [span for span in spans if span.causal == causal]:
            _backward_of(q_THD)(grad_THE, q_THD, k_SKD, v_SKE, out_THE, lse_TH, some, scale, *grads)
    return grads


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _forward_of(tensor: Tensor) -> Callable[..., None]:
    return {"cpu": _flash_on_cpu, "cuda": _flash_on_cuda}[tensor.device.type] if _flashes(tensor) else _reference


def _backward_of(tensor: Tensor) -> Callable[..., None]:
    if not _flashes(tensor):
        return _reference_backward
    return {"cpu": _flash_on_cpu_backward, "cuda": _flash_on_cuda_backward}[tensor.device.type]


def _flashes(tensor: Tensor) -> bool:
    """On a GPU flash attention takes 16 bits alone."""
    return chosen("attention_spans", tensor) == "flash" and (not tensor.is_cuda or tensor.dtype.itemsize == 2)


# --- plain torch


def _probabilities(q_THD: Tensor, k_SKD: Tensor, span: Span, scale: float) -> Tensor:
    """Scores [K, R, t, s] of a span, R = H / K query heads a key/value head; masked ones are -inf."""
    q_KRtD = q_THD[span.queries].to(_wide(q_THD)).unflatten(1, (k_SKD.shape[1], -1)).permute(1, 2, 0, 3)
    k_KsD = k_SKD[span.keys].to(_wide(q_THD)).transpose(0, 1)
    scores = scale * torch.einsum("krtd,ksd->krts", q_KRtD, k_KsD)
    if span.causal:
        index = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(index > index[:, None], -torch.inf)
    return scores


def _reference(
    q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, spans: Sequence[Span], scale: float, out_THE: Tensor, lse_TH: Tensor
) -> None:
    for span in spans:
        scores = _probabilities(q_THD, k_SKD, span, scale)
        lse_KRt = scores.logsumexp(-1)
        v_KsE = v_SKE[span.keys].to(scores.dtype).transpose(0, 1)
        out = torch.einsum("krts,kse->tkre", (scores - lse_KRt[..., None]).exp(), v_KsE)
        out_THE[span.queries] = out.flatten(1, 2).to(out_THE.dtype)
        lse_TH[span.queries] = lse_KRt.flatten(0, 1).T


def _reference_backward(
    grad_THE: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    out_THE: Tensor,
    lse_TH: Tensor,
    spans: Sequence[Span],
    scale: float,
    dq_THD: Tensor,
    dk_SKD: Tensor,
    dv_SKE: Tensor,
) -> None:
    num_kv_heads, dtype = k_SKD.shape[1], _wide(q_THD)

    def grouped(tensor: Tensor, span: Span) -> Tensor:  # [K, R, t, ...]
        return tensor[span.queries].to(dtype).unflatten(1, (num_kv_heads, -1)).movedim(0, 2)

    for span in spans:
        scores = _probabilities(q_THD, k_SKD, span, scale)
        p_KRts = (scores - grouped(lse_TH, span)[..., None]).exp()
        grad, q, k, v = (
            grouped(grad_THE, span),
            grouped(q_THD, span),
            k_SKD[span.keys].to(dtype),
            v_SKE[span.keys].to(dtype),
        )
        delta_KRt = (grad * grouped(out_THE, span)).sum(-1)
        ds_KRts = scale * p_KRts * (torch.einsum("krte,ske->krts", grad, v) - delta_KRt[..., None])
        dq_THD[span.queries] += torch.einsum("krts,skd->tkrd", ds_KRts, k).flatten(1, 2).to(dq_THD.dtype)
        dk_SKD[span.keys] += torch.einsum("krts,krtd->skd", ds_KRts, q).to(dk_SKD.dtype)
        dv_SKE[span.keys] += torch.einsum("krts,krte->ske", p_KRts, grad).to(dv_SKE.dtype)


# --- PyTorch's flash attention for CPUs, a call a span


def _padded(*tensors: Tensor) -> list[Tensor]:
    """The fused kernels want one head size; zeros change neither a score nor an output that is kept."""
    size = max(tensor.shape[-1] for tensor in tensors)
    size += -size % 8 if tensors[0].is_cuda else 0
    return [F.pad(tensor, (0, size - tensor.shape[-1])) for tensor in tensors]


def _heads_first(tensor: Tensor, span: slice) -> Tensor:
    return tensor[span].transpose(0, 1)[None]


def _flash_on_cpu(
    q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, spans: Sequence[Span], scale: float, out_THE: Tensor, lse_TH: Tensor
) -> None:
    q, k, v = _padded(q_THD, k_SKD, v_SKE)
    for span in spans:
        parts = _heads_first(q, span.queries), _heads_first(k, span.keys), _heads_first(v, span.keys)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, span.causal, scale=scale)
        out_THE[span.queries] = out[0].transpose(0, 1)[..., : out_THE.shape[-1]]
        lse_TH[span.queries] = lse[0].T


def _flash_on_cpu_backward(
    grad_THE: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    out_THE: Tensor,
    lse_TH: Tensor,
    spans: Sequence[Span],
    scale: float,
    *grads: Tensor,
) -> None:
    q, k, v, grad, out = _padded(q_THD, k_SKD, v_SKE, grad_THE, out_THE)
    for span in spans:
        above, saved, queries = (_heads_first(tensor, span.queries) for tensor in (grad, out, q))
        keys, values = (_heads_first(tensor, span.keys) for tensor in (k, v))
        lse = lse_TH[span.queries].T[None].contiguous()
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            above, queries, keys, values, saved, lse, 0.0, span.causal, scale=scale
        )
        for total, part, where in zip(grads, parts, (span.queries, span.keys, span.keys)):
            total[where] += part[0].transpose(0, 1)[..., : total.shape[-1]]


# --- flash attention on a GPU, one call for all spans


def _pieces(tensor: Tensor, where: Sequence[slice]) -> list[Tensor]:
    return [tensor.narrow(0, one.start, one.stop - one.start) for one in where]


def _joined(tensor: Tensor, where: Sequence[slice]) -> Tensor:
    return torch.cat(_pieces(tensor, where))


def _starts(where: Sequence[slice], device: torch.device) -> tuple[Tensor, int]:
    """cu_seqlens of the joined slices, and the longest of them."""
    lengths = [one.stop - one.start for one in where]
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return starts.to(device, non_blocking=True), max(lengths)


def _varlen(
    spans: Sequence[Span], device: torch.device
) -> tuple[list[slice], list[slice], tuple[Tensor, Tensor, int, int]]:
    queries, keys = [span.queries for span in spans], [span.keys for span in spans]
    (q_starts, q_longest), (k_starts, k_longest) = _starts(queries, device), _starts(keys, device)
    return queries, keys, (q_starts, k_starts, q_longest, k_longest)


def _flash_on_cuda(
    q_THD: Tensor, k_SKD: Tensor, v_SKE: Tensor, spans: Sequence[Span], scale: float, out_THE: Tensor, lse_TH: Tensor
) -> None:
    queries, keys, lengths = _varlen(spans, q_THD.device)
    q, k, v = _padded(_joined(q_THD, queries), _joined(k_SKD, keys), _joined(v_SKE, keys))
    out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, spans[0].causal, False, scale=scale
    )
    for whole, found in ((out_THE, out.narrow(-1, 0, out_THE.shape[-1])), (lse_TH, lse_HT.transpose(0, 1))):
        pieces = _pieces(whole, queries)
        torch._foreach_copy_(pieces, list(found.split([len(piece) for piece in pieces])))


def _flash_on_cuda_backward(
    grad_THE: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    out_THE: Tensor,
    lse_TH: Tensor,
    spans: Sequence[Span],
    scale: float,
    *grads: Tensor,
) -> None:
    queries, keys, lengths = _varlen(spans, q_THD.device)
    q, k, v, grad, out = _padded(
        *(_joined(q_THD, queries), _joined(k_SKD, keys), _joined(v_SKE, keys)),
        *(_joined(grad_THE, queries), _joined(out_THE, queries)),
    )
    lse_HT = torch.cat([piece.transpose(0, 1) for piece in _pieces(lse_TH, queries)], 1)
    dropout = [q.new_zeros(size, dtype=torch.uint64) for size in (2, 0)]  # its random state: there is none
    parts = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse_HT, *lengths, 0.0, spans[0].causal, *dropout, scale=scale
    )
    for total, part, where in zip(grads, parts, (queries, keys, keys)):
        pieces = _pieces(total, where)
        torch._foreach_add_(pieces, list(part.narrow(-1, 0, total.shape[-1]).split([len(piece) for piece in pieces])))
