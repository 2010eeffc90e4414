"""Which method splits rows: what makes the choice change, what is left out of it and why, and what a person reads."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from titan_nemotron.errors import UserError
from titan_nemotron.models.nemotron3.config import Nemotron3Config
from titan_nemotron.models.nemotron3.flavors import FLAVORS
from titan_nemotron.models.nemotron3.model import Nemotron3
from titan_nemotron.parallel.config import ContextMethodConfig
from titan_nemotron.parallel.context.choose import ContextPlan, choose, rates_of
from titan_nemotron.parallel.context.cost import DEVICES, AttentionSize, MambaSize, Rows

LONG = Rows(number=1, length=262_144, degree=8, itemsize=2)


def model_of(config: Nemotron3Config) -> nn.Module:
    with torch.device("meta"):
        return Nemotron3(config)


NANO = model_of(FLAVORS["nano_30b"].model_copy(update={"pattern": "ME*M"}))


def plan(rows: Rows = LONG, model: nn.Module = NANO, **keys: object) -> ContextPlan:
    keys = {"device": "h100"} | keys
    rows = dataclasses.replace(rows, document_length=keys.get("document_length", rows.document_length))
    return choose(model, rows, ContextMethodConfig(**keys), "cpu")  # type: ignore[arg-type]


def methods(**keys: object) -> tuple[str, str]:
    """Of Mamba-2 and of attention."""
    mamba, attention = plan(**keys).choices  # type: ignore[arg-type]
    return mamba.method, attention.method


def test_layers_of_a_kind_and_size_are_one_choice() -> None:
    mamba, attention = plan().choices
    assert mamba.layers == ["layers.0.mixer", "layers.3.mixer"] and attention.layers == ["layers.2.mixer"]
    assert mamba.size == MambaSize(heads=64, head_size=64, groups=8, state_size=128, taps=4)
    assert attention.size == AttentionSize(heads=32, kv_heads=2, key_size=128, value_size=128)
    assert plan().methods == {"layers.0.mixer": "state", "layers.3.mixer": "state", "layers.2.mixer": attention.method}


def test_what_makes_the_choice_change() -> None:
    """A ring receives less and waits longer; states are few bytes a row, and more work a token than exchanged heads."""
    assert methods() == ("state", "ulysses")  # a row of one document: a ring waits almost twice
    assert methods(link_gigabytes=1) == ("state", "ring")  # bytes are dear
    assert methods(document_length=1_000) == ("state", "ring")  # short documents: few bytes, little to wait for
    assert methods(link_gigabytes=1e6, latency_microseconds=1e-6) == ("ulysses", "ulysses")  # operations are dear
    short = Rows(number=1, length=64, degree=8, itemsize=2)
    assert methods(rows=short, link_gigabytes=1, latency_microseconds=1e-6)[0] == "ulysses"  # states outweigh tokens
    assert methods(mamba="ulysses", attention="ring") == ("ulysses", "ring")


def test_a_method_that_heads_do_not_allow_is_left_out() -> None:
    """Three heads do not divide over two ranks: auto takes what is left; a method that is asked for is an error."""
    odd = model_of(
        FLAVORS["debug"].model_copy(update={"mamba_num_heads": 3, "n_groups": 1, "num_attention_heads": 3, "pattern": "M*"})
        .model_copy(update={"num_key_value_heads": 1})
    )  # fmt: skip
    rows = Rows(number=1, length=64, degree=2, itemsize=4)
    found = plan(rows=rows, model=odd)
    for choice, left, heads in zip(
        found.choices, ("state", "ring"), ("3 heads in 1 groups", "3 query heads on 1 key/value heads")
    ):
        assert choice.method == left
        assert choice.reasons == {"ulysses": f"ulysses spreads {heads}; possible: 1, 3"}
    assert sum("impossible: ulysses spreads 3" in line for line in found.describe()) == 2
    for kind in ("mamba", "attention"):
        with pytest.raises(UserError) as error:
            plan(rows=rows, model=odd, **{kind: "ulysses"})
        assert f'parallel.context_method.{kind} = "ulysses": with parallel.context = 2: layers.' in str(error.value)
        assert str(error.value).endswith("possible: 1, 3")


@settings(max_examples=50)
@given(
    st.integers(1, 8),
    st.integers(6, 18).map(lambda power: 2**power),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from([0, 64, 5_000]),
    st.sampled_from(sorted(DEVICES)),
)
def test_nothing_possible_costs_less(number: int, length: int, degree: int, documents: int, device: str) -> None:
    found = plan(rows=Rows(number, length, degree, 2, documents), device=device)
    for choice in found.choices:
        seconds = {m: cost.seconds(found.rates) for m, cost in choice.costs.items() if m not in choice.reasons}
        assert seconds[choice.method] == min(seconds.values())


def test_rates_are_the_devices_or_given() -> None:
    assert rates_of(ContextMethodConfig(), "cpu") == ("gloo", DEVICES["gloo"])
    assert rates_of(ContextMethodConfig(device="gb200"), "cpu") == ("gb200", DEVICES["gb200"])
    given = ContextMethodConfig(device="h200", link_gigabytes=50, latency_microseconds=5)
    assert rates_of(given, "cuda") == ("h200", (50e9, 989e12, pytest.approx(5e-6)))


def test_what_a_person_reads() -> None:
    """The table fits 80 columns, marks one method a kind, and its numbers are those of the costs."""
    found = plan(document_length=1_000)
    header, columns, *table, legend = found.describe()
    assert header == (
        "context: parts of 32,768 of 262,144 tokens, documents of 1,000 tokens; h100: 450 GB/s, 989 TFLOP/s, 20 us"
    )
    assert max(map(len, [columns, *table, legend])) <= 80
    assert [line.split()[:2] for line in table if line[2] != " "] == [["2", "mamba"], ["1", "attention"]]
    taken = [line[17:].split() for line in table if "*" in line]
    assert [line[0] for line in taken] == ["state", "ring"]
    for line, choice in zip(taken, found.choices):
        cost = choice.costs[choice.method]
        numbers = [f"{cost.received / 1e6:,.3f}", f"{cost.received * cost.returned / 1e6:,.3f}"]
        numbers += [f"{cost.flops / 1e9:,.3f}", f"{cost.waiting:.2f}x", f"{cost.seconds(found.rates) * 1e3:,.3f}"]
        assert line[2:] == numbers
