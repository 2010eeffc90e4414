"""Runs that are killed, stopped, or hang, and what they continue from."""

import random
import signal
import time
from pathlib import Path

import torch

from tests.train.launch import Launcher, checkpoint_tensors, records, timeless, wait_until
from titan_nemotron.checkpoint.manager import complete_steps
from titan_nemotron.train import loop
from titan_nemotron.train.health import HUNG, NOT_FINITE

KILLS = 5
TIMEOUT = "20"  # seconds: on a slow machine a healthy step may take many
FOREVER = 3_600.0  # seconds: longer than any test waits


def assert_same_end(first: Path, second: Path) -> None:
    """Bitwise: weights, router biases, optimizer and random state, and every record but for the clock."""
    one, two = (checkpoint_tensors(path / "checkpoints" / "step-12") for path in (first, second))
    assert one.keys() == two.keys()
    assert [name for name, value in one.items() if not torch.equal(value, two[name])] == []
    assert timeless(first) == timeless(second)


def test_killed_at_any_moment_ends_the_same(finished: Path, launcher: Launcher) -> None:
    flags = ("--job.name", "killed", "--training.validation_interval", "4")
    directory = launcher.of("killed")
    chance = random.Random(0)

    def reached() -> int:
        return max(complete_steps(directory / "checkpoints"), default=0)

    for kill in range(KILLS):
        before = reached()
        launch = launcher(*flags)
        wait_until(lambda: not launch.running or reached() > before or "gnorm" in launch.text)
        if kill % 2:  # while it saves, or removes an old checkpoint
            wait_until(lambda: not launch.running or list(directory.glob("checkpoints/*.*")), every=0.0005)
        else:
            time.sleep(chance.uniform(0.0, 0.3))
        launch.kill()
        assert reached() >= before
    launcher.run(*flags)
    assert_same_end(finished, directory)
    assert not list(directory.glob("checkpoints/*.partial"))


def test_two_ranks_killed_in_a_save_end_the_same(launcher: Launcher) -> None:
    flags = ("--training.validation_rows", "0", "--metrics.completion_tokens", "0")
    launcher.run("--job.name", "pair", *flags, ranks=2)
    directory = launcher.of("pair-killed")
    launch = launcher("--job.name", "pair-killed", *flags, ranks=2)
    wait_until(lambda: complete_steps(directory / "checkpoints"))
    wait_until(lambda: not launch.running or list(directory.glob("checkpoints/*.partial")), every=0.0005)
    launch.kill()
    assert complete_steps(directory / "checkpoints")[-1] < 12
    text = launcher.run("--job.name", "pair-killed", *flags, ranks=2).text
    assert "resuming" in text
    assert_same_end(launcher.of("pair"), directory)


def test_sigterm_saves_and_another_number_of_ranks_goes_on(finished: Path, launcher: Launcher) -> None:
    flags = ("--job.name", "stopped", "--training.validation_interval", "4", "--checkpoint.interval", "0")
    directory = launcher.of("stopped")
    launch = launcher(*flags, prepare=slow_steps)
    wait_until(lambda: (directory / "metrics.jsonl").exists() and len(records(directory)) >= 3)
    launch.signal(signal.SIGTERM)
    assert launch.wait() == [128 + signal.SIGTERM], launch.text
    (step,) = complete_steps(directory / "checkpoints")
    assert 3 <= step < 12
    assert f"start again to continue from step {step}" in launch.text
    assert timeless(directory) == timeless(finished)[:step]

    launch = launcher(*flags, ranks=2, prepare=slow_steps)  # two ranks, and Ctrl-C on one of them
    wait_until(lambda: len(records(directory)) > step)
    launch.signal(signal.SIGINT, rank=1)
    assert launch.wait() == [128 + signal.SIGINT] * 2, launch.text
    steps = complete_steps(directory / "checkpoints")
    assert steps[-1] > step

    launcher.run(*flags)
    one, two = (checkpoint_tensors(path / "checkpoints" / "step-12") for path in (finished, directory))
    for name, value in one.items():
        if name.startswith("model."):
            torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-5)
    for one_record, two_record in zip(records(finished), records(directory), strict=True):
        assert one_record["tokens"] == two_record["tokens"]
        assert abs(one_record["loss"] - two_record["loss"]) < 1e-5 * one_record["loss"]


