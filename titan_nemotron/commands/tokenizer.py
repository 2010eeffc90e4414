"""`titan-nemotron tokenizer train`: a byte-level BPE trained on the documents of a job's sources."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from titan_nemotron.commands.tokenize import Data, data_table
from titan_nemotron.config import POSITIONAL, Table, split
from titan_nemotron.errors import UserError


class TokenizerOptions(Table):
    """Train a byte-level BPE tokenizer on the training documents of [data] source and write its Hugging Face files.

    The vocabulary has [data] vocabulary_size tokens. The same documents give the same tokenizer.
    """

    action: Annotated[Literal["train"], POSITIONAL] = Field(description="What to do: train.")
    output: str = Field(description="Directory to write, which [data] tokenizer can then name.")
    config: str | None = Field(None, description="TOML file of a job; its [data] table is used.")


def run(arguments: list[str]) -> None:
    """Train a tokenizer on the sources of a configuration and save it."""
    options, rest = split(TokenizerOptions, Data, arguments, "titan-nemotron tokenizer")
    data = data_table(options.config, rest)
    output = Path(options.output)
    if (output / "tokenizer.json").exists():
        raise UserError(f"--output {output}: has a tokenizer already; remove it or name another directory")

    from titan_nemotron.data.order import training_texts
    from titan_nemotron.data.tokenizer import train_tokenizer

    texts = training_texts(data)
    tokenizer = train_tokenizer(texts, data.vocabulary_size)
    tokenizer.save(output)
    sample = texts[:100]
    num_bytes, num_tokens = sum(len(text.encode()) for text in sample), sum(map(len, tokenizer.encode(sample)))
    print(f"{len(texts):,} documents; {tokenizer.vocabulary_size:,} tokens, {num_bytes / num_tokens:.2f} bytes a token")
    print(f"wrote {output}; use it as [data] tokenizer")
