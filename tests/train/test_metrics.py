"""Records on disk and on the console."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from titan_nemotron.train.heatmap import CELL, GREY, LEAST_CELL, expert_heatmap, png
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
    assert load["max_violations"] == {"layers.1": 0.5, "layers.3": 3.0}
    assert load["max_violation"] == 3.0
    assert load["dead_experts"] == {"layers.1": 0, "layers.3": 3}


def test_heat_map_of_the_load() -> None:
    """Rows are calls and columns experts: no token black, even white, much red, grey where a call has no such expert."""
    image = expert_heatmap({"layers.1": torch.tensor([0.0, 4, 4, 4, 8]), "layers.3": torch.tensor([0.0, 0, 0, 12])})
    assert image.dtype == np.uint8
    cells = image[CELL // 2 : 2 * CELL : CELL, CELL // 2 :: CELL].tolist()
    black, white, orange, red, grey = [0, 0, 0], [255] * 3, [250, 140, 30], [130, 0, 20], [GREY] * 3
    assert cells == [[black, white, white, white, orange], [black, black, black, red, grey]]
    assert image[-1, 0].tolist() == black and image[-1, -1].tolist() == red  # the scale
    assert expert_heatmap({"layers.1": torch.ones(512)}).shape[1] == 512 * LEAST_CELL


def test_a_png_holds_every_pixel() -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    decoder = pytest.importorskip("PIL.Image", reason="Pillow decodes")
    assert (np.asarray(decoder.open(io.BytesIO(png(image)))) == image).all()


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
