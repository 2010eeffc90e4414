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
from titan_nemotron.parallel.expert import AllToAllDispatch

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


def expensive(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what is expensive and what decides where rows travel, compute the rest again.

    It sees operations, not kernels that were compiled or launched on their own: an operation of ours that is to be kept has
    to be a custom op. Flex attention is seen in compiled blocks alone; in eager ones it is computed again.
    """
    ours = getattr(op, "namespace", None) == "titan_nemotron"
    return kept(ours or op in EXPENSIVE or decides(op, *args))


def decisions(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what decides where rows travel alone."""
    return kept(decides(op, *args))


def decides(op: Any, *args: Any) -> bool:
    """Whether an operation says where rows travel: the experts that are chosen, and the numbers of rows that ranks tell each
    other and the host waits for. Kept, ranks agree on them in the backward without another word."""
    if op in (travel.all_to_all_single.default, travel.wait_tensor.default):
        return not args[0].is_floating_point()
    return op in (aten.topk.default, torch.ops.titan_nemotron.on_host.default)


def kept(keep: bool) -> CheckpointPolicy:
    """The policy's answer."""
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective(
    block: nn.Module, x_BLD: Tensor, layout: DocumentLayout, cache: Any = None, indices: Tensor | None = None
) -> Any:
    """A block's forward that keeps what `expensive` says."""
    contexts = functools.partial(create_selective_checkpoint_contexts, expensive)
    return _checkpointed(block, x_BLD, layout, cache, indices, context_fn=contexts)


def full(
    block: nn.Module, x_BLD: Tensor, layout: DocumentLayout, cache: Any = None, indices: Tensor | None = None
) -> Any:
    """A block's forward that keeps its input alone."""
    return _checkpointed(block, x_BLD, layout, cache, indices)


def full_but_decisions(
    block: nn.Module, x_BLD: Tensor, layout: DocumentLayout, cache: Any = None, indices: Tensor | None = None
) -> Any:
    """A block's forward that keeps its input and what `decisions` says."""
    contexts = functools.partial(create_selective_checkpoint_contexts, decisions)
    return _checkpointed(block, x_BLD, layout, cache, indices, context_fn=contexts)


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
        travels = any(isinstance(module, AllToAllDispatch) for module in block.modules())
        whole = full_but_decisions if travels else full
        block.forward = types.MethodType(selective if mode == "selective" else whole, block)  # type: ignore[method-assign]
