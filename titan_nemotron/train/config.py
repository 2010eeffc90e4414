"""The `[training]` and `[metrics]` tables."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from titan_nemotron.config import Table

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class TrainingConfig(Table):
    """Length of the run, batches, losses, validation."""

    steps: Positive = 1000
    """Optimizer steps."""
    sequence_length: Positive = 1024
    """Tokens in a row."""
    global_batch_size: Positive = 8
    """Rows in an optimizer step, over all ranks."""
    microbatch_size: Positive = 1
    """Rows a rank computes at once; gradients accumulate over the microbatches of a step."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type that layers compute in; "auto" is float32 on a CPU and bfloat16 on CUDA. Master weights are always float32."""
    mtp_loss_scale: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the multi-token-prediction losses, averaged over the depths."""
    auxiliary_loss_coefficient: Annotated[float, Field(ge=0)] = 1e-4
    """Weight of the routers' sequence auxiliary loss."""
    max_gradient_norm: Annotated[float, Field(ge=0)] = 1.0
    """The gradient is scaled down to this global norm; 0 never scales it."""
    max_nonfinite_steps: Positive = 10
    """The run stops after this many skipped steps in a row (a loss or gradient was not finite)."""
    validation_interval: NotNegative = 0
    """Steps between validations; there is always one at the end, and 0 gives only that one."""
    validation_rows: NotNegative = 64
    """Rows of a validation, over all ranks, the same ones every time; 0 turns validation off."""

    def mistakes(self) -> Iterator[str]:
        if self.global_batch_size % self.microbatch_size:
            yield (
                f"microbatch_size = {self.microbatch_size}: does not divide global_batch_size = "
                f"{self.global_batch_size}; make one a multiple of the other"
            )


class MetricsConfig(Table):
    """What the run reports."""

    interval: Positive = 10
    """Steps between logged steps (console, metrics.jsonl, TensorBoard); the first and the last are always logged."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak of one device, in 10^12 FLOP/s, for the utilisation; known for common NVIDIA GPUs."""
    profile: list[Positive] = Field(default_factory=list)
    """Steps to profile, on rank 0: each writes profile/step-N.json.gz to the run's directory, a Chrome trace, and on CUDA
    profile/step-N-memory.pickle, a snapshot for pytorch.org/memory_viz; on a CPU the trace holds the allocations."""
    completion_prompt: str = "import "
    """Prompt of the completion sampled at the end."""
    completion_tokens: NotNegative = 64
    """Tokens of the completion sampled at the end; 0 samples none."""
