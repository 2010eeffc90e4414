"""Copies of the weights, and experts spread over ranks: the same numbers as one process."""

import dataclasses
import functools
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed.cases_step import RATE, gradients
from tests.distributed.harness import Context, case
from tests.distributed.reference import (
    CONFIG,
    ROWS,
    SETTINGS,
    Reference,
    assert_gradients,
    microbatches,
    relative,
    rows,
    sharded,
    shared,
    unsharded,
    whole_parameters,
)
from titan_nemotron.models.layers.moe import Experts, LocalDispatch
from titan_nemotron.optim.adamw import build_optimizer
from titan_nemotron.optim.config import OptimizerConfig
from titan_nemotron.parallel.config import ParallelConfig
from titan_nemotron.parallel.expert import AllToAllDispatch
from titan_nemotron.parallel.mesh import EXPERT, Mesh, build_mesh
from titan_nemotron.train.step import train_step

EIGHT = CONFIG.model_copy(update={"n_routed_experts": 8})  # divide over 4 ranks
MESHES = {2: ((2, 1), (1, 2)), 4: ((2, 1), (4, 1), (1, 2), (1, 4), (2, 2))}  # (replicate, expert) by number of ranks


def meshes(context: Context) -> list[Mesh]:
    configs = [ParallelConfig(replicate=replicate, expert=expert) for replicate, expert in MESHES[context.world_size]]
    return [build_mesh(config, torch.device("cpu")) for config in configs]


@case(2, 4)
def meshes_start_alike(context: Context) -> None:
    """Bitwise the weights of one process, with experts whole on every rank where they divide."""
    expected = unsharded(EIGHT).state_dict()
    for mesh in meshes(context):
        model = sharded(mesh, config=EIGHT)
        for name, tensor in whole_parameters(model).items():
            assert torch.equal(tensor, expected[name]), (mesh.axes, name)
        if mesh.experts is not None:
            for module in model.modules():
                if isinstance(module, Experts):
                    assert isinstance(module.up_proj, DTensor)
                    assert module.up_proj.to_local().shape[1:] == module.up_proj.shape[1:]


