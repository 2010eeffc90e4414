"""A virtual stream whose documents continue in the next row.

Each document is followed by the end-of-document token, and rows of exactly L tokens are cut from that.

Shapes: L positions, A tokens of look-ahead (1 + multi-token-prediction depths).
"""

from typing import Any

from titan_nemotron.data.encoder import Encoder, Part, Row
from titan_nemotron.data.feed import Feed
from titan_nemotron.errors import UserError


class Stream:
    """One virtual stream: where it is, and its next row.

    A document is read as parts: its pieces, then the end-of-document token. The position is (document, part, offset).
    """

    def __init__(self, feed: Feed, length: int, state: dict[str, Any], skip: float = 0.0) -> None:
        """state: of an earlier `state()`, or empty; skip: the fraction of its first document a new stream leaves out."""
        self.feed, self.length = feed, length
        self.rows: int = state.get("rows", 0)
        self.part: int = state.get("part", 0)
        self.offset: int = state.get("offset", 0)
        self._open: tuple[int, int] | None = tuple(state["open"]) if state.get("open") else None  # order, number
        self._mark: Any = None
        self._pieces = 0  # of the open document; 0: it has yet to be opened again
        self._skip = 0.0 if state else skip
        self._parts: dict[int, Part] = {}  # those in use

    def state(self) -> dict[str, Any]:
        """JSON-able: rows given, position, and what helps the orders to find the documents."""
        held = [] if self._open is None else [(*self._open, self._mark)]
        position = {"open": self._open and list(self._open), "part": self.part, "offset": self.offset}
        return {"rows": self.rows, **self.feed.state(held), **position}

    def row(self, encode: Encoder, look_ahead: int) -> Row | None:
        """The next row [L+A]; its look-ahead continues the row's last document only. None when no document is left."""
        length, row = self.length, encode.empty_row(self.length + look_ahead)
        filled = index = 0
        while filled < length and self._ready(encode):
            part = self._load(self.part, encode)
            count = encode.copy(part, self.offset, row, filled, length, index)
            filled, self.offset = filled + count, self.offset + count
            if self.offset == len(part.tokens):
                del self._parts[self.part]
                self.part, self.offset = self.part + 1, 0
                if self.part > self._pieces:
                    self._open, self._pieces, self.part = None, 0, 0
                    index += 1
        if filled == 0:
            return None
        if self._open is not None:  # the row's last document goes on
            offset = self.offset
            for number in range(self.part, self._pieces + 1):
                filled += encode.copy(self._load(number, encode), offset, row, filled, len(row.tokens), index)
                offset = 0
                if filled == len(row.tokens):
                    break
        self.rows += 1
        return row

    def _ready(self, encode: Encoder) -> bool:
        """Open a document if none is open; False when there is none."""
        if self._pieces:
            return True
        if self._open is None:
            document = self.feed.take()
            if document is None:
                return False
            self._open, self._mark, record = (document.order, document.number), document.mark, document.record
        else:  # after a resume
            found, self._mark = self.feed.piece(*self._open, self.part)
            if found is None:
                raise self._changed()
            record = found
        self._pieces = record.pieces
        if self._skip and record.pieces > 1:
            self.part = int(self._skip * record.pieces)
        else:
            part = self._parts[min(self.part, record.pieces - 1)] = encode(record)
            self.offset = self.offset or int(self._skip * len(part.tokens))
        self._skip = 0.0
        if self.part > record.pieces or self.offset > len(self._load(self.part, encode).tokens):
            raise self._changed()
        return True

    def _load(self, number: int, encode: Encoder) -> Part:
        if number not in self._parts:
            assert self._open is not None
            if number == self._pieces:
                self._parts[number] = encode.end
            else:
                record, _ = self.feed.piece(*self._open, number)
                if record is None:
                    raise self._changed()
                self._parts[number] = encode(record)
        return self._parts[number]

    def _changed(self) -> UserError:
        assert self._open is not None
        return UserError(f"[data]: document {self._open[1]} is not what it was when reading began; restore the data")
