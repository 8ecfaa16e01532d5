# SPDX-License-Identifier: Apache-2.0
import errno
import json
import struct

import pytest

from bert_jax.errors import InputError, StoppedError, reading


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda: json.loads("[\n"), "a.bin is damaged or another kind of file (Expecting value: line 2"),
        (
            lambda: struct.unpack("<q", b"x"),
            "a.bin is damaged or another kind of file (error: unpack requires a buffer",
        ),
        (lambda: {}["rows"], "a.bin is damaged or another kind of file (KeyError: 'rows'); copy it again"),
        (lambda: b"\xff".decode(), "a.bin is damaged or another kind of file ('utf-8' codec can't decode"),
        (lambda: open("/nowhere"), "cannot read a.bin: No such file or directory; check the path"),
        (lambda: _raise(OSError("of a library")), "a.bin is damaged or another kind of file (OSError: of a library)"),
        (lambda: _raise(OSError(errno.EMFILE, "Too many")), "cannot read a.bin: Too many; raise the limit"),
        (lambda: _raise(MemoryError("9 GB")), "a.bin is damaged, or needs more memory than there is (9 GB)"),
        (lambda: _raise(InputError("model.window -1")), "a.bin: model.window -1"),
        (lambda: _raise(InputError("a.bin has no column")), "a.bin has no column"),
        (lambda: _raise(ValueError("one\ntwo\n" + "x" * 999)), "a.bin is damaged or another kind of file (one two xxx"),
    ],
)
def test_whatever_a_library_raises_is_one_line_with_the_file(fail, message):
    with pytest.raises(InputError) as caught, reading("a.bin"):
        fail()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_what_stopped_and_an_interrupt_stay_what_they_are():
    with pytest.raises(StoppedError, match="gone"), reading("a.bin"):
        raise StoppedError("gone")
    with pytest.raises(KeyboardInterrupt), reading("a.bin"):
        raise KeyboardInterrupt


def _raise(error: Exception) -> None:
    raise error
