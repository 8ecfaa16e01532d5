#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs bert_jax on a TPU host, and runs a command of it until it has finished. tpu_vm.sh copies it to the hosts;
# startup.sh runs the same.
#
#     PACKAGE=gs://BUCKET/bert_jax-0.2.0-py3-none-any.whl bash host.sh train --config=... --workdir=gs://BUCKET/run
#
# Needs: the network, to install uv, Python 3.11 and the package; gcloud if PACKAGE is in a bucket.
# A run that was killed, lost a host or hung is started again, and resumes from its last checkpoint. An error in its
# settings or data (status 1) ends the loop, because another try would end the same way.
#
# Not run on a TPU yet: the test checks the loop with a command of its own.
set -uo pipefail

: "${PACKAGE:?a wheel, gs://BUCKET/FILE.whl, or what pip installs}"
PLACE=${PLACE:-$HOME/bert_jax}  # of the environment
PAUSE=${PAUSE:-10}              # seconds before another try

install() {
  [ -x "$PLACE/bin/bert_jax" ] && return
  command -v uv >/dev/null || { curl -LsSf https://astral.sh/uv/install.sh | sh; PATH=$HOME/.local/bin:$PATH; }
  local what=$PACKAGE
  if [[ $PACKAGE == gs://* ]]; then
    gcloud storage cp "$PACKAGE" /tmp/ || return
    what=/tmp/${PACKAGE##*/}
  fi
  uv venv --quiet --python 3.11 "$PLACE" && uv pip install --quiet --python "$PLACE/bin/python" "${what}[train,tpu,gcs,hub]"
}

# Hosts of a slice finish their installation minutes apart; the processes wait so long for each other.
case ${1:-} in train | finetune) set -- "$@" --join_seconds="${JOIN_SECONDS:-900}" ;; esac

until install; do echo "cannot install yet; again in $PAUSE s" >&2; sleep "$PAUSE"; done
while true; do
  "$PLACE/bin/bert_jax" "$@"
  status=$?
  case $status in
    0) echo "finished"; exit 0 ;;
    1 | 2) echo "ended with status $status: see the error above; it is not tried again" >&2; exit "$status" ;;
    130) echo "stopped by Ctrl-C" >&2; exit "$status" ;;
  esac
  echo "ended with status $status; the same command again in $PAUSE s" >&2
  sleep "$PAUSE"
done
