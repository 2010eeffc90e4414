"""torchrun for people: launch.py torchrun-arguments...

The same as torchrun with three differences: the exit status is that of the first process that failed; a mistake of the
user (exit status 2, its message already printed) is not buried under error tables; a signal is passed on once, and the
trainer then has time to save.
"""

import logging
import os
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

USER_MISTAKE = 2
SAVE_SECONDS = 600  # how long a trainer that was told to stop may take to save


def main() -> int:
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
    logging.disable(logging.CRITICAL)  # in this process alone: the ranks have their own
    try:
        run.run(run.parse_args(sys.argv[1:]))
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code != USER_MISTAKE:
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            print(f"Rank {rank} ended with {how}; the others were stopped.", file=sys.stderr)
        return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main())
