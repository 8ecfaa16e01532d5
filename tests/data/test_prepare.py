# SPDX-License-Identifier: Apache-2.0
"""Prepared data sets: the same bytes for any number of workers and interruptions, and legal rows."""

import gzip
import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import message
from commands import run_python

from bert_jax.data import building, instances, pieces, prepare, records
from bert_jax.data.prepare import PrepareOptions
from bert_jax.data.sources import corpus
from bert_jax.errors import InputError
from bert_jax.tokenizing import load_tokenizer
from tests.data.test_packing import sequences as sequences_of

WORDS = [left + right for left in "ba be bi do du ka ki ko ma mo".split() for right in "la lo ra ro sa ta to".split()]
ENDINGS = ["s", "ed", "ing"]
OPTIONS = PrepareOptions(max_seq_length=32, duplicates=2, holdout_rate=0.1, shards=3)


def write_text(folder: Path, num_files: int = 5, num_documents: int = 40) -> str:
    """Writes files of random sentences, one a line and two to a paragraph, and returns their glob."""
    rng = random.Random(1)
    folder.mkdir()

    def sentence() -> str:
        words = [rng.choice(WORDS) + rng.choice(["", "", *ENDINGS]) for _ in range(rng.randint(2, 10))]
        return " ".join(words).capitalize() + ". "

    def document() -> str:
        paragraphs = ["".join(sentence() for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(1, 12))]
        return "\n".join(paragraphs)

    for number in range(num_files):
        (folder / f"{number}.txt").write_text("\n\n".join(document() for _ in range(num_documents)) + "\n")
    return f"{folder}/*.txt"


