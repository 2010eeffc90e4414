"""Rows against the definition: stream, order, packing, targets, ranks, resume, held-out documents."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.data.support import config, read, reader, stream_tokens, texts, tokenizer, write_jsonl, write_parquet
from titan_nemotron.data.loader import build_loader, merge_states
from titan_nemotron.data.records import IndexedSource, pieces
from titan_nemotron.data.sources import open_source
from titan_nemotron.errors import UserError
from titan_nemotron.layout import IGNORED, Batch

documents = st.lists(st.text("ab é\n😀", max_size=30), min_size=1, max_size=12).filter(any)


@given(documents, st.integers(1, 5), st.integers(1, 24), st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=60)
def test_rows_and_targets_are_those_of_the_uncut_streams(
    documents: list[str], streams: int, length: int, depths: int, seed: int
) -> None:
    """Tokens in order, each once; labels and MTP targets as if no document had been cut at a row's end."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder, "a.jsonl"), documents)
        rounds = 4
        rows_reader = reader(config(path, "jsonl", streams=streams), length=length, mtp_depths=depths, seed=seed)
        rows = [read(rows_reader) for _ in range(rounds * streams)]
    for stream in range(streams):
        count = rounds * length
        tokens, numbers = stream_tokens(
            tokenizer().encode(documents), stream, streams, seed, count + length + depths + 2
        )
        for start, row in zip(range(0, count, length), rows[stream::streams], strict=True):
            assert row.tokens[0, :length].tolist() == tokens[start : start + length]
            assert np.array_equal(
                np.diff(row.document_ids[0, :length]) == 0, np.diff(numbers[start : start + length]) == 0
            )
            batch = Batch.from_rows(
                torch.from_numpy(row.tokens).long(),
                torch.from_numpy(row.document_ids),
                length=length,
                mtp_depths=depths,
            )

            position = range(start, start + length)
            assert batch.labels[0].tolist() == [same_document(tokens, numbers, i, 1, IGNORED) for i in position]
            for depth in range(depths):
                inputs = [same_document(tokens, numbers, i, 1 + depth, 0) for i in position]
                targets = [same_document(tokens, numbers, i, 2 + depth, IGNORED) for i in position]
                assert batch.mtp_tokens[depth, 0].tolist() == inputs
                assert batch.mtp_labels[depth, 0].tolist() == targets


def same_document(tokens: list[int], numbers: list[int], position: int, ahead: int, fill: int) -> int:
    return tokens[position + ahead] if numbers[position] == numbers[position + ahead] else fill


