"""Runs the multi-rank cases; see harness.py for how to add one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import launch_in_subprocess, load_cases, run_case
from titan_nemotron.parallel.mesh import start_process_group

CASES = load_cases()
RUNS = [(world_size, name) for name, (_, world_sizes) in CASES.items() for world_size in world_sizes]


@pytest.fixture(scope="session")
def results() -> dict[int, dict[str, str]]:
    """What launches have given so far, by world size."""
    return {}


@pytest.fixture
def alone() -> Iterator[None]:
    start_process_group(torch.device("cpu"), 60.0)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [name for world_size, name in RUNS if world_size == 1])
def test_one_rank(name: str, alone: None, tmp_path: Path) -> None:
    run_case(name, tmp_path)


@pytest.mark.parametrize("world_size, name", sorted(run for run in RUNS if run[0] > 1))
def test_case(
    world_size: int,
    name: str,
    results: dict[int, dict[str, str]],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if world_size not in results:
        selected = [item.callspec.params for item in request.session.items if item.name.startswith("test_case[")]  # type: ignore[attr-defined]
        names = [params["name"] for params in selected if params.get("world_size") == world_size]
        results[world_size] = launch_in_subprocess(world_size, names, tmp_path_factory.mktemp(f"ranks{world_size}"))
    error = results[world_size][name]
    if error:
        pytest.fail(error, pytrace=False)