@pytest.fixture(scope="module")
def vocab(tmp_path_factory) -> str:
    """Returns a vocabulary file for the words of these tests."""
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS, *(f"##{ending}" for ending in ENDINGS)]
    path.write_text("\n".join(tokens) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_text(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, text, vocab) -> Path:
    """Returns the data set of the text, prepared without interruption by one process."""
    path = tmp_path_factory.mktemp("prepared") / "data"
    make(text, vocab, path)
    return path


@pytest.fixture
def output(tmp_path):
    return tmp_path / "data"


def make(text, vocab, output, options=OPTIONS):
    """Prepares a data set in one process; returns its manifest."""
    return prepare.prepare(str(text), vocab, str(output), options, num_workers=1)


def contents(path: Path) -> dict[str, bytes]:
    """Returns all files below a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def sequences(path: Path, split: str = "train") -> list[tuple[list[str], list[str], int]]:
    """Returns the tokens of A, those of B and the label of all sequences, checking that the rows are legal."""
    dataset = records.open_dataset(path)
    tokenizer = load_tokenizer(dataset.tokenizer_path)
    found = []
    for ids, starts, first_length, label in sequences_of(dataset, split).values():
        tokens = tokenizer.tokens(ids)
        first, second = tokens[1 : first_length - 1], tokens[first_length:-1]
        pair = [*second, "[SEP]"] if label != records.NO_LABEL else []
        assert tokens == ["[CLS]", *first, "[SEP]", *pair]
        assert first and bool(second) == bool(pair) and not {"[CLS]", "[SEP]", "[PAD]"} & {*first, *second}
        assert starts == [not token.startswith("##") for token in tokens]
        found.append((first, second, label))
    return found


@pytest.mark.parametrize(("name", "shards"), [("train", 3), ("heldout", 1)])
def test_rows_are_legal_and_counted(prepared, name, shards):
    dataset = records.open_dataset(prepared)
    split, counted = getattr(dataset, name), dataset.manifest["splits"][name]
    found = sequences(prepared, name)
    assert len(found) == split.num_rows == split.num_sequences == counted["sequences"] == counted["rows"] > 0
    random_next = sum(label == instances.IS_RANDOM for *_, label in found)
    assert counted["random_next_share"] == round(random_next / len(found), 4)
    filled = sum(len(first) + len(second) + 3 for first, second, _ in found)
    assert counted["fill"] == round(filled / len(found) / OPTIONS.max_seq_length, 4)
    assert len(np.unique(split.gather(np.arange(split.num_rows))["numbers"])) == split.num_sequences
    assert len(split.shards) == shards


def test_counts_of_documents_sentences_and_tokens(prepared, text, vocab):
    tokenizer, dataset = load_tokenizer(vocab), records.open_dataset(prepared)
    documents = list(corpus.iterate_documents(text))
    lines = [line for document in documents for line in document]
    splits = dataset.manifest["splits"]
    found = {name: sum(split[name] for split in splits.values()) for name in ("documents", "sentences", "tokens")}
    tokens = sum(map(len, tokenizer.encode_batch(lines)))
    assert found == {"documents": 200, "sentences": sum(line.count(".") for line in lines), "tokens": tokens}
    assert len(documents) == 200 and splits["heldout"]["documents"] == 20
    assert dataset.token_counts.sum() == splits["train"]["tokens"]
    assert not dataset.token_counts[[tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id]].any()


def test_the_manifest_names_the_inputs_without_their_directories(tmp_path, prepared, text, vocab):
    manifest = records.open_dataset(prepared).manifest
    files = sorted(Path(text).parent.glob("*.txt"))
    num_bytes = sum(file.stat().st_size for file in files)
    assert manifest["inputs"] == {"names": ["*.txt"], "files": 5, "bytes": num_bytes}
    assert str(Path(text).parent) not in json.dumps(manifest)
    # The same text by other names is the same data set: it is not made again, nor refused.
    prepare.prepare(",".join(map(str, files)), vocab, str(prepared), OPTIONS, num_workers=1)
    assert records.open_dataset(prepared).manifest == manifest


def test_one_shard_is_what_the_reference_makes_of_the_same_documents(output, text, vocab):
    """The documents of a shard, in order of their hash, go through `create_instances`: the golden-tested code."""
    options = PrepareOptions(max_seq_length=32, duplicates=2, holdout_rate=0)
    make(text, vocab, output, options)
    tokenizer = load_tokenizer(vocab)
    tokens, bounds = [], []
    for lines in sorted(corpus.iterate_documents(text), key=lambda lines: pieces.document_key(lines, seed=0)):
        bounds.append([len(tokens)])
        for sentence in "\n".join(lines).replace(".", ".\n").split("\n"):
            if ids := tokenizer.encode(sentence):
                tokens.extend(ids)
                bounds[-1].append(len(tokens))
    made = instances.create_instances(bounds, 32, 0.1, 2, random.Random("0/train/0"))
    names = tokenizer.tokens(tokens)
    expected = [(names[a:b], names[c:d], label) for a, b, c, d, label in made.tolist()]
    assert sequences(output) == expected


def test_pieces_and_compression_change_no_byte_of_a_shard(tmp_path, prepared, text, vocab, monkeypatch):
    (tmp_path / "zipped").mkdir()
    for path in Path(text).parent.glob("*.txt"):
        (tmp_path / "zipped" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    make(f"{tmp_path}/zipped/*.gz", vocab, tmp_path / "data")
    monkeypatch.setattr(pieces, "_LINES_AT_ONCE", 7)
    monkeypatch.setattr(corpus.plan_pieces, "__defaults__", (1000,))
    assert len(corpus.plan_pieces(text)) > 20
    make(text, vocab, tmp_path / "cut")
    whole, zipped, cut = (contents(path) for path in (prepared, tmp_path / "data", tmp_path / "cut"))
    for each in (whole, zipped, cut):
        del each[records.MANIFEST]
    assert whole == zipped == cut


PREPARE_AND_DIE = """
import os, signal, sys
from bert_jax.data import prepare
replace, left = os.replace, [int(sys.argv[4])]
def dying_replace(*paths):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    replace(*paths)
os.replace = dying_replace
options = prepare.PrepareOptions(max_seq_length=32, duplicates=2, holdout_rate=0.1, shards=3)
prepare.prepare(*sys.argv[1:4], options, num_workers=1)
"""


@pytest.mark.parametrize("num_files", [[0, 2], [9, 1, 8], [26], [34, 0]])
def test_a_killed_run_goes_on_and_ends_the_same(output, prepared, text, vocab, num_files):
    for number in num_files:  # files that each run writes before it is killed
        done = run_python(["-c", PREPARE_AND_DIE, text, vocab, output, number])
        assert done.returncode == -signal.SIGKILL
        assert not (output / records.MANIFEST).exists()
    make(text, vocab, output)
    assert contents(output) == contents(prepared)


def test_what_is_finished_is_not_made_again(tmp_path, output, prepared, text, vocab, monkeypatch):
    run_python(["-c", PREPARE_AND_DIE, text, vocab, output, "36"])
    shards = [output / marker.stem for marker in tmp_path.rglob("train-*.json")]
    written = [*tmp_path.rglob("*-0?????.npy"), *shards]
    times = {path: path.stat().st_mtime_ns for path in written}
    assert len(times) == 5 * 4 + 2
    monkeypatch.setattr(pieces, "_encode", None)  # would fail if a piece were made again
    monkeypatch.setattr(building.shutil, "rmtree", lambda path, **_: None)
    make(text, vocab, output)
    assert {path: path.stat().st_mtime_ns for path in written} == times


def test_a_complete_data_set_is_left_alone(prepared, text, vocab, capsys):
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    make(text, vocab, prepared)
    assert "already complete" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


def test_another_splitter_makes_another_data_set(output, prepared, text, vocab, monkeypatch):
    shutil.copytree(prepared, output)
    manifest = json.loads((output / records.MANIFEST).read_text())
    splitter = manifest["identity"].pop("splitter")  # as of versions that kept it in "made_with" alone
    (output / records.MANIFEST).write_text(json.dumps(manifest))
    make(text, vocab, output)
    monkeypatch.setattr(prepare, "splitter_version", lambda: "sentencex 9.9")
    for place in (output, prepared):
        assert f"was begun with {splitter}, not sentencex 9.9" in refusal(text, vocab, place, **vars(OPTIONS))


def test_a_low_limit_of_open_files_is_enough(tmp_path, output, vocab):
    """Pieces are read and closed; the limit cannot be raised here."""
    text = write_text(tmp_path / "text", num_files=80, num_documents=1)
    command = (
        "import resource; from bert_jax.data import prepare; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)); "
        f"prepare.prepare({text!r}, {vocab!r}, {str(tmp_path / 'data')!r}, "
        "prepare.PrepareOptions(max_seq_length=32, holdout_rate=0.1, shards=8), num_workers=1)"
    )
    done = run_python(["-c", command])
    assert done.returncode == 0, done.stderr
    splits = records.open_dataset(output).manifest["splits"]
    assert sum(split["documents"] for split in splits.values()) == 80


def test_documents_go_to_one_split_and_identical_ones_stay_together(tmp_path, output, vocab):
    documents = ["\n".join(f"{word} {other}." for other in WORDS[:9]) for word in WORDS]
    (tmp_path / "text").write_text("\n\n".join(documents * 2))
    options = PrepareOptions(max_seq_length=32, duplicates=1, holdout_rate=0.2, shards=2)
    make(tmp_path / "text", vocab, output, options)
    splits = records.open_dataset(output).manifest["splits"]
    assert splits["heldout"]["documents"] == 2 * 14 and splits["train"]["documents"] == 2 * 56
    sentences = []
    for split in ("train", "heldout"):
        words = [f" {' '.join(side)}" for made in sequences(output, split) for side in made[:2]]
        sentences.append({sentence for side in words for sentence in side.split(" .") if len(sentence.split()) == 2})
    assert all(sentences) and not sentences[0] & sentences[1]


def test_held_out_documents_are_cut_once_whatever_the_duplicates(output, prepared, text, vocab):
    options = PrepareOptions(max_seq_length=32, duplicates=1, holdout_rate=0.1, shards=3)
    make(text, vocab, output, options)
    ours, other = contents(prepared), contents(output)
    assert ours["heldout-00000-of-00001.npy"] == other["heldout-00000-of-00001.npy"]
    assert len(ours["train-00000-of-00003.npy"]) > 1.8 * len(other["train-00000-of-00003.npy"])


def test_large_splits_get_several_shards_that_share_the_documents(output, text, vocab, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 1500)
    options = PrepareOptions(max_seq_length=32, duplicates=1, holdout_rate=0.2, next_sentence="none")
    splits = make(text, vocab, output, options)["splits"]
    dataset = records.open_dataset(output)
    for split, counted, documents in ((dataset.train, splits["train"], 160), (dataset.heldout, splits["heldout"], 40)):
        assert len(split.shards) == -(-counted["tokens"] // 1500) > 1 and counted["documents"] == documents
        rows = split.gather(np.arange(split.num_rows))
        assert rows["lengths"].sum() - 2 * len(rows) == counted["tokens"]  # no document lost, none twice
        assert len(np.unique(rows["numbers"])) == len(rows)


@pytest.mark.parametrize(("next_sentence", "labels"), [("sop", {0, 1}), ("none", {records.NO_LABEL})])
def test_other_pairs_of_sentences(output, text, vocab, next_sentence, labels):
    options = PrepareOptions(max_seq_length=32, duplicates=1, holdout_rate=0.1, next_sentence=next_sentence)
    manifest = make(text, vocab, output, options)["splits"]["train"]
    found = sequences(output)
    assert {label for *_, label in found} == labels and manifest["sequences"] == len(found)
    filled = sum(len(first) + len(second) + (3 if second else 2) for first, second, _ in found)
    assert manifest["fill"] == round(filled / len(found) / 32, 4)


PREPARE_AND_MEASURE = """
import sys
sys.path.append(sys.argv.pop())
from benchmarks.peers.memory import most_memory
from bert_jax.data import prepare
from bert_jax.data.sources import corpus
corpus.plan_pieces.__defaults__ = (1 << 17,)
prepare.SHARD_TOKENS = 1 << 15
prepare.prepare(*sys.argv[1:4], prepare.PrepareOptions(duplicates=1), num_workers=1)
print(most_memory())
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(repository, tmp_path, vocab):
    """Eight times as many pieces and shards take no more memory, but for 32 bytes of each document."""
    peaks, pieces_of = [], []
    for number, num_documents in enumerate((500, 4000)):
        text = write_text(tmp_path / f"text{number}", num_files=4, num_documents=num_documents)
        pieces_of.append(len(corpus.plan_pieces(text, 1 << 17)))
        places = (text, vocab, str(tmp_path / f"data{number}"), str(repository))
        done = subprocess.run([sys.executable, "-c", PREPARE_AND_MEASURE, *places], capture_output=True, check=True)
        peaks.append(int(done.stdout))
    assert pieces_of[1] >= 6 * pieces_of[0] >= 48
    assert peaks[1] - peaks[0] < 8 << 20, peaks  # the text is 6 MB, its arrays in memory are more


def refusal(inputs, tokenizer, output, **options) -> str:
    """Returns the message with which `prepare` fails."""
    return message(prepare.prepare, str(inputs), str(tokenizer), str(output), PrepareOptions(**options), num_workers=1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_seq_length": 7},
        {"max_seq_length": 65536},
        {"short_seq_rate": 1.0},
        {"holdout_rate": 1.5},
        {"duplicates": 0},
        {"shards": -1},
        {"next_sentence": "nps"},
        {"language": "DE"},
    ],
)
def test_bad_options(output, text, vocab, options):
    assert f"{next(iter(options))} " in refusal(text, vocab, output, **options)
    assert not output.exists()


