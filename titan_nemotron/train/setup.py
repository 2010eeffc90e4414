"""What a run is made of, built from its job."""

import fcntl
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from titan_nemotron.checkpoint.convert import keep_source, keep_token_ids
from titan_nemotron.checkpoint.hub_files import is_hub_directory
from titan_nemotron.checkpoint.load import load_weights
from titan_nemotron.checkpoint.manager import CheckpointManager
from titan_nemotron.config import to_toml
from titan_nemotron.data.loader import Loader, build_loader, merge_states
from titan_nemotron.data.tokenizer import Tokenizer, build_tokenizer
from titan_nemotron.errors import UserError
from titan_nemotron.layout import Batch
from titan_nemotron.models.family import Family, load_family
from titan_nemotron.ops import kernels
from titan_nemotron.optim.adamw import build_optimizer, freeze
from titan_nemotron.parallel.apply import apply, plan_context
from titan_nemotron.parallel.context.choose import ContextPlan
from titan_nemotron.parallel.mesh import data_coordinates, own_part
from titan_nemotron.parallel.sharded import local_part
from titan_nemotron.train.flops import ModelSize, model_size
from titan_nemotron.train.job import Job
from titan_nemotron.train.ranks import Ranks
from titan_nemotron.train.step import StepResult, StepSettings


@dataclass
class Progress:
    """How far a run is, as its checkpoints keep it.

    tokens: positions trained on, padding left out; skipped: steps that were not finite; losses: of the first and of the
    last step that was finite.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    first_loss: float | None = None
    last_loss: float | None = None

    def after(self, result: StepResult) -> "Progress":
        """The progress with one more step."""
        if result.skipped:
            return replace(self, step=self.step + 1, tokens=self.tokens + result.tokens, skipped=self.skipped + 1)
        first = result.loss if self.first_loss is None else self.first_loss
        return Progress(self.step + 1, self.tokens + result.tokens, self.skipped, first, result.loss)


@dataclass
class Position:
    """What, with the tensors, a run continues from: its progress, and this rank's share of the data streams."""

    progress: Progress
    data: dict[str, Any]


