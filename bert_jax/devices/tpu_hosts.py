# SPDX-License-Identifier: Apache-2.0
"""The hosts of a TPU slice, as its metadata server lists them: TPU VMs have no variables that name the others."""

import re
import urllib.request
from collections.abc import Mapping

_SECONDS = 5  # for an answer; the server is on the same machine


def count_hosts(environment: Mapping[str, str]) -> int:
    """Returns the number of hosts of all slices that train together; 0 if this is no TPU VM, or it is not known.

    `environment` is that of the process after JAX was imported: JAX then has TPU_ML_PLATFORM on a TPU VM, and
    TPU_SKIP_MDS_QUERY where there is no TPU chip. GCE_METADATA_IP replaces the server, as it does for JAX.
    """
    if "TPU_ML_PLATFORM" not in environment or "TPU_SKIP_MDS_QUERY" in environment:
        return 0
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    hosts = len(
        [name for name in _attribute(server, "worker-network-endpoints").split(",") if name]
    )
    slices = re.search(
        r"^MEGASCALE_NUM_SLICES: '?(\d{1,4})'?\s*$", _attribute(server, "tpu-env"), re.MULTILINE
    )
    return hosts * max(1, int(slices[1]) if slices else 1)


def _attribute(server: str, name: str) -> str:
    """Returns an attribute of this machine, "" if there is none or no server answers."""
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    # no proxy knows this machine's metadata
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS) as answer:
            return answer.read(2**20).decode(errors="replace")
    except (OSError, ValueError):
        return ""
