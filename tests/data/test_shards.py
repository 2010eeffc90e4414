import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import config, read, reader, texts, tokenizer, write_jsonl
from titan_nemotron.data.shards import TokenShards, write_shards
from titan_nemotron.data.sources import open_source
from titan_nemotron.data.tokenizer import Tokenizer, train_tokenizer
from titan_nemotron.errors import UserError


def tokenise(path: Path, output: Path, **keys: Any) -> list[str]:
    return write_shards([open_source(config(path, "jsonl").source[0])], tokenizer(), output, **keys)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_equal_those_of_live_tokenisation(split: str, tmp_path: Path) -> None:
    """Bad, empty and held-out records included; several shards."""
    path = write_jsonl(tmp_path / "a.jsonl", [*texts(30), "", 5, *texts(20), "naïve 😀"])
    seen = []
    bad = tokenise(path, tmp_path / "shards", tokens_per_shard=200, progress=lambda *counts: seen.append(counts))
    assert bad == [f"{path}:32: field 'text' holds int, not a string"]
    assert seen[-1] == (53, sum(len(ids) for ids in tokenizer().encode([*texts(30), *texts(20), "naïve 😀"])))
    assert len(TokenShards(tmp_path / "shards").manifest["shards"]) > 3
    live = reader(config(path, "jsonl", validation_fraction=0.2), split=split, length=11)
    stored = reader(config(tmp_path / "shards", "shards", validation_fraction=0.2), split=split, length=11)
    for _ in range(60 if split == "train" else 1000):
        one, other = live.read(), stored.read()
        if one is None:
            assert other is None
            break
        assert other is not None
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.document_ids, other.document_ids)
        assert one.target_bytes == other.target_bytes
        assert one.states == other.states


def test_long_files_are_tokenised_in_the_same_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_nemotron.data.files.PIECE", 64)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("\n".join(texts(number * 5)))
    settings = config(tmp_path / "*.txt", "text")
    write_shards([open_source(settings.source[0])], tokenizer(), tmp_path / "shards")
    live, stored = reader(settings), reader(config(tmp_path / "shards", "shards"))
    assert all(np.array_equal(read(live).tokens, read(stored).tokens) for _ in range(60))


def test_the_directory_is_its_own_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(5))
    tokenise(path, tmp_path / "shards")
    assert Tokenizer.from_path(tmp_path / "shards").fingerprint == tokenizer().fingerprint
    other = train_tokenizer(["quite another text, of other words altogether"] * 9, 280)
    from tests.data.support import plan
    from titan_nemotron.data.reader import RowReader

    with pytest.raises(UserError, match="made with another tokenizer"):
        RowReader(plan(config(tmp_path / "shards", "shards")), other)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    big = Tokenizer(tokenizer().backend, tokenizer().eos_token)
    big.vocabulary_size = 1 << 17
    path = write_jsonl(tmp_path / "a.jsonl", texts(5))
    write_shards([open_source(config(path, "jsonl").source[0])], big, tmp_path / "shards")
    shards = TokenShards(tmp_path / "shards")
    assert shards.manifest["dtype"] == "uint32"
    assert [shards.record(n).tokens.tolist() for n in range(5)] == tokenizer().encode(texts(5))  # type: ignore[union-attr]


def test_never_half_written(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(5))

    def interrupt(documents: int, tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenise(path, tmp_path / "shards", progress=interrupt)
    assert [item.name for item in tmp_path.iterdir()] == ["a.jsonl"]
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="the sources have no text: .*:1: no field"):
        tokenise(tmp_path / "bad.jsonl", tmp_path / "shards")
    assert not (tmp_path / "shards").exists()
    tokenise(path, tmp_path / "shards")
    with pytest.raises(UserError, match="exists already; remove it"):
        tokenise(path, tmp_path / "shards")


def test_a_damaged_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"path = .*not a directory of token shards"):
        TokenShards(tmp_path)
    tokenise(write_jsonl(tmp_path / "a.jsonl", texts(5)), tmp_path / "shards")
    tokens = tmp_path / "shards" / "00000.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"00000.tokens is \d+ bytes, the manifest says"):
        TokenShards(tmp_path / "shards")
    tokens.unlink()
    with pytest.raises(UserError, match=r"00000.tokens is missing"):
        TokenShards(tmp_path / "shards")
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(UserError, match="version 99"):
        TokenShards(tmp_path / "shards")
