"""The options that name a trained model, shared by the commands that run one."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from titan_nemotron.config import Table
from titan_nemotron.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from titan_nemotron.data.tokenizer import Tokenizer


class ModelOptions(Table):
    """A trained model, and how to compute with it."""

    checkpoint: str = Field(description="Hugging Face directory, or one of our checkpoints.")
    dtype: Literal["float32", "bfloat16", "stored"] = Field(
        "float32", description='Type to compute in; "stored" is the type of each tensor in the files.'
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description='Where to compute; "auto" is cuda where PyTorch sees a GPU, otherwise cpu.'
    )

    def model(self) -> "nn.Module":
        """The model, loaded, in evaluation mode."""
        import torch

        from titan_nemotron.checkpoint.load import load_model

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: PyTorch sees no GPU; use --device cpu")
        dtype = None if self.dtype == "stored" else getattr(torch, self.dtype)
        return load_model(self.checkpoint, dtype=dtype, device=device)


def find_tokenizer(checkpoint: str, named: str | None) -> "Tokenizer":
    """The tokenizer that was named, or lies in the checkpoint's directory, or in that of the run that wrote it."""
    from titan_nemotron.data.tokenizer import Tokenizer

    if named is not None:
        return Tokenizer.from_path(named)
    path = Path(checkpoint)
    if not path.exists():
        raise UserError(f"--checkpoint {checkpoint}: no such directory; give a Hugging Face directory or a checkpoint")
    run = path.resolve().parent.parent  # of run/checkpoints/step-N
    for place in (path, path / "tokenizer", path / "hub", run / "tokenizer", run / "hub"):
        if (place / "tokenizer.json").is_file():
            return Tokenizer.from_path(place)
    raise UserError(f"--checkpoint {checkpoint}: no tokenizer.json there; name one with --tokenizer")
