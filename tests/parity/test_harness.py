"""The parity tests themselves: a wrong expectation, an unknown kind and an empty folder must fail."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity import nemotron3
from tests.parity.case import Case
from tests.parity.test_fixtures import test_case as run_case
from tests.support import REPOSITORY

CASES = REPOSITORY / "tests" / "fixtures" / "nemotron3"


def copied(name: str, path: Path) -> Path:
    shutil.copytree(CASES / name, path / name)
    return path / name


@pytest.mark.parametrize(
    ("name", "file", "tensor"),
    [
        ("moe", "io", "logits"),
        ("moe", "io", "hidden.layer.2"),
        ("moe", "io", "router.1.weights"),
        ("moe", "grads", "backbone.layers.0.mixer.A_log"),
        ("moe", "model", "backbone.layers.1.mixer.gate.weight"),
        ("mtp_packed", "io", "mtp.1.hidden"),
        ("mtp_packed", "grads", "mtp.layers.0.eh_proj.weight"),
        ("chunk_boundary", "io", "s9.logits"),
        ("padding", "io", "left.logits"),
        ("decode", "io", "cache.2.ssm_state"),
        ("decode", "io", "step_logits"),
        ("router_megatron_grouped", "io", "seq_aux_loss_grad"),
        ("router_megatron", "io", "updated_bias"),
    ],
)
def test_a_wrong_tensor_fails(tmp_path: Path, name: str, file: str, tensor: str) -> None:
    """Each half a percent too large."""
    folder = copied(name, tmp_path)
    tensors = load_file(folder / f"{file}.safetensors")
    save_file({**tensors, tensor: tensors[tensor] * 1.005}, folder / f"{file}.safetensors")
    with pytest.raises(AssertionError):
        run_case(folder)


def test_a_wrong_answer_that_is_ours_fails(tmp_path: Path) -> None:
    folder = copied("packed_docs", tmp_path)
    tensors = load_file(folder / "io.safetensors")
    save_file({**tensors, "logits_no_reset": tensors["logits"].clone()}, folder / "io.safetensors")
    with pytest.raises(AssertionError, match="a wrong answer"):
        run_case(folder)


def test_a_wrong_loss_fails(tmp_path: Path) -> None:
    folder = copied("latent_moe", tmp_path)
    meta = json.loads((folder / "meta.json").read_text())
    meta["adamw"]["loss_gradnorm_per_step"][5][0] *= 1.001
    with pytest.raises(AssertionError):
        nemotron3.check_model(Case(folder, meta))


def test_what_nothing_looks_at_fails(tmp_path: Path) -> None:
    folder = copied("padding", tmp_path)
    tensors = load_file(folder / "io.safetensors")
    save_file({**tensors, "middle.logits": torch.zeros(3)}, folder / "io.safetensors")
    with pytest.raises(AssertionError, match=r"padding: nothing looked at middle\.logits"):
        run_case(folder)


@pytest.mark.parametrize("meta", [{"family": "nemotron3", "kind": "riddle"}, {"family": "llama", "kind": "model"}, {}])
def test_an_unknown_kind_fails(tmp_path: Path, meta: dict[str, str]) -> None:
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(AssertionError, match="nothing here checks family"):
        run_case(tmp_path)


def test_other_roots_are_searched_and_an_empty_one_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/parity/test_fixtures.py"]
    environment = {**os.environ, "TITAN_NEMOTRON_FIXTURES": str(tmp_path)}
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout
    assert f"no folder with a meta.json under {tmp_path}" in result.stdout
