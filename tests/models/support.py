"""A small hybrid with every kind of block, for the tests of models."""

from typing import Any

import torch
from torch import Tensor, nn

from titan_nemotron.layout import Batch
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3 import FAMILY
from titan_nemotron.models.nemotron3.config import Nemotron3Config

VOCABULARY = 64
SMALL: dict[str, Any] = {
    "pattern": "ME*-ME",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "initializer_range": 0.2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 16,
    "mtp_blocks": 1,
    "mtp_depths": 2,
}


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    model = FAMILY.model(Nemotron3Config(**SMALL | changes))
    initialize(model, seed)
    return model.to(dtype)


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def row_of(*lengths: int) -> Tensor:
    """Document ids [1, L]; a negative length is padding."""
    pieces = [torch.full((abs(length),), index if length > 0 else -1) for index, length in enumerate(lengths)]
    return torch.cat(pieces)[None]


def batch_of(model: nn.Module, tokens: Tensor, document_ids: Tensor) -> Batch:
    return Batch.from_rows(tokens, document_ids, length=tokens.shape[1], mtp_depths=model.config.mtp_depths)
