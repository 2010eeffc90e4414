"""What the trainer needs to know of a model family, and how a family is found.

A family is a package that exports FAMILY: titan_nemotron.models.nemotron3, or anything importable by its dotted path.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from titan_nemotron.config import Table
from titan_nemotron.errors import UserError
from titan_nemotron.layout import Batch

BUILT_IN = ("nemotron3",)


class Losses(NamedTuple):
    """What a training forward returns; all sums, so that the caller divides by global counts.

    main        scalar, sum of -log p over the valid labels
    mtp         [D], the same for each multi-token depth
    auxiliary   scalar, sum over rows and routed layers of the sequence auxiliary loss, without its coefficient; without
                gradients it is not computed, and 0
    stats       statistics by call ("layers.3", "mtp.1.layers.1"); shared multi-token blocks are called once a depth
    logprobs    [B, L] of the main labels, without gradient
    """

    main: Tensor
    mtp: Tensor
    auxiliary: Tensor
    stats: dict[str, dict[str, Tensor]]
    logprobs: Tensor


class Model(Protocol):
    """A family's model is an nn.Module with these methods (see models/nemotron3/model.py for the shapes)."""

    def loss(self, batch: Batch, replay: dict[str, Tensor] | None = None) -> Losses:
        """Forward over a batch, its losses as sums; replay: expert indices of each routed call, instead of the router's."""
        ...

    def blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The units of recomputation, compilation and sharding, by parameter prefix."""
        ...

    def routers(self) -> Mapping[str, nn.Module]:
        """The router behind each routed call of Losses.stats."""
        ...


class Slot(NamedTuple):
    """Where a hub tensor lives in our model: a parameter or buffer, or one expert's matrix of it."""

    parameter: str
    expert: int | None
    shape: tuple[int, ...]


class Hub(Protocol):
    """What a family's hub module exports: its Hugging Face directories."""

    MODEL_TYPE: str
    """model_type in config.json."""

    def tensors(self, config: Any) -> dict[str, Slot]:
        """Every tensor of a directory by its name, in file order, and where it lives in the model."""
        ...

    def config_from_hub(self, hub: dict[str, Any], mtp_depths: int | None = None, where: str = ...) -> Any:
        """The family's configuration from config.json; `where` names the file in a UserError."""
        ...

    def config_to_hub(
        self, config: Any, dtype: str | None = None, source: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """A config.json. dtype: of most tensors; source: the config.json the model came from, whose other keys are kept."""
        ...


@dataclass(frozen=True)
class Family:
    """config: its pydantic table; model: nn.Module class built from a config; flavors: named sizes; hub: a module."""

    name: str
    config: type[Table]
    model: type[nn.Module]
    flavors: Mapping[str, Any]
    hub: Hub


def load_family(name: str) -> Family:
    """A built-in family by name, or any importable package that exports FAMILY, by its dotted path."""
    path = f"titan_nemotron.models.{name}" if name in BUILT_IN else name
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise UserError(f"model.family: cannot import {name!r} ({error}); built in: {', '.join(BUILT_IN)}") from error
    family = getattr(module, "FAMILY", None)
    if not isinstance(family, Family):
        raise UserError(f"model.family: {path} exports no FAMILY; it needs a titan_nemotron.models.family.Family")
    return family


def family_of_hub(config: Mapping[str, Any], where: str) -> Family:
    """The built-in family that reads a hub config.json; `where` names it in the UserError when there is none."""
    families = [load_family(name) for name in BUILT_IN]
    for family in families:
        if config.get("model_type") == family.hub.MODEL_TYPE:
            return family
    known = ", ".join(family.hub.MODEL_TYPE for family in families)
    raise UserError(f"{where}/config.json: model_type = {config.get('model_type')!r}: not known here; known: {known}")