@given(st.text("ab é\n😀", min_size=200, max_size=600), st.integers(1, 3), st.integers(0, 4))
@example("a" * 191 + "😀", 1, 0)  # the last piece holds nothing but the rest of a character
@settings(max_examples=40)
def test_long_files_are_read_piece_by_piece(text: str, streams: int, depths: int) -> None:
    """Pieces of 64 bytes: the same text, rows and targets across them, and a resume in any of them."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_nemotron.data.files.PIECE", 64)
        for number in range(3):
            Path(folder, f"{number}.txt").write_text(text[number:], newline="")
        corpus = config(Path(folder, "*.txt"), "text", streams=streams)
        source = open_source(corpus.source[0])
        assert isinstance(source, IndexedSource)
        documents = []
        for number in range(3):
            found = [piece.text or "" for piece in pieces(source, number)]
            assert "".join(found) == text[number:]
            assert len(found) > 3
            documents.append([token for ids in tokenizer().encode(found) for token in ids])
        rows_reader, length = reader(corpus, length=24, mtp_depths=depths), 24
        states: dict[str, Any] = {}
        for row in range(25):
            found_row = read(rows_reader)
            resumed = read(reader(corpus, {"streams": states}, length=24, mtp_depths=depths))
            assert np.array_equal(found_row.tokens, resumed.tokens)
            assert np.array_equal(found_row.document_ids, resumed.document_ids)
            tokens, numbers = stream_tokens(documents, row % streams, streams, 0, (row + 2) * length)
            start = row // streams * length
            assert found_row.tokens[0, :length].tolist() == tokens[start : start + length]
            last = start + length - 1
            same = [
                token
                for token, number in zip(tokens[last + 1 :], numbers[last + 1 :], strict=True)
                if number == numbers[last]
            ]
            ahead = found_row.tokens[0, length:][found_row.document_ids[0, length:] >= 0]
            assert ahead.tolist() == same[: depths + 1]
            states.update(json.loads(json.dumps(found_row.states)))


@given(st.integers(1, 30), st.integers(0, 5))
@settings(max_examples=20)
def test_an_epoch_has_every_document_once(number: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind, write in (("jsonl", write_jsonl), ("parquet", write_parquet)):
            path = write(Path(folder, kind), texts(number))
            source = reader(config(path, kind, streams=1), length=1, seed=seed)
            total = sum(len(ids) + 1 for ids in tokenizer().encode(texts(number)))
            tokens = [int(read(source).tokens[0, 0]) for _ in range(total)]
            assert sorted(tokenizer().decode(tokens).split("<|endoftext|>")[:-1]) == sorted(texts(number))


PACKING = {
    "continue": {},
    "refuse": {"kind": "best_fit", "pool": 3, "window": 2, "shuffle_rows": 2},
    "split": {"kind": "best_fit", "pool": 2, "window": 1, "tolerance": 2, "shuffle_rows": 0, "too_long": "split"},
}


@pytest.fixture(
    scope="module", params=["jsonl", "parquet", "datasets", "jsonl refuse", "datasets split", "parquet split"]
)
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Indexed, streamed with cheap skipping, and streamed with a cursor of its own; documents that continue, or packed."""
    folder = tmp_path_factory.mktemp("corpus")
    kind, *variant = request.param.split()
    keys = {"packing": PACKING[variant[-1] if variant and variant[-1] in PACKING else "continue"]}
    for file in range(3):
        (write_jsonl if kind == "jsonl" else write_parquet)(
            folder / f"{file}.{kind}", texts(40)[file * 11 : file * 11 + 11 + file]
        )
    if kind == "datasets":
        source = {"kind": kind, "path": "parquet", "files": str(folder / "*.datasets")}
        return config("", kind, source=[source], **keys)
    if "weights" in variant:
        weights = {0: 1, 1: 2.5, 2: 0.7}
        keys["source"] = [
            {"kind": kind, "path": str(folder / f"{file}.{kind}"), "weight": weight} for file, weight in weights.items()
        ]
    return config(folder / "*", kind, **keys)


def all_ranks(corpus: Any, degree: int, steps: int, state: Any = None, rows: int = 2) -> tuple[list[list[int]], Any]:
    """The rows of `steps` global batches of 8 rows in their global order, and the merged state."""
    loaders = [
        build_loader(
            corpus,
            tokenizer(),
            sequence_length=16,
            mtp_depths=2,
            rows_per_microbatch=rows,
            data_rank=rank,
            data_degree=degree,
            seed=3,
        )
        for rank in range(degree)
    ]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    found = []
    for _ in range(steps * 8 // (rows * degree)):
        batches = [next(loader) for loader in loaders]
        for row in range(rows):
            found += [torch.cat([b.tokens[row], b.labels[row], *b.mtp_labels[:, row]]).tolist() for b in batches]
    return found, json.loads(json.dumps(merge_states(loader.state_dict() for loader in loaders)))


def test_ranks_interleave_to_the_same_rows(corpus: Any) -> None:
    one, state = all_ranks(corpus, 1, 12)
    for degree, rows in ((1, 4), (2, 2), (4, 1), (4, 2)):
        found, merged = all_ranks(corpus, degree, 12, rows=rows)
        assert found == one
        assert {key: entry["next"] for key, entry in merged["streams"].items()} == {
            key: entry["next"] for key, entry in state["streams"].items()
        }


def test_resume_on_any_number_of_ranks(corpus: Any) -> None:
    uninterrupted, _ = all_ranks(corpus, 1, 24)
    for before, after, steps in ((1, 1, 1), (1, 4, 7), (4, 2, 5), (2, 1, 11), (2, 4, 13), (4, 4, 20)):
        first, state = all_ranks(corpus, before, steps)
        second, state = all_ranks(corpus, after, 2, state)
        third, _ = all_ranks(corpus, before, 2, state)
        assert first + second + third == uninterrupted[: (steps + 4) * 8]


@given(st.integers(0, 40))
@settings(max_examples=15)
def test_resume_at_any_row(corpus: Any, rows: int) -> None:
    original = reader(corpus, seed=1)
    states: dict[str, Any] = {}
    for _ in range(rows):
        states.update(json.loads(json.dumps(read(original).states)))
    resumed = reader(corpus, {"streams": states}, seed=1)
    for _ in range(10):
        one, other = read(original), read(resumed)
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.document_ids, other.document_ids)


