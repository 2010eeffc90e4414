"""Walking over the keys of a table: what there is, of which type, and which key was probably meant."""

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from titan_nemotron.config.table import Table

Path = tuple[str | int, ...]  # ("data", "source", 0, "path"); written data.source.0.path


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, None left out: int | None -> (int,)."""
    if get_origin(annotation) is typing.Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) if member is not type(None) for inner in members(member))
    return (annotation,)


def is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Table)


def step(annotation: Any, part: str | int) -> FieldInfo | Any | None:
    """What stands at `part` inside a value of this type: a field of a table, the type of a list's or dict's items, or None."""
    for member in members(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if is_table(member):
            if part in member.model_fields:
                return member.model_fields[part]
        elif origin in (list, tuple) and (isinstance(part, int) or part.isdigit()):
            return arguments[0]
        elif origin is dict:
            return arguments[1]
        elif member is Any or member is dict:
            return Any
    return None


def lookup(table: Any, path: Path) -> FieldInfo | Any | None:
    """The field (or the type of an item) at a path, None where there is no such key."""
    found: Any = table
    for part in path:
        found = step(annotation_of(found), part)
        if found is None:
            return None
    return found


def annotation_of(found: FieldInfo | Any) -> Any:
    return found.annotation if isinstance(found, FieldInfo) else found


def item_table(annotation: Any) -> type[Table] | None:
    """The table T of a list[T], None for every other type."""
    for member in members(annotation):
        if get_origin(member) is list and is_table(get_args(member)[0]):
            return get_args(member)[0]
    return None


def inner_table(annotation: Any) -> type[Table] | None:
    return next((member for member in members(annotation) if is_table(member)), None)


def leaves(table: type[Table], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """Every key that takes a value, in order; a list of tables is entered once, as its item 0."""
    for name, field in table.model_fields.items():
        inner, item = inner_table(field.annotation), item_table(field.annotation)
        if inner:
            yield from leaves(inner, (*prefix, name))
        elif item:
            yield from leaves(item, (*prefix, name, 0))
        else:
            yield (*prefix, name), field


def type_text(annotation: Any, metadata: typing.Sequence[Any] = ()) -> str:
    """The type as a person says it: integer >= 1, "linear" | "cosine", list of number."""
    texts = []
    for member in members(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if origin is Literal:
            texts.extend(f'"{value}"' if isinstance(value, str) else str(value) for value in arguments)
        elif origin is list:
            texts.append(f"list of {type_text(arguments[0])}")
        elif origin is tuple:
            texts.append("[" + ", ".join("..." if item is ... else type_text(item) for item in arguments) + "]")
        elif origin is dict or member is dict:
            texts.append("table" if not arguments or arguments[1] is Any else f"table of {type_text(arguments[1])}")
        elif is_table(member):
            texts.append("table")
        else:
            texts.append({bool: "true | false", int: "integer", float: "number", str: "string", Any: "any"}.get(member, "string"))
    bounds = bounds_text(metadata)
    return " | ".join(texts) + (f" {bounds}" if bounds else "")


def bounds_text(metadata: typing.Sequence[Any]) -> str:
    """The limits of a number or of a list's length: >= 1, < 2."""
    forms = {
        "gt": "> {:g}",
        "ge": ">= {:g}",
        "lt": "< {:g}",
        "le": "<= {:g}",
        "multiple_of": "a multiple of {:g}",
        "min_length": "length >= {}",
        "max_length": "length <= {}",
        "pattern": "like {}",
    }
    found = ((form, getattr(item, name, None)) for item in metadata for name, form in forms.items())
    return ", ".join(form.format(limit) for form, limit in found if limit is not None)


def toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value)


def default_of(field: FieldInfo) -> Any:
    """The default as a plain value; PydanticUndefined for a required key."""
    if field.default is not PydanticUndefined or field.default_factory is None:
        return field.default
    return field.default_factory()  # type: ignore[call-arg]


def nearest(table: type[Table], path: Path) -> str | None:
    """The key that was probably meant by an unknown one, as a dotted path.

    In this order: the same name in another table, a similar name in the same table, a similar path anywhere.
    """
    known = [dotted(found) for found, _ in leaves(table)]
    name, parent = str(path[-1]), lookup(table, path[:-1])
    same_name = [key for key in known if key.split(".")[-1] == name.replace("-", "_")]
    if same_name:
        return max(same_name, key=lambda key: difflib.SequenceMatcher(None, key, dotted(path)).ratio())
    around = next((member for member in members(annotation_of(parent)) if is_table(member)), None)
    if around:
        similar = difflib.get_close_matches(name, around.model_fields, n=1, cutoff=0.6)
        if similar:
            return dotted((*path[:-1], similar[0]))
    similar = difflib.get_close_matches(name, {key.split(".")[-1] for key in known}, n=1, cutoff=0.75)
    if similar:
        return nearest(table, (*path[:-1], similar[0]))
    return next(iter(difflib.get_close_matches(dotted(path), known, n=1, cutoff=0.75)), None)
