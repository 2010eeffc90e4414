"""What it costs to split rows over ranks, by method: bytes, operations, waiting, time.

Time of a layer, forward and backward = bytes received / link + operations of the rank that is waited for / compute +
messages * latency. Nothing is assumed to overlap. A backward sends what its forward sent once more, and ring's twice: keys
and values again, and their gradients.

Shapes: P ranks, L positions of a row, l = L / P of a rank; sizes as in AttentionSize and MambaSize.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STATE_BYTES = 4  # states travel in fp32
DECAY_BYTES = 8  # and the logarithms of their decays in fp64
SAMPLED_ROWS = 8


class Rates(NamedTuple):
    """link: bytes a second that a rank receives; compute: operations a second of a rank; latency: seconds of a message."""

    link: float
    compute: float
    latency: float


# Data sheets: NVLink 900 GB/s (Hopper) and 1.8 TB/s (Blackwell) count both directions; dense bf16 of the H100 SXM, H200
# and GB200. A latency of 20 us is of the order of a small all-to-all of NCCL with its launch: measure it, and set it.
# gloo: two processes of one CPU, an order of magnitude.
DEVICES = {
    "h100": Rates(450e9, 989e12, 20e-6),
    "h200": Rates(450e9, 989e12, 20e-6),
    "gb200": Rates(900e9, 2500e12, 20e-6),
    "gloo": Rates(1e9, 0.05e12, 300e-6),
}


@dataclass(frozen=True)
class AttentionSize:
    """Query heads, key/value heads, and the sizes of a head's keys and values."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class MambaSize:
    """Heads of head_size channels, groups, state size, and taps of the convolution."""

    heads: int
    head_size: int
    groups: int
    state_size: int
    taps: int


@dataclass(frozen=True)
class Rows:
    """Rows that ranks share: their number in a microbatch, length, ranks, bytes of an activation, and the mean length of
    documents (0: a row is one document)."""

    number: int
    length: int
    degree: int
    itemsize: int
    document_length: int = 0


class Cost(NamedTuple):
    """Of a layer and rank.

    received  bytes in a forward, mean over ranks
    returned  bytes in the backward, as a multiple of those
    flops     operations, forward and backward, mean over ranks
    waiting   operations of the rank that is waited for, step by step, as a multiple of the mean
    messages  collective operations, forward and backward
    """

    received: float
    returned: float
    flops: float
    waiting: float
    messages: int

    def seconds(self, rates: Rates) -> float:
        """Forward and backward."""
        transfer = self.received * (1 + self.returned) / rates.link
        return transfer + self.flops * self.waiting / rates.compute + self.messages * rates.latency


def ring_bytes(size: AttentionSize, rows: Rows) -> float:
    """(P - 1) / 2 * l * (K key_size + K value_size) elements: rank r receives the keys and values of the r before it."""
    elements = size.kv_heads * (size.key_size + size.value_size)
    return (rows.degree - 1) / 2 * rows.number * rows.length / rows.degree * elements * rows.itemsize


def ulysses_bytes(size: AttentionSize, rows: Rows) -> float:
    """(P - 1) / P * l * (H + K) (key_size + value_size) elements: queries, keys, values, outputs.

    Fewer key/value heads than ranks are copied to as many.
    """
    heads = size.heads + max(size.kv_heads, rows.degree)
    return _exchanged(heads * (size.key_size + size.value_size), rows) * rows.itemsize


def state_bytes(size: MambaSize, rows: Rows) -> float:
    """(P - 1) * H head_size state_size states in fp32 with H decays in fp64, and taps - 1 inputs of the convolution from
    the rank before (none on the first): whatever L is."""
    P, channels = rows.degree, size.heads * size.head_size + 2 * size.groups * size.state_size
    states = (P - 1) * size.heads * (size.head_size * size.state_size * STATE_BYTES + DECAY_BYTES)
    halo = (P - 1) / P * (size.taps - 1) * channels * rows.itemsize
    return rows.number * (states + halo)


