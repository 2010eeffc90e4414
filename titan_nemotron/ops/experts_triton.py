"""What lies between the two matrix products of an expert, in one pass over memory. Imported on a GPU alone.

Shapes: R routed rows, F expert size. One program a row; sums in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def activate_kernel(h_ptr, weights_ptr, a_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """a = w relu(h)^2, a row of `size` elements a program, in fp32; see ops.experts.relu2_experts."""
    row = tl.program_id(0).to(tl.int64)  # R * F may not fit 32 bits
    weight = tl.load(weights_ptr + row).to(tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        relu = tl.maximum(tl.load(h_ptr + row * size + columns, mask=inside, other=0.0).to(tl.float32), 0.0)
        tl.store(a_ptr + row * size + columns, relu * relu * weight, mask=inside)


@triton.jit
def activate_backward_kernel(h_ptr, da_ptr, weights_ptr, a_ptr, dweights_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a, the gradient of h over that of a, and the gradient of the weights."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        places = row * size + columns
        relu = tl.maximum(tl.load(h_ptr + places, mask=inside, other=0.0).to(tl.float32), 0.0)
        da = tl.load(da_ptr + places, mask=inside, other=0.0).to(tl.float32)
        square = relu * relu
        total += da * square
        tl.store(a_ptr + places, square * weight, mask=inside)
        tl.store(da_ptr + places, da * relu * (2.0 * weight), mask=inside)
    tl.store(dweights_ptr + row, tl.sum(total, 0))


def activate(h_RF: Tensor, weights_R: Tensor) -> Tensor:
    """a = w relu(h)^2."""
    a_RF = torch.empty_like(h_RF)
    if len(h_RF):
        activate_kernel[(len(h_RF),)](h_RF, weights_R, a_RF, h_RF.shape[1], BLOCK=BLOCK)
    return a_RF


def activate_backward(h_RF: Tensor, da_RF: Tensor, weights_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a once more, and the gradients of h (in the memory of da) and of the weights."""
    a_RF, dweights_R = torch.empty_like(h_RF), torch.empty_like(weights_R)
    if len(h_RF):
        activate_backward_kernel[(len(h_RF),)](h_RF, da_RF, weights_R, a_RF, dweights_R, h_RF.shape[1], BLOCK=BLOCK)
    return a_RF, da_RF, dweights_R