def slow_steps() -> None:
    """So that a signal meets a run in the middle."""
    real = loop.train_step

    def slow(*arguments, **named):  # type: ignore[no-untyped-def]
        time.sleep(0.2)
        return real(*arguments, **named)

    loop.train_step = slow  # type: ignore[assignment]


def test_a_second_ctrl_c_ends_at_once(launcher: Launcher) -> None:
    launch = launcher("--job.name", "impatient", prepare=endless_step)
    wait_until(lambda: "computing" in launch.text.splitlines())
    launch.signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C" in launch.text)
    time.sleep(1.2)
    launch.signal(signal.SIGINT)
    assert launch.wait() == [128 + signal.SIGINT]
    assert complete_steps(launcher.of("impatient") / "checkpoints") == []


def endless_step() -> None:
    def endless(*arguments, **named):  # type: ignore[no-untyped-def]
        print("computing")
        time.sleep(FOREVER)

    loop.train_step = endless


def test_steps_that_are_not_finite_stop_the_run(launcher: Launcher) -> None:
    flags = ("--job.name", "diverged", "--training.max_nonfinite_steps", "3", "--checkpoint.interval", "1")
    launch = launcher(*flags, "--optimizer.learning_rate", "1e35", "--schedule.warmup_steps", "0")
    assert launch.wait() == [NOT_FINITE], launch.text
    directory = launcher.of("diverged")
    lines = records(directory)
    assert [line["skipped"] for line in lines[-3:]] == [True] * 3
    assert lines[-1]["loss"] is None
    before = lines[-4]["step"]
    assert complete_steps(directory / "checkpoints")[-1] == before
    assert f"step-{before} is from before them" in launch.text
    tensors = checkpoint_tensors(directory / "checkpoints" / f"step-{before}")
    assert all(value.isfinite().all() for value in tensors.values())


def test_a_rank_that_hangs_is_named(launcher: Launcher) -> None:
    launch = launcher("--job.name", "hanging", "--parallel.timeout_seconds", TIMEOUT, ranks=2, prepare=hang_on_rank_1)
    assert launch.wait() == [HUNG, HUNG], launch.text
    assert launch.text.count("error:") == 1, launch.text
    assert f"parallel.timeout_seconds = {TIMEOUT}" in launch.text
    assert "rank 0: waits in all_reduce in step 3, computing" in launch.text
    assert "rank 1: has not arrived, in step 3, computing" in launch.text


def hang_on_rank_1() -> None:
    import torch.distributed as dist

    real, calls = loop.train_step, []

    def hang(*arguments, **named):  # type: ignore[no-untyped-def]
        calls.append(None)
        if len(calls) == 3 and dist.get_rank() == 1:
            time.sleep(FOREVER)
        return real(*arguments, **named)

    loop.train_step = hang  # type: ignore[assignment]


def test_a_rank_that_dies_is_named(launcher: Launcher) -> None:
    launch = launcher("--job.name", "dying", "--parallel.timeout_seconds", TIMEOUT, ranks=2, prepare=slow_steps)
    wait_until(lambda: (launcher.of("dying") / "metrics.jsonl").exists() and len(records(launcher.of("dying"))) >= 2)
    launch.signal(signal.SIGKILL, rank=1)
    assert launch.wait() == [HUNG, -signal.SIGKILL], launch.text
    assert "rank 1: is gone, last heard of in" in launch.text


def test_a_directory_in_use_is_refused(launcher: Launcher) -> None:
    launch = launcher("--job.name", "busy", prepare=endless_step)
    wait_until(lambda: "computing" in launch.text.splitlines())
    second = launcher("--job.name", "busy")
    assert second.wait() == [2]
    assert "another process is training" in second.text
    launch.kill()
