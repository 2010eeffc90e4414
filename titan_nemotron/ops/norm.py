"""Root-mean-square norms.

Shapes: T positions, C channels, G groups of C / G channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.kernels import chosen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = w * x / sqrt(mean(x^2) + eps) over the last dim, computed in at least fp32 and cast to x's dtype at the end.

    x [..., C], weight [C]; returns [..., C] in x's dtype. |x| stays below 1e18: the squares of more overflow in fp32.
    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
    """
    if chosen("norm", x) == "fused" and torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
    """Mamba-2's output norm, gate first: u = y * silu(z), then the root-mean-square norm of each group of channels.

    y, z [..., C], weight [C], C divisible by group_size; computed in at least fp32; returns [..., C] in z's dtype.
    """
    if chosen("norm", z) == "fused" and torch.is_grad_enabled():
        return _GatedRMSNorm.apply(y, z, weight, group_size, eps)
    dtype = torch.promote_types(z.dtype, torch.float32)
    u = (y.to(dtype) * F.silu(z.to(dtype))).unflatten(-1, (-1, group_size))
    u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    return (u.flatten(-2) * weight.to(dtype)).to(z.dtype)


def _reciprocal_rms(u_TGC: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(u^2) + eps), [T, G, 1]."""
    return torch.linalg.vecdot(u_TGC, u_TGC).div_(u_TGC.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)


def _normalised_backward(grad_TGC: Tensor, u_TGC: Tensor, r_TG1: Tensor, weight_GC: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of u and w, where out = w u r and r = 1 / sqrt(mean(u^2) + eps):

    du = r (w dout - u r^2 mean(w dout u)),  dw = sum_t r dout u.
    """
    product = grad_TGC * u_TGC
    dweight = torch.bmm(r_TG1.permute(1, 2, 0), product.transpose(0, 1)).squeeze(1)
    mean = torch.linalg.vecdot(product, weight_GC).div_(u_TGC.shape[-1]).unsqueeze(-1)
    du = torch.mul(grad_TGC, weight_GC, out=product).mul_(r_TG1)
    # r^3 alone would underflow where u is 1e15
    return du.addcmul_(u_TGC, mean.mul_(r_TG1).mul_(r_TG1).mul_(r_TG1), value=-1), dweight


class _RMSNorm(torch.autograd.Function):
    """Keeps x and the reciprocal root mean square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        u = x.float().reshape(-1, 1, x.shape[-1])
        r = _reciprocal_rms(u, eps)
        ctx.save_for_backward(x, weight, r)
        # In x's shape, not a view of another: the output may leave a sharded module, whose hooks want no views.
        return (x * r.view(*x.shape[:-1], 1)).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        u, g = (tensor.float().reshape(-1, 1, x.shape[-1]) for tensor in (x, grad))
        du, dweight = _normalised_backward(g, u, r, weight.float().unsqueeze(0))
        return du.view(x.shape).to(x.dtype), dweight.view(weight.shape).to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    """Keeps y, z and the reciprocal root mean square."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, weight: Tensor, group_size: int, eps: float) -> Tensor:
        grouped = (-1, weight.shape[0] // group_size, group_size)
        u = F.silu(z.float()).mul_(y).reshape(grouped)
        r = _reciprocal_rms(u, eps)
        ctx.save_for_backward(y, z, weight, r)
        return u.mul_(r).mul_(weight.float().view(grouped[1:])).view(z.shape).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        y, z, weight, r = ctx.saved_tensors
        grouped = (*r.shape[:2], weight.shape[0] // r.shape[1])
        sigmoid = torch.sigmoid(z.float())
        gate = sigmoid * z
        slope = torch.lerp(gate, gate.new_ones(()), sigmoid)  # silu'(z) = sigmoid + silu - sigmoid silu
        u = (gate * y).view(grouped)
        du, dweight = _normalised_backward(grad.float().reshape(grouped), u, r, weight.float().view(grouped[1:]))
        du = du.view(z.shape)
        dy, dz = gate.mul_(du), slope.mul_(du).mul_(y)
        return dy.to(y.dtype), dz.to(z.dtype), dweight.view(weight.shape).to(weight.dtype), None, None
