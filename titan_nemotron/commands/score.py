"""`titan-nemotron score`: logits and log-probabilities of given tokens."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from titan_nemotron.commands.model import ModelOptions
from titan_nemotron.config import load
from titan_nemotron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class ScoreOptions(ModelOptions):
    """Write the logits of given tokens, and the log-probability of the next token inside its document.

    The input is safetensors with input_ids int64 [B, L] and optionally document_ids [B, L] (-1 is padding); the output
    holds logits fp32 [B, L, V] and logprobs fp32 [B, L], 0 where there is no next token.
    """

    input: str = Field(description="File of tokens.")
    output: str = Field(description="File to write.")


def run(arguments: list[str]) -> None:
    """Write the log-probability of every token of a safetensors file."""
    options = load(ScoreOptions, None, arguments, "titan-nemotron score")
    output = Path(options.output)
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no directory {output.parent}; make it first")
    input_ids, document_ids = read_tokens(Path(options.input))

    from safetensors.torch import save_file

    from titan_nemotron.generation.score import score

    model = options.model()
    with named(Path(options.input)):
        logits, logprobs = score(model, input_ids, document_ids)
    save_file({"logits": logits, "logprobs": logprobs}, output)


def read_tokens(file: Path) -> "tuple[Tensor, Tensor | None]":
    """input_ids [B, L] and document_ids [B, L] or None. Raises UserError for what is not such a file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from titan_nemotron.layout import check_rows

    if not file.is_file():
        raise UserError(f"--input {file}: no such file; give a safetensors file with input_ids")
    try:
        tensors = load_file(file)
    except OSError as error:
        raise UserError(f"--input {file}: cannot read it ({error.strerror or error})") from None
    except SafetensorError as error:
        raise UserError(f"--input {file}: not a safetensors file ({error})") from None
    if "input_ids" not in tensors:
        raise UserError(f"--input {file}: has no tensor input_ids; it holds {', '.join(tensors) or 'nothing'}")
    with named(file):
        check_rows(tensors["input_ids"], tensors.get("document_ids"))
    return tensors["input_ids"], tensors.get("document_ids")


@contextlib.contextmanager
def named(file: Path) -> Iterator[None]:
    """Whatever is wrong with the tokens is said of the file they come from."""
    try:
        yield
    except UserError as error:
        raise UserError(f"--input {file}: {error}") from None
