"""Forward and backward of one small hybrid in fp32, ours against transformers with its default experts; same weights.

python benchmarks/training_step.py [--length 1024] [--threads 2] [--repeats 15]
"""

import argparse
import gc
import resource
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch
from peer import HYBRID, pair
from torch import nn
from torch.profiler import ProfilerActivity, profile

from titan_nemotron.layout import Batch

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "grouped_mm", "scaled_dot_product")


def steps(length: int) -> dict[str, Callable[[], float]]:
    """By name: one forward and backward that returns the mean loss."""
    ours, theirs = pair()
    tokens = torch.randint(0, HYBRID.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch.from_rows(tokens, torch.zeros_like(tokens), length=length, mtp_depths=0)

    def clear(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    def our_step() -> float:
        clear(ours)
        loss = ours.loss(batch).main / batch.num_targets  # type: ignore[operator]
        loss.backward()
        return loss.item()

    def their_step() -> float:
        clear(theirs)
        # labels are shifted inside; the same targets as ours need one more token than the inputs
        logits = theirs(batch.tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        loss.backward()
        return loss.item()

    return {"titan_nemotron": our_step, "transformers": their_step}


def product_share(step: Callable[[], float]) -> float:
    """The share of the profiled time that is spent in matrix products and attention."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
    events = profiler.key_averages()
    products = sum(e.self_cpu_time_total for e in events if any(name in e.key for name in PRODUCTS))
    return products / sum(event.self_cpu_time_total for event in events)
