"""Models, meshes, keys and rows drawn at random: whatever is possible gives the numbers of one process.

More draws than the tests take: RANDOM_DRAWS=100:200 ./run_tests.sh tests/distributed -k any_mesh
"""

import dataclasses
import os
import random

import torch
from torch import Tensor

from tests.distributed.harness import Context, case
from tests.distributed.reference import SETTINGS, shared, whole_gradients
from titan_nemotron.errors import UserError
from titan_nemotron.layout import Batch
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3.config import Nemotron3Config
from titan_nemotron.models.nemotron3.model import Nemotron3
from titan_nemotron.parallel.apply import apply
from titan_nemotron.parallel.config import (
    CompileConfig,
    ContextMethodConfig,
    FSDPConfig,
    ParallelConfig,
    RecomputeConfig,
)
from titan_nemotron.parallel.mesh import build_mesh, data_coordinates, own_part
from titan_nemotron.train.step import forward_backward, global_totals, reduce_sums

DRAWS = range(*map(int, os.environ.get("RANDOM_DRAWS", "0:12").split(":")))


@dataclasses.dataclass(frozen=True)
class Draw:
    config: Nemotron3Config
    parallel: ParallelConfig
    recompute: str
    size: int  # rows of a microbatch
    num_rows: int
    length: int
    documents: float  # how often one begins
    padding: float  # of rows

    def rows(self, seed: int, start: int, stop: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        total = self.length + 1 + self.config.mtp_depths
        tokens = torch.randint(0, self.config.vocab_size, (self.num_rows, total), generator=generator)
        documents = (torch.rand(self.num_rows, total, generator=generator) < self.documents).cumsum(1)
        for row in range(self.num_rows):
            if torch.rand((), generator=generator) < self.padding:
                documents[row, int(torch.randint(0, total, (), generator=generator)) :] = -1
        return Batch.from_rows(
            tokens[start:stop], documents[start:stop], length=self.length, mtp_depths=self.config.mtp_depths
        )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def draw(seed: int, world_size: int) -> Draw:
    """Some draws are impossible: heads or experts that the ranks do not divide."""
    choose = random.Random(seed)
    context = choose.choice(divisors(world_size))
    replicate = choose.choice(divisors(world_size // context))
    expert = choose.choice(divisors(world_size // replicate))
    heads, mamba_heads, num_experts = choose.choice((3, 4, 8)), choose.choice((3, 4, 8)), choose.choice((4, 5, 8))
    mtp_blocks = choose.randint(0, 2)
    pattern = "".join(choose.choice("MME*-") for _ in range(choose.randint(1, 4))) + "E"
    config = Nemotron3Config(
        pattern=pattern,
        vocab_size=choose.choice((17, 101)),
        hidden_size=choose.choice((8, 24)),
        num_attention_heads=heads,
        num_key_value_heads=choose.choice(divisors(heads)),
        head_dim=choose.choice((4, 16)),
        mamba_num_heads=mamba_heads,
        mamba_head_dim=choose.choice((4, 8)),
        n_groups=choose.choice(divisors(mamba_heads)),
        ssm_state_size=choose.choice((4, 16)),
        chunk_size=8,
        n_routed_experts=num_experts,
        num_experts_per_tok=choose.randint(1, 2),
        moe_intermediate_size=choose.choice((8, 24)),
        moe_shared_expert_intermediate_size=8,
        moe_latent_size=choose.choice((0, 16)),
        intermediate_size=24,
        mtp_blocks=mtp_blocks,
        mtp_depths=choose.randint(mtp_blocks, 3) if mtp_blocks else 0,
        initializer_range=0.1,
    )
    reshard = choose.choice((True, False))
    fsdp = FSDPConfig(
        reshard_after_forward=reshard,
        moe_layers_kept_gathered=choose.randint(0, 1) if reshard else 0,
        keep_experts_between_microbatches=choose.choice((True, False)),
        prefetch=choose.randint(1, 3),
        gradient_sync=choose.choice(("last", "every")),
        reduce_scatters_in_flight=choose.randint(1, 3),
    )
    method = ContextMethodConfig(
        mamba=choose.choice(("auto", "state", "ulysses")), attention=choose.choice(("auto", "ring", "ulysses"))
    )
    size = choose.randint(1, 2)
    return Draw(
        config=config,
        parallel=ParallelConfig(replicate=replicate, context=context, expert=expert, fsdp=fsdp, context_method=method),
        recompute=choose.choice(("none", "selective", "full")),
        size=size,
        num_rows=size * choose.randint(1, 3) * (world_size // context),
        length=choose.choice((1, 2, 3, 5, 8, 15, 16, 33)),
        documents=choose.choice((0.0, 0.05, 0.3, 0.9)),
        padding=choose.choice((0.0, 0.5)),
    )


def plain(drawn: Draw, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor], dict[str, Tensor]]:
    """Sums of losses, gradients and counts of one process."""
    model, batch = Nemotron3(drawn.config), drawn.rows(seed, 0, drawn.num_rows)
    initialize(model, seed)
    losses = model.loss(batch)
    total = losses.main / max(1, batch.num_targets)
    total = total + SETTINGS.auxiliary_loss_coefficient * losses.auxiliary / drawn.num_rows
    for depth, count in enumerate(batch.num_mtp_targets):
        total = total + SETTINGS.mtp_loss_scale / drawn.config.mtp_depths * losses.mtp[depth] / max(1, count)
    total.backward()
    counts = {call: stats["counts_E"].double() for call, stats in losses.stats.items() if "counts_E" in stats}
    sums = tuple(loss.detach() for loss in (losses.main, losses.mtp, losses.auxiliary))
    return sums, whole_gradients(model), counts


@case(2, 4)
def any_mesh_any_model_any_rows(context: Context) -> None:
    """Sums of losses 2e-6, global gradient 3e-6, each tensor 5e-5 (or 2.5e-7 of all); twice: nothing is left behind."""
    possible = 0
    for seed in DRAWS:
        drawn = draw(seed, context.world_size)
        mesh = build_mesh(drawn.parallel, torch.device("cpu"))
        with torch.device("meta"):
            model = Nemotron3(drawn.config)
        try:
            apply(
                model,
                mesh,
                parallel=drawn.parallel,
                recompute=RecomputeConfig(mode=drawn.recompute),  # type: ignore[arg-type]
                compile=CompileConfig(),
                dtype=torch.float32,
                microbatch=(drawn.size, drawn.length),
                seed=seed,
            )
        except UserError:
            continue
        possible += 1
        expected = shared(context.rank, None if context.rank else plain(drawn, seed))
        expected_sums, gradients, counts = expected  # type: ignore[misc]
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        rank, degree = data_coordinates(mesh)
        share = drawn.num_rows // degree
        starts = range(rank * share, (rank + 1) * share, drawn.size)
        shortest = drawn.config.conv_kernel - 1
        batches = [own_part(drawn.rows(seed, start, start + drawn.size), mesh, shortest=shortest) for start in starts]
        every = drawn.parallel.fsdp.gradient_sync == "every"
        settings = dataclasses.replace(SETTINGS, sync_every_microbatch=every)
        for _ in range(2):
            totals = global_totals(batches)
            sums = reduce_sums(forward_backward(model, batches, totals, settings))
            actual = whole_gradients(model)
            model.zero_grad()
            auxiliary = sums.auxiliary * drawn.num_rows / totals.rows
            for found, loss in zip((sums.main, sums.mtp_D, auxiliary), expected_sums, strict=True):
                torch.testing.assert_close(found.float(), loss, atol=1e-5, rtol=2e-6, msg=f"draw {seed}: {drawn}")
            for call, count in counts.items():
                assert torch.equal(sums.counts[call], count), f"draw {seed}: {call}, {drawn}"
            assert set(actual) == set(gradients), f"draw {seed}: {set(actual) ^ set(gradients)}, {drawn}"
            errors = {name: (actual[name] - gradients[name]).norm() for name in gradients}
            total = torch.stack(list(errors.values())).norm() / norm
            assert total <= 3e-6, f"draw {seed}: global gradient {total:.2e}, {drawn}"
            for name, error in errors.items():
                allowed = 5e-5 * max(gradients[name].norm(), 5e-3 * norm)
                assert error <= allowed, f"draw {seed}: {name} {error:.2e} > {allowed:.2e}, {drawn}"
    assert possible >= len(DRAWS) // 2
