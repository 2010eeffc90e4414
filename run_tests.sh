#!/usr/bin/env bash
# Runs everything that has to pass: ./run_tests.sh
# or only pytest with these arguments:  ./run_tests.sh tests/ops -k scan
# Needs the network for the first installation alone.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=tools/setup_venv.sh
source "$here/tools/setup_venv.sh"
setup_venv tests
cd "$here"

export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=disabled
if (($#)); then
    exec python -m pytest "$@"
fi

# The tensors of tests are small: a file of tests on each core is faster than several cores for one test.
workers="$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)"
((workers <= 8)) || workers=8
export OMP_NUM_THREADS=1

summary="" status=0
check() {
    local start=$SECONDS verdict=ok
    printf '\n== %s\n' "$*"
    "$@" || { verdict=FAILED && status=1; }
    summary+="$(printf '  %-44s %4d s  %s' "$*" $((SECONDS - start)) "$verdict")"$'\n'
}

check ruff check .
check ruff format --check .
check shellcheck -x run_train.sh run_tests.sh tools/setup_venv.sh run_slurm.sh .ci/run
check mypy
check lint-imports
printf '\n== before pytest\n%s' "$summary"
check python -m pytest -n "$workers" --dist loadfile --durations 10
exit "$status"
