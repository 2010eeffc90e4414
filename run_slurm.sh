#!/usr/bin/env bash
# One job on several machines:  sbatch --nodes 4 run_slurm.sh train_configs/JOB.toml [--table.key value ...]
# Submit it from the repository's folder, which all machines must see under the same path (or sync first), after one
# ./run_train.sh there has created .venv. Change or override the #SBATCH lines to what your cluster is.
#SBATCH --job-name=titan_nemotron
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=outputs/slurm-%j.txt
# Slurm tells the trainer two minutes before the time is up; it saves a checkpoint, and the job queues again.
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

if (($# == 0)); then
    echo "Usage: sbatch --nodes N run_slurm.sh CONFIG.toml [--table.key value ...]" >&2
    exit 2
fi
processes="${SLURM_GPUS_ON_NODE:-1}"
# The first machine of the job hosts the rendezvous; the port follows from the job, so that two jobs do not meet.
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
port=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-8} / processes))}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110   # how long the trainer may take to save after the signal

exec srun --kill-on-bad-exit=1 .venv/bin/torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$processes" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$port" \
    -m titan_nemotron.train --config "$@"
