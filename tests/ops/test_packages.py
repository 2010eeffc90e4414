"""The adapters to mamba_ssm and causal_conv1d, run without a GPU, against our own paths.

The scan's kernels run under Triton's interpreter: the package is an oracle. The convolution's are CUDA: a stand-in
computes them, and insists on what the kernels insist on. Both in processes of their own, because Triton decides at import
whether it interprets, and causal_conv1d imports its CUDA extension at once.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PREAMBLE = """
import contextlib, sys, types
import torch, triton

torch.cuda.device = lambda index: contextlib.nullcontext()
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=1)
autotune = triton.autotune
triton.autotune = lambda configs, **options: autotune(configs[:1], **options)  # tuning needs a driver

def check(name, actual, expected, tolerance):
    error = (actual - expected).norm() / expected.norm().clamp_min(1e-6)
    assert error < tolerance, (name, float(error))

def gradients(outputs, leaves):
    random = torch.Generator().manual_seed(1)
    return torch.autograd.grad(outputs, leaves, [torch.randn(o.shape, generator=random) for o in outputs])
"""

SCAN = """
from titan_nemotron.ops.ssd.chunked import chunked_scan
from titan_nemotron.ops.ssd.mamba import mamba_scan

NAMES = "y final x dt A B C D dt_bias initial".split()
random = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, generator=random)

for ids, chunk_size, state in (
    ([[0] * 9 + [1] * 7 + [2] * 19, [0] * 16 + [1] * 15 + [2] + [-1] * 3], 16, True),
    ([[-1] * 3 + [0] * 15 + [-1] * 2 + [0] * 2 + [1] * 3], 12, False),
):
    ids = torch.tensor(ids, dtype=torch.int32)
    rows, length = ids.shape
    leaves = [draw(rows, length, 2, 8), draw(rows, length, 2), -torch.exp(draw(2)), draw(rows, length, 1, 16),
              draw(rows, length, 1, 16), draw(2), draw(2) - 2]
    leaves += [draw(rows, 2, 8, 16)] if state else []
    leaves = [leaf.requires_grad_() for leaf in leaves]
    initial = leaves[7] if state else None
    limit = (0.0, float("inf"))
    ours = chunked_scan(*leaves[:7], ids, limit, initial)
    theirs = mamba_scan(*leaves[:7], ids, limit, initial, chunk_size)
    pairs = zip((*theirs, *gradients(theirs, leaves)), (*ours, *gradients(ours, leaves)))
    for name, (a, e) in zip(NAMES, pairs):
        check(name, a, e, 4e-6)
print("equal")
"""

CONVOLUTION = """
from titan_nemotron.ops.conv import shifted
from titan_nemotron.ops.conv.package import packaged_sum, takes
from titan_nemotron.ops.conv.shifted import shifted_sum

sys.modules["causal_conv1d_cuda"] = types.ModuleType("causal_conv1d_cuda")
from causal_conv1d import causal_conv1d_interface

def check_layout(x, weight, bias, ids, initial):
    rows, channels, length = x.shape
    assert x.stride(1) == 1 and x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0 and channels % 8 == 0
    assert ids.dtype == torch.int32 and ids.is_contiguous() and bias.dtype == weight.dtype and initial is None

def forward(x, weight, bias, ids, initial, out, final, silu):
    check_layout(x, weight, bias, ids, initial)
    out.copy_(causal_conv1d_interface.causal_conv1d_ref(x, weight, bias, seq_idx=ids, activation="silu"))

def backward(x, weight, bias, dout, ids, initial, dfinal, dx, dweight, dbias, dinitial, silu):
    check_layout(x, weight, bias, ids, initial)
    grads = shifted._backward(dout.mT, x.mT, weight, bias, None, ids)
    dx.copy_(grads[0].mT)
    dweight.copy_(grads[1])
    dbias.copy_(grads[2])

sys.modules["causal_conv1d_cuda"].causal_conv1d_fwd = forward
sys.modules["causal_conv1d_cuda"].causal_conv1d_bwd = backward

projected = torch.randn(2, 13, 43).requires_grad_()
ids = torch.tensor([[0] * 4 + [1] * 2 + [-1] * 3 + [1] * 4, [0] * 12 + [-1]], dtype=torch.int64)
for start in (0, 5):  # strides that the kernels take, and strides that they do not
    x, weight, bias = projected[:, :, start : start + 16], torch.randn(16, 4), torch.randn(16)
    leaves = [projected, weight.requires_grad_(), bias.requires_grad_()]
    assert takes(x, weight, None) and not takes(x, weight, torch.zeros(2, 16, 4)) and not takes(x[..., :15], weight, None)
    theirs, ours = packaged_sum(x, weight, bias, ids), shifted_sum(x, weight, bias, ids, None)
    pairs = zip((theirs, *gradients([theirs], leaves)), (ours, *gradients([ours], leaves)))
    for name, (a, e) in zip(("y", "x", "weight", "bias"), pairs):
        check(name, a, e, 1e-6)
print("equal")
"""


@pytest.mark.parametrize("code", [SCAN, CONVOLUTION], ids=["scan", "convolution"])
def test_adapter_equals_ours(code):
    pytest.importorskip("triton")
    for name in ("mamba_ssm", "causal_conv1d"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code], env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0 and "equal" in result.stdout, result.stderr
