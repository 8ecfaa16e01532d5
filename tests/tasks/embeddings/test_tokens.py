# SPDX-License-Identifier: Apache-2.0
"""Texts whose tokens are compared: how they are cut, filled up and marked, and how they are found."""

import dataclasses
import json

import numpy as np
import pytest
from builders import growing_bert, message, write

from bert_jax.batch import UNSCORED, UNSEEN
from bert_jax.checkpoints.pretrained import save_pretrained
from bert_jax.model.heads.table import EMBEDDING_KINDS
from bert_jax.settings.finetuning import EmbeddingConfig, FinetuneConfig, TaskConfig
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings import search
from bert_jax.tasks.embeddings.prepare import PairOptions, prepare_pairs
from bert_jax.tasks.embeddings.read import TextsExample
from bert_jax.tasks.embeddings.search import nearest_texts
from bert_jax.tasks.embeddings.task import from_start
from bert_jax.tasks.embeddings.tokens import TokenFit
from bert_jax.tasks.prepare import completed
from bert_jax.tokenizing import load_tokenizer

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def tokenizer(pretrained):
    return load_tokenizer(pretrained / "tokenizer")


def config(**settings):
    settings = {"kind": "multi_vector", "query_length": 7, "query_expansion": 6} | settings
    return TaskConfig(name="embeddings", max_seq_length=9, embedding=EmbeddingConfig(**settings))


SIGNS = {0: ".", UNSEEN: "u", UNSCORED: "s"}


@pytest.mark.parametrize(
    ("text", "is_query", "settings", "tokens", "marks"),
    [
        ("ban .", True, {}, "[CLS] ban . [SEP] [MASK] [MASK]", "....uu"),
        ("ban .", True, {"expansion_is_seen": True}, "[CLS] ban . [SEP] [MASK] [MASK]", "......"),
        ("ban .", True, {"query_expansion": 0}, "[CLS] ban . [SEP]", "...."),
        ("ban", True, {"query_expansion": 90, "query_length": 5}, "[CLS] ban [SEP] [MASK] [MASK]", "...uu"),
        ("ban " * 9, True, {}, "[CLS] ban ban ban ban ban [SEP]", "......."),
        ("ban . dar", False, {}, "[CLS] ban . dar [SEP]", "..s.."),
        ("ban . dar", False, {"skipped_words": '["dar", "none"]'}, "[CLS] ban . dar [SEP]", "...s."),
        ("ban . dar", False, {"skipped_words": ""}, "[CLS] ban . dar [SEP]", "....."),
        ("ban " * 9, False, {}, "[CLS] ban ban ban ban ban ban ban [SEP]", "........."),
    ],
)
def test_queries_are_filled_up_and_punctuation_of_passages_does_not_count(
    tokenizer, text, is_query, settings, tokens, marks
):
    found = TokenFit(config(**settings), tokenizer)(tokenizer.encode(text), is_query)
    assert " ".join(tokenizer.tokens(found.token_ids)) == tokens
    assert "".join(SIGNS[mark] for mark in found.marks.tolist()) == marks
    assert found.was_cut == (len(text) > 20)


def test_rows_have_the_marks_of_their_texts(tokenizer):
    made = make_task(config(query_prompt="the ", passage_prompt="dar "))
    examples = [TextsExample(("ban", "bas .", "ban . bas")), TextsExample(("ban", "ban"))]
    (row, alone), _ = made.make_rows(examples, tokenizer, True)
    texts = ["[CLS] the ban [SEP] [MASK] [MASK]", "[CLS] dar bas . [SEP]", "[CLS] dar ban . bas [SEP]"]
    assert " ".join(tokenizer.tokens(row.token_ids)) == " ".join(texts) and row.lengths == (6, 5, 6)
    assert row.marks.tolist() == [0] * 4 + [UNSEEN] * 2 + [0, 0, 0, UNSCORED, 0] + [0, 0, 0, UNSCORED, 0, 0]
    assert alone.label == (0.0, row.label[1], row.label[1])  # both are queries
    rows = made.make_rows(examples, tokenizer, False).rows
    outputs = [RNG.normal(size=(len(row.token_ids), 4)).astype(np.float32) for row in rows]
    found = made.decode(examples, rows, outputs)[0].vectors
    assert [len(vectors) for vectors in found] == [6, 4, 5]
    np.testing.assert_array_equal(found[1], outputs[1][[0, 1, 2, 4]])


