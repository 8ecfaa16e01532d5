# SPDX-License-Identifier: Apache-2.0
"""JSON lines and WikiExtractor's output, told apart from text by their contents; compressed, cut or damaged."""

import bz2
import gzip
import html
import io
import json
import lzma
import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from builders import message

from bert_jax.data.sources import corpus, formats
from bert_jax.storage.files import zstd

EXPECTED = [["a one", "a two"], ["b one"], ["ä 日本 one"]]
JSON_LINES = (
    '{"text": "a one\\na two\\n"}\n'
    "\n"
    '{"id": 7, "title": "B", "text": "B\\n\\n \\n  b one\\r\\n"}\r\n'
    '{"text": " \\n", "more": {"text": [1, 2]}}\n'
    '{"text": "\\u00e4 日本 one"}'
).encode()
WIKI_EXTRACTOR = """
<doc id="1" url="https://en.wikipedia.org/wiki?curid=1" title="A">
A

a one

a two
</doc>

<doc id="2" revid="9" url="https://en.wikipedia.org/wiki?curid=2" title="The "B" &amp; C">
The "B" & C
b one
</doc>
<doc id="3" url="https://en.wikipedia.org/wiki?curid=3" title="Nothing">
Nothing

</doc>
<doc id="4" url="https://en.wikipedia.org/wiki?curid=4" title="Other">
ä 日本 one</doc>
""".encode()
FILES = {
    "json": JSON_LINES,
    "wiki": WIKI_EXTRACTOR,
    "text": b"a one\na two\n\nb one\n\n\xc3\xa4 \xe6\x97\xa5\xe6\x9c\xac one",
}


def zstd_frames(data: bytes) -> bytes:
    """Returns `data` as two zstd frames and a skippable one."""
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    middle = len(data) // 2
    frames = [zstd.compress(part, options=checked) for part in (data[:middle], data[middle:])]
    return b"\x50\x2a\x4d\x18\3\0\0\0abc" + b"".join(frames)


COMPRESSIONS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd_frames}


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def fails(path: str, piece_bytes: int = corpus.PIECE_BYTES) -> str:
    """Returns the message of the error that reading the input ends with."""
    return message(lambda: [list(corpus.read_piece(piece)) for piece in corpus.plan_pieces(path, piece_bytes)])


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", FILES)
def test_every_format_is_recognised_in_every_compression(tmp_path, name, compression):
    path = write(tmp_path / "file", COMPRESSIONS[compression](FILES[name]))
    assert list(corpus.iterate_documents(path)) == EXPECTED


@pytest.mark.parametrize("name", FILES)
def test_wherever_files_are_cut_the_documents_are_the_same(tmp_path, name):
    path = write(tmp_path / "file", FILES[name])
    numbers = set()
    for piece_bytes in range(1, len(FILES[name]) + 2):
        pieces = corpus.plan_pieces(path, piece_bytes)
        numbers.add(len(pieces))
        assert [document for piece in pieces for document in corpus.read_piece(piece)] == EXPECTED, piece_bytes
    assert min(numbers) == 1 and max(numbers) >= 3


@pytest.mark.parametrize(
    "line",
    ["{", "{}", "{ in } text", '{"quoted" text}', '{"a", "b"}', "{x: 1}", "<doc>", "<document id=1>", "[1]", '"text":'],
)
def test_text_that_begins_like_another_format_is_text(tmp_path, line):
    path = write(tmp_path / "file", f"{line}\n\nsecond\n".encode())
    assert list(corpus.iterate_documents(path)) == [[line], ["second"]]


@pytest.mark.parametrize(
    ("name", "content"),
    [("file", b'\n[{"text": "one"},\n{"text": "two"}]'), ("a.json", b'["one"]'), ("file", b'{\n"text": 1\n}')],
)
def test_json_that_is_not_in_lines_is_refused(tmp_path, name, content):
    path = write(tmp_path / name, content)
    assert f"{path} is JSON that is not in lines; write one object a line" in fails(path)


@pytest.mark.parametrize(("kind", "compress"), [("bzip2", bz2.compress), ("xz", lzma.compress)])
def test_other_compression_is_refused(tmp_path, kind, compress):
    path = write(tmp_path / "a.jsonl", compress(JSON_LINES))
    assert f"{path} is compressed by {kind}; decompress it" in fails(path)


TEXT = "A sentence of many letters. " * 20 + "\n\nAnother one.\n"


def tar(compression: str) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode=f"w:{compression}", format=tarfile.USTAR_FORMAT) as stream:
        stream.addfile(tarfile.TarInfo("text.txt"))
    return archive.getvalue()


@pytest.mark.parametrize(
    ("content", "problem", "remedy"),
    [
        *((TEXT.encode(name), name.upper(), f"iconv -f {name} -t utf-8") for name in
          ("utf-16", "utf-16le", "utf-16be", "utf-32", "utf-32le", "utf-32be")),


        (b"\xff\xff\xff\xff\x90\0\0\0\x10\0\0\0" * 9, "Arrow", "to_parquet"),
        (b"\x01\0\0\0\x00\0\0\0" * 40, "NUL bytes", "give the text files"),
        (tar(""), "an archive", "give the text files"),
        (tar("gz"), "an archive", "give the text files"),

        (TEXT.encode() + b"\0", "NUL bytes", "give the text files"),
        (gzip.compress(TEXT.encode() + b"\0", mtime=0), "NUL bytes", "give the text files"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS", "git lfs pull"),
        (b"one\rtwo\r\rthree\r", "CR alone", "tr '\\r' '\\n'"),

        (b"one\rtwo\rthree\r\n", "CR alone", "tr"),
        (b"\xef\xbb\xbf" + b"A line.\r" * 20_000, "CR alone", "tr"),

    ],
    ids=lambda value: "content" if isinstance(value, bytes) else None,  # an archive has the time in it
)  # fmt: skip
def test_what_is_not_text_in_lines_of_utf8_is_refused(tmp_path, content, problem, remedy):
    told = fails(write(tmp_path / "file", content))
    assert problem in told and remedy in told and str(tmp_path / "file") in told


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"one\r", [["one"]]),
        (b"one\r\r\n\r\r\ntwo\r\r\n", [["one"], ["two"]]),
        (b"a progress bar 1%\r2%\nof\nlines\n", [["a progress bar 1%\r2%", "of", "lines"]]),
        (b"x\n" * 5000 + b"a late \0 NUL\n", [["x"] * 5000 + ["a late \0 NUL"]]),
    ],
)
def test_what_is_text_is_read_as_before(tmp_path, content, expected):
    assert list(corpus.iterate_documents(write(tmp_path / "file", content))) == expected


