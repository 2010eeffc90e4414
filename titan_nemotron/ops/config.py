"""The `[kernels]` table."""

from typing import Literal

from titan_nemotron.config import Table


class KernelsConfig(Table):
    """How each op computes. "auto" takes the fastest path for the tensor's device; fp64 always takes the reference."""

    ssd: Literal["auto", "reference", "chunked", "mamba_ssm"] = "auto"
    """Mamba-2 scan: `chunked` is ours (CPU, CUDA), `mamba_ssm` the package's Triton kernels (CUDA)."""
    conv: Literal["auto", "reference", "shifted", "causal_conv1d"] = "auto"
    """Causal convolution: `shifted` is ours (CPU, CUDA), `causal_conv1d` the package's kernels (CUDA)."""
    norm: Literal["auto", "reference", "fused"] = "auto"
    """RMS norm and gated RMS norm: `fused` is ours, with a hand-written backward (CPU, CUDA)."""
