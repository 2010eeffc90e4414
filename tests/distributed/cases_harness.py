"""Cases that go wrong on purpose; test_harness.py launches them, nothing else does."""

import os
import sys

from tests.distributed.harness import Context, case


@case(0)
def one_rank_raises(context: Context) -> None:
    if context.rank == 1:
        raise ValueError("seven is not eight")


@case(0)
def one_rank_dies(context: Context) -> None:
    if context.rank == 0:
        print("last words", file=sys.stderr, flush=True)
        os._exit(9)


@case(0)
def all_ranks_leave(context: Context) -> None:
    os._exit(0)


@case(0)
def nothing_wrong(context: Context) -> None:
    assert context.world_size == 2