def ulysses_mix_bytes(size: MambaSize, rows: Rows) -> float:
    """(P - 1) / P * l * (2 H head_size + 2 G state_size + H) elements: x, B, C, dt and y; groups copied to as many as ranks."""
    groups = max(size.groups, rows.degree)
    return _exchanged(2 * size.heads * size.head_size + 2 * groups * size.state_size + size.heads, rows) * rows.itemsize


def _exchanged(elements: int, rows: Rows) -> float:
    """Elements that a rank receives when `elements` of each of its positions change places with those of others."""
    return (rows.degree - 1) / rows.degree * rows.number * rows.length / rows.degree * elements


def score_entries(lengths: Sequence[int], degree: int) -> list[list[int]]:
    """[P][P]: pairs of a query of part r and a key of part j that see each other in a row of documents of these lengths.

    The degree divides the sum of the lengths. Parts are consecutive; a query sees the keys of its document up to itself.
    """
    part, entries, start = sum(lengths) // degree, [[0] * degree for _ in range(degree)], 0
    for length in lengths:
        end = start + length
        for r in range(start // part, -(-end // part)):
            queries = min(end, (r + 1) * part) - max(start, r * part)
            entries[r][r] += queries * (queries + 1) // 2
            for j in range(start // part, r):
                entries[r][j] += queries * (min(end, (j + 1) * part) - max(start, j * part))
        start = end
    return entries


def packed_lengths(length: int, document_length: int, seed: int) -> list[int]:
    """Documents of a packed row, with exponentially distributed lengths of this mean, the last one cut; 0: one document."""
    if not document_length:
        return [length]
    generator = random.Random(seed)
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, 1 + int(generator.expovariate(1 / document_length))))
    return lengths


def rank_imbalance(entries: Sequence[Sequence[int]]) -> float:
    """Largest over mean number of score entries of a rank, over all steps of a ring."""
    totals = [sum(row) for row in entries]
    return max(totals) * len(totals) / sum(totals)


def ring_waiting(entries: Sequence[Sequence[int]]) -> float:
    """Score entries that a ring waits for, over the mean of the ranks: at step s rank r has the keys of part r - s, and all
    wait for the busiest."""
    degree = len(entries)
    waited = sum(max(entries[r][r - step] for r in range(step, degree)) for step in range(degree))
    return waited * degree / sum(map(sum, entries))


def sampled_entries(rows: Rows) -> Iterator[list[list[int]]]:
    """score_entries of random packed rows, the same ones every time; lengths are rounded up to a multiple of the ranks."""
    length = -(-rows.length // rows.degree) * rows.degree
    for seed in range(SAMPLED_ROWS if rows.document_length else 1):
        yield score_entries(packed_lengths(length, rows.document_length, seed), rows.degree)


def attention_costs(size: AttentionSize, rows: Rows) -> dict[str, Cost]:
    """By method. Operations: 2 (key_size + value_size) a score entry and head, and 2.5 times as many in the backward, which
    computes the scores again (Dao, "FlashAttention-2", 2023)."""
    sampled = list(sampled_entries(rows))
    mean = sum(sum(map(sum, entries)) for entries in sampled) / len(sampled)
    flops = 3.5 * 2 * (size.key_size + size.value_size) * size.heads * rows.number * mean / rows.degree
    waiting = sum(map(ring_waiting, sampled)) / len(sampled)
    steps = rows.degree - 1
    return {
        "ulysses": Cost(ulysses_bytes(size, rows), 1, flops, 1.0, 8),
        "ring": Cost(ring_bytes(size, rows), 2, flops, waiting, 2 * steps),
    }


def mamba_costs(size: MambaSize, rows: Rows) -> dict[str, Cost]:
    """By method. Operations: 7 inner size * state size a position in a forward (as train.flops), twice that in a backward;
    with states passed on 2 more, for what the state that arrived contributes."""
    once = 3 * size.heads * size.head_size * size.state_size * rows.number * rows.length / rows.degree
    return {
        "state": Cost(state_bytes(size, rows), 1, 9 * once, 1.0, 6),
        "ulysses": Cost(ulysses_mix_bytes(size, rows), 1, 7 * once, 1.0, 6),
    }
