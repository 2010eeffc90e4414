"""Models from directories: tensors copied one by one into the places that the family's hub names stand for."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_nemotron.checkpoint.hub_files import HubFiles
from titan_nemotron.errors import UserError
from titan_nemotron.models.family import Family, Slot, family_of_hub
from titan_nemotron.models.layers.basic import fp32_names
from titan_nemotron.models.layers.init import initialize, local_part, tensors_by_name

LISTED = 10  # tensors that an error names before it only counts


def load_model(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """The model in a Hugging Face directory, in evaluation mode.

    Called as model(input_ids [B, L], document_ids [B, L] or None) -> logits [B, L, V]. Without a dtype every tensor keeps
    the one it is stored in; a given dtype leaves those in fp32 that training keeps there (router, norms, A_log, D,
    dt_bias, head), unless it is wider. Raises UserError for whatever does not fit.
    """
    files = HubFiles(path)
    family = family_of_hub(files.config, str(files.path))
    config = family.hub.config_from_hub(files.config)
    model = empty_model(family, config, device or "cpu", stored_dtypes(files, family.hub.tensors(config)), dtype)
    load_hub(model, files, family.hub.tensors(config), seed=0)
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
    config: object,
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
        if isinstance(tensor, nn.Parameter):
            setattr(module, name, nn.Parameter(empty))
        else:
            setattr(module, name, empty)
    return model


@torch.no_grad()
def load_hub(
    model: nn.Module, files: HubFiles, slots: Mapping[str, Slot], *, seed: int, init_missing: Sequence[str] = ()
) -> None:
    """Fill a materialised model, sharded or not, from hub files; each rank reads only what it holds.

    A missing, unexpected or misshapen tensor is a UserError that names it, unless one of the patterns init_missing
    matches its hub name: then its initial value is used (an unexpected one is left out). A pattern that matches no such
    tensor is an error.
    """
    waived = check(files, slots, init_missing)
    initialize(model, seed, {slots[name].parameter for name in waived if name in slots})
    tensors = {name: getattr(module, own) for name, (module, own) in tensors_by_name(model).items()}
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


def check(files: HubFiles, slots: Mapping[str, Slot], init_missing: Sequence[str]) -> set[str]:
    """The hub names that the patterns waive. Raises UserError for what does not fit and is not waived."""
    problems: dict[str, str] = {name: "is missing" for name in slots if name not in files.entries}
    for name, entry in files.entries.items():
        if name not in slots:
            problems[name] = "is unexpected"
        elif entry.shape != slots[name].shape:
            problems[name] = f"has shape {list(entry.shape)}, the model needs {list(slots[name].shape)}"
    lines = []
    for pattern in init_missing:
        if not any(fnmatchcase(name, pattern) for name in problems):
            lines.append(f"checkpoint.init_missing: {pattern!r} matches no missing tensor of {files.path}; remove it")
    waived = {name for name in problems if any(fnmatchcase(name, pattern) for pattern in init_missing)}
    found = [f"{files.path}: {name} {problem}" for name, problem in problems.items() if name not in waived]
    lines += found[:LISTED]
    if len(found) > LISTED:
        lines.append(f"{files.path}: {len(found) - LISTED} more tensors do not fit")
    if lines:
        raise UserError("\n".join(lines))
    return waived


def hub_tensors(
    model: nn.Module, slots: Mapping[str, Slot], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Every hub tensor of a model, sharded or not, for write_hub_directory; all ranks must run through it together.

    dtypes: hub name -> the dtype to write; the parameter's own where there is none. A sharded parameter is gathered once,
    whole, and its experts are cut out of it.
    """
    owners = tensors_by_name(model)
    by_parameter: dict[str, list[tuple[str, Slot]]] = {}
    for name, slot in slots.items():
        by_parameter.setdefault(slot.parameter, []).append((name, slot))
    for parameter, members in by_parameter.items():
        module, own = owners[parameter]
        tensor = getattr(module, own).detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        for name, slot in members:
            piece = tensor if slot.expert is None else tensor[slot.expert]
            yield name, piece.to(dtypes.get(name, piece.dtype))
