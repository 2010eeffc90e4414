"""Who a hanging run waits for.

Every rank tells the others through the store of the process group, every few seconds, what it is doing: its phase, since
when, and the collective operation its main thread is in. When a rank's phase outlasts the timeout while it waits for
others, or others for it, one rank prints what all were doing, and all end.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from titan_nemotron.train.health import HUNG

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
T = TypeVar("T")

LEAVING_SECONDS = 3.0  # how long the rank that may hold the store waits for the others' last words


@dataclass
class Heartbeat:
    """phase and the seconds in it, the collective operation the main thread is in, and a number that grows."""

    phase: str
    seconds: float
    collective: str | None
    number: int


class Watchdog:
    """The training loop tells it the phases and progress inside them; a thread of its own does the rest."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.interval = min(2.0, timeout / 10)
        self._limit = f"parallel.timeout_seconds = {timeout:g}"
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        # A connection of its own: the main thread may hold the lock of the other while it waits.
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore("watchdog", store.clone())  # type: ignore[attr-defined]
        self._main = threading.main_thread().ident
        self.current, self._since, self._number = "starting", time.monotonic(), 0
        self._failed_in: str | None = None
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beat()
        if self.num_ranks > 1:
            self._thread.start()

    def phase(self, name: str) -> None:
        """Say what the rank is doing from now on, for the report of a hang."""
        self.current, self._since = name, time.monotonic()

    def each(self, items: Sequence[T]) -> Sequence[T]:
        """The same items; taking one of them counts as progress."""
        return _Watched(items, self)

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def say_once(self, text: str) -> None:
        """Print what several ranks may have to say before they end, as soon as the first of them says it."""
        try:
            if self._store.add(f"said {text}", 1) == 1:
                print(text, file=sys.stderr, flush=True)
            self._leave()
        except (RuntimeError, OSError):
            pass  # the rank that held the store has left, after saying what there was to say

    def end_if_lost(self, error: BaseException) -> None:
        """End the process, after a report, when `error` comes out of a collective that timed out or lost a rank."""
        collective = _collective([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        if self.num_ranks > 1 and collective is not None and any(word in str(error).lower() for word in LOST):
            self._failed_in = collective
            self._end(f"{collective} failed ({self._limit}): {str(error).splitlines()[0]}")

    def _watch(self) -> None:
        alone = False
        while not self._closed.wait(self.interval):
            mine = self._now()
            try:
                if self._ending.locked():
                    self._beat()  # the main thread is about to end the process
                elif alone:
                    # The store is gone, and with it the rank or the launcher that held it.
                    self._end_alone(mine)
                elif self._beat() and self._store.check(["reported"]):
                    self._leave()
                    os._exit(HUNG)
                elif mine.seconds > self.timeout and self._stuck(mine):
                    self._end(f"no progress for {mine.seconds:.0f} s ({self._limit})")
            except (RuntimeError, OSError):
                alone = True

    def _end_alone(self, mine: Heartbeat) -> None:
        if mine.seconds > self.timeout:
            print(
                f"error: rank {self.rank}: alone in {mine.phase} for {mine.seconds:.0f} s", file=sys.stderr, flush=True
            )
            os._exit(HUNG)

    def _now(self) -> Heartbeat:
        self._number += 1
        seconds = time.monotonic() - self._since
        return Heartbeat(self.current, seconds, self._failed_in or self._current_collective(), self._number)

    def _beat(self) -> bool:
        self._store.set(str(self.rank), json.dumps(asdict(self._now())))
        return True

    def _current_collective(self) -> str | None:
        frames = []
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return _collective(frames[::-1])

    def _stuck(self, mine: Heartbeat) -> bool:
        """A long phase alone is no hang: somebody must wait in a collective operation, or be in another phase."""
        return any(beat.collective or beat.phase != mine.phase for beat in self._all())

    def _all(self) -> list[Heartbeat]:
        return [Heartbeat(**json.loads(self._store.get(str(rank)))) for rank in range(self.num_ranks)]

    def _end(self, what: str) -> None:
        """One rank reports, all end; called by the watching thread or, when a collective has failed, by the main one."""
        self._ending.acquire()  # never released: whoever comes second waits for the end
        try:
            if self._store.add("ends", 1) == 1:
                print(f"error: {self._report(what)}", file=sys.stderr, flush=True)
                self._store.set("reported", "")
            else:
                self._beat_until(lambda: self._store.check(["reported"]), 4 * self.interval + LEAVING_SECONDS)
            self._leave()
        except (RuntimeError, OSError):
            print(f"error: rank {self.rank}: {what}; the rank that held the store is gone", file=sys.stderr, flush=True)
        os._exit(HUNG)

    def _leave(self) -> None:
        left = self._store.add("left", 1)
        end = time.monotonic() + LEAVING_SECONDS
        while self.rank == 0 and left < self.num_ranks and time.monotonic() < end:
            time.sleep(0.05)
            left = self._store.add("left", 0)

    def _beat_until(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            self._beat()
            time.sleep(self.interval / 4)

    def _report(self, what: str) -> str:
        """One line for the run, and one for each group of ranks that were doing the same."""
        before = self._all()
        self._beat_until(lambda: False, 3 * self.interval)  # a rank that is gone falls silent
        groups: dict[str, list[tuple[int, float]]] = {}
        for rank, (earlier, beat) in enumerate(zip(before, self._all(), strict=True)):
            if beat.number == earlier.number:
                line = f"is gone, last heard of in {beat.phase}"
            elif beat.collective:
                line = f"waits in {beat.collective} in {beat.phase}"
            else:
                line = f"has not arrived, in {beat.phase}"
            groups.setdefault(line, []).append((rank, beat.seconds))
        lines = [what]
        for line, members in groups.items():
            ranks, seconds = ", ".join(str(rank) for rank, _ in members), max(seconds for _, seconds in members)
            lines.append(f"  rank{'s' if len(members) > 1 else ''} {ranks}: {line} for {seconds:.0f} s")
        return "\n".join(lines)


class _Watched(Sequence[T]):
    def __init__(self, items: Sequence[T], watchdog: Watchdog) -> None:
        self._items, self._watchdog = items, watchdog

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:  # iteration comes here too
        self._watchdog.phase(self._watchdog.current)
        return self._items[index]


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
