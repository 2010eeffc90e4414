"""Records on disk and on the console."""

import json
import math
from pathlib import Path

import torch

from titan_nemotron.train.metrics import duration, expert_load, format_record, header, open_truncated, short


def test_a_resumed_file_has_every_step_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (1, 2, 4, 6)]
    file.write_text("\n".join(lines) + '\n{"step": 8, "lo')  # killed in the middle of a line
    with open_truncated(file, 4) as opened:
        opened.write('{"step": 5}\n')
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 4, 5]
    with open_truncated(tmp_path / "new.jsonl", 0):
        pass
    assert (tmp_path / "new.jsonl").read_text() == ""


def test_load_of_experts_in_multiples_of_an_even_one() -> None:
    counts = {"layers.1": torch.tensor([2.0, 4, 4, 6]), "layers.3": torch.tensor([0.0, 0, 0, 8])}
    load = expert_load(counts)
    assert load["expert_load"] == {"layers.1": [0.5, 1.0, 1.5], "layers.3": [0.0, 0.0, 4.0]}
    assert load["max_violation"] == 3.0


def test_lines_fit_a_narrow_terminal() -> None:
    record = {
        "step": 1_000_000,
        "loss": 12.34567,
        "mtp_losses": [12.5, 12.75],
        "grad_norm": 1234.5,
        "lr": 3e-4,
        "tokens_per_second": 123456789.0,
        "mfu": 0.4567,
        "memory_gib": 123.4,
        "seconds_left": 100 * 3600.0,
        "skipped": False,
    }
    assert len(header(record)) <= 80
    large = {"loss": 123.4567, "grad_norm": 1.234e10, "tokens_per_second": 999_999.0, "mfu": 1.0, "memory_gib": 287.6}
    for changes in ({}, {"loss": math.nan, "grad_norm": math.inf}, large):
        line = format_record(record | changes)
        assert len(line) == len(header(record))
        assert len(line.split()) == len(header(record).split()), line  # no column runs into the next


def test_numbers_and_times() -> None:
    numbers = (0.5, 950, 999.9, 12_345, 999_499, 999_999, 6.5e6, 3e12)
    assert [short(number) for number in numbers] == ["0.5", "950", "1k", "12.3k", "999k", "1M", "6.5M", "3T"]
    assert [duration(seconds) for seconds in (5, 65, 3_605, 360_000)] == ["0:05", "1:05", "1:00:05", "100:00:00"]
