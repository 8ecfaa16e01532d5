# SPDX-License-Identifier: Apache-2.0
"""Tables as other programs write them, and what is none: each with its own line and the fix."""

import pytest
from builders import message, write

from bert_jax.tasks.readers import check_header, read_table

ARROW_STREAM = b"\xff\xff\xff\xff\x90\0\0\0\x10\0\0\0\0\0\x0a\0\x0e\0\x06\0\0\0\0\0"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "sep=;\ntext;label\na;pos\n", "a.csv:1 is sep=;, which only Excel reads"),
        ("a.tsv", "text\tlabel\rx\ty\rz\ty\n\n", "a.tsv has lines that end in CR alone"),
        ("a.tsv", "text,label\nx,y\n", "parted by ','; save the table with tabs, or as .csv with commas"),
        (
            "a.tsv",
            "text\tlabel\nx\ty\n".encode("utf-16"),
            "a.tsv is UTF-16, not UTF-8; convert it with iconv -f utf-16",
        ),
        ("a.csv", ARROW_STREAM, "a.csv is Arrow, as save_to_disk of datasets writes it; write"),
        ("a.tsv", bytes(range(4)) + b"\x01\0\0\0\x00\0\0\0" * 40 + b"\xff", "a.tsv:1 is not UTF-8 (byte 0xff)"),
        (
            "a.tsv",
            "version https://git-lfs.github.com/spec/v1\noid sha256:4\n",
            "a.tsv is a pointer of Git LFS in place",
        ),
    ],
)
def test_tables_of_other_programs_are_named_with_the_fix(tmp_path, name, content, problem):
    assert problem in message(read_table, write(tmp_path / name, content))


def rows_of(path):
    return [dict(record) for record in read_table(path).records]


def test_odd_line_ends_that_are_read(tmp_path):
    """The csv module ends rows at CR alone, and to JSON it is a blank."""
    assert rows_of(write(tmp_path / "a.csv", "text,label\ra,x\r"))[0] == {"text": "a", "label": "x"}
    assert rows_of(write(tmp_path / "a.json", '[{"text":\r"a"}]\r'))[0] == {"text": "a"}
    assert rows_of(write(tmp_path / "a.tsv", "text\r")) == []
    assert rows_of(write(tmp_path / "b.tsv", "text\tlabel\ra\tx\rb\ty"))[1] == {"text": "b", "label": "y"}
    assert rows_of(write(tmp_path / "a.jsonl", '{"text": "a"}\r{"text": "b"}\r')) == [{"text": "a"}, {"text": "b"}]


def test_a_header_of_one_column_is_no_mistake():
    for name in ("text", "a, ", ";", "label,"):
        check_header([name], "a.tsv", False)
