"""The whole configuration of a job: one TOML file, one table for each package."""

from typing import Literal

from pydantic import Field

from titan_nemotron.checkpoint.config import CheckpointConfig
from titan_nemotron.config import Table
from titan_nemotron.models.config import ModelConfig
from titan_nemotron.ops.config import KernelsConfig
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
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
