"""Hugging Face directories in and out: names, dtypes, errors, and the real transformers on the other side."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.support import SMALL, VOCABULARY, small_model
from tests.support import REPOSITORY
from titan_nemotron import load_model
from titan_nemotron.checkpoint.config import CheckpointConfig
from titan_nemotron.checkpoint.convert import convert, export, keep_token_ids
from titan_nemotron.checkpoint.hub_files import INDEX, HubFiles, write_hub_directory
from titan_nemotron.checkpoint.load import hub_tensors, load_weights
from titan_nemotron.checkpoint.manager import CheckpointManager
from titan_nemotron.errors import UserError
from titan_nemotron.models.layers.init import initialize, tensors_by_name
from titan_nemotron.models.nemotron3 import FAMILY

# transformers clamps the time step from below by time_step_min; the family does not
CHANGES: dict[str, Any] = {"routed_scaling_factor": 2.5, "time_step_min": 1e-6}
FP32_IN_FILES = ("A_log", "D", "dt_bias", "e_score_correction_bias", "gate.weight")


def built(seed: int = 0, **changes: Any) -> nn.Module:
    model = small_model(seed, **CHANGES | changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for router in model.routers().values():  # type: ignore[operator]
            router.correction_bias.normal_(60.0, 0.05, generator=generator)
    return model


def written(path: Path, model: nn.Module, dtypes: dict[str, torch.dtype] | None = None, **options: Any) -> Path:
    slots = FAMILY.hub.tensors(model.config)
    tensors = hub_tensors(model.state_dict().items(), slots, dtypes or {})
    write_hub_directory(path, tensors, FAMILY.hub.config_to_hub(model.config, "float32"), **options)
    return path


def mixed_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """bf16, with the tensors in fp32 that released files keep there."""
    return {
        name: torch.float32 if name.endswith(FP32_IN_FILES) else torch.bfloat16
        for name in FAMILY.hub.tensors(model.config)
    }


def all_tensors(path: Path) -> dict[str, Tensor]:
    files = HubFiles(path)
    return {name: files.read(name) for name in files.entries}


def assert_same_files(first: Path, second: Path) -> None:
    """Byte by byte and in dtype, tensor by tensor."""
    left, right = all_tensors(first), all_tensors(second)
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def test_import_then_export_is_byte_equal_through_our_checkpoint(tmp_path: Path) -> None:
    model = built()
    source = written(tmp_path / "hf", model, mixed_dtypes(model), max_shard_bytes=30_000)
    extra = json.loads((source / "config.json").read_text()) | {"eos_token_id": [2, 11], "rope_theta": 10000}
    (source / "config.json").write_text(json.dumps(extra))
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 11]}')
    assert len(list(source.glob("*.safetensors"))) > 3
    assert set(json.loads((source / INDEX).read_text())["weight_map"]) == set(FAMILY.hub.tensors(model.config))

    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "ours", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    convert(tmp_path / "ours", tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        back = json.loads((tmp_path / "back" / name).read_text())
        assert back == json.loads((source / name).read_text()), name
    assert {path.name for path in (tmp_path / "back").iterdir()} == {
        "config.json", "tokenizer.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip

    ids = tokens(2, 17)
    with torch.no_grad():
        expected = load_model(source)(ids)
        assert torch.equal(load_model(tmp_path / "ours")(ids), expected)
        assert torch.equal(load_model(tmp_path / "back")(ids), expected)


def test_convert_refuses_to_overwrite_and_foreign_directories(tmp_path: Path) -> None:
    source = written(tmp_path / "hf", built())
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there: exists already"):
        convert(source, tmp_path / "there")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a Hugging Face directory"):
        convert(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(UserError, match="neither a Hugging Face directory"):
        load_model(tmp_path / "nowhere")


def test_export_in_bf16_keeps_what_stays_fp32(tmp_path: Path) -> None:
    model = built()
    convert(written(tmp_path / "hf", model), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "small", dtype=torch.bfloat16)
    files = HubFiles(tmp_path / "small")
    fp32 = {
        name.rpartition("mixer.")[2] or name for name, entry in files.entries.items() if entry.dtype == torch.float32
    }
    assert {"A_log", "D", "dt_bias", "gate.weight", "gate.e_score_correction_bias", "norm.weight"} <= fp32
    assert {"lm_head.weight", "backbone.norm_f.weight"} <= fp32
    assert files.entries["backbone.embeddings.weight"].dtype == torch.bfloat16
    assert files.entries["backbone.layers.1.mixer.experts.0.up_proj.weight"].dtype == torch.bfloat16
    assert files.config["torch_dtype"] == "bfloat16"


def test_load_model_dtypes(tmp_path: Path) -> None:
    model = built()
    source = written(tmp_path / "hf", model, mixed_dtypes(model))
    stored = load_model(source).state_dict()
    assert stored["embeddings.weight"].dtype == torch.bfloat16
    assert stored["layers.0.mixer.ssm.A_log"].dtype == torch.float32
    wide = load_model(source, dtype=torch.float64).state_dict()
    assert {tensor.dtype for tensor in wide.values()} == {torch.float64}
    narrow = load_model(source, dtype=torch.bfloat16).state_dict()
    assert narrow["layers.1.mixer.experts.up_proj"].dtype == torch.bfloat16
    assert narrow["layers.1.mixer.router.correction_bias"].dtype == torch.float32
    with pytest.raises(UserError, match="dtype = fp17: use float32"):
        load_model(source, dtype="fp17")
    with torch.no_grad():
        exact = load_model(source, dtype="float32")(tokens(1, 5))
        for rough in (load_model(source), load_model(source, dtype=torch.bfloat16)):
            logits = rough(tokens(1, 5))
            assert exact.dtype == logits.dtype == torch.float32
            assert float((logits - exact).norm() / exact.norm()) < 0.05


def edit(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_misfits_are_named(tmp_path: Path) -> None:
    source = written(tmp_path / "hf", built())
    expert = "backbone.layers.1.mixer.experts.3.up_proj.weight"

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["backbone.layers.0.mixer.D"]
        tensors["backbone.layers.0.mixer.strange"] = torch.zeros(3)
        tensors[expert] = torch.zeros(5, 16)

    edit(source, change)
    with pytest.raises(UserError) as raised:
        load_model(source)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("backbone.layers.0.mixer.D is missing")
    assert any(line.endswith("backbone.layers.0.mixer.strange is unexpected") for line in lines)
    assert any(line.endswith(f"{expert} has shape [5, 16], the model needs [24, 16]") for line in lines)

    model = built(seed=7)
    fresh = {name: tensor.clone() for name, tensor in built(seed=9).state_dict().items()}
    patterns = ["*.mixer.D", "*.strange", "*.experts.3.up_proj.*"]
    load_weights(model, FAMILY, model.config, source, seed=9, init_missing=patterns)
    loaded, stored = model.state_dict(), all_tensors(source)
    assert torch.equal(loaded["layers.0.mixer.ssm.D"], fresh["layers.0.mixer.ssm.D"])
    assert torch.equal(loaded["layers.1.mixer.experts.up_proj"][3], fresh["layers.1.mixer.experts.up_proj"][3])
    assert torch.equal(loaded["layers.1.mixer.experts.up_proj"][2], stored[expert.replace(".3.", ".2.")])
    with pytest.raises(UserError, match=r"init_missing: 'head\*' matches no missing tensor"):
        load_weights(model, FAMILY, model.config, source, seed=0, init_missing=[*patterns, "head*"])


def test_many_misfits_are_counted(tmp_path: Path) -> None:
    source = written(tmp_path / "hf", built())
    edit(source, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".experts." in name])
    with pytest.raises(UserError) as raised:
        load_model(source)
    lines = str(raised.value).splitlines()
    assert len(lines) == 11
    assert lines[-1].endswith("38 more tensors do not fit")


def test_our_checkpoint_reports_misfits_by_our_names(tmp_path: Path) -> None:
    convert(written(tmp_path / "hf", built(mtp_blocks=0, mtp_depths=0)), tmp_path / "ours")
    model = built(seed=5)
    with pytest.raises(UserError, match=r"mtp\.blocks\.0\.enorm\.weight is missing"):
        load_weights(model, FAMILY, model.config, tmp_path / "ours", seed=5)
    load_weights(model, FAMILY, model.config, tmp_path / "ours", seed=5, init_missing=["mtp.*"])
    expected = FAMILY.model(model.config)
    initialize(expected, 5)
    assert torch.equal(model.state_dict()["mtp.blocks.0.eh_proj.weight"], expected.mtp.blocks[0].eh_proj.weight)
    stored = all_tensors(tmp_path / "hf")
    assert torch.equal(model.state_dict()["embeddings.weight"], stored["backbone.embeddings.weight"])


def test_broken_directories_are_user_errors(tmp_path: Path) -> None:
    source = written(tmp_path / "hf", built(), max_shard_bytes=30_000)
    first = sorted(source.glob("*.safetensors"))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:-100])
    with pytest.raises(UserError, match="cannot read it"):
        load_model(source)
    first.unlink()
    with pytest.raises(UserError, match=first.name):
        load_model(source)
    first.write_bytes(whole)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"]["backbone.missing"] = first.name
    (source / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match="but it does not"):
        load_model(source)
    del index["weight_map"]["backbone.missing"]
    (source / INDEX).write_text(json.dumps(index))
    (source / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="'llama': not known here; known: nemotron_h"):
        load_model(source)
    (source / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_model(source)


def test_loaded_values_survive_another_initialisation_of_nothing(tmp_path: Path) -> None:
    """What was loaded is what the file holds, bit for bit, and initialising no names changes nothing."""
    source = written(tmp_path / "hf", built())
    model = load_model(source)
    initialize(model, 3, names=())
    slots, state = FAMILY.hub.tensors(model.config), model.state_dict()
    for name, tensor in all_tensors(source).items():
        slot = slots[name]
        ours = state[slot.parameter] if slot.expert is None else state[slot.parameter][slot.expert]
        assert torch.equal(ours, tensor), name


def test_checkpoints_of_a_run_load_and_export_by_the_newest(tmp_path: Path) -> None:
    """A folder of a run means its newest checkpoint; what belongs beside the weights is found in hub/ and tokenizer/."""
    run, manager = tmp_path / "run", CheckpointManager(tmp_path / "run" / "checkpoints", CheckpointConfig())
    for step in (1, 2):
        model = built(seed=step)
        job = tomli_w.dumps({"model": {"config": SMALL | CHANGES}})
        manager.save(step, model, torch.optim.AdamW(model.parameters()), {}, job)
    manager.close()
    keep_token_ids(3, None, run / "hub")
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "tokenizer.json").write_text("{}")

    ids = tokens(1, 9)
    with torch.no_grad():
        expected = model(ids)
        assert torch.equal(load_model(run)(ids), expected)
        assert torch.equal(load_model(run / "checkpoints" / "step-2")(ids), expected)
        assert not torch.equal(load_model(run / "checkpoints" / "step-1")(ids), expected)
        convert(run, tmp_path / "hf")
        assert torch.equal(load_model(tmp_path / "hf")(ids), expected)
    export(model, FAMILY, model.config, run, tmp_path / "exported")
    assert_same_files(tmp_path / "hf", tmp_path / "exported")
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    config = HubFiles(tmp_path / "hf").config
    assert config == HubFiles(tmp_path / "exported").config
    assert (config["eos_token_id"], config["bos_token_id"]) == (3, None)

    (run / "checkpoints" / "step-2" / "config.toml").unlink()
    with pytest.raises(UserError, match=r"config\.toml: cannot read it"):
        load_model(run)


# The other side: transformers itself.


def hf_logits(path: Path, ids: Tensor) -> tuple[Tensor, Any]:
    transformers = pytest.importorskip("transformers")
    reference = transformers.NemotronHForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return reference.eval()(ids).logits, reference


@pytest.mark.parametrize("changes", [{}, {"moe_latent_size": 0, "mtp_blocks": 0, "mtp_depths": 0, "use_bias": True}])
def test_transformers_loads_what_we_export(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Logits to 1e-4 in fp32; multi-token tensors are in the file and transformers ignores them."""
    model = built(**changes)
    source = written(tmp_path / "hf", model, max_shard_bytes=60_000)
    ids = tokens(2, 21)
    expected, reference = hf_logits(source, ids)
    with torch.no_grad():
        torch.testing.assert_close(load_model(source)(ids), expected, atol=1e-4, rtol=0)

    # And the way back: what transformers saves, we read.
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    ours = load_model(tmp_path / "theirs") if not model.config.mtp_blocks else None
    if ours is None:
        config = model.config.model_copy(update={"mtp_blocks": 0, "mtp_depths": 0})
        ours = FAMILY.model(config)
        load_weights(ours, FAMILY, config, tmp_path / "theirs", seed=0)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), expected, atol=1e-4, rtol=0)


def test_fixture_directories_are_read_as_they_are(tmp_path: Path) -> None:
    """A released-style directory beside other safetensors files: only the weights are taken."""
    case = REPOSITORY / "tests" / "fixtures" / "nemotron3" / "latent_moe"
    shutil.copytree(case, tmp_path / "case")
    convert(tmp_path / "case", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    assert_same_files(tmp_path / "case", tmp_path / "back")
    assert set(tensors_by_name(load_model(tmp_path / "back"))) == set(tensors_by_name(load_model(case)))
