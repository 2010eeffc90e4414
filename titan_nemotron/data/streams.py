"""Virtual streams: documents packed into rows that are the same for any number of ranks.

Document n belongs to stream n mod S; a stream packs its documents, each followed by the end-of-document token, into rows of
exactly L tokens; row g of the whole corpus is row g // S of stream g mod S; rank r of R reads the rows with g mod R == r.

Shapes: B rows, L positions, A tokens of look-ahead (1 + multi-token-prediction depths).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_nemotron.data.config import DataConfig
from titan_nemotron.data.order import NoMoreDocuments, Order, PermutedOrder, Selection, StreamedOrder
from titan_nemotron.data.records import IndexedSource, Record, StreamedSource
from titan_nemotron.data.sources import open_source
from titan_nemotron.data.tokenizer import Tokenizer
from titan_nemotron.errors import UserError

NO_DOCUMENT = -1  # layout.PADDING, without importing torch
Row = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, document ids, bytes of text: int32 [L+A] each


@dataclass
class Rows:
    """B packed rows and the streams' states behind them.

    tokens        [B, L+A] int32  the look-ahead continues the row's last document only
    document_ids  [B, L+A] int32  0, 1, 2, ... from left to right; -1 is padding
    target_bytes  bytes of text that the targets inside the L positions stand for; None when not known
    """

    tokens: np.ndarray
    document_ids: np.ndarray
    target_bytes: int | None
    states: dict[str, dict[str, Any]]


class Stream:
    """One virtual stream: where it is, and its next row.

    A document is read as parts: its pieces, then the end-of-document token. The position is (document, part, offset).
    """

    def __init__(self, number: int, stride: int, state: dict[str, Any], skip: float = 0.0) -> None:
        """state: of an earlier `state()`, or empty; skip: the fraction of its first document a new stream leaves out."""
        self.number, self.stride = number, stride
        self.rows: int = state.get("rows", 0)
        self.document: int = state.get("document", number)
        self.part: int = state.get("part", 0)
        self.offset: int = state.get("offset", 0)
        self.mark: Any = state.get("mark")
        self._skip = 0.0 if state else skip
        self._pieces: int | None = None  # of the open document
        self._parts: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}  # those in use

    def state(self, order: Order) -> dict[str, Any]:
        """JSON-able: rows given, position, and what helps the order to find the document."""
        mark = self.mark if self._pieces is not None else order.mark(self.document)
        state = {"rows": self.rows, "document": self.document, "part": self.part, "offset": self.offset}
        return state if mark is None else {**state, "mark": mark}

    def row(self, order: Order, encode: "Encoder", length: int, look_ahead: int) -> Row | None:
        """Tokens, document ids and bytes of the next row, int32 [L+A] each; None when no document is left."""
        row = encode.empty_row(length + look_ahead)
        filled = index = 0
        while filled < length and self._ready(order, encode):
            tokens, _ = part = self._load(self.part, order, encode)
            count = encode.copy(part, self.offset, row, filled, length, index)
            filled, self.offset = filled + count, self.offset + count
            if self.offset == len(tokens):
                del self._parts[self.part]
                self.part, self.offset = self.part + 1, 0
                if self._pieces is not None and self.part > self._pieces:
                    self._pieces, self.part, self.document = None, 0, self.document + self.stride
                    index += 1
        if filled == 0:
            return None
        if self._pieces is not None:  # the row's last document goes on
            offset = self.offset
            for number in range(self.part, self._pieces + 1):
                filled += encode.copy(self._load(number, order, encode), offset, row, filled, len(row[0]), index)
                offset = 0
                if filled == len(row[0]):
                    break
        self.rows += 1
        return row

    def _ready(self, order: Order, encode: "Encoder") -> bool:
        """Open a document if none is open; False when there is none."""
        while self._pieces is None:
            try:
                record, self.mark = order.document(self.document, self.part)
            except NoMoreDocuments:
                return False
            if record is None:
                self.document, self.part, self.offset = self.document + self.stride, 0, 0
                continue
            self._pieces = record.pieces
            if self._skip and record.pieces > 1:
                self.part = int(self._skip * record.pieces)
            else:
                tokens, _ = self._parts[min(self.part, record.pieces - 1)] = encode(record)
                self.offset = self.offset or int(self._skip * len(tokens))
            self._skip = 0.0
            if self.part > record.pieces or self.offset > len(self._load(self.part, order, encode)[0]):
                raise UserError(f"[data]: document {self.document} is shorter than at the checkpoint; restore the data")
        return True

    def _load(self, number: int, order: Order, encode: "Encoder") -> tuple[np.ndarray, np.ndarray | None]:
        if number not in self._parts:
            if number == self._pieces:
                self._parts[number] = encode.end
            else:
                record, _ = order.document(self.document, number)
                if record is None:
                    raise UserError(f"[data]: document {self.document} has changed while it was read; restore the data")
                self._parts[number] = encode(record)
        return self._parts[number]


class Encoder:
    """Tokens of a piece of a document, and the bytes each stands for."""

    def __init__(self, tokenizer: Tokenizer, exact_bytes: bool) -> None:
        """exact_bytes: count them also for a tokenizer that is not byte-level, at the price of slower encoding."""
        self.tokenizer, self.eos_id = tokenizer, tokenizer.eos_id
        self.end = np.array([tokenizer.eos_id], dtype=np.int32), np.zeros(1, dtype=np.int32)
        self.table = tokenizer.token_bytes
        self.exact = exact_bytes
        self.knows_bytes = exact_bytes or self.table is not None

    def empty_row(self, total: int) -> Row:
        """A row of padding alone."""
        return np.full(total, self.eos_id, np.int32), np.full(total, NO_DOCUMENT, np.int32), np.zeros(total, np.int32)

    def __call__(self, record: Record) -> tuple[np.ndarray, np.ndarray | None]:
        """Token ids and their bytes; None for bytes that are those of the table, or not known."""
        if record.tokens is not None:
            self.knows_bytes = self.table is not None
            return record.tokens, None
        if self.exact and self.table is None:
            return self.tokenizer.encode_with_bytes(record.text or "")
        return np.array(self.tokenizer.encode([record.text or ""])[0], dtype=np.int32), None

    def copy(
        self, part: tuple[np.ndarray, np.ndarray | None], offset: int, row: Row, start: int, stop: int, index: int
    ) -> int:
        """Fill start..stop of a row from a part as far as it goes; returns how many tokens that were."""
        tokens, sizes = part
        count = min(stop - start, len(tokens) - offset)
        here, there = slice(start, start + count), slice(offset, offset + count)
        row[0][here], row[1][here] = tokens[there], index
        if sizes is not None:
            row[2][here] = sizes[there]
        elif self.table is not None:
            row[2][here] = self.table[tokens[there]]
        return count


@dataclass(frozen=True)
class Plan:
    """Everything that decides which rows a rank reads; travels to the background process."""

    config: DataConfig
    length: int
    mtp_depths: int
    rows: int
    data_rank: int
    data_degree: int
    seed: int
    split: str

    @property
    def look_ahead(self) -> int:
        """Tokens that a row needs beyond its length: the label of its last position, at every depth."""
        return 1 + self.mtp_depths

    @property
    def streams(self) -> int:
        """Validation is one stream, read once from end to end, so that any number of rows is an unbiased sample."""
        return self.config.streams if self.split == "train" else 1


class RowReader:
    """The rows of one rank, B at a time, and the state of its streams."""

    def __init__(self, plan: Plan, tokenizer: Tokenizer, state: dict[str, Any] | None = None) -> None:
        self.plan = plan
        config = plan.config
        table = "[[data.source]]"
        configs = config.source
        if plan.split == "validation" and config.validation_source:
            table, configs = "[[data.validation_source]]", config.validation_source
        sources = [open_source(source, table) for source in configs]
        for source in sources:
            if getattr(source, "tokenizer_hash", tokenizer.fingerprint) != tokenizer.fingerprint:
                raise UserError(
                    f"{table}: the token shards were made with another tokenizer; set [data] tokenizer to their directory"
                )
        entries = (state or {}).get("streams", {})
        every = range(plan.streams)
        owned = [number for number in every if plan.split != "train" or number % plan.data_degree == plan.data_rank]
        num_records = sum(getattr(source, "num_records", plan.streams) for source in sources)
        self.streams = {
            number: Stream(number, plan.streams, entries.get(str(number), {}), _skip(number, plan.streams, num_records))
            for number in owned
        }
        self.order = self._make_order(sources)
        self.order.check()
        self.encode = Encoder(tokenizer, exact_bytes=plan.split != "train")
        rows_done = sum(entry["rows"] for entry in entries.values())
        self.next_row = rows_done + (plan.data_rank - rows_done) % plan.data_degree

    def _make_order(self, sources: list[IndexedSource | StreamedSource]) -> Order:
        plan, config = self.plan, self.plan.config
        selection, endless = Selection(plan.split, config.held_out), plan.split == "train"
        indexed = [source for source in sources if isinstance(source, IndexedSource)]
        if len(indexed) == len(sources):
            return PermutedOrder(indexed, selection, plan.seed, endless=endless)
        marks = [stream.mark for stream in self.streams.values()]
        return StreamedOrder(
            sources,
            selection,
            plan.seed,
            endless=endless,
            block=config.shuffle_block,
            streams=plan.streams,
            starts={number: stream.document for number, stream in self.streams.items()},
            mark=None if None in marks else min(marks, key=lambda mark: mark["number"]),
        )

    def read(self) -> Rows | None:
        """The next microbatch; None when validation has no document left.

        All ranks get the same number of microbatches: rows behind the last document are padding.
        """
        plan, rows = self.plan, []
        touched = set()
        if plan.split == "train":
            for _ in range(plan.rows):
                number = self.next_row % plan.streams
                rows.append(self._row(number))
                touched.add(number)
                self.next_row += plan.data_degree
        else:
            group = [self._row(0) for _ in range(plan.rows * plan.data_degree)]
            if group[0] is None:
                return None
            rows = group[plan.data_rank :: plan.data_degree]
            touched.add(0)
        empty = self.encode.empty_row(plan.length + plan.look_ahead)
        tokens, ids, sizes = (np.stack(parts) for parts in zip(*(row or empty for row in rows), strict=True))
        is_target = (ids[:, 1 : plan.length + 1] == ids[:, : plan.length]) & (ids[:, : plan.length] >= 0)
        target_bytes = int(sizes[:, 1 : plan.length + 1][is_target].sum()) if self.encode.knows_bytes else None
        states = {str(number): self.streams[number].state(self.order) for number in touched}
        return Rows(tokens, ids, target_bytes, states)

    def _row(self, number: int) -> Row | None:
        return self.streams[number].row(self.order, self.encode, self.plan.length, self.plan.look_ahead)


def _skip(stream: int, streams: int, documents: int) -> float:
    """With fewer documents than streams, several streams begin with the same one: they start evenly spread over it."""
    return (stream // documents) / -(-streams // documents) if 0 < documents < streams else 0.0
