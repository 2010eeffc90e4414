"""`titan-nemotron config`, and the files of the repository that it writes."""

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from tests.support import REPOSITORY
from titan_nemotron import commands
from titan_nemotron.commands.config import REFERENCE, SCHEMA, generated
from titan_nemotron.config import load
from titan_nemotron.config.keys import dotted, leaves, toml
from titan_nemotron.train.job import Job

EXAMPLES = sorted((REPOSITORY / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", [REFERENCE, SCHEMA])
def test_generated_files_are_current(path: str) -> None:
    stored = (REPOSITORY / path).read_text(encoding="utf-8")
    assert stored == generated()[path], f"{path} is out of date: run titan-nemotron config --write"


def test_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands.main(["config", "--write"]) == 2
    assert "there is no docs/ here" in capsys.readouterr().err
    for path in generated():
        Path(path).parent.mkdir(exist_ok=True)
    assert commands.main(["config", "--write"]) == 0
    assert {path: Path(path).read_text(encoding="utf-8") for path in generated()} == generated()


def test_prints_a_job_that_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[model]\nflavor = "nano_30b"\n[model.config]\nhidden_size = 64\n')
    assert commands.main(["config", str(file), "--training.steps", "7"]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    job = load(Job, tmp_path / "again.toml")
    assert job == load(Job, file, ["--training.steps", "7"])
    assert (job.training.steps, job.model.resolved().hidden_size) == (7, 64)


def test_help_of_train_shows_every_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        commands.main(["train", "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for path, field in leaves(Job, free=True):
        assert f"--{dotted(path)} " in words
        assert (field.description or "") in words
        if field.default not in (None, {}) and not callable(field.default_factory):
            assert f"default: {toml(field.default)})" in words


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples(file: Path) -> None:
    """Each is valid, also in an editor's eyes, refers to the schema, and says nothing that its base says already."""
    text = file.read_text(encoding="utf-8")
    assert text.startswith("#:schema ./schema.json\n")
    tree = tomllib.loads(text)
    jsonschema.validate(tree, json.loads((REPOSITORY / SCHEMA).read_text()))
    load(Job, file)
    base = tree.pop("base", None)
    inherited = load(Job, None if base is None else file.parent / base).model_dump()
    for table, values in tree.items():
        for key, value in values.items():
            assert value != inherited[table][key], f"[{table}] {key} is what the base says"
