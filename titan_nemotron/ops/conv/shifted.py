"""The convolution as a sum of shifted inputs, with a hand-written backward: fp32, made for a CPU, runs anywhere.

The rows are one long sequence, worked off in blocks that stay in cache, as if every tap lay in the document. The first
K - 1 positions of each document, where that is wrong, are done apart, from their masked windows. The backward keeps the
inputs alone and recomputes the sums.

Shapes: B rows, L positions, T = B L, C channels, K taps, E edges: positions with a tap outside their document.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.opaque import opaque

BLOCK = 128  # positions


def shifted_sum(
    x_BLC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    document_ids_BL: Tensor,
    initial_state_BCK: Tensor | None,
) -> Tensor:
    """See causal_conv1d."""
    y_BLC: Tensor = _ShiftedSum.apply(x_BLC, weight_CK, bias_C, initial_state_BCK, document_ids_BL)
    return y_BLC


class _Edges(NamedTuple):
    """Valid positions with a tap outside their document, ascending, and what their taps read."""

    index_E: Tensor
    sources_EK: Tensor
    """Flat position of each tap's input, oldest first; 0 where there is none."""
    inside_EK: Tensor
    """Whether the tap reads an input of the same document."""
    carried_EK: Tensor
    """Whether it reads the initial state, before position 0 and in the document of position 0..."""
    columns_EK: Tensor
    """...and its column there."""
    rows_E: Tensor

    @classmethod
    def find(cls, document_ids_BL: Tensor, taps: int) -> "_Edges":
        length = document_ids_BL.shape[1]
        ids = document_ids_BL.flatten()
        whole = torch.zeros_like(document_ids_BL, dtype=torch.bool)
        whole[:, taps - 1 :] = True
        for age in range(1, min(taps, length)):
            whole[:, age:] &= document_ids_BL[:, age:] == document_ids_BL[:, :-age]
        index = (~whole & (document_ids_BL >= 0)).flatten().nonzero().flatten()
        rows, positions = index // length, index % length
        ages = torch.arange(taps - 1, -1, -1, device=ids.device)
        before = positions[:, None] < ages
        sources = torch.where(before, 0, index[:, None] - ages)
        own = ids[index][:, None]
        inside = ~before & (ids[sources] == own)
        carried = before & (document_ids_BL[rows, 0][:, None] == own)
        return cls(index, sources, inside, carried, taps + positions[:, None] - ages, rows)

    def windows(self, x_TC: Tensor, initial_state_BCK: Tensor | None) -> Tensor:
        """What the taps of each edge read, [E, K, C], fp32; zeros outside the document."""
        windows = torch.where(self.inside_EK[..., None], x_TC[self.sources_EK].float(), 0)
        if initial_state_BCK is not None:
            edges, taps = self.carried_EK.nonzero(as_tuple=True)
            windows[edges, taps] = initial_state_BCK[self.rows_E[edges], :, self.columns_EK[edges, taps]].float()
        return windows

    def scatter(self, dwindows_EKC: Tensor, dx_TC: Tensor, dinitial_state_BCK: Tensor) -> None:
        """Adds the gradients of the windows to those of what they read."""
        for tap in range(dwindows_EKC.shape[1]):
            inside, carried = self.inside_EK[:, tap], self.carried_EK[:, tap]
            dx_TC.index_add_(0, self.sources_EK[inside, tap], dwindows_EKC[inside, tap])
            # in one tap, all edges read different columns: nothing is added twice
            dinitial_state_BCK[self.rows_E[carried], :, self.columns_EK[carried, tap]] += dwindows_EKC[carried, tap]


def _blocks(num_positions: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, num_positions)) for start in range(0, num_positions, BLOCK)]