@dataclass
class Run:
    """The parts of a run. The model is sharded; loaders give this rank's microbatches on the CPU."""

    job: Job
    ranks: Ranks
    directory: Path
    family: Family
    model: Any
    size: ModelSize
    context: ContextPlan | None
    optimizer: torch.optim.Optimizer
    settings: StepSettings
    tokenizer: Tokenizer
    loader: Loader
    held_out: Loader | None
    checkpoints: CheckpointManager
    lock: TextIO | None

    @property
    def data_degree(self) -> int:
        """Ranks with rows of their own."""
        return data_coordinates(self.ranks.mesh)[1]

    @property
    def microbatches(self) -> int:
        """A rank's microbatches in a step."""
        return self.job.training.global_batch_size // (self.job.training.microbatch_size * self.data_degree)

    def next_batches(self) -> list[Batch]:
        """This rank's microbatches of the next step, on its device."""
        return [self.own_part(next(self.loader)).to(self.ranks.device) for _ in range(self.microbatches)]

    def own_part(self, batch: Batch) -> Batch:
        """This rank's part of whole rows."""
        return own_part(batch, self.ranks.mesh, shortest=self.job.shortest_part)

    def held_out_batches(self) -> Iterator[Batch]:
        """This rank's part of [training] validation_rows, rounded up to whole microbatches: the same rows every time."""
        assert self.held_out is not None
        rows = self.job.training.microbatch_size * self.data_degree
        number = -(-self.job.training.validation_rows // rows)
        return map(self.own_part, itertools.islice(self.held_out, number))

    def position(self, progress: Progress) -> Position:
        """Where the run is, to be saved."""
        return Position(progress, self.loader.state_dict())

    def save(self, position: Position) -> None:
        """A checkpoint of the tensors as they are; the position may be one from before steps that moved nothing."""
        state = {
            "progress": asdict(position.progress),
            "data": merge_states(self.ranks.gather(position.data)),
            "tokenizer": self.tokenizer.fingerprint,
            "job": self.job.model_dump(mode="json"),
        }
        self.checkpoints.save(position.progress.step, self.model, self.optimizer, state, to_toml(self.job))

    def resume(self) -> Progress:
        """Continue from the newest whole checkpoint, or start: from [checkpoint] load, or from initial weights."""
        step = self.checkpoints.latest()
        if step is None:
            return Progress()
        state = self.checkpoints.load(step, self.model, self.optimizer, check=self._check)
        self.ranks.together(lambda: self.loader.load_state_dict(state["data"]))
        return Progress(**state["progress"])

    def _check(self, state: dict[str, Any]) -> None:
        """What a run must not change between two of its checkpoints. Raises UserError."""
        before, now = (resolved["model"]["config"] for resolved in (state["job"], self.job.model_dump(mode="json")))
        lines = [
            f"model.config.{key} = {json.dumps(now.get(key))}: {self.directory} was trained with "
            f"{json.dumps(before.get(key))}; restore it, or change job.name for a new run"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if state["tokenizer"] != self.tokenizer.fingerprint:
            lines.append(
                f"data.tokenizer: is not the one that {self.directory} was trained with; set it to "
                f'"{self.directory / "tokenizer"}", or change job.name for a new run'
            )
        if lines:
            raise UserError("\n".join(lines))


def build_model(job: Job) -> tuple[Family, nn.Module]:
    """The job's model on the meta device, with what does not train frozen."""
    family = load_family(job.model.family)
    with torch.device("meta"):
        model = family.model(job.model.resolved())
    freeze(model, job.optimizer.freeze)
    return family, model


def compute_dtype(job: Job, device: torch.device) -> torch.dtype:
    """What layers compute in: of "auto", fp32 on a CPU and bf16 elsewhere."""
    if job.training.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, job.training.dtype)
    return dtype


def arrangement(job: Job, ranks: Ranks) -> dict[str, Any]:
    """What parallel.apply and arrange take of a job."""
    return {
        "parallel": job.parallel,
        "recompute": job.recompute,
        "compile": job.compile,
        "dtype": compute_dtype(job, ranks.device),
        "microbatch": (job.training.microbatch_size, job.training.sequence_length),
    }


def context_plan(job: Job, model: nn.Module, ranks: Ranks) -> ContextPlan | None:
    """How the rows of each layer will be split, where ranks share rows. Raises UserError."""
    if ranks.mesh.context is None:
        return None
    microbatch = job.training.microbatch_size, job.training.sequence_length
    return plan_context(model, ranks.mesh, job.parallel, compute_dtype(job, ranks.device), microbatch)


def with_whole_model(job: Job) -> Job:
    """The job with every key of the model's configuration written out, so that it outlives changes of flavors."""
    config = job.model.resolved().model_dump(exclude_none=True)
    return job.model_copy(update={"model": job.model.model_copy(update={"config": config})})


def build(job: Job, ranks: Ranks) -> Run:
    """Everything before the first step but the state of a resumed run. Raises UserError, on all ranks together."""
    job = with_whole_model(job)
    ranks.together(lambda: kernels.configure(job.kernels))
    directory = Path(job.job.output_directory).expanduser() / job.job.name
    lock = ranks.together(lambda: lock_directory(directory) if ranks.rank == 0 else None)
    checkpoints = CheckpointManager(directory / "checkpoints", job.checkpoint, ranks.saving_group)
    tokenizer = ranks.together(lambda: build_tokenizer(job.data))
    family, model = build_model(job)
    check_vocabulary(job, tokenizer)
    size = model_size(model, job.training.sequence_length)
    loads = job.checkpoint.load is not None and checkpoints.latest() is None
    context = ranks.together(lambda: context_plan(job, model, ranks))
    apply(model, ranks.mesh, **arrangement(job, ranks), seed=None if loads else job.job.seed)
    torch.manual_seed(job.job.seed + ranks.rank)
    if loads:
        load_initial(job, family, model, ranks, directory)
    if ranks.rank == 0:
        (directory / "config.toml").write_text(to_toml(job))
        tokenizer.save(directory / "tokenizer")
        if job.checkpoint.load is None:
            keep_token_ids(tokenizer.eos_id, tokenizer.bos_id, directory / "hub")
    return Run(
        job=job,
        ranks=ranks,
        directory=directory,
        family=family,
        model=model,
        size=size,
        context=context,
        optimizer=build_optimizer(model, job.optimizer),
        settings=StepSettings(
            mtp_loss_scale=job.training.mtp_loss_scale,
            auxiliary_loss_coefficient=job.training.auxiliary_loss_coefficient,
            max_gradient_norm=job.training.max_gradient_norm,
            router_bias_rate=job.optimizer.router_bias_rate,
            sync_every_microbatch=job.parallel.fsdp.gradient_sync == "every",
            keep_experts_between_microbatches=job.parallel.fsdp.keep_experts_between_microbatches,
        ),
        tokenizer=tokenizer,
        loader=ranks.together(lambda: open_loader(job, tokenizer, ranks, "train")),
        held_out=ranks.together(lambda: open_loader(job, tokenizer, ranks, "validation")) if validates(job) else None,
        checkpoints=checkpoints,
        lock=lock,
    )


def validates(job: Job) -> bool:
    """Whether the run measures held-out documents."""
    return job.training.validation_rows > 0 and job.data.has_validation


def open_loader(job: Job, tokenizer: Tokenizer, ranks: Ranks, split: str) -> Loader:
    """The rows of a split that this rank reads."""
    rank, degree = data_coordinates(ranks.mesh)
    return build_loader(
        job.data,
        tokenizer,
        sequence_length=job.training.sequence_length,
        mtp_depths=getattr(job.model.resolved(), "mtp_depths", 0),
        rows_per_microbatch=job.training.microbatch_size,
        data_rank=rank,
        data_degree=degree,
        seed=job.job.seed,
        split=split,
    )


def initial_weights(job: Job) -> Path:
    """[checkpoint] load."""
    return Path(job.checkpoint.load or "").expanduser()


def load_initial(job: Job, family: Family, model: nn.Module, ranks: Ranks, directory: Path) -> None:
    """Weights of a new run, from a Hugging Face directory or a checkpoint; what an export needs of it goes to hub/."""
    path = initial_weights(job)

    def load() -> None:
        load_weights(
            model,
            family,
            job.model.resolved(),
            path,
            seed=job.job.seed,
            init_missing=job.checkpoint.init_missing,
            local_part=local_part,
            group=ranks.group,
        )

    if is_hub_directory(path):
        ranks.together(load)
    else:
        load()
    if ranks.rank == 0:
        keep_source(path, directory / "hub")


def check_vocabulary(job: Job, tokenizer: Tokenizer) -> None:
    """Raises UserError where the tokenizer has more tokens than the model."""
    vocabulary = getattr(job.model.resolved(), "vocab_size", tokenizer.vocabulary_size)
    if tokenizer.vocabulary_size > vocabulary:
        raise UserError(
            f"model.config.vocab_size = {vocabulary}: the tokenizer has {tokenizer.vocabulary_size} tokens; raise it"
        )


def lock_directory(directory: Path) -> TextIO:
    """Hold the run's directory until this process ends, however it ends. Raises UserError when another one holds it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"job.output_directory: cannot write to {directory} ({error.strerror}); choose another"
        ) from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.close()
        raise UserError(
            f"job.name: another process is training in {directory}; wait for its end, or choose another name"
        ) from None
    except OSError:
        pass  # a file system without locks
    return lock
