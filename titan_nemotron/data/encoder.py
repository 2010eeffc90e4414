"""From records to the tokens of a row.

Shapes: N tokens of a document or a piece of one, L positions, A tokens of look-ahead.
"""

from typing import NamedTuple

import numpy as np

from titan_nemotron.data.records import Record
from titan_nemotron.data.tokenizer import Tokenizer

NO_DOCUMENT = -1  # layout.PADDING, without importing torch


class Part(NamedTuple):
    """A document, or a piece of one.

    tokens  [N] int32
    sizes   [N] int32  bytes of text each token stands for; None: those of the tokenizer's table, or not known
    scored  [N] bool   tokens that count as a target; None: all
    prompt  tokens before the first that counts; with `scored` alone
    """

    tokens: np.ndarray
    sizes: np.ndarray | None = None
    scored: np.ndarray | None = None
    prompt: int = 0


class Row(NamedTuple):
    """One row with its look-ahead: tokens, document ids and bytes of text, int32 [L+A] each; which count, bool [L+A]."""

    tokens: np.ndarray
    document_ids: np.ndarray
    sizes: np.ndarray
    scored: np.ndarray


class Encoder:
    """Tokens of a piece of a document, and the bytes each stands for."""

    def __init__(self, tokenizer: Tokenizer, exact_bytes: bool) -> None:
        """exact_bytes: count them also for a tokenizer that is not byte-level, at the price of slower encoding."""
        self.tokenizer, self.eos_id = tokenizer, tokenizer.eos_id
        self.end = Part(np.array([tokenizer.eos_id], dtype=np.int32), np.zeros(1, dtype=np.int32))
        self.table = tokenizer.token_bytes
        self.exact = exact_bytes
        self.knows_bytes = exact_bytes or self.table is not None

    def empty_row(self, total: int) -> Row:
        """A row of padding alone."""
        return Row(
            np.full(total, self.eos_id, np.int32),
            np.full(total, NO_DOCUMENT, np.int32),
            np.zeros(total, np.int32),
            np.ones(total, bool),
        )

    def __call__(self, record: Record) -> Part:
        """The tokens of a record, without the one that ends a document."""
        if record.tokens is not None:
            self.knows_bytes = self.table is not None
            return Part(record.tokens)
        if self.exact and self.table is None:
            return Part(*self.tokenizer.encode_with_bytes(record.text or ""))
        return Part(np.array(self.tokenizer.encode([record.text or ""])[0], dtype=np.int32))

    def whole(self, records: list[Record]) -> Part:
        """A document of one or several pieces, with the token that ends it."""
        parts = [*map(self, records), self.end]
        sizes = [self._sizes(part) for part in parts] if self.exact and self.table is None else None
        tokens = np.concatenate([part.tokens for part in parts])
        return Part(tokens, None if sizes is None else np.concatenate(sizes))

    def _sizes(self, part: Part) -> np.ndarray:
        if part.sizes is not None:
            return part.sizes
        return np.zeros(len(part.tokens), np.int32) if self.table is None else self.table[part.tokens]

    def copy(self, part: Part, offset: int, row: Row, start: int, stop: int, index: int) -> int:
        """Fill start..stop of a row from a part as far as it goes; returns how many tokens that were."""
        count = min(stop - start, len(part.tokens) - offset)
        here, there = slice(start, start + count), slice(offset, offset + count)
        row.tokens[here], row.document_ids[here] = part.tokens[there], index
        row.sizes[here] = self._sizes(part)[there]
        if part.scored is not None:
            row.scored[here] = part.scored[there]
        return count
