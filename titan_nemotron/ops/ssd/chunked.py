"""The scan as matrix products over chunks, with a hand-written backward: fp32, made for a CPU, runs anywhere.

Custom ops, so that autograd, compilation and recomputation see one opaque operation. The mathematics is in block.py;
here rows and groups are cut into blocks whose temporaries stay in cache. The backward keeps the inputs alone.

Shapes: B rows, L positions, H heads, P channels of a head, G groups of heads, N state size.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.ssd.block import Block, Cut, Decays
from titan_nemotron.ops.ssd.segments import segments

CHUNK = 64  # longer: more exponentials and products inside chunks; shorter: more states
BLOCK = 1 << 18  # elements of x in one block


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
    inputs = (x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H)
    y_BLHP, final_state_BHPN = _scan(*inputs, initial_state_BHPN, document_ids_BL, *dt_limit)
    return y_BLHP, final_state_BHPN


def _chunk_length(length: int) -> int:
    """The shortest multiple of 8 with which the row takes as few chunks as with CHUNK."""
    num_chunks = -(-length // CHUNK)
    return -(-length // (8 * num_chunks)) * 8


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


def _time_step(dt: Tensor, dt_bias: Tensor, document_ids: Tensor, low: float, high: float) -> Tensor:
    d = F.softplus(dt.float() + dt_bias.float()).clamp_(low, high)
    return d.mul_((document_ids >= 0)[..., None])


@torch.library.custom_op("titan_nemotron::ssd_scan", mutates_args=())
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
    chunk = _chunk_length(length)
    padded = -(-length // chunk) * chunk
    x, dt, B, C = (_padded(tensor, padded) for tensor in (x, dt, B, C))
    document_ids = _padded(document_ids, padded, -1)
    d = _time_step(dt, dt_bias, document_ids, low, high)
    decays = Decays.build(d, A.float(), segments(document_ids), chunk)
    y = x.new_empty(x.shape)
    final_state = x.new_empty(num_rows, num_heads, channels, B.shape[3], dtype=torch.float32)
    for cut in _cuts(x, B, chunk):
        block = Block(cut, decays, x, B, C)
        initial = None if initial_state is None else initial_state[cut.rows, cut.heads]
        y_block, final_state[cut.rows, cut.heads] = block.forward(D[cut.heads], initial)
        cut.by_head(y).copy_(y_block)
    y.mul_((document_ids >= 0)[..., None, None])
    return y[:, :length].contiguous(), final_state


@_scan.register_fake
def _(x, dt, A, B, C, D, dt_bias, initial_state, document_ids, low, high):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape[0], *x.shape[2:], B.shape[3], dtype=torch.float32)


@torch.library.custom_op("titan_nemotron::ssd_scan_backward", mutates_args=())
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
    """Gradients in the order of _scan's inputs, fp32 except those of x, B and C."""
    length, chunk = x.shape[1], _chunk_length(x.shape[1])
    padded = -(-length // chunk) * chunk
    dy, x, dt, B, C = (_padded(tensor, padded) for tensor in (dy, x, dt, B, C))
    document_ids = _padded(document_ids, padded, -1)
    valid = document_ids >= 0
    dy = torch.where(valid[..., None, None], dy, 0)
    d = _time_step(dt, dt_bias, document_ids, low, high)
    decays = Decays.build(d, A.float(), segments(document_ids), chunk)
    dx, dB, dC = (tensor.new_empty(tensor.shape) for tensor in (x, B, C))
    dd, leaving, ending = torch.empty_like(d), torch.empty_like(d), torch.empty_like(d, dtype=torch.float64)
    passing = torch.empty_like(decays.through_BcH)
    dD, dinitial = torch.zeros_like(D, dtype=torch.float32), torch.empty_like(dfinal_state)
    for cut in _cuts(x, B, chunk):
        block = Block(cut, decays, x, B, C)
        initial = None if initial_state is None else initial_state[cut.rows, cut.heads]
        grads = block.backward(cut.by_head(dy), D[cut.heads], initial, dfinal_state[cut.rows, cut.heads])
        for target, value in ((dx, grads.dx), (dd, grads.dd), (ending, grads.ending), (leaving, grads.leaving)):
            cut.by_head(target).copy_(value)
        cut.by_group(dB).copy_(grads.dB)
        cut.by_group(dC).copy_(grads.dC)
        passing[cut.rows, :, cut.heads] = grads.passing.transpose(0, 1)
        dinitial[cut.rows, cut.heads] = grads.dinitial_state
        dD[cut.heads] += grads.dD
    ending, leaving = (tensor.unflatten(1, (-1, chunk)) for tensor in (ending, leaving))
    sees = decays.sees_BcQQ
    da = ((sees.mT.double() @ ending).float() + sees.tril(-1) @ leaving + passing[:, :, None]).flatten(1, 2)
    raw = dt.float() + dt_bias.float()
    unclamped = F.softplus(raw)
    inside = valid[..., None] & (unclamped >= low) & (unclamped <= high)
    ddt = torch.where(inside, (dd + da * A.float()) * torch.sigmoid(raw), 0)
    dx, ddt, dB, dC = (tensor[:, :length].contiguous() for tensor in (dx, ddt, dB, dC))
    return dx, ddt, (da * d).sum((0, 1)), dB, dC, dD, ddt.sum((0, 1)), dinitial


@_scan_backward.register_fake
def _(dy, dfinal_state, x, dt, A, B, C, D, dt_bias, initial_state, document_ids, low, high):  # type: ignore[no-untyped-def]
    fp32 = (tensor.new_empty(tensor.shape, dtype=torch.float32) for tensor in (dt, A, D, dt_bias, dfinal_state))
    ddt, dA, dD, dbias, dinitial = fp32
    dx, dB, dC = (tensor.new_empty(tensor.shape) for tensor in (x, B, C))
    return dx, ddt, dA, dB, dC, dD, dbias, dinitial


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.low, ctx.high = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dy, dfinal_state):  # type: ignore[no-untyped-def]
    tensors = ctx.saved_tensors
    grads = _scan_backward(dy, dfinal_state, *tensors, ctx.low, ctx.high)
    cast = [None if tensor is None else grad.to(tensor.dtype) for grad, tensor in zip(grads, tensors, strict=False)]
    return *cast, None, None, None


_scan.register_autograd(_differentiate, setup_context=_setup)
