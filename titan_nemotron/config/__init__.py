"""Configuration: TOML files and flags to validated tables. Knows no table; each package owns its own in its config.py."""

from titan_nemotron.config.document import json_schema, reference_markdown, to_toml
from titan_nemotron.config.load import build, load, split
from titan_nemotron.config.table import POSITIONAL, KeysOf, Table

__all__ = ["POSITIONAL", "KeysOf", "Table", "build", "json_schema", "load", "reference_markdown", "split", "to_toml"]
