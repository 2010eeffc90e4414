"""config.json in every spelling, and the sizes of the released models."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_nemotron.errors import UserError
from titan_nemotron.models.nemotron3 import FAMILY
from titan_nemotron.models.nemotron3.config import Nemotron3Config
from titan_nemotron.models.nemotron3.hub import config_from_hub, config_to_hub, tensors

SMALL = FAMILY.flavors["debug"]


def hub(**changes: Any) -> dict[str, Any]:
    return config_to_hub(SMALL) | changes


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_layer_lists_in_every_spelling() -> None:
    plain = without(hub(), "hybrid_override_pattern")
    old = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
    new = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    pattern = "MEM*-E"
    spellings = [
        {"hybrid_override_pattern": pattern},
        {"hybrid_override_pattern": "ME|M*|-E"},
        {"layers_block_type": [old[letter] for letter in pattern]},
        {"layers_block_type": [new[letter] for letter in pattern]},
        {"layer_types": [new[letter] for letter in pattern]},
        # transformers prefers the list
        {"layers_block_type": [new[letter] for letter in pattern], "hybrid_override_pattern": "MM"},
    ]
    for spelling in spellings:
        assert config_from_hub(plain | spelling).pattern == pattern, spelling


def test_multi_token_spellings() -> None:
    plain = without(hub(), "mtp_num_layers", "mtp_use_repeated_layer")
    config = config_from_hub(plain)
    assert (config.mtp_pattern, config.mtp_blocks, config.mtp_depths) == ("*E", 1, 1)
    assert config_from_hub(plain, mtp_depths=2).mtp_depths == 2
    assert config_from_hub(hub()) == SMALL  # our own files say two depths in Megatron-LM's words
    assert config_from_hub(plain | {"mtp_hybrid_override_pattern": "M*E"}).mtp_pattern == "M*E"
    named = without(plain, "mtp_hybrid_override_pattern") | {"mtp_layers_block_type": ["attention", "mlp"]}
    assert config_from_hub(named).mtp_pattern == "*-"
    none = config_from_hub(plain | {"num_nextn_predict_layers": 0})
    assert (none.mtp_blocks, none.mtp_depths) == (0, 0)
    megatron = without(plain, "num_nextn_predict_layers", "mtp_hybrid_override_pattern")
    megatron |= {"hybrid_override_pattern": "MEM*/*-/*-"}
    config = config_from_hub(megatron)
    assert (config.pattern, config.mtp_pattern, config.mtp_blocks, config.mtp_depths) == ("MEM*", "*-", 2, 2)
    shared = config_from_hub(megatron | {"mtp_use_repeated_layer": True})
    assert (shared.mtp_blocks, shared.mtp_depths) == (1, 2)
    with pytest.raises(UserError, match="differ"):
        config_from_hub(megatron | {"hybrid_override_pattern": "MEM*/*-/*E"})


def test_missing_keys_mean_what_transformers_means() -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.NemotronHConfig(layers_block_type=["moe"])
    config = config_from_hub({"hybrid_override_pattern": "E"})
    for name in Nemotron3Config.model_fields:
        if hasattr(reference, name):
            expected = getattr(reference, name)
            assert getattr(config, name) == (0 if expected is None else expected), name
    assert (config.mtp_blocks, config.mtp_depths) == (0, 0)


def test_what_transformers_writes_and_what_we_write_mean_the_same(tmp_path: Path) -> None:
    """Through transformers' configuration and its file, which spells infinity and layers its own way."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(hub()))
    transformers.NemotronHConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert theirs["time_step_limit"] != [0.0, math.inf]
    assert config_from_hub(theirs) == SMALL


