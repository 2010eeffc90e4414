"""The training loop."""

import contextlib
import time
from collections.abc import Iterator

import torch

from titan_nemotron.layout import Batch
from titan_nemotron.optim.schedule import learning_rate
from titan_nemotron.train.finish import finish
from titan_nemotron.train.flops import peak_flops
from titan_nemotron.train.health import NOT_FINITE, Stopped, StopSignal
from titan_nemotron.train.job import Job
from titan_nemotron.train.metrics import Metrics, fitted
from titan_nemotron.train.plan import describe_run
from titan_nemotron.train.ranks import Ranks
from titan_nemotron.train.setup import Position, Progress, Run, build
from titan_nemotron.train.step import StepResult, train_step
from titan_nemotron.train.validation import Validation, validate


def train(job: Job, ranks: Ranks) -> None:
    """Train until the last step, from the newest checkpoint if there is one.

    Raises Stopped, after a checkpoint, when the run ends before its last step, and UserError for what the user can fix.
    """
    run = build(job, ranks)
    progress = run.resume()
    metrics = open_metrics(run, progress)
    last = job.training.steps
    nonfinite_in_a_row = 0
    safe = run.position(progress)  # before a streak of steps that were not finite, which moved nothing

    with (
        StopSignal(announce=ranks.rank == 0) as stop,
        contextlib.closing(metrics) if metrics else contextlib.nullcontext(),
    ):
        while progress.step < last:
            step = progress.step + 1
            ranks.watchdog.phase(f"step {step}, reading data")
            start = time.perf_counter()
            batches = run.next_batches()
            data_wait = time.perf_counter() - start

            ranks.watchdog.phase(f"step {step}, computing")
            rate = learning_rate(job.schedule, job.optimizer.learning_rate, step, last)
            with profiled(run, step):
                result = train_step(run.model, run.optimizer, ranks.watchdog.each(batches), rate, run.settings)
            progress = progress.after(result)
            nonfinite_in_a_row = nonfinite_in_a_row + 1 if result.skipped else 0
            if not result.skipped:
                safe = run.position(progress)

            report(run, metrics, progress, result, rate, data_wait)

            ranks.watchdog.phase(f"step {step}, checkpoint")
            given_up = nonfinite_in_a_row >= job.training.max_nonfinite_steps
            signal, save_failed = ranks.agree(stop.number, run.checkpoints.failed)
            if step == last:
                run.save(run.position(progress))
            elif signal or given_up or (run.checkpoints.due(step) and not result.skipped):
                run.save(safe)
            if signal or given_up or save_failed or step == last:
                run.checkpoints.wait()
            if given_up:
                raise Stopped(not_finite(run, safe, nonfinite_in_a_row), NOT_FINITE)
            if signal and step < last:
                raise Stopped(f"stopped; start again to continue from step {safe.progress.step}", 128 + signal)

    finish(run, metrics, progress)


def open_metrics(run: Run, progress: Progress) -> Metrics | None:
    """On rank 0, after saying what is about to be trained."""
    if run.ranks.rank != 0:
        return None
    print(fitted("\n".join(describe_run(run, progress))), flush=True)
    peak = run.job.metrics.peak_tflops
    one_device = peak * 1e12 if peak is not None else peak_flops(run.ranks.device)
    return Metrics(
        run.directory,
        resumed=progress.step,
        steps=run.job.training.steps,
        flops=run.size.flops,
        peak=None if one_device is None else one_device * run.ranks.num_ranks,
        device=run.ranks.device,
    )


def report(
    run: Run, metrics: Metrics | None, progress: Progress, result: StepResult, rate: float, data_wait: float
) -> None:
    """Validate when it is time, and write a record when there is something to say; all ranks call it."""
    step, training = progress.step, run.job.training
    ends = step == training.steps
    validates = run.held_out is not None and (
        ends or (training.validation_interval > 0 and step % training.validation_interval == 0)
    )
    logs = ends or validates or result.skipped or step == 1 or step % run.job.metrics.interval == 0
    bad_records = run.ranks.total(run.loader.bad.count * run.ranks.mesh.leads_rows) if logs else 0
    record = None
    if metrics is not None:
        metrics.count(result, data_wait)
        record = metrics.record(step, progress.tokens, result, rate, bad_records) if logs else None
    validation = validated(run, step) if validates else None
    if metrics is not None:
        if record is not None:
            metrics.write(record, result.counts, validation)
        if result.skipped:
            metrics.note(f"step {step} skipped: its loss or gradient was not finite ({progress.skipped} so far)")
        metrics.progress(step)


def validated(run: Run, step: int) -> Validation:
    """Mean losses over the held-out rows; the watchdog knows where it is."""

    def batches() -> Iterator[Batch]:
        for number, batch in enumerate(run.held_out_batches()):
            run.ranks.watchdog.phase(f"step {step}, validation batch {number}")
            yield batch

    return validate(run.model, batches())


def not_finite(run: Run, safe: Position, in_a_row: int) -> str:
    """The message that ends a run whose steps failed one after another."""
    step = safe.progress.step
    return (
        f"error: the loss or gradient was not finite in {in_a_row} steps in a row ([training] max_nonfinite_steps); "
        f"{run.directory}/checkpoints/step-{step} is from before them: start again with a lower learning rate, or other data"
    )


@contextlib.contextmanager
def profiled(run: Run, step: int) -> Iterator[None]:
    """On rank 0 and in the steps that [metrics] profile names, what its description says."""
    if run.ranks.rank != 0 or step not in run.job.metrics.profile:
        yield
        return
    directory = run.directory / "profile"
    directory.mkdir(exist_ok=True)
    on_cuda = run.ranks.device.type == "cuda"
    if on_cuda:
        torch.cuda.memory._record_memory_history()
    with torch.profiler.profile(record_shapes=True, with_stack=on_cuda, profile_memory=not on_cuda) as profiler:
        yield
    profiler.export_chrome_trace(str(directory / f"step-{step}.json.gz"))
    if on_cuda:
        torch.cuda.memory._dump_snapshot(str(directory / f"step-{step}-memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
