#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Rehearses benchmarks/gpu.sh on a CPU: each stage is killed in the middle, then goes on in slices to its end.
#     benchmarks/gpu_rehearse.sh [FLAG...]       flags are for benchmarks/gpu.py, such as --peer_python=PATH
#     KILL_AFTER=60 MINUTES=2 STAGES="1 3" benchmarks/gpu_rehearse.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export WORK=${WORK:-runs/gpu_rehearsal}
rm -rf "$WORK"
for stage in ${STAGES:-1 2 3}; do
  echo "stage $stage: killed after ${KILL_AFTER:-40} seconds"
  benchmarks/gpu.sh "$stage" --rehearse "$@" &
  sleep "${KILL_AFTER:-40}"
  kill -KILL $! 2>/dev/null || true
  wait $! || true
  for slice in $(seq 50); do
    status=0
    benchmarks/gpu.sh "$stage" --rehearse --minutes="${MINUTES:-3}" "$@" || status=$?
    echo "stage $stage: slice $slice ended with status $status"
    [[ $status == 2 ]] || break
  done
  [[ $status == 0 ]] || exit "$status"
done
ls -l "$WORK/rehearsal/records"
