import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import WORDS, config, read, reader, texts, tokenizer, write_jsonl, write_parquet
from titan_nemotron.data.config import DataConfig, SourceConfig
from titan_nemotron.data.files import PIECE
from titan_nemotron.data.records import IndexedSource, in_order
from titan_nemotron.data.sources import open_source
from titan_nemotron.errors import UserError


def source(kind: str, path: Path | str | None = None, **keys: Any) -> Any:
    return open_source(SourceConfig(kind=kind, path=None if path is None else str(path), **keys))  # type: ignore[arg-type]


def found(opened: Any) -> list[str | None]:
    return [record.text for record in in_order(opened)]


def test_every_kind_reads_the_same_documents(tmp_path: Path) -> None:
    import datasets

    documents = texts(30)
    for number, text in enumerate(documents):
        (tmp_path / f"{number:02d}.txt").write_text(text)
    write_jsonl(tmp_path / "a.jsonl", documents[:20])
    write_jsonl(tmp_path / "b.jsonl", documents[20:])
    write_parquet(tmp_path / "a.parquet", documents[:20])
    write_parquet(tmp_path / "b.parquet", documents[20:])
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": documents})}).save_to_disk(
        str(tmp_path / "dict")
    )
    opened = [
        source("text", tmp_path / "*.txt"),
        source("jsonl", tmp_path / "*.jsonl"),
        source("parquet", tmp_path / "*.parquet"),
        source("datasets", "json", files=str(tmp_path / "*.jsonl")),
        source("datasets", tmp_path / "saved"),
        source("datasets", tmp_path / "dict"),
    ]
    for one in opened:
        assert found(one) == documents
        assert np.array_equal(np.concatenate([one.keys(0, 11), one.keys(11, 30)]), one.keys(0, 30))
        for start in (1, 7, 20, 29):
            assert [record.text for record in in_order(one, start)] == documents[start:]
    assert [isinstance(one, IndexedSource) for one in opened] == [True, True, False, False, True, True]
    with pytest.raises(UserError, match="split = 'test'"):
        source("datasets", tmp_path / "dict", split="test")


