"""Routed experts spread over the ranks of the expert axis.

Each rank holds E / P of the experts of a layer and keeps its own tokens; a token's rows travel to the ranks of its experts
and back.

Shapes: T tokens of this rank, K experts a token, S = T K rows sent, R rows received, E experts, P ranks of the axis, D model
(or latent) size.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from titan_nemotron.models.layers.moe import DispatchHandle, Experts, LocalDispatch, MoE
from titan_nemotron.ops.experts import inverse_permutation, on_host, permute_rows, sum_rows
from titan_nemotron.parallel.mesh import check_degree


class Travelling(NamedTuple):
    """Rows on their way. home: how this rank's rows, sorted by expert, come back to tokens; sent_P, received_P: numbers of
    rows to and from each rank; received_PE: those of each of this rank's experts from each rank."""

    rows_RD: Tensor
    weights_R: Tensor
    home: DispatchHandle
    sent_P: list[int]
    received_P: list[int]
    received_PE: Tensor


class AllToAllHandle(NamedTuple):
    """The way back: the permutation of what arrived, from (rank, expert) to (expert, rank), and its inverse."""

    travelled: Travelling
    order_R: Tensor
    places_R: Tensor


class AllToAllDispatch(LocalDispatch):
    """LocalDispatch over ranks: rows go to the rank that holds their expert, whatever their number, and come back."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        super().__init__(num_experts)
        self.group = group

    def send(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Travelling:  # type: ignore[override]
        """Start the rows on their way. The host waits once, for their numbers; not when a block is computed again."""
        rows_SD, weights_S, offsets_E, home = super().send(x_TD, indices_TK, weights_TK)
        counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
        received_E = all_to_all_single(counts_E, None, None, self.group)
        counts_PE, received_PE = (counts.unflatten(0, (self.group.size(), -1)) for counts in (counts_E, received_E))
        sent_P, received_P = on_host(torch.stack([counts_PE.sum(1), received_PE.sum(1)])).tolist()
        rows_RD, weights_R = (
            all_to_all_single_autograd(tensor, received_P, sent_P, self.group) for tensor in (rows_SD, weights_S)
        )
        return Travelling(rows_RD, weights_R, home, sent_P, received_P, received_PE)

    def receive(self, sent: Travelling) -> tuple[Tensor, Tensor, Tensor, AllToAllHandle]:
        """Rows [R, D] of this rank's experts, sorted by expert and then by source rank."""
        num_ranks, num_experts = sent.received_PE.shape
        experts = torch.arange(num_experts, device=sent.received_PE.device).repeat(num_ranks)
        experts_R = experts.repeat_interleave(sent.received_PE.flatten(), output_size=sum(sent.received_P))
        order_R = experts_R.argsort(stable=True)
        places_R = inverse_permutation(order_R)
        x_RD = permute_rows(sent.rows_RD, order_R, places_R)
        offsets_E = sent.received_PE.sum(0).cumsum(0, dtype=torch.int32)
        return x_RD, sent.weights_R.index_select(0, order_R), offsets_E, AllToAllHandle(sent, order_R, places_R)

    def combine(self, y_RD: Tensor, handle: AllToAllHandle) -> Tensor:
        """Send the rows back and sum each token's K: their weights are already in them."""
        travelled = handle.travelled
        back_RD = permute_rows(y_RD, handle.places_R, handle.order_R)
        rows_SD = all_to_all_single_autograd(back_RD, travelled.sent_P, travelled.received_P, self.group)
        return sum_rows(rows_SD, *travelled.home)


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh`, the expert axis, its part of every layer's experts, and let tokens travel to them.

    Parameters become DTensors under their old names, sharded along the experts. The model is on the meta device. Raises
    UserError when the experts of a layer do not divide.
    """
    for name, moe in model.named_modules():
        if not isinstance(moe, MoE):
            continue
        num_experts, degree = moe.router.weight.shape[0], mesh.size()
        check_degree("expert", degree, num_experts, f"the {num_experts} experts of {name}")
        moe.dispatcher = AllToAllDispatch(num_experts, mesh.get_group())
        for part, parameter in moe.experts.named_parameters(recurse=False):
            local = torch.empty(num_experts // degree, *parameter.shape[1:], device=parameter.device)
            spread = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            moe.experts.register_parameter(part, nn.Parameter(spread, requires_grad=parameter.requires_grad))
        moe.experts.part = local_weight  # type: ignore[method-assign]


def local_weight(weight: Tensor) -> Tensor:
    """The experts of this rank, in a forward: what sharded training gathers is still spread over the expert axis."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def shard_dim(experts: Experts, degree: int) -> int:
    """The dim along which the sharding of an expert module cuts its experts: between them where they divide, so that their
    matrices stay whole, else along their rows."""
    return 0 if local_weight(experts.up_proj).shape[0] % degree == 0 else 1
