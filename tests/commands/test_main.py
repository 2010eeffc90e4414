"""The console script: what it says, and its exit statuses."""

import subprocess
import sys

import pytest

from tests.support import REPOSITORY
from titan_nemotron import commands
from titan_nemotron.errors import UserError


@pytest.fixture
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for name, sentence in commands.COMMANDS.items():
        assert f"  {name:<9}  {sentence}" in text.splitlines()


def test_without_a_command_the_help_comes_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == 2
    assert "usage: titan-nemotron COMMAND" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("titan-nemotron ")


@pytest.mark.parametrize("name", commands.COMMANDS)
@pytest.mark.usefixtures("eighty_columns")
def test_help_of_each_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        commands.main([name, "--help"])
    assert stopped.value.code == 0
    captured = capsys.readouterr()
    assert f"usage: titan-nemotron {name}" in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    assert not captured.err


MISTAKES = {
    "trian": ["trian: unknown command; did you mean train?"],
    "x": ["x: unknown command; use one of train, convert, generate, score, tokenize, tokenizer, config"],
    "score --checkpont a --input b": [
        "--checkpont a: unknown flag; did you mean --checkpoint?",
        "--checkpoint: is missing; Hugging Face directory, or one of our checkpoints.",
        "--output: is missing; File to write.",
    ],
    "convert a": ["DESTINATION: is missing; Directory to write; it must not exist."],
    "convert a b c": ["c: no flag takes this word; write --KEY c, or remove it"],
    "generate --checkpoint /nowhere --prompt a": [
        "--checkpoint /nowhere: no such directory; give a Hugging Face directory or a checkpoint"
    ],
    "generate --checkpoint a --prompt b --top-p 2": ["--top_p 2: expected number > 0, <= 1"],
    "score --checkpoint a --input /nowhere --output b": [
        "--input /nowhere: no such file; give a safetensors file with input_ids"
    ],
    "tokenizer teach --output a": ['ACTION teach: expected "train"'],
    "tokenize --output tests": ["--output tests: exists already; remove it or name another directory"],
    "tokenize --output a --data.streems 4": ["--data.streems 4: unknown flag; did you mean --data.streams?"],
    "config --training.stepz 4": ["--training.stepz 4: unknown flag; did you mean --training.steps?"],
    "config nothing.toml": ["nothing.toml: no such file; give the path of a TOML file"],
    "train --config nothing.toml": ["nothing.toml: no such file; give the path of a TOML file"],
}


@pytest.mark.parametrize("arguments, expected", MISTAKES.items(), ids=MISTAKES)
def test_mistakes(
    arguments: str, expected: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    try:
        status = commands.main(arguments.split())
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [f"error: {line}" for line in expected]
    assert not captured.out


def test_ctrl_c_and_a_closed_pipe_are_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "dispatch", interrupted)
    assert commands.main(["train"]) == 130
    assert capsys.readouterr().err == "\nstopped\n"


def test_several_mistakes_are_one_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(name: str, arguments: list[str]) -> int:
        raise UserError("a: 1\nb: 2")

    monkeypatch.setattr(commands, "dispatch", wrong)
    assert commands.main(["train"]) == 2
    assert capsys.readouterr().err == "error: a: 1\nerror: b: 2\n"


def test_output_into_a_closed_pipe() -> None:
    code = "import sys; from titan_nemotron.commands import main; sys.exit(main(['config']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate()
    assert (process.returncode, error) == (0, "")


def test_tables_are_read_without_torch() -> None:
    """Whoever has a mistake in a flag does not wait for the import of torch."""
    code = "import sys, titan_nemotron.train.job, titan_nemotron.commands.tokenize; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True) == "False\n"
