"""A run from start to end: what it writes, prints and refuses."""

import gzip
import json
import math
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from tests.train.launch import Launcher, checkpoint_tensors, records
from titan_nemotron import load_model
from titan_nemotron.checkpoint.manager import complete_steps
from titan_nemotron.config import load
from titan_nemotron.train.flops import model_size
from titan_nemotron.train.job import Job
from titan_nemotron.train.setup import build_model


def test_files_of_a_run(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()} - {".lock"}
    assert names == {"config.toml", "metrics.jsonl", "tensorboard", "checkpoints", "tokenizer", "hub", "hf"}
    assert complete_steps(finished / "checkpoints") == [10, 12]
    job = load(Job, finished / "config.toml", [])
    assert job.training.steps == 12
    written = tomllib.loads((finished / "config.toml").read_text())
    assert written["model"]["config"]["conv_kernel"] == 4  # a default of the family
    assert written["optimizer"]["learning_rate"] == job.optimizer.learning_rate


def test_records(finished: Path) -> None:
    lines = records(finished)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["tokens"] for line in lines] == [4 * 32 * step for step in range(1, 13)]
    for line in lines:
        assert all(math.isfinite(line[key]) for key in ("loss", "grad_norm", "lr", "tokens_per_second", "data_wait"))
        assert len(line["mtp_losses"]) == 2
        assert line["expert_load"].keys() == {"layers.1", "mtp.0.layers.1", "mtp.1.layers.1"}
        assert all(low <= middle <= high for low, middle, high in line["expert_load"].values())
        assert ("bits_per_byte" in line) == (line["step"] % 4 == 0)
        assert "mfu" not in line  # nobody has said what a CPU's peak is
    assert abs(lines[0]["loss"] - math.log(300)) < 0.2
    assert lines[-1]["loss"] < lines[0]["loss"]
    # nats a target and bits a byte tell the same loss: a target stands for one to a few bytes
    assert 1 <= lines[-1]["validation_loss"] / math.log(2) / lines[-1]["bits_per_byte"] < 8


def test_tensorboard_has_every_number_of_the_records(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard")).Reload()
    lines = records(finished)

    def written(tag: str) -> list[tuple[int, float]]:
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]

    for key in lines[0].keys() - {"step", "mtp_losses", "expert_load", "max_violations", "dead_experts"}:
        assert written(key) == [(line["step"], line[key]) for line in lines]
    for depth in range(2):
        assert written(f"mtp_losses/{depth}") == [(line["step"], line["mtp_losses"][depth]) for line in lines]
    for place, name in enumerate(("min", "median", "max")):
        loads = [(line["step"], line["expert_load"]["mtp.1.layers.1"][place]) for line in lines]
        assert written(f"expert_load_{name}/mtp.1.layers.1") == loads
    for key in ("max_violations", "dead_experts"):
        assert written(f"{key}/layers.1") == [(line["step"], line[key]["layers.1"]) for line in lines]
    pictures = events.Images("expert_load")
    assert [picture.step for picture in pictures] == [1, 4, 8, 12]  # the first record, and validations
    assert all(picture.encoded_image_string.startswith(b"\x89PNG") for picture in pictures)
    assert written("bits_per_byte") == [(line["step"], line["bits_per_byte"]) for line in lines[3::4]]


def test_export_is_the_trained_model(finished: Path) -> None:
    exported = load_model(finished / "hf").state_dict()
    trained = checkpoint_tensors(finished / "checkpoints" / "step-12")
    assert all(torch.equal(value, trained[f"model.{name}"]) for name, value in exported.items())
    assert (finished / "hf" / "tokenizer.json").is_file()


def test_what_it_prints(finished: Path, launcher: Launcher) -> None:
    text = (launcher.directory / "finished.txt").read_text()
    lines = text.splitlines()
    header = next(index for index, line in enumerate(lines) if line.split()[:2] == ["step", "loss"])
    assert [line.split()[0] for line in lines[header + 1 : header + 5]] == ["1", "2", "3", "4"]
    assert all(len(line) <= 80 for line in lines[header : header + 5])
    assert lines[header].split() == ["step", "loss", "mtp0", "mtp1", "gnorm", "lr", "tok/s", "mem", "left"]
    summary = text[text.index("done:") :]
    for word in ("first", "last", "bits per byte", "tokens per second", "outputs", "completion"):
        assert word in summary


