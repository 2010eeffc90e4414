"""`titan-nemotron tokenize`: the documents of a job's sources as memory-mapped token shards."""

import sys
import time
from pathlib import Path

from pydantic import Field

from titan_nemotron.config import Table, load, split
from titan_nemotron.data.config import DataConfig
from titan_nemotron.errors import UserError

SHOWN_PROBLEMS = 10  # bad records named on the console


class TokenizeOptions(Table):
    """Tokenise every document of [data] source once and write memory-mapped shards, for a source of kind "shards"."""

    output: str = Field(description="Directory to write; it must not exist.")
    config: str | None = Field(None, description="TOML file of a job; its [data] table is used.")
    tokens_per_shard: int = Field(1 << 28, gt=0, description="Tokens in a file.")


class Data(Table):
    """The [data] table alone, for flags and help."""

    data: DataConfig = Field(default_factory=DataConfig)


def data_table(config: str | None, arguments: list[str]) -> DataConfig:
    """The [data] table of a job's file and flags; without a file, of the flags alone."""
    if config is None:
        return load(Data, None, arguments).data
    from titan_nemotron.train.job import Job

    return load(Job, config, arguments).data


def run(arguments: list[str]) -> None:
    """Write the sources of a configuration as shards of tokens."""
    options, rest = split(TokenizeOptions, Data, arguments, "titan-nemotron tokenize")
    data = data_table(options.config, rest)
    output = Path(options.output)
    if output.exists():
        raise UserError(f"--output {output}: exists already; remove it or name another directory")

    from titan_nemotron.data.shards import write_shards
    from titan_nemotron.data.sources import open_source
    from titan_nemotron.data.tokenizer import build_tokenizer

    start = shown = time.monotonic()
    num_documents = num_tokens = 0

    def progress(documents: int, tokens: int) -> None:
        nonlocal num_documents, num_tokens, shown
        num_documents, num_tokens = documents, tokens
        if sys.stderr.isatty() and time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            print(f"\r{documents:,} documents, {tokens:,} tokens", end="", file=sys.stderr, flush=True)

    sources = [open_source(source) for source in data.source]
    tokenizer = build_tokenizer(data)
    problems = write_shards(sources, tokenizer, output, tokens_per_shard=options.tokens_per_shard, progress=progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    for problem in problems[:SHOWN_PROBLEMS]:
        print(f"left out: {problem}", file=sys.stderr)
    if len(problems) > SHOWN_PROBLEMS:
        print(f"left out: {len(problems) - SHOWN_PROBLEMS:,} more", file=sys.stderr)
    seconds = time.monotonic() - start
    print(
        f"{num_documents:,} documents, {num_tokens:,} tokens in {seconds:.1f} s ({num_tokens / seconds:,.0f} tokens/s)"
    )
    print(f'wrote {output}; use it as [[data.source]] kind = "shards", path = "{output}", and as [data] tokenizer')