def test_aliases_and_ignored_keys() -> None:
    config = config_from_hub(without(hub(), "layer_norm_epsilon") | {"norm_eps": 1e-6})
    assert config.layer_norm_epsilon == 1e-6
    assert config_from_hub(hub(norm_eps=1e-6)).layer_norm_epsilon == SMALL.layer_norm_epsilon
    assert config_from_hub(without(hub(), "n_routed_experts") | {"num_local_experts": 16}).n_routed_experts == 16
    assert config_from_hub(hub(mamba_proj_bias=True)).use_bias is False
    assert config_from_hub(hub(use_bias=True)).use_bias is True
    assert config_from_hub(hub(attention_bias=True)).attention_bias is True
    ignored = hub(expand=7, rope_theta=1e4, partial_rotary_factor=0.5, n_shared_experts=2, residual_in_fp32=True)
    assert config_from_hub(ignored) == SMALL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": ["mamba", "rwkv"]}, "layers_block_type: unknown layer 'rwkv'; known: mamba,"),
        ({"hybrid_override_pattern": "MX"}, "pattern = 'MX': unknown letter 'X'"),
        ({"hybrid_override_pattern": ""}, "has neither hybrid_override_pattern nor layers_block_type"),
        ({"hidden_size": -1}, "hidden_size = -1"),
        ({"hidden_size": "big"}, 'hidden_size = "big"'),
        ({"n_groups": 5}, "mamba_num_heads = 12: is not divisible by n_groups = 5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True: only False is supported"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu': only 'relu2' is supported"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: is more than the 8 experts"),
    ],
)
def test_what_the_family_cannot_have_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        config_from_hub(hub(**changes), where="model/config.json")
    assert str(raised.value).startswith(f"model/config.json: {message}"), raised.value
    assert len(str(raised.value).splitlines()) == 1


def test_unknown_keys_of_the_source_are_kept() -> None:
    source = hub(eos_token_id=[2, 11], rope_theta=10000.0, torch_dtype="bfloat16")
    assert config_to_hub(SMALL, source=source) == source
    assert config_to_hub(SMALL, "float32", source) == source | {"torch_dtype": "float32"}
    named = without(source, "hybrid_override_pattern", "torch_dtype") | {
        "layers_block_type": ["moe"],
        "dtype": "bfloat16",
    }
    changed = config_to_hub(SMALL, source=named)
    assert (changed["eos_token_id"], changed["rope_theta"]) == ([2, 11], 10000.0)
    assert changed["torch_dtype"] == "bfloat16"
    assert "layers_block_type" not in changed
    assert config_from_hub(changed) == SMALL


# The released sizes. Expected numbers: specs of the released checkpoints, elements and tensors of their files.

NO_MTP = {"mtp_blocks": 0, "mtp_depths": 0}
ONE_MTP = {"mtp_blocks": 1, "mtp_depths": 2}


@pytest.mark.parametrize(
    ("flavor", "changes", "elements", "num_tensors"),
    [
        ("nano_30b", NO_MTP, 31_577_937_344, 6_243),
        ("nano_30b", ONE_MTP, 32_913_266_240, 6_513),
        ("super_120b", NO_MTP, 120_668_687_360, 41_643),
        ("super_120b", ONE_MTP, 123_611_033_088, 42_683),
        ("ultra_550b", NO_MTP, 549_308_968_960, 49_983),
        ("ultra_550b", ONE_MTP, 560_524_603_904, 51_023),
    ],
)
def test_released_sizes(flavor: str, changes: dict[str, int], elements: int, num_tensors: int) -> None:
    """The table's first column counts parameters; the second, with multi-token prediction, the biases of routers too."""
    config = FAMILY.flavors[flavor].model_copy(update=changes)
    with torch.device("meta"):
        model = FAMILY.model(config)
    slots = tensors(config)
    assert len(slots) == num_tensors
    biases = sum(buffer.numel() for buffer in model.buffers())
    in_files = sum(math.prod(slot.shape) for slot in slots.values())
    assert in_files == sum(parameter.numel() for parameter in model.parameters()) + biases
    assert in_files - (0 if changes is ONE_MTP else biases) == elements
    assert FAMILY.flavors["super_120b"].mtp_blocks == FAMILY.flavors["ultra_550b"].mtp_blocks == 1


@pytest.mark.parametrize("flavor", sorted(FAMILY.flavors))
def test_every_slot_is_a_tensor_of_the_model(flavor: str) -> None:
    config = FAMILY.flavors[flavor]
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in FAMILY.model(config).state_dict().items()}
    covered: dict[str, int] = {}
    for name, slot in tensors(config).items():
        shape = shapes[slot.parameter]
        assert slot.shape == (shape if slot.expert is None else shape[1:]), name
        covered[slot.parameter] = covered.get(slot.parameter, 0) + math.prod(slot.shape)
    assert covered == {name: math.prod(shape) for name, shape in shapes.items()}
