# SPDX-License-Identifier: Apache-2.0
"""Tokens are Google's; vocabularies that cannot work are refused with a reason."""

import itertools
import json
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import message

from bert_jax import load_tokenizer
from bert_jax.errors import InputError
from bert_jax.text import wordpiece, words
from bert_jax.text.tokenizer import wordpiece_tokenizer
from tests.reference.make_tokenizer_goldens import (
    LINES_PER_HASH,
    character_texts,
    corpus_lines,
    fuzz_texts,
    hashes,
    sigma_texts,
)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = [*SPECIAL, "want", "##want", "##ed", "wa", "un", "runn", "##ing", ",", "a", "##a", "[", "]", "mask"]


@pytest.fixture(scope="module")
def goldens(repository):
    return json.loads((repository / "tests/golden/tokenizer.json").read_text())


@pytest.fixture
def small():
    return wordpiece_tokenizer(VOCAB, lowercase=True)


@pytest.mark.parametrize("casing", ["uncased", "cased"])
def test_tokens_of_fuzzed_text_are_those_of_the_reference(goldens, repository, casing):
    tokenizer = load_tokenizer(
        repository / "tests/fixtures" / ("tokenizer" if casing == "uncased" else "tokenizer_cased")
    )
    assert hashes(map(tokenizer.tokenize, fuzz_texts())) == goldens[casing]["fuzz_tokens"]


def check_arrays(tokenizer, texts, ids):
    """Checks that many texts at a time get the ids that each gets by itself."""
    flat, counts = tokenizer.encode_arrays(texts)
    assert flat.dtype == np.min_scalar_type(tokenizer.vocab_size - 1)
    assert flat.tolist() == [index for text in ids for index in text]
    assert counts.tolist() == [len(text) for text in ids]


@pytest.mark.parametrize(
    ("folder", "every"),
    [("tokenizer", 60), *(pytest.param(f"tokenizer{cased}", 3, marks=pytest.mark.slow) for cased in ("", "_cased"))],
)
def test_many_texts_at_a_time_are_encoded_as_each_alone(repository, folder, every):
    tokenizer = load_tokenizer(repository / "tests/fixtures" / folder)
    texts = ["", "x" * 15, "x" * 16, "x" * 17, "x" * 201, "字" * 300, "a\0", "\0", "\0\0 \0a", "a\nb\n", "\n", ""]
    texts += [*itertools.chain(fuzz_texts(), character_texts(), sigma_texts())][::every]
    ids = tokenizer.encode_batch(texts)
    start, size = 0, 0
    while start < len(texts):
        check_arrays(tokenizer, texts[start : start + size], ids[start : start + size])
        start, size = start + size, 2 * size + 1
    check_arrays(tokenizer, texts[:20], ids[:20])  # when all are known


def test_long_words_do_not_lend_their_ids_to_words_of_nul_bytes(repository):
    """Whose key is that of a long word; it shows where another word has taken the first place of the table."""
    tokenizer = load_tokenizer(repository / "tests/fixtures/tokenizer")
    for size in range(100, 3000, 37):
        encoder = wordpiece.WordPiece(tokenizer.vocab, tokenizer.pieces.normalizer)
        encoder.encode_arrays([" ".join(f"{number * size:x}" for number in range(size))])
        encoder.encode_arrays(["y" * 40])
        assert encoder.encode_arrays(["\0 a \0\0"])[0].tolist() == tokenizer.encode("a")


def test_numbers_of_words_last_while_their_table_grows():
    table, seen, rng = words.WordNumbers(), {}, random.Random(0)
    for size in (1, 10, 3000, 100, 20000):
        lines = [f"{rng.choice('ab') * rng.randint(1, 24)}{rng.randint(0, size)}" for _ in range(size)]
        numbers, new = table.look_up(words.find_words("\n".join(lines).encode()))
        assert sorted(lines[place] for place in new) == sorted(set(lines) - set(seen))
        for line, number in zip(lines, numbers.tolist(), strict=True):
            assert seen.setdefault(line, number) == number
    assert sorted(seen.values()) == list(range(1, table.count))


def check_corpus(goldens, shared_data, casing, name):
    golden = goldens[casing]["corpora"][name]
    tokenizer = load_tokenizer(shared_data / "vocab" / f"bert-base-{casing}-vocab.txt")
    lines = corpus_lines(shared_data / name)
    assert len(lines) == golden["lines"]
    ids = tokenizer.encode_batch(lines)
    assert sum(map(len, ids)) == golden["tokens"]
    pieces = hashes(map(tokenizer.tokens, ids))
    check_arrays(tokenizer, lines, ids)
    wrong = [index * LINES_PER_HASH for index, pair in enumerate(zip(pieces, golden["pieces"])) if pair[0] != pair[1]]
    assert not wrong, f"{name}: lines from {wrong} differ"
    assert hashes(map(tokenizer.pieces.normalizer, lines)) == golden["words"]


