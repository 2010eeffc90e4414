"""The documents that one stream reads from several orders, in turn by weight."""

from typing import Any, NamedTuple

from titan_nemotron.data.order import NoMoreDocuments, Order
from titan_nemotron.data.records import Record


class Document(NamedTuple):
    """A document that a feed has given: from which order, its number there, the record (its first piece), and a mark."""

    order: int
    number: int
    record: Record
    mark: Any


class Feed:
    """Documents number s, s + S, s + 2 S, ... of each order, for stream s of S.

    The next one comes from the order with the largest claim, weight * (documents given + 1) - documents given from it, the
    first of those alike: no order is ever a whole document behind its share, so that long-run shares are exact, and equal
    weights take turns. An order that has ended takes no part any more.
    """

    def __init__(
        self, orders: list[Order], weights: list[float], stream: int, stride: int, state: dict[str, Any]
    ) -> None:
        """weights: positive; state: of an earlier `state()`, or empty."""
        total = sum(weights)
        self.orders, self.shares, self.stride = orders, [weight / total for weight in weights], stride
        self.next: list[int] = list(state.get("next", [stream] * len(orders)))
        self.given: list[int] = list(state.get("given", [0] * len(orders)))
        self._ended: set[int] = set()

    def take(self) -> Document | None:
        """The next document that has text; None when all orders have ended."""
        while (order := self._turn()) is not None:
            number = self.next[order]
            try:
                record, mark = self.orders[order].document(number)
            except NoMoreDocuments:
                self._ended.add(order)
                continue
            self.next[order] = number + self.stride
            if record is not None:
                self.given[order] += 1
                return Document(order, number, record, mark)
        return None

    def _turn(self) -> int | None:
        running = [order for order in range(len(self.orders)) if order not in self._ended]
        if len(running) < 2:
            return running[0] if running else None
        total = sum(self.given[order] for order in running) + 1
        shares = sum(self.shares[order] for order in running)
        return max(running, key=lambda order: self.shares[order] / shares * total - self.given[order])

    def piece(self, order: int, number: int, piece: int = 0) -> tuple[Record | None, Any]:
        """A piece of a document once more, or of one that a resumed stream holds, and its mark."""
        return self.orders[order].document(number, piece)

    def state(self, held: list[tuple[int, int, Any]]) -> dict[str, Any]:
        """JSON-able. held: (order, number, mark) of documents that will be asked for again after a resume.

        first: the oldest document of each order that will be asked for; marks: what helps the order to find it.
        """
        first, marks = list(self.next), []
        for order, source in enumerate(self.orders):
            oldest = min(((number, mark) for o, number, mark in held if o == order), key=lambda h: h[0], default=None)
            if oldest is not None and oldest[0] < first[order]:
                first[order] = oldest[0]
                marks.append(oldest[1])
            else:
                marks.append(source.mark(first[order]))
        state = {"next": list(self.next), "given": list(self.given), "first": first}
        return state if all(mark is None for mark in marks) else {**state, "marks": marks}