def test_a_terminal_shows_a_progress_bar_and_the_utilisation(launcher: Launcher) -> None:
    """In a terminal of eighty columns: lines as elsewhere, a bar below them that is gone at the end."""
    peak = 0.5  # in 10^12 FLOP/s
    flags = ["--job.name", "terminal", "--metrics.peak_tflops", str(peak), "--training.steps", "4"]
    launch, terminal = launcher.in_terminal(*flags)
    assert launch.wait() == [0], terminal.text
    text = terminal.text
    assert "\x1b[2Ktraining" in text  # the line is erased before the bar is drawn again
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    bars = [line for line in lines if re.fullmatch(r"training ━+╺?━* +\d+% [\d:-]+", line)]
    assert "   0% " in bars[0]
    assert " 100% " in bars[-1]
    header = "   step     loss   mtp0   mtp1    gnorm       lr  tok/s    mfu    mem      left"
    assert header in lines
    words = [line for line in lines if str(launcher.directory) not in line]
    assert max(map(len, words)) <= 80
    assert [line for line in lines if line.startswith("kernels: ")] != [line for line in lines if "head: " in line]
    for step in range(1, 5):
        (line,) = [line for line in lines if line.split()[:1] == [str(step)]]
        assert len(line) == len(header)
    after = text[text.rindex("done: 4 steps") :]
    assert "training" not in after

    job = load(Job, launcher.of("terminal") / "config.toml", [])
    _, model = build_model(job)
    flops = model_size(model, job.training.sequence_length).flops
    for record in records(launcher.of("terminal")):
        assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / (peak * 1e12))


def test_a_finished_run_only_reports(finished: Path, launcher: Launcher) -> None:
    before = (finished / "metrics.jsonl").read_text()
    exported = (finished / "hf" / "model.safetensors").stat()
    text = launcher.run("--job.name", "finished", "--checkpoint.export", "--training.validation_interval", "4").text
    assert "nothing left to train" in text
    assert "bits per byte" in text
    assert (finished / "metrics.jsonl").read_text() == before
    again = (finished / "hf" / "model.safetensors").stat()
    assert (again.st_ino, again.st_mtime_ns) == (exported.st_ino, exported.st_mtime_ns)


def test_an_export_older_than_the_last_checkpoint_is_replaced(finished: Path, launcher: Launcher) -> None:
    directory = launcher.of("exported")
    shutil.copytree(finished, directory)
    exported = (directory / "hf" / "model.safetensors").read_bytes()
    (directory / "hf" / "model.safetensors").write_bytes(b"of an earlier step")
    os.utime(directory / "hf" / "config.json", (0, 0))
    launcher.run("--job.name", "exported", "--checkpoint.export", "--training.validation_interval", "4")
    assert (directory / "hf" / "model.safetensors").read_bytes() == exported
    assert not list(directory.glob("hf.*"))


def test_bad_records_are_those_of_all_ranks(launcher: Launcher) -> None:
    text = "the cat saw two dogs run far away " * 4
    lines = [json.dumps({"text": text} if number % 3 else {"txet": text}) for number in range(60)]
    (launcher.directory / "bad.jsonl").write_text("\n".join(lines))
    flags = ["--data.source.0.kind", "jsonl", "--data.source.0.path", str(launcher.directory / "bad.jsonl")]
    flags += ["--data.vocabulary_size", "270", "--training.steps", "6"]
    flags += ["--training.validation_rows", "0", "--metrics.completion_tokens", "0"]
    for ranks in (1, 2):
        launcher.run("--job.name", f"bad-{ranks}", *flags, ranks=ranks)
    one, two = ([line["bad_records"] for line in records(launcher.of(f"bad-{ranks}"))] for ranks in (1, 2))
    assert one == two
    assert one[0] < one[-1]


def test_rows_and_experts_over_two_ranks_are_the_same_run(launcher: Launcher) -> None:
    """Losses, validation, tokens and a completion of one process, when two share the rows and the experts."""
    flags = ["--training.steps", "3", "--metrics.interval", "1"]
    launcher.run("--job.name", "alone", *flags)
    launcher.run("--job.name", "split", *flags, "--parallel.context", "2", "--parallel.expert", "2", ranks=2)
    alone, split = (records(launcher.of(name)) for name in ("alone", "split"))
    for one, two in zip(alone, split, strict=True):
        assert one["tokens"] == two["tokens"]
        for key in ("loss", "auxiliary_loss", "grad_norm", "validation_loss", "bits_per_byte"):
            if key in one:
                assert two[key] == pytest.approx(one[key], rel=1e-4), key


