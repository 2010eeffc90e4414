"""Flags: `--table.key value` over the keys of a table. tyro reads them and prints the help.

tyro is given one text-only mirror of the table, so that every mistake of a command line is reported at once and in the
same words as a mistake in a file: types are checked by pydantic, after the file and the flags are laid together.
"""

import dataclasses
import inspect
import re
import shutil
import textwrap
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_json

from titan_nemotron.config import keys
from titan_nemotron.config.files import Words
from titan_nemotron.config.keys import Path
from titan_nemotron.config.table import POSITIONAL, Table

ABSENT = ("\0",)  # the words of a flag that was not given


@dataclasses.dataclass(frozen=True)
class Flag:
    """`--path words`; a word that stands alone where the command takes one has that argument's path."""

    path: Path
    words: tuple[str, ...]

    def origin(self, table: type[Table]) -> Words:
        """The flag as it was given, for messages."""
        return Words(" ".join([name_of(table, self.path), *self.words]))

    def as_words(self) -> list[str]:
        """The flag as a command line would repeat it."""
        name = f"--{keys.dotted(self.path)}"
        return [f"{name}={self.words[0]}"] if len(self.words) == 1 else [name, *self.words]


def read(table: type[Table], arguments: Sequence[str], prog: str) -> tuple[list[Flag], list[str]]:
    """The flags of this table in `arguments`, and the words that belong to no key of it.

    `--a.b 1`, `--a.b=1`, `--a-b` for `--a_b`, several words for a list, none for a boolean; the last of two wins.
    `--help` prints every key and exits.
    """
    if not arguments:
        return [], []
    wanted = [name for name, field in table.model_fields.items() if POSITIONAL in field.metadata]
    first_flag = next((place for place, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    alone, arguments = list(arguments[:first_flag]), arguments[first_flag:]
    asked_for_help = asks_for_help(arguments)
    given = [path for word in arguments if word.startswith("--") and (path := _path(table, word))]
    mirror, paths = _mirror(table, given, asked_for_help)
    if asked_for_help:  # not tyro's `description`, which it does not wrap
        print(description(table), end="\n\n")
    parsed: Any
    parsed, rest = tyro.cli(
        mirror,
        args=arguments,
        prog=prog,
        description="",
        return_unknown_args=True,
        use_underscores=True,
    )
    flags = []
    for (group, name), path in paths.items():
        words = getattr(getattr(parsed, group) if group else parsed, name)
        if words == ABSENT:
            continue
        takes = _takes(keys.annotation_of(keys.lookup(table, path)), words)
        if wanted and len(words) > takes:  # convert --dtype bfloat16 SOURCE DESTINATION
            words, alone = words[:takes], [*alone, *words[takes:]]
        flags.append(Flag(path, words))
    flags += [Flag((name,), (word,)) for name, word in zip(wanted, alone, strict=False)]
    flags.sort(key=lambda flag: len(flag.path))  # a whole table first, then what changes in it
    return flags, [*alone[len(wanted) :], *rest]


def name_of(table: type[Table], path: Path) -> str:
    """--a.b, or A for an argument that is given by its place."""
    found = keys.lookup(table, path)
    if isinstance(found, FieldInfo) and POSITIONAL in found.metadata:
        return str(path[-1]).upper()
    return f"--{keys.dotted(path)}"


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether -h or --help is among the words."""
    return "-h" in arguments or "--help" in arguments


def unknown(words: Sequence[str]) -> tuple[list[Flag], list[str]]:
    """Words that no key claimed: flags nobody knows with their words, and words that stand alone."""
    flags: list[Flag] = []
    alone = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags.append(Flag(tuple(name.split(".")), (value,) if equals else ()))
        elif flags and not word.startswith("-"):
            flags[-1] = Flag(flags[-1].path, (*flags[-1].words, word))
        else:
            alone.append(word)
    return flags, alone


def needs_a_word(table: type[Table], path: Path) -> bool:
    """False for a boolean and for a list, which the bare flag sets to true and to empty, and for a key of a free table,
    which may be a boolean."""
    types = keys.members(keys.annotation_of(keys.lookup(table, path)))
    return not any(member in (bool, Any) or get_origin(member) in (list, tuple) for member in types)


def description(table: type[Table]) -> str:
    """The paragraphs of a table's docstring, wrapped to the terminal."""
    width = min(shutil.get_terminal_size().columns, 80)
    paragraphs = inspect.cleandoc(table.__doc__ or "").split("\n\n")
    return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in paragraphs)


def _path(table: type[Table], word: str) -> Path | None:
    """The key that a flag names, free keys and items of lists included; None when there is no such key."""
    path: Path = ()
    found: Any = table
    for part in word[2:].partition("=")[0].split("."):
        annotation = keys.annotation_of(found)
        is_item = part.isdigit() and any(get_origin(member) in (list, tuple) for member in keys.members(annotation))
        # hidden-size is hidden_size, but the key "-" of a free table stays what it is
        name: str | int = int(part) if is_item else re.sub(r"(?<=\w)-(?=\w)", "_", part)
        found = keys.step(annotation, name)
        path = (*path, name)
        if found is None or not part:
            return None
    return path


def _takes(annotation: Any, words: tuple[str, ...]) -> int:
    """How many of the words a key of this type can use."""
    types = keys.members(annotation)
    if any(get_origin(member) in (list, tuple) for member in types):
        return len(words)
    if bool in types and words and words[0].lower() not in ("true", "false"):
        return 0
    return 1


def value_of(found: FieldInfo | Any, words: tuple[str, ...]) -> Any:
    """The words of a flag as a TOML value of the key's type; what does not fit stays text, for pydantic to refuse."""
    annotation = keys.annotation_of(found)
    if not words and (annotation is Any or bool in keys.members(annotation)):
        return True
    sequence = next((member for member in keys.members(annotation) if get_origin(member) in (list, tuple)), None)
    whole = _toml(words[0]) if len(words) == 1 else None  # the list in one word, as TOML writes it
    if sequence and not isinstance(whole, list):
        item = get_args(sequence)[0] if get_args(sequence) else str
        return [value_of(item, (word,)) for word in words]
    if len(words) != 1:
        return [_toml(word) for word in words] if annotation in (Any, object) else list(words)
    text = words[0]
    if text.lower() == "none" and type(None) in get_args(annotation):
        return None
    parsed = _toml(text)
    order = (parsed, text) if annotation in (Any, object) else (text, parsed)
    return next((value for value in order if _fits(annotation, value)), parsed)


def _toml(text: str) -> Any:
    lower = text.lower()
    if lower in ("true", "false"):
        return lower == "true"
    if "\n" in text:  # more than one value
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)  # also what TOML does not take: .5, 1.
    except ValueError:
        return text


