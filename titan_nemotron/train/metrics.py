"""What a run reports: a console line, metrics.jsonl and TensorBoard, all from one record a logged step. Rank 0 alone."""

import json
import math
import resource
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from titan_nemotron.train.step import StepResult
from titan_nemotron.train.validation import Validation

HEADER_EVERY = 30  # lines
HEATMAP_EVERY = 20  # records


class Metrics:
    """Measures the time between logged steps, and writes.

    directory    of the run: metrics.jsonl and tensorboard/ are written there
    resumed      the step that the run continues from; what was written of later steps is removed
    flops        operations a token takes; with `peak`, of all devices together in FLOP/s, it gives the utilisation
    """

    def __init__(
        self, directory: Path, *, resumed: int, steps: int, flops: float, peak: float | None, device: torch.device
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import: rank 0 alone needs it

        self.steps, self.flops, self.peak, self.device = steps, flops, peak, device
        self._file = open_truncated(directory / "metrics.jsonl", resumed)
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=resumed + 1)
        self._console = Console(steps, resumed)
        self._last_time = time.perf_counter()
        self._last_step, self._tokens, self._wait = resumed, 0, 0.0
        self._total_tokens, self._seconds = 0, 0.0
        self._num_records = 0

    def count(self, result: StepResult, data_wait: float) -> None:
        """Count a step; data_wait: seconds it waited for its batches."""
        self._tokens += result.tokens
        self._wait += data_wait

    def record(
        self, step: int, tokens: int, result: StepResult, learning_rate: float, bad_records: int
    ) -> dict[str, Any]:
        """The record of a step, with means since the last record; call it before anything that is not training."""
        seconds = max(time.perf_counter() - self._last_time, 1e-9)
        speed = self._tokens / seconds
        self._total_tokens += self._tokens
        self._seconds += seconds
        record: dict[str, Any] = {
            "step": step,
            "tokens": tokens,
            "loss": result.loss,
            "mtp_losses": list(result.mtp_losses),
            "auxiliary_loss": result.auxiliary_loss,
            "grad_norm": result.gradient_norm,
            "lr": learning_rate,
            "skipped": result.skipped,
            "tokens_per_second": speed,
            "data_wait": self._wait / seconds,
            "bad_records": bad_records,
            "memory_gib": memory_gib(self.device),
        }
        if self.peak is not None:
            record["mfu"] = speed * self.flops / self.peak
        if result.counts:
            record |= expert_load(result.counts)
        record["seconds_left"] = (self.steps - step) * seconds / max(1, step - self._last_step)
        self._last_step, self._tokens, self._wait = step, 0, 0.0
        return record

    def write(self, record: dict[str, Any], counts: Mapping[str, Tensor], validation: Validation | None) -> None:
        """Write a record everywhere; what comes after it is not counted as time of the next.

        counts: tokens of the experts of each routed call; drawn as a heat map when the step validates, in the first record
        and in every HEATMAP_EVERY-th after it.
        """
        if validation is not None:
            record = record | {"validation_loss": validation.loss, "bits_per_byte": validation.bits_per_byte}
        self._file.write(json.dumps(_finite(record)) + "\n")
        self._file.flush()
        for tag, value in _scalars(record):
            self._board.add_scalar(tag, value, record["step"])
        if counts and (validation is not None or self._num_records % HEATMAP_EVERY == 0):
            from titan_nemotron.train.heatmap import add_heatmap, expert_heatmap

            add_heatmap(self._board, "expert_load", expert_heatmap(counts), record["step"])
        self._num_records += 1
        self._console.line(format_record(record), header(record))
        if validation is not None:
            self._console.line(f"validation at step {record['step']}: {validation}")
        self._last_time = time.perf_counter()

    def progress(self, step: int) -> None:
        """Show how far the run is."""
        self._console.progress(step)

    def note(self, line: str) -> None:
        """Print a line between the records."""
        self._console.line(line)

    @property
    def tokens_per_second(self) -> float:
        """Since the run was started, validation left out."""
        return self._total_tokens / self._seconds if self._seconds else 0.0

    def close(self) -> None:
        """Write what is waiting and close."""
        self._console.close()
        self._board.close()
        self._file.close()


