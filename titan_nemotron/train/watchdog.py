"""Who a hanging run waits for.

Every rank tells the others through the store of the process group, every few seconds, what it is doing: its phase, since
when, and the collective operation its main thread is in. When a rank's phase outlasts the timeout while it waits for
others, or others for it, it prints what all ranks were doing and ends the process.
"""

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from types import FrameType

import torch.distributed as dist

from titan_nemotron.train.health import HUNG, Stopped

DISTRIBUTED = os.sep + os.path.join("torch", "distributed") + os.sep
OPERATOR_CALL = os.path.join("torch", "_ops.py")
# What FSDP's waiting functions wait for.
NAMES = {
    "wait_for_unshard": "all_gather of weights",
    "foreach_all_gather": "all_gather of weights",
    "foreach_reduce": "reduce_scatter of gradients",
    "wait_for_post_backward": "reduce_scatter of gradients",
    "wait_tensor": "a functional collective",
}
LOST = ("timed out", "timeout", "closed by peer", "reset by peer", "broken pipe", "connection", "socket")


@dataclass
class Heartbeat:
    """phase and the seconds in it, the collective operation the main thread is in, and when this was said (Unix time)."""

    phase: str
    seconds: float
    collective: str | None
    at: float


class Watchdog:
    """`phase` is called by the training loop; the rest runs in a thread of its own."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.interval = min(5.0, timeout / 10)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        # A connection of its own: the main thread may hold the lock of the other while it waits.
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._main = threading.main_thread().ident
        self._phase, self._since = "starting", time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beat()
        if self.num_ranks > 1:
            self._thread.start()

    def phase(self, name: str) -> None:
        self._phase, self._since = name, time.monotonic()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def explain(self, error: BaseException) -> Stopped | None:
        """What to say when `error` comes out of a collective operation that timed out or lost a rank, else None."""
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        collective = _collective(frames)
        if self.num_ranks == 1 or collective is None or not any(word in str(error).lower() for word in LOST):
            return None
        self._beat(collective)
        time.sleep(2 * self.interval)  # let the others say where they are, or fall silent
        return Stopped(self._report(f"{collective} failed ({str(error).splitlines()[0]})"), HUNG)

    def _watch(self) -> None:
        while not self._closed.wait(self.interval):
            try:
                mine = self._beat()
                if mine.seconds > self.timeout and self._stuck(mine):
                    self._end(f"no progress for {mine.seconds:.0f} s (parallel.timeout_seconds = {self.timeout:g})")
            except (RuntimeError, OSError):  # the store is gone, and with it the rank or the launcher that held it
                return

    def _beat(self, collective: str | None = None) -> Heartbeat:
        seconds = time.monotonic() - self._since
        beat = Heartbeat(self._phase, seconds, collective or self._current_collective(), time.time())
        self.store.set(str(self.rank), json.dumps(asdict(beat)))
        return beat

    def _current_collective(self) -> str | None:
        frames = []
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return _collective(frames[::-1])

    def _stuck(self, mine: Heartbeat) -> bool:
        """A long phase alone is no hang: somebody must wait in a collective operation, or be in another phase."""
        return any(beat is None or beat.collective or beat.phase != mine.phase for beat in self._all())

    def _all(self) -> list[Heartbeat | None]:
        keys = [str(rank) for rank in range(self.num_ranks)]
        return [Heartbeat(**json.loads(self.store.get(key))) if self.store.check([key]) else None for key in keys]

    def _end(self, what: str) -> None:
        if self.store.add("ended", 1) == 1:
            print(f"error: {self._report(what)}", file=sys.stderr, flush=True)
        else:
            time.sleep(self.interval)  # the rank that prints goes first
        os._exit(HUNG)

    def _report(self, what: str) -> str:
        """One line for the run, one for each group of ranks that were doing the same."""
        now = time.time()
        groups: dict[str, list[tuple[int, float]]] = {}
        for rank, beat in enumerate(self._all()):
            if beat is None:
                line, seconds = "has said nothing", 0.0
            elif now - beat.at > 3 * self.interval + 1:
                line, seconds = f"has stopped in {beat.phase}", now - beat.at
            elif beat.collective:
                line, seconds = f"waits in {beat.collective} in {beat.phase}", beat.seconds
            else:
                line, seconds = f"has not arrived, in {beat.phase}", beat.seconds
            groups.setdefault(line, []).append((rank, seconds))
        lines = [what]
        for line, members in groups.items():
            ranks = ", ".join(str(rank) for rank, _ in members)
            lines.append(
                f"  rank{'s' if len(members) > 1 else ''} {ranks}: {line}, for {max(s for _, s in members):.0f} s"
            )
        return "\n".join(lines)


def _collective(frames: list[FrameType]) -> str | None:
    """The collective operation that a stack, outermost frame first, is waiting in; None when it does something else.

    A stack that waits ends inside torch.distributed; the one of a sharded model's forward merely passes through it.
    """
    names: list[str] = []
    for frame in reversed(frames):
        file = frame.f_code.co_filename
        if DISTRIBUTED in file:
            names.append(frame.f_code.co_name)
        elif names or not file.endswith(OPERATOR_CALL):
            break
    known = [NAMES[name] for name in names if name in NAMES]
    public = [name for name in names if not name.startswith(("_", "wrapper", "inner"))]
    return next(iter([*known, *public, *names]), None)
