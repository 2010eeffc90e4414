"""Best-fit packing in one pass with a pool of rows: how full the rows are and how fast it plans, against three others.

python benchmarks/packing.py [--documents 200000] [--pool 1000] [--window 1000] [--repeats 3]

Compared with first-fit-decreasing over the whole set, which has to see all of it first; TRL's best-fit-decreasing
(`pip install trl`; a map over batches of 1,000 documents, of which it also copies the tokens); and documents put one behind
the other, a new row where one does not fit. Documents longer than a row are left out for all. Ours includes the hash of each
document's prompt, which here is its first quarter. One core; times are the best of the repeats, TRL's of one.
"""

import argparse
import ast
import importlib.util
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from titan_nemotron.data.hashing import prompt_key
from titan_nemotron.data.packing import BestFitPacker

Set = tuple[str, list[np.ndarray], int]  # name, tokens of each document, tokens of a row


def lognormal(mean: float, deviation: float, length: int, num_documents: int) -> Set:
    random = np.random.default_rng(0)
    lengths = np.ceil(random.lognormal(mean, deviation, num_documents)).astype(int)
    lengths = lengths[lengths <= length]
    stream = random.integers(0, 100_000, int(lengths.sum()), dtype=np.int32)
    return f"lognormal({mean:g}, {deviation:g})", np.split(stream, np.cumsum(lengths)[:-1]), length


def definitions(length: int) -> Set:
    """The functions and classes of Python's standard library and of what is installed, a byte a token."""
    documents = []
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(folder).rglob("*.py")):
            try:
                text = path.read_text()
                nodes = ast.parse(text).body
            except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
                continue
            lines = text.splitlines(keepends=True)
            for node in nodes:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    code = "".join(lines[node.lineno - 1 : node.end_lineno]).encode()
                    if 0 < len(code) <= length:
                        documents.append(np.frombuffer(code, np.uint8).astype(np.int32))
            if len(documents) > 100_000:
                break
    return "Python definitions, in bytes", documents, length


def ours(documents: list[np.ndarray], length: int, pool: int, window: int) -> int:
    packer = BestFitPacker(length, pool=pool, window=window)
    num_rows = 0
    for number, tokens in enumerate(documents):
        num_rows += len(packer.add(number, len(tokens), prompt_key(tokens[: -(-len(tokens) // 4)])))
    return num_rows + len(packer.flush())


def one_behind_the_other(documents: list[np.ndarray], length: int) -> int:
    num_rows, left = 0, 0
    for tokens in documents:
        if len(tokens) > left:
            num_rows, left = num_rows + 1, length
        left -= len(tokens)
    return num_rows


def first_fit_decreasing(documents: list[np.ndarray], length: int) -> int:
    """Longest first, each into the first row with room, by a tree of the free tokens of all rows."""
    size = 1 << len(documents).bit_length()
    free = [length] * (2 * size)  # of node n, the most among the rows below it
    num_rows = 0
    for need in sorted((len(tokens) for tokens in documents), reverse=True):
        node = 1
        while node < size:
            node = 2 * node if free[2 * node] >= need else 2 * node + 1
        num_rows = max(num_rows, node - size + 1)
        free[node] -= need
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return num_rows


def trl_rows(documents: list[np.ndarray], length: int) -> int:
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    disable_caching()
    return len(pack_dataset(Dataset.from_dict({"input_ids": documents}), length, "bfd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--pool", type=int, default=1000)
    parser.add_argument("--window", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    runs: dict[str, tuple[Callable[[list[np.ndarray], int], int], int]] = {
        f"ours, pool of {arguments.pool:,}": (
            lambda *given: ours(*given, arguments.pool, arguments.window),
            arguments.repeats,
        ),
        "first-fit-decreasing, all": (first_fit_decreasing, 1),
        "one behind the other": (one_behind_the_other, arguments.repeats),
    }
    if importlib.util.find_spec("trl"):
        runs["TRL, best-fit-decreasing"] = (trl_rows, 1)
    else:
        print("TRL is not installed: pip install trl")
    sets = (
        lognormal(6, 1, 8192, arguments.documents),
        lognormal(7, 0.8, 4096, arguments.documents),
        definitions(8192),
    )
    for name, documents, length in sets:
        total = sum(map(len, documents))
        print(f"\n{name}, rows of {length:,}: {len(documents):,} documents of {total / len(documents):,.0f} tokens")
        speeds = {}
        for method, (run, repeats) in runs.items():
            best = float("inf")
            for _ in range(repeats):
                start = time.perf_counter()
                num_rows = run(documents, length)
                best = min(best, time.perf_counter() - start)
            speeds[method] = len(documents) / best
            print(f"  {method:26s} {total / (num_rows * length):8.2%} full  {speeds[method]:12,.0f} documents a second")
        first, *others = speeds
        print("  times as fast as " + ", ".join(f"{other}: {speeds[first] / speeds[other]:.1f}" for other in others))


if __name__ == "__main__":
    main()
