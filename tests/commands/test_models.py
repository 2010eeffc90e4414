"""score and generate on a small model with a tokenizer of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import REPOSITORY
from titan_nemotron import commands, load_model
from titan_nemotron.checkpoint.hub_files import write_hub_directory
from titan_nemotron.checkpoint.load import hub_tensors
from titan_nemotron.data.tokenizer import Tokenizer, train_tokenizer
from titan_nemotron.errors import UserError
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


def score(folder: Path, checkpoint: Path | str, tensors: dict[str, torch.Tensor]) -> int:
    save_file(tensors, folder / "in")
    arguments = ["--checkpoint", str(checkpoint), "--input", str(folder / "in"), "--output", str(folder / "out")]
    return commands.main(["score", *arguments])


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
def test_score_of_no_tokens_is_empty(tmp_path: Path, checkpoint: Path, shape: tuple[int, int]) -> None:
    assert score(tmp_path, checkpoint, {"input_ids": torch.zeros(shape, dtype=torch.int64)}) == 0
    out = load_file(tmp_path / "out")
    assert out["logits"].shape == (*shape, 280) and out["logprobs"].shape == shape


def test_score_names_what_the_model_cannot_take(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ids, message in {
        (1, 280): "input_ids: 280 at row 0, position 1 is outside the vocabulary of 280",
        (0, -7): "input_ids: -7 at row 0, position 1 is outside the vocabulary of 280",
    }.items():
        assert score(tmp_path, checkpoint, {"input_ids": torch.tensor([ids])}) == 2
        assert capsys.readouterr().err == f"error: --input {tmp_path / 'in'}: {message}\n"
    padded = {"input_ids": torch.tensor([[1, 280]]), "document_ids": torch.tensor([[0, -1]])}
    assert score(tmp_path, checkpoint, padded) == 0


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"tokens": torch.ones(1, 2)}, "has no tensor input_ids; it holds tokens"),
        ({"input_ids": torch.ones(1, 2)}, "input_ids: is torch.float32; expected integers"),
        ({"input_ids": torch.ones(1, 2, dtype=torch.bool)}, "input_ids: is torch.bool; expected integers"),
        ({"input_ids": torch.ones(2, dtype=torch.int64)}, "input_ids: expected shape [rows, length], got [2]"),
        (
            {"input_ids": torch.ones(1, 2, dtype=torch.int64), "document_ids": torch.ones(1, 2)},
            "document_ids: is torch.float32; expected integers",
        ),
        (
            {"input_ids": torch.ones(1, 2, dtype=torch.int64), "document_ids": torch.ones(2, 1, dtype=torch.int64)},
            "document_ids: shape [2, 1] differs from input_ids [1, 2]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_score_names_what_is_wrong_with_the_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tensors: dict[str, torch.Tensor], message: str
) -> None:
    file = tmp_path / "in"
    assert score(tmp_path, "x", tensors) == 2  # before the model is loaded
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


def test_generate_continues_an_empty_prompt(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    """As a document that begins: behind the token that ends one."""
    arguments = ["--checkpoint", str(checkpoint), "--prompt", "", "--temperature", "0", "--max-new-tokens", "3"]
    assert commands.main(["generate", *arguments]) == 0
    assert capsys.readouterr().out.strip()


def test_generate_names_a_tokenizer_of_another_vocabulary(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    small = tmp_path / "small"
    model = FAMILY.model(FAMILY.hub.config_from_hub(config | {"vocab_size": 20}))
    initialize(model, seed=0)
    slots = FAMILY.hub.tensors(model.config)
    tensors = hub_tensors(model.state_dict().items(), slots, {})
    write_hub_directory(small, tensors, FAMILY.hub.config_to_hub(model.config, "float32"))
    tokens = str(checkpoint.parent / "tokenizer")
    assert commands.main(["generate", "--checkpoint", str(small), "--prompt", PROMPT, "--tokenizer", tokens]) == 2
    assert "is no token of the model's vocabulary of 20\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "float7"}, "dtype = float7: use float32,"),
        ({"dtype": torch.int64}, "dtype = torch.int64: use float32,"),
        ({"device": "toaster"}, "device = toaster: cannot be used here"),
        ({"path": "nowhere"}, "nowhere: is neither a Hugging Face directory"),
        ({"path": ""}, ".: is neither a Hugging Face directory"),
    ],
    ids=str,
)
def test_load_model_names_what_is_wrong(checkpoint: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        load_model(**{"path": checkpoint} | wrong)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