def test_validation_and_profiling_change_nothing(finished: Path, launcher: Launcher) -> None:
    """Neither weights nor router biases; a run without any validation ends bitwise the same."""
    launcher.run("--job.name", "unvalidated", "--training.validation_rows", "0", "--metrics.profile", "2", "3")
    first, second = (
        checkpoint_tensors(path / "checkpoints" / "step-12") for path in (finished, launcher.of("unvalidated"))
    )
    assert_profiled(launcher.of("unvalidated") / "profile", (2, 3))
    assert any("correction_bias" in name and value.any() for name, value in first.items())
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def assert_profiled(directory: Path, steps: tuple[int, ...]) -> None:
    """A trace with operations; the memory in a snapshot on CUDA, otherwise in the trace."""
    on_cuda = torch.cuda.is_available()
    names = {f"step-{step}.json.gz" for step in steps}
    snapshots = {f"step-{step}-memory.pickle" for step in steps} if on_cuda else set()
    assert {path.name for path in directory.iterdir()} == names | snapshots
    for name in names:
        with gzip.open(directory / name) as file:
            events = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= events
        assert ("[memory]" in events) is not on_cuda
    for name in snapshots:
        assert (directory / name).stat().st_size > 1000


def test_starts_from_trained_weights(finished: Path, launcher: Launcher) -> None:
    """From a Hugging Face directory and from a checkpoint of another run: the same first loss, near the last one."""
    sources = {"from_hf": finished / "hf", "from_ours": finished / "checkpoints" / "step-12"}
    for name, source in sources.items():
        flags = ["--job.name", name, "--checkpoint.load", str(source), "--training.steps", "1"]
        launcher.run(*flags, "--data.tokenizer", str(finished / "tokenizer"))
    losses = [records(launcher.of(name))[0]["loss"] for name in sources]
    assert losses[0] == losses[1]
    assert abs(losses[0] - records(finished)[-1]["validation_loss"]) < 0.2


def test_dry_run(launcher: Launcher) -> None:
    text = launcher.run("--job.name", "dry", "--dry-run", "--model.flavor", "debug").text
    assert not launcher.of("dry").exists()
    for part in (
        "parameters",
        "active",
        "mesh: replicate 1, shard 1",
        "tokens a step",
        "FLOPs a token",
        "no decay",
        "kernels: ",
    ):
        assert part in text


PLANS = {
    "--parallel.context 2 --parallel.expert 8": "mesh: replicate 1, shard 32, context 2, expert 8 on cpu",
    "--parallel.replicate 4 --parallel.expert 4 --compile.enable": "mesh: replicate 4, shard 16, expert 4 on cpu",
    "--parallel.replicate 2 --parallel.expert 4 --parallel.fsdp.reduce_dtype bfloat16 --parallel.fsdp.prefetch 2 "
    "--parallel.fsdp.reduce_scatters_in_flight 2 --parallel.fsdp.moe_layers_kept_gathered 1 "
    "--parallel.fsdp.keep_experts_between_microbatches": "mesh: replicate 2, shard 32, expert 4 on cpu",
}
NO_PLANS = {
    "--parallel.replicate 3": "parallel.replicate = 3: does not divide the 64 processes; possible: 1, 2, 4, 8, 16, 32, 64",
    "--parallel.replicate 2 --parallel.context 3": "parallel.context = 3: does not divide the 32 ranks that share a copy",
    "--parallel.expert 16": "parallel.expert = 16: does not divide the 8 experts of layers.1.mixer; possible: 1, 2, 4, 8",
    "--parallel.shard 7": "parallel.shard = 7: 64 processes run, replicate is 1 and context is 1; possible: -1 or 64",
    "--parallel.fsdp.moe_layers_kept_gathered 99": "parallel.fsdp.moe_layers_kept_gathered = 99: the model has ",
}


