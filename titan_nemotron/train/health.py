"""What ends a run before its last step, and with which exit status.

0    the run is done
2    a mistake of the user's; the message says which
3    steps in a row were not finite; the checkpoint is from before them
4    a rank stood still or was lost in a collective operation
130  Ctrl-C, 143  SIGTERM: a checkpoint was written and the run resumes from it (a second Ctrl-C ends without one)
"""

import os
import signal
import socket
import threading
import time
from types import TracebackType
from typing import Any

MISTAKE, NOT_FINITE, HUNG = 2, 3, 4
SAME_KEYSTROKE = 1.0  # seconds; a terminal and a launcher may both pass on one Ctrl-C


class Stopped(Exception):
    """The run ends early, on all ranks together, with this message and exit status; what is to be saved is saved."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class StopSignal:
    """While entered, SIGTERM and Ctrl-C are only noted, in `number`; a second Ctrl-C ends the process at once.

    A thread does the noting: the main one may be waiting inside an operation, where no Python code of it runs.
    """

    def __init__(self, announce: bool) -> None:
        self.number = 0
        self._announce, self._noted_at = announce, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        threading.Thread(target=self._note_all, name="signals", daemon=True).start()
        self._fd_before = signal.set_wakeup_fd(self._writer.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._writer.close()  # ends the thread

    def _note_all(self) -> None:
        while numbers := self._reader.recv(1):
            self._note(numbers[0])
        self._reader.close()

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if number in self._before and self.number == 0:
            self.number, self._noted_at = number, now
            if self._announce:
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                os.write(2, f"\n{name}: saving after this step; Ctrl-C (again) ends at once\n".encode())
        elif number == signal.SIGINT and now - self._noted_at > SAME_KEYSTROKE:
            os._exit(128 + signal.SIGINT)
