# SPDX-License-Identifier: Apache-2.0
"""SentencePiece models are learnt the same way every time, read with care, and never take text for a special token."""

import io
import pickle
import random
import re
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import sentencepiece
from builders import message

from bert_jax import InputError, load_tokenizer
from bert_jax.text.sentencepieces import BLANK, LineSample, SentencePieces, learn_sentencepieces
from bert_jax.text.tokenizer import Tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_lines(words: str, end: str, blank: str, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [blank.join(rng.choices(words.split(), k=rng.randint(3, 9))) + end for _ in range(300)]


STEMS = "low tow new flow want know walk talk sing call jump open".split()
WORDS = " ".join(stem + ending for stem in STEMS for ending in ("", "er", "ers", "ed", "ing"))
ENGLISH = make_lines(f"{WORDS} The the nobody MASK SEP Straße [x] why", ".", " ")
JAPANESE = make_lines("吾輩は 猫である 名前は まだ 無い 書生 という 人間 見た 記憶 スーと 々", "。", "")


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def english(request):
    return Tokenizer(learn_sentencepieces(ENGLISH, 80, request.param, character_coverage=1))


@pytest.fixture(scope="module")
def japanese():
    return Tokenizer(learn_sentencepieces(JAPANESE, 80, character_coverage=1))


def foreign_model(lines=ENGLISH, **options) -> bytes:
    """Returns a model as somebody else would train it."""
    content = io.BytesIO()
    defaults = {"vocab_size": 60, "character_coverage": 1.0, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=content, **(defaults | options)
    )
    return content.getvalue()


ALBERT = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": SPECIAL[2:]}


# Learning


def test_special_and_unused_tokens_come_first():
    for num_unused in (0, 3):
        vocab = learn_sentencepieces(ENGLISH, 70, num_unused=num_unused).vocab
        assert len(vocab) == len(set(vocab)) == 70
        assert list(vocab[: 5 + num_unused]) == [*SPECIAL, *(f"[unused{index}]" for index in range(num_unused))]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("asked", [-1, 7, 100_000])
def test_the_size_that_the_refusal_names_works(model_type, asked):
    for lines in (ENGLISH, JAPANESE):
        told = message(learn_sentencepieces, lines, asked, model_type)
        assert f"vocab_size {asked} does not fit this text" in told
        named = int(re.findall(r"(?:vs|<=) ([0-9]+)", told)[0])
        assert len(learn_sentencepieces(lines, named, model_type).vocab) == named
        with pytest.raises(InputError):
            learn_sentencepieces(lines, named + (1 if asked > named else -1), model_type)


@pytest.mark.parametrize("lines", [[], ["", " "], ["\u3000"]])
def test_no_words_is_one_line(lines):
    assert "holds no words" in message(learn_sentencepieces, lines, 50)


def test_a_coverage_that_the_library_does_not_take_is_refused():
    assert "character_coverage 0.5" in message(learn_sentencepieces, ENGLISH, 50, character_coverage=0.5)


# The sample


def test_a_sample_is_bounded_in_order_the_same_every_time_and_fair():
    lines = [f"é{number:06}" + "." * (number % 93) for number in range(10_000)]  # 100 bytes, the least to count
    samples = [LineSample(375_000), LineSample(375_000)]
    for sample in samples:
        for line in lines:
            sample.add(line)
            assert len(sample._heap) <= 3750
    found = samples[0].lines()
    assert found == samples[1].lines() == sorted(found)
    assert len(found) == 3750 and sample.num_lines == 10_000
    early = sum(line < "é005" for line in found)
    assert abs(early - 1875) < 4 * (3750 * 0.5 * 0.5) ** 0.5


# Text to ids and back


def test_what_text_says_is_no_special_token(english):
    text = "the [MASK] [SEP] [x] [PAD][CLS] [UNK]"
    assert set(english.encode(text)).isdisjoint(set(english.special_ids) - {english.unk_id})
    assert english.special_ids == (0, 1, 2, 3, 4)
    allowed = english.tokenize("the[MASK], the [SEP]", allow_special=True)
    assert [token for token in allowed if token in SPECIAL] == ["[MASK]", "[UNK]", "[SEP]"]  # "," was never seen
    assert english.encode("the lower", allow_special=True) == english.encode("the lower")


def test_text_after_a_special_token_begins_a_word_only_after_a_blank(japanese):
    tokens = japanese.tokenize("吾輩は[MASK]猫である [MASK] 猫である", allow_special=True)
    first, second = (index for index, token in enumerate(tokens) if token == "[MASK]")
    assert not any(BLANK in token for token in tokens[first:second])
    assert tokens[second + 1].startswith(BLANK)
    assert japanese.encode("[MASK]猫", allow_special=True)[0] == japanese.mask_id


def test_decode_gives_the_text_back(english, japanese):
    for tokenizer, lines in ((english, ENGLISH), (japanese, JAPANESE)):
        for line in lines[:50]:
            assert tokenizer.decode(tokenizer.encode(line)) == line
    ids = [english.cls_id, *english.encode("the towers é"), english.sep_id, *english.encode("why"), english.sep_id]
    assert english.decode(ids) == "[CLS] the towers [UNK] [SEP] why [SEP]"
    assert english.decode(ids, skip_special=True) == "the towers why"
    assert english.decode([]) == ""


def test_words_begin_after_blanks(english):
    starts = english.word_starts
    assert starts.dtype == np.bool_ and starts.shape == (80,) and starts[list(english.special_ids)].all()
    assert starts[english.encode("The lower\n towers were newer.")].sum() == 6


def test_every_piece_of_a_script_without_blanks_is_a_word(japanese):
    assert japanese.word_starts.all()


# Files


def test_a_saved_tokenizer_is_the_same(tmp_path, english, japanese):
    texts = ENGLISH[:20] + JAPANESE[:20]
    for tokenizer in (english, japanese, Tokenizer(learn_sentencepieces(ENGLISH, 70, lowercase=True))):
        tokenizer.save(tmp_path / "new")
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["spiece.model", "tokenizer_config.json"]
        for loaded in (load_tokenizer(tmp_path / "new"), pickle.loads(pickle.dumps(tokenizer))):
            assert (loaded.vocab, loaded.config, loaded.kind) == (tokenizer.vocab, tokenizer.config, "sentencepiece")
            assert loaded.fingerprint == tokenizer.fingerprint
            assert loaded.encode_batch(texts) == tokenizer.encode_batch(texts)


def test_fingerprint_tells_models_and_options_apart():
    content = foreign_model(**ALBERT)
    bpe = foreign_model(**ALBERT, model_type="bpe")
    models = [(content, False), (content, True), (content, True, True), (bpe, False)]
    fingerprints = [Tokenizer(SentencePieces(*model)).fingerprint for model in models]
    assert len(set(fingerprints)) == 4
    assert Tokenizer(SentencePieces(content, lowercase=True)).fingerprint == fingerprints[1]


def test_a_damaged_model_is_one_line(tmp_path, english):
    path, whole = tmp_path / "some.model", english.pieces.content
    # Cut after a whole piece it is a smaller model to the library.
    token = english.vocab[79].encode()
    cut = whole[: whole.index(b"\n" + bytes([len(token)]) + token) - 2]
    assert sentencepiece.SentencePieceProcessor(model_proto=cut).get_piece_size() == 79
    damaged = [cut, *(whole[:length] for length in range(0, len(whole), 9973))]
    damaged += [b"garbage" * 100, b"\0" * 1000, "\n".join(SPECIAL).encode(), whole + b"\n"]
    for content in damaged:
        path.write_bytes(content)
        assert "the SentencePiece model is damaged" in message(load_tokenizer, path)
    path.write_bytes(whole)
    assert load_tokenizer(path).vocab == english.vocab
    assert "does not exist" in message(load_tokenizer, tmp_path / "missing.model")


def test_a_directory_with_two_vocabularies_is_refused(tmp_path, english):
    english.save(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(SPECIAL))
    assert "has vocab.txt and spiece.model" in message(load_tokenizer, tmp_path)
    assert load_tokenizer(tmp_path / "spiece.model").kind == "sentencepiece"


# Models of others


def test_special_tokens_under_other_names(tmp_path):
    xlnet = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 5}
    xlnet["control_symbols"] = ["<cls>", "<sep>", "<mask>"]
    for options, ids in ((ALBERT, (0, 1, 2, 3, 4)), (xlnet, (5, 0, 3, 4, 6))):
        (tmp_path / "spiece.model").write_bytes(foreign_model(**options))
        tokenizer = load_tokenizer(tmp_path / "spiece.model")
        assert tokenizer.special_ids == ids
        assert [tokenizer.vocab[index] for index in ids] == SPECIAL
        assert tokenizer.encode("[MASK]", allow_special=True) == [tokenizer.mask_id]
        tokenizer.save(tmp_path / "saved")
        assert (tmp_path / "saved/spiece.model").read_bytes() == (tmp_path / "spiece.model").read_bytes()