@pytest.mark.parametrize("size", [512, 3])
def test_texts_are_found_by_the_sum_of_the_largest_products(monkeypatch, size):
    monkeypatch.setattr(search, "TEXTS", size)
    queries, texts = ([RNG.normal(size=(RNG.integers(1, 20), 5)) for _ in range(count)] for count in (3, 8))
    texts[5] = texts[2]  # the first of equals comes first
    expected = np.array([[(query @ text.T).max(axis=1).sum() for text in texts] for query in queries])
    found = nearest_texts(*([each.astype(np.float32) for each in part] for part in (queries, texts)), 4)
    order = np.argsort(-expected.round(4), axis=1, kind="stable")[:, :4]
    assert found.numbers.tolist() == order.tolist()
    np.testing.assert_allclose(found.scores, np.take_along_axis(expected, order, 1), rtol=1e-5)
    assert nearest_texts([], texts, 2).scores.shape == (0, 2)


def test_a_run_ranks_pairs_by_the_score_and_writes_it(tmp_path, tokenizer):
    made = make_task(config())
    examples = [TextsExample(("ban", "ban dar")), TextsExample(("bas", "bas dar"))]
    rows = made.make_rows(examples, tokenizer, False).rows
    outputs = [np.zeros((len(row.token_ids), 4), np.float32) for row in rows]
    for output, places in zip(outputs, ([0], [0, 1], [2], [2, 1])):
        output[range(len(places)), places] = 1
    predictions = made.decode(examples, rows, outputs)
    assert made.score(examples, predictions)["ndcg@10"] == 1
    made.write(tmp_path, "dev", examples, predictions)
    assert (tmp_path / "dev.tsv").read_text() == "index\tprediction\n0\t1.0\n0\t1.0\n"
    assert np.shape(made.show(predictions[0])["embeddings"]) == (len(rows[0].token_ids), 4)


def test_a_new_model_has_the_settings_of_its_kind_unless_others_are_given():
    asked = TaskConfig(name="embeddings", max_seq_length=0, embedding=EmbeddingConfig(kind="multi_vector"))
    for start in (None, TaskConfig(embedding=EmbeddingConfig(projection_size=8, query_prompt="q: "))):
        task, lines = from_start(asked, start)
        settings = task.embedding
        assert (settings.projection_size, settings.projection_activation, settings.query_prompt) == (128, "none", "")
        assert task.max_seq_length == 180 and lines == []
    narrow = dataclasses.replace(asked.embedding, projection_size=16)
    own, _ = from_start(dataclasses.replace(asked, embedding=narrow), None)
    assert own.embedding.projection_size == 16
    again, (line,) = from_start(TaskConfig(max_seq_length=0), own)
    assert again.embedding == own.embedding and again.max_seq_length == 180
    assert line.startswith('from it: kind "multi_vector", pooling "mean", projection_size 16, projection_activation')
    head = EMBEDDING_KINDS["multi_vector"].as_set(again)
    assert head.settings == again.embedding and head.longest == 180 and head.parts == ("projection",)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pooling": "cls"}, "pooling, kept_dimensions and dimensions are of one vector"),
        ({"dimensions": "4"}, "pooling, kept_dimensions and dimensions are of one vector"),
        ({"loss": "triplet"}, "has the losses infonce, in one direction"),
        ({"both_directions": True}, "has the losses infonce, in one direction"),
        ({"skipped_words": "the"}, 'skipped_words "the" is no list of tokens; give punctuation, or as JSON'),
        ({"skipped_words": "[1]"}, "is no list of tokens"),
        ({"query_length": 4}, "query_length 4 is not from 5"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, problem):
    assert problem in message(config(**settings).validate)


