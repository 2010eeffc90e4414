"""Reading TOML files that inherit from one another, remembering where each value came from."""

import difflib
import re
import tomllib
from pathlib import Path as FilePath
from typing import Any

from titan_nemotron.config.keys import Path
from titan_nemotron.errors import UserError

Tree = dict[str, Any]


class Words(str):
    """Where a value comes from, when that is the command line: the flag with its words."""


Origins = dict[Path, str]  # path of a value or a table -> "file:line", or Words

HEADER = re.compile(r"\s*\[{1,2}\s*([\w.\"'\s-]+?)\s*\]{1,2}\s*(#.*)?$")
KEY = re.compile(r"\s*([\w.\"'\s-]+?)\s*=")


def read(file: str | FilePath) -> tuple[Tree, Origins]:
    """A TOML file with everything that its `base` files give it, nearest file first.

    Tables merge key by key, lists and values replace. Raises UserError for a missing or malformed file and for a
    circle of bases; the message names the file and, where there is one, the line.
    """
    return _read(FilePath(file), ())


def _read(file: FilePath, below: tuple[FilePath, ...]) -> tuple[Tree, Origins]:
    if file.resolve() in [child.resolve() for child in below]:
        raise UserError(
            f"{below[-1]}: base goes in a circle: {' -> '.join(map(str, (*below, file)))}; remove one of them"
        )
    tree, lines = _parse(file, below)
    origins: Origins = {path: f"{file}:{line}" for path, line in lines.items()}
    base = tree.pop("base", None)
    if base is None:
        return tree, origins
    if not isinstance(base, str):
        raise UserError(
            f"{origins[('base',)]}: base = {base!r}: expected the path of one TOML file, relative to this file"
        )
    merged, merged_origins = _read(file.parent / base, (*below, file))
    merge(merged, tree, merged_origins, origins)
    return merged, merged_origins


def _parse(file: FilePath, below: tuple[FilePath, ...]) -> tuple[Tree, dict[Path, int]]:
    name = f'{below[-1]}: base = "{file}"' if below else str(file)
    try:
        text = file.read_bytes().decode()
        tree = tomllib.loads(text)
    except FileNotFoundError:
        neighbours = [other.name for other in file.parent.glob("*.toml") if other not in below]
        similar = difflib.get_close_matches(file.name, neighbours, n=1)
        hint = f"; did you mean {file.with_name(similar[0])}?" if similar else "; give the path of a TOML file"
        raise UserError(f"{name}: no such file{hint}") from None
    except OSError as error:
        raise UserError(f"{name}: {(error.strerror or str(error)).lower()}; give a TOML file") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{file}:{line}: not UTF-8; save the file as UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(_malformed(file, text, str(error))) from None
    return tree, _lines(text, tree)


def _malformed(file: FilePath, text: str, message: str) -> str:
    """file:line: what the parser says, with the line itself, since a bare "Invalid value" helps nobody."""
    found = re.search(r" \(at line (\d+), column \d+\)| \(at end of document\)", message)
    lines = text.splitlines()
    number = int(found[1]) if found and found[1] else len(lines)
    if found:
        message = message.replace(found[0], "")
    what = message[:1].lower() + message[1:]
    shown = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    hint = "; text goes in quotes" if what == "invalid value" else ""
    return f"{file}:{number}: malformed TOML: {what} in `{shown}`{hint}"


def _lines(text: str, tree: Tree) -> dict[Path, int]:
    """The line of each table and key, found by looking for it: tomllib does not say. A wrong find is harmless."""
    lines: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}  # [[list]] -> items seen
    for number, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            path: Path = ()
            names = _names(header[1])
            for position, name in enumerate(names, 1):
                path = (*path, name)
                if isinstance(at(tree, path), list):
                    if position == len(names) and line.lstrip().startswith("[["):
                        counts[path] = counts.get(path, -1) + 1
                    path = (*path, counts.get(path, 0))
            if at(tree, path) is not None:
                table = path
                lines.setdefault(path, number)
        elif key := KEY.match(line):
            path = (*table, *_names(key[1]))
            if at(tree, path) is not None:
                lines.setdefault(path, number)
    return lines


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def at(tree: Any, path: Path) -> Any:
    """What stands at a path, None where nothing does."""
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def merge(tree: Tree, other: Tree, origins: Origins, other_origins: Origins, prefix: Path = ()) -> None:
    """Lay `other` over `tree`, in place, with its origins."""
    for name, value in other.items():
        path = (*prefix, name)
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            merge(tree[name], value, origins, other_origins, path)
            continue
        tree[name] = value
        for old in [old for old in origins if old[: len(path)] == path]:
            del origins[old]
        origins.update({new: line for new, line in other_origins.items() if new[: len(path)] == path})


def put(tree: Any, path: Path, value: Any) -> None:
    """Set what stands at a path, making the tables and the next item of a list on the way."""
    for place, part in enumerate(path):
        last = place == len(path) - 1
        inner: Any = value if last else [] if isinstance(path[place + 1], int) else {}
        if isinstance(tree, list) and part == len(tree):
            tree.append(inner)
        elif last or not isinstance(at(tree, (part,)), type(inner)):
            tree[part] = inner
        tree = tree[part]


def take_out(tree: Any, path: Path) -> bool:
    """Remove what stands at a path; False where nothing does."""
    around = at(tree, path[:-1])
    if not path or not isinstance(around, dict) or path[-1] not in around:
        return False
    del around[path[-1]]
    return True