def test_negative_workers(output, text, vocab):
    assert "workers -1 is negative" in message(prepare.prepare, text, vocab, str(output), OPTIONS, num_workers=-1)


def paragraphs(count: int) -> str:
    """Returns documents of two sentences."""
    return "\n\n".join(f"{word} bala.\n{word} balo." for word in WORDS[:count])


@pytest.mark.parametrize(
    ("content", "options", "problem"),
    [
        ("", {}, "no document"),
        ("\x07\n\n\x07\n", {}, "no document"),
        ("bala bala.\nbalo balo.\n" * 50, {}, "holds one document"),
        ("bala bala.\nbalo balo.\n" * 50, {"next_sentence": "none"}, "1 different documents; to hold out 1"),
        ("bala bala.\nbalo balo.\n\n" * 20, {}, "20 documents, all of the same text"),
        (paragraphs(3), {}, "3 different documents; to hold out 2"),
        (paragraphs(7), {"holdout_rate": 0, "shards": 4}, "use at most 3"),
    ],
)
def test_texts_that_cannot_be_divided(tmp_path, output, vocab, content, options, problem):
    (tmp_path / "text").write_text(content)
    assert problem in refusal(tmp_path / "text", vocab, output, **options)


@pytest.mark.parametrize(
    ("text", "next_sentence"), [("bala bala.\n" * 50, "none"), (paragraphs(3), "nsp")], ids=["one", "few"]
)
def test_a_single_document_will_do_without_pairs_and_few_without_a_held_out_part(
    tmp_path, output, vocab, text, next_sentence
):
    (tmp_path / "text").write_text(text)
    options = PrepareOptions(holdout_rate=0, max_seq_length=32, next_sentence=next_sentence)
    make(tmp_path / "text", vocab, output, options)
    assert sequences(output) and records.open_dataset(output).heldout.num_rows == 0


