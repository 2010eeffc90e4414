"""The scan: the definition in fp64, the chunked path against it, documents, padding, states, chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.support import make_documents, relative
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


@settings(max_examples=40, deadline=None)
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


def test_step_continues_the_scan():
    inputs = make_inputs(3, 2, 5)
    x, dt, A, B, C, D, dt_bias, state = inputs
    expected, final = ssd_scan(*inputs[:7], torch.zeros(2, 5, dtype=torch.int32), initial_state_BHPN=state)
    for t in range(5):
        y, state = ssd_step(state, x[:, t], dt[:, t], A, B[:, t], C[:, t], D, dt_bias)
        torch.testing.assert_close(y, expected[:, t])
    torch.testing.assert_close(state, final)