def open_truncated(path: Path, step: int) -> TextIO:
    """metrics.jsonl for appending, without the records after `step` and without a last line that was cut."""
    kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step] if path.exists() else []
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.rename(path)
    return open(path, "a")


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def expert_load(counts: Mapping[str, Tensor]) -> dict[str, Any]:
    """How evenly the experts of each routed call are loaded, by call.

    expert_load      least, middle and most loaded expert, as multiples of an even load
    max_violations   (max - mean) / mean (MaxVio); max_violation is the largest of them
    dead_experts     how many had no token
    """
    loads, dead = {}, {}
    for call, count_E in counts.items():
        load_E = (count_E / count_E.mean().clamp(min=1e-9)).sort().values
        loads[call] = [round(float(load_E[i]), 4) for i in (0, len(load_E) // 2, -1)]
        dead[call] = int((count_E == 0).sum())
    violations = {call: round(load[-1] - 1, 4) for call, load in loads.items()}
    return {
        "expert_load": loads,
        "max_violations": violations,
        "max_violation": max(violations.values()),
        "dead_experts": dead,
    }


def memory_gib(device: torch.device) -> float:
    """Peak memory: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2 ** (30 if sys.platform == "darwin" else 20)  # macOS counts bytes, Linux KiB


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(record: dict[str, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in record.items():
        if key == "expert_load":
            for call, load in value.items():
                found += [(f"expert_load_{name}/{call}", item) for name, item in zip(("min", "median", "max"), load)]
        elif isinstance(value, dict):
            found += [(f"{key}/{call}", float(item)) for call, item in value.items()]
        elif isinstance(value, list):
            found += [(f"{key}/{index}", item) for index, item in enumerate(value)]
        elif key != "step":
            found.append((key, float(value)))
    return found


def header(record: dict[str, Any]) -> str:
    """The names of format_record's columns."""
    mtp = "".join(f"{f'mtp{depth}':>7}" for depth in range(len(record["mtp_losses"])))
    mfu = f"{'mfu':>7}" if "mfu" in record else ""
    return f"{'step':>7}{'loss':>9}{mtp}{'gnorm':>9}{'lr':>9}{'tok/s':>7}{mfu}{'mem':>7}{'left':>10}"


def format_record(record: dict[str, Any]) -> str:
    """At most 80 columns with two multi-token depths."""
    mtp = "".join(f"{loss:>7.3f}" for loss in record["mtp_losses"])
    mfu = f"{record['mfu']:>7.1%}" if "mfu" in record else ""
    return (
        f"{record['step']:>7}{record['loss']:>9.4f}{mtp}{record['grad_norm']:>9.3g}{record['lr']:>9.2e}"
        f"{short(record['tokens_per_second']):>7}{mfu}{record['memory_gib']:>6.1f}G"
        f"{duration(record['seconds_left']):>10}"
    )


def short(number: float) -> str:
    """1234567 as 1.23M."""
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:  # what rounds to 1000 is 1 of the next unit
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """h:mm:ss, or m:ss under an hour; days are told as hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def fitted(text: str) -> str:
    """Lines to read: in a terminal folded between words at its width, elsewhere as they are."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip(" |"))][: width // 2]
        lines.append(
            textwrap.fill(line, width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)
        )
    return "\n".join(lines)


class Console:
    """Lines, and below them a progress bar when the output is a terminal."""

    def __init__(self, steps: int, resumed: int) -> None:
        self._lines, self._header = 0, ""
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import Progress

            self._bar = Progress(transient=True)
            self._task = self._bar.add_task("training", total=steps, completed=resumed)
            self._bar.start()

    def line(self, text: str, header: str = "") -> None:
        """header: printed before the first line that has it, when it changes, and every HEADER_EVERY lines."""
        if header:
            if header != self._header or self._lines % HEADER_EVERY == 0:
                self._print(header)
                self._header, self._lines = header, 0
            self._lines += 1
        self._print(text)

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def progress(self, step: int) -> None:
        """Show how far the run is."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def close(self) -> None:
        """Write what is waiting and close."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
