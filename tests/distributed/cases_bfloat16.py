"""bf16 compute: what each operation sees, and what is summed in fp32 all the same."""

import importlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.cases_mesh import EIGHT, meshes, own_batches
from tests.distributed.harness import Context, case
from tests.distributed.reference import ROWS, SETTINGS, microbatches, relative, sharded, whole_gradients
from titan_nemotron.optim.adamw import build_optimizer
from titan_nemotron.optim.config import OptimizerConfig
from titan_nemotron.parallel.config import FSDPConfig, ParallelConfig
from titan_nemotron.parallel.mesh import data_coordinates
from titan_nemotron.train.step import forward_backward, global_totals, train_step

BF16, FP32 = torch.bfloat16, torch.float32


def observe_operations(seen: dict[str, set[Any]]) -> list[Any]:
    """Patches that note the dtypes of the floating tensors each operation gets, in order."""
    operations = {
        "basic": ("rms_norm", "gated_rms_norm"),
        "mamba2": ("causal_conv1d", "ssd_scan"),
        "attention": ("attention",),
        "moe": ("relu2_experts",),
        "head": ("linear_cross_entropy",),
    }

    def observed(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name].add(tuple(a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()))
            return operation(*args, **kwargs)

        return call

    patches = []
    for module_name, names in operations.items():
        module = importlib.import_module(f"titan_nemotron.models.layers.{module_name}")
        patches += [mock.patch.object(module, name, observed(name, getattr(module, name))) for name in names]
    return patches


@case(2)
def dtypes_of_operations(context: Context) -> None:
    """fp32 stay the norms, routers, decays and the head; everything else computes in bf16; masters and gradients are fp32."""
    model = sharded(context.mesh, dtype=BF16)
    assert {p.dtype for p in model.parameters()} == {FP32}
    weights: dict[str, set[torch.dtype]] = defaultdict(set)
    outputs: dict[str, set[torch.dtype]] = defaultdict(set)

    def kind_of(module: nn.Module) -> str:
        return type(module).__name__.removeprefix("FSDP")

    def before(module: nn.Module, inputs: Any) -> None:  # after the weights were gathered
        weights[kind_of(module)] |= {parameter.dtype for parameter in module.parameters(recurse=False)}

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[kind_of(module)].add(output.dtype)

    for module in model.modules():
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    operations: dict[str, set[Any]] = defaultdict(set)
    patches = observe_operations(operations)
    for patch in patches:
        patch.start()
    optimizer = build_optimizer(model, OptimizerConfig())
    batches = microbatches(0, context.rank, context.world_size, 2)
    forward_backward(model, batches, global_totals(batches), SETTINGS)
    for patch in patches:
        patch.stop()

    for kind in ("RMSNorm", "GatedRMSNorm", "Router", "StateSpace", "Head"):
        assert weights[kind] == {FP32}, kind
    for kind in ("Embedding", "Linear", "DepthwiseConv", "Experts"):
        assert weights[kind] == {BF16}, kind
    for kind in ("Embedding", "Linear", "RMSNorm", "GatedRMSNorm"):
        assert outputs[kind] == {BF16}, kind
    assert operations["rms_norm"] == {(BF16, FP32)}
    assert operations["gated_rms_norm"] == {(BF16, BF16, FP32)}
    assert operations["causal_conv1d"] == {(BF16, BF16, BF16)}
    assert operations["ssd_scan"] == {(BF16, BF16, FP32, BF16, BF16, FP32, FP32)}  # x, dt, A, B, C, D, dt_bias
    assert operations["attention"] == {(BF16, BF16, BF16)}
    assert operations["relu2_experts"] == {(BF16, BF16, BF16, FP32)}  # rows, up, down, routing weights
    assert operations["linear_cross_entropy"] == {(BF16, FP32)}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FP32}
    assert all(router.correction_bias.dtype == FP32 for router in model.routers().values())

    result = train_step(model, optimizer, batches, 1e-3, SETTINGS)
    assert not result.skipped
    assert {entry["exp_avg"].dtype for entry in optimizer.state.values()} == {FP32}


@case(2, 4)
def multi_token_share_of_the_head(context: Context) -> None:
    """The head's gradient sums main and multi-token losses in fp32: a share of a thousandth survives in bf16 compute and
    with bf16 on the wire, on every mesh."""
    scale = 3e-3
    for mesh in meshes(context):
        wire = FSDPConfig(reduce_dtype="bfloat16")
        model = sharded(mesh, config=EIGHT, dtype=BF16, parallel=ParallelConfig(fsdp=wire))
        batch = own_batches(0, mesh, ROWS // data_coordinates(mesh)[1])[0]
        totals = global_totals([batch])

        def head_gradient(main: float, mtp: float) -> Tensor:
            losses = model.loss(batch)
            (main * losses.main / totals.targets.float() + mtp * losses.mtp.sum() / totals.targets.float()).backward()
            gradient = whole_gradients(model)["lm_head.weight"]
            model.zero_grad()
            return gradient

        both, main, share = head_gradient(1.0, scale), head_gradient(1.0, 0.0), head_gradient(0.0, scale)
        assert share.norm() < 1e-2 * main.norm()
        assert relative(both - main, share) <= 1e-3, mesh.axes
        rounded = (main.bfloat16() + share.bfloat16()).float() - main.bfloat16().float()
        assert relative(rounded, share) > 0.1  # what a sum in bf16 would have left of it


@case(2)
def accumulation(context: Context) -> None:
    """Microbatches accumulate in fp32, unreduced or reduced each time."""
    batches = microbatches(0, context.rank, context.world_size, 1)
    totals = global_totals(batches)
    model = sharded(context.mesh, dtype=BF16)
    expected: dict[str, Tensor] = {}
    for batch in batches:
        forward_backward(model, [batch], totals, SETTINGS)
        for name, gradient in whole_gradients(model).items():
            expected[name] = expected.get(name, torch.zeros_like(gradient, dtype=torch.float64)) + gradient
        model.zero_grad()
    for every in (False, True):
        forward_backward(model, batches, totals, replace(SETTINGS, sync_every_microbatch=every))
        for name, gradient in whole_gradients(model).items():
            assert relative(gradient, expected[name]) <= 1e-6, (every, name, relative(gradient, expected[name]))
        model.zero_grad()
    dist.barrier()
