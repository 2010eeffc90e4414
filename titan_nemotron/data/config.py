"""The [data] table."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SourceConfig(Table):
    kind: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "shards"] = Field(
        "stdlib",
        description="What the source is: the Python files of the running Python's own standard library; text files (a file is a document); "
        "jsonl files (a line is a document); parquet files (a row is a document); anything the datasets library can load; "
        "a directory written by `titan-nemotron tokenize`.",
    )
    path: str | None = Field(
        None,
        description="Files as a glob (** crosses directories); for datasets the name on the hub, a builder such as json, or a "
        "directory written by save_to_disk; for shards the directory; not used by stdlib.",
    )
    field: str = Field("text", description="Field or column that holds a document's text, in jsonl, parquet and datasets.")
    subset: str | None = Field(None, description="Subset (configuration) of a dataset; only for datasets.")
    split: str = Field("train", description="Split of a dataset; only for datasets.")
    files: str | None = Field(None, description="Data files for a builder such as json or csv, as a glob; only for datasets.")


class DataConfig(Table):
    source: list[SourceConfig] = Field(
        default_factory=lambda: [SourceConfig()],
        min_length=1,
        description="Where documents come from; with several sources the document order runs over all of them, one after the other.",
    )
    validation_source: list[SourceConfig] = Field(
        default_factory=list, description="Where validation documents come from; when empty, a fraction of the training sources is held out."
    )
    validation_fraction: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Fraction of the documents held out for validation, chosen by a hash of each document's name, never trained on; "
        "not used with a validation_source.",
    )
    tokenizer: str = Field(
        "train",
        description="Tokenizer as a tokenizer.json file or a directory that holds one, or train: a byte-level BPE trained on the training documents and cached.",
    )
    vocabulary_size: int = Field(4096, ge=257, description="Number of tokens of a tokenizer that is trained here, the end-of-document token included.")
    tokenizer_bytes: int = Field(
        256 * 1024**2, gt=0, description="A tokenizer is trained on the first documents up to this many bytes."
    )
    eos_token: str | None = Field(
        None, description="Token that ends every document; needed only when the tokenizer's files do not say which it is."
    )
    streams: int = Field(
        256, ge=1, description="Number of virtual streams the documents are dealt to; the number of data ranks must divide it."
    )
    shuffle_block: int = Field(
        1024,
        ge=1,
        description="Sources that can only be read in order (parquet, datasets streams) are shuffled in blocks of this many documents; 1 keeps their order.",
    )
    workers: int = Field(1, ge=0, le=1, description="1 loads and tokenises in a background process, 0 in the training process.")
    prefetch: int = Field(4, ge=1, description="Microbatches the background process prepares ahead.")

    @property
    def held_out(self) -> float:
        """Fraction of the training sources that belongs to validation."""
        return 0.0 if self.validation_source else self.validation_fraction

    @property
    def has_validation(self) -> bool:
        return bool(self.validation_source) or self.validation_fraction > 0
