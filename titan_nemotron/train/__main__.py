"""`torchrun --nproc-per-node N -m titan_nemotron.train --config FILE [--table.key value]`; `python -m` is one process.

Exit statuses are those of train/health.py; a mistake of the user's is told once, on one line each, by all ranks together.
"""

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from pydantic import Field

from titan_nemotron.config import Table, load, split
from titan_nemotron.errors import UserError
from titan_nemotron.train.health import MISTAKE, Stopped
from titan_nemotron.train.job import Job


class TrainOptions(Table):
    """Train a model as one TOML file says."""

    config: str | None = Field(None, description="TOML file of the job; without one, the defaults.")
    dry_run: bool = Field(
        False, description="Check the job, build the model without memory, say what would be trained, and exit."
    )


def main(arguments: Sequence[str] | None = None, prog: str = "python -m titan_nemotron.train") -> int:
    """Train as the arguments say; returns the exit status."""
    rank_zero = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        options, rest = split(TrainOptions, Job, list(sys.argv[1:] if arguments is None else arguments), prog)
        job = load(Job, options.config, rest, prog)
        if job.parallel.world and not options.dry_run:
            raise UserError(f"parallel.world = {job.parallel.world}: is for a --dry-run; leave it out to train")
        job.check_ranks(job.parallel.world or int(os.environ.get("WORLD_SIZE", "1")))
    except UserError as error:
        if rank_zero:
            print(as_errors(error), file=sys.stderr)
        else:
            time.sleep(2)  # torchrun ends all ranks when one has ended; the one that speaks comes first
        return MISTAKE
    return run(job, options.dry_run)


def run(job: Job, dry_run: bool = False) -> int:
    """Train, or with `dry_run` print the plan; returns the exit status."""
    # Slow to import; whoever has a mistake in a file does not wait for it.
    from titan_nemotron.train import plan
    from titan_nemotron.train.loop import train
    from titan_nemotron.train.metrics import fitted
    from titan_nemotron.train.ranks import PlannedRanks, Ranks

    ranks = None
    try:
        ranks = (PlannedRanks if job.parallel.world else Ranks)(job.job.device, job.parallel)
        if dry_run:
            lines = plan.dry_run(job, ranks)
            if ranks.rank == 0:
                print(fitted("\n".join(lines)))
        else:
            train(job, ranks)
        ranks.close()
        return 0
    except Stopped as stopped:
        text, status = str(stopped), stopped.status
    except UserError as error:
        text, status = as_errors(error), MISTAKE
    except Exception as error:
        if ranks is not None:
            ranks.end_if_lost(error)
        raise
    if ranks is None:
        print(text, file=sys.stderr)
    else:
        ranks.say_once(text)
    return status


def as_errors(error: UserError) -> str:
    """The message as it is printed, `error:` before each line."""
    return "\n".join(f"error: {line}" for line in str(error).splitlines())


def enter(arguments: Sequence[str] | None = None) -> NoReturn:
    """`main` for a process of its own: ends it with the exit status."""
    try:
        status = main(arguments)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # Threads that write a checkpoint or wait for another rank must not keep a failed process alive.
        os._exit(status)
    sys.exit(0)


if __name__ == "__main__":
    enter()
