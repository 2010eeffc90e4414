"""The scan with the Triton kernels of the package mamba_ssm, for NVIDIA GPUs.

Shapes: B rows, L positions, H heads, P channels of a head, G groups of heads, N state size.
"""

import functools
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.opaque import opaque
from titan_nemotron.ops.ssd.segments import segments


def mamba_scan(
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
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """See ssd_scan; chunk_size is rounded up to a power of two, as the kernels need it.

    The kernels could compute d themselves, but know no padding; so d is computed here, in fp32, and is 0 at padding, which
    belongs to the document before it.
    """
    valid_BL = document_ids_BL >= 0
    d_BLH = F.softplus(dt_BLH.float() + dt_bias_H.float()).clamp(*dt_limit)
    d_BLH = torch.where(valid_BL[..., None], d_BLH, 0)
    y_BLHP, final_state_BHPN = _MambaScan.apply(
        x_BLHP,
        d_BLH,
        A_H.float(),
        B_BLGN.to(x_BLHP.dtype),
        C_BLGN.to(x_BLHP.dtype),
        D_H.float(),
        None if initial_state_BHPN is None else initial_state_BHPN.float(),
        segments(document_ids_BL).int(),
        max(16, 1 << (chunk_size - 1).bit_length()),
    )
    return torch.where(valid_BL[..., None, None], y_BLHP, 0), final_state_BHPN


@functools.cache
def _kernels() -> ModuleType:
    """mamba_ssm.ops.triton.ssd_combined, past the package's __init__.

    That would import the package's models, transformers with them, and a CUDA extension that the scan does not use.
    """
    spec = importlib.util.find_spec("mamba_ssm")
    assert spec is not None, "the path is taken only where the package is installed"
    entered = "mamba_ssm" not in sys.modules
    if entered:
        sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    finally:
        if entered:  # whoever wants the whole package imports it anew
            del sys.modules["mamba_ssm"]


def _forward(
    x: Tensor,
    d: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor | None,
    segment: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    y, _, _, _, _, final_state = _kernels()._mamba_chunk_scan_combined_fwd(
        x, d, A, B, C, chunk_size, D=D, initial_states=initial_state, seq_idx=segment
    )
    return y, final_state


def _backward(
    dy: Tensor,
    dfinal_state: Tensor,
    x: Tensor,
    d: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor | None,
    segment: Tensor,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # the output is needed for a gate alone, which we leave to the norm: x stands in for its shape
    dx, dd, dA, dB, dC, dD, _, _, dinitial_state = _kernels()._mamba_chunk_scan_combined_bwd(
        dy, x, d, A, B, C, x, chunk_size, D=D, initial_states=initial_state, dfinal_states=dfinal_state, seq_idx=segment
    )
    return dx, dd, dA, dB, dC, dD, torch.empty_like(dfinal_state) if dinitial_state is None else dinitial_state


def _forward_shapes(x: Tensor, d: Tensor, A: Tensor, B: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    num_rows, _, num_heads, channels = x.shape
    return x.new_empty(x.shape), x.new_empty(num_rows, num_heads, channels, B.shape[3], dtype=torch.float32)


def _backward_shapes(dy: Tensor, dfinal_state: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return *(tensor.new_empty(tensor.shape) for tensor in inputs[:6]), dfinal_state.new_empty(dfinal_state.shape)


_INPUTS = (
    "Tensor x, Tensor d, Tensor A, Tensor B, Tensor C, Tensor D, Tensor? initial_state, Tensor segment, int chunk_size"
)
_FORWARD = opaque(f"mamba_scan({_INPUTS}) -> (Tensor, Tensor)", _forward, _forward_shapes)
_BACKWARD = opaque(
    f"mamba_scan_backward(Tensor dy, Tensor dfinal_state, {_INPUTS}) -> ({', '.join(['Tensor'] * 7)})",
    _backward,
    _backward_shapes,
)


class _MambaScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.chunk_size = inputs
        ctx.save_for_backward(*tensors)
        outputs: tuple[Tensor, Tensor] = _FORWARD(*inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dfinal_state: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        grads = _BACKWARD(dy, dfinal_state, *tensors, ctx.chunk_size)
        return *(None if tensor is None else grad for grad, tensor in zip(grads, tensors)), None, None