def test_names_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    """The same files elsewhere have the same documents held out."""
    for folder in ("here", "there"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        write_jsonl(tmp_path / folder / "deep" / "a.jsonl", texts(9))
        (tmp_path / folder / "deep" / "b.txt").write_text("text")
    for kind, pattern in (("jsonl", "**/*.jsonl"), ("text", "**/*.txt")):
        here, there = (source(kind, tmp_path / folder / pattern) for folder in ("here", "there"))
        assert np.array_equal(here.keys(0, 9), there.keys(0, 9))


def test_standard_library() -> None:
    one, other = source("stdlib"), source("stdlib")
    names = [name for name, _ in one.files]
    assert names == [name for name, _ in other.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert not [
        name for name in names if "/test/" in name or "site-packages" in name or name.startswith("_sysconfigdata")
    ]
    assert sum(len(text) for text in found(one) if text) > 5_000_000


def test_json_lines_at_the_edges(tmp_path: Path) -> None:
    """No newline at the end, an empty file, blank lines, Windows line ends, lines longer than a scanned block."""
    long = "x" * (17 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\r\n\n{"text": "two"}')
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": long}) + "\n" + json.dumps({"text": "end"}) + "\n")
    opened = source("jsonl", tmp_path / "*.jsonl")
    assert found(opened) == ["one", "", "two", long, "end"]
    assert opened.name(4) == f"{tmp_path / 'c.jsonl'}:2"


BAD_LINES = b"""{"text": "good"}
not json
{"other": 1}
[1, 2]
{"text": 5}
{"text": "\xff"}
{"text": "\\ud800"}
"""
PROBLEMS = [
    "not JSON",
    "no field 'text' .fields: other.",
    "list instead of",
    "holds int",
    "not UTF-8 at byte 10",
    "Unicode",
]


def test_bad_records_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BAD_LINES)
    rows = reader(config(tmp_path / "a.jsonl", "jsonl", streams=1), length=40)
    tokens = [token for _ in range(3) for token in read(rows).tokens[0, :40].tolist()]
    assert set(tokenizer().decode(tokens).split("<|endoftext|>")[:-1]) == {"good"}
    bad = rows.bad
    assert bad.count >= 6  # counted each time one is met, also in a later epoch
    assert len(bad.named) == 6
    for line, problem in enumerate(PROBLEMS, start=2):
        assert any(re.search(f"a.jsonl:{line}: .*{problem}", name) for name in bad.named), problem


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_bad_records_of_all_ranks_add_up(kind: str, tmp_path: Path) -> None:
    """Whether a rank reads its own documents alone or, from a source without an index, all of them."""
    documents = [None if number % 3 == 1 else text for number, text in enumerate(texts(60))]
    (write_jsonl if kind == "jsonl" else write_parquet)(tmp_path / "a", documents)
    settings = config(tmp_path / "a", kind, shuffle_block=60)
    counts = {}
    for degree in (1, 2, 4):
        readers = [reader(settings, data_rank=rank, data_degree=degree) for rank in range(degree)]
        for rows in readers:
            for _ in range(20 // degree):
                read(rows)
        counts[degree] = [rows.bad.count for rows in readers]
    assert all(count > 0 for count in counts[2])
    assert {sum(count) for count in counts.values()} == {sum(counts[1])}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_only_bad_records_is_an_error(kind: str, tmp_path: Path) -> None:
    (write_jsonl if kind == "jsonl" else write_parquet)(tmp_path / "a", [1, 2, 3])
    with pytest.raises(
        UserError, match=r"none of 3 records can be used, 3 are bad; the first is .*a:\d: field 'text' holds int"
    ):
        reader(config(tmp_path / "a", kind))


def test_undecodable_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xffcd")
    (tmp_path / "b.txt").write_text("fine")
    opened = source("text", tmp_path / "*.txt")
    assert [record.problem for record in in_order(opened)] == ["not UTF-8 at byte 2", None]
    long = b"x" * (PIECE - 1) + "é".encode() * 5 + b"x" * PIECE + b"\xff"
    (tmp_path / "a.txt").write_bytes(long)
    assert [record.problem for record in in_order(opened)] == [f"not UTF-8 at byte {len(long) - 1}", None]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_empty_sources(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path = .*nothing.*: no file matches"):
        source(kind, tmp_path / "nothing*")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="it is a directory, write"):
        source(kind, tmp_path / "folder")
    if kind == "parquet":
        write_parquet(tmp_path / "a", [])
    else:
        (tmp_path / "a").write_text("")
    with pytest.raises(UserError, match="hold no documents|none of 1 documents has any text"):
        reader(config(tmp_path / "a", kind))


def test_errors_name_the_key(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", texts(3))
    with pytest.raises(UserError, match="field = 'body'.*no such column; it has text"):
        source("parquet", tmp_path / "a.parquet", field="body")
    write_jsonl(tmp_path / "a.jsonl", texts(3))
    with pytest.raises(UserError, match="a.jsonl is not a readable parquet file"):
        source("parquet", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b123")
    with pytest.raises(UserError, match="is compressed"):
        source("jsonl", tmp_path / "a.jsonl.gz")
    with pytest.raises(UserError, match="datasets cannot load it"):
        source("datasets", str(tmp_path / "no-such-dataset"))
    with pytest.raises(ValueError, match="a source of kind jsonl needs a path"):
        DataConfig.model_validate({"source": [{"kind": "jsonl"}]})
    with pytest.raises(ValueError, match=r"path = .*no such directory; write it with `titan-nemotron tokenize`"):
        source("shards", tmp_path / "none")
    with pytest.raises(ValueError, match=r"tokenizer = 'none': no such file or directory"):
        DataConfig(tokenizer="none")
    with pytest.raises(ValueError, match="needs no path"):
        DataConfig.model_validate({"source": [{"path": "x"}]})


def test_a_stream_that_breaks_off_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": \n')
    opened = source("datasets", "json", files=str(tmp_path / "*.jsonl"))
    with pytest.raises(UserError, match=r"json/train:1: datasets cannot read on"):
        found(opened)


def test_several_sources_are_one_order(tmp_path: Path) -> None:
    """Indexed and streamed sources together: everything once an epoch."""
    write_jsonl(tmp_path / "a.jsonl", texts(7))
    write_parquet(tmp_path / "b.parquet", [f"other {word}" for word in WORDS[:9]])
    for kind, name in (("parquet", "b.parquet"), ("jsonl", "a.jsonl")):
        sources = [{"kind": "jsonl", "path": str(tmp_path / "a.jsonl")}, {"kind": kind, "path": str(tmp_path / name)}]
        settings = DataConfig.model_validate({"source": sources, "streams": 1, "validation_fraction": 0, "workers": 0})
        documents = [record.text or "" for one in settings.source for record in in_order(open_source(one))]
        rows = reader(settings, length=1)
        total = sum(len(ids) + 1 for ids in tokenizer().encode(documents))
        tokens = [int(read(rows).tokens[0, 0]) for _ in range(total)]
        assert sorted(tokenizer().decode(tokens).split("<|endoftext|>")[:-1]) == sorted(documents)
