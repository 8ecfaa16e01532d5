# SPDX-License-Identifier: Apache-2.0
"""What a loop of one's own takes from `bert_jax`: masks, losses of pre-training, vectors in place of words, recipes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import computed, drawn_params, tiny_model
from jax.sharding import NamedSharding, PartitionSpec

import bert_jax
from bert_jax import HEADS, InputError, MaskingConfig, ModelConfig

TEXTS = ["the ban ben bin ber .", "the dan dus det dor dan dis the dun .", "the kan kor ."]


@pytest.fixture(scope="module")
def batch(bert):
    return bert_jax.make_batch(bert.tokenizer, TEXTS)


@pytest.fixture(scope="module")
def applied(bert):
    """Returns `bert.apply` as a compiled function that gives arrays of NumPy, which tests share."""
    compiled = jax.jit(bert.apply)
    return lambda batch: jax.device_get(compiled(batch))


def test_tokens_are_masked_by_a_key(bert, batch):
    mask = jax.jit(lambda key: bert_jax.mask_tokens(bert.tokenizer, batch, key, MaskingConfig(rate=0.3)))
    masked, again, other = (jax.device_get(mask(jax.random.key(seed))) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, masked, again)
    assert (masked.mlm_positions != other.mlm_positions).any()
    rows, _ = np.nonzero(chosen := masked.mlm_weights > 0)
    assert np.array_equal(batch.token_ids[rows, masked.mlm_positions[chosen]], masked.mlm_labels[chosen])
    assert chosen.sum(axis=1).tolist() == [2, 4, 2]  # of 8, 12 and 6 tokens


def test_the_head_of_pretraining_has_the_losses_of_a_run(bert, batch):
    head, labels = HEADS["pretraining"], np.array([[0], [1], [-1]])

    @jax.jit
    def mask(key):
        masked = bert_jax.mask_tokens(bert.tokenizer, batch, key)
        return masked, head.weights(masked)

    masked, weights = jax.device_get(mask(jax.random.key(0)))

    @jax.jit
    def losses(masked):
        output = bert_jax.forward(bert.config, bert.params, masked, head)
        labelled = masked._replace(next_sentence_labels=labels)
        log_shares = jax.tree.map(jax.nn.log_softmax, output)
        return log_shares, head.losses(output, masked, weights), head.losses(output, labelled, weights)

    log_shares, words_only, metrics = jax.device_get(losses(masked))
    picked = np.take_along_axis(log_shares.mlm_logits, masked.mlm_labels[..., None], axis=-1)[..., 0]
    words = -(picked * weights).sum() / weights.sum()
    next_ones = -log_shares.next_sentence_logits[np.arange(2), 0, labels[:2, 0]].mean()
    assert set(words_only) == {"loss", "mlm_loss", "mlm_accuracy"}
    assert set(metrics) == {"loss", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}
    assert float(words_only["loss"][0]) == pytest.approx(float(words), rel=1e-5)
    assert float(metrics["loss"][0]) == pytest.approx(float(words + next_ones), rel=1e-5)
    assert float(metrics["nsp_loss"][1]) == 2


def test_word_vectors_stand_in_for_token_ids(bert, batch):
    table = np.asarray(bert.params["encoder"]["embeddings"]["word"]["embedding"])
    vectors = table[batch.token_ids]

    @jax.jit
    def hidden(batch):
        return bert_jax.encode(bert.config, bert.params, batch).hidden

    by_ids, by_vectors = hidden(batch), hidden(batch._replace(word_vectors=vectors))
    np.testing.assert_allclose(by_vectors, by_ids, atol=1e-6)
    zeros = batch._replace(token_ids=np.zeros_like(batch.token_ids), word_vectors=vectors)
    np.testing.assert_allclose(hidden(zeros), by_ids, atol=1e-6)

    gradient = computed(jax.grad(lambda vectors: hidden(batch._replace(word_vectors=vectors))[:, 0, 0].sum()), vectors)
    inside = np.asarray(batch.sequence_ids) > 0
    assert (np.abs(gradient).max(axis=-1) > 0)[inside].all() and not np.abs(gradient)[~inside].any()


def test_sizes_and_recipes_by_name():
    base = ModelConfig.of("base")
    assert (base.num_layers, base.hidden_size, base.compute_dtype) == (12, 768, "float32")
    config, plain = bert_jax.recipe("pretrain:small", {"data.path": "data128"}), bert_jax.recipe("pretrain:small")
    assert config == dataclasses.replace(plain, data=dataclasses.replace(plain.data, path="data128"))
    assert isinstance(bert_jax.recipe("finetune:mnli"), bert_jax.FinetuneConfig)
    for call, told in (
        (lambda: ModelConfig.of("bsae"), r"no model size 'bsae'.*base"),
        (lambda: bert_jax.recipe("pretrian:base"), "did you mean --config=pretrain:base"),
        (lambda: bert_jax.recipe("my/own.py"), "the recipe my/own.py does not exist"),
        (lambda: bert_jax.recipe("demo", {"train.num_stesp": 1}), "train.num_stesp is not a setting.*train.num_steps"),
        (lambda: bert_jax.recipe("demo", {"train.num_steps": "many"}), "'many' is of another type; use a whole number"),
        (lambda: bert_jax.pretrain(bert_jax.recipe("finetune:sst2"), "nowhere"), "are not of pre-training; give such"),  # type: ignore[arg-type]
        (lambda: bert_jax.finetune(plain, "nowhere"), "are not of fine-tuning; give such, as of recipe"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=told):
            call()


def test_a_model_is_an_argument_of_compiled_functions(bert, batch, applied):
    """A pytree whose leaves are its parameters: gradients are a model too, and equal models share a program."""
    expected = applied(batch)
    traced = []

    @jax.jit
    def hidden(bert, batch):
        traced.append(None)
        return bert.apply(batch).hidden

    np.testing.assert_allclose(hidden(bert, batch), expected.hidden, atol=1e-6)
    doubled = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), bert)
    assert isinstance(doubled, bert_jax.Pretrained) and doubled.tokenizer is bert.tokenizer
    assert not np.allclose(hidden(doubled, batch), expected.hidden, atol=1e-2)
    hidden(dataclasses.replace(bert, params=jax.device_get(bert.params)), batch)
    assert len(traced) == 1
    hidden.trace(dataclasses.replace(bert, config=dataclasses.replace(bert.config, layer_norm_epsilon=1e-5)), batch)
    assert len(traced) == 2

    @jax.jit
    @jax.grad
    def derivative(bert):
        return bert.apply(batch, dropout_key=jax.random.key(0)).hidden[0, 0, 0]

    gradient = derivative(bert)
    assert (
        isinstance(gradient, bert_jax.Pretrained) and np.abs(gradient.params["encoder"]["pooler"]["kernel"]).max() == 0
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_heads_compute_on_a_mesh_as_jax_makes_it(bert, batch):
    """Its axes are explicit: shardings are part of types."""
    head, rows = HEADS["pretraining"], jax.tree.map(lambda leaf: np.tile(leaf, (8, *[1] * (leaf.ndim - 1)))[:8], batch)
    params = drawn_params(bert.config)

    def outputs(params, batch):
        return bert_jax.forward(bert.config, params, batch, head)

    expected = jax.jit(outputs)(params, rows)
    mesh = jax.make_mesh((8,), ("lines",))
    with jax.set_mesh(mesh):
        divided = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("lines")))
        whole = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        found = jax.jit(outputs)(whole, divided)
        assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(found) if leaf.shape[0] == 8} == {"lines"}
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=2e-6), found, expected)


def test_a_model_makes_batches_of_any_texts(bert, batch):
    """Lists, generators, arrays; rows fit the model's positions; labels are of the head."""
    jax.tree.map(np.testing.assert_array_equal, bert.batch(TEXTS), batch)
    jax.tree.map(np.testing.assert_array_equal, bert.batch(text for text in TEXTS), batch)
    jax.tree.map(np.testing.assert_array_equal, bert.batch(np.array(TEXTS)), batch)
    labelled = bert.batch(TEXTS, labels=[0, 2, 1])
    assert labelled.labels.tolist() == [[0], [2], [1]]
    with pytest.warns(bert_jax.CutWarning):
        assert bert.batch(["the ban " * 100]).token_ids.shape == (1, 64)
    for answer in (bert_jax.sentence_embeddings, bert_jax.score_sentences):
        np.testing.assert_array_equal(answer(bert, iter(TEXTS)), answer(bert, TEXTS))
    assert bert.encode(iter(TEXTS)).hidden.shape == (3, 12, 32)
    with pytest.raises(InputError, match="this is a single text; give a list of them"):
        bert.batch(TEXTS[0])


