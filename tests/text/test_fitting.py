# SPDX-License-Identifier: Apache-2.0
"""Texts that are too long: one rule for all that reads them. They are cut and told of, or refused."""

import dataclasses
import itertools
import pickle
import warnings

import numpy as np
import pytest
from builders import message
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import bert_jax
from bert_jax.errors import InputError
from bert_jax.inference import features
from bert_jax.inference.features import sentence_embeddings, token_features
from bert_jax.inference.predict import Predictor, fill_masks
from bert_jax.inference.sentence_scores import score_sentences, token_scores
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.rules import to_dict
from bert_jax.text.fitting import CutWarning, cuts_in_one_line, fit_texts, pair_lengths, tell_cut
from bert_jax.text.hf_tokenizer import save_hf_tokenizer

LONG = "ban ber [MASK] bis " * 40  # of a model with 64 positions
TEXTS = ["the ban .", LONG, "dan [MASK] der", LONG]


def classifier(bert, **settings):
    """Returns the model with an untrained head of two classes; fine-tuned, if it has settings."""
    head = {"kernel": np.zeros((32, 2), np.float32), "bias": np.zeros(2, np.float32)}
    task_settings = to_dict(TaskConfig(name="classification", **settings)) if settings else {}
    params = bert.params | {"classifier": head}
    about = {"task": "sequence_classification", "labels": ("no", "yes"), "task_settings": task_settings}
    return dataclasses.replace(bert, params=params, **about)


READERS = {
    "encode": lambda bert, **rest: bert.encode(TEXTS, **rest).hidden,
    "token_features": lambda bert, **rest: list(token_features(bert, TEXTS, (-1,), **rest)),
    "sentence_embeddings": lambda bert, **rest: sentence_embeddings(bert, TEXTS, **rest),
    "score_sentences": lambda bert, **rest: score_sentences(bert, TEXTS, **rest),
    "token_scores": lambda bert, **rest: token_scores(bert, TEXTS, **rest),
    "predict": lambda bert, **rest: Predictor(classifier(bert), **rest)(TEXTS),
    "fill_masks": lambda bert, **rest: fill_masks(bert, [f"[MASK] {text}" for text in TEXTS], **rest),
}


@pytest.mark.parametrize("name", READERS)
def test_long_texts_are_cut_to_the_positions_and_counted_once(bert, name):
    with pytest.warns(CutWarning) as told:
        found = READERS[name](bert)
    assert len(found) == 4
    (of_cuts,) = (each for each in told if isinstance(each.message, CutWarning))  # once, whatever else warns
    assert (of_cuts.message.count, of_cuts.message.most) == (2, 64)
    assert of_cuts.filename == __file__  # the line of the caller, not one of ours
    assert "2 texts have more than 64 tokens with [CLS] and [SEP]; the rest was cut off" in str(of_cuts.message)


@pytest.mark.parametrize("name", READERS)
def test_long_texts_are_refused_by_name(bert, name):
    with pytest.raises(InputError, match=r"(text|sentence|input) 2 has .* tokens with .CLS. .*room for 64; shorten"):
        READERS[name](bert, long_texts="refuse")
    assert "long_texts 'drop' is not one of cut, refuse" in message(READERS[name], bert, long_texts="drop")


def test_a_text_as_long_as_the_model_is_not_cut(bert):
    text = "ban " * 62
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bert.encode([text]).hidden.shape == (1, 64, 32)
        assert len(token_scores(bert, [text], long_texts="refuse")[0]) == 62
        (fitted,) = fit_texts(bert.tokenizer, [text], 64, "refuse")
        assert len(fitted.token_ids) == 64 and not fitted.was_cut


def test_a_fine_tuned_model_cuts_to_its_own_length(bert):
    model, texts = classifier(bert, max_seq_length=8), ["ban ber bis", "ban ber bis dan der dir ban ber"]
    with pytest.warns(CutWarning, match="1 text has more than 8 tokens"):
        Predictor(model)(texts)
    with pytest.raises(InputError, match=r"input 2 has more than 8 tokens with .* there is room for 8"):
        Predictor(model, "refuse")(texts)
    with pytest.warns(CutWarning, match="1 text has more than 5 tokens"):
        sentence_embeddings(bert, ["ban ber bis dan", "ban"], max_seq_length=5)


