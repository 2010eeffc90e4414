"""AdamW over fp32 master weights, and which parameters train and decay."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from titan_nemotron.errors import UserError
from titan_nemotron.optim.config import OptimizerConfig

NO_DECAY = ("A_log", "D", "dt_bias", "bias")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Switch off the gradient of the parameters whose names match a shell pattern; before the model is sharded.

    Raises UserError for a pattern that matches nothing.
    """
    for pattern in patterns:
        matched = [parameter for name, parameter in model.named_parameters() if fnmatchcase(name, pattern)]
        if not matched:
            example = next(name for name, _ in model.named_parameters())
            raise UserError(f"optimizer.freeze: {pattern!r} matches no parameter; names look like {example!r}")
        for parameter in matched:
            parameter.requires_grad_(False)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Weight decay is for matrices: never for vectors, biases, or Mamba-2's A_log, D and dt_bias."""
    return parameter.dim() > 1 and name.rpartition(".")[2] not in NO_DECAY


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with a group that decays and one that does not; the caller sets each group's "lr" before a step."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise UserError(f"optimizer.freeze: {config.freeze} leaves no parameter to train")
    groups = []
    for decay in (True, False):
        members = [parameter for name, parameter in named if decays(name, parameter) is decay]
        if members:
            groups.append({"params": members, "weight_decay": config.weight_decay if decay else 0.0})
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
    # All states from the start: a parameter without a gradient yet is saved like the others, and torch, which fills in
    # an optimizer's missing states by a step without effect before it saves them, does not count that step.
    for _, parameter in named:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def describe(model: nn.Module) -> str:
    """A table of what trains and decays: parameters and elements of each kind."""
    rows = {"decay": [0, 0], "no decay": [0, 0], "frozen": [0, 0]}
    for name, parameter in model.named_parameters():
        kind = "frozen" if not parameter.requires_grad else "decay" if decays(name, parameter) else "no decay"
        rows[kind][0] += 1
        rows[kind][1] += parameter.numel()
    lines = [f"{'parameters':<12}{'tensors':>10}{'elements':>20}"]
    lines += [f"{kind:<12}{tensors:>10,}{elements:>20,}" for kind, (tensors, elements) in rows.items() if tensors]
    return "\n".join(lines)
