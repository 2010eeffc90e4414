"""tokenizer train, tokenize, and training data read back from what they write."""

from pathlib import Path

import numpy as np
import pytest

from titan_nemotron import commands
from titan_nemotron.data.config import SourceConfig
from titan_nemotron.data.sources import open_source
from titan_nemotron.data.tokenizer import Tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """The flags that name forty small files, one of which is not UTF-8."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"document {number} says {number * number}, and no more\n" * 3)
    (folder / "99.txt").write_bytes(b"\xff\xfe")
    return ["--data.source.0.kind", "text", "--data.source.0.path", f"{folder}/*.txt", "--data.vocabulary_size", "300"]


def test_a_tokenizer_is_trained_and_its_shards_hold_the_documents(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["tokenizer", "train", "--output", str(tmp_path / "tokenizer"), *texts]) == 0
    out = capsys.readouterr().out
    assert "300 tokens" in out
    assert f"wrote {tmp_path / 'tokenizer'}" in out
    tokenizer = Tokenizer.from_path(tmp_path / "tokenizer")
    assert tokenizer.vocabulary_size == 300

    shards = tmp_path / "shards"
    named = ["--data.tokenizer", str(tmp_path / "tokenizer")]
    assert commands.main(["tokenize", "--output", str(shards), *texts, *named]) == 0
    captured = capsys.readouterr()
    assert "41 documents" in captured.out
    assert captured.err.startswith("left out: ")
    assert "99.txt" in captured.err
    source = open_source(SourceConfig(kind="shards", path=str(shards)))
    tokens = source.record(7).tokens  # type: ignore[union-attr]
    assert isinstance(tokens, np.ndarray)
    assert tokenizer.decode(tokens.tolist()) == "document 7 says 49, and no more\n" * 3


def test_the_data_table_of_a_job_s_file_is_used(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'[data]\nvocabulary_size = 290\n[[data.source]]\nkind = "text"\npath = "{texts[3]}"\n')
    arguments = ["tokenizer", "train", "--output", str(tmp_path / "t"), "--config", str(file)]
    assert commands.main(arguments) == 0
    assert Tokenizer.from_path(tmp_path / "t").vocabulary_size == 290
    capsys.readouterr()
    assert commands.main(arguments) == 2
    expected = f"error: --output {tmp_path / 't'}: has a tokenizer already; remove it or name another directory\n"
    assert capsys.readouterr().err == expected
