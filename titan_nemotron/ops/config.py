"""The `[kernels]` table."""

from typing import Literal

from titan_nemotron.config import Table


class KernelsConfig(Table):
    """How each op computes. "auto" takes the fastest path for the tensor's device; fp64 always takes the reference."""

    linear: Literal["auto", "reference", "transposed", "blocks"] = "auto"
    """Linear maps of two to eight rows in fp32 (CPU): `transposed` multiplies the other way round, `blocks` with a part of
    the weight at a time, faster on Intel; else torch's own."""
    ssd: Literal["auto", "reference", "chunked", "mamba_ssm"] = "auto"
    """Mamba-2 scan: `chunked` is ours (CPU, CUDA), `mamba_ssm` the package's Triton kernels (CUDA)."""
    conv: Literal["auto", "reference", "shifted", "causal_conv1d"] = "auto"
    """Causal convolution: `shifted` is ours (CPU, CUDA), `causal_conv1d` the package's kernels (CUDA)."""
    norm: Literal["auto", "reference", "fused"] = "auto"
    """RMS norm and gated RMS norm: `fused` is ours, with a hand-written backward (CPU, CUDA)."""
    attention: Literal["auto", "reference", "documents", "flex"] = "auto"
    """Attention: `documents` makes one causal call a document (CPU), `flex` is flex attention with a block mask (CUDA)."""
    attention_spans: Literal["auto", "reference", "flash"] = "auto"
    """Attention of a ring of ranks, a step: `flash` is torch's own (CPU; CUDA in 16 bits, else the reference)."""
    experts: Literal["auto", "reference", "grouped_mm", "triton"] = "auto"
    """Routed experts: `grouped_mm` is torch's grouped products (CPU, CUDA), `triton` has our kernel between them (CUDA)."""
    head: Literal["auto", "reference", "chunked", "liger"] = "auto"
    """Loss of the output layer: `chunked` is plain torch (CPU, CUDA), `liger` takes the softmax from Liger (CUDA)."""
