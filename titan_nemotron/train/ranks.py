"""This process among the others of a run, and what they decide together."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titan_nemotron.errors import UserError
from titan_nemotron.parallel.config import ParallelConfig
from titan_nemotron.parallel.mesh import (
    Mesh,
    build_mesh,
    plan_process_group,
    process_device,
    start_process_group,
)
from titan_nemotron.train.watchdog import Watchdog

T = TypeVar("T")


class Ranks:
    """This process among the others: device, mesh, a process group for small things on the CPU, and the watchdog."""

    def __init__(self, device: str, parallel: ParallelConfig) -> None:
        self.device: torch.device = process_device(device)
        start_process_group(self.device, parallel.timeout_seconds)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.mesh: Mesh = build_mesh(parallel, self.device)
        self.group = dist.new_group(backend="gloo")
        self.saving_group = dist.new_group(backend="gloo")  # saving goes on in the background
        self.watchdog = Watchdog(parallel.timeout_seconds)
        self.agree(0)  # nobody goes on, or leaves, before everybody is here

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, act: Callable[[], T]) -> T:
        """What `act` gives here; a mistake that any rank finds ends all of them, with each line once.

        For what has no collective operation inside and may fail on one rank alone, such as reading files.
        """
        value, mistake = None, ""
        try:
            value = act()
        except UserError as error:
            mistake = str(error)
        lines = dict.fromkeys(line for text in self.gather(mistake) for line in text.splitlines())
        if lines:
            raise UserError("\n".join(lines))
        return value  # type: ignore[return-value]

    def agree(self, *values: int) -> list[int]:
        """The largest of each value over all ranks."""
        largest = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return [int(value) for value in largest]

    def total(self, value: int) -> int:
        """The sum of a value over all ranks."""
        total = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def say_once(self, text: str) -> None:
        """Print to standard error what any rank may be the first to know."""
        self.watchdog.say_once(text)

    def end_if_lost(self, error: Exception) -> None:
        """End the process with a message when the error means that another rank was lost."""
        self.watchdog.end_if_lost(error)

    def close(self) -> None:
        """Leave the process group."""
        self.watchdog.close()
        dist.destroy_process_group()


class PlannedRanks(Ranks):
    """Rank 0 of ranks that do not exist, for a plan: it builds their mesh, and decides alone."""

    def __init__(self, device: str, parallel: ParallelConfig) -> None:
        self.device = process_device(device)
        plan_process_group(parallel.world)
        self.rank, self.num_ranks = 0, parallel.world
        self.mesh = build_mesh(parallel, torch.device("cpu"))

    def gather(self, value: T) -> list[T]:
        """Its own value: the other ranks do not exist."""
        return [value]

    def say_once(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr)

    def end_if_lost(self, error: Exception) -> None:
        """There is nobody to lose."""

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
