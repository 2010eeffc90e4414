"""What the cores of split rows receive is what the formulas of the cost model say, forward and backward."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import Traffic
from tests.distributed.cases_context import group
from tests.distributed.harness import Context, case
from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.attention import LocalAttention
from titan_nemotron.models.layers.mamba2 import LocalMix, MixWeights
from titan_nemotron.parallel.context import CORES, MIXES
from titan_nemotron.parallel.context.cost import (
    AttentionSize,
    Cost,
    MambaSize,
    Rows,
    attention_costs,
    mamba_costs,
)

GROUPED = AttentionSize(heads=80, kv_heads=16, key_size=24, value_size=16)  # Motif 3's, with an eighth of their sizes
FEW = AttentionSize(heads=8, kv_heads=1, key_size=16, value_size=16)
MAMBA = MambaSize(heads=16, head_size=8, groups=2, state_size=16, taps=4)
ONE_GROUP = MambaSize(heads=16, head_size=8, groups=1, state_size=16, taps=4)


def received(context: Context, run: Callable[[], Tensor]) -> tuple[float, float]:
    """Bytes in a forward and in the backward, mean over ranks."""
    counted = []
    with Traffic() as traffic:
        out = run()
        counted.append(traffic.received)
        out.sum().backward()
        counted.append(traffic.received - counted[0])
    total = torch.tensor(counted, dtype=torch.float64)
    dist.all_reduce(total)
    forward, backward = (total / context.world_size).tolist()
    return forward, backward


def attention(context: Context, size: AttentionSize, method: str, layout: DocumentLayout) -> tuple[float, float]:
    core: nn.Module = CORES[method](LocalAttention(scale=0.1), group(context))
    part = layout.shard(context.rank, context.world_size)
    heads = ((size.heads, size.key_size), (size.kv_heads, size.key_size), (size.kv_heads, size.value_size))
    qkv = [torch.randn(len(layout.document_ids), part.length, *head, requires_grad=True) for head in heads]
    return received(context, lambda: core(*qkv, part)[0])


def mamba(context: Context, size: MambaSize, method: str, length: int) -> tuple[float, float]:
    limit = (0.0, float("inf"))
    local = LocalMix(size.heads, size.head_size, size.groups, size.state_size, 64, limit)
    mix: nn.Module = MIXES[method](local, group(context))
    part = DocumentLayout.single(2, length).shard(context.rank, context.world_size)
    channels = size.heads * size.head_size + 2 * size.groups * size.state_size
    xBC, dt = (torch.randn(2, part.length, n, requires_grad=True) for n in (channels, size.heads))
    conv, bias, A, D, dt_bias = (
        torch.randn(shape, requires_grad=True)
        for shape in ((channels, size.taps), (channels,), (size.heads,), (size.heads,), (size.heads,))
    )
    return received(context, lambda: mix(xBC, dt, MixWeights(conv, bias, -A.exp(), D, dt_bias), part))


def assert_is(counted: tuple[float, float], cost: Cost) -> None:
    assert counted == (cost.received, cost.received * cost.returned), (counted, cost)


@case(2, 4)
def bytes_of_attention_are_those_of_the_formulas(context: Context) -> None:
    """More and fewer key/value heads than ranks; a ring receives two thirds of what Ulysses does with 80 heads on 16."""
    for length in (64, 128):
        rows = Rows(number=2, length=length, degree=context.world_size, itemsize=4)
        for size in (GROUPED, FEW):
            counted = {m: attention(context, size, m, DocumentLayout.single(2, length)) for m in CORES}
            for method, cost in attention_costs(size, rows).items():
                assert_is(counted[method], cost)
            if size is GROUPED:  # (P - 1) / 2 * K against (P - 1) / P * (H + K)
                assert counted["ring"][0] / counted["ulysses"][0] == context.world_size / 2 * 16 / 96


@case(2, 4)
def bytes_of_passed_states_do_not_depend_on_the_length(context: Context) -> None:
    """At L = 1,024 and 4,096; those of exchanged heads do."""
    found = {}
    for length in (1_024, 4_096):
        rows = Rows(number=2, length=length, degree=context.world_size, itemsize=4)
        for size in (MAMBA, ONE_GROUP):
            for method, cost in mamba_costs(size, rows).items():
                found[length, size, method] = mamba(context, size, method, length)
                assert_is(found[length, size, method], cost)
    for size in (MAMBA, ONE_GROUP):
        assert found[1_024, size, "state"] == found[4_096, size, "state"]
        assert 4 * found[1_024, size, "ulysses"][0] == found[4_096, size, "ulysses"][0]


@case(4)
def a_ring_sends_as_far_as_documents_reach(context: Context) -> None:
    """Nothing where documents end with the parts; a block where one document crosses one border."""
    length = 16 * context.world_size
    ids = torch.arange(length) // 16
    assert attention(context, FEW, "ring", DocumentLayout.from_document_ids(ids[None])) == (0, 0)
    crossing = DocumentLayout.from_document_ids(torch.where(ids == 2, 1, ids)[None])  # parts 1 and 2 are one document
    block = 16 * FEW.kv_heads * (FEW.key_size + FEW.value_size) * 4
    assert attention(context, FEW, "ring", crossing) == (block / 4, 2 * block / 4)
    padding = DocumentLayout.from_document_ids(torch.full((1, length), -1))
    assert attention(context, FEW, "ring", padding) == (0, 0)
