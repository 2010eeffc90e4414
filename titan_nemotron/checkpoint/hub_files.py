"""Hugging Face directories: safetensors files with an index, read and written tensor by tensor."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_nemotron.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# What stands beside the weights and belongs to the model: tokenizer, chat template, generation settings, model code.
SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".py")
OWN_FILES = (CONFIG, "hub.json", "state.json")


class Entry(NamedTuple):
    """Where a tensor lies, and what it is."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def is_hub_directory(path: Path) -> bool:
    """Whether it has a configuration and weights, in one file or with an index."""
    return (path / CONFIG).is_file() and ((path / WEIGHTS).is_file() or (path / INDEX).is_file())


class HubFiles:
    """The weights of a Hugging Face directory, for reading; only headers are read until a tensor is asked for.

    entries: hub name -> file, shape and dtype. Raises UserError for a missing, cut or foreign file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_json(self.path / CONFIG)
        self.entries: dict[str, Entry] = {}
        self._open: dict[str, Any] = {}
        listed: dict[str, str] = {}
        if not (self.path / WEIGHTS).is_file():
            if not (self.path / INDEX).is_file():
                raise UserError(f"{self.path}: holds neither {WEIGHTS} nor {INDEX}")
            listed = read_json(self.path / INDEX).get("weight_map", {})
        for file in sorted(set(listed.values())) if listed else [WEIGHTS]:
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118
                if listed.get(name, file) != file:
                    continue
                piece = handle.get_slice(name)
                dtype = DTYPES.get(piece.get_dtype())
                if dtype is None:
                    raise UserError(f"{self.path / file}: {name} has the unknown type {piece.get_dtype()}")
                self.entries[name] = Entry(file, tuple(piece.get_shape()), dtype)
        for name, file in listed.items():
            if name not in self.entries:
                raise UserError(f"{self.path / INDEX}: says that {file} holds {name}, but it does not")

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self.path / file}: cannot read it ({error}); download it again") from error
        return self._open[file]

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or the part of it that the slices cut out: only that is read."""
        handle = self._handle(self.entries[name].file)
        tensor: Tensor = handle.get_slice(name)[part] if part else handle.get_tensor(name)
        return tensor


def write_hub_directory(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: dict[str, Any],
    *,
    side_files: Sequence[Path] = (),
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a Hugging Face directory from a stream of (hub name, tensor): at most one shard is held in memory.

    A new shard starts when the next tensor would exceed max_shard_bytes; one shard alone is named model.safetensors, more
    get an index. side_files: folders whose tokenizer and other small files are copied along. The directory appears under
    its name only when it is complete. Raises UserError when it exists already.
    """
    path = Path(path)
    if path.exists():
        raise UserError(f"{path}: exists already; give another destination or remove it first")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for folder in side_files:
        copy_side_files(folder, partial)
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    places: list[list[str]] = []
    total_bytes = 0
    for number, shard in enumerate(_shards(tensors, max_shard_bytes)):
        save_file(shard, partial / f"{number}.part", metadata={"format": "pt"})
        places.append(list(shard))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    files = [f"model-{number + 1:05d}-of-{len(places):05d}.safetensors" for number in range(len(places))]
    if len(files) == 1:
        files = [WEIGHTS]
    for number, file in enumerate(files):
        # safetensors writes files that only their owner may read
        (partial / f"{number}.part").chmod((partial / CONFIG).stat().st_mode)
        (partial / f"{number}.part").rename(partial / file)
    if len(files) > 1:
        weight_map = {name: file for names, file in zip(places, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    partial.rename(path)


def _shards(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def copy_side_files(source: Path, destination: Path) -> None:
    """Copy what stands beside the weights, except what describes these weights alone."""
    for file in sorted(source.iterdir()):
        if file.suffix in SIDE_FILES and file.name not in OWN_FILES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, destination / file.name)
