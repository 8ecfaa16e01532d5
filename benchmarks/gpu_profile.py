# SPDX-License-Identifier: Apache-2.0
"""Where the time of a profiled run goes: the events of each line of each device, by name, as JSON.

    python -m benchmarks.gpu_profile --workdir=DIR --output=profile.json --archive=profile.tar.xz

Reads what train.py wrote with report.profile_steps. Times of one line overlap those of others: sum within a line only.
"""

from pathlib import Path
from typing import Any

from absl import flags

from benchmarks.gpu_packing import MIB, write_archive
from benchmarks.gpu_records import summarize
from bert_jax.errors import InputError
from bert_jax.storage.writing import atomic_path, write_json
from bert_jax.tools import cli

WORKDIR = flags.DEFINE_string("workdir", "", "of the profiled run")
OUTPUT = flags.DEFINE_string("output", "", "JSON file to write")
ARCHIVE = flags.DEFINE_string("archive", "", "a .tar.xz of the profile, for TensorBoard or XProf; none if not given")
TOP = flags.DEFINE_integer("top", 40, "names of each line that are kept", lower_bound=1)
MOST = flags.DEFINE_float("archive_mib", 12.0, "the largest archive; one that is larger is not kept")


def main() -> None:
    """Writes the summary and the archive."""
    if not WORKDIR.value or not OUTPUT.value:
        raise InputError("--workdir and --output are needed: a profiled run, and the file to write")
    files = sorted(Path(WORKDIR.value, "profile").rglob("*.xplane.pb"))
    if not files:
        raise InputError(f"{WORKDIR.value} has no profile; train with --config.report.profile_steps=10:15")
    from jax.profiler import ProfileData  # here, so that --help needs no jax

    lines = [line for file in files for line in summarize(ProfileData.from_file(str(file)), TOP.value)]
    summary: dict[str, Any] = {"lines": lines}
    if not lines:
        raise InputError(f"{files[0]} has no event of a device; profile steps that the run takes")
    if ARCHIVE.value:
        with atomic_path(Path(ARCHIVE.value)) as temporary:
            write_archive(temporary, [(file.name, file) for file in files])
        size = Path(ARCHIVE.value).stat().st_size
        summary["archive_bytes"] = size
        if size > MOST.value * MIB:
            Path(ARCHIVE.value).unlink()
            print(f"{ARCHIVE.value} would have {size / MIB:.1f} MiB, above {MOST.value:g}: it is left out")
    write_json(Path(OUTPUT.value), summary)


if __name__ == "__main__":
    cli.run(main)
