#!/usr/bin/env bash
# Trains one job: ./run_train.sh [--table.key value ...]
#   CONFIG_FILE   the job's TOML file              (default: train_configs/nemotron3_debug.toml)
#   NGPU          processes on this machine        (default: the visible GPUs, else 1)
# For PYTHON, GPU_EXTRAS and pip's settings see tools/setup_venv.sh; for several machines run_slurm.sh.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=tools/setup_venv.sh
source "$here/tools/setup_venv.sh"
setup_venv train

visible_gpus() {
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true
    elif has_gpu; then
        nvidia-smi -L | grep -c '^GPU' || true
    else
        echo 0
    fi
}

NGPU="${NGPU:-$(visible_gpus)}"
[[ "$NGPU" == 0 ]] && NGPU=1
if [[ ! "$NGPU" =~ ^[1-9][0-9]*$ ]]; then
    echo "NGPU is '$NGPU': give the number of processes to start on this machine." >&2
    exit 2
fi
job=(-m titan_nemotron.train --config "${CONFIG_FILE:-$here/train_configs/nemotron3_debug.toml}" "$@")
cores="$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}"

if ((NGPU > 1)); then
    # torchrun --standalone --nproc-per-node N, but ending with the trainer's own message and exit status.
    exec "$venv/bin/python" "$here/tools/launch.py" --standalone --nproc-per-node "$NGPU" "${job[@]}"
fi
# What torchrun would set for one process, without a second process to watch it; port 0 is any free one.
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0
exec "$venv/bin/python" "${job[@]}"
