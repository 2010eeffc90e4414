"""Mamba-2 mixer.

Shapes: B rows, L positions, D model size, I = H * P inner size, H heads, P channels of a head, G groups, N state size,
C = I + 2 G N convolution channels, K taps.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.basic import GatedRMSNorm, Linear
from titan_nemotron.models.layers.cache import MixCache
from titan_nemotron.models.layers.init import Rule, constant, log_uniform_decay, time_step_bias, uniform
from titan_nemotron.ops.conv import causal_conv1d, causal_conv1d_state, causal_conv1d_step
from titan_nemotron.ops.ssd import ssd_scan, ssd_step


class MixWeights(NamedTuple):
    """What the convolution and the scan need; A = -exp(A_log)."""

    conv_CK: Tensor
    conv_bias_C: Tensor | None
    A_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor


class DepthwiseConv(nn.Module):
    """The parameters of the causal depthwise convolution, in the shapes of nn.Conv1d: weight [C, 1, K], bias [C]."""

    def __init__(self, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.initial: dict[str, Rule] = {"weight": uniform(taps**-0.5), "bias": uniform(taps**-0.5)}

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Weight [C, K] and bias [C] or None, as the operation takes them."""
        return self.weight.squeeze(1), self.bias


class StateSpace(nn.Module):
    """A_log, D and dt_bias [H]: a module of their own, because they stay fp32 when the rest computes in bf16."""

    stays_fp32 = True

    def __init__(self, num_heads: int, time_step: tuple[float, float, float]) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.D = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.initial: dict[str, Rule] = {
            "A_log": log_uniform_decay(),
            "D": constant(1.0),
            "dt_bias": time_step_bias(*time_step),
        }

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """A = -exp(A_log), at least fp32; D; dt_bias: each [H]."""
        dtype = torch.promote_types(self.A_log.dtype, torch.float32)
        # clone: an alias of a sharded parameter's storage would be freed under the backward's feet
        return -torch.exp(self.A_log.to(dtype)), self.D.clone(), self.dt_bias.clone()


class LocalMix(nn.Module):
    """Convolution and scan when every rank holds whole rows: one seam, because both cross tokens."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_groups: int,
        state_size: int,
        chunk_size: int,
        dt_limit: tuple[float, float],
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.num_groups, self.state_size = (
            num_heads,
            head_size,
            num_groups,
            state_size,
        )
        self.chunk_size, self.dt_limit = chunk_size, dt_limit

    def forward(
        self,
        xBC_BLC: Tensor,
        dt_BLH: Tensor,
        weights: MixWeights,
        layout: DocumentLayout,
        *,
        cache: MixCache | None = None,
    ) -> Tensor:
        """Returns y [B, L, H * P]. With a cache the rows continue it; padding may then only stand at a row's end."""
        if cache is not None and xBC_BLC.shape[1] == 1 and not layout.has_padding:
            return self._step(xBC_BLC[:, 0], dt_BLH[:, 0], weights, cache)[:, None]
        ids = layout.document_ids
        conv_state = None if cache is None else cache.conv_state
        ssm_state = None if cache is None else cache.ssm_state
        mixed = causal_conv1d(xBC_BLC, weights.conv_CK, weights.conv_bias_C, ids, conv_state)
        y_BLHP, final_state = self.scan(mixed, dt_BLH, weights, ids, ssm_state)
        if cache is not None:
            cache.conv_state = causal_conv1d_state(cache.conv_state, xBC_BLC, ids)
            cache.ssm_state = final_state
        return y_BLHP.flatten(-2)

    def scan(
        self, mixed: Tensor, dt_BLH: Tensor, weights: MixWeights, ids_BL: Tensor, state_BHPN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ssd_scan over the convolution's output [B, L, C], from a state or from zero: y [B, L, H, P] and the last state."""
        x, B, C = self.parts(mixed)
        return ssd_scan(
            x,
            dt_BLH,
            weights.A_H,
            B,
            C,
            weights.D_H,
            weights.dt_bias_H,
            ids_BL,
            chunk_size=self.chunk_size,
            dt_limit=self.dt_limit,
            initial_state_BHPN=state_BHPN,
        )

    def parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., H, P], B and C [..., G, N] out of the convolution's channels."""
        inner, groups = self.num_heads * self.head_size, self.num_groups * self.state_size
        x, B, C = mixed.split([inner, groups, groups], dim=-1)
        states = (self.num_groups, self.state_size)
        return x.unflatten(-1, (self.num_heads, self.head_size)), B.unflatten(-1, states), C.unflatten(-1, states)

    def _step(self, xBC_BC: Tensor, dt_BH: Tensor, weights: MixWeights, cache: MixCache) -> Tensor:
        """The same for one token a row, without the machinery of chunks."""
        mixed, cache.conv_state = causal_conv1d_step(cache.conv_state, xBC_BC, weights.conv_CK, weights.conv_bias_C)
        x, B, C = self.parts(mixed)
        y_BHP, cache.ssm_state = ssd_step(
            cache.ssm_state,
            x,
            dt_BH,
            weights.A_H,
            B,
            C,
            weights.D_H,
            weights.dt_bias_H,
            dt_limit=self.dt_limit,
        )
        return y_BHP.flatten(-2)


class Mamba2(nn.Module):
    """in_proj -> [z | xBC | dt]; convolution and scan (the seam `mix`); gated norm; out_proj."""

    def __init__(
        self,
        size: int,
        *,
        num_heads: int,
        head_size: int,
        num_groups: int,
        state_size: int,
        taps: int,
        chunk_size: int,
        dt_limit: tuple[float, float],
        time_step: tuple[float, float, float],
        bias: bool,
        conv_bias: bool,
        eps: float,
        std: float,
        out_std: float,
    ) -> None:
        super().__init__()
        inner = num_heads * head_size
        channels = inner + 2 * num_groups * state_size
        self.sections = [inner, channels, num_heads]
        self.in_proj = Linear(size, sum(self.sections), bias=bias, std=std)
        self.conv1d = DepthwiseConv(channels, taps, bias=conv_bias)
        self.ssm = StateSpace(num_heads, time_step)
        self.mix = LocalMix(num_heads, head_size, num_groups, state_size, chunk_size, dt_limit)
        self.norm = GatedRMSNorm(inner, inner // num_groups, eps)
        self.out_proj = Linear(inner, size, bias=bias, std=out_std)

    def forward(
        self, x_BLD: Tensor, layout: DocumentLayout, cache: MixCache | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[B, L, D] -> [B, L, D] in x's dtype, and no statistics. With a cache the rows continue it, and it moves on."""
        z, xBC, dt = self.in_proj(x_BLD).split(self.sections, dim=-1)
        y = self.mix(xBC, dt, MixWeights(*self.conv1d(), *self.ssm()), layout, cache=cache)
        return self.out_proj(self.norm(y, z)), {}
