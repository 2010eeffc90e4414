"""The cost model of context parallelism: numbers derived by hand, counting by brute force, and what must grow with what."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_nemotron.parallel.context.cost import (
    DEVICES,
    AttentionSize,
    MambaSize,
    Rows,
    attention_costs,
    mamba_costs,
    packed_lengths,
    rank_imbalance,
    ring_bytes,
    ring_waiting,
    score_entries,
    state_bytes,
    ulysses_bytes,
    ulysses_mix_bytes,
)

LONG = Rows(number=1, length=262_144, degree=8, itemsize=2)
GROUPED = AttentionSize(heads=80, kv_heads=16, key_size=192, value_size=128)
MAMBA = MambaSize(heads=128, head_size=64, groups=8, state_size=128, taps=4)


def test_bytes_derived_by_hand() -> None:
    """80 query heads on 16 of 192 and 128: 5,120 elements of keys and values, 30,720 with queries and outputs."""
    assert ring_bytes(GROUPED, LONG) == 3.5 * 32_768 * 5_120 * 2 == pytest.approx(1.174e9, rel=1e-3)
    assert ulysses_bytes(GROUPED, LONG) == 7 / 8 * 32_768 * 30_720 * 2 == pytest.approx(1.762e9, rel=1e-3)
    assert ring_bytes(GROUPED, LONG) / ulysses_bytes(GROUPED, LONG) == pytest.approx(2 / 3)
    halo, decays = 7 / 8 * 3 * (8_192 + 2_048) * 2, 7 * 128 * 8
    assert state_bytes(MAMBA, LONG) == 7 * 128 * 128 * 64 * 4 + decays + halo == pytest.approx(29.4e6, rel=5e-3)
    assert (
        ulysses_mix_bytes(MAMBA, LONG) == 7 / 8 * 32_768 * (16_384 + 2_048 + 128) * 2 == pytest.approx(1.06e9, rel=5e-3)
    )


def test_heads_that_several_ranks_share_are_copied() -> None:
    few = AttentionSize(heads=32, kv_heads=2, key_size=128, value_size=128)
    assert ulysses_bytes(few, LONG) == 7 / 8 * 32_768 * (32 + 8) * 256 * 2
    assert ring_bytes(few, LONG) == 3.5 * 32_768 * 2 * 256 * 2
    two_groups = dataclasses.replace(MAMBA, groups=2)
    assert ulysses_mix_bytes(two_groups, LONG) == ulysses_mix_bytes(MAMBA, LONG)


def test_one_document_makes_a_ring_wait_almost_twice() -> None:
    """Every step but the first computes a whole square, and the mean rank half of them: (2 P - 1) / P for long parts."""
    for degree in (1, 2, 8):
        entries = score_entries([4_096 * degree], degree)
        assert ring_waiting(entries) == pytest.approx((2 * degree - 1) / degree, rel=1e-3)
        assert rank_imbalance(entries) == pytest.approx((2 * degree - 1) / degree, rel=1e-3)


rows_of_documents = st.tuples(st.integers(1, 5), st.integers(1, 6)).flatmap(
    lambda sizes: st.tuples(
        st.just(sizes[0]), st.lists(st.integers(1, sizes[0] * sizes[1]), min_size=1, max_size=6).map(list)
    )
)


@given(rows_of_documents)
def test_entries_are_pairs_that_see_each_other(drawn: tuple[int, list[int]]) -> None:
    degree, lengths = drawn
    lengths = [*lengths, *([] if sum(lengths) % degree == 0 else [degree - sum(lengths) % degree])]
    ids = [document for document, length in enumerate(lengths) for _ in range(length)]
    part = len(ids) // degree
    expected = [[0] * degree for _ in range(degree)]
    for query in range(len(ids)):
        for key in range(query + 1):
            expected[query // part][key // part] += ids[query] == ids[key]
    entries = score_entries(lengths, degree)
    assert entries == expected
    assert 1 <= rank_imbalance(entries) <= ring_waiting(entries) + 1e-12 <= degree + 1e-12


@given(st.integers(1, 5_000), st.integers(0, 500), st.integers(0, 3))
def test_packed_rows_are_full(length: int, document_length: int, seed: int) -> None:
    lengths = packed_lengths(length, document_length, seed)
    assert sum(lengths) == length and min(lengths) > 0
    assert lengths == packed_lengths(length, document_length, seed)


@given(st.integers(1, 64).map(lambda n: 64 * n), st.sampled_from([2, 4, 8, 16]), st.integers(1, 4))
def test_what_grows_with_what(length: int, degree: int, number: int) -> None:
    rows = Rows(number, length, degree, 2)
    longer, more = (dataclasses.replace(rows, **change) for change in ({"length": 2 * length}, {"degree": 2 * degree}))
    for bytes_of in (ring_bytes, ulysses_bytes):
        assert bytes_of(GROUPED, longer) == pytest.approx(2 * bytes_of(GROUPED, rows))
    assert ulysses_mix_bytes(MAMBA, longer) == pytest.approx(2 * ulysses_mix_bytes(MAMBA, rows))
    assert state_bytes(MAMBA, longer) == state_bytes(MAMBA, rows) < state_bytes(MAMBA, more)
    assert ring_bytes(GROUPED, more) > ring_bytes(GROUPED, rows)  # (P - 1) / P
    wide = dataclasses.replace(GROUPED, kv_heads=80)
    assert ulysses_bytes(wide, more) < ulysses_bytes(wide, rows)  # (P - 1) / P^2
    for costs in (attention_costs(GROUPED, rows), mamba_costs(MAMBA, rows)):
        for cost in costs.values():
            assert cost.waiting >= 1
            assert cost.seconds(DEVICES["gb200"]) <= cost.seconds(DEVICES["h100"]) < cost.seconds(DEVICES["gloo"])
    for method, cost in attention_costs(GROUPED, rows).items():
        assert cost.seconds(DEVICES["h100"]) < attention_costs(GROUPED, longer)[method].seconds(DEVICES["h100"])


def test_short_documents_make_a_ring_wait_less() -> None:
    waits = [
        attention_costs(GROUPED, dataclasses.replace(LONG, document_length=mean))["ring"].waiting
        for mean in (1_000, 60_000, 0)
    ]
    assert 1 < waits[0] < waits[1] < 8 and waits[0] < waits[2] < 2
