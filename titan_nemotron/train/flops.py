"""How much a model computes, counted from its modules.

Shapes: L positions, H heads, E head size, K experts a token, Q chunk length.
"""

from dataclasses import dataclass

import torch
from torch import nn

from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.basic import Embedding
from titan_nemotron.models.layers.head import Head
from titan_nemotron.models.layers.mamba2 import Mamba2
from titan_nemotron.models.layers.moe import MoE
from titan_nemotron.models.layers.mtp import MultiTokenPredictor

# Dense peak in 10^12 FLOP/s in bf16, by a part of the device's name; from NVIDIA's data sheets (without sparsity).
PEAKS = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


@dataclass(frozen=True)
class ModelSize:
    """total: parameters, without buffers; active: those that a token meets in generation, embedding and head included,
    multi-token prediction left out; flops: operations a token of training takes, forward and backward."""

    total: int
    active: int
    flops: float


def model_size(model: nn.Module, sequence_length: int) -> ModelSize:
    """Count a model, on any device, for rows of `sequence_length`.

    flops = 3 * (2 * weights a token is multiplied with + attention 4 H E L / 2 + scan 7 * inner size * state size), where
    the head and shared blocks count as often as multi-token prediction uses them. Causal attention counts half its
    square, documents count as if they filled the row, and recomputation counts nothing, as is usual for utilisation.
    Source of the scan's 7: Megatron-LM, mamba_layer_flops.
    """
    predictors = [module for module in model.modules() if isinstance(module, MultiTokenPredictor)]
    depths = sum(module.depths for module in predictors)
    repeats = {inner: module.depths / len(module.blocks) for module in predictors for inner in module.modules()}
    experts = {
        module.experts: module.router.topk / module.dispatcher.num_experts
        for module in model.modules()
        if isinstance(module, MoE)
    }
    total, active, forward = 0, 0.0, 0.0
    for module in model.modules():
        calls = 1.0 + depths if isinstance(module, Head) else repeats.get(module, 1.0)
        share = experts.get(module, 1.0)  # type: ignore[call-overload]
        for parameter in module.parameters(recurse=False):
            total += parameter.numel()
            active += 0 if module in repeats else parameter.numel() * share
            if parameter.dim() > 1 and not isinstance(module, Embedding):
                forward += 2 * parameter.numel() * share * calls
        if isinstance(module, Attention):
            forward += calls * 4 * module.q_proj.weight.shape[0] * sequence_length / 2
        elif isinstance(module, Mamba2):
            forward += calls * 7 * module.mix.num_heads * module.mix.head_size * module.mix.state_size
    return ModelSize(total, round(active), 3 * forward)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of a device in FLOP/s, None where we do not know it."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """peak_flops of a GPU with this name."""
    return next((peak * 1e12 for part, peak in PEAKS.items() if part in name), None)
