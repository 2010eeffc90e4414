"""The order of documents: which record is document n of the endless sequence that is dealt to the streams."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import numpy as np

from titan_nemotron.data.config import DataConfig
from titan_nemotron.data.hashing import held_out, mix, permuted
from titan_nemotron.data.records import IndexedSource, Record, StreamedSource, in_order
from titan_nemotron.data.sources import open_source
from titan_nemotron.errors import UserError

MAX_NAMED = 20  # bad records named one by one; the others are only counted


class NoMoreDocuments(Exception):
    """The end of a finite order (validation reads its documents once)."""


@dataclass
class BadRecords:
    """How many records could not be read (each time one is met), and the first of them by name.

    The counts of all ranks add up: one of them counts each bad record.
    """

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, name: str, problem: str) -> None:
        """Count a bad record, and name it if it is among the first few."""
        self.count += 1
        line = f"{name}: {problem}"
        if len(self.named) < MAX_NAMED and line not in self.named:
            self.named.append(line)

    @classmethod
    def joined(cls, parts: Iterable["BadRecords"]) -> "BadRecords":
        """Those of several orders, in one that further records do not change."""
        found = list(parts)
        named = [line for part in found for line in part.named]
        return cls(sum(part.count for part in found), named[:MAX_NAMED])


@dataclass(frozen=True)
class Selection:
    """Which documents an order holds: all, the training part or the held-out part of the sources."""

    split: str
    fraction: float

    def takes(self, keys: np.ndarray) -> np.ndarray:
        """Which of the keys belong to this split."""
        if self.fraction == 0:
            return np.ones(len(keys), dtype=bool)
        return held_out(keys, self.fraction) == (self.split == "validation")


class Order(Protocol):
    """Documents of one epoch after another, by number: what shuffles reads through this."""

    bad: BadRecords
    num_documents: int | None  # of one epoch; None when only reading to the end would tell

    def document(self, number: int, piece: int = 0) -> tuple[Record | None, Any]:
        """A piece of document `number`, None when it is held out, bad or empty, and its mark.

        For one stream, numbers only grow.
        """

    def mark(self, number: int) -> Any:
        """JSON-able help to find document `number`, not asked for yet, after a resume; None when the number is enough."""

    def check(self) -> None:
        """UserError unless some document has text."""


class PermutedOrder:
    """All sources are indexed: document n is record permutation(seed, n // N)[n % N] of their N records.

    Held-out, bad and empty records keep their number and give nothing, so that no rank has to read what another owns.
    """

    def __init__(self, sources: list[IndexedSource], selection: Selection, seed: int, *, endless: bool) -> None:
        self.sources, self.selection, self.seed, self.endless = sources, selection, seed, endless
        self.bad = BadRecords()
        self.first = np.concatenate([[0], np.cumsum([source.num_records for source in sources])])
        size = int(self.first[-1])
        self._places: np.ndarray | None = None
        if not endless:  # few documents: find them once instead of passing over all others
            taken = [np.flatnonzero(selection.takes(source.keys(0, source.num_records))) for source in sources]
            self._places = np.concatenate([places + start for places, start in zip(taken, self.first, strict=False)])
            size = len(self._places)
        self._size = size
        self.num_documents: int | None = size

    def document(self, number: int, piece: int = 0) -> tuple[Record | None, None]:
        epoch, index = divmod(number, max(1, self._size))
        if self._size == 0 or (epoch > 0 and not self.endless):
            raise NoMoreDocuments
        place = permuted(index, self._size, mix(mix(self.seed) + epoch))
        return self._read(int(self._places[place]) if self._places is not None else place, piece), None

    def _read(self, place: int, piece: int = 0) -> Record | None:
        which = int(np.searchsorted(self.first, place, side="right")) - 1
        source, index = self.sources[which], place - int(self.first[which])
        if not self.selection.takes(source.keys(index, index + 1))[0]:
            return None
        record = source.record(index, piece)
        if record.problem is not None:
            self.bad.add(source.name(index), record.problem)
            return None
        return record._replace(name=source.name(index)) if _has_text(record) else None

    def mark(self, number: int) -> None:
        return None

    def check(self) -> None:
        """Reads until the first document that has text."""
        for place in self._places if self._places is not None else range(self._size):
            if self._read(int(place)) is not None:
                self.bad = BadRecords()
                return
        raise nothing_to_read(self.selection, int(self.first[-1]), self.bad)


class StreamedOrder:
    """Some source can only be read in order: documents are numbered as they are read, epoch after epoch.

    Each source is read in blocks of records that are permuted by (seed, epoch, source, block); bad, empty and held-out
    records get no number. Every rank reads everything and keeps its own streams' documents until they are asked for; a bad
    record is counted by the rank that gets the next document.
    """

    num_documents: int | None = None

    def __init__(
        self,
        sources: list[IndexedSource | StreamedSource],
        selection: Selection,
        seed: int,
        *,
        endless: bool,
        block: int,
        streams: int,
        starts: dict[int, int],
        mark: dict[str, Any] | None = None,
    ) -> None:
        """starts: for each stream this reader owns, the first document it will ask for; mark: where to begin to read."""
        self.sources, self.selection, self.seed, self.endless, self.block = sources, selection, seed, endless, block
        self.streams, self.starts = streams, dict(starts)
        self.bad, self._met = BadRecords(), BadRecords()  # those counted here, and all
        self._waiting: dict[int, tuple[Record, dict[str, Any]]] = {}
        self._blocks = self._read_blocks(mark or {"number": 0, "epoch": 0, "source": 0, "record": 0, "cursor": None})
        self._last_mark = mark
        self._next = mark["number"] if mark else 0
        self._ended = False

    def document(self, number: int, piece: int = 0) -> tuple[Record | None, Any]:
        while number not in self._waiting:
            self._read_block()
        stream = number % self.streams
        for passed_over in range(self.starts[stream], number, self.streams):  # a resumed stream had them already
            self._waiting.pop(passed_over, None)
        self.starts[stream] = number + self.streams
        return self._waiting.pop(number)

    def mark(self, number: int) -> Any:
        """The block that holds document `number`, or the last block read when it lies behind that."""
        return self._waiting[number][1] if number in self._waiting else self._last_mark

    def _read_block(self) -> None:
        if self._ended:
            raise NoMoreDocuments
        try:
            mark, records = next(self._blocks)
        except StopIteration:
            self._ended = True
            raise NoMoreDocuments from None
        self._last_mark = mark
        for record in records:
            stream = self._next % self.streams
            if self._next >= self.starts.get(stream, self._next + 1):
                self._waiting[self._next] = (record, mark)
            self._next += 1

    def _read_blocks(self, mark: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Record]]]:
        epoch, found = mark["epoch"], mark["number"] > 0
        num_records = 0
        while True:
            for which in range(mark["source"], len(self.sources)):
                source, index, cursor = self.sources[which], mark["record"], mark["cursor"]
                records = in_order(source, index, cursor)
                while block := list(islice(records, self.block)):
                    here = {"number": self._next, "epoch": epoch, "source": which, "record": index, "cursor": cursor}
                    yield here, self._keep(which, index, block, epoch)
                    found = found or self._next > here["number"]
                    index += len(block)
                    cursor = source.cursor() if isinstance(source, StreamedSource) else None
                num_records += index
                mark = {**mark, "record": 0, "cursor": None}
            if not found:
                raise nothing_to_read(self.selection, num_records, self._met)
            if not self.endless:
                return
            epoch, mark = epoch + 1, {**mark, "source": 0}

    def _keep(self, which: int, start: int, block: list[Record], epoch: int) -> list[Record]:
        source, size = self.sources[which], len(block)
        taken = self.selection.takes(source.keys(start, start + size))
        key = mix(mix(mix(mix(self.seed) + epoch) + which) + start)
        kept: list[Record] = []
        for place in range(size):
            index = permuted(place, size, key) if self.block > 1 else place
            record = block[index]
            if not taken[index]:
                continue
            if record.problem is not None:
                self._met.add(source.name(start + index), record.problem)
                if (self._next + len(kept)) % self.streams in self.starts:
                    self.bad.add(source.name(start + index), record.problem)
            elif _has_text(record):
                kept.append(record._replace(name=source.name(start + index)))
        return kept

    def check(self) -> None:
        """Reads until the first document that has text, and keeps it."""
        while self._next == 0:
            self._read_block()


def _has_text(record: Record) -> bool:
    return record.pieces > 1 or bool(record.text if record.tokens is None else len(record.tokens))


def nothing_to_read(selection: Selection, num_records: int, bad: BadRecords) -> UserError:
    """Why a selection has no document to give, as the error to raise."""
    which = "[[data.source]]"
    if num_records == 0:
        return UserError(f"{which}: the sources hold no documents")
    if bad.count:
        return UserError(
            f"{which}: none of {num_records} records can be used, {bad.count} are bad; the first is {bad.named[0]}"
        )
    if selection.split == "validation" and selection.fraction:
        return UserError(
            f"[data] validation_fraction = {selection.fraction}: holds out none of {num_records} documents; "
            "raise it, name a [[data.validation_source]], or set it to 0 to train without"
        )
    return UserError(
        f"{which}: none of {num_records} documents has any text to {'train on' if selection.split == 'train' else 'validate on'}"
    )


def training_texts(config: DataConfig) -> list[str]:
    """The first training documents of the sources, up to [data] tokenizer_bytes: what a tokenizer is trained on."""
    selection, bad = Selection("train", config.held_out), BadRecords()
    texts: list[str] = []
    size = num_records = 0
    for source in (open_source(table) for table in config.source):
        for index, record in enumerate(in_order(source)):
            num_records += 1
            if record.tokens is not None:
                raise UserError(
                    "[data] tokenizer: token shards hold no text to train one on; set it to the shards' directory"
                )
            if record.problem is not None:
                bad.add(source.name(index), record.problem)
            elif record.text and selection.takes(source.keys(index, index + 1))[0]:
                texts.append(record.text)
                size += len(record.text.encode())
                if size >= config.tokenizer_bytes:
                    return texts
    if not texts:
        raise nothing_to_read(selection, num_records, bad)
    return texts
