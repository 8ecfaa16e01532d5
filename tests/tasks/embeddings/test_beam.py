# SPDX-License-Identifier: Apache-2.0
"""A pipeline makes the bytes of `prepare_pairs`, of several sources, in parts and shards."""

import importlib.util
import json

import pytest
from builders import message, write_vocab

from bert_jax.storage.places import to_place
from bert_jax.tasks.embeddings import prepare
from bert_jax.tasks.embeddings.prepare import PairOptions, prepare_pairs

HAS_BEAM = importlib.util.find_spec("apache_beam") is not None
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_BEAM, reason="needs pip install 'bert_jax[beam]'")]
IN_THREADS = "--direct_num_workers=2 --direct_running_mode=multi_threading"


def write_lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Writes a file, two that are one source, and BEIR's three; parts have four examples and shards few rows."""
    monkeypatch.setattr(prepare, "_EXAMPLES_AT_ONCE", 4)
    monkeypatch.setattr(prepare, "SHARD_BYTES", 400)
    words = [f"{first}a{last}" for first in "bdf" for last in "nrst"]
    for name, count in (("one", 11), ("two/0", 5), ("two/1", 6)):
        rows = [{"anchor": words[n], "positive": " ".join(words[n:]), "negative": words[n - 1]} for n in range(count)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    for name, key in (("corpus", "title"), ("queries", "other")):
        write_lines(tmp_path / f"beir/{name}.jsonl", [{"_id": word, "text": word, key: ""} for word in words])
    (tmp_path / "beir/qrels").mkdir()
    judged = [f"{word}\t{other}\t1\n" for word, other in zip(words, words[3:])]
    (tmp_path / "beir/qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    write_vocab(tmp_path / "vocab.txt")
    return f"{tmp_path}/one.jsonl,{tmp_path}/two/*.jsonl,{tmp_path}/beir"


@pytest.mark.parametrize("remote", [False, True])
def test_a_pipeline_makes_the_same_bytes(tmp_path, sources, remote):
    """On a disk and in a bucket, where a worker leaves alone what others have written."""
    from bert_jax.tasks.embeddings.beam import prepare_pairs_with_beam

    given = sources, f"{tmp_path}/vocab.txt"
    named = {"names": ["one", "two", "beir"], "weights": [1.0, 2.0, 0.5]}
    options = PairOptions(query_prompt="ban ", max_seq_length=9)
    expected = prepare_pairs(*given, f"{tmp_path}/here", options, num_workers=1, **named)
    output = f"memory://{tmp_path.name}" if remote else f"{tmp_path}/there"
    assert prepare_pairs_with_beam(*given, output, options, IN_THREADS, **named) == expected
    for path in tmp_path.glob("here/**/*"):
        if path.is_file():
            assert (to_place(output) / path.relative_to(tmp_path / "here").as_posix()).read_bytes() == path.read_bytes()
    assert len(expected["splits"]["train"]["shards"]) > 5 and expected["figures"]["truncated"]
    again = message(prepare_pairs_with_beam, *given, output, options, IN_THREADS, **named)
    assert again.endswith("choose a new place")


def test_what_a_step_refuses_is_one_error_and_nothing_is_left(tmp_path, sources):
    from bert_jax.tasks.embeddings.beam import prepare_pairs_with_beam

    (tmp_path / "one.jsonl").write_text("\n")
    given = sources, f"{tmp_path}/vocab.txt", f"{tmp_path}/there", PairOptions(), IN_THREADS
    assert message(prepare_pairs_with_beam, *given, names=["one", "two", "beir"]).endswith(
        "one.jsonl has no example; leave it out"
    )
    assert not (tmp_path / "there").exists()
