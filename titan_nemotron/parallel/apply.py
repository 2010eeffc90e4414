"""The one function that makes a model parallel.

Order: build on the meta device (the caller) -> experts -> context -> recompute -> compile -> shard -> materialise ->
initialise or load. Precision will come before experts; it swaps submodules too.
"""

import functools
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from titan_nemotron.errors import UserError
from titan_nemotron.models.family import Losses, Model
from titan_nemotron.models.layers.basic import Embedding
from titan_nemotron.models.layers.head import Head
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.layers.moe import Experts
from titan_nemotron.models.layers.mtp import MTPBlock
from titan_nemotron.parallel.config import CompileConfig, FSDPConfig, ParallelConfig, RecomputeConfig
from titan_nemotron.parallel.context import split_rows
from titan_nemotron.parallel.context.choose import ContextPlan, choose
from titan_nemotron.parallel.context.cost import Rows
from titan_nemotron.parallel.expert import shard_dim, spread_experts
from titan_nemotron.parallel.fsdp import kept_blocks, tune
from titan_nemotron.parallel.mesh import EXPERT, EXPERT_SHARD, Mesh
from titan_nemotron.parallel.recompute import apply_recompute
from titan_nemotron.parallel.sharded import local_part


def apply(
    model: nn.Module,
    mesh: Mesh,
    *,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    compile: CompileConfig,
    dtype: torch.dtype,
    microbatch: tuple[int, int],
    seed: int | None,
) -> None:
    """Parallelise `model`, built on the meta device, in place; its methods and parameter names stay as they are.

    dtype: what layers compute in. Master weights, gradients and their reduction are fp32. Modules with `stays_fp32`
    compute with fp32 weights. microbatch: its rows and their whole length, by which the ways to split rows are compared.
    seed None leaves the weights empty: the caller loads every one of them.
    """
    arrange(model, mesh, parallel=parallel, recompute=recompute, compile=compile, dtype=dtype, microbatch=microbatch)
    materialise(model, mesh)
    if seed is not None:
        initialize(model, seed, local_part=local_part)


def arrange(
    model: nn.Module,
    mesh: Mesh,
    *,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    compile: CompileConfig,
    dtype: torch.dtype,
    microbatch: tuple[int, int],
) -> None:
    """Everything of `apply` that needs no memory: parameters are sharded, and still on the meta device."""
    blocks = [block for _, block in cast(Model, model).blocks()]
    if mesh.experts is not None:
        spread_experts(model, mesh.experts[EXPERT])
    if mesh.context is not None:
        split_rows(model, mesh.context, plan_context(model, mesh, parallel, dtype, microbatch).methods)
    for block in blocks:
        apply_recompute(block, recompute.mode)
    if compile.enable:
        compile_blocks(blocks)
    shard(model, blocks, mesh, parallel.fsdp, dtype)