DEBERTA = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "bos_piece": "[CLS]", "eos_piece": "[SEP]"}
DEBERTA |= {"pad_piece": "[PAD]", "unk_piece": "[UNK]"}


@pytest.mark.parametrize(
    ("model", "name", "options", "special", "between", "moved"),
    [
        ("deberta-v2", "spm.model", DEBERTA, (0, 3, 1, 2, 60), 1, 0),
        ("albert", "spiece.model", ALBERT | {"pad_piece": "<pad>"}, (0, 1, 2, 3, 4), 1, 0),
        ("xlm-roberta", "sentencepiece.bpe.model", {}, (1, 3, 0, 2, 61), 2, 1),
        ("camembert", "sentencepiece.bpe.model", {}, (1, 3, 5, 6, 64), 2, 4),
    ],
)
def test_a_model_that_a_class_of_transformers_reads(tmp_path, model, name, options, special, between, moved):
    """Its pieces have the ids of the file, after the special tokens that the class puts first."""
    lines = [line.lower().replace("ß", "ss") for line in ENGLISH]
    content = foreign_model(lines, **options)
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model}"}}')
    found = load_tokenizer(tmp_path)
    assert (found.special_ids, found.template.separators, found.kind) == (special, between, "tokenizers")
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content).encode(lines[:20])
    assert found.encode_batch(lines[:20]) == [[index + moved for index in ids] for ids in theirs]
    found.save(tmp_path / "own")
    for again in (load_tokenizer(tmp_path / "own"), pickle.loads(pickle.dumps(found))):
        assert again.fingerprint == found.fingerprint and again.encode_batch(lines) == found.encode_batch(lines)
    (tmp_path / name).write_bytes(content[:-9])
    assert f"{name} is damaged" in message(load_tokenizer, tmp_path)
    (tmp_path / name).rename(tmp_path / "vocab.txt")
    assert f"and there is no {name} and no tokenizer.json" in message(load_tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pad_id": 3}, r"lacks \[CLS\], \[SEP\], \[MASK\];"),
        (
            ALBERT | {"control_symbols": ["[CLS]", "[SEP]"], "user_defined_symbols": ["[MASK]"]},
            r"\[MASK\] is not a control symbol",
        ),
        # Which piece begins a word would depend on the piece before it: whole words could not be masked.
        (ALBERT | {"treat_whitespace_as_suffix": True, "add_dummy_prefix": False}, "its pieces end with blanks"),
        (ALBERT | {"treat_whitespace_as_suffix": True, "model_type": "bpe"}, "its pieces end with blanks"),
    ],
)
def test_models_that_are_not_for_bert_are_refused(tmp_path, options, problem):
    (tmp_path / "some.model").write_bytes(foreign_model(**options))
    with pytest.raises(InputError, match=rf"some\.model: .*{problem}"):
        load_tokenizer(tmp_path / "some.model")


