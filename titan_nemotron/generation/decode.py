"""Batched incremental generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from titan_nemotron.errors import UserError
from titan_nemotron.generation.cache import Cache
from titan_nemotron.generation.sampling import Sampling, sample
from titan_nemotron.layout import PADDING, DocumentLayout


@dataclass
class Completion:
    """tokens: the new ones, the stopping one included; logprobs: of each under the distribution it was drawn from."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stop: Callable[[list[int]], bool] | None = None,
) -> list[Completion]:
    """Continue every prompt by at most sampling.max_new_tokens, or to a stop id, or until stop(new tokens) is true.

    Prompts of different lengths run in one batch; each row's result is the same as alone. The prompt is read in one
    pass, then one token a step through the caches. Raises UserError for an empty prompt and for a token outside the
    vocabulary.
    """
    if not prompts:
        return []
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {row}: is empty; give at least one token")
        for token in prompt:
            if not isinstance(token, int) or not 0 <= token < vocabulary:
                raise UserError(f"prompt {row}: {token!r} is no token of the model's vocabulary of {vocabulary}")
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    document_ids = torch.full_like(tokens, PADDING)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
        document_ids[row, : len(prompt)] = 0
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    cache = Cache(model, len(prompts), longest + sampling.max_new_tokens)
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    completions = [Completion() for _ in prompts]
    running = set(range(len(prompts)))

    layout = DocumentLayout.from_document_ids(document_ids).to(device)
    one_token = DocumentLayout.single(len(prompts), 1, device)
    tokens = tokens.to(device)
    for step in range(sampling.max_new_tokens):
        h, _ = model.hidden(tokens, layout, cache=cache)  # type: ignore[operator]
        h_last = h[torch.arange(len(prompts), device=device), last][:, None] if step == 0 else h
        logits = model.lm_head.logits(h_last)[:, 0]  # type: ignore[operator, union-attr]
        chosen, logprobs = sample(logits, sampling, generators)
        for row, (token, logprob) in enumerate(zip(chosen.tolist(), logprobs.tolist(), strict=True)):
            if row not in running:
                continue
            completion = completions[row]
            completion.tokens.append(token)
            completion.logprobs.append(logprob)
            if token in sampling.stop_ids or (stop is not None and stop(completion.tokens)):
                completion.finish_reason = "stop"
                running.discard(row)
        if not running:
            break
        tokens, layout = chosen[:, None], one_token  # finished rows run on unread: the batch keeps its shape
    return completions