def test_dry_run_plans_for_ranks_that_do_not_exist(launcher: Launcher) -> None:
    flags = "--job.name planned --dry-run --parallel.world 64 --model.flavor debug --model.config.n_routed_experts 8"
    flags += " --training.global_batch_size 64"
    flags += " --training.microbatch_size 1 --training.sequence_length 768 --data.streams 64"
    for plan, expected in PLANS.items():
        text = launcher.run(*flags.split(), *plan.split()).text
        assert expected in text and "rank 0 holds" in text
    for plan, expected in NO_PLANS.items():
        launch = launcher(*flags.split(), *plan.split())
        assert launch.wait() == [2]
        assert expected in launch.text and "Traceback" not in launch.text
    launch = launcher(*flags.replace("--dry-run ", "").split())
    assert launch.wait() == [2]
    assert "parallel.world = 64: is for a --dry-run; leave it out to train" in launch.text


def test_dry_run_looks_into_initial_weights(finished: Path, launcher: Launcher, tmp_path: Path) -> None:
    """Names and shapes, from the headers alone: what would not load is one line for each tensor."""
    checkpoint = finished / "checkpoints" / "step-12"
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / ".metadata").write_bytes((checkpoint / ".metadata").read_bytes()[:100])
    (tmp_path / "empty").mkdir()
    flags = ("--job.name", "dry", "--dry-run", "--checkpoint.load")

    text = launcher.run(*flags, str(finished / "hf")).text
    assert f"initial weights: {finished / 'hf'}, where " in text
    assert "tensors fit\n" in text
    waived = ("--model.config.head_dim", "8", "--checkpoint.init_missing", "*.[qkv]_proj.*", "*.o_proj.*")
    text = launcher.run(*flags, str(finished), *waived).text  # a run means its newest checkpoint
    assert f"initial weights: {checkpoint}, where " in text
    assert "tensors fit; init_missing stands for 8\n" in text

    mistakes: dict[tuple[str, ...], list[str]] = {
        (str(tmp_path / "none"),): ["no such directory"],
        (str(tmp_path / "empty"),): ["is neither a Hugging Face directory"],
        (str(cut),): [".metadata: cannot read it"],
        (str(finished / "hf"), "--checkpoint.init_missing", "nothing*"): ["'nothing*' matches no missing tensor"],
        (str(finished / "hf"), "--model.config.pattern", "ME"): ["backbone.layers.2.norm.weight is unexpected"],
        (str(checkpoint), "--model.config.pattern", "ME*-"): ["layers.3.norm.weight is missing"],
        (str(checkpoint), "--model.config.vocab_size", "301"): [
            "embeddings.weight has shape [300, 32], the model needs [301, 32]",
            "lm_head.weight has shape [300, 32], the model needs [301, 32]",
        ],
    }
    for more, messages in mistakes.items():
        launch = launcher(*flags, *more)
        assert launch.wait() == [2], launch.text
        for message in messages:
            assert message in launch.text, launch.text
        assert all(line.startswith("error: ") for line in launch.text.splitlines()), launch.text
    assert not launcher.of("dry").exists()


def test_mistakes_are_told_once_and_all_ranks_end(launcher: Launcher) -> None:
    launch = launcher("--training.steps", "-1", "--job.nmae", "x", ranks=2)
    assert launch.wait() == [2, 2]
    assert len(launch.text.splitlines()) == 2, launch.text
    assert "training.steps" in launch.text
    assert "did you mean" in launch.text
    for flag in ("--training.global_batch_size=3", "--checkpoint.load=/nowhere"):
        launch = launcher("--job.name", "mistaken", flag, ranks=2)
        assert launch.wait() == [2, 2], launch.text
        assert launch.text.startswith("error: ")
        assert len(launch.text.splitlines()) == 1, launch.text


def test_a_directory_that_cannot_be_written(launcher: Launcher) -> None:
    launch = launcher("--job.output_directory", str(launcher.job / "below_a_file"))
    assert launch.wait() == [2]
    assert launch.text.startswith("error: job.output_directory: cannot write")


def test_another_model_does_not_resume(finished: Path, launcher: Launcher) -> None:
    launch = launcher("--job.name", "finished", "--model.config.head_dim", "8")
    assert launch.wait() == [2]
    assert launch.text.startswith("error: model.config.head_dim = 8: ")
    assert json.loads((finished / "checkpoints" / "step-12" / "state.json").read_text())["step"] == 12
