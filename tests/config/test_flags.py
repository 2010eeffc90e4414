"""Every way to write a flag, and the help."""

from typing import Annotated, Any

import pytest
from pydantic import Field

from tests.config.tables import Example
from titan_nemotron.config import POSITIONAL, Table, load, split
from titan_nemotron.errors import UserError


@pytest.mark.parametrize(
    "arguments, key, value",
    [
        ("--training.steps 5", "training.steps", 5),
        ("--training.steps=5", "training.steps", 5),
        ("--training.steps 5 --training.steps 6", "training.steps", 6),
        ("--training.loss_scale .5", "training.loss_scale", 0.5),
        ("--training.loss-scale 1e-3", "training.loss_scale", 1e-3),
        ("--training.loss_scale 2", "training.loss_scale", 2.0),
        ("--training.loss_scale inf", "training.loss_scale", float("inf")),
        ("--training.dtype bfloat16", "training.dtype", "bfloat16"),
        ("--compile.enable", "compile.enable", True),
        ("--compile.enable true", "compile.enable", True),
        ("--compile.enable True", "compile.enable", True),
        ("--compile.enable=false", "compile.enable", False),
        ("--data.streams -1 --training.global_batch_size 1 --training.microbatch_size 1", "data.streams", -1),
        ("--optimizer.warmup_steps 3", "optimizer.warmup_steps", 3),
        ("--optimizer.warmup_steps auto", "optimizer.warmup_steps", "auto"),
        ("--optimizer.betas 0.8 1", "optimizer.betas", (0.8, 1.0)),
        ("--optimizer.betas [0.8,0.9]", "optimizer.betas", (0.8, 0.9)),
        ("--optimizer.freeze a b", "optimizer.freeze", ["a", "b"]),
        ('--optimizer.freeze ["a","b"]', "optimizer.freeze", ["a", "b"]),
        ("--optimizer.freeze 3 true", "optimizer.freeze", ["3", "true"]),
        ("--optimizer.freeze --compile.enable", "optimizer.freeze", []),
        ("--optimizer.freeze=--x", "optimizer.freeze", ["--x"]),
        ("--optimizer.freeze [", "optimizer.freeze", ["["]),
        ("--model.config.hidden-size 64", "model.config", {"hidden_size": 64}),
        ("--model.config.a.b [1,2]", "model.config", {"a": {"b": [1, 2]}}),
        ("--model.config.limit 0.0 0.1", "model.config", {"limit": [0.0, 0.1]}),
        ("--model.config.limit 0 inf --compile.enable", "model.config", {"limit": [0, float("inf")]}),
        ("--model.config.bias", "model.config", {"bias": True}),
        ("--model.config.bias --compile.enable", "model.config", {"bias": True}),
        ("--model.config.bias false", "model.config", {"bias": False}),
        ("--model.config {a=1}", "model.config", {"a": 1}),
        ("--model.config.pattern MEM*E", "model.config", {"pattern": "MEM*E"}),
        ("--model.mixers.- a:B --model.mixers.X 3", "model.mixers", {"-": "a:B", "X": "3"}),
        ("--model.config.b 2 --model.config {a=1,b=1}", "model.config", {"a": 1, "b": 2}),
        ("--model.config.a 1\nb=2", "model.config", {"a": "1\nb=2"}),
        ("--data.source.0.path x", "data.source.0.path", "x"),
        ("--data.source.0.path 3 --data.source.1.kind stdlib --data.source.1.path none", "data.source.1.path", None),
    ],
    ids=str,
)
def test_value(arguments: str, key: str, value: Any) -> None:
    found: Any = load(Example, None, arguments.split(" "), "test")
    for part in key.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


class Options(Table):
    """What a command takes.

    Second paragraph, which is long enough that it does not fit into one line of eighty columns.
    """

    source: Annotated[str, POSITIONAL] = Field(description="What to read.")
    target: Annotated[str, POSITIONAL] = Field("out", description="What to write.")
    dtypes: list[str] = Field([], description="Types.")
    dry_run: bool = Field(False, description="Only look.")


class Required(Table):
    """A command with a flag that it needs."""

    needed: str = Field(description="What is needed.")


@pytest.mark.parametrize(
    "arguments",
    [
        "a b --dry-run --training.steps 5",
        "--dry-run a b --training.steps 5",
        "--training.steps 5 a b --dry_run",
        "a --dry_run true b --training.steps=5",
    ],
)
def test_options_of_a_command_beside_the_flags_of_a_table(arguments: str) -> None:
    options, rest = split(Options, Example, arguments.split(), "test")
    assert (options.source, options.target, options.dry_run) == ("a", "b", True)
    assert load(Example, None, rest, "test").training.steps == 5


def test_words_too_many_are_a_mistake() -> None:
    _, rest = split(Options, Example, ["a", "b", "c", "--nothing", "3"], "test")
    with pytest.raises(UserError) as raised:
        load(Example, None, rest, "test")
    assert str(raised.value).splitlines() == [
        "c: no flag takes this word; write --KEY c, or remove it",
        "--nothing 3: unknown flag; see --help",
    ]


def test_a_flag_without_its_value_is_one_mistake() -> None:
    with pytest.raises(UserError, match=r"^SOURCE: is missing; What to read.$"):
        load(Options, None, ["--dry_run"], "test")
    with pytest.raises(UserError, match=r"^--needed: needs a value$"):
        load(Required, None, ["--needed"], "test")


def test_missing_arguments_of_a_command() -> None:
    with pytest.raises(UserError, match="^SOURCE: is missing; What to read.$"):
        split(Options, Example, [], "test")


def test_help_shows_every_key_in_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        split(Options, Example, ["--help"], "titan-nemotron example")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.replace("│", " ").split())
    for expected in [
        "What a command takes.",
        "usage: titan-nemotron example",
        "SOURCE What to read. (required)",
        "--dry_run [true|false] Only look. (default: false)",
        "training options",
        "How long, and on how much.",
        "--training.steps INTEGER Optimizer steps. (>= 1; default: 10)",
        '--training.dtype {float32,bfloat16} Type that layers compute in. (default: "float32")',
        "--optimizer.betas NUMBER ... Decay of the moments. (default: [0.9, 0.95])",
        '--optimizer.warmup_steps INTEGER|{auto} Steps to the peak. (default: "auto")',
        "--data.source.0.path TEXT Files.",
        "--model.config TABLE Family keys. (or --model.config.KEY VALUE)",
        "--model.config.hidden_size INTEGER Model size.",
        "--model.mixers TABLE Letter to class. (or --model.mixers.KEY VALUE)",
    ]:
        assert expected in words, expected
