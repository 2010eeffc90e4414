"""What crosses the parts of a row equals the same operation on whole rows, in fp64 to 1e-12, forward and backward."""

import torch
from torch import Tensor, nn

from tests.distributed.harness import Context, case
from tests.ops.support import relative
from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.attention import LocalAttention
from titan_nemotron.models.layers.mamba2 import LocalMix, MixWeights
from titan_nemotron.parallel.config import ParallelConfig
from titan_nemotron.parallel.context.exchange import gathered
from titan_nemotron.parallel.context.ring import RingAttention
from titan_nemotron.parallel.context.state import StatePassingMix
from titan_nemotron.parallel.context.ulysses import UlyssesAttention
from titan_nemotron.parallel.context.ulysses_mix import UlyssesMix
from titan_nemotron.parallel.mesh import build_mesh

ROWS, PART = 3, 6


def group(context: Context) -> torch.distributed.ProcessGroup:
    mesh = build_mesh(ParallelConfig(context=context.world_size), torch.device("cpu"))
    assert mesh.context is not None
    return mesh.context.get_group()


def layouts(context: Context) -> list[DocumentLayout]:
    """One document a row, a border at every position of some row, short documents, padding anywhere, nothing but padding."""
    length = PART * context.world_size
    random = torch.Generator().manual_seed(5)
    ids = [torch.zeros(ROWS, length, dtype=torch.int64)]
    ids += [
        (torch.arange(length) >= torch.arange(first, first + ROWS)[:, None]).long() for first in range(1, length, 3)
    ]
    for often in (0.1, 0.5, 1.0):
        documents = (torch.rand(ROWS, length, generator=random) < often).cumsum(1)
        for padding in (0.0, 0.3):
            padded = torch.rand(ROWS, length, generator=random) < padding
            # a document may lie on both sides of padding: what follows padding is another
            ids.append(torch.where(padded, -1, documents + 100 * padded.cumsum(1)))
    ids.append(torch.full((ROWS, length), -1))
    return [DocumentLayout.from_document_ids(each) for each in ids]


def check(context: Context, local: nn.Module, split: nn.Module, inputs: list[Tensor], weights: list[Tensor]) -> None:
    """inputs are whole rows [B, L, ...]; split sees this rank's part of them, and the same weights."""
    for layout in layouts(context):
        whole = [tensor.clone().requires_grad_() for tensor in inputs]
        own = [weight.clone().requires_grad_() for weight in weights]
        out = local(*whole, *([MixWeights(*own)] if own else []), layout)
        out = out if isinstance(out, Tensor) else out[0]
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
        expected = torch.autograd.grad(out, [*whole, *own], upstream, materialize_grads=True)

        part = layout.shard(context.rank, context.world_size)
        here = slice(part.start, part.start + part.length)
        parts = [tensor[:, here].clone().requires_grad_() for tensor in inputs]
        own = [weight.clone().requires_grad_() for weight in weights]
        y = split(*parts, *([MixWeights(*own)] if own else []), part)
        y = y if isinstance(y, Tensor) else y[0]
        actual = torch.autograd.grad(y, [*parts, *own], upstream[:, here], materialize_grads=True)
        torch.testing.assert_close(y, out[:, here], atol=1e-12, rtol=1e-12)
        for index in range(len(inputs)):
            torch.testing.assert_close(actual[index], expected[index][:, here], atol=1e-12, rtol=1e-12)
        for index in range(len(inputs), len(actual)):
            total = gathered(actual[index], split.group).sum(0)  # type: ignore[arg-type]
            torch.testing.assert_close(total, expected[index], atol=1e-11, rtol=1e-11)


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@case(2, 4)
def states_are_passed_on(context: Context) -> None:
    """Mamba-2: halo of the convolution, states through any number of parts, also with large and small steps."""
    heads, size, groups, states, taps = 4, 3, 2, 5, 4
    channels, length = heads * size + 2 * groups * states, PART * context.world_size
    for limit in ((0.0, float("inf")), (0.1, 0.5)):
        local = LocalMix(heads, size, groups, states, 8, limit)
        inputs = random((ROWS, length, channels), (ROWS, length, heads))
        conv, bias, A, D, dt_bias = random((channels, taps), (channels,), (heads,), (heads,), (heads,))
        check(context, local, StatePassingMix(local, group(context)), inputs, [conv, bias, -A.exp(), D, dt_bias])


@case(2, 4)
def heads_of_mamba_are_exchanged_for_positions(context: Context) -> None:
    """Mamba-2 with more, as many and fewer groups than ranks; the ranks' gradients of the weights sum to the whole."""
    heads, size, states, taps = 8, 3, 5, 4
    length = PART * context.world_size
    for groups in (4, 2, 1):
        channels = heads * size + 2 * groups * states
        local = LocalMix(heads, size, groups, states, 8, (0.0, float("inf")))
        inputs = random((ROWS, length, channels), (ROWS, length, heads))
        conv, bias, A, D, dt_bias = random((channels, taps), (channels,), (heads,), (heads,), (heads,))
        check(context, local, UlyssesMix(local, group(context)), inputs, [conv, bias, -A.exp(), D, dt_bias])


@case(2, 4)
def attention_over_split_rows(context: Context) -> None:
    """Attention with more, as many and fewer key/value heads than ranks; values of another size than keys."""
    length = PART * context.world_size
    for heads, kv_heads in ((8, 8), (8, 2), (4, 1)):
        local = LocalAttention(scale=0.3)
        shapes = [(ROWS, length, n, size) for n, size in ((heads, 4), (kv_heads, 4), (kv_heads, 6))]
        for core in (UlyssesAttention, RingAttention):
            check(context, local, core(local, group(context)), random(*shapes), [])


@case(2, 4)
def a_ring_in_lower_precision(context: Context) -> None:
    """Against whole rows in fp64: PyTorch's fused calls in fp32 and bf16, whose contributions travel in that dtype."""
    length, local = PART * context.world_size, LocalAttention(scale=0.3)
    ring = RingAttention(local, group(context))
    whole = random(*((ROWS, length, n, size) for n, size in ((8, 4), (2, 4), (2, 6))))
    whole = [tensor.bfloat16().double().requires_grad_() for tensor in whole]
    for layout in layouts(context):
        out = local(*whole, layout)[0]
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        expected = [out, *torch.autograd.grad(out, whole, upstream.double())]
        part = layout.shard(context.rank, context.world_size)
        here = slice(part.start, part.start + part.length)
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            parts = [tensor[:, here].detach().to(dtype).requires_grad_() for tensor in whole]
            y = ring(*parts, part)[0]
            actual = [y, *torch.autograd.grad(y, parts, upstream[:, here].to(dtype))]
            for one, other in zip(actual, expected, strict=True):
                assert one.dtype == dtype
                assert relative(one, other[:, here]) <= tolerance, (dtype, layout.document_ids)
