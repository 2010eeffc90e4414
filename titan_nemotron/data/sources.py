"""Where documents come from: the source that a table describes."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titan_nemotron.data.config import SourceConfig
from titan_nemotron.data.files import JsonLines, ParquetRows, TextFiles, matching_files
from titan_nemotron.data.hashing import name_hash, record_keys
from titan_nemotron.data.records import IndexedSource, Record, StreamedSource, field_text
from titan_nemotron.errors import UserError

# Tests, packages that distributions ship apart (Debian), and files made by the build: left out everywhere, so that
# one Python version gives one corpus however it was installed.
STDLIB_LEFT_OUT = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test",
    "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "distutils",
}  # fmt: skip


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

    def record(self, index: int, piece: int = 0) -> Record:
        return field_text(self.dataset[index], self.field)


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
