# SPDX-License-Identifier: Apache-2.0
"""A grown model is the old one on old text, starts sensibly on new words, and trains on."""

import dataclasses

import jax
import numpy as np
import pytest
from builders import assert_same, drawn_params, growing_bert, message
from commands import run_python

from bert_jax import InputError, load_pretrained
from bert_jax.batches.make import make_batch
from bert_jax.checkpoints.grow import grow
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.inference.features import encode_texts
from bert_jax.model.heads.pretraining import PRETRAINING
from bert_jax.model.objective import forward
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.rules import to_dict
from bert_jax.text.sentencepieces import learn_sentencepieces
from bert_jax.text.tokenizer import Tokenizer

NEW = ["corona", "banana"]
OLD_TEXTS = ["the ban bas dar .", "the dirt , Ban [unused0] co ##ro", "ba co"]


@pytest.fixture(scope="module")
def bert():
    return growing_bert()


def logits_at_first(bert: Pretrained, text: str) -> np.ndarray:
    """Returns the logits [V] over the vocabulary at [CLS]."""
    batch = make_batch(bert.tokenizer, [text], bert.config.max_positions)
    logits = jax.jit(forward, static_argnums=(0, 3))(bert.config, bert.params, batch, PRETRAINING).mlm_logits
    return np.asarray(logits[0, 0, : bert.config.vocab_size])


@pytest.mark.parametrize("use_unused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_old_text_has_the_same_ids_hidden_states_and_logits(bert, use_unused):
    grown = grow(bert, NEW, use_unused, max_positions=16 if use_unused else 40)
    assert grown.tokenizer.encode_batch(OLD_TEXTS) == bert.tokenizer.encode_batch(OLD_TEXTS)
    assert_same(encode_texts(grown, OLD_TEXTS), encode_texts(bert, OLD_TEXTS))
    old = [index for index, token in enumerate(bert.tokenizer.vocab) if not token.startswith("[unused")]
    assert_same(logits_at_first(bert, "the ban")[old], logits_at_first(grown, "the ban")[old])


@pytest.mark.parametrize("use_unused", [False, True])
def test_a_new_word_is_one_token_and_the_mean_of_its_pieces(bert, use_unused):
    grown = grow(bert, NEW, use_unused)
    places = [1, 2] if use_unused else [20, 21]
    assert grown.config.vocab_size == grown.tokenizer.vocab_size == (20 if use_unused else 22)
    assert grown.tokenizer.encode("the Corona banana") == [7, *places]
    logits = logits_at_first(grown, "the ban")
    table, bias = grown.params["encoder"]["embeddings"]["word"]["embedding"], grown.params["mlm"]["output_bias"]
    for place, word in zip(places, NEW):
        pieces = bert.tokenizer.encode(word)
        np.testing.assert_allclose(table[place], table[pieces].mean(0), rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(bias[place], bias[pieces].mean(), rtol=1e-5)
        np.testing.assert_allclose(logits[place], logits[pieces].mean(), rtol=1e-4, atol=1e-5)


def test_padding_stays_zero_and_shapes_follow_the_vocabulary(bert):
    grown = grow(bert, ["corona", "banana", "dirt", "dina", "coro"])
    table, bias = grown.params["encoder"]["embeddings"]["word"]["embedding"], grown.params["mlm"]["output_bias"]
    assert len(table) == len(bias) == grown.config.padded_vocab_size == 32
    assert not table[25:].any() and not bias[25:].any() and np.abs(table[:25]).sum(1).all()


def test_spare_rows_of_the_table_are_used_first():
    bert = growing_bert(spare_rows=3)
    grown = grow(bert, NEW)
    assert grown.config == bert.config and grown.tokenizer.encode("corona") == [20]
    old, new = (each.params["mlm"]["output_bias"] for each in (bert, grown))
    assert_same(new[[19, 22]], old[[19, 22]])


def test_new_positions_repeat_the_old_ones(bert):
    grown = grow(bert, max_positions=40)
    old, new = (each.params["encoder"]["embeddings"]["position"]["embedding"] for each in (bert, grown))
    assert_same(new, np.concatenate([old, old, old[:8]]))
    assert np.isfinite(encode_texts(grown, ["the ban " * 19]).hidden).all()
    with pytest.raises(InputError, match="room for 16"):
        encode_texts(bert, ["the ban " * 19], "refuse")
    assert len(old) == 16 and bert.tokenizer.vocab_size == 20  # the old model is left alone


def relative(bert, **changes):
    """Returns the model with other positions, and random parameters."""
    config = dataclasses.replace(bert.config, **changes)
    return dataclasses.replace(bert, config=config, params=drawn_params(config))


def test_rows_before_the_first_position_are_not_repeated(bert):
    other = relative(bert, position_offset=2)
    table = other.params["encoder"]["embeddings"]["position"]["embedding"]
    grown = grow(other, max_positions=40)
    new = grown.params["encoder"]["embeddings"]["position"]["embedding"]
    assert_same(new, np.concatenate([table, table[2:], table[2:10]]))


@pytest.mark.parametrize("changes", [{"score_bias": "buckets"}, {"positions": "none", "score_bias": "alibi"}])
def test_what_has_all_distances_already_is_kept(bert, changes):
    other = relative(bert, **changes)
    grown = grow(other, max_positions=40)
    assert grown.config == dataclasses.replace(other.config, max_positions=40)
    ours, theirs = (each.params["encoder"].get("score_bias", {}) for each in (grown, other))
    assert_same(ours, theirs)
    assert np.isfinite(encode_texts(grown, ["the ban " * 19]).hidden).all()


def test_angles_of_rotary_positions_grow(bert):
    other = relative(bert, positions="rotary")
    grown = grow(other, max_positions=32)
    assert grown.config.rotary_theta == pytest.approx(10_000 * 2 ** (8 / 6))
    assert grown.config.local_rotary_theta == 10_000 and grown.config.max_positions == 32
    assert_same(grown.params, other.params)
    with pytest.raises(InputError, match=r"rotary_theta .* is not from 1"):  # could not be read again
        grow(relative(bert, positions="rotary", num_heads=8), max_positions=16 * 2**15)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"words": ["ban"]}, r"'ban' is there already"),
        ({"words": ["corona", "corona"]}, "'corona' is there already"),
        ({"words": ["two words"]}, r"'two words' is \['two', 'words'\]"),
        ({"words": ["Corona"]}, r"'Corona' is \['corona'\] to this tokenizer"),
        ({"words": [""]}, r"'' is \[\]"),
        ({"words": ["##virus"]}, "is a piece of a word"),
        ({"words": ["a" * 201]}, "has 201 characters"),
        ({"words": ["x", "y", "z"], "use_unused": True}, r"has 2 \[unused\.\.\] tokens"),
        ({"max_positions": 8}, "max_positions 8 is below the 16"),
        ({"max_positions": 10**11}, r"model\.max_positions 100000000000 is"),
    ],
)
def test_what_cannot_grow_is_refused(bert, changes, problem):
    with pytest.raises(InputError, match=problem):
        grow(bert, **changes)


