"""Best-fit packing and the shuffle of finished rows."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from titan_nemotron.data.packing import BestFitPacker, Placed, Shuffle

LENGTH = 20
# (tokens, key) of documents: few keys, so that rows refuse documents
documents = st.lists(st.tuples(st.integers(1, LENGTH), st.integers(0, 5)), max_size=120)


def pack(packer: BestFitPacker, given: list[tuple[int, int]], start: int = 0) -> list[Placed]:
    return [row for n, (size, key) in enumerate(given[start:], start) for row in packer.add(n, size, key)]


def naive(given: list[tuple[int, int]], pool: int, window: int, tolerance: int) -> list[list[int]]:
    """The rule, word by word, on lists."""
    windows = (range(first, min(first + window, len(given))) for first in range(0, len(given), window))
    order = [number for numbers in windows for number in sorted(numbers, key=lambda n: -given[n][0])]
    finished: list[list[int]] = []
    rows: list[list[int]] = []  # by age

    def free(row: list[int]) -> int:
        return LENGTH - sum(given[n][0] for n in row)

    for number in order:
        size, key = given[number]
        fitting = [row for row in rows if free(row) >= size and all(given[n][1] != key for n in row)]
        if not fitting:
            if len(rows) == pool:
                fullest = min(rows, key=free)
                rows.remove(fullest)
                finished.append(fullest)
            fitting = [[]]
            rows.append(fitting[0])
        row = min(fitting, key=free)
        row.append(number)
        if free(row) <= tolerance:
            rows.remove(row)
            finished.append(row)
    return finished + sorted(rows, key=free)


@given(documents, st.integers(1, 6), st.integers(1, 9), st.integers(0, 4))
@settings(max_examples=300)
def test_each_document_once_by_the_rule(given: list[tuple[int, int]], pool: int, window: int, tolerance: int) -> None:
    packer = BestFitPacker(LENGTH, pool=pool, window=window, tolerance=tolerance)
    rows = pack(packer, given) + packer.flush()
    assert [row.documents for row in rows] == naive(given, pool, window, tolerance)
    assert sorted(n for row in rows for n in row.documents) == list(range(len(given)))
    for row in rows:
        assert row.num_tokens == sum(given[n][0] for n in row.documents) <= LENGTH
        assert len({given[n][1] for n in row.documents}) == len(row.documents)
    assert packer.flush() == []


@given(documents, st.integers(1, 6), st.integers(1, 9), st.data())
def test_goes_on_from_its_state(given: list[tuple[int, int]], pool: int, window: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(given)))
    whole = BestFitPacker(LENGTH, pool=pool, window=window)
    expected = pack(whole, given) + whole.flush()
    first = BestFitPacker(LENGTH, pool=pool, window=window)
    rows = pack(first, given[:stop])
    assert len(first.state()["rows"]) <= pool
    assert len(first.state()["waiting"]) < window
    second = BestFitPacker(LENGTH, pool=pool, window=window, state=json.loads(json.dumps(first.state())))
    assert rows + pack(second, given, stop) + second.flush() == expected


@given(st.integers(0, 30), st.integers(0, 8), st.integers(0, 2**64 - 1), st.data())
def test_shuffle_gives_every_row_once(num_rows: int, size: int, seed: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, num_rows))

    def run(restart: bool) -> list[list[int]]:
        shuffle, out = Shuffle(size, seed), []
        for number in range(num_rows):
            if restart and number == stop:
                shuffle = Shuffle(size, seed, json.loads(json.dumps(shuffle.state())))
            out.append(shuffle.push([number]))
            assert len(shuffle.state()["held"]) <= size
        return [row for row in out if row is not None] + shuffle.flush()

    once = run(restart=False)
    assert sorted(once) == [[number] for number in range(num_rows)]
    assert run(restart=True) == once
    if size == 0:
        assert once == sorted(once)


def test_shuffle_depends_on_its_seed() -> None:
    orders = set()
    for seed in range(5):
        shuffle = Shuffle(10, seed)
        out = [row for number in range(40) if (row := shuffle.push([number]))] + shuffle.flush()
        orders.add(tuple(row[0] for row in out))
    assert len(orders) == 5
