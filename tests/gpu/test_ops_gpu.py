"""Every path of every op, and a whole model, on its device against the reference in fp64 on a CPU.

The bodies take a device: those of a CPU run with the rest of the tests, those of a GPU where there is one
(`./run_tests.sh tests/gpu`). Shapes are such as the packages' kernels take.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.support import batch_of, random_tokens, row_of, small_model
from tests.ops.support import SpanAttention, relative
from titan_nemotron.errors import UserError
from titan_nemotron.generation.decode import generate
from titan_nemotron.generation.sampling import Sampling
from titan_nemotron.layout import DocumentLayout
from titan_nemotron.ops import kernels
from titan_nemotron.ops.attention import attention
from titan_nemotron.ops.config import KernelsConfig
from titan_nemotron.ops.conv import causal_conv1d
from titan_nemotron.ops.experts import relu2_experts
from titan_nemotron.ops.head import linear_cross_entropy, linear_logprobs
from titan_nemotron.ops.linear import linear
from titan_nemotron.ops.norm import gated_rms_norm, rms_norm
from titan_nemotron.ops.ssd import ssd_scan

# Documents that end inside and at the end of chunks, of one token, padding before, between and behind them.
IDS = torch.cat([row_of(40, 24, 64, 1, 21), row_of(-3, 100, -7, 1, 1, 30, -8)])
ROWS, LENGTH = IDS.shape
LAYOUT = DocumentLayout.from_document_ids(IDS)
TARGETS = torch.where(torch.arange(150) % 7 == 0, -100, torch.arange(150) * 37 % 1000)
ENDS = torch.tensor(
    [5, 5, 30, 47], dtype=torch.int32
)  # of the experts' rows; the second has none, 3 rows have no expert

# A GPU multiplies fp32 in the packages' kernels with the mantissa of TF32, 10 bits.
TOLERANCES = {
    ("cpu", "float32"): 1e-5,
    ("cpu", "bfloat16"): 1e-2,
    ("cuda", "float32"): 3e-3,
    ("cuda", "bfloat16"): 2e-2,
}


@dataclass(frozen=True)
class Case:
    """call(*inputs, device): one tensor or more; shapes: of the inputs; wide: those that stay fp32 beside bf16."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]
    wide: tuple[int, ...] = ()


CASES = {
    "linear": Case("linear", ((3, 64), (48, 64), (48,)), lambda x, w, b, device: linear(x, w, b)),
    "norm": Case("norm", ((ROWS, LENGTH, 64), (64,)), lambda x, w, device: rms_norm(x, w, 1e-5), wide=(1,)),
    "gated norm": Case(
        "norm",
        ((ROWS, LENGTH, 64), (ROWS, LENGTH, 64), (64,)),
        lambda y, z, w, device: gated_rms_norm(y, z, w, 32, 1e-5),
        wide=(2,),
    ),
    "conv": Case(
        "conv",
        ((ROWS, LENGTH, 16), (16, 4), (16,)),
        lambda x, w, b, device: causal_conv1d(x, w, b, LAYOUT.to(device).document_ids),
    ),
    "conv with a state": Case(
        "conv",
        ((ROWS, LENGTH, 16), (16, 4), (16,), (ROWS, 16, 4)),
        lambda x, w, b, state, device: causal_conv1d(x, w, b, LAYOUT.to(device).document_ids, state),
        wide=(3,),
    ),
    "scan": Case(
        "ssd",
        ((ROWS, LENGTH, 4, 16), (ROWS, LENGTH, 4), (4,), *[(ROWS, LENGTH, 2, 16)] * 2, (4,), (4,), (ROWS, 4, 16, 16)),
        lambda x, dt, A_log, B, C, D, bias, state, device: ssd_scan(
            *(x, dt, -torch.exp(A_log), B, C, D, bias, LAYOUT.to(device).document_ids),
            chunk_size=32,
            initial_state_BHPN=state,
        ),
        wide=(2, 5, 6, 7),
    ),
    "attention": Case(
        "attention",
        ((ROWS, LENGTH, 4, 16), *[(ROWS, LENGTH, 2, 16)] * 2),
        lambda q, k, v, device: attention(q, k, v, LAYOUT.to(device), scale=0.25),
    ),
    "attention in a window": Case(
        "attention",
        ((ROWS, LENGTH, 4, 16), *[(ROWS, LENGTH, 2, 16)] * 2),
        lambda q, k, v, device: attention(q, k, v, LAYOUT.to(device), scale=0.25, window=20),
    ),
    "attention of spans": Case(
        "attention_spans",
        ((60, 4, 16), (50, 2, 16), (50, 2, 24)),
        lambda q, k, v, device: SpanAttention.apply(q, k, v),
    ),
    "experts": Case(
        "experts",
        ((50, 32), (4, 48, 32), (4, 32, 48), (50,)),
        lambda x, up, down, weights, device: relu2_experts(x, up, down, weights, ENDS.to(device)),
        wide=(3,),
    ),
    "loss": Case(
        "head",
        ((150, 32), (1000, 32)),
        lambda h, w, device: linear_cross_entropy(h, w, TARGETS.to(device)),
        wide=(1,),
    ),
    "log-probabilities": Case(
        "head",
        ((150, 32), (1000, 32)),
        lambda h, w, device: linear_logprobs(h, w, TARGETS.to(device), 0.7),
        wide=(1,),
    ),
}


