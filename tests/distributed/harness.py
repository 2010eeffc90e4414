"""Cases that need several ranks: one launch per world size runs them all.

Adding a case: write a function in a file tests/distributed/cases_<area>.py and decorate it.

    from tests.distributed.harness import Context, case

    @case()                        # on 1, 2 and 4 ranks; or @case(2), @case(2, 4)
    def sums_agree(context: Context) -> None:
        total = torch.tensor(float(context.rank))
        dist.all_reduce(total)
        assert total == sum(range(context.world_size))

Every rank calls the function inside a running gloo group; an exception on any rank fails the case. It appears as the
pytest test `tests/distributed/test_distributed.py::test_case[<ranks>-<name>]` and is chosen with -k like any other.

How it runs: pytest starts one launcher process for a world size (one rank runs inside pytest itself), and each test waits for
its case. The launcher imports torch and the cases once and forks the ranks, fresh ones every few cases, so that a launch costs
seconds. A rank that fails, dies or hangs ends its case with a message that names case and rank; the launcher forks fresh ranks
for the cases that remain.
"""

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from titan_nemotron.ops.ssd import chunked
from titan_nemotron.parallel.config import ParallelConfig
from titan_nemotron.parallel.mesh import Mesh, build_mesh, start_process_group

HERE = Path(__file__).resolve().parent
CASE_SECONDS = 400.0  # a machine may be slow; a rank that fails or dies is noticed at once
# Cases that the same ranks run: each group of a mesh has a thread that gloo wakes a hundred times a second until the process
# ends, and hundreds of them leave no time to the cases.
CASES_AT_ONCE = 6


@dataclass(frozen=True)
class Context:
    """What a case knows of its surroundings; directory is empty, and shared by the ranks of this case alone."""

    rank: int
    world_size: int
    mesh: Mesh
    directory: Path


CaseFunction = Callable[[Context], None]
CASES: dict[str, tuple[CaseFunction, tuple[int, ...]]] = {}


def case(*world_sizes: int) -> Callable[[CaseFunction], CaseFunction]:
    """Register a function as a case on these numbers of ranks (1, 2 and 4 by default)."""

    def register(function: CaseFunction) -> CaseFunction:
        assert function.__name__ not in CASES, f"two cases are called {function.__name__}"
        CASES[function.__name__] = function, world_sizes or (1, 2, 4)
        return function

    return register


def load_cases() -> dict[str, tuple[CaseFunction, tuple[int, ...]]]:
    """Import every tests/distributed/cases_*.py."""
    for path in sorted(HERE.glob("cases_*.py")):
        importlib.import_module(f"tests.distributed.{path.stem}")
    return CASES


def run_case(name: str, directory: Path) -> None:
    """Run one case in the group that this process has joined."""
    rank, mesh = dist.get_rank(), build_mesh(ParallelConfig(), torch.device("cpu"))
    own = directory / name
    own.mkdir(exist_ok=True)
    dist.barrier()
    torch.manual_seed(0)
    with mock.patch.object(chunked, "CHUNK", 8):  # rows are short: let the scan cross chunks
        CASES[name][0](Context(rank, dist.get_world_size(), mesh, own))
    dist.barrier()


# --- the launcher, and what the ranks it forks do


def _rank(rank: int, world_size: int, port: int, names: Sequence[str], directory: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    start_process_group(torch.device("cpu"), CASE_SECONDS)
    for name in names:
        (directory / f"current.{rank}").write_text(name)
        try:
            run_case(name, directory)
        except BaseException:
            (directory / f"{name}.error.{rank}").write_text(traceback.format_exc())
            sys.stderr.flush()
            os._exit(1)
        if rank == 0:
            (directory / f"{name}.passed").touch()
    dist.destroy_process_group()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(pids: dict[int, int], names: Sequence[str], directory: Path) -> str | None:
    """Wait for the ranks (process id -> rank). Returns what went wrong, or None; kills what is left."""
    passed, deadline = -1, time.monotonic() + CASE_SECONDS
    waiting, trouble = dict(pids), None
    while waiting and trouble is None:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = waiting.pop(pid)
                if status:  # two may be found at once
                    ended = f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
                    trouble = ended if trouble is None else f"{trouble}, {ended}"
        now_passed = sum((directory / f"{name}.passed").exists() for name in names)
        if now_passed > passed:
            passed, deadline = now_passed, time.monotonic() + CASE_SECONDS
        elif time.monotonic() > deadline:
            trouble = f"ranks {sorted(waiting.values())} did not finish in {CASE_SECONDS:.0f} s"
        time.sleep(0.02)
    if trouble:
        time.sleep(0.5)  # the other ranks may be about to say what went wrong for them
        for pid in list(waiting):  # the rank whose end ended the others may be seen after them
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                trouble += f", rank {waiting.pop(pid)} ended with {os.waitstatus_to_exitcode(status)}"
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return trouble


def _outcome(directory: Path, name: str) -> str | None:
    """What went wrong in a case, "" when it passed, None as long as it has not ended."""
    if (directory / f"{name}.passed").exists():
        return ""
    failed = directory / f"{name}.failed"
    return failed.read_text() if failed.exists() else None


def run_cases(world_size: int, names: list[str], directory: Path) -> None:
    """Run the cases in order on forked ranks, and leave in `directory` what `_outcome` reads."""
    while remaining := [name for name in names if _outcome(directory, name) is None][:CASES_AT_ONCE]:
        port, pids = _free_port(), {}
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                _rank(rank, world_size, port, remaining, directory)
            pids[pid] = rank
        trouble = _watch(pids, remaining, directory)
        failed = next((name for name in remaining if _outcome(directory, name) is None), None)
        if failed is None:
            continue
        where = {int(path.suffix[1:]): path.read_text() for path in directory.glob("current.*")}
        lines = [f"case {failed} on {world_size} ranks: {trouble or 'the ranks ended in it'}; ranks were in {where}"]
        for path in sorted(directory.glob(f"{failed}.error.*")):
            lines.append(f"--- rank {path.suffix[1:]}\n{path.read_text()}")
        text = directory / "failed.text"
        text.write_text("\n".join(lines))
        text.rename(directory / f"{failed}.failed")  # whoever sees the file sees all of it


class Launch:
    """Cases that run in another process, one that has never computed anything, which is what may be forked."""

    def __init__(self, world_size: int, names: Sequence[str], directory: Path) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "tests.distributed.harness", str(world_size), str(directory), *names]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_ADDR2LINE": "1"}
        with (directory / "output").open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=HERE.parent.parent,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def outcome(self, name: str) -> str:
        """Wait for a case to end. Returns what went wrong, with the last lines of output, or "" when it passed."""
        while (error := _outcome(self.directory, name)) is None:
            ended = self.process.poll() is not None
            if ended and _outcome(self.directory, name) is None:
                raise RuntimeError(f"the launcher ended with {self.process.returncode}:\n{self._output()}")
            time.sleep(0.02)
        return error and f"{error}\n--- output\n{self._output()[-4000:]}"

    def _output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


if __name__ == "__main__":
    # Cases register in the module that they import, which is not __main__.
    from tests.distributed import harness

    harness.load_cases()
    harness.run_cases(int(sys.argv[1]), sys.argv[3:], Path(sys.argv[2]))
