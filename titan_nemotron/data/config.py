"""The [data] table."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from titan_nemotron.config import Table


def matches(pattern: str) -> bool:
    """Whether a glob finds a file; stops at the first."""
    found = glob.iglob(str(Path(pattern).expanduser()), recursive=True)
    return any(Path(path).is_file() for path in found)


class SourceConfig(Table):
    """Where documents come from."""

    kind: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "shards"] = "stdlib"
    """stdlib: the Python files of the running Python's own standard library; text: a file is a document; jsonl: a line
    is one; parquet: a row is one; datasets: anything the datasets library loads; shards: written by `titan-nemotron
    tokenize`."""
    path: str | None = None
    """Files as a glob (** crosses directories); for datasets a name on the hub, a builder such as json, or a directory
    written by save_to_disk; for shards their directory; not used by stdlib."""
    field: str = "text"
    """Field or column that holds a document's text, in jsonl, parquet and datasets."""
    subset: str | None = None
    """Subset (configuration) of a dataset; only for datasets."""
    split: str = "train"
    """Split of a dataset; only for datasets."""
    files: str | None = None
    """Data files for a builder such as json or csv, as a glob; only for datasets."""

    weight: float | None = Field(None, gt=0)
    """Share of the documents that come from this source, over the sum of all weights: give every source one, equal ones to
    read them in turn, or none, and each has its share of all records."""

    def mistakes(self) -> Iterator[str]:
        if (self.path is None) != (self.kind == "stdlib"):
            need = "needs no path; remove it" if self.kind == "stdlib" else "needs a path"
            yield f"path: a source of kind {self.kind} {need}"
        elif self.kind in ("text", "jsonl", "parquet") and self.path is not None and not matches(self.path):
            hint = f"; it is a directory, write {self.path.rstrip('/')}/**/* for all files below it"
            yield f"path = {self.path!r}: no file matches{hint if Path(self.path).expanduser().is_dir() else ''}"
        elif self.kind == "shards" and self.path is not None and not Path(self.path).expanduser().is_dir():
            yield f"path = {self.path!r}: no such directory; write it with `titan-nemotron tokenize`"
        for key, value in (("subset", self.subset), ("files", self.files)):
            if value is not None and self.kind != "datasets":
                yield f'{key}: only for sources of kind "datasets"; remove it'


class PackingConfig(Table):
    """How documents become rows."""

    kind: Literal["continue", "best_fit"] = "continue"
    """continue: one behind the other, and a document that a row cuts goes on in the next; best_fit: whole documents, each in
    the unfinished row that it fills best, what stays free being padding."""
    pool: int = Field(128, ge=1)
    """Unfinished rows of a stream, at most: more fill better, and take memory (4 bytes a token) and time until the first row
    is full; only for best_fit, as are the keys below."""
    window: int = Field(256, ge=1)
    """Documents of a stream that wait to be placed together, the longest first; 1 places each as it comes."""
    tolerance: int = Field(0, ge=0)
    """A row with at most this many tokens free is finished."""
    shuffle_rows: int = Field(64, ge=0)
    """Finished rows of a stream among which the next is drawn at random; 0 keeps the order in which they were finished."""
    too_long: Literal["refuse", "split"] = "refuse"
    """A document longer than a row: refuse counts and names it as a bad record, split cuts it into rows."""


class DataConfig(Table):
    """What is trained on, and how it becomes rows of tokens."""

    source: list[SourceConfig] = Field(default_factory=lambda: [SourceConfig()], min_length=1)
    """Where documents come from; the document order runs over all sources, one after the other."""
    validation_source: list[SourceConfig] = Field(default_factory=list)
    """Where validation documents come from; when empty, a fraction of the training sources is held out."""
    validation_fraction: float = Field(0.01, ge=0, lt=1)
    """Fraction of the documents held out for validation, chosen by a hash of each one's name, and never trained on; not
    used with a validation_source."""
    tokenizer: str = "train"
    """A tokenizer.json file, a directory that holds one, or "train": a byte-level BPE trained on the training documents
    and cached."""
    vocabulary_size: int = Field(4096, ge=257)
    """Number of tokens of a tokenizer that is trained here, the end-of-document token included."""
    tokenizer_bytes: int = Field(256 * 1024**2, gt=0)
    """A tokenizer is trained on the first documents up to this many bytes."""
    eos_token: str | None = None
    """Token that ends every document; needed only when the tokenizer's files do not say which it is."""
    packing: PackingConfig = Field(default_factory=PackingConfig)
    streams: int = Field(256, ge=1)
    """Number of virtual streams the documents are dealt to; the number of data ranks must divide it."""
    shuffle_block: int = Field(1024, ge=1)
    """Sources that can only be read in order (parquet, datasets streams) are shuffled in blocks of this many documents;
    1 keeps their order."""
    workers: int = Field(1, ge=0, le=1)
    """1 loads and tokenises in a background process, 0 in the training process."""
    prefetch: int = Field(4, ge=1)
    """Microbatches the background process prepares ahead."""

    def mistakes(self) -> Iterator[str]:
        for table, sources in (("source", self.source), ("validation_source", self.validation_source)):
            without = sum(source.weight is None for source in sources)
            if 0 < without < len(sources):
                yield f"{table}: {without} of {len(sources)} have no weight; give every one a weight, or none"
        if self.tokenizer != "train" and not Path(self.tokenizer).expanduser().exists():
            yield (
                f"tokenizer = {self.tokenizer!r}: no such file or directory; "
                'give a tokenizer.json, a directory with one, or "train"'
            )

    @property
    def held_out(self) -> float:
        """Fraction of the training sources that belongs to validation."""
        return 0.0 if self.validation_source else self.validation_fraction

    @property
    def has_validation(self) -> bool:
        """Whether any documents are held out."""
        return bool(self.validation_source) or self.validation_fraction > 0
