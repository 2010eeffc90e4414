"""What an export that was cut off leaves, and when hf/ is written again."""

import os
from pathlib import Path

import pytest

from titan_nemotron.train.finish import is_stale, put_back


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (["hf", "hf.new.partial"], "hf"),  # killed while it was written
        (["hf.old", "hf.new"], "hf.old"),  # between the two renames
        (["hf", "hf.old"], "hf"),  # while the old one was removed
        (["hf.new"], None),  # before the first export had its name
        (["hf"], "hf"),
        ([], None),
    ],
)
def test_one_whole_export_is_left(left: list[str], kept: str | None, tmp_path: Path) -> None:
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    put_back(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == (["hf"] if kept else [])
    if kept:
        assert (tmp_path / "hf" / "config.json").read_text() == kept


def test_stale_is_what_is_missing_or_older_than_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    assert is_stale(tmp_path, 3)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    assert not is_stale(tmp_path, 3)
    os.utime(checkpoint / ".metadata", (2**33, 2**33))
    assert is_stale(tmp_path, 3)
