"""Every mistake of a file and its flags in one go, in the words a person reads."""

from pathlib import Path

import pytest

from tests.config.tables import Example
from titan_nemotron.config import build, load
from titan_nemotron.errors import UserError


def mistakes(directory: Path, toml: str | None, *arguments: str) -> list[str]:
    file = None
    if toml is not None:
        file = directory / "job.toml"
        file.write_text(toml)
    with pytest.raises(UserError) as raised:
        load(Example, file, arguments, "test")
    return [line.removeprefix(f"{directory}/") for line in str(raised.value).splitlines()]


CASES = {
    "similar key": (
        "[training]\nstesp = 5",
        ["job.toml:2: training.stesp = 5: unknown key; did you mean steps?"],
    ),
    "key inside the given one": (
        "[training]\nnum_steps_max = 5",
        ["job.toml:2: training.num_steps_max = 5: unknown key; did you mean steps?"],
    ),
    "key of another table": (
        "[training]\nlearning_rate = 1e-4",
        ["job.toml:2: training.learning_rate = 0.0001: unknown key; did you mean [optimizer] learning_rate?"],
    ),
    "nothing alike": (
        "[compile]\nbanana = 1",
        ["job.toml:2: compile.banana = 1: unknown key; known here: enable"],
    ),
    "similar table, and what stands in it": (
        '[trainig]\nsteps = "many"\nstesp = 5',
        [
            "job.toml:1: [trainig]: unknown table; did you mean [training]?",
            'job.toml:2: training.steps = "many": expected integer >= 1',
            "job.toml:3: training.stesp = 5: unknown key; did you mean steps?",
        ],
    ),
    "unknown table with a known key": (
        "[sgd]\nlearning_rate = 1.0",
        [
            "job.toml:1: [sgd]: unknown table; known tables: training, optimizer, compile, data, model",
            "job.toml:2: sgd.learning_rate = 1.0: unknown key; did you mean [optimizer] learning_rate?",
        ],
    ),
    "key outside of any table": (
        "steps = 5",
        ["job.toml:1: steps = 5: unknown key; did you mean [training] steps?"],
    ),
    "inside a list of tables": (
        '[[data.source]]\nkind = "stdlib"\n\n[[data.source]]\nkind = "txet"\npaht = "x"',
        [
            'job.toml:5: data.source.1.kind = "txet": expected "stdlib" | "text"',
            'job.toml:6: data.source.1.paht = "x": unknown key; did you mean path?',
        ],
    ),
    "combination inside a list of tables": (
        '[[data.source]]\nkind = "text"',
        ["job.toml:1: data.source.0.path: a text source needs one"],
    ),
    "wrong types": (
        '[training]\nsteps = 1.5\nloss_scale = "big"\ndtype = "fp8"\n'
        '[optimizer]\nbetas = [0.9]\nfreeze = "a"\nwarmup_steps = 0.5\n[compile]\nenable = "yes"',
        [
            "job.toml:2: training.steps = 1.5: expected integer >= 1",
            'job.toml:4: training.dtype = "fp8": expected "float32" | "bfloat16"',
            'job.toml:3: training.loss_scale = "big": expected number > 0',
            "job.toml:6: optimizer.betas = [0.9]: expected [number, number]",
            'job.toml:7: optimizer.freeze = "a": expected list of string',
            'job.toml:8: optimizer.warmup_steps = 0.5: expected integer | "auto"',
            'job.toml:10: compile.enable = "yes": expected true | false',
        ],
    ),
    "text where a number is meant is not converted": (
        '[training]\nsteps = "5"',
        ['job.toml:2: training.steps = "5": expected integer >= 1'],
    ),
    "item of a list": (
        '[optimizer]\nfreeze = ["a", 3]',
        ["job.toml:2: optimizer.freeze.1 = 3: expected string"],
    ),
    "out of range": ("[training]\nsteps = 0", ["job.toml:2: training.steps = 0: expected integer >= 1"]),
    "empty list": ("[data]\nsource = []", ["job.toml:2: data.source = []: expected list of table length >= 1"]),
    "value where a table is meant": ("training = 3", ["job.toml:1: training = 3: expected table"]),
    "table where a value is meant": (
        "[training.steps]\na = 1",
        ["job.toml:1: training.steps = {a = 1}: expected integer >= 1"],
    ),
    "combination in a table": (
        "[training]\nmicrobatch_size = 3",
        ["job.toml:2: training.microbatch_size = 3: does not divide global_batch_size = 8"],
    ),
    "combination of tables": (
        "[training]\nglobal_batch_size = 12",
        ["job.toml:2: data.streams = 256: not divisible by training.global_batch_size = 12"],
    ),
    "combinations behind other mistakes": (
        '[training]\nmicrobatch_size = 3\n[data]\nstreams = 3\n[optimizer]\nlearning_rate = "x"',
        [
            "job.toml:2: training.microbatch_size = 3: does not divide global_batch_size = 8",
            'job.toml:6: optimizer.learning_rate = "x": expected number > 0',
            "job.toml:4: data.streams = 3: not divisible by training.global_batch_size = 8",
        ],
    ),
    "no combination is blamed on a key that is wrong already": (
        '[training]\nglobal_batch_size = "x"\nmicrobatch_size = 5',
        ['job.toml:2: training.global_batch_size = "x": expected integer >= 1'],
    ),
    "long values are cut": (
        f'[training]\nsteps = "{"x" * 100}"',
        [f'job.toml:2: training.steps = "{"x" * 56}...: expected integer >= 1'],
    ),
    "malformed": (
        "[training]\nsteps = ten\n",
        ["job.toml:2: malformed TOML: invalid value in `steps = ten`; text goes in quotes"],
    ),
    "unclosed string": (
        '[training]\ndtype = "float32\nsteps = 3',
        ["job.toml:2: malformed TOML: illegal character '\\n' in `dtype = \"float32`"],
    ),
    "key twice": (
        "[training]\nsteps = 1\nsteps = 2\n",
        ["job.toml:3: malformed TOML: cannot overwrite a value in `steps = 2`"],
    ),
}


