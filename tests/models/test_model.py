"""The whole model: precision, statistics, replay of the routing, and what it refuses."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.support import batch_of, random_tokens, row_of, small_model
from titan_nemotron.errors import UserError
from titan_nemotron.models.family import Losses, load_family
from titan_nemotron.models.layers.moe import Router
from titan_nemotron.ops import kernels
from titan_nemotron.ops.config import KernelsConfig


@pytest.fixture
def references() -> Iterator[Callable[[], None]]:
    """Forces the reference path of every op when called."""
    yield lambda: kernels.configure(KernelsConfig(**dict.fromkeys(KernelsConfig.model_fields, "reference")))
    kernels.configure(KernelsConfig())


def total(losses: Losses) -> Tensor:
    return losses.main + losses.mtp.sum() + 0.1 * losses.auxiliary


def gradients(model: nn.Module, losses: Losses) -> dict[str, Tensor]:
    model.zero_grad()
    total(losses).backward()
    unused = torch.zeros(())
    grads = ((name, parameter, parameter.grad) for name, parameter in model.named_parameters())
    return {name: unused.expand_as(parameter) if grad is None else grad.clone() for name, parameter, grad in grads}


def routing(losses: Losses) -> dict[str, Tensor]:
    return {call: stats["indices_BLK"] for call, stats in losses.stats.items() if "indices_BLK" in stats}


def packed_batch(model: nn.Module) -> object:
    return batch_of(model, random_tokens(2, 21), torch.cat([row_of(5, 9, -2, 5), row_of(1, 20)]))


def test_fp64_agrees_with_fp32() -> None:
    """Logits and log-probabilities to 1e-4, losses to 1e-5 and gradients to 1e-4, relative, under the same routing."""
    narrow, wide = small_model(), small_model(dtype=torch.float64)
    batch = packed_batch(narrow)
    expected = wide.loss(batch)
    found = narrow.loss(batch, routing(expected))
    assert expected.main.dtype == expected.logprobs.dtype == torch.float64
    assert found.main.dtype == torch.float32
    torch.testing.assert_close(found.logprobs.double(), expected.logprobs, atol=1e-4, rtol=0)
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert {name: indices.tolist() for name, indices in routing(narrow.loss(batch)).items()} == {
        name: indices.tolist() for name, indices in routing(expected).items()
    }
    exact = gradients(wide, expected)
    for name, gradient in gradients(narrow, found).items():
        error = (gradient.double() - exact[name]).norm() / exact[name].norm()
        assert error < 1e-4, f"{name}: {error:.1e}"
    with torch.no_grad():
        logits = narrow(batch.tokens, batch.layout.document_ids).double()
        torch.testing.assert_close(logits, wide(batch.tokens, batch.layout.document_ids), atol=1e-4, rtol=0)


# Rows of one batch, of one length; a negative length is padding.
ODD: dict[str, list[list[int]]] = {
    "one token": [[1]],
    "three rows of one token, one of padding": [[1], [-1], [1]],
    "every token its own document": [[1] * 13],
    "documents shorter than the depths": [[1, 2, 3, 1, 1], [2, 1, -1, 2, 2], [-3, 2, -1, 1, 1]],
    "padding alone": [[-9], [-9]],
    "padding around": [[-3, 5, -2, 1, -4], [15], [1, 14]],
    "one beyond a chunk": [[65], [64, 1], [1, 64]],
    "no rows": [],
}


@pytest.mark.parametrize("name", ODD)
def test_fast_paths_agree_with_the_references_on_odd_rows(name: str, references: Callable[[], None]) -> None:
    """Losses and every gradient, in fp32, the routing held; a gradient is compared at the size of its largest elements."""
    rows = [row_of(*row) for row in ODD[name]]
    ids = torch.cat(rows) if rows else torch.zeros(0, 7, dtype=torch.int64)
    model = small_model()
    batch = batch_of(model, random_tokens(*ids.shape), ids)
    found = model.loss(batch)
    fast = gradients(model, found)
    references()
    expected = model.loss(batch, routing(found))
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    for parameter, gradient in gradients(model, expected).items():
        largest = float(gradient.abs().max().clamp(min=1e-3))
        torch.testing.assert_close(fast[parameter], gradient, rtol=0, atol=1e-4 * largest, msg=parameter)


def test_log_probabilities_of_the_loss_are_those_of_the_logits() -> None:
    model = small_model()
    batch = packed_batch(model)
    losses = model.loss(batch)
    logprobs = model(batch.tokens, batch.layout.document_ids).log_softmax(-1)
    scored = batch.labels >= 0
    expected = logprobs.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(losses.logprobs[scored], expected[scored], atol=1e-5, rtol=0)
    assert (losses.logprobs[~scored] == 0).all()
    torch.testing.assert_close(losses.main, -expected[scored].sum(), rtol=1e-5, atol=0)
    assert not losses.logprobs.requires_grad


def test_training_forwards_change_no_state() -> None:
    model = small_model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        total(model.loss(packed_batch(model))).backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_recomputed_blocks_count_once() -> None:
    """Blocks computed again in the backward: loss, gradients and every statistic are bitwise the same."""
    plain = small_model()
    recomputing = copy.deepcopy(plain)
    for _, block in recomputing.blocks():
        forward = block.forward
        block.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )
    batch = packed_batch(plain)
    first, second = plain.loss(batch), recomputing.loss(batch)
    assert torch.equal(total(first), total(second))
    expected, found = gradients(plain, first), gradients(recomputing, second)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())
    for call, stats in first.stats.items():
        assert all(torch.equal(value, second.stats[call][name]) for name, value in stats.items()), call
    valid = int((batch.layout.document_ids >= 0).sum())
    for call, router in plain.routers().items():
        assert int(first.stats[call]["counts_E"].sum()) == valid * router.topk


def test_replayed_routing_reproduces_bitwise_and_holds() -> None:
    model = small_model()
    batch = packed_batch(model)
    first = model.loss(batch)
    chosen = routing(first)
    assert set(chosen) == set(model.routers()) == {"layers.1", "layers.5", "mtp.0.layers.1", "mtp.1.layers.1"}
    expected = gradients(model, first)
    again = model.loss(batch, chosen)
    assert torch.equal(total(again), total(first))
    found = gradients(model, again)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())

    with torch.no_grad():
        for router in model.routers().values():
            router.weight.neg_()
    moved = routing(model.loss(batch))
    assert any(not torch.equal(moved[call], chosen[call]) for call in chosen)
    held = model.loss(batch, chosen)
    assert all(torch.equal(indices, chosen[call]) for call, indices in routing(held).items())
    # Scores and weights follow the router at hand: its gradient is not lost.
    assert gradients(model, held)["layers.1.mixer.router.weight"].abs().sum() > 0


def router(num_experts: int, topk: int, n_group: int, topk_group: int) -> Router:
    built = Router(
        num_experts, num_experts, topk, n_group=n_group, topk_group=topk_group, norm_topk=True, scaling=1.0, std=0.02
    )
    with torch.no_grad():
        built.weight.copy_(torch.eye(num_experts))
        built.correction_bias.zero_()
    return built


@pytest.mark.parametrize("offset", [0.0, -3.0, -60.0])
def test_groups_with_negative_biased_scores(offset: float) -> None:
    """With every score + bias below zero, experts outside the chosen groups must still lose (a mask of 0 lets them win)."""
    built = router(num_experts=12, topk=3, n_group=4, topk_group=2)
    logits = torch.randn(1, 50, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        built.correction_bias.fill_(offset)
    indices, weights, stats = built(logits, torch.ones(1, 50, dtype=torch.bool))
    biased = logits.sigmoid() + offset
    groups = biased.unflatten(-1, (4, 3)).topk(2).values.sum(-1).topk(2).indices
    assert ((indices // 3)[..., None] == groups[..., None, :]).any(-1).all()
    for position in range(50):  # the definition, one token at a time
        allowed = [e for e in range(12) if e // 3 in groups[0, position].tolist()]
        best = sorted(allowed, key=lambda e: -float(logits[0, position, e]))[:3]
        assert set(indices[0, position].tolist()) == set(best)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 50))
    assert int(stats["counts_BE"].sum()) == 150


def test_scores_that_are_equal_or_underflow() -> None:
    """Any K distinct experts; weights, auxiliary sums and gradients stay finite where all scores are 0."""
    built = router(num_experts=8, topk=3, n_group=2, topk_group=1)
    logits = torch.stack([torch.zeros(8), torch.full((8,), -200.0), torch.full((8,), 1e30)])[None].requires_grad_()
    indices, weights, stats = built(logits, torch.ones(1, 3, dtype=torch.bool))
    assert all(len(set(chosen)) == 3 for chosen in indices[0].tolist())
    assert torch.equal(weights[0, 1], torch.zeros(3))
    torch.testing.assert_close(weights[0, ::2], torch.full((2, 3), 1 / 3))
    torch.testing.assert_close(stats["score_sums_BE"], torch.full((1, 8), 2 / 8))
    (grad,) = torch.autograd.grad(weights.square().sum() + stats["score_sums_BE"].square().sum(), logits)
    assert grad.isfinite().all()


def test_bias_steers_selection_but_not_weights_and_has_no_gradient() -> None:
    built = router(num_experts=8, topk=2, n_group=1, topk_group=1)
    logits = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        built.correction_bias[5] = 10.0
    indices, weights, _ = built(logits, torch.ones(1, 30, dtype=torch.bool))
    assert (indices == 5).any(-1).all()
    scores = logits.sigmoid().gather(-1, indices)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    weights.sum().backward()
    assert not built.correction_bias.requires_grad
    assert built.weight.grad is not None


def test_foreign_families_and_mixers_are_user_errors() -> None:
    with pytest.raises(UserError, match="cannot import 'no.such.family'"):
        load_family("no.such.family")
    with pytest.raises(UserError, match="json exports no FAMILY"):
        load_family("json")
    with pytest.raises(UserError, match="cannot load 'json:Nothing'"):
        small_model(pattern="MX", mixers={"X": "json:Nothing"})


def test_a_document_in_two_pieces_is_refused() -> None:
    with pytest.raises(UserError, match="in two pieces"):
        small_model()(random_tokens(1, 4), torch.tensor([[0, 1, 0, 0]]))


def test_a_model_on_meta_gives_shapes() -> None:
    model = small_model(pattern="M*-", mtp_blocks=0, mtp_depths=0).to("meta")
    logits = model(torch.zeros(2, 9, dtype=torch.int32, device="meta"))
    assert logits.is_meta and logits.shape == (2, 9, 64)
