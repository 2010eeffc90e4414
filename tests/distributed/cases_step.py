"""The training step on several ranks: the same numbers as one process that sees the whole batch."""

import functools
import math
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
from titan_nemotron.layout import Batch
from titan_nemotron.optim.adamw import build_optimizer
from titan_nemotron.optim.config import OptimizerConfig
from titan_nemotron.parallel.clip import clip_gradients
from titan_nemotron.parallel.config import FSDPConfig, ParallelConfig
from titan_nemotron.train.step import (
    StepResult,
    StepSettings,
    forward_backward,
    global_totals,
    reduce_sums,
    total_loss,
    train_step,
)

RATE = 1e-3


def splits(context: Context) -> list[int]:
    """Every number of rows a microbatch can have."""
    share = ROWS // context.world_size
    return [size for size in range(1, share + 1) if share % size == 0]


def gradients(model: nn.Module, batches: list[Batch], settings: StepSettings = SETTINGS) -> tuple[Tensor, dict, dict]:
    """The global loss, the global gradient and the global counts of a batch; leaves no gradient behind."""
    totals = global_totals(batches)
    sums = reduce_sums(forward_backward(model, batches, totals, settings))
    loss = sums.main / totals.targets + settings.auxiliary_loss_coefficient * sums.auxiliary / totals.rows
    loss = loss + settings.mtp_loss_scale * (sums.mtp_D / totals.mtp_targets_D).mean()
    found = whole_gradients(model)
    model.zero_grad()
    return loss, found, sums.counts


def reference_gradients(context: Context) -> tuple[Tensor, dict, dict]:
    if context.rank:
        return shared(context.rank, None)  # type: ignore[return-value]
    loss, losses, found = Reference().gradients(rows(0))
    counts = {call: stats["counts_E"] for call, stats in losses.stats.items() if "counts_E" in stats}
    return shared(0, (loss, found, counts))  # type: ignore[return-value]


@case()
def initial_weights(context: Context) -> None:
    """Bitwise those of one process, also where a dim does not divide or has fewer elements than ranks."""
    expected = unsharded().state_dict()
    actual = whole_parameters(sharded(context.mesh))
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@case()
def every_split(context: Context) -> None:
    """The same global batch in every split into microbatches: loss, global gradient, each tensor, counts."""
    loss, expected, counts = reference_gradients(context)
    model = sharded(context.mesh)
    for size in splits(context):
        for every in (False, True):
            batches = microbatches(0, context.rank, context.world_size, size)
            settings = replace(SETTINGS, sync_every_microbatch=every)
            actual_loss, actual, actual_counts = gradients(model, batches, settings)
            assert abs(actual_loss / loss - 1) <= 1e-6
            assert_gradients(actual, expected, total=1e-6, each=2e-5)
            for call, count in counts.items():
                assert torch.equal(actual_counts[call], count.double()), call


@case()
def recomputation(context: Context) -> None:
    """selective and full: the same loss, gradients and statistics, each counted once, also in microbatches."""
    loss, expected, counts = reference_gradients(context)
    for mode in ("selective", "full"):
        model = sharded(context.mesh, recompute=mode)
        for size in {splits(context)[0], splits(context)[-1]}:
            batches = microbatches(0, context.rank, context.world_size, size)
            actual_loss, actual, actual_counts = gradients(model, batches)
            assert abs(actual_loss / loss - 1) <= 1e-6
            assert_gradients(actual, expected, total=1e-6, each=2e-5)
            for call, count in counts.items():
                assert torch.equal(actual_counts[call], count.double()), (mode, call)


@case(2)
def compiled(context: Context) -> None:
    """Blocks that are compiled in one graph each, sharded and recomputed; the weights are gathered outside the graphs."""
    loss, expected, counts = reference_gradients(context)
    batches = microbatches(0, context.rank, context.world_size, 2)
    traced = functools.partial(
        torch.compile, backend="aot_eager"
    )  # the graphs, without the time their compilation takes
    with mock.patch.object(torch, "compile", traced):
        model = sharded(context.mesh, recompute="selective", compile=True)
    actual_loss, actual, actual_counts = gradients(model, batches)
    assert abs(actual_loss / loss - 1) <= 1e-6
    assert_gradients(actual, expected, total=1e-5, each=1e-5)
    for call, count in counts.items():
        assert torch.equal(actual_counts[call], count.double()), call


@case(2)
def weights_kept_after_forward(context: Context) -> None:
    """reshard_after_forward = false changes no number."""
    _, expected, _ = reference_gradients(context)
    model = sharded(context.mesh, parallel=ParallelConfig(fsdp=FSDPConfig(reshard_after_forward=False)))
    _, actual, _ = gradients(model, microbatches(0, context.rank, context.world_size, 2))
    assert_gradients(actual, expected, total=1e-6, each=2e-5)


