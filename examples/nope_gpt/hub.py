"""Names in Hugging Face directories; here simply our own."""

from typing import Any

import torch

from titan_nemotron.models.family import Slot

MODEL_TYPE = "nope_gpt"


def tensors(config: Any) -> dict[str, Slot]:
    from examples.nope_gpt.model import NopeGPT

    with torch.device("meta"):
        state = NopeGPT(config).state_dict()
    return {name: Slot(name, None, tuple(tensor.shape)) for name, tensor in state.items()}


def config_from_hub(hub: dict[str, Any], mtp_depths: int | None = None) -> Any:
    from examples.nope_gpt.model import NopeGPTConfig

    return NopeGPTConfig(**{name: hub[name] for name in NopeGPTConfig.model_fields if name in hub})


def config_to_hub(config: Any, dtype: str) -> dict[str, Any]:
    return {"model_type": MODEL_TYPE, "torch_dtype": dtype, **config.model_dump()}
