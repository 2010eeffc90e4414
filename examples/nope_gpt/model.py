"""The model: attention and squared-ReLU MLP blocks in turn.

Shapes: B rows, L positions, D model size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from titan_nemotron.config import Table
from titan_nemotron.layout import Batch, DocumentLayout, rows_of_tokens
from titan_nemotron.models.family import Losses
from titan_nemotron.models.layers.attention import Attention
from titan_nemotron.models.layers.basic import Embedding, RMSNorm
from titan_nemotron.models.layers.block import Block
from titan_nemotron.models.layers.head import Head
from titan_nemotron.models.layers.mlp import MLPMixer


class NopeGPTConfig(Table):
    vocab_size: int = Field(1024, gt=0, description="Rows of the embedding and of the output layer.")
    hidden_size: int = Field(96, gt=0, description="Model size.")
    num_layers: int = Field(3, gt=0, description="Pairs of an attention and an MLP block.")
    num_attention_heads: int = Field(4, gt=0, description="Heads.")
    mtp_depths: int = Field(0, ge=0, le=0, description="This family predicts the next token alone.")

    def mistakes(self) -> Iterator[str]:
        size, heads = self.hidden_size, self.num_attention_heads
        if size % heads:
            yield f"hidden_size = {size}: is not divisible by num_attention_heads = {heads}; change one of them"


class NopeGPT(nn.Module):
    def __init__(self, config: NopeGPTConfig) -> None:
        super().__init__()
        self.config = config
        size, heads, eps, std = config.hidden_size, config.num_attention_heads, 1e-5, 0.02
        out_std = std / (2 * config.num_layers) ** 0.5
        self.embeddings = Embedding(config.vocab_size, size, std=std)
        self.layers = nn.ModuleList()
        for _ in range(config.num_layers):
            attention = Attention(size, heads, heads, size // heads, bias=False, std=std, out_std=out_std)
            self.layers.append(Block(size, eps, attention))
            self.layers.append(Block(size, eps, MLPMixer(size, 4 * size, bias=False, std=std, out_std=out_std)))
        self.norm_f = RMSNorm(size, eps)
        self.lm_head = Head(size, config.vocab_size, std=std)

    def forward(self, input_ids_BL: Tensor, document_ids_BL: Tensor | None = None, *, cache: Any = None) -> Tensor:
        tokens_BL, layout = rows_of_tokens(input_ids_BL, document_ids_BL, self.config.vocab_size)
        return self.lm_head.logits(self.hidden(tokens_BL, layout, cache=cache)[0])

    def hidden(
        self, tokens_BL: Tensor, layout: DocumentLayout, *, cache: Any = None, replay: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        x = self.embeddings(tokens_BL)
        for i, layer in enumerate(self.layers):
            x, _ = layer(x, layout, cache=cache and cache[f"layers.{i}"])
        return self.norm_f(x), {}

    def loss(self, batch: Batch, replay: dict[str, Tensor] | None = None) -> Losses:
        h, stats = self.hidden(batch.tokens, batch.layout)
        main, logprobs = self.lm_head(h, batch.labels)
        return Losses(main, main.new_zeros(0), main.new_zeros(()), stats, logprobs)

    def blocks(self) -> Iterator[tuple[str, Block]]:
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            yield f"layers.{i}", layer

    def routers(self) -> dict[str, nn.Module]:
        return {}
