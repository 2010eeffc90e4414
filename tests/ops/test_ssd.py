"""The scan: the definition in fp64, the chunked path against it, documents, padding, states, chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.support import make_documents, of_largest, relative
from titan_nemotron.ops.ssd import chunked, ssd_scan, ssd_step
from titan_nemotron.ops.ssd.chunked import chunked_scan
from titan_nemotron.ops.ssd.reference import sequential_scan

UNLIMITED = (0.0, float("inf"))
NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial_state")


def make_inputs(
    seed: int, num_rows: int, length: int, *, groups: int = 2, repeat: int = 2, channels: int = 4, state: int = 6
) -> list[Tensor]:
    """x, dt, A, B, C, D, dt_bias, initial state, in fp64; decays from 1 to far below the smallest fp32 number."""
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    heads = groups * repeat
    dt = normal(num_rows, length, heads) * 3
    return [
        normal(num_rows, length, heads, channels), dt, -torch.exp(normal(heads)),
        normal(num_rows, length, groups, state), normal(num_rows, length, groups, state), normal(heads),
        normal(heads) - 2, normal(num_rows, heads, channels, state),
    ]  # fmt: skip


def run(scan, inputs: list[Tensor], ids: Tensor, dtype: torch.dtype, limit=UNLIMITED) -> tuple[Tensor, ...]:
    """Outputs and gradients under fixed upstream gradients."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    y, state = scan(*leaves[:7], ids, limit, leaves[7])
    random = torch.Generator().manual_seed(1)
    upstream = [torch.randn(t.shape, generator=random, dtype=torch.float64).to(dtype) for t in (y, state)]
    return y.detach(), state.detach(), *torch.autograd.grad((y, state), leaves, upstream)


def test_the_reference_has_the_right_derivatives():
    inputs = [tensor.requires_grad_() for tensor in make_inputs(0, 2, 7, channels=2, state=3)]
    ids = torch.tensor([[0, 0, 1, 1, -1, 1, 2], [-1, -1, 0, 0, 0, 3, -1]])
    scan = lambda *leaves: ssd_scan(*leaves[:7], ids, initial_state_BHPN=leaves[7])  # noqa: E731
    assert torch.autograd.gradcheck(scan, inputs, fast_mode=False)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 3),
    length=st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 130])),
    groups=st.sampled_from([1, 2, 3]),
    repeat=st.sampled_from([1, 2, 3]),
    boundary=st.sampled_from([0.0, 0.05, 0.5]),
    padding=st.sampled_from([0.0, 0.1, 1.0]),
    limit=st.sampled_from([UNLIMITED, (0.01, 0.3)]),
    block=st.sampled_from([1, 1 << 18]),
)
def test_chunked_equals_the_definition(seed, num_rows, length, groups, repeat, boundary, padding, limit, block):
    inputs = make_inputs(seed, num_rows, length, groups=groups, repeat=repeat)
    ids = make_documents(seed, num_rows, length, boundary, padding)
    expected = run(sequential_scan, inputs, ids, torch.float64, limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "BLOCK", block)
        actual = run(chunked_scan, inputs, ids, torch.float32, limit)
    for name, a, e in zip(("y", "final_state", *NAMES), actual, expected, strict=True):
        assert relative(a, e) < 1e-5, name


@pytest.mark.parametrize(("scale_dt", "scale_A"), [(1e3, 1), (1e8, 1), (1e12, 1), (1, 1e-8), (1, 1e9), (1, 1e20)])
def test_huge_time_steps_and_decays(scale_dt, scale_A):
    """Sums of decays far beyond what fp32 resolves, forward and backward."""
    inputs = make_inputs(5, 2, 70)
    inputs[1], inputs[2] = (inputs[1] * scale_dt).float().double(), (inputs[2] * scale_A).float().double()
    ids = make_documents(5, 2, 70, 0.05, 0.1)
    expected = run(sequential_scan, inputs, ids, torch.float64)
    for name, a, e in zip(("y", "final_state", *NAMES), run(chunked_scan, inputs, ids, torch.float32), expected):
        assert of_largest(a, e) < 1e-5, name


