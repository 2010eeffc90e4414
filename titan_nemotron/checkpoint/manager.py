"""Checkpoints of a run: complete, or not there.

    checkpoints/step-<N>/   .metadata, *.distcp   model, optimizer and random state (torch.distributed.checkpoint)
                            state.json            what is small: step, tokens, data streams, the job
                            config.toml           the job, to read and to start from

A checkpoint is written under the name step-<N>.partial, synced to disk, and renamed last; one that is removed is
renamed first. So a directory named step-<N> is whole, whenever the process was killed.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from titan_nemotron.checkpoint.config import CheckpointConfig
from titan_nemotron.errors import UserError

COMPLETE = re.compile(r"step-(\d+)$")
SHOWN_MISTAKES = 5  # tensors named in an error

T = TypeVar("T")


def complete_steps(directory: Path) -> list[int]:
    """The steps of the whole checkpoints in `directory`, ascending."""
    if not directory.is_dir():
        return []
    found = (COMPLETE.match(path.name) for path in directory.iterdir())
    steps = sorted(int(match[1]) for match in found if match)
    return [step for step in steps if is_checkpoint(directory / f"step-{step}")]


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    return state


class CheckpointManager:
    """Saves and restores one run. Every method is called by all ranks together.

    group: a process group that works on CPU tensors, of its own because saving may go on in the background; None for
    the default group, or where there is none.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, group: dist.ProcessGroup | None = None) -> None:
        self.directory, self.config, self.group = directory, config, group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._on_rank_zero("open", self._clean)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        return self._on_rank_zero("look into", lambda: max(complete_steps(self.directory), default=None))

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        return self.config.interval > 0 and step % self.config.interval == 0

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank; `wait` then raises."""
        return self._saving is not None and self._saving.done() and self._saving.exception() is not None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        config_toml: str,
    ) -> None:
        """Save step-<step>, unless it exists. With `asynchronous` the state is copied now and written behind the scenes.

        state: JSON-able, of the whole run; rank 0's is written. Raises UserError, here or in the next `save` or `wait`,
        when the checkpoint cannot be written.
        """
        self.wait()
        final, partial = self.directory / f"step-{step}", self.directory / f"step-{step}.partial"
        if self._on_rank_zero("write", lambda: self._prepare(final, partial)):
            return
        files = {"state.json": json.dumps({**state, "step": step}), "config.toml": config_toml}
        tensors = {
            "model": get_model_state_dict(model),
            "optimizer": _optimizer_tensors(model, optimizer),
            "random": self._random_state(),
        }
        target: dict[str, Any] = {
            "storage_writer": dcp.FileSystemWriter(partial, sync_files=True),
            "process_group": self.group,
        }
        if self.config.asynchronous:
            writing = dcp.async_save(tensors, **target)
            assert isinstance(writing, Future)
            write: Callable[[], object] = writing.result
        else:
            write = lambda: dcp.save(tensors, **target)  # noqa: E731
        self._saving = self._worker.submit(self._finish, write, files, partial, final)
        if not self.config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background. Raises UserError on all ranks when it failed on any."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        failure = None
        try:
            saving.result()
        except (Exception, CheckpointException) as error:
            failure = _reason(error)
        failures = _all_gather(failure, self.group)
        for rank, reason in enumerate(failures):
            if reason is not None:
                for partial in self.directory.glob("*.partial"):
                    shutil.rmtree(partial, ignore_errors=True)
                free = shutil.disk_usage(self.directory).free / 2**30 if self.directory.exists() else 0.0
                where = f"rank {rank}: " if len(failures) > 1 else ""
                raise UserError(
                    f"checkpoint: cannot write {self.directory}: {where}{reason} ({free:.1f} GiB free); make room, "
                    "then start again: the run resumes from its last whole checkpoint"
                )

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        check: Callable[[dict[str, Any]], None] = lambda state: None,
    ) -> dict[str, Any]:
        """Restore model, optimizer and random state in place; returns the state that `save` got, after `check`ing it.

        Any number of ranks may read what any other number wrote. Raises UserError that names the tensors which the
        checkpoint lacks, has beyond the model's, or has in another shape.
        """
        path = self.directory / f"step-{step}"
        state = self._on_rank_zero("read", lambda: read_state(path))
        check(state)
        tensors = {
            "model": get_model_state_dict(model),
            "optimizer": _optimizer_tensors(model, optimizer),
        }
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        random = {name: value for name, value in self._random_state().items() if f"random.{name}" in stored}
        _compare(path, tensors, stored)
        if random:
            tensors["random"] = random
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), process_group=self.group)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        whole = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, {**whole, **tensors["optimizer"]}, options=options)
        self._restore_random_state(random)
        return state

    def close(self) -> None:
        """Wait for the save under way and take no more."""
        self.wait()
        self._worker.shutdown()

    # What follows runs on rank 0, in the background thread when saving is asynchronous.

    def _clean(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob("step-*.*"):
            if path.suffix in (".partial", ".removed"):
                shutil.rmtree(path)

    def _prepare(self, final: Path, partial: Path) -> bool:
        if final.exists():
            return True
        partial.mkdir(parents=True)
        return False

    def _finish(self, write: Callable[[], object], files: dict[str, str], partial: Path, final: Path) -> None:
        """Once all ranks' tensors are on disk: add the small files, rename, and remove what is not kept any more."""
        write()
        if self.rank != 0:
            return
        for name, text in files.items():
            with open(partial / name, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        _sync_directory(partial)
        partial.rename(final)
        _sync_directory(self.directory)
        for step in _superfluous(complete_steps(self.directory), self.config):
            path = self.directory / f"step-{step}"
            shutil.rmtree(path.rename(path.with_name(f"{path.name}.removed")))

    def _on_rank_zero(self, doing: str, act: Callable[[], T]) -> T:
        """The result of `act` on rank 0, on all ranks; an error of the file system is a UserError on all ranks."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = act()
            except (OSError, ValueError) as error:
                answer[1] = (
                    f"checkpoint: cannot {doing} {self.directory}: {_reason(error)}; "
                    "choose another job.output_directory, or make room"
                )
        if dist.is_initialized():
            dist.broadcast_object_list(answer, src=0, group=self.group)
        if answer[1]:
            raise UserError(answer[1])
        result: T = answer[0]
        return result

    def _random_state(self) -> dict[str, Tensor]:
        states = {f"cpu.{self.rank}": torch.get_rng_state()}
        if torch.cuda.is_available():
            states[f"cuda.{self.rank}"] = torch.cuda.get_rng_state()
        return states

    def _restore_random_state(self, states: dict[str, Tensor]) -> None:
        """A rank that the saving run did not have keeps the state it started with."""
        for name, value in states.items():
            torch.set_rng_state(value) if name.startswith("cpu") else torch.cuda.set_rng_state(value)


def _superfluous(steps: Sequence[int], config: CheckpointConfig) -> list[int]:
    return [step for step in steps[: -config.keep_last] if not config.keep_every or step % config.keep_every]


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's tensors by parameter name; hyperparameters are left out, because the job at hand states them."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    return {name: value for name, value in flat.items() if name.startswith("state.")}


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is a whole checkpoint: its last two files are there."""
    return (path / ".metadata").is_file() and (path / "state.json").is_file()


def _compare(path: Path, tensors: dict[str, dict[str, Any]], stored: dict[str, Any]) -> None:
    wanted = {f"{part}.{name}": value for part, values in tensors.items() for name, value in values.items()}
    kept = {name for name in stored if name.split(".", 1)[0] in tensors}
    lines = [f"lacks {name}" for name in sorted(wanted.keys() - kept)]
    lines += [f"has {name}, which the model does not" for name in sorted(kept - wanted.keys())]
    for name in sorted(wanted.keys() & kept):
        there = stored[name].size if isinstance(stored[name], TensorStorageMetadata) else None
        here = wanted[name].shape if isinstance(wanted[name], Tensor) else None
        if there != here:
            lines.append(f"has {name} in shape {list(there or [])}, the model in {list(here or [])}")
    if lines:
        more = f"; and {len(lines) - SHOWN_MISTAKES} more" if len(lines) > SHOWN_MISTAKES else ""
        raise UserError(
            f"checkpoint: {path} does not fit this job: it {'; it '.join(lines[:SHOWN_MISTAKES])}{more}; "
            "change job.name for a new run, or restore the model and optimizer settings it was saved with"
        )


def _all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
