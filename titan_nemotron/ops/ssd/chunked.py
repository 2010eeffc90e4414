"""The scan as matrix products over chunks, with a hand-written backward: fp32, made for a CPU, runs anywhere.

The mathematics is in block.py; here rows and groups are cut into blocks that bound the temporaries. The backward keeps the
inputs alone.

Shapes: B rows, L positions, H heads, P channels of a head, G groups of heads, N state size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.opaque import opaque
from titan_nemotron.ops.ssd.block import Block, Cut, Decays, Gradients
from titan_nemotron.ops.ssd.segments import segments

CHUNK = 64  # longer: more exponentials and products inside chunks; shorter: more states
BLOCK = 1 << 19  # elements of x in one block: its temporaries stay in the cache of a core


def chunked_scan(
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
    inputs = (x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, initial_state_BHPN, document_ids_BL)
    outputs: tuple[Tensor, Tensor] = _ChunkedScan.apply(*inputs, *dt_limit)
    return outputs


def _chunk_length(length: int) -> tuple[int, int]:
    """A multiple of 8 with which the row takes as few chunks as with CHUNK, and the length of those chunks together."""
    num_chunks = -(-length // CHUNK)
    chunk = -(-length // (8 * num_chunks)) * 8
    return chunk, num_chunks * chunk


def _padded(tensor: Tensor, length: int, value: int = 0) -> Tensor:
    """[B, L, ...] -> [B, length, ...]."""
    missing = length - tensor.shape[1]
    return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing), value=value) if missing else tensor


def _cuts(x: Tensor, B: Tensor, chunk: int) -> Iterator[Cut]:
    num_rows, length, num_heads, channels = x.shape
    num_groups = B.shape[2]
    heads = num_heads // num_groups
    groups_at_once = max(1, min(num_groups, BLOCK // (length * heads * channels)))
    rows_at_once = max(1, BLOCK // (length * groups_at_once * heads * channels))
    for row in range(0, num_rows, rows_at_once):
        for group in range(0, num_groups, groups_at_once):
            stop = min(group + groups_at_once, num_groups)
            rows = slice(row, min(row + rows_at_once, num_rows))
            yield Cut(rows, slice(group, stop), slice(group * heads, stop * heads), chunk)


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    document_ids: Tensor,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    num_rows, length, num_heads, channels = x.shape
    chunk, padded = _chunk_length(length)
    x_, dt, B, C = (_padded(tensor, padded) for tensor in (x, dt, B, C))
    document_ids = _padded(document_ids, padded, -1)
    valid = document_ids >= 0
    d = F.softplus(dt.float() + dt_bias.float()).clamp_(low, high).mul_(valid[..., None])
    decays = Decays.build(d, A, D, valid, segments(document_ids), chunk)
    y = x.new_empty(x_.shape, dtype=torch.float32)
    final_state = x.new_empty(num_rows, num_heads, channels, B.shape[3], dtype=torch.float32)
    for cut in _cuts(x_, B, chunk):
        initial = None if initial_state is None else initial_state[cut.rows, cut.heads]
        final_state[cut.rows, cut.heads] = Block(cut, decays, x_, B, C).forward(initial, y)
    return y[:, :length].to(x.dtype).contiguous(), final_state


def _scan_backward(
    dy: Tensor,
    dfinal_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    document_ids: Tensor,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the order of _scan's inputs; those of dt, A, D, dt_bias and the state in fp32."""
    length = x.shape[1]
    chunk, padded = _chunk_length(length)
    dy, x_, dt, B_, C_ = (_padded(tensor, padded) for tensor in (dy, x, dt, B, C))
    document_ids = _padded(document_ids, padded, -1)
    valid = document_ids >= 0
    raw = dt.float() + dt_bias.float()
    unlimited = F.softplus(raw)
    d = unlimited.clamp(low, high).mul_(valid[..., None])
    decays = Decays.build(d, A, D, valid, segments(document_ids), chunk)

    def empty(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return like.new_empty(like.shape, dtype=dtype)

    grads = Gradients(
        dx_BLHP=empty(x_),
        dB_BLGN=empty(B_),
        dC_BLGN=empty(C_),
        dinitial_state_BHPN=empty(dfinal_state),
        x_inside_BLH=empty(d),
        x_leaving_BLH=empty(d),
        skip_BLH=empty(d),
        ending_BLH=empty(d, torch.float64),
        entering_BLH=empty(d),
        passing_BcH=empty(decays.through_BcH),
    )
    for cut in _cuts(x_, B, chunk):
        initial = None if initial_state is None else initial_state[cut.rows, cut.heads]
        Block(cut, decays, x_, B_, C_).backward(dy, initial, dfinal_state[cut.rows, cut.heads], grads)

    per_chunk = (-1, chunk)
    sees = decays.sees_BcQQ.double()
    ending = (grads.ending_BLH + grads.entering_BLH).unflatten(1, per_chunk)
    leaving = (grads.x_leaving_BLH * decays.x_leaving_BLH).unflatten(1, per_chunk)
    da = sees.mT @ ending + sees.tril(-1) @ leaving.double() + grads.passing_BcH[:, :, None]
    da = da.float().flatten(1, 2)
    dd = grads.x_inside_BLH * decays.kept_BLH + grads.x_leaving_BLH * decays.to_end_BLH + da * A.float()
    passes = valid[..., None] & (unlimited >= low) & (unlimited <= high)
    ddt = torch.where(passes, dd * torch.sigmoid(raw), 0)
    dD = (grads.skip_BLH * valid[..., None]).sum((0, 1))
    dx, ddt, dB, dC = (
        grad[:, :length].to(tensor.dtype).contiguous()
        for grad, tensor in ((grads.dx_BLHP, x), (ddt, ddt), (grads.dB_BLGN, B), (grads.dC_BLGN, C))
    )
    return dx, ddt, (da * d).sum((0, 1)), dB, dC, dD, ddt.sum((0, 1)), grads.dinitial_state_BHPN


def _scan_shapes(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], *x.shape[2:], B.shape[3], dtype=torch.float32)


def _backward_shapes(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    x, dt, A, B, C, D, dt_bias = inputs[:7]
    dx, dB, dC = (tensor.new_empty(tensor.shape) for tensor in (x, B, C))
    ddt, dA, dD, dbias, dinitial = (
        tensor.new_empty(tensor.shape, dtype=torch.float32) for tensor in (dt, A, D, dt_bias, dfinal_state)
    )
    return dx, ddt, dA, dB, dC, dD, dbias, dinitial


_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, Tensor? initial_state, "
    "Tensor document_ids, float low, float high"
)
_SCAN = opaque(f"ssd_scan({_INPUTS}) -> (Tensor, Tensor)", _scan, _scan_shapes)
_SCAN_BACKWARD = opaque(
    f"ssd_scan_backward(Tensor dy, Tensor dfinal_state, {_INPUTS}) -> ({', '.join(['Tensor'] * 8)})",
    _scan_backward,
    _backward_shapes,
)


class _ChunkedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.low, ctx.high = inputs
        ctx.save_for_backward(*tensors)
        return _SCAN(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfinal_state: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        grads = _SCAN_BACKWARD(dy, dfinal_state, *tensors, ctx.low, ctx.high)
        cast = (None if tensor is None else grad.to(tensor.dtype) for grad, tensor in zip(grads, tensors))
        return *cast, None, None, None
