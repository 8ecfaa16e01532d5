#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on GPU nodes under Slurm, and queues itself again when it is pre-empted or its time is over.
#
#     sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm.sh train --config=pretrain:large,phase=1 \
#         --config.data.path=/shared/data128 --workdir=/shared/runs/large
#
# Needs: an environment with `pip install 'bert_jax[train,cuda12]'`, on BERT_JAX (its directory, .venv here unless set), and a
# work directory that all nodes share, or a bucket. One task a GPU: JAX gives each task of a node the GPU of its number.
# Two minutes before the end of its time every task gets SIGTERM: the run saves, ends with status 143 and is queued
# again; so it is after status 75 (a node was lost), 76 (it hung) and 134 (the first node was lost).
#
# Not run on a cluster yet: the test checks the command by an srun that only records it.
#SBATCH --job-name=bert_jax
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

[ $# -gt 0 ] || { echo "error: give the command of bert_jax, as in: sbatch $0 train --config=pretrain:base ..." >&2; exit 1; }

srun --kill-on-bad-exit=0 --wait=120 "${BERT_JAX:-.venv}/bin/bert_jax" "$@"
status=$?
case $status in
  75 | 76 | 134 | 137 | 143)
    echo "ended with status $status; the same job again" >&2
    scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit "$status"
