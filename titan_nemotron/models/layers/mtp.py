"""Multi-token prediction.

Shapes: B rows, L positions, D model size.
"""

import torch
from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.basic import Linear, RMSNorm
from titan_nemotron.models.layers.block import Block


class MTPBlock(nn.Module):
    """y = eh_proj([RMS(embedding of token i+1+k); RMS(h)]), the sublayers' residual blocks, then RMS.

    Its output is both what the head scores against token i+2+k and the input h of the next depth.
    """

    def __init__(self, size: int, eps: float, layers: list[Block], *, std: float) -> None:
        super().__init__()
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = Linear(2 * size, size, std=std)
        self.layers = nn.ModuleList(layers)
        self.final_layernorm = RMSNorm(size, eps)

    def forward(
        self,
        h_BLD: Tensor,
        embedded_BLD: Tensor,
        layout: DocumentLayout,
        replay: dict[str, Tensor],
        name: str,
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """name: of this depth ("mtp.0"); statistics and replayed routing go by f"{name}.layers.{j}"."""
        y = self.eh_proj(torch.cat([self.enorm(embedded_BLD), self.hnorm(h_BLD)], dim=-1))
        all_stats = {}
        for j, layer in enumerate(self.layers):
            y, stats = layer(y, layout, indices=replay.get(f"{name}.layers.{j}"))
            all_stats[f"{name}.layers.{j}"] = stats
        return self.final_layernorm(y), all_stats


class MultiTokenPredictor(nn.Module):
    """`depths` applications of `blocks`, used in turn: one physical block is shared by all depths."""

    def __init__(self, blocks: list[MTPBlock], depths: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.depths = depths

    def block_of(self, depth: int) -> MTPBlock:
        """The physical block that a depth uses."""
        block = self.blocks[depth % len(self.blocks)]
        assert isinstance(block, MTPBlock)
        return block