def run_steps(context: Context, size: int, steps: int, *, replay: list | None = None, **arguments) -> tuple:
    model = sharded(context.mesh, **arguments)
    optimizer = build_optimizer(model, OptimizerConfig())
    results = []
    for step in range(steps):
        batches = microbatches(step, context.rank, context.world_size, size)
        routing = None
        if replay is not None:  # indices of the whole batch, by call: this rank's rows
            first = context.rank * ROWS // context.world_size
            starts = [first + index * size for index in range(len(batches))]
            routing = [
                {call: all_rows[start : start + size] for call, all_rows in replay[step].items()} for start in starts
            ]
        results.append(train_step(model, optimizer, batches, RATE, SETTINGS, replay=routing))
    return model, optimizer, results


@case()
def three_steps(context: Context) -> None:
    """Parameters, biases, losses and norms after three steps with the routing replayed, in every split."""
    expected: dict[str, Tensor] = {}
    recorded = None
    if context.rank == 0:
        reference, recorded = Reference(), []
        for step in range(3):
            losses, norm = reference.step(rows(step))
            routing = {call: stats["indices_BLK"] for call, stats in losses.stats.items() if "indices_BLK" in stats}
            recorded.append((routing, losses.main / rows(step).num_targets, norm))
        expected = whole_parameters(reference.model)
    expected, recorded = shared(context.rank, (expected, recorded))  # type: ignore[misc]
    for size in splits(context):
        model, _, results = run_steps(context, size, 3, replay=[routing for routing, _, _ in recorded])
        for result, (_, loss, norm) in zip(results, recorded):
            assert not result.skipped
            assert abs(result.loss / loss - 1) <= 1e-5
            assert abs(result.gradient_norm / norm - 1) <= 1e-5
        actual = whole_parameters(model)
        for name, tensor in expected.items():
            if name.endswith("correction_bias"):
                assert torch.equal(actual[name], tensor), name
            else:
                assert relative(actual[name], tensor) <= 1e-5, f"{name}: {relative(actual[name], tensor):.2e}"


@case(1, 2)
def same_run_bitwise(context: Context) -> None:
    """Same seed, same ranks: bitwise the same run."""
    first, second = (run_steps(context, 2, 2) for _ in range(2))
    for name, tensor in whole_parameters(first[0]).items():
        assert torch.equal(tensor, whole_parameters(second[0])[name]), name
    assert [result.loss for result in first[2]] == [result.loss for result in second[2]]


@case()
def clipping(context: Context) -> None:
    """One norm over all shards; the gradient is scaled down to the bound and never up; 0 never scales."""
    _, expected, _ = reference_gradients(context)
    model = sharded(context.mesh)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).double().norm()
    for bound, scale in ((norm.item() / 3, 1 / 3), (norm.item() * 3, 1.0), (0.0, 1.0)):
        batches = microbatches(0, context.rank, context.world_size, 2)
        forward_backward(model, batches, global_totals(batches), SETTINGS)
        assert abs(clip_gradients(model.parameters(), bound) / norm - 1) <= 1e-6
        actual = whole_gradients(model)
        assert_gradients(actual, {name: scale * g for name, g in expected.items()}, total=1e-5, each=2e-5)
        model.zero_grad()


@case()
def router_biases(context: Context) -> None:
    """They move once a step on global counts: not by validation, recomputation, microbatches or frozen routers."""
    counts = reference_gradients(context)[2]
    tokens = sum(int(row.layout.valid.sum()) for row in (rows(0, i, i + 1) for i in range(ROWS)))
    assert all(count.sum() == tokens * CONFIG.num_experts_per_tok for count in counts.values())
    total = {"layers.1": counts["layers.1"], "mtp.0": counts["mtp.0.layers.1"] + counts["mtp.1.layers.1"]}
    for frozen in ((), ("*.router.*",)):
        model = sharded(context.mesh, recompute="full", frozen=frozen)
        optimizer = build_optimizer(model, OptimizerConfig())
        with torch.no_grad():
            model.loss(rows(3, 0, 2))
        assert not any(router.correction_bias.any() for router in model.routers().values())
        weight = whole_parameters(model)["layers.1.mixer.router.weight"]
        train_step(model, optimizer, microbatches(0, context.rank, context.world_size, 1), RATE, SETTINGS)
        for call, count in (("layers.1", total["layers.1"]), ("mtp.1.layers.1", total["mtp.0"])):
            expected = SETTINGS.router_bias_rate * torch.sign(count.mean() - count)
            assert torch.equal(model.routers()[call].correction_bias, expected), call
        assert torch.equal(weight, whole_parameters(model)["layers.1.mixer.router.weight"]) == bool(frozen)


