"""The rows of one rank: every stream it owns, B rows at a time.

Document n of an order belongs to stream n mod S; row g of the whole corpus is row g // S of stream g mod S; rank r of R reads
the rows with g mod R == r. So any number of ranks sees the same rows in the same order.

Shapes: B rows, L positions, A tokens of look-ahead (1 + multi-token-prediction depths).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_nemotron.data.config import DataConfig, SourceConfig
from titan_nemotron.data.encoder import Encoder, Row
from titan_nemotron.data.feed import Feed
from titan_nemotron.data.order import BadRecords, Order, PermutedOrder, Selection, StreamedOrder
from titan_nemotron.data.packed import PackedStream
from titan_nemotron.data.records import IndexedSource, StreamedSource
from titan_nemotron.data.sources import open_source
from titan_nemotron.data.streams import Stream
from titan_nemotron.data.tokenizer import Tokenizer
from titan_nemotron.errors import UserError


@dataclass
class Rows:
    """B packed rows and the streams' states behind them.

    tokens        [B, L+A] int32  the look-ahead continues the row's last document only
    document_ids  [B, L+A] int32  0, 1, 2, ... from left to right; -1 is padding
    scored        [B, L+A] bool   tokens that count as a target
    target_bytes  bytes of text that the targets inside the L positions stand for; None when not known
    """

    tokens: np.ndarray
    document_ids: np.ndarray
    scored: np.ndarray
    target_bytes: int | None
    states: dict[str, dict[str, Any]]


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
        self.plan, self.tokenizer = plan, tokenizer
        entries: dict[str, dict[str, Any]] = (state or {}).get("streams", {})
        every = range(plan.streams)
        owned = [number for number in every if plan.split != "train" or number % plan.data_degree == plan.data_rank]
        states = {number: entries.get(str(number), {}) for number in owned}
        groups, weights, num_records = self._open_sources()
        self.orders = [self._make_order(place, group, states) for place, group in enumerate(groups)]
        for order in self.orders:
            order.check()
        self.streams = {
            number: self._make_stream(number, weights, states[number], _skip(number, plan.streams, num_records))
            for number in owned
        }
        self.encode = Encoder(tokenizer, exact_bytes=plan.split != "train")
        rows_done = sum(entry["rows"] for entry in entries.values())
        self.next_row = rows_done + (plan.data_rank - rows_done) % plan.data_degree

    @property
    def bad(self) -> BadRecords:
        """The bad records of all orders, as they are now."""
        return BadRecords.joined(order.bad for order in self.orders)

    @property
    def num_documents(self) -> int | None:
        """Of one epoch of all orders; None when only reading to the end would tell."""
        numbers = [order.num_documents for order in self.orders]
        return None if None in numbers else sum(number or 0 for number in numbers)

    def _open_sources(self) -> tuple[list[list[IndexedSource | StreamedSource]], list[float], int]:
        """The sources by order, the orders' weights, and the number of records.

        Sources without weights are one order, in which each has its share of the records; with weights each is an order.
        """
        config, table = self.plan.config, "[[data.source]]"
        configs: list[SourceConfig] = config.source
        if self.plan.split == "validation" and config.validation_source:
            table, configs = "[[data.validation_source]]", config.validation_source
        sources = [open_source(source, table) for source in configs]
        for source in sources:
            if getattr(source, "tokenizer_hash", self.tokenizer.fingerprint) != self.tokenizer.fingerprint:
                raise UserError(
                    f"{table}: the token shards were made with another tokenizer; set [data] tokenizer to their directory"
                )
        num_records = sum(getattr(source, "num_records", self.plan.streams) for source in sources)
        if configs[0].weight is None:
            return [sources], [1.0], num_records
        return [[source] for source in sources], [source.weight or 0.0 for source in configs], num_records

    def _make_order(
        self, place: int, sources: list[IndexedSource | StreamedSource], states: dict[int, dict[str, Any]]
    ) -> Order:
        plan, config = self.plan, self.plan.config
        selection, endless = Selection(plan.split, config.held_out), plan.split == "train"
        indexed = [source for source in sources if isinstance(source, IndexedSource)]
        if len(indexed) == len(sources):
            return PermutedOrder(indexed, selection, plan.seed, endless=endless)
        marks: list[Any] = [state["marks"][place] if "marks" in state else None for state in states.values()]
        return StreamedOrder(
            sources,
            selection,
            plan.seed,
            endless=endless,
            block=config.shuffle_block,
            streams=plan.streams,
            starts={number: state["first"][place] if state else number for number, state in states.items()},
            mark=None if None in marks else min(marks, key=lambda mark: mark["number"]),
        )

    def _make_stream(
        self, number: int, weights: list[float], state: dict[str, Any], skip: float
    ) -> Stream | PackedStream:
        plan = self.plan
        feed = Feed(self.orders, weights, number, plan.streams, state)
        if plan.config.packing.kind == "best_fit":
            return PackedStream(feed, plan.config.packing, plan.length, number, plan.seed, state)
        return Stream(feed, plan.length, state, skip)

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
        tokens, ids, sizes, scored = (np.stack(parts) for parts in zip(*(row or empty for row in rows), strict=True))
        is_target = (ids[:, 1 : plan.length + 1] == ids[:, : plan.length]) & (ids[:, : plan.length] >= 0)
        is_target &= scored[:, 1 : plan.length + 1]
        target_bytes = int(sizes[:, 1 : plan.length + 1][is_target].sum()) if self.encode.knows_bytes else None
        return Rows(
            tokens, ids, scored, target_bytes, {str(number): self.streams[number].state() for number in touched}
        )

    def _row(self, number: int) -> Row | None:
        return self.streams[number].row(self.encode, self.plan.look_ahead)


def _skip(stream: int, streams: int, documents: int) -> float:
    """With fewer documents than streams, several streams begin with the same one: they start evenly spread over it."""
    return (stream // documents) / -(-streams // documents) if 0 < documents < streams else 0.0
