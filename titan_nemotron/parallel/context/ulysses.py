"""Attention over rows that are split: positions for heads and back (Jacobs et al., "DeepSpeed Ulysses", 2023).

Shapes: B rows, L positions of the whole row, l of this rank, H query heads, K key/value heads, E head size, P ranks.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.attention import LocalAttention
from titan_nemotron.parallel.context.exchange import heads_for_positions, positions_for_heads


class UlyssesAttention(nn.Module):
    """Each rank computes all positions of H / P query heads and of the key/value heads that these read.

    With fewer key/value heads than ranks, each is sent to all ranks whose query heads read it.
    """

    def __init__(self, local: LocalAttention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.local, self.group = local, group

    def forward(
        self,
        q_BlHE: Tensor,
        k_BlKE: Tensor,
        v_BlKE: Tensor,
        layout: DocumentLayout,
        *,
        cache: None = None,
        **latent: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's positions of all heads, [B, l, H, E]."""
        assert cache is None, "decoding splits no rows"
        copies = max(1, self.group.size() // k_BlKE.shape[2])
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k_BlKE, v_BlKE))
        q, k, v = (heads_for_positions(x, self.group) for x in (q_BlHE, k, v))
        out, max_logit_h = self.local(q, k, v, layout.whole, **latent)
        assert max_logit_h is None, "each rank would know its own heads alone"
        return positions_for_heads(out, self.group), None