def _fits(annotation: Any, value: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_json(to_json(value, inf_nan_mode="constants"), strict=True)
    except ValidationError:
        return False
    return True


def _mirror(
    table: type[Table], given: Sequence[Path], asked_for_help: bool
) -> tuple[type, dict[tuple[str, str], Path]]:
    """What tyro reads: a dataclass with one group for each table, one text field for each key.

    Keys that only the command line names (of free tables, of later items of a list) come from `given`. The second
    result says which key each (group, field) holds; the group "" is the dataclass itself.
    """
    groups: dict[Path, list[tuple[Path, FieldInfo]]] = {(): []}
    for path, field in keys.leaves(table, free=asked_for_help):
        groups.setdefault(path[:1] if len(path) > 1 else (), [])  # a table comes before its subtables
        groups.setdefault(path[:-1], []).append((path, field))
    listed = {path for path, _ in keys.leaves(table)}
    for path in dict.fromkeys(given):
        if path not in listed:
            found = keys.lookup(table, path)
            groups.setdefault(path[:-1], []).append(
                (path, found if isinstance(found, FieldInfo) else Field(description=""))
            )

    paths: dict[tuple[str, str], Path] = {}
    top: list[Any] = []
    for number, (prefix, members) in enumerate(groups.items()):
        group = f"group{number}" if prefix else ""
        fields: list[Any] = []
        for place, (path, field) in enumerate(members):
            positional = POSITIONAL in field.metadata
            if positional and not asked_for_help:
                continue
            paths[group, f"key{place}"] = path
            fields.append(_leaf(f"key{place}", path, field, positional))
        if prefix:
            found = keys.lookup(table, prefix)
            help_text = (found.description if isinstance(found, FieldInfo) else "") or ""
            dataclass = dataclasses.make_dataclass(group, fields)
            name = tyro.conf.arg(name=keys.dotted(prefix), help=help_text)
            top.append((group, Annotated[dataclass, name], dataclasses.field(default_factory=dataclass)))
        else:
            top = fields + top
    return dataclasses.make_dataclass("Arguments", top), paths


def _leaf(name: str, path: Path, field: FieldInfo, positional: bool) -> tuple[str, Any, tuple[str, ...]]:
    key = str(path[-1])
    default, bounds = keys.default_of(field), keys.bounds_text(field.metadata)
    hints = [bounds] if bounds else []
    if default is PydanticUndefined:
        hints.append("required")
    elif default not in (None, {}):
        hints.append(f"default: {keys.toml(default)}")
    if any(member is dict or get_origin(member) is dict for member in keys.members(field.annotation)):
        hints.append(f"or --{keys.dotted(path)}.KEY VALUE")
    options = tyro.conf.arg(
        name=key,
        metavar=key.upper() if positional else _metavar(field.annotation),
        help=field.description or "",
        help_behavior_hint=f"({'; '.join(hints)})" if hints else "",
    )
    kind = Annotated[tuple[str, ...], options]
    return name, Annotated[kind, tyro.conf.Positional] if positional else kind, ABSENT


def _metavar(annotation: Any) -> str:
    texts: list[str] = []
    for member in keys.members(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if origin is Literal:
            texts.append("{" + ",".join(map(str, arguments)) + "}")
        elif origin in (list, tuple):
            texts.append(f"{_metavar(arguments[0])} ...")
        elif origin is dict or member is dict:
            texts.append("TABLE")
        else:
            texts.append({bool: "[true|false]", int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(member, "VALUE"))
    return "|".join(texts)
