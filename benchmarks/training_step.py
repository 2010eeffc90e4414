"""Forward and backward of one small hybrid in fp32, ours against transformers with its default experts; same weights.

python benchmarks/training_step.py [--length 1024] [--threads 2] [--repeats 15]
"""

import argparse
from collections.abc import Callable

import torch
from measure import apart, best_of, rise
from peer import HYBRID, pair
from torch import nn
from torch.profiler import ProfilerActivity, profile

from titan_nemotron.layout import Batch

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "grouped_mm", "scaled_dot_product")


def steps(length: int) -> dict[str, Callable[[], float]]:
    """By name: one forward and backward that returns the mean loss."""
    ours, theirs = pair()
    tokens = torch.randint(0, HYBRID.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch.from_rows(tokens, torch.zeros_like(tokens), length=length, mtp_depths=0)

    def clear(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    def our_step() -> float:
        clear(ours)
        loss = ours.loss(batch).main / batch.num_targets  # type: ignore[operator]
        loss.backward()
        return loss.item()

    def their_step() -> float:
        clear(theirs)
        # labels are shifted inside; the same targets as ours need one more token than the inputs
        logits = theirs(batch.tokens, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())
        loss.backward()
        return loss.item()

    return {"titan_nemotron": our_step, "transformers": their_step}


def product_share(step: Callable[[], float]) -> float:
    """The share of the profiled time that is spent in matrix products and attention."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
    events = profiler.key_averages()
    products = sum(e.self_cpu_time_total for e in events if any(name in e.key for name in PRODUCTS))
    return products / sum(event.self_cpu_time_total for event in events)


def rise_of(name: str, length: int, threads: int) -> float:
    torch.set_num_threads(threads)
    return rise(steps(length)[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    runs = steps(arguments.length)
    losses = {name: step() for name, step in runs.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, f"the losses differ: {losses}"
    times = best_of(arguments.repeats, runs)
    shares = {name: product_share(step) for name, step in runs.items()}
    memory = {name: apart(rise_of, name, arguments.length, arguments.threads) for name in runs}

    print(
        f"fp32 forward and backward, 1 row of {arguments.length}, {arguments.threads} threads, best of {arguments.repeats}"
    )
    print(f"{'':15s} {'wall':>9s} {'CPU time':>9s} {'products':>9s} {'peak memory':>12s}")
    for name, (wall, cpu) in times.items():
        print(f"{name:15s} {wall * 1e3:6.0f} ms {cpu * 1e3:6.0f} ms {shares[name]:8.0%} {memory[name]:8.0f} MiB")
    ours, theirs = times["titan_nemotron"], times["transformers"]
    print(f"ratio           {theirs.wall / ours.wall:7.2f} x by wall clock, {theirs.cpu / ours.cpu:.2f} x by CPU time")
    ceiling = theirs.cpu / (shares["titan_nemotron"] * ours.cpu)
    print(f"ceiling         {ceiling:7.2f} x, if our step were its matrix products and attention alone")


if __name__ == "__main__":
    main()
