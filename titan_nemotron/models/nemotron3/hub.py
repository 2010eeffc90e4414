"""Names and configuration of Nemotron 3 in Hugging Face directories (model type nemotron_h)."""

from typing import Any

from titan_nemotron.errors import UserError
from titan_nemotron.models.family import Slot
from titan_nemotron.models.nemotron3.config import Nemotron3Config

MODEL_TYPE = "nemotron_h"
_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
# Keys whose names and meanings are the hub's own.
_SAME = tuple(
    name
    for name in Nemotron3Config.model_fields
    if name not in ("pattern", "mtp_pattern", "mtp_blocks", "mtp_depths", "mixers", "moe_latent_size")
)


def tensors(config: Nemotron3Config) -> dict[str, Slot]:
    """Every tensor of a hub checkpoint, in file order, and where it lives in our model."""
    c = config
    slots: dict[str, Slot] = {}
    slots["backbone.embeddings.weight"] = Slot("embeddings.weight", None, (c.vocab_size, c.hidden_size))
    for i, letter in enumerate(c.pattern):
        slots |= _block(c, letter, f"backbone.layers.{i}", f"layers.{i}")
    slots["backbone.norm_f.weight"] = Slot("norm_f.weight", None, (c.hidden_size,))
    slots["lm_head.weight"] = Slot("lm_head.weight", None, (c.vocab_size, c.hidden_size))
    for block in range(c.mtp_blocks):
        length, ours = len(c.mtp_pattern), f"mtp.blocks.{block}"
        for j, letter in enumerate(c.mtp_pattern):
            hub = f"mtp.layers.{block * length + j}"
            if j == 0:
                slots[f"{hub}.enorm.weight"] = Slot(f"{ours}.enorm.weight", None, (c.hidden_size,))
                slots[f"{hub}.hnorm.weight"] = Slot(f"{ours}.hnorm.weight", None, (c.hidden_size,))
                slots[f"{hub}.eh_proj.weight"] = Slot(
                    f"{ours}.eh_proj.weight", None, (c.hidden_size, 2 * c.hidden_size)
                )
            slots |= _block(c, letter, hub, f"{ours}.layers.{j}")
            if j == length - 1:
                slots[f"{hub}.final_layernorm.weight"] = Slot(f"{ours}.final_layernorm.weight", None, (c.hidden_size,))
    return slots


