# SPDX-License-Identifier: Apache-2.0
"""What a tokenizer.json describes: the library's ids through our `Tokenizer`, in the rows that the file asks for."""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from builders import assert_same, message, tiny_model
from described import KINDS, LINES, unigram_of_xlmr, write_described
from hf_models import random_params
from tokenizers import normalizers

from bert_jax import InputError, load_pretrained, load_tokenizer
from bert_jax.batches.make import make_batch
from bert_jax.checkpoints.grow import grow
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.data.records import open_dataset
from bert_jax.inference.predict import fill_masks
from bert_jax.text.bert_json import is_plain
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_json import learn_bytes
from bert_jax.text.words import SpacedEncoder

TEXT = "The  naïve jumpers\n aren't 1.5% (of Straße) 東京, \t<s> [SEP] 🙂."


@pytest.fixture(scope="module", params=list(KINDS))
def directory(request, tmp_path_factory):
    return write_described(tmp_path_factory.mktemp("described") / request.param, request.param)


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def library(directory):
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_ids_are_the_librarys(tokenizer, library):
    texts = (*LINES[:20], "", " ", "a", " a b", "\n東京\n", "e\u0301", "x" * 300)
    wanted = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokenizer.encode(text) for text in texts] == wanted
    ids, counts = tokenizer.encode_arrays(texts)
    assert ids.tolist() == [index for each in wanted for index in each] and counts.tolist() == [*map(len, wanted)]
    assert tokenizer.kind == "tokenizers" and tokenizer.vocab_size == library.get_vocab_size()


ODD = (
    "|a|a |a  b|a\tb|don't 'tis it's|a\nb|a\0|\0|\0 \0a|a\u00a0b|\u00a8a \u00a8b|x \u0308a|12345 6789|\u200b a\u200bb|"
    "`` x ''|\ufdfa \ufc5e a|\u03a3\u0391\u03a3 \u03a3|\ud800 a|e\u0301\u0301 f|a \u0301b|a\u3000b|<mask> a|a [MASK] b"
).split("|")


def test_words_that_stand_alone_are_looked_up(tokenizer, directory):
    """Also in texts that have other blanks, marks after a blank, NUL and names of special tokens."""
    rng = random.Random(0)
    letters = "ab \u00e9\u6771\u0308'1.,\u00a8\u200b\u03a3|<>\u00ad\ufb01"
    texts = [*LINES[:20], *ODD, "|||IP||| a|||IP|||b"]
    texts += ["".join(rng.choices(letters, k=rng.randrange(1, 20))) for _ in range(300)]
    looked_up = tokenizer.pieces._by_words
    assert (looked_up is None) == (directory.name in ("dnabert", "deberta"))
    wanted = [tokenizer.encode(text) for text in texts]
    for _ in range(2):  # new words, and known ones
        ids, counts = tokenizer.encode_arrays(texts)
        assert ids.tolist() == [index for each in wanted for index in each] and counts.tolist() == [*map(len, wanted)]
    assert tokenizer.encode_arrays([])[0].size == 0


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}


