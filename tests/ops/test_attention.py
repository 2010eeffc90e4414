"""Attention: the definition in fp64, one call a document against it, documents, windows, padding, the GPU's block mask."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.ops import attention as ops
from titan_nemotron.ops.attention import attention, cached_attention, documents, flex
from titan_nemotron.ops.attention.flex import make_block_mask
from titan_nemotron.ops.attention.spans import Span, span_attention, span_attention_backward

# Segments of a row, in tokens; negative is padding.
segments = st.lists(st.integers(-4, 40).filter(bool), min_size=1, max_size=5)


def layout_of(*rows: list[int]) -> DocumentLayout:
    length = max(sum(map(abs, row)) for row in rows)
    ids = torch.full((len(rows), length), -1)
    for index, row in enumerate(rows):
        start = 0
        for document, size in enumerate(row):
            ids[index, start : start + abs(size)] = document if size > 0 else -1
            start += abs(size)
    return DocumentLayout.from_document_ids(ids)


def inputs(seed: int, layout: DocumentLayout, groups: int, repeat: int, size: int, size_v: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    shape = layout.document_ids.shape
    heads = ((groups * repeat, size), (groups, size), (groups, size_v))
    return [torch.randn(*shape, *head, generator=random, dtype=torch.float64).requires_grad_() for head in heads]


def by_definition(q: Tensor, k: Tensor, v: Tensor, layout: DocumentLayout, scale: float, window: int | None) -> Tensor:
    """Position by position."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    k, v = (tensor.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for tensor in (k, v))
    for row, ids in enumerate(layout.document_ids.tolist()):
        for i, document in enumerate(ids):
            if document < 0:
                continue
            seen = [j for j in range(i + 1) if ids[j] == document and (window is None or i - j <= window)]
            weights = torch.softmax(scale * torch.einsum("hd,jhd->hj", q[row, i], k[row, seen]), -1)
            out[row, i] = torch.einsum("hj,jhd->hd", weights, v[row, seen])
    return out


def with_gradients(run, leaves: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    out = run(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]


def test_the_reference_has_the_right_values_and_derivatives():
    layout = layout_of([3, -1, 2], [1, 5])
    leaves = inputs(0, layout, 2, 2, 3, 4)
    for window in (None, 1):
        run = lambda *qkv: attention(*qkv, layout, scale=0.7, window=window)  # noqa: E731
        torch.testing.assert_close(run(*leaves), by_definition(*leaves, layout, 0.7, window))
        assert torch.autograd.gradcheck(run, leaves)


@example(seed=0, rows=[[1, 2]], groups=1, repeat=1, sizes=(8, 8), window=None)
@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    rows=st.lists(segments, min_size=1, max_size=3),
    groups=st.integers(1, 2),
    repeat=st.integers(1, 3),
    sizes=st.sampled_from([(8, 8), (8, 5), (5, 8)]),
    window=st.sampled_from([None, 0, 1, 7, 30, 1000]),
)
def test_one_call_a_document_equals_the_mask(seed, rows, groups, repeat, sizes, window):
    layout = layout_of(*rows)
    leaves = inputs(seed, layout, groups, repeat, *sizes)
    run = lambda *qkv: attention(*qkv, layout, scale=0.5, window=window)  # noqa: E731
    for actual, expected in zip(with_gradients(run, leaves, torch.float32), with_gradients(run, leaves, torch.float64)):
        torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)


def test_a_window_in_a_long_document():
    """Several blocks of queries, each looking back beyond its own."""
    layout = layout_of([333, 7, 200], [540])
    leaves = inputs(0, layout, 1, 2, 8, 8)
    for window in (63, 64, 100, 300):
        run = lambda *qkv: attention(*qkv, layout, scale=0.5, window=window)  # noqa: E731
        pairs = zip(with_gradients(run, leaves, torch.float32), with_gradients(run, leaves, torch.float64))
        for actual, expected in pairs:
            torch.testing.assert_close(actual.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [([6, 7, -2],), ([5, 5], [10]), ([-3, 12],), ([2, 3],)])
