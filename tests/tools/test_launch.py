"""tools/launch.py: what a person sees when several processes end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import REPOSITORY

TRAINER = r"""
import os, pathlib, signal, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
if what == "mistake":
    if rank == "0":
        print("error: training.steps = 0: give 1 or more", file=sys.stderr)
    time.sleep(0.5)
    sys.exit(2)
if what == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "stop":
    def save(number, frame):
        time.sleep(1)
        os.write(1, b"saved\n")
        sys.exit(128 + number)
    signal.signal(signal.SIGTERM, save)
pathlib.Path(f"ready-{rank}").touch()
time.sleep(60)
"""


def launch(folder: Path, what: str) -> subprocess.Popen[str]:
    (folder / "trainer.py").write_text(TRAINER)
    command = [sys.executable, REPOSITORY / "tools" / "launch.py", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "-m", "trainer", what],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "what, status, message",
    [
        ("mistake", 2, "error: training.steps = 0: give 1 or more\n"),
        ("killed", 137, "Rank 1 ended with SIGKILL; the others were stopped.\n"),
    ],
)
def test_the_first_failure_is_the_exit_status_and_no_table_follows(tmp_path, what, status, message):
    process = launch(tmp_path, what)
    assert process.communicate(timeout=600)[1] == message
    assert process.returncode == status


def test_a_signal_reaches_the_trainers_and_they_may_finish(tmp_path):
    process = launch(tmp_path, "stop")
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=600)
    assert (output, errors) == ("saved\nsaved\n", "")
    assert process.returncode == 128 + signal.SIGTERM
