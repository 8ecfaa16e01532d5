# SPDX-License-Identifier: Apache-2.0
"""Documents come out the same however files are cut, and bad input is one clear line."""

import gzip

import pytest
from builders import message

from bert_jax.data.sources import corpus


def write(path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def fingerprint(inputs: str) -> str:
    return corpus.join_fingerprints(corpus.contents_of(inputs))


def in_pieces(path: str, piece_bytes: int) -> tuple[int, list[list[str]]]:
    """Returns the number of pieces and all their documents."""
    pieces = corpus.plan_pieces(path, piece_bytes)
    return len(pieces), [document for piece in pieces for document in corpus.read_piece(piece)]


AWKWARD = {
    "plain": (b"a one\na two\n\nb one\n\nc one\nc two\n", [["a one", "a two"], ["b one"], ["c one", "c two"]]),
    "no_last_newline": (b"a one\n\nb one", [["a one"], ["b one"]]),
    "carriage_returns": (b"a one\r\na two\r\n\r\nb one\r\n\r\n\r\nc one", [["a one", "a two"], ["b one"], ["c one"]]),
    "blanks_and_tabs": (b"  a one \n \t \nb one\n\t\n\xc2\xa0\nc one\n", [["a one"], ["b one"], ["c one"]]),
    "blank_lines_first_and_last": (b"\n\n\na one\n\nb one\n\n\n\n", [["a one"], ["b one"]]),
    "byte_order_mark": (b"\xef\xbb\xbfa one\n\nb one\n", [["a one"], ["b one"]]),
    "more_bytes_than_letters": ("ä ö ü\n日本 語\n\nß\n".encode(), [["ä ö ü", "日本 語"], ["ß"]]),
}


@pytest.mark.parametrize(("content", "expected"), AWKWARD.values(), ids=AWKWARD)
def test_documents_of_awkward_files(tmp_path, content, expected):
    path = write(tmp_path / "text", content)
    assert list(corpus.iterate_documents(path)) == expected
    for piece_bytes in range(1, len(content) + 2):
        assert in_pieces(path, piece_bytes)[1] == expected, piece_bytes


def test_the_end_of_a_file_ends_a_document(tmp_path):
    first, second = write(tmp_path / "1", b"a one\na two"), write(tmp_path / "2", b"b one\n")
    assert list(corpus.iterate_documents(f"{first},{second}")) == [["a one", "a two"], ["b one"]]
    assert list(corpus.iterate_documents(f"{tmp_path}/*")) == [["a one", "a two"], ["b one"]]


def fails(inputs) -> str:
    """Returns the message of the error that reading the inputs ends with."""
    return message(lambda: list(corpus.iterate_documents(str(inputs))))


def test_missing_input(tmp_path):
    assert "matches no file" in fails(tmp_path / "nothing*")
    assert "names no file" in fails("")
    assert "matches no file; it is a directory: give its files, such as" in fails(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", gzip.compress(b"", mtime=0), gzip.compress(b"\n\n", mtime=0)])
def test_input_without_a_document(tmp_path, content):
    assert "holds no document" in fails(write(tmp_path / "text", content))


def test_not_utf8_in_a_later_piece_names_the_line_of_the_file(tmp_path):
    path = write(tmp_path / "text", b"one\n\nthree\n\nfive\n\n\xff\n")
    assert "line 7 is not UTF-8" in message(in_pieces, path, 3)


def test_fingerprint_is_of_the_contents(tmp_path):
    first, same, other = (write(tmp_path / name, text) for name, text in (("1", b"a"), ("2", b"a"), ("3", b"b")))
    assert fingerprint(first) == fingerprint(same) != fingerprint(other)
    assert fingerprint(f"{first},{other}") != fingerprint(first)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("/data/text/*.txt.gz, wiki.txt,other/wiki.txt", ["*.txt.gz", "wiki.txt"]),

        ("gs://bucket/text/*.gz,hf://datasets/ORG/NAME/*.parquet", ["gs://bucket/text/*.gz", "hf://datasets/ORG/NAME/*.parquet"]),

        ("https://me:secret@host/a.txt?token=secret", ["https://host/a.txt"]),

        ("a.txt,tfds:wikipedia/20230601.en:1.0.0", ["a.txt", "tfds:wikipedia/20230601.en:1.0.0"]),
        ("text/\udcff.txt", ["?.txt"]),
    ],
)  # fmt: skip
def test_names_that_anybody_may_read(given, names):
    """Neither directories of the machine nor passwords, which then are in model cards too."""
    assert corpus.public_names(given) == names


def test_inputs_are_counted_by_their_files(tmp_path):
    paths = [write(tmp_path / name, text) for name, text in (("1", b"one .\n"), ("2", b"two words .\n"))]
    contents = [*corpus.contents_of(",".join(paths)), ("tfds:name", "its version", -1)]
    assert corpus.describe_inputs(["a"], contents) == {"names": ["a"], "files": 2, "bytes": 18}
    assert fingerprint(",".join(paths)) == corpus.join_fingerprints(contents[:2])
