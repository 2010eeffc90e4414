"""A mixture-of-experts layer whose rows travel to their experts, forward and backward: what travelling costs.

python benchmarks/expert_dispatch.py [--ranks 2] [--tokens 1024] [--size 256] [--experts 16] [--repeats 5]

All on the same gloo ranks, one thread each, at the same time and in turn, with the same tokens for each rank:
  travelling   experts spread over the ranks (AllToAllDispatch)
  local        the same layer with all experts on every rank
  loop         local, with a loop over the experts that autograd differentiates
  dense        an MLP with as many active weights
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from measure import Times, Traffic, best_of, on_ranks, slowest
from torch import Tensor, nn

from titan_nemotron.layout import DocumentLayout
from titan_nemotron.models.layers.init import initialize
from titan_nemotron.models.layers.mlp import MLP
from titan_nemotron.models.layers.moe import MoE
from titan_nemotron.ops import kernels
from titan_nemotron.ops.config import KernelsConfig
from titan_nemotron.parallel.expert import spread_experts
from titan_nemotron.parallel.mesh import EXPERT, Mesh
from titan_nemotron.parallel.sharded import local_part

TOPK = 2


def layer(size: int, experts: int, mesh: Mesh | None) -> nn.Module:
    """Equal weights on every mesh."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {
                "moe": MoE(
                    size,
                    num_experts=experts,
                    topk=TOPK,
                    hidden=2 * size,
                    shared_hidden=2 * size,
                    latent=0,
                    n_group=1,
                    topk_group=1,
                    norm_topk=True,
                    scaling=1.0,
                    bias=False,
                    std=0.05,
                    out_std=0.05,
                )
            }
        )
    if mesh is not None:
        assert mesh.experts is not None
        spread_experts(model, mesh.experts[EXPERT])
    model.to_empty(device="cpu")
    initialize(model, 0, local_part=local_part)
    return model["moe"]


def measure(tokens: int, size: int, experts: int, repeats: int) -> tuple[dict[str, Times], float]:
    """Times of this rank, and the bytes it received in one run."""
    mesh = Mesh.of("cpu", range(dist.get_world_size()), expert=dist.get_world_size())
    travelling, local = layer(size, experts, mesh), layer(size, experts, None)
    dense = MLP(size, (TOPK + 1) * 2 * size, bias=False, std=0.05, out_std=0.05)
    dense_model = nn.ModuleDict({"dense": dense})
    initialize(dense_model, 0)
    random = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(1, tokens, size, generator=random).requires_grad_()
    layout = DocumentLayout.single(1, tokens)

    def run(module: nn.Module, path: str = "auto") -> Tensor:
        kernels.configure(KernelsConfig(experts=path))  # type: ignore[arg-type]
        x.grad = None
        module.zero_grad()
        out = module(x) if module is dense else module(x, layout)[0]
        out.square().sum().backward()
        return out.detach()

    runs: dict[str, Callable[[], Tensor]] = {
        "travelling": partial(run, travelling),
        "local": partial(run, local),
        "loop": partial(run, local, "reference"),
        "dense": partial(run, dense),
    }
    outputs = {name: act() for name, act in runs.items()}
    for name in ("local", "loop"):
        torch.testing.assert_close(outputs["travelling"], outputs[name], atol=1e-4, rtol=1e-4)
    with Traffic() as traffic:
        runs["travelling"]()
    return best_of(repeats, runs, before=dist.barrier), traffic.received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    sizes = (arguments.tokens, arguments.size, arguments.experts)
    results = on_ranks(arguments.ranks, measure, *sizes, arguments.repeats)
    times = slowest([found for found, _ in results])
    received = sum(traffic for _, traffic in results) / len(results)
    print(
        f"{arguments.ranks} gloo ranks of one thread, {arguments.tokens} tokens each, size {arguments.size}, fp32, forward"
    )
    print(f"and backward; {arguments.experts} experts, {TOPK} a token, and a shared one, of {2 * arguments.size}")
    print(f"{'':12s} {'ms':>9s} {'over dense':>11s} {'over local':>11s} {'MB received':>12s}")
    for name, ms in times.items():
        bytes_received = received if name == "travelling" else 0.0
        print(
            f"{name:12s} {ms:9.1f} {ms / times['dense']:11.2f} {ms / times['local']:11.2f} {bytes_received / 1e6:12.2f}"
        )


if __name__ == "__main__":
    main()
