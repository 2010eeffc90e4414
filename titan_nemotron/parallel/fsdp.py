"""What FSDP2 gathers when, and how it reduces gradients: the keys of `[parallel.fsdp]`, through FSDP2's own hooks."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_nemotron.errors import UserError
from titan_nemotron.models.family import Model
from titan_nemotron.models.layers.moe import MoE
from titan_nemotron.models.layers.mtp import MTPBlock
from titan_nemotron.parallel.config import FSDPConfig


class BFloat16Wire:
    """A reduce-scatter that sends bf16 and sums in fp32: sum over p of bf16(x_p), each contribution rounded once.

    PyTorch's own with reduce_dtype bf16 would also round every partial sum. An all-to-all moves as many elements as a
    reduce-scatter by rings does. The interface is that of FSDPModule.set_custom_reduce_scatter.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for what travels, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """output [n] = sum over ranks of this rank's part of their inputs [P n]; both fp32."""
        assert op == dist.ReduceOp.SUM and not async_op
        rounded = input_tensor.bfloat16()
        arrived = torch.empty_like(rounded)
        dist.all_to_all_single(arrived, rounded, group=group)
        torch.sum(arrived.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)


def moe_blocks(blocks: list[nn.Module]) -> list[nn.Module]:
    """The blocks that hold routed experts, in the order of their forward."""
    return [block for block in blocks if any(isinstance(module, MoE) for module in block.modules())]


def kept_blocks(blocks: list[nn.Module], config: FSDPConfig) -> list[nn.Module]:
    """The blocks that stay gathered from forward to backward. Raises UserError where there are fewer experts' blocks."""
    if not config.reshard_after_forward:
        return blocks
    found, number = moe_blocks(blocks), config.moe_layers_kept_gathered
    if number > len(found):
        raise UserError(
            f"parallel.fsdp.moe_layers_kept_gathered = {number}: the model has {len(found)} mixture-of-experts blocks; "
            f"use at most {len(found)}"
        )
    if config.keep_experts_between_microbatches and not found:
        raise UserError(
            "parallel.fsdp.keep_experts_between_microbatches = true: the model has no mixture-of-experts block; "
            "set it to false"
        )
    return found[len(found) - number :]


def tune(model: nn.Module, blocks: list[nn.Module], reduced_fp32: list[nn.Module], config: FSDPConfig) -> None:
    """Prefetch and reduce as the configuration says; the model is sharded. `reduced_fp32` never travel in less."""
    root = cast(FSDPModule, model)
    ahead = {block for module in model.modules() if isinstance(module, MTPBlock) for block in module.modules()}
    # Logits need no multi-token block: what the last block before them gathered of one would be kept, and be old one day.
    for chain in ([b for b in blocks if b not in ahead], [b for b in blocks if b in ahead]):
        prefetch(cast(list[FSDPModule], chain), config.prefetch)
    if config.reduce_dtype == "bfloat16":
        for module in model.modules():
            if isinstance(module, FSDPModule) and module not in reduced_fp32:
                set_reduce_scatter(module, BFloat16Wire())
    if config.reduce_scatters_in_flight > 1:
        if not hasattr(root, "set_separate_reduce_scatter_group"):
            raise UserError(
                f"parallel.fsdp.reduce_scatters_in_flight = {config.reduce_scatters_in_flight}: needs PyTorch 2.13, and "
                f"this is {torch.__version__}; set it to 1"
            )
        root.set_reduce_scatter_max_input_buffers(config.reduce_scatters_in_flight)
        root.set_separate_reduce_scatter_group()


def prefetch(blocks: list[FSDPModule], number: int) -> None:
    """Each block starts the gathers of the `number` after it in the forward, and of those before it in the backward."""
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + number])
        if number > 1:  # FSDP2 itself takes one, and knows the order in which blocks that are used twice come
            block.set_modules_to_backward_prefetch(blocks[max(index - number, 0) : index][::-1])


def set_reduce_scatter(module: FSDPModule, comm: BFloat16Wire) -> None:
    """FSDP2 refuses a module whose experts have a mesh of their own, because a reduction could belong to one of its groups;
    ours takes the group it is called with, so it is set on both. Raises UserError where this PyTorch has them elsewhere."""
    groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", [])
    if len(groups) <= 1:
        module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    elif all(hasattr(group, "_reduce_scatter_comm") for group in groups):
        for group in groups:
            group._reduce_scatter_comm = comm
    else:
        raise UserError(
            f'parallel.fsdp.reduce_dtype = "bfloat16": not possible with parallel.expert above 1 in PyTorch '
            f'{torch.__version__}; set it to "float32"'
        )


def begin_microbatch(model: Model, *, last: bool, sync_every: bool, keep_experts: bool) -> None:
    """Say before a microbatch's forward what its backward will reduce and free; `last` of its step."""
    root = cast(FSDPModule, model)
    root.set_requires_gradient_sync(sync_every or last)
    root.set_requires_all_reduce(last)  # copies of the weights meet once a step, with the sums of all microbatches
    if keep_experts:
        for block in moe_blocks([block for _, block in model.blocks()]):
            cast(FSDPModule, block).set_reshard_after_backward(last, recurse=False)
