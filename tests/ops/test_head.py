"""The output layer's two operations: the definition, chunks against it, skipped targets, weights, temperature, extremes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_nemotron.ops import head as ops
from titan_nemotron.ops.head import linear_cross_entropy, linear_logprobs


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(ops, "ROWS", {"cpu": 4})
    monkeypatch.setattr(ops, "LOGITS", 64)
    monkeypatch.setattr(ops, "CACHE", 64)


def inputs(seed: int, tokens: int, size: int, vocabulary: int, skipped: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, w in fp64, targets with a share of -100, weights."""
    random = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, size, generator=random, dtype=torch.float64).requires_grad_()
    w = torch.randn(vocabulary, size, generator=random, dtype=torch.float64).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=random)
    targets[torch.rand(tokens, generator=random) < skipped] = -100
    return h, w, targets, torch.rand(tokens, generator=random, dtype=torch.float64)


def both(run, h: Tensor, w: Tensor) -> list[tuple[Tensor, ...]]:
    """Values and gradients in fp32 and in fp64; run gives a scalar to differentiate and other values."""
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (h, w)]
        scalar, *values = run(*leaves)
        gradients = torch.autograd.grad(scalar * 0.3, leaves)
        results.append(tuple(tensor.detach().double() for tensor in (scalar, *values, *gradients)))
    return results


def test_the_references_have_the_right_values_and_derivatives():
    h, w, targets, weights = inputs(0, 5, 3, 7, 0.4)
    logits = h @ w.T
    loss, logprobs = linear_cross_entropy(h, w, targets, weights)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(loss, (losses * weights).sum())
    torch.testing.assert_close(logprobs, -losses)
    logprobs, entropy = linear_logprobs(h, w, targets, 0.7)
    distribution = torch.distributions.Categorical(logits=logits / 0.7)
    valid = targets >= 0
    torch.testing.assert_close(logprobs[valid], distribution.log_prob(targets.clamp(min=0))[valid])
    torch.testing.assert_close(entropy[valid], distribution.entropy()[valid])
    assert not logprobs[~valid].any() and not entropy[~valid].any() and not entropy.requires_grad
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, weights)[0], (h, w))
    assert torch.autograd.gradcheck(lambda h, w: linear_logprobs(h, w, targets, 0.7)[0], (h, w))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    tokens=st.integers(0, 20),
    vocabulary=st.sampled_from([1, 2, 17, 40]),
    skipped=st.sampled_from([0.0, 0.3, 1.0]),
    weighted=st.booleans(),
    temperature=st.sampled_from([1.0, 0.5, 3.0]),
)
def test_chunks_equal_the_definition(seed, tokens, vocabulary, skipped, weighted, temperature):
    h, w, targets, weights = inputs(seed, tokens, 6, vocabulary, skipped)

    def cross_entropy(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy(h, w, targets, weights.to(h.dtype) if weighted else None)

    def logprobs(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        values, entropy = linear_logprobs(h, w, targets, temperature)
        return (values * weights.to(h.dtype)).sum(), values, entropy

    for run in (cross_entropy, logprobs):
        for actual, expected in zip(*both(run, h, w)):
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    with torch.no_grad():
        loss = cross_entropy(h.float(), w.float())[0]
        torch.testing.assert_close(loss.double(), cross_entropy(h, w)[0], atol=2e-5, rtol=2e-5)


def test_nothing_to_score_is_zero_and_leaves_zero_gradients():
    h, w, targets, _ = inputs(0, 9, 4, 11, 1.0)
    for run in (lambda h, w: linear_cross_entropy(h, w, targets), lambda h, w: linear_logprobs(h, w, targets, 2.0)):
        h32, w32 = (tensor.detach().float().requires_grad_() for tensor in (h, w))
        out = run(h32, w32)
        assert not any(tensor.any() for tensor in out)
        out[0].sum().backward()
        assert not h32.grad.any() and not w32.grad.any()


def test_extreme_logits():
    h, w, targets, _ = inputs(0, 9, 4, 11, 0.2)
    scaled = lambda factor: (h.detach() * factor, w)  # noqa: E731
    for factor in (1e4, 1e18):
        for actual in both(lambda h, w: linear_cross_entropy(h, w, targets), *scaled(factor)):
            assert all(tensor.isfinite().all() for tensor in actual)
        run = lambda h, w: (linear_logprobs(h, w, targets)[0].sum(), linear_logprobs(h, w, targets)[1])  # noqa: E731
        for actual in both(run, *scaled(factor)):
            assert all(tensor.isfinite().all() for tensor in actual)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e8, 1e18])
