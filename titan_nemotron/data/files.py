"""Documents in local files: text, JSON lines and parquet."""

import codecs
import glob
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titan_nemotron.data.hashing import name_hash, record_keys
from titan_nemotron.data.records import Record, checked_text, field_text
from titan_nemotron.errors import UserError

PIECE = 1 << 16  # bytes; longer text files are read and tokenised piece by piece, so that a row comes soon


def matching_files(pattern: str, where: str) -> list[tuple[str, Path]]:
    """Files of a glob, sorted, each with its name below the part of the pattern that has no wildcard."""
    parts = Path(pattern).expanduser().parts
    fixed = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    root = Path(*parts[:fixed])
    found = [Path(path) for path in glob.glob(str(Path(*parts)), recursive=True)]
    files = sorted((path.relative_to(root).as_posix(), path) for path in found if path.is_file())
    if not files:  # the table has been checked, so they have gone since
        raise UserError(f"{where} path = {pattern!r}: no file matches any more")
    return files


class TextFiles:
    """Every file is a document, however long: what lies in memory is a piece of it.

    Piece k starts behind the first line end from byte k * PIECE on, or at the next character where no line ends nearby.
    """

    def __init__(self, files: list[tuple[str, Path]]) -> None:
        self.files = files
        self._checked: set[int] = set()  # long files known to be UTF-8 from end to end
        self.num_records = len(files)
        self._keys = np.array([name_hash(name) for name, _ in files], dtype=np.uint64)

    def keys(self, start: int, stop: int) -> np.ndarray:
        return self._keys[start:stop]

    def name(self, index: int) -> str:
        return str(self.files[index][1])

    def record(self, index: int, piece: int = 0) -> Record:
        try:
            with open(self.files[index][1], "rb") as file:
                size = os.fstat(file.fileno()).st_size
                pieces = max(1, -(-size // PIECE))
                if pieces == 1:
                    return Record(text=file.read().decode("utf-8"))
                if index not in self._checked and (problem := _not_utf8(file)):
                    return Record(problem=problem)
                self._checked.add(index)
                piece = min(piece, pieces - 1)
                start, stop = _piece_start(file, piece, size), _piece_start(file, piece + 1, size)
                file.seek(start)
                return Record(text=file.read(stop - start).decode("utf-8"), pieces=pieces)
        except UnicodeDecodeError as error:
            return Record(problem=f"not UTF-8 at byte {error.start}")
        except OSError as error:
            return Record(problem=error.strerror or str(error))


def _not_utf8(file: BinaryIO) -> str | None:
    """Where a file is not UTF-8, reading it once from end to end."""
    decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        data = file.read(PIECE)
        held_back = len(decoder.getstate()[0])
        try:
            decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            return f"not UTF-8 at byte {start - held_back + error.start}"
        if not data:
            return None
        start += len(data)


def _piece_start(file: BinaryIO, piece: int, size: int) -> int:
    if piece == 0:
        return 0
    start = min(piece * PIECE, size)
    file.seek(start)
    near = file.read(PIECE // 4)
    line_end = near.find(b"\n")
    if line_end >= 0:
        return start + line_end + 1
    return start + next((skip for skip, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), len(near[:4]))


class JsonLines:
    """Every line of a file is a document; lines are found once, then read in any order."""

    def __init__(self, files: list[tuple[str, Path]], field: str, where: str) -> None:
        self.files, self.field = files, field
        self.hashes = [name_hash(name) for name, _ in files]
        self.maps: list[mmap.mmap | bytes] = []
        self.ends: list[np.ndarray] = []
        for _, path in files:
            with open(path, "rb") as file:
                empty = path.stat().st_size == 0  # an empty file cannot be mapped
                data = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if data[:2] == b"\x1f\x8b" or data[:4] == b"\x28\xb5\x2f\xfd":
                raise UserError(
                    f'{where} path: {path} is compressed; unpack it, or use kind = "datasets", path = "json", files = ...'
                )
            self.maps.append(data)
            self.ends.append(_line_ends(data))
        self.first = np.concatenate([[0], np.cumsum([len(ends) for ends in self.ends])])
        self.num_records = int(self.first[-1])

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self.first, index, side="right")) - 1
        return file, index - int(self.first[file])

    def keys(self, start: int, stop: int) -> np.ndarray:
        return _keys_of_files(self.hashes, self.first, start, stop)

    def name(self, index: int) -> str:
        file, line = self._place(index)
        return f"{self.files[file][1]}:{line + 1}"

    def record(self, index: int, piece: int = 0) -> Record:
        file, line = self._place(index)
        ends = self.ends[file]
        data = self.maps[file][int(ends[line - 1]) if line else 0 : int(ends[line])]
        if not data.strip():
            return Record(text="")
        try:
            return field_text(json.loads(data.decode("utf-8")), self.field)
        except UnicodeDecodeError as error:
            return Record(problem=f"not UTF-8 at byte {error.start} of the line")
        except (ValueError, RecursionError) as error:
            return Record(problem=f"not JSON: {error}")


def _line_ends(data: mmap.mmap | bytes) -> np.ndarray:
    """Offsets just behind each line; int64."""
    ends, block = [], 1 << 24
    for start in range(0, len(data), block):
        piece = np.frombuffer(data[start : start + block], dtype=np.uint8)
        ends.append(np.flatnonzero(piece == 10) + (start + 1))
    found = np.concatenate(ends) if ends else np.zeros(0, dtype=np.int64)
    if len(data) and (len(found) == 0 or found[-1] != len(data)):
        found = np.append(found, len(data))  # the last line has no newline
    return found.astype(np.int64)


def _keys_of_files(hashes: list[int], first: np.ndarray, start: int, stop: int) -> np.ndarray:
    parts = [np.zeros(0, dtype=np.uint64)]
    for file, file_hash in enumerate(hashes):
        low, high = max(start, int(first[file])), min(stop, int(first[file + 1]))
        if low < high:
            parts.append(record_keys(file_hash, low - int(first[file]), high - int(first[file])))
    return np.concatenate(parts)


class ParquetRows:
    """Every row is a document, read row group by row group."""

    def __init__(self, files: list[tuple[str, Path]], field: str, where: str) -> None:
        import pyarrow.parquet

        self.files, self.field = files, field
        self.hashes = [name_hash(name) for name, _ in files]
        counts = []
        for _, path in files:
            try:
                with pyarrow.parquet.ParquetFile(path) as parquet:
                    counts.append(parquet.metadata.num_rows)
                    names = parquet.schema_arrow.names
            except (OSError, pyarrow.ArrowException) as error:
                raise UserError(f"{where} path: {path} is not a readable parquet file: {error}") from None
            if field not in names:
                raise UserError(f"{where} field = {field!r}: {path} has no such column; it has {', '.join(names)}")
        self.first = np.concatenate([[0], np.cumsum(counts)])

    def keys(self, start: int, stop: int) -> np.ndarray:
        return _keys_of_files(self.hashes, self.first, start, stop)

    def name(self, index: int) -> str:
        file = int(np.searchsorted(self.first, index, side="right")) - 1
        return f"{self.files[file][1]}:{index - int(self.first[file])}"

    def cursor(self) -> None:
        return None  # the metadata make skipping quick

    def records(self, start: int, cursor: Any = None) -> Iterator[Record]:
        import pyarrow.parquet

        for file, (_, path) in enumerate(self.files):
            if start >= self.first[file + 1]:
                continue
            skip = max(0, start - int(self.first[file]))
            with pyarrow.parquet.ParquetFile(path) as parquet:
                for group in range(parquet.num_row_groups):
                    rows = parquet.metadata.row_group(group).num_rows
                    if skip >= rows:
                        skip -= rows
                        continue
                    for batch in parquet.iter_batches(batch_size=256, row_groups=[group], columns=[self.field]):
                        column = batch.column(0)
                        for value in column.slice(min(skip, len(column))):
                            yield checked_text(value.as_py(), self.field)
                        skip = max(0, skip - len(column))
