"""The code of the two guides trains, resumes nothing, leaks nothing and decodes, without the package knowing of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.gated_conv import GatedConv
from examples.nope_gpt import FAMILY as NOPE_GPT
from tests.support import REPOSITORY
from titan_nemotron import commands
from titan_nemotron.generation.cache import Cache
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3 import FAMILY as NEMOTRON3

SMALL = [
    *("--training.steps", "8", "--training.sequence-length", "64", "--training.global-batch-size", "4"),
    *("--training.microbatch-size", "4", "--training.validation-interval", "0", "--data.vocabulary-size", "300"),
    *("--data.validation-fraction", "0", "--data.workers", "0", "--metrics.interval", "1"),
    *("--optimizer.learning-rate", "3e-3", "--schedule.warmup-steps", "1"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few thousand short documents of a language that is quick to learn."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = (json.dumps({"text": f"{n} plus {n + 1} is {2 * n + 1}. " * 4}) for n in range(2000))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("example", ["mixer", "family"])
def test_the_example_of_the_guide_trains(example: str, corpus: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(
        f'base = "{REPOSITORY}/train_configs/example_{example}.toml"\n'
        f'[job]\nname = "{example}"\noutput_directory = "{tmp_path}"\n'
        f'[[data.source]]\nkind = "jsonl"\npath = "{corpus}"\n'
    )
    command = [sys.executable, "-m", "titan_nemotron.train", "--config", str(config), *SMALL]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / example / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 9))
    assert records[-1]["loss"] < records[0]["loss"] - 0.5


def models() -> dict[str, torch.nn.Module]:
    small = {"vocab_size": 64, "hidden_size": 32, "initializer_range": 0.2}
    mixer = NEMOTRON3.flavors["debug"].model_copy(
        update=small | {"pattern": "GMG", "mixers": {"G": "examples.gated_conv:GatedConv"}, "mamba_head_dim": 8}
    )
    built = {
        "mixer": NEMOTRON3.model(mixer),
        "family": NOPE_GPT.model(NOPE_GPT.flavors["small"].model_copy(update={"vocab_size": 64})),
    }
    for model in built.values():
        initialize(model, seed=1)
    assert any(isinstance(module, GatedConv) for module in built["mixer"].modules())
    return built


@pytest.mark.parametrize("example", ["mixer", "family"])
def test_the_example_decodes_and_keeps_documents_apart(example: str) -> None:
    model = models()[example]
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0] * 6 + [1] * 8 + [-1] * 3]).expand(2, -1)
    with torch.no_grad():
        packed = model(tokens, ids)
        for document in (slice(0, 6), slice(6, 14)):
            torch.testing.assert_close(packed[:, document], model(tokens[:, document]), atol=2e-5, rtol=0)
        cache = Cache(model, 2, 17)
        pieces = [model(piece, cache=cache) for piece in tokens.split([5, 1, 1, 10], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=2e-5, rtol=0)


def test_mistakes_of_the_example_s_configuration_are_reported_with_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "job.toml"
    lines = [f'base = "{REPOSITORY}/train_configs/example_family.toml"', "[training]", "steps = -1"]
    config.write_text("\n".join([*lines, "[model.config]", "num_attention_heads = 7"]) + "\n")
    assert commands.main(["config", str(config)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert f"{config}:3: training.steps = -1: expected" in errors[1]
    heads = "model.config.hidden_size = 96: is not divisible by num_attention_heads = 7; change one of them"
    assert errors[0] == f"error: {config}:5: {heads}"
