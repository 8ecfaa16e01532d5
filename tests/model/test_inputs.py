# SPDX-License-Identifier: Apache-2.0
"""Arrays that do not fit are refused where a function is traced; numbers that do not, where they are on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import message, random_batch, tiny_model

import bert_jax
from bert_jax.batch import Row
from bert_jax.model.heads.table import HEADS
from bert_jax.model.inputs import check_batch, check_parts, check_rows, check_shapes
from bert_jax.model.losses import accuracy, cross_entropy, squared_error
from bert_jax.model.teaching import class_divergence, taught
from bert_jax.settings.pretraining import TeacherConfig

B, M, K, L = 4, 1, 3, 16


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_letters_stand_for_one_size_each():
    check_shapes("it", one=(array(2, 3), "BL"), other=(array(2), "B"), third=(None, "BM"), last=(array(3, 5), ("L", 5)))
    found = message(check_shapes, "it", one=(array(2, 3), "BL"), other=(array(3), "B"))
    assert found.startswith("it: other has the shape [3] and must have [2]; make_batch makes such arrays")
    assert "[2, M]" in message(check_shapes, "it", one=(array(2), "B"), other=(array(2), "BM"))


LOSSES = {
    "classes [B]": (cross_entropy, [(B, M, K), (B,), (B, M)], "labels has the shape [4] and must have [4, 1]"),
    "weights [B]": (cross_entropy, [(B, M, K), (B, M), (B,)], "weights has the shape [4] and must have [4, 1]"),
    "a single weight": (cross_entropy, [(B, M, K), (B, M), ()], "weights has the shape []"),
    "soft classes": (accuracy, [(B, M, K), (B, M, K), (B, M)], "labels has the shape [4, 1, 3]"),
    "accuracy of [B]": (accuracy, [(B, M, K), (B,), (B, M)], "labels has the shape [4]"),
    "numbers [B]": (squared_error, [(B, M), (B,), (B, M)], "labels has the shape [4] and must have [4, 1]"),
    "numbers [B, M, 1]": (squared_error, [(B, M), (B, M, 1), (B, M)], "labels has the shape [4, 1, 1]"),
    "a teacher [B, K]": (class_divergence, [(B, M, K), (B, K)], "teacher has the shape [4, 3] and must have [4, 1, 3]"),
    "taught [B]": (
        lambda apart, weights: taught((0.0, 1.0), apart, weights, TeacherConfig()),
        [(B, M), (B,)],
        "weights has the shape [4] and must have [4, 1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_refuses_what_would_broadcast(name):
    loss, shapes, expected = LOSSES[name]
    arrays = [jnp.zeros(shape, jnp.int32 if number == 1 else jnp.float32) for number, shape in enumerate(shapes)]
    assert expected in message(jax.eval_shape, loss, *arrays)
    assert expected in message(loss, *arrays)


def test_numbers_are_no_classes():
    logits, weights = jnp.zeros((B, M, K)), jnp.zeros((B, M))
    assert "labels are float32, and a class is a whole number" in message(cross_entropy, logits, weights, weights)


HEADS_AND_LABELS = {  # the shapes of outputs, and of labels that are none
    "sequence_classification": [(B, M, K), (B,), (B, K), (B, M, K - 1), None],
    "multilabel_classification": [(B, M, K), (B,), (B, M), (B, K), None],
    "token_classification": [(B, L, K), (B,), (B, L + 1), (B, L, K), None],
    "question_answering": [(B, L, 2), (B,), (B, 2), (B, M), None],
    "multiple_choice": [(B, M, 1), (B,), (B, M, 1), None],
    "masked_lm": [(B, 1, 256), (B,), None],
    "next_sentence": [(B, M, 2), (B,), (B, M, 1), None],
    "sentence_embedding": [(B, M, 32), (B,), (B, M), None],
    "token_embeddings": [(B, L, 32), (B,), (B, M), None],
}


@pytest.mark.parametrize(
    ("name", "number"), [(n, i) for n, shapes in HEADS_AND_LABELS.items() for i in range(1, len(shapes))]
)
def test_every_head_refuses_labels_of_another_shape(name, number):
    head, shape, dtype = HEADS[name], HEADS_AND_LABELS[name][number], np.int32
    if (shape and len(shape) == 3) or name.startswith("multilabel"):
        dtype = np.float32
    batch = random_batch(num_rows=B, row_length=L)._replace(mlm_positions=np.zeros((B, 1), np.int32))
    batch = batch._replace(labels=None if shape is None else np.zeros(shape, dtype))
    outputs = array(*HEADS_AND_LABELS[name][0])
    found = message(jax.eval_shape, lambda outputs: head.losses(outputs, batch, head.weights(batch)), outputs)
    assert "the batch has no" in found or "has the shape" in found or "labels are float32" in found


@pytest.mark.parametrize("name", [name for name in bert_jax.Batch._fields if name not in ("labels", "teacher")])
def test_every_field_of_a_batch_has_its_shape(bert, name):
    batch = bert_jax.make_batch(bert, ["b c", "d"])
    given = getattr(batch, name)
    wrong = np.zeros((3, 2) if given is None or name == "cls_positions" else (*given.shape, 1), np.int32)
    wrong = np.zeros((2, 1, 1), np.int32) if name in ("mlm_labels", "mlm_weights", "mlm_positions") else wrong
    found = message(check_batch, bert.config, batch._replace(**{name: wrong}))
    assert found.startswith("the batch: ") and "has the shape" in found
    traced = jax.jit(lambda params, batch: bert_jax.encode(bert.config, params, batch).hidden)
    assert message(traced, bert.params, batch._replace(**{name: wrong})) == found


@pytest.mark.parametrize("call", ["encode", "forward", "Encoder"])
def test_rows_longer_than_the_positions_are_refused_where_they_are_traced(bert, call):
    batch = jax.tree.map(jnp.asarray, bert_jax.make_batch(bert.tokenizer, [("b c " * 50).strip()]))
    calls = {
        "encode": lambda: bert_jax.encode(bert.config, bert.params, batch),
        "forward": lambda: bert_jax.forward(bert.config, bert.params, batch, HEADS["masked_lm"]),
        "Encoder": lambda: bert_jax.Encoder(bert.config).init(jax.random.key(0), batch),
    }
    assert message(jax.eval_shape, calls[call]).startswith(
        "the batch has rows of 104 tokens and the model 64 positions"
    )


def test_packed_rows_may_be_longer_than_a_sequence():
    """Their positions start again with each sequence."""
    batch = random_batch(num_rows=2, row_length=96, num_sequences=2)
    check_batch(tiny_model(), batch)
    assert "96 tokens" in message(check_batch, tiny_model(), random_batch(num_rows=2, row_length=96))
    check_batch(tiny_model(positions="rotary"), random_batch(num_rows=2, row_length=96))  # no table ends


@pytest.mark.parametrize(
    ("field", "number", "expected"),
    [
        ("token_ids", 203, "token_ids of the batch is 203, and the model has 0 to 202"),
        ("token_ids", -1, "token_ids of the batch is -1"),
        ("type_ids", 2, "type_ids of the batch is 2, and the model has 0 to 1"),
        ("cls_positions", L, "cls_positions of the batch is 16"),
        ("mlm_positions", L, "mlm_positions of the batch is 16"),
    ],
)
def test_ids_beyond_a_table_are_refused_on_the_host(field, number, expected):
    batch = random_batch(num_rows=1, row_length=L)._replace(mlm_positions=np.zeros((1, 1), np.int32))
    changed = np.asarray(getattr(batch, field)).astype(np.int32)
    changed[0, -1] = number
    params = jax.eval_shape(functools.partial(bert_jax.init_params, tiny_model()), jax.random.key(0))
    encode = lambda params: bert_jax.encode(tiny_model(), params, batch._replace(**{field: changed}))  # noqa: E731
    assert message(jax.eval_shape, encode, params).startswith(expected)
    changed = jnp.asarray(changed)
    assert message(jax.eval_shape, encode, params).startswith(expected)


def test_rows_are_refused_before_they_are_batches():
    def row(ids=(2, 5, 3), types=(0, 0, 0)):
        return Row(0, np.array(ids, np.int32), np.array(types, np.uint8), (len(ids),))

    check_rows(tiny_model(), [row(), row(types=(0, 1, 1))], "it")
    check_rows(tiny_model(), [], "it")
    assert message(check_rows, tiny_model(), [row([5] * 65, [0] * 65)], "it").startswith(
        "it has a sequence of 65 tokens"
    )
    assert message(check_rows, tiny_model(), [row([2, 203, 3])], "it").startswith("a token id in it is 203")
    assert "pairs of texts" in message(check_rows, tiny_model(), [row(types=[0, 1, 2])], "it")


def test_ids_of_another_tokenizer_are_refused_by_all_that_answers(bert, tokenizer):
    other = bert_jax.Pretrained(bert.config, bert.params, tokenizer)
    text = tokenizer.vocab[tokenizer.vocab_size - 1].removeprefix("##")
    texts = [f"{text} {text}s [MASK]"]
    for answer in (other.encode, *(functools.partial(call, other) for call in (
        bert_jax.sentence_embeddings, bert_jax.fill_masks, bert_jax.score_sentences))):  # fmt: skip
        assert "and the model has 0 to 166" in message(answer, texts)
    assert "and the model has 0 to 166" in message(bert_jax.make_batch, other, texts)


def test_parts_that_are_missing_are_named(bert):
    check_parts(bert.params, ("encoder", "pooler", "mlm"))
    batch = bert_jax.make_batch(bert, ["b"])
    found = message(bert_jax.forward, bert.config, bert.params, batch, HEADS["sequence_classification"])
    assert found.startswith("the parameters have no classifier, but encoder, mlm, next_sentence; give all of a model's")
    assert message(bert_jax.encode, bert.config, bert.params["encoder"], batch).startswith(
        "the parameters have no encoder"
    )


@pytest.mark.parametrize("name", ["question_answering", "multiple_choice", "sentence_embedding"])
def test_outputs_without_their_last_axis_have_no_loss(bert, name):
    head = HEADS[name]
    texts = ["bar bes", "bit"] if name == "question_answering" else [["bar", "bes"], ["bit", "bon"]]
    labels = [(1, 1), (1, 1)] if name == "question_answering" else [1, 0]
    batch = bert_jax.make_batch(bert, texts, labels=labels, head=head)
    logits = jnp.zeros(batch.token_ids.shape if name == "question_answering" else batch.cls_positions.shape)
    assert "losses: logits has the shape [" in message(head.losses, logits, batch, head.weights(batch))
