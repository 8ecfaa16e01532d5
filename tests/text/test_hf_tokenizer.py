# SPDX-License-Identifier: Apache-2.0
"""A tokenizer in Hugging Face's files comes back as it was, and one that is not BERT's is refused."""

import json
import shutil

import pytest
from builders import change_json, message
from described import write_described
from hf_models import make_tokenizer
from read_models import load_hf_tokenizer

from bert_jax.errors import InputError
from bert_jax.text.hf_tokenizer import save_hf_tokenizer
from bert_jax.tokenizing import load_tokenizer

TEXT = "The naïve 東京 don't [MASK] Ünïted, 1.5% tokens"


@pytest.fixture(params=["tokenizer", "tokenizer_cased"])
def tokenizer(request, repository):
    return load_tokenizer(repository / "tests" / "fixtures" / request.param)


@pytest.mark.parametrize("missing", ["", "vocab.txt", "tokenizer.json", "tokenizer_config.json"])
def test_any_two_of_the_three_files_suffice(tokenizer, tmp_path, missing):
    assert save_hf_tokenizer(tmp_path, tokenizer, 512) == []
    if missing:
        (tmp_path / missing).unlink()
    found, notes = load_hf_tokenizer(tmp_path)
    google = {} if missing != "vocab.txt" else {"google_rules": False, "max_input_chars_per_word": 100}
    google |= {"odd_token_to_longer": True} if missing != "tokenizer.json" else {}
    assert notes == [] and found.config == tokenizer.config | google
    assert list(found.encode(TEXT)) == list(tokenizer.encode(TEXT))


ADDED = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


@pytest.mark.parametrize(
    ("file", "values", "problem"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"}, "and RobertaTokenizer"),
        ("tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer"}, "has a tokenizer of BertJapaneseTok"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "is damaged or another kind of file"),
        ("tokenizer_config.json", {"do_basic_tokenize": False}, "do_basic_tokenize is false, BERT's is true"),
        ("tokenizer_config.json", {"strip_accents": "no"}, 'strip_accents is "no"; make it true or false'),
        ("tokenizer.json", {"model": {"type": "WordPiece", "vocab": {"a": 7}}, "added_tokens": []}, "disagree about"),
        ("tokenizer.json", {"added_tokens": [{"content": None, "id": 7}]}, "is damaged or another kind of file"),
        ("tokenizer.json", {"added_tokens": [{"content": "[MASK]", "id": 7}]}, 'token "[MASK]" has the id 7, and tra'),
    ],
)
def test_what_is_not_berts_is_refused(repository, tmp_path, file, values, problem):
    save_hf_tokenizer(tmp_path, load_tokenizer(repository / "tests" / "fixtures" / "tokenizer"), 512)
    change_json(tmp_path / file, **values)
    assert problem in message(load_hf_tokenizer, tmp_path)


def test_capitals_in_the_vocabulary_decide_where_no_file_does(repository, tmp_path):
    for name, lowercase in (("tokenizer", True), ("tokenizer_cased", False)):
        (tmp_path / name).mkdir()
        shutil.copy(repository / "tests" / "fixtures" / name / "vocab.txt", tmp_path / name)
        assert load_hf_tokenizer(tmp_path / name)[0].config["do_lower_case"] is lowercase