@case()
def frozen_parameters(context: Context) -> None:
    """Frozen parameters keep their bits and get no gradient; the others move as they would in one process."""
    frozen = ("embeddings.*", "layers.0.*", "*.fc1_latent_proj.*", "*.dt_bias")
    expected: dict[str, Tensor] = {}
    if context.rank == 0:
        reference = Reference(frozen=frozen)
        reference.step(rows(0))
        expected = whole_parameters(reference.model)
    expected = shared(context.rank, expected)  # type: ignore[assignment]
    before = whole_parameters(unsharded())
    model, _, _ = run_steps(context, 2, 1, frozen=frozen)
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {"embeddings.weight", "layers.0.mixer.in_proj.weight", "layers.1.mixer.fc1_latent_proj.weight"} <= still
    for name, tensor in whole_parameters(model).items():
        if name in still:
            assert torch.equal(tensor, before[name]), name
        else:
            assert relative(tensor, expected[name]) <= 1e-5, name


def poison(model: nn.Module, value: float, where: str) -> torch.utils.hooks.RemovableHandle:
    """Make a number infinite or NaN in the forward, or in the backward alone."""

    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        if where == "forward":
            return output * value
        output.register_hook(lambda gradient: gradient * value)
        return None

    return model.norm_f.register_forward_hook(hook)  # type: ignore[union-attr, operator, return-value]


@case()
def nonfinite_on_one_rank(context: Context) -> None:
    """A loss or a gradient that is not finite on one rank makes every rank skip the step, and nothing moves."""
    model, optimizer, _ = run_steps(context, 2, 1)
    for where, value in (("forward", math.nan), ("backward", math.inf)):
        before, state = whole_parameters(model), optimizer.state_dict()["state"]
        state = {index: {key: whole(t).clone() for key, t in entry.items()} for index, entry in state.items()}
        batches = microbatches(1, context.rank, context.world_size, 2)
        handle = poison(model, value, where) if context.rank == context.world_size - 1 else None
        result = train_step(model, optimizer, batches, RATE, SETTINGS)
        if handle is not None:
            handle.remove()
        assert result.skipped
        assert math.isfinite(result.loss) == (where == "backward")
        for name, tensor in whole_parameters(model).items():
            assert torch.equal(tensor, before[name]), name
        for index, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(whole(tensor), state[index][key]) for key, tensor in entry.items())
        result = train_step(model, optimizer, batches, RATE, SETTINGS)
        assert not result.skipped
        assert math.isfinite(result.gradient_norm)


@case()
def depths_without_targets(context: Context) -> None:
    """Documents too short for a depth: it contributes 0, on all ranks or on some, and nothing is divided by 0."""

    def short(step: int, start: int, stop: int, longest: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, CONFIG.vocab_size, (ROWS, LENGTH + 3), generator=generator)[start:stop]
        documents = (torch.arange(LENGTH + 3) // longest).expand(stop - start, -1)
        return Batch.from_rows(tokens, documents, length=LENGTH, mtp_depths=2)

    model = sharded(context.mesh)
    optimizer = build_optimizer(model, OptimizerConfig())
    share = ROWS // context.world_size
    first = context.rank * share

    def step(longest: int) -> StepResult:
        batch = short(0, first, first + share, longest)
        return train_step(model, optimizer, [batch], RATE, replace(SETTINGS, max_gradient_norm=0.0))

    nothing = step(1)  # documents of one token: no target at all
    assert not nothing.skipped
    assert nothing.targets == 0
    assert (nothing.loss, nothing.mtp_losses) == (0.0, (0.0, 0.0))
    pairs = step(2)  # documents of two tokens: next-token targets alone
    assert not pairs.skipped
    assert pairs.loss > 0
    assert pairs.mtp_losses == (0.0, 0.0)
    some = step(2 if context.rank else LENGTH)  # rank 0 alone has the deeper targets
    assert not some.skipped
    assert min(some.mtp_losses) > 0


@case(1, 2)
def validation_between_steps(context: Context) -> None:
    """A forward without gradient, and logits, leave the run as it was."""
    plain, _, _ = run_steps(context, 2, 2)
    model = sharded(context.mesh)
    optimizer = build_optimizer(model, OptimizerConfig())
    for step in range(2):
        with torch.no_grad():
            model.loss(rows(5, 0, 2))
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            logits = model(rows(5, 0, 2).tokens)
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            assert logits.shape == (2, LENGTH, CONFIG.vocab_size)
        train_step(model, optimizer, microbatches(step, context.rank, context.world_size, 2), RATE, SETTINGS)
    for name, tensor in whole_parameters(plain).items():
        assert torch.equal(tensor, whole_parameters(model)[name]), name


@case(1, 2)
def loss_is_a_sum_over_microbatches(context: Context) -> None:
    """total_loss of the microbatches adds up to the reported means with their coefficients."""
    model = sharded(context.mesh)
    batches = microbatches(0, context.rank, context.world_size, 1)
    totals = global_totals(batches)
    total = torch.stack([total_loss(model.loss(batch), totals, SETTINGS).detach() for batch in batches]).sum()
    torch.distributed.all_reduce(total)
    loss, _, _ = gradients(model, batches)
    assert abs(total / loss - 1) <= 1e-6
