# SPDX-License-Identifier: Apache-2.0
"""Documents go to splits and shards by the hash of their text."""

import functools
import gzip
import pickle

import numpy as np
import pytest
from builders import assert_same
from conftest import ROOT

from bert_jax.data import pieces, prepare
from bert_jax.data.prepare import PrepareOptions
from bert_jax.data.sources import corpus
from bert_jax.errors import TextError
from bert_jax.tokenizing import load_tokenizer


def test_shards_are_ranges_of_equally_many_documents_that_cover_all():
    documents = np.ones(1000, pieces.DOCUMENT)
    documents["key"] = np.random.default_rng(0).integers(0, 1 << 64, 1000, np.uint64)
    documents["key"][500:600] = documents["key"][:100]  # copies
    ranges = prepare.plan_ranges(documents, PrepareOptions(holdout_rate=0.1, shards=7))
    keys = np.unique(documents["key"])
    inside = np.array([(keys >= shard.first) & (keys <= shard.last) for shard in ranges])
    assert (inside.sum(axis=0) == 1).all()
    sizes = inside.sum(axis=1)[[shard.split == "train" for shard in ranges]]
    assert len(sizes) == 7 and sizes.sum() == 810 and sizes.max() - sizes.min() <= 1
    heldout, *_ = (shard for shard in ranges if shard.split == "heldout")
    assert heldout.last < min(shard.first for shard in ranges if shard.split == "train")


def test_a_text_with_which_a_tokenizer_fails_is_named_by_its_line(tmp_path, monkeypatch):
    def fail(documents, *_):
        raise TextError("the library fails", [line for document in documents for line in document][1])

    monkeypatch.setattr(pieces, "encode_documents", fail)
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress("one line.\n\nthe grösse.\n".encode()))
    (piece,) = corpus.plan_pieces(str(path))
    with pytest.raises(TextError, match=r"text\.txt\.gz, line 3: the library fails$") as told:
        pieces.write_piece(tmp_path, 0, piece, None, 0, "en")
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)  # it crosses from a worker


def test_a_long_document_has_parts_that_end_with_sentences(monkeypatch):
    monkeypatch.setattr(pieces, "PART_TOKENS", 10)
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.choice([0, 1, 3, 5, 40], rng.integers(1, 60))
        sentences = ["x" * int(length) for length in lengths]
        counts, tokens, *shares = map(np.array, zip(*pieces._parts(lengths, sentences, (1000, 170))))
        assert tokens.sum() == lengths.sum() and counts.sum() == np.count_nonzero(lengths)
        assert [share.sum() for share in shares] == [1000, 170]
        if len(counts) > 1:
            assert set(np.cumsum(tokens)) <= set(np.cumsum(lengths)) and tokens.min() > 0


@pytest.mark.parametrize(
    ("passage", "tokens", "num_keys"), [(0, [5, 5, 4], 2), (1, [1] * 14, 9), (3, [3, 2, 3, 2, 3, 1], 4)]
)
def test_parts_are_united_to_documents_or_passages(passage, tokens, num_keys):
    parts = np.zeros(14, pieces.DOCUMENT)
    parts["key"] = [7] * 10 + [9] * 4
    parts["part"] = [*range(5), *range(5), *range(4)]  # the first two are copies
    parts["tokens"] = parts["sentences"] = parts["text_bytes"] = 1
    united, keys = pieces.unite(parts, passage), pieces.keys_of(parts, passage)
    assert united["tokens"].tolist() == tokens and len(np.unique(keys)) == num_keys
    assert keys[:5].tolist() == keys[5:10].tolist()  # copies stay together
    assert np.unique(united["key"]).tolist() == np.unique(keys).tolist()
    assert len(pieces.unite(parts[:0], passage)) == 0


