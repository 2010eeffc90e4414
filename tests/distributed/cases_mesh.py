"""Copies of the weights, experts spread over ranks, rows split over ranks: the same numbers as one process."""

import dataclasses
import functools
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.cases_checkpoint import everything
from tests.distributed.cases_step import RATE, gradients
from tests.distributed.harness import Context, case
from tests.distributed.reference import (
    CONFIG,
    LENGTH,
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
    whole,
    whole_gradients,
    whole_parameters,
)
from titan_nemotron.checkpoint.config import CheckpointConfig
from titan_nemotron.checkpoint.convert import export
from titan_nemotron.checkpoint.load import load_weights
from titan_nemotron.checkpoint.manager import CheckpointManager
from titan_nemotron.layout import Batch
from titan_nemotron.models.layers.moe import Experts, LocalDispatch
from titan_nemotron.models.nemotron3 import FAMILY
from titan_nemotron.models.nemotron3.config import Nemotron3Config
from titan_nemotron.optim.adamw import build_optimizer
from titan_nemotron.optim.config import OptimizerConfig
from titan_nemotron.parallel.clip import clip_gradients
from titan_nemotron.parallel.config import ContextMethodConfig, ParallelConfig
from titan_nemotron.parallel.context import CORES, MIXES
from titan_nemotron.parallel.expert import AllToAllDispatch
from titan_nemotron.parallel.mesh import EXPERT, Mesh, build_mesh, data_coordinates, own_part
from titan_nemotron.parallel.sharded import local_part
from titan_nemotron.train.step import forward_backward, global_totals, reduce_sums, train_step

EIGHT = CONFIG.model_copy(update={"n_routed_experts": 8})  # divide over 4 ranks
EVEN = EIGHT.model_copy(update={"mamba_num_heads": 4, "n_groups": 2})  # heads of every kind divide, too
DEGREES = {  # (replicate, context, expert) by number of ranks
    2: ((2, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2)),
    4: ((2, 1, 1), (4, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1), (1, 4, 4)),
}
WAYS = (
    ("ulysses", "ring", "selective"),
    ("state", "ring", "full"),
    ("ulysses", "ulysses", "none"),
)  # of splitting rows


def meshes(context: Context) -> list[Mesh]:
    names = ("replicate", "context", "expert")
    configs = [ParallelConfig(**dict(zip(names, degrees, strict=True))) for degrees in DEGREES[context.world_size]]
    return [build_mesh(config, torch.device("cpu")) for config in configs]