def test_a_token_of_blanks_in_tokenizer_json_is_saved_and_read_as_it_is(tokenizer, tmp_path):
    save_hf_tokenizer(tmp_path, tokenizer, 64)
    (tmp_path / "vocab.txt").unlink()
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    backend["model"]["vocab"]["\u2028"] = len(backend["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    found, _ = load_hf_tokenizer(tmp_path)
    found.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").fingerprint == found.fingerprint
    assert load_tokenizer(tmp_path).fingerprint == found.fingerprint


@pytest.mark.parametrize("option", ["lowercase", "strip_accents", "handle_chinese_chars"])
@pytest.mark.parametrize(("kind", "left_out"), [("BertTokenizer", ""), ("PreTrainedTokenizerFast", "vocab.txt")])
def test_options_of_tokenizer_json_alone_are_those_of_the_vocabulary_too(tokenizer, tmp_path, option, kind, left_out):
    """`prepare_corpus --tokenizer` reads a directory as the model in it does."""
    save_hf_tokenizer(tmp_path, tokenizer, 64)
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    change_json(
        tmp_path / "tokenizer.json", normalizer=backend["normalizer"] | {option: not backend["normalizer"][option]}
    )
    if left_out:
        (tmp_path / left_out).unlink()
    for settings in ({"do_lower_case": None}, {"do_lower_case": True, "strip_accents": True}):
        about = {"tokenizer_class": kind} | settings
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
        assert load_tokenizer(tmp_path).config == load_hf_tokenizer(tmp_path)[0].config


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend", "BertTokenizerFast"])
def test_the_general_classes_do_what_tokenizer_json_says(tokenizer, tmp_path, kind):
    save_hf_tokenizer(tmp_path, tokenizer, 64)
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind, do_lower_case=not tokenizer.lowercase)
    found, _ = load_hf_tokenizer(tmp_path)
    assert found.lowercase == (tokenizer.lowercase if kind != "BertTokenizerFast" else not tokenizer.lowercase)
    change_json(tmp_path / "tokenizer.json", post_processor=None)
    if kind == "BertTokenizerFast":
        load_hf_tokenizer(tmp_path)
    else:
        assert "post_processor is null, so it adds no" in message(load_hf_tokenizer, tmp_path)


def test_a_sequence_of_one_is_that_one(tokenizer, tmp_path):
    save_hf_tokenizer(tmp_path, tokenizer, 64)
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    inner = {"type": "Sequence", "normalizers": [backend["normalizer"]]}
    splitter = {"type": "Sequence", "pretokenizers": [backend["pre_tokenizer"]]}
    nested = {"type": "Sequence", "normalizers": [inner]}
    change_json(tmp_path / "tokenizer.json", normalizer=nested, pre_tokenizer=splitter)
    assert load_hf_tokenizer(tmp_path)[0].fingerprint == tokenizer.fingerprint
    nested["normalizers"].append({"type": "NFC"})
    change_json(tmp_path / "tokenizer.json", normalizer=nested)
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert load_hf_tokenizer(tmp_path)[0].kind == "tokenizers"


@pytest.mark.parametrize("longest", [5, 200])
def test_the_longest_word_of_tokenizer_json_is_kept(tokenizer, tmp_path, longest):
    save_hf_tokenizer(tmp_path, tokenizer, 64)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    change_json(tmp_path / "tokenizer.json", model=model | {"max_input_chars_per_word": longest})
    found, notes = load_hf_tokenizer(tmp_path)
    found.save(tmp_path / "own")
    assert not notes and not save_hf_tokenizer(tmp_path / "again", found, 64)
    for each in (found, load_tokenizer(tmp_path / "own"), load_hf_tokenizer(tmp_path / "again")[0]):
        assert each.encode("a" * longest) != [each.unk_id] == each.encode("a" * (longest + 1))
        assert each.encode_arrays(["a" * (longest + 1)])[0].tolist() == [each.unk_id]
        assert each.fingerprint == found.fingerprint
    assert (found.fingerprint == tokenizer.fingerprint) == (longest == 200)  # data of vocab.txt fit the model
    change_json(tmp_path / "tokenizer.json", model=model | {"max_input_chars_per_word": True})
    with pytest.raises(InputError, match=r"max_input_chars_per_word is .*; make it a number of characters"):
        load_hf_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"normalizer": {"type": "Sequence", "normalizers": []}},
        {"added_tokens": [ADDED | {"content": "##s"}]},
    ],
)
def test_what_is_not_berts_is_what_tokenizer_json_says(repository, tmp_path, values):
    ours = load_tokenizer(repository / "tests" / "fixtures" / "tokenizer")
    save_hf_tokenizer(tmp_path, ours, 512)
    about = tmp_path / "tokenizer_config.json"
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    change_json(about, tokenizer_class="PreTrainedTokenizerFast", model_input_names=inputs)
    for added in values.get("added_tokens", ()):
        added["id"] = ours.id_of("##s")
    change_json(tmp_path / "tokenizer.json", **values)
    found, notes = load_hf_tokenizer(tmp_path)
    assert (found.kind, notes, found.special_ids) == ("tokenizers", [], ours.special_ids)
    assert load_tokenizer(tmp_path).encode("don't") == found.encode("don't")
    assert save_hf_tokenizer(tmp_path / "again", found, 512) == []
    assert load_hf_tokenizer(tmp_path / "again")[0].fingerprint == found.fingerprint
    change_json(about, tokenizer_class="BertTokenizer", do_lower_case=not ours.lowercase)
    assert load_hf_tokenizer(tmp_path)[0].lowercase is not ours.lowercase  # BERT's class has its own parts


@pytest.mark.parametrize("kind", ["roberta", "modernbert", "xlmr", "words"])
def test_the_relatives_come_back_as_they_were(tmp_path, kind):
    kinds = {"roberta": "RobertaTokenizer", "xlmr": "XLMRobertaTokenizer"}
    write_described(tmp_path / "there", kind, tokenizer_class=kinds.get(kind, "PreTrainedTokenizerFast"))
    found, notes = load_hf_tokenizer(tmp_path / "there")
    assert not notes and not save_hf_tokenizer(tmp_path / "back", found, 512)
    back, _ = load_hf_tokenizer(tmp_path / "back")
    assert back.fingerprint == found.fingerprint and back.template == found.template
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["model_max_length"] == 512


@pytest.mark.parametrize(("side", "said"), [("left", ['truncation_side "left" is not kept']), ("right", [])])
def test_a_side_of_cutting_that_is_not_kept_is_said(tmp_path, side, said):
    save_hf_tokenizer(tmp_path / "bert", make_tokenizer(131), 512)
    write_described(tmp_path / "other", "roberta", tokenizer_class="RobertaTokenizer")
    for name in ("bert", "other"):
        change_json(tmp_path / name / "tokenizer_config.json", truncation_side=side)
        assert [note.partition(";")[0] for note in load_hf_tokenizer(tmp_path / name)[1]] == said
