"""The benchmarks of several ranks run, at sizes where their times say nothing, and count what the formulas say."""

import subprocess
import sys

from tests.support import REPOSITORY


def output_of(script: str, *flags: str) -> list[list[str]]:
    """The words of each line."""
    command = [sys.executable, f"benchmarks/{script}.py", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    return [line.split() for line in done.stdout.splitlines() if line]


def test_bytes_counted_are_those_of_the_formulas() -> None:
    lines = output_of("context_bytes", "--ranks", "2", "--length", "32")
    start = next(index for index, words in enumerate(lines) if words[:2] == ["by", "formula:"])
    counted = [words[-4:] for words in lines[2:start]]
    assert len(counted) == 6
    for forward, formula, backward, formula_back in counted:
        assert float(forward) > 0 and (forward, backward) == (formula, formula_back)
    ratios = [words[-1] for words in lines[start + 2 :]]
    assert ratios == ["1.00x", "0.67x", "1.00x", "0.20x", "1.00x", "40.15x"]  # as cost.py's tests derive them


def test_balance_of_a_ring() -> None:
    _, _, *rows, last = output_of("context_balance", "--length", "4096", "--ranks", "4")
    assert len(rows) == 5 and all(float(words[-4]) >= 1 and words[-2] == "1.00" for words in rows)
    assert last[:2] == ["one", "document"] and last[2:] == ["1.75", "1.75", "1.00", "1.75"]  # (2 P - 1) / P


def test_overhead_of_each_axis() -> None:
    _, _, *rows = output_of("scaling", "--ranks", "2", "--length", "16", "--repeats", "1")
    assert [words[1] for words in rows] == ["replicate", "shard", "context", "expert"]
    assert all(float(words[5]) > 0 for words in rows)


def test_experts_that_travel() -> None:
    rows = output_of("expert_dispatch", "--tokens", "16", "--size", "16", "--repeats", "1")[-4:]
    assert [words[0] for words in rows] == ["travelling", "local", "loop", "dense"]
    assert [float(words[-1]) for words in rows][1:] == [0, 0, 0]
