"""Starting alone and the mesh; several ranks are in tests/distributed."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from titan_nemotron.errors import UserError
from titan_nemotron.parallel.config import ParallelConfig
from titan_nemotron.parallel.mesh import build_mesh, data_coordinates, process_device, start_process_group

CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    start_process_group(CPU, 30.0)
    yield
    dist.destroy_process_group()


def test_one_process_without_a_launcher(alone: None) -> None:
    mesh = build_mesh(ParallelConfig(), CPU)
    assert mesh.axes == {"replicate": 1, "shard": 1}
    assert data_coordinates(mesh) == (0, 1)
    assert build_mesh(ParallelConfig(shard=1), CPU).dense.size() == 1


def test_a_degree_that_the_ranks_cannot_form(alone: None) -> None:
    with pytest.raises(
        UserError, match=r"parallel\.shard = 3: 1 processes run, replicate is 1 and context is 1; .* -1 or 1"
    ):
        build_mesh(ParallelConfig(shard=3), CPU)
    with pytest.raises(UserError, match=r"parallel\.replicate = 2: does not divide the 1 processes; possible: 1$"):
        build_mesh(ParallelConfig(replicate=2), CPU)
    with pytest.raises(UserError, match=r"parallel\.expert = 2: does not divide the 1 ranks that share a copy"):
        build_mesh(ParallelConfig(expert=2), CPU)
    with pytest.raises(UserError, match=r"parallel\.context = 2: does not divide the 1 ranks that share a copy"):
        build_mesh(ParallelConfig(context=2), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda sees a GPU")
def test_devices_without_a_gpu() -> None:
    assert process_device("auto") == process_device("cpu") == CPU
    with pytest.raises(UserError, match=r'job\.device: "cuda", but PyTorch sees no GPU'):
        process_device("cuda")
