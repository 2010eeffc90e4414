"""A stream whose rows hold whole documents, packed by best fit.

Shapes: L positions, A tokens of look-ahead.
"""

from collections import deque
from typing import Any, NamedTuple

from titan_nemotron.data.config import PackingConfig
from titan_nemotron.data.encoder import Encoder, Part, Row
from titan_nemotron.data.feed import Document, Feed
from titan_nemotron.data.hashing import mix, prompt_key
from titan_nemotron.data.packing import BestFitPacker, Shuffle
from titan_nemotron.data.records import Record
from titan_nemotron.errors import UserError

REFUSED = 10_000  # documents refused one after another, over a whole epoch at least, that end the run


class Held(NamedTuple):
    """A document in an unfinished row, or a piece of one that was split: where it comes from, and its tokens."""

    order: int
    number: int
    piece: int
    mark: Any
    part: Part


class PackedStream:
    """One virtual stream: documents from a feed -> packer -> shuffle of finished rows -> rows, one at a time.

    A document longer than a row is refused, counted and named, or split, as [data.packing] says. Of the documents in
    unfinished rows the tokens are kept; a resume reads them again by their numbers.
    """

    def __init__(
        self, feed: Feed, config: PackingConfig, length: int, number: int, seed: int, state: dict[str, Any]
    ) -> None:
        """state: of an earlier `state()`, or empty."""
        self.feed, self.config, self.length = feed, config, length
        self.rows: int = state.get("rows", 0)
        self.packer = BestFitPacker(
            length,
            pool=config.pool,
            window=config.window,
            tolerance=config.tolerance,
            state=state.get("packer"),
        )
        self.shuffle = Shuffle(config.shuffle_rows, mix(mix(seed) + number), state.get("shuffle"))
        self._ready: deque[list[int]] = deque(state.get("ready", []))
        self._next: int = state.get("next_document", 0)
        self._to_read: list[list[int]] = state.get("held", [])  # document, order, number, piece
        self._held: dict[int, Held] = {}
        self._refused = 0

    def row(self, encode: Encoder, look_ahead: int) -> Row | None:
        """The next row [L+A], the look-ahead empty; None when the feed has ended and all rows are given."""
        self._read_again(encode)
        while not self._ready:
            document = self.feed.take()
            if document is None:
                finished = [placed.documents for placed in self.packer.flush()]
                shuffled = [row for row in map(self.shuffle.push, finished) if row is not None]
                self._ready.extend(shuffled + self.shuffle.flush())
                if not self._ready:
                    return None
                break
            for piece, part in enumerate(self._parts(document, encode)):
                self._held[self._next] = Held(document.order, document.number, piece, document.mark, part)
                self._next += 1
                prompt = part.tokens if part.scored is None else part.tokens[: part.prompt]
                for placed in self.packer.add(self._next - 1, len(part.tokens), prompt_key(prompt)):
                    if (row := self.shuffle.push(placed.documents)) is not None:
                        self._ready.append(row)
        return self._filled(self._ready.popleft(), encode, look_ahead)

    def _filled(self, documents: list[int], encode: Encoder, look_ahead: int) -> Row:
        row, start = encode.empty_row(self.length + look_ahead), 0
        for index, document in enumerate(documents):
            start += encode.copy(self._held.pop(document).part, 0, row, start, self.length, index)
        self.rows += 1
        return row

    def _parts(self, document: Document, encode: Encoder) -> list[Part]:
        """The document as one part, or as several of at most a row; none for one that is refused."""
        part = self._encoded(document.order, document.number, document.record, encode)
        num_tokens = len(part.tokens)
        if num_tokens <= self.length or self.config.too_long == "split":
            self._refused = 0
            return split(part, self.length)
        self._refuse(document, f"its {num_tokens:,} tokens do not fit into a row of {self.length:,}")
        return []

    def _encoded(self, order: int, number: int, record: Record, encode: Encoder) -> Part:
        records = [record]
        for piece in range(1, record.pieces):
            more, _ = self.feed.piece(order, number, piece)
            assert more is not None, "a document that has a first piece has the others"
            records.append(more)
        return encode.whole(records)

    def _refuse(self, document: Document, problem: str) -> None:
        order = self.feed.orders[document.order]
        order.bad.add(document.record.name or f"document {document.number}", problem)
        self._refused += 1
        if self._refused >= max(REFUSED, order.num_documents or 0):
            raise UserError(
                f"[data]: {self._refused:,} documents one after another cannot be used; the last is "
                f"{document.record.name}: {problem}"
            )

    def _read_again(self, encode: Encoder) -> None:
        """After a resume: the documents of unfinished rows, each once, in the order of their numbers."""
        parts: dict[tuple[int, int], tuple[list[Part], Any]] = {}
        for document, order, number, piece in sorted(self._to_read, key=lambda held: held[1:]):
            if (order, number) not in parts:
                record, mark = self.feed.piece(order, number)
                if record is None:
                    raise UserError(f"[data]: document {number} is not what it was at the checkpoint; restore the data")
                parts = {(order, number): (split(self._encoded(order, number, record, encode), self.length), mark)}
            pieces, mark = parts[order, number]
            if piece >= len(pieces):
                raise UserError(f"[data]: document {number} is shorter than at the checkpoint; restore the data")
            self._held[document] = Held(order, number, piece, mark, pieces[piece])
        self._to_read = []

    def state(self) -> dict[str, Any]:
        """JSON-able: rows given, and the documents of unfinished rows by number."""
        held = self._held.items()
        return {
            "rows": self.rows,
            **self.feed.state([(document.order, document.number, document.mark) for _, document in held]),
            "next_document": self._next,
            "packer": self.packer.state(),
            "shuffle": self.shuffle.state(),
            "ready": [list(row) for row in self._ready],
            "held": self._to_read or [[n, document.order, document.number, document.piece] for n, document in held],
        }


def split(part: Part, length: int) -> list[Part]:
    """A document as it is, or cut into parts of `length` tokens and a rest.

    The first token behind a cut is no target, because nothing stands before it in its row.
    """
    return [
        Part(
            part.tokens[start : start + length],
            None if part.sizes is None else part.sizes[start : start + length],
            None if part.scored is None else part.scored[start : start + length],
            min(max(part.prompt - start, 0), length),
        )
        for start in range(0, len(part.tokens), length)
    ]
