"""Mamba-2 over rows that are split: a halo for the convolution, and states handed on.

The scan is linear in the state it starts from. Each rank scans its part from zero; the states at the ends of all parts, and
the decays through them, give the state h that a part starts from, and y_t gains exp(l_t) C_t h where l_t is the logarithm of
the decay from the part's start through t, as long as t lies in the document that crosses the border. What is sent does not
depend on the length of the row.

Shapes: P ranks, B rows, l positions of this rank, C channels, K taps, H heads of D channels, G groups, N state size.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.cache import MixCache
from titan_nemotron.models.layers.mamba2 import LocalMix, MixWeights
from titan_nemotron.ops.conv import causal_conv1d
from titan_nemotron.parallel.context.exchange import gathered, handed_on


class StatePassingMix(LocalMix):
    """LocalMix over the ranks of a context group; decoding splits no rows, and is LocalMix's."""

    def __init__(self, local: LocalMix, group: dist.ProcessGroup) -> None:
        sizes = (local.num_heads, local.head_size, local.num_groups, local.state_size)
        super().__init__(*sizes, local.chunk_size, local.dt_limit)
        self.group = group

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
        mixed = causal_conv1d(
            xBC_BlC, weights.conv_CK, weights.conv_bias_C, layout.local_ids, self.halo(xBC_BlC, weights, layout)
        )
        y_BlHD, state_BHDN = self.scan(mixed, dt_BlH, weights, layout.local_ids)
        log_decay_BlH = self.log_decay(dt_BlH, weights, layout)
        start_BHDN = self.start(state_BHDN, log_decay_BlH[:, -1], layout)
        return (
            y_BlHD + self.correction(self.parts(mixed)[2], start_BHDN, log_decay_BlH, layout).to(y_BlHD.dtype)
        ).flatten(-2)

    def halo(self, xBC_BlC: Tensor, weights: MixWeights, layout: DocumentLayout) -> Tensor:
        """[B, C, K]: the last inputs before this part, zero where they belong to another document."""
        taps = weights.conv_CK.shape[1]
        assert xBC_BlC.shape[1] >= taps - 1, "a part is shorter than the convolution reaches"
        before_BkC = handed_on(xBC_BlC[:, xBC_BlC.shape[1] - (taps - 1) :], self.group)
        if layout.start:
            ids = layout.document_ids[:, layout.start - (taps - 1) : layout.start]
            before_BkC = torch.where((ids == layout.local_ids[:, :1])[..., None], before_BkC, 0)
        return F.pad(before_BkC, (0, 0, 1, 0)).transpose(1, 2)  # the oldest of K is never read

    def log_decay(self, dt_BlH: Tensor, weights: MixWeights, layout: DocumentLayout) -> Tensor:
        """[B, l, H] fp64: sum of d A from the part's start through t; padding does not decay."""
        dtype = torch.promote_types(dt_BlH.dtype, torch.float32)
        d = F.softplus(dt_BlH.to(dtype) + weights.dt_bias_H.to(dtype)).clamp(*self.dt_limit)
        return (d * layout.valid[..., None] * weights.A_H.to(dtype)).double().cumsum(1)

    def start(self, state_BHDN: Tensor, log_decay_BH: Tensor, layout: DocumentLayout) -> Tensor:
        """The state [B, H, D, N] that this part starts from: sum over the parts j before it, as long as one document
        crosses from the end of j to here, of exp(the log-decays of the parts between) times the state at the end of j."""
        rank, size = self.group.rank(), self.group.size()
        states_PBHDN = gathered(state_BHDN, self.group)
        decays_PBH = gathered(log_decay_BH, self.group)
        through_PBH = decays_PBH.cumsum(0)
        between_PBH = through_PBH[max(rank - 1, 0)] - through_PBH
        last = layout.document_ids[:, layout.length - 1 :: layout.length].T  # [P, B]: at the end of each part
        before = torch.arange(size, device=last.device)[:, None] < rank
        crosses_PB = before & (last == layout.local_ids[:, 0]) & (last >= 0)
        weight_PBH = torch.where(crosses_PB[..., None], between_PBH.clamp(max=0), float("-inf")).exp()
        return torch.einsum("pbh,pbhdn->bhdn", weight_PBH.to(state_BHDN.dtype), states_PBHDN)

    def correction(self, C_BlGN: Tensor, start_BHDN: Tensor, log_decay_BlH: Tensor, layout: DocumentLayout) -> Tensor:
        """exp(l_t) C_t h for the document that crosses into this part, [B, l, H, D]."""
        previous = layout.document_ids[:, max(layout.start - 1, 0), None]
        continues_Bl = (layout.local_ids == previous) & layout.valid & (layout.start > 0)
        decay_BlH = torch.where(continues_Bl[..., None], log_decay_BlH, float("-inf")).exp().to(start_BHDN.dtype)
        grouped = start_BHDN.unflatten(1, (C_BlGN.shape[2], -1))
        read = torch.einsum("blgn,bgrdn->blgrd", C_BlGN.to(start_BHDN.dtype), grouped).flatten(2, 3)
        return read * decay_BlH[..., None]
