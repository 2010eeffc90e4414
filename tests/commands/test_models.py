"""score and generate on a small model with a tokenizer of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import REPOSITORY
from titan_nemotron import commands, load_model
from titan_nemotron.checkpoint.hub_files import write_hub_directory
from titan_nemotron.checkpoint.load import hub_tensors
from titan_nemotron.data.tokenizer import Tokenizer, train_tokenizer
from titan_nemotron.models.config import ModelConfig
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3 import FAMILY

PROMPT = "def f(x):"
CASE = REPOSITORY / "tests" / "fixtures" / "nemotron3" / "packed_docs"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([f"def f{n}(x):\n    return x + {n}\n" for n in range(50)], 280)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "vocab_size": 280, "pattern": "ME*", "initializer_range": 0.3}
    config = ModelConfig(config=sizes).resolved()
    model = FAMILY.model(config)
    initialize(model, seed=0)
    tensors = hub_tensors(model.state_dict().items(), FAMILY.hub.tensors(config), {})
    tokenizer.save(folder / "tokenizer")
    files = [folder / "tokenizer"]
    write_hub_directory(folder / "hf", tensors, FAMILY.hub.config_to_hub(config, "float32"), side_files=files)
    return folder / "hf"


def generate(capsys: pytest.CaptureFixture[str], checkpoint: Path, *arguments: str) -> str:
    assert commands.main(["generate", "--checkpoint", str(checkpoint), "--prompt", PROMPT, *arguments]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_score_is_the_fixture_s_logits(tmp_path: Path) -> None:
    case = load_file(CASE / "io.safetensors")
    inputs = {"input_ids": case["input_ids"].long(), "document_ids": case["seq_idx"].long()}
    save_file(inputs, tmp_path / "in.safetensors")
    arguments = [
        "--checkpoint",
        str(CASE),
        "--input",
        str(tmp_path / "in.safetensors"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert commands.main(["score", *arguments]) == 0
    out = load_file(tmp_path / "out")
    ids, documents = inputs["input_ids"], inputs["document_ids"]
    assert out["logits"].dtype == out["logprobs"].dtype == torch.float32
    assert out["logits"].shape[:2] == out["logprobs"].shape == ids.shape
    real = documents >= 0
    torch.testing.assert_close(out["logits"][real], case["logits"][real], atol=2e-4, rtol=0)
    expected = torch.zeros(ids.shape)
    expected[:, :-1] = torch.log_softmax(case["logits"], -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    expected[:, :-1][(documents[:, 1:] != documents[:, :-1]) | ~real[:, 1:]] = 0
    torch.testing.assert_close(out["logprobs"], expected, atol=2e-4, rtol=0)


def test_score_takes_rows_without_documents(tmp_path: Path, checkpoint: Path) -> None:
    ids = torch.arange(12).reshape(2, 6)
    save_file({"input_ids": ids}, tmp_path / "in")
    arguments = ["--checkpoint", str(checkpoint), "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert commands.main(["score", *arguments]) == 0
    with torch.no_grad():
        expected = load_model(checkpoint)(ids)
    torch.testing.assert_close(load_file(tmp_path / "out")["logits"], expected)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"tokens": torch.ones(1, 2)}, "has no tensor input_ids; it holds tokens"),
        ({"input_ids": torch.ones(1, 2)}, "input_ids is torch.float32; expected integers"),
    ],
    ids=str,
)
def test_score_names_what_is_wrong_with_the_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tensors: dict[str, torch.Tensor], message: str
) -> None:
    file = tmp_path / "in"
    save_file(tensors, file)
    assert commands.main(["score", "--checkpoint", "x", "--input", str(file), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: --input {file}: {message}\n"
    file.write_bytes(b"not a safetensors file")
    assert commands.main(["score", "--checkpoint", "x", "--input", str(file), "--output", str(tmp_path / "out")]) == 2
    assert "not a safetensors file" in capsys.readouterr().err
    assert (
        commands.main(["score", "--checkpoint", "x", "--input", str(file), "--output", str(tmp_path / "a" / "b")]) == 2
    )
    assert "there is no directory" in capsys.readouterr().err


def test_generate_is_the_greedy_continuation(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tokenizer: Tokenizer
) -> None:
    model = load_model(checkpoint)
    tokens = tokenizer.encode([PROMPT])[0]
    for _ in range(12):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokenizer.eos_id not in tokens
    text = generate(capsys, checkpoint, "--temperature", "0", "--max-new-tokens", "12")
    assert text == tokenizer.decode(tokens)


def test_generate_repeats_itself_for_a_seed(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    first, again, other = (
        generate(capsys, checkpoint, "--seed", seed, "--top-p", "0.9", "--max-new-tokens", "20") for seed in "112"
    )
    assert first == again != other
    assert first.startswith(PROMPT)


def test_generate_ends_before_a_stop_text(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    whole = generate(capsys, checkpoint, "--max-new-tokens", "40").removeprefix(PROMPT)
    stops = [whole[15:17], whole[20:23]]
    end = min(whole.index(stop) for stop in stops)
    cut = generate(capsys, checkpoint, "--max-new-tokens", "40", "--stop", *stops)
    assert cut == PROMPT + whole[:end]


def test_generate_finds_a_tokenizer_or_says_so(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ["generate", "--checkpoint", str(CASE), "--prompt", PROMPT, "--max-new-tokens", "1"]
    assert commands.main(arguments) == 2
    assert capsys.readouterr().err.endswith("no tokenizer.json there; name one with --tokenizer\n")
    text = generate(capsys, checkpoint, "--tokenizer", str(checkpoint.parent / "tokenizer"), "--max-new-tokens", "0")
    assert text == PROMPT
