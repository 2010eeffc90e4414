"""The convolution with the kernels of the package causal_conv1d, for NVIDIA GPUs.

Shapes: B rows, L positions, C channels, K taps.
"""

import torch
from torch import Tensor


def takes(x_BLC: Tensor, weight_CK: Tensor, initial_state_BCK: Tensor | None) -> bool:
    """Whether the kernels can: 2 to 4 taps, channels in eights, and no initial state beside documents."""
    return initial_state_BCK is None and x_BLC.shape[2] % 8 == 0 and 2 <= weight_CK.shape[1] <= 4


def packaged_sum(x_BLC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, document_ids_BL: Tensor) -> Tensor:
    """See causal_conv1d; without an initial state."""
    from causal_conv1d import causal_conv1d_fn

    # Channels last, with rows and positions that start at multiples of 8 elements; a slice of a projection may not.
    if x_BLC.stride(2) != 1 or x_BLC.stride(1) % 8 or x_BLC.stride(0) % 8:
        x_BLC = x_BLC.contiguous()
    y_BLC: Tensor = causal_conv1d_fn(
        x_BLC.transpose(1, 2),
        weight_CK,
        None if bias_C is None else bias_C.to(weight_CK.dtype),
        seq_idx=document_ids_BL.int(),
        activation="silu",
    ).transpose(1, 2)
    return torch.where((document_ids_BL >= 0).unsqueeze(-1), y_BLC, 0)