def long_documents() -> np.ndarray:
    """Returns the parts of six documents of 400 parts each."""
    parts = np.zeros(6 * 400, pieces.DOCUMENT)
    parts["key"] = np.repeat(np.random.default_rng(0).integers(0, 1 << 64, 6, np.uint64), 400)
    parts["part"] = np.tile(np.arange(400), 6)
    parts["tokens"], parts["sentences"] = pieces.PART_TOKENS, 50
    return parts


@pytest.mark.parametrize("rate", [0.005, 0.1])
def test_long_documents_are_cut_where_too_many_tokens_would_be_held_out(rate):
    parts = long_documents()
    ranges = prepare.plan_ranges(parts, PrepareOptions(holdout_rate=rate))
    assert 1 <= ranges[0].passage <= 64
    keys = pieces.keys_of(parts, ranges[0].passage)
    inside = [(keys >= shard.first) & (keys <= shard.last) for shard in ranges if shard.split == "heldout"]
    assert rate / 2 < np.mean(inside, axis=1).sum() < 2 * rate


@pytest.mark.parametrize(("options", "count"), [({"holdout_rate": 0.4}, 2), ({"holdout_rate": 0, "shards": 8}, 8)])
def test_long_documents_stay_whole_where_as_many_tokens_are_held_out(options, count):
    ranges = prepare.plan_ranges(long_documents(), PrepareOptions(**options))
    assert len(ranges) == count and bool(ranges[0].passage) == (count == 8)


def test_what_chance_holds_out_does_not_cut_documents():
    """Of hundreds of documents five are held out; those may be long ones."""
    parts = np.zeros(500 + 9, pieces.DOCUMENT)
    parts["key"] = np.minimum(np.arange(509), 499)
    parts["part"][499:] = np.arange(10)
    parts["tokens"] = parts["sentences"] = 100
    parts["tokens"][:5] = 400
    ranges = prepare.plan_ranges(parts, PrepareOptions(holdout_rate=0.01))
    assert not ranges[0].passage and ranges[-1].last == 4  # 3.8 % of the tokens: a warning tells


def test_batches_end_with_many_characters_too(monkeypatch):
    monkeypatch.setattr(pieces, "_BYTES_AT_ONCE", 100)
    documents = [["x" * size] * lines for size, lines in ((30, 1), (30, 2), (30, 3), (500, 1), (1, 5), (1, 1))]
    assert [len(batch) for batch in pieces._batches(documents)] == [3, 1, 2]


def test_sentences_are_encoded_some_at_a_time_with_the_same_result(monkeypatch):
    tokenizer = load_tokenizer(ROOT / "tests/fixtures/tokenizer")
    documents = [["The ban ran. It sat on " + "and on " * count + "."] * 3 for count in range(20)]
    whole = pieces.encode_documents(documents, tokenizer, 0, "en")
    monkeypatch.setattr(pieces, "_BYTES_AT_ONCE", 50)
    for ours, theirs in zip(pieces.encode_documents(documents, tokenizer, 0, "en"), whole, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("array", [*pieces.EncodedPiece._fields, "sums"])
def test_a_piece_that_is_damaged_since_the_power_failed_is_made_again(tmp_path, array):
    tokenizer = load_tokenizer(ROOT / "tests/fixtures/tokenizer")
    (tmp_path / "a.txt").write_text("The ban ran.\nIt sat on it.\n\nThe ban sat.\n")
    (plan,) = corpus.plan_pieces(str(tmp_path / "a.txt"))
    make = functools.partial(pieces.write_piece, tmp_path, 0, plan, tokenizer, 0, "en")
    make()
    whole = {path: path.read_bytes() for path in tmp_path.glob("*-000000.*")}
    (place,) = tmp_path.glob(f"{array}-000000.*")
    for damaged in (b"", whole[place][:-8] + bytes(8)):
        place.write_bytes(damaged)
        make()
        assert {path: path.read_bytes() for path in whole} == whole
    before = place.stat().st_mtime_ns
    make()
    assert place.stat().st_mtime_ns == before
