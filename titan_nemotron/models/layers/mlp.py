"""Squared-ReLU feed-forward layer."""

from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.basic import Linear
from titan_nemotron.ops.activation import relu2


class MLP(nn.Module):
    """down(relu(up(x))^2), not gated; also the form of the shared expert."""

    def __init__(self, size: int, hidden: int, *, bias: bool, std: float, out_std: float) -> None:
        super().__init__()
        self.up_proj = Linear(size, hidden, bias=bias, std=std)
        self.down_proj = Linear(hidden, size, bias=bias, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in x's dtype."""
        return self.down_proj(relu2(self.up_proj(x)))


class MLPMixer(MLP):
    """The MLP as a block's mixer: it crosses no tokens and has no statistics."""

    def forward(self, x_BLD: Tensor, layout: DocumentLayout, cache: None = None) -> tuple[Tensor, dict[str, Tensor]]:  # type: ignore[override]
        """[B, L, D] -> [B, L, D]; layout and cache are not read."""
        return super().forward(x_BLD), {}