def test_a_sentencepiece_vocabulary_is_refused_but_not_its_positions(bert):
    tokenizer = Tokenizer(learn_sentencepieces(["the ban bas dar co ba"] * 3, 20, "bpe", character_coverage=1))
    other = dataclasses.replace(bert, tokenizer=tokenizer)
    with pytest.raises(InputError, match="a vocabulary of sentencepiece cannot grow"):
        grow(other, NEW)
    assert grow(other, max_positions=20).config.max_positions == 20


@pytest.mark.slow
def test_the_command_keeps_the_task_its_labels_and_its_settings(tmp_path):
    """Before, a grown model of a task predicted by other settings than it was trained with."""
    bert = growing_bert()
    params = bert.params | {"classifier": {"kernel": np.ones((32, 2), np.float32), "bias": np.zeros(2, np.float32)}}
    params = {name: params[name] for name in ("encoder", "classifier")}
    settings = to_dict(TaskConfig(name="classification", max_seq_length=11, text_column="review"))
    task = "sequence_classification", ("bad", "good")
    save_pretrained(Pretrained(bert.config, params, bert.tokenizer, *task, task_settings=settings), tmp_path / "old")
    (tmp_path / "words.txt").write_text("corona\n")
    command = ["-m", "bert_jax.tools.grow_model", f"--checkpoint={tmp_path}/old", f"--add_tokens={tmp_path}/words.txt"]
    done = run_python([*command, f"--output={tmp_path}/new"])
    assert done.returncode == 0, done.stderr
    grown = load_pretrained(tmp_path / "new")
    assert (grown.task, grown.labels, grown.task_settings) == (*task, settings)
    assert grown.tokenizer.vocab_size == bert.tokenizer.vocab_size + 1


def test_marks_of_entities_are_found_in_text_and_kept(bert, tmp_path):
    """Other text keeps its ids; the marks start as their pieces, and go through Hugging Face's format."""
    grown = grow(bert, special=("[E1]", "[/E1]"))
    text, tokenizer = "the [E1] banana [/E1] ban", grown.tokenizer
    marks = tokenizer.id_of("[E1]"), tokenizer.id_of("[/E1]")
    ids = tokenizer.encode(text)
    assert [index for index in ids if index not in marks] == bert.tokenizer.encode("the banana ban")
    assert marks[0] in tokenizer.encode("the[E1]ban") and grown.config.vocab_size == bert.config.vocab_size + 2
    save_hf(tmp_path / "hf", grown.config, grown.params, tokenizer, "pretraining", ())
    back = load_pretrained(tmp_path / "hf")
    assert back.tokenizer.encode(text) == ids
    assert grow(back, special=("[E2]",)).tokenizer.encode("ban [E2]")[-1] == marks[1] + 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"special": wrong}, "is empty, has blanks around it, or is there already")
     for wrong in (["[E1]", "[E1]"], [" [E1]"], ["ban"], [""])]
    + [({"words": ["corona"], "special": ["[E1]"]}, "grow the model twice")],
)  # fmt: skip
def test_marks_that_cannot_be_added_are_refused(bert, changes, problem):
    assert problem in message(grow, bert, **changes)
