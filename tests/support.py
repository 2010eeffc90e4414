"""Helpers that several folders of tests share."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def fixtures_root() -> Path:
    """The folder in which parity tests look for cases: every folder below it that holds a meta.json.

    The environment variable TITAN_NEMOTRON_FIXTURES replaces tests/fixtures, so that the same tests run on other sets.
    """
    return Path(os.environ.get("TITAN_NEMOTRON_FIXTURES") or REPOSITORY / "tests" / "fixtures").resolve()
