# SPDX-License-Identifier: Apache-2.0
"""The memory of this process, for our benchmarks and for peers. Nothing of bert_jax is used."""

import re
import resource
import sys
from pathlib import Path


def most_memory() -> int:
    """Returns the most bytes that were resident so far.

    On Linux `ru_maxrss` is also what the parent held when it started this process, so the kernel's other count is read.
    """
    status = Path("/proc/self/status")
    if status.exists() and (
        found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text("ascii", "replace"))
    ):
        return 1024 * int(found[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
