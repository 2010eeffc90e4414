"""Tokenizers: one read from Hugging Face files, or a byte-level BPE trained on the documents and cached."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_nemotron.data.config import DataConfig
from titan_nemotron.errors import UserError

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOD>")
# Pieces that merges never cross: a word with the sign or space before it, up to two digits, a run of signs, a line end
# together with the indentation that follows it.
PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+\s*|\s+(?!\S)|\s+"


class Tokenizer:
    """Text to token ids and back.

    Text is plain text: a special token spelled out in a document is encoded as its characters, so that only we end documents.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        eos_token: str,
        bos_token: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        """config: fields of tokenizer_config.json that `save` writes again, such as the chat template."""
        eos_id = backend.token_to_id(eos_token)
        if eos_id is None:
            raise UserError(f"[data] eos_token = {eos_token!r}: the tokenizer has no such token")
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.eos_token, self.bos_token, self.config = backend, eos_token, bos_token, config or {}
        self.eos_id: int = eos_id
        self.bos_id: int | None = backend.token_to_id(bos_token) if bos_token else None
        self.vocabulary_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def from_path(cls, path: str | Path, eos_token: str | None = None) -> "Tokenizer":
        """A tokenizer.json file, or a directory that holds one. UserError when there is none or its end token is unknown."""
        import tokenizers

        path = Path(path).expanduser()
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            hint = "the directory has no tokenizer.json" if path.is_dir() else "no such file or directory"
            raise UserError(
                f'[data] tokenizer = {str(path)!r}: {hint}; give a tokenizer.json, a directory with one, or "train"'
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"[data] tokenizer: {file} is not a tokenizers file: {error}") from None
        config = _config_files(file.parent)
        if eos_token is None:
            eos_token = _content(config.get("eos_token"))
        if eos_token is None:
            known = [token for token in KNOWN_ENDS if backend.token_to_id(token) is not None]
            if len(known) != 1:
                raise UserError(f"[data] eos_token: {file} does not say which token ends a document; name it")
            eos_token = known[0]
        return cls(backend, eos_token, _content(config.get("bos_token")), config)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Tokenizer":
        """What `to_bytes` gave."""
        import tokenizers

        fields = json.loads(data)
        return cls(tokenizers.Tokenizer.from_str(fields["tokenizer"]), fields["eos_token"], fields["bos_token"])

    def to_bytes(self) -> bytes:
        """All that decides what it gives, to be hashed."""
        fields = {"tokenizer": self.backend.to_str(), "eos_token": self.eos_token, "bos_token": self.bos_token}
        return json.dumps(fields).encode()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what ids mean: the vocabulary with its ids, and the end-of-document token."""
        vocabulary = sorted(self.backend.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps([vocabulary, self.eos_id]).encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids and the number of UTF-8 bytes of `text` each token stands for, both int32; the bytes sum to the text's.

        A token of a byte-level vocabulary stands for its own bytes. For another tokenizer the bytes up to the end of the
        characters it covers count, so what normalisation drops is counted with the token behind it.
        """
        if self.token_bytes is not None:
            ids = np.array(self.encode([text])[0], dtype=np.int32)
            return ids, self.token_bytes[ids]
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        sizes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ends_of_characters = np.concatenate([[0], np.cumsum(1 + (sizes > 0x7F) + (sizes > 0x7FF) + (sizes > 0xFFFF))])
        ends = np.maximum.accumulate(np.array([end for _, end in encoding.offsets], dtype=np.int64))
        if len(ends):
            ends[-1] = len(sizes)
        return ids, np.diff(ends_of_characters[ends], prepend=0).astype(np.int32)

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text of each token, int32 [vocabulary size], 0 for special ones; None unless all are byte-level."""
        description = json.loads(self.backend.to_str())
        if (
            description["model"]["type"] != "BPE"
            or description.get("normalizer")
            or not _is_byte_level(description["pre_tokenizer"])
        ):
            return None
        if any(not added["special"] and (added["lstrip"] or added["rstrip"]) for added in description["added_tokens"]):
            return None  # such a token swallows spaces
        sizes = np.zeros(self.vocabulary_size, dtype=np.int32)
        for token, number in description["model"]["vocab"].items():
            sizes[number] = len(token)  # a byte-level token has one character for each byte
        for added in description["added_tokens"]:
            sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return sizes

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def save(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, readable by transformers' AutoTokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"))
        defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config = {**defaults, **self.config, "eos_token": self.eos_token}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _config_files(directory: Path) -> dict[str, Any]:
    """What the Hugging Face files beside a tokenizer.json say; a chat template in a file of its own included."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            try:
                config |= json.loads((directory / name).read_text())
            except (ValueError, TypeError) as error:
                raise UserError(f"[data] tokenizer: {directory / name} is not a JSON object: {error}") from None
    if (directory / "chat_template.jinja").is_file():
        config["chat_template"] = (directory / "chat_template.jinja").read_text()
    return config


def _content(token: Any) -> str | None:
    """A special token is written as a string, as an object that holds one, or not at all."""
    return token.get("content") if isinstance(token, dict) else token


def _is_byte_level(step: dict[str, Any] | None) -> bool:
    """True for a pre-tokenizer whose output has one character for each byte of its input."""
    if step is None:
        return False
    if step["type"] == "Sequence":
        steps = step["pretokenizers"]
        return any(_is_byte_level(inner) for inner in steps) and not any(
            inner.get("add_prefix_space") for inner in steps
        )
    return bool(step["type"] == "ByteLevel" and not step["add_prefix_space"])


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) whose vocabulary holds exactly `vocabulary_size` tokens.

    The same texts in the same order give the same tokenizer. UserError when they are too few for so many tokens.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() != vocabulary_size:
        raise UserError(
            f"[data] vocabulary_size = {vocabulary_size}: the documents give only {backend.get_vocab_size()} tokens; lower it"
        )
    return Tokenizer(backend, END_OF_DOCUMENT)


def cache_directory() -> Path:
    """Where trained tokenizers are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan_nemotron"


def cached_tokenizer(texts: list[str], vocabulary_size: int) -> Tokenizer:
    """`train_tokenizer`, kept in the cache by what it is made from. Ranks may call it together: one trains, the others wait."""
    import filelock

    digest = hashlib.sha256(f"{PIECES}\0{END_OF_DOCUMENT}\0{vocabulary_size}".encode())
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    directory = cache_directory() / "tokenizers" / digest.hexdigest()[:32]
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(directory.with_suffix(".lock")):
            if not (directory / "tokenizer.json").is_file():
                with tempfile.TemporaryDirectory(prefix=directory.name, dir=directory.parent) as temporary:
                    train_tokenizer(texts, vocabulary_size).save(Path(temporary, "made"))
                    Path(temporary, "made").rename(directory)
    except OSError as error:
        raise UserError(f"{directory.parent}: cannot keep the tokenizer there ({error}); set XDG_CACHE_HOME") from None
    return Tokenizer.from_path(directory)


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that [data] names: read from files, or trained on the training documents (or found in the cache)."""
    from titan_nemotron.data.order import training_texts

    if config.tokenizer != "train":
        return Tokenizer.from_path(config.tokenizer, config.eos_token)
    return cached_tokenizer(training_texts(config), config.vocabulary_size)