def test_step_continues_the_scan():
    inputs = make_inputs(3, 2, 5)
    x, dt, A, B, C, D, dt_bias, state = inputs
    expected, final = ssd_scan(*inputs[:7], torch.zeros(2, 5, dtype=torch.int32), initial_state_BHPN=state)
    for t in range(5):
        y, state = ssd_step(state, x[:, t], dt[:, t], A, B[:, t], C[:, t], D, dt_bias)
        torch.testing.assert_close(y, expected[:, t])
    torch.testing.assert_close(state, final)


def test_internal_chunks_do_not_change_the_result():
    inputs, ids = make_inputs(0, 2, 100), make_documents(0, 2, 100, 0.03, 0.1)
    results = []
    for chunk in (8, 16, 64, 128):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunked, "CHUNK", chunk)
            results.append(run(chunked_scan, inputs, ids, torch.float32))
    for other in results[1:]:
        for a, e in zip(other, results[0], strict=True):
            assert relative(a, e.double()) < 2e-6


def test_the_hint_of_a_chunk_changes_nothing():
    inputs, ids = [tensor.float() for tensor in make_inputs(0, 1, 40)], make_documents(0, 1, 40, 0.1, 0.1)
    first, second = (ssd_scan(*inputs[:7], ids, chunk_size=size)[0] for size in (16, 128))
    assert torch.equal(first, second)


@pytest.mark.parametrize("other", [1.0, 1e4], ids=["noise", "huge"])
def test_nothing_crosses_documents(other):
    """Perturbing one document changes no other, forward or backward, wherever the boundaries fall in the chunks."""
    inputs, ids = make_inputs(0, 1, 150), torch.full((1, 150), -1)
    for document, (start, stop) in enumerate([(0, 30), (30, 64), (66, 69), (69, 150)]):
        ids[0, start:stop] = document
    changed = [tensor.clone() for tensor in inputs]
    inside = ids[0] == 1
    for index in (0, 1, 3, 4):  # x, dt, B, C
        changed[index][:, inside] = other * changed[index][:, inside].flip(1)
    before, after = (run(chunked_scan, tensors, ids, torch.float32) for tensors in (inputs, changed))
    for index in (0, 2, 3, 5, 6):  # y and the gradients of x, dt, B, C
        torch.testing.assert_close(after[index][:, ~inside], before[index][:, ~inside], rtol=0, atol=0)
    assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("seed", range(3))
def test_extreme_decays(seed):
    """A state forgotten at once beside one that hardly changes: long sums of decays, small differences of them."""
    inputs = make_inputs(seed, 1, 130)
    dt = inputs[1]
    dt[:] = torch.where(torch.rand(dt.shape, generator=torch.Generator().manual_seed(seed)) < 0.2, 60.0, -12.0)
    ids = torch.zeros(1, 130, dtype=torch.int32)
    expected, actual = run(sequential_scan, inputs, ids, torch.float64), run(chunked_scan, inputs, ids, torch.float32)
    for name, a, e in zip(("y", "final_state", *NAMES), actual, expected, strict=True):
        assert relative(a, e) < 1e-5, name


def test_bf16_inputs_are_summed_in_fp32():
    inputs = [tensor.bfloat16().double() for tensor in make_inputs(0, 2, 70)]
    ids = make_documents(0, 2, 70, 0.05, 0.1)
    expected = run(sequential_scan, inputs, ids, torch.float64)
    leaves = [tensor.to(torch.bfloat16 if index in (0, 3, 4) else torch.float32) for index, tensor in enumerate(inputs)]
    y, state = ssd_scan(*leaves[:7], ids, initial_state_BHPN=leaves[7])
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert relative(y, expected[0]) < 4e-3
    assert relative(state, expected[1]) < 1e-5


def test_a_compiled_scan_is_one_graph():
    inputs, ids = make_inputs(0, 2, 20), make_documents(0, 2, 20, 0.1, 0.1)
    compiled = torch.compile(chunked_scan, fullgraph=True, backend="aot_eager")
    for a, e in zip(
        run(compiled, inputs, ids, torch.float32), run(chunked_scan, inputs, ids, torch.float32), strict=True
    ):
        assert torch.equal(a, e)


@pytest.mark.parametrize("length", [0, 1])
def test_short_rows(length):
    inputs = [tensor.float() for tensor in make_inputs(0, 2, length)]
    ids = torch.zeros(2, length, dtype=torch.int32)
    y, state = ssd_scan(*inputs[:7], ids, initial_state_BHPN=inputs[7])
    assert y.shape == inputs[0].shape
    if length == 0:
        assert torch.equal(state, inputs[7])
