"""The `[optimizer]` and `[schedule]` tables."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from titan_nemotron.config import Table

Fraction = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Table):
    """AdamW, which moves the weights, and the routers' balancing."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate; the schedule scales it."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay of AdamW's averages of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay a step of matrices, as a multiple of the learning rate; vectors (norms, biases, A_log, D, dt_bias) never decay."""
    router_bias_rate: Annotated[float, Field(ge=0)] = 1e-3
    """Step of the routers' correction biases towards even load, once per optimizer step, also for frozen routers."""
    freeze: list[str] = Field(default_factory=list)
    """Parameters that do not train: shell patterns on their names, as "*.router.*"; a pattern must match something."""


class ScheduleConfig(Table):
    """The learning rate over the run."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warmup: constant; linear or cosine decay to the end; or wsd, constant and then a decay of `decay_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warmup from 0."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of wsd's decay, which ends with the run."""
    decay_shape: Literal["linear", "cosine", "minus_sqrt"] = "minus_sqrt"
    """Shape of wsd's decay."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end, as a share of the peak."""

    def mistakes(self) -> Iterator[str]:
        if self.kind == "wsd" and self.decay_steps == 0:
            yield "decay_steps = 0: wsd needs the number of steps of its decay"
        if self.kind != "wsd" and self.decay_steps:
            yield f'decay_steps = {self.decay_steps}: only kind = "wsd" reads it; {self.kind} decays to the end of the run'
