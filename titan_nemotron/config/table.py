"""The base class of every configuration table."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from titan_nemotron.errors import UserError

POSITIONAL = (
    "positional"  # Annotated[str, POSITIONAL]: an argument of a command that is given by its place, not by a flag
)


@dataclass(frozen=True)
class KeysOf:
    """Annotated[dict[str, Any], KeysOf("module:Class")]: a free table that usually has the keys of another table class.

    Only help, reference and JSON schema use it, and only then is the class imported.
    """

    path: str

    def table(self) -> "type[Table]":
        """The class, imported now."""
        module, _, name = self.path.partition(":")
        found: type[Table] = getattr(importlib.import_module(module), name)
        return found

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        properties = self.table().model_json_schema()["properties"]
        for described in properties.values():
            described.pop("default", None)
        return {**handler(core_schema), "properties": properties}


class Table(BaseModel):
    """One TOML table: pydantic fields, each with a type, a default and a sentence (the description, or a string below the
    field; for a table inside a table its own docstring serves).

    Unknown keys are errors, defaults are validated, and an instance does not change. TOML has no null, so a key may be
    None only where None is its default. What single fields cannot say goes into `mistakes`.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, use_attribute_docstrings=True)

    def mistakes(self) -> Iterator[str]:
        """The impossible combinations of this table's (valid) values, one line each: "key = value: what to do".

        A line starts with the key, named as inside this table; the file, its line and the table's name are put before it.
        A UserError raised here counts as the lines of its message.
        """
        return iter(())

    @model_validator(mode="after")
    def _report_mistakes(self) -> "Table":
        lines: list[str] = []
        try:
            lines.extend(self.mistakes())
        except UserError as error:
            lines.extend(str(error).splitlines())
        if lines:
            raise ValueError("\n".join(lines))
        return self

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, field in cls.model_fields.items():
            if field.description is None and isinstance(field.annotation, type) and issubclass(field.annotation, Table):
                field.description = field.annotation.__doc__
            assert field.description, f"{cls.__name__}.{name} needs a description"
            field.description = " ".join(field.description.split())