@pytest.mark.parametrize("casing", ["uncased", pytest.param("cased", marks=pytest.mark.slow)])
def test_tokens_of_36_texts_in_many_scripts_are_those_of_the_reference(goldens, shared_data, casing):
    names = [name for name in goldens[casing]["corpora"] if name.startswith("udhr/")]
    assert len(names) == 36
    for name in names:
        check_corpus(goldens, shared_data, casing, name)


@pytest.mark.slow
@pytest.mark.parametrize("casing", ["uncased", "cased"])
@pytest.mark.parametrize("number", range(10))
def test_tokens_of_wikipedia_are_those_of_the_reference(goldens, shared_data, casing, number):
    check_corpus(goldens, shared_data, casing, f"wikipedia_en/wiki_en-{number:02}.txt.gz")


def test_longest_match_first(small):
    assert small.tokenize("unwanted running") == ["un", "##want", "##ed", "runn", "##ing"]
    assert small.encode("unwanted, UNWANTED") == [9, 6, 7, 12, 9, 6, 7]
    assert small.tokenize("unwantedX running") == ["[UNK]", "runn", "##ing"]  # one piece makes a word unknown


def test_a_word_of_201_characters_is_unknown(small):
    assert small.tokenize("a" * 200) == ["a"] + ["##a"] * 199
    assert small.tokenize("a" * 201) == ["[UNK]"]


