"""The convolution: the definition in fp64, the shifted path against it, documents, padding, initial state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.support import make_documents, relative
from titan_nemotron.ops.conv import causal_conv1d, causal_conv1d_state, causal_conv1d_step, shifted
from titan_nemotron.ops.conv.reference import masked_sum
from titan_nemotron.ops.conv.shifted import shifted_sum


def make_inputs(seed: int, num_rows: int, length: int, channels: int, taps: int) -> list[Tensor]:
    """x, weight, bias, initial state, in fp64."""
    random = torch.Generator().manual_seed(seed)
    shapes = (num_rows, length, channels), (channels, taps), (channels,), (num_rows, channels, taps)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def run(convolve, inputs: list[Tensor], ids: Tensor, dtype: torch.dtype, bias: bool, state: bool) -> tuple[Tensor, ...]:
    x, weight, b, initial = leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    y = convolve(x, weight, b if bias else None, ids, initial if state else None)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    used = [leaf for leaf, use in zip(leaves, (True, True, bias, state)) if use]
    return y.detach(), *torch.autograd.grad(y, used, upstream)


def test_the_reference_has_the_right_derivatives():
    inputs = [tensor.requires_grad_() for tensor in make_inputs(0, 2, 7, 3, 4)]
    ids = torch.tensor([[0, 0, 1, 1, -1, 1, 2], [-1, -1, 0, 0, 0, 3, -1]])
    assert torch.autograd.gradcheck(lambda x, w, b, s: causal_conv1d(x, w, b, ids, s), inputs)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 3),
    length=st.integers(1, 20),
    taps=st.sampled_from([1, 2, 4]),
    boundary=st.sampled_from([0.0, 0.1, 0.5]),
    padding=st.sampled_from([0.0, 0.2, 1.0]),
    bias=st.booleans(),
    state=st.booleans(),
    block=st.sampled_from([1, 3, 256]),
)
def test_shifted_equals_the_definition(seed, num_rows, length, taps, boundary, padding, bias, state, block):
    inputs = make_inputs(seed, num_rows, length, 5, taps)
    ids = make_documents(seed, num_rows, length, boundary, padding)
    expected = run(masked_sum, inputs, ids, torch.float64, bias, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shifted, "BLOCK", block)
        actual = run(shifted_sum, inputs, ids, torch.float32, bias, state)
    for a, e in zip(actual, expected, strict=True):
        assert relative(a, e) < 1e-5


def test_step_continues_a_sequence():
    x, weight, bias, state = make_inputs(0, 2, 5, 3, 4)
    expected = causal_conv1d(x, weight, bias, torch.zeros(2, 5, dtype=torch.int32), state)
    for t in range(5):
        y, state = causal_conv1d_step(state, x[:, t], weight, bias)
        torch.testing.assert_close(y, expected[:, t])
    torch.testing.assert_close(state, x[:, 1:].mT)


@pytest.mark.parametrize("pieces", [[1, 1, 1, 6], [4, 5], [9], [2, 0, 7]], ids=str)
def test_the_state_continues_a_sequence(pieces):
    """In pieces, each row padded by another number of positions: the outputs and the state are those of the whole."""
    x, weight, bias, state = make_inputs(0, 2, 9, 3, 4)
    expected = causal_conv1d(x, weight, bias, torch.zeros(2, 9, dtype=torch.int32), state)
    found, start = [], 0
    for length in pieces:
        part = torch.cat([x[:, start : start + length], torch.full((2, 2, 3), torch.nan, dtype=x.dtype)], dim=1)
        ids = torch.zeros(2, length + 2, dtype=torch.int32)
        ids[:, length:] = -1
        found.append(causal_conv1d(part, weight, bias, ids, state)[:, :length])
        state = causal_conv1d_state(state, part, ids)
        start += length
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
    assert torch.equal(state, x[:, -4:].mT)


def test_rows_of_different_lengths_keep_their_own_state():
    x, _, _, state = make_inputs(0, 3, 5, 3, 4)
    ids = torch.tensor([[0, 0, 0, -1, -1], [-1] * 5, [0] * 5])
    found = causal_conv1d_state(state.float(), x, ids)
    assert found.dtype == torch.float32
    assert torch.equal(found[0], torch.cat([state[0, :, 3:], x[0, :3].T], dim=1).float())
    assert torch.equal(found[1], state[1].float())
    assert torch.equal(found[2], x[2, 1:].T.float())


def test_nothing_crosses_documents():
    inputs, ids = make_inputs(0, 1, 20, 3, 4), torch.tensor([[0] * 5 + [1] * 6 + [-1] + [2] * 8])
    inside = ids[0] == 1
    changed = [tensor.clone() for tensor in inputs]
    changed[0][:, inside] = 1e4 * changed[0][:, inside].flip(1)
    before, after = (run(shifted_sum, tensors, ids, torch.float32, True, True) for tensors in (inputs, changed))
    for index in (0, 1):  # y and the gradient of x
        assert torch.equal(after[index][:, ~inside], before[index][:, ~inside])


def test_bf16_inputs_are_summed_in_fp32():
    x, weight, bias, _ = make_inputs(0, 2, 30, 8, 4)
    ids = make_documents(0, 2, 30, 0.1, 0.1)
    y = causal_conv1d(x.bfloat16(), weight.float(), bias.float(), ids)
    assert y.dtype == torch.bfloat16
    assert relative(y, masked_sum(x.bfloat16().double(), weight, bias, ids, None)) < 4e-3


def test_a_compiled_convolution_is_one_graph():
    inputs, ids = make_inputs(0, 2, 20, 3, 4), make_documents(0, 2, 20, 0.1, 0.1)
    compiled = torch.compile(shifted_sum, fullgraph=True, backend="aot_eager")
    arguments = (inputs, ids, torch.float32, True, True)
    for a, e in zip(run(compiled, *arguments), run(shifted_sum, *arguments), strict=True):
        assert torch.equal(a, e)
