"""Score entries of the busiest rank over the mean, on random packed rows: a ring of consecutive parts against Ulysses.

python benchmarks/context_balance.py [--length 262144] [--ranks 8]

An entry is a query and a key that see each other. "a ring waits" counts step by step, where all ranks wait for the busiest.
With Ulysses every rank has all positions of as many heads as the others.
"""

import argparse

from titan_nemotron.parallel.context.cost import Rows, rank_imbalance, ring_waiting, sampled_entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=262_144)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    print(f"rows of {arguments.length:,} over {arguments.ranks} ranks, the mean of 8 random rows")
    print(
        f"{'mean length of documents':24s} {'ring':>8s} {'a ring waits':>13s} {'Ulysses':>8s} {'ring / Ulysses':>15s}"
    )
    part = arguments.length // arguments.ranks
    for mean in (part // 32, part // 8, part // 2, part, 4 * part, 0):
        sampled = list(sampled_entries(Rows(1, arguments.length, arguments.ranks, 2, mean)))
        ring, waits = (sum(map(measure, sampled)) / len(sampled) for measure in (rank_imbalance, ring_waiting))
        ulysses = 1.0
        print(
            f"{f'{mean:,}' if mean else 'one document':24s} {ring:8.2f} {waits:13.2f} {ulysses:8.2f} {waits / ulysses:15.2f}"
        )


if __name__ == "__main__":
    main()
