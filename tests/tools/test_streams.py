# SPDX-License-Identifier: Apache-2.0
"""Training outlives the reader of its messages; output for a program does not."""

import subprocess
import sys

from commands import run_python

PROGRAM = """
import sys
from bert_jax.tools import streams
streams.prepare_streams()
sys.stdin.readline()  # by now the reader is gone
print("lost", file=sys.stderr)
print("lost too", file=sys.stderr)
open(sys.argv[1], "w").write("went on")
"""


def test_messages_without_a_reader_are_dropped(repository, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path / "mark"],
        cwd=repository,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stderr.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / "mark").read_text() == "went on"


def test_a_character_that_is_none_is_written_escaped(repository):
    code = "import sys; from bert_jax.tools.streams import prepare_streams; prepare_streams(); "
    code += 'print("\\udcff\\ud800", file=sys.stderr)'
    done = run_python(["-c", code], repository)
    assert (done.returncode, done.stderr) == (0, "\\udcff\\ud800\n")
