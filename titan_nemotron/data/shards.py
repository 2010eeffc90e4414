"""Memory-mapped token shards: documents tokenised once, read in any order without a tokenizer.

A directory holds
    manifest.json        format, dtype, tokenizer hash, counts, shards
    tokenizer.json ...   the tokenizer itself
    N.tokens             all documents of shard N, one after the other, uint16 or uint32, little-endian, without end-of-document
    N.offsets            int64 [documents + 1], where each document starts
    N.keys               uint64 [documents], hash of each document's name, so that the same documents are held out as live
A record that was bad keeps its place as a document of no tokens, so that numbers and order equal the live source's.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_nemotron.data.records import IndexedSource, Record, StreamedSource, pieces
from titan_nemotron.data.tokenizer import Tokenizer
from titan_nemotron.errors import UserError

FORMAT = "titan_nemotron token shards"
VERSION = 1


class ShardWriter:
    """Writes a directory of shards under a temporary name; `finish` renames it into place.

    Raises UserError when the directory exists.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer, tokens_per_shard: int = 1 << 28) -> None:
        if directory.exists():
            raise UserError(f"output {directory}: exists already; remove it or name another directory")
        self.directory, self.tokenizer, self.tokens_per_shard = directory, tokenizer, tokens_per_shard
        self.partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
        self.partial.mkdir(parents=True)
        self.dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 1 << 16 else "<u4")
        self.shards: list[dict[str, Any]] = []
        self.num_documents = self.num_tokens = 0
        self._start_shard()

    def _start_shard(self) -> None:
        self._file = open(self.partial / f"{len(self.shards):05d}.tokens", "wb")  # noqa: SIM115  closed by _end_shard
        self._offsets: list[int] = [0]
        self._keys: list[int] = []

    def _end_shard(self) -> None:
        self._file.close()
        name = f"{len(self.shards):05d}"
        np.array(self._offsets, dtype="<i8").tofile(self.partial / f"{name}.offsets")
        np.array(self._keys, dtype="<u8").tofile(self.partial / f"{name}.keys")
        self.shards.append({"name": name, "documents": len(self._keys), "tokens": self._offsets[-1]})

    def add(self, array: np.ndarray, key: int) -> None:
        """Append a document's tokens; a shard that would grow beyond its size ends before it."""
        if self._keys and self._offsets[-1] + len(array) > self.tokens_per_shard:
            self._end_shard()
            self._start_shard()
        self._file.write(array.tobytes())
        self._offsets.append(self._offsets[-1] + len(array))
        self._keys.append(key)
        self.num_documents += 1
        self.num_tokens += len(array)

    def finish(self) -> None:
        """Close the last shard, write tokenizer and manifest, and give the directory its name."""
        self._end_shard()
        self.tokenizer.save(self.partial)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "tokenizer_hash": self.tokenizer.fingerprint,
            "vocabulary_size": self.tokenizer.vocabulary_size,
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "shards": self.shards,
        }
        (self.partial / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        try:
            self.partial.rename(self.directory)
        except OSError:
            self.abandon()
            raise UserError(f"output {self.directory}: was made by another process meanwhile") from None

    def abandon(self) -> None:
        """Remove what was written."""
        self._file.close()
        shutil.rmtree(self.partial, ignore_errors=True)


class TokenShards:
    """An indexed source over a directory of shards. UserError when it is not one, or incomplete."""

    def __init__(self, directory: Path, where: str = "[[data.source]]") -> None:
        self.directory = directory
        try:
            self.manifest = json.loads((directory / "manifest.json").read_text())
            if self.manifest["format"] != FORMAT or self.manifest["version"] != VERSION:
                raise ValueError(f"format {self.manifest['format']!r}, version {self.manifest['version']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where} path = {str(directory)!r}: not a directory of token shards ({error})") from None
        dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        self.tokenizer_hash: str = self.manifest["tokenizer_hash"]
        self._tokens = [self._map(shard, "tokens", dtype, shard["tokens"], where) for shard in self.manifest["shards"]]
        self._offsets = [
            self._map(shard, "offsets", "<i8", shard["documents"] + 1, where) for shard in self.manifest["shards"]
        ]
        self._keys = [self._map(shard, "keys", "<u8", shard["documents"], where) for shard in self.manifest["shards"]]
        self.first = np.concatenate([[0], np.cumsum([len(keys) for keys in self._keys])]).astype(np.int64)
        self.num_records = int(self.first[-1])

    def _map(self, shard: dict[str, Any], kind: str, dtype: Any, count: int, where: str) -> np.ndarray:
        path, dtype = self.directory / f"{shard['name']}.{kind}", np.dtype(dtype)
        size = path.stat().st_size if path.is_file() else -1
        if size != count * dtype.itemsize:
            found = "missing" if size < 0 else f"{size} bytes"
            raise UserError(
                f"{where} path: {path} is {found}, the manifest says {count * dtype.itemsize} bytes; write the shards again"
            )
        return np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype=dtype)

    def keys(self, start: int, stop: int) -> np.ndarray:
        parts = [np.zeros(0, dtype=np.uint64)]
        for number, keys in enumerate(self._keys):
            low, high = max(start, int(self.first[number])), min(stop, int(self.first[number + 1]))
            if low < high:
                parts.append(keys[low - int(self.first[number]) : high - int(self.first[number])])
        return np.concatenate(parts)

    def name(self, index: int) -> str:
        return f"{self.directory}:{index}"

    def record(self, index: int, piece: int = 0) -> Record:
        number = int(np.searchsorted(self.first, index, side="right")) - 1
        place = index - int(self.first[number])
        start, stop = self._offsets[number][place : place + 2]
        return Record(tokens=self._tokens[number][start:stop])


def write_shards(
    sources: list[IndexedSource | StreamedSource],
    tokenizer: Tokenizer,
    directory: Path,
    *,
    tokens_per_shard: int = 1 << 28,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Tokenise every record of the sources, in order, into `directory`; returns what was wrong with bad records, by name.

    progress(documents, tokens) is called after each batch of documents. UserError when every record is bad.
    """
    writer = ShardWriter(directory, tokenizer, tokens_per_shard)
    problems: list[str] = []
    try:
        batch: list[tuple[list[Record], int]] = []

        def flush() -> None:
            encoded = iter(tokenizer.encode([part.text or "" for parts, _ in batch for part in parts]))
            for parts, key in batch:
                tokens = [next(encoded) if part.tokens is None else part.tokens for part in parts]
                writer.add(np.concatenate([np.asarray(part, dtype=writer.dtype) for part in tokens]), key)
            batch.clear()
            if progress is not None:
                progress(writer.num_documents, writer.num_tokens)

        size = 0
        for source in sources:
            for index, parts in enumerate(_documents(source)):
                if parts[0].problem is not None:
                    problems.append(f"{source.name(index)}: {parts[0].problem}")
                batch.append((parts, int(source.keys(index, index + 1)[0])))
                size += sum(len(part.text or "") for part in parts)
                if len(batch) == 512 or size > 1 << 24:
                    flush()
                    size = 0
        flush()
        if writer.num_tokens == 0:
            raise UserError(f"the sources have no text{': ' + problems[0] if problems else ''}")
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return problems


def _documents(source: IndexedSource | StreamedSource) -> Iterator[list[Record]]:
    """Each document as its pieces, which are tokenised apart as they are when training reads them."""
    if isinstance(source, IndexedSource):
        return (list(pieces(source, index)) for index in range(source.num_records))
    return ([record] for record in source.records(0))
