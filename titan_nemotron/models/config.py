"""The `[model]` table."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from titan_nemotron.config import KeysOf, Table, build
from titan_nemotron.errors import UserError


class ModelConfig(Table):
    """What is trained: a family, one of its named sizes, and what differs from it."""

    family: str = Field(
        "nemotron3",
        description="Model family: nemotron3, or the import path of a package that exports FAMILY.",
    )
    flavor: str = Field("debug", description="Named size of the family to start from.")
    config: Annotated[dict[str, Any], KeysOf("titan_nemotron.models.nemotron3.config:Nemotron3Config")] = Field(
        {}, description="Keys of the family's configuration that differ from the flavor."
    )

    def resolved(self) -> Any:
        """The family's configuration: the flavor with the overrides of `config`. Raises UserError."""
        # The family brings torch with it; whoever only looks at tables does not wait for that.
        from titan_nemotron.models.family import load_family

        family = load_family(self.family)
        if self.flavor not in family.flavors:
            known = ", ".join(family.flavors)
            raise UserError(f'flavor = "{self.flavor}": {self.family} has no such flavor; known: {known}')
        return build(family.config, {**family.flavors[self.flavor].model_dump(), **self.config}, "config")

    def mistakes(self) -> Iterator[str]:
        self.resolved()
        return iter(())
