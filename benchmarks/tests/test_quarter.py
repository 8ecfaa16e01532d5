# SPDX-License-Identifier: Apache-2.0
"""The quarter of an hour on a GPU: its figures from a trace, its parts at tiny sizes on a CPU, one that is ended."""

import json
import subprocess
import sys

import pytest
from jax.profiler import ProfileData

from benchmarks import traces

TRACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "gemm" } }
  event_metadata { key: 2 value { id: 2 name: "fusion_7" } }
  lines { name: "Stream #1" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000000 }
    events { metadata_id: 2 offset_ps: 6000000000 duration_ps: 2000000000 } }
  lines { name: "Stream #2" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 3000000000 duration_ps: 2000000000 } }
  lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 1 offset_ps: 0 duration_ps: 90000000000 } }
}
planes { name: "/host:CPU" lines { name: "Stream #9" events { metadata_id: 1 duration_ps: 70000000000 } } }
"""


def test_a_trace_is_read_as_busy_and_idle_time_by_kernel():
    """Two steps: streams overlap for 1 ms, and for 1 ms nothing runs."""
    found = traces.read_trace(ProfileData.text_proto_to_serialized_xspace(TRACE), steps=2)
    assert (found["wall_ms"], found["busy_ms"], found["idle_ms"], found["kernels"]) == (4.0, 3.5, 0.5, 1.5)
    assert [(op["kernel"], op["ms"], op["count"]) for op in found["ops"]] == [
        ("gemm", 3.0, 1.0),
        ("fusion_7", 1.0, 0.5),
    ]


def run(repository, output, *flags):
    command = [sys.executable, "-m", "benchmarks.quarter", f"--output={output}", "--size=tiny", *flags]
    done = subprocess.run(command, cwd=repository, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads((output / "quarter.json").read_text("utf-8"))


@pytest.mark.slow
def test_every_kind_of_part_runs_on_a_cpu(repository, tmp_path):
    record = run(repository, tmp_path, "--parts=base,modern,attention,embeddings,finetune", "--at_once=2")
    assert {part["status"] for part in record["parts"].values()} == {0}
    lines = {(line["part"], line["name"]): line for line in record["lines"]}
    for part in ("base", "modern"):
        assert lines[part, "ours bfloat16, 8 x 32"]["step_ms"] > 0 and (tmp_path / f"{part}_8x32.hlo.gz").exists()
    assert lines["attention", "ours 32"]["error"] < 0.02 and lines["embeddings", "ours bfloat16"]["texts_a_second"] > 0
    assert not [
        line for line in record["lines"] if "error" in line and "cudnn" not in line["name"] and "rows" not in line
    ]


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(repository, tmp_path):
    record = run(repository, tmp_path, "--parts=base,attention", "--part_seconds=4", "--seconds=9")
    assert record["parts"]["base"]["status"] == -9 and set(record["parts"]) == {"base", "attention"}
