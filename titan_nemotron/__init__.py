"""titan_nemotron: one small trainer for hybrid Mamba-2 / attention / LatentMoE / multi-token-prediction models.

The package imports almost nothing here, so that `import titan_nemotron` is quick: `load_model` is found on first use.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_model"]

if TYPE_CHECKING:
    from titan_nemotron.checkpoint.load import load_model


def __getattr__(name: str) -> Any:
    if name == "load_model":
        from titan_nemotron.checkpoint.load import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
