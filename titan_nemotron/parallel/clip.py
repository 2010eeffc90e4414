"""Clipping by the global norm of sharded gradients."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm), norm = sqrt(sum of squares over all parameters and ranks).

    max_norm 0 never scales. The norm is returned as an fp32 scalar, equal on all ranks, without a host synchronisation.
    """
    by_mesh = defaultdict(list)  # an operation on several DTensors needs them on one mesh
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh[mesh].append(parameter)
    norms = []
    for group in by_mesh.values():
        norm = nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    if max_norm > 0:
        for group in by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total
