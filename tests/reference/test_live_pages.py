# SPDX-License-Identifier: Apache-2.0
"""The page that shows bert_jax beside other libraries: both sides of it run, and print what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.reference, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from test_howto import check_prints  # noqa: E402


def test_both_sides_of_the_page_give_the_same(tmp_path):
    (tmp_path / "models").symlink_to(ROOT / "models")
    page = (ROOT / "docs" / "howto" / "from_others.md").read_text("utf-8")
    source = "\n".join(re.findall(r"^```py(?:thon)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    # As a reader runs them: what makes tests compile fast costs a digit.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_prints(source, done.stdout)
