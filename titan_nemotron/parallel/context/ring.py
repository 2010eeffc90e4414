"""Attention over rows that are split: keys and values go round (Liu et al., "Ring Attention", 2023).

At step s rank r holds the keys and values of part r - s, which rank r - 1 held before, and joins what its queries read there
to what they have read. Causal: only parts before r are read, and only those that a document of r reaches back to; nobody
waits for others. Documents are contiguous, so that of a part before r each row reads one rectangle: the keys from where the
document that crosses into r starts, by the queries of that document. All ranks know all documents, and so what each sends.

Backward: keys and values go round once more, and the gradients of a part go straight home to its rank.

Shapes: P ranks, B rows, l positions of this rank, T = B l tokens, H query heads, K key/value heads, D size of a key, E of a
value.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.attention import LocalAttention
from titan_nemotron.models.layers.cache import AttentionCache
from titan_nemotron.ops.attention.documents import segments
from titan_nemotron.ops.attention.spans import Span, span_attention, span_attention_backward
from titan_nemotron.ops.opaque import opaque
from titan_nemotron.parallel.context.exchange import passed


class RingAttention(LocalAttention):
    """Each rank computes its positions of all heads; it receives keys and values, of which grouped-query attention has few.

    Decoding splits no rows, and is LocalAttention's.
    """

    def __init__(self, local: LocalAttention, group: dist.ProcessGroup) -> None:
        assert local.window is None, "a window needs the part before alone"
        super().__init__(local.scale)
        self.group = group

    def forward(
        self,
        q_BlHD: Tensor,
        k_BlKD: Tensor,
        v_BlKE: Tensor,
        layout: DocumentLayout,
        *,
        cache: AttentionCache | None = None,
        latent: Tensor | None = None,
        expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's positions of all heads, [B, l, H, E]."""
        assert latent is None and expand is None, "this core expands no latent"
        if cache is not None:
            return super().forward(q_BlHD, k_BlKD, v_BlKE, layout, cache=cache)
        out: Tensor = _Ring.apply(
            q_BlHD, k_BlKD, v_BlKE, layout.host_ids, layout.start, self.scale, self.group.group_name
        )
        return out, None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, lse_TH = _FORWARD(*inputs)
        *tensors, ctx.start, ctx.scale, ctx.group = inputs
        ctx.save_for_backward(*tensors, out, lse_TH)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = _BACKWARD(grad, *ctx.saved_tensors, ctx.start, ctx.scale, ctx.group)
        return *grads, None, None, None, None


class Ring:
    """Who reads what, from the documents of whole rows [B, L] on the host, and this rank's place.

    start, length: of this rank's part of each row; group: the name of the ranks that share the rows.
    """

    def __init__(self, ids_BL: Tensor, start: int, length: int, group: str) -> None:
        self.ids_PBl = ids_BL.unflatten(1, (-1, length)).transpose(0, 1)
        self.rank, self.degree, self.length = start // length, len(self.ids_PBl), length
        self.group = _resolve_process_group(group)  # type: ignore[arg-type]

    def reads(self, reader: int, step: int) -> bool:
        """Whether the queries of `reader` read the part `step` before theirs: whether a document reaches from the end of
        that part to the start of theirs."""
        return step <= reader < self.degree and bool(self.crosses(reader, step).any())

    def crosses(self, reader: int, step: int) -> Tensor:
        """[B]: which rows have such a document."""
        last_B = self.ids_PBl[reader - step, :, -1]
        return (last_B == self.ids_PBl[reader, :, 0]) & (last_B >= 0)

    @cached_property
    def num_steps(self) -> int:
        """Steps of the whole group; the first, everyone's own part, is one."""
        return 1 + sum(any(self.reads(r, step) for r in range(self.degree)) for step in range(1, self.degree))

    def spans(self, step: int) -> list[Span]:
        """What this rank's queries read of the keys that it holds at `step`, positions of all rows in a row."""
        if step == 0:
            return self._own_spans()
        here_Bl, there_Bl = self.ids_PBl[self.rank], self.ids_PBl[self.rank - step]
        crossing_B1 = here_Bl[:, :1]
        queries_B, keys_B = ((ids_Bl == crossing_B1).sum(1).tolist() for ids_Bl in (here_Bl, there_Bl))
        crosses_B = self.crosses(self.rank, step).tolist()
        starts = range(0, len(crosses_B) * self.length, self.length)
        return [
            Span(start, start + queries, start + self.length - keys, start + self.length, causal=False)
            for start, queries, keys, crosses in zip(starts, queries_B, keys_B, crosses_B)
            if crosses
        ]

    def _own_spans(self) -> list[Span]:
        starts, padding = segments(self.ids_PBl[self.rank])
        borders = [*starts.tolist(), self.ids_PBl[0].numel()]
        documents = zip(borders, borders[1:], padding.tolist())
        return [Span(start, end, start, end, causal=True) for start, end, skip in documents if not skip]

    def rotate(self, k_TKD: Tensor, v_TKE: Tensor) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Keys and values of every step, own ones first, None where this rank reads nothing; the next ones are on their way
        while it computes with these."""
        sizes = [k_TKD.shape[-1], v_TKE.shape[-1]]
        held: Tensor = torch.cat([k_TKD, v_TKE], -1)
        for step in range(self.num_steps):
            last = step + 1 == self.num_steps
            if not last:
                to = self.rank + 1 if self.reads(self.rank + 1, step + 1) else None
                source = self.rank - 1 if self.reads(self.rank, step + 1) else None
                coming = passed(held, to, source, self.group)
            if step == 0 or self.reads(self.rank, step):
                k, v = held.view(len(k_TKD), -1, sum(sizes)).split(sizes, -1)
                yield k, v
            else:
                yield None
            if not last:
                held = wait_tensor(coming)

    def go_home(self, step: int, grads: Tensor, reads: bool) -> Tensor:
        """Send the gradients of the part that was read at `step` to its rank; starts to receive what the rank that read
        this one's part sends, [0] where it did not."""
        source = self.rank + step if self.reads(self.rank + step, step) else None
        return passed(grads, self.rank - step if reads else None, source, self.group)


