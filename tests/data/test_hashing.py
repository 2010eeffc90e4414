import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_nemotron.data.hashing import MASK, held_out, mix, mix_array, permuted, record_keys


@given(st.integers(1, 300), st.integers(0, MASK))
@settings(max_examples=60)
def test_permuted_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_differ_and_spread() -> None:
    """Over many keys each place is hit about equally often (expected 100 of 800, six standard deviations are 56)."""
    counts = np.zeros((8, 8), dtype=int)
    for key in range(800):
        for index in range(8):
            counts[index, permuted(index, 8, mix(key))] += 1
    assert abs(counts - 100).max() < 56


def test_mix_of_arrays_equals_mix_of_integers() -> None:
    values = [0, 1, 2, 12345, MASK, MASK - 1, 1 << 63]
    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == [mix(value) for value in values]


def test_held_out_fraction() -> None:
    keys = record_keys(7, 0, 100_000)
    assert abs(held_out(keys, 0.05).mean() - 0.05) < 0.004  # six standard deviations
    assert not held_out(keys, 0.0).any()
    assert np.array_equal(record_keys(7, 500, 600), keys[500:600])
