"""Models from directories, of Hugging Face or of ours; every tensor has to fit."""

import contextlib
import pickle
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titan_nemotron.checkpoint.hub_files import HubFiles, is_hub_directory
from titan_nemotron.checkpoint.manager import complete_steps
from titan_nemotron.config import build
from titan_nemotron.errors import UserError
from titan_nemotron.models.config import ModelConfig
from titan_nemotron.models.family import Family, Slot, family_of_hub, load_family
from titan_nemotron.models.layers.basic import fp32_names
from titan_nemotron.models.layers.init import LocalPart, initialize, tensors_by_name, unsharded

LISTED = 10  # tensors that an error names before it only counts
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # what a model may be loaded as
PREFIX = "model."  # of the weights among a checkpoint's tensors


def load_model(
    path: str | Path, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """The model in a Hugging Face directory or in one of our checkpoints, in evaluation mode.

    Called as model(input_ids [B, L], document_ids [B, L] or None) -> logits [B, L, V]. Without a dtype every tensor keeps
    the one it is stored in; a given dtype leaves those in fp32 that training keeps there (router, norms, A_log, D,
    dt_bias, head), unless it is wider. Raises UserError for whatever does not fit.
    """
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and wanted not in FLOATS:
        raise UserError(
            f"dtype = {dtype}: use float32, bfloat16, float16, float64, or none at all for the stored types"
        )
    dtype = wanted
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device = {device}: cannot be used here ({reason}); use cpu or cuda") from None
    path = Path(path)
    if is_hub_directory(path):
        files = HubFiles(path)
        family = family_of_hub(files.config, str(path))
        return from_hub(
            files, family, family.hub.config_from_hub(files.config, where=str(path / "config.json")), dtype, device
        )
    path = checkpoint_directory(path)
    family, config = checkpoint_model(path)
    stored = {name: entry.properties.dtype for name, entry in stored_tensors(Reader(path)).items()}
    model = empty_model(family, config, device or "cpu", stored, dtype)
    load_checkpoint(model, path, seed=0)
    return model.eval()


def load_weights(
    model: nn.Module,
    family: Family,
    config: Any,
    path: str | Path,
    *,
    seed: int,
    init_missing: Sequence[str] = (),
    local_part: LocalPart = unsharded,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill a materialised model, sharded or not, from a Hugging Face directory or one of our checkpoints, all ranks together.

    local_part: for a sharded model, what this rank holds of a tensor (parallel.sharded.local_part).

    A missing, unexpected or misshapen tensor is a UserError that names it, unless one of the patterns init_missing
    matches its name in the source: then its initial value is used (an unexpected one is left out). A pattern that
    matches no such tensor is an error.
    """
    path = Path(path)
    if is_hub_directory(path):
        slots = family.hub.tensors(config)
        load_hub(model, HubFiles(path), slots, seed=seed, init_missing=init_missing, local_part=local_part)
    else:
        path = checkpoint_directory(path)
        load_checkpoint(model, path, seed=seed, init_missing=init_missing, local_part=local_part, group=group)


def check_weights(
    model: nn.Module, family: Family, config: Any, path: str | Path, *, init_missing: Sequence[str] = ()
) -> tuple[int, int]:
    """Raise the UserErrors that load_weights would, from names and shapes alone; the model may be on the meta device.

    Returns how many tensors load_weights would read, and how many it would initialise or leave out.
    """
    path = Path(path)
    if is_hub_directory(path):
        files = HubFiles(path)
        found = set(files.entries)
        waived = check_hub(files, family.hub.tensors(config), init_missing)
    else:
        path = checkpoint_directory(path)
        reader = Reader(path)
        found = set(stored_tensors(reader))
        waived = check_checkpoint(path, reader, saved_tensors(model), init_missing)
    return len(found - waived), len(waived)


def from_hub(
    files: HubFiles,
    family: Family,
    config: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """load_model with a configuration of the caller's, for example with more multi-token depths than blocks."""
    slots = family.hub.tensors(config)
    model = empty_model(family, config, device or "cpu", stored_dtypes(files, slots), dtype)
    load_hub(model, files, slots, seed=0)
    return model.eval()


def stored_dtypes(files: HubFiles, slots: Mapping[str, Slot]) -> dict[str, torch.dtype]:
    """Parameter name -> the dtype that holds what the files store for it."""
    dtypes: dict[str, torch.dtype] = {}
    for name, slot in slots.items():
        if name in files.entries:
            stored = files.entries[name].dtype
            dtypes[slot.parameter] = torch.promote_types(stored, dtypes.get(slot.parameter, stored))
    return dtypes


def empty_model(
    family: Family,
    config: Any,
    device: torch.device | str,
    stored: Mapping[str, torch.dtype],
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A model on the device, its tensors unset, each in its stored dtype or in `dtype` (see load_model)."""
    with torch.device("meta"):
        model = family.model(config)
    fp32 = fp32_names(model)
    for full, (module, name) in tensors_by_name(model).items():
        tensor = getattr(module, name)
        wanted = stored.get(full, tensor.dtype) if dtype is None else dtype
        if dtype is not None and full in fp32:
            wanted = torch.promote_types(dtype, torch.float32)
        empty = torch.empty_like(tensor, dtype=wanted, device=device)
        setattr(module, name, nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty)
    return model


@torch.no_grad()
def load_hub(
    model: nn.Module,
    files: HubFiles,
    slots: Mapping[str, Slot],
    *,
    seed: int,
    init_missing: Sequence[str] = (),
    local_part: LocalPart = unsharded,
) -> None:
    """load_weights from hub files; each rank reads only what it holds."""
    waived = check_hub(files, slots, init_missing)
    tensors = {name: getattr(module, own) for name, (module, own) in tensors_by_name(model).items()}
    in_files = {slot.parameter for name, slot in slots.items() if name not in waived}
    partly = {slots[name].parameter for name in waived if name in slots}
    initialize(model, seed, partly | (set(tensors) - in_files), local_part=local_part)
    local_parts = {slot.parameter: local_part(tensors[slot.parameter]) for slot in slots.values()}
    for name, slot in slots.items():
        if name in waived:
            continue
        local, offsets = local_parts[slot.parameter]
        if slot.expert is not None:
            index = slot.expert - offsets[0]
            if not 0 <= index < local.shape[0]:
                continue
            local, offsets = local[index], offsets[1:]
        if local.numel() == 0:
            continue
        whole = tuple(local.shape) == slot.shape
        part = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
        local.copy_(files.read(name, () if whole else part))


def check_hub(files: HubFiles, slots: Mapping[str, Slot], init_missing: Sequence[str] = ()) -> set[str]:
    """`check` of hub files."""
    found = {name: entry.shape for name, entry in files.entries.items()}
    return check(files.path, found, {name: slot.shape for name, slot in slots.items()}, init_missing)


def check(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    init_missing: Sequence[str] = (),
) -> set[str]:
    """The names that the patterns waive. Raises UserError for what does not fit and is not waived."""
    problems: dict[str, str] = {name: "is missing" for name in wanted if name not in found}
    for name, shape in found.items():
        if name not in wanted:
            problems[name] = "is unexpected"
        elif shape != wanted[name]:
            problems[name] = f"has shape {list(shape)}, the model needs {list(wanted[name])}"
    lines = [
        f"checkpoint.init_missing: {pattern!r} matches no missing tensor of {path}; remove it"
        for pattern in init_missing
        if not any(fnmatchcase(name, pattern) for name in problems)
    ]
    waived = {name for name in problems if any(fnmatchcase(name, pattern) for pattern in init_missing)}
    unfit = [f"{path}: {name} {problem}" for name, problem in problems.items() if name not in waived]
    lines += unfit[:LISTED]
    if len(unfit) > LISTED:
        lines.append(f"{path}: {len(unfit) - LISTED} more tensors do not fit")
    if lines:
        raise UserError("\n".join(lines))
    return waived


# Our own checkpoints.


def checkpoint_directory(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one of a run. Raises UserError when there is none."""
    if (path / ".metadata").is_file():
        return path
    for directory in (path, path / "checkpoints"):
        steps = complete_steps(directory)
        if steps:
            return directory / f"step-{steps[-1]}"
    raise UserError(
        f"{path}: is neither a Hugging Face directory (config.json and safetensors) nor one of our checkpoints"
    )


def checkpoint_model(path: Path) -> tuple[Family, Any]:
    """Family and configuration of the model in one of our checkpoints, by the config.toml beside its tensors."""
    file = path / "config.toml"
    try:
        job = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file}: cannot read it ({error.strerror}); a checkpoint needs its job's config.toml"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: is not TOML ({error})") from error
    table = build(ModelConfig, job.get("model", {}), "model")
    return load_family(table.family), table.resolved()


class Reader(dcp.FileSystemReader):
    """Of one checkpoint, whose metadata is read once for many loads. Raises UserError when it cannot be read."""

    metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata is None:
            try:
                self.metadata = super().read_metadata(*args, **kwargs)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                raise UserError(
                    f"{self.path}/.metadata: cannot read it ({error}); copy the checkpoint again"
                ) from error
        return self.metadata


def stored_tensors(reader: Reader) -> dict[str, TensorStorageMetadata]:
    """Parameter or buffer name -> its size and type in one of our checkpoints."""
    return {
        name.removeprefix(PREFIX): entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model that its checkpoints hold, by name."""
    saved = set(model.state_dict())
    named = tensors_by_name(model).items()
    return {name: getattr(module, own).detach() for name, (module, own) in named if name in saved}


def check_checkpoint(
    path: Path, reader: Reader, tensors: Mapping[str, Tensor], init_missing: Sequence[str] = ()
) -> set[str]:
    """`check` of one of our checkpoints against a model's saved tensors."""
    found = {name: tuple(entry.size) for name, entry in stored_tensors(reader).items()}
    return check(path, found, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, init_missing)


@torch.no_grad()
def load_checkpoint(
    model: nn.Module,
    path: Path,
    *,
    seed: int,
    init_missing: Sequence[str] = (),
    local_part: LocalPart = unsharded,
    group: dist.ProcessGroup | None = None,
) -> None:
    """load_weights from one of our checkpoints; names are those of our parameters."""
    tensors, reader = saved_tensors(model), Reader(path)
    waived = check_checkpoint(path, reader, tensors, init_missing)
    initialize(model, seed, waived | (set(tensors_by_name(model)) - set(tensors)), local_part=local_part)
    read_tensors(reader, {name: tensor for name, tensor in tensors.items() if name not in waived}, group)


def read_tensors(
    reader: Reader, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None, *, alone: bool = False
) -> None:
    """Fill tensors, sharded or not, with those of the same names; all ranks together, or this one alone."""
    state = {PREFIX + name: tensor for name, tensor in tensors.items()}
    with quiet():
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=alone)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that a checkpoint is read or written by a single process: it may be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def hub_tensors(
    parameters: Iterable[tuple[str, Tensor]], slots: Mapping[str, Slot], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Every hub tensor of a stream of parameters and buffers, for write_hub_directory.

    dtypes: hub name -> the dtype to write; the parameter's own where there is none. A sharded parameter is gathered once,
    whole (all ranks run through the stream together), and its experts are cut out of it.
    """
    by_parameter: dict[str, list[tuple[str, Slot]]] = {}
    for name, slot in slots.items():
        by_parameter.setdefault(slot.parameter, []).append((name, slot))
    for parameter, tensor in parameters:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, slot in by_parameter.get(parameter, ()):
            piece = whole if slot.expert is None else whole[slot.expert]
            yield name, piece.to(dtypes.get(name, piece.dtype))
