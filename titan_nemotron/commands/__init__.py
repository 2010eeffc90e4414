"""The `titan-nemotron` console script. Each command is a module here with `run(arguments)`, imported when it is called."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from titan_nemotron.errors import UserError

COMMANDS = {
    "train": "train a model as a TOML file says",
    "convert": "a checkpoint of ours to a Hugging Face directory, or back",
    "generate": "complete a prompt with a trained model",
    "score": "logits and log-probabilities of given tokens",
    "tokenize": "write documents as memory-mapped token shards",
    "tokenizer": "train a tokenizer on documents",
    "config": "check a job's TOML file and print it resolved",
}


def usage() -> str:
    """What `titan-nemotron --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {sentence}" for name, sentence in COMMANDS.items()]
    return "\n".join(
        [
            "usage: titan-nemotron COMMAND [--help] ...",
            "",
            "commands:",
            *lines,
            "",
            "titan-nemotron COMMAND --help tells more about one of them.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 for a mistake of the user's, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(usage())
            return 0 if words else 2
        return dispatch(words[0], words[1:])
    except UserError as error:
        print_errors(error)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `titan-nemotron ... | head` is no mistake
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def dispatch(name: str, arguments: list[str]) -> int:
    """Run the command and return its exit status. Raises UserError for a name that is none."""
    if name == "--version":
        from titan_nemotron import __version__

        print(f"titan-nemotron {__version__}")
        return 0
    if name not in COMMANDS:
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UserError(
            f"{name}: unknown command; "
            + (f"did you mean {similar[0]}?" if similar else f"use one of {', '.join(COMMANDS)}")
        )
    importlib.import_module(f"titan_nemotron.commands.{name}").run(arguments)
    return 0


def print_errors(error: UserError) -> None:
    """Each line of a user's mistakes on stderr."""
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