def _sums(x_TC: Tensor, weight_KC: Tensor, bias_C: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """bias + the shifted sums of positions start to stop, as if all were one document, and the inputs they read, fp32."""
    taps = len(weight_KC)
    first = max(start - taps + 1, 0)
    x, offset = x_TC[first:stop].float(), start - first
    z = torch.addcmul(bias_C, x[offset:], weight_KC[-1])
    for age in range(1, taps):
        skipped = min(max(age - offset, 0), stop - start)  # at the very start
        z[skipped:].addcmul_(x[offset + skipped - age : len(x) - age], weight_KC[-1 - age])
    return z, x


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, document_ids: Tensor
) -> Tensor:
    num_channels, taps = weight.shape
    x_TC, weight_KC = x.reshape(-1, num_channels), weight.float().T.contiguous()
    bias_C = weight_KC.new_zeros(num_channels) if bias is None else bias.float()
    edges = _Edges.find(document_ids, taps)
    y_TC = x.new_empty(x_TC.shape)
    for start, stop in _blocks(len(x_TC)):
        z, _ = _sums(x_TC, weight_KC, bias_C, start, stop)
        y_TC[start:stop] = F.silu(z, inplace=True)
    edge_sums = (edges.windows(x_TC, initial_state) * weight_KC).sum(1) + bias_C
    y_TC[edges.index_E] = F.silu(edge_sums).to(y_TC.dtype)
    y_TC.index_fill_(0, (document_ids.flatten() < 0).nonzero().flatten(), 0)
    return y_TC.view(x.shape)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    document_ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, in its dtype, and of weight, bias and the initial state, in fp32."""
    num_channels, taps = weight.shape
    x_TC, dy_TC, weight_KC = (t.reshape(-1, num_channels) for t in (x, dy, weight.float().T.contiguous()))
    bias_C = weight_KC.new_zeros(num_channels) if bias is None else bias.float()
    edges = _Edges.find(document_ids, taps)
    irregular = document_ids.flatten() < 0
    irregular[edges.index_E] = True
    dx_TC, dweight_KC = torch.empty_like(x_TC, dtype=torch.float32), torch.zeros_like(weight_KC)
    dbias_C = torch.zeros_like(bias_C)
    dinitial_state = weight_KC.new_zeros(x.shape[0], num_channels, taps)
    for start, stop in _blocks(len(x_TC)):
        z, read = _sums(x_TC, weight_KC, bias_C, start, stop)
        dz = torch.ops.aten.silu_backward(dy_TC[start:stop].float(), z)
        dz.index_fill_(0, irregular[start:stop].nonzero().flatten(), 0)
        dbias_C += dz.sum(0)
        torch.mul(dz, weight_KC[-1], out=dx_TC[start:stop])
        for age in range(taps):
            skipped = min(max(age - start, 0), stop - start)
            later = dz[skipped:]
            if age:
                dx_TC[start + skipped - age : stop - age].addcmul_(later, weight_KC[-1 - age])
            dweight_KC[-1 - age] += (later * read[len(read) - len(later) - age : len(read) - age]).sum(0)
    windows = edges.windows(x_TC, initial_state)
    edge_sums = (windows * weight_KC).sum(1) + bias_C
    dz_EC = torch.ops.aten.silu_backward(dy_TC[edges.index_E].float(), edge_sums)
    dbias_C += dz_EC.sum(0)
    dweight_KC += (dz_EC[:, None] * windows).sum(0)
    edges.scatter(dz_EC[:, None] * weight_KC, dx_TC, dinitial_state)
    return dx_TC.to(x.dtype).view(x.shape), dweight_KC.T.contiguous(), dbias_C, dinitial_state


def _backward_shapes(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels, taps = weight.shape
    shapes = ((channels, taps), (channels,), (x.shape[0], channels, taps))
    dweight, dbias, dinitial_state = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return x.new_empty(x.shape), dweight, dbias, dinitial_state


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor document_ids"
_FORWARD = opaque(f"causal_conv1d({_INPUTS}) -> Tensor", _forward, lambda x, *rest: x.new_empty(x.shape))
_BACKWARD = opaque(
    f"causal_conv1d_backward(Tensor dy, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)", _backward, _backward_shapes
)


class _ShiftedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        y: Tensor = _FORWARD(*inputs)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = _BACKWARD(dy, *inputs)
        return *(None if tensor is None else grad.to(tensor.dtype) for grad, tensor in zip(grads, inputs)), None