@case(2, 4)
def meshes_have_one_gradient(context: Context) -> None:
    """Loss, global gradient, each tensor and counts, in microbatches, with every kind of recomputation."""
    loss, expected, counts = reference(context)
    for mesh in meshes(context):
        for recompute, size in (("none", 1), ("selective", 2), ("full", ROWS // context.world_size)):
            model = sharded(mesh, config=EIGHT, recompute=recompute)
            batches = microbatches(0, context.rank, context.world_size, size)
            for every in (False, True):
                settings = dataclasses.replace(SETTINGS, sync_every_microbatch=every)
                actual_loss, actual, actual_counts = gradients(model, batches, settings)
                assert abs(actual_loss / loss - 1) <= 1e-6, mesh.axes
                assert_gradients(actual, expected, total=1e-6, each=2e-5)
                for call, count in counts.items():
                    assert torch.equal(actual_counts[call], count.double()), (mesh.axes, call)


@case(2)
def compiled_blocks_let_rows_travel(context: Context) -> None:
    """The exchange of rows is part of a block's one graph."""
    loss, expected, counts = reference(context)
    mesh = build_mesh(ParallelConfig(expert=2), torch.device("cpu"))
    traced = functools.partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", traced):
        model = sharded(mesh, config=EIGHT, recompute="selective", compile=True)
    actual_loss, actual, actual_counts = gradients(model, microbatches(0, context.rank, context.world_size, 2))
    assert abs(actual_loss / loss - 1) <= 1e-6
    assert_gradients(actual, expected, total=1e-5, each=1e-5)
    for call, count in counts.items():
        assert torch.equal(actual_counts[call], count.double()), call


def reference(context: Context) -> tuple[Tensor, dict, dict]:
    if context.rank:
        return shared(context.rank, None)  # type: ignore[return-value]
    loss, losses, found = Reference(unsharded(EIGHT)).gradients(rows(0))
    counts = {call: stats["counts_E"] for call, stats in losses.stats.items() if "counts_E" in stats}
    return shared(0, (loss, found, counts))  # type: ignore[return-value]


@case(2, 4)
def meshes_take_the_same_steps(context: Context) -> None:
    """Parameters, biases, losses and norms after three steps with the routing replayed."""
    expected: dict[str, Tensor] = {}
    recorded = []
    if context.rank == 0:
        plain = Reference(unsharded(EIGHT))
        for step in range(3):
            losses, norm = plain.step(rows(step))
            routing = {call: stats["indices_BLK"] for call, stats in losses.stats.items() if "indices_BLK" in stats}
            recorded.append((routing, losses.main / rows(step).num_targets, norm))
        expected = whole_parameters(plain.model)
    expected, recorded = shared(context.rank, (expected, recorded))  # type: ignore[misc, assignment]
    share = ROWS // context.world_size
    mine = slice(context.rank * share, (context.rank + 1) * share)
    for mesh in meshes(context):
        model = sharded(mesh, config=EIGHT)
        optimizer = build_optimizer(model, OptimizerConfig())
        for step, (routing, loss, norm) in enumerate(recorded):
            batches = microbatches(step, context.rank, context.world_size, share)
            replay = [{call: indices[mine] for call, indices in routing.items()}]
            result = train_step(model, optimizer, batches, RATE, SETTINGS, replay=replay)
            assert abs(result.loss / loss - 1) <= 1e-5
            assert abs(result.gradient_norm / norm - 1) <= 1e-5, mesh.axes
        actual = whole_parameters(model)
        for name, tensor in expected.items():
            if name.endswith("correction_bias"):
                assert torch.equal(actual[name], tensor), name
            else:
                assert relative(actual[name], tensor) <= 1e-5, (mesh.axes, name, relative(actual[name], tensor))


@case(2, 4)
def rows_travel_whatever_their_number(context: Context) -> None:
    """Uneven counts, experts and ranks without a token, one expert that takes all; forward and backward in fp64."""
    num_ranks, num_experts, num_tokens, topk, size = context.world_size, 8, 5, 2, 4
    mesh = build_mesh(ParallelConfig(expert=num_ranks), torch.device("cpu")).experts
    assert mesh is not None
    dispatch, local = AllToAllDispatch(num_experts, mesh[EXPERT].get_group()), LocalDispatch(num_experts)
    mine = slice(context.rank * num_experts // num_ranks, (context.rank + 1) * num_experts // num_ranks)
    for kind in ("any", "one expert", "no token", "one rank alone"):
        random = torch.Generator().manual_seed(context.rank)
        tokens = 0 if kind == "no token" or (kind == "one rank alone" and context.rank) else num_tokens + context.rank
        x = torch.randn(tokens, size, generator=random, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(tokens, topk, generator=random, dtype=torch.float64, requires_grad=True)
        indices = torch.rand(tokens, num_experts, generator=random).topk(topk).indices
        if kind == "one expert":
            indices = torch.full_like(indices, 3)

        def run(dispatcher: LocalDispatch | AllToAllDispatch, scales_E: Tensor) -> list[Tensor]:
            """An expert multiplies by its number plus one."""
            rows_RD, weights_R, offsets_E, handle = dispatcher.dispatch(x, indices, weights)
            counts = offsets_E.long().diff(prepend=torch.zeros(1, dtype=torch.int64))
            assert offsets_E.dtype == torch.int32 and len(offsets_E) == len(scales_E)
            assert int(counts.sum()) == len(rows_RD)
            y = rows_RD * (weights_R * scales_E.repeat_interleave(counts))[:, None]
            out = dispatcher.combine(y, handle)  # type: ignore[arg-type]
            return [out.detach(), *torch.autograd.grad((out**2).sum(), (x, weights))]

        scales = torch.arange(1.0, num_experts + 1, dtype=torch.float64)
        for actual, expected in zip(run(dispatch, scales[mine]), run(local, scales), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
