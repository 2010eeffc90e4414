"""`titan-nemotron train`: the same as `python -m titan_nemotron.train`."""

import sys

from titan_nemotron.train.__main__ import main


def run(arguments: list[str]) -> None:
    """What `python -m titan_nemotron.train` does."""
    status = main(arguments, "titan-nemotron train")
    if status:
        sys.exit(status)
