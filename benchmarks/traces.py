# SPDX-License-Identifier: Apache-2.0
"""A profile of a GPU in figures: what its kernels took, by name, and how long nothing ran."""

import re
from collections import defaultdict
from typing import Any

from jax.profiler import ProfileData

KEPT_OPS = 120  # of a profile, by time


def read_trace(trace: bytes, steps: int) -> dict[str, Any]:
    """Returns ms a step of a trace: busy, idle between kernels, kernels a step, and the operations that take most.

    Lines of a device that are kernels are those named "Stream ..."; kernels of several streams may overlap.
    """
    spans, times, counts = [], defaultdict(float), defaultdict(int)
    for plane in ProfileData.from_serialized_xspace(trace).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                facts = {str(key): value for key, value in event.stats}
                op = str(facts.get("hlo_op", "")) or event.name
                key = (event.name[:100], re.sub(r"[.\d]+$", "", op)[:80])
                times[key] += event.duration_ns
                counts[key] += 1
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
    busy = end = 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    wall = max((stop for _, stop in spans), default=0.0) - min(
        (start for start, _ in spans), default=0.0
    )
    scale = 1e-6 / steps
    ops = [
        {
            "kernel": kernel,
            "op": op,
            "ms": round(times[kernel, op] * scale, 4),
            "count": counts[kernel, op] / steps,
        }
        for kernel, op in sorted(times, key=lambda key: -times[key])[:KEPT_OPS]
    ]
    return {
        "wall_ms": wall * scale,
        "busy_ms": busy * scale,
        "idle_ms": (wall - busy) * scale,
        "kernels": len(spans) / steps,
        "ops": ops,
    }
