"""Which path each op takes: chosen by device, forced by `[kernels]`, described once at start.

An op asks `chosen("ssd", x)` and branches on the name. To add a path: a `Path` here, its name in ops/config.py.
"""

import pathlib
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from titan_nemotron.errors import UserError
from titan_nemotron.ops.config import KernelsConfig


@dataclass(frozen=True)
class Path:
    """One way to compute an op: on which devices, and with which package (None: torch alone)."""

    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    package: str | None = None


REFERENCE = Path("reference")


def _intel() -> bool:
    """Whether the processor is Intel's, for which the matrix library has ways of its own."""
    information = pathlib.Path("/proc/cpuinfo")
    return information.is_file() and "GenuineIntel" in information.read_text()


_FEW_ROWS = Path("blocks", ("cpu",)), Path("transposed", ("cpu",))
# causal_conv1d_cuda is the extension of causal-conv1d, which an install without CUDA lacks.
# Fastest first; the reference is last, takes everything, and is what fp64 always takes.
PATHS: dict[str, tuple[Path, ...]] = {
    "linear": (*(_FEW_ROWS if _intel() else reversed(_FEW_ROWS)), REFERENCE),
    "ssd": (Path("mamba_ssm", ("cuda",), "mamba_ssm"), Path("chunked"), REFERENCE),
    "conv": (Path("causal_conv1d", ("cuda",), "causal_conv1d_cuda"), Path("shifted"), REFERENCE),
    "norm": (Path("fused"), REFERENCE),
    "attention": (Path("documents", ("cpu",)), Path("flex", ("cuda",)), REFERENCE),
    "attention_spans": (Path("flash"), REFERENCE),
    "experts": (Path("triton", ("cuda",), "triton"), Path("grouped_mm"), REFERENCE),
    "head": (Path("liger", ("cuda",), "liger_kernel"), Path("chunked"), REFERENCE),
}
# Looked up once, at import: find_spec inside a compiled region would break its graph.
_INSTALLED = {
    path.package: find_spec(path.package) is not None for paths in PATHS.values() for path in paths if path.package
}
_forced: dict[str, str] = {}


def _installed(path: Path) -> bool:
    return path.package is None or _INSTALLED[path.package]


def chosen(op: str, tensor: Tensor) -> str:
    """The name of the path that `op` takes for this tensor: the forced one, else the fastest for its device."""
    if tensor.dtype == torch.float64:
        return "reference"
    return _select(op, tensor.device.type)


def _select(op: str, device: str) -> str:
    forced = _forced.get(op)
    for path in PATHS[op]:
        if forced == path.name and device not in path.devices:
            raise UserError(
                f'[kernels] {op} = "{forced}" does not run on {device}: use {" or ".join(path.devices)}, or "auto"'
            )
        if forced == path.name or (forced is None and device in path.devices and _installed(path)):
            return path.name
    return "reference"  # devices we have no path for (meta)


def configure(config: KernelsConfig) -> None:
    """Force the paths that `config` names, for this process. UserError when a path's package is not installed."""
    forced = {op: name for op, name in config.model_dump().items() if name != "auto"}
    mistakes = []
    for op, name in forced.items():
        path = next(path for path in PATHS[op] if path.name == name)
        if not _installed(path):
            mistakes.append(f'[kernels] {op} = "{name}" needs the package {path.package}: install it, or use "auto"')
    if mistakes:
        raise UserError("\n".join(mistakes))
    _forced.clear()
    _forced.update(forced)


def describe(device: str) -> list[str]:
    """One line for each op: the path it takes on `device`, and whether it was forced.

    Raises UserError when a forced path does not run there.
    """
    return [f"{op}: {_select(op, device)}{' (forced)' if op in _forced else ''}" for op in PATHS]
