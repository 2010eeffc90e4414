"""What a mixer needs of a decoding cache; generation/cache.py implements it.

Shapes: B rows, L new positions, S cached positions, K key/value heads, C convolution channels, T taps, H heads, P channels
of a head, N state size.
"""

from typing import Protocol

from torch import Tensor

from titan_nemotron.layout import DocumentLayout


class AttentionCache(Protocol):
    """Keys and values of the S positions an attention block has seen."""

    def append(self, k_BLKD: Tensor, v_BLKD: Tensor, layout: DocumentLayout) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store the valid new keys and values; return all keys, all values [B, S, K, D] and the mask [B, L, S]."""
        ...


class MixCache(Protocol):
    """What a Mamba-2 block carries from one token to the next; the block replaces both states."""

    conv_state: Tensor
    """[B, C, T]: the last T inputs of the convolution, oldest first."""
    ssm_state: Tensor
    """[B, H, P, N], at least fp32."""


class ModelCache(Protocol):
    """The caches of all blocks of a model, during incremental generation."""

    def __getitem__(self, layer: str) -> AttentionCache | MixCache | None:
        """The cache of a block by its name ("layers.3"), None for blocks without one."""
        ...
