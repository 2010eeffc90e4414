"""How the benchmarks measure: in turn, best of several repeats; memory in a process of its own; ranks, and what they send."""

import gc
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

PROCESSES = get_context("spawn")


class Times(NamedTuple):
    """Seconds of the best repeat, by wall clock and of CPU time."""

    wall: float
    cpu: float


def best_of(
    repeats: int, runs: Mapping[str, Callable[[], Any]], before: Callable[[], Any] = lambda: None
) -> dict[str, Times]:
    """Every run once a repeat, in turn, so that other work on the machine slows all of them; `before` each is not timed."""
    samples: dict[str, list[Times]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            before()
            start = Times(time.perf_counter(), time.process_time())
            run()
            samples[name].append(Times(time.perf_counter() - start.wall, time.process_time() - start.cpu))
    return {name: Times(*(min(column) for column in zip(*times))) for name, times in samples.items()}


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rise(run: Callable[[], Any]) -> float:
    """MiB by which a second run raises this process's resident memory at its highest."""
    run()
    gc.collect()
    highest = before = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return (highest - before) / 2**20


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a process of its own."""
    with PROCESSES.Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(function, arguments)


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(*arguments) on gloo ranks of one thread each; the result of every rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tasks = [(rank, num_ranks, port, function, arguments) for rank in range(num_ranks)]
    with PROCESSES.Pool(num_ranks) as pool:  # a rank waits for the others, so that each process gets one
        return pool.starmap(_rank, tasks, chunksize=1)


def _rank(rank: int, num_ranks: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), **address}
    dist.init_process_group("gloo")
    result = function(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return result


def slowest(times: list[dict[str, Times]]) -> dict[str, float]:
    """Milliseconds by wall clock of the rank that took longest."""
    return {name: max(rank[name].wall for rank in times) * 1e3 for name in times[0]}


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank receives in collective operations. Reductions count as a ring would send them:
    (P - 1) / P of the tensor for a scatter or a gather, both for an all-reduce. It looks into our own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.received = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function.namespace == "titan_nemotron":
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments, **(keywords or {}))
        out = function(*arguments, **(keywords or {}))
        match function.overloadpacket.__name__:
            case "all_to_all_single":
                tensor, received, _, group = arguments
                rank, degree = (lambda g: (g.rank(), g.size()))(_resolve_process_group(group))
                row = tensor.element_size() * math.prod(tensor.shape[1:])
                rows = sum(received) - received[rank] if received else tensor.shape[0] * (degree - 1) // degree
                self.received += rows * row
            case "all_gather_into_tensor":
                self.received += arguments[0].nbytes * (arguments[1] - 1)
            case "reduce_scatter_tensor":
                self.received += out.nbytes * (arguments[2] - 1)
            case "all_reduce":
                self._add(2 * arguments[0].nbytes, _resolve_process_group(arguments[2]).size())
            case "_allgather_base_":
                self.received += arguments[0].nbytes - arguments[1].nbytes
            case "_reduce_scatter_base_":
                self.received += arguments[1].nbytes - arguments[0].nbytes
            case "allreduce_":
                total = sum(tensor.nbytes for tensor in arguments[0])
                self._add(2 * total, dist.ProcessGroup.unbox(arguments[1]).size())
            case name if "c10d" in function.namespace and not any(
                n in name for n in ("wait", "wrap_tensor", "barrier")
            ):
                raise NotImplementedError(f"the bytes of {function}")
        return out

    def _add(self, num_bytes: float, degree: int) -> None:
        self.received += num_bytes * (degree - 1) / degree
