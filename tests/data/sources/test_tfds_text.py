# SPDX-License-Identifier: Apache-2.0
"""Data sets of TFDS are read without TensorFlow, whole or by ranges of examples, and what is missing is said."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import message

from bert_jax.data.sources import corpus, tfds_text
from bert_jax.errors import InputError


def build(data_dir: Path, name: str, texts: list[str], num_examples: int = 5, value: bytes | str = "") -> None:
    """Prepares a data set `name` of two splits in TFDS's format with random access."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.registered import skip_registration

    class Texts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.2.0")

        def _info(self):
            kinds = {text: tfds.features.Text() for text in texts}
            features = tfds.features.FeaturesDict({**kinds, "number": tfds.features.Scalar(np.int32)})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(0, num_examples), "test": self._generate_examples(100, 103)}

        def _generate_examples(self, start, end):
            for number in range(start, end):
                text = value or (f"\nfirst {number}\r\n\n  second {number} äöü \n" if number != 3 else " \n")
                yield number, {**dict.fromkeys(texts, text), "number": number}

    with skip_registration():
        builder_class = type(name, (Texts,), {"name": name, "code_path": None})
    builder_class(data_dir=str(data_dir), file_format="array_record").download_and_prepare()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """Returns a TFDS data directory: poems, and data sets to make mistakes with."""
    path = tmp_path_factory.mktemp("tfds")
    build(path, "poems", ["text", "comment"], num_examples=60)
    build(path, "letters", ["letter"])
    build(path, "pairs", ["question", "answer"])
    build(path, "numbers", [])
    build(path, "latin", ["text"], value=b"caf\xe9")
    build(path, "sequential", ["text"])
    described = path / "sequential" / "1.2.0" / "dataset_info.json"
    described.write_text(described.read_text().replace("array_record", "tfrecord"))
    return path


@pytest.fixture(autouse=True)
def prepared(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))


def fails(source: str) -> str:
    """Returns the message of the error that reading the input ends with."""
    return message(lambda: list(corpus.iterate_documents(source)))


def numbers(source: str, piece_bytes: int = 1 << 24) -> list[int]:
    """Returns the numbers of the documents of an input, read by pieces, after checking their lines."""
    documents = [document for piece in corpus.plan_pieces(source, piece_bytes) for document in corpus.read_piece(piece)]
    found = [int(document[0].removeprefix("first ")) for document in documents]
    assert documents == [[f"first {number}", f"second {number} äöü"] for number in found]
    return found


def test_an_example_is_a_document(data_dir):
    train = numbers("tfds:poems")
    assert sorted(train) == [number for number in range(60) if number != 3]  # which is blank
    assert sorted(numbers("tfds:poems:test")) == [100, 101, 102]
    assert sorted(numbers("tfds:poems:1.2.0:train+test:comment")) == sorted([*train, 100, 101, 102])
    assert len(numbers("tfds:poems:train[:10%]")) in (5, 6)
    assert len(numbers("tfds:letters")) == 4  # the only text, whatever its name


@pytest.mark.parametrize("source", ["tfds:poems", "tfds:poems:train[10:50]+test"])
def test_ranges_of_examples_are_the_whole(source):
    whole = numbers(source)
    counts = set()
    for piece_bytes in (1, 500, 2000):
        assert numbers(source, piece_bytes) == whole
        counts.add(len(corpus.plan_pieces(source, piece_bytes)))
    assert len(counts) == 3 and max(counts) >= len(whole)


def test_the_fingerprint_is_of_data_split_and_feature(tmp_path, data_dir, monkeypatch):
    def fingerprint(source: str) -> str:
        return corpus.contents_of(source)[0][1]

    first = fingerprint("tfds:poems")
    assert first == fingerprint("tfds:poems:1.2.0:train:text")
    assert len({first, *map(fingerprint, ("tfds:poems:test", "tfds:poems:train:comment", "tfds:letters"))}) == 4
    shutil.copytree(data_dir / "poems", tmp_path / "poems")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert fingerprint("tfds:poems") == first
    shutil.rmtree(tmp_path / "poems")
    build(tmp_path, "poems", ["text", "comment"], num_examples=59)
    assert fingerprint("tfds:poems") != first


def test_no_tensorflow_is_imported():
    program = (
        "import sys; from bert_jax.data.sources import corpus; assert 'tensorflow_datasets' not in sys.modules; "
        "print(len(list(corpus.iterate_documents('tfds:poems')))); assert 'tensorflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("59\n", 0), done.stderr


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("tfds:peoms", "peoms is not prepared in {dir}"),
        (
            "tfds:wikipedia/20230601.en",
            "'tfds build wikipedia/20230601.en --file_format=array_record', which needs",
        ),
        ("tfds:poems:trian", "has no split 'trian'; it has train, test"),
        ("tfds:poems:train[5", "is not tfds:NAME[:VERSION][:SPLIT[:FEATURE]]"),
        ("tfds:poems:train:number", "has no text 'number'"),
        ("tfds:pairs", "answer, question; choose one"),
        ("tfds:numbers", "has no text"),
        (
            "tfds:sequential",
            "is prepared as tfrecord, which has no random access; prepare it again with 'tfds build seq",
        ),
        ("tfds:latin", "example 0: 'text' is not UTF-8 (byte 0xe9)"),
        ("tfds:poems:train[:0]", "holds no document"),
    ],
)
def test_what_is_wrong_is_said(source, problem, data_dir):
    assert problem.format(dir=data_dir) in fails(source)


def test_damaged_data_are_named(tmp_path, data_dir, monkeypatch):
    shutil.copytree(data_dir / "letters", tmp_path / "letters")
    for shard in tmp_path.rglob("*array_record*"):
        shard.write_bytes(shard.read_bytes()[:100])
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert "tfds:letters" in fails("tfds:letters")


def test_without_tfds_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    expected = "tfds:poems needs the package tensorflow_datasets, which is not installed: pip install 'bert_jax[tfds]'"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        tfds_text.examples_fingerprint("tfds:poems")
