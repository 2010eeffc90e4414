"""The base of every configuration table."""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """One table of a TOML file. Unknown keys are errors; every field carries a sentence as its description."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, use_attribute_docstrings=True)