@pytest.mark.parametrize(
    ("kind", "part", "value"),
    [
        ("roberta", "normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
        ("roberta", "normalizer", {"type": "Replace", "pattern": {"String": "a b"}, "content": "c"}),
        ("roberta", "normalizer", {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        ("roberta", "pre_tokenizer", None),
        ("roberta", "pre_tokenizer", BYTES | {"use_regex": False}),
        ("xlmr", "pre_tokenizer", METASPACE | {"split": False}),
        ("roberta", "added_tokens", {"rstrip": True}),
        ("roberta", "added_tokens", {"content": "low new"}),
    ],
)
def test_parts_that_look_beyond_a_blank_are_left_to_the_library(tmp_path, kind, part, value):
    path = write_described(tmp_path / kind, kind) / "tokenizer.json"
    described = json.loads(path.read_text())
    if part == "added_tokens":
        content, vocab = value.get("content", "<new>"), described["model"]["vocab"]
        token = {"id": len(vocab), "content": content, "single_word": False, "lstrip": False, "rstrip": False}
        described[part].append(token | {"normalized": False, "special": False} | value)
    else:
        described[part] = value
    path.write_text(json.dumps(described))
    tokenizer = load_tokenizer(path.parent)
    assert tokenizer.pieces._by_words is None
    texts = ["a b", "low new low", "new  b", " a a b ", "low a a"]
    assert tokenizer.encode_arrays(texts)[0].tolist() == [index for text in texts for index in tokenizer.encode(text)]


def test_rows_are_those_of_the_files_template(tokenizer, library):
    pairs = [("The jumpers", "a call"), ("new", "")]
    batch = make_batch(tokenizer, pairs, 64)
    for row, pair in enumerate(pairs):
        wanted = library.encode(*pair)
        real = np.asarray(batch.sequence_ids[row]) > 0
        assert batch.token_ids[row][real].tolist() == wanted.ids
        assert batch.type_ids[row][real].tolist() == [kind * tokenizer.template.second_type for kind in wanted.type_ids]
    short = join_texts(tokenizer, *tokenizer.encode_batch(LINES[:2]), 20).token_ids
    assert len(short) == 20 and list(short).count(tokenizer.sep_id) == tokenizer.template.separators + 1


def test_text_becomes_a_special_token_only_where_it_may(tokenizer, library):
    text = f"The {tokenizer.template.specials[4]} jumps, {tokenizer.template.specials[3]}."
    assert not set(tokenizer.encode(text)) & ({*tokenizer.special_ids} - {tokenizer.unk_id})
    assert not set(tokenizer.encode_with_offsets(text)[0]) & ({*tokenizer.special_ids} - {tokenizer.unk_id})
    assert tokenizer.encode(text, True) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.mask_id in tokenizer.encode(text, True)


def test_special_tokens_without_a_role_are_in_texts(directory, tmp_path):
    """Marks of entities, say: transformers finds them too."""
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs.add_special_tokens(["<e1>", "</e1>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(directory / "tokenizer_config.json", tmp_path)
    ours = load_tokenizer(tmp_path)
    ours.save(tmp_path / "again")
    text, mark = "The <e1> jumpers</e1> call", ours.id_of("<e1>")
    for each in (ours, load_tokenizer(tmp_path / "again")):
        assert each.encode(text) == theirs.encode(text, add_special_tokens=False).ids == each.encode(text, True)
        assert {mark, each.id_of("</e1>")} <= {*each.encode(text)}
        masked = each.encode(f"{each.template.specials[4]}<e1>")
        assert each.mask_id not in masked and masked[-1] == mark


def test_a_normalizer_that_puts_a_blank_before_a_text_needs_no_other(tmp_path):
    """As Llama's does: a sentence has the same tokens alone and after another."""
    made = unigram_of_xlmr()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None
    made.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    one, two = ours.encode("The new flow"), ours.encode("a low tower")
    assert ours.template.blank == "" and ours.encode("The new flow a low tower") == one + two
    assert ours.encode(" a") != ours.encode("a")


@pytest.mark.parametrize("text", [TEXT, "\ud800a\udfff b\ud800", " \n "], ids=["text", "surrogates", "blanks"])
def test_spans_are_the_tokens_texts(tokenizer, text):
    ids, spans = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) and spans.shape == (len(ids), 2) and spans.dtype == np.int32
    parts = [text[start:end] for start, end in spans]
    assert not any(part != part.strip() for part in parts)
    assert set("".join(parts)) >= set(text) - set(" \n\t\ud800\udfff")


def test_it_survives_pickles_threads_and_files(directory, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "saved")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, [TEXT] * 64)) == [tokenizer.encode(TEXT)] * 64
    for each in (pickle.loads(pickle.dumps(tokenizer)), load_tokenizer(tmp_path / "saved")):
        assert each.fingerprint == tokenizer.fingerprint and each.encode(TEXT) == tokenizer.encode(TEXT)
        assert each.template == tokenizer.template and each.special_ids == tokenizer.special_ids
    ids = tokenizer.encode("The jumpers call")
    # nothing marks the pieces of dnabert that go on with a word, so its library puts a blank after each
    whole = " ".join(tokenizer.tokens(ids)) if directory.name == "dnabert" else "The jumpers call"
    assert tokenizer.decode(ids).lower() == whole.lower()


def test_word_starts(directory, tokenizer):
    ids = tokenizer.encode(" The jumpers, it's naïve 東京")
    starts = tokenizer.word_starts[ids]
    words = "".join("|" * int(start) + tokenizer.vocab[index].strip("Ġ▁") for index, start in zip(ids, starts)).lower()
    words = words.replace("##", "")
    if directory.name == "words":
        assert words.startswith("|the|jumpers,|it's|")
    elif directory.name == "dnabert":
        assert words.startswith("|the|jumper|s|,|i|t|") and starts.all()
    else:
        assert words.startswith(("|the|jumpers|,|it|'s|na", "|the|jumpers|,|it|'|s|na", "|the|jumpers|,|it|'s|"))
        assert starts.sum() >= 7
    assert tokenizer.word_starts[list(tokenizer.special_ids)].all()


@pytest.mark.parametrize("directory", ["modernbert", "roberta", "mpnet"], indirect=True)
def test_rows_of_a_data_set_are_those_of_the_template(directory, tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("\n".join(LINES[first : first + 9]) for first in range(0, len(LINES), 9)))
    options = PrepareOptions(max_seq_length=64, duplicates=1, holdout_rate=0.2)
    prepare(str(text), str(directory), str(tmp_path / "data"), options, 1)
    dataset = open_dataset(str(tmp_path / "data"))
    assert dataset.load_tokenizer().fingerprint == tokenizer.fingerprint
    rows = dataset.train.gather(np.arange(dataset.train.num_rows))
    for ids, length, first in zip(rows["token_ids"], rows["lengths"][:, 0], rows["first_lengths"][:, 0]):
        ends = np.flatnonzero(ids[:length] == tokenizer.sep_id).tolist()
        assert ids[0] == tokenizer.cls_id and ends[-1] == length - 1
        assert len(ends) == tokenizer.template.separators + 1
        assert first == (ends[-2] + 1 if tokenizer.template.second_type else length)
        assert (ids[length:] == tokenizer.pad_id).all()


# What is chosen


def test_berts_wordpiece_stays_ours(repository, tmp_path):
    ours = load_tokenizer(repository / "tests" / "fixtures" / "tokenizer")
    from read_models import load_hf_tokenizer

    from bert_jax.text.hf_tokenizer import save_hf_tokenizer

    save_hf_tokenizer(tmp_path, ours, 64)
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    assert is_plain(backend, tmp_path)
    (tmp_path / "vocab.txt").unlink()
    assert load_tokenizer(tmp_path).fingerprint == ours.fingerprint == load_hf_tokenizer(tmp_path)[0].fingerprint
    backend["added_tokens"].append(backend["added_tokens"][0] | {"content": "[E1]", "id": ours.vocab_size})
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    found, _ = load_hf_tokenizer(tmp_path)
    assert found.kind == "tokenizers" and found.encode("a [E1] b", True)[1] == ours.vocab_size
    assert found.fingerprint == load_tokenizer(tmp_path).fingerprint


def change(backend, path, value):
    *parts, last = path
    for part in parts:
        backend = backend[part]
    if last == "+":
        backend.append(value)
    else:
        backend[last] = value


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (["model", "dropout"], 0.1, "its dropout 0.1 makes ids random; set it to null"),
        (["model", "end_of_word_suffix"], "</w>", 'end with "</w>", so they do not say where words begin'),
        (["model", "vocab", "far"], 10**9, "tokens have ids up to 1000000000"),
        (["model", "merges", "+"], ["a", "nowhere"], "(Exception: Token `nowhere` out of vocabulary"),
        (["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "(RuntimeError: Precompiled"),
        (["added_tokens", 4, "id"], 77, 'give "i" and "<mask>" the same id, 77'),
        (["post_processor"], None, "its post_processor"),
        (["post_processor", "cls"], ["<none>", 9], 'cls_token "<none>" is not in the vocabulary of 380 tokens'),
    ],
)
def test_what_cannot_be_computed_is_named(tmp_path, path, value, problem):
    write_described(tmp_path, "roberta")
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    change(backend, path, value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    told = message(load_tokenizer, tmp_path)
    assert problem in told and str(tmp_path) in told


@pytest.mark.parametrize("name", ["<blank>", {"content": "<blank>"}])
def test_special_tokens_are_those_of_the_settings(tmp_path, name):
    write_described(tmp_path, "roberta", mask_token=name)
    found = load_tokenizer(tmp_path)  # one that the vocabulary lacks comes after it, as in transformers
    assert (found.template.specials[4], found.mask_id, found.vocab_size) == ("<blank>", 380, 381)
    write_described(tmp_path, "roberta", mask_token=None, pad_token=None)  # the usual names
    assert load_tokenizer(tmp_path).template.specials == ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    assert "do_lower_case is false in the file itself" in message(load_tokenizer, tmp_path, lowercase=True)


# Errors of the library on a text

FEW = {token: number for number, token in enumerate(["[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "b"])}


ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("changes", "text", "problem"),
    [
        ({"pre_tokenizer": ENDLESS}, "a" * 40 + "!", "retry-limit-in-match over"),
        ({"model": {"type": "WordLevel", "unk_token": "[NO]", "vocab": FEW}}, "\u2603", "Missing"),
    ],
)
def test_a_text_on_which_the_library_fails_is_one_line(tmp_path, changes, text, problem):
    backend = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, "decoder": None}
    backend |= {"model": {"type": "WordLevel", "unk_token": "b", "vocab": FEW}}
    backend["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend | changes))
    (tmp_path / "tokenizer_config.json").write_text('{"unk_token": "b", "tokenizer_class": "PreTrainedTokenizerFast"}')
    found = load_tokenizer(tmp_path)
    for call, *more in ((found.encode,), (found.encode, True), (found.encode_with_offsets,)):
        told = message(call, text, *more)
        assert f"fails on the text {json.dumps(text)[:40]}" in told and problem in told and told.isprintable()
    assert problem in message(found.encode_arrays, ["a", text, "b"])
    assert found.encode("a") == [4]


def test_a_word_that_fails_leaves_no_number_behind():
    def encode(texts):
        if " bad" in texts:
            raise ValueError
        return np.array([len(text) for text in texts]), np.ones(len(texts), np.int64)

    encoder = SpacedEncoder(encode, 100)
    with pytest.raises(ValueError):
        encoder(["some bad words"])
    for _ in range(2):
        ids, counts = encoder(["some words", "bad"])
        assert (ids.tolist(), counts.tolist()) == ([4, 6, 3], [2, 1])


def test_words_as_they_are_within_a_text(directory, tokenizer, tmp_path):
    """What training on lists of words uses, and an export says."""
    from read_models import load_hf_tokenizer

    from bert_jax.text.hf_tokenizer import save_hf_tokenizer

    blanked = tokenizer.with_blanks()
    changes = directory.name in ("roberta", "modernbert", "llama")
    assert (blanked is not tokenizer) == changes and blanked.template.blank == ""
    words = ["low", "walk", "东", ".", "new"]
    for word in words:
        assert blanked.encode(word) == tokenizer.encode(tokenizer.template.blank + word)
    save_hf_tokenizer(tmp_path, blanked, 64)
    about = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert about.get("add_prefix_space") == (True if changes else None)
    assert load_hf_tokenizer(tmp_path)[0].encode_batch(words) == blanked.encode_batch(words)
    assert blanked.with_blanks() is blanked


# Learning

LEARN = "from described import LINES; from bert_jax.text.tokenizer_json import learn_bytes; import hashlib; print(hashlib.sha256(learn_bytes(LINES, 330, True, True, 3).content).hexdigest())"  # noqa: E501


def test_the_same_text_gives_the_same_bytes(repository):
    learnt = learn_bytes(LINES, 330, True, True, 3)
    tokenizer = Tokenizer(learnt)
    assert tokenizer.vocab_size == 330 and tokenizer.vocab[:2] == ("[PAD]", "[unused0]") and tokenizer.lowercase
    assert tokenizer.encode("Naïve") == tokenizer.encode(" naive")
    assert "�" not in tokenizer.decode(tokenizer.encode("🙂"))
    environment = os.environ | {"PYTHONPATH": str(repository / "tests"), "PYTHONHASHSEED": "7"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    done = subprocess.run(
        [sys.executable, "-c", LEARN], env=environment, text=True, capture_output=True, cwd=repository
    )
    assert done.stdout.strip() == hashlib.sha256(learnt.content).hexdigest(), done.stderr


def test_sizes_that_do_not_fit_are_named():
    for size, problem in ((200, "use --vocab_size=261 or more"), (5000, "is too large for this text: no more than")):
        with pytest.raises(InputError, match=problem):
            learn_bytes(LINES, size)
    assert "holds no words" in message(learn_bytes, ["", " "], 300)


# With models


@pytest.mark.parametrize("directory", ["roberta", "xlmr", "mpnet"], indirect=True)
def test_a_model_fills_its_own_mask_and_goes_to_hugging_face_and_back(directory, tokenizer, tmp_path):
    config = tiny_model(vocab_size=tokenizer.vocab_size, type_vocab_size=2)
    params = random_params(config, parts=("pooler", "mlm", "next_sentence"))
    bert, mask = Pretrained(config, params, tokenizer), tokenizer.template.specials[4]
    save_pretrained(bert, tmp_path / "own")
    save_hf(tmp_path / "hf", config, params, tokenizer, "pretraining", ())
    wanted = fill_masks(bert, [f"The {mask} jumps."])
    assert len(wanted[0]) == 1
    for name in ("own", "hf"):
        found = load_pretrained(tmp_path / name)
        assert found.tokenizer.fingerprint == tokenizer.fingerprint
        assert_same(found.params, params)
        again = dataclasses.replace(bert, tokenizer=found.tokenizer)  # equal parameters, in the same program
        assert fill_masks(again, [f"The {mask} jumps."]) == wanted
    assert f"text 1 has no {mask}" in message(fill_masks, bert, ["The tower."])
    assert "a vocabulary of tokenizers cannot grow" in message(grow, bert, words=["corona"])
