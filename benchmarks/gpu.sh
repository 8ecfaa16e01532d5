#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures on a machine with a GPU and no network, in slices of eight minutes: docs/howto/borrowed_gpu.md.
#     benchmarks/gpu.sh STAGE [--out=DIR] [--rehearse] ...       STAGE is 1, 2 or 3; the rest is for benchmarks/gpu.py
#     PYTHON=python3.12 KIT=DIR benchmarks/gpu.sh 1              another interpreter, another kit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
kit=${KIT:-gpu_kit}
work=${WORK:-runs/gpu}

if ! compgen -G "$kit/wheels/*.whl" >/dev/null; then
  echo "error: $kit has no wheels; make it with make gpu-kit where there is a package index, and bring it here" >&2
  exit 1
fi
if [[ ! -e $work/site || $kit/kit.json -nt $work/site ]]; then
  rm -rf "$work/site" "$work/site.new"
  mkdir -p "$work"
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-cache-dir \
    --target "$work/site.new" "$kit"/wheels/*.whl
  mv "$work/site.new" "$work/site"
fi
export PYTHONPATH="$PWD/$work/site:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.gpu "$@" --kit="$kit" --work="$work"