def test_naming_a_line_takes_no_memory(tmp_path):
    """What stands before the piece of a line is counted some bytes at a time."""
    start = 200 << 20
    path = tmp_path / "file"
    with open(path, "wb") as stream:
        stream.write(b"x" * 60 + b"\n\n")
        stream.seek(start)  # over NUL bytes, which take no space on the disk
        stream.write(b"\n\n\xff\n")
    piece = formats.Piece(str(path), formats.TEXT, str(path), start + 2, start + 4)
    tracemalloc.start()
    assert "line 5 is not UTF-8" in message(list, formats.read_file(piece))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_the_name_says_json_lines_too(tmp_path):
    path = write(tmp_path / "texts.jsonl.gz", gzip.compress(b"no JSON\n"))
    assert f'{path}, line 1: "no JSON" is not an object' in fails(path)
    assert formats.detect_format(write(tmp_path / "jsonl", b"no JSON\n"), "jsonl") == formats.TEXT


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "cut o',
        "plain",
        "[" * 100_000,
        '{"content": "x", "id": 1}',
        '{"text": null}',
        '{"text": "\\ud83d alone"}',
    ],
)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_a_bad_line_of_json_is_named(tmp_path, line, piece_bytes):
    path = write(tmp_path / "file", f'{{"text": "one"}}\n\n{{"text": "three"}}\n{line}\n'.encode())
    told = fails(path, piece_bytes)
    assert told.startswith(f"{path}, line 4: ") and 'is not an object such as {"text": "..."}' in told


def test_a_title_is_left_out_only_where_it_is_the_first_line(tmp_path):
    texts = ["T\n\none T\nT", "T is one", "T"]
    lines = [json.dumps({"title": "T", "text": text}) for text in texts] + ['{"title": null, "text": "None"}']
    path = write(tmp_path / "file", "\n".join(lines).encode())
    assert list(corpus.iterate_documents(path)) == [["one T", "T"], ["T is one"], ["None"]]


def test_entities_are_unescaped_where_wikiextractor_wrote_them(tmp_path):
    text, title = 'if a < b & c > d:\n"AT&T" x\u0304', "<br> & 'co'"
    escaped = html.escape(text, quote=False).replace("\u0304", "&#772;")
    page = {"url": "https://x.org/wiki?curid=1", "title": title, "text": escaped}
    for content, expected in (
        (f'<doc id="1" url="x?curid=1" title="{title}">\n{title}\n\n{escaped}\n</doc>\n', text.split("\n")),
        (json.dumps(page), text.split("\n")),
        (json.dumps({"url": "https://x.org/page", "text": "write &amp; for &"}), ["write &amp; for &"]),  # by others
    ):
        assert list(corpus.iterate_documents(write(tmp_path / "file", content.encode()))) == [expected]


DOC = '<doc id="{0}" url="x?curid={0}" title="T">\nT\n\nline of {0}\n</doc>\n'


@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_a_doc_without_end_is_named(tmp_path, piece_bytes):
    whole = "".join(DOC.format(number) for number in range(4))
    path = write(tmp_path / "end", whole[:-9].encode())
    assert f"{path}, line 16: this <doc> has no </doc> before the end of the file" in fails(path, piece_bytes)
    lines = whole.splitlines(keepends=True)
    path = write(tmp_path / "middle", "".join(lines[:9] + lines[10:]).encode())
    assert f"{path}, line 6: this <doc> has no </doc> before {path}, line 10; " in fails(path, piece_bytes)


def test_text_outside_docs_is_named(tmp_path):
    path = write(tmp_path / "file", (DOC.format(0) + "\nlost\n" + DOC.format(1)).encode())
    assert f'{path}, line 7 stands outside <doc> and </doc> ("lost")' in fails(path)


@pytest.mark.parametrize(
    ("name", "compression"), [("json", "gzip"), ("wiki", "zstd"), ("text", "gzip"), ("text", "zstd")]
)
def test_a_compressed_file_that_is_damaged_is_named_once(tmp_path, name, compression):
    noise = bytes(random.Random(0).choices(b"abcdefgh", k=200_000))
    bulk = {"json": b'{"text": "%s"}', "wiki": b"<doc id=9>\n%s\n</doc>", "text": b"%s"}[name] % noise
    whole = COMPRESSIONS[compression](bulk)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
    for damaged in (whole[:middle], whole[:-1], flipped):
        path = write(tmp_path / compression, damaged)
        assert fails(path).startswith(f"{path} is damaged or another kind of file")


def test_real_output_of_wikiextractor(shared_data):
    documents = list(corpus.iterate_documents(str(shared_data / "wikiextractor_raw" / "wiki_00.gz")))
    assert len(documents) == 37  # whose titles are left out
    assert documents[0][0].startswith("Anarchism is an anti-authoritarian political and social philosophy")
