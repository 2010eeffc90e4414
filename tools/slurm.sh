#!/usr/bin/env bash
# One job on several machines:  sbatch --nodes 4 tools/slurm.sh train_configs/JOB.toml [--table.key value ...]
# Submit it from the repository's folder, which all machines see under the same path, after a ./run_train.sh has made
# .venv there on such a machine. Change the #SBATCH lines to what your cluster has, or override them: sbatch --nodes 16 ...
#SBATCH --job-name=titan_nemotron
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=slurm-%j.txt
# Five minutes before its time is up the trainer is told; it saves, and the job queues again and resumes from there.
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if (($# == 0)); then
    echo "Usage: sbatch --nodes N tools/slurm.sh CONFIG.toml [--table.key value ...]" >&2
    exit 2
fi
gpus="${SLURM_GPUS_ON_NODE:-1}"
# The first machine hosts the rendezvous. The port follows from the job, so that two jobs on it do not meet.
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
port=$((20000 + SLURM_JOB_ID % 20000))
cores="${SLURM_CPUS_PER_TASK:-$gpus}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > gpus ? cores / gpus : 1))}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280 # seconds to save in, within the five minutes above

status=0
# torchrun with the trainer's own messages and exit status; `.venv/bin/torchrun` in its place works as well.
# When one machine has ended, the others have a minute to end too: not killed at once, for one may be finishing a save.
srun --cpus-per-task "$cores" --kill-on-bad-exit=0 --wait=60 .venv/bin/python tools/launch.py \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$port" \
    -m titan_nemotron.train --config "$@" || status=$?
if ((status == 128 + 15)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