def plan_context(
    model: nn.Module, mesh: Mesh, parallel: ParallelConfig, dtype: torch.dtype, microbatch: tuple[int, int]
) -> ContextPlan:
    """How `arrange` splits the rows of each layer where ranks share rows; asked before it has."""
    number, length = microbatch
    config = parallel.context_method
    rows = Rows(number, length, mesh.context_degree, dtype.itemsize, config.document_length)
    return choose(model, rows, config, mesh.device_type)


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Compile each block's forward alone: the hooks that gather weights stay outside.

    Blocks of one kind share a graph, so compilation takes as long for a hundred blocks as for one of each kind.
    """
    torch._dynamo.config.recompile_limit = (
        64  # of all graphs together: kinds of blocks, with and without gradient, shapes
    )
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True)  # type: ignore[method-assign]


def shard(model: nn.Module, blocks: list[nn.Module], mesh: Mesh, fsdp: FSDPConfig, dtype: torch.dtype) -> None:
    """Shard every parameter along dim 0, in groups that are gathered and reduced together.

    - each block, each multi-token projection, the embedding: gathered in `dtype` around their forward and backward;
    - the head, used 1 + D times in a forward: gathered once, in fp32, so its gradient sums and reduces in fp32;
    - of a block, the experts that are spread over ranks: on their own mesh, cut between experts where those divide;
    - everything else, which is the small modules that stay fp32 (norms, routers, decays): one group of the whole model,
      gathered in fp32 once a step. One group a block would double the number of collectives for a thousandth of the
      bytes, and its hooks would run inside what is recomputed or compiled.
    """
    units = [m for m in model.modules() if m in set(blocks) or isinstance(m, Embedding | Head | MTPBlock)]
    heads = [unit for unit in units if isinstance(unit, Head)]
    # Kept from forward to backward; with the blocks go the projections and embeddings around them.
    others = [] if fsdp.reshard_after_forward else [unit for unit in units if unit not in blocks]
    kept = {*heads, *kept_blocks(blocks, fsdp), *others}
    placements = expert_placements(model, mesh)
    inside = {parameter for unit in units for parameter in unit.parameters()}
    small = {
        parameter
        for module in model.modules()
        if getattr(module, "stays_fp32", False) and module not in units
        for parameter in module.parameters(recurse=False)
    }

    def precision(param_dtype: torch.dtype) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    # The root comes first, because it owns parameters inside units, and a sharded module hides what is inside it.
    fully_shard(model, mesh=mesh.sharding(), mp_policy=precision(torch.float32), ignored_params=inside - small)
    for unit in reversed(units):  # children before parents
        stays_fp32 = getattr(unit, "stays_fp32", False)
        fully_shard(
            unit,
            mesh=mesh.sharding(),
            reshard_after_forward=unit not in kept,
            mp_policy=precision(torch.float32 if stays_fp32 else dtype),
            shard_placement_fn=placements.get if placements else None,
            # Those of the units inside.
            ignored_params={p for p in unit.parameters() if isinstance(p, DTensor) and p not in placements},
        )
        sharded = cast(FSDPModule, unit)
        if isinstance(unit, Embedding):
            sharded.set_unshard_in_backward(False)  # its backward needs the tokens alone
        if isinstance(unit, Head):
            register_fsdp_forward_method(unit, "logits")
    register_fsdp_forward_method(model, "loss")
    free_without_gradient(model, [model, *kept])
    tune(model, blocks, [model, *heads], fsdp)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by global counts, so gradients are plain sums; gloo has no other reduction.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def expert_placements(model: nn.Module, mesh: Mesh) -> dict[nn.Parameter, Any]:
    """Where sharding puts the parameters of experts that are spread over ranks; it asks for each parameter of a block."""
    if mesh.experts is None:
        return {}
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError:
        raise UserError(f"parallel.expert: needs PyTorch 2.13, and this is {torch.__version__}; set it to 1") from None
    axes = mesh.sharding(experts=True)
    one_copy = axes.ndim == 1
    info = FSDPMeshInfo(axes, shard_mesh_dim=0) if one_copy else HSDPMeshInfo(axes, 1, replicate_mesh_dim=0)
    degree = mesh.experts[EXPERT_SHARD].size()
    return {
        parameter: ShardPlacementResult(Shard(shard_dim(module, degree)), info)
        for module in model.modules()
        if isinstance(module, Experts)
        for parameter in module.parameters()
    }


def free_without_gradient(model: nn.Module, kept: list[nn.Module]) -> None:
    """Free the weights that stay gathered until the backward after a forward that has none.

    Otherwise a model that was only scored would show its whole weights, in place of the shards that are trained and saved.
    """

    def free() -> None:
        if not torch.is_grad_enabled():
            for module in kept:
                cast(FSDPModule, module).reshard()

    loss = cast(Model, model).loss

    @functools.wraps(loss)
    def loss_then_free(*args: Any, **kwargs: Any) -> Losses:
        losses = loss(*args, **kwargs)
        free()
        return losses

    model.loss = loss_then_free  # type: ignore[assignment]
    model.register_forward_hook(lambda *_: free())


def materialise(model: nn.Module, mesh: Mesh) -> None:
    """Give the meta tensors memory on this rank's device, without values."""
    if mesh.device_type == "cpu":
        model.to_empty(device="cpu")
    else:
        model.to_empty(device=torch.device(mesh.device_type, torch.accelerator.current_device_index()))