def test_a_state_that_does_not_fit_is_an_error(corpus: Any, tmp_path: Path) -> None:
    _, state = all_ranks(corpus, 2, 2)
    other = corpus.model_copy(update={"shuffle_block": 6})
    with pytest.raises(UserError, match="shuffle_block = 5, now it is 6"):
        all_ranks(other, 1, 1, state)
    del state["streams"]["2"]
    with pytest.raises(UserError, match="every rank"):
        all_ranks(corpus, 1, 1, state)
    with pytest.raises(UserError, match="streams = 4: 3 data ranks do not divide"):
        all_ranks(corpus, 3, 1)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_held_out_documents_are_never_trained_on(kind: str, tmp_path: Path) -> None:
    corpus = texts(200, longest=4)
    if kind == "text":
        for number, text in enumerate(corpus):
            (tmp_path / f"{number}.txt").write_text(text)
    else:
        (write_jsonl if kind == "jsonl" else write_parquet)(tmp_path / "a", corpus)
    settings = config(tmp_path / "*", kind, validation_fraction=0.1, streams=2)
    training: set[str] = set()
    train_reader = reader(settings, length=64)
    for _ in range(200):
        training.update(tokenizer().decode(read(train_reader).tokens[0, :64].tolist()).split("<|endoftext|>")[1:-1])
    held: list[list[int]] = []
    for degree in (1, 2, 4):
        readers = [
            reader(settings, length=16, split="validation", rows=2, data_rank=r, data_degree=degree)
            for r in range(degree)
        ]
        rows: list[np.ndarray] = []
        while batches := [batch for batch in (one.read() for one in readers) if batch is not None]:
            assert len(batches) == degree  # every rank gets as many
            rows += [np.where(b.document_ids >= 0, b.tokens, -1)[row, :16] for row in range(2) for b in batches]
        held.append([token for token in np.concatenate(rows).tolist() if token >= 0])
    assert held[0] == held[1] == held[2]
    validation = tokenizer().decode(held[0]).split("<|endoftext|>")[:-1]
    assert len(validation) == len(set(validation))
    assert 5 < len(validation) < 40
    assert training.isdisjoint(validation)
    assert training | set(validation) == set(corpus)


def test_a_validation_source_holds_out_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(5))
    write_jsonl(tmp_path / "b.jsonl", ["other text", "and more"])
    settings = config(
        tmp_path / "a.jsonl", "jsonl", validation_source=[{"kind": "jsonl", "path": str(tmp_path / "b.jsonl")}]
    )
    validation = reader(settings, split="validation", length=64)
    rows = read(validation)
    assert validation.read() is None
    found = tokenizer().decode(rows.tokens[0][rows.document_ids[0] >= 0].tolist()).split("<|endoftext|>")
    assert sorted(found) == ["", "and more", "other text"]
    assert settings.held_out == 0


def test_validation_starts_again_and_counts_bytes(tmp_path: Path) -> None:
    corpus = [*texts(20), "naïve 😀 text", "", "x"]
    write_jsonl(tmp_path / "a.jsonl", ["train"])
    write_jsonl(tmp_path / "b.jsonl", corpus)
    settings = config(
        tmp_path / "a.jsonl", "jsonl", validation_source=[{"kind": "jsonl", "path": str(tmp_path / "b.jsonl")}]
    )
    loader = build_loader(
        settings,
        tokenizer(),
        sequence_length=16,
        mtp_depths=1,
        rows_per_microbatch=2,
        data_rank=0,
        data_degree=1,
        seed=0,
        split="validation",
    )
    first, again = list(loader), list(loader)
    assert len(first) == len(again) > 3
    assert all(one is other for one, other in zip(first, again, strict=True))
    encoded = tokenizer().encode(corpus)
    # Every token but a document's first is a target once, the end of the document (of no bytes) too.
    assert sum(batch.num_targets for batch in first) == sum(len(ids) for ids in encoded)
    first_bytes = [len(tokenizer().decode(ids[:1]).encode()) for ids in encoded if ids]
    assert sum(batch.target_bytes or 0 for batch in first) == sum(len(text.encode()) for text in corpus) - sum(
        first_bytes
    )


def test_nothing_held_out_is_an_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(3))
    with pytest.raises(UserError, match="validation_fraction = 0.001: holds out none of 3 documents"):
        reader(config(tmp_path / "a.jsonl", "jsonl", validation_fraction=0.001), split="validation")
