#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains on TPUs of a GKE cluster, as a workload of xpk (github.com/AI-Hypercomputer/xpk).
#
#     NAME=bert CLUSTER=tpus ZONE=us-west4-a PROJECT=mine TYPE=v5litepod-16 IMAGE=REGION-docker.pkg.dev/mine/bert/bert_jax \
#         launch/gke_xpk.sh train --config=pretrain:base --config.data.path=gs://BUCKET/data128 --workdir=gs://BUCKET/base
#
# Needs: xpk, gcloud and kubectl, logged in; a cluster made by `xpk cluster create`; IMAGE, with Python 3.11 or later and
# `pip install 'bert_jax[train,tpu,gcs]'`; a service account that may write the bucket. SLICES is 1 unless set.
# GKE tells every pod its number and the names of the others (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES), so they join without
# a flag. A pod that ends with another status than 0 is started again, RESTARTS times (10), and resumes.
#
# Not run on a cluster yet: the test checks the command by an xpk that only records it.
set -euo pipefail

: "${NAME:?the name of the workload}" "${CLUSTER:?of xpk}" "${ZONE:?of the cluster}" "${PROJECT:?of Google Cloud}"
: "${TYPE:?such as v5litepod-16}" "${IMAGE:?with bert_jax inside}"
[ $# -gt 0 ] || { echo "error: give the command of bert_jax, as in: $0 train --config=pretrain:base ..." >&2; exit 1; }

# Pods pull their image in their own time; the processes wait so long for each other.
case $1 in train | finetune) set -- "$@" --join_seconds="${JOIN_SECONDS:-900}" ;; esac

exec xpk workload create --workload="$NAME" --cluster="$CLUSTER" --zone="$ZONE" --project="$PROJECT" \
  --tpu-type="$TYPE" --num-slices="${SLICES:-1}" --docker-image="$IMAGE" --max-restarts="${RESTARTS:-10}" \
  --command="bert_jax $(printf '%q ' "$@")"
