"""Loading machinery for configuration; it knows no table. Each package owns its tables in its own config.py."""

from titan_nemotron.config.table import Table

__all__ = ["Table"]
