"""The background process: the same rows, and no way to hang."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.support import config, texts, tokenizer, write_jsonl
from tests.support import REPOSITORY
from titan_nemotron.data.config import DataConfig
from titan_nemotron.data.loader import Loader, build_loader
from titan_nemotron.errors import UserError


def build(settings: DataConfig) -> Loader:
    return build_loader(
        settings, tokenizer(), sequence_length=16, mtp_depths=1, rows_per_microbatch=2,
        data_rank=0, data_degree=1, seed=5,
    )  # fmt: skip


def loader(path: Path, **keys: Any) -> Loader:
    return build(config(path, "jsonl", **keys))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(40))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc/self").exists() else True


def test_the_same_rows_and_the_state_of_what_was_handed_out(corpus: Path) -> None:
    torch.ones(64, 64) @ torch.ones(64, 64)  # torch's threads exist
    inside, outside = loader(corpus), loader(corpus, workers=1, prefetch=3)
    states = []
    for _ in range(12):
        one, other = next(inside), next(outside)
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.mtp_labels, other.mtp_labels)
        assert one.target_bytes == other.target_bytes
        assert outside.state_dict() == inside.state_dict()  # not of what was read ahead
        states.append(json.loads(json.dumps(outside.state_dict())))
    last = one
    for state in (states[3], states[10]):
        inside.load_state_dict(state)
        outside.load_state_dict(state)
        assert torch.equal(next(inside).tokens, next(outside).tokens)
    assert torch.equal(outside.load_state_dict(states[10]) or next(outside).tokens, last.tokens)
    assert outside._worker is not None
    process = outside._worker.process
    outside.close()
    outside.close()
    assert process.poll() is not None
    with pytest.raises(ValueError, match="closed"):
        next(outside)


def test_the_users_mistakes_surface_as_they_are(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", texts(3))
    settings = config(path, "jsonl", workers=1)
    path.unlink()
    with pytest.raises(UserError, match=r"\[\[data.source\]\] path = .*b.jsonl': no file matches any more"):
        build(settings)
    (tmp_path / "a.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match="1 are bad; the first is .*a.jsonl:1: not JSON"):
        loader(tmp_path / "a.jsonl", workers=1)


def test_bad_records_are_reported(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open(corpus, "a") as file:
        file.write("nonsense\n")
    found = loader(corpus, workers=1)
    for _ in range(60):
        next(found)
    assert found.bad.count >= 1
    assert found.bad.named == [f"{corpus}:41: not JSON: Expecting value: line 1 column 1 (char 0)"]
    assert [record.message for record in caplog.records] == [f"bad record {found.bad.named[0]}"]
    found.close()


def test_a_defect_surfaces_with_its_traceback(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows read before it are handed out first."""
    found = loader(corpus, workers=1)
    for _ in range(3):
        next(found)
    found.close()
    broken = tokenizer().to_bytes().replace(b'"eos_token": "<|endoftext|>"', b'"eos_token": 7')
    monkeypatch.setattr(found.tokenizer, "to_bytes", lambda: broken)
    with pytest.raises(RuntimeError, match=r"(?s)loads and tokenises the data failed:\nTraceback.*TypeError"):
        found._start(None)


def test_a_killed_process_is_an_error_and_no_hang(corpus: Path) -> None:
    found = loader(corpus, workers=1, prefetch=1)
    next(found)
    assert found._worker is not None
    os.kill(found._worker.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="has ended .signal 9, out of memory"):
        list(found)  # what the pipe still holds comes first
    found.close()


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in a shell's background ignores it
from tests.data.support import config, plan, tokenizer
from titan_nemotron.data.worker import Worker
worker = Worker(plan(config(sys.argv[1], "jsonl")), tokenizer().to_bytes(), None, prefetch=2)
worker.receive()
print(worker.process.pid, flush=True)
time.sleep({sleep})
"""


@pytest.mark.parametrize("end", ["SIGKILL", "exit", "SIGINT"])
def test_it_ends_with_its_parent(corpus: Path, end: str) -> None:
    """A script without a __main__ guard, killed or at its end; a signal to the whole group reaches only the trainer."""
    script = SCRIPT.format(sleep=0 if end == "exit" else 60)
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(corpus)], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    if end == "SIGKILL":
        assert alive(pid)
        parent.kill()
    elif end == "SIGINT":
        os.killpg(parent.pid, signal.SIGINT)
    parent.wait(timeout=300)
    deadline = time.time() + 300
    while alive(pid) and time.time() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
