"""A mixer of one's own: a gated short convolution.

Shapes: B rows, L positions, D model size.
"""

import torch
from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.basic import Linear
from titan_nemotron.models.layers.mamba2 import DepthwiseConv
from titan_nemotron.models.nemotron3.config import Nemotron3Config
from titan_nemotron.ops.conv import causal_conv1d, causal_conv1d_state


class GatedConv(nn.Module):
    """out_proj(gate * silu(conv(value))), where [gate | value] = in_proj(x).

    The convolution is the only part that crosses tokens, and it is told the documents by the layout.
    """

    def __init__(self, config: Nemotron3Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.in_proj = Linear(size, 2 * size, std=config.initializer_range)
        self.conv1d = DepthwiseConv(size, config.conv_kernel, bias=True)
        self.out_proj = Linear(size, size, std=config.residual_std)

    def forward(
        self, x_BLD: Tensor, layout: DocumentLayout, cache: "ConvCache | None" = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        gate, value = self.in_proj(x_BLD).chunk(2, dim=-1)
        state = None if cache is None else cache.state
        mixed = causal_conv1d(value, *self.conv1d(), layout.document_ids, state)
        if cache is not None:
            cache.state = causal_conv1d_state(cache.state, value, layout.document_ids)
        return self.out_proj(gate * mixed), {}

    def make_cache(self, num_rows: int, capacity: int) -> "ConvCache":
        """Called by generation; a mixer without this method can be trained but not decoded."""
        channels, _, taps = self.conv1d.weight.shape
        # Not weight.new_zeros: outside its block's forward a weight may be a shard, and so would be what is made of it.
        return ConvCache(torch.zeros(num_rows, channels, taps, device=self.conv1d.weight.device))


class ConvCache:
    """state [B, D, taps]: the convolution's last inputs, oldest first."""

    def __init__(self, state: Tensor) -> None:
        self.state = state
