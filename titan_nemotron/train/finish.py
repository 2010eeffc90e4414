"""The end of a run: the exported model, a sampled completion, a summary."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import register_fsdp_forward_method

from titan_nemotron.checkpoint.convert import export
from titan_nemotron.generation.decode import generate
from titan_nemotron.generation.sampling import Sampling
from titan_nemotron.train.metrics import Metrics, fitted, short
from titan_nemotron.train.setup import Progress, Run

TEMPERATURE, TOP_P = 0.7, 0.9  # of the sampled completion


def finish(run: Run, metrics: Metrics | None, progress: Progress) -> None:
    """Called by all ranks when the last step is done and saved, also when a run that was done is started again."""
    run.loader.close()
    if run.job.checkpoint.export:
        export_model(run, progress.step)
    completion = sampled_completion(run) if run.job.metrics.completion_tokens else None
    run.checkpoints.close()
    if metrics is not None:
        print(fitted("\n".join(summary(run, progress, metrics.tokens_per_second, completion))), flush=True)


def export_model(run: Run, step: int) -> None:
    """Write hf/ unless it holds this step already; rank 0 writes while all ranks gather one tensor after the other."""
    run.ranks.watchdog.phase("export")
    stale = False
    if run.ranks.rank == 0:
        put_back(run.directory)
        stale = is_stale(run.directory, step)
    if run.ranks.agree(stale) == [0]:
        return
    directory, new, old = (run.directory / name for name in ("hf", "hf.new", "hf.old"))
    export(run.model, run.family, run.job.model.resolved(), run.directory, new)
    if run.ranks.rank == 0:
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
        shutil.rmtree(old, ignore_errors=True)


def put_back(run: Path) -> None:
    """Put in order what an export that was cut off left: the old one stays until the new one has its name."""
    directory, old = run / "hf", run / "hf.old"
    if old.exists() and not directory.exists():
        old.rename(directory)
    for rest in ("hf.old", "hf.new", "hf.new.partial"):
        shutil.rmtree(run / rest, ignore_errors=True)


def is_stale(run: Path, step: int) -> bool:
    """Whether hf/ is missing or older than the checkpoint of this step."""
    exported, saved = run / "hf" / "config.json", run / "checkpoints" / f"step-{step}" / ".metadata"
    return not exported.exists() or exported.stat().st_mtime_ns < saved.stat().st_mtime_ns


def sampled_completion(run: Run) -> str:
    """The prompt of [metrics] and what the model makes of it; all ranks compute the same tokens."""
    run.ranks.watchdog.phase("sampled completion")
    register_fsdp_forward_method(run.model, "hidden")  # only now: a loss calls it, and would gather weights twice
    prompt = run.tokenizer.encode([run.job.metrics.completion_prompt])[0] or [run.tokenizer.eos_id]
    sampling = Sampling(
        temperature=TEMPERATURE, top_p=TOP_P, max_new_tokens=run.job.metrics.completion_tokens, seed=run.job.job.seed
    )
    tokens = generate(run.model, [prompt], sampling)[0].tokens
    end = tokens.index(run.tokenizer.eos_id) if run.tokenizer.eos_id in tokens else len(tokens)
    return run.job.metrics.completion_prompt + run.tokenizer.decode(tokens[:end])


def summary(run: Run, progress: Progress, tokens_per_second: float, completion: str | None) -> Iterator[str]:
    """The lines at the end of a run."""
    steps = run.job.training.steps
    yield ""
    yield f"done: {progress.step:,} steps, {progress.tokens:,} tokens" + (
        f", {progress.skipped} steps skipped" if progress.skipped else ""
    )
    if progress.first_loss is not None and progress.last_loss is not None:
        yield f"  loss         {progress.first_loss:.4f} first, {progress.last_loss:.4f} last"
    record = last_record(run.directory)
    if record.get("bits_per_byte") is not None:
        yield f"  held out     {record['bits_per_byte']:.4f} bits per byte, loss {record['validation_loss']:.4f}"
    if tokens_per_second:
        yield f"  speed        {short(tokens_per_second)} tokens per second"
    else:
        yield f"  nothing left to train: raise training.steps above {steps}, or change job.name for a new run"
    hf = ", hf/" if run.job.checkpoint.export else ""
    yield f"  outputs      {run.directory}/: config.toml, metrics.jsonl, tensorboard/, checkpoints/step-{progress.step}/{hf}"
    if completion is not None:
        yield f"  completion   of {run.job.metrics.completion_prompt!r}:"
        for line in completion.splitlines():
            yield f"    | {''.join(sign if sign.isprintable() else '�' for sign in line.expandtabs(4))}"


def last_record(directory: Path) -> dict[str, Any]:
    """The last line of metrics.jsonl; empty without one."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    record: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return record
