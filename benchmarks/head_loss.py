"""Time and memory of the output layer's operations, chunked (ours) against the materialised form.

python benchmarks/head_loss.py [--vocabulary 131072] [--tokens 4096] [--hidden 1024] [--repeats 3] [--threads N]

Times are forward and backward, best of the repeats, interleaved in one process. Memory is the most that a process of its
own held beyond its inputs, forward and backward; "extra" leaves out the weight's gradient, which both must have.
"""

import argparse
import gc
import multiprocessing
import threading
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_nemotron.ops.head import linear_cross_entropy, linear_logprobs


def loss_materialised(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(h @ w.T, targets, reduction="sum")


def loss_ours(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return linear_cross_entropy(h, w, targets)[0]


def logprobs_materialised(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    """Without the entropy, which ours gives as well."""
    return torch.log_softmax(h @ w.T, dim=-1).gather(1, targets[:, None]).sum()


def logprobs_ours(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return linear_logprobs(h, w, targets)[0].sum()


FORMS: dict[str, dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "training loss": {"materialised": loss_materialised, "ours": loss_ours},
    "log-probabilities": {"materialised": logprobs_materialised, "ours": logprobs_ours},
}
TARGETS = {"training loss": 1.1, "log-probabilities": 1.35}


def inputs(tokens: int, hidden: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=random)
    w = torch.randn(vocabulary, hidden, generator=random).mul_(0.02)
    targets = torch.randint(vocabulary, (tokens,), generator=random)
    return h.requires_grad_(), w.requires_grad_(), targets


def seconds(form: Callable[[Tensor, Tensor, Tensor], Tensor], h: Tensor, w: Tensor, targets: Tensor) -> float:
    h.grad = w.grad = None
    start = time.perf_counter()
    (form(h, w, targets) / len(targets)).backward()
    return time.perf_counter() - start


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def peak(result: "multiprocessing.Queue[int]", operation: str, name: str, shape: tuple[int, int, int]) -> None:
    """The most bytes held beyond the inputs, in a process of its own."""
    small = tuple(tensor for tensor in inputs(8, 16, 32))
    seconds(FORMS[operation][name], *small)  # what the first call of everything allocates
    h, w, targets = inputs(*shape)
    gc.collect()
    before, highest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds(FORMS[operation][name], h, w, targets)
    done.set()
    watcher.join()
    result.put(highest - before)


def measured_peak(operation: str, name: str, shape: tuple[int, int, int]) -> int:
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=peak, args=(result, operation, name, shape))
    process.start()
    value: int = result.get()
    process.join()
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = (arguments.tokens, arguments.hidden, arguments.vocabulary)
    logits, weight = arguments.tokens * arguments.vocabulary * 4, arguments.hidden * arguments.vocabulary * 4

    print(f"vocabulary {shape[2]}, {shape[0]} tokens, hidden {shape[1]}, fp32, CPU, {arguments.threads} threads")
    print(f"logits {logits / 2**20:.0f} MiB, gradient of the weight {weight / 2**20:.0f} MiB")
    for operation, forms in FORMS.items():
        print(f"\n{operation}: forward and backward")
        for name in forms:
            extra = measured_peak(operation, name, shape) - weight
            print(f"  {name:13s} extra memory {extra / 2**20:8.0f} MiB  = {extra / logits:6.3f} of the logits")
        h, w, targets = inputs(*shape)
        best = {name: float("inf") for name in forms}
        for _ in range(arguments.repeats):  # interleaved, so that a busy machine slows both
            for name, form in forms.items():
                best[name] = min(best[name], seconds(form, h, w, targets))
        for name, value in best.items():
            print(f"  {name:13s} {value:8.2f} s")
        ratio = best["ours"] / best["materialised"]
        print(f"  time of ours / materialised {ratio:.3f}  (at most {TARGETS[operation]})")


if __name__ == "__main__":
    main()
