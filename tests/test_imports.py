"""What importing the package costs, and that a bare install, without any extra, can import all of it."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from tests.support import REPOSITORY

EXTRAS_ONLY = {"transformers", "datasets", "pyarrow", "torchao", "triton", "liger_kernel", "mamba_ssm", "causal_conv1d"}

IMPORT_ALL = """
import importlib.machinery, json, pkgutil, sys

class Bare(importlib.machinery.PathFinder):
    absent = set(json.loads(sys.argv[1]))

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.absent else super().find_spec(name, path, target)

sys.meta_path = [Bare if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
import titan_nemotron
for module in pkgutil.walk_packages(titan_nemotron.__path__, "titan_nemotron."):
    if not module.name.endswith("_triton"):  # kernels: imported where they run
        importlib.import_module(module.name)
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bare_install() -> set[str]:
    """The distributions that the package needs without extras, directly or not."""
    found: set[tuple[str, str]] = set()
    waiting = [("titan-nemotron", "")]
    while waiting:
        name, extra = waiting.pop()
        if (canonical(name), extra) in found:
            continue
        found.add((canonical(name), extra))
        for line in distribution(name).requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, inner) for inner in ("", *requirement.extras)]
    return {name for name, _ in found}


def test_importing_the_package_and_its_commands_imports_nothing_heavy():
    loaded = json.loads(
        run("import json, sys, titan_nemotron, titan_nemotron.commands; print(json.dumps(list(sys.modules)))")
    )
    assert not {"torch", "numpy", "pydantic", "tyro", "rich", "tokenizers", "transformers"} & set(loaded)


def test_every_module_imports_without_the_extras():
    ours = bare_install()
    absent = {
        module
        for module, names in packages_distributions().items()
        if not ours & {canonical(name) for name in names} and module != "titan_nemotron"
    }
    run(IMPORT_ALL, json.dumps(sorted(absent | EXTRAS_ONLY)))


def imported(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_models_and_operations_know_nothing_of_processes():
    files = [file for floor in ("models", "ops") for file in (REPOSITORY / "titan_nemotron" / floor).rglob("*.py")]
    modules = {(file.name, module) for file in files for module in imported(file)}
    assert ("init.py", "torch.Tensor") in modules
    assert not {(file, module) for file, module in modules if module.startswith("torch.distributed")}
