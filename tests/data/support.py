"""Small corpora and a plain second way to compute what the loader should give."""

import functools
import json
from pathlib import Path
from typing import Any

from titan_nemotron.data.config import DataConfig
from titan_nemotron.data.hashing import mix, permuted
from titan_nemotron.data.reader import Plan, RowReader, Rows
from titan_nemotron.data.tokenizer import Tokenizer, train_tokenizer

SENTENCE = "the state of a stream is exact to the row and documents continue in the next row wherever they end"
WORDS = SENTENCE.split()


@functools.cache
def tokenizer() -> Tokenizer:
    return train_tokenizer([" ".join(WORDS * 3)], 290)


def texts(number: int, longest: int = 12) -> list[str]:
    """Documents of different lengths, each with its number in it."""
    return [
        f"<{n}> " + " ".join(WORDS[(n * 5 + k) % len(WORDS)] for k in range(mix(n) % longest)) for n in range(number)
    ]


def write_jsonl(path: Path, documents: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def write_parquet(path: Path, documents: list[Any], group: int = 7) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), path, row_group_size=group)
    return path


def config(path: Path | str, kind: str, **keys: Any) -> DataConfig:
    defaults = {"validation_fraction": 0.0, "streams": 4, "workers": 0, "shuffle_block": 5}
    return DataConfig.model_validate({"source": [{"kind": kind, "path": str(path)}], **defaults, **keys})


def plan(config: DataConfig, **keys: Any) -> Plan:
    defaults = {"length": 16, "mtp_depths": 2, "rows": 1, "data_rank": 0, "data_degree": 1, "seed": 0, "split": "train"}
    return Plan(config, **{**defaults, **keys})


def reader(config: DataConfig, state: dict[str, Any] | None = None, **keys: Any) -> RowReader:
    return RowReader(plan(config, **keys), tokenizer(), state)


def read(reader: RowReader) -> Rows:
    rows = reader.read()
    assert rows is not None
    return rows


def stream_tokens(
    documents: list[list[int]], stream: int, streams: int, seed: int, count: int
) -> tuple[list[int], list[int]]:
    """The first `count` tokens of a stream and the number of the document each is in, straight from the definition.

    documents: the token ids of each. With fewer documents than streams, a stream leaves out the head of its first one.
    """
    tokens: list[int] = []
    numbers: list[int] = []
    number = stream
    copies = -(-streams // len(documents))
    skip = (stream // len(documents)) / copies if copies > 1 else 0
    while len(tokens) < count:
        epoch, index = divmod(number, len(documents))
        ids = documents[permuted(index, len(documents), mix(mix(seed) + epoch))]
        if ids:
            ids, skip = ids[int(skip * len(ids)) :], 0
            tokens += [*ids, tokenizer().eos_id]
            numbers += [number] * (len(ids) + 1)
        number += streams
    return tokens, numbers
