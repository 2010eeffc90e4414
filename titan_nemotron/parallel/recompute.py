"""Recomputation of blocks in the backward (activation checkpointing).

A block returns its statistics, so what the second forward computes of them is dropped: nothing is counted twice.
"""

import functools
import types
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_nemotron.layout import DocumentLayout

aten, travel = torch.ops.aten, torch.ops._c10d_functional

# Outputs that cost far more to compute again than to keep. Our own operations (titan_nemotron::*) belong to them too.
EXPENSIVE = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
    torch.ops.higher_order.flex_attention,
    travel.all_to_all_single.default,
    travel.all_gather_into_tensor.default,
    travel.all_reduce.default,
    travel.wait_tensor.default,
}


def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is expensive, compute the rest again.

    It sees operations, not kernels that were compiled or launched on their own: an operation of ours that is to be kept has
    to be a custom op. Flex attention is seen in compiled blocks alone; in eager ones it is computed again.
    """
    ours = getattr(op, "namespace", None) == "titan_nemotron"
    return CheckpointPolicy.MUST_SAVE if ours or op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def selective(
    block: nn.Module, x_BLD: Tensor, layout: DocumentLayout, cache: Any = None, indices: Tensor | None = None
) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return _checkpointed(block, x_BLD, layout, cache, indices, context_fn=contexts)


def full(
    block: nn.Module, x_BLD: Tensor, layout: DocumentLayout, cache: Any = None, indices: Tensor | None = None
) -> Any:
    return _checkpointed(block, x_BLD, layout, cache, indices)


def _checkpointed(block: nn.Module, *args: Any, **options: Any) -> Any:
    def forward(*args: Any) -> Any:
        return type(block).forward(block, *args)

    # No random numbers are drawn in a block, so their state need not be kept.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def apply_recompute(block: nn.Module, mode: Literal["none", "selective", "full"]) -> None:
    """Make a block recompute; parameter names stay as they are.

    The new forward is a method of one function for all blocks, so that compiled blocks of one kind can share a graph.
    """
    if mode != "none":
        block.forward = types.MethodType({"selective": selective, "full": full}[mode], block)  # type: ignore[method-assign]
