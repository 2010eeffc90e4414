"""One optimizer step, from microbatches to moved weights.

Shapes: D multi-token depths, E experts, B rows, L positions, K experts a token.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_nemotron.layout import Batch
from titan_nemotron.models.family import Losses, Model
from titan_nemotron.optim.router_bias import update_router_biases
from titan_nemotron.parallel.clip import clip_gradients
from titan_nemotron.parallel.fsdp import begin_microbatch

Routing = dict[str, Tensor]  # the experts chosen in a microbatch, [B, L, K] by call


class ShardedModel(Model, Protocol):
    """A family's model after parallel.apply."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


@dataclass(frozen=True)
class StepSettings:
    """The numbers of a step; see [training], [optimizer] and [parallel]."""

    mtp_loss_scale: float = 0.1
    auxiliary_loss_coefficient: float = 1e-4
    max_gradient_norm: float = 1.0
    router_bias_rate: float = 1e-3
    sync_every_microbatch: bool = False
    keep_experts_between_microbatches: bool = False


class Totals(NamedTuple):
    """Counts over all ranks and microbatches, fp64 on the device: valid targets, those of each depth [D], rows, tokens."""

    targets: Tensor
    mtp_targets_D: Tensor
    rows: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class StepResult:
    """What a step did, equal on all ranks.

    loss, mtp_losses  mean over the valid targets of the global batch, without coefficients (0 where there is none)
    auxiliary_loss    mean over rows of the sum over routed calls, without its coefficient
    gradient_norm     before clipping
    tokens            positions that are not padding
    targets           valid targets of the main loss
    counts            tokens sent to each expert [E] by routed call, fp64 on the device
    skipped           a loss or the gradient was not finite: nothing moved
    """

    loss: float
    mtp_losses: tuple[float, ...]
    auxiliary_loss: float
    gradient_norm: float
    tokens: int
    targets: int
    counts: dict[str, Tensor]
    skipped: bool


class Sums(NamedTuple):
    """Detached sums over this rank's microbatches, or all of them: main, each depth [D], auxiliary, counts by call [E]."""

    main: Tensor
    mtp_D: Tensor
    auxiliary: Tensor
    counts: dict[str, Tensor]


def global_totals(batches: Sequence[Batch]) -> Totals:
    """Count before the first backward what losses are divided by: one all-reduce, no host synchronisation."""
    device = batches[0].tokens.device
    known = [[batch.num_targets, *batch.num_mtp_targets, batch.tokens.shape[0]] for batch in batches]
    tokens = torch.stack([batch.layout.valid.sum() for batch in batches]).sum()
    counts = torch.cat([torch.tensor(known, dtype=torch.float64).sum(0).to(device), tokens.double()[None]])
    dist.all_reduce(counts)
    return Totals(counts[0], counts[1:-2], counts[-2], counts[-1])


def total_loss(losses: Losses, totals: Totals, settings: StepSettings) -> Tensor:
    """main / N + scale / D * sum_k mtp_k / N_k + coefficient * auxiliary / rows, of one microbatch's sums.

    Summed over microbatches and ranks it is the loss of the global batch. A depth without a valid target has sum 0 and
    contributes 0.
    """
    total = losses.main / totals.targets.clamp(min=1).to(losses.main)
    if depths := len(losses.mtp):
        weights_D = settings.mtp_loss_scale / depths / totals.mtp_targets_D.clamp(min=1)
        total = total + (losses.mtp * weights_D.to(losses.mtp)).sum()
    coefficient = settings.auxiliary_loss_coefficient / totals.rows
    return total + losses.auxiliary * coefficient.to(losses.auxiliary)


def loss_sums(losses: Losses) -> Sums:
    """Detach what a step reports; counts in fp64, which holds them exactly."""
    counts = {call: stats["counts_E"].double() for call, stats in losses.stats.items() if "counts_E" in stats}
    return Sums(losses.main.detach().double(), losses.mtp.detach().double(), losses.auxiliary.detach().double(), counts)


def add(left: Sums, right: Sums) -> Sums:
    """Sums over the microbatches of both."""
    counts = {call: count + right.counts[call] for call, count in left.counts.items()}
    return Sums(left.main + right.main, left.mtp_D + right.mtp_D, left.auxiliary + right.auxiliary, counts)


def reduce_sums(sums: Sums) -> Sums:
    """Sum over all ranks in one all-reduce."""
    parts = [sums.main[None], sums.mtp_D, sums.auxiliary[None], *sums.counts.values()]
    packed = torch.cat(parts)
    dist.all_reduce(packed)
    main, mtp_D, auxiliary, *counts = packed.split([len(part) for part in parts])
    return Sums(main[0], mtp_D, auxiliary[0], dict(zip(sums.counts, counts, strict=True)))


def forward_backward(
    model: ShardedModel,
    batches: Sequence[Batch],
    totals: Totals,
    settings: StepSettings,
    replay: Sequence[Routing] | None = None,
) -> Sums:
    """Accumulate the gradient of the global loss over this rank's microbatches, in fp32.

    Gradients are reduced in the last backward alone, unless settings.sync_every_microbatch: until then a rank holds whole
    gradients instead of shards (4 bytes a parameter), which saves a reduction a microbatch.
    """
    sums: Sums | None = None
    for index, batch in enumerate(batches):
        begin_microbatch(
            model,
            last=index == len(batches) - 1,
            sync_every=settings.sync_every_microbatch,
            keep_experts=settings.keep_experts_between_microbatches,
        )
        losses: Losses = model.loss(batch, None if replay is None else replay[index])
        total_loss(losses, totals, settings).backward()
        sums = loss_sums(losses) if sums is None else add(sums, loss_sums(losses))
    assert sums is not None
    return sums


def train_step(
    model: ShardedModel,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    learning_rate: float,
    settings: StepSettings,
    *,
    replay: Sequence[Routing] | None = None,
) -> StepResult:
    """Move the weights by the gradient of the global batch; `batches` are this rank's microbatches, on its device.

    All ranks give the same number of microbatches. A loss or gradient that is not finite on any rank makes all ranks skip
    the step: no weight, optimizer state or router bias moves. The host waits for the device once.
    """
    totals = global_totals(batches)
    sums = reduce_sums(forward_backward(model, batches, totals, settings, replay))
    norm = clip_gradients(model.parameters(), settings.max_gradient_norm)

    main = sums.main / totals.targets.clamp(min=1)
    mtp_D = sums.mtp_D / totals.mtp_targets_D.clamp(min=1)
    numbers = [main, *mtp_D, sums.auxiliary / totals.rows, norm, totals.tokens, totals.targets]
    loss, *mtp_losses, auxiliary_loss, gradient_norm, tokens, targets = torch.stack(numbers).tolist()

    # Every number is a sum over all ranks, so that all ranks decide alike.
    finite = all(map(math.isfinite, (loss, *mtp_losses, auxiliary_loss, gradient_norm)))
    if finite:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        update_router_biases(model, sums.counts, settings.router_bias_rate)
    optimizer.zero_grad()
    return StepResult(
        loss=loss,
        mtp_losses=tuple(mtp_losses),
        auxiliary_loss=auxiliary_loss,
        gradient_norm=gradient_norm,
        tokens=int(tokens),
        targets=int(targets),
        counts=sums.counts,
        skipped=not finite,
    )
