"""The loss on held-out documents."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titan_nemotron.layout import Batch
from titan_nemotron.train.step import ShardedModel


@dataclass(frozen=True)
class Validation:
    """loss: nats a target, mean over the valid targets of all ranks; bits_per_byte: None when bytes are not known."""

    loss: float
    bits_per_byte: float | None

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        return f"loss {self.loss:.4f}{bits}"


@torch.no_grad()
def validate(model: ShardedModel, batches: Iterable[Batch]) -> Validation:
    """Score this rank's batches, and sum over ranks. Statistics of the forward are dropped, so no router moves.

    bits_per_byte = sum of -log2 p over the targets / bytes of text that the targets stand for.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # nats, targets, bytes, batches whose bytes are unknown
    for batch in batches:
        loss = model.loss(batch.to(device)).main.double()
        sums[0] += loss
        unknown = batch.target_bytes is None
        sums[1:] += torch.tensor([batch.num_targets, batch.target_bytes or 0, unknown], device=device)
    dist.all_reduce(sums)
    nats, targets, num_bytes, unknown_batches = sums.tolist()
    known = unknown_batches == 0 and num_bytes > 0
    return Validation(nats / max(targets, 1), nats / math.log(2) / num_bytes if known else None)
