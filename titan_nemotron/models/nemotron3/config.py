"""Configuration of the Nemotron 3 family, in the names of its hub files."""

import importlib.util
from collections.abc import Iterator

from pydantic import Field

from titan_nemotron.config import Table

LETTERS = {"M": "Mamba-2", "*": "attention", "E": "mixture of experts", "-": "MLP"}


def importable(path: str) -> bool:
    """Whether a module of 'module:Class' is there; only packages around it are imported."""
    module, _, name = path.partition(":")
    try:
        return bool(name) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


class Nemotron3Config(Table):
    """[model.config] of the family: sizes and constants, with the defaults of this file."""

    pattern: str = Field(
        "MEM*E", description="One letter a block: M Mamba-2, * attention, E mixture of experts, - MLP."
    )
    vocab_size: int = Field(131072, gt=0, description="Rows of the embedding and of the output layer.")
    hidden_size: int = Field(2688, gt=0, description="Model size.")
    layer_norm_epsilon: float = Field(1e-5, gt=0, description="Added to the mean square inside every norm.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")

    num_attention_heads: int = Field(32, gt=0, description="Query heads.")
    num_key_value_heads: int = Field(2, gt=0, description="Key/value heads.")
    head_dim: int = Field(128, gt=0, description="Size of an attention head.")
    attention_bias: bool = Field(False, description="Bias in the attention projections.")

    mamba_num_heads: int = Field(64, gt=0, description="Mamba-2 heads.")
    mamba_head_dim: int = Field(64, gt=0, description="Channels of a Mamba-2 head.")
    n_groups: int = Field(8, gt=0, description="Groups of Mamba-2 heads that share B and C.")
    ssm_state_size: int = Field(128, gt=0, description="Size of the state of each Mamba-2 channel.")
    conv_kernel: int = Field(4, gt=1, description="Taps of the Mamba-2 convolution.")
    chunk_size: int = Field(128, gt=0, description="Tokens the scan handles at once; never changes the result.")
    use_bias: bool = Field(False, description="Bias in the Mamba-2 projections.")
    use_conv_bias: bool = Field(True, description="Bias in the Mamba-2 convolution.")
    time_step_limit: tuple[float, float] = Field(
        (0.0, float("inf")), description="Clamp of the time step after softplus."
    )
    time_step_min: float = Field(1e-3, gt=0, description="Smallest initial time step.")
    time_step_max: float = Field(0.1, gt=0, description="Largest initial time step.")
    time_step_floor: float = Field(1e-4, gt=0, description="Floor of the initial time step.")

    intermediate_size: int = Field(1856, gt=0, description="Inner size of an MLP block.")
    mlp_bias: bool = Field(False, description="Bias in MLP blocks, shared experts and latent projections.")

    n_routed_experts: int = Field(128, gt=0, description="Routed experts of a block.")
    num_experts_per_tok: int = Field(6, gt=0, description="Routed experts a token visits.")
    moe_intermediate_size: int = Field(1856, gt=0, description="Inner size of a routed expert.")
    moe_shared_expert_intermediate_size: int = Field(
        3712, ge=0, description="Inner size of the shared expert; 0 for none."
    )
    moe_latent_size: int = Field(
        0, ge=0, description="Size of the latent space the routed experts work in; 0 for none."
    )
    n_group: int = Field(1, gt=0, description="Groups of experts for group-limited routing.")
    topk_group: int = Field(1, gt=0, description="Groups a token may choose from.")
    norm_topk_prob: bool = Field(True, description="Divide the chosen scores by their sum.")
    routed_scaling_factor: float = Field(2.5, gt=0, description="Factor on the routing weights.")

    mtp_pattern: str = Field(
        "*E", description="Blocks of one multi-token-prediction layer, in the letters of the pattern."
    )
    mtp_blocks: int = Field(0, ge=0, description="Multi-token-prediction layers with weights of their own; 0 for none.")
    mtp_depths: int = Field(0, ge=0, description="Tokens predicted beyond the next; the layers are used in turn.")

    mixers: dict[str, str] = Field({}, description="Mixers of your own: a letter of the pattern -> 'module:Class'.")
    max_position_embeddings: int = Field(262144, gt=0, description="Longest sequence, as written to hub files.")

    def mistakes(self) -> Iterator[str]:
        known = {**LETTERS, **self.mixers}
        for letter, path in self.mixers.items():
            if not importable(path):
                yield f"mixers.{letter} = {path!r}: cannot be found; write 'module:Class', with the module importable here"
        low, high = self.time_step_limit
        if not low <= high:
            yield f"time_step_limit = {[low, high]}: its first number is above its second; swap them"
        for key in ("pattern", "mtp_pattern"):
            pattern = getattr(self, key)
            unknown = "".join(sorted(set(pattern) - set(known)))
            if not pattern:
                yield f"{key}: is empty; give one letter a block"
            if unknown:
                legend = ", ".join(f"{letter} {what}" for letter, what in known.items())
                yield f"{key} = {pattern!r}: unknown letter {unknown!r}; known: {legend}"
        for heads, groups in (
            ("num_attention_heads", "num_key_value_heads"),
            ("mamba_num_heads", "n_groups"),
            ("n_routed_experts", "n_group"),
        ):
            number, divisor = getattr(self, heads), getattr(self, groups)
            if number % divisor:
                yield f"{heads} = {number}: is not divisible by {groups} = {divisor}; change one of them"
        per_group = self.n_routed_experts // self.n_group
        if self.n_group > 1 and per_group < 2:
            yield f"n_group = {self.n_group}: leaves fewer than 2 experts a group; at most {self.n_routed_experts // 2}"
        if self.topk_group > self.n_group:
            yield f"topk_group = {self.topk_group}: is more than n_group = {self.n_group}"
        elif self.num_experts_per_tok > per_group * self.topk_group:
            yield (
                f"num_experts_per_tok = {self.num_experts_per_tok}: is more than the {per_group * self.topk_group} "
                "experts a token may choose from"
            )
        if (self.mtp_blocks == 0) != (self.mtp_depths == 0) or self.mtp_blocks > self.mtp_depths:
            yield (
                f"mtp_blocks = {self.mtp_blocks}: cannot serve mtp_depths = {self.mtp_depths}; "
                "use 1 to mtp_depths blocks, or 0 for both"
            )

    @property
    def num_layers(self) -> int:
        """Blocks before multi-token prediction."""
        return len(self.pattern)

    @property
    def residual_std(self) -> float:
        """Standard deviation of the projections that write to the residual stream, as Megatron-LM scales it."""
        return self.initializer_range / self.num_layers**0.5
