"""Linear, norm and embedding with explicit casts and stated initial values.

Weights may be stored in a wider type than the activations: each forward casts its weight to the activation's type, so no
autocast is needed, and under mixed-precision sharding the cast is a no-op. Modules with the class attribute `stays_fp32`
own parameters that stay fp32 while training; they are small, so that sharding can treat them apart.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_nemotron.models.layers.init import Rule, constant, normal, tensors_by_name
from titan_nemotron.ops.linear import linear
from titan_nemotron.ops.norm import gated_rms_norm, rms_norm


class Linear(nn.Module):
    """y = x W^T + b, in x's dtype. Weight [out, in] starts from N(0, std^2), bias from 0."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.initial: dict[str, Rule] = {"weight": normal(std), "bias": constant(0.0)}

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Module):
    """Rows of a table [vocabulary, model size] that starts from N(0, std^2)."""

    def __init__(self, vocabulary: int, size: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, size))
        self.initial: dict[str, Rule] = {"weight": normal(std)}

    def forward(self, tokens: Tensor) -> Tensor:
        """Integers [...] -> [..., model size], in the table's dtype."""
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight that starts at 1."""

    stays_fp32 = True

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.initial: dict[str, Rule] = {"weight": constant(1.0)}

    def forward(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim, [..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)


class GatedRMSNorm(RMSNorm):
    """Mamba-2's output norm: gate with silu(z), then normalise each group of channels."""

    def __init__(self, size: int, group_size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.group_size = group_size

    def forward(self, y: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        """y and gate z, both [..., size] -> [..., size]."""
        return gated_rms_norm(y, z, self.weight, self.group_size, self.eps)


def fp32_names(model: nn.Module) -> set[str]:
    """Names of the parameters and buffers that stay fp32 while training."""
    return {name for name, (module, _) in tensors_by_name(model).items() if getattr(module, "stays_fp32", False)}
