"""The background process that loads, tokenises and packs. It imports neither torch nor anything that does.

It is a fresh interpreter, not a fork and not a `multiprocessing` child: safe to start when torch threads or CUDA exist, and
indifferent to how the trainer's own script is written. The trainer sends a plan over one pipe; rows, or the error that
ended the work, come back over another. It ignores Ctrl-C and SIGTERM (the trainer may need rows until it has saved) and ends when
the trainer closes the pipe or is gone.
"""

import contextlib
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any, BinaryIO

from titan_nemotron.errors import UserError

_START = "import sys; sys.path[:] = {path!r}; from titan_nemotron.data.worker import main; main({results}, {parent}, {prefetch})"


@dataclass
class Failed:
    """What ended the process: a message for the user, or the traceback of a defect."""

    message: str
    user_error: bool


class Worker:
    """The trainer's side. The first message is the reader's number of documents, the others are (rows, bad records)."""

    def __init__(self, plan: Any, tokenizer: bytes, state: dict[str, Any] | None, prefetch: int) -> None:
        read_end, write_end = os.pipe()
        code = _START.format(path=sys.path, results=write_end, parent=os.getpid(), prefetch=prefetch)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                pass_fds=[write_end],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        finally:
            os.close(write_end)
        self._results: BinaryIO = os.fdopen(read_end, "rb")
        assert self.process.stdin is not None
        try:
            pickle.dump((plan, tokenizer, state), self.process.stdin)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended already; receive() says why

    def receive(self) -> Any:
        """The next message. Raises the process's own UserError, or RuntimeError with its traceback or exit status."""
        try:
            message = pickle.load(self._results)
        except (EOFError, pickle.UnpicklingError):
            status = self.process.wait()
            reason = f"signal {-status}, out of memory?" if status == -signal.SIGKILL else f"exit status {status}"
            raise RuntimeError(f"the process that loads and tokenises the data has ended ({reason})") from None
        if isinstance(message, Failed):
            if message.user_error:
                raise UserError(message.message)
            raise RuntimeError(f"the process that loads and tokenises the data failed:\n{message.message}")
        return message

    def close(self) -> None:
        """End the process."""
        self._results.close()
        if self.process.poll() is None:
            self.process.kill()  # it owns nothing that must be put in order
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def main(results: int, parent: int, prefetch: int) -> None:
    """The background process's side: one thread reads and tokenises, one watches the trainer, this one writes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = pickle.load(sys.stdin.buffer)
    messages: queue.Queue[Any] = queue.Queue(prefetch)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    threading.Thread(target=_produce, args=(*job, messages), daemon=True).start()
    try:
        with os.fdopen(results, "wb") as output:
            while True:
                message = messages.get()
                pickle.dump(message, output, protocol=pickle.HIGHEST_PROTOCOL)
                output.flush()
                if isinstance(message, Failed):
                    break
    except BrokenPipeError:
        pass  # the trainer has closed its end
    os._exit(0)


def _watch(parent: int) -> None:
    """End this process when the trainer closes our input or is gone, also while the other threads wait."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], 1.0)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    os._exit(0)


def _produce(plan: Any, tokenizer: bytes, state: dict[str, Any] | None, messages: queue.Queue[Any]) -> None:
    from titan_nemotron.data.reader import RowReader
    from titan_nemotron.data.tokenizer import Tokenizer

    try:
        reader = RowReader(plan, Tokenizer.from_bytes(tokenizer), state)
        messages.put(reader.num_documents)
        while True:
            messages.put((reader.read(), reader.bad))
    except UserError as error:
        messages.put(Failed(str(error), user_error=True))
    except BaseException:
        messages.put(Failed(traceback.format_exc(), user_error=False))
