"""The `[checkpoint]` table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from titan_nemotron.config import Table

NotNegative = Annotated[int, Field(ge=0)]


class CheckpointConfig(Table):
    """Saving and resuming, and where initial weights come from."""

    interval: NotNegative = 500
    """Steps between checkpoints; there is always one at the end, and 0 gives only that one."""
    asynchronous: bool = True
    """Write in the background while training goes on; costs a copy of the state in host memory."""
    keep_last: Annotated[int, Field(gt=0)] = 2
    """Newest checkpoints to keep."""
    keep_every: NotNegative = 0
    """Checkpoints at multiples of this many steps are kept for good; 0 keeps none for good."""
    load: str | None = None
    """Initial weights of a new run: a Hugging Face directory or one of our checkpoints; a resumed run ignores it."""
    init_missing: list[str] = Field(default_factory=list)
    """Tensors of `load`, by its names (* matches anything), that may be missing or of another shape and are then
    initialised, or unexpected and are then left out; a pattern must match one."""
    export: bool = False
    """Write the trained model as a Hugging Face directory, hf/, at the end."""

    def mistakes(self) -> Iterator[str]:
        if self.load is not None and not Path(self.load).expanduser().is_dir():
            yield f"load = {self.load!r}: no such directory; give a Hugging Face directory or one of our checkpoints"
        if self.init_missing and self.load is None:
            yield "init_missing: means nothing without load; set [checkpoint] load, or remove init_missing"
