"""Checkpoints: whole or absent, what is kept, and messages."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from titan_nemotron.checkpoint.config import CheckpointConfig
from titan_nemotron.checkpoint.manager import CheckpointManager, complete_steps
from titan_nemotron.errors import UserError
from titan_nemotron.optim.adamw import build_optimizer
from titan_nemotron.optim.config import OptimizerConfig


def small(seed: int = 0, width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4))
    model[0].bias.requires_grad_(False)
    groups = [{"params": [model[0].weight, model[2].weight]}, {"params": [model[1].weight], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [value for values in optimizer.state_dict()["state"].values() for value in values.values()]
    return [*model.state_dict().values(), *state]


def save(manager: CheckpointManager, number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    manager.save(number, model, optimizer, {"tokens": 7}, 'name = "job"\n')


@pytest.mark.parametrize("asynchronous", [False, True])
def test_restores_bitwise_in_a_fresh_process_state(tmp_path: Path, asynchronous: bool) -> None:
    config = CheckpointConfig(asynchronous=asynchronous)
    model, optimizer = small()
    step(model, optimizer)
    manager = CheckpointManager(tmp_path, config)
    save(manager, 1, model, optimizer)
    saved = [tensor.clone() for tensor in tensors(model, optimizer)]
    step(model, optimizer)  # while the writing may still go on
    manager.close()

    torch.manual_seed(99)
    other, fresh = small(seed=1)
    again = CheckpointManager(tmp_path, config)
    assert again.latest() == 1
    state = again.load(1, other, fresh)
    assert state["tokens"] == 7
    assert (tmp_path / "step-1" / "config.toml").read_text() == 'name = "job"\n'
    assert all(torch.equal(a, b) for a, b in zip(saved, tensors(other, fresh), strict=True))
    step(other, fresh)  # draws from the restored generator
    assert all(torch.equal(a, b) for a, b in zip(tensors(model, optimizer), tensors(other, fresh), strict=True))


def test_hyperparameters_are_those_of_the_job_at_hand(tmp_path: Path) -> None:
    model, optimizer = small()
    step(model, optimizer)
    manager = CheckpointManager(tmp_path, CheckpointConfig())
    save(manager, 1, model, optimizer)
    manager.close()
    other, fresh = small(seed=1)
    fresh.param_groups[0]["weight_decay"] = 0.5
    CheckpointManager(tmp_path, CheckpointConfig()).load(1, other, fresh)
    assert fresh.param_groups[0]["weight_decay"] == 0.5


def test_what_is_not_whole_is_not_seen(tmp_path: Path) -> None:
    model, optimizer = small()
    step(model, optimizer)
    manager = CheckpointManager(tmp_path, CheckpointConfig(keep_last=9))
    for number in (1, 2, 3):
        save(manager, number, model, optimizer)
    manager.close()
    (tmp_path / "step-3" / ".metadata").unlink()
    (tmp_path / "step-2").rename(tmp_path / "step-2.partial")
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-7.removed")
    assert complete_steps(tmp_path) == [1]
    assert CheckpointManager(tmp_path, CheckpointConfig()).latest() == 1
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.removed"))


def test_keeps_the_last_and_every_nth(tmp_path: Path) -> None:
    model, optimizer = small()
    step(model, optimizer)
    manager = CheckpointManager(tmp_path, CheckpointConfig(keep_last=2, keep_every=4))
    for number in range(1, 11):
        save(manager, number, model, optimizer)
    manager.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-4", "step-8", "step-9"]


def test_names_the_tensors_that_do_not_fit(tmp_path: Path) -> None:
    model, optimizer = small()
    step(model, optimizer)
    manager = CheckpointManager(tmp_path, CheckpointConfig())
    save(manager, 1, model, optimizer)
    manager.close()
    with pytest.raises(UserError, match=r"model\.0\.weight in shape \[8, 4\], the model in \[6, 4\]"):
        CheckpointManager(tmp_path, CheckpointConfig()).load(1, *small(width=6))
    other, fresh = small()
    fresh.add_param_group({"params": [other[0].bias.requires_grad_()]})
    with pytest.raises(UserError, match=r"lacks optimizer\.state\.0\.bias\.exp_avg"):
        CheckpointManager(tmp_path, CheckpointConfig()).load(1, other, fresh)


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^checkpoint: cannot open .*Not a directory.*$"):
        CheckpointManager(tmp_path / "file" / "checkpoints", CheckpointConfig())


def test_a_disk_that_takes_no_more_is_one_line(tmp_path: Path) -> None:
    model, optimizer = small(width=4096)
    step(model, optimizer)
    manager = CheckpointManager(tmp_path, CheckpointConfig())
    save(manager, 1, model, optimizer)
    manager.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        save(manager, 2, model, optimizer)
        with pytest.raises(UserError, match=r"^checkpoint: cannot write .*GiB free.*$"):
            manager.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]
    assert json.loads((tmp_path / "step-1" / "state.json").read_text())["step"] == 1
    save(manager, 2, model, optimizer)
    manager.close()
    assert complete_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_without_a_gradient_is_saved_and_no_step_is_counted_that_was_not_taken(
    tmp_path: Path, steps: int
) -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        return model, build_optimizer(model, OptimizerConfig())

    model, optimizer = built()
    for _ in range(steps):
        step(model["used"], optimizer)
    manager = CheckpointManager(tmp_path, CheckpointConfig(asynchronous=False))
    save(manager, steps, model, optimizer)
    other, fresh = built()
    manager.load(steps, other, fresh)
    for restored, its_optimizer in ((model, optimizer), (other, fresh)):
        counts = {name: int(its_optimizer.state[p]["step"]) for name, p in restored.named_parameters()}
        assert counts == {name: steps if name.startswith("used") else 0 for name in counts}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert all(torch.equal(value, fresh.state[two][key]) for key, value in optimizer.state[one].items())