def test_models_batches_and_outputs_are_shown_in_a_few_words(bert, batch, applied):
    assert repr(bert).splitlines() == [
        "Pretrained(bert, 2 layers of 32, 0.0 M parameters, computes in float32)",
        "  pretraining; 167 words, at most 64 tokens",
    ]
    assert repr(batch).startswith("Batch(token_ids=int32[3,16], type_ids=uint8[3,16], sequence_ids=int32[3,16], ")
    assert "labels" not in repr(batch) and repr(applied(batch)).startswith("Encoded(hidden=float32[3,16,32], ")


def test_functions_of_batches_are_exported(bert, batch, applied):
    exported = jax.export.export(jax.jit(lambda params, batch: bert_jax.encode(bert.config, params, batch)))
    written = exported(bert.params, batch).serialize()
    encoded = jax.export.deserialize(bytearray(written)).call(bert.params, batch)
    np.testing.assert_allclose(encoded.hidden, applied(batch).hidden, atol=1e-6)


@pytest.mark.parametrize("kind", [jnp.asarray, lambda array: array.tolist()])
def test_arrays_of_other_libraries_are_a_batch(batch, applied, kind):
    mask = batch.sequence_ids.astype(np.int64)
    same = bert_jax.Batch.from_ids(*map(kind, (batch.token_ids.astype(np.int64), mask, batch.type_ids)))
    np.testing.assert_allclose(applied(same).hidden[mask > 0], applied(batch).hidden[mask > 0], atol=1e-6)
    np.testing.assert_allclose(applied(same).pooled, applied(batch).pooled, atol=1e-6)
    # padding on the left
    lengths = mask.sum(axis=1)
    left = np.zeros_like(batch.token_ids)
    for row, length in enumerate(lengths):
        left[row, -length:] = batch.token_ids[row, :length]
    turned = bert_jax.Batch.from_ids(kind(left), kind(np.flip(mask, axis=1)))
    np.testing.assert_allclose(applied(turned).pooled, applied(batch).pooled, atol=1e-6)
    alone = bert_jax.Batch.from_ids(kind(batch.token_ids[:1, : lengths[0]]))
    np.testing.assert_allclose(applied(alone).pooled[0], applied(batch).pooled[0], atol=1e-6)


