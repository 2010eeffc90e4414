"""Root-mean-square norms.

Shapes: C channels, G groups of C / G channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = w * x / sqrt(mean(x^2) + eps) over the last dim, computed in at least fp32 and cast to x's dtype at the end.

    x [..., C], weight [C]; returns [..., C] in x's dtype.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
    """Mamba-2's output norm, gate first: u = y * silu(z), then the root-mean-square norm of each group of channels.

    y, z [..., C], weight [C], C divisible by group_size; computed in at least fp32; returns [..., C] in z's dtype.
    """
    dtype = torch.promote_types(z.dtype, torch.float32)
    u = (y.to(dtype) * F.silu(z.to(dtype))).unflatten(-1, (-1, group_size))
    u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    return (u.flatten(-2) * weight.to(dtype)).to(z.dtype)