def test_what_all_logits_share_does_not_matter(offset):
    """Eleven, or three, equally likely tokens: the entropy is a logarithm, not a small difference of large logits."""
    h = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    w = torch.tensor([[offset, 0.0]] * 3 + [[offset, -1e30]] * 8)
    logprobs, entropy = linear_logprobs(h, w, torch.tensor([2, 2]))
    expected = torch.tensor([11.0, 3.0]).log()
    torch.testing.assert_close(logprobs, -expected)
    torch.testing.assert_close(entropy, expected)


def test_no_gradient_is_computed_that_nobody_asked_for(monkeypatch):
    h, w, targets, _ = inputs(0, 9, 4, 11, 0.2)
    h, w = h.detach().float(), w.detach().float()
    asked = []
    compute = ops._GRADIENTS
    monkeypatch.setattr(ops, "_GRADIENTS", lambda *args: asked.append(args[5:7]) or compute(*args))
    linear_cross_entropy(h, w, targets)
    with torch.no_grad():
        linear_cross_entropy(h.clone().requires_grad_(), w, targets)
    assert asked == []
    linear_cross_entropy(h.clone().requires_grad_(), w, targets)[0].backward()
    linear_cross_entropy(h, w.clone().requires_grad_(), targets)[0].backward()
    linear_logprobs(h.clone().requires_grad_(), w, targets)[0].sum().backward()
    assert asked == [(True, False), (False, True), (True, False)]


def test_the_weight_gradient_is_kept_once_and_given_away():
    """One buffer from the loss to the parameter; a second backward, which would find it used, is an error."""
    h, w, targets, _ = inputs(0, 9, 4, 11, 0.2)
    w = w.detach().float().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda x: x):
        loss, logprobs = linear_cross_entropy(h.detach().float(), w, targets)
    assert not logprobs.requires_grad
    (loss / 7).backward()
    assert kept and w.grad.data_ptr() == kept[-1]
    loss, _ = linear_cross_entropy(h.detach().float(), w, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bf16_hidden_states_meet_an_fp32_weight():
    """The gradient of the weight keeps what bf16 would lose."""
    h, w, targets, _ = inputs(0, 300, 8, 11, 0.0)
    h, w = h.detach().bfloat16().requires_grad_(), w.detach().float().requires_grad_()
    exact_h, exact_w = (tensor.detach().double().requires_grad_() for tensor in (h, w))
    linear_cross_entropy(h, w, targets)[0].backward()
    linear_cross_entropy(exact_h, exact_w, targets)[0].backward()
    assert h.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float32
    torch.testing.assert_close(w.grad.double(), exact_w.grad, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(h.grad.double(), exact_h.grad, atol=0.01, rtol=0.01)


def test_compiled():
    h, w, targets, weights = inputs(0, 9, 4, 11, 0.2)
    h, w, weights = (tensor.detach().float() for tensor in (h, w, weights))
    leaves = (h.requires_grad_(), w.requires_grad_())
    for op, options in ((linear_cross_entropy, (targets, weights)), (linear_logprobs, (targets, 0.5))):
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        results = []
        for run in (op, compiled):
            values = run(*leaves, *options)
            results.append((*values, *torch.autograd.grad(values[0].sum() * 0.5, leaves)))
        torch.testing.assert_close(*results)
