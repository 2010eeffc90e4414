"""Runs the multi-rank cases; see harness.py for how to add one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import Launch, load_cases, run_case
from titan_nemotron.parallel.mesh import start_process_group

CASES = load_cases()
RUNS = [(world_size, name) for name, (_, world_sizes) in CASES.items() for world_size in world_sizes]


@pytest.fixture(scope="module")
def launches() -> Iterator[dict[int, Launch]]:
    """The launch of each world size; the first test of a size starts it."""
    started: dict[int, Launch] = {}
    yield started
    for launch in started.values():
        launch.close()


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
    launches: dict[int, Launch],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if world_size not in launches:
        selected = [item.callspec.params for item in request.session.items if item.name.startswith("test_case[")]  # type: ignore[attr-defined]
        names = [params["name"] for params in selected if params.get("world_size") == world_size]
        launches[world_size] = Launch(world_size, names, tmp_path_factory.mktemp(f"ranks{world_size}"))
    if error := launches[world_size].outcome(name):
        pytest.fail(error, pytrace=False)
