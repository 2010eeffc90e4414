"""Bytes that a rank receives when rows are split, by method: counted on gloo ranks at a small size, and by formula.

python benchmarks/context_bytes.py [--ranks 4] [--length 1024] [--rows-length 262144] [--rows-ranks 8]

Counted: one row of one document, fp32, the mean of the ranks. By formula (parallel/context/cost.py): a long row in bf16.
"against" is the forward's bytes over those of the first method of the same layer.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from measure import Traffic, on_ranks
from torch import Tensor

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.attention import LocalAttention
from titan_nemotron.models.layers.mamba2 import LocalMix, MixWeights
from titan_nemotron.parallel.context import CORES, MIXES
from titan_nemotron.parallel.context.cost import AttentionSize, Cost, MambaSize, Rows, attention_costs, mamba_costs

LAYERS: dict[str, AttentionSize | MambaSize] = {
    "attention 80 heads on 16": AttentionSize(heads=80, kv_heads=16, key_size=192, value_size=128),
    "attention 32 heads on 2": AttentionSize(heads=32, kv_heads=2, key_size=128, value_size=128),
    "Mamba-2 64 heads in 8": MambaSize(heads=64, head_size=64, groups=8, state_size=128, taps=4),
}


def costs(size: AttentionSize | MambaSize, rows: Rows) -> dict[str, Cost]:
    return attention_costs(size, rows) if isinstance(size, AttentionSize) else mamba_costs(size, rows)


def call(size: AttentionSize | MambaSize, method: str, length: int) -> Callable[[], Tensor]:
    """A forward of this rank's part of a row."""
    part = DocumentLayout.single(1, length).shard(dist.get_rank(), dist.get_world_size())
    group = dist.distributed_c10d._get_default_group()
    if isinstance(size, AttentionSize):
        core = CORES[method](LocalAttention(scale=0.1), group)
        heads = ((size.heads, size.key_size), (size.kv_heads, size.key_size), (size.kv_heads, size.value_size))
        qkv = [torch.randn(1, part.length, *head, requires_grad=True) for head in heads]
        return lambda: core(*qkv, part)[0]
    mix = MIXES[method](
        LocalMix(size.heads, size.head_size, size.groups, size.state_size, 64, (0.0, float("inf"))), group
    )
    channels = size.heads * size.head_size + 2 * size.groups * size.state_size
    xBC, dt = (torch.randn(1, part.length, n, requires_grad=True) for n in (channels, size.heads))
    shapes = ((channels, size.taps), (channels,), *[(size.heads,)] * 3)
    conv, bias, A, D, dt_bias = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return lambda: mix(xBC, dt, MixWeights(conv, bias, -A.exp(), D, dt_bias), part)  # type: ignore[no-any-return]


def count(size: AttentionSize | MambaSize, length: int) -> dict[str, tuple[float, float]]:
    """Bytes that this rank receives in a forward and in the backward, by method."""
    found = {}
    for method in CORES if isinstance(size, AttentionSize) else MIXES:
        run = call(size, method, length)
        with Traffic() as traffic:
            out = run()
            forward = traffic.received
            out.sum().backward()
        found[method] = forward, traffic.received - forward
    return found


def mean(ranks: list[dict[str, tuple[float, float]]], method: str) -> tuple[float, float]:
    forward, backward = (sum(column) / len(ranks) for column in zip(*(rank[method] for rank in ranks)))
    return forward, backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--length", type=int, default=1_024)
    parser.add_argument("--rows-length", type=int, default=262_144)
    parser.add_argument("--rows-ranks", type=int, default=8)
    arguments = parser.parse_args()
    print(f"counted: {arguments.ranks} ranks, a row of {arguments.length:,}, fp32; MB that a rank receives")
    print(f"{'layer':25s} {'method':8s} {'forward':>9s} {'formula':>9s} {'backward':>9s} {'formula':>9s}")
    for name, size in LAYERS.items():
        counted = on_ranks(arguments.ranks, partial(count, size), arguments.length)
        for method, cost in costs(size, Rows(1, arguments.length, arguments.ranks, 4)).items():
            forward, backward = mean(counted, method)
            numbers = (forward, cost.received, backward, cost.received * cost.returned)
            print(f"{name:25s} {method:8s} " + " ".join(f"{number / 1e6:9.3f}" for number in numbers))
    long = Rows(1, arguments.rows_length, arguments.rows_ranks, 2)
    print(f"\nby formula: {long.degree} ranks, a row of {long.length:,}, bf16; MB that a rank receives")
    print(f"{'layer':25s} {'method':8s} {'forward':>11s} {'backward':>11s} {'against':>9s}")
    for name, size in LAYERS.items():
        by_method = costs(size, long)
        first = next(iter(by_method.values())).received
        for method, cost in by_method.items():
            forward, backward = cost.received / 1e6, cost.received * cost.returned / 1e6
            print(f"{name:25s} {method:8s} {forward:11,.1f} {backward:11,.1f} {cost.received / first:8.2f}x")


if __name__ == "__main__":
    main()
