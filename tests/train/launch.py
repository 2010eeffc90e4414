"""Runs the real `python -m titan_nemotron.train` in real processes that start quickly.

A server process imports everything once and forks the ranks; each rank then is what torchrun would have started.
"""

import contextlib
import json
import multiprocessing
import os
import pty
import signal
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["titan_nemotron.train.loop", "titan_nemotron.train.plan", "tests.train.launch"])

JOB = """
[job]
name = "run"
[model.config]
pattern = "ME*"
hidden_size = 32
vocab_size = 300
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
mamba_num_heads = 4
mamba_head_dim = 16
n_groups = 2
ssm_state_size = 16
chunk_size = 16
n_routed_experts = 4
moe_intermediate_size = 32
moe_shared_expert_intermediate_size = 32
moe_latent_size = 16
[data]
vocabulary_size = 300
validation_fraction = 0.2
streams = 8
[[data.source]]
kind = "text"
path = "{text}/*.txt"
[training]
steps = 12
sequence_length = 32
global_batch_size = 4
validation_rows = 8
[schedule]
kind = "cosine"
warmup_steps = 2
[metrics]
interval = 1
completion_tokens = 8
[checkpoint]
interval = 2
"""


def write_job(directory: Path) -> Path:
    """A job of a second on text that is the same everywhere."""
    text = directory / "text"
    text.mkdir()
    words = "the cat sat on a mat and saw two dogs run far away from it over there".split()  # noqa: SIM905
    for number in range(40):
        generator = torch.Generator().manual_seed(number)
        chosen = torch.randint(len(words), (400,), generator=generator).tolist()
        (text / f"{number:02}.txt").write_text(" ".join(words[word] for word in chosen))
    file = directory / "job.toml"
    file.write_text(JOB.format(text=text))
    return file


def _enter(
    environment: dict[str, str], output: str, arguments: Sequence[str], prepare: Callable[[], None] | None
) -> None:
    os.setsid()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    from titan_nemotron.train.__main__ import enter

    if prepare is not None:
        prepare()
    enter(arguments)


@dataclass
class Launch:
    """The processes of one run, and what they have printed."""

    processes: list[BaseProcess]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, seconds: float = 300.0) -> list[int | None]:
        """Exit statuses; whoever is left after `seconds` is killed and has None."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [process for process in self.processes if process.exitcode is None]
        statuses = [process.exitcode for process in self.processes]
        for process in late:
            process.kill()
            process.join()
        return statuses

    def signal(self, number: int, rank: int | None = None) -> None:
        for process in self.processes if rank is None else [self.processes[rank]]:
            assert process.pid is not None
            os.kill(process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    @property
    def running(self) -> bool:
        return any(process.is_alive() for process in self.processes)


class Terminal:
    """A pseudo-terminal of eighty columns, and what was written to it."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self.path = Path(os.ttyname(theirs))
        self._theirs, self._read = theirs, bytearray()
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        with contextlib.suppress(OSError):  # nobody holds the other end any more
            while piece := os.read(self._ours, 4096):
                self._read += piece

    @property
    def text(self) -> str:
        """All of it, once the processes have ended."""
        os.close(self._theirs)
        self._thread.join()
        os.close(self._ours)
        return self._read.decode()


class Launcher:
    """Starts runs that write below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.count = 0
        self.job = write_job(directory)

    def __call__(
        self,
        *flags: str,
        ranks: int = 1,
        prepare: Callable[[], None] | None = None,
        output: Path | None = None,
    ) -> Launch:
        self.count += 1
        output = output or self.directory / f"output-{self.count}.txt"
        arguments = ["--config", str(self.job), "--job.output_directory", str(self.directory / "outputs"), *flags]
        environment = {"XDG_CACHE_HOME": str(self.directory / "cache"), "OMP_NUM_THREADS": "1"}
        environment |= {"TERM": "xterm-256color"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            if ranks > 1:
                environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            process = SERVER.Process(target=_enter, args=(environment, str(output), arguments, prepare))
            process.start()
            processes.append(process)
        return Launch(processes, output)

    def in_terminal(self, *flags: str) -> tuple[Launch, "Terminal"]:
        terminal = Terminal()
        return self(*flags, output=terminal.path), terminal

    def run(self, *flags: str, ranks: int = 1, prepare: Callable[[], None] | None = None) -> Launch:
        """Start and wait for a run that must succeed."""
        launch = self(*flags, ranks=ranks, prepare=prepare)
        statuses = launch.wait()
        assert statuses == [0] * ranks, launch.text
        return launch

    def of(self, name: str) -> Path:
        return self.directory / "outputs" / name


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


TIMES = ("tokens_per_second", "data_wait", "memory_gib", "seconds_left")


def timeless(directory: Path) -> list[dict[str, Any]]:
    """The records without what depends on the clock and the machine."""
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records(directory)]


def checkpoint_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = dcp.FileSystemReader(path)
    tensors: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def wait_until(true: Callable[[], Any], seconds: float = 300.0, every: float = 0.001) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(every)
