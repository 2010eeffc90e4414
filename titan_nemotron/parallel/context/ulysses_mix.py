"""Mamba-2 over rows that are split: positions for heads and back, as UlyssesAttention does.

Shapes: B rows, L positions of the whole row, l of this rank, C channels, H heads of D channels, h = H / P of this rank,
G groups, N state size, P ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.cache import MixCache
from titan_nemotron.models.layers.mamba2 import LocalMix, MixWeights
from titan_nemotron.parallel.context.exchange import heads_for_positions, positions_for_heads


class UlyssesMix(LocalMix):
    """Each rank convolves and scans all positions of H / P heads and of the groups of B and C that these read.

    With fewer groups than ranks, each is sent to all ranks whose heads read it. A rank's weights are slices, so their
    gradients are those of its heads alone: the sum over ranks is the whole gradient. Decoding splits no rows, and is
    LocalMix's.
    """

    def __init__(self, local: LocalMix, group: dist.ProcessGroup) -> None:
        super().__init__(
            local.num_heads,
            local.head_size,
            local.num_groups,
            local.state_size,
            local.chunk_size,
            local.dt_limit,
        )
        self.group, size = group, group.size()
        self.copies = max(1, size // local.num_groups)  # ranks that read one group
        self.own = LocalMix(
            local.num_heads // size,
            local.head_size,
            local.num_groups * self.copies // size,
            local.state_size,
            local.chunk_size,
            local.dt_limit,
        )

    def forward(
        self,
        xBC_BlC: Tensor,
        dt_BlH: Tensor,
        weights: MixWeights,
        layout: DocumentLayout,
        *,
        cache: MixCache | None = None,
    ) -> Tensor:
        """This rank's positions of y, [B, l, H D]."""
        if cache is not None:
            return super().forward(xBC_BlC, dt_BlH, weights, layout, cache=cache)
        sent = torch.cat([self.by_rank(xBC_BlC), dt_BlH.unflatten(-1, (self.group.size(), -1))], dim=-1)
        xBC_BLc, dt_BLh = heads_for_positions(sent, self.group)[:, :, 0].split(
            [sent.shape[-1] - self.own.num_heads, self.own.num_heads], dim=-1
        )
        rank, bias = self.group.rank(), weights.conv_bias_C
        A_h, D_h, dt_bias_h = (
            weight.unflatten(0, (self.group.size(), -1))[rank]
            for weight in (weights.A_H, weights.D_H, weights.dt_bias_H)
        )
        conv_cK = self.by_rank(weights.conv_CK.T)[:, rank].T
        bias_c = None if bias is None else self.by_rank(bias)[rank]
        y_BLI = self.own(xBC_BLc, dt_BLh, MixWeights(conv_cK, bias_c, A_h, D_h, dt_bias_h), layout.whole)
        y_BLhD = y_BLI.unflatten(-1, (self.own.num_heads, self.head_size))
        return positions_for_heads(y_BLhD, self.group).flatten(-2)

    def by_rank(self, channels: Tensor) -> Tensor:
        """[..., C] -> [..., P, c]: the channels of x, B and C that each rank needs."""
        return torch.cat(
            [
                part.repeat_interleave(copies, dim=-2).flatten(-2).unflatten(-1, (self.group.size(), -1))
                for part, copies in zip(self.parts(channels), (1, self.copies, self.copies), strict=True)
            ],
            dim=-1,
        )