def test_pairs_are_cut_from_the_longer(bert):
    (found,) = fit_texts(bert.tokenizer, [("ban " * 70, "ber bis")], 64)
    assert found.was_cut and len(found.token_ids) == 64 and found.type_ids.sum() == 3
    assert "text 8 has 75 tokens" in message(fit_texts, bert.tokenizer, [("ban " * 70, "ber bis")], 64, "refuse", 7)


@pytest.mark.parametrize("max_length", [2, -5, 64.0, "64"])
def test_a_length_without_room_is_refused(bert, max_length):
    with pytest.raises(InputError, match=rf"max_length {max_length!r} is not a whole number of 3 or more; 128 and"):
        bert_jax.make_batch(bert.tokenizer, [("ban", "ber bis")], max_length=max_length)


@pytest.mark.parametrize("words", [["the", "ban"], ["the", "ban", "bis"]])
def test_a_list_of_words_is_no_pair(bert, words):
    for read in (bert.encode, lambda texts: sentence_embeddings(bert, texts)):
        with pytest.raises(InputError, match=r"text 2 is \['the', 'ban'.*, not a text"):
            read(["ban", words])


def test_commands_say_it_once_at_the_end(capsys):
    with pytest.warns(UserWarning, match="another"), cuts_in_one_line():
        for _ in range(3):
            tell_cut(2, 64)
        tell_cut(0, 64)
        warnings.warn("another", stacklevel=1)
        assert not capsys.readouterr().err
    said = capsys.readouterr().err
    assert said.startswith("warning: 6 texts have more than 64 tokens") and said.count("\n") == 1
    assert "--long_texts=refuse" in said


def test_encode_compiles_few_programs(bert, monkeypatch):
    shapes = set()

    def noted(config, params, batch):
        shapes.add(batch.token_ids.shape)
        return np.zeros((*batch.token_ids.shape, 32), np.float32), None

    monkeypatch.setattr(features, "_encoded", noted)
    for count in (1, 2, 5, 7, 40):
        for length in range(1, 50, 3):
            found = bert.encode(["ban " * length] * count)
            assert found.hidden.shape == (count, length + 2, 32) and found.mask.all()
    assert len(shapes) <= 3 * 7


def test_pairs_are_cut_as_hugging_faces_tokenizers_cut_them():
    words = Library(WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    for room, first, second in itertools.product(range(2, 12), range(1, 14), range(1, 14)):
        words.enable_truncation(room, strategy="longest_first")
        types = words.encode("a " * first, "a " * second).type_ids
        ours = pair_lengths(first, second, room, odd_to_longer=True)
        assert ours == (types.count(0), types.count(1)), (first, second, room)
    # Google's rule gives the odd token to the first; that of equal or longer second texts goes to the second
    assert pair_lengths(9, 9, 5) == (3, 2) and pair_lengths(9, 9, 5, odd_to_longer=True) == (2, 3)


def test_who_wrote_a_tokenizer_says_how_its_pairs_are_cut(bert, tmp_path):
    def types_of(tokenizer):
        (fitted,) = fit_texts(tokenizer, [("ban ber bis dan der", "ban ber bis dan der")], 8)
        return fitted.type_ids.tolist()

    google = bert.tokenizer
    (tmp_path / "hub").mkdir()
    save_hf_tokenizer(tmp_path / "hub", google, 64)
    hub = bert_jax.load_tokenizer(tmp_path / "hub")
    for tokenizer in (hub, google.cutting_as_hub(), pickle.loads(pickle.dumps(hub))):
        assert types_of(tokenizer) == [0, 0, 0, 0, 1, 1, 1, 1]
        assert tokenizer.fingerprint == google.fingerprint  # the ids of a text are the same
        tokenizer.save(tmp_path / "saved")
        assert bert_jax.load_tokenizer(tmp_path / "saved").template.odd_to_longer
    google.save(tmp_path / "google")
    for tokenizer in (google, bert_jax.load_tokenizer(tmp_path / "google")):
        assert types_of(tokenizer) == [0, 0, 0, 0, 0, 1, 1, 1]
