"""Seconds before anything happens: the import, the console script, a second start of ./run_train.sh.

python benchmarks/startup.py [--repeats 10]

Each time is the best of the repeats, and each is compared in turn with the same command without what is measured, so
that a busy machine slows both.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(sys.executable).parent / "titan-nemotron"


def seconds(command: list[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True)
    return time.perf_counter() - start


def share(command: list[str], without: list[str], repeats: int, environment: dict[str, str] | None = None) -> float:
    """How much longer the best run of command takes than the best run without what is measured."""
    pairs = [(seconds(command, environment or {}), seconds(without, environment or {})) for _ in range(repeats)]
    return min(first for first, _ in pairs) - min(second for _, second in pairs)


def third_party(module: str) -> list[str]:
    """The packages outside the standard library that importing a module of ours brings in."""
    code = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    names = {
        name.partition(".")[0] for name in subprocess.check_output([sys.executable, "-c", code], text=True).split()
    }
    return sorted(names - set(sys.stdlib_module_names) - {"titan_nemotron"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats

    python, nothing = [sys.executable, "-c"], ["true"]
    rows = [
        ("import titan_nemotron", 0.3, share([*python, "import titan_nemotron"], [*python, ""], repeats)),
        ("titan-nemotron --help", 1.5, share([str(SCRIPT), "--help"], nothing, repeats)),
        # A number of processes that does not exist ends the script where it would start the trainer.
        ("./run_train.sh, second start", 2.0, share(["./run_train.sh"], nothing, repeats, {"NGPU": "none"})),
    ]
    print(f"{'':<32}{'seconds':>9}{'at most':>9}")
    for name, target, value in rows:
        print(f"{name:<32}{value:>9.3f}{target:>9.1f}{'' if value <= target else '   too slow'}")
    packages = third_party("titan_nemotron"), third_party("titan_nemotron.commands")
    print(f"third-party packages imported: {packages[0] or 'none'}; by the console script: {packages[1] or 'none'}")


if __name__ == "__main__":
    main()
