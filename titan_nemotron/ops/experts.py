"""Routed experts as grouped matrix products.

Shapes: R routed rows sorted by expert, E experts, D model (or latent) size, F expert size.
"""

import torch
from torch import Tensor


def relu2_experts(x_RD: Tensor, up_EFD: Tensor, down_EDF: Tensor, weights_R: Tensor, offsets_E: Tensor) -> Tensor:
    """y_r = down_e (w_r * relu(up_e x_r)^2) for the rows r in [offsets[e-1], offsets[e]) of expert e.

    The routing weight is folded in before the down projection, which has no bias, so that combining is a plain sum.
    offsets [E] int32: ends of the experts' rows; rows at and beyond offsets[-1] give 0. Returns [R, D] in x's dtype.
    """
    outputs = []
    start = 0
    for expert, stop in enumerate(offsets_E.tolist()):
        hidden = torch.relu(x_RD[start:stop] @ up_EFD[expert].T).square() * weights_R[start:stop, None].to(x_RD.dtype)
        outputs.append(hidden @ down_EDF[expert].T)
        start = stop
    outputs.append(x_RD.new_zeros(x_RD.shape[0] - start, down_EDF.shape[1]))
    return torch.cat(outputs)
