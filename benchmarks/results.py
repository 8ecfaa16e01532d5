# SPDX-License-Identifier: Apache-2.0
"""The pages of docs that have blocks, drawn from records: no figure in a block is typed by hand.

    python -m benchmarks.results collect --workdirs='runs/table5/*/*' --output=benchmarks/records/table5.json
    python -m benchmarks.results draw      # or `make results`: all pages that have blocks
    python -m benchmarks.results check     # exit status 1 if a page is not as its records are

`collect` keeps what pages need of work directories in a file small enough to commit; `benchmarks.pages` says how a
page asks for it. Tables have means and standard deviations over seeds, and intervals of a paired bootstrap.
"""

import glob
import sys
from pathlib import Path

from absl import flags

from benchmarks.collecting import collect, merged, read_record, write_record
from benchmarks.pages import Sources, draw_page
from bert_jax.errors import InputError
from bert_jax.storage.writing import atomic_path
from bert_jax.tools import cli

COMMANDS = ("collect", "draw", "check")
ROOT = Path(__file__).resolve().parents[1]

WORKDIRS = flags.DEFINE_list("workdirs", [], "collect: directories or quoted globs, with commas between")
OUTPUT = flags.DEFINE_string("output", "", "collect: the record to write, .json or .json.gz")
MERGE = flags.DEFINE_bool("merge", False, "collect: keep the units of --output that are not collected anew")
PAGES = flags.DEFINE_list("pages", [], "draw, check: files of Markdown; all of docs if none is given")
RECORDS = flags.DEFINE_string("records", str(ROOT / "benchmarks" / "records"), "draw, check: where records are")
PAPER = flags.DEFINE_string("paper", str(ROOT / "benchmarks" / "paper.toml"), "draw, check: the paper's figures")

_command = "draw"


def main() -> int:
    """Runs the command that stands first."""
    if _command not in COMMANDS:
        raise InputError(f"there is no command {_command!r}; use {', '.join(COMMANDS)}")
    return _collect() if _command == "collect" else _draw(check=_command == "check")


def _collect() -> int:
    if not WORKDIRS.value or not OUTPUT.value:
        raise InputError("--workdirs and --output are needed: directories of runs, and the record to write")
    directories = []
    for pattern in WORKDIRS.value:
        found = [Path(name) for name in sorted(glob.glob(pattern)) if Path(name).is_dir()]
        if not found:
            raise InputError(
                f"--workdirs={pattern} is no directory; give directories, or a quoted glob that finds some"
            )
        directories += found
    output = Path(OUTPUT.value)
    record = collect(list(dict.fromkeys(directories)))
    if MERGE.value and output.exists():
        record = merged(record["units"], read_record(output)["units"])
    write_record(record, output)
    groups = sorted({unit["group"] for unit in record["units"]})
    print(f"{output}: {len(record['units'])} units of {', '.join(groups)}; {output.stat().st_size:,} bytes")
    return 0


def _draw(check: bool) -> int:
    sources = Sources(Path(RECORDS.value), Path(PAPER.value))
    pages = [Path(name) for name in PAGES.value] or sorted((ROOT / "docs").rglob("*.md"))
    stale = []
    for page in pages:
        try:
            before = page.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"page {page} cannot be read: {error.strerror or error}") from None
        after = draw_page(page, sources, pictures=not check)
        if after != before:
            stale.append(page)
            if not check:
                with atomic_path(page) as temporary:
                    temporary.write_text(after, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'is not as its records are; give make results' if check else 'drawn anew'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        _command = sys.argv.pop(1)
    cli.run(main)
