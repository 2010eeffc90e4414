"""The Mamba-2 scan, its convolution and its gated norm, forward and backward in fp32, ours against transformers' in torch.

python benchmarks/scan.py [--length 1024] [--threads 2] [--repeats 20]

The GFLOP/s of the scan count what the recurrence itself needs, 12 H P N a token, whatever an implementation computes.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import apart, best_of, rise
from torch import Tensor

from titan_nemotron.ops.conv import causal_conv1d
from titan_nemotron.ops.norm import gated_rms_norm
from titan_nemotron.ops.ssd import ssd_scan

SCANS = [  # heads, channels of a head, state size, groups
    (12, 64, 64, 2),
    (24, 32, 64, 4),
    (24, 64, 128, 8),
]
EPS = 1e-5


def with_backward(function: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """A run of function(*inputs) and its gradients, which returns both."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    upstream = torch.randn(function(*leaves).shape, generator=torch.Generator().manual_seed(1))

    def run() -> tuple[Tensor, ...]:
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    return run


def scans(
    length: int, heads: int, channels: int, state: int, groups: int
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
    inputs = [
        draw(1, length, heads, channels), draw(1, length, heads), -torch.exp(draw(heads)),
        draw(1, length, groups, state), draw(1, length, groups, state), draw(heads), draw(heads) - 4,
    ]  # fmt: skip
    ids = torch.zeros(1, length, dtype=torch.int32)

    def theirs(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        y: Tensor = mamba2_chunk_scan(x, dt, A, B, C, chunk_size=128, D=D, dt_bias=dt_bias, dt_softplus=True)
        return y

    ours = with_backward(lambda *leaves: ssd_scan(*leaves, ids)[0], inputs)
    return {"titan_nemotron": ours, "transformers": with_backward(theirs, inputs)}


def convolutions(length: int, channels: int, taps: int) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    inputs = [torch.randn(1, length, channels), torch.randn(channels, taps), torch.randn(channels)]
    ids = torch.zeros(1, length, dtype=torch.int32)

    def theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=taps - 1, groups=channels)
        return F.silu(out[:, :, :length]).transpose(1, 2)

    ours = with_backward(lambda x, weight, bias: causal_conv1d(x, weight, bias, ids), inputs)
    return {"titan_nemotron": ours, "transformers": with_backward(theirs, inputs)}


def norms(length: int, channels: int, groups: int) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

    inputs = [torch.randn(1, length, channels), torch.randn(1, length, channels), torch.randn(channels)]
    module = Zamba2RMSNormGated(channels, channels // groups, EPS)
    theirs = lambda y, z, weight: torch.func.functional_call(module, {"weight": weight}, (y, z))  # noqa: E731
    ours = with_backward(lambda y, z, weight: gated_rms_norm(y, z, weight, channels // groups, EPS), inputs)
    return {"titan_nemotron": ours, "transformers": with_backward(theirs, inputs)}


def rise_of(make: Callable[..., dict[str, Callable[[], object]]], arguments: tuple[int, ...], name: str) -> float:
    return rise(make(*arguments)[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"fp32 forward and backward, 1 row of {options.length}, {options.threads} threads, best of {options.repeats}; "
        "ours / transformers"
    )
    print(f"{'':34s} {'wall, ms':>15s} {'CPU time, ms':>15s} {'ratios':>13s} {'GFLOP/s':>9s} {'peak, MiB':>12s}")
    cases = [(f"scan {h} x {p}, N {n}, {g} groups", scans, (h, p, n, g), 12 * h * p * n) for h, p, n, g in SCANS]
    cases += [("convolution 1,280 x 4", convolutions, (1280, 4), 0), ("gated norm 768, 2 groups", norms, (768, 2), 0)]
    for label, make, shape, flops in cases:
        arguments = (options.length, *shape)
        runs = make(*arguments)
        for ours, theirs in zip(*(run() for run in runs.values()), strict=True):
            assert (ours - theirs).norm() < 1e-4 * theirs.norm(), f"{label}: the results differ"
        a, b = best_of(options.repeats, runs).values()
        memory = [apart(rise_of, make, arguments, name) for name in runs]
        speeds = "/".join(f"{flops * options.length / t.wall / 1e9:.0f}" for t in (a, b)) if flops else ""
        print(
            f"{label:34s} {a.wall * 1e3:7.1f}/{b.wall * 1e3:7.1f} {a.cpu * 1e3:7.1f}/{b.cpu * 1e3:7.1f} "
            f"{b.wall / a.wall:6.2f} {b.cpu / a.cpu:6.2f} {speeds:>9s} {memory[0]:5.0f}/{memory[1]:6.0f}"
        )


if __name__ == "__main__":
    main()