def test_nothing_crosses_a_boundary_and_padding_is_zero(rows):
    layout = layout_of(*rows)
    q, k, v = (leaf.detach().float().requires_grad_() for leaf in inputs(0, layout, 1, 2, 8, 8))
    out = attention(q, k, v, layout, scale=0.5)
    assert not out[~layout.valid].any()
    own = (layout.document_ids == 0) & (torch.arange(len(rows)) == 0)[:, None]
    for grad in torch.autograd.grad(out[own].square().sum(), (q, k, v)):
        assert grad[own].any() and not grad[~own].any()
    # what padding holds does not matter, not even when it is not a number
    spoiled = [tensor.detach().masked_fill(~layout.valid[..., None, None], torch.nan) for tensor in (q, k, v)]
    assert torch.equal(attention(*spoiled, layout, scale=0.5), out)


def test_large_scores_are_safe():
    layout = layout_of([9, 4, -3])
    leaves = [leaf * 1e4 for leaf in inputs(0, layout, 2, 1, 8, 8)]
    for tensor in with_gradients(lambda *qkv: attention(*qkv, layout, scale=1.0), leaves, torch.float32):
        assert tensor.isfinite().all()


def test_bf16():
    layout = layout_of([9, 30, -3])
    leaves = [leaf.detach().bfloat16() for leaf in inputs(0, layout, 2, 2, 8, 8)]
    run = lambda *qkv: attention(*qkv, layout, scale=0.5)  # noqa: E731
    pairs = zip(with_gradients(run, leaves, torch.bfloat16), with_gradients(run, leaves, torch.float64))
    for actual, expected in pairs:
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.double(), expected, atol=0.05, rtol=0.05)


def test_compiled_once_for_every_packing():
    compiled = torch.compile(
        lambda q, k, v, layout: attention(q, k, v, layout, scale=0.5), fullgraph=True, backend="aot_eager"
    )
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for row in ([20], [3, 17], [5, 5, 5, -5]):
            layout = layout_of(row)
            leaves = inputs(0, layout, 1, 2, 8, 8)
            expected = with_gradients(lambda *qkv: attention(*qkv, layout, scale=0.5), leaves, torch.float32)
            actual = with_gradients(lambda *qkv: compiled(*qkv, layout), leaves, torch.float32)
            torch.testing.assert_close(actual, expected)


@settings(max_examples=30)
@given(rows=st.lists(segments, min_size=1, max_size=2), window=st.sampled_from([None, 0, 5, 17, 64]))
def test_the_block_mask_is_the_mask(rows, window):
    """Blocks are called empty, partial or full exactly as torch finds by looking at every pair of positions."""
    from torch.nn.attention.flex_attention import create_block_mask

    layout = layout_of(*rows)
    shape = layout.document_ids.shape
    ours = make_block_mask(layout, window, block=16)
    theirs = create_block_mask(ours.mask_mod, shape[0], None, shape[1], shape[1], device="cpu", BLOCK_SIZE=16)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
def test_flex_attention_with_our_block_mask(window, monkeypatch):
    """Forward only: torch refuses its backward on a CPU."""
    monkeypatch.setattr(flex, "_compiled_flex_attention", flex._flex_attention)
    layout = layout_of([150, -4, 100, 3], [257])
    q, k, v = (leaf.detach().float() for leaf in inputs(0, layout, 2, 2, 16, 16))
    for _ in range(2):  # the second time with the mask that was kept
        out = flex.attention_by_flex(q, k, v, layout, 0.5, window)
        torch.testing.assert_close(out, ops._reference(q, k, v, layout, 0.5, window), atol=2e-6, rtol=1e-5)
    assert ("block mask", window) in layout.derived


