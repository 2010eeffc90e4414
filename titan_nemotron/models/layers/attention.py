"""Grouped-query attention without positional embedding.

Shapes: B rows, L positions, D model size, H query heads, K key/value heads, E head size.
"""

from collections.abc import Callable

from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.basic import Linear
from titan_nemotron.models.layers.cache import AttentionCache
from titan_nemotron.ops.attention import attention, cached_attention


class LocalAttention(nn.Module):
    """softmax(scale q k^T) v inside each document, causal, when every rank holds whole rows; parallelism swaps it.

    window: position i sees j only when i - j <= window; None: no bound inside the document.
    latent, expand: for families that keep a compressed key/value latent and expand it inside the core; unused here.
    """

    def __init__(self, scale: float, window: int | None = None) -> None:
        super().__init__()
        self.scale, self.window = scale, window

    def forward(
        self,
        q_BLHE: Tensor,
        k_BLKE: Tensor,
        v_BLKE: Tensor,
        layout: DocumentLayout,
        *,
        cache: AttentionCache | None = None,
        latent: Tensor | None = None,
        expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs [B, L, H, E] in q's dtype, and their largest logits [H] where somebody monitors them."""
        assert latent is None and expand is None, "this core expands no latent"
        if cache is None:
            return attention(q_BLHE, k_BLKE, v_BLKE, layout, scale=self.scale, window=self.window), None
        k, v, mask = cache.append(k_BLKE, v_BLKE, layout)
        return cached_attention(q_BLHE, k, v, mask, scale=self.scale), None


class Attention(nn.Module):
    """softmax(q k^T / sqrt(E)) v with H query heads reading K key/value heads, no rotary, no norm on q or k."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        bias: bool,
        std: float,
        out_std: float,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.q_proj = Linear(size, num_heads * head_size, bias=bias, std=std)
        self.k_proj = Linear(size, num_kv_heads * head_size, bias=bias, std=std)
        self.v_proj = Linear(size, num_kv_heads * head_size, bias=bias, std=std)
        self.o_proj = Linear(num_heads * head_size, size, bias=bias, std=out_std)
        self.core = LocalAttention(scale=head_size**-0.5)

    def forward(
        self, x_BLD: Tensor, layout: DocumentLayout, cache: AttentionCache | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, L, D] -> [B, L, D] in x's dtype, and {"max_logit_H": [H]} where the core monitors logits, else {}.

        With a cache the new positions also see what it holds, and are added to it.
        """
        q, k, v = (
            projection(x_BLD).unflatten(-1, (-1, self.head_size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BLHE, max_logit_H = self.core(q, k, v, layout, cache=cache)
        stats = {} if max_logit_H is None else {"max_logit_H": max_logit_H}
        return self.o_proj(out_BLHE.flatten(-2)), stats