def test_a_model_of_small_letters_gets_small_letters(tmp_path):
    small = [line.lower() for line in ENGLISH]
    (tmp_path / "spiece.model").write_bytes(foreign_model(small, **ALBERT))
    tokenizer = load_tokenizer(tmp_path / "spiece.model")
    assert tokenizer.lowercase and not tokenizer.strip_accents
    assert tokenizer.encode("THE Lower") == tokenizer.encode("the lower") != [tokenizer.unk_id]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false, "keep_accents": false}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.lowercase, tokenizer.strip_accents) == (False, True)
    assert tokenizer.encode("THE") != tokenizer.encode("the") == tokenizer.encode("thé")


@pytest.mark.parametrize("more", ["", "İstanbul"])  # the capital that folding leaves as it is
def test_a_model_that_folds_case_cannot_be_cased(tmp_path, more):
    lines = [f"{line} {more}" for line in ENGLISH]
    (tmp_path / "some.model").write_bytes(foreign_model(lines, **ALBERT, normalization_rule_name="nmt_nfkc_cf"))
    assert load_tokenizer(tmp_path / "some.model").lowercase
    assert "some.model: the model lower-cases" in message(load_tokenizer, tmp_path / "some.model", lowercase=False)


@pytest.fixture(scope="module")
def small_model():
    """Returns the file of a model, and the place of its first piece that is not a special token."""
    content = learn_sentencepieces(["the river ran by the town"] * 4, 30, model_type="bpe").content
    return content, content.index("▁".encode())


def refusal(content: bytes) -> str:
    return message(SentencePieces, content, lowercase=False)


def test_a_file_of_0xff_is_refused_at_once(small_model):
    """An integer without an end was read to the end of the file, in time that is quadratic."""
    started = time.process_time()
    assert "damaged" in refusal(b"\xff" * 2_000_000)
    assert "damaged" in refusal(small_model[0] + b"\xff" * 2_000_000)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("score", [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"])
def test_a_score_that_is_not_finite_is_one_line(small_model, score):
    content, place = small_model
    place = content.index(b"\x15", place)  # field 2 of a piece, four bytes
    assert "has a score that is not finite" in refusal(content[: place + 1] + score + content[place + 5 :])


def test_half_a_surrogate_pair_is_dropped(english):
    whole, broken = "the box", "th\ud800e b\udfffox"
    assert english.encode(broken) == english.encode(whole)
    ids, spans = english.encode_with_offsets(broken)
    clean = [broken[start:end].replace("\ud800", "").replace("\udfff", "") for start, end in spans.tolist()]
    expected = english.encode_with_offsets(whole)
    assert ids == expected[0] and clean == [whole[start:end] for start, end in expected[1].tolist()]


def test_a_text_on_which_the_library_fails_is_one_line(english, monkeypatch):
    failing = mock.Mock(side_effect=RuntimeError("Internal: damaged\ncharsmap"))
    monkeypatch.setattr(english.pieces, "_model", SimpleNamespace(encode=failing))
    for call, text in ((english.encode, "☃"), (english.encode_with_offsets, "☃"), (english.encode_arrays, ["☃"])):
        told = message(call, text)
        assert "SentencePiece model fails on the text" in told and "(Internal: damaged charsmap); copy" in told
