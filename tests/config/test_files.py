"""Inheritance: base files, how tables merge, and which place a mistake is reported at."""

from pathlib import Path

import pytest

from tests.config.tables import Example
from titan_nemotron.config import load
from titan_nemotron.errors import UserError


def write(directory: Path, **files: str) -> Path:
    """Write name.toml for each, and return the first."""
    for name, text in files.items():
        path = directory / (name.replace("__", "/") + ".toml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return directory / f"{next(iter(files))}.toml"


def error(file: Path) -> str:
    with pytest.raises(UserError) as raised:
        load(Example, file, (), "test")
    return str(raised.value).replace(f"{file.parent}/", "")


def test_tables_merge_lists_replace_and_the_nearest_file_wins(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        job='base = "shared/middle.toml"\n[training]\nsteps = 1\n[model.config]\na = 1\n[optimizer]\nfreeze = ["x"]',
        shared__middle='base = "../root.toml"\n[training]\nsteps = 2\nglobal_batch_size = 16\n[model.config]\na = 2\nb = 2',
        root='[training]\nsteps = 3\nloss_scale = 3.0\n[optimizer]\nfreeze = ["y", "z"]\n[model.config]\nc = {d = 3}',
    )
    job = load(Example, file, ["--training.global_batch_size", "32"], "test")
    assert (job.training.steps, job.training.global_batch_size, job.training.loss_scale) == (1, 32, 3.0)
    assert job.optimizer.freeze == ["x"]
    assert job.model.config == {"a": 1, "b": 2, "c": {"d": 3}}


def test_a_mistake_is_reported_where_it_stands(tmp_path: Path) -> None:
    file = write(
        tmp_path, job='base = "root.toml"\n[training]\nsteps = "x"', root='[training]\nsteps = 1\n\nloss_scale = "y"'
    )
    assert error(file).splitlines() == [
        'job.toml:3: training.steps = "x": expected integer >= 1',
        'root.toml:4: training.loss_scale = "y": expected number > 0',
    ]


def test_a_replaced_list_forgets_the_lines_of_the_old_one(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        job='base = "root.toml"\n[data]\nsource = [{kind = "x"}]',
        root='[[data.source]]\nkind = "text"\npath = "a"',
    )
    assert error(file) == 'job.toml:3: data.source.0.kind = "x": expected "stdlib" | "text"'


def test_circle(tmp_path: Path) -> None:
    file = write(tmp_path, a='base = "b.toml"', b='base = "a.toml"')
    assert error(file) == "b.toml: base goes in a circle: a.toml -> b.toml -> a.toml; remove one of them"


def test_missing_files(tmp_path: Path) -> None:
    file = write(tmp_path, nemotron3_debug="", job='base = "root.toml"')
    assert (
        error(tmp_path / "nemotron_debug.toml")
        == "nemotron_debug.toml: no such file; did you mean nemotron3_debug.toml?"
    )
    assert error(tmp_path / "zzz") == "zzz: no such file; give the path of a TOML file"
    assert error(tmp_path / "job.toml") == 'job.toml: base = "root.toml": no such file; give the path of a TOML file'
    assert error(file.parent) == f"{tmp_path.name}: is a directory; give a TOML file"


def test_base_must_be_a_path(tmp_path: Path) -> None:
    file = write(tmp_path, job='\nbase = ["a.toml"]')
    assert error(file) == "job.toml:2: base = ['a.toml']: expected the path of one TOML file, relative to this file"


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"[training]\n# caf\xe9\n")
    assert error(tmp_path / "job.toml") == "job.toml:2: not UTF-8; save the file as UTF-8 text"


def test_lines_are_found_in_every_way_of_writing(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        job="""
optimizer.learning_rate = "a"  # dotted
[ training ]  # with spaces
  "steps" = "b"
betas = '''
[optimizer]
steps = 3
'''
[[data . source]]
[[ data.source ]]
kind = "c"
""",
    )
    assert error(file).splitlines() == [
        'job.toml:4: training.steps = "b": expected integer >= 1',
        'job.toml:5: training.betas = "[optimizer]\\nsteps = 3\\n": unknown key; did you mean [optimizer] betas?',
        'job.toml:2: optimizer.learning_rate = "a": expected number > 0',
        'job.toml:11: data.source.1.kind = "c": expected "stdlib" | "text"',
    ]
