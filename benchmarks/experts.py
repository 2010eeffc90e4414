"""Routed experts, forward and backward: ours against a loop over the experts and against transformers' default.

python benchmarks/experts.py [--repeats 10] [--threads N]

From the tokens and their routing to the sum over experts, fp32, CPU; best of the repeats, interleaved in one process.
"products" is the six matrix products of every expert alone, without dispatch, activation, or allocation: the floor.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import NemotronHConfig, NemotronHForCausalLM

from titan_nemotron.models.layers.moe import Experts, LocalDispatch
from titan_nemotron.ops import kernels
from titan_nemotron.ops.config import KernelsConfig

# name: tokens, experts a token, experts, model (latent) size, expert size
SHAPES = {
    "debug flavor": (2048, 2, 8, 96, 256),
    "20 M hybrid": (1024, 2, 8, 384, 384),
    "32 experts": (1024, 6, 32, 256, 256),
    "128 experts": (1024, 6, 128, 256, 256),
}


def transformers_experts(experts: Experts) -> torch.nn.Module:
    """transformers' module with the same weights, computed as its models do when nothing is chosen."""
    num_experts, hidden, size = experts.up_proj.shape
    sizes = {"n_routed_experts": num_experts, "hidden_size": size, "moe_intermediate_size": hidden}
    small = {"vocab_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = NemotronHConfig(layers_block_type=["moe"], moe_shared_expert_intermediate_size=8, **sizes, **small)
    model = NemotronHForCausalLM(config)
    theirs = next(module for module in model.modules() if type(module).__name__ == "NemotronHExperts")
    theirs.load_state_dict(experts.state_dict())
    return theirs


def products(experts: Experts, rows: int) -> Callable[[], None]:
    """The six products with equally many rows for every expert, into memory that exists."""
    num_experts, hidden, size = experts.up_proj.shape
    up, down = experts.up_proj.detach(), experts.down_proj.detach()
    rows = max(1, rows // num_experts)
    x, y, h = torch.randn(rows, size), torch.empty(rows, size), torch.empty(rows, hidden)
    dup, ddown = torch.empty_like(up), torch.empty_like(down)

    def run() -> None:
        for expert in range(num_experts):
            torch.mm(x, up[expert].T, out=h)
            torch.mm(h, down[expert].T, out=y)
            torch.mm(x, down[expert], out=h)
            torch.mm(h, up[expert], out=y)
            torch.mm(h.T, x, out=dup[expert])
            torch.mm(x.T, h, out=ddown[expert])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"fp32, CPU, {arguments.threads} threads; milliseconds, forward and backward")
    print(
        f"{'':14s} {'products':>9s} {'ours':>9s} {'loop':>9s} {'transformers':>13s}   loop / ours   transformers / ours"
    )
    for name, (tokens, topk, num_experts, size, hidden) in SHAPES.items():
        random = torch.Generator().manual_seed(0)
        experts, dispatcher = Experts(num_experts, size, hidden, std=0.02, out_std=0.02), LocalDispatch(num_experts)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.normal_(std=0.05, generator=random)
        theirs = transformers_experts(experts)
        x = torch.randn(tokens, size, generator=random).requires_grad_()
        weights, indices = torch.rand(tokens, num_experts, generator=random).topk(topk)
        weights.requires_grad_()
        upstream = torch.randn(tokens, size, generator=random)

        def ours(path: str) -> Tensor:
            kernels.configure(KernelsConfig(experts=path))  # type: ignore[arg-type]
            x_RD, weights_R, offsets_E, handle = dispatcher.dispatch(x, indices, weights)
            return dispatcher.combine(experts(x_RD, weights_R, offsets_E), handle)

        runs: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
            "ours": (lambda: ours("auto"), [x, weights, *experts.parameters()]),
            "loop": (lambda: ours("reference"), [x, weights, *experts.parameters()]),
            "transformers": (lambda: theirs(x, indices, weights), [x, weights, *theirs.parameters()]),
        }
        outputs = [run() for run, _ in runs.values()]
        assert all(torch.allclose(outputs[0], other, atol=1e-4) for other in outputs[1:]), "the outputs differ"
        floor = products(experts, tokens * topk)
        best = dict.fromkeys(("products", *runs), float("inf"))
        for _ in range(arguments.repeats):  # interleaved, so that a busy machine slows all
            start = time.perf_counter()
            floor()
            best["products"] = min(best["products"], time.perf_counter() - start)
            for key, (run, leaves) in runs.items():
                start = time.perf_counter()
                torch.autograd.grad(run(), leaves, upstream)
                best[key] = min(best[key], time.perf_counter() - start)
        times = {key: value * 1e3 for key, value in best.items()}
        print(
            f"{name:14s} {times['products']:9.1f} {times['ours']:9.1f} {times['loop']:9.1f} {times['transformers']:13.1f}"
            f"   {times['loop'] / times['ours']:11.2f}   {times['transformers'] / times['ours']:19.2f}"
        )


if __name__ == "__main__":
    main()
