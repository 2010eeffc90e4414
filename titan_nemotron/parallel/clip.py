"""Clipping by the global norm of sharded gradients."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm), norm = sqrt(sum of squares over all parameters and ranks).

    max_norm 0 never scales. Gradients may live on different meshes: each mesh sums the squares of its shards over the axes
    that its gradients are sharded on. Returns the norm, an fp64 scalar on the device, equal on all ranks; the host does not
    wait for it.
    """
    local: list[Tensor] = []
    by_axes: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            assert isinstance(gradient, DTensor)
            axes = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
            by_axes[gradient.device_mesh, axes].append(gradient.to_local())
            local.append(gradient.to_local())
    total = torch.zeros((), dtype=torch.float64, device=local[0].device)
    for (mesh, axes), shards in by_axes.items():
        squares = torch.stack(torch._foreach_norm(shards)).double().square().sum()
        for axis in axes:
            dist.all_reduce(squares, group=mesh.get_group(axis))
        total = total + squares
    norm = total.sqrt()
    if max_norm > 0:
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0).float())
    return norm