def on(device: str, *values: object) -> Any:
    return pytest.param(*values, device, marks=[pytest.mark.gpu] if device == "cuda" else [])


PATHS = [
    on(device, name, path.name)
    for name, case in CASES.items()
    for path in kernels.PATHS[case.op]
    for device in path.devices
    if path is not kernels.REFERENCE
]


@pytest.fixture(autouse=True)
def unforced() -> Iterator[None]:
    yield
    kernels.configure(KernelsConfig())


def values_and_gradients(case: Case, inputs: list[Tensor], device: str) -> list[Tensor]:
    leaves = [tensor.to(device).requires_grad_() for tensor in inputs]
    outputs = case.call(*leaves, device=device)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    above = torch.Generator().manual_seed(1)
    pairs = [
        (output, torch.randn(output.shape, generator=above).bfloat16().to(device, output.dtype))
        for output in outputs
        if output.requires_grad
    ]
    differentiable, upstream = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(differentiable, leaves, upstream)
    return [tensor.detach().cpu() for tensor in (*outputs, *gradients)]


def test_every_op_has_a_case() -> None:
    assert {case.op for case in CASES.values()} == set(kernels.PATHS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "path", "device"), PATHS)
def test_path_equals_the_reference(name: str, path: str, device: str, dtype: str) -> None:
    case = CASES[name]
    try:
        kernels.configure(KernelsConfig(**{case.op: path}))
    except UserError as error:
        pytest.skip(str(error))  # its package is not installed
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=random).bfloat16() for shape in case.shapes]  # exact in every type
    inputs = [
        tensor.to(torch.float32 if index in case.wide else getattr(torch, dtype)) for index, tensor in enumerate(drawn)
    ]
    found = values_and_gradients(case, inputs, device)
    expected = values_and_gradients(case, [tensor.double() for tensor in inputs], "cpu")
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.isfinite().all(), index
        assert relative(one, other) < TOLERANCES[device, dtype], index
    for one, tensor in zip(found[-len(inputs) :], inputs, strict=True):
        assert one.dtype == tensor.dtype


@pytest.mark.parametrize("device", [on("cpu"), on("cuda")])
def test_a_model_equals_the_reference(device: str) -> None:
    """Losses and gradients in fp32, under the reference's routing."""
    sizes = {"head_dim": 16, "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 32, "moe_intermediate_size": 32}
    exact, model = small_model(dtype=torch.float64, **sizes), small_model(**sizes).to(device)
    batch = batch_of(exact, random_tokens(*IDS.shape), IDS)
    expected = exact.loss(batch)
    replay = {call: stats["indices_BLK"].to(device) for call, stats in expected.stats.items() if "indices_BLK" in stats}
    found = model.loss(batch.to(device), replay)
    tolerance = TOLERANCES[device, "float32"] * 10
    for losses in (expected, found):
        (losses.main + losses.mtp.sum() + 0.1 * losses.auxiliary).backward()
    for one, other in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=tolerance, atol=tolerance)
    parameters = dict(model.named_parameters())
    for name, parameter in exact.named_parameters():
        error = (parameters[name].grad.cpu().double() - parameter.grad).norm() / parameter.grad.norm()
        assert error < tolerance, name


@pytest.mark.parametrize("device", [on("cpu"), on("cuda")])
def test_generation_equals_the_full_forward(device: str) -> None:
    """The log-probabilities of the greedy tokens, through the caches and without."""
    model = small_model(head_dim=16, mamba_head_dim=16, ssm_state_size=16).to(device)
    prompts = [random_tokens(length, seed=length).tolist() for length in (3, 11)]
    for prompt, done in zip(prompts, generate(model, prompts, Sampling(temperature=0, max_new_tokens=6)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + done.tokens], device=device))[0, len(prompt) - 1 : -1]
        picked = logits.log_softmax(-1).cpu().gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        torch.testing.assert_close(picked, torch.tensor(done.logprobs), rtol=0, atol=2e-2 if device == "cuda" else 1e-4)
