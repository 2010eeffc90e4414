"""The Nemotron 3 model.

Shapes: B rows, L positions, D model size, V vocabulary.
"""

import importlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from titan_nemotron.errors import UserError
from titan_nemotron.layout import Batch, DocumentLayout, rows_of_tokens
from titan_nemotron.models.family import Losses
from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.basic import Embedding, RMSNorm
from titan_nemotron.models.layers.block import Block
from titan_nemotron.models.layers.cache import ModelCache
from titan_nemotron.models.layers.head import Head
from titan_nemotron.models.layers.mamba2 import Mamba2
from titan_nemotron.models.layers.mlp import MLPMixer
from titan_nemotron.models.layers.moe import MoE, Router
from titan_nemotron.models.layers.mtp import MTPBlock, MultiTokenPredictor
from titan_nemotron.models.nemotron3.config import Nemotron3Config


def build_mixer(letter: str, config: Nemotron3Config) -> nn.Module:
    """The mixer that a letter of the pattern stands for."""
    size, std, out_std = config.hidden_size, config.initializer_range, config.residual_std
    if letter in config.mixers:
        return _imported_mixer(letter, config)
    match letter:
        case "M":
            return Mamba2(
                size,
                num_heads=config.mamba_num_heads,
                head_size=config.mamba_head_dim,
                num_groups=config.n_groups,
                state_size=config.ssm_state_size,
                taps=config.conv_kernel,
                chunk_size=config.chunk_size,
                dt_limit=config.time_step_limit,
                time_step=(config.time_step_min, config.time_step_max, config.time_step_floor),
                bias=config.use_bias,
                conv_bias=config.use_conv_bias,
                eps=config.layer_norm_epsilon,
                std=std,
                out_std=out_std,
            )
        case "*":
            heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
            return Attention(size, *heads, bias=config.attention_bias, std=std, out_std=out_std)
        case "-":
            return MLPMixer(size, config.intermediate_size, bias=config.mlp_bias, std=std, out_std=out_std)
        case "E":
            return MoE(
                size,
                num_experts=config.n_routed_experts,
                topk=config.num_experts_per_tok,
                hidden=config.moe_intermediate_size,
                shared_hidden=config.moe_shared_expert_intermediate_size,
                latent=config.moe_latent_size,
                n_group=config.n_group,
                topk_group=config.topk_group,
                norm_topk=config.norm_topk_prob,
                scaling=config.routed_scaling_factor,
                bias=config.mlp_bias,
                std=std,
                out_std=out_std,
            )
    raise AssertionError(f"the configuration let the letter {letter!r} through")


def _imported_mixer(letter: str, config: Nemotron3Config) -> nn.Module:
    path = config.mixers[letter]
    module, _, name = path.partition(":")
    try:
        mixer: nn.Module = getattr(importlib.import_module(module), name)(config)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model.config.mixers.{letter}: cannot load {path!r} ({error}); write 'module:Class'"
        ) from error
    return mixer


class Nemotron3(nn.Module):
    """embeddings -> residual blocks of the pattern -> norm_f -> lm_head, with multi-token prediction beside it."""

    def __init__(self, config: Nemotron3Config) -> None:
        super().__init__()
        self.config = config
        size, eps, std = config.hidden_size, config.layer_norm_epsilon, config.initializer_range
        self.embeddings = Embedding(config.vocab_size, size, std=std)
        self.layers = nn.ModuleList(Block(size, eps, build_mixer(letter, config)) for letter in config.pattern)
        self.norm_f = RMSNorm(size, eps)
        self.lm_head = Head(size, config.vocab_size, std=std)
        self.mtp: MultiTokenPredictor | None = None
        if config.mtp_blocks:
            blocks = []
            for _ in range(config.mtp_blocks):
                layers = [Block(size, eps, build_mixer(letter, config)) for letter in config.mtp_pattern]
                blocks.append(MTPBlock(size, eps, layers, std=std))
            self.mtp = MultiTokenPredictor(blocks, config.mtp_depths)

    def forward(
        self, input_ids_BL: Tensor, document_ids_BL: Tensor | None = None, *, cache: ModelCache | None = None
    ) -> Tensor:
        """Logits [B, L, V] in at least fp32; document_ids as in DocumentLayout, one document a row without them.

        With a cache the tokens continue what it holds; a row is then one document, with padding (-1) only at its end. Raises
        UserError for a wrong shape or type, for ids outside the vocabulary, for a document in two pieces, and for several
        documents in a row of a cache.
        """
        tokens_BL, layout = rows_of_tokens(input_ids_BL, document_ids_BL, self.config.vocab_size)
        if cache is not None and document_ids_BL is not None and bool((layout.document_ids > 0).any()):
            raise UserError("document_ids: a cache continues one document a row; give each document a row of its own")
        h, _ = self.hidden(tokens_BL, layout, cache=cache)
        return self.lm_head.logits(h)

    def hidden(
        self,
        tokens_BL: Tensor,
        layout: DocumentLayout,
        *,
        cache: ModelCache | None = None,
        replay: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        """Hidden states [B, L, D] after norm_f, and the blocks' statistics by name."""
        x = self.embeddings(tokens_BL)
        all_stats = {}
        for i, layer in enumerate(self.layers):
            name = f"layers.{i}"
            x, stats = layer(x, layout, cache=cache and cache[name], indices=replay and replay.get(name))
            all_stats[name] = stats
        return self.norm_f(x), all_stats

    def loss(self, batch: Batch, replay: dict[str, Tensor] | None = None) -> Losses:
        """Loss sums of the next token and of every multi-token depth; replay: routing indices [B, L, K] by call."""
        h, stats = self.hidden(batch.tokens, batch.layout, replay=replay)
        main, logprobs = self.lm_head(h, batch.labels)
        mtp = []
        for depth in range(self.mtp.depths if self.mtp is not None else 0):
            assert self.mtp is not None
            embedded = self.embeddings(batch.mtp_tokens[depth])
            h, depth_stats = self.mtp.block_of(depth)(h, embedded, batch.layout, replay or {}, f"mtp.{depth}")
            stats |= depth_stats
            mtp.append(self.lm_head(h, batch.mtp_labels[depth])[0])
        auxiliary = [block["auxiliary_sum"] for block in stats.values() if "auxiliary_sum" in block]
        return Losses(
            main=main,
            mtp=torch.stack(mtp) if mtp else main.new_zeros(0),
            auxiliary=torch.stack(auxiliary).sum() if auxiliary else main.new_zeros(()),
            stats=stats,
            logprobs=logprobs,
        )

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Every residual block with the prefix of its parameters, those of multi-token prediction last."""
        for name, module in self.named_modules():
            if isinstance(module, Block):
                yield name, module

    def routers(self) -> dict[str, Router]:
        """The router behind each routed call in Losses.stats."""
        found = {}
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mixer, MoE):
                found[f"layers.{i}"] = layer.mixer.router
        for depth in range(self.mtp.depths if self.mtp is not None else 0):
            assert self.mtp is not None
            for j, layer in enumerate(self.mtp.block_of(depth).layers):
                if isinstance(layer.mixer, MoE):
                    found[f"mtp.{depth}.layers.{j}"] = layer.mixer.router
        return found
