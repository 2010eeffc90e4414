"""`titan-nemotron convert`: between our checkpoints and Hugging Face directories."""

import sys
import time
from typing import Annotated, Literal

from pydantic import Field

from titan_nemotron.config import POSITIONAL, Table, load


class ConvertOptions(Table):
    """Turn one of our checkpoints into a Hugging Face directory, or the other way round, by what SOURCE is."""

    source: Annotated[str, POSITIONAL] = Field(description="Hugging Face directory, or one of our checkpoints or runs.")
    destination: Annotated[str, POSITIONAL] = Field(description="Directory to write; it must not exist.")
    dtype: Literal["stored", "float32", "bfloat16"] = Field(
        "stored",
        description="Type of the tensors of a Hugging Face directory that is written; those that stay fp32 while training "
        "stay so.",
    )
    max_shard_gigabytes: float = Field(5.0, gt=0, description="Size of a safetensors file at most.")


def run(arguments: list[str]) -> None:
    """Convert between Hugging Face directories and checkpoints, showing progress."""
    options = load(ConvertOptions, None, arguments, "titan-nemotron convert")

    import torch

    from titan_nemotron.checkpoint.convert import convert

    shown = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and (time.monotonic() - shown > 0.2 or done == total):
            shown = time.monotonic()
            print(f"\r{done / 1e9:.1f} of {total / 1e9:.1f} GB", end="", file=sys.stderr, flush=True)

    sentence = convert(
        options.source,
        options.destination,
        dtype=None if options.dtype == "stored" else getattr(torch, options.dtype),
        max_shard_bytes=int(options.max_shard_gigabytes * 1e9),
        progress=progress,
    )
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(f"wrote {sentence}")
