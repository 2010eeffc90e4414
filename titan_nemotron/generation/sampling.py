"""Sampling from logits.

Shapes: B rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_nemotron.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p keeps the fewest tokens whose probability reaches it; seed: of the first row,
    row i draws from seed + i, so that a row's tokens do not depend on its neighbours."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature != 0 and not self.temperature >= 1e-6:
            raise UserError(f"temperature: {self.temperature} is below 1e-6; use 0 for greedy")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: {self.top_p} is not in (0, 1]")
        if self.max_new_tokens < 0:
            raise UserError(f"max_new_tokens: {self.max_new_tokens} is negative")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed: {self.seed} does not fit 64 bits")


def sample(logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability under the distribution it was drawn from (temperature, top-p applied).

    Greedy tokens carry the log-probability at temperature 1. Returns two [B] tensors, int64 and at least fp32.
    """
    if sampling.temperature == 0:
        logprobs = torch.log_softmax(logits_BV, -1)
        tokens = logits_BV.argmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
    logprobs = torch.log_softmax(logits_BV / sampling.temperature, -1)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        dropped = torch.zeros_like(logprobs, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logprobs = torch.log_softmax(logprobs.masked_fill(dropped, float("-inf")), -1)
    cumulative = logprobs.double().exp().cumsum(-1)
    drawn = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
    target = drawn.to(cumulative.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits_BV.shape[1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
