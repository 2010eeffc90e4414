"""Document layouts and the batches cut from rows, against their definitions spelled out in loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_nemotron.errors import UserError
from titan_nemotron.layout import IGNORED, PADDING, Batch, DocumentLayout


@st.composite
def document_rows(draw: st.DrawFn) -> torch.Tensor:
    """Rows of runs: a run is padding or a document with an id of its own in the row, in any order."""
    length = draw(st.integers(1, 20))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = []
        ids = iter(draw(st.permutations(range(25))))
        while len(row) < length:
            row += [draw(st.sampled_from([PADDING, -5])) if draw(st.booleans()) else next(ids)] * draw(
                st.integers(1, 6)
            )
        rows.append(row[:length])
    return torch.tensor(rows)


@given(document_rows())
def test_layout_follows_its_definition(ids: torch.Tensor) -> None:
    layout = DocumentLayout.from_document_ids(ids)
    segments = []
    for row, values in enumerate(ids.tolist()):
        known: list[int] = []
        for i, value in enumerate(values):
            if value < 0:
                assert layout.document_ids[row, i] == PADDING and layout.positions[row, i] == 0
            else:
                if value not in known:
                    known.append(value)
                assert layout.document_ids[row, i] == known.index(value)
                assert layout.positions[row, i] == i - values.index(value)
            if i == 0 or max(value, PADDING) != max(values[i - 1], PADDING):
                segments.append(row * len(values) + i)
    assert layout.cu_seqlens.tolist() == [*segments, ids.numel()]
    assert layout.max_length == max(b - a for a, b in zip(segments, [*segments[1:], ids.numel()], strict=True))
    assert layout.has_padding == bool((ids < 0).any())


@given(document_rows(), st.integers(0, 4), st.integers(0, 3))
def test_targets_lie_inside_the_document(ids: torch.Tensor, lookahead: int, depths: int) -> None:
    tokens = torch.arange(100, 100 + ids.numel()).view_as(ids)
    length = max(1, ids.shape[1] - lookahead)
    batch = Batch.from_rows(tokens, ids, length=length, mtp_depths=depths)
    same = lambda row, i, j: j < ids.shape[1] and ids[row, i] == ids[row, j] and ids[row, i] >= 0  # noqa: E731
    for row in range(ids.shape[0]):
        for i in range(length):
            assert batch.labels[row, i] == (tokens[row, i + 1] if same(row, i, i + 1) else IGNORED)
            for k in range(depths):
                assert batch.mtp_tokens[k, row, i] == (tokens[row, i + 1 + k] if same(row, i, i + 1 + k) else 0)
                assert batch.mtp_labels[k, row, i] == (tokens[row, i + 2 + k] if same(row, i, i + 2 + k) else IGNORED)
    assert batch.num_targets == (batch.labels != IGNORED).sum()
    assert batch.num_mtp_targets == tuple((batch.mtp_labels[k] != IGNORED).sum() for k in range(depths))


def test_tokens_that_are_not_scored_are_no_targets() -> None:
    tokens, ids = torch.tensor([[5, 6, 7, 8]]), torch.zeros(1, 4, dtype=torch.int64)
    scored = torch.tensor([[True, False, True, True]])
    batch = Batch.from_rows(tokens, ids, length=4, mtp_depths=1, scored=scored)
    assert batch.labels.tolist() == [[IGNORED, 7, 8, IGNORED]]
    assert batch.mtp_tokens.tolist() == [[[6, 7, 8, 0]]]  # inputs stay, scored or not
    assert batch.mtp_labels.tolist() == [[[7, 8, IGNORED, IGNORED]]]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[0, 1, 0]]), "row 0 has a document in two pieces"),
        (torch.tensor([[0, 0, 1], [3, -1, 3]]), "row 1 has a document in two pieces"),
        (torch.tensor([0, 1]), "expected shape"),
    ],
)
def test_impossible_ids_are_refused(ids: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DocumentLayout.from_document_ids(ids)


def test_parts_of_rows_have_the_targets_of_the_whole() -> None:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (2, 15), generator=random)
    documents = (torch.rand(2, 15, generator=random) < 0.3).cumsum(1)
    documents[1, 9:] = -1
    batch = Batch.from_rows(tokens, documents, length=12, mtp_depths=2, target_bytes=7)
    parts = [batch.shard(rank, 3) for rank in range(3)]
    for name in ("tokens", "labels", "mtp_tokens", "mtp_labels"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts], dim=-1), getattr(batch, name)), name
    assert torch.equal(torch.cat([part.layout.valid for part in parts], dim=1), batch.layout.valid)
    assert sum(part.num_targets for part in parts) == batch.num_targets
    for depth, number in enumerate(batch.num_mtp_targets):
        assert sum(part.num_mtp_targets[depth] for part in parts) == number
    assert sum(part.target_bytes for part in parts) == 7
    assert torch.equal(parts[1].layout.whole.valid, batch.layout.valid)


def test_rows_that_parts_do_not_divide_are_padded() -> None:
    tokens = torch.randint(0, 50, (2, 10), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_rows(tokens, torch.zeros_like(tokens), length=7, mtp_depths=2)
    for degree, shortest, length in ((2, 1, 8), (4, 1, 8), (4, 3, 12), (7, 1, 7)):
        parts = [batch.shard(rank, degree, shortest=shortest) for rank in range(degree)]
        assert {part.layout.document_ids.shape[1] for part in parts} == {length}
        for name, fill in (("tokens", 0), ("labels", IGNORED), ("mtp_tokens", 0), ("mtp_labels", IGNORED)):
            joined = torch.cat([getattr(part, name) for part in parts], dim=-1)
            assert torch.equal(joined[..., :7], getattr(batch, name)) and (joined[..., 7:] == fill).all(), name
        valid = torch.cat([part.layout.valid for part in parts], dim=1)
        assert valid[:, :7].all() and not valid[:, 7:].any()
        assert sum(part.num_targets for part in parts) == batch.num_targets
