"""Decoding caches of a model: keys and values for attention, convolution and scan states for Mamba-2.

Shapes: B rows, L new positions, S cached positions, K key/value heads, D head size, C convolution channels, T taps,
H heads, P channels of a head, N state size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.mamba2 import Mamba2


class KVCache:
    """Keys and values of one attention block, a row's tokens from position 0 on; lengths [B] of them are filled."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.longest = 0  # an upper bound of lengths, known without asking the device
        self.lengths = torch.zeros(num_rows, dtype=torch.int64)
        self.even = True  # whether all rows certainly have the same length
        self.k = self.v = torch.empty(0)

    def append(self, k_BLKD: Tensor, v_BLKD: Tensor, layout: DocumentLayout) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write the valid new tokens behind each row's last; return keys, values [B, S, K, D] and the mask [B, L, S].

        No mask: every row has the same length and one new token, which sees all keys.
        Padding may only stand at a row's end. A row that outgrows the capacity is a programming error.
        """
        num_rows, new = k_BLKD.shape[:2]
        assert self.longest + new <= self.capacity, (
            f"cache of {self.capacity} tokens asked to hold {self.longest + new}"
        )
        if self.k.numel() == 0:
            self.k = k_BLKD.new_zeros(num_rows, self.capacity, *k_BLKD.shape[2:])
            self.v = v_BLKD.new_zeros(num_rows, self.capacity, *v_BLKD.shape[2:])
            self.lengths = self.lengths.to(k_BLKD.device)
        places_BL = self.lengths[:, None] + torch.arange(new, device=k_BLKD.device)
        rows = torch.arange(num_rows, device=k_BLKD.device)[:, None]
        # Padding is written too, behind the valid tokens, where the next append overwrites it.
        self.k[rows, places_BL] = k_BLKD
        self.v[rows, places_BL] = v_BLKD
        self.longest += new
        if layout.has_padding:
            self.lengths = self.lengths + layout.valid.sum(1)
            self.even = False
        else:
            self.lengths = self.lengths + new
        if self.even and new == 1:
            return self.k[:, : self.longest], self.v[:, : self.longest], None
        keys = torch.arange(self.longest, device=k_BLKD.device)
        mask_BLS = keys <= places_BL[..., None]
        if layout.has_padding:
            mask_BLS &= layout.valid[..., None]
        return self.k[:, : self.longest], self.v[:, : self.longest], mask_BLS


class SSMCache:
    """conv_state [B, C, T]: the convolution's last inputs, oldest first; ssm_state [B, H, P, N] in at least fp32."""

    def __init__(self, num_rows: int, mixer: Mamba2) -> None:
        mix, weight = mixer.mix, mixer.conv1d.weight
        assert isinstance(weight, Tensor)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        empty: dict[str, Any] = {"dtype": dtype, "device": weight.device}
        self.conv_state = torch.zeros(num_rows, weight.shape[0], weight.shape[2], **empty)
        self.ssm_state = torch.zeros(num_rows, mix.num_heads, mix.head_size, mix.state_size, **empty)


class Cache:
    """The caches of all blocks of the backbone, by block name.

    A mixer of your own takes part by a method make_cache(num_rows, capacity) that returns whatever its forward expects.
    """

    def __init__(self, model: nn.Module, num_rows: int, capacity: int) -> None:
        self.blocks: dict[str, Any] = {}
        for name, block in model.blocks():  # type: ignore[operator]
            mixer = block.mixer
            if isinstance(mixer, Attention):
                self.blocks[name] = KVCache(num_rows, capacity)
            elif isinstance(mixer, Mamba2):
                self.blocks[name] = SSMCache(num_rows, mixer)
            elif hasattr(mixer, "make_cache"):
                self.blocks[name] = mixer.make_cache(num_rows, capacity)

    def __getitem__(self, name: str) -> Any:
        return self.blocks.get(name)
