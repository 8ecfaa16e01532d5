#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Asks for spot TPUs, trains on them by a start-up script, and asks again after every pre-emption, until the run is done.
#
#     NAME=bert ZONE=us-central1-a TYPE=v5litepod-16 PACKAGE=gs://BUCKET/bert_jax-0.2.0-py3-none-any.whl \
#         launch/queued_resource.sh train --config=pretrain:base --config.data.path=gs://BUCKET/data128 \
#         --workdir=gs://BUCKET/base
#
# Needs: gcloud, logged in, with a project that has quota for spot TPUs of TYPE in ZONE (TPU Research Cloud gives it);
# PACKAGE as for tpu_vm.sh; a bucket that the TPUs' service account may write. Keep it running, in tmux for one: the
# hosts resume by themselves after a reboot, but TPUs that were taken away are only replaced by a new request.
# --workdir must be in a bucket: disks go with the TPUs. DONE is the object that tells that the run has finished.
# KEEP=1 leaves the TPUs at the end. SPOT= (empty) asks for TPUs that are not taken away.
#
# Not run on a TPU yet: the test checks the commands by a gcloud that only records them.
set -euo pipefail

: "${NAME:?the name of the request}" "${ZONE:?such as us-central1-a}" "${TYPE:?such as v5litepod-16}" "${PACKAGE:?a wheel}"
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
SPOT=${SPOT---spot}
PAUSE=${PAUSE:-60}  # seconds between two looks

workdir=
for argument in "$@"; do
  case $argument in --workdir=gs://*) workdir=${argument#--workdir=} ;; esac
done
[ -n "$workdir" ] || { echo "error: the command needs --workdir=gs://BUCKET/RUN: disks go with the TPUs" >&2; exit 1; }
DONE=${DONE:-$workdir/pretrained/config.json}

requests() { gcloud compute tpus queued-resources "$@" --zone="$ZONE"; }

here=$(cd "$(dirname "$0")" && pwd)
command=$(mktemp)
trap 'rm -f "$command"' EXIT
printf '%s\n' "$@" >"$command"

ask() {
  requests create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$VERSION" ${SPOT:+"$SPOT"} \
    --metadata="bert-jax-package=$PACKAGE" \
    --metadata-from-file="startup-script=$here/startup.sh,bert-jax-host=$here/host.sh,bert-jax-command=$command"
}

until gcloud storage ls "$DONE" >/dev/null 2>&1; do
  state=$(requests describe "$NAME" --format='value(state.state)' 2>/dev/null || echo MISSING)
  echo "$(date -u +%FT%TZ) $NAME: $state"
  case $state in
    MISSING) ask ;;
    SUSPENDED | FAILED) requests delete "$NAME" --quiet --force && ask ;;
  esac
  sleep "$PAUSE"
done
echo "finished: $DONE"
[ -n "${KEEP:-}" ] || requests delete "$NAME" --quiet --force
