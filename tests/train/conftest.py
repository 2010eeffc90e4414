import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.launch import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    directory: Path = tmp_path_factory.mktemp("train")
    yield Launcher(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def finished(launcher: Launcher) -> Path:
    """The directory of a run that was never disturbed; every step has a record."""
    flags = ("--job.name", "finished", "--checkpoint.export", "--training.validation_interval", "4")
    (launcher.directory / "finished.txt").write_text(launcher.run(*flags).text)
    return launcher.of("finished")
