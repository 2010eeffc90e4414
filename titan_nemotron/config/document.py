"""What a table looks like from outside: as TOML, as a JSON schema for editors, as the reference page."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from titan_nemotron.config import keys
from titan_nemotron.config.table import Table


def to_toml(table: Table) -> str:
    """Every key with its value; `load` of this text gives an equal table. None, a default always, is left out."""
    return tomli_w.dumps(_plain(table.model_dump(exclude_none=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def json_schema(table: type[Table]) -> dict[str, Any]:
    """JSON schema (2020-12) of the TOML file, `base` included, for editors that complete and check."""
    schema = table.model_json_schema()
    base = {"type": "string", "description": "A TOML file to inherit from, relative to this one."}
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_one_line(schema)}


def _one_line(schema: Any) -> Any:
    """The schema with each description, which may be a string of several lines in the source, on one."""
    if isinstance(schema, list):
        return [_one_line(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    described = schema.get("description")
    plain = {key: _one_line(item) for key, item in schema.items()}
    return plain | {"description": " ".join(described.split())} if isinstance(described, str) else plain


def reference_markdown(table: type[Table]) -> str:
    """A Markdown section for each TOML table: its sentence, then key, type, default and description of each key."""
    return "\n".join(_sections(table, ()))


def _sections(table: type[Table], path: keys.Path) -> Iterator[str]:
    """The rows of a table's own keys, then a section for each table inside it."""
    subtables: dict[str, type[Table] | dict[str, FieldInfo]] = {}
    for name, field in table.model_fields.items():
        inner = keys.inner_table(field.annotation) or keys.item_table(field.annotation) or keys.usual_keys(field)
        if inner:
            subtables[name] = inner
    own = {name: field for name, field in table.model_fields.items() if name not in subtables}
    yield from _rows(own)
    for name, inner in subtables.items():
        field, inside = table.model_fields[name], (*path, name)
        title = f"[[{keys.dotted(inside)}]]" if keys.item_table(field.annotation) else f"[{keys.dotted(inside)}]"
        yield from ["", f"{'#' * (len(inside) + 1)} `{title}`", "", field.description or ""]
        yield from _rows(inner) if isinstance(inner, dict) else _sections(inner, inside)


def _rows(fields: dict[str, FieldInfo]) -> Iterator[str]:
    if fields:
        yield from ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        default = keys.default_of(field)
        shown = "required" if default is PydanticUndefined else "" if default is None else f"`{keys.toml(default)}`"
        cells = [f"`{name}`", keys.type_text(field.annotation, field.metadata), shown, field.description or ""]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
