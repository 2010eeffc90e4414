"""Every case of the fixtures, found by folder and dispatched by its family and kind."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from tests.parity import nemotron3
from tests.parity.case import Case
from tests.support import fixtures_root
from titan_nemotron.ops.ssd import chunked

CHECKS: dict[str, dict[str, Callable[[Case], None]]] = {"nemotron3": nemotron3.CHECKS}
FOLDERS = sorted(meta.parent for meta in fixtures_root().rglob("meta.json"))


def test_there_are_cases() -> None:
    assert FOLDERS, f"no folder with a meta.json under {fixtures_root()}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(fixtures_root())))
def test_case(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    family, kind = meta.get("family"), meta.get("kind")
    check = CHECKS.get(family, {}).get(kind)
    assert check is not None, f"{folder}: nothing here checks family {family!r}, kind {kind!r}"
    case = Case(folder, meta)
    with mock.patch.object(chunked, "CHUNK", 8):  # the cases' rows are short: let the scan cross chunks
        check(case)
    case.assert_all_read()
