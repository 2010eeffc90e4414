"""The output layer; the loss runs inside its forward, because outside it a sharded weight is only a shard.

Shapes: B rows, L positions, D model size, V vocabulary.
"""

import torch
from torch import Tensor, nn

from titan_nemotron.models.layers.init import Rule, normal
from titan_nemotron.ops.head import linear_cross_entropy
from titan_nemotron.ops.linear import linear


class Head(nn.Module):
    """Weight [V, D], kept fp32 while training: main and multi-token losses accumulate into one fp32 gradient."""

    stays_fp32 = True

    def __init__(self, size: int, vocabulary: int, *, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, size))
        self.initial: dict[str, Rule] = {"weight": normal(std)}

    def forward(
        self, h_BLD: Tensor, targets_BL: Tensor, token_weights_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sum of -weight * log p(target) over the targets that are not -100, and log p [B, L] without gradient."""
        weights = None if token_weights_BL is None else token_weights_BL.flatten()
        loss_sum, logprobs = linear_cross_entropy(h_BLD.flatten(0, 1), self.weight, targets_BL.flatten(), weights)
        return loss_sum, logprobs.view_as(targets_BL)

    def logits(self, h_BLD: Tensor) -> Tensor:
        """[B, L, V] in at least fp32."""
        dtype = torch.promote_types(h_BLD.dtype, torch.float32)
        return linear(h_BLD.to(dtype), self.weight.to(dtype))
