"""What pydantic found wrong, as lines a person can act on."""

import re
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from titan_nemotron.config import keys
from titan_nemotron.config.files import Origins, Words
from titan_nemotron.config.flags import name_of
from titan_nemotron.config.keys import Path
from titan_nemotron.config.table import Table

LONGEST_VALUE = 60  # characters of a value shown in a line


def lines(table: type[Table], errors: list[ErrorDetails], origins: Origins) -> list[tuple[Path, str]]:
    """One line for each mistake, with the path it is about, in the order of the keys.

    A key whose type is a union gives pydantic one error for each alternative; they become one line.
    """
    merged: dict[tuple[Path, bool], list[ErrorDetails]] = {}
    for error in errors:
        path = _known_part(table, error)
        if error["type"] == "missing" and error["loc"] in origins:  # a flag without its value, which has a line already
            continue
        merged.setdefault((path, error["type"] == "value_error"), []).append(error)
    found = []
    for (path, _), group in merged.items():
        if group[0]["type"] == "value_error":
            found += [line for error in group for line in _from_validator(table, path, error, origins)]
        else:
            found.append((path, _line(table, path, group, origins)))
    return found


def _known_part(table: type[Table], error: ErrorDetails) -> Path:
    """The part of an error's place that is keys; pydantic puts the tried alternatives of a union behind it."""
    place: Path = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        return place
    if error["type"] == "missing" and isinstance(place[-1], int):  # a list too short for its [number, number]
        place = place[:-1]
    length = len(place)
    while length and keys.lookup(table, place[:length]) is None:
        length -= 1
    return place[:length]


def _line(table: type[Table], path: Path, errors: list[ErrorDetails], origins: Origins) -> str:
    first = errors[0]
    field = keys.lookup(table, path)
    if first["type"] == "missing" and path == first["loc"]:
        assert isinstance(field, FieldInfo)
        if len(path) > 1:
            return f"{where(path, origins)}{keys.dotted(path)}: is missing; {field.description}"
        return f"{name_of(table, path)}: is missing; {field.description}"  # an argument of a command
    if first["type"] == "extra_forbidden":
        return unknown_key(table, path, first["input"], origins)
    about = (
        f"expected {keys.type_text(keys.annotation_of(field), field.metadata if isinstance(field, FieldInfo) else ())}"
    )
    return f"{named(path, first['input'], origins)}: {about}"


def _from_validator(table: type[Table], path: Path, error: ErrorDetails, origins: Origins) -> list[tuple[Path, str]]:
    """The lines of a validator's ValueError. A line that starts with a key of its table gets the whole path."""
    found = keys.lookup(table, path) if path else table
    inside = keys.inner_table(keys.annotation_of(found)) is not None
    results = []
    for line in str(error["ctx"]["error"]).splitlines():
        if not inside:
            results.append((path, f"{named(path, error['input'], origins)}: {line}"))
            continue
        start = re.match(r"[\w.-]+", line)
        own: Path = tuple(int(part) if part.isdigit() else part for part in start[0].split(".")) if start else ()
        if own and keys.lookup(table, (*path, *own)) is not None:
            key, text = (*path, *own), ".".join([*map(str, path), line])
        elif own[:-1] and keys.lookup(table, own) is not None:  # the line names its key from the root
            key, text = own, line
        else:
            key, text = path, f"{keys.dotted(path)}: {line}" if path else line
        # The key may stand at its default; then another one that the line names is the one to change.
        mentioned = [tuple(word.split(".")) for word in re.findall(r"[\w.-]+", line)]
        places = [key, *mentioned, *((*around, *name) for around in (key[:-1], path) for name in mentioned)]
        results.append((key, where(next((place for place in places if place in origins), key), origins) + text))
    return results


def unknown_key(table: type[Table], path: Path, value: Any, origins: Origins) -> str:
    """One line for a key that no table has."""
    origin = _origin(path, origins)
    is_flag = isinstance(origin, Words)
    meant = keys.nearest(table, path)
    if meant:
        same_table = meant.rpartition(".")[0] == keys.dotted(path[:-1])
        shown = f"--{meant}" if is_flag else meant.rpartition(".")[2] if same_table else _in_file(meant)
        hint = f"did you mean {shown}?"
    elif is_flag:
        hint = "see --help"
    else:
        around = keys.lookup(table, path[:-1]) if path[:-1] else table
        inner = keys.inner_table(keys.annotation_of(around))
        hint = f"known here: {', '.join(inner.model_fields)}" if inner else "remove it"
    if isinstance(value, dict) and not is_flag:
        return f"{where(path, origins)}[{keys.dotted(path)}]: unknown table; {hint}"
    return f"{named(path, value, origins)}: unknown {'flag' if is_flag else 'key'}; {hint}"


def _in_file(path: str) -> str:
    """data.source.0.path as [[data.source]] path, optimizer.learning_rate as [optimizer] learning_rate."""
    parent, _, name = path.rpartition(".")
    head, _, last = parent.rpartition(".")
    if not parent:
        return name
    return f"[[{head}]] {name}" if last.isdigit() else f"[{parent}] {name}"


def named(path: Path, value: Any, origins: Origins) -> str:
    """file:line: key = value, or --key value."""
    origin = _origin(path, origins)
    if isinstance(origin, Words):
        return origin
    text = keys.toml(value)
    if len(text) > LONGEST_VALUE:
        text = text[: LONGEST_VALUE - 3] + "..."
    return f"{where(path, origins)}{keys.dotted(path)} = {text}"


def where(path: Path, origins: Origins) -> str:
    """The file and line that a value comes from, with ": " behind it; empty for a flag and for a default."""
    origin = _origin(path, origins)
    return f"{origin}: " if origin and not isinstance(origin, Words) else ""


def _origin(path: Path, origins: Origins) -> str | None:
    """Where a value comes from: its own place, or that of the table around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None
