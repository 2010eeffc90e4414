"""Between our checkpoints and Hugging Face directories, one tensor at a time.

What a hub directory says beyond its weights is kept for the way back: hub.json holds its config.json and the dtype of
each tensor, and its small files (tokenizer, chat template, generation settings) lie beside it. A converted checkpoint
holds them itself; a training run that started from a hub directory holds them in its folder hub/.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import tomli_w
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from titan_nemotron.checkpoint.hub_files import (
    HubFiles,
    copy_side_files,
    is_hub_directory,
    read_json,
    write_hub_directory,
)
from titan_nemotron.checkpoint.load import (
    PREFIX,
    Reader,
    check_checkpoint,
    check_hub,
    checkpoint_directory,
    checkpoint_model,
    hub_tensors,
    quiet,
    read_tensors,
    saved_tensors,
    stored_dtypes,
    stored_tensors,
)
from titan_nemotron.config import Table
from titan_nemotron.errors import UserError
from titan_nemotron.models.family import Family, Slot, family_of_hub
from titan_nemotron.models.layers.basic import fp32_names

RECORD = "hub.json"
GENERATION = "generation_config.json"
BYTES_PER_FILE = 5 * 10**9
THREADS = 2  # that write a checkpoint, each with a tensor in memory

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Source(NamedTuple):
    """What is known of the directory a model came from: its config.json, the dtype of each of its tensors, and folders
    whose small files belong beside the weights."""

    config: dict[str, Any] | None
    dtypes: dict[str, torch.dtype]
    folders: list[Path]


def keep_source(path: Path, folder: Path) -> None:
    """Keep in a folder what is known of the source of a model in a Hugging Face directory or one of our checkpoints."""
    if is_hub_directory(path):
        files = HubFiles(path)
        names = {name: dtype_name(entry.dtype) for name, entry in files.entries.items()}
        most = Counter(names.values()).most_common(1)[0][0]
        others = {name: dtype for name, dtype in names.items() if dtype != most}
        folder.mkdir(parents=True, exist_ok=True)
        record = {"config": files.config, "dtype": most, "other_dtypes": others}
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        copy_side_files(path, folder)
        return
    for place in beside(checkpoint_directory(path)):
        if (place / RECORD).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(place / RECORD, folder / RECORD)
            copy_side_files(place, folder)


def beside(checkpoint: Path) -> list[Path]:
    """Folders that may hold what belongs beside the weights: the checkpoint, if converted, or two of the run's."""
    if (checkpoint / RECORD).is_file():
        return [checkpoint]
    run = checkpoint.absolute().parent.parent
    return [run / "hub", run / "tokenizer"]


def find_source(folders: Sequence[Path], slots: Mapping[str, Slot]) -> Source:
    """What keep_source left in the folders; the small files of a later one win."""
    folders = [folder for folder in folders if folder.is_dir()]
    for folder in folders:
        if (folder / RECORD).is_file():
            record = read_json(folder / RECORD)
            dtypes = {name: getattr(torch, record["other_dtypes"].get(name, record["dtype"])) for name in slots}
            return Source(record["config"], dtypes, folders)
    return Source(None, {}, folders)


def keep_token_ids(eos_id: int, bos_id: int | None, folder: Path) -> None:
    """For a model from scratch: what its hub directory is to say of the tokens that start and end a document."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {"bos_token_id": bos_id, "eos_token_id": eos_id, "pad_token_id": None}
    (folder / GENERATION).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def token_ids(folders: Sequence[Path]) -> dict[str, Any]:
    """What keep_token_ids wrote."""
    for folder in folders:
        if (folder / GENERATION).is_file():
            return {key: value for key, value in read_json(folder / GENERATION).items() if key.endswith("_token_id")}
    return {}


def dtype_name(dtype: torch.dtype) -> str:
    """The name as configurations write it: bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = BYTES_PER_FILE,
    progress: Progress = lambda done, total: None,
) -> str:
    """Write `destination`: one of our checkpoints where `source` is a Hugging Face directory, and the other way round.

    Tensors keep their values exactly: import then export gives each hub tensor in the dtype it had. dtype: write hub
    tensors in this one instead; those that stay fp32 while training stay fp32. Returns a sentence that says what was
    written. Raises UserError for a source that is neither or does not fit, and for a destination that exists.
    """
    source, destination = Path(source), Path(destination)
    if destination.exists():
        raise UserError(f"{destination}: exists already; give another destination or remove it first")
    if is_hub_directory(source):
        if dtype is not None:
            raise UserError(
                "dtype: applies to Hugging Face directories that are written; our checkpoints keep the source's"
            )
        hub_to_checkpoint(source, destination, progress)
        return f"{destination}: a checkpoint of ours, with the weights of {source}"
    path = checkpoint_directory(source)
    checkpoint_to_hub(path, destination, dtype, max_shard_bytes, progress)
    return f"{destination}: a Hugging Face directory, with the weights of {path}"


