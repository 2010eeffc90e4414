"""No information crosses a document's boundary, wherever it falls, and padding disturbs nothing."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.models.support import VOCABULARY, batch_of, random_tokens, row_of, small_model
from titan_nemotron.layout import DocumentLayout
from titan_nemotron.ops.ssd import chunked

# Segments of a row; a negative length is padding. Chunks are 8 tokens, so that boundaries fall everywhere in them.
segments = st.lists(st.integers(-4, 13).filter(bool), min_size=1, max_size=6).filter(lambda row: max(row) > 0)


@pytest.fixture(scope="module", autouse=True)
def short_chunks() -> Iterator[None]:
    """The scan's chunks are 8 positions, as the models' chunk_size says, though the CPU path takes its own length."""
    with mock.patch.object(chunked, "CHUNK", 8):
        yield


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return small_model()


@pytest.fixture(scope="module")
def exact() -> nn.Module:
    """In fp64, where the plain reference runs."""
    return small_model(dtype=torch.float64)


def places(row: list[int]) -> list[slice]:
    """Where the documents of a row lie."""
    starts = [sum(map(abs, row[:index])) for index in range(len(row))]
    return [slice(start, start + length) for start, length in zip(starts, row, strict=True) if length > 0]


@settings(max_examples=25)
@given(row=segments, seed=st.integers(0, 9))
def test_a_packed_document_equals_the_document_alone(model: nn.Module, row: list[int], seed: int) -> None:
    tokens, ids = random_tokens(1, sum(map(abs, row)), seed=seed), row_of(*row)
    with torch.no_grad():
        packed = model(tokens, ids)
        for place in places(row):
            torch.testing.assert_close(packed[:, place], model(tokens[:, place]), atol=2e-5, rtol=0)


@settings(max_examples=20)
@given(row=segments, seed=st.integers(0, 9), data=st.data())
@pytest.mark.parametrize("kind", ["model", "exact"])
def test_gradients_stay_inside_the_document(
    kind: str, request: pytest.FixtureRequest, row: list[int], seed: int, data: st.DataObject
) -> None:
    """d(logits of one document) / d(input) is exactly zero outside, and not zero at its start."""
    model = request.getfixturevalue(kind)
    tokens, ids = random_tokens(1, sum(map(abs, row)), seed=seed), row_of(*row)
    chosen = data.draw(st.sampled_from(places(row)))
    x = model.embeddings(tokens).detach().requires_grad_()
    layout = DocumentLayout.from_document_ids(ids)
    h = x
    for layer in model.layers:
        h, _ = layer(h, layout)
    logits = model.lm_head.logits(model.norm_f(h))
    logits[:, chosen].square().sum().backward()
    inside = torch.zeros(tokens.shape[1], dtype=torch.bool)
    inside[chosen] = True
    assert torch.equal(x.grad[:, ~inside], torch.zeros_like(x.grad[:, ~inside]))
    assert (x.grad[:, inside] != 0).any(-1).all()


@settings(max_examples=20)
@given(row=segments, seed=st.integers(0, 9))
def test_what_stands_outside_a_document_does_not_matter(exact: nn.Module, row: list[int], seed: int) -> None:
    """Change all tokens but those of one document, padding included: its logits stay (1e-12, in fp64)."""
    tokens, ids = random_tokens(1, sum(map(abs, row)), seed=seed), row_of(*row)
    with torch.no_grad():
        before = exact(tokens, ids)
        for place in places(row):
            changed = (tokens + 1) % VOCABULARY
            changed[:, place] = tokens[:, place]
            torch.testing.assert_close(exact(changed, ids)[:, place], before[:, place], atol=1e-12, rtol=0)


@settings(max_examples=15)
@given(row=segments, seed=st.integers(0, 9))
def test_loss_of_a_packed_row_is_the_sum_over_its_documents(model: nn.Module, row: list[int], seed: int) -> None:
    """Main and multi-token losses, their counts, and the routing's counts: nothing is added by packing or padding."""
    tokens, ids = random_tokens(1, sum(map(abs, row)), seed=seed), row_of(*row)
    with torch.no_grad():
        packed = model.loss(whole := batch_of(model, tokens, ids))
        alone = []
        for place in places(row):
            batch = batch_of(model, tokens[:, place], torch.zeros_like(tokens[:, place]))
            alone.append((model.loss(batch), batch))
    torch.testing.assert_close(packed.main, sum(losses.main for losses, _ in alone), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(packed.mtp, sum(losses.mtp for losses, _ in alone), atol=1e-4, rtol=1e-5)
    assert whole.num_targets == sum(batch.num_targets for _, batch in alone)
    for call, stats in packed.stats.items():
        if "counts_E" in stats:
            assert torch.equal(stats["counts_E"], sum(losses.stats[call]["counts_E"] for losses, _ in alone)), call


@settings(max_examples=15)
@given(length=st.integers(1, 20), before=st.integers(0, 9), after=st.integers(0, 9))
def test_padding_changes_neither_loss_nor_auxiliary_loss_nor_gradient(
    exact: nn.Module, length: int, before: int, after: int
) -> None:
    tokens = random_tokens(1, before + length + after)
    ids = torch.full_like(tokens, -1)
    ids[:, before : before + length] = 0
    grown = []
    for some_tokens, some_ids in ((tokens, ids), (tokens[:, before : before + length], torch.zeros(1, length))):
        exact.zero_grad()
        losses = exact.loss(batch_of(exact, some_tokens, some_ids.long()))
        (losses.main + losses.mtp.sum() + losses.auxiliary).backward()
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in exact.named_parameters()
        }
        grown.append((losses, gradients))
    (padded, padded_gradients), (plain, plain_gradients) = grown
    for found, expected in zip(padded[:3], plain[:3], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    for name, gradient in padded_gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], atol=1e-9, rtol=1e-9, msg=name)


def test_a_row_of_padding_alone_is_harmless(model: nn.Module) -> None:
    model.zero_grad()
    tokens, ids = random_tokens(2, 9), torch.cat([row_of(9), row_of(-9)])
    losses = model.loss(batch_of(model, tokens, ids))
    alone = model.loss(batch_of(model, tokens[:1], ids[:1]))
    torch.testing.assert_close(losses.main, alone.main)
    torch.testing.assert_close(losses.auxiliary, alone.auxiliary)
    (losses.main + losses.mtp.sum() + losses.auxiliary).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
