"""Packing: which tokens of a row belong to one document, and the batch built on it.

Shapes: B rows, L positions, D multi-token-prediction depths, N documents.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.errors import UserError

T = TypeVar("T")
PADDING = -1  # document id of a padding position
IGNORED = -100  # label of a position that is not scored (the value Hugging Face and PyTorch use)


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of a batch of whole rows; every operation that crosses tokens takes one.

    document_ids  [B, L] int32  0, 1, 2, ... from left to right in each row; -1 is padding
    positions     [B, L] int32  index inside the document; 0 at padding
    cu_seqlens    [N+1]  int32  starts of the segments in the flattened B*L tokens; a run of padding and a row's end
                                close a segment too, so the last entry is B*L
    max_length    longest segment, in tokens
    has_padding   whether any position is padding; a Python bool, so that asking costs no device synchronisation
    host_ids      document_ids on the host, for what is planned there without a synchronisation
    start, part   where the positions that this rank holds start, and their number; None is the whole row
    """

    document_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_length: int
    has_padding: bool
    host_ids: Tensor
    start: int = 0
    part: int | None = None
    # What operations derive from the layout (masks, Python lists), keyed by the deriver; filled on first use.
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_document_ids(cls, document_ids: Tensor) -> "DocumentLayout":
        """Any integer ids [B, L], equal inside a document and contiguous; negative is padding.

        Raises UserError for another shape or type, and when an id comes back after its document has ended.
        """
        _check_integers("document_ids", document_ids)
        device, (num_rows, length) = document_ids.device, document_ids.shape
        ids = document_ids.detach().to("cpu", torch.int64)
        valid = ids >= 0
        starts = torch.ones_like(valid)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts[:, 1:] &= valid[:, 1:] | valid[:, :-1]  # -1 and -2 are the same padding
        canonical = (starts & valid).cumsum(1) - 1
        for row in range(num_rows):
            runs = ids[row][starts[row] & valid[row]]
            if runs.unique().numel() != runs.numel():
                raise UserError(
                    f"document_ids: row {row} has a document in two pieces; give each document one contiguous run"
                )
        canonical = torch.where(valid, canonical, PADDING).to(torch.int32)
        index = torch.arange(length).expand(num_rows, length)
        last_start = torch.where(starts, index, 0).cummax(1).values if length else index
        positions = torch.where(valid, index - last_start, 0)
        boundaries = starts.flatten().nonzero().flatten()
        cu_seqlens = torch.cat([boundaries, torch.tensor([num_rows * length])])
        return cls(
            document_ids=canonical.to(device),
            positions=positions.to(device, torch.int32),
            cu_seqlens=cu_seqlens.to(device, torch.int32),
            max_length=int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0,
            has_padding=not bool(valid.all()),
            host_ids=canonical,
        )

    @classmethod
    def single(cls, num_rows: int, length: int, device: torch.device | str = "cpu") -> "DocumentLayout":
        """One document a row, no padding."""
        return cls.from_document_ids(torch.zeros(num_rows, length, dtype=torch.int32)).to(device)

    def to(self, device: torch.device | str) -> "DocumentLayout":
        """A copy on `device`, without what was derived here: masks lie on the device they were made for."""
        move = lambda tensor: tensor.to(device, non_blocking=True)  # noqa: E731
        return replace(
            self,
            document_ids=move(self.document_ids),
            positions=move(self.positions),
            cu_seqlens=move(self.cu_seqlens),
            derived={},
        )

    def shard(self, rank: int, degree: int) -> "DocumentLayout":
        """The same rows, of which this rank holds part `rank` of `degree` equal parts."""
        part = self.document_ids.shape[1] // degree
        assert part * degree == self.document_ids.shape[1], "the degree divides the length"
        return replace(self, start=rank * part, part=part, derived={})

    def padded(self, length: int) -> "DocumentLayout":
        """The same documents in rows of `length` positions; what is added is padding."""
        extra = length - self.document_ids.shape[1]
        return DocumentLayout.from_document_ids(F.pad(self.document_ids, (0, extra), value=PADDING))

    def derive(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` derives from the layout, kept under `key`. A compiled graph does not keep what it makes itself: the
        forward of one that is recomputed may change nothing outside."""
        if key in self.derived:
            found: T = self.derived[key]
            return found
        made = make()
        if not torch.compiler.is_compiling():
            self.derived[key] = made
        return made

    @property
    def whole(self) -> "DocumentLayout":
        """The layout of a rank that holds whole rows; what is derived from it is kept."""
        return (
            self if self.part is None else self.derive("whole", lambda: replace(self, start=0, part=None, derived={}))
        )

    @property
    def length(self) -> int:
        """Positions that this rank holds."""
        return self.document_ids.shape[1] if self.part is None else self.part

    @property
    def local_ids(self) -> Tensor:
        """document_ids at the positions that this rank holds."""
        return self.document_ids if self.part is None else self.document_ids[:, self.start : self.start + self.part]

    @property
    def valid(self) -> Tensor:
        """Bool at the positions that this rank holds, False at padding."""
        return self.local_ids >= 0


def _check_integers(name: str, tensor: Tensor) -> None:
    """Raises UserError for what is not a tensor of integers [B, L]."""
    if not isinstance(tensor, Tensor):
        raise UserError(f"{name}: expected a tensor of integers, got {type(tensor).__name__}")
    if tensor.dim() != 2:
        raise UserError(f"{name}: expected shape [rows, length], got {list(tensor.shape)}")
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise UserError(f"{name}: is {tensor.dtype}; expected integers")


def check_rows(input_ids: Tensor, document_ids: Tensor | None = None) -> None:
    """Raises UserError unless both are tensors of integers of one shape [B, L]; B and L may be 0."""
    _check_integers("input_ids", input_ids)
    if document_ids is not None:
        _check_integers("document_ids", document_ids)
        if document_ids.shape != input_ids.shape:
            raise UserError(
                f"document_ids: shape {list(document_ids.shape)} differs from input_ids {list(input_ids.shape)}"
            )


def rows_of_tokens(input_ids: Tensor, document_ids: Tensor | None, vocabulary: int) -> tuple[Tensor, DocumentLayout]:
    """What a user calls a model with, checked: tokens [B, L] int64, 0 at padding, and their layout.

    Without document_ids a row is one document. Raises UserError for what check_rows and DocumentLayout.from_document_ids
    refuse, and for a token outside the vocabulary; at padding (a negative document id) any token may stand.
    """
    check_rows(input_ids, document_ids)
    tokens = input_ids.long()
    if document_ids is None:
        num_rows, length = tokens.shape
        layout = DocumentLayout.single(num_rows, length, tokens.device)
    else:
        layout = DocumentLayout.from_document_ids(document_ids.to(tokens.device))
    if layout.has_padding:
        tokens = torch.where(layout.valid, tokens, 0)
    outside = (tokens < 0) | (tokens >= vocabulary)
    if not tokens.is_meta and outside.any():  # on meta a model is called for shapes: there are no values to check
        row, position = outside.nonzero()[0].tolist()
        raise UserError(
            f"input_ids: {int(tokens[row, position])} at row {row}, position {position} is outside the vocabulary of "
            f"{vocabulary}"
        )
    return tokens, layout


def _shifted(values: Tensor, document_ids: Tensor, shift: int, length: int, fill: int) -> Tensor:
    """values[:, i + shift] where i and i + shift lie in one document, `fill` elsewhere; i < length."""
    num_rows, total = values.shape
    out = values.new_full((num_rows, length), fill)
    stop = min(length, total - shift)
    if stop > 0:
        here, there = document_ids[:, :stop], document_ids[:, shift : shift + stop]
        out[:, :stop] = torch.where((here == there) & (here >= 0), values[:, shift : shift + stop], fill)
    return out


@dataclass(frozen=True)
class Batch:
    """One microbatch of whole rows.

    tokens       [B, L] int64
    labels       [B, L] int64     the next token inside the document, -100 where there is none or it is not scored
    mtp_tokens   [D, B, L] int64  token i+1+k inside the document, else 0: the input of depth k at position i
    mtp_labels   [D, B, L] int64  token i+2+k inside the document, else -100: the target of depth k at position i
    layout       the documents of the L positions
    num_targets, num_mtp_targets  valid labels here, a count and one for each depth (Python integers: no device sync)
    target_bytes bytes of text that the valid labels stand for, or None when the source does not know
    """

    tokens: Tensor
    labels: Tensor
    mtp_tokens: Tensor
    mtp_labels: Tensor
    layout: DocumentLayout
    num_targets: int
    num_mtp_targets: tuple[int, ...]
    target_bytes: int | None = None

    @classmethod
    def from_rows(
        cls,
        tokens: Tensor,
        document_ids: Tensor,
        *,
        length: int,
        mtp_depths: int,
        scored: Tensor | None = None,
        target_bytes: int | None = None,
    ) -> "Batch":
        """Cut labels and multi-token targets from rows [B, L + look-ahead]; only the first `length` positions are inputs.

        With a look-ahead of 1 + mtp_depths tokens, a document that continues in the next row keeps the targets at the
        row's end. scored [B, L + look-ahead] bool: tokens that count as a target (all of them by default).
        """
        targets = tokens if scored is None else torch.where(scored, tokens, IGNORED)
        labels = _shifted(targets, document_ids, 1, length, IGNORED)
        shape = (mtp_depths, *labels.shape)
        mtp_tokens, mtp_labels = tokens.new_zeros(shape), tokens.new_full(shape, IGNORED)
        for depth in range(mtp_depths):
            mtp_tokens[depth] = _shifted(tokens, document_ids, 1 + depth, length, 0)
            mtp_labels[depth] = _shifted(targets, document_ids, 2 + depth, length, IGNORED)
        return cls(
            tokens=tokens[:, :length].contiguous(),
            labels=labels,
            mtp_tokens=mtp_tokens,
            mtp_labels=mtp_labels,
            layout=DocumentLayout.from_document_ids(document_ids[:, :length]),
            num_targets=int((labels != IGNORED).sum()),
            num_mtp_targets=tuple(int((mtp_labels[depth] != IGNORED).sum()) for depth in range(mtp_depths)),
            target_bytes=target_bytes,
        )

    def padded(self, length: int) -> "Batch":
        """The same rows at `length` positions; what is added belongs to no document, and no target is there."""

        def pad(tensor: Tensor, value: int) -> Tensor:
            return F.pad(tensor, (0, length - self.tokens.shape[1]), value=value)

        return replace(
            self,
            tokens=pad(self.tokens, 0),
            labels=pad(self.labels, IGNORED),
            mtp_tokens=pad(self.mtp_tokens, 0),
            mtp_labels=pad(self.mtp_labels, IGNORED),
            layout=self.layout.padded(length),
        )

    def shard(self, rank: int, degree: int, *, shortest: int = 1) -> "Batch":
        """Part `rank` of `degree` equal parts of every row, of at least `shortest` positions; rows are padded to that.

        The bytes of a row's text count on the first rank alone.
        """
        length = degree * max(shortest, -(-self.tokens.shape[1] // degree))
        if length != self.tokens.shape[1]:
            return self.padded(length).shard(rank, degree)
        layout = self.layout.shard(rank, degree)
        here = slice(layout.start, layout.start + layout.length)
        labels, mtp_labels = self.labels[:, here].contiguous(), self.mtp_labels[..., here].contiguous()
        return replace(
            self,
            tokens=self.tokens[:, here].contiguous(),
            labels=labels,
            mtp_tokens=self.mtp_tokens[..., here].contiguous(),
            mtp_labels=mtp_labels,
            layout=layout,
            num_targets=int((labels != IGNORED).sum()),
            num_mtp_targets=tuple(int((depth != IGNORED).sum()) for depth in mtp_labels),
            target_bytes=self.target_bytes if rank == 0 or self.target_bytes is None else 0,
        )

    def to(self, device: torch.device | str) -> "Batch":
        """A copy on `device`; the counts stay Python integers. From pinned memory the transfer does not block."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens", "labels", "mtp_tokens", "mtp_labels")
        }
        return replace(self, layout=self.layout.to(device), **moved)
