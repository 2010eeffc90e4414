"""Packing: which tokens of a row belong to one document, and the batch built on it.

Shapes: B rows, L positions, D multi-token-prediction depths, N documents.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from titan_nemotron.errors import UserError

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
    """

    document_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_length: int
    has_padding: bool
    # What operations derive from the layout (masks, Python lists), keyed by the deriver; filled on first use.
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_document_ids(cls, document_ids: Tensor) -> "DocumentLayout":
        """Any integer ids [B, L], equal inside a document and contiguous; negative is padding.

        Raises UserError when an id comes back after its document has ended.
        """
        if document_ids.dim() != 2:
            raise UserError(f"document_ids: expected shape [rows, length], got {list(document_ids.shape)}")
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
        canonical = torch.where(valid, canonical, PADDING)
        index = torch.arange(length).expand(num_rows, length)
        last_start = torch.where(starts, index, 0).cummax(1).values if length else index
        positions = torch.where(valid, index - last_start, 0)
        boundaries = starts.flatten().nonzero().flatten()
        cu_seqlens = torch.cat([boundaries, torch.tensor([num_rows * length])])
        return cls(
            document_ids=canonical.to(device, torch.int32),
            positions=positions.to(device, torch.int32),
            cu_seqlens=cu_seqlens.to(device, torch.int32),
            max_length=int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0,
            has_padding=not bool(valid.all()),
        )

    @classmethod
    def single(cls, num_rows: int, length: int, device: torch.device | str = "cpu") -> "DocumentLayout":
        """One document a row, no padding."""
        return cls.from_document_ids(torch.zeros(num_rows, length, dtype=torch.int32)).to(device)

    def to(self, device: torch.device | str) -> "DocumentLayout":
        move = lambda tensor: tensor.to(device, non_blocking=True)  # noqa: E731
        return replace(
            self,
            document_ids=move(self.document_ids),
            positions=move(self.positions),
            cu_seqlens=move(self.cu_seqlens),
            derived={},
        )

    @property
    def valid(self) -> Tensor:
        """[B, L] bool, False at padding."""
        return self.document_ids >= 0


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

    def to(self, device: torch.device | str) -> "Batch":
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens", "labels", "mtp_tokens", "mtp_labels")
        }
        return replace(self, layout=self.layout.to(device), **moved)
