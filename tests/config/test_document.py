"""A table as TOML, as JSON schema, as reference: nothing is lost, nothing is missing."""

import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.config.tables import Compile, Data, Example, Model, Optimizer, Source, Training
from titan_nemotron.config import Table, json_schema, load, reference_markdown, to_toml
from titan_nemotron.config.keys import dotted, leaves, toml

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text(st.sampled_from("ab_-.é "), min_size=1, max_size=4)
positive = st.floats(min_value=0, exclude_min=True, allow_nan=False)
value: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
examples = st.builds(
    Example,
    training=st.builds(
        Training,
        steps=st.integers(1, 2**63 - 1),
        global_batch_size=st.sampled_from([4, 8, 64]),
        microbatch_size=st.sampled_from([1, 2, 4]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        loss_scale=positive,
    ),
    optimizer=st.builds(
        Optimizer,
        learning_rate=positive,
        betas=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
        freeze=st.lists(text, max_size=3),
        warmup_steps=st.just("auto") | st.integers(-5, 5),
    ),
    compile=st.builds(Compile, enable=st.booleans()),
    data=st.builds(
        Data,
        streams=st.sampled_from([64, 128]),
        source=st.lists(
            st.builds(Source, path=st.none() | text) | st.builds(Source, kind=st.just("text"), path=text),
            min_size=1,
            max_size=3,
        ),
    ),
    model=st.builds(
        Model, config=st.dictionaries(names, value, max_size=3), mixers=st.dictionaries(names, text, max_size=2)
    ),
)


@settings(max_examples=150)
@given(examples)
def test_round_trip(job: Example) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "job.toml"
        file.write_text(to_toml(job), encoding="utf-8", newline="")
        again = load(Example, file, (), "test")
    assert again == job
    assert to_toml(again) == to_toml(job)


@settings(max_examples=50)
@given(examples)
def test_flags_say_what_a_file_says(job: Example) -> None:
    """Every key of a job given as a flag, its value as TOML writes it, gives the same job."""
    arguments = []
    for path, _ in leaves(Example):
        if path[:2] == ("data", "source"):
            continue
        found: Any = job
        for part in path:
            found = getattr(found, str(part))
        arguments.append(f"--{dotted(path)}={found if isinstance(found, str) else toml(found)}")
    sources = [f"--data.source={toml(job.data.source)}"]
    assert load(Example, None, arguments + sources, "test") == job


@settings(max_examples=30)
@given(examples)
def test_schema_accepts_what_load_accepts(job: Example) -> None:
    jsonschema.validate(job.model_dump(mode="json", exclude_none=True), json_schema(Example))


@pytest.mark.parametrize(
    "wrong",
    [
        {"training": {"stesp": 1}},
        {"training": {"steps": "x"}},
        {"training": {"steps": 0}},
        {"trainig": {}},
        {"data": {"source": [{"kind": "x"}]}},
        {"base": 3},
        {"model": {"config": {"hidden_size": "x"}}},
    ],
    ids=str,
)
def test_schema_refuses_what_load_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json_schema(Example))


def test_schema_knows_base_and_free_keys() -> None:
    jsonschema.validate({"base": "x.toml", "model": {"config": {"hidden_size": 3, "other": "x"}}}, json_schema(Example))


def test_schema_describes_every_key_on_one_line() -> None:
    properties = json_schema(Example)["$defs"]["Training"]["properties"]
    assert properties["dtype"]["description"] == "Type that layers compute in."
    assert properties["dtype"]["enum"] == ["float32", "bfloat16"]


def test_reference_names_every_key() -> None:
    reference = reference_markdown(Example)
    for line in [
        "## `[training]`",
        "How long, and on how much.",
        "| `steps` | integer >= 1 | `10` | Optimizer steps. |",
        '| `dtype` | "float32" \\| "bfloat16" | `"float32"` | Type that layers compute in. |',
        "### `[[data.source]]`",
        "| `path` | string |  | Files. |",
        "### `[model.config]`",
        "| `hidden_size` | integer |  | Model size. |",
        "| `mixers` | table of string | `{}` | Letter to class. |",
    ]:
        assert line in reference.splitlines()


def test_every_key_needs_a_sentence() -> None:
    with pytest.raises(AssertionError, match="Bare.key needs a description"):

        class Bare(Table):
            key: int = 3


def test_tables_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Training().steps = 3  # type: ignore[misc]