def test_what_cannot_be_learnt_is_named(tokenizer):
    graded, pair = TextsExample(("ban", "bas"), 1.0), TextsExample(("ban", "bas"))
    assert "are not learnt from graded pairs" in message(make_task(config()).settle, [graded])
    long = make_task(config(query_prompt="the ban bas dar the "))
    problem = "has 5 tokens, and query_length 7 leaves no room"
    assert problem in message(long.make_rows, [pair], tokenizer, True)


@pytest.mark.parametrize("name", ["pairs.jsonl", "texts.txt"])
def test_prepared_pairs_are_the_rows_of_their_table(tmp_path, pretrained, tokenizer, name):
    """Among them queries and passages that are cut, and a passage with punctuation; texts alone are all queries."""
    texts = ["ban", "bas . dar", "ban " * 6, "ban " * 9, ". . bes"]
    lines = [json.dumps({"anchor": one, "positive": texts[number - 1]}) for number, one in enumerate(texts)]
    table = write(tmp_path / name, "\n".join(texts if name == "texts.txt" else lines))
    prompts, out = {"query_prompt": "the ", "passage_prompt": "mot "}, str(tmp_path / "out")
    prepare_pairs(table, str(pretrained / "tokenizer"), out, PairOptions(max_seq_length=9, **prompts), num_workers=1)
    made = make_task(config(**prompts))
    read = [made.read(place, "train") for place in (table, out)]
    one, other = (made.make_rows(examples, tokenizer, True).rows for examples in read)
    assert len(one) == len(other) == 5 and made.settle(read[0]) == made.settle(read[1])
    taken = other.take(np.arange(5))
    for mine, stored, lengths, again in zip(one, taken, other.lengths.tolist(), other[:5]):
        assert stored.lengths == mine.lengths == tuple(lengths) == again.lengths
        for field in ("token_ids", "type_ids", "marks"):
            np.testing.assert_array_equal(getattr(stored, field), getattr(mine, field))
    assert max(other.lengths[:, 0]) == 7 and (max(other.lengths[:, 1]) == 9) == (name == "pairs.jsonl")
    longer = make_task(config(**prompts, query_length=10))
    problem = "query_length 10 is above the 9 tokens of prepared texts; lower it"
    assert problem in message(longer.make_rows, read[1], tokenizer, True)


def test_prompts_that_the_vocabulary_has_are_tokens(tmp_path):
    bert = growing_bert()
    save_pretrained(bert, tmp_path / "start")
    asked = config(query_prompt="[unused0] ", passage_prompt="[unused1]")
    run = FinetuneConfig(task=asked, init_checkpoint=str(tmp_path / "start"))
    (_, start), (_, dense) = completed(run), completed(dataclasses.replace(run, task=TaskConfig(name="embeddings")))
    assert start.tokenizer.tokenize("[unused0] ban [unused1] bas") == ["[unused0]", "ban", "[unused1]", "bas"]
    assert start.tokenizer.vocab == tuple(bert.tokenizer.vocab)
    assert start.tokenizer.encode("ban coart") == bert.tokenizer.encode("ban coart")
    assert dense.tokenizer.tokenize("[unused0] ban")[0] == "[UNK]"
    pairs = write(
        tmp_path / "pairs.jsonl", '{"query": "ban", "positive": "bas"}\n{"query": "the", "positive": "ban"}\n'
    )
    made = make_task(asked)
    for is_token in (False, True):
        options = PairOptions(9, "[unused0] ", "[unused1]", is_token)
        out = str(tmp_path / f"out{is_token}")
        prepare_pairs(pairs, str(tmp_path / "start/tokenizer"), out, options, num_workers=1)
        found = made.read(out, "train")
        if not is_token:
            said = "prepare the pairs with the model's, and with --prompt_tokens where"
            assert said in message(made.make_rows, found, start.tokenizer, True)
    stored, wanted = (made.make_rows(each, start.tokenizer, True).rows for each in (found, made.read(pairs, "train")))
    for mine, theirs in zip(wanted, stored.take(np.arange(2))):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