@pytest.mark.parametrize("shapes", [[(3,), (3,)], [(2, 4), (2, 4), (1, 4)]])
def test_arrays_of_other_shapes_are_no_batch(shapes):
    with pytest.raises(InputError, match=r"not all of one shape \[rows, tokens\]; pad the rows"):
        bert_jax.Batch.from_ids(*(np.ones(shape, np.int32) for shape in shapes))


def test_in_float64_derivatives_are_those_of_differences(batch):
    """Of a model with most of what families have, scanned and by windows."""
    config = tiny_model(
        vocab_size=167,
        compute_dtype="float64",
        family="modernbert",
        num_layers=4,
        window=4,
        positions="rotary",
        norm="before",
        norm_bias=False,
        dense_bias=False,
        feed_forward="gated",
        type_vocab_size=0,
        activation="gelu_exact",
    )
    head, random = HEADS["sequence_classification"], np.random.default_rng(0)
    labelled = batch._replace(labels=np.array([[0], [1], [2]]))
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, drawn_params(config, head.name, 3))
        direction = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), params)
        norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(direction)))
        step = jax.tree.map(lambda leaf: 1e-4 * leaf / norm, direction)

        @jax.jit
        @jax.value_and_grad
        def loss(params):
            logits = bert_jax.forward(config, params, labelled, head)
            total, count = head.losses(logits, labelled, head.weights(labelled))["loss"]
            return total / count

        after, before = (loss(jax.tree.map(add, params, step))[0] for add in (np.add, np.subtract))
        gradient = loss(params)[1]
        assert {leaf.dtype.name for leaf in jax.tree.leaves((after, gradient))} == {"float64"}
        along = sum(np.vdot(*pair) for pair in zip(jax.tree.leaves(gradient), jax.tree.leaves(step)))
        assert float(after - before) / 2 == pytest.approx(float(along), rel=1e-6)
    with pytest.raises(InputError, match="float64 needs 64 bits"):
        bert_jax.forward(config, params, labelled, head)
    run = bert_jax.PretrainConfig(model=config)
    with pytest.raises(InputError, match="float64 is for functions alone"):
        dataclasses.replace(run, data=dataclasses.replace(run.data, path="data")).validate()
