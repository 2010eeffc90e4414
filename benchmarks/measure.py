"""How the benchmarks measure: in turn, best of several repeats; memory in a process of its own."""

import gc
import os
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

PROCESSES = get_context("spawn")


class Times(NamedTuple):
    """Seconds of the best repeat, by wall clock and of CPU time."""

    wall: float
    cpu: float


def best_of(repeats: int, runs: Mapping[str, Callable[[], Any]]) -> dict[str, Times]:
    """Every run once a repeat, in turn, so that other work on the machine slows all of them."""
    samples: dict[str, list[Times]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
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
