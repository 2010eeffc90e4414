"""From a TOML file and flags to a validated table, or to one line for every mistake."""

import copy
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import to_json

from titan_nemotron.config import files, flags, keys, mistakes
from titan_nemotron.config.files import Origins, Tree
from titan_nemotron.config.keys import Path
from titan_nemotron.config.table import Table
from titan_nemotron.errors import UserError

AnyTable = TypeVar("AnyTable", bound=Table)
ROUNDS = 5  # validations before we stop looking for mistakes behind mistakes


def load(
    table: type[AnyTable], file: str | FilePath | None, arguments: Sequence[str] = (), prog: str | None = None
) -> AnyTable:
    """Read a TOML file with its bases, lay the flags over it, validate.

    Raises UserError with one line for each mistake of the file and the flags together. `--help` prints and exits.
    """
    lines: list[str] = []
    tree: Tree = {}
    origins: Origins = {}
    given, rest = flags.read(table, arguments, prog or FilePath(sys.argv[0]).name)
    unreadable = False
    if file is not None:
        try:
            tree, origins = files.read(file)
        except UserError as error:
            lines, unreadable = str(error).splitlines(), True
    lines += _lay_over(table, tree, origins, given, rest)
    value, found = _validate(table, tree, origins)
    if unreadable:  # what the flags say can still be judged
        found = [(path, line) for path, line in found if isinstance(origins.get(path), files.Words)]
    lines += [line for _, line in found]
    if value is None or lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return value


def split(
    options: type[AnyTable], table: type[Table], arguments: Sequence[str], prog: str
) -> tuple[AnyTable, list[str]]:
    """For a command that takes options of its own beside the flags of a table: the options, and the other arguments.

    `--help` prints the keys of both and exits.
    """
    both = type(options.__name__, (options, table), {"__doc__": options.__doc__})
    given, rest = flags.read(both, arguments, prog)
    own = [flag for flag in given if flag.path[0] in options.model_fields]
    rest = [word for flag in given if flag not in own for word in flag.as_words()] + rest
    tree: Tree = {}
    origins: Origins = {}
    lines = _lay_over(options, tree, origins, own, [])
    value, found = _validate(options, tree, origins)
    if value is None or lines:
        raise UserError("\n".join([*lines, *(line for _, line in found)]))
    return value, rest


def build(table: type[AnyTable], values: Tree, name: str) -> AnyTable:
    """A table from plain values, as strict as if it stood in a file. `name` is the key that holds it: a UserError has
    one line for each mistake, "name.key = value: ..."."""
    value, found = _validate(table, copy.deepcopy(values), {})
    if value is None:
        raise UserError("\n".join(f"{name}.{line}" for _, line in found))
    return value


def _lay_over(
    table: type[Table], tree: Tree, origins: Origins, given: Sequence[flags.Flag], rest: Sequence[str]
) -> list[str]:
    """Put the flags into the tree; a line for each that has no place there."""
    unknown, alone = flags.unknown(rest)
    lines = [f"{word}: no flag takes this word; write --KEY {word}, or remove it" for word in alone]
    for flag in unknown:
        lines.append(mistakes.unknown_key(table, flag.path, None, {flag.path: flag.origin(table)}))
    for flag in given:
        origin = flag.origin(table)
        if not flag.words and flags.needs_a_word(table, flag.path):
            lines.append(f"{origin}: needs a value")
            origins[flag.path] = origin
            continue
        beyond = [
            keys.dotted(flag.path[:place])
            for place, part in enumerate(flag.path)
            if isinstance(part, int) and part > len(files.at(tree, flag.path[:place]) or [])
        ]
        if beyond:
            lines.append(f"{origin}: {beyond[0]} has fewer items; give those first")
            continue
        files.put(tree, flag.path, flags.value_of(keys.lookup(table, flag.path), flag.words))
        origins[flag.path] = origin
    return lines


def _validate(table: type[AnyTable], tree: Tree, origins: Origins) -> tuple[AnyTable | None, list[tuple[Path, str]]]:
    """The validated table, or its mistakes.

    pydantic looks at combinations only where every single value is right. So what is wrong is taken out and the rest
    looked at again, leaving out what is then said about the keys that were taken out.
    """
    found = list(_unknown_tables(table, table, tree, origins, ()))
    value: AnyTable | None = None
    wrong: set[str] = set()
    for _ in range(ROUNDS):
        try:
            value = table.model_validate_json(to_json(tree, inf_nan_mode="constants"), strict=True)
            break
        except ValidationError as error:
            errors = error.errors(include_url=False)
        new = [
            (path, line)
            for path, line in mistakes.lines(table, errors, origins)
            if not any(re.search(rf"\b{re.escape(name)}\b", line, re.IGNORECASE) for name in wrong)
        ]
        found += new
        removed = [files.take_out(tree, path) for path, _ in new]
        wrong |= {str(path[-1]) for path, _ in new if path}
        if not any(removed):
            break
    return (None if found else value), found


def _unknown_tables(
    table: type[Table], root: type[Table], tree: Tree, origins: Origins, prefix: Path
) -> Iterator[tuple[Path, str]]:
    """Lines for the tables that do not exist. What stands in one is judged as if it stood in the table that was
    probably meant; where none is alike, by whether another table has a key of that name."""
    for name, content in list(tree.items()):
        path = (*prefix, name)
        if name in table.model_fields:
            inner = keys.inner_table(table.model_fields[name].annotation)
            if inner and isinstance(content, dict):
                yield from _unknown_tables(inner, root, content, origins, path)
        elif isinstance(content, dict):
            del tree[name]
            subtables = [key for key, field in table.model_fields.items() if keys.inner_table(field.annotation)]
            meant = next(iter(difflib.get_close_matches(name, subtables, n=1)), None)
            hint = (
                f"did you mean [{keys.dotted((*prefix, meant))}]?" if meant else f"known tables: {', '.join(subtables)}"
            )
            yield path, f"{mistakes.where(path, origins)}[{keys.dotted(path)}]: unknown table; {hint}"
            if meant:
                new_path = (*prefix, meant)
                moved = {
                    new_path + old[len(path) :]: origin for old, origin in origins.items() if old[: len(path)] == path
                }
                files.merge(tree, {meant: content}, origins, moved, prefix)
                yield from _unknown_tables(table, root, {meant: tree[meant]}, origins, prefix)
                continue
            for key, value in content.items():
                if keys.nearest(root, (*path, key)):
                    yield (*path, key), mistakes.unknown_key(root, (*path, key), value, origins)
