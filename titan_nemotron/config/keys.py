"""Walking over the keys of a table: what there is, of which type, and which key was probably meant."""

import copy
import difflib
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from titan_nemotron.config.table import KeysOf, Table

Path = tuple[str | int, ...]  # ("data", "source", 0, "path"); written data.source.0.path


def dotted(path: Path) -> str:
    """a.b.c, as flags and messages name a key."""
    return ".".join(str(part) for part in path)


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, None left out: int | None -> (int,)."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(inner for member in get_args(annotation) if member is not type(None) for inner in members(member))
    return (annotation,)


def is_table(annotation: Any) -> bool:
    """Whether an annotation is a class of Table."""
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
    """The type of a key, from its field or itself."""
    return found.annotation if isinstance(found, FieldInfo) else found


def item_table(annotation: Any) -> type[Table] | None:
    """The table T of a list[T], None for every other type."""
    for member in members(annotation):
        if get_origin(member) is list and is_table(get_args(member)[0]):
            return get_args(member)[0]
    return None


def inner_table(annotation: Any) -> type[Table] | None:
    """The table that an annotation is or may be; None where it is none."""
    return next((member for member in members(annotation) if is_table(member)), None)


def leaves(table: type[Table], prefix: Path = (), free: bool = False) -> Iterator[tuple[Path, FieldInfo]]:
    """Every key that takes a value, in order; a list of tables is entered once, as its item 0.

    free: also the keys that a free table usually has (KeysOf), which means importing the class that says so.
    """
    for name, field in table.model_fields.items():
        inner, item = inner_table(field.annotation), item_table(field.annotation)
        if inner:
            yield from leaves(inner, (*prefix, name), free)
        elif item:
            yield from leaves(item, (*prefix, name, 0), free)
        else:
            yield (*prefix, name), field
            if free and (usual := usual_keys(field)):
                yield from (((*prefix, name, key), inner_field) for key, inner_field in usual.items())


def usual_keys(field: FieldInfo) -> dict[str, FieldInfo] | None:
    """The keys that a free table (KeysOf) usually has, without defaults: those are not the free table's to say."""
    for item in field.metadata:
        if isinstance(item, KeysOf):
            return {name: without_default(key) for name, key in item.table().model_fields.items()}
    return None


def without_default(field: FieldInfo) -> FieldInfo:
    """A copy of the field that has to be given."""
    plain = copy.copy(field)
    plain.default, plain.default_factory = None, None
    return plain


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The type as a person says it: integer >= 1, "linear" | "cosine", list of number."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(member, metadata) for member in arguments if member is not type(None))
    if origin is Literal:
        text = " | ".join(map(toml, arguments))
    elif origin is list:
        text = f"list of {type_text(arguments[0])}"
    elif origin is tuple:
        text = "[" + ", ".join("..." if item is ... else type_text(item) for item in arguments) + "]"
    elif origin is dict or annotation is dict:
        text = "table" if not arguments or arguments[1] is Any else f"table of {type_text(arguments[1])}"
    elif is_table(annotation):
        text = "table"
    else:
        text = {bool: "true | false", int: "integer", float: "number", Any: "any value"}.get(annotation, "string")
    bounds = bounds_text(metadata)
    return f"{text} {bounds}" if bounds else text


def bounds_text(metadata: Sequence[Any]) -> str:
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
    flat = [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]
    found = ((form, getattr(item, name, None)) for item in flat for name, form in forms.items())
    return ", ".join(form.format(limit) for form, limit in found if limit is not None)


def toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True, exclude_unset=True)
    if isinstance(value, bool | str):
        return tomli_w.dumps({"key": value}).removeprefix("key = ").rstrip("\n")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_bare(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return str(value)


def _bare(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def default_of(field: FieldInfo) -> Any:
    """The default as a plain value; PydanticUndefined for a required key."""
    if field.default is not PydanticUndefined or field.default_factory is None:
        return field.default
    return field.default_factory()  # type: ignore[call-arg]


def nearest(table: type[Table], path: Path) -> str | None:
    """The key that was probably meant by an unknown one, as a dotted path.

    In this order: the same name in another table, a similar name in the same table or one that holds
    the other, a similar path anywhere.
    """
    known = [dotted(found) for found, _ in leaves(table)]
    name, parent = str(path[-1]), lookup(table, path[:-1])
    same_name = [key for key in known if key.split(".")[-1] == name.replace("-", "_")]
    if same_name:
        return max(same_name, key=lambda key: difflib.SequenceMatcher(None, key, dotted(path)).ratio())
    around = next((member for member in members(annotation_of(parent)) if is_table(member)), None)
    if around:
        similar = difflib.get_close_matches(name, around.model_fields, n=1, cutoff=0.6)
        similar = similar or [key for key in around.model_fields if len(key) > 3 and (key in name or name in key)]
        if similar:
            return dotted((*path[:-1], max(similar, key=len)))
    similar = difflib.get_close_matches(name, {key.split(".")[-1] for key in known}, n=1, cutoff=0.75)
    if similar:
        return nearest(table, (*path[:-1], similar[0]))
    return next(iter(difflib.get_close_matches(dotted(path), known, n=1, cutoff=0.75)), None)