def test_of_duplicate_lines_the_last_counts(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a", "b", "a", "[MASK]"]) + "\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a b") == [7, 6]
    assert tokenizer.vocab_size == 9
    assert tokenizer.mask_id == 8
    assert tokenizer.tokens([5, 7]) == ["a", "a"]
    assert tokenizer.tokens([5, 9999]) == ["a", "[9999]"]  # of a table with more rows


def test_special_tokens_in_text_are_text_unless_allowed(small):
    assert small.tokenize("a[MASK], a") == ["a", "[", "mask", "]", ",", "a"]
    assert small.tokenize("a[MASK], [SEP] A", allow_special=True) == ["a", "[MASK]", ",", "[SEP]", "a"]
    assert small.encode("[mask]", allow_special=True) == small.encode("[mask]")


def test_special_ids_are_found_by_name():
    vocab = random.Random(1).sample(VOCAB, len(VOCAB))
    tokenizer = wordpiece_tokenizer(vocab, lowercase=True)
    ids = tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id
    assert tokenizer.special_ids == ids and [vocab[index] for index in ids] == SPECIAL


def test_word_starts(small):
    assert small.word_starts.dtype == np.bool_
    assert small.word_starts.tolist() == [not token.startswith("##") for token in VOCAB]


def test_decode_joins_pieces(small):
    ids = [small.cls_id, *small.encode("unwanted, running zebra"), small.sep_id]
    assert small.decode(ids) == "[CLS] unwanted , running [UNK] [SEP]"
    assert small.decode(ids, skip_special=True) == "unwanted , running"
    assert small.decode([]) == ""


def test_id_of(small):
    assert small.id_of("want") == 5
    assert "'zebra' is not in the vocabulary" in message(small.id_of, "zebra")


def test_forgetting_words_changes_no_token(small, monkeypatch):
    texts = ["unwanted, a", "running a, unwanted", "a a a", "unwanted want, running"]
    expected = small.encode_batch(texts)
    monkeypatch.setattr(wordpiece, "_CACHED_WORDS", 2)
    monkeypatch.setattr(words, "_CACHED_WORDS", 2)
    forgetful = wordpiece_tokenizer(VOCAB, lowercase=True)
    assert forgetful.encode_batch(texts) == expected
    for text, ids in zip(texts, expected):
        check_arrays(forgetful, [text], [ids])
    assert forgetful.pieces._batches._raw.count == 5  # the words of the last two texts; number 0 is none


@pytest.mark.parametrize("options", [(True, None, True), (False, True, True), (True, False, False)])
def test_saved_tokenizer_is_the_same(tmp_path, options):
    tokenizer = wordpiece_tokenizer(VOCAB, *options)
    tokenizer.save(tmp_path / "new")
    for loaded in (load_tokenizer(tmp_path / "new"), pickle.loads(pickle.dumps(tokenizer))):
        assert (loaded.vocab, loaded.config, loaded.kind) == (tokenizer.vocab, tokenizer.config, "wordpiece")
        assert loaded.fingerprint == tokenizer.fingerprint and loaded.encode("Unwanted") == tokenizer.encode("Unwanted")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["tokenizer_config.json", "vocab.txt"]


def test_fingerprint_tells_vocabularies_and_options_apart():
    options = [(VOCAB, True), (VOCAB, False), (VOCAB, True, False), (VOCAB, True, None, False), (VOCAB[::-1], True)]
    fingerprints = [wordpiece_tokenizer(*each).fingerprint for each in options]
    assert len(set(fingerprints)) == len(fingerprints)
    assert wordpiece_tokenizer(VOCAB, True, True).fingerprint == fingerprints[0]
    hub = wordpiece_tokenizer(VOCAB, True).cutting_as_hub()  # pairs; the ids of a text are the same
    assert hub.fingerprint == fingerprints[0] and hub.template.odd_to_longer


@pytest.mark.parametrize(
    ("names", "second_type"), [(None, 1), ([], 1), (["input_ids"], 0), (["input_ids", "token_type_ids"], 1), ("x", 1)]
)
def test_options_say_how_long_words_and_which_types_there_are(names, second_type):
    options = {"do_lower_case": True, "max_input_chars_per_word": 5, "model_input_names": names}
    pieces = wordpiece.make_wordpiece(VOCAB, options)
    assert (pieces("want wanted"), pieces.template.second_type) == ([5, 1], second_type)
    assert (pieces.config.get("model_input_names") is None) == bool(second_type)


@pytest.mark.parametrize(
    ("extra", "lowercase"), [([], True), (["[unused1]", "<S>"], True), (["Paris"], False), (["É"], False)]
)
def test_capital_letters_tell_a_cased_vocabulary(tmp_path, extra, lowercase):
    (tmp_path / "some.txt").write_text("\n".join([*VOCAB, *extra]), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path / "some.txt")
    assert (tokenizer.lowercase, tokenizer.strip_accents) == (lowercase, lowercase)
    assert load_tokenizer(tmp_path / "some.txt", lowercase=not lowercase).lowercase is not lowercase
    assert load_tokenizer(tmp_path / "some.txt", strip_accents=not lowercase).strip_accents is not lowercase


def test_a_configuration_decides_and_arguments_override_it(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB))
    config = {"do_lower_case": False, "strip_accents": None, "tokenize_chinese_chars": False, "model_max_length": 512}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.config == {"do_lower_case": False, "strip_accents": False, "tokenize_chinese_chars": False}
    assert load_tokenizer(tmp_path, lowercase=True).strip_accents


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(VOCAB).encode() + b"\r\n")
    assert load_tokenizer(tmp_path).vocab == tuple(VOCAB)


@pytest.mark.parametrize("missing", SPECIAL)
def test_a_vocabulary_without_a_special_token_is_refused(tmp_path, missing):
    (tmp_path / "vocab.txt").write_text("\n".join(token for token in VOCAB if token != missing))
    told = message(load_tokenizer, tmp_path / "vocab.txt")
    assert str(tmp_path / "vocab.txt") in told and f"lacks {missing};" in told


def test_a_directory_without_a_vocabulary_is_refused(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").touch()
    told = message(load_tokenizer, tmp_path)
    assert "holds none of vocab.txt, spiece.model, " in told
    assert f"tokenizer.json (did you mean {tmp_path}/tokenizer?)" in told
    assert "does not exist" in message(load_tokenizer, tmp_path / "missing.txt")


def test_a_list_is_no_text_and_a_text_no_list(tokenizer):
    with pytest.raises(InputError, match=r"^\['a', 'b'\] is not a text; give a string, or a list to encode_batch"):
        tokenizer.encode(["a", "b"])
    with pytest.raises(InputError, match="this is a single text; give a list of them"):
        tokenizer.encode_batch("ab")


def test_threads_share_a_tokenizer():
    rng, letters = random.Random(0), "abcdefghij"
    tokenizer = wordpiece_tokenizer([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)], lowercase=True)
    texts = [["".join(rng.choices(letters, k=5)) for _ in range(200)] for _ in range(60)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda each: tokenizer.encode_arrays(each)[0].tolist(), texts))
    assert found == [[index for text in each for index in tokenizer.encode(text)] for each in texts]
