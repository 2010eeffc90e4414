"""Incremental generation against the full forward, on a small hybrid with every kind of block.

Shapes: B rows, L positions, V vocabulary.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.support import VOCABULARY, random_tokens, small_model
from titan_nemotron.errors import UserError
from titan_nemotron.generation.cache import Cache
from titan_nemotron.generation.decode import generate
from titan_nemotron.generation.sampling import Sampling, sample
from titan_nemotron.generation.score import score
from titan_nemotron.layout import DocumentLayout


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return small_model(seed=3)


@settings(max_examples=15)
@given(pieces=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_any_split_through_the_cache_equals_the_full_forward(
    model: torch.nn.Module, pieces: list[int], seed: int
) -> None:
    tokens = random_tokens(2, sum(pieces), seed=seed)
    with torch.no_grad():
        full = model(tokens)
        cache = Cache(model, 2, sum(pieces))
        parts = [model(part, cache=cache) for part in tokens.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=2e-5, rtol=0)


def test_ragged_pieces_through_the_cache_equal_each_row_alone(model: torch.nn.Module) -> None:
    """Rows advance by different numbers of tokens, padding at their ends, a row may even stand still."""
    lengths = torch.tensor([[3, 1], [5, 4], [1, 0], [1, 1]])
    rows = [random_tokens(1, int(lengths[:, row].sum()), seed=row) for row in range(2)]
    cache, done = Cache(model, 2, 32), [0, 0]
    for piece in lengths.tolist():
        tokens, ids = torch.zeros(2, max(piece), dtype=torch.int64), torch.full((2, max(piece)), -1)
        for row, size in enumerate(piece):
            tokens[row, :size] = rows[row][0, done[row] : done[row] + size]
            ids[row, :size] = 0
        with torch.no_grad():
            logits = model(tokens, ids, cache=cache)
            for row, size in enumerate(piece):
                alone = model(rows[row])[0, done[row] : done[row] + size]
                torch.testing.assert_close(logits[row, :size], alone, atol=2e-5, rtol=0)
                done[row] += size


def test_a_batch_of_ragged_prompts_equals_each_prompt_alone(model: torch.nn.Module) -> None:
    prompts = [random_tokens(n, seed=n).tolist() for n in (1, 17, 8, 2)]
    sampling = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 12}
    together = generate(model, prompts, Sampling(**sampling, seed=5))
    for row, prompt in enumerate(prompts):
        (alone,) = generate(model, [prompt], Sampling(**sampling, seed=5 + row))
        assert together[row].tokens == alone.tokens
        assert together[row].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_greedy_tokens_and_logprobs_equal_the_full_forward(model: torch.nn.Module) -> None:
    prompt = random_tokens(7).tolist()
    (completion,) = generate(model, [prompt], Sampling(temperature=0, max_new_tokens=20))
    logits, logprobs = score(model, torch.tensor([prompt + completion.tokens]))
    assert completion.tokens == logits[0, 6:-1].argmax(-1).tolist()
    assert completion.logprobs == pytest.approx(logprobs[0, 6:-1].tolist(), abs=1e-4)
    assert completion.finish_reason == "length"


def test_stop_ids_and_stop_functions_end_a_row_alone(model: torch.nn.Module) -> None:
    prompts = [random_tokens(4, seed=1).tolist(), random_tokens(6, seed=2).tolist()]
    free = generate(model, prompts, Sampling(temperature=0, max_new_tokens=10))
    stop_id = next(token for token in free[0].tokens if token not in free[1].tokens)
    stopped = generate(model, prompts, Sampling(temperature=0, max_new_tokens=10, stop_ids=(stop_id,)))
    first = free[0].tokens.index(stop_id)
    assert stopped[0].tokens == free[0].tokens[: first + 1] and stopped[0].finish_reason == "stop"
    assert stopped[1].tokens == free[1].tokens and stopped[1].finish_reason == "length"
    shortened = generate(model, prompts, Sampling(temperature=0, max_new_tokens=10), stop=lambda new: len(new) == 2)
    assert [c.tokens for c in shortened] == [c.tokens[:2] for c in free]


def test_sampling_follows_the_tempered_distribution() -> None:
    """20,000 draws; the total variation of a multinomial sample of that size over 5 tokens is below 0.02."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    draws = 20_000
    generators = [torch.Generator().manual_seed(row) for row in range(draws)]
    tokens, logprobs = sample(logits.expand(draws, -1), Sampling(temperature=0.7), generators)
    expected = torch.softmax(logits / 0.7, -1)
    observed = torch.bincount(tokens, minlength=5) / draws
    assert 0.5 * (observed - expected).abs().sum() < 0.02
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generators = [torch.Generator().manual_seed(row) for row in range(500)]
    tokens, logprobs = sample(logits.expand(500, -1), Sampling(top_p=0.8), generators)
    assert set(tokens.tolist()) == {0, 1}
    assert logprobs[tokens == 0][0].item() == pytest.approx(math.log(0.5 / 0.8), abs=1e-5)
    tokens, _ = sample(logits.expand(500, -1), Sampling(top_p=1e-6), generators)
    assert set(tokens.tolist()) == {0}


