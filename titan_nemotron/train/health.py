"""What ends a run before its last step, and with which exit status.

0    the run is done
2    a mistake of the user's; the message says which
3    steps in a row were not finite; the checkpoint is from before them
4    a rank stood still or was lost in a collective operation
130  Ctrl-C, 143  SIGTERM: a checkpoint was written and the run resumes from it (a second Ctrl-C ends without one)
"""

import os
import signal
import sys
import time
from types import FrameType, TracebackType

MISTAKE, NOT_FINITE, HUNG = 2, 3, 4
SAME_KEYSTROKE = 1.0  # seconds; a terminal and a launcher may both pass on one Ctrl-C


class Stopped(Exception):
    """The run ends early, on all ranks together, with this message and exit status; what is to be saved is saved."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class StopSignal:
    """While entered, SIGTERM and Ctrl-C are only noted, in `number`; a second Ctrl-C ends the process at once."""

    def __init__(self, announce: bool) -> None:
        self.number = 0
        self._announce, self._noted_at = announce, 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number == 0:
            self.number, self._noted_at = number, now
            if self._announce:
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                # Not print: the interrupted code may be in the middle of one.
                os.write(
                    sys.stderr.fileno(), f"\n{name}: saving after this step; Ctrl-C (again) ends at once\n".encode()
                )
        elif number == signal.SIGINT and now - self._noted_at > SAME_KEYSTROKE:
            os._exit(128 + signal.SIGINT)
