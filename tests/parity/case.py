"""One folder of fixtures: its files, and comparisons under its own tolerances."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from titan_nemotron.checkpoint.hub_files import HubFiles
from titan_nemotron.checkpoint.load import from_hub
from titan_nemotron.models.family import Family

# Noise under which a gradient counts as zero, and how far a wrong answer has to be away in tolerances.
ZERO = 1e-7
FAR = 10
# Tensors that explain a case or are of interest only; nothing is expected to equal them.
INFORMATION = ("logits_bf16",)


class Case:
    """meta.json's `tolerance` holds logits_atol (absolute), hidden_rtol and grad_rel (relative, by norm)."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self._read: set[str] = set()

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "io.safetensors")

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        return load_file(self.folder / "grads.safetensors")

    @cached_property
    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return config

    def __getitem__(self, name: str) -> Tensor:
        self._read.add(name)
        return self.tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def model(self, family: Family, dtype: torch.dtype | None = None, **changes: Any) -> torch.nn.Module:
        """The case's model through our own loader; changes: keys of the configuration."""
        config = family.hub.config_from_hub(self.config, mtp_depths=self.meta.get("depths"))
        return from_hub(HubFiles(self.folder), family, config.model_copy(update=changes), dtype)

    @property
    def atol(self) -> float:
        return float(self.meta["tolerance"]["logits_atol"])

    def close(self, found: Tensor, name: str, where: Tensor | None = None) -> None:
        """found equals the tensor `name` of the file to the absolute tolerance of logits (where `where` is true)."""
        error = (found.detach() - self[name]).abs()
        worst = float((error if where is None else error[where]).max())
        assert worst <= self.atol, f"{name}: off by {worst:.2e}, allowed {self.atol:.0e}"

    def near(self, found: Tensor, name: str) -> None:
        """The same relative to the largest entry, for hidden states."""
        error = float((found.detach() - self[name]).abs().max() / self[name].abs().max())
        allowed = self.meta["tolerance"]["hidden_rtol"]
        assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.0e}"

    def far(self, found: Tensor, name: str) -> None:
        """A wrong answer kept in the file: a test that cannot tell it from ours is worth nothing."""
        difference = float((found.detach() - self[name]).abs().max())
        assert difference > FAR * self.atol, f"{name}: a wrong answer, yet only {difference:.2e} away"

    def gradients_close(self, found: dict[str, Tensor]) -> None:
        """Each gradient by hub name, relative to its norm, and the norms that meta.json lists."""
        allowed = self.meta["tolerance"]["grad_rel"]
        assert set(self.gradients) <= set(found), sorted(set(self.gradients) - set(found))
        for name, expected in self.gradients.items():
            error, norm = float((found[name] - expected).norm()), float(expected.norm())
            assert error <= max(allowed * norm, ZERO), f"{name}: gradient off by {error / max(norm, ZERO):.2e}"
        for name, norm in self.meta["grad_norms"].items():
            assert abs(float(found[name].norm()) - norm) <= max(allowed * norm, ZERO), name
        total = torch.stack([found[name].norm() for name in self.meta["grad_norms"]]).norm()
        self.equal_number(float(total), self.meta["grad_norm_total"], allowed)

    def equal_number(self, found: float, expected: float, relative: float = 1e-5) -> None:
        assert abs(found - expected) <= relative * abs(expected), f"{found} for {expected}"

    def assert_all_read(self) -> None:
        """Every tensor of the file was compared, or used, but for INFORMATION."""
        unread = set(self.__dict__.get("tensors", {})) - self._read - set(INFORMATION)
        assert not unread, f"{self.folder.name}: nothing looked at {', '.join(sorted(unread))}"
