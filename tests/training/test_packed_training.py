# SPDX-License-Identifier: Apache-2.0
"""A packed batch and the same sequences in rows of their own: the same masks, losses, gradients and counts."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from builders import make_dataset, tiny_model, tiny_run

from bert_jax.batches.load import rows_to_batch
from bert_jax.data.records import open_dataset
from bert_jax.model.masking import mask_rows, prediction_budgets, predictions_per_row
from bert_jax.model.objective import PretrainingObjective
from bert_jax.pretraining import pretrain
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig, TrainConfig
from bert_jax.training import describe
from bert_jax.training.report import read_metrics
from bert_jax.training.step import batch_counts

EPOCH = 3


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Returns a data set of rows of 60 tokens with much padding, and the same with up to four sequences in each."""
    options = {"row_length": 60, "short_seq_rate": 0.9, "holdout_rate": 0.2}
    alone, packed = (make_dataset(tmp_path_factory.mktemp(f"up_to_{count}"), pack=count, **options) for count in (1, 4))
    return open_dataset(alone), open_dataset(packed)


def twins(datasets, num_rows=24):
    """Returns the batch of rows of their own, and that of packed rows, with the same sequences."""
    unpacked, packed = (dataset.train.gather(np.arange(dataset.train.num_rows)) for dataset in datasets)
    counts = (packed["lengths"] > 0).sum(axis=1)
    of_many, of_few = np.flatnonzero(counts > 2), np.flatnonzero(counts < 3)
    together = packed[np.concatenate([of_many[: num_rows // 2], of_few[: num_rows // 2]])]
    numbers = together["numbers"][together["lengths"] > 0]
    home = {int(number): row for row, number in enumerate(unpacked["numbers"][:, 0])}
    alone = unpacked[[home[int(number)] for number in numbers]]
    assert len(of_many) >= num_rows // 2 <= len(of_few)  # rows of both kinds
    return tuple(rows_to_batch(rows, np.full(len(rows), EPOCH, np.int32)) for rows in (alone, together))


@functools.partial(jax.jit, static_argnums=(1, 2))
def masked(batch, masking, tokenizer):
    vocab_size, mask_id, cls_id, sep_id = tokenizer
    return mask_rows(batch, masking, vocab_size, mask_id, (cls_id, sep_id))


def ids(dataset):
    about = dataset.manifest["tokenizer"]
    return tuple(about[name] for name in ("vocab_size", "mask_id", "cls_id", "sep_id"))


def by_sequence(batch) -> dict:
    """Returns what is seen and what is to be predicted of each sequence, by its number."""
    batch = jax.tree.map(np.asarray, batch)
    found = {}
    for row in range(len(batch.token_ids)):
        predicted = batch.mlm_positions[row][batch.mlm_weights[row] > 0]
        labels = batch.mlm_labels[row][batch.mlm_weights[row] > 0]
        for place in np.flatnonzero(batch.sequence_weights[row]):
            inside = batch.sequence_ids[row] == place + 1
            mine = inside[predicted]
            start = batch.cls_positions[row, place]
            found[int(batch.sequence_numbers[row, place])] = (
                batch.token_ids[row][inside].tolist(),
                batch.type_ids[row][inside].tolist(),
                (predicted[mine] - start).tolist(),
                labels[mine].tolist(),
                int(batch.next_sentence_labels[row, place]),
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("whole_word", [False, True])
def test_a_packed_batch_equals_its_unpacked_twin(datasets, whole_word):
    tokenizer = ids(datasets[0])
    model = tiny_model(vocab_size=tokenizer[0], num_layers=1, hidden_size=16, num_heads=2, intermediate_size=32)
    masking = MaskingConfig(max_predictions=4, whole_word=whole_word)
    objective = PretrainingObjective(model, masking, tokenizer[1], tokenizer[2:])
    params = jax.jit(objective.init)(jax.random.key(0))

    @jax.jit
    def losses_and_gradients(params, batch):
        def loss(params):
            metrics = objective.losses(params, batch, None)
            return metrics["mlm_loss"][0] / metrics["mlm_loss"][1] + metrics["nsp_loss"][0], metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(params)
        return gradients, metrics, batch_counts(batch)

    alone, together = (masked(batch, masking, tokenizer) for batch in twins(datasets))
    assert by_sequence(alone) == by_sequence(together)
    ours, theirs = losses_and_gradients(params, alone), losses_and_gradients(params, together)
    for (before, metric), (after, _) in zip(*(_flat(result[1:]) for result in (ours, theirs)), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, err_msg=metric)
    for (before, name), (after, _) in zip(*(_flat(result[0]) for result in (ours, theirs)), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=2e-6, err_msg=name)
    assert theirs[2]["sequences"][0] == ours[2]["sequences"][0] == len(alone.token_ids)


def _flat(tree):
    return [(leaf, jax.tree_util.keystr(path)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def test_places_for_predictions_are_enough_and_few():
    """P of a packed row follows from its length: 79 for three sequences in 512 tokens, where 3 x 80 would be 240."""
    config = MaskingConfig(max_predictions=80)
    assert [predictions_per_row(config, 512, count) for count in (1, 2, 3, 8)] == [77, 78, 79, 84]
    assert predictions_per_row(MaskingConfig(max_predictions=20), 512, 3) == 60
    rng = np.random.default_rng(0)
    budgets = prediction_budgets(config, 512)
    for count in (2, 3, 8):
        cuts = np.sort(rng.integers(0, 513, (20_000, count - 1)), axis=1)
        lengths = np.diff(np.pad(cuts, ((0, 0), (1, 1)), constant_values=(0, 512)), axis=1)
        assert budgets[lengths].sum(axis=1).max() <= predictions_per_row(config, 512, count)


def test_a_run_says_how_many_sequences_its_rows_hold(datasets):
    lines = [describe.describe_data(tiny_run(data.path), data) for data in datasets]
    alone, together = (data.train.num_rows for data in datasets)
    assert lines[0].startswith(f"data: {alone} rows of 60 tokens, ")
    assert lines[1].startswith(f"data: {alone} sequences in {together} rows of 60 tokens, ")
    assert lines[1].endswith(f"12 steps of 16 rows are {12 * 16 / together:.1f} epochs")


@pytest.mark.slow
def test_a_run_on_packed_rows_evaluates_as_on_unpacked_ones(datasets, tmp_path):
    scores = []
    for name, data in zip(("alone", "together"), datasets, strict=True):
        config = tiny_run(data.path, mesh=MeshConfig(data=1), train=TrainConfig(num_steps=1))
        config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, every_steps=1))
        pretrain(config, tmp_path / name, jax.devices()[:1])  # the first step has rate 0
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        scores.append(next(record for record in records if record["kind"] == "eval"))
    for metric in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "unigram_loss", "nsp_base_rate"):
        assert scores[1][metric] == pytest.approx(scores[0][metric], rel=1e-5), metric
