"""Tables for the tests of the loading machinery, with one of everything a table can hold."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from titan_nemotron.config import KeysOf, Table


class Training(Table):
    """How long, and on how much."""

    steps: int = Field(10, ge=1, description="Optimizer steps.")
    global_batch_size: int = Field(8, ge=1, description="Rows of a step.")
    microbatch_size: int = Field(4, ge=1, description="Rows at once.")
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that layers
    compute in."""
    loss_scale: float = Field(1.0, gt=0, description="Factor on the loss.")

    def mistakes(self) -> Iterator[str]:
        if self.global_batch_size % self.microbatch_size:
            yield f"microbatch_size = {self.microbatch_size}: does not divide global_batch_size = {self.global_batch_size}"


class Optimizer(Table):
    """AdamW."""

    learning_rate: float = Field(1e-3, gt=0, description="Peak rate.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay of the moments.")
    freeze: list[str] = Field([], description="Patterns of names that stay as they are.")
    warmup_steps: int | Literal["auto"] = Field("auto", description="Steps to the peak.")


class Compile(Table):
    """torch.compile."""

    enable: bool = Field(False, description="Compile each block.")


class Source(Table):
    """Where text comes from."""

    kind: Literal["stdlib", "text"] = Field("stdlib", description="Kind of source.")
    path: str | None = Field(None, description="Files.")

    def mistakes(self) -> Iterator[str]:
        if self.kind == "text" and self.path is None:
            yield "path: a text source needs one"


class Data(Table):
    """What is read."""

    streams: int = Field(256, description="Virtual streams.")
    source: list[Source] = Field(default_factory=lambda: [Source()], min_length=1, description="Sources.")


class Model(Table):
    """What is trained."""

    config: Annotated[dict[str, Any], KeysOf("tests.config.tables:Family")] = Field({}, description="Family keys.")
    mixers: dict[str, str] = Field({}, description="Letter to class.")


class Family(Table):
    """Keys of a family."""

    hidden_size: int = Field(64, description="Model size.")


class Example(Table):
    """A job."""

    training: Training = Field(default_factory=Training)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    compile: Compile = Field(default_factory=Compile)
    data: Data = Field(default_factory=Data)
    model: Model = Field(default_factory=Model)

    def mistakes(self) -> Iterator[str]:
        if self.data.streams % self.training.global_batch_size:
            yield (
                f"data.streams = {self.data.streams}: not divisible by training.global_batch_size = "
                f"{self.training.global_batch_size}"
            )