def test_other_options_or_text_in_the_same_directory(tmp_path, output, prepared, text, vocab):
    assert "was begun with seed 0, not 5" in refusal(text, vocab, prepared, **vars(OPTIONS) | {"seed": 5})
    other = write_text(tmp_path / "text", num_files=1)
    assert "was begun with another input" in refusal(other, vocab, prepared, **vars(OPTIONS))
    run_python(["-c", PREPARE_AND_DIE, text, vocab, output, "12"])
    assert "was begun with seed 0, not 5" in refusal(text, vocab, output, **vars(OPTIONS) | {"seed": 5})


def test_a_directory_with_something_else(tmp_path, text, vocab):
    (tmp_path / "mine").write_text("precious")
    assert "choose a new directory" in refusal(text, vocab, tmp_path)
    assert "choose a new directory" in refusal(text, vocab, tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bad_text_fails_in_one_line_with_the_place(tmp_path, output, text, vocab, num_workers):
    (tmp_path / "bad.txt").write_bytes(b"bala.\n\nbal\xff.\n")
    with pytest.raises(InputError, match=r"^.*bad.txt, line 3 is not UTF-8") as caught:
        prepare.prepare(f"{text},{tmp_path}/bad.txt", vocab, str(output), OPTIONS, num_workers=num_workers)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.txt"]  # the 31 good files left nothing
    (tmp_path / "bad.txt").write_bytes(b"bala.\n\nbal.\n")
    prepare.prepare(f"{text},{tmp_path}/bad.txt", vocab, str(output), OPTIONS, num_workers=num_workers)


def test_the_command(tmp_path, prepared, text, vocab):
    flags = "--max_seq_length=32 --duplicates=2 --holdout_rate=0.1 --shards=3 --workers=2".split()
    places = [f"--input={text}", f"--tokenizer={vocab}", f"--output={tmp_path}/data"]
    done = run_python(["-m", "bert_jax.tools.prepare_corpus", *places, *flags])
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "data") == contents(prepared)
    assert "documents" in done.stderr and "MB/s" in done.stderr


def test_preparing_imports_no_jax():
    program = "import sys, bert_jax.tools.prepare_corpus; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_wikipedia_is_prepared_as_published(tmp_path, output, shared_data):
    """A share of Wikipedia with the published vocabulary: few unknown words, and the reference's mix of labels."""
    with gzip.open(shared_data / "wikipedia_en" / "wiki_en-00.txt.gz") as stream:
        (tmp_path / "text.txt").write_bytes(stream.read(1_000_000).rpartition(b"\n")[0])
    places = tmp_path / "text.txt", shared_data / "vocab" / "bert-base-uncased-vocab.txt", output
    manifest = prepare.prepare(*map(str, places), PrepareOptions(duplicates=2), num_workers=1)
    train = manifest["splits"]["train"]
    assert 0.5 < train["random_next_share"] < 0.56  # half, and the chunks of one sentence
    assert 0.85 < train["fill"] < 0.99  # one document in ten is cut short
    assert train["unknown_share"] < 0.001
    sequences(output)
