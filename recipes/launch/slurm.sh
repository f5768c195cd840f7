#!/usr/bin/env bash
# sbatch --nodes 2 recipes/launch/slurm.sh recipe=medusa_llama3 shard=hybrid
# One launcher a node, one process a GPU. Submit the same line again to go on from the newest checkpoint; a job that was
# preempted resumes by itself. SIGTERM 120 s before the end goes to the steps, where it saves and leaves (with B:TERM it
# would go to this script alone).
#SBATCH --job-name=drafthead
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

gpus=${SLURM_GPUS_ON_NODE:-8}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a node
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-8} / gpus))

# SLURM_NODEID is known only within a task, so the launcher's command is put together there.
srun --kill-on-bad-exit=1 bash -c '
  exec accelerate launch --config_file recipes/launch/nodes.yaml \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * $1))" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" train/run.py "${@:2}"
' launcher "$gpus" "$@"
