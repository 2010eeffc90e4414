"""Records: what every source gives, and the two ways to read one.

An indexed source knows its number of records and reads any of them; a streamed source is read in order and can skip.
A record that cannot be read is returned with its problem, never raised: the reader counts and names it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np


class Record(NamedTuple):
    """One document, or one of its `pieces`: its text, or its tokens when they were made before, or what is wrong with it.

    name: what to call it in a message, where an order gives it.
    """

    text: str | None = None
    tokens: np.ndarray | None = None
    problem: str | None = None
    pieces: int = 1
    name: str = ""


class Source(Protocol):
    """Where documents come from: what both kinds below can say about their records."""

    def keys(self, start: int, stop: int) -> np.ndarray:
        """uint64 hashes of the records' names: decide what is held out, the same on every machine."""

    def name(self, index: int) -> str:
        """What to call record `index` in a message: file:line."""


@runtime_checkable
class IndexedSource(Source, Protocol):
    """A source that gives any record by its number."""

    num_records: int

    def record(self, index: int, piece: int = 0) -> Record:
        """Record `index`; of one in several pieces only that piece, or the last one when there are fewer."""


@runtime_checkable
class StreamedSource(Source, Protocol):
    """A source that can only be read from front to back."""

    def records(self, start: int, cursor: Any = None) -> Iterator[Record]:
        """The records from number `start` on; `cursor`, when given, is what `cursor()` returned before that record."""

    def cursor(self) -> Any:
        """A JSON-able position before the next record of the running iterator, or None when the number is enough."""


def in_order(source: IndexedSource | StreamedSource, start: int = 0, cursor: Any = None) -> Iterator[Record]:
    """The records of a source of either kind from number `start` on."""
    if isinstance(source, IndexedSource):
        return (_whole(list(pieces(source, index))) for index in range(start, source.num_records))
    return source.records(start, cursor)


def pieces(source: IndexedSource, index: int) -> Iterator[Record]:
    """All pieces of one record."""
    first = source.record(index)
    yield first
    for piece in range(1, first.pieces):
        yield source.record(index, piece)


def _whole(parts: list[Record]) -> Record:
    return parts[0] if len(parts) == 1 else Record(text="".join(part.text or "" for part in parts))


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
    """The text in a field of a record, or what is wrong with it."""
    if not isinstance(fields, dict):
        return Record(problem=f"{type(fields).__name__} instead of an object with fields")
    if field not in fields:
        return Record(problem=f"no field {field!r} (fields: {', '.join(map(str, fields)) or 'none'})")
    return checked_text(fields[field], field)