def own_batches(step: int, mesh: Mesh, size: int) -> list[Batch]:
    """This rank's microbatches of `size` rows, and of these its part."""
    return [own_part(batch, mesh) for batch in microbatches(step, *data_coordinates(mesh), size)]


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
    """Loss, global gradient, each tensor and counts, in microbatches of one row with one kind of recomputation or the other."""
    loss, expected, counts = reference(context)
    for index, mesh in enumerate(meshes(context)):
        kinds = [("selective", 1), ("full", 1), ("none", ROWS // data_coordinates(mesh)[1])]
        for recompute, size in kinds if len(mesh.axes) > 3 else kinds[index % 2 :][:1]:  # all with expert and context
            model = sharded(mesh, config=EIGHT, recompute=recompute)
            batches = own_batches(0, mesh, size)
            for every in (False, True):
                settings = dataclasses.replace(SETTINGS, sync_every_microbatch=every)
                actual_loss, actual, actual_counts = gradients(model, batches, settings)
                assert abs(actual_loss / loss - 1) <= 1e-6, mesh.axes
                assert_gradients(actual, expected, total=1e-6, each=2e-5)
                for call, count in counts.items():
                    assert torch.equal(actual_counts[call], count.double()), (mesh.axes, call)


@case(2, 4)
def ways_to_split_rows_have_one_gradient(context: Context) -> None:
    """Each method of each kind of layer, beside spread experts, with each kind of recomputation."""
    loss, expected, counts = reference(context, EVEN)
    mesh = build_mesh(ParallelConfig(context=context.world_size, expert=2), torch.device("cpu"))
    batches = own_batches(0, mesh, 2)
    for mamba, attention, recompute in WAYS:
        method = ContextMethodConfig(mamba=mamba, attention=attention)  # type: ignore[arg-type]
        model = sharded(mesh, config=EVEN, recompute=recompute, parallel=ParallelConfig(context_method=method))
        for letter, way, kinds in (("mix", mamba, MIXES), ("core", attention, CORES)):
            found = {type(getattr(module, letter)) for module in model.modules() if hasattr(module, letter)}
            assert found == {kinds[way]}
        actual_loss, actual, actual_counts = gradients(model, batches, SETTINGS)
        assert abs(actual_loss / loss - 1) <= 1e-6, method
        assert_gradients(actual, expected, total=1e-6, each=2e-5)
        for call, count in counts.items():
            assert torch.equal(actual_counts[call], count.double()), (method, call)


@case(2, 4)
def rows_of_any_length_have_one_gradient(context: Context) -> None:
    """Rows that the ranks do not divide, or too short for the convolution, are padded: loss of every depth, auxiliary loss,
    gradient and counts are those of the rows alone."""
    mesh = build_mesh(ParallelConfig(context=context.world_size), torch.device("cpu"))
    plain = Reference(unsharded(EVEN))
    for length, (mamba, attention, recompute) in zip((LENGTH - 1, LENGTH + 1, 5), WAYS, strict=True):
        method = ContextMethodConfig(mamba=mamba, attention=attention)  # type: ignore[arg-type]
        model = sharded(mesh, config=EVEN, recompute=recompute, parallel=ParallelConfig(context_method=method))
        batch = rows(0, length=length)
        part = own_part(batch, mesh, shortest=EVEN.conv_kernel - 1)
        _, losses, expected = plain.gradients(batch)
        totals = global_totals([part])
        sums = reduce_sums(forward_backward(model, [part], totals, SETTINGS))
        actual = whole_gradients(model)
        model.zero_grad()
        torch.testing.assert_close(sums.main.float(), losses.main, atol=0, rtol=1e-6)
        torch.testing.assert_close(sums.mtp_D.float(), losses.mtp, atol=0, rtol=1e-6)
        torch.testing.assert_close((sums.auxiliary / totals.rows).float(), losses.auxiliary / ROWS, atol=0, rtol=1e-6)
        assert totals.tokens == batch.layout.valid.sum() and totals.targets == batch.num_targets
        assert tuple(totals.mtp_targets_D) == batch.num_mtp_targets
        assert_gradients(actual, expected, total=1e-6, each=2e-5)
        for call, count in sums.counts.items():
            assert torch.equal(count, losses.stats[call]["counts_E"].double()), (length, call)


@case(2)
def compiled_blocks_let_rows_travel(context: Context) -> None:
    """What ranks exchange, of experts and of parts of rows, is part of a block's one graph."""
    loss, expected, counts = reference(context, EVEN)
    traced = functools.partial(torch.compile, backend="aot_eager")
    kinds = (
        (1, "state", "ring", "selective"),
        (2, "state", "ring", "full"),
        (2, "ulysses", "ulysses", "selective"),
    )
    for degree, mamba, attention, recompute in kinds:
        mesh = build_mesh(ParallelConfig(expert=2, context=degree), torch.device("cpu"))
        method = ContextMethodConfig(mamba=mamba, attention=attention)  # type: ignore[arg-type]
        with mock.patch.object(torch, "compile", traced):
            model = sharded(
                mesh,
                config=EVEN,
                recompute=recompute,
                compile=True,
                parallel=ParallelConfig(context_method=method),
            )
        actual_loss, actual, actual_counts = gradients(model, own_batches(0, mesh, 2))
        assert abs(actual_loss / loss - 1) <= 1e-6
        assert_gradients(actual, expected, total=1e-5, each=1e-5)
        for call, count in counts.items():
            assert torch.equal(actual_counts[call], count.double()), call


def reference(context: Context, config: Nemotron3Config = EIGHT) -> tuple[Tensor, dict, dict]:
    if context.rank:
        return shared(context.rank, None)  # type: ignore[return-value]
    loss, losses, found = Reference(unsharded(config)).gradients(rows(0))
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
    for mesh in meshes(context):
        rank, degree = data_coordinates(mesh)
        share = ROWS // degree
        mine = slice(rank * share, (rank + 1) * share)
        model = sharded(mesh, config=EIGHT)
        optimizer = build_optimizer(model, OptimizerConfig())
        for step, (routing, loss, norm) in enumerate(recorded):
            batches = own_batches(step, mesh, share)
            layout = batches[0].layout
            here = slice(layout.start, layout.start + layout.length)
            replay = [{call: indices[mine, here] for call, indices in routing.items()}]
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
def one_norm_over_all_meshes(context: Context) -> None:
    """A dense gradient of norm 3 and an expert's of norm 4 make 5 on every rank, and both shrink by the same factor."""
    for mesh in meshes(context):
        model = sharded(mesh, config=EIGHT)
        expert = next(module for module in model.modules() if isinstance(module, Experts))
        norms = {model.lm_head.weight: 3.0, expert.up_proj: 4.0}
        for parameter, norm in norms.items():
            parameter.grad = torch.full_like(parameter, norm / parameter.numel() ** 0.5)
        for bound, left in ((10.0, 1.0), (1.0, 0.2)):
            assert abs(clip_gradients(model.parameters(), bound) - 5) <= 1e-5, mesh.axes
            for parameter, norm in norms.items():
                assert parameter.grad is not None
                assert abs(whole(parameter.grad).norm() / norm - left) <= 1e-5


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


class Calls(TorchDispatchMode):
    """Counts operations by name, and exchanges besides by what is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        name = function.overloadpacket.__name__
        self.counts[name] += 1
        if name == "all_to_all_single":
            self.counts[f"{name} of {str(arguments[0].dtype).removeprefix('torch.')}"] += 1
        return function(*arguments, **(keywords or {}))


@case(2)
def the_host_waits_once(context: Context) -> None:
    """A dispatch and combine reads numbers of the device once, its backward never; rows travel once each way."""
    mesh = build_mesh(ParallelConfig(expert=2), torch.device("cpu")).experts
    assert mesh is not None
    dispatch = AllToAllDispatch(8, mesh[EXPERT].get_group())
    x, weights = torch.randn(6, 4, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    indices = torch.rand(6, 8).topk(2).indices
    read = 0

    def tolist(tensor: Tensor) -> list:
        nonlocal read
        read += 1
        return plain(tensor)

    plain = Tensor.tolist
    with mock.patch.object(Tensor, "tolist", tolist), Calls() as forward:
        rows_RD, weights_R, _, handle = dispatch.dispatch(x, indices, weights)
        out = dispatch.combine(rows_RD * weights_R[:, None], handle)
    assert read + forward.counts["_local_scalar_dense"] == 1
    assert forward.counts["all_to_all_single"] == 4  # numbers, rows, weights; rows back
    with mock.patch.object(Tensor, "tolist", tolist), Calls() as backward:
        out.sum().backward()
    assert read == 1 and backward.counts["_local_scalar_dense"] == 0
    assert backward.counts["all_to_all_single"] == 3


@case(2)
def recomputation_reuses_what_was_decided(context: Context) -> None:
    """However much is computed again, experts are chosen, numbers told to other ranks and the host waits once a routed call;
    of the rows, selective recomputation keeps what arrived, there and back, and sends nothing twice."""
    mesh = build_mesh(ParallelConfig(expert=2), torch.device("cpu"))
    exchanges = {}
    for recompute in ("none", "selective", "full"):
        model = sharded(mesh, config=EIGHT, recompute=recompute)
        with Calls() as forward:
            losses = model.loss(rows(0))
        routed = sum("counts_E" in stats for stats in losses.stats.values())
        assert routed > 1 and forward.counts["on_host"] == forward.counts["all_to_all_single of int32"] == routed
        with Calls() as backward:
            (losses.main + losses.mtp.sum() + losses.auxiliary).backward()
        assert not {"on_host", "all_to_all_single of int32", "topk", "_local_scalar_dense"} & set(backward.counts)
        exchanges[recompute] = backward.counts["all_to_all_single"]
    assert exchanges["none"] == exchanges["selective"] == 3 * routed  # rows there and back, weights there
    assert exchanges["none"] < exchanges["full"] <= 6 * routed


@case(2, 4)
def saved_on_one_mesh_and_loaded_on_another(context: Context) -> None:
    """Checkpoints and Hugging Face directories know nothing of the mesh: weights, biases, moments and steps bitwise."""
    expected: dict[str, Tensor] = {}
    all_meshes = [context.mesh, *meshes(context)]
    for index, mesh in enumerate([*all_meshes, all_meshes[0]]):
        model = sharded(mesh, config=EIGHT, seed=index)
        optimizer = build_optimizer(model, OptimizerConfig())
        manager = CheckpointManager(context.directory / "checkpoints", CheckpointConfig(), dist.group.WORLD)
        if expected:
            manager.load(index, model, optimizer)
            found = everything(model, optimizer)
            assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == [], mesh.axes
            load_weights(model, FAMILY, EIGHT, context.directory / f"hf-{index}", seed=0, local_part=local_part)
            found = everything(model, optimizer)
            assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == [], mesh.axes
        batches = own_batches(index, mesh, 1)
        train_step(model, optimizer, batches, RATE, SETTINGS)
        expected = everything(model, optimizer)
        manager.save(index + 1, model, optimizer, {}, "")
        manager.close()
        export(model, FAMILY, EIGHT, context.directory, context.directory / f"hf-{index + 1}")
        dist.barrier()
