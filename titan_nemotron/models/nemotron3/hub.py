"""Names and configuration of Nemotron 3 in Hugging Face directories (model type nemotron_h)."""

from typing import Any

from titan_nemotron.config import build
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
    if name not in ("pattern", "mtp_pattern", "mtp_blocks", "mtp_depths", "mixers")
)
# What a config.json that lacks a key means by it, where that is not our own default (transformers' NemotronHConfig).
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_key_value_heads": 8,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 4096,
}
# Other names of keys, from old files and from transformers' aliases.
_ALIASES = {
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
    "norm_eps": "layer_norm_epsilon",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
}
# What the family has no other form of.
_FIXED = {"tie_word_embeddings": False, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
# Keys that say what config_to_hub says its own way.
_LAYER_KEYS = (
    "hybrid_override_pattern",
    "layers_block_type",
    "layer_types",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
    "dtype",
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


def _pattern(hub: dict[str, Any], prefix: str, where: str) -> str | None:
    """Both spellings of a layer list: a list of type names, or a pattern string; the list wins, as in transformers."""
    names = hub.get(f"{prefix}layers_block_type")
    if names is None:
        return hub.get(f"{prefix}hybrid_override_pattern")
    for name in names:
        if name not in _LETTERS:
            raise UserError(f"{where}: {prefix}layers_block_type: unknown layer {name!r}; known: {', '.join(_LETTERS)}")
    return "".join(_LETTERS[name] for name in names)


def config_from_hub(hub: dict[str, Any], mtp_depths: int | None = None, where: str = "config.json") -> Nemotron3Config:
    """Our configuration from a hub config.json, which missing keys fill with transformers' defaults.

    mtp_depths: how often the multi-token blocks are used; by default what the file says, else once each. A Megatron-style
    pattern "main/*E/*E" lists the multi-token depths behind slashes; "|" marks pipeline cuts. Keys that transformers
    ignores are ignored (expand, rope_theta, n_shared_experts, mamba_proj_bias, residual_in_fp32), except attention_bias.
    Raises UserError, with `where` in front, for each value the family cannot have.
    """
    hub = {_ALIASES[name]: value for name, value in hub.items() if name in _ALIASES} | {
        name: value for name, value in hub.items() if name not in _ALIASES
    }
    for name, only in _FIXED.items():
        if hub.get(name, only) not in (only, None):
            raise UserError(f"{where}: {name} = {hub[name]!r}: only {only!r} is supported")
    pattern = _pattern(hub, "", where)
    if not pattern:
        raise UserError(f"{where}: has neither hybrid_override_pattern nor layers_block_type; add one of them")
    pattern, *repeats = pattern.replace("|", "").split("/")
    if len(set(repeats)) > 1:
        raise UserError(f"{where}: hybrid_override_pattern: the multi-token depths {repeats} differ; make them equal")
    blocks = hub.get("num_nextn_predict_layers")
    if blocks is None:
        blocks = 1 if repeats and hub.get("mtp_use_repeated_layer") else len(repeats)
    values = {name: hub[name] for name in _SAME if hub.get(name) is not None}
    values |= {
        "pattern": pattern,
        "mtp_pattern": _pattern(hub, "mtp_", where) or (repeats[0] if repeats else "*E"),
        "mtp_blocks": blocks,
        "mtp_depths": mtp_depths if mtp_depths is not None else _depths(hub, blocks, len(repeats)),
    }
    if "time_step_limit" in values:
        values["time_step_limit"] = [_number(bound) for bound in values["time_step_limit"]]
    try:
        return build(Nemotron3Config, _DEFAULTS | values, "")
    except UserError as error:
        lines = [f"{where}: {line.removeprefix('.')}" for line in str(error).splitlines()]
        raise UserError("\n".join(lines)) from None


def _depths(hub: dict[str, Any], blocks: int, repeats: int) -> int:
    return max(blocks, repeats, hub.get("mtp_num_layers") or 0) if blocks else 0


def _number(value: Any) -> Any:
    """transformers writes infinity as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if isinstance(value, dict) and "__float__" in value else value


def config_to_hub(
    config: Nemotron3Config, dtype: str | None = None, source: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A hub config.json; num_nextn_predict_layers is the number of physical blocks.

    dtype: "bfloat16", ...; what source says, else "float32", where it is None. source: the config.json the model came
    from. Where it describes the same model it is returned as it is; else its keys that we do not know (token ids, rope
    settings, ...) are kept beside ours.
    """
    if source is not None:
        stated = source.get("torch_dtype", source.get("dtype"))
        dtype = dtype or stated
        if config_from_hub(source, mtp_depths=config.mtp_depths) == config:
            return source if dtype == stated else source | {"dtype" if "dtype" in source else "torch_dtype": dtype}
    hub: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": MODEL_TYPE,
        "torch_dtype": dtype or "float32",
        "hybrid_override_pattern": config.pattern,
        "num_hidden_layers": config.num_layers,
        "mamba_proj_bias": config.use_bias,
        "norm_eps": config.layer_norm_epsilon,
        "residual_in_fp32": False,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": config.mtp_blocks,
        **_FIXED,
    }
    if config.mtp_blocks:
        hub["mtp_hybrid_override_pattern"] = config.mtp_pattern
    if config.mtp_depths > config.mtp_blocks:
        hub |= {"mtp_num_layers": config.mtp_depths, "mtp_use_repeated_layer": True}  # Megatron-LM's names
    hub |= {name: getattr(config, name) for name in _SAME} | {"moe_latent_size": config.moe_latent_size or None}
    stale = {*_LAYER_KEYS, *_ALIASES}
    return {name: value for name, value in (source or {}).items() if name not in stale} | hub
