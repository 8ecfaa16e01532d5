#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates one TPU VM, or a slice of several hosts, installs bert_jax on all its hosts and trains there.
#
#     NAME=bert ZONE=us-west4-a TYPE=v5litepod-8 PACKAGE=gs://BUCKET/bert_jax-0.2.0-py3-none-any.whl \
#         launch/tpu_vm.sh train --config=pretrain:base --config.data.path=gs://BUCKET/data128 --workdir=gs://BUCKET/base
#
# Needs: gcloud, logged in, with a project that has quota for TYPE in ZONE; PACKAGE, a wheel in a bucket (`pip wheel
# --no-deps .` makes it) or anything else that pip installs; a service account of the VM that may write the bucket.
# VERSION is the image of the VM. The command runs on every host, and the hosts find each other. The same call resumes.
# The VM stays until `gcloud compute tpus tpu-vm delete NAME --zone=ZONE`, and costs as long.
#
# Not run on a TPU yet: the test checks the commands by a gcloud that only records them.
set -euo pipefail

: "${NAME:?the name of the TPU VM}" "${ZONE:?such as us-west4-a}" "${TYPE:?such as v5litepod-8}" "${PACKAGE:?a wheel}"
VERSION=${VERSION:-v2-alpha-tpuv5-lite}
[ $# -gt 0 ] || { echo "error: give the command of bert_jax, as in: $0 train --config=pretrain:base ..." >&2; exit 1; }

tpu() { gcloud compute tpus tpu-vm "$@" --zone="$ZONE"; }

if ! tpu describe "$NAME" >/dev/null 2>&1; then
  tpu create "$NAME" --accelerator-type="$TYPE" --version="$VERSION"
fi
here=$(cd "$(dirname "$0")" && pwd)
tpu scp "$here/host.sh" "$NAME:host.sh" --worker=all
# Quoted once more for the shell of the host.
tpu ssh "$NAME" --worker=all --command="PACKAGE=$(printf %q "$PACKAGE") bash host.sh $(printf '%q ' "$@")"
