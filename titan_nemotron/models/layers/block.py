"""The residual block: one mixer, one norm."""

from typing import Any

from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.basic import RMSNorm


class Block(nn.Module):
    """x + mixer(norm(x)). The unit of recomputation, compilation and sharding.

    A mixer is called as mixer(x_BLD, layout, cache=None) and returns its output and a dict of statistics, which the block
    hands on: statistics are returned, never kept, so that recomputing a block counts nothing twice.
    """

    def __init__(self, size: int, eps: float, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps)
        self.mixer = mixer

    def forward(
        self, x_BLD: Tensor, layout: DocumentLayout, cache: Any = None, indices: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """indices: the routing to replay, for blocks whose mixer routes."""
        replay = {} if indices is None else {"indices": indices}
        y, stats = self.mixer(self.norm(x_BLD), layout, cache=cache, **replay)
        return x_BLD + y, stats
