"""The whole configuration of a job: one TOML file, one table for each package."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from titan_nemotron.checkpoint.config import CheckpointConfig
from titan_nemotron.config import Table
from titan_nemotron.data.config import DataConfig
from titan_nemotron.errors import UserError
from titan_nemotron.models.config import ModelConfig
from titan_nemotron.ops.config import KernelsConfig
from titan_nemotron.optim.config import OptimizerConfig, ScheduleConfig
from titan_nemotron.parallel.config import CompileConfig, ParallelConfig, RecomputeConfig
from titan_nemotron.train.config import MetricsConfig, TrainingConfig


class JobConfig(Table):
    """Which run this is, and where its outputs go."""

    name: str = Field("debug", pattern=r"^[\w.-]+$", description="Name of the run, and of its folder of outputs.")
    output_directory: str = Field("outputs", description="Folder that holds a folder for each run.")
    seed: int = Field(0, ge=0, description="Seed of the initial weights, of the order of the data and of all sampling.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description='Where to train; "auto" is cuda where PyTorch sees a GPU, otherwise cpu.'
    )


class Job(Table):
    """Train a model as one TOML file says."""

    job: JobConfig = Field(default_factory=JobConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)

    def mistakes(self) -> Iterator[str]:
        vocabulary = getattr(self.model.resolved(), "vocab_size", None)
        if self.data.tokenizer == "train" and vocabulary is not None and self.data.vocabulary_size > vocabulary:
            yield (
                f"data.vocabulary_size = {self.data.vocabulary_size}: more tokens than model.config.vocab_size = "
                f"{vocabulary}; raise that or lower this"
            )

        steps = self.training.steps
        if beyond := [step for step in self.metrics.profile if step > steps]:
            yield f"metrics.profile = {self.metrics.profile}: the run ends at step {steps}; leave out {beyond}"

        length, context = self.training.sequence_length, self.parallel.context
        reach = self.shortest_part
        if length % context:
            yield f"parallel.context = {context}: does not divide training.sequence_length = {length}; change one of them"
        elif length // context < reach:
            yield (
                f"parallel.context = {context}: parts of {length // context} tokens are shorter than the convolution's "
                f"reach of {reach}; lower it or raise training.sequence_length"
            )

    @property
    def shortest_part(self) -> int:
        """Positions of a row that a rank must hold where rows are split: the convolution reaches into one part alone."""
        return int(getattr(self.model.resolved(), "conv_kernel", 1)) - 1

    def check_ranks(self, num_processes: int) -> None:
        """What the tables say must fit the number of ranks. Raises UserError with a line for each mistake."""
        if num_processes % self.parallel.context:
            return  # parallel.mesh says so, with the degrees that are possible
        lines = []
        num_ranks = num_processes // self.parallel.context  # with rows of their own
        rows, microbatch = self.training.global_batch_size, self.training.microbatch_size
        if rows % (microbatch * num_ranks):
            lines.append(
                f"training.global_batch_size = {rows}: not divisible by microbatch_size * ranks = {microbatch} * "
                f"{num_ranks}; use a multiple of {microbatch * num_ranks}"
            )
        if self.data.streams % num_ranks:
            lines.append(
                f"data.streams = {self.data.streams}: not divisible by the {num_ranks} ranks; use a multiple of {num_ranks}"
            )
        if lines:
            raise UserError("\n".join(lines))
