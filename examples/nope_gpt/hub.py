"""Names in Hugging Face directories; here simply our own."""

from typing import Any

import torch

from titan_nemotron.config import build
from titan_nemotron.models.family import Slot

MODEL_TYPE = "nope_gpt"


def tensors(config: Any) -> dict[str, Slot]:
    from examples.nope_gpt.model import NopeGPT

    with torch.device("meta"):
        state = NopeGPT(config).state_dict()
    return {name: Slot(name, None, tuple(tensor.shape)) for name, tensor in state.items()}


def config_from_hub(hub: dict[str, Any], mtp_depths: int | None = None, where: str = "config.json") -> Any:
    from examples.nope_gpt.model import NopeGPTConfig

    return build(NopeGPTConfig, {name: hub[name] for name in NopeGPTConfig.model_fields if name in hub}, where)


def config_to_hub(config: Any, dtype: str | None = None, source: dict[str, Any] | None = None) -> dict[str, Any]:
    return {**(source or {}), "model_type": MODEL_TYPE, "torch_dtype": dtype or "float32", **config.model_dump()}