def test_score_stays_inside_documents(model: torch.nn.Module) -> None:
    tokens = random_tokens(1, 9)
    ids = torch.tensor([[-1, 4, 4, 4, 7, 7, -1, 2, -1]])
    logits, logprobs = score(model, tokens, ids)
    with torch.no_grad():
        for start, stop in ((1, 4), (4, 6), (7, 8)):
            alone = model(tokens[:, start:stop])[0]
            torch.testing.assert_close(logits[0, start:stop], alone, atol=2e-5, rtol=0)
            expected = alone.log_softmax(-1)[:-1].gather(1, tokens[0, start + 1 : stop, None])[:, 0]
            torch.testing.assert_close(logprobs[0, start : stop - 1], expected, atol=2e-5, rtol=0)
            assert logprobs[0, stop - 1] == 0
    assert logprobs[0, 0] == 0 and logprobs[0, 6] == 0


WRONG = {
    "outside": (torch.tensor([[1, VOCABULARY]]), None, f"input_ids: {VOCABULARY} at row 0, position 1 is outside"),
    "negative": (torch.tensor([[1], [-1]]), None, "input_ids: -1 at row 1, position 0 is outside"),
    "flat": (torch.tensor([1, 2]), None, "input_ids: expected shape"),
    "deep": (torch.ones(1, 2, 3, dtype=torch.int64), None, "input_ids: expected shape"),
    "a list": ([[1, 2]], None, "input_ids: expected a tensor of integers, got list"),
    "floats": (torch.ones(1, 2), None, "input_ids: is torch.float32; expected integers"),
    "booleans": (torch.ones(1, 2, dtype=torch.bool), None, "input_ids: is torch.bool; expected integers"),
    "other shape": (torch.tensor([[1, 2]]), torch.tensor([[0]]), "document_ids: shape"),
    "float ids": (torch.tensor([[1, 2]]), torch.zeros(1, 2), "document_ids: is torch.float32; expected integers"),
    "two pieces": (torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 0]]), "document_ids: row 0 has a document in two"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_in_given_tokens_are_named(model: torch.nn.Module, wrong: str) -> None:
    tokens, ids, message = WRONG[wrong]
    for call in (model, lambda *given: score(model, *given)):
        with pytest.raises(UserError) as raised:
            call(tokens, ids)
        assert str(raised.value).startswith(message)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)], ids=str)
def test_no_tokens_have_no_logits(model: torch.nn.Module, shape: tuple[int, int]) -> None:
    tokens = torch.zeros(shape, dtype=torch.int64)
    logits, logprobs = score(model, tokens)
    assert logits.shape == (*shape, VOCABULARY) and logprobs.shape == shape
    with torch.no_grad():
        assert model(tokens, tokens).shape == logits.shape


def test_whatever_stands_at_padding_does_not_matter(model: torch.nn.Module) -> None:
    """Ids of any type and any negative number; a row of padding alone has finite logits and no log-probabilities."""
    tokens, ids = random_tokens(2, 6), torch.tensor([[0, 0, 0, -1, -2, -1], [-1] * 6])
    odd = torch.where(ids >= 0, tokens, torch.tensor([-100, 10**6]).repeat(3))
    (logits, logprobs), (odd_logits, odd_logprobs) = score(model, tokens, ids), score(model, odd, ids.short())
    torch.testing.assert_close(odd_logits[0, :3], logits[0, :3])
    assert torch.equal(odd_logprobs, logprobs)
    assert odd_logits.isfinite().all()
    assert (logprobs[0, 2:] == 0).all() and (logprobs[1] == 0).all()


@pytest.mark.parametrize("token", [VOCABULARY, -1, 1.5, "a"], ids=repr)
def test_a_prompt_s_tokens_belong_to_the_vocabulary(model: torch.nn.Module, token: object) -> None:
    with pytest.raises(UserError, match=f"prompt 1: {token!r} is no token of the model's vocabulary of {VOCABULARY}"):
        generate(model, [[1], [2, token]], Sampling())


def test_no_prompts_and_no_new_tokens_are_no_mistake(model: torch.nn.Module) -> None:
    assert generate(model, [], Sampling()) == []
    assert [completion.tokens for completion in generate(model, [[1], [2]], Sampling(max_new_tokens=0))] == [[], []]


def test_mistakes_in_sampling_are_named(model: torch.nn.Module) -> None:
    with pytest.raises(UserError, match="prompt 1: is empty"):
        generate(model, [[1], []], Sampling())
    for key, values in {
        "temperature": (-1.0, 1e-30, math.nan),
        "top_p": (0.0, 1.1, math.nan),
        "max_new_tokens": (-1,),
        "seed": (2**64,),
    }.items():
        for value in values:
            with pytest.raises(UserError, match=f"^{key}: {value} "):
                Sampling(**{key: value})


def test_layout_without_padding_says_so() -> None:
    assert not DocumentLayout.single(2, 3).has_padding
    assert DocumentLayout.from_document_ids(torch.tensor([[0, -1]])).has_padding


def test_a_cache_holds_one_document_a_row(model: torch.nn.Module) -> None:
    with pytest.raises(UserError, match="document_ids: a cache continues one document a row"):
        model(random_tokens(1, 4), torch.tensor([[0, 0, 1, 1]]), cache=Cache(model, 1, 8))
