"""What a run is about to do, in lines to read."""

from torch import nn

from titan_nemotron.checkpoint.hub_files import is_hub_directory
from titan_nemotron.checkpoint.load import check_weights, checkpoint_directory
from titan_nemotron.models.family import Family
from titan_nemotron.ops import kernels
from titan_nemotron.optim import adamw
from titan_nemotron.parallel.apply import arrange
from titan_nemotron.parallel.context.choose import ContextPlan
from titan_nemotron.parallel.mesh import data_coordinates
from titan_nemotron.parallel.sharded import local_part
from titan_nemotron.train.flops import ModelSize, model_size
from titan_nemotron.train.job import Job
from titan_nemotron.train.metrics import short
from titan_nemotron.train.ranks import Ranks
from titan_nemotron.train.setup import (
    Progress,
    Run,
    arrangement,
    build_model,
    compute_dtype,
    context_plan,
    initial_weights,
)

BYTES_OF_STATE = 16  # a parameter: fp32 weight and gradient, and AdamW's two averages


def describe_run(run: Run, progress: Progress) -> list[str]:
    """The first lines of a run."""
    lines = describe(run.job, run.size, run.ranks, run.context)
    if progress.step:
        lines.append(f"resuming {run.directory} after step {progress.step} of {run.job.training.steps}")
    return lines


def describe(job: Job, size: ModelSize, ranks: Ranks, context: ContextPlan | None) -> list[str]:
    """The lines at the start of a run: model, mesh, batch, and how rows are split."""
    training = job.training
    tokens = training.global_batch_size * training.sequence_length
    mesh = ", ".join(f"{name} {degree}" for name, degree in ranks.mesh.axes.items())
    accumulation = training.global_batch_size // (training.microbatch_size * data_coordinates(ranks.mesh)[1])
    dtype = str(compute_dtype(job, ranks.device)).removeprefix("torch.")
    return [
        f"{job.job.name}: {job.model.family} {job.model.flavor}, {size.total:,} parameters, {size.active:,} active",
        f"mesh: {mesh} on {ranks.device.type}, computing in {dtype}; recompute {job.recompute.mode}, "
        f"compile {'on' if job.compile.enable else 'off'}",
        *(context.describe() if context else []),
        f"batch: {training.global_batch_size} rows of {training.sequence_length} = {tokens:,} tokens a step, "
        f"{accumulation} microbatch{'es' if accumulation > 1 else ''} of {training.microbatch_size} a rank",
        f"length: {training.steps:,} steps, {short(float(tokens) * training.steps)} tokens",
        f"kernels: {'; '.join(kernels.describe(ranks.device.type))}",
    ]


def describe_initial_weights(job: Job, family: Family, model: nn.Module) -> list[str]:
    """What [checkpoint] load gives, as its directory's headers say. Raises UserError for what does not fit."""
    if job.checkpoint.load is None:
        return []
    path = initial_weights(job)
    if not is_hub_directory(path):
        path = checkpoint_directory(path)
    read, waived = check_weights(model, family, job.model.resolved(), path, init_missing=job.checkpoint.init_missing)
    others = f"; init_missing stands for {waived:,}" if waived else ""
    return [f"initial weights: {path}, where {read:,} tensors fit{others}"]


def dry_run(job: Job, ranks: Ranks) -> list[str]:
    """Check what can be checked without data and memory, and say what a run would do. Raises UserError."""
    kernels.configure(job.kernels)
    family, model = build_model(job)
    loading = ranks.together(lambda: describe_initial_weights(job, family, model))
    size = model_size(model, job.training.sequence_length)
    groups = adamw.describe(model)
    context = context_plan(job, model, ranks)
    arrange(model, ranks.mesh, **arrangement(job, ranks))
    held = sum(local_part(parameter)[0].numel() for parameter in model.parameters())
    return [
        *describe(job, size, ranks, context),
        f"work: {short(size.flops)} FLOPs a token, forward and backward; rank {ranks.rank} holds {held:,} parameters, with "
        f"gradients and optimizer {held * BYTES_OF_STATE / 2**30:.3g} GiB",
        *loading,
        "",
        groups,
        "",
        "dry run: nothing was trained or written",
    ]
