"""What the ranks of a context group exchange, with gradients.

Shapes: P ranks, B rows, L positions of the whole row, l = L / P of this rank, H heads, E head size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, all_to_all_single_autograd

try:  # its name from torch 2.13 on; the older one warns there
    from torch.distributed._functional_collectives import all_gather_single_autograd
except ImportError:
    from torch.distributed._functional_collectives import all_gather_tensor_autograd as all_gather_single_autograd


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[P, ...]: the tensors of all ranks, in their order; the backward sums over ranks."""
    return all_gather_single_autograd(tensor.contiguous()[None], 0, group)


def handed_on(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor of the previous rank, zeros on the first; the backward hands gradients back."""
    rank, size = group.rank(), group.size()
    rows = tensor.flatten()
    sent = [rows.numel() if other == rank + 1 else 0 for other in range(size)]
    received = [rows.numel() if other == rank - 1 else 0 for other in range(size)]
    if rank == size - 1:
        rows = rows[:0]
    arrived = all_to_all_single_autograd(rows.contiguous(), received, sent, group)
    return arrived.view(tensor.shape) if rank else torch.zeros_like(tensor) + 0 * arrived.sum()


def passed(tensor: Tensor, to: int | None, source: int | None, group: dist.ProcessGroup) -> Tensor:
    """Flat, on its way (wait_tensor ends it), without gradients: what rank `source` passes, while `tensor` goes to rank
    `to`; of one size everywhere, and nothing where there is no such rank. All ranks of the group take part."""

    def sizes(rank: int | None) -> list[int]:
        return [tensor.numel() if other == rank else 0 for other in range(group.size())]

    rows = tensor.contiguous().flatten() if to is not None else tensor.new_empty(0)
    coming: Tensor = all_to_all_single(rows, sizes(source), sizes(to), group)
    return coming


def heads_for_positions(x_BlHE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L, H / P, E]: all positions of this rank's heads, for this rank's positions of all heads."""
    size = group.size()
    parts = x_BlHE.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    arrived = all_to_all_single_autograd(parts, [1] * size, [1] * size, group)
    return arrived.permute(1, 0, 2, 3, 4).flatten(1, 2)


def positions_for_heads(x_BLhE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: [B, l, H, E]."""
    size = group.size()
    parts = x_BLhE.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    arrived = all_to_all_single_autograd(parts, [1] * size, [1] * size, group)
    return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, on every rank; so is its gradient."""
    return _Summed.apply(tensor, group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total: Tensor = all_reduce(tensor.contiguous(), "sum", group) + 0  # waited for
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.contiguous(), "sum", ctx.group) + 0, None
