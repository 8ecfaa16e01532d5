#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Start-up script of TPU VMs: every host runs it as root at each boot, and so the run resumes after a pre-emption.
# queued_resource.sh hands it over, with host.sh and the command as attributes of the VM.
#
# Needs: the attributes bert-jax-host (the text of host.sh), bert-jax-package and bert-jax-command (arguments, one a line).
# Its output is in `sudo journalctl -u google-startup-scripts`.
#
# Not run on a TPU yet: the test runs it with a metadata server of its own.
set -euo pipefail

attribute() {
  curl --silent --fail --header 'Metadata-Flavor: Google' \
    "http://${GCE_METADATA_IP:-metadata.google.internal}/computeMetadata/v1/instance/attributes/$1"
}

export HOME=${HOME:-/root}
PACKAGE=$(attribute bert-jax-package)
export PACKAGE
mapfile -t arguments < <(attribute bert-jax-command)
script=$(mktemp)
attribute bert-jax-host >"$script"
exec bash "$script" "${arguments[@]}"