def _forward(
    q_BlHD: Tensor, k_BlKD: Tensor, v_BlKE: Tensor, ids_BL: Tensor, start: int, scale: float, group: str
) -> tuple[Tensor, Tensor]:
    """out [B, l, H, E] in q's dtype, and the log-sum-exp of the scores [T, H], 0 at padding."""
    ring = Ring(ids_BL, start, q_BlHD.shape[1], group)
    q_THD, k_TKD, v_TKE = (tensor.flatten(0, 1) for tensor in (q_BlHD, k_BlKD, v_BlKE))
    out_THE, lse_TH = torch.empty(0), torch.empty(0)
    for step, turn in enumerate(ring.rotate(k_TKD, v_TKE)):
        if turn is None:
            continue
        part_THE, part_lse_TH = span_attention(q_THD, *turn, ring.spans(step), scale)
        if step == 0:
            # At padding any finite number will do: the parts to come have -inf there.
            out_THE, lse_TH = part_THE.to(part_lse_TH.dtype), part_lse_TH.masked_fill(part_lse_TH == -torch.inf, 0)
            continue
        joined_TH = torch.logaddexp(lse_TH, part_lse_TH)
        out_THE *= (lse_TH - joined_TH).exp()[..., None]
        out_THE += part_THE * (part_lse_TH - joined_TH).exp()[..., None]
        lse_TH = joined_TH
    return out_THE.to(q_BlHD.dtype).unflatten(0, q_BlHD.shape[:2]), lse_TH


def _backward(
    grad: Tensor,
    q_BlHD: Tensor,
    k_BlKD: Tensor,
    v_BlKE: Tensor,
    ids_BL: Tensor,
    out: Tensor,
    lse_TH: Tensor,
    start: int,
    scale: float,
    group: str,
) -> tuple[Tensor, ...]:
    """Gradients in the dtypes of q, k and v. Those that travel are rounded to that dtype, and summed in at least fp32."""
    ring = Ring(ids_BL, start, q_BlHD.shape[1], group)
    grad, q, k_TKD, v_TKE, out = (tensor.flatten(0, 1) for tensor in (grad, q_BlHD, k_BlKD, v_BlKE, out))
    dq_THD = torch.zeros_like(q, dtype=lse_TH.dtype)
    own_TKF = torch.empty(0)  # gradients of this rank's keys and values, side by side
    coming: Tensor | None = None
    for step, turn in enumerate(ring.rotate(k_TKD, v_TKE)):
        grads_TKF = own_TKF
        if turn is not None:
            dq, dk, dv = span_attention_backward(grad, q, *turn, out, lse_TH, ring.spans(step), scale)
            dq_THD += dq
            grads_TKF = torch.cat([dk, dv], -1)
        if step == 0:
            own_TKF = grads_TKF.to(lse_TH.dtype)
            continue
        _add(own_TKF, coming)
        coming = ring.go_home(step, grads_TKF.to(q.dtype), turn is not None)
    _add(own_TKF, coming)
    dk, dv = own_TKF.split([k_TKD.shape[-1], v_TKE.shape[-1]], -1)
    like = (q_BlHD, k_BlKD, v_BlKE)
    return tuple(g.to(x.dtype).reshape(x.shape).contiguous() for g, x in zip((dq_THD, dk, dv), like))


def _add(total: Tensor, coming: Tensor | None) -> None:
    """Add what comes, if anything does."""
    if coming is not None and coming.numel():
        total += wait_tensor(coming).view_as(total)


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(q.shape[0] * q.shape[1], q.shape[2], dtype=wide)


def _backward_shapes(grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in rest[:3])


_FORWARD = opaque(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor ids, int start, float scale, str group) -> (Tensor, Tensor)",
    _forward,
    _forward_shapes,
)
_BACKWARD = opaque(
    "ring_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor ids, Tensor out, Tensor lse, int start, "
    "float scale, str group) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_shapes,
)
