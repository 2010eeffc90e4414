"""Where documents come from: one class for each kind of source, all reading records one by one.

An indexed source knows its number of records and reads any of them; a streamed source is read in order and can skip.
A record that cannot be read is returned with its problem, never raised: the reader counts and names it.
"""

import glob
import json
import mmap
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from titan_nemotron.data.config import SourceConfig
from titan_nemotron.data.hashing import name_hash, record_keys
from titan_nemotron.errors import UserError

# Tests, packages that distributions ship apart (Debian), and files made by the build: left out everywhere, so that
# one Python version gives one corpus however it was installed.
STDLIB_LEFT_OUT = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test",
    "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "distutils",
}  # fmt: skip


class Record(NamedTuple):
    """One document: its text, or its tokens when they were made before, or what is wrong with it."""

    text: str | None = None
    tokens: np.ndarray | None = None
    problem: str | None = None


class Source(Protocol):
    def keys(self, start: int, stop: int) -> np.ndarray:
        """uint64 hashes of the records' names: decide what is held out, the same on every machine."""

    def name(self, index: int) -> str:
        """What to call record `index` in a message: file:line."""


@runtime_checkable
class IndexedSource(Source, Protocol):
    num_records: int

    def record(self, index: int) -> Record: ...


@runtime_checkable
class StreamedSource(Source, Protocol):
    def records(self, start: int, cursor: Any = None) -> Iterator[Record]:
        """The records from number `start` on; `cursor`, when given, is what `cursor()` returned before that record."""

    def cursor(self) -> Any:
        """A JSON-able position before the next record of the running iterator, or None when the number is enough."""


def in_order(source: IndexedSource | StreamedSource, start: int = 0, cursor: Any = None) -> Iterator[Record]:
    """The records of a source of either kind from number `start` on."""
    if isinstance(source, IndexedSource):
        return (source.record(index) for index in range(start, source.num_records))
    return source.records(start, cursor)


def checked_text(value: Any, field: str) -> Record:
    """A record from a field's value; anything but a string of valid Unicode is a problem."""
    if not isinstance(value, str):
        return Record(problem=f"field {field!r} holds {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return Record(problem=f"field {field!r} is not valid Unicode (a lone surrogate)")
    return Record(text=value)


def field_text(fields: Any, field: str) -> Record:
    if not isinstance(fields, dict):
        return Record(problem=f"{type(fields).__name__} instead of an object with fields")
    if field not in fields:
        return Record(problem=f"no field {field!r} (fields: {', '.join(map(str, fields)) or 'none'})")
    return checked_text(fields[field], field)


class TextFiles:
    """Every file is a document."""

    def __init__(self, files: list[tuple[str, Path]]) -> None:
        self.files = files
        self.num_records = len(files)
        self._keys = np.array([name_hash(name) for name, _ in files], dtype=np.uint64)

    def keys(self, start: int, stop: int) -> np.ndarray:
        return self._keys[start:stop]

    def name(self, index: int) -> str:
        return str(self.files[index][1])

    def record(self, index: int) -> Record:
        try:
            return Record(text=self.files[index][1].read_bytes().decode("utf-8"))
        except UnicodeDecodeError as error:
            return Record(problem=f"not UTF-8 at byte {error.start}")
        except OSError as error:
            return Record(problem=error.strerror or str(error))


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

    def record(self, index: int) -> Record:
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


class StreamedDataset:
    """Anything the datasets library streams."""

    def __init__(self, dataset: Any, field: str, label: str) -> None:
        self.dataset, self.field, self.label = dataset, field, label
        self.hash = name_hash(label)
        self._beginning = dataset.state_dict()

    def keys(self, start: int, stop: int) -> np.ndarray:
        return record_keys(self.hash, start, stop)

    def name(self, index: int) -> str:
        return f"{self.label}:{index}"

    def cursor(self) -> Any:
        return self.dataset.state_dict()

    def records(self, start: int, cursor: Any = None) -> Iterator[Record]:
        self.dataset.load_state_dict(self._beginning if cursor is None else cursor)
        index = 0 if cursor is None else start
        try:
            for fields in self.dataset:
                if index >= start:
                    yield field_text(fields, self.field)
                index += 1
        except Exception as error:  # a file it cannot parse, a lost connection, ...: there is no way past it
            raise UserError(f"{self.name(index)}: datasets cannot read on: {_first_line(error)}") from error


class IndexedDataset:
    """A dataset written by `save_to_disk`."""

    def __init__(self, dataset: Any, field: str, label: str) -> None:
        self.dataset, self.field, self.label = dataset, field, label
        self.hash = name_hash(label)
        self.num_records = len(dataset)

    def keys(self, start: int, stop: int) -> np.ndarray:
        return record_keys(self.hash, start, stop)

    def name(self, index: int) -> str:
        return f"{self.label}:{index}"

    def record(self, index: int) -> Record:
        return field_text(self.dataset[index], self.field)


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


def standard_library(where: str) -> list[tuple[str, Path]]:
    """The .py files of the running Python's standard library that every installation has, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_LEFT_OUT]
        for path in (Path(folder, name) for name in names):
            # _sysconfigdata describes the build, not Python
            if path.suffix == ".py" and not path.name.startswith("_sysconfigdata") and not path.is_symlink():
                files.append((path.relative_to(root).as_posix(), path))
    if not files:
        raise UserError(
            f'{where} kind = "stdlib": {root} has no .py files; name other text with kind = "text" and path = ...'
        )
    return sorted(files)


def open_source(config: SourceConfig, where: str = "[[data.source]]") -> IndexedSource | StreamedSource:
    """The source that a table describes; UserError when it cannot be read at all."""
    if config.kind == "stdlib":
        return TextFiles(standard_library(where))
    if config.path is None:
        raise UserError(f"{where} path: missing; a source of kind {config.kind!r} needs one")
    if config.kind == "shards":
        from titan_nemotron.data.shards import TokenShards

        return TokenShards(Path(config.path).expanduser(), where)
    if config.kind == "datasets":
        return _open_dataset(config, where)
    files = matching_files(config.path, where)
    if config.kind == "text":
        return TextFiles(files)
    if config.kind == "jsonl":
        return JsonLines(files, config.field, where)
    return ParquetRows(files, config.field, where)


def _open_dataset(config: SourceConfig, where: str) -> IndexedSource | StreamedSource:
    import datasets

    assert config.path is not None
    local = Path(config.path).expanduser()
    # A folder's place says nothing about what is in it: the same data set elsewhere has the same documents held out.
    label = "/".join(
        part for part in (local.name if local.exists() else config.path, config.subset, config.split) if part
    )
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            loaded = datasets.load_from_disk(str(local))
            if isinstance(loaded, datasets.DatasetDict):
                if config.split not in loaded:
                    raise UserError(f"{where} split = {config.split!r}: {local} has {', '.join(map(str, loaded))}")
                loaded = loaded[config.split]
            return IndexedDataset(loaded, config.field, label)
        files = str(Path(config.files).expanduser()) if config.files else None
        stream = datasets.load_dataset(config.path, config.subset, split=config.split, data_files=files, streaming=True)
    except UserError:
        raise
    except Exception as error:  # the library raises a dozen kinds: names not found, no network, unknown split, ...
        raise UserError(f"{where} path = {config.path!r}: datasets cannot load it: {_first_line(error)}") from error
    return StreamedDataset(stream, config.field, label)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