@torch.no_grad()
@pytest.mark.parametrize("path", ["flex", "reference"])
def test_masks_inside_a_compiled_block_that_is_recomputed(path, monkeypatch):
    """It makes its mask and keeps it nowhere, or finds one that an eager call has kept; for one shape of rows, and for any."""
    monkeypatch.setattr(ops, "chosen", lambda op, tensor: path)

    def run(q: Tensor, k: Tensor, v: Tensor, layout: DocumentLayout) -> Tensor:
        return checkpoint(lambda *qkv: attention(*qkv, layout, scale=0.5), q, k, v, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        for row in ([150, -4, 103], [257], [10, 100, 147]):
            layout = layout_of(row)
            q, k, v = (leaf.detach().float() for leaf in inputs(0, layout, 2, 2, 16, 16))
            for _ in range(2):
                out = compiled(q, k, v, layout)
                torch.testing.assert_close(out, ops._reference(q, k, v, layout, 0.5, None), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("new", [1, 3])
def test_new_queries_over_cached_keys(new):
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    q, k, v = draw(3, new, 6, 8), draw(3, 11, 2, 8), draw(3, 11, 2, 8)
    mask = torch.arange(11) <= torch.tensor([4, 0, 7])[:, None, None] + torch.arange(new)[:, None]
    mask[1, 0] = False
    out = cached_attention(q, k, v, mask, scale=0.3)
    k, v = (tensor.repeat_interleave(3, dim=2) for tensor in (k, v))
    scores = torch.einsum("blhd,bshd->bhls", q, k) * 0.3
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num(0)
    torch.testing.assert_close(out, torch.einsum("bhls,bshd->blhd", weights, v))
    assert not out[1, 0].any()


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all parts, from out [T, H, E] and lse [T, H] over those of each."""
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    weights = [(one - lse).exp().nan_to_num()[..., None] for _, one in parts]
    return sum((weight * out for weight, (out, _) in zip(weights, parts)), torch.zeros_like(parts[0][0])), lse


@settings(max_examples=40)
@given(
    seed=st.integers(0, 99),
    rows=st.lists(segments, min_size=1, max_size=3),
    groups=st.integers(1, 2),
    repeat=st.integers(1, 3),
    sizes=st.sampled_from([(8, 8), (8, 5), (5, 8)]),
    cut=st.integers(1, 40),
)
def test_attention_over_pieces_of_the_keys_joins_to_the_whole(seed, rows, groups, repeat, sizes, cut):
    """Each document's queries read its keys in pieces of `cut`: whole ones before their own, and theirs up to themselves."""
    layout = layout_of(*rows)
    leaves = inputs(seed, layout, groups, repeat, *sizes)
    expected = with_gradients(lambda *qkv: attention(*qkv, layout, scale=0.5), leaves, torch.float64)
    starts, padding = (found.tolist() for found in documents.segments(layout.document_ids))
    calls: list[list[Span]] = [[]]  # no query twice in one
    for start, end, skip in zip(starts, [*starts[1:], layout.document_ids.numel()], padding):
        for query in range(start, end, cut) if not skip else ():
            query_end = min(query + cut, end)
            calls[0].append(Span(query, query_end, query, query_end, causal=True))
            for index, key in enumerate(range(start, query, cut), 1):
                calls.extend([] for _ in range(index + 1 - len(calls)))
                calls[index].append(Span(query, query_end, key, key + cut, causal=False))
    upstream = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        q, k, v, grad = (tensor.detach().flatten(0, 1).to(dtype) for tensor in (*leaves, upstream))
        out, lse = joined([span_attention(q, k, v, spans, 0.5) for spans in calls])
        grads = [span_attention_backward(grad, q, k, v, out, lse, spans, 0.5) for spans in calls]
        actual = [out, *(sum(parts[1:], parts[0]) for parts in zip(*grads))]
        for one, other in zip(actual, expected):
            torch.testing.assert_close(one.double(), other.flatten(0, 1), atol=tolerance, rtol=tolerance)
        assert torch.equal(lse == -torch.inf, ~layout.valid.flatten()[:, None].expand_as(lse))


def test_spans_are_the_operations_that_a_gpu_takes():
    """Shapes of both calls on a GPU that is not there, in 16 bits, with heads whose sizes it does not take as they are."""
    spans = [Span(0, 7, 3, 20, causal=False), Span(10, 30, 20, 50, causal=False), Span(40, 48, 40, 48, causal=True)]
    with FakeTensorMode():
        q, k, v = (torch.empty(60, h, d, dtype=torch.bfloat16, device="cuda") for h, d in ((4, 20), (2, 20), (2, 12)))
        out, lse = span_attention(q, k, v, spans, 0.5)
        assert (out.shape, lse.shape, lse.dtype) == ((60, 4, 12), (60, 4), torch.float32)
        grads = span_attention_backward(torch.empty_like(out), q, k, v, out, lse, spans, 0.5)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
