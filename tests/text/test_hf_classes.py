# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's directory is what the class of transformers 5 that reads it makes of it.

The expected values are those of AutoTokenizer, which tests/reference/test_live_tokenizers.py compares live.
"""

import json

import pytest
from builders import change_json, message
from described import write_described
from read_models import load_hf_tokenizer
from tokenizers import processors

from bert_jax.text.fitting import join_texts
from bert_jax.text.hf_classes import class_of
from bert_jax.text.hf_tokenizer import save_hf_tokenizer
from bert_jax.text.tokenizer import wordpiece_tokenizer
from bert_jax.text.tokenizer_files import TokenizerFiles
from bert_jax.text.vocab import SPECIAL_TOKENS
from bert_jax.tokenizing import load_tokenizer


@pytest.mark.parametrize(
    ("model", "named", "kind"),
    [
        ("bert", None, "BertTokenizer"),
        ("electra", "ElectraTokenizerFast", "BertTokenizer"),
        ("bert", "XLMRobertaTokenizerFast", "XLMRobertaTokenizer"),
        ("roberta", None, "RobertaTokenizer"),
        ("roberta", "PreTrainedTokenizerFast", ""),
        ("modernbert", "RobertaTokenizer", ""),
        ("mpnet", None, "MPNetTokenizer"),
        ("mpnet", "MPNetTokenizerFast", "MPNetTokenizer"),
        ("distilbert", "DistilBertTokenizerFast", "DistilBertTokenizer"),
        (None, None, ""),
    ],
)
def test_the_class_of_a_directory(tmp_path, model, named, kind):
    files = TokenizerFiles(tmp_path, {}, model={"model_type": model})
    assert class_of(files, {"tokenizer_class": named}) == kind
    files = TokenizerFiles(tmp_path, {}, model={"model_type": model, "tokenizer_class": named})
    assert class_of(files, {}) == kind


def write_bert(directory, tokenizer, settings, model="bert", **parts):
    """Writes a directory that only tokenizer.json describes."""
    save_hf_tokenizer(directory, tokenizer, 64)
    (directory / "vocab.txt").unlink()
    change_json(directory / "tokenizer.json", **parts)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": model}))


GENERAL = {"tokenizer_class": "PreTrainedTokenizerFast"}
TYPES = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
ROBERTAS = {"type": "RobertaProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2], "trim_offsets": True}
ROBERTAS |= {"add_prefix_space": False}


@pytest.mark.parametrize(
    ("settings", "parts", "kind", "separators", "second_type"),
    [
        (GENERAL, {}, "wordpiece", 1, 0),  # its types are 0 unless the files name types
        (GENERAL | TYPES, {}, "wordpiece", 1, 1),
        ({}, {}, "wordpiece", 1, 1),  # a BERT without a class is BertTokenizer's
        (GENERAL | TYPES, {"post_processor": ROBERTAS}, "tokenizers", 2, 0),
        (GENERAL | TYPES, {"post_processor": ROBERTAS | {"type": "BertProcessing"}}, "wordpiece", 1, 1),
        ({"tokenizer_class": "DistilBertTokenizer"}, {"post_processor": None}, "wordpiece", 1, 0),
        (GENERAL | {"extra_special_tokens": ["<e1>"]}, {}, "tokenizers", 1, 0),
        ({"additional_special_tokens": ["<e1>"]}, {}, "tokenizers", 1, 1),
        ({"added_tokens_decoder": {"1500": {"content": "<e1>"}}}, {}, "tokenizers", 1, 1),
    ],
)
def test_rows_and_added_tokens_are_those_of_transformers(
    tmp_path, repository, settings, parts, kind, separators, second_type
):
    write_bert(tmp_path, load_tokenizer(repository / "tests" / "fixtures" / "tokenizer"), settings, **parts)
    for found in (load_hf_tokenizer(tmp_path)[0], load_tokenizer(tmp_path)):
        assert found.kind == kind and found.template[1:3] == (separators, second_type)
        row = join_texts(found, found.encode("the"), found.encode("a"), 9)
        end = [*[found.sep_id] * separators, *found.encode("a"), found.sep_id]
        assert row.token_ids.tolist() == [found.cls_id, *found.encode("the"), *end]
        assert row.type_ids.tolist() == [*[0] * (2 + separators), second_type, second_type]
        if "<e1>" in str(settings):
            assert found.encode("the<e1>a")[1] == 1500 == found.vocab_size - 1
        found.save(tmp_path / "own")
        assert load_tokenizer(tmp_path / "own").template == found.template


@pytest.mark.parametrize("file", ["added_tokens.json", "special_tokens_map.json"])
@pytest.mark.parametrize("left_out", ["vocab.txt", "tokenizer.json"])
def test_added_tokens_of_other_files(tmp_path, repository, file, left_out):
    save_hf_tokenizer(tmp_path, load_tokenizer(repository / "tests" / "fixtures" / "tokenizer"), 64)
    (tmp_path / left_out).unlink()
    content = {"<e1>": 1500} if file == "added_tokens.json" else {"additional_special_tokens": ["<e1>"]}
    (tmp_path / file).write_text(json.dumps(content))
    for found in (load_hf_tokenizer(tmp_path)[0], load_tokenizer(tmp_path)):
        assert found.encode("the<e1>a")[1] == 1500 == found.vocab_size - 1


@pytest.mark.parametrize("named", [{}, {"tokenizer_class": "MPNetTokenizer", "do_lower_case": False}])
def test_mpnet_reads_words_as_bert_with_the_rows_of_roberta(tmp_path, named):
    """Also from vocab.txt alone: lower case unless it is said, [UNK] for unknown words, two </s> between texts."""
    vocab = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "the", "##se", "The", ".", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "config.json").write_text('{"model_type": "mpnet"}')
    found, notes = load_hf_tokenizer(tmp_path)
    assert not notes and found.special_ids == (1, 4, 0, 2, 9)
    assert found.encode("The these q.") == [7 if named else 5, 5, 6, 4, 8]
    assert found.encode("the <mask>", True) == [5, 9]
    row = join_texts(found, found.encode("the"), found.encode("these"), 9)
    assert row.token_ids.tolist() == [0, 5, 2, 2, 5, 6, 2] and not row.type_ids.any()


@pytest.mark.parametrize(
    "rows",
    [
        {"single": "[CLS] $A", "pair": "[CLS] $A [SEP] $B"},
        {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:0"},
        {"single": "[CLS]:1 $A:1 [SEP]:1", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"},
    ],
)
def test_rows_that_cannot_be_laid_are_refused(tmp_path, repository, rows):
    special = [("[CLS]", 2), ("[SEP]", 3)]
    made = json.loads(processors.TemplateProcessing(**rows, special_tokens=special).__getstate__())
    write_bert(
        tmp_path, load_tokenizer(repository / "tests" / "fixtures" / "tokenizer"), GENERAL | TYPES, post_processor=made
    )
    for load in (load_hf_tokenizer, load_tokenizer):
        assert "tokenizer.json: its post_processor" in message(load, tmp_path)


def test_only_a_vocab_txt_keeps_googles_rules(tmp_path):
    """Of a final sigma and characters for private use; the library's are those of tokenizer.json alone."""
    save_hf_tokenizer(tmp_path, wordpiece_tokenizer([*SPECIAL_TOKENS, "οδος", "οδοσ", "x"], True), 64)
    text = "ΟΔΟΣ \ue000x"
    google, (note,) = load_hf_tokenizer(tmp_path)
    assert google.tokenize(text) == ["οδος", "[UNK]"] and note.startswith("a Greek capital sigma that ends a word")
    (tmp_path / "vocab.txt").unlink()
    alone, notes = load_hf_tokenizer(tmp_path)
    ids = alone.encode(text)
    assert alone.tokens(ids) == ["οδοσ", "x"] and not notes
    assert alone.encode_arrays([text])[0].tolist() == load_tokenizer(tmp_path).encode(text) == ids
    assert alone.encode_with_offsets(text)[0] == ids and alone.fingerprint == google.fingerprint
    alone.save(tmp_path / "own")
    assert load_tokenizer(tmp_path / "own").encode(text) == ids


def test_what_the_class_of_roberta_makes_of_its_file(tmp_path):
    """The normalizer is dropped, and the blank before a text is that of tokenizer_config.json."""
    directory = write_described(tmp_path, "roberta", tokenizer_class="RobertaTokenizer", add_prefix_space=True)
    change_json(directory / "tokenizer.json", normalizer={"type": "Lowercase"})
    (directory / "config.json").write_text('{"model_type": "roberta"}')
    found, notes = load_hf_tokenizer(directory)
    assert found.tokenize("low") == ["Ġlow"] and not notes and found.template.blank == ""
    change_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert load_hf_tokenizer(directory)[0].tokenize("LOW") == ["low"]