def _block(c: Nemotron3Config, letter: str, hub: str, ours: str) -> dict[str, Slot]:
    slots = {f"{hub}.norm.weight": Slot(f"{ours}.norm.weight", None, (c.hidden_size,))}

    def add(hub_name: str, our_name: str, *shape: int) -> None:
        slots[f"{hub}.mixer.{hub_name}"] = Slot(f"{ours}.mixer.{our_name}", None, shape)

    def linear(hub_name: str, our_name: str, out: int, size: int, bias: bool = False) -> None:
        add(f"{hub_name}.weight", f"{our_name}.weight", out, size)
        if bias:
            add(f"{hub_name}.bias", f"{our_name}.bias", out)

    match letter:
        case "M":
            inner = c.mamba_num_heads * c.mamba_head_dim
            channels = inner + 2 * c.n_groups * c.ssm_state_size
            linear("in_proj", "in_proj", inner + channels + c.mamba_num_heads, c.hidden_size, c.use_bias)
            add("conv1d.weight", "conv1d.weight", channels, 1, c.conv_kernel)
            if c.use_conv_bias:
                add("conv1d.bias", "conv1d.bias", channels)
            for name in ("dt_bias", "A_log", "D"):
                add(name, f"ssm.{name}", c.mamba_num_heads)
            add("norm.weight", "norm.weight", inner)
            linear("out_proj", "out_proj", c.hidden_size, inner, c.use_bias)
        case "*":
            width, kv_width = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
            linear("q_proj", "q_proj", width, c.hidden_size, c.attention_bias)
            linear("k_proj", "k_proj", kv_width, c.hidden_size, c.attention_bias)
            linear("v_proj", "v_proj", kv_width, c.hidden_size, c.attention_bias)
            linear("o_proj", "o_proj", c.hidden_size, width, c.attention_bias)
        case "-":
            linear("up_proj", "up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
            linear("down_proj", "down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias)
        case "E":
            size = c.moe_latent_size or c.hidden_size
            add("gate.weight", "router.weight", c.n_routed_experts, c.hidden_size)
            add("gate.e_score_correction_bias", "router.correction_bias", c.n_routed_experts)
            for expert in range(c.n_routed_experts):
                for name, shape in (
                    ("up_proj", (c.moe_intermediate_size, size)),
                    ("down_proj", (size, c.moe_intermediate_size)),
                ):
                    slots[f"{hub}.mixer.experts.{expert}.{name}.weight"] = Slot(
                        f"{ours}.mixer.experts.{name}", expert, shape
                    )
            if c.moe_shared_expert_intermediate_size:
                hidden = c.moe_shared_expert_intermediate_size
                linear("shared_experts.up_proj", "shared_expert.up_proj", hidden, c.hidden_size, c.mlp_bias)
                linear("shared_experts.down_proj", "shared_expert.down_proj", c.hidden_size, hidden, c.mlp_bias)
            if c.moe_latent_size:
                linear("fc1_latent_proj", "fc1_latent_proj", c.moe_latent_size, c.hidden_size, c.mlp_bias)
                linear("fc2_latent_proj", "fc2_latent_proj", c.hidden_size, c.moe_latent_size, c.mlp_bias)
        case _:
            raise UserError(
                f"model.config.pattern: hub files have no name for your mixer {letter!r}; keep our own checkpoints"
            )
    return slots


def _pattern(hub: dict[str, Any], prefix: str) -> str | None:
    """Both spellings of a layer list: a pattern string, or a list of type names."""
    if hub.get(f"{prefix}layers_block_type") is not None:
        return "".join(_LETTERS[name] for name in hub[f"{prefix}layers_block_type"])
    return hub.get(f"{prefix}hybrid_override_pattern")


def config_from_hub(hub: dict[str, Any], mtp_depths: int | None = None) -> Nemotron3Config:
    """Our configuration from a hub config.json; mtp_depths defaults to the number of physical blocks.

    A Megatron-style pattern "main/*E/*E" lists the multi-token depths after slashes; "|" marks pipeline cuts.
    """
    pattern = _pattern(hub, "")
    if pattern is None:
        raise UserError("config.json: has neither hybrid_override_pattern nor layers_block_type")
    pattern, *repeats = pattern.replace("|", "").split("/")
    blocks = hub.get("num_nextn_predict_layers") or 0
    values = {name: hub[name] for name in _SAME if hub.get(name) is not None}
    return Nemotron3Config(
        pattern=pattern,
        moe_latent_size=hub.get("moe_latent_size"),
        mtp_pattern=_pattern(hub, "mtp_") or (repeats[0] if repeats else "*E"),
        mtp_blocks=blocks,
        mtp_depths=max(blocks, len(repeats)) if blocks and mtp_depths is None else (mtp_depths or 0) if blocks else 0,
        **values,
    )


def config_to_hub(config: Nemotron3Config, dtype: str) -> dict[str, Any]:
    """A hub config.json; num_nextn_predict_layers is the number of physical blocks. dtype: "float32", "bfloat16", ..."""
    hub = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": MODEL_TYPE,
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "hybrid_override_pattern": config.pattern,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": config.use_bias,
        "norm_eps": config.layer_norm_epsilon,
        "residual_in_fp32": False,
        "n_shared_experts": 1,
        "moe_latent_size": config.moe_latent_size,
        "num_nextn_predict_layers": config.mtp_blocks,
    }
    if config.mtp_blocks:
        hub["mtp_hybrid_override_pattern"] = config.mtp_pattern
    return hub | {name: getattr(config, name) for name in _SAME}
