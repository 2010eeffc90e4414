"""Balancing of routed experts without an auxiliary loss.

Shapes: E experts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_nemotron.models.family import Model


@torch.no_grad()
def update_router_biases(model: Model, counts: Mapping[str, Tensor], rate: float) -> None:
    """b_e += rate * sign(mean(count) - count_e) for every router, once per optimizer step.

    counts [E] by call (as Losses.stats names calls), summed over all ranks and microbatches of the step, in any dtype that
    holds them exactly. A router that is called several times (shared multi-token blocks) moves once, by the sum of its
    calls. The biases have no gradient and move also where router weights are frozen. Source: Megatron-LM,
    get_updated_expert_bias.
    """
    totals: dict[Tensor, Tensor] = {}
    for call, router in model.routers().items():
        bias = router.correction_bias
        assert isinstance(bias, Tensor)
        totals[bias] = totals.get(bias, 0) + counts[call]
    for bias, count_E in totals.items():
        count_E = count_E.double()
        bias += rate * torch.sign(count_E.mean() - count_E).to(bias)
