"""Forward and backward of one small hybrid in fp32, ours against transformers with its default experts; same weights.

python benchmarks/training_step.py [--length 1024] [--threads 2] [--repeats 15]
"""

import argparse
import gc
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
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


def peak_memory(name: str, length: int, threads: int) -> float:
    """MiB by which one step of `name`, the second, raises the resident memory of a process of its own."""
    torch.set_num_threads(threads)
    step = steps(length)[name]
    step()
    gc.collect()
    highest = before = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    done.set()
    watcher.join()
    return (highest - before) / 2**20


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.repeats):  # in turn, so that other work on the machine slows both
        for name, step in runs.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            step()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - start_cpu)
    shares = {name: product_share(step) for name, step in runs.items()}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = {name: pool.apply(peak_memory, (name, arguments.length, arguments.threads)) for name in runs}

    print(
        f"fp32 forward and backward, 1 row of {arguments.length}, {arguments.threads} threads, best of {arguments.repeats}"
    )
    print(f"{'':15s} {'wall':>9s} {'CPU time':>9s} {'products':>9s} {'peak memory':>12s}")
    for name in runs:
        times = f"{min(wall[name]) * 1e3:6.0f} ms {min(cpu[name]) * 1e3:6.0f} ms"
        print(f"{name:15s} {times} {shares[name]:8.0%} {memory[name]:8.0f} MiB")
    ours, theirs = "titan_nemotron", "transformers"
    by_wall, by_cpu = (min(times[theirs]) / min(times[ours]) for times in (wall, cpu))
    print(f"ratio           {by_wall:7.2f} x by wall clock, {by_cpu:.2f} x by CPU time")
    ceiling = min(cpu[theirs]) / (shares[ours] * min(cpu[ours]))
    print(f"ceiling         {ceiling:7.2f} x, if our step were its matrix products and attention alone")


if __name__ == "__main__":
    main()