@pytest.mark.parametrize("toml, expected", CASES.values(), ids=CASES)
def test_file(tmp_path: Path, toml: str, expected: list[str]) -> None:
    assert mistakes(tmp_path, toml) == expected


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--training.stesp", "5"], ["--training.stesp 5: unknown flag; did you mean --training.steps?"]),
        (["--steps=5"], ["--steps 5: unknown flag; did you mean --training.steps?"]),
        (["--training.betas", "1"], ["--training.betas 1: unknown flag; did you mean --optimizer.betas?"]),
        (["--training.steps", "ten"], ["--training.steps ten: expected integer >= 1"]),
        (["--training.steps"], ["--training.steps: needs a value"]),
        (["--training.steps", "1", "2"], ["--training.steps 1 2: expected integer >= 1"]),
        (["--training.dtype", "fp8"], ['--training.dtype fp8: expected "float32" | "bfloat16"']),
        (["--compile.enable", "yes"], ["--compile.enable yes: expected true | false"]),
        (["--optimizer.betas", "0.9"], ["--optimizer.betas 0.9: expected [number, number]"]),
        (["--data.source.0.paht", "x"], ["--data.source.0.paht x: unknown flag; did you mean --data.source.0.path?"]),
        (["--data.source.2.kind", "x"], ["--data.source.2.kind x: data.source has fewer items; give those first"]),
        (["steps"], ["steps: no flag takes this word; write --KEY steps, or remove it"]),
        (
            ["--training.microbatch_size", "3"],
            ["training.microbatch_size = 3: does not divide global_batch_size = 8"],
        ),
    ],
    ids=" ".join,
)  # fmt: skip
def test_flags(tmp_path: Path, arguments: list[str], expected: list[str]) -> None:
    assert mistakes(tmp_path, None, *arguments) == expected


def test_file_and_flags_together(tmp_path: Path) -> None:
    assert mistakes(tmp_path, "[training]\nstesp = 1\n", "--optimizer.learning_rate", "x", "--steps", "3") == [
        "--steps 3: unknown flag; did you mean --training.steps?",
        "job.toml:2: training.stesp = 1: unknown key; did you mean steps?",
        "--optimizer.learning_rate x: expected number > 0",
    ]


def test_flags_are_judged_beside_a_malformed_file(tmp_path: Path) -> None:
    lines = mistakes(tmp_path, "[training\n", "--optimizer.learning_rate", "x")
    assert len(lines) == 2
    assert lines[0].startswith("job.toml:1: malformed TOML")
    assert lines[1] == "--optimizer.learning_rate x: expected number > 0"


def test_build_names_the_key_that_holds_the_table() -> None:
    with pytest.raises(UserError) as raised:
        build(Example, {"training": {"steps": 0}, "optimizr": {}}, "config")
    assert str(raised.value).splitlines() == [
        "config.[optimizr]: unknown table; did you mean [optimizer]?",
        "config.training.steps = 0: expected integer >= 1",
    ]
