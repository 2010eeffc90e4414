"""Attention over rows that are split: positions for heads and back (Jacobs et al., "DeepSpeed Ulysses", 2023).

Shapes: B rows, L positions of the whole row, l of this rank, H query heads, K key/value heads, E head size, P ranks.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.attention import LocalAttention
from titan_nemotron.models.layers.cache import AttentionCache
from titan_nemotron.parallel.context.exchange import heads_for_positions, positions_for_heads


class UlyssesAttention(LocalAttention):
    """Each rank computes all positions of H / P query heads and of the key/value heads that these read.

    With fewer key/value heads than ranks, each is sent to all ranks whose query heads read it. Decoding splits no rows, and
    is LocalAttention's.
    """

    def __init__(self, local: LocalAttention, group: dist.ProcessGroup) -> None:
        super().__init__(local.scale, local.window)
        self.group = group

    def forward(
        self,
        q_BlHE: Tensor,
        k_BlKE: Tensor,
        v_BlKE: Tensor,
        layout: DocumentLayout,
        *,
        cache: AttentionCache | None = None,
        latent: Tensor | None = None,
        expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """This rank's positions of all heads, [B, l, H, E]."""
        assert latent is None and expand is None, "this core expands no latent"
        if cache is not None:
            return super().forward(q_BlHE, k_BlKE, v_BlKE, layout, cache=cache)
        copies = max(1, self.group.size() // k_BlKE.shape[2])
        k, v = (x.repeat_interleave(copies, dim=2) for x in (k_BlKE, v_BlKE))
        q, k, v = (heads_for_positions(x, self.group) for x in (q_BlHE, k, v))
        out, max_logit_h = super().forward(q, k, v, layout.whole)
        assert max_logit_h is None, "each rank would know its own heads alone"
        return positions_for_heads(out, self.group), None
