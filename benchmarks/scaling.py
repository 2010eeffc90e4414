"""What each axis of the mesh costs a training step, and how the bytes that a rank receives grow with the ranks.

python benchmarks/scaling.py [--ranks 1 2 4] [--length 256] [--repeats 3]

Every rank has the same number of tokens on every mesh: a row of its own, or with context a part of a row as many times as
long, in documents of the same length. "alone" is the model without a mesh in each of the same processes at the same time,
so that a ratio holds what is sent and waited for, and not that processes share a machine. Forward and backward, fp32.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from measure import Times, Traffic, best_of, on_ranks, slowest
from peer import HYBRID
from torch import nn

from titan_nemotron.layout import Batch
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.nemotron3 import FAMILY
from titan_nemotron.parallel.apply import apply
from titan_nemotron.parallel.config import CompileConfig, ParallelConfig, RecomputeConfig
from titan_nemotron.parallel.mesh import build_mesh, own_part
from titan_nemotron.train.step import StepSettings, forward_backward, global_totals

# Few layers, one of each kind, and heads that 4 ranks divide.
CONFIG = HYBRID.model_copy(
    update={"pattern": "ME*E", "vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 8, "n_groups": 4}
)
AXES = ("replicate", "shard", "context", "expert")


def rows(length: int, parts: int) -> Batch:
    """One row of `parts` documents of `length`."""
    tokens = torch.randint(0, CONFIG.vocab_size, (1, parts * length + 1), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(tokens.shape[1]) // length)[None]
    return Batch.from_rows(tokens, documents, length=parts * length, mtp_depths=0)


def step(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    forward_backward(model, [batch], global_totals([batch]), StepSettings())  # type: ignore[arg-type]


def alone(model: nn.Module, batch: Batch) -> None:
    model.zero_grad()
    (model.loss(batch).main / batch.num_targets).backward()  # type: ignore[operator]


def measure(length: int, repeats: int) -> tuple[dict[str, Times], dict[str, float]]:
    """Times of this rank by axis, and the bytes it received in a step."""
    degree = dist.get_world_size()
    whole = FAMILY.model(CONFIG)
    initialize(whole, 0)
    runs: dict[str, Callable[[], None]] = {"alone": partial(alone, whole, rows(length, 1))}
    for axis in AXES if degree > 1 else ("shard",):
        parallel = ParallelConfig(**({} if axis == "shard" else {axis: degree}))
        mesh = build_mesh(parallel, torch.device("cpu"))
        with torch.device("meta"):
            model = FAMILY.model(CONFIG)
        options = {
            "recompute": RecomputeConfig(),
            "compile": CompileConfig(),
            "dtype": torch.float32,
            "microbatch": (1, length),
        }
        apply(model, mesh, parallel=parallel, seed=0, **options)  # type: ignore[arg-type]
        batch = own_part(rows(length, degree if axis == "context" else 1), mesh)
        runs[axis] = partial(step, model, batch)
    received = {}
    for name, run in runs.items():
        run()  # what the first run sets up is not counted
        with Traffic() as traffic:
            run()
        received[name] = traffic.received
    return best_of(repeats, runs, before=dist.barrier), received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--length", type=int, default=256, help="tokens of each rank")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{arguments.length} tokens a rank, gloo, one thread a rank, best of {arguments.repeats}; the slowest rank")
    print(
        f"{'ranks':5s} {'axis':10s} {'ms':>9s} {'alone':>9s} {'ratio':>7s} {'MB received':>12s} {'over 2 ranks':>13s}"
    )
    at_two: dict[str, float] = {}
    for num_ranks in arguments.ranks:
        results = on_ranks(num_ranks, measure, arguments.length, arguments.repeats)
        times = slowest([found for found, _ in results])
        for axis in list(times)[1:]:
            received = sum(traffic[axis] for _, traffic in results) / num_ranks
            if num_ranks == 2:
                at_two[axis] = received
            growth = f"{received / at_two[axis]:13.2f}" if at_two.get(axis) else f"{'':13s}"
            ratio = times[axis] / times["alone"]
            row = f"{num_ranks:5d} {axis:10s} {times[axis]:9.0f} {times['alone']:9.0f} {ratio:7.2f} {received / 1e6:12.2f}"
            print(f"{row} {growth}".rstrip())


if __name__ == "__main__":
    main()