class _Streaming(dcp.DefaultSavePlanner):
    """Plans with tensors on the meta device and asks for each only when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.read(index.fqn)


def hub_to_checkpoint(source: Path, destination: Path, progress: Progress) -> None:
    """Write a Hugging Face directory as one of our checkpoints, tensor by tensor in its stored dtype. Raises UserError for a
    tensor that is missing, unexpected or misshapen.
    """
    files = HubFiles(source)
    family = family_of_hub(files.config, str(source))
    config = family.hub.config_from_hub(files.config, where=str(source / "config.json"))
    slots = family.hub.tensors(config)
    check_hub(files, slots)
    dtypes = stored_dtypes(files, slots)
    members: dict[str, list[str]] = {}
    for name, slot in slots.items():
        members.setdefault(slot.parameter, []).append(name)
    empty = {}
    for parameter, names in members.items():
        slot = slots[names[0]]
        shape = slot.shape if slot.expert is None else (len(names), *slot.shape)
        empty[parameter] = torch.empty(shape, dtype=dtypes[parameter], device="meta")
    total, done, lock = sum(tensor.nbytes for tensor in empty.values()), 0, Lock()

    def read(name: str) -> Tensor:
        nonlocal done
        parameter = name.removeprefix(PREFIX)
        names = members[parameter]
        if slots[names[0]].expert is None:
            tensor = files.read(names[0]).to(dtypes[parameter])
        else:
            tensor = torch.empty_like(empty[parameter], device="cpu")
            for hub_name in names:
                tensor[slots[hub_name].expert].copy_(files.read(hub_name))
        with lock:
            done += tensor.nbytes
            progress(done, total)
        return tensor

    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # A file for each tensor, because the writer holds what goes into a file until the file is done.
    writer = dcp.FileSystemWriter(partial, single_file_per_rank=False, thread_count=THREADS)
    state = {PREFIX + name: tensor for name, tensor in empty.items()}
    with quiet():
        dcp.save(state, storage_writer=writer, planner=_Streaming(read), no_dist=True)
    keep_source(source, partial)
    (partial / "config.toml").write_text(tomli_w.dumps({"model": model_table(family, config)}), encoding="utf-8")
    (partial / "state.json").write_text(json.dumps({"step": 0}) + "\n", encoding="utf-8")
    partial.rename(destination)


def model_table(family: Family, config: Table) -> dict[str, Any]:
    """The [model] table of a configuration: the flavor that is nearest, and what differs from it."""
    values = config.model_dump()
    differences = {
        name: {key: value for key, value in values.items() if value != getattr(flavor, key)}
        for name, flavor in family.flavors.items()
    }
    nearest = min(differences, key=lambda name: len(differences[name]))
    return {"family": family.name, "flavor": nearest, "config": differences[nearest]}


def checkpoint_to_hub(
    path: Path, destination: Path, dtype: torch.dtype | None, max_shard_bytes: int, progress: Progress
) -> None:
    """Write the weights of one of our checkpoints as a Hugging Face directory, in files of at most `max_shard_bytes` and in
    `dtype`, or as they are stored. Raises UserError where the checkpoint does not hold the model its configuration names.
    """
    family, config = checkpoint_model(path)
    slots = family.hub.tensors(config)
    reader = Reader(path)
    stored = stored_tensors(reader)
    with torch.device("meta"):
        model = family.model(config)
    check_checkpoint(path, reader, saved_tensors(model))
    sizes = {name: entry.size.numel() * entry.properties.dtype.itemsize for name, entry in stored.items()}

    def parameters() -> Iterator[tuple[str, Tensor]]:
        done = 0
        for name, entry in stored.items():
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            read_tensors(reader, {name: tensor}, alone=True)
            done += sizes[name]
            progress(done, sum(sizes.values()))
            yield name, tensor

    source = find_source(beside(path), slots)
    _write(family, config, model, parameters(), source, destination, dtype, max_shard_bytes)


def export(
    model: nn.Module,
    family: Family,
    config: Any,
    run: Path,
    destination: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a trained model, sharded or not, as a Hugging Face directory; all ranks call it, rank 0 writes.

    run: the folder of the run, whose hub/ and tokenizer/ say what goes in beside the weights. dtype as in `convert`.
    """
    tensors = ((name, tensor) for name, tensor in get_model_state_dict(model).items() if isinstance(tensor, Tensor))
    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            source = find_source([run / "hub", run / "tokenizer"], family.hub.tensors(config))
            _write(family, config, model, tensors, source, destination, dtype, BYTES_PER_FILE)
    finally:
        for _ in hub_tensors(tensors, {}, {}):  # all ranks gather together to the end, also when writing failed
            pass


def _write(
    family: Family,
    config: Any,
    model: nn.Module,
    parameters: Iterable[tuple[str, Tensor]],
    source: Source,
    destination: Path,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    slots, dtypes = family.hub.tensors(config), source.dtypes
    if dtype is not None:
        wide, fp32 = torch.promote_types(dtype, torch.float32), fp32_names(model)
        dtypes = {name: wide if slot.parameter in fp32 else dtype for name, slot in slots.items()}
    hub_config = family.hub.config_to_hub(config, None if dtype is None else dtype_name(dtype), source.config)
    if source.config is None:
        hub_config |= token_ids(source.folders)
    tensors = hub_tensors(parameters, slots, dtypes)
    write_hub_directory(destination, tensors, hub_config, side_files=source.folders, max_shard_bytes=max_shard_bytes)
