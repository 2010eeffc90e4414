"""Rows of whole documents: each token once, nothing cut, nothing twice in a row; what does not fit; sources by weight."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.support import config, read, reader, tokenizer, write_jsonl
from titan_nemotron.data.reader import Rows
from titan_nemotron.errors import UserError

LENGTH = 24
documents = st.lists(st.text("ab c\n", min_size=1, max_size=40), min_size=1, max_size=40)


def row_documents(rows: Rows) -> list[list[tuple[int, ...]]]:
    """The documents of each row, as tokens."""
    found = []
    for tokens, ids in zip(rows.tokens, rows.document_ids, strict=True):
        assert (ids[LENGTH:] < 0).all()  # whole documents have nothing to look ahead to
        assert (np.diff(ids[: int((ids >= 0).sum())]) >= 0).all() and (ids[int((ids >= 0).sum()) :] < 0).all()
        found.append([tuple(tokens[ids == number].tolist()) for number in range(ids.max() + 1)])
    return found


def validation(path: Path, packing: dict[str, Any], rows: int = 3) -> Any:
    settings = config("none", "text", source=[{"kind": "stdlib"}], packing={"kind": "best_fit", **packing})
    source = settings.source[0].model_copy(update={"kind": "jsonl", "path": str(path)})
    settings = settings.model_copy(update={"validation_source": [source]})
    return reader(settings, length=LENGTH, split="validation", rows=rows)


@given(documents, st.integers(1, 5), st.integers(1, 6), st.integers(0, 4), st.integers(0, 5), st.booleans())
@settings(max_examples=80)
def test_each_token_of_each_accepted_document_is_in_one_row(
    given: list[str], pool: int, window: int, tolerance: int, shuffle_rows: int, splits: bool
) -> None:
    packing = {"pool": pool, "window": window, "tolerance": tolerance, "shuffle_rows": shuffle_rows}
    with tempfile.TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder, "a.jsonl"), given)
        one = validation(path, {**packing, "too_long": "split" if splits else "refuse"})
        found: list[list[tuple[int, ...]]] = []
        while (rows := one.read()) is not None:
            found += row_documents(rows)
    whole = [(*ids, tokenizer().eos_id) for ids in tokenizer().encode(given)]
    if splits:
        expected = Counter(ids[start : start + LENGTH] for ids in whole for start in range(0, len(ids), LENGTH))
        assert one.bad.count == 0
    else:
        expected = Counter(ids for ids in whole if len(ids) <= LENGTH)
        assert one.bad.count == len(whole) - expected.total()
        assert all(f"do not fit into a row of {LENGTH}" in line for line in one.bad.named)
    assert Counter(document for row in found for document in row) == expected
    for row in found:
        assert len(set(row)) == len(row)
        assert sum(map(len, row)) <= LENGTH


def test_a_refused_document_is_named_by_its_line_and_all_refused_ends_the_run(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "b " * 60, "c"])
    one = validation(path, {}, rows=1)
    assert read(one).document_ids.max() == 1
    assert len(one.bad.named) == 1
    assert one.bad.named[0].startswith(f"{path}:2: its ") and one.bad.named[0].endswith("do not fit into a row of 24")
    write_jsonl(tmp_path / "b.jsonl", ["b " * 60] * 3)
    endless = reader(config(tmp_path / "b.jsonl", "jsonl", packing={"kind": "best_fit"}), length=LENGTH)
    with pytest.raises(UserError, match=r"10,000 documents one after another cannot be used.*b.jsonl:[123]: its"):
        endless.read()


def test_the_open_documents_of_a_resume_are_checked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"{n} a b c" for n in range(40)])
    packed = config(path, "jsonl", streams=1, packing={"kind": "best_fit", "pool": 2, "window": 2})
    state = {"streams": json.loads(json.dumps(read(reader(packed, length=LENGTH)).states))}
    write_jsonl(path, [""] * 39 + ["a"])
    with pytest.raises(UserError, match="is not what it was at the checkpoint"):
        reader(packed, state, length=LENGTH).read()


@pytest.mark.parametrize("kind", ["continue", "best_fit"])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.5, 0.2, 0.3)])
def test_sources_come_by_weight_and_equal_ones_in_turn(kind: str, weights: tuple[float, ...], tmp_path: Path) -> None:
    names = "abc"[: len(weights)]
    sources = [
        {"kind": "jsonl", "path": str(write_jsonl(tmp_path / f"{name}.jsonl", [name] * (5 + place))), "weight": weight}
        for place, (name, weight) in enumerate(zip(names, weights, strict=True))
    ]
    packing = {"kind": kind, "window": 1, "pool": 1, "shuffle_rows": 0}
    mixed = reader(
        config("", "", source=sources, streams=2, packing=packing), length=2
    )  # a document and its end: a row
    found: list[list[str]] = [[], []]
    for number in range(400):
        rows = read(mixed)
        found[number % 2].append(tokenizer().decode(rows.tokens[0, :1].tolist()))
    for stream in found:
        for count in range(1, len(stream) + 1):
            given = Counter(stream[:count])
            for name, weight in zip(names, weights, strict=True):
                assert abs(given[name] - count * weight / sum(weights)) < 1 + 1e-9
        if weights == (1, 1):
            assert stream == ["a", "b"] * (len(stream) // 2)
